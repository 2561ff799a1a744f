"""One token per row by the Gumbel-argmax trick (Maddison et al., arXiv 1411.0030); see `reference.sample`.

    token = argmax over v of logit_v / T + Gumbel(seed, position, origin, stream, v), v with logit_v >= threshold

One launch. The first pass over the logits leaves the stats of each block and the largest logit of each group of 256 tokens. The
last program of a row searches for the threshold, if there are filters, and draws. For the draw only few groups matter
(jit_draw.py). Greedy rows take the argmax of the logits and compute no noise.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .jit_draw import draw_by_token
from .jit_filters import filter_row
from .jit_groups import SEARCH_ROOM
from .jit_rows import arrive, fetch_stats, log_sum_exp, read_at
from .jit_tiles import leave_tiles
from .launch import as_rows, empty_stats, is_filtered, row_arguments, shape_arguments, view, vocabulary_view
from .philox import SAMPLE
from .records import Draws


# Which arguments are specialised: see row_stats_kernel.
@triton.jit(
    do_not_specialize=["noise_stream", "num_rows", "width", "num_programs", "tiles"],
    do_not_specialize_on_alignment=[
        "temperature", "top_k", "top_p", "min_p", "seed", "position", "origin",
        "tokens", "logprobs", "threshold", "lse", "argmax",
    ],
)  # fmt: skip
def sample_kernel(
    logits, bias, mask,  # views [B, W, V]; bias and mask or None
    temperature, top_k, top_p, min_p,  # [B] or None
    seed, position, origin,  # [B] int64; origin or None: 0
    tokens,  # [B, W] int64, written
    logprobs,  # [B, W] float32, written, or None
    threshold, lse, argmax,  # [B, W] float32, float32, int64; written
    scratch, counters,
    noise_stream,
    num_rows, width, num_programs, tiles, num_blocks,  # programs of a row, and tiles of a program
    FILTERED: tl.constexpr, SHIFT: tl.constexpr, SAMPLE_SHIFT: tl.constexpr,
    NUM_BLOCKS: tl.constexpr, NUM_GROUPS: tl.constexpr, BLOCKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    rows = (logits, bias, mask, None, None)
    memory = (scratch, num_rows, num_blocks, SEARCH_ROOM if FILTERED else 0)
    first, column, batch = tl.program_id(0) * tiles, tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    row = batch * width + column
    inverse_temperature, greedy = leave_tiles(
        rows, batch, column, row, memory, temperature, first, tiles, True,
        FILTERED, True, SAMPLE_SHIFT, BLOCKS, BLOCK,
    )  # fmt: skip

    if arrive(counters + row, num_programs):
        best, total, row_argmax = fetch_stats(row, memory, inverse_temperature, NUM_BLOCKS)
        tl.store(argmax + row, row_argmax.to(tl.int64))
        least = tl.full([], float("-inf"), tl.float32)
        if FILTERED:
            least, total, _ = filter_row(
                rows, batch, column, row, memory, least, best, total, inverse_temperature, greedy, (top_k, top_p, min_p),
                SHIFT, SAMPLE_SHIFT, NUM_GROUPS, BLOCKS,
            )  # fmt: skip
        row_lse = log_sum_exp(best, total, inverse_temperature)
        tl.store(threshold + row, tl.where(greedy, best, least))
        tl.store(lse + row, row_lse)
        valid = tl.abs(row_lse) < float("inf")
        tl.store(tokens + row, tl.where(valid, row_argmax, -1).to(tl.int64))  # unless another one is drawn
        if logprobs is not None:
            tl.store(logprobs + row, tl.where(valid, tl.minimum(best * inverse_temperature - row_lse, 0.0), 0.0))
        if valid & (not greedy):
            row_position = tl.load(position + batch) + column
            row_origin = tl.zeros_like(row_position)
            if origin is not None:
                row_origin = tl.load(origin + batch)
            noise = (tl.load(seed + batch), row_position, row_origin, noise_stream)
            token = draw_by_token(
                rows, batch, column, row, memory, least, best, inverse_temperature, noise, NUM_GROUPS, BLOCKS
            )
            tl.store(tokens + row, token.to(tl.int64))
            if logprobs is not None:
                logprob = read_at(rows, batch, column, token) * inverse_temperature - row_lse
                tl.store(logprobs + row, tl.minimum(logprob, 0.0))


def sample(
    logits: Tensor,  # [B, V] or [B, W, V] float32, bfloat16 or float16, any strides
    temperature: Tensor | None = None,  # [B] float, below 1e-5 = greedy; None: 1
    top_k: Tensor | None = None,  # [B] int; None: off
    top_p: Tensor | None = None,  # [B] float; None: off
    min_p: Tensor | None = None,  # [B] float; None: off
    *,
    seed: Tensor,  # [B] int64
    position: Tensor,  # [B] int64, absolute position of the token drawn from column 0
    origin: Tensor | None = None,  # [B] int64; None: 0
    stream: int = SAMPLE,
    logit_bias: Tensor | None = None,  # [V], [B, V] or [B, W, V] float
    token_mask: Tensor | None = None,  # likewise, bool
    return_logprobs: bool = False,
) -> Draws:
    """Tokens [B] or [B, W], and the rows' stats; one launch."""
    rows = as_rows(logits)
    stats = empty_stats(logits)
    tokens = torch.empty_like(stats.argmax)
    logprobs = torch.empty_like(stats.lse) if return_logprobs else None
    filtered = is_filtered(top_k, top_p, min_p)
    shape = shape_arguments(rows, rows.shape[:2], filtered, True, logit_bias, token_mask, batched=False)
    if tokens.numel():
        with torch.cuda.device_of(logits):
            sample_kernel[(shape["num_programs"], rows.shape[1], rows.shape[0])](
                logits=view(rows),
                bias=vocabulary_view(logit_bias, rows),
                mask=vocabulary_view(token_mask, rows),
                **row_arguments(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p),
                **row_arguments(seed=seed, position=position, origin=origin),
                tokens=tokens,
                logprobs=logprobs,
                **stats._asdict(),
                noise_stream=stream,
                **shape,
            )
    return Draws(tokens, stats, logprobs)
