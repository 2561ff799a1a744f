"""Drawing one token from a row in the Triton kernels: argmax of log weight + Gumbel noise, by token or in two levels.

Two tokens are compared by (x - best) / T + noise: at low temperature x / T is in the thousands, and rounding the sum
x / T + noise would wipe out the noise.

Of most tokens the noise itself is never worked out: an upper bound of it, a fourth of the work, tells that they do not win.
"""

import triton
import triton.language as tl

from .jit_groups import STEP, fetch_list, group_ids, group_indices, leave_list, list_groups, listed_groups
from .jit_random import BLOCK_LEVEL, gumbel, gumbel_bound, philox_words
from .jit_rows import (
    BLOCK_MASS,
    BLOCK_PEAK,
    NO_ID,
    PEAK,
    VALUE,
    WINNER,
    as_int,
    block_ids,
    blocks_at,
    fetch,
    finite,
    leave_masses,
    lowest_id,
    pick,
    read,
    tile_ids,
    tile_indices,
    tile_max,
    tiles_at,
)


@triton.jit
def _overtake(top, winner, rows, batch, column, ids, bound, best, inverse_temperature, noise):
    """The largest of `top` and (x - best) / T + noise over a tile, whose values are less than `bound`; and its id."""
    highest = tile_max(bound)
    while highest > top:
        token = lowest_id(bound, highest, ids)
        four = gumbel(philox_words(tl.zeros([1], tl.int32) + token // 4, noise))
        value = (read(rows, batch, column, token) - best) * inverse_temperature
        value += pick(four, tl.arange(0, 4) == token % 4)
        winner = tl.where((value > top) | ((value == top) & (token < winner)), token, winner)
        top = tl.maximum(top, value)
        bound = tl.where(ids == token, float("-inf"), bound)
        highest = tile_max(bound)
    return top, winner


@triton.jit
def leave_winner(x, peak, rows, batch, column, tile, row, memory, inverse_temperature, noise, BLOCKS: tl.constexpr,
                 BLOCK: tl.constexpr):  # fmt: skip
    """Leave the largest (x - peak) / T + noise of a tile x and its id, with noise for every token."""
    words = philox_words(tile_indices(tile, BLOCKS, BLOCK), noise)
    bound = (x - finite(peak)) * inverse_temperature + gumbel_bound(words)
    value, winner = _overtake(
        tl.full([], float("-inf"), tl.float32), tl.zeros([], tl.int32), rows, batch, column, tile_ids(tile, BLOCKS, BLOCK),
        bound, finite(peak), inverse_temperature, noise,
    )  # fmt: skip
    tl.store(tiles_at(memory, VALUE, row) + tile, value)
    tl.store(as_int(tiles_at(memory, WINNER, row)) + tile, winner)


@triton.jit
def fetch_winner(row, memory, best, inverse_temperature, NUM_TILES: tl.constexpr):
    """The winner of a whole row, from those of its tiles."""
    tile = tl.arange(0, NUM_TILES)
    inside = tile < memory[2]
    peak = fetch(tiles_at(memory, PEAK, row) + tile, inside, float("-inf"))
    value = fetch(tiles_at(memory, VALUE, row) + tile, inside, float("-inf"))
    winner = fetch(as_int(tiles_at(memory, WINNER, row)) + tile, inside, NO_ID)
    value += tl.where(value > float("-inf"), (peak - best) * inverse_temperature, 0.0)
    return tl.min(tl.where(value == tl.max(value, axis=0), winner, NO_ID), axis=0)


@triton.jit
def draw_kept(rows, batch, column, row, memory, threshold, best, inverse_temperature, noise, NUM_GROUPS: tl.constexpr,
              BLOCKS: tl.constexpr):  # fmt: skip
    """The token of a row with the largest x / T + noise among those with x >= threshold. Reads the groups that have any."""
    top, winner = tl.full([], float("-inf"), tl.float32), tl.zeros([], tl.int32)
    count = list_groups(memory, row, threshold, NUM_GROUPS)
    for start in range(0, count, STEP * BLOCKS):
        group = listed_groups(rows, memory, row, start, count, BLOCKS)
        ids = group_ids(group)
        x = read(rows, batch, column, ids)
        bound = (x - best) * inverse_temperature + gumbel_bound(philox_words(group_indices(group), noise))
        bound = tl.where(x >= threshold, bound, float("-inf"))
        top, winner = _overtake(top, winner, rows, batch, column, ids, bound, best, inverse_temperature, noise)
    return winner


@triton.jit
def leave_kept_masses(rows, batch, column, row, memory, threshold, left_out, inverse_temperature, NUM_BLOCKS: tl.constexpr,
                      BLOCKS: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Leave peak and mass of each block of a row, of tokens with x >= threshold other than `left_out`. Reads the blocks that
    have any."""
    every = tl.arange(0, NUM_BLOCKS)
    peaks, masses = blocks_at(memory, BLOCK_PEAK, row) + every, blocks_at(memory, BLOCK_MASS, row) + every
    peak = fetch(peaks, every < memory[3], float("-inf"))
    chosen = (peak >= threshold) & (peak > float("-inf"))
    count = leave_list(memory, row, chosen)  # its barriers: all threads have read what is now overwritten
    tl.store(peaks, float("-inf"), mask=(every < memory[3]) & (chosen == 0))
    tl.store(masses, 0.0, mask=(every < memory[3]) & (chosen == 0))
    for start in range(0, count, BLOCKS):
        block = fetch_list(memory, row, start + tl.arange(0, BLOCKS), count, memory[3])
        ids = block_ids(block, BLOCK)
        x = read(rows, batch, column, ids)
        x = tl.where((x >= threshold) & (ids != left_out), x, float("-inf"))
        leave_masses(x, None, block, row, memory, inverse_temperature)
    tl.debug_barrier()  # they are read by other threads than wrote them


@triton.jit
def choose_block(log_mass, noise, NUM_BLOCKS: tl.constexpr):
    """The first level of a draw: a block by its log mass [NUM_BLOCKS], -inf where there is none."""
    words = philox_words(tl.arange(0, NUM_BLOCKS // 4).to(tl.int64) + BLOCK_LEVEL, noise)
    value = log_mass + gumbel(words)
    return tl.min(tl.where(value == tl.max(value, axis=0), tl.arange(0, NUM_BLOCKS), NO_ID), axis=0)


@triton.jit
def choose_token(log_weight, ids, first, noise, BLOCK: tl.constexpr):
    """The second level: a token of the block from `first` on by its log weight [BLOCK]."""
    value = log_weight + gumbel(philox_words(first // 4 + tl.arange(0, BLOCK // 4), noise))
    return tl.min(tl.where(value == tl.max(value, axis=0), ids, NO_ID), axis=0)


@triton.jit
def draw_in_two_levels(rows, batch, column, row, memory, threshold, left_out, inverse_temperature, noise,
                       NUM_BLOCKS: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """A token of a row whose blocks have left their masses, and whether there is any. Reads one block."""
    block = tl.arange(0, NUM_BLOCKS)
    inside = block < memory[3]
    peak = fetch(blocks_at(memory, BLOCK_PEAK, row) + block, inside, float("-inf"))
    mass = fetch(blocks_at(memory, BLOCK_MASS, row) + block, inside, 0.0)
    best = finite(tl.max(peak, axis=0))
    log_mass = tl.where(mass > 0, (peak - best) * inverse_temperature + tl.log(mass), float("-inf"))
    first = choose_block(log_mass, noise, NUM_BLOCKS) * BLOCK
    ids = first + tl.arange(0, BLOCK)
    x = read(rows, batch, column, ids)
    x = tl.where((x >= threshold) & (ids != left_out), x, float("-inf"))
    weight = (x - finite(tl.max(x, axis=0))) * inverse_temperature
    return choose_token(weight, ids, first, noise, BLOCK), tl.max(log_mass, axis=0) > float("-inf")
