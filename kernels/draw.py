"""Drawing an id by weights in torch, by token or in two levels; jit_draw.py does the same in the kernels.

A draw is the argmax of log weight + Gumbel noise (Gumbel 1954; Maddison et al., arXiv 1411.0030).
"""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from . import philox
from .numerics import argmax
from .records import DRAW_BLOCK

_LIKELIEST = 8  # groups of a row that are looked at first
_SOONER = 2.0**-5  # times of arrival are below 17: what is divided by this part of one does not become 0
_ROUNDING = 0.001  # more than all rounding errors of the values that a draw compares


def draw_by_token(log_weights: Tensor, seed: Tensor, position: Tensor, origin: Tensor, stream: int) -> Tensor:
    """One id per row with probability proportional to exp(log_weights): [N, V], seed, position and origin [N] -> [N] int64.

    Every token has its own noise, so two rows that are close draw the same token as often as they can.
    """
    if log_weights.device.type == "cpu" and log_weights.shape[-1] > _LIKELIEST * philox.GROUP:
        return torch.from_numpy(_Race(log_weights, seed, position, origin, stream).winners())
    return argmax(log_weights + philox.race(seed, position, origin, stream, log_weights.shape[-1]))


class _Race:
    """argmax(log_weights + philox.race(...)) from the noise of few groups.

    In each group the noise of the token that arrives first bounds that of the others (see `philox.first_arrivals`)."""

    def __init__(self, log_weights: Tensor, seed: Tensor, position: Tensor, origin: Tensor, stream: int) -> None:
        self.weights: NDArray[Any] = log_weights.detach().numpy()
        self.size = self.weights.shape[-1]
        self.counter = seed.numpy(), position.numpy(), origin.numpy(), stream
        groups = -(-self.size // philox.GROUP)
        times, places = philox.first_arrivals(seed, position, origin, stream, groups)
        self.times, self.places = times.numpy(), places.numpy()
        noise = -np.log(self.times)
        tokens = self.places + np.arange(groups) * philox.GROUP
        values = np.take_along_axis(self.weights, np.minimum(tokens, self.size - 1), axis=1) + noise
        values[tokens >= self.size] = -np.inf
        best = values.argmax(axis=1)[:, None]
        self.top = np.take_along_axis(values, best, axis=1)[:, 0]
        self.token = np.take_along_axis(tokens, best, axis=1)[:, 0]
        starts = np.arange(0, self.size, philox.GROUP)
        self.bound = np.maximum.reduceat(self.weights, starts, axis=1) + noise + _ROUNDING

    def winners(self) -> NDArray[np.int64]:
        likeliest = np.argpartition(self.bound, -_LIKELIEST, axis=1)[:, -_LIKELIEST:]
        first = np.zeros(self.bound.shape, dtype=bool)
        np.put_along_axis(first, likeliest, True, axis=1)
        self._run(*np.nonzero(first & (self.bound > self.top[:, None])))
        self._run(*np.nonzero(~first & (self.bound > self.top[:, None])))
        return np.minimum(self.token, self.size - 1)  # a row without a distribution may have no winner

    def _run(self, row: NDArray[np.int64], group: NDArray[np.int64]) -> None:
        """Take the other tokens of these groups into account, those that do not arrive first."""
        if not len(row):
            return
        seed, position, origin, stream = self.counter
        index = group[:, None] * (philox.GROUP // 4) + np.arange(philox.GROUP // 4)
        words = philox.philox(seed[row, None], index, position[row, None], origin[row, None], stream)
        words = words.reshape(len(row), -1)
        # A token that arrives later than `latest` cannot win. Its random word shows that before any logarithm.
        first = self.times[row, group].astype(np.float64)
        latest = first * np.exp(np.minimum(self.bound[row, group] - self.top[row], 64))
        early = words <= (-np.expm1(first - latest) * 2.0**32 + 2.0**12)[:, None]
        early[np.arange(len(row)), self.places[row, group]] = False
        which, lane = np.nonzero(early)
        token = group[which] * philox.GROUP + lane
        inside = token < self.size
        which, lane, token = which[inside], lane[inside], token[inside]
        time = philox.exponential(words[which, lane]).numpy() + self.times[row, group][which]
        row = row[which]
        value = self.weights[row, token] - np.log(time)
        before = self.top.copy()
        np.maximum.at(self.top, row, value)
        self.token[self.top > before] = self.size
        winning = value == self.top[row]
        np.minimum.at(self.token, row[winning], token[winning])


def draw(weights: Tensor, seed: Tensor, position: Tensor, origin: Tensor | int, stream: Tensor | int) -> Tensor:
    """One id per row with probability proportional to its weight: [N, V], seed and position [N] -> [N] int64.

    The id is the argmax of weight / time, which is that of log weight + Gumbel noise. In two levels: first a block of DRAW_BLOCK
    tokens by its mass, then a token inside it. This needs the noise of one block's tokens instead of all. Where there is only one
    block, it draws the tokens of `draw_by_token`."""
    size = weights.shape[-1]
    if size <= DRAW_BLOCK:
        return _first(weights, philox.arrivals(seed, position, origin, stream, size))
    mass = block_sums(weights)
    times = philox.times(seed, position, origin, stream, mass.shape[-1], first=philox.BLOCK_LEVEL)
    first = _first(mass, times) * DRAW_BLOCK
    arrivals = philox.arrivals(seed, position, origin, stream, DRAW_BLOCK, first)
    return first + _first(_block_at(weights, first), arrivals)


def _first(weights: Tensor, times: Tensor) -> Tensor:
    """Where weight / time is largest, [N, V] -> [N]; overwrites the times. Not where a weight is 0, if there are others, however small."""
    return argmax(weights / times.mul_(_SOONER))


def _block_at(weights: Tensor, first: Tensor) -> Tensor:
    """The DRAW_BLOCK weights from `first` [...] on, 0 beyond the vocabulary: [..., V] -> [..., DRAW_BLOCK]."""
    size = weights.shape[-1]
    if first.device.type == "cpu" and first.numel() == 1 and first.item() + DRAW_BLOCK <= size:
        return weights.narrow(-1, int(first.item()), DRAW_BLOCK)
    ids = first[..., None] + torch.arange(DRAW_BLOCK, device=first.device)
    inside = weights.gather(-1, ids.clamp(max=size - 1))
    return inside.masked_fill_(ids >= size, 0) if size % DRAW_BLOCK else inside


def block_sums(weights: Tensor) -> Tensor:
    """Sums over blocks of DRAW_BLOCK, the last of which may be shorter: [..., V] -> [..., blocks]."""
    size = weights.shape[-1]
    whole = size - size % DRAW_BLOCK
    sums = weights[..., :whole].unflatten(-1, (-1, DRAW_BLOCK)).sum(dim=-1)
    return sums if whole == size else torch.cat([sums, weights[..., whole:].sum(dim=-1, keepdim=True)], dim=-1)
