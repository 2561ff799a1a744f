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

import math
from collections.abc import Sequence
from itertools import cycle
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
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

FEW = 32  # counters, for which the calls of numpy would cost more than the arithmetic
AT_ONCE = 8192  # counters, of about 100 bytes each: they stay in a cache of a core
# For `_words_at_once`. Numbers are arrays here because these cost less in each call. Each constant is a pair for the two halves
# of a round, which change places from one round to the next: shifts of the seed and what is added to them for the key, and
# multipliers.
_MASK_64, _32 = np.array(_MASK, dtype=np.uint64), np.array(32, dtype=np.uint64)
_SHIFTS = np.array([[0, 32], [32, 0]] * (ROUNDS // 2), dtype=np.uint64)
_ADDED = np.array([[WEYL_0 * i, WEYL_1 * i][:: 1 - 2 * (i % 2)] for i in range(ROUNDS)], dtype=np.uint64)
_MULTIPLIERS = np.array([[MUL_1, MUL_0], [MUL_0, MUL_1]], dtype=np.uint64)

Array = Any  # an int64 tensor, an int, or a numpy array in place of a tensor on the CPU: for few numbers its calls cost a third


def philox(seed: Array, index: Array, position: Array, origin: Array, stream: Array) -> Array:
    """Four 32-bit words per counter.

    Args:
        seed, index, position, origin: int64, broadcast against each other; the last three are taken modulo 2**32. The
            seed is a tensor or a numpy array. If it is an array, none of the others is a tensor.
        stream: SAMPLE, DRAFT, ACCEPT or RESIDUAL, or an array of them.

    Returns:
        [..., 4] int64 with values in [0, 2**32), where ... is the broadcast shape; a numpy array where the seed is one.
    """
    counter: Sequence[Array] = (index, position, origin, stream)
    if isinstance(seed, np.ndarray):
        return _words_in_numpy(seed, counter)
    if seed.device.type == "cpu":
        return torch.from_numpy(_words_in_numpy(seed.numpy(), _arrays(*counter)))
    counter = [torch.as_tensor(word, dtype=torch.int64, device=seed.device) for word in counter]
    shape = torch.broadcast_shapes(seed.shape, *(word.shape for word in counter))
    return torch.stack([word.expand(shape) for word in _words(seed, counter)], dim=-1)


def _arrays(*values: Array) -> list[Array]:
    """Tensors on the CPU as numpy arrays, which share their memory; everything else as it is."""
    return [value.numpy() if isinstance(value, Tensor) and value.device.type == "cpu" else value for value in values]


def _words(seed: Tensor, counter: Sequence[Tensor]) -> tuple[Tensor, ...]:
    c0, c1, c2, c3 = (word & _MASK for word in counter)
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
    return c0, c1, c2, c3


def _words_in_numpy(seed: NDArray[np.int64], counter: Sequence[Array]) -> NDArray[np.int64]:
    """`_words`, at once or, where there are many, in parts that stay in the cache."""
    shape = np.broadcast(seed, *counter).shape
    size = math.prod(shape)
    if size <= FEW:
        return _words_of_few(seed, counter, shape)
    if size <= AT_ONCE:
        return _words_at_once(seed, counter, shape)
    axis = next(axis for axis in range(-len(shape), 0) if shape[axis] > 1)
    step = max(1, shape[axis] * AT_ONCE // size)
    result = np.empty((*shape, 4), dtype=np.int64)
    rest = (slice(None),) * (-1 - axis)
    for first in range(0, shape[axis], step):
        part: Any = (..., slice(first, first + step), *rest)
        inputs = (
            value[part] if np.ndim(value) >= -axis and value.shape[axis] > 1 else value for value in (seed, *counter)
        )
        result[(*part, slice(None))] = _words_in_numpy(next(inputs), tuple(inputs))
    return result


def _words_of_few(seed: NDArray[np.int64], counter: Sequence[Array], shape: tuple[int, ...]) -> NDArray[np.int64]:
    """`_words` on large ints, each of which holds a number of every counter in 64 bits of its own: one operation of Python is one
    of all of them. No product carries from one number into the next."""
    inputs = np.empty((5, *shape), dtype="<i8")
    inputs[0], inputs[1], inputs[2], inputs[3], inputs[4] = *counter, seed
    size = 8 * math.prod(shape)
    data = inputs.tobytes()
    c0, c1, c2, c3, keys = (int.from_bytes(data[i * size : (i + 1) * size], "little") for i in range(5))
    ones = int.from_bytes(b"\1\0\0\0\0\0\0\0" * (size // 8), "little")
    mask, weyl_0, weyl_1 = ones * _MASK, ones * WEYL_0, ones * WEYL_1
    c0, c1, c2, c3, k0, k1 = c0 & mask, c1 & mask, c2 & mask, c3 & mask, keys & mask, keys >> 32 & mask
    for _ in range(ROUNDS):
        low, high = c0 * MUL_0, c2 * MUL_1
        c0, c1, c2, c3 = (high >> 32 & mask) ^ c1 ^ k0, high & mask, (low >> 32 & mask) ^ c3 ^ k1, low & mask
        k0, k1 = k0 + weyl_0 & mask, k1 + weyl_1 & mask
    words = bytearray().join(word.to_bytes(size, "little") for word in (c0, c1, c2, c3))
    return np.frombuffer(words, dtype="<i8").reshape(4, *shape).transpose(*range(1, len(shape) + 1), 0)


def _words_at_once(seed: NDArray[np.int64], counter: Sequence[Array], shape: tuple[int, ...]) -> NDArray[np.int64]:
    """With few calls, most of which do not broadcast, and all in place. c2 and c0 are one array, c3 and c1 another; each
    pair changes places from round to round."""
    inputs = np.empty((4, *(shape or (1,))), dtype=np.int64)
    inputs[1], inputs[3], inputs[0], inputs[2] = counter
    words = inputs.view(np.uint64)
    np.bitwise_and(words, _MASK_64, words)
    # One key where one seed serves many numbers: arrays with a key for each number would not stay in the cache.
    ones = (1,) * (inputs.ndim - 1)
    seed = seed.reshape(ones[seed.ndim :] + seed.shape).view(np.uint64)
    keys = (seed >> _SHIFTS.reshape(ROUNDS, 2, *ones)) + _ADDED.reshape(ROUNDS, 2, *ones) & _MASK_64
    multipliers = np.empty((2, *words[:2].shape), np.uint64)
    multipliers[...] = _MULTIPLIERS.reshape(2, 2, *ones)
    even, odd, (even_0, even_1, odd_0, odd_1) = words[:2], words[2:], words
    product = np.empty_like(even)
    for key, multiplier in zip(keys, cycle(multipliers), strict=False):
        np.multiply(even, multiplier, product)
        np.right_shift(product, _32, even)
        np.bitwise_xor(even_0, odd_1, even_0)
        np.bitwise_xor(even_1, odd_0, even_1)
        np.bitwise_xor(even, key, even)
        np.bitwise_and(product, _MASK_64, odd)
    result = np.empty((*inputs.shape[1:], 4), dtype=np.int64)
    result[..., 0], result[..., 1], result[..., 2], result[..., 3] = inputs[1], inputs[3], inputs[0], inputs[2]
    return result.reshape(*shape, 4)


def uniform_from_bits(bits: Array) -> Tensor:
    """32-bit words (int64) to float32 strictly inside (0, 1), with the finest steps near 0."""
    if isinstance(bits, np.ndarray):
        values = bits.astype(np.float32)
        values += 0.5
        values *= 2.0**-32
        return torch.from_numpy(np.minimum(values, UNIFORM_MAX, out=values))
    return bits.to(torch.float32).add_(0.5).mul_(2.0**-32).clamp_(max=UNIFORM_MAX)


def uniform(seed: Tensor, position: Tensor, origin: Tensor | int, stream: Tensor | int) -> Tensor:
    """One float32 in (0, 1) per position; arguments as for `philox`."""
    seed, position, origin, stream = _arrays(seed, position, origin, stream)
    return uniform_from_bits(philox(seed, 0, position, origin, stream)[..., 0])


def exponential(bits: Array) -> Tensor:
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
    words = _words_from(seed, position, origin, stream, (first, 4, 0, (count + 3) // 4))
    return exponential(words.reshape(*words.shape[:-2], 4 * words.shape[-2])[..., :count])


def first_arrivals(
    seed: Tensor, position: Tensor, origin: Tensor | int, stream: Tensor | int, groups: int
) -> tuple[Tensor, Tensor]:
    """In a race: when the first token of each group arrives, and which token that is.

    In a race every token arrives after an exponentially distributed time of its own, and -log of that is its Gumbel noise. The
    first of n tokens arrives after such a time divided by n, whichever it is. Each of the others arrives a time of its own *later*,
    because the exponential distribution is memoryless. So a group's largest noise is known before that of any other token.

    Args:
        seed, position, origin, stream: [...] int64, broadcast against each other.

    Returns:
        times [..., groups] float32, and places in the group [..., groups] int64.
    """
    words = _words_from(seed, position, origin, stream, (0, GROUP, GROUP_LEVEL, groups))
    return exponential(words[..., 0]).div_(GROUP), _tensor(words[..., 1] % GROUP)


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
    groups = (count + GROUP - 1) // GROUP
    tokens = groups * GROUP // 4
    words = _words_from(seed, position, origin, stream, (first, 4, 0, tokens), (first, GROUP, GROUP_LEVEL, groups))
    numbers = exponential(words)
    time, place = numbers[..., tokens:, :1] / GROUP, _tensor(words[..., tokens:, 1:2] % GROUP)
    later = numbers[..., :tokens, :].reshape(*numbers.shape[:-2], groups, GROUP)
    return later.scatter_(-1, place, 0).add_(time).flatten(-2)[..., :count]


def race(
    seed: Tensor, position: Tensor, origin: Tensor | int, stream: Tensor | int, count: int, first: Tensor | int = 0
) -> Tensor:
    """The same as Gumbel noise, -log of the times: [..., count] float32."""
    return arrivals(seed, position, origin, stream, count, first).log_().neg_()


def _tensor(values: Array) -> Tensor:
    return torch.from_numpy(values) if isinstance(values, np.ndarray) else values


def _words_from(
    seed: Tensor,
    position: Tensor,
    origin: Tensor | int,
    stream: Tensor | int,
    *ranges: tuple[Tensor | int, int, int, int],
) -> Array:
    """The words of several ranges, side by side: [..., all counts, 4]; a numpy array on the CPU.

    A range (first, size, level, count) stands for `count` indices from level + first / size on."""
    key, *counter = (
        each if isinstance(each, int) else each[..., None] for each in _arrays(seed, position, origin, stream)
    )
    indices: list[Any] = []
    for first, size, level, count in ranges:
        (start,) = _arrays(first)
        steps = np.arange(count) if isinstance(key, np.ndarray) else torch.arange(count, device=seed.device)
        indices.append(
            steps + (start // size + level if isinstance(start, int) else (start // size + level)[..., None])
        )
    if len(indices) == 1:
        return philox(key, indices[0], *counter)
    join = np.concatenate if isinstance(key, np.ndarray) else torch.cat
    return philox(key, join(indices, -1), *counter)
