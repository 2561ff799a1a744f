"""Counter-based random numbers: Philox 4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011).

key      the row's 64-bit seed
counter  (index, position, origin, stream), 32 bits each

- position: the absolute index in the sequence of the token being decided.
- origin: the position of the round's first drafted token.
- index: the block of four tokens that the number is for. Token v takes output v % 4 of index v // 4. Draws in two levels number
  their blocks from BLOCK_LEVEL on, as if they were tokens beyond any vocabulary. Group g of a race takes outputs 0 and 1 of index
  GROUP_LEVEL + g. A number that belongs to a position and not to a token takes output 0 of index 0 (the acceptance test), or
  outputs 0 and 1 (a draw by inversion).
- stream: the purpose. Streams are disjoint. SAMPLE has origin 0, so that plain decoding and the bonus token of a round draw alike.
  The others have their round's origin, because a later round may decide a position again.

This file is the torch twin (any device, no global generator) and imports no Triton; jit_random.py does the same in the kernels.
"""

import torch
from torch import Tensor

STREAMS = SAMPLE, DRAFT, ACCEPT, RESIDUAL = 0, 1, 2, 3
BLOCK_LEVEL = 1 << 33  # as a token; as an index 2**31
GROUP_LEVEL = 3 << 30  # as an index
GROUP = 256  # tokens of a race that are drawn for together

MUL_0, MUL_1 = 0xD2511F53, 0xCD9E8D57
WEYL_0, WEYL_1 = 0x9E3779B9, 0xBB67AE85
_MASK = 0xFFFFFFFF
ROUNDS = 10
UNIFORM_MAX = 1.0 - 2.0**-24  # the largest float32 below 1


def philox(
    seed: Tensor, index: Tensor | int, position: Tensor | int, origin: Tensor | int, stream: Tensor | int
) -> Tensor:
    """Four 32-bit words per counter.

    Args:
        seed, index, position, origin: int64, broadcast against each other; the last three are taken modulo 2**32.
        stream: SAMPLE, DRAFT, ACCEPT or RESIDUAL, or a tensor of them.

    Returns:
        [..., 4] int64 with values in [0, 2**32), where ... is the broadcast shape.
    """
    c0, c1, c2, c3 = (
        torch.as_tensor(word, dtype=torch.int64, device=seed.device) & _MASK
        for word in (index, position, origin, stream)
    )
    k0, k1 = seed & _MASK, (seed >> 32) & _MASK
    for _ in range(ROUNDS):
        # The int64 product wraps, but its 64 bits are those of the unsigned product.
        low, high = c0 * MUL_0, c2 * MUL_1
        c0, c1, c2, c3 = (
            (high >> 32 & _MASK) ^ c1 ^ k0,
            high & _MASK,
            (low >> 32 & _MASK) ^ c3 ^ k1,
            low & _MASK,
        )
        k0, k1 = (k0 + WEYL_0) & _MASK, (k1 + WEYL_1) & _MASK
    return torch.stack(torch.broadcast_tensors(c0, c1, c2, c3), dim=-1)


def uniform_from_bits(bits: Tensor) -> Tensor:
    """32-bit words (int64) to float32 strictly inside (0, 1), with the finest steps near 0."""
    return bits.to(torch.float32).add_(0.5).mul_(2.0**-32).clamp_(max=UNIFORM_MAX)


def uniform(seed: Tensor, position: Tensor, origin: Tensor | int, stream: Tensor | int) -> Tensor:
    """One float32 in (0, 1) per position; arguments as for `philox`."""
    return uniform_from_bits(philox(seed, 0, position, origin, stream)[..., 0])


def exponential(bits: Tensor) -> Tensor:
    """Exponentially distributed float32 numbers of mean 1 from 32-bit words (int64): -log(1 - u).

    The form with 1 - u is finest at the smallest numbers, which decide a draw. As u has steps of 2**-32 near 0, two of 150,000
    tokens tie about once in 30,000 draws, and not once in 60.
    """
    return uniform_from_bits(bits).neg_().log1p_().neg_()


def times(
    seed: Tensor, position: Tensor, origin: Tensor | int, stream: Tensor | int, count: int, first: Tensor | int = 0
) -> Tensor:
    """Exponentially distributed times of mean 1 for `count` tokens from `first` on. -log of them is standard Gumbel noise.

    Args:
        seed, position, origin, stream: [...] int64, broadcast against each other.
        first: int, or [...] int64 of the same shape; a multiple of 4.

    Returns:
        [..., count] float32, above 0.
    """
    return exponential(_words(seed, position, origin, stream, first // 4, (count + 3) // 4).flatten(-2)[..., :count])


def first_arrivals(
    seed: Tensor, position: Tensor, origin: Tensor | int, stream: Tensor | int, groups: int, first: Tensor | int = 0
) -> tuple[Tensor, Tensor]:
    """In a race: when the first token of each group arrives, and which token that is.

    In a race every token arrives after an exponentially distributed time of its own, and -log of that is its Gumbel noise. The
    first of n tokens arrives after such a time divided by n, whichever it is. Each of the others arrives a time of its own
    *later*, because the exponential distribution is memoryless. So a group's largest noise is known before that of others.

    Args:
        seed, position, origin, stream: [...] int64, broadcast against each other.
        first: the token that the first group begins with: int, or [...] int64 of the same shape; a multiple of GROUP.

    Returns:
        times [..., groups] float32, and places in the group [..., groups] int64.
    """
    words = _words(seed, position, origin, stream, first // GROUP + GROUP_LEVEL, groups)
    return exponential(words[..., 0]).div_(GROUP), words[..., 1] % GROUP


def arrivals(
    seed: Tensor, position: Tensor, origin: Tensor | int, stream: Tensor | int, count: int, first: Tensor | int = 0
) -> Tensor:
    """When `count` tokens from `first` on arrive in a race (see `first_arrivals`). -log of that is their Gumbel noise.

    Args:
        seed, position, origin, stream: [...] int64, broadcast against each other.
        first: int, or [...] int64 of the same shape; a multiple of GROUP.

    Returns:
        [..., count] float32, above 0.
    """
    time, place = first_arrivals(seed, position, origin, stream, (count + GROUP - 1) // GROUP, first)
    token = torch.arange(count, device=seed.device)
    group = token // GROUP
    later = times(seed, position, origin, stream, count, first)
    return later.masked_fill_(place[..., group] == token % GROUP, 0).add_(time[..., group])


def race(seed: Tensor, position: Tensor, origin: Tensor | int, stream: Tensor | int, count: int) -> Tensor:
    """The same as Gumbel noise, -log of the times: [..., count] float32."""
    return arrivals(seed, position, origin, stream, count).log_().neg_()


def _words(
    seed: Tensor, position: Tensor, origin: Tensor | int, stream: Tensor | int, first: Tensor | int, count: int
) -> Tensor:
    """The words of `count` indices from `first` on: [..., count, 4]."""
    *counter, start = (
        value[..., None] if isinstance(value, Tensor) else value for value in (position, origin, stream, first)
    )
    return philox(seed[..., None], start + torch.arange(count, device=seed.device), *counter)
