"""Drawing an id by log weights in torch, by token or in two levels; jit_draw.py has the kernels'.

argmax of log weight + Gumbel noise (Gumbel 1954; Maddison et al., arXiv 1411.0030)
"""

import torch
from torch import Tensor

from . import philox
from .records import DRAW_BLOCK
from .rows import log_sum_exp


def draw_by_token(
    log_weights: Tensor, seed: Tensor, position: Tensor, origin: Tensor | int, stream: Tensor | int
) -> Tensor:
    """One id per row with probability proportional to exp(log_weights): log_weights [..., V] -> [...] int64.

    Every token has its own noise, so that two rows that are close draw the same token as often as they can.
    """
    noise = philox.gumbel(seed, position, origin, stream, log_weights.shape[-1])
    return (log_weights + noise).argmax(dim=-1)


def draw(log_weights: Tensor, seed: Tensor, position: Tensor, origin: Tensor | int, stream: Tensor | int) -> Tensor:
    """As `draw_by_token`, in two levels: first a block of DRAW_BLOCK tokens by its mass, then a token inside it. Costs
    noise for one block instead of all of them, and where there is only one block it draws the same tokens."""
    size = log_weights.shape[-1]
    if size <= DRAW_BLOCK:
        return draw_by_token(log_weights, seed, position, origin, stream)
    mass = _log_block_mass(log_weights)
    noise = philox.gumbel(seed, position, origin, stream, mass.shape[-1], first=philox.BLOCK_LEVEL)
    first = (mass + noise).argmax(dim=-1) * DRAW_BLOCK
    ids = first[..., None] + torch.arange(DRAW_BLOCK, device=first.device)
    inside = log_weights.gather(-1, ids.clamp(max=size - 1))
    if size % DRAW_BLOCK:
        inside = inside.masked_fill_(ids >= size, -torch.inf)
    return first + (inside + philox.gumbel(seed, position, origin, stream, DRAW_BLOCK, first)).argmax(dim=-1)


def _log_block_mass(log_weights: Tensor) -> Tensor:
    """log of the sum of each block of DRAW_BLOCK weights; the last may be shorter: [..., V] -> [..., blocks]."""
    size = log_weights.shape[-1]
    whole = size - size % DRAW_BLOCK
    mass = log_sum_exp(log_weights[..., :whole].unflatten(-1, (-1, DRAW_BLOCK)))
    return mass if whole == size else torch.cat([mass, log_sum_exp(log_weights[..., None, whole:])], dim=-1)
