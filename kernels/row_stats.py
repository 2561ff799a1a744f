"""Threshold, log-sum-exp and argmax of rows; see `reference.row_stats` for their definition.

    lse = log sum over v of exp(logit_v / T), v with logit_v >= threshold

One launch, with one program per tile of a row, or for several (jit_tiles.py). The last program of a row combines its blocks
(jit_rows.py) and, if there are filters, searches for the threshold (jit_filters.py).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .jit_filters import filter_row
from .jit_groups import SEARCH_ROOM
from .jit_rows import arrive, fetch_stats, leave_stats, load_temperature, log_sum_exp, read_raw, tile_ids
from .jit_tiles import leave_tiles
from .launch import as_rows, empty_stats, is_filtered, row_arguments, shape_arguments, view, vocabulary_view
from .records import RowStats


# The vocabulary's size and the strides stay specialised: because they are multiples of 16, the compiler can load 16 bytes at
# once, and a model has one vocabulary. What varies while serving is not specialised: batch, width, and where small tensors
# begin (they may be views of larger ones).
@triton.jit(
    do_not_specialize=["num_rows", "width", "num_programs", "tiles"],
    do_not_specialize_on_alignment=[
        "cu_adjust",
        "temperature",
        "top_k",
        "top_p",
        "min_p",
        "threshold",
        "lse",
        "argmax",
    ],
)
def row_stats_kernel(
    logits, bias, mask,  # views [B, W, V]; bias and mask or None
    cu_adjust,  # [B+1] int32 if bias and mask are packed, or None
    temperature, top_k, top_p, min_p,  # [B] or None
    threshold, lse, argmax,  # [B, W] float32, float32, int64; written
    scratch, counters,
    num_rows, width, num_programs, tiles, num_blocks,  # programs of a row, and tiles of a program
    FILTERED: tl.constexpr, SHIFT: tl.constexpr, SAMPLE_SHIFT: tl.constexpr,
    NUM_BLOCKS: tl.constexpr, NUM_GROUPS: tl.constexpr, BLOCKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    rows = (logits, bias, mask, None, cu_adjust)
    memory = (scratch, num_rows, num_blocks, SEARCH_ROOM if FILTERED else 0)
    first, column, batch = tl.program_id(0) * tiles, tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    row = batch * width + column
    if FILTERED:
        inverse_temperature, greedy = leave_tiles(
            rows, batch, column, row, memory, temperature, first, tiles, True,
            FILTERED, True, SAMPLE_SHIFT, BLOCKS, BLOCK,
        )  # fmt: skip
    else:
        ids = tile_ids(first, BLOCKS, BLOCK)
        x = read_raw(rows, batch, column, ids)  # first, so that everything else overlaps with the loads
        inverse_temperature, greedy = load_temperature(temperature, batch)
        leave_stats(x, None, ids, first, row, memory, inverse_temperature, want_argmax=True, MASSES=True, BLOCKS=BLOCKS)

    if arrive(counters + row, num_programs):
        best, total, row_argmax = fetch_stats(row, memory, inverse_temperature, NUM_BLOCKS)
        tl.store(argmax + row, row_argmax.to(tl.int64))  # first, which frees its register for the search
        least = tl.where(greedy, best, float("-inf"))  # before the search, which has registers for little else
        if FILTERED:
            least, total, _ = filter_row(
                rows, batch, column, row, memory, least, best, total, inverse_temperature, greedy, (top_k, top_p, min_p),
                SHIFT, SAMPLE_SHIFT, NUM_GROUPS, BLOCKS,
            )  # fmt: skip
        tl.store(threshold + row, least)
        tl.store(lse + row, log_sum_exp(best, total, inverse_temperature))


def row_stats(
    logits: Tensor,  # [B, V] or [B, W, V] float32, bfloat16 or float16, any strides
    temperature: Tensor | None = None,  # [B] float, below 1e-5 = greedy; None: 1
    top_k: Tensor | None = None,  # [B] int; None: off
    top_p: Tensor | None = None,  # [B] float; None: off
    min_p: Tensor | None = None,  # [B] float; None: off
    *,
    logit_bias: Tensor | None = None,  # [V], [B, V] or [B, W, V] float
    token_mask: Tensor | None = None,  # likewise, bool
    cu_adjust: Tensor | None = None,  # [B+1] int32, if bias and mask are packed, as `verify` takes them
) -> RowStats:
    """Stats of rows: fields [B] or [B, W]; one launch."""
    rows = as_rows(logits)
    stats = empty_stats(logits)
    filtered = is_filtered(top_k, top_p, min_p)
    shape = shape_arguments(rows, rows.shape[:2], filtered, False, logit_bias, token_mask, batched=False)
    if rows.shape[0] * rows.shape[1]:
        with torch.cuda.device_of(logits):
            row_stats_kernel[(shape["num_programs"], rows.shape[1], rows.shape[0])](
                logits=view(rows),
                bias=vocabulary_view(logit_bias, rows, cu_adjust),
                mask=vocabulary_view(token_mask, rows, cu_adjust),
                cu_adjust=cu_adjust,
                **row_arguments(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p),
                **stats._asdict(),
                **shape,
            )
    return stats
