"""What a sequence asks of its rows and of its drafts; the parts that both launches of verification are made of."""

import triton
import triton.language as tl

from .jit_draw import draw_kept
from .jit_filters import filter_row
from .jit_groups import STEP, group_ids, list_groups, listed_groups
from .jit_random import ACCEPT, uniforms
from .jit_rows import (
    ARGMAX,
    HEAT,
    MASS,
    NO_ID,
    PEAK,
    ROW_ENTROPY,
    ROW_LSE,
    ROW_THRESHOLD,
    ROW_WINNER,
    VALUE,
    WINNER,
    as_int,
    fetch,
    fetch_stats,
    finite,
    log_sum_exp,
    pick,
    read,
    read_at,
    row_at,
    tile_heat,
    tiles_at,
    total_mass,
)
from .records import Status

_INVALID_DRAFT = tl.constexpr(int(Status.INVALID_DRAFT))
_ZERO_DRAFT_PROB = tl.constexpr(int(Status.ZERO_DRAFT_PROB))


@triton.jit
def leave_filtered_row(
    target, batch, column, row, memory, inverse_temperature, greedy, filters, noise,
    METHOD: tl.constexpr, SHIFT: tl.constexpr, SAMPLE_SHIFT: tl.constexpr,
    NUM_TILES: tl.constexpr, NUM_GROUPS: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Leave what the sequence will ask of a filtered row: threshold, lse, own token, entropy."""
    best, total, own = fetch_stats(row, memory, inverse_temperature, NUM_TILES)
    tl.store(as_int(row_at(memory, ROW_WINNER, row)), own)  # first, so that the search has its register
    threshold, total = filter_row(
        target, batch, column, row, memory, best, total, inverse_temperature, greedy, filters, SHIFT, SAMPLE_SHIFT,
        NUM_GROUPS, BLOCKS,
    )  # fmt: skip
    if METHOD == "coupled":
        if not greedy:
            own = draw_kept(
                target, batch, column, row, memory, threshold, best, inverse_temperature, noise, NUM_GROUPS, BLOCKS
            )
            tl.store(as_int(row_at(memory, ROW_WINNER, row)), own)
    if METHOD == "typical":
        heat = tl.zeros([], tl.float32)
        count = list_groups(memory, row, threshold, NUM_GROUPS)
        for start in range(0, count, STEP * BLOCKS):
            x = read(target, batch, column, group_ids(listed_groups(target, memory, row, start, count, BLOCKS)))
            heat += tile_heat(tl.where(x >= threshold, x, float("-inf")), best, inverse_temperature)
        tl.store(row_at(memory, ROW_ENTROPY, row), tl.log(total) - heat / total)
    tl.store(row_at(memory, ROW_THRESHOLD, row), threshold)
    tl.store(row_at(memory, ROW_LSE, row), log_sum_exp(best, total, inverse_temperature))


@triton.jit
def fetch_filtered_rows(row, inside, memory):
    """Threshold, lse, own token and entropy of the rows [WIDTH] of a sequence."""
    threshold = fetch(row_at(memory, ROW_THRESHOLD, row), inside, 0.0)
    lse = fetch(row_at(memory, ROW_LSE, row), inside, float("-inf"))
    own = fetch(as_int(row_at(memory, ROW_WINNER, row)), inside, -1)
    return threshold, lse, own, fetch(row_at(memory, ROW_ENTROPY, row), inside, 0.0)


@triton.jit
def fetch_tiles(row, inside, memory, MASSES: tl.constexpr, NUM_TILES: tl.constexpr):
    """Peaks and masses of the tiles of rows [WIDTH]: [WIDTH, NUM_TILES] each; without MASSES the peaks stand for both."""
    row, tile = row[:, None], tl.arange(0, NUM_TILES)[None, :]
    known = inside[:, None] & (tile < memory[2])
    peak = fetch(tiles_at(memory, PEAK, row) + tile, known, float("-inf"))
    mass = peak
    if MASSES:
        mass = fetch(tiles_at(memory, MASS, row) + tile, known, 0.0)
    return peak, mass


@triton.jit
def from_tiles(peak, mass, row, inside, memory, x_left_out, inverse_temperature, greedy, METHOD: tl.constexpr,
               MASSES: tl.constexpr, NUM_TILES: tl.constexpr):  # fmt: skip
    """As `fetch_filtered_rows`, of unfiltered rows. x_left_out [WIDTH]: the logit of the token that is not in their tiles."""
    row, tile = row[:, None], tl.arange(0, NUM_TILES)[None, :]
    known = inside[:, None] & (tile < memory[2])
    best = tl.maximum(tl.max(peak, axis=1), x_left_out)
    entropy = tl.zeros_like(best)
    if MASSES:
        total = total_mass(peak, mass, best[:, None], inverse_temperature, 1)
        total += tl.exp((x_left_out - finite(best)) * inverse_temperature)
        if METHOD == "typical":
            heat = fetch(tiles_at(memory, HEAT, row) + tile, known, 0.0)
            cooler = tl.where(mass > 0, (peak - best[:, None]) * inverse_temperature, 0.0)
            heat = tl.sum(tl.exp(cooler) * (heat + mass * cooler), axis=1)
            entropy = tl.log(total) - heat / total
    else:
        total = tl.where(best == float("-inf"), 0.0, 1.0)  # only whether there is a distribution
    own = tl.zeros_like(best).to(tl.int32)
    if greedy:
        argmax = fetch(as_int(tiles_at(memory, ARGMAX, row)) + tile, known, NO_ID)
        own = tl.min(tl.where(peak == best[:, None], argmax, NO_ID), axis=1)
    else:
        if METHOD == "coupled":
            value = fetch(tiles_at(memory, VALUE, row) + tile, known, float("-inf"))
            winner = fetch(as_int(tiles_at(memory, WINNER, row)) + tile, known, NO_ID)
            value += tl.where(value > float("-inf"), (peak - best[:, None]) * inverse_temperature, 0.0)
            own = tl.min(tl.where(value == tl.max(value, axis=1)[:, None], winner, NO_ID), axis=1)
    threshold = tl.full(best.shape, float("-inf"), tl.float32)
    return threshold, log_sum_exp(best, total, inverse_temperature), own, entropy


@triton.jit
def read_drafts(token, draft, draft_threshold, draft_lse, batch, column, num_drafts):
    """Of the drafts [WIDTH], in the drafter's rows: logit, lse and threshold."""
    at, inside = batch * num_drafts + column, column < num_drafts
    q_lse = tl.load(draft_lse + at, mask=inside, other=0.0)
    least = tl.load(draft_threshold + at, mask=inside, other=0.0)
    return read_at(draft, batch, column, token), q_lse, least


@triton.jit
def fit_drafts(token, lse, drafts, column, num_drafts, inverse_temperature, greedy):
    """Per draft [WIDTH]: whether it can be tested at all, q of its token, and its flags; drafts: what `read_drafts` has read,
    None for one-hot drafts, whose q is 1."""
    testable = (column < num_drafts) & (token >= 0) & (tl.abs(lse) < float("inf"))
    fit, q, flags = testable, tl.full(lse.shape, 1.0, tl.float32), tl.zeros_like(token).to(tl.int32)
    if drafts is not None:
        y, q_lse, least = drafts
        q = tl.where(y >= least, tl.exp(y * inverse_temperature - q_lse), 0.0)
        valid = tl.abs(q_lse) < float("inf")
        fit = tl.where(greedy, testable, testable & valid & (q != 0))
        flags = tl.where(testable & ~fit, tl.where(valid, _ZERO_DRAFT_PROB, _INVALID_DRAFT), 0)
    return fit, q, flags


@triton.jit
def draft_prefix(p, q, column, num_drafts):
    """s [WIDTH]: s_0 = 1, s_i = min(s_{i-1} p(x_i) / q(x_i), 1); p and q of x_i in lane i - 1."""
    s = tl.full([], 1.0, tl.float32)
    prefix = tl.full(p.shape, 1.0, tl.float32)
    for i in range(num_drafts):
        s = tl.minimum(tl.div_rn(s * pick(p, column == i), pick(q, column == i)), 1.0)
        prefix = tl.where(column == i + 1, s, prefix)
    return prefix


@triton.jit
def block_length(prefix, mass, length, seed, position, column):
    """The longest prefix that passes its own test; prefix s and mass r [WIDTH] in lane i, `length` = n."""
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
        tl.store(logprobs + at, tl.where(kept >= 0, x * inverse_temperature - lse, 0.0), mask=inside)
