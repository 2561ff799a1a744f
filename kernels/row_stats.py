"""Threshold, log-sum-exp and argmax of rows; see `reference.row_stats` for what they are.

    lse = log sum over v of exp(logit_v / T), v with logit_v >= threshold

One program per tile of a row; the last of a row puts its blocks together (jit_rows.py) and searches for the threshold
if there are filters (jit_filters.py). One launch.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .jit_filters import CANDIDATES, SAMPLES, filter_row, key_shift, leave_sample, sample_shift
from .jit_rows import (
    BLOCK,
    FILTERED,
    PLAIN,
    arrive,
    fetch_stats,
    floats_per_row,
    leave_stats,
    load_temperature,
    log_sum_exp,
    read,
    tile_ids,
)
from .numerics import spread
from .records import RowStats
from .workspace import workspace


# The vocabulary's size and the strides stay specialised: that they are multiples of 16 is what lets the compiler load
# 16 bytes at once, and a model has one vocabulary. What varies while serving is not: batch, width, and where small
# tensors, which may be views of larger ones, begin.
@triton.jit(
    do_not_specialize=["num_rows", "width"],
    do_not_specialize_on_alignment=["temperature", "top_k", "top_p", "min_p", "threshold", "lse", "argmax"],
)
def row_stats_kernel(
    logits, bias, mask,  # views [B, W, V]; bias and mask or None
    temperature, top_k, top_p, min_p,  # [B] or None
    threshold, lse, argmax,  # [B, W] float32, float32, int64; written
    scratch, counters,
    num_rows, width, num_tiles, num_blocks,
    FILTERED: tl.constexpr, SHIFT: tl.constexpr, SAMPLE_SHIFT: tl.constexpr,
    NUM_TILES: tl.constexpr, BLOCKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    rows, memory = (logits, bias, mask), (scratch, num_rows, num_tiles, num_blocks)
    program = tl.program_id(0)
    row, tile = (program // num_tiles).to(tl.int64), program % num_tiles
    batch, column = row // width, row % width
    inverse_temperature, greedy = load_temperature(temperature, batch)

    ids = tile_ids(tile, BLOCKS, BLOCK)
    x = read(rows, batch, column, ids)
    leave_stats(x, ids, tile, row, memory, inverse_temperature, True, True, BLOCKS)
    if FILTERED:
        leave_sample(x, ids, logits[1], row, memory, SAMPLE_SHIFT)

    if arrive(counters + row, num_tiles):
        best, total, row_argmax = fetch_stats(row, memory, inverse_temperature, NUM_TILES)
        least = tl.full([], float("-inf"), tl.float32)
        if FILTERED:
            least, total = filter_row(
                rows, batch, column, row, memory, best, total, inverse_temperature, greedy, (top_k, top_p, min_p),
                SHIFT, SAMPLE_SHIFT,
            )  # fmt: skip
        tl.store(threshold + row, tl.where(greedy, best, least))
        tl.store(lse + row, log_sum_exp(best, total, inverse_temperature))
        tl.store(argmax + row, row_argmax.to(tl.int64))


def row_stats(
    logits: Tensor,  # [B, V] or [B, W, V] float32, bfloat16 or float16, any strides
    temperature: Tensor | None = None,  # [B] float, 0 = greedy; None: 1
    top_k: Tensor | None = None,  # [B] int; None: off
    top_p: Tensor | None = None,  # [B] float; None: off
    min_p: Tensor | None = None,  # [B] float; None: off
    *,
    logit_bias: Tensor | None = None,  # [V], [B, V] or [B, W, V] float
    token_mask: Tensor | None = None,  # likewise, bool
) -> RowStats:
    """Stats of rows: fields [B] or [B, W]; one launch."""
    rows = as_rows(logits)
    stats = empty_stats(logits)
    filtered = is_filtered(top_k, top_p, min_p)
    shape = shape_arguments(rows, filtered, logit_bias, batched=False)
    if rows.shape[0] * rows.shape[1]:
        with torch.cuda.device_of(logits):
            row_stats_kernel[(shape["num_rows"] * shape["num_tiles"],)](
                logits=view(rows),
                bias=vocabulary_view(logit_bias, rows),
                mask=vocabulary_view(token_mask, rows),
                **row_arguments(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p),
                **stats._asdict(),
                **shape,
            )
    return stats


def as_rows(logits: Tensor) -> Tensor:
    """[B, V] or [B, W, V] as [B, W, V]."""
    return logits if logits.dim() == 3 else logits[:, None]


def view(rows: Tensor) -> tuple[Tensor, int, int, int, int]:
    """What a kernel gets of logits [B, W, V]."""
    return rows, rows.shape[2], rows.stride(0), rows.stride(1), rows.stride(2)


def vocabulary_view(value: Tensor | None, rows: Tensor) -> tuple[Tensor, int, int, int, int] | None:
    """The same of a bias or mask [V], [B, V] or [B, W, V] over logits [B, W, V]: strides are 0 where it is spread."""
    if value is None:
        return None
    return view(spread(value, 3).expand(rows.shape[0], rows.shape[1], -1))


def row_arguments(**values: Tensor | None) -> dict[str, Tensor | None]:
    """Small tensors [B] as the kernels read them: contiguous."""
    return {name: None if value is None else value.contiguous() for name, value in values.items()}


def is_filtered(top_k: Tensor | None, top_p: Tensor | None, min_p: Tensor | None) -> bool:
    return not (top_k is None and top_p is None and min_p is None)


def shape_arguments(rows: Tensor, filtered: bool, logit_bias: Tensor | None, batched: bool) -> dict[str, Any]:
    """Sizes, memory and options for a pass over logits [B, W, V]; `batched`: with a counter per sequence too."""
    batch, width, vocab_size = rows.shape
    num_rows, num_blocks = batch * width, triton.cdiv(vocab_size, BLOCK)
    size = FILTERED if filtered else PLAIN
    blocks = min(size["blocks"], triton.next_power_of_2(num_blocks))
    num_tiles = triton.cdiv(num_blocks, blocks)
    per_row = floats_per_row(num_tiles, num_blocks) + (SAMPLES + CANDIDATES if filtered else 0)
    counters, scratch = workspace(rows.device, num_rows + (batch if batched else 0), num_rows * per_row)
    return dict(
        scratch=scratch,
        counters=counters,
        num_rows=num_rows,
        width=width,
        num_blocks=num_blocks,
        num_tiles=num_tiles,
        SHIFT=key_shift(rows.dtype, logit_bias is not None),
        SAMPLE_SHIFT=sample_shift(vocab_size),
        NUM_TILES=triton.next_power_of_2(num_tiles),
        BLOCKS=blocks,
        BLOCK=BLOCK,
        FILTERED=filtered,
        num_warps=size["threads"] // (64 if torch.version.hip else 32),
        enable_fp_fusion=False,  # the arithmetic is then the twin's on every release of Triton
    )


def empty_stats(logits: Tensor) -> RowStats:
    """Room for the stats of logits [..., V]."""
    shape, device = logits.shape[:-1], logits.device
    return RowStats(
        threshold=torch.empty(shape, dtype=torch.float32, device=device),
        lse=torch.empty(shape, dtype=torch.float32, device=device),
        argmax=torch.empty(shape, dtype=torch.int64, device=device),
    )
