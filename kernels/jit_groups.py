"""Groups of 256 tokens in the Triton kernels: which parts of a row hold anything at or above a bound.

Few groups hold the tokens that filters keep of a language model's distribution, or that may win a draw. So the first reading of
such a row leaves the largest logit of each group. Whatever reads the row again lists the groups that reach its bound, and reads
only those.

BLOCKS groups are read at once, as many as a tile has blocks. A warp then has whole groups, and need not wait for others on its way
through the list.
"""

import triton
import triton.language as tl

from . import philox
from .constants import Constant
from .jit_rows import BLOCK, LANES, TILE_BLOCKS, as_int, fetch, read, rest_at

GROUPS = Constant(BLOCK // LANES.value)  # of a block
# float32 numbers of scratch memory per row that the search for a threshold needs in addition, 56 KiB together. They come first, so
# that all of it is at fixed distances from one pointer. A sample has at least half of SAMPLES tokens. CONTENDERS must hold the
# logits between its two bounds: for top-p at most 10,000 of 262,144 if the logits are normally distributed.
SAMPLES, CONTENDERS = 4096, 10240
assert LANES.value == philox.GROUP  # groups of logits and groups of a race are the same
SEARCH_ROOM = Constant(SAMPLES + CONTENDERS)
STEP = Constant(2)  # STEP * BLOCKS groups of a race are read at once: half as many tokens as a tile has
MOST_LISTED = Constant(STEP.value * TILE_BLOCKS)  # groups of a race that are listed at once


@triton.jit
def search_at(memory, row):
    """Pointer to a row's memory for its sample and its contenders."""
    return rest_at(memory) + row * (memory[2] * (2 * GROUPS) + 3 * MOST_LISTED + memory[3])


@triton.jit
def group_peaks_at(memory, row):
    """Pointer to the largest logits of the groups of a row, float32 [GROUPS * blocks of a row]."""
    return search_at(memory, row) + memory[3]


@triton.jit
def race_at(memory, row):
    """Pointer to the list of groups of a race: three numbers for each of MOST_LISTED groups."""
    return group_peaks_at(memory, row) + memory[2] * (2 * GROUPS)


def group_floats(num_blocks: int, filtered: bool) -> int:
    """float32 numbers of scratch memory per row that groups take, and filters."""
    return (SEARCH_ROOM.value if filtered else 0) + 2 * GROUPS.value * num_blocks + 3 * MOST_LISTED.value


@triton.jit
def leave_group_peaks(x, tile, row, memory, BLOCKS: tl.constexpr):
    """Leave the largest logit of each group of a tile x, and return them, [GROUPS, BLOCKS]."""
    block, part = tile * BLOCKS + tl.arange(0, BLOCKS)[None, :], tl.arange(0, GROUPS)[:, None]
    peaks = tl.max(x, axis=2)
    tl.store(group_peaks_at(memory, row) + block * GROUPS + part, peaks, mask=block < memory[2])
    return peaks


@triton.jit
def fetch_group_peaks(memory, row, group):
    """The largest logits of groups [...] of a row, float32; -inf after the last group."""
    return fetch(group_peaks_at(memory, row) + group, group < memory[2] * GROUPS, float("-inf"))


@triton.jit
def _list_at(memory, row):
    """Pointer to the list of groups of a row that was made last, int32 [GROUPS * blocks of a row]."""
    return as_int(group_peaks_at(memory, row) + memory[2] * GROUPS)


@triton.jit
def list_groups(memory, row, bound, NUM_GROUPS: tl.constexpr):
    """List the groups of a row that have a logit >= bound other than -inf, and return their number. Overwrites the last list."""
    block, part = tl.arange(0, NUM_GROUPS // GROUPS)[:, None], tl.arange(0, GROUPS)[None, :]
    return list_reaching(fetch_group_peaks(memory, row, block * GROUPS + part), bound, memory, row)


@triton.jit
def list_reaching(peaks, bound, memory, row):
    """As `list_groups`, from the largest logits of all groups [blocks, GROUPS]."""
    group = tl.arange(0, peaks.shape[0])[:, None] * GROUPS + tl.arange(0, GROUPS)[None, :]
    chosen = ((peaks >= bound) & (peaks > float("-inf"))).to(tl.int32)
    of_block = tl.sum(chosen, axis=1)
    before = tl.cumsum(of_block, axis=0) - of_block
    place = before[:, None] + tl.cumsum(chosen, axis=1) - chosen
    tl.debug_barrier()  # all threads have read the last list
    tl.store(_list_at(memory, row) + place, group, mask=chosen != 0)
    tl.debug_barrier()  # they are read by other threads than wrote them
    return tl.sum(of_block, axis=0)


@triton.jit
def listed_groups(memory, row, start, count, BLOCKS: tl.constexpr):
    """Listed groups from place `start` of `count` on, read at once [BLOCKS]; after the last, a group beyond the vocabulary."""
    place = start + tl.arange(0, BLOCKS)
    return fetch(_list_at(memory, row) + place, place < count, memory[2] * GROUPS)


@triton.jit
def read_listed(rows, batch, column, memory, row, start, count, BLOCKS: tl.constexpr):
    """The logits [BLOCKS, 256] of `listed_groups`, -inf beyond the vocabulary."""
    return read(rows, batch, column, group_ids(listed_groups(memory, row, start, count, BLOCKS)))


@triton.jit
def group_ids(group):
    """Token ids of groups [BLOCKS]: [BLOCKS, 256]."""
    return group[:, None] * LANES + tl.arange(0, LANES)[None, :]


@triton.jit
def group_indices(group):
    """Random-number indices of groups [STEP, BLOCKS], four tokens to an index: [STEP, BLOCKS, 64]."""
    return group[:, :, None] * (LANES // 4) + tl.arange(0, LANES // 4)[None, None, :]
