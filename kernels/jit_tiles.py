"""The first reading of a row that has work of its own, as under filters or where it draws by token: what it leaves for that.

Several tiles to a program, if there are many programs. They take more registers than others, for the work at a row's end, so fewer
run at once. Each therefore reads a tile while it works on the one before.
"""

import triton
import triton.language as tl

from .jit_bounds import leave_sample
from .jit_groups import leave_group_peaks
from .jit_rows import leave_stats, load_temperature, read_raw, tile_ids, vocab_size_of, without_nan


@triton.jit
def leave_tiles(rows, batch, column, row, memory, temperature, first, tiles, want_argmax, FILTERED: tl.constexpr,
                MASSES: tl.constexpr, SAMPLE_SHIFT: tl.constexpr, BLOCKS: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Leave the stats of the blocks of `tiles` tiles from tile `first` on, as far as there are so many (see `leave_stats`), the
    largest logits of their groups, and if FILTERED their part of the sample. Returns what `load_temperature` does.

    want_argmax: leave the argmax, too, if the row is not greedy; if it is, it is left anyway."""
    beyond = tl.cdiv(vocab_size_of(rows), BLOCKS * BLOCK)
    end = tl.minimum(first + tiles, beyond)
    # The logits are loaded first, so that everything else overlaps with the loads.
    x = read_raw(rows, batch, column, tile_ids(first, BLOCKS, BLOCK))
    inverse_temperature, greedy = load_temperature(temperature, batch)
    for tile in range(first, end):
        ahead = read_raw(rows, batch, column, tile_ids(tl.where(tile + 1 < end, tile + 1, beyond), BLOCKS, BLOCK))
        if not MASSES:
            x = without_nan(x)
        group_peaks, ids = leave_group_peaks(x, tile, row, memory, BLOCKS), tile_ids(tile, BLOCKS, BLOCK)
        leave_stats(x, group_peaks, ids, tile, row, memory, inverse_temperature, want_argmax | greedy, MASSES, BLOCKS)
        if FILTERED:
            leave_sample(x, tile, row, memory, SAMPLE_SHIFT, BLOCKS, BLOCK)
        x = ahead
    return inverse_temperature, greedy
