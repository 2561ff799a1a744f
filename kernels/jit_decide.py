"""The work of the last program of a sequence in launch 1: test its drafts and draw the next token; see `verify.py`."""

import triton
import triton.language as tl

from .constants import Constant
from .jit_draw import block_masses, draw_in_two_levels, kept_masses
from .jit_random import ACCEPT, RESIDUAL, SAMPLE, uniforms
from .jit_rows import ROW_LSE, ROW_PENDING, ROW_PREFIX, ROW_THRESHOLD, as_int, pick, read_at, row_at
from .jit_verify import block_length, draft_prefix, fetch_rows, from_blocks, read_drafts, store_verdict, testable_drafts
from .records import Status

_NAN_TARGET = Constant(int(Status.NAN_TARGET))
_EMPTY_TARGET = Constant(int(Status.EMPTY_TARGET))
_EMPTY_RESIDUAL = Constant(int(Status.EMPTY_RESIDUAL))


@triton.jit
def decide(
    rows, batch, width, memory, sequence, outputs, typical_epsilon, typical_delta,
    METHOD: tl.constexpr, FILTERED: tl.constexpr, BY_ROW: tl.constexpr, LEAVE_OUT: tl.constexpr,
    WIDTH: tl.constexpr, AT_ONCE: tl.constexpr,
    NUM_BLOCKS: tl.constexpr, NUM_GROUPS: tl.constexpr, BLOCKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Test a sequence's drafts and emit its tokens. What needs the rows of draft logits is left to the second launch."""
    draft_tokens, draft, draft_threshold, draft_lse, seed, position, inverse_temperature, greedy = sequence
    seed, first = tl.load(seed + batch), tl.load(position + batch)
    num_drafts = width - 1
    column = tl.arange(0, WIDTH).to(tl.int64)
    inside, row = column < width, batch * width + column
    token = tl.load(draft_tokens + batch * num_drafts + column, mask=column < num_drafts, other=-1)

    # The rows, and p and q of the drafted tokens. All loads are issued before any result is used.
    if BY_ROW:
        threshold, lse, own, entropy = fetch_rows(row, inside, memory)
    x = read_at(rows, batch, column, token)
    drafts = None
    if draft_lse is not None:
        drafts = read_drafts(token, draft, draft_threshold, draft_lse, batch, column, num_drafts)
    if not BY_ROW:
        x_left_out = tl.full([WIDTH], float("-inf"), tl.float32)
        if LEAVE_OUT:
            x_left_out = tl.where(greedy, x_left_out, x)
        threshold, lse, own, entropy = from_blocks(
            row, inside, memory, x_left_out, inverse_temperature, greedy, METHOD, WIDTH, AT_ONCE
        )
    p = tl.where((x >= threshold) & (x > float("-inf")), tl.exp(x * inverse_temperature - lse), 0.0)
    testable, q, flags = testable_drafts(token, lse, drafts, column, num_drafts, inverse_temperature, greedy)

    # How many drafts are accepted.
    if METHOD == "coupled":
        accepted = token == own
    elif METHOD == "typical":
        accepted = p > tl.minimum(typical_delta * tl.exp(-entropy), typical_epsilon)
    else:
        accepted = uniforms(seed, first + column, first, ACCEPT) * q < p
    accepted = testable & tl.where(greedy, token == own, accepted)
    count = tl.min(tl.where(accepted, num_drafts, column), axis=0)  # leading ones; lane K is never accepted
    deferred = count < 0
    if METHOD == "block":
        length = tl.min(tl.where(testable, num_drafts, column), axis=0)
        prefix = draft_prefix(p, q, column, num_drafts)
        if draft_lse is None:
            mass = prefix * (1 - p)  # the sum of max(s p - one-hot, 0) is s - s p(x)
            count = tl.where(greedy, count, block_length(prefix, mass, length, seed, first, column))
        else:
            tl.store(row_at(memory, ROW_PREFIX, row), prefix, mask=inside)
            deferred = (length > 0) & (not greedy)
            count = tl.where(deferred, length, count)
    here = column == count
    rejected = (pick(testable.to(tl.int32), here) > 0) & (METHOD != "typical")
    if draft_lse is not None:  # what launch 2 needs from this one
        if METHOD == "rejection":
            deferred = rejected & (not greedy)
        tl.store(row_at(memory, ROW_LSE, row), lse, mask=inside)
        tl.store(row_at(memory, ROW_THRESHOLD, row), threshold, mask=inside)
        tl.store(as_int(row_at(memory, ROW_PENDING, batch * width)), tl.where(deferred, count, -1).to(tl.int32))

    # What comes next.
    row_lse = pick(lse, here)
    flag = pick(flags, here) | tl.where(row_lse != row_lse, _NAN_TARGET, 0)
    flag |= tl.where(row_lse == float("-inf"), _EMPTY_TARGET, 0)
    valid = tl.abs(row_lse) < float("inf")
    next_token = pick(own, here).to(tl.int64)
    if METHOD != "coupled":
        if valid & (not greedy) & (not deferred):
            row_threshold = pick(threshold, here)
            left_out = tl.where(rejected, pick(token, here), -1)
            decider = batch * width + count
            if FILTERED:
                peaks, masses = kept_masses(
                    rows, batch, count, decider, memory, row_threshold, left_out, inverse_temperature,
                    NUM_BLOCKS, NUM_GROUPS, BLOCKS,
                )  # fmt: skip
            else:
                peaks, masses = block_masses(decider, memory, NUM_BLOCKS)
            noise = (seed, first + count, tl.where(rejected, first, 0), tl.where(rejected, RESIDUAL, SAMPLE))
            drawn, found = draw_in_two_levels(
                rows, batch, count, peaks, masses, row_threshold, left_out, inverse_temperature, noise, BLOCK
            )
            # If no other token than the rejected one has a probability, p is all on the rejected one.
            next_token = tl.where(found, drawn.to(tl.int64), left_out)
            flag |= tl.where(found, 0, _EMPTY_RESIDUAL)
    store_verdict(
        rows, batch, token, column, count, tl.where(valid, next_token, -1), flag, lse, inverse_temperature, outputs,
        width,
    )  # fmt: skip
