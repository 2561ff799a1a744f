"""One token per row by the Gumbel-argmax trick (Maddison et al., arXiv 1411.0030); see `reference.sample`.

    token = argmax over v of logit_v / T + Gumbel(seed, position, origin, stream, v)

The argmax does not need the log-sum-exp, so the row's stats and its draw come out of one reading. Greedy rows take
the argmax of the logits and compute no noise.

One program per row: reads V logits, writes four numbers.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .jit_helpers import (
    OPTIONS,
    block_size,
    finish_draw,
    finish_stats,
    fold_draw,
    fold_stats,
    gumbel_block,
    load_logits,
    load_temperature,
    start_draw,
    start_stats,
)
from .philox import SAMPLE
from .records import Draws
from .row_stats import empty_stats


# On what is specialised, see row_stats_kernel.
@triton.jit(
    do_not_specialize=["noise_stream", "width"],
    do_not_specialize_on_alignment=[
        "temperature", "seed", "position", "origin", "tokens", "threshold", "lse", "argmax",
    ],
)  # fmt: skip
def sample_kernel(
    logits,  # [B, W, V]
    temperature,  # [B] or None
    seed,  # [B] int64
    position,  # [B] int64
    origin,  # [B] int64, or None: 0
    tokens,  # [B, W] int64, written
    threshold,  # [B, W] float32, written
    lse,  # [B, W] float32, written
    argmax,  # [B, W] int64, written
    noise_stream,
    width,
    vocab_size,
    stride_batch,
    stride_row,
    stride_token,
    BLOCK: tl.constexpr,
):
    program = tl.program_id(0).to(tl.int64)
    batch, column = program // width, program % width
    row = logits + batch * stride_batch + column * stride_row
    inverse_temperature, greedy = load_temperature(temperature, batch)
    row_seed = tl.load(seed + batch)
    row_position = tl.load(position + batch) + column
    row_origin = tl.zeros_like(row_position)
    if origin is not None:
        row_origin = tl.load(origin + batch)

    peak, peak_id, mass = start_stats(BLOCK)
    best, extra, best_id = start_draw(BLOCK)
    for start in range(0, vocab_size, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        x = load_logits(row, ids, vocab_size, stride_token)
        peak, peak_id, mass = fold_stats(peak, peak_id, mass, x, ids, inverse_temperature, greedy)
        if not greedy:
            noise = gumbel_block(row_seed, start, row_position, row_origin, noise_stream, BLOCK)
            best, extra, best_id = fold_draw(best, extra, best_id, x, noise, ids, inverse_temperature)
    row_threshold, row_lse, row_argmax = finish_stats(peak, peak_id, mass, inverse_temperature, greedy)
    token, _ = finish_draw(best, extra, best_id, inverse_temperature)
    token = tl.where(greedy, row_argmax, token)

    tl.store(tokens + program, tl.where(tl.abs(row_lse) < float("inf"), token, -1))
    tl.store(threshold + program, row_threshold)
    tl.store(lse + program, row_lse)
    tl.store(argmax + program, row_argmax)


def sample(
    logits: Tensor,  # [B, V] or [B, W, V] float32, bfloat16 or float16, any strides
    temperature: Tensor | None = None,  # [B] float, 0 = greedy; None: 1
    *,
    seed: Tensor,  # [B] int64
    position: Tensor,  # [B] int64, absolute position of the token drawn from column 0
    origin: Tensor | None = None,  # [B] int64; None: 0
    stream: int = SAMPLE,
) -> Draws:
    """Tokens [B] or [B, W] of unfiltered rows, and the rows' stats; one launch."""
    stats = empty_stats(logits)
    tokens = torch.empty_like(stats.argmax)
    rows = logits if logits.dim() == 3 else logits[:, None]
    batch, width, vocab_size = rows.shape
    with torch.cuda.device_of(logits):
        sample_kernel[(batch * width,)](
            logits=rows,
            temperature=None if temperature is None else temperature.contiguous(),
            seed=seed.contiguous(),
            position=position.contiguous(),
            origin=None if origin is None else origin.contiguous(),
            tokens=tokens,
            threshold=stats.threshold,
            lse=stats.lse,
            argmax=stats.argmax,
            noise_stream=stream,
            width=width,
            vocab_size=vocab_size,
            stride_batch=rows.stride(0),
            stride_row=rows.stride(1),
            stride_token=rows.stride(2),
            BLOCK=block_size(vocab_size),
            **OPTIONS,
        )
    return Draws(tokens, stats)
