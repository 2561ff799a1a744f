"""Parts of the attention kernels: which keys a query sees, tiles of K and V, logits, and the division of the sums."""

import triton
import triton.language as tl

from .jit_rows import LOG2_E, peak_or_0


@triton.jit
def load_lengths(seq_lens, num_valid, batch, width):
    """The number of keys of a row before this call, and that of its columns that are not padding, int32."""
    length = tl.load(seq_lens + batch).to(tl.int32)
    valid = width
    if num_valid is not None:
        valid = tl.load(num_valid + batch).to(tl.int32)
    return length, valid


@triton.jit
def visible_keys(first_column, last_column, length, valid, window, kv_length, BLOCK_N: tl.constexpr):
    """A range [begin, end) with all keys that columns first_column ... last_column see; begin is a multiple of BLOCK_N."""
    end = tl.minimum(tl.minimum(length + last_column + 1, length + valid), kv_length)
    begin = tl.zeros_like(end)
    if window is not None:
        begin = tl.maximum(length + first_column - window + 1, 0) // BLOCK_N * BLOCK_N
    return begin, end


@triton.jit
def tile_offsets(dim, STRIDE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Offsets [BLOCK_N, BLOCK_D] inside a tile of keys that are STRIDE apart; 32 bits where they suffice."""
    key = tl.arange(0, BLOCK_N)
    if STRIDE * BLOCK_N >= 2**31:
        key = key.to(tl.int64)
    return key[:, None] * STRIDE + dim[None, :]


@triton.jit
def multiply(a, b, accumulator, WIDEN: tl.constexpr):
    """a b + accumulator (None: 0) in float32. WIDEN is for the interpreter, which would take the bits of bfloat16 for integers."""
    if WIDEN:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, accumulator, input_precision="ieee")


@triton.jit
def logits_of(dots, scale, softcap):
    """s / log 2, because a GPU has exp2 and not exp."""
    if softcap is None:
        s = dots * (scale * LOG2_E)
    else:
        # tanh(x) = 1 - 2 / (exp(2 x) + 1), also where exp overflows. Near 0 that loses x beside 1: there its series is taken.
        tanh = 1.0 - 2.0 / (tl.exp2(dots * (2.0 * scale / softcap * LOG2_E)) + 1.0)
        x = dots * (scale / softcap)
        square = x * x
        tanh = tl.where(square < 0.01, x + x * square * (square * (2 / 15) - 1 / 3), tanh)
        s = tanh * (softcap * LOG2_E)
    return s


@triton.jit
def inverse(peak, mass, sinks, head, mask):
    """The factor for the sums of query rows, 1 / mass. It is 1 where a row saw nothing: its sums are 0, whatever a sink weighs."""
    seen = mass != 0.0
    if sinks is not None:
        sink = tl.load(sinks + head, mask=mask, other=0.0).to(tl.float32) * LOG2_E
        mass += tl.exp2(sink - peak_or_0(peak))
    return tl.div_rn(1.0, tl.where(seen, mass, 1.0))
