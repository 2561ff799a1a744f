"""Drawing an id by log weights in torch, by token or in two levels; jit_draw.py has the kernels'.

argmax of log weight + Gumbel noise (Gumbel 1954; Maddison et al., arXiv 1411.0030)
"""

import torch
from torch import Tensor

from . import philox
from .numerics import SMALL, argmax, bounds, exp, exp_, finite_peak
from .records import DRAW_BLOCK


def draw_by_token(
    log_weights: Tensor, seed: Tensor, position: Tensor, origin: Tensor | int, stream: Tensor | int
) -> Tensor:
    """One id per row with probability proportional to exp(log_weights): log_weights [..., V] -> [...] int64.

    Every token has its own noise, so that two rows that are close draw the same token as often as they can.
    """
    noise = philox.gumbel(seed, position, origin, stream, log_weights.shape[-1])
    return argmax(log_weights + noise)


def draw(log_weights: Tensor, seed: Tensor, position: Tensor, origin: Tensor | int, stream: Tensor | int) -> Tensor:
    """As `draw_by_token`, in two levels: first a block of DRAW_BLOCK tokens by its mass, then a token inside it. Costs
    noise for one block instead of all of them, and where there is only one block it draws the same tokens."""
    size = log_weights.shape[-1]
    if size <= DRAW_BLOCK:
        return draw_by_token(log_weights, seed, position, origin, stream)
    mass = _block_mass(log_weights)
    noise = philox.gumbel(seed, position, origin, stream, mass.shape[-1], first=philox.BLOCK_LEVEL)
    first = argmax(mass.log_() + noise) * DRAW_BLOCK
    noise = philox.gumbel(seed, position, origin, stream, DRAW_BLOCK, first)
    return first + argmax(_block_at(log_weights, first) + noise)


def _block_at(log_weights: Tensor, first: Tensor) -> Tensor:
    """The DRAW_BLOCK log weights from `first` [...] on, -inf behind the last: [..., V] -> [..., DRAW_BLOCK]."""
    size = log_weights.shape[-1]
    if first.device.type == "cpu" and first.numel() == 1 and first.item() + DRAW_BLOCK <= size:
        return log_weights.narrow(-1, int(first.item()), DRAW_BLOCK)
    ids = first[..., None] + torch.arange(DRAW_BLOCK, device=first.device)
    inside = log_weights.gather(-1, ids.clamp(max=size - 1))
    return inside.masked_fill_(ids >= size, -torch.inf) if size % DRAW_BLOCK else inside


def _block_mass(log_weights: Tensor) -> Tensor:
    """The sum of each block of DRAW_BLOCK weights, times a factor of its own for each row: [..., V] -> [..., blocks]."""
    mass = _block_sums(exp(log_weights))
    heaviest = mass.amax(dim=-1)
    if bounds(heaviest)[0] > SMALL:
        return mass
    peak = finite_peak(log_weights).masked_fill_(heaviest > SMALL, 0)
    return _block_sums(exp_(log_weights - peak[..., None]))


def _block_sums(weights: Tensor) -> Tensor:
    """Of blocks of DRAW_BLOCK, the last of which may be shorter."""
    size = weights.shape[-1]
    whole = size - size % DRAW_BLOCK
    sums = weights[..., :whole].unflatten(-1, (-1, DRAW_BLOCK)).sum(dim=-1)
    return sums if whole == size else torch.cat([sums, weights[..., whole:].sum(dim=-1, keepdim=True)], dim=-1)
