"""Attention of the W newest columns of every row over a static cache in which each row has its own length.

    out_i = sum over visible j of p_ij v_j,    p_ij = exp(s_ij) / (exp(sink) + sum over visible j of exp(s_ij))
    s_ij  = scale q_i . k_j,  with a softcap c: c tanh(scale q_i . k_j / c)

See `attention_reference.ragged_attention`. The keys of a row are cut into splits at multiples of `split_size`, which
follows from the number of query rows alone, and a split into blocks of BLOCK_N. One program serves one split for a tile of BLOCK_M
query rows: the W columns of the query heads that share a key head, column by column. K and V are read once for all of a tile. Of
the keys it has seen, the program keeps per query row

    peak  the largest s      mass  sum of exp(s - peak)      sums  sum of exp(s - peak) v

(Milakov & Gimelshein, arXiv 1805.02867; Dao et al., arXiv 2205.14135). If there is only one split, the program divides and is
done. Otherwise it leaves the three in scratch memory, and a second launch combines the splits of each query row in their order.

Why a second launch, and not the last program to arrive: that program would read alone what many wrote, at 128k keys 3 MB, in the
time in which the whole GPU reads 400 MB. A launch also needs no counters, so a captured graph needs no memory but its scratch.

A row's result is its own, bit for bit. Blocks and splits begin at the same keys whatever the batch, the slot, the capacity and
`kv_length`. A block or split in which a query sees nothing multiplies its sums by 1 and adds 0.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .jit_attention import inverse, load_lengths, logits_of, multiply, tile_offsets, visible_keys
from .jit_rows import peak_or_0
from .launch import cdiv, next_power_of_2, row_arguments, view_4d
from .workspace import workspace

SPLIT_SIZE = 512  # keys; see split_size_for
COMBINED = 16  # splits that the second launch reads at once


# The strides of the large tensors stay specialised: because they are multiples of 16, the compiler can load 16 bytes at once,
# and a model has one of each. What varies while serving is not specialised.
@triton.jit(
    do_not_specialize=[
        "scale", "softcap", "window", "num_rows", "width", "kv_length", "split_size", "num_splits", "num_tiles",
    ],
    do_not_specialize_on_alignment=["seq_lens", "num_valid", "slots", "sinks"],
)  # fmt: skip
def attention_kernel(
    query,  # view [B, H, W, D]: (pointer, strides of batch, head, column)
    keys, values,  # views [slots, H_kv, capacity, D]: (pointer, strides of slot, head, key)
    seq_lens, num_valid, slots,  # [B] int64; the last two or None
    sinks,  # [H] or None
    output,  # [B, W, H, D]; written where there is one split
    scratch,  # float32: sums [B W H, num_splits, D], peak and mass [B W H, num_splits]; written otherwise
    scale, softcap, window,  # the last two or None
    num_rows, width, kv_length, split_size, num_splits, num_tiles,
    KEY_STRIDE: tl.constexpr, VALUE_STRIDE: tl.constexpr,  # as constants they cost no registers
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, EVICTION: tl.constexpr, WIDEN: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    tile, split = tl.program_id(0) % num_tiles, tl.program_id(0) // num_tiles
    kv_head, batch = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    length, valid = load_lengths(seq_lens, num_valid, batch, width)
    first, last = tile * BLOCK_M // GROUP, tl.minimum(((tile + 1) * BLOCK_M - 1) // GROUP, width - 1)
    begin, end = visible_keys(first, last, length, valid, window, kv_length, BLOCK_N)
    begin, end = tl.maximum(begin, split * split_size), tl.minimum(end, (split + 1) * split_size)
    if begin >= end and num_splits > 1:
        return

    # Query rows: column by column, in each column the heads of this group.
    row = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    column, head = row // GROUP, kv_head * GROUP + row % GROUP
    position, inside = length + column, column < width
    dim = tl.arange(0, BLOCK_D)
    stored = inside[:, None] & (dim < HEAD_DIM)[None, :]
    q_at = query[0] + batch * query[1] + head * query[2] + column.to(tl.int64) * query[3]
    q = tl.load(q_at[:, None] + dim[None, :], mask=stored, other=0.0)
    slot = batch
    if slots is not None:
        slot = tl.load(slots + batch)
    k_row = keys[0] + slot * keys[1] + kv_head * keys[2]
    v_row = values[0] + slot * values[1] + kv_head * values[2]
    k_tile, v_tile = tile_offsets(dim, KEY_STRIDE, BLOCK_N), tile_offsets(dim, VALUE_STRIDE, BLOCK_N)

    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    mass = tl.zeros([BLOCK_M], tl.float32)
    sums = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for start in tl.range(begin, end, BLOCK_N):
        key = start + tl.arange(0, BLOCK_N)
        # Keys from `end` on are stale. They are not loaded, because even times 0 they may give NaN.
        readable = (key < end)[:, None] & (dim < HEAD_DIM)[None, :]
        k_at = k_row + tl.cast(start, tl.int64) * KEY_STRIDE + k_tile
        k = tl.load(k_at, mask=readable, other=0.0, eviction_policy=EVICTION)
        s = logits_of(multiply(q, tl.trans(k), None, WIDEN), scale, softcap)
        visible = (key < end)[None, :] & (key[None, :] <= position[:, None])
        if window is not None:
            visible &= key[None, :] > position[:, None] - window
        s = tl.where(visible, s, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(s, axis=1))
        weight = tl.exp2(s - peak_or_0(new_peak)[:, None])
        shrink = tl.exp2(peak - peak_or_0(new_peak))
        mass = mass * shrink + tl.sum(weight, axis=1)
        v_at = v_row + tl.cast(start, tl.int64) * VALUE_STRIDE + v_tile
        v = tl.load(v_at, mask=readable, other=0.0, eviction_policy=EVICTION)
        sums = multiply(weight.to(v.dtype), v, sums * shrink[:, None], WIDEN)
        peak = new_peak

    out_row = (batch * width + column) * (tl.num_programs(1) * GROUP) + head
    if num_splits == 1:
        result = sums * inverse(peak, mass, sinks, head, inside)[:, None]
        tl.store(output + (out_row * HEAD_DIM)[:, None] + dim[None, :], result, mask=stored)
    else:
        at = out_row * num_splits + split
        peaks = scratch + num_rows.to(tl.int64) * num_splits * HEAD_DIM
        tl.store(scratch + (at * HEAD_DIM)[:, None] + dim[None, :], sums, mask=stored)
        tl.store(peaks + at, peak, mask=inside)
        tl.store(peaks + num_rows.to(tl.int64) * num_splits + at, mass, mask=inside)


@triton.jit(
    do_not_specialize=["window", "num_rows", "num_heads", "width", "kv_length", "split_size", "num_splits"],
    do_not_specialize_on_alignment=["seq_lens", "num_valid", "sinks"],
)
def combine_kernel(
    seq_lens, num_valid, sinks, output, scratch, window,  # as above
    num_rows, num_heads, width, kv_length, split_size, num_splits,
    HEAD_DIM: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, COMBINED: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    batch, column, head = row // num_heads // width, (row // num_heads % width).to(tl.int32), row % num_heads
    length, valid = load_lengths(seq_lens, num_valid, batch, width)
    begin, end = visible_keys(column, column, length, valid, window, kv_length, BLOCK_N)
    # The splits in which this query sees keys follow from its position alone. Padding that sees no key has left nothing.
    first = begin // split_size
    last = tl.where(begin < end, (end + split_size - 1) // split_size, first)
    dim = tl.arange(0, BLOCK_D)
    sums_at = scratch + row * num_splits * HEAD_DIM
    peaks_at = scratch + num_rows.to(tl.int64) * num_splits * HEAD_DIM + row * num_splits
    masses_at = peaks_at + num_rows.to(tl.int64) * num_splits

    peak = tl.full([], float("-inf"), tl.float32)
    for group in tl.range(first, last, COMBINED):
        split = group + tl.arange(0, COMBINED)
        used = split < last
        peak = tl.maximum(peak, tl.max(tl.load(peaks_at + split, mask=used, other=float("-inf")), axis=0))
    mass = tl.zeros([], tl.float32)
    sums = tl.zeros([BLOCK_D], tl.float32)
    for group in tl.range(first, last, COMBINED):
        split = group + tl.arange(0, COMBINED)
        used = split < last
        weight = tl.exp2(tl.load(peaks_at + split, mask=used, other=float("-inf")) - peak_or_0(peak))
        mass += tl.sum(weight * tl.load(masses_at + split, mask=used, other=0.0), axis=0)
        at = sums_at + split.to(tl.int64)[:, None] * HEAD_DIM + dim[None, :]
        partial = tl.load(at, mask=used[:, None] & (dim < HEAD_DIM)[None, :], other=0.0)
        sums += tl.sum(weight[:, None] * partial, axis=0)
    result = sums * inverse(peak, mass, sinks, head, True)
    tl.store(output + row * HEAD_DIM + dim, result, mask=dim < HEAD_DIM)


def ragged_attention(
    query: Tensor,  # [B, H, W, D] float32, bfloat16 or float16, contiguous in the last dimension
    keys: Tensor,  # [slots, H_kv, capacity, D] likewise
    values: Tensor,  # [slots, H_kv, capacity, D] likewise
    seq_lens: Tensor,  # [B] int64, keys of each row before this call
    *,
    scale: float | None = None,  # None: 1 / sqrt(D)
    window: int | None = None,  # keys that a query sees, its own included; None: all
    softcap: float | None = None,  # None: off
    sinks: Tensor | None = None,  # [H] floating; None: none
    slots: Tensor | None = None,  # [B] int64, the cache row of each batch row; None: 0 ... B-1
    kv_length: int | None = None,  # no query sees a key at or beyond it; None: capacity
    num_valid: Tensor | None = None,  # [B] int64, columns of each row that are no padding; None: W
) -> Tensor:
    """Attention [B, W, H, D], contiguous; see `attention_reference.ragged_attention`.

    One launch where kv_length is at most split_size_for(W H / H_kv, ...), otherwise two.
    """
    batch, num_heads, width, head_dim = query.shape
    num_kv_heads = keys.shape[1]
    output = torch.empty((batch, width, num_heads, head_dim), dtype=query.dtype, device=query.device)
    if output.numel() == 0:
        return output
    group = num_heads // num_kv_heads
    kv_length = keys.shape[2] if kv_length is None else kv_length
    blocks = blocks_for(group * width, head_dim, query.dtype)
    num_tiles = cdiv(group * width, blocks["BLOCK_M"])
    split_size = split_size_for(num_tiles)
    num_splits, num_rows = cdiv(kv_length, split_size), batch * width * num_heads
    floats = num_rows * num_splits * (head_dim + 2) if num_splits > 1 else 1
    both: dict[str, Any] = dict(
        **row_arguments(seq_lens=seq_lens, num_valid=num_valid, sinks=sinks),
        output=output,
        scratch=workspace(query.device, 0, floats)[1],
        window=window,
        num_rows=num_rows,
        width=width,
        kv_length=kv_length,
        split_size=split_size,
        num_splits=num_splits,
        HEAD_DIM=head_dim,
        BLOCK_N=blocks["BLOCK_N"],
        BLOCK_D=blocks["BLOCK_D"],
        enable_fp_fusion=False,  # so that both kernels, in all their variants, round alike
    )
    with torch.cuda.device_of(query):
        attention_kernel[(num_tiles * num_splits, num_kv_heads, batch)](
            **(both | options_for(blocks, query.dtype)),
            query=view_4d(query),
            keys=view_4d(keys),
            values=view_4d(values),
            **row_arguments(slots=slots),
            scale=head_dim**-0.5 if scale is None else scale,
            softcap=softcap,
            num_tiles=num_tiles,
            KEY_STRIDE=keys.stride(2),
            VALUE_STRIDE=values.stride(2),
            GROUP=group,
            # While decoding, K and V pass through the L2 cache once, and should leave it to the partial sums. Triton 3.6 and 3.7
            # lose this hint on NVIDIA's copies to shared memory.
            EVICTION="evict_first" if num_tiles == 1 else "",
            WIDEN=triton.knobs.runtime.interpret and query.dtype == torch.bfloat16,
            BLOCK_M=blocks["BLOCK_M"],
        )
        if num_splits > 1:
            combine_kernel[(num_rows,)](**both, num_heads=num_heads, COMBINED=COMBINED, num_warps=2)
    return output


def split_size_for(num_tiles: int) -> int:
    """Keys of a split, from the number of tiles of query rows: the more tiles, the fewer splits.

    While decoding there is one tile. At D = 128 in bf16 a split of 512 keys is 256 KB, for which a program that serves 24 query
    rows writes 12 KB. B = 1 with 8 key heads and 8192 keys is 128 programs, one for each processor of a large GPU.

    Prefill has enough programs without splits. With longer splits its scratch memory does not grow with W.
    """
    return SPLIT_SIZE * next_power_of_2(num_tiles)


def blocks_for(query_rows: int, head_dim: int, dtype: torch.dtype) -> dict[str, int]:
    """Sizes of a program's blocks. They follow from what a row's result may depend on alone: not from batch, lengths or capacity.

    - Up to 32 query rows, a block of K and one of V are 16 KiB each (at D = 128), and up to two of each are in flight: 70 to
      82 KiB of shared memory, and less than 256 registers for each of 128 threads. So two programs fit on a processor, with
      128 KiB in flight: three times what keeps an H200 busy (4.8 TB/s x 1 us / 132 processors = 36 KB).
    - More query rows need more registers, so blocks are half as large, and three programs fit on a processor.
    - AMD's processors have 64 KiB of shared memory in all.
    - No tensor core multiplies in the precision of float32. Fused multiply-adds want few rows and many threads.
    """
    block_d = max(16, next_power_of_2(head_dim))
    exact = dtype == torch.float32
    limit = 64 if not exact else 32 if block_d <= 128 else 16
    block_m = min(limit, max(16, next_power_of_2(query_rows)))
    small = exact or block_m == 64 or torch.version.hip is not None
    block_n = (8 if small else 16) * 1024 // (block_d * dtype.itemsize)
    return dict(BLOCK_M=block_m, BLOCK_N=min(max(block_n, 16), 128 if block_m == 16 else 64), BLOCK_D=block_d)


def options_for(blocks: dict[str, int], dtype: torch.dtype) -> dict[str, Any]:
    """Threads, stages and registers of a program."""
    num_warps = 8 if dtype == torch.float32 or blocks["BLOCK_M"] * blocks["BLOCK_D"] > 8192 else 4
    wide = blocks["BLOCK_D"] > 128
    if torch.version.hip:
        return dict(num_warps=num_warps, num_stages=1 if wide and dtype == torch.float32 else 2)
    # With three stages there would be no room for a second program on an sm_80, by 128 bytes and by 1 KiB.
    num_stages = 2 if wide and (dtype == torch.float32 or blocks["BLOCK_M"] == 32) else 3
    # Without maxnreg, ptxas aims at more programs per processor than there is shared memory for, and spills a few bytes.
    return dict(num_warps=num_warps, num_stages=num_stages, maxnreg=255)
