"""The second launch of verification with full draft distributions: residuals max(s p - q, 0), and what they decide.

    rejection  s = 1; one row per sequence, that of the first rejection: the next token is drawn from its residual.
    block      s_i = min(s_{i-1} p(x_i) / q(x_i), 1) for each of the n drafts that are fit; with
               r_i = sum over v of max(s_i p(v) - q(v), 0) in row i, the prefix of i drafts passes if
               u_i < h_i = r_i / (r_i + 1 - s_i) for i < n, u_n < s_n for i = n;
               the longest that passes is accepted, and the next token is drawn from its residual, or for i = n from p.

(`block`: Sun et al., arXiv 2403.10444, algorithm 2.) One program per tile of a row reads the logits of target and draft and leaves
the residual mass of each block. The last program of a sequence decides, and draws in two levels, reading one block again.

Programs of a sequence that the first launch has finished end at once.
"""

import triton
import triton.language as tl

from .constants import Constant
from .jit_draw import block_masses, choose_block, choose_token, draw_in_two_levels, kept_masses
from .jit_groups import SEARCH_ROOM
from .jit_random import RESIDUAL, SAMPLE, log1m
from .jit_rows import (
    BLOCK_RESIDUAL_MASS,
    LOG2_E,
    ROW_LSE,
    ROW_PENDING,
    ROW_PREFIX,
    ROW_THRESHOLD,
    arrive,
    as_int,
    block_sum,
    blocks_at,
    fetch,
    load_temperature,
    pick,
    read,
    read_raw,
    row_at,
    tile_ids,
)
from .jit_verify import block_length, fetch_blocks, row_blocks, store_verdict
from .records import Status

_EMPTY_RESIDUAL = Constant(int(Status.EMPTY_RESIDUAL))


@triton.jit
def residual_weights(x, y, shifts, inverse_temperature, FILTERED: tl.constexpr):
    """log2(s p), and the ratio q / (s p), of tokens with logits x and y: log max(s p - q, 0) = log(s p) + log(1 - ratio).

    shifts = (lse of p - log s, lse of q, threshold of p if FILTERED, threshold of q). The ratio is NaN where both are 0.
    """
    p_shift, q_shift, threshold, draft_threshold = shifts
    scale = inverse_temperature * LOG2_E
    log_p = tl.fma(x, scale, -p_shift * LOG2_E)
    if FILTERED:
        log_p = tl.where(x >= threshold, log_p, float("-inf"))
    log_q = tl.where(y >= draft_threshold, tl.fma(y, scale, -q_shift * LOG2_E), float("-inf"))
    return log_p, tl.exp2(log_q - log_p)


@triton.jit
def _draw_from_residual(rows, draft, batch, column, mass, shifts, inverse_temperature, noise, FILTERED: tl.constexpr,
                        NUM_BLOCKS: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """A token drawn from the row's residual, whose blocks have the masses `mass` [NUM_BLOCKS], and whether there is any."""
    log_mass = tl.where(mass > 0, tl.log(mass), float("-inf"))
    block, found = choose_block(log_mass, noise, NUM_BLOCKS)
    start = block * BLOCK
    ids = start + tl.arange(0, BLOCK)
    x, y = read(rows, batch, column, ids), read(draft, batch, column, ids)
    log_p, ratio = residual_weights(x, y, shifts, inverse_temperature, FILTERED)
    weight = tl.where(ratio < 1, log_p / LOG2_E + log1m(tl.where(ratio < 1, ratio, 0.0)), float("-inf"))
    return choose_token(weight, start, noise, BLOCK), found


# Which arguments are specialised: see row_stats_kernel.
@triton.jit(
    do_not_specialize=["num_rows", "width", "num_programs"],
    do_not_specialize_on_alignment=[
        "cu_num_logits", "draft_tokens", "draft_threshold", "draft_lse", "temperature", "seed", "position",
        "tokens", "num_accepted", "status", "logprobs",
    ],
)  # fmt: skip
def residual_kernel(
    target, bias, mask,  # views [B, K+1, V_target]; bias and mask or None
    cu_num_logits,  # [B+1] int32 if these are packed, or None
    draft_tokens,  # [B, K] int64, -1 = none
    draft,  # view [B, K, V_draft]
    draft_threshold, draft_lse,  # [B, K] float32
    temperature,  # [B] or None
    seed, position,  # [B] int64
    tokens, num_accepted, status,  # [B, K+1] int64, [B] int32, [B] int32; written where the first launch deferred
    logprobs,  # [B, K+1] float32, or None; likewise
    scratch, counters,
    num_rows, width, num_programs, num_blocks,
    METHOD: tl.constexpr, FILTERED: tl.constexpr, WIDTH: tl.constexpr, AT_ONCE: tl.constexpr,
    NUM_BLOCKS: tl.constexpr, NUM_GROUPS: tl.constexpr, BLOCKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    rows, drafts = (target, bias, mask, cu_num_logits, cu_num_logits), (draft, bias, mask, None, cu_num_logits)
    memory = (scratch, num_rows, num_blocks, SEARCH_ROOM if FILTERED else 0)
    tile, column, batch = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    pending = tl.load(as_int(row_at(memory, ROW_PENDING, batch * width)))
    inverse_temperature, _ = load_temperature(temperature, batch)
    if METHOD == "rejection":
        column = pending.to(tl.int64)  # the row of the first rejection, or -1
        active, expected = column >= 0, num_programs
    else:
        active, expected = column < pending, pending * num_programs  # each row with a fit draft
    if active:
        row = batch * width + column
        ids = tile_ids(tile, BLOCKS, BLOCK)
        # There is no NaN in these rows, or their drafts would not be fit.
        x, y = read_raw(rows, batch, column, ids), read_raw(drafts, batch, column, ids)
        shifts = _shifts(row, row - batch, memory, draft_threshold, draft_lse, METHOD)
        log_p, ratio = residual_weights(x, y, shifts, inverse_temperature, FILTERED)
        mass = block_sum(tl.where(ratio < 1, tl.exp2(log_p) * (1 - ratio), 0.0))
        block = tile * BLOCKS + tl.arange(0, BLOCKS)
        tl.store(blocks_at(memory, BLOCK_RESIDUAL_MASS, row) + block, mass, mask=block < num_blocks)
        if arrive(counters + num_rows + batch, expected):
            sequence = (draft_tokens, draft_threshold, draft_lse, tl.load(seed + batch), tl.load(position + batch))
            _decide(
                rows, drafts, batch, width, pending, inverse_temperature, memory, sequence,
                (tokens, num_accepted, status, logprobs), METHOD, FILTERED, WIDTH, AT_ONCE,
                NUM_BLOCKS, NUM_GROUPS, BLOCKS, BLOCK,
            )  # fmt: skip


@triton.jit
def _shifts(row, draft_row, memory, draft_threshold, draft_lse, METHOD: tl.constexpr):
    """`shifts` of a row for `residual_weights`. Stats may come in half precision; as float32, their products are in float32."""
    p_shift = tl.load(row_at(memory, ROW_LSE, row))
    if METHOD == "block":
        p_shift -= tl.log(tl.load(row_at(memory, ROW_PREFIX, row)))
    threshold = tl.load(row_at(memory, ROW_THRESHOLD, row))
    q_shift, least = tl.load(draft_lse + draft_row), tl.load(draft_threshold + draft_row)
    return p_shift, q_shift.to(tl.float32), threshold, least.to(tl.float32)


@triton.jit
def _decide(
    rows, drafts, batch, width, pending, inverse_temperature, memory, sequence, outputs,
    METHOD: tl.constexpr, FILTERED: tl.constexpr, WIDTH: tl.constexpr, AT_ONCE: tl.constexpr,
    NUM_BLOCKS: tl.constexpr, NUM_GROUPS: tl.constexpr, BLOCKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """For a sequence whose residual masses are known: the next token, and under `block` how many drafts are accepted."""
    draft_tokens, draft_threshold, draft_lse, seed, first = sequence
    column = tl.arange(0, WIDTH).to(tl.int64)
    inside, row = column < width, batch * width + column
    token = tl.load(draft_tokens + batch * (width - 1) + column, mask=column < width - 1, other=-1)
    lse = tl.load(row_at(memory, ROW_LSE, row), mask=inside, other=float("-inf"))
    # Flags that launch 1 has found at the row after the last fit draft.
    flags = tl.load(outputs[2] + batch)
    count = pending.to(tl.int64)
    rejected = count >= 0
    if METHOD == "block":
        prefix = tl.load(row_at(memory, ROW_PREFIX, row), mask=inside, other=1.0)
        mass = tl.zeros([WIDTH], tl.float32)
        for start in range(0, memory[2], AT_ONCE):
            block = row_blocks(start, AT_ONCE)
            known = (column < pending)[None, :, None] & (block < memory[2])
            mass += block_sum(fetch_blocks(memory, BLOCK_RESIDUAL_MASS, row, known, block, 0.0))
        count = block_length(prefix, mass, pending, seed, first, column)
        rejected = count < pending
        flags = tl.where(rejected, 0, flags)
    row_lse, decider = pick(lse, column == count), batch * width + count

    next_token, found = tl.zeros([], tl.int32), rejected & (count < 0)  # false, and of the type that it has below
    if rejected:
        block = tl.arange(0, NUM_BLOCKS)
        block_mass = fetch(blocks_at(memory, BLOCK_RESIDUAL_MASS, decider) + block, block < memory[2], 0.0)
        shifts = _shifts(decider, decider - batch, memory, draft_threshold, draft_lse, METHOD)
        next_token, found = _draw_from_residual(
            rows, drafts, batch, count, block_mass, shifts, inverse_temperature, (seed, first + count, first, RESIDUAL),
            FILTERED, NUM_BLOCKS, BLOCK,
        )  # fmt: skip
        flags |= tl.where(found, 0, _EMPTY_RESIDUAL)
    valid = tl.abs(row_lse) < float("inf")
    if valid & (not found):  # all drafts accepted, or no residual left by rounding: draw from p
        threshold = tl.load(row_at(memory, ROW_THRESHOLD, decider))
        if FILTERED:
            peaks, masses = kept_masses(
                rows, batch, count, decider, memory, threshold, -1, inverse_temperature, NUM_BLOCKS, NUM_GROUPS, BLOCKS
            )
        else:
            peaks, masses = block_masses(decider, memory, NUM_BLOCKS)
        noise = (seed, first + count, tl.where(rejected, first, 0), tl.where(rejected, RESIDUAL, SAMPLE))
        next_token, _ = draw_in_two_levels(
            rows, batch, count, peaks, masses, threshold, -1, inverse_temperature, noise, BLOCK
        )
    next_token = tl.where(valid, next_token.to(tl.int64), -1)
    store_verdict(
        rows, batch, token, column, count, next_token, flags, lse, inverse_temperature, outputs, width
    )  # fmt: skip
