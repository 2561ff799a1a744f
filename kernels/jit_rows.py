"""How the Triton kernels read a row of logits, and which stats of its blocks they leave for the last program of the row.

A row is cut into tiles of BLOCKS x BLOCK tokens. A program reads one (or, in jit_tiles.py, several) into registers, once. Of each
block of BLOCK = 1024 tokens it leaves these stats in scratch memory, as far as wanted:

    peak     the largest logit                          mass     sum of exp((x - peak) / T)
    argmax   its lowest id                              moment   sum of (x - peak) / T exp((x - peak) / T)

The program that arrives last knows the whole row from them: with best = the largest peak,
lse = best / T + log(sum over blocks of mass exp((peak - best) / T)). A draw in two levels chooses a block by the masses. Nothing
depends on which program arrives last, nor on how many tiles each has.

Tuples that the kernels pass on:

    rows    (logits, bias, mask, cu_logits, cu_adjust); bias and mask may be None. Each of the first three is a view of a tensor
            [B, W, V]: (pointer, vocabulary size, stride of batch, of row, of token).
            Packed rows are a view of [N, V] with a batch stride of 0: sequence b has the rows from cu[b] up to cu[b + 1].
            cu_logits is the cu of the logits, cu_adjust that of bias and mask; None: not packed. A missing row is -inf throughout.
    memory  (scratch, number of rows, blocks of a row, room for a search): where they leave their numbers.
    noise   (seed, position, origin, stream): what a random number is for, besides its index (jit_random.py).

A tile is held as [BLOCK / 256, BLOCKS, 256]. A warp then has whole blocks, with 8 neighbouring tokens to a thread, and computes
the stats of a block in registers and by shuffles.

max and argmax skip NaN in the interpreter but need not on a GPU. So a NaN must not decide anything: +inf as the largest logit
marks a row that has no distribution. `read` turns NaN into +inf. After `read_raw` the sum of exponentials shows a NaN.
"""

import triton
import triton.language as tl

from .constants import Constant
from .records import DRAW_BLOCK, GREEDY_BELOW

BLOCK = DRAW_BLOCK
LANES = Constant(256)  # neighbouring tokens of a block that a warp reads at once: 16 bytes a thread in bf16
LOG2_E = Constant(1.4426950408889634)
# This gives each thread 32 tokens: work that is done once per program then counts little, and four loads of 16 bytes in bf16
# are in flight at once.
TILE_BLOCKS, THREADS = 8, 256

# Fields of the scratch memory: for each block of each row, and for each row.
BLOCK_PEAK, BLOCK_MASS, BLOCK_ARGMAX, BLOCK_MOMENT, BLOCK_RESIDUAL_MASS = (Constant(i) for i in range(5))
BLOCK_FIELDS = Constant(5)
ROW_THRESHOLD, ROW_LSE, ROW_WINNER, ROW_ENTROPY, ROW_PREFIX, ROW_PENDING, ROW_LISTED = (Constant(i) for i in range(7))
ROW_FIELDS = Constant(7)
NO_ID = Constant(0x7FFFFFFF)
_GREEDY_BELOW = Constant(GREEDY_BELOW)
_TINY = Constant(2.0**-126)  # the smallest normal float32


@triton.jit
def read_raw(rows, batch, column, ids, wanted=None):
    """float32 logits of tokens `ids` >= 0, with bias added; -inf outside the mask, beyond the vocabulary, and where not `wanted`.

    They are of row `column` (int64, a scalar or of the shape of ids) of sequence `batch` (int64 scalar). ids of three dimensions
    ascend by 1 along the last, which the compiler is told: to leave some out, say which are wanted."""
    logits, bias, mask, cu_logits, cu_adjust = rows
    offsets = ids.to(tl.int64)
    # Without this hint Triton 3.6 distributes a tile's first axis over the warps, instead of its blocks.
    if len(ids.shape) == 3:
        offsets = tl.max_contiguous(offsets, [1, 2, ids.shape[2]])
    at, inside = _locate(logits, cu_logits, batch, column, ids, offsets)
    if wanted is not None:
        inside &= wanted
    x = tl.load(at, mask=inside, other=float("-inf")).to(tl.float32)
    if bias is not None:
        at, has_bias = _locate(bias, cu_adjust, batch, column, ids, offsets)
        x += tl.load(at, mask=inside & has_bias, other=0.0).to(tl.float32)
    if mask is not None:
        at, has_mask = _locate(mask, cu_adjust, batch, column, ids, offsets)
        x = tl.where(tl.load(at, mask=inside & has_mask, other=1) != 0, x, float("-inf"))
    return x


@triton.jit
def _locate(view, cu, batch, column, ids, offsets):
    """Pointers to tokens `ids` of a view's row, and which of them exist; `offsets` are the ids in int64."""
    values, size, stride_batch, stride_row, stride_token = view
    inside = ids < size
    if cu is not None:
        first, end = tl.load(cu + batch).to(tl.int64), tl.load(cu + batch + 1).to(tl.int64)
        column += first
        inside &= column < end
    return values + batch * stride_batch + column * stride_row + offsets * stride_token, inside


@triton.jit
def without_nan(x):
    """+inf in place of NaN."""
    return tl.where(x == x, x, float("inf"))


@triton.jit
def read(rows, batch, column, ids, wanted=None):
    """As `read_raw`, with +inf for NaN."""
    return without_nan(read_raw(rows, batch, column, ids, wanted))


@triton.jit
def vocab_size_of(rows):
    """V of the logits, behind which there is nothing to read."""
    return rows[0][1]


@triton.jit
def read_at(rows, batch, column, ids):
    """As `read`, with -inf for ids below 0."""
    return read(rows, batch, column, tl.where(ids < 0, vocab_size_of(rows), ids))


@triton.jit
def tile_ids(tile, BLOCKS: tl.constexpr, BLOCK: tl.constexpr, APART: tl.constexpr = 1):
    """Token ids of a tile in its layout, [BLOCK / 256, BLOCKS, 256], or of every APART-th of its tokens, [..., 256 / APART]."""
    block = tile * BLOCKS + tl.arange(0, BLOCKS)
    part, lane = tl.arange(0, BLOCK // LANES), tl.arange(0, LANES // APART) * APART
    return block[None, :, None] * BLOCK + part[:, None, None] * LANES + lane[None, None, :]


@triton.jit
def block_max(x):
    """The largest of each block of a tile: [BLOCKS]."""
    return tl.max(tl.max(x, axis=0), axis=1)


@triton.jit
def block_sum(x):
    """The sum of each block of a tile: [BLOCKS]."""
    return tl.sum(tl.sum(x, axis=0), axis=1)


@triton.jit
def tile_max(x):
    """The largest of a whole tile."""
    return tl.max(block_max(x), axis=0)


@triton.jit
def load_temperature(temperature, batch):
    """1/T, and whether the row is greedy. 1/T is 1 for greedy rows, and for all rows if there is no tensor.

    It is never 0, because 0 times a logit of -inf is NaN."""
    t = 1.0
    if temperature is not None:
        t = tl.load(temperature + batch).to(tl.float32)
    greedy = t < _GREEDY_BELOW
    inverse = tl.div_rn(1.0, tl.where(greedy, 1.0, t))
    return tl.where(inverse < _TINY, _TINY, inverse), greedy  # NaN stays NaN


@triton.jit
def peak_or_0(x):
    """0 in place of -inf, so that a difference from it is -inf and not NaN."""
    return tl.where(x == float("-inf"), 0.0, x)


@triton.jit
def block_mass(x, peak, inverse_temperature):
    """sum of exp((x - peak) / T) over each block of a tile x: [BLOCKS], as peak."""
    return block_sum(tl.exp2((x - peak_or_0(peak)[None, :, None]) * (inverse_temperature * LOG2_E)))


@triton.jit
def block_moment(x, peak, inverse_temperature):
    """sum of d exp(d) over each block of a tile x, d = (x - peak) / T: [BLOCKS], as peak."""
    return block_sum(moment_of((x - peak_or_0(peak)[None, :, None]) * inverse_temperature))


@triton.jit
def moment_of(d):
    """d exp(d), 0 where d = -inf."""
    return tl.where(d > float("-inf"), d * tl.exp(d), 0.0)


@triton.jit
def lowest_id(value, top, ids):
    """The lowest id of a tile whose value is `top`."""
    return tl.min(tl.min(tl.min(tl.where(value == top, ids, NO_ID), axis=0), axis=1), axis=0)


@triton.jit
def scaled_mass(peak, mass, best, inverse_temperature):
    """mass exp((peak - best) / T) of blocks."""
    return tl.where(mass > 0, mass * tl.exp((peak - best) * inverse_temperature), 0.0)


@triton.jit
def blocks_at(memory, FIELD: tl.constexpr, row):
    """Pointer to a float32 field of the blocks of a row."""
    scratch, num_rows, num_blocks, _ = memory
    return scratch + (FIELD * num_rows + row) * num_blocks


@triton.jit
def row_at(memory, FIELD: tl.constexpr, row):
    """Pointer to a float32 field of a row."""
    scratch, num_rows, num_blocks, _ = memory
    return scratch + (BLOCK_FIELDS * num_blocks + FIELD) * num_rows + row


@triton.jit
def rest_at(memory):
    """Pointer to the memory after all fields, aligned to 16 bytes."""
    scratch, num_rows, num_blocks, _ = memory
    return scratch + ((BLOCK_FIELDS * num_blocks + ROW_FIELDS) * num_rows + 3) // 4 * 4


def floats_per_row(num_blocks: int) -> int:
    """float32 numbers of scratch memory that the fields take per row."""
    return BLOCK_FIELDS.value * num_blocks + ROW_FIELDS.value


@triton.jit
def fetch(pointer, mask, other):
    """Load what other programs have left, bypassing the L1 cache of this processor."""
    return tl.load(pointer, mask=mask, other=other, cache_modifier=".cg")


@triton.jit
def as_int(pointer):
    """The same memory as int32."""
    return pointer.to(tl.pointer_type(tl.int32), bitcast=True)


@triton.jit
def arrive(counter, expected):
    """Whether this program is the last of `expected` to arrive. If so, it sees what the others wrote before they arrived, and the
    counter is 0 again."""
    tl.debug_barrier()  # all threads of this program have written
    last = tl.atomic_add(counter, 1, sem="acq_rel") == expected - 1
    if last:
        tl.store(counter, 0)
    return last


@triton.jit
def log_sum_exp(best, total, inverse_temperature):
    """best / T + log(total): -inf for a row that is -inf throughout, NaN for one with NaN or +inf, or whose best / T is +inf."""
    lse = tl.where(total > 0, best * inverse_temperature + tl.log(total), float("-inf"))
    endless = (best == float("inf")) | (best * inverse_temperature == float("inf"))
    return tl.where(endless, float("nan"), lse)


@triton.jit
def leave_masses(x, group_peaks, block, row, memory, inverse_temperature):
    """Leave peak and mass of each block [BLOCKS] of a tile x, which may be raw (from `read_raw`). Returns the peaks.

    group_peaks: the largest logits of its groups [BLOCK / 256, BLOCKS] where they are known, or None."""
    if group_peaks is None:
        peaks = block_max(x)
    else:
        peaks = tl.max(group_peaks, axis=0)
    masses = block_mass(x, peaks, inverse_temperature)
    peaks = tl.where(masses == masses, peaks, float("inf"))
    tl.store(blocks_at(memory, BLOCK_PEAK, row) + block, peaks, mask=block < memory[2])
    tl.store(blocks_at(memory, BLOCK_MASS, row) + block, masses, mask=block < memory[2])
    return peaks


@triton.jit
def leave_stats(x, group_peaks, ids, tile, row, memory, inverse_temperature, want_argmax, MASSES: tl.constexpr,
                BLOCKS: tl.constexpr):  # fmt: skip
    """Leave the peaks of a tile's blocks, and if wanted their masses and argmax. Returns the peaks [BLOCKS].

    With MASSES the tile may be raw, and `group_peaks` may be None (see `leave_masses`). Without, neither."""
    block = tile * BLOCKS + tl.arange(0, BLOCKS)
    if MASSES:
        peaks = leave_masses(x, group_peaks, block, row, memory, inverse_temperature)
    else:
        peaks = tl.max(group_peaks, axis=0)
        tl.store(blocks_at(memory, BLOCK_PEAK, row) + block, peaks, mask=block < memory[2])
    if want_argmax:
        largest = tl.where(without_nan(x) == peaks[None, :, None], ids, NO_ID)
        largest = tl.min(tl.min(largest, axis=0), axis=1)
        tl.store(as_int(blocks_at(memory, BLOCK_ARGMAX, row)) + block, largest, mask=block < memory[2])
    return peaks


@triton.jit
def fetch_stats(row, memory, inverse_temperature, NUM_BLOCKS: tl.constexpr):
    """Stats of a whole row from those of its blocks: best, total = sum of exp((x - best) / T), argmax.

    At a temperature of NaN no block knows its argmax, and the row's is 0."""
    block = tl.arange(0, NUM_BLOCKS)
    inside = block < memory[2]
    peak = fetch(blocks_at(memory, BLOCK_PEAK, row) + block, inside, float("-inf"))
    mass = fetch(blocks_at(memory, BLOCK_MASS, row) + block, inside, 0.0)
    argmax = fetch(as_int(blocks_at(memory, BLOCK_ARGMAX, row)) + block, inside, NO_ID)
    best = tl.max(peak, axis=0)
    argmax = tl.min(tl.where(peak == best, argmax, NO_ID), axis=0)
    argmax = tl.where(argmax == NO_ID, 0, argmax)
    return best, tl.sum(scaled_mass(peak, mass, best, inverse_temperature), axis=0), argmax


@triton.jit
def pick(values, here):
    """The one element of `values` where `here` is true."""
    return tl.sum(tl.where(here, values, tl.zeros_like(values)), axis=0)
