"""Rejection verification (Leviathan et al., arXiv 2211.17192; Chen et al., arXiv 2302.01318); see `reference.verify`.

With p the target's and q the drafter's distribution, each from logits, temperature and stats:

    accept x_i while u_i q(x_i) < p(x_i);  on a rejection draw from max(p - q, 0), after the last draft from p

A draw is argmax of log weight + Gumbel noise, and log max(p - q, 0) = log p + log(1 - q / p).

Launch 1 computes the stats of every target row (one more launch those of the draft rows, unless the sampler kept
them). Launch 2 has one program per sequence: it tests all drafts at once, reading two logits for each, and then
passes over the row that decides, and over the draft's row beside it if that was rejected. So K + 2 target rows and
one draft row are read in all, and nothing as wide as the vocabulary is written. Sequences that end in an argmax or
in an error skip the pass.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .jit_helpers import (
    ACCEPT,
    OPTIONS,
    RESIDUAL,
    SAMPLE,
    block_size,
    draft_ratio,
    finish_draw,
    fold_draw,
    gumbel_block,
    load_logits,
    load_temperature,
    log1m,
    prob_of,
    start_draw,
    uniforms,
)
from .records import RowStats, Status, Verdict
from .row_stats import row_stats

_NAN_TARGET = tl.constexpr(int(Status.NAN_TARGET))
_EMPTY_TARGET = tl.constexpr(int(Status.EMPTY_TARGET))
_INVALID_DRAFT = tl.constexpr(int(Status.INVALID_DRAFT))
_ZERO_DRAFT_PROB = tl.constexpr(int(Status.ZERO_DRAFT_PROB))
_EMPTY_RESIDUAL = tl.constexpr(int(Status.EMPTY_RESIDUAL))


@triton.jit
def _test_drafts(
    target, target_vocab, target_stride_row, target_stride_token,
    target_threshold, target_lse, target_argmax,
    draft, draft_vocab, draft_stride_row, draft_stride_token, draft_threshold, draft_lse,
    draft_tokens, num_drafts, inverse_temperature, greedy, seed, position,
    BLOCK_WIDTH: tl.constexpr,
):  # fmt: skip
    """How many drafts stand, whether the next was rejected by its test, and the flags of the one that ended it.

    All pointers point to the sequence's first column. Each draft has a lane; `fit` says that it can be tested.
    """
    column = tl.arange(0, BLOCK_WIDTH).to(tl.int64)
    inside = column < num_drafts
    token = tl.load(draft_tokens + column, mask=inside, other=-1)
    argmax = tl.load(target_argmax + column, mask=inside, other=-1)
    lse = tl.load(target_lse + column, mask=inside, other=0.0)
    threshold = tl.load(target_threshold + column, mask=inside, other=0.0)
    row = target + column * target_stride_row
    p = prob_of(row, token, target_vocab, target_stride_token, threshold, lse, inverse_temperature)
    testable = (token >= 0) & (tl.abs(lse) < float("inf"))
    fit = testable
    flags = tl.zeros([BLOCK_WIDTH], tl.int32)
    bound = uniforms(seed, position + column, position, ACCEPT)
    if draft is not None:
        lse = tl.load(draft_lse + column, mask=inside, other=0.0)
        threshold = tl.load(draft_threshold + column, mask=inside, other=0.0)
        row = draft + column * draft_stride_row
        q = prob_of(row, token, draft_vocab, draft_stride_token, threshold, lse, inverse_temperature)
        valid = tl.abs(lse) < float("inf")
        fit = tl.where(greedy, testable, testable & valid & (q != 0))
        flags = tl.where(testable & ~fit, tl.where(valid, _ZERO_DRAFT_PROB, _INVALID_DRAFT), 0)
        bound *= q
    accepted = fit & tl.where(greedy, token == argmax, bound < p)
    count = tl.min(tl.where(accepted, num_drafts, column), axis=0)  # leading ones; lane K is never accepted
    here = column == count
    rejected = tl.max(tl.where(here & fit, 1, 0), axis=0) > 0
    return count, rejected, tl.max(tl.where(here, flags, 0), axis=0)


@triton.jit
def _draw_next(
    target, target_vocab, target_stride_token, threshold, lse,
    draft, draft_vocab, draft_stride_token, draft_threshold, draft_lse,
    draft_token, rejected, inverse_temperature, seed, position, origin, stream,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """One pass over the deciding row: the token drawn, and whether the residual it should come from was empty.

    target and draft point to their row. The draw from p is gathered beside that from the residual, because only
    after the pass is it known that p <= q everywhere, which rounding can cause.
    """
    best, extra, best_id = start_draw(BLOCK)
    best_r, extra_r, id_r = start_draw(BLOCK)
    for start in range(0, target_vocab, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        x = load_logits(target, ids, target_vocab, target_stride_token)
        x = tl.where(x >= threshold, x, float("-inf"))
        noise = gumbel_block(seed, start, position, origin, stream, BLOCK)
        best, extra, best_id = fold_draw(best, extra, best_id, x, noise, ids, inverse_temperature)
        if rejected:
            if draft is None:
                left = noise + tl.where(ids == draft_token, float("-inf"), 0.0)
            else:
                y = load_logits(draft, ids, draft_vocab, draft_stride_token)
                ratio = draft_ratio(x, y, threshold, lse, draft_threshold, draft_lse, inverse_temperature)
                left = noise + tl.where(ratio < 1, log1m(tl.where(ratio < 1, ratio, 0.0)), float("-inf"))
            best_r, extra_r, id_r = fold_draw(best_r, extra_r, id_r, x, left, ids, inverse_temperature)
    token, _ = finish_draw(best, extra, best_id, inverse_temperature)
    token_r, any_r = finish_draw(best_r, extra_r, id_r, inverse_temperature)
    return tl.where(rejected & any_r, token_r, token), rejected & ~any_r


# On what is specialised, see row_stats_kernel.
@triton.jit(
    do_not_specialize=["num_drafts"],
    do_not_specialize_on_alignment=[
        "target_threshold", "target_lse", "target_argmax", "draft_tokens", "draft_threshold", "draft_lse",
        "temperature", "seed", "position", "tokens", "num_accepted", "status",
    ],
)  # fmt: skip
def verify_kernel(
    target,  # [B, K+1, V_target] logits
    target_threshold,  # [B, K+1] float
    target_lse,  # [B, K+1] float
    target_argmax,  # [B, K+1] int64
    draft_tokens,  # [B, K] int64, -1 = none
    draft,  # [B, K, V_draft] logits, or None: one-hot
    draft_threshold,  # [B, K] float, or None
    draft_lse,  # [B, K] float, or None
    temperature,  # [B] float, or None
    seed,  # [B] int64
    position,  # [B] int64
    tokens,  # [B, K+1] int64, written
    num_accepted,  # [B] int32, written
    status,  # [B] int32, written
    num_drafts,
    target_vocab, target_stride_batch, target_stride_row, target_stride_token,
    draft_vocab, draft_stride_batch, draft_stride_row, draft_stride_token,
    BLOCK_WIDTH: tl.constexpr,  # a power of two >= K+1
    BLOCK: tl.constexpr,
):  # fmt: skip
    batch = tl.program_id(0).to(tl.int64)
    inverse_temperature, greedy = load_temperature(temperature, batch)
    row_seed, first = tl.load(seed + batch), tl.load(position + batch)
    target += batch * target_stride_batch
    target_threshold += batch * (num_drafts + 1)
    target_lse += batch * (num_drafts + 1)
    target_argmax += batch * (num_drafts + 1)
    draft_tokens += batch * num_drafts
    if draft is not None:
        draft += batch * draft_stride_batch
        draft_threshold += batch * num_drafts
        draft_lse += batch * num_drafts

    count, rejected, flags = _test_drafts(
        target, target_vocab, target_stride_row, target_stride_token,
        target_threshold, target_lse, target_argmax,
        draft, draft_vocab, draft_stride_row, draft_stride_token, draft_threshold, draft_lse,
        draft_tokens, num_drafts, inverse_temperature, greedy, row_seed, first, BLOCK_WIDTH,
    )  # fmt: skip

    lse = tl.load(target_lse + count)
    next_token = tl.load(target_argmax + count)
    flags |= tl.where(lse != lse, _NAN_TARGET, 0) | tl.where(lse == float("-inf"), _EMPTY_TARGET, 0)
    if tl.abs(lse) < float("inf"):
        if not greedy:
            draft_row, q_threshold, q_lse = draft, 0.0, 0.0
            if draft is not None:
                draft_row += count * draft_stride_row
                q_threshold = tl.load(draft_threshold + count, mask=rejected, other=0.0)
                q_lse = tl.load(draft_lse + count, mask=rejected, other=0.0)
            drawn, empty = _draw_next(
                target + count * target_stride_row, target_vocab, target_stride_token,
                tl.load(target_threshold + count), lse,
                draft_row, draft_vocab, draft_stride_token, q_threshold, q_lse,
                tl.load(draft_tokens + count, mask=rejected, other=-1), rejected, inverse_temperature,
                row_seed, first + count, tl.where(rejected, first, 0),
                tl.where(rejected, RESIDUAL, SAMPLE), BLOCK,
            )  # fmt: skip
            next_token = drawn.to(tl.int64)
            flags |= tl.where(empty, _EMPTY_RESIDUAL, 0)
    else:
        next_token = tl.full([], -1, tl.int64)

    column = tl.arange(0, BLOCK_WIDTH)
    kept = tl.load(draft_tokens + column, mask=column < count, other=-1)
    kept = tl.where(column == count, next_token, kept)
    tl.store(tokens + batch * (num_drafts + 1) + column, kept, mask=column <= num_drafts)
    tl.store(num_accepted + batch, count.to(tl.int32))
    tl.store(status + batch, flags)


def verify(
    target_logits: Tensor,  # [B, K+1, V_target] float32, bfloat16 or float16, any strides
    draft_tokens: Tensor,  # [B, K] int64, -1 = none
    draft_logits: Tensor | None = None,  # [B, K, V_draft] likewise; None: one-hot
    draft_stats: RowStats | None = None,  # of draft_logits, fields [B, K]
    *,
    temperature: Tensor | None = None,  # [B] float, 0 = greedy; None: 1
    seed: Tensor,  # [B] int64
    position: Tensor,  # [B] int64, absolute position of the first drafted token
) -> Verdict:
    """How many drafts stand, and the next token, for unfiltered rows; see `reference.verify`.

    Two launches, or three where draft_logits come without their stats.
    """
    batch, width, target_vocab = target_logits.shape
    stats = row_stats(target_logits, temperature)
    if draft_logits is not None and draft_stats is None:
        draft_stats = row_stats(draft_logits, temperature)
    draft_vocab = 1
    draft_strides: tuple[int, ...] = (1, 1, 1)
    if draft_logits is not None:
        draft_vocab, draft_strides = draft_logits.shape[-1], draft_logits.stride()
    tokens = torch.empty((batch, width), dtype=torch.int64, device=target_logits.device)
    num_accepted = torch.empty(batch, dtype=torch.int32, device=target_logits.device)
    status = torch.empty_like(num_accepted)
    with torch.cuda.device_of(target_logits):
        verify_kernel[(batch,)](
            target=target_logits,
            target_threshold=stats.threshold,
            target_lse=stats.lse,
            target_argmax=stats.argmax,
            draft_tokens=draft_tokens.contiguous(),
            draft=draft_logits,
            draft_threshold=None if draft_stats is None else draft_stats.threshold.contiguous(),
            draft_lse=None if draft_stats is None else draft_stats.lse.contiguous(),
            temperature=None if temperature is None else temperature.contiguous(),
            seed=seed.contiguous(),
            position=position.contiguous(),
            tokens=tokens,
            num_accepted=num_accepted,
            status=status,
            num_drafts=width - 1,
            target_vocab=target_vocab,
            target_stride_batch=target_logits.stride(0),
            target_stride_row=target_logits.stride(1),
            target_stride_token=target_logits.stride(2),
            draft_vocab=draft_vocab,
            draft_stride_batch=draft_strides[0],
            draft_stride_row=draft_strides[1],
            draft_stride_token=draft_strides[2],
            BLOCK_WIDTH=triton.next_power_of_2(width),
            BLOCK=block_size(target_vocab),
            **OPTIONS,
        )
    return Verdict(tokens, num_accepted, status)
