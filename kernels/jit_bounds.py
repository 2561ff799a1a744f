"""The start of the search for a filter's threshold: keys of logits, a sample of the row, and bounds from it and from groups.

jit_filters.py searches between the bounds.
"""

from inspect import signature

import torch
import triton
import triton.language as tl

from .constants import Constant
from .jit_groups import GROUPS, SAMPLES, group_peaks_at, list_reaching, search_at
from .jit_rows import BLOCK_MASS, BLOCK_PEAK, LANES, LOG2_E, blocks_at, fetch, tile_ids

_SAMPLES = Constant(SAMPLES)
# Triton 3.9 announces that 3.10 will not have this argument. Making a tensor flat then moves it through shared memory.
_ANY_ORDER = Constant("can_reorder" in signature(tl.reshape).parameters)


@triton.jit
def logit_key(x, SHIFT: tl.constexpr):
    """float32 to an int32 of the same order. SHIFT drops the low bits that a 16-bit logit does not have."""
    bits = tl.where(x == 0, 0.0, x).to(tl.int32, bitcast=True)  # -0 is 0
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits) >> SHIFT


@triton.jit
def key_logit(key, SHIFT: tl.constexpr):
    """The inverse of logit_key."""
    bits = tl.where(key < 0, ((key << SHIFT) | ((1 << SHIFT) - 1)) ^ 0x7FFFFFFF, key << SHIFT)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def middle_of(low, high):
    """The mean, rounded down, without the sum low + high, which may be too large for an int32."""
    return (low & high) + ((low ^ high) >> 1)


@triton.jit
def weight_of(x, best, inverse_temperature):
    """exp((x - best) / T)."""
    return tl.exp2((x - best) * (inverse_temperature * LOG2_E))


@triton.jit
def flat(number, x, SIZE: tl.constexpr):
    """An int32 and a float32 tensor of SIZE elements as vectors. Their order is arbitrary, but the same for both.

    With any order allowed, elements stay in the registers where they are. To get the same order, both are packed into one tensor
    meanwhile."""
    both = (number.to(tl.int64) << 32) | (x.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF)
    both = as_vector(both, SIZE)
    return (both >> 32).to(tl.int32), both.to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def as_vector(x, SIZE: tl.constexpr):
    """A tensor of SIZE elements as a vector, in an arbitrary order: where possible, elements stay in the registers they are in."""
    return tl.reshape(x, [SIZE], can_reorder=True) if _ANY_ORDER else tl.reshape(x, [SIZE])


@triton.jit
def sample_and_contenders(memory, row):
    """Pointers to the sample and the contenders of a row."""
    return search_at(memory, row), search_at(memory, row) + _SAMPLES


@triton.jit
def leave_sample(x, tile, row, memory, SAMPLE_SHIFT: tl.constexpr, BLOCKS: tl.constexpr, BLOCK: tl.constexpr):
    """Leave every 2**SAMPLE_SHIFT-th logit of a tile x in the row's sample. The last tile may add -inf, beyond the vocabulary."""
    sample, _ = sample_and_contenders(memory, row)
    # A thread has 8 neighbours. If at most the first of them is chosen, the others are dropped here, to save masked stores.
    APART: tl.constexpr = 1 << (3 if SAMPLE_SHIFT > 3 else SAMPLE_SHIFT)
    x = tl.reshape(x, [BLOCK // LANES, BLOCKS, LANES // APART, APART])
    x = tl.max(tl.where(tl.arange(0, APART)[None, None, None, :] == 0, x, float("-inf")), axis=3)
    ids, x = flat(tile_ids(tile, BLOCKS, BLOCK, APART), x, BLOCKS * BLOCK // APART)
    tl.store(sample + (ids >> SAMPLE_SHIFT), x, mask=(ids & ((1 << SAMPLE_SHIFT) - 1)) == 0)


@triton.jit
def sampled_count(sample, samples, bound):
    """How many of a sample are at or above a bound."""
    lane = tl.arange(0, _SAMPLES)
    y = fetch(sample + lane, lane < samples, float("-inf"))
    return tl.sum(((y >= bound) & (lane < samples)).to(tl.int32), axis=0)


@triton.jit
def _seems_enough(y, bound, total, by_count, wanted, deviations, SCALE: tl.constexpr):
    """Whether there is enough at or above a bound, by a sample y, with a margin of `deviations` standard deviations."""
    above = y >= bound
    if by_count:
        count = tl.sum(above.to(tl.float32), axis=0)
        enough = count - deviations * (tl.sqrt(count) + 1) >= wanted / SCALE
    else:
        below = tl.where(above, 0.0, y)
        deviation = tl.sqrt(tl.sum(below * below, axis=0))
        enough = SCALE * (tl.sum(below, axis=0) + deviations * deviation) <= total - wanted
    return enough


@triton.jit
def sampled_bounds(sample, samples, inverse_temperature, best, total, by_count, wanted, lowest, highest,
                   SCALE: tl.constexpr, SHIFT: tl.constexpr):  # fmt: skip
    """Two keys, as far as a sample can tell: the largest with surely enough at or above it, and the largest with perhaps enough.

    Counts are estimated from the tokens at or above, where top-k cuts; masses from the tokens below, where no token is heavy."""
    lane = tl.arange(0, _SAMPLES)
    y = fetch(sample + lane, lane < samples, float("-inf"))
    y = tl.where(by_count, y, weight_of(y, best, inverse_temperature))  # has the same order
    surely, low = lowest, lowest
    for side in range(2):  # surely: with three deviations to spare; perhaps: with three deviations missing
        high = highest
        while high > low + 1:
            middle = middle_of(low, high)
            bound = key_logit(middle, SHIFT)
            bound = tl.where(by_count, bound, weight_of(bound, best, inverse_temperature))
            enough = _seems_enough(y, bound, total, by_count, wanted, 3 - 6 * side, SCALE)
            low, high = tl.where(enough, middle, low), tl.where(enough, high, middle)
        surely = tl.where(side == 0, low, surely)
    return surely, low


@triton.jit
def proven_bound(memory, row, best, inverse_temperature, by_count, wanted, lowest, highest, SHIFT: tl.constexpr,
                 NUM_GROUPS: tl.constexpr):  # fmt: skip
    """The largest key at or above which there certainly is enough, or `lowest`; and how many groups reach it, which are listed.

    What is certain of a block that reaches a bound: it has as many tokens there as it has groups that do; and the larger of two
    masses, that of the largest logits of these groups, and its own less the most that its tokens below the bound could have."""
    block, part = tl.arange(0, NUM_GROUPS // GROUPS), tl.arange(0, GROUPS)
    inside = block < memory[2]
    at = group_peaks_at(memory, row) + block[:, None] * GROUPS + part[None, :]
    peaks = fetch(at, inside[:, None], float("-inf"))
    peak = fetch(blocks_at(memory, BLOCK_PEAK, row) + block, inside, float("-inf"))
    mass = fetch(blocks_at(memory, BLOCK_MASS, row) + block, inside, 0.0)
    mass = tl.where(by_count, 0.0, mass * weight_of(peak, best, inverse_temperature))
    amounts = tl.where(by_count, 1.0, weight_of(peaks, best, inverse_temperature))
    low, high = lowest, highest
    while high > low + 1:
        middle = middle_of(low, high)
        bound = key_logit(middle, SHIFT)
        by_peaks = tl.sum(tl.where(peaks >= bound, amounts, 0.0), axis=1)
        by_mass = mass - weight_of(bound, best, inverse_temperature) * (GROUPS * LANES)
        enough = tl.sum(tl.where(peak >= bound, tl.maximum(by_peaks, by_mass), 0.0), axis=0) >= wanted
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle)
    return low, list_reaching(peaks, key_logit(low, SHIFT), memory, row)


def sample_shift(vocab_size: int) -> int:
    """The smallest shift for which a sample of every 2**shift-th token has at most SAMPLES tokens."""
    return max(0, (vocab_size - 1).bit_length() - SAMPLES.bit_length() + 1)


def key_shift(dtype: torch.dtype, biased: bool) -> int:
    """The low bits that a logit of this dtype does not have as a float32."""
    return 0 if biased else {torch.bfloat16: 16, torch.float16: 13}.get(dtype, 0)
