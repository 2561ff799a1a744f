"""How the Triton kernels read a row of logits, and what the blocks of a row leave behind for the last of their programs.

A row is cut into tiles of BLOCKS x BLOCK tokens, one program each, whose number depends on nothing but the vocabulary.
A program reads its tile once, into registers, and leaves of each block of BLOCK = 1024 tokens, as far as they are wanted,

    peak     the largest logit                          mass     sum of exp((x - peak) / T)
    argmax   its lowest id                              heat     sum of (x - peak) / T exp((x - peak) / T)

The program that arrives last then knows the row: lse = best / T + log(sum over blocks of mass exp((peak - best) / T)) with best =
the largest peak, and a draw in two levels chooses a block by the masses. Nothing depends on which program that is.

What the kernels hand to each other:

    rows    (logits, bias, mask, cu_logits, cu_adjust); bias and mask or None. Each of the first three is a view of a tensor [B, W, V]:
            (pointer, vocabulary size, stride of batch, of row, of token). Packed rows are one of [N, V] with a stride of batch of 0:
            sequence b has the rows from cu[b] up to cu[b + 1] of them, which the last two say of the logits and of bias and mask;
            None: they are not packed. A row that a sequence has not is -inf throughout.
    memory  (scratch, number of rows, blocks of a row, room for a search): where they leave their numbers.
    noise   (seed, position, origin, stream): what a random number is for, besides its index (jit_random.py).

A tile is held as [BLOCK / 256, BLOCKS, 256]: a warp then has whole blocks, 8 neighbouring tokens to a thread, and what is
said of a block is worked out in registers and by shuffles.

The interpreter's max and argmax skip NaN and a GPU's need not, so a NaN must not decide: +inf as the largest logit marks a
row that has no distribution. `read` makes +inf of NaN; after `read_raw` the sum of exponentials shows that there was one.
"""

import triton
import triton.language as tl

from .records import DRAW_BLOCK, GREEDY_BELOW

BLOCK = DRAW_BLOCK
LANES = tl.constexpr(256)  # neighbouring tokens of a block that a warp reads at once: 16 bytes a thread in bf16
LOG2_E = tl.constexpr(1.4426950408889634)
# A program has 32 tokens to a thread: what is done once per program counts little then, and four loads of 16 bytes in bf16 are
# on their way at once.
TILE_BLOCKS, THREADS = 8, 256

# Fields of the scratch memory: of each block of each row, and of each row.
BLOCK_PEAK, BLOCK_MASS, BLOCK_ARGMAX, BLOCK_HEAT, BLOCK_RESIDUAL_MASS = (tl.constexpr(i) for i in range(5))
BLOCK_FIELDS = tl.constexpr(5)
ROW_THRESHOLD, ROW_LSE, ROW_WINNER, ROW_ENTROPY, ROW_PREFIX, ROW_PENDING = (tl.constexpr(i) for i in range(6))
ROW_FIELDS = tl.constexpr(6)
NO_ID = tl.constexpr(0x7FFFFFFF)
_GREEDY_BELOW = tl.constexpr(GREEDY_BELOW)
_TINY = tl.constexpr(2.0**-126)  # the smallest normal float32


@triton.jit
def read_raw(rows, batch, column, ids):
    """Logits float32 of tokens `ids` >= 0 in row `column` (int64, scalar or of the shape of ids) of sequence `batch`
    (int64 scalar): bias added, -inf outside the mask and beyond the vocabulary."""
    logits, bias, mask, cu_logits, cu_adjust = rows
    offsets = ids.to(tl.int64)
    # Without this hint the compiler of Triton 3.6 spreads a tile's first axis over the warps, and not its blocks.
    if len(ids.shape) == 3:
        offsets = tl.max_contiguous(offsets, [1, 2, ids.shape[2]])
    at, inside = _locate(logits, cu_logits, batch, column, ids, offsets)
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
    """Pointers to tokens `ids` (`offsets` are the same in int64) of a view's row, and which of them there are."""
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
def read(rows, batch, column, ids):
    """As `read_raw`, and +inf for NaN."""
    return without_nan(read_raw(rows, batch, column, ids))


@triton.jit
def vocab_size_of(rows):
    return rows[0][1]


@triton.jit
def read_at(rows, batch, column, ids):
    """As `read`, with -inf for ids below 0."""
    return read(rows, batch, column, tl.where(ids < 0, vocab_size_of(rows), ids))


@triton.jit
def block_ids(block, BLOCK: tl.constexpr, APART: tl.constexpr = 1):
    """Token ids of blocks [BLOCKS], as a tile of them is held: [BLOCK / 256, BLOCKS, 256]; or of every APART-th token,
    [BLOCK / 256, BLOCKS, 256 / APART]."""
    part, lane = tl.arange(0, BLOCK // LANES), tl.arange(0, LANES // APART) * APART
    return block[None, :, None] * BLOCK + part[:, None, None] * LANES + lane[None, None, :]


@triton.jit
def tile_ids(tile, BLOCKS: tl.constexpr, BLOCK: tl.constexpr, APART: tl.constexpr = 1):
    """Token ids of a tile, or of every APART-th of its tokens."""
    return block_ids(tile * BLOCKS + tl.arange(0, BLOCKS), BLOCK, APART)


@triton.jit
def block_max(x):
    """Of each block of a tile: [BLOCKS]."""
    return tl.max(tl.max(x, axis=0), axis=1)


@triton.jit
def block_sum(x):
    """Likewise."""
    return tl.sum(tl.sum(x, axis=0), axis=1)


@triton.jit
def tile_max(x):
    """Of a whole tile."""
    return tl.max(block_max(x), axis=0)


@triton.jit
def load_temperature(temperature, batch):
    """1/T and whether the row is greedy; 1/T = 1 for greedy rows, and everywhere if there is no tensor.

    It is never 0, as 0 times a logit of -inf is NaN."""
    t = 1.0
    if temperature is not None:
        t = tl.load(temperature + batch).to(tl.float32)
    greedy = t < _GREEDY_BELOW
    inverse = tl.div_rn(1.0, tl.where(greedy, 1.0, t))
    return tl.where(inverse < _TINY, _TINY, inverse), greedy  # NaN stays NaN


@triton.jit
def finite(x):
    """0 in place of -inf, so that a difference from it is -inf and not NaN."""
    return tl.where(x == float("-inf"), 0.0, x)


@triton.jit
def block_mass(x, peak, inverse_temperature):
    """sum of exp((x - peak) / T) over each block of a tile x: [BLOCKS], as peak."""
    return block_sum(tl.exp2((x - finite(peak)[None, :, None]) * (inverse_temperature * LOG2_E)))


@triton.jit
def block_heat(x, peak, inverse_temperature):
    """sum of d exp(d) over each block of a tile x, d = (x - peak) / T: [BLOCKS], as peak; 0 where d = -inf."""
    d = (x - finite(peak)[None, :, None]) * inverse_temperature
    return block_sum(tl.where(d > float("-inf"), d * tl.exp(d), 0.0))


@triton.jit
def lowest_id(value, top, ids):
    """The lowest of a tile's ids whose value is `top`."""
    return tl.min(tl.min(tl.min(tl.where(value == top, ids, NO_ID), axis=0), axis=1), axis=0)


@triton.jit
def total_mass(peak, mass, best, inverse_temperature, axis: tl.constexpr):
    """sum of mass exp((peak - best) / T) over blocks."""
    return tl.sum(tl.where(mass > 0, mass * tl.exp((peak - best) * inverse_temperature), 0.0), axis=axis)


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
    """Pointer behind all fields, which begins on 16 bytes."""
    scratch, num_rows, num_blocks, _ = memory
    return scratch + ((BLOCK_FIELDS * num_blocks + ROW_FIELDS) * num_rows + 3) // 4 * 4


def floats_per_row(num_blocks: int) -> int:
    """Scratch memory that the fields take."""
    return BLOCK_FIELDS.value * num_blocks + ROW_FIELDS.value


@triton.jit
def fetch(pointer, mask, other):
    """Load what other programs have left: past the cache of this processor."""
    return tl.load(pointer, mask=mask, other=other, cache_modifier=".cg")


@triton.jit
def as_int(pointer):
    """The same memory as int32."""
    return pointer.to(tl.pointer_type(tl.int32), bitcast=True)


@triton.jit
def arrive(counter, expected):
    """Whether this program is the last of `expected` to come here; what the others wrote before is then visible, and
    the counter is 0 again."""
    tl.debug_barrier()  # all threads of this program have written
    last = tl.atomic_add(counter, 1, sem="acq_rel") == expected - 1
    if last:
        tl.store(counter, 0)
    return last


@triton.jit
def log_sum_exp(best, total, inverse_temperature):
    """best / T + log(total): -inf for a row that is -inf throughout, NaN for one with NaN or +inf."""
    lse = tl.where(total > 0, best * inverse_temperature + tl.log(total), float("-inf"))
    return tl.where(best == float("inf"), float("nan"), lse)


@triton.jit
def leave_masses(x, group_peaks, block, row, memory, inverse_temperature):
    """Leave peak and mass of each block [BLOCKS] of a tile x, which may be raw; returns the peaks. Takes the largest logits of its
    groups [BLOCK / 256, BLOCKS] where they are known, or None."""
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
    """Leave the peaks of a tile's blocks, their masses and argmax if wanted; returns the peaks [BLOCKS]. The tile may be raw if
    MASSES; on `group_peaks` see `leave_masses`: not None unless MASSES."""
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
    """Of a whole row, from its blocks: best, total = sum of exp((x - best) / T), argmax."""
    block = tl.arange(0, NUM_BLOCKS)
    inside = block < memory[2]
    peak = fetch(blocks_at(memory, BLOCK_PEAK, row) + block, inside, float("-inf"))
    mass = fetch(blocks_at(memory, BLOCK_MASS, row) + block, inside, 0.0)
    argmax = fetch(as_int(blocks_at(memory, BLOCK_ARGMAX, row)) + block, inside, NO_ID)
    best = tl.max(peak, axis=0)
    argmax = tl.min(tl.where(peak == best, argmax, NO_ID), axis=0)
    return best, total_mass(peak, mass, best, inverse_temperature, 0), argmax


@triton.jit
def pick(values, here):
    """The one element of `values` where `here` is true."""
    return tl.sum(tl.where(here, values, tl.zeros_like(values)), axis=0)
