"""Drawing by inversion of the distribution function: one random number for each row, on a CPU.

The token is the first up to which the probabilities come to more than u. `sample` draws with noise for every token, as a coupled
draft must. On a CPU inversion takes a third of its time. Where either serves, for drafts that verification compares with their
distribution, they draw other tokens with the same probabilities.
"""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from . import philox
from .draw import block_sums
from .numerics import computed
from .records import DRAW_BLOCK, Draws, RowStats
from .rows import Temperatures, row_stats


@torch.no_grad()
def sample_by_inversion(
    logits: Tensor,  # [B, W, V] any floating dtype, on the CPU
    temperature: Tensor | None = None,  # [B] float, below 1e-5 = greedy; None: 1
    top_k: Tensor | None = None,  # [B] int, <= 0 = off
    top_p: Tensor | None = None,  # [B] float in (0, 1], 1 = off
    min_p: Tensor | None = None,  # [B] float in [0, 1], 0 = off
    *,
    seed: Tensor,  # [B] int64
    position: Tensor,  # [B] int64, absolute position of the token drawn from column 0
    origin: Tensor,  # [B] int64, position of the round's first drafted token
    stream: int,
) -> Draws:
    """One token per row, with log-probabilities. Column w decides the token at position + w. Greedy rows take the argmax.

    Rows that are no distribution get -1, as from `sample`.
    """
    temperatures, filters = Temperatures.of(temperature), (top_k, top_p, min_p)
    scale, greedy = temperatures.scale(logits), None
    if not temperatures.never_greedy:
        greedy = temperatures.greedy(seed).numpy()[:, None]
    values = raw = computed(logits).numpy()
    threshold = np.full(raw.shape[:-1], -np.inf, dtype=raw.dtype)
    if any(each is not None for each in filters):
        threshold = row_stats(logits, temperatures, scale, filters).threshold.numpy()
        lowest = threshold if greedy is None else np.where(greedy, -np.inf, threshold)
        values = np.where(values < lowest[..., None], -np.inf, values)
    argmax = raw.argmax(axis=-1)
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):  # of rows that are no distribution
        if scale is not None:
            values = values * scale.numpy()[:, None, None]
        peak = values.max(axis=-1)
        weights = np.exp(values - peak[..., None])
        # Of blocks of DRAW_BLOCK weights, the last of which may be shorter.
        ends = np.cumsum(block_sums(torch.from_numpy(weights)).numpy(), axis=-1, dtype=np.float64)
        lse = (np.log(ends[..., -1]) + peak).astype(raw.dtype)
        lse[peak == -np.inf] = -np.inf
        tokens = _inverted(weights, ends, _uniform(seed, position, origin, stream, raw.shape[1]))
        if greedy is not None:
            tokens = np.where(greedy, argmax, tokens)
            threshold = np.where(greedy, raw.max(axis=-1), threshold)
        logprobs = np.take_along_axis(values, tokens[..., None], axis=-1)[..., 0] - lse
    valid = np.isfinite(lse)
    stats = RowStats(*map(torch.from_numpy, (threshold, lse, argmax)))
    logprobs = np.where(valid, np.minimum(logprobs, 0), 0)  # by rounding, some would be above 0
    return Draws(torch.from_numpy(np.where(valid, tokens, -1)), stats, torch.from_numpy(logprobs))


def _uniform(seed: Tensor, position: Tensor, origin: Tensor, stream: int, width: int) -> NDArray[np.float64]:
    """A number in (0, 1) for each row, [B, width], in steps of 2**-52 from the first two words of index 0."""
    at = position.numpy()[:, None] + np.arange(width)
    words = philox.philox(seed.numpy()[:, None], 0, at, origin.numpy()[:, None], stream)
    return ((words[..., 0] << 20 | words[..., 1] >> 12) + 0.5) * 2.0**-52


def _inverted(weights: NDArray[Any], ends: NDArray[np.float64], u: NDArray[np.float64]) -> NDArray[np.int64]:
    """The first token of each row [B, W, V] up to which the weights come to more than u [B, W] times all: first its block, by the
    sums `ends` [B, W, blocks] up to the end of each, then the token inside it."""
    rows = zip(weights.reshape(-1, weights.shape[-1]), ends.reshape(-1, ends.shape[-1]), u.flat, strict=True)
    found = []
    for its_weights, its_ends, number in rows:
        block, rest = _first_above(its_ends, number * its_ends[-1])
        start = block * DRAW_BLOCK
        inside = np.cumsum(its_weights[start : start + DRAW_BLOCK], dtype=np.float64)
        found.append(start + _first_above(inside, rest)[0])
    return np.array(found).reshape(u.shape)


def _first_above(sums: NDArray[np.float64], wanted: float) -> tuple[int, float]:
    """The first place whose sum is above what is wanted, and what is wanted beyond the sum before; 0 for NaN.

    By rounding, what is wanted may come to all: then it is the last place that adds something."""
    wanted = min(wanted, np.nextafter(sums[-1], 0))
    place = int(np.searchsorted(sums, wanted, side="right"))
    if place == len(sums):  # NaN
        return 0, 0.0
    return place, wanted - sums[place - 1] if place else wanted
