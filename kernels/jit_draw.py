"""Drawing one token from a row in the Triton kernels: argmax of log weight + Gumbel noise, by token or in two levels.

Tokens are compared by (x - best) / T + noise. At low temperature x / T is in the thousands, so rounding x / T + noise would wipe
out the noise.

- By token, every token has its own noise, so two rows that are close draw the same token as often as they can. The noise is
  computed for few tokens only: in a race (see philox.py) the largest noise of each group of 256 is known first, and with it most
  groups cannot win.
- In two levels, the blocks have noise, and then the tokens of the one block that won.
"""

import triton
import triton.language as tl

from .constants import Constant
from .jit_groups import (
    GROUPS,
    MOST_LISTED,
    STEP,
    fetch_group_peaks,
    group_ids,
    group_indices,
    group_peaks_at,
    list_groups,
    listed_groups,
    race_at,
    search_at,
)
from .jit_random import BLOCK_LEVEL, exponential, first_arrivals, gumbel, philox_words, race, race_bound
from .jit_rows import (
    BLOCK_MASS,
    BLOCK_PEAK,
    LANES,
    LOG2_E,
    NO_ID,
    ROW_LISTED,
    as_int,
    blocks_at,
    fetch,
    lowest_id,
    peak_or_0,
    pick,
    read,
    row_at,
    scaled_mass,
    tile_max,
)

_ROUNDING = Constant(0.001)  # more than all rounding errors of the values that a draw compares


@triton.jit
def _overtake(top, winner, rows, batch, column, ids, bound, best, inverse_temperature, noise):
    """The largest of `top` and of (x - best) / T + noise over the tokens `ids`, and its id. Each value is less than its `bound`.

    None of these tokens is the first of its group to arrive."""
    highest = tile_max(bound)
    while highest > top:
        token = lowest_id(bound, highest, ids)
        time, _ = first_arrivals(token // LANES, noise)
        later = exponential(philox_words(tl.zeros([1], tl.int32) + token // 4, noise))
        value = (read(rows, batch, column, token) - best) * inverse_temperature
        value -= tl.log(time + pick(later, tl.arange(0, 4) == token % 4))
        winner = tl.where((value > top) | ((value == top) & (token < winner)), token, winner)
        top = tl.maximum(top, value)
        bound = tl.where(ids == token, float("-inf"), bound)
        highest = tile_max(bound)
    return top, winner


@triton.jit
def _first_values(rows, batch, column, row, memory, threshold, best, inverse_temperature, noise,
                  NUM_GROUPS: tl.constexpr):  # fmt: skip
    """Of the token that arrives first in each group, [NUM_GROUPS] each: id, time of arrival, and value (x - best) / T + noise.

    The fourth result is the largest (x - best) / T of each group. It and the values are -inf below the threshold."""
    group = tl.arange(0, NUM_GROUPS)
    peak = fetch_group_peaks(memory, row, group)
    time, place = first_arrivals(group, noise)
    token = group * LANES + place
    x = read(rows, batch, column, token)
    most = tl.where((peak >= threshold) & (peak > float("-inf")), (peak - best) * inverse_temperature, float("-inf"))
    value = (x - best) * inverse_temperature - tl.log(time)
    return token, time, tl.where((x >= threshold) & (x > float("-inf")), value, float("-inf")), most


@triton.jit
def _list_contenders(bound, top, token, time, most, row, memory, COUNT: tl.constexpr):
    """List up to COUNT groups that may hold a value above `top`, with their first token, its time and the largest (x - best) / T.

    Returns how many are listed, and the bounds [NUM_GROUPS] with -inf for these."""
    chosen = bound > top
    count = tl.sum(chosen.to(tl.int32), axis=0)
    if count > COUNT:
        # The highest of them, without a sort: at least one from each of COUNT / 2 parts of the row.
        parts = tl.reshape(bound, [bound.shape[0] // (COUNT // 2), COUNT // 2])
        chosen = chosen & (bound >= tl.min(tl.max(parts, axis=0), axis=0))
        count = tl.minimum(tl.sum(chosen.to(tl.int32), axis=0), COUNT)
    place = tl.cumsum(chosen.to(tl.int32), axis=0) - 1
    chosen = chosen & (place < COUNT)
    at = race_at(memory, row) + place
    tl.debug_barrier()  # all threads have read the last list
    tl.store(as_int(at), token, mask=chosen)
    tl.store(at + MOST_LISTED, time, mask=chosen)
    tl.store(at + 2 * MOST_LISTED, most, mask=chosen)
    tl.debug_barrier()  # they are read by other threads than wrote them
    return count, tl.where(chosen, float("-inf"), bound)


@triton.jit
def _look_at_groups(top, winner, count, rows, batch, column, row, memory, threshold, best, inverse_temperature, noise,
                    BLOCKS: tl.constexpr):  # fmt: skip
    """The largest of `top` and of the values in the listed groups other than those of their first tokens, and its id.

    Of all their tokens the random words are computed, but only the logits of those are read that may win."""
    place = tl.arange(0, STEP)[:, None] * BLOCKS + tl.arange(0, BLOCKS)[None, :]
    at, listed = race_at(memory, row) + place, place < count
    first = tl.load(as_int(at), mask=listed, other=0)
    time = tl.load(at + MOST_LISTED, mask=listed, other=1.0)
    most = tl.load(at + 2 * MOST_LISTED, mask=listed, other=float("-inf"))
    group = first // LANES
    ids = group[:, :, None] * LANES + tl.arange(0, LANES)[None, None, :]
    bound = race_bound(time[:, :, None], philox_words(group_indices(group), noise))
    able = (most[:, :, None] + bound > top) & (ids != first[:, :, None])
    x = read(rows, batch, column, ids, able)
    kept = (x >= threshold) & (x > float("-inf"))
    bound = tl.where(kept, (x - best) * inverse_temperature + bound, float("-inf"))
    return _overtake(top, winner, rows, batch, column, ids, bound, best, inverse_temperature, noise)


@triton.jit
def draw_by_token(rows, batch, column, row, memory, threshold, best, inverse_temperature, noise, NUM_GROUPS: tl.constexpr,
                  BLOCKS: tl.constexpr):  # fmt: skip
    """The token of a row with the largest x / T + noise among those with x >= threshold; the lowest id if there are several.

    1. In each group the token that arrives first has the largest noise. Take the best value over these first tokens.
    2. It is mostly not the best of all. But few groups can have a better one: those whose largest logit with their largest noise
       would be better.
    3. Look at these groups, a few at a time. After each time fewer are left.
    """
    token, time, value, most = _first_values(
        rows, batch, column, row, memory, threshold, best, inverse_temperature, noise, NUM_GROUPS
    )
    top = tl.max(value, axis=0)
    winner = tl.min(tl.where(value == top, token, NO_ID), axis=0)
    count, bound = _list_contenders(most - tl.log(time) + _ROUNDING, top, token, time, most, row, memory, STEP * BLOCKS)
    while count > 0:
        top, winner = _look_at_groups(
            top, winner, count, rows, batch, column, row, memory, threshold, best, inverse_temperature, noise, BLOCKS
        )
        count, bound = _list_contenders(bound, top, token, time, most, row, memory, STEP * BLOCKS)
    return winner


@triton.jit
def block_masses(row, memory, NUM_BLOCKS: tl.constexpr):
    """Peak and mass of each block of a row [NUM_BLOCKS], as its first reading has left them."""
    block = tl.arange(0, NUM_BLOCKS)
    inside = block < memory[2]
    peak = fetch(blocks_at(memory, BLOCK_PEAK, row) + block, inside, float("-inf"))
    return peak, fetch(blocks_at(memory, BLOCK_MASS, row) + block, inside, 0.0)


@triton.jit
def kept_masses(rows, batch, column, row, memory, threshold, left_out, inverse_temperature, NUM_BLOCKS: tl.constexpr,
                NUM_GROUPS: tl.constexpr, BLOCKS: tl.constexpr):  # fmt: skip
    """As `block_masses`, over the tokens with x >= threshold other than `left_out`.

    Reads only the groups that have such tokens. Overwrites their largest logits, and what the search has left of the row, which is
    room for 3.6 million tokens."""
    masses_at, last = search_at(memory, row), memory[2] * GROUPS
    count = fetch(as_int(row_at(memory, ROW_LISTED, row)), True, 0)
    if count < 0:
        count = list_groups(memory, row, threshold, NUM_GROUPS)
    group = listed_groups(memory, row, 0, count, BLOCKS)
    x = read(rows, batch, column, group_ids(group))
    next_group = listed_groups(memory, row, BLOCKS, count, BLOCKS)
    for start in tl.range(2 * BLOCKS, count + 2 * BLOCKS, BLOCKS, disable_licm=True):  # as in find_threshold
        ahead = read(rows, batch, column, group_ids(next_group))  # on its way during what follows
        x = tl.where((x >= threshold) & (group_ids(group) != left_out), x, float("-inf"))
        peak = tl.max(x, axis=1)
        mass = tl.sum(tl.exp2((x - peak_or_0(peak)[:, None]) * (inverse_temperature * LOG2_E)), axis=1)
        tl.store(group_peaks_at(memory, row) + group, peak, mask=group < last)
        tl.store(masses_at + group, mass, mask=group < last)
        group, x = next_group, ahead
        next_group = listed_groups(memory, row, start, count, BLOCKS)
    tl.debug_barrier()  # they are read by other threads than wrote them
    every = tl.arange(0, NUM_BLOCKS)[:, None] * GROUPS + tl.arange(0, GROUPS)[None, :]
    peaks = fetch_group_peaks(memory, row, every)
    kept = (peaks >= threshold) & (peaks > float("-inf"))
    masses = fetch(masses_at + every, kept, 0.0)
    best = tl.max(tl.where(kept, peaks, float("-inf")), axis=1)
    return best, tl.sum(scaled_mass(peaks, masses, best[:, None], inverse_temperature), axis=1)


@triton.jit
def choose_block(log_mass, noise, NUM_BLOCKS: tl.constexpr):
    """The first level of a draw: a block by its log mass [NUM_BLOCKS], -inf where there is none; and whether there is any mass."""
    words = philox_words(tl.arange(0, NUM_BLOCKS // 4).to(tl.int64) + BLOCK_LEVEL, noise)
    top, block = tl.max(log_mass + gumbel(words), axis=0, return_indices=True)
    return block, top > float("-inf")


@triton.jit
def choose_token(log_weight, first, noise, BLOCK: tl.constexpr):
    """The second level: a token of the block from `first` on by its log weight [BLOCK]."""
    _, place = tl.max(log_weight + race(first, noise, BLOCK), axis=0, return_indices=True)
    return first + place


@triton.jit
def draw_in_two_levels(
    rows, batch, column, peak, mass, threshold, left_out, inverse_temperature, noise, BLOCK: tl.constexpr
):
    """A token drawn from a row with these peaks and masses of blocks [NUM_BLOCKS], and whether there is any. Reads one block."""
    best = peak_or_0(tl.max(peak, axis=0))
    log_mass = tl.where(mass > 0, (peak - best) * inverse_temperature + tl.log(mass), float("-inf"))
    chosen, found = choose_block(log_mass, noise, mass.shape[0])
    first = chosen * BLOCK
    ids = first + tl.arange(0, BLOCK)
    x = read(rows, batch, column, ids)
    x = tl.where((x >= threshold) & (ids != left_out), x, float("-inf"))
    # Any logit near the largest will do to keep the differences exact.
    near = tl.max(tl.where(tl.arange(0, mass.shape[0]) == chosen, peak, float("-inf")), axis=0)
    return choose_token((x - peak_or_0(near)) * inverse_temperature, first, noise, BLOCK), found
