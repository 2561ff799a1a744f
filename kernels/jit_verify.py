"""Parts of both launches of verification: what a sequence needs of its rows and of its drafts."""

import triton
import triton.language as tl

from .constants import Constant
from .jit_draw import draw_by_token
from .jit_filters import filter_row
from .jit_groups import list_groups, read_listed
from .jit_random import ACCEPT, SAMPLE, uniforms
from .jit_rows import (
    BLOCK_ARGMAX,
    BLOCK_MASS,
    BLOCK_MOMENT,
    BLOCK_PEAK,
    NO_ID,
    ROW_ENTROPY,
    ROW_LISTED,
    ROW_LSE,
    ROW_THRESHOLD,
    ROW_WINNER,
    as_int,
    block_max,
    block_sum,
    blocks_at,
    fetch,
    fetch_stats,
    log_sum_exp,
    moment_of,
    peak_or_0,
    pick,
    read_at,
    row_at,
    scaled_mass,
)
from .records import Status

_INVALID_DRAFT = Constant(int(Status.INVALID_DRAFT))
_ZERO_DRAFT_PROB = Constant(int(Status.ZERO_DRAFT_PROB))


@triton.jit
def leave_row(
    target, batch, column, row, memory, inverse_temperature, greedy, filters, seed, position,
    METHOD: tl.constexpr, FILTERED: tl.constexpr, MASSES: tl.constexpr, SHIFT: tl.constexpr, SAMPLE_SHIFT: tl.constexpr,
    NUM_BLOCKS: tl.constexpr, NUM_GROUPS: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Leave what the sequence needs of a row that is filtered or draws by itself: threshold, lse, own token, entropy.

    Without MASSES the lse only tells whether there is a distribution."""
    best, total, own = fetch_stats(row, memory, inverse_temperature, NUM_BLOCKS)
    tl.store(as_int(row_at(memory, ROW_WINNER, row)), own)  # first, which frees its register for the search
    threshold = tl.full([], float("-inf"), tl.float32)
    if FILTERED:
        threshold, total, listed = filter_row(
            target, batch, column, row, memory, threshold, best, total, inverse_temperature, greedy, filters, SHIFT, SAMPLE_SHIFT,
            NUM_GROUPS, BLOCKS,
        )  # fmt: skip
        tl.store(as_int(row_at(memory, ROW_LISTED, row)), listed)
    if not MASSES:
        total = tl.where(best == float("-inf"), 0.0, 1.0)
    tl.store(row_at(memory, ROW_THRESHOLD, row), threshold)
    tl.store(row_at(memory, ROW_LSE, row), log_sum_exp(best, total, inverse_temperature))
    if METHOD == "coupled":
        if not greedy:
            own_position = tl.load(position + batch) + column
            noise = (tl.load(seed + batch), own_position, tl.zeros_like(own_position), SAMPLE)
            own = draw_by_token(
                target, batch, column, row, memory, threshold, best, inverse_temperature, noise, NUM_GROUPS, BLOCKS
            )
            tl.store(as_int(row_at(memory, ROW_WINNER, row)), own)
    if METHOD == "typical":
        moment = tl.zeros([], tl.float32)
        count = list_groups(memory, row, threshold, NUM_GROUPS)
        if FILTERED:  # it takes the place of the search's list, which the deciding row would read
            tl.store(as_int(row_at(memory, ROW_LISTED, row)), count)
        for start in range(0, count, BLOCKS):
            x = read_listed(target, batch, column, memory, row, start, count, BLOCKS)
            d = (tl.where(x >= threshold, x, float("-inf")) - best) * inverse_temperature
            moment += tl.sum(tl.sum(moment_of(d), axis=1), axis=0)
        tl.store(row_at(memory, ROW_ENTROPY, row), tl.log(total) - moment / total)


@triton.jit
def fetch_rows(row, inside, memory):
    """Threshold, lse, own token and entropy of the rows [WIDTH] of a sequence."""
    threshold = fetch(row_at(memory, ROW_THRESHOLD, row), inside, 0.0)
    lse = fetch(row_at(memory, ROW_LSE, row), inside, float("-inf"))
    own = fetch(as_int(row_at(memory, ROW_WINNER, row)), inside, -1)
    return threshold, lse, own, fetch(row_at(memory, ROW_ENTROPY, row), inside, 0.0)


@triton.jit
def fetch_blocks(memory, FIELD: tl.constexpr, row, known, block, other):
    """A field of blocks `block` [N, 1, 32] of the rows of a sequence, row [WIDTH]: [N, WIDTH, 32]; `other` where not `known`.

    A warp then has whole rows, as it has whole blocks of a tile. Without the hint Triton spreads the first axis over the warps."""
    at = tl.max_contiguous((row * memory[2])[None, :, None] + block, [1, 2, 32])
    return fetch(blocks_at(memory, FIELD, 0) + at, known, other)


@triton.jit
def row_blocks(start, AT_ONCE: tl.constexpr):
    """Numbers of AT_ONCE blocks from `start` on, [AT_ONCE / 32, 1, 32]."""
    return start + (tl.arange(0, AT_ONCE // 32) * 32)[:, None, None] + tl.arange(0, 32)[None, None, :]


@triton.jit
def from_blocks(row, inside, memory, x_left_out, inverse_temperature, greedy, METHOD: tl.constexpr, WIDTH: tl.constexpr,
                AT_ONCE: tl.constexpr):  # fmt: skip
    """As `fetch_rows`, for rows that have no work of their own: from the stats of their blocks, AT_ONCE blocks at a time.

    x_left_out [WIDTH]: the logit of the token that is left out of the blocks, -inf if none is."""
    best, own = tl.full([WIDTH], float("-inf"), tl.float32), tl.full([WIDTH], NO_ID, tl.int32)
    total, moment = tl.zeros([WIDTH], tl.float32), tl.zeros([WIDTH], tl.float32)
    for start in range(0, memory[2], AT_ONCE):
        block = row_blocks(start, AT_ONCE)
        known = inside[None, :, None] & (block < memory[2])
        peak = fetch_blocks(memory, BLOCK_PEAK, row, known, block, float("-inf"))
        mass = fetch_blocks(memory, BLOCK_MASS, row, known, block, 0.0)
        higher = tl.maximum(best, block_max(peak))
        # Below -1000 exp is 0, also times any finite number. Without the bound, a mass times the lowest float would not be finite.
        colder = tl.where(total > 0, tl.maximum((best - higher) * inverse_temperature, -1000.0), 0.0)
        if METHOD == "typical":
            cooler = tl.where(mass > 0, tl.maximum((peak - higher[None, :, None]) * inverse_temperature, -1000.0), 0.0)
            its_moment = fetch_blocks(memory, BLOCK_MOMENT, row, known, block, 0.0)
            its_moment = block_sum(tl.exp(cooler) * (its_moment + mass * cooler))
            moment = tl.exp(colder) * (moment + total * colder) + its_moment
        total = tl.exp(colder) * total + block_sum(scaled_mass(peak, mass, higher[None, :, None], inverse_temperature))
        if greedy:
            argmax = fetch_blocks(memory, BLOCK_ARGMAX, row, known, block, 0.0).to(tl.int32, bitcast=True)
            its_own = tl.min(tl.min(tl.where(known & (peak == higher[None, :, None]), argmax, NO_ID), axis=0), axis=1)
            own = tl.where(best == higher, tl.minimum(own, its_own), its_own)
        best = higher
    entropy = tl.zeros([WIDTH], tl.float32)
    if METHOD == "typical":
        entropy = tl.log(total) - moment / total
    higher = tl.maximum(best, x_left_out)
    total = tl.where(total > 0, tl.exp((best - higher) * inverse_temperature) * total, total)
    total += tl.exp((x_left_out - peak_or_0(higher)) * inverse_temperature)
    threshold = tl.full([WIDTH], float("-inf"), tl.float32)
    return threshold, log_sum_exp(higher, total, inverse_temperature), own, entropy


@triton.jit
def read_drafts(token, draft, draft_threshold, draft_lse, batch, column, num_drafts):
    """Logit, lse and threshold of each draft [WIDTH] in its row of draft logits."""
    at, inside = batch * num_drafts + column, column < num_drafts
    q_lse = tl.load(draft_lse + at, mask=inside, other=0.0).to(tl.float32)
    least = tl.load(draft_threshold + at, mask=inside, other=0.0).to(tl.float32)
    return read_at(draft, batch, column, token), q_lse, least


@triton.jit
def testable_drafts(token, lse, drafts, column, num_drafts, inverse_temperature, greedy):
    """Per draft [WIDTH]: whether it can be tested at all, q of its token, and its flags.

    drafts: what `read_drafts` has read; None for one-hot drafts, whose q is 1."""
    there = (column < num_drafts) & (token >= 0) & (tl.abs(lse) < float("inf"))
    testable, q, flags = there, tl.full(lse.shape, 1.0, tl.float32), tl.zeros_like(token).to(tl.int32)
    if drafts is not None:
        y, q_lse, least = drafts
        q = tl.where(y >= least, tl.exp(y * inverse_temperature - q_lse), 0.0)
        valid = tl.abs(q_lse) < float("inf")
        testable = tl.where(greedy, there, there & valid & (q != 0))
        flags = tl.where(there & ~testable, tl.where(valid, _ZERO_DRAFT_PROB, _INVALID_DRAFT), 0)
    return testable, q, flags


@triton.jit
def draft_prefix(p, q, column, num_drafts):
    """s [WIDTH]: s_0 = 1, s_i = min(s_{i-1} p(x_i) / q(x_i), 1). p and q of x_i are in lane i - 1."""
    s = tl.full([], 1.0, tl.float32)
    prefix = tl.full(p.shape, 1.0, tl.float32)
    for i in range(num_drafts):
        s = tl.minimum(tl.div_rn(s * pick(p, column == i), pick(q, column == i)), 1.0)
        prefix = tl.where(column == i + 1, s, prefix)
    return prefix


@triton.jit
def block_length(prefix, mass, length, seed, position, column):
    """Length of the longest prefix that passes its own test; s_i and r_i are in lane i of `prefix` and `mass`; n = `length`."""
    u = uniforms(seed, position + column - 1, position, ACCEPT)
    passed = tl.where(column < length, u * (mass + 1 - prefix) < mass, u < prefix)
    return tl.max(tl.where(passed & (column > 0) & (column <= length), column, 0), axis=0)


@triton.jit
def store_verdict(rows, batch, token, column, count, next_token, flags, lse, inverse_temperature, outputs, width):
    """Write the accepted ones of the drafts `token` [WIDTH], then the next token, then -1."""
    tokens, num_accepted, status, logprobs = outputs
    kept = tl.where(column < count, token, -1)
    kept = tl.where(column == count, next_token, kept)
    at, inside = batch * width + column, column < width
    tl.store(tokens + at, kept, mask=inside)
    tl.store(num_accepted + batch, count.to(tl.int32))
    tl.store(status + batch, flags)
    if logprobs is not None:
        x = read_at(rows, batch, column, kept)
        tl.store(logprobs + at, tl.where(kept >= 0, tl.minimum(x * inverse_temperature - lse, 0.0), 0.0), mask=inside)
