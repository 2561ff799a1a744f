"""Draws by weights in torch, by token or in two levels; jit_draw.py does the same in the kernels.

A draw is the argmax of log weight + Gumbel noise (Gumbel 1954; Maddison et al., arXiv 1411.0030).
"""

from torch import Tensor

from . import philox
from .numerics import argmax, resize
from .records import DRAW_BLOCK

_SOONER = 2.0**-5  # times of arrival are below 17: what is divided by this part of one does not become 0


def draw_by_token(
    log_weights: Tensor, seed: Tensor, position: Tensor, origin: Tensor | int, stream: Tensor | int
) -> Tensor:
    """One id per row with probability proportional to exp(log_weights): [..., V], seed, position and origin [...] -> [...] int64.

    Every token has its own noise, so two rows that are close draw the same token as often as they can.
    """
    return argmax(log_weights + philox.race(seed, position, origin, stream, log_weights.shape[-1]))


def draw(weights: Tensor, seed: Tensor, position: Tensor, origin: Tensor | int, stream: Tensor | int) -> Tensor:
    """One id per row with probability proportional to its weight: [N, V], seed and position [N] -> [N] int64.

    The id is the argmax of weight / time, which is that of log weight + Gumbel noise. In two levels: first a block of DRAW_BLOCK
    tokens by its mass, then a token inside it. This needs the noise of one block's tokens instead of all. Where there is only one
    block, it draws the tokens of `draw_by_token`."""
    size = weights.shape[-1]
    if size <= DRAW_BLOCK:
        return _first(weights, philox.arrivals(seed, position, origin, stream, size))
    blocks = resize(weights, -(-size // DRAW_BLOCK) * DRAW_BLOCK, 0.0).unflatten(-1, (-1, DRAW_BLOCK))
    mass = blocks.sum(dim=-1)
    block = _first(mass, philox.times(seed, position, origin, stream, mass.shape[-1], first=philox.BLOCK_LEVEL))
    inside = blocks.take_along_dim(block[:, None, None], dim=1)[:, 0]
    first = block * DRAW_BLOCK
    return first + _first(inside, philox.arrivals(seed, position, origin, stream, DRAW_BLOCK, first))


def _first(weights: Tensor, times: Tensor) -> Tensor:
    """Where weight / time is largest, [N, V] -> [N]. Not where a weight is 0, if there are others, however small."""
    return argmax(weights / (times * _SOONER))
