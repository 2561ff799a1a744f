"""Counter-based random numbers: Philox 4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011).

key      the row's 64-bit seed
counter  (index, position, origin, stream), 32 bits each

`position` is the absolute index in the sequence of the token being decided, `origin` that of the round's first drafted
token, `index` the block of four tokens that the number is for: token v takes output v % 4 of index v // 4. Draws in
two levels number their blocks from BLOCK_LEVEL on, as if they were tokens beyond any vocabulary. A number that belongs
to a position and not to a token (the acceptance test) takes output 0 of index 0.

Streams are disjoint. SAMPLE has origin 0, so that plain decoding and the bonus token of a round draw alike; the others
carry their round's origin, because a position may be decided anew in a later round.

This file is the torch twin (any device, no global generator) and imports no Triton; jit_random.py has the kernels'.
"""

import torch
from torch import Tensor

SAMPLE, DRAFT, ACCEPT, RESIDUAL = 0, 1, 2, 3
BLOCK_LEVEL = 1 << 33  # as a token; as an index 2**31

_MUL_0, _MUL_1 = 0xD2511F53, 0xCD9E8D57
_WEYL_0, _WEYL_1 = 0x9E3779B9, 0xBB67AE85
_MASK = 0xFFFFFFFF
ROUNDS = 10
UNIFORM_MAX = 1.0 - 2.0**-24  # the largest float32 below 1


def philox(seed: Tensor, index: Tensor, position: Tensor, origin: Tensor | int, stream: int) -> tuple[Tensor, ...]:
    """Four 32-bit words per counter.

    Args:
        seed, index, position, origin: int64, broadcast against each other; the last three are taken modulo 2**32.
        stream: one of SAMPLE, DRAFT, ACCEPT, RESIDUAL.

    Returns:
        Four int64 tensors of the broadcast shape with values in [0, 2**32).
    """
    shape = torch.broadcast_shapes(seed.shape, index.shape, position.shape)
    c0, c1 = index & _MASK, position & _MASK
    c2 = torch.as_tensor(origin, dtype=torch.int64, device=seed.device) & _MASK
    c3 = torch.full((), stream, dtype=torch.int64, device=seed.device)
    k0, k1 = seed & _MASK, (seed >> 32) & _MASK
    for _ in range(ROUNDS):
        # The int64 product wraps, but its 64 bits are those of the unsigned product.
        low, high = c0 * _MUL_0, c2 * _MUL_1
        c0, c1, c2, c3 = (
            (high >> 32 & _MASK) ^ c1 ^ k0,
            high & _MASK,
            (low >> 32 & _MASK) ^ c3 ^ k1,
            low & _MASK,
        )
        k0, k1 = (k0 + _WEYL_0) & _MASK, (k1 + _WEYL_1) & _MASK
    return tuple(word.expand(shape) for word in (c0, c1, c2, c3))


def uniform_from_bits(bits: Tensor) -> Tensor:
    """32-bit words (int64) to float32 strictly inside (0, 1), with the finest steps near 0."""
    return ((bits.to(torch.float32) + 0.5) * 2.0**-32).clamp(max=UNIFORM_MAX)


def uniform(seed: Tensor, position: Tensor, origin: Tensor | int, stream: int) -> Tensor:
    """One float32 in (0, 1) per position; arguments as for `philox`."""
    return uniform_from_bits(philox(seed, torch.zeros_like(position), position, origin, stream)[0])


def gumbel(
    seed: Tensor, position: Tensor, origin: Tensor | int, stream: int, count: int, first: Tensor | int = 0
) -> Tensor:
    """Standard Gumbel noise for `count` tokens from `first` on, -log(-log(1 - u)).

    The form with 1 - u keeps the resolution where it decides, at the largest noise: with u in steps of 2**-32 near 0,
    two of 150,000 tokens tie about once in 30,000 draws, and not once in 60.

    Args:
        seed, position, origin: [...] int64, broadcast against each other.
        first: int, or [...] int64 of the same shape; a multiple of 4.

    Returns:
        [..., count] float32.
    """
    index = torch.arange((count + 3) // 4, device=seed.device)
    index = index + torch.as_tensor(first, dtype=torch.int64, device=seed.device)[..., None] // 4
    origin = torch.as_tensor(origin, dtype=torch.int64, device=seed.device)[..., None]
    words = philox(seed[..., None], index, position[..., None], origin, stream)
    bits = torch.stack(words, dim=-1).flatten(-2)[..., :count]
    return -torch.log(-torch.log1p(-uniform_from_bits(bits)))
