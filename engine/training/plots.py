"""A picture of a training's log."""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)


def plot_training(log: Sequence[dict[str, Any]], file: Path) -> None:
    """Loss and acceptance per position against the tokens seen; without matplotlib, one line says that there is none."""
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
    positions = max((len(r["validation"]["acceptance"]) for r in ends), default=0)
    for position in range(positions):
        values = [r["validation"]["acceptance"][position] for r in ends]
        rates.plot([r["tokens"] for r in ends], values, "o-", label=f"draft {position + 1}")
    rates.set(xlabel="tokens", ylabel="acceptance, if those before stood", ylim=(0, 1))
    if positions:
        rates.legend()
    figure.savefig(file, dpi=120)
