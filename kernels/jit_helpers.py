"""What the Triton kernels share: numbers from Philox, and the two things that a pass over a row gathers.

A pass folds a row block by block into BLOCK lanes, lane i seeing the tokens i, i + BLOCK, ... The lanes meet
only once, at the end: inside the loop nothing crosses a lane, so there is no barrier in it.

Stats, per lane: the peak (largest logit), its lowest id, and mass = sum of exp((x - peak) / T). At the end

    lse = best / T + log(sum over lanes of mass * exp((peak - best) / T)), with best = the largest peak.

A draw, per lane: the token with the largest x / T + e, where e is Gumbel noise and, for a residual, a log factor
beside it. Two tokens are compared as (x - y) / T + (e - f) > 0: at low temperature x / T is in the thousands, and
rounding the sum x / T + e would wipe out the noise.

The interpreter's max and argmax skip NaN and a GPU's need not, so NaN becomes +inf when it is loaded. +inf as the
largest logit marks a row that has no distribution.
"""

import triton
import triton.language as tl

from . import philox as twin

# One program reads a row in blocks of 4096 tokens: 16 per thread, two 16-byte loads of bf16. `sample` and
# `verify` share these numbers, and with them the order in which a tie in rounding is decided.
BLOCK = 4096
# Without fused multiply-add the arithmetic is the twin's, whatever a Triton release does by default.
OPTIONS = dict(num_warps=8, enable_fp_fusion=False)

SAMPLE = tl.constexpr(twin.SAMPLE)
ACCEPT = tl.constexpr(twin.ACCEPT)
RESIDUAL = tl.constexpr(twin.RESIDUAL)
_UNIFORM_MAX = tl.constexpr(twin.UNIFORM_MAX)
_LOWEST = tl.constexpr(-3.4028234663852886e38)  # finite, so that a difference from -inf is -inf and not NaN


def block_size(vocab_size: int) -> int:
    """BLOCK, or the power of two that holds a smaller vocabulary: a model has one, so this makes no variants."""
    return max(16, min(BLOCK, triton.next_power_of_2(vocab_size)))


@triton.jit
def uniform_from_bits(bits):
    """uint32 to float32 in (0, 1); see the twin."""
    return tl.minimum((bits.to(tl.float32) + 0.5) * 2.3283064365386963e-10, _UNIFORM_MAX)  # 2**-32


@triton.jit
def uniforms(seed, position, origin, stream: tl.constexpr):
    """One uniform per position: output 0 of index 0."""
    index = tl.zeros_like(position).to(tl.uint32)
    bits, _, _, _ = tl.philox(seed, index, position.to(tl.uint32), origin.to(tl.uint32), stream)
    return uniform_from_bits(bits)


@triton.jit
def philox_block(seed, start, position, origin, stream, BLOCK: tl.constexpr):
    """Words [BLOCK] uint32 for the tokens from start on: token v takes output v % 4 of index v // 4.

    start is a multiple of 4; position, origin and stream are integer scalars, taken modulo 2**32.
    """
    index = (start // 4 + tl.arange(0, BLOCK // 4)).to(tl.uint32)
    a, b, c, d = tl.philox(seed, index, position.to(tl.uint32), origin.to(tl.uint32), stream.to(tl.uint32))
    return tl.interleave(tl.interleave(a, c), tl.interleave(b, d))


@triton.jit
def log1m(u):
    """log(1 - u) for u in [0, 1): there is no log1p without libdevice, which the interpreter lacks.

    Below 1/2 it is -2 atanh(s) with s = u / (2 - u) <= 1/3, by the series s + s^3 / 3 + ... + s^15 / 15, of which
    what is left out is 2e-9. Above, 1 - u is exact.
    """
    s = u / (2 - u)
    t = s * s
    series = 1 / 13 + t * (1 / 15)
    series = 1 / 7 + t * (1 / 9 + t * (1 / 11 + t * series))
    series = 1 + t * (1 / 3 + t * (1 / 5 + t * series))
    return tl.where(u < 0.5, -2 * s * series, tl.log(1 - u))


@triton.jit
def gumbel_block(seed, start, position, origin, stream, BLOCK: tl.constexpr):
    """Standard Gumbel noise [BLOCK] float32 for the tokens from start on."""
    u = uniform_from_bits(philox_block(seed, start, position, origin, stream, BLOCK))
    return -tl.log(-log1m(u))


@triton.jit
def load_temperature(temperature, batch):
    """1/T and whether the row is greedy; 1/T = 1 for greedy rows, and everywhere if there is no tensor."""
    t = 1.0
    if temperature is not None:
        t = tl.load(temperature + batch).to(tl.float32)
    greedy = t == 0.0
    return tl.div_rn(1.0, tl.where(greedy, 1.0, t)), greedy


@triton.jit
def load_logits(row, ids, vocab_size, stride_token):
    """Logits [BLOCK] as float32: -inf beyond the vocabulary, +inf for NaN."""
    at = row + ids.to(tl.int64) * stride_token
    x = tl.load(at, mask=ids < vocab_size, other=float("-inf")).to(tl.float32)
    return tl.where(x == x, x, float("inf"))


@triton.jit
def prob_of(row, ids, vocab_size, stride_token, threshold, lse, inverse_temperature):
    """prob(id) = exp(logit / T - lse) where logit >= threshold; 0 for ids outside [0, V)."""
    inside = (ids >= 0) & (ids < vocab_size)
    x = tl.load(row + ids * stride_token, mask=inside, other=float("-inf")).to(tl.float32)
    return tl.where(x >= threshold, tl.exp(x * inverse_temperature - lse), 0.0)


@triton.jit
def draft_ratio(x, y, threshold, lse, draft_threshold, draft_lse, inverse_temperature):
    """q / p from the logits x of the target and y of the draft; NaN where both are 0."""
    log_p = tl.where(x >= threshold, x * inverse_temperature - lse, float("-inf"))
    log_q = tl.where(y >= draft_threshold, y * inverse_temperature - draft_lse, float("-inf"))
    return tl.exp(log_q - log_p)


@triton.jit
def start_stats(BLOCK: tl.constexpr):
    """Lanes (peak, peak_id, mass) before the first block."""
    return tl.full([BLOCK], _LOWEST, tl.float32), tl.arange(0, BLOCK), tl.zeros([BLOCK], tl.float32)


@triton.jit
def _fade(distance, inverse_temperature, greedy):
    """exp(-distance / T); a greedy row keeps only what ties with its maximum."""
    return tl.where(greedy, (distance == 0).to(tl.float32), tl.exp(-distance * inverse_temperature))


@triton.jit
def fold_stats(peak, peak_id, mass, x, ids, inverse_temperature, greedy):
    """Lanes after one more block x, with one exp: of exp(peak - new peak) and exp(x - new peak), one is 1."""
    higher = x > peak
    fade = _fade(tl.abs(x - peak), inverse_temperature, greedy)
    mass = tl.where(higher, mass * fade + 1, mass + fade)
    return tl.where(higher, x, peak), tl.where(higher, ids, peak_id), mass


@triton.jit
def finish_stats(peak, peak_id, mass, inverse_temperature, greedy):
    """Scalars (threshold, lse, argmax) of a row, from its lanes."""
    best = tl.max(peak, axis=0)
    argmax = tl.min(tl.where(peak == best, peak_id, 0x7FFFFFFF), axis=0)
    total = tl.sum(mass * _fade(best - peak, inverse_temperature, greedy), axis=0)
    lse = tl.where(total == 0, float("-inf"), best * inverse_temperature + tl.log(total))
    lse = tl.where(best == float("inf"), float("nan"), lse)
    best = tl.where(lse == float("-inf"), float("-inf"), best)
    return tl.where(greedy, best, float("-inf")), lse, argmax


@triton.jit
def start_draw(BLOCK: tl.constexpr):
    """Lanes (best, extra, best_id) before the first block: extra = -inf, which any token beats."""
    lowest = tl.full([BLOCK], _LOWEST, tl.float32)
    return lowest, tl.full([BLOCK], float("-inf"), tl.float32), tl.zeros([BLOCK], tl.int32)


@triton.jit
def fold_draw(best, extra, best_id, x, e, ids, inverse_temperature):
    """Lanes after one more block of tokens with logits x and noise e; NaN, from two -inf, never wins."""
    wins = (x - best) * inverse_temperature + (e - extra) > 0
    return tl.where(wins, x, best), tl.where(wins, e, extra), tl.where(wins, ids, best_id)


@triton.jit
def finish_draw(best, extra, best_id, inverse_temperature):
    """The id drawn, and whether there was anything to draw from."""
    offered = extra > float("-inf")
    peak = tl.max(best, axis=0)
    value = (best - peak) * inverse_temperature + extra
    token = tl.min(tl.where(offered & (value == tl.max(value, axis=0)), best_id, 0x7FFFFFFF), axis=0)
    return token, tl.max(offered.to(tl.int32), axis=0) > 0
