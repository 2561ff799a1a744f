"""Random numbers of the Triton kernels; philox.py is their torch twin and says what each counter stands for."""

import triton
import triton.language as tl

from . import philox as twin
from .constants import Constant

SAMPLE = Constant(twin.SAMPLE)
ACCEPT = Constant(twin.ACCEPT)
RESIDUAL = Constant(twin.RESIDUAL)
BLOCK_LEVEL = Constant(twin.BLOCK_LEVEL // 4)  # as an index
_GROUP_LEVEL, _GROUP = Constant(twin.GROUP_LEVEL), Constant(twin.GROUP)
_ROUNDS = Constant(twin.ROUNDS)
_MUL_0, _MUL_1 = Constant(twin.MUL_0), Constant(twin.MUL_1)
_WEYL_0, _WEYL_1 = Constant(twin.WEYL_0), Constant(twin.WEYL_1)
_UNIFORM_MAX = Constant(twin.UNIFORM_MAX)
_LN_2 = Constant(0.6931471805599453)


@triton.jit
def uniform_from_bits(bits):
    """uint32 to float32 in (0, 1); see the twin."""
    return tl.minimum((bits.to(tl.float32) + 0.5) * 2.3283064365386963e-10, _UNIFORM_MAX)  # 2**-32


@triton.jit
def _philox(seed, index, position, origin, stream):
    """Four words for each counter (index, position, origin, stream), uint32 of one shape.

    The same as `tl.philox`, but with a loop. Its rounds are unrolled, and were up to half of the code of a kernel that draws."""
    seed = seed.to(tl.uint64)
    key_0, key_1 = seed.to(tl.uint32), (seed >> 32).to(tl.uint32)
    c0, c1, c2, c3 = index, position, origin, stream
    for _ in range(_ROUNDS):
        c0, c1, c2, c3 = (
            tl.umulhi(c2, _MUL_1) ^ c1 ^ key_0,
            tl.mul(c2, _MUL_1, sanitize_overflow=False),
            tl.umulhi(c0, _MUL_0) ^ c3 ^ key_1,
            tl.mul(c0, _MUL_0, sanitize_overflow=False),
        )
        key_0 = tl.add(key_0, _WEYL_0, sanitize_overflow=False)
        key_1 = tl.add(key_1, _WEYL_1, sanitize_overflow=False)
    return c0, c1, c2, c3


@triton.jit
def uniforms(seed, position, origin, STREAM: tl.constexpr):
    """One uniform per position [...] int64: output 0 of index 0."""
    zero = tl.zeros_like(position).to(tl.uint32)
    bits, _, _, _ = _philox(seed, zero, position.to(tl.uint32), origin.to(tl.uint32) + zero, zero + STREAM)
    return uniform_from_bits(bits)


@triton.jit
def log1m(u):
    """log(1 - u) for u in [0, 1). log1p needs libdevice, which the interpreter lacks.

    Below 1/2 it is -2 atanh(s) with s = u / (2 - u) <= 1/3, by the series s + s^3 / 3 + ... + s^15 / 15. The terms left out come
    to 2e-9. Above 1/2, 1 - u is exact.
    """
    s = u / (2 - u)
    t = s * s
    series = 1 / 13 + t * (1 / 15)
    series = 1 / 7 + t * (1 / 9 + t * (1 / 11 + t * series))
    series = 1 + t * (1 / 3 + t * (1 / 5 + t * series))
    return tl.where(u < 0.5, -2 * s * series, tl.log(1 - u))


@triton.jit
def philox_words(index, noise):
    """All four words of each index, in order: uint32 [..., 4 n] for index [..., n].

    A token has a word of its own. noise = (seed, position, origin, stream), integer scalars; all but the seed are taken
    modulo 2**32.
    """
    seed, position, origin, stream = noise
    zero = tl.zeros_like(index).to(tl.uint32)
    at, since = position.to(tl.uint32) + zero, origin.to(tl.uint32) + zero
    a, b, c, d = _philox(seed, index.to(tl.uint32), at, since, (zero + stream).to(tl.uint32))
    return tl.interleave(tl.interleave(a, c), tl.interleave(b, d))


@triton.jit
def exponential(words):
    """Exponentially distributed float32 numbers of mean 1, of the shape of `words`."""
    return -log1m(uniform_from_bits(words))


@triton.jit
def gumbel(words):
    """Standard Gumbel noise float32, of the shape of `words`."""
    return -tl.log(exponential(words))


@triton.jit
def first_arrivals(group, noise):
    """When the first token of each group [...] of a race arrives, float32, and that token's place in the group; see the twin."""
    seed, position, origin, stream = noise
    zero = tl.zeros_like(group).to(tl.uint32)
    index = group.to(tl.uint32) + _GROUP_LEVEL
    time, place, _, _ = _philox(
        seed, index, position.to(tl.uint32) + zero, origin.to(tl.uint32) + zero, (zero + stream).to(tl.uint32)
    )
    return exponential(time) * (1 / _GROUP), (place % _GROUP).to(tl.int32)


@triton.jit
def race(first, noise, COUNT: tl.constexpr):
    """Standard Gumbel noise float32 [COUNT] of tokens from `first` on, as a race has it; both are multiples of 256."""
    time, place = first_arrivals(first // _GROUP + tl.arange(0, COUNT // _GROUP), noise)
    later = exponential(philox_words(first // 4 + tl.arange(0, COUNT // 4), noise))
    later = tl.reshape(later, [COUNT // _GROUP, _GROUP])
    later = tl.where(tl.arange(0, _GROUP)[None, :] == place[:, None], 0.0, later)
    return tl.reshape(-tl.log(time[:, None] + later), [COUNT])


@triton.jit
def race_bound(time, words):
    """An upper bound of the noise -log(time + exponential(words)) of tokens that are not the first of their group.

    It needs no logarithms, which are most of the work of the noise itself. Where the noise is large, the bound is 0.03 above it on
    average.

    -log(1 - u) >= u + u^2 / 2, and log2(y) >= bits(y) / 2**23 - 127, where both sides are equal at powers of two and the right
    one is linear between them. 0.001 is more than all rounding.
    """
    w = words.to(tl.float32)
    y = time * 2.0**32 + tl.fma(w, w * 2.0**-33, w)  # 2**32 (time + u + u^2 / 2)
    return tl.fma(y.to(tl.int32, bitcast=True).to(tl.float32), _LN_2 * -(2.0**-23), (127 + 32) * _LN_2 + 0.001)
