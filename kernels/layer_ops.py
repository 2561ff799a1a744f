"""What lies between the matrix products of a decoder layer of Llama's kind, on any device: from Triton or torch, as in ops.py.

The torch twins are what transformers computes, with its roundings. See layers.py for the formulas and their papers. These are for
the engine's own calls, whose shapes it knows, and check nothing.
"""

import torch
from torch import Tensor
from torch.nn.functional import silu

from .ops import use_triton


def rms_norm(
    x: Tensor,  # [..., D] float32, bfloat16 or float16, contiguous
    weight: Tensor,  # [D] likewise
    eps: float,
    y: Tensor | None = None,  # [..., D] likewise
) -> tuple[Tensor, Tensor]:
    """x, or x + y if y is given, and its norm, [..., D] each."""
    if use_triton(x):
        from . import layers

        return layers.rms_norm(x, weight, eps, y)
    summed = x if y is None else x + y
    wide = summed.float()
    return summed, weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)


def rotate(
    query: Tensor,  # [B, H, W, D] float32, bfloat16 or float16, contiguous in the last dimension; written
    key: Tensor,  # [B, H_kv, W, D] likewise; written
    cosines: Tensor,  # [B or 1, W, D] likewise
    sines: Tensor,  # [B or 1, W, D] likewise
) -> None:
    """Rotate the pairs (i, i + D / 2) of queries and keys, in place."""
    if use_triton(query):
        from . import layers

        return layers.rotate(query, key, cosines, sines)
    for x in (query, key):
        first, second = x.chunk(2, dim=-1)
        x.copy_(x * cosines[:, None] + torch.cat((-second, first), dim=-1) * sines[:, None])
    return None


def gated_silu(
    gate: Tensor,  # [...] float32, bfloat16 or float16, contiguous
    up: Tensor,  # [...] likewise
) -> Tensor:
    """silu(gate) * up."""
    if use_triton(gate):
        from . import layers

        return layers.gated_silu(gate, up)
    return silu(gate) * up
