"""A picture of a training's log."""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .files import replacing

logger = logging.getLogger(__name__)


def plot_training(log: Sequence[dict[str, Any]], file: Path) -> None:
    """Loss, and acceptance per position, against the tokens seen, as a PNG file.

    Without matplotlib there is none, and a logged warning says so.

    Raises:
        OSError: if it cannot be written.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        logger.warning("no plot of the training: matplotlib is not installed (pip install matplotlib)")
        return
    steps = [record for record in log if "validation" not in record]
    ends = [record for record in log if "validation" in record]
    figure = Figure(figsize=(9, 3.5), layout="constrained")
    losses, rates = figure.subplots(1, 2)
    losses.plot([r["tokens"] for r in steps], [r["loss"] for r in steps], linewidth=0.8, label="training")
    losses.plot([r["tokens"] for r in ends], [r["validation"]["loss"] for r in ends], "o-", label="validation")
    losses.set(xlabel="tokens", ylabel="loss")
    losses.legend()
    for position in range(max((len(r["validation"]["acceptance"]) for r in ends), default=0)):
        known = [r for r in ends if position < len(r["validation"]["acceptance"])]
        values = [r["validation"]["acceptance"][position] for r in known]
        rates.plot([r["tokens"] for r in known], values, "o-", label=f"draft {position + 1}")
    rates.set(xlabel="tokens", ylabel="acceptance, if those before stood", ylim=(0, 1))
    if rates.lines:
        rates.legend()
    with replacing(file) as partial:
        figure.savefig(partial, dpi=120, format="png")
