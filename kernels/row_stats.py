"""Threshold, log-sum-exp and argmax of rows in one reading; see `reference.row_stats`.

    lse = log sum over v of exp(logit_v / T)

Without filters the threshold is -inf, and for greedy rows the row's maximum: their lse is then over the tokens
that tie with it, at temperature 1, so maximum + log(how many tie).

One program per row: reads V logits, writes three numbers.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .jit_helpers import (
    OPTIONS,
    block_size,
    finish_stats,
    fold_stats,
    load_logits,
    load_temperature,
    start_stats,
)
from .records import RowStats


# vocab_size and the strides stay specialised: that they are multiples of 16 is what lets the compiler load 16 bytes
# at once, and a model has one vocabulary. What varies while serving is not: the width, and where small tensors, which
# may be views of larger ones, begin.
@triton.jit(do_not_specialize=["width"], do_not_specialize_on_alignment=["temperature", "threshold", "lse", "argmax"])
def row_stats_kernel(
    logits,  # [B, W, V]
    temperature,  # [B] or None
    threshold,  # [B, W] float32, written
    lse,  # [B, W] float32, written
    argmax,  # [B, W] int64, written
    width,
    vocab_size,
    stride_batch,
    stride_row,
    stride_token,
    BLOCK: tl.constexpr,
):
    program = tl.program_id(0).to(tl.int64)
    batch = program // width
    row = logits + batch * stride_batch + program % width * stride_row
    inverse_temperature, greedy = load_temperature(temperature, batch)

    peak, peak_id, mass = start_stats(BLOCK)
    for start in range(0, vocab_size, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        x = load_logits(row, ids, vocab_size, stride_token)
        peak, peak_id, mass = fold_stats(peak, peak_id, mass, x, ids, inverse_temperature, greedy)
    row_threshold, row_lse, row_argmax = finish_stats(peak, peak_id, mass, inverse_temperature, greedy)

    tl.store(threshold + program, row_threshold)
    tl.store(lse + program, row_lse)
    tl.store(argmax + program, row_argmax)


def row_stats(
    logits: Tensor,  # [B, V] or [B, W, V] float32, bfloat16 or float16, any strides
    temperature: Tensor | None = None,  # [B] float, 0 = greedy; None: 1
) -> RowStats:
    """Stats of unfiltered rows: fields [B] or [B, W]; one launch."""
    stats = empty_stats(logits)
    rows = logits if logits.dim() == 3 else logits[:, None]
    batch, width, vocab_size = rows.shape
    with torch.cuda.device_of(logits):
        row_stats_kernel[(batch * width,)](
            logits=rows,
            temperature=None if temperature is None else temperature.contiguous(),
            threshold=stats.threshold,
            lse=stats.lse,
            argmax=stats.argmax,
            width=width,
            vocab_size=vocab_size,
            stride_batch=rows.stride(0),
            stride_row=rows.stride(1),
            stride_token=rows.stride(2),
            BLOCK=block_size(vocab_size),
            **OPTIONS,
        )
    return stats


def empty_stats(logits: Tensor) -> RowStats:
    """Room for the stats of logits [..., V]."""
    shape, device = logits.shape[:-1], logits.device
    return RowStats(
        threshold=torch.empty(shape, dtype=torch.float32, device=device),
        lse=torch.empty(shape, dtype=torch.float32, device=device),
        argmax=torch.empty(shape, dtype=torch.int64, device=device),
    )
