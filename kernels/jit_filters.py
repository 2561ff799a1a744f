"""top-k, top-p and min-p in the Triton kernels: a search for the smallest logit that stays, without a sort.

An *amount* decides which logits stay: under top-k the number of logits that are at least t, under top-p their mass. The threshold
is the largest t at which the amount at or above t is enough: at least k, or p times the mass that top-k left.

1. The first reading of the row leaves the largest logit of each group of 256 tokens, and the mass of each block of 1024. If k
   groups reach t, so do k tokens; and those largest logits have a mass, too. So there are bounds at or above which there certainly
   is enough. The largest of them is found by halving, without any reading of the row.
2. A *sweep* reads the groups that reach that bound, and collects all logits at or above it. It also sums up the mass that min-p
   leaves.
3. The first reading also leaves a sample, every n-th token. If by that there is no room for all these logits (CONTENDERS), the
   sample gives two other bounds that the threshold lies between, three standard deviations to either side. The sweep then checks
   exactly that it does, and collects the logits between.
4. The threshold is found by halving among the logits collected. What is halved are keys: integers in the order of the logits.

If the sample misled, or there is no room for the logits between (CONTENDERS), the bracket is halved and the row is swept again. A
row of at most SAMPLES tokens is its own sample: top-k and top-p need no sweep there, min-p one where it decides.

So a filtered row is read once, and mostly at most once more. Only a top-p after a top-k of thousands takes yet another sweep. All
but the first reading are of the groups that hold what may stay: in peaked rows a few in a hundred.
"""

import triton
import triton.language as tl

from .constants import Constant
from .jit_bounds import (
    as_vector,
    flat,
    key_logit,
    logit_key,
    middle_of,
    proven_bound,
    sample_and_contenders,
    sampled_bounds,
    sampled_count,
    weight_of,
)
from .jit_groups import CONTENDERS, SAMPLES, list_groups, read_listed
from .jit_rows import LANES, vocab_size_of

# Groups that may reach a bound without a look at how many of their tokens do, which mostly are few.
_FEW = Constant(2 * CONTENDERS // LANES.value)
_AT_ONCE = Constant(256)  # contenders
_CONTENDERS = Constant(CONTENDERS)
_SAMPLES = Constant(SAMPLES)


@triton.jit
def _in_eights(x):
    """The sums over 8 neighbours of x [BLOCKS, 256], which a thread has: [BLOCKS, 32]."""
    return tl.sum(tl.reshape(x, [x.shape[0], LANES // 8, 8]), axis=2)


@triton.jit
def _sum(x):
    """The sum of all elements of x [BLOCKS, N]."""
    return tl.sum(tl.sum(x, axis=1), axis=0)


@triton.jit
def _sweep(rows, batch, column, row, memory, count, low, high, cut_off, best, inverse_temperature, SHIFT: tl.constexpr,
           BLOCKS: tl.constexpr):  # fmt: skip
    """One reading of the `count` listed groups, which are those that reach `low`. low and high are keys.

    Returns count and mass of the logits at or above `high`, count [BLOCKS] and mass of those in [low, high), and the mass at or
    above the logit `cut_off`, if there is one (too little where it is below `low`). The logits in [low, high) are left as
    contenders, each warp's by themselves, as far as there is room."""
    ROOM: tl.constexpr = _CONTENDERS // BLOCKS
    least, most = key_logit(low, SHIFT), key_logit(high, SHIFT)
    _, contenders = sample_and_contenders(memory, row)
    begin = tl.arange(0, BLOCKS)[:, None] * ROOM
    found, over = tl.zeros([BLOCKS], tl.int32), tl.zeros([BLOCKS, LANES // 8], tl.int32)
    over_mass, within_mass = tl.zeros([BLOCKS, LANES // 8], tl.float32), tl.zeros([BLOCKS, LANES // 8], tl.float32)
    uncut_mass = tl.zeros([BLOCKS, LANES // 8], tl.float32)
    x = read_listed(rows, batch, column, memory, row, 0, count, BLOCKS)
    ahead = read_listed(rows, batch, column, memory, row, BLOCKS, count, BLOCKS)
    for start in tl.range(2 * BLOCKS, count + 2 * BLOCKS, BLOCKS, disable_licm=True):  # as in find_threshold
        beyond = read_listed(rows, batch, column, memory, row, start, count, BLOCKS)  # on its way during what follows
        above = x >= most
        within = (x >= least) & (x < most) & (x > float("-inf"))
        chosen = within.to(tl.int32)
        at = found[:, None] + tl.cumsum(chosen, axis=1) - chosen
        at, value = flat(tl.where(within & (at < ROOM), begin + at, _CONTENDERS), x, BLOCKS * LANES)
        tl.store(contenders + at, value, mask=at < _CONTENDERS)
        found += tl.sum(chosen, axis=1)
        over += _in_eights(above.to(tl.int32))
        weight = weight_of(x, best, inverse_temperature)
        over_mass += _in_eights(tl.where(above, weight, 0.0))
        within_mass += _in_eights(tl.where(within, weight, 0.0))
        if cut_off is not None:
            uncut_mass += _in_eights(tl.where(x >= cut_off, weight, 0.0))
        x, ahead = ahead, beyond
    tl.debug_barrier()  # the contenders are read by other threads than wrote them
    return _sum(over), _sum(over_mass), found, _sum(within_mass), _sum(uncut_mass)


@triton.jit
def _collect(rows, batch, column, row, memory, cut_off, best, total, inverse_temperature, by_count, wanted, lowest, highest,
             leave_top, SCALE: tl.constexpr, SHIFT: tl.constexpr, NUM_GROUPS: tl.constexpr, BLOCKS: tl.constexpr):  # fmt: skip
    """Sweep until [low, high) is known to hold the threshold, and its logits are the contenders.

    Unless `leave_top`, `high` is above all logits if possible, so that the contenders are all logits from `low` on. `wanted` is a
    number of tokens if `by_count`, else a mass."""
    floor, ceiling = lowest, highest  # at or above floor there is enough, at or above ceiling there is not
    if not by_count:
        # All tokens that weigh no more than `light` may be left out. By rounding, more may be wanted than there is; the logarithm
        # of a negative number would make the search endless.
        light = tl.maximum(total - wanted, 0.0) / (2 * vocab_size_of(rows))
        floor = tl.maximum(lowest, logit_key(best + tl.log(light) / inverse_temperature, SHIFT))
    low, count = proven_bound(
        memory, row, best, inverse_temperature, by_count, wanted, floor, highest, SHIFT, NUM_GROUPS
    )
    if by_count:
        floor = low
    high = highest
    sample, _ = sample_and_contenders(memory, row)
    samples = tl.cdiv(vocab_size_of(rows), 4 * SCALE) * 4  # a thread reads four
    too_many = count > _FEW
    if too_many:
        too_many = SCALE * sampled_count(sample, samples, key_logit(low, SHIFT)) > _CONTENDERS // 2
    if too_many:
        low, perhaps = sampled_bounds(
            sample, samples, inverse_temperature, best, total, by_count, wanted, floor, highest, SCALE, SHIFT
        )  # fmt: skip
        high = tl.where(leave_top, tl.minimum(tl.maximum(perhaps, low) + 1, highest), highest)
        count = tl.full([], -1, tl.int32)
    over, found = tl.zeros([], tl.int32), tl.zeros([BLOCKS], tl.int32)
    over_mass, within_mass = tl.zeros([], tl.float32), tl.zeros([], tl.float32)
    uncut_mass = tl.full([], -1.0, tl.float32)  # not known
    searching = low < high
    while searching:
        if count < 0:
            count = list_groups(memory, row, key_logit(low, SHIFT), NUM_GROUPS)
        over, over_mass, found, within_mass, uncut_mass = _sweep(
            rows, batch, column, row, memory, count, low, high, cut_off, best, inverse_temperature, SHIFT, BLOCKS
        )
        more = tl.where(by_count, over.to(tl.float32), over_mass)
        within = tl.where(by_count, tl.sum(found, axis=0).to(tl.float32), within_mass)
        too_low = (more >= wanted) & (high < ceiling)
        too_high = (too_low == 0) & (more + within < wanted) & (low > floor)
        floor = tl.where(too_low, high, tl.where(too_high, floor, low))
        ceiling = tl.where(too_low, ceiling, tl.where(too_high, low, high))
        searching = too_low | too_high | ((tl.max(found, axis=0) > _CONTENDERS // BLOCKS) & (high > low + 1))
        count = tl.where(searching, -1, count)
        low = tl.where(searching & (ceiling > floor + 1), middle_of(floor, ceiling), floor)
        high = ceiling
    return low, high, over, over_mass, found, within_mass, uncut_mass, count


@triton.jit
def _halve(values, found, low, high, over, over_mass, within_mass, best, inverse_temperature, by_count, wanted,
           ROOM: tl.constexpr, SHIFT: tl.constexpr):  # fmt: skip
    """The largest key in [low, high) at or above which there is enough, and the mass at or above it.

    The values are in lists [BLOCKS, ROOM], of which `found` [BLOCKS] count. The first of each, mostly all, stay in registers."""
    EACH: tl.constexpr = _AT_ONCE // found.shape[0]  # values of a list at once
    at = values + (tl.arange(0, found.shape[0]) * ROOM)[:, None] + tl.arange(0, EACH)[None, :]
    left = found[:, None] - tl.arange(0, EACH)[None, :]
    most = tl.max(found, axis=0)
    x = as_vector(tl.load(at, mask=left > 0, other=float("-inf")), _AT_ONCE)
    # A number of tokens, too, is exact in float32.
    amount = tl.where(by_count, 1.0, weight_of(x, best, inverse_temperature))
    more, lowest = tl.where(by_count, over.to(tl.float32), over_mass), low
    while high > low + 1:
        middle = middle_of(low, high)
        least = key_logit(middle, SHIFT)
        amounts = tl.where(x >= least, amount, 0.0)
        for start in range(EACH, most, EACH):
            y = as_vector(tl.load(at + start, mask=left > start, other=float("-inf")), _AT_ONCE)
            amounts += tl.where(y >= least, tl.where(by_count, 1.0, weight_of(y, best, inverse_temperature)), 0.0)
        enough = more + tl.sum(amounts, axis=0) >= wanted
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle)
    mass = over_mass + within_mass
    if low > lowest:
        least = key_logit(low, SHIFT)
        masses = tl.where(x >= least, weight_of(x, best, inverse_temperature), 0.0)
        for start in range(EACH, most, EACH):
            y = as_vector(tl.load(at + start, mask=left > start, other=float("-inf")), _AT_ONCE)
            masses += tl.where(y >= least, weight_of(y, best, inverse_temperature), 0.0)
        mass = over_mass + tl.sum(masses, axis=0)
    return low, mass


@triton.jit
def _mass_from(rows, batch, column, row, memory, count, threshold, best, inverse_temperature, BLOCKS: tl.constexpr):
    """sum of exp((x - best) / T) over x >= threshold, in one reading of the `count` listed groups."""
    total = tl.zeros([BLOCKS], tl.float32)
    for start in range(0, count, BLOCKS):
        x = read_listed(rows, batch, column, memory, row, start, count, BLOCKS)
        total += tl.sum(tl.where(x >= threshold, weight_of(x, best, inverse_temperature), 0.0), axis=1)
    return tl.sum(total, axis=0)


@triton.jit
def find_threshold(
    rows, batch, column, row, memory,
    best, total, inverse_temperature,  # of the whole row; best is finite
    filters,  # (top_k, top_p, min_p), [B] each or None
    SHIFT: tl.constexpr, SAMPLE_SHIFT: tl.constexpr, NUM_GROUPS: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """The smallest logit that the filters keep; sum of exp((x - best) / T) over what they keep; and how many groups are listed,
    among which are all that hold what they keep, or -1."""
    top_k, top_p, min_p = filters
    vocab_size = vocab_size_of(rows)
    k, p, m = tl.zeros([], tl.int32), tl.full([], 1.0, tl.float32), tl.zeros([], tl.float32)
    if top_k is not None:
        k = tl.load(top_k + batch)
        k = tl.where((k > 0) & (k < vocab_size), k, 0).to(tl.int32)
    if top_p is not None:
        p = tl.load(top_p + batch).to(tl.float32)
    if min_p is not None:
        m = tl.load(min_p + batch).to(tl.float32)

    threshold, mass = tl.full([], float("-inf"), tl.float32), total
    lowest, highest = logit_key(threshold, SHIFT), logit_key(best, SHIFT) + 1
    cut_off, uncut_mass = None, tl.full([], -1.0, tl.float32)
    listed = tl.full([], -1, tl.int32)
    if min_p is not None:
        cut_off = best + tl.div_rn(tl.log(tl.where(m > 0, m, 1.0)), inverse_temperature)
        cut_off = tl.where(m > 0, cut_off, float("-inf"))
    if (k > 0) | (p < 1):
        whole: tl.constexpr = SAMPLE_SHIFT == 0
        scale: tl.constexpr = 1 << SAMPLE_SHIFT
        sample, contenders = sample_and_contenders(memory, row)
        ROOM: tl.constexpr = (_SAMPLES if whole else _CONTENDERS) // BLOCKS
        values = contenders
        if whole:
            values = sample
        # `values` holds all logits in [low, high), in lists of `found` [BLOCKS] each. There are `over` more above.
        low, over = lowest, tl.zeros([], tl.int32)
        found = tl.minimum(tl.maximum(vocab_size.to(tl.int32) - tl.arange(0, BLOCKS) * ROOM, 0), ROOM)
        # What both stages use, such as the addresses of a thread's parts, would be worked out before the loop and hold registers
        # throughout: some ten of 128. So nothing moves out of it.
        for stage in tl.range(2, disable_licm=True):  # top-k, top-p
            by_count = stage == 0
            if tl.where(by_count, k > 0, p < 1):
                wanted = tl.where(by_count, k.to(tl.float32), p * mass)
                high, over_mass, within_mass = highest, tl.zeros([], tl.float32), mass
                # top-p goes on among the logits that top-k has collected, if these are all that it left.
                collected = (by_count == 0) & (k > 0) & (over == 0) & (tl.max(found, axis=0) <= ROOM)
                if not (collected | whole):
                    # scale * deviation**2 logits may be at or above the lower bound: the sample's count there may be 3 deviations
                    # above k / scale, and the row's number 3 deviations above that.
                    deviation = 3 + tl.sqrt(wanted / scale + 5.25)
                    leave_top = (p >= 1) | (by_count == 0) | (scale * deviation * deviation > _CONTENDERS)
                    low, high, over, over_mass, found, within_mass, uncut_mass, listed = _collect(
                        rows, batch, column, row, memory, cut_off, best, total, inverse_temperature, by_count, wanted, low,
                        highest, leave_top, scale, SHIFT, NUM_GROUPS, BLOCKS,
                    )  # fmt: skip
                low, mass = _halve(
                    values, found, low, high, over, over_mass, within_mass, best, inverse_temperature, by_count, wanted,
                    ROOM, SHIFT
                )  # fmt: skip
        threshold = key_logit(low, SHIFT)
    if min_p is not None:
        if cut_off > threshold:
            threshold, mass = cut_off, uncut_mass
            if mass < 0:
                listed = list_groups(memory, row, threshold, NUM_GROUPS)
                mass = _mass_from(
                    rows, batch, column, row, memory, listed, threshold, best, inverse_temperature, BLOCKS
                )
    return threshold, mass, listed


@triton.jit
def filter_row(
    rows, batch, column, row, memory, threshold, best, total, inverse_temperature, greedy, filters,
    SHIFT: tl.constexpr, SAMPLE_SHIFT: tl.constexpr, NUM_GROUPS: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """`find_threshold` for any row. Greedy rows and rows without a distribution keep `threshold` and `total`, unfiltered."""
    mass, listed = total, tl.full([], -1, tl.int32)
    if (tl.abs(best) < float("inf")) & (not greedy):
        threshold, mass, listed = find_threshold(
            rows, batch, column, row, memory, best, total, inverse_temperature, filters, SHIFT, SAMPLE_SHIFT, NUM_GROUPS, BLOCKS,
        )  # fmt: skip
    return threshold, mass, listed
