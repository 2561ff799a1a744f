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

from collections.abc import Sequence
from itertools import cycle

import numpy as np
import torch
from torch import Tensor

SAMPLE, DRAFT, ACCEPT, RESIDUAL = 0, 1, 2, 3
BLOCK_LEVEL = 1 << 33  # as a token; as an index 2**31

_MUL_0, _MUL_1 = 0xD2511F53, 0xCD9E8D57
_WEYL_0, _WEYL_1 = 0x9E3779B9, 0xBB67AE85
_MASK = 0xFFFFFFFF
ROUNDS = 10
_MASK_64, _HALF = np.array(_MASK, dtype=np.uint64), np.array(32, dtype=np.uint64)
# Shift of the seed, what is added to it, and multiplier: for each round, and for what becomes c0 and c2 in it.
_TABLE = np.array(
    [[[0, 32], [_WEYL_0 * i, _WEYL_1 * i], [_MUL_1, _MUL_0]] for i in range(ROUNDS)], dtype=np.uint64
).swapaxes(0, 1)
_TABLE[:, 1::2] = _TABLE[:, 1::2, ::-1].copy()  # their places change
UNIFORM_MAX = 1.0 - 2.0**-24  # the largest float32 below 1


def philox(
    seed: Tensor, index: Tensor | int, position: Tensor, origin: Tensor | int, stream: Tensor | int
) -> tuple[Tensor, ...]:
    """Four 32-bit words per counter.

    Args:
        seed, index, position, origin: int64, broadcast against each other; the last three are taken modulo 2**32.
        stream: SAMPLE, DRAFT, ACCEPT or RESIDUAL, or a tensor of them.

    Returns:
        Four int64 tensors of the broadcast shape with values in [0, 2**32).
    """
    if seed.device.type == "cpu":
        return _words_on_cpu(seed, (index, position, origin, stream))
    counter = [
        torch.as_tensor(word, dtype=torch.int64, device=seed.device) for word in (index, position, origin, stream)
    ]
    shape = torch.broadcast_shapes(seed.shape, *(word.shape for word in counter))
    return tuple(word.expand(shape) for word in _words(seed, counter))


def _words(seed: Tensor, counter: Sequence[Tensor]) -> tuple[Tensor, ...]:
    c0, c1, c2, c3 = (word & _MASK for word in counter)
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
    return c0, c1, c2, c3


def _words_on_cpu(seed: Tensor, counter: Sequence[Tensor | int]) -> tuple[Tensor, ...]:
    """`_words` in numpy. Of a few hundred numbers it is the calls that cost, most of all those that broadcast: c2 and c0
    are one array, c3 and c1 another, each pair changes places from round to round, and all is done in place."""
    k = seed.numpy().view(np.uint64)
    c0, c1, c2, c3 = [word.numpy() if isinstance(word, Tensor) else word for word in counter]
    shape = np.broadcast(k, c0, c1, c2, c3).shape
    signed = np.empty((4, *shape), dtype=np.int64)
    signed[0], signed[1], signed[2], signed[3] = c2, c0, c3, c1
    words = signed.view(np.uint64)
    np.bitwise_and(words, _MASK_64, out=words)
    ones = (1,) * len(shape)
    table = _TABLE.reshape(3, ROUNDS, 2, *ones)
    keys, multipliers = np.empty((ROUNDS, 2, *shape), dtype=np.uint64), np.empty((2, 2, *shape), dtype=np.uint64)
    keys[...] = (k.reshape(1, 1, *ones[k.ndim :], *k.shape) >> table[0]) + table[1] & _MASK_64
    multipliers[...] = table[2, :2]
    even, odd = words[:2], words[2:]
    even_0, even_1, odd_0, odd_1 = (words[i : i + 1] for i in range(4))
    product = np.empty_like(even)
    for key, multiplier in zip(keys, cycle(multipliers), strict=False):
        np.multiply(even, multiplier, out=product)
        np.right_shift(product, _HALF, out=even)
        np.bitwise_xor(even_0, odd_1, out=even_0)
        np.bitwise_xor(even_1, odd_0, out=even_1)
        np.bitwise_xor(even, key, out=even)
        np.bitwise_and(product, _MASK_64, out=odd)
    third, first, fourth, second = torch.from_numpy(signed).unbind()
    return first, second, third, fourth


def uniform_from_bits(bits: Tensor) -> Tensor:
    """32-bit words (int64) to float32 strictly inside (0, 1), with the finest steps near 0."""
    return bits.to(torch.float32).add_(0.5).mul_(2.0**-32).clamp_(max=UNIFORM_MAX)


def uniform(seed: Tensor, position: Tensor, origin: Tensor | int, stream: Tensor | int) -> Tensor:
    """One float32 in (0, 1) per position; arguments as for `philox`."""
    return uniform_from_bits(philox(seed, 0, position, origin, stream)[0])


def gumbel(
    seed: Tensor, position: Tensor, origin: Tensor | int, stream: Tensor | int, count: int, first: Tensor | int = 0
) -> Tensor:
    """Standard Gumbel noise for `count` tokens from `first` on, -log(-log(1 - u)).

    The form with 1 - u keeps the resolution where it decides, at the largest noise: with u in steps of 2**-32 near 0,
    two of 150,000 tokens tie about once in 30,000 draws, and not once in 60.

    Args:
        seed, position, origin, stream: [...] int64, broadcast against each other.
        first: int, or [...] int64 of the same shape; a multiple of 4.

    Returns:
        [..., count] float32.
    """
    index = torch.arange((count + 3) // 4, device=seed.device)
    index = index + (first[..., None] >> 2 if isinstance(first, Tensor) else first >> 2)
    origin, stream = (each[..., None] if isinstance(each, Tensor) else each for each in (origin, stream))
    words = philox(seed[..., None], index, position[..., None], origin, stream)
    bits = torch.stack(words, dim=-1).flatten(-2)[..., :count]
    return uniform_from_bits(bits).neg_().log1p_().neg_().log_().neg_()
