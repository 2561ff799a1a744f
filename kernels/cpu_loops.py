"""The loops over rows of logits on a CPU, which Numba compiles; cpu.py calls them. What they compute is in reference.py.

A row is read block by block of DRAW_BLOCK tokens, which stay in the first-level cache while they are worked on in vector
instructions. Each sequence is worked on by itself, from its first row on, up to the row that decides: rows after it are not read,
but for those of all drafts under `block`. Beside the rows there is scratch memory for the sums of blocks, and, under top-k or
top-p, for one row's largest logits.

If a row up to that one, or a draft's row, is not a distribution, the loops give no verdict, and the reference decides instead: the
verdict and its status.

All loops are in one file, because Numba keeps what it compiled until the file of the outermost function changes.
"""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numba import njit

from .philox import ACCEPT, GROUP, GROUP_LEVEL, MUL_0, MUL_1, RESIDUAL, ROUNDS, SAMPLE, UNIFORM_MAX, WEYL_0, WEYL_1
from .records import DRAW_BLOCK, GREEDY_BELOW, Status

REJECTION, BLOCK, COUPLED = 0, 1, 2  # the rules of verification
STATS, BY_TOKEN, BY_INVERSION = 0, 1, 2  # what is done with a row: nothing more, or a draw
DEPTHS = 8  # at which a filter's threshold is looked for, the last one 512 T below the peak

_F32, _I32, _I64, _U64 = np.float32, np.int32, np.int64, np.uint64
# A number of Python's is a type of its own to Numba, for which a function that gets it is compiled once more.
_0, _NONE, _ACCEPT, _RESIDUAL, _SAMPLE = (_I64(number) for number in (0, -1, ACCEPT, RESIDUAL, SAMPLE))
_INF = _F32(np.inf)
_LOWEST = np.finfo(_F32).min
_LOG2_E = _F32(math.log2(math.e))
_GREEDY_BELOW = _F32(GREEDY_BELOW)
_TINY = np.finfo(_F32).tiny
_UNIFORM_MAX = _F32(UNIFORM_MAX)
_BLOCK_INDEX = 1 << 31  # philox.BLOCK_LEVEL as an index
_EMPTY_RESIDUAL = int(Status.EMPTY_RESIDUAL)
# 2**f = exp(f log 2) = sum over k of (f log 2)**k / k!; for |f| <= 1/2 what follows is below 1e-8.
_C1, _C2, _C3, _C4, _C5, _C6, _C7 = (_F32(math.log(2) ** k / math.factorial(k)) for k in range(1, 8))


def _called_from_python(function: Callable[..., None]) -> Any:
    """Compiled when first called, and kept on disk for later processes where there is a place that can be written to."""
    try:
        return njit(cache=True, nogil=True, error_model="numpy")(function)
    except RuntimeError:  # there is none
        return njit(nogil=True, error_model="numpy")(function)


def kept(loop: Any) -> bool:
    """Whether a loop called from Python is compiled, in this process or by an earlier one."""
    if loop.signatures:
        return True
    folder, line = loop.stats.cache_path, loop.py_func.__code__.co_firstlineno
    return folder is not None and any(Path(folder).glob(f"*.{loop.__name__}-{line}.*.nbi"))


_OPTIONS = dict(no_cpython_wrapper=True, no_cfunc_wrapper=True, error_model="numpy")  # x / 0 is not an error
_inner = njit(**_OPTIONS)
_over_numbers = njit(**_OPTIONS, fastmath={"contract", "reassoc", "nsz"})


# Random numbers: see philox.py. `noise` is (seed, position, origin, stream).


@_inner
def _philox(noise, index):
    """Four words of 32 bits, as uint64."""
    seed, position, origin, stream = noise
    mask, half = _U64(0xFFFFFFFF), _U64(32)
    c0, c1, c2, c3 = _U64(index) & mask, _U64(position) & mask, _U64(origin) & mask, _U64(stream) & mask
    k0, k1 = _U64(seed) & mask, _U64(seed) >> half
    for _ in range(ROUNDS):
        low, high = c0 * _U64(MUL_0), c2 * _U64(MUL_1)
        c0, c1, c2, c3 = (high >> half) ^ c1 ^ k0, high & mask, (low >> half) ^ c3 ^ k1, low & mask
        k0, k1 = (k0 + _U64(WEYL_0)) & mask, (k1 + _U64(WEYL_1)) & mask
    return c0, c1, c2, c3


@_inner
def _uniform(word):
    """A float32 in (0, 1)."""
    return min((_F32(word) + _F32(0.5)) * _F32(2.0**-32), _UNIFORM_MAX)


@_inner
def _exponential(word):
    """A time of mean 1."""
    return -math.log1p(-float(_uniform(word)))


@_inner
def _first_arrival(noise, group):
    """When the first token of a group arrives, and its place in the group."""
    words = _philox(noise, GROUP_LEVEL + group)
    return _exponential(words[0]) / GROUP, int(words[1]) % GROUP


# Parts of a row. A row is (bfloat16 numbers in memory as int16, or none, float32 numbers in memory, or none, where it begins, V);
# `part` are some of its tokens, `start` the first of them.


@_over_numbers
def _load(part, row, start):
    """Their logits."""
    narrow, wide, first, _ = row
    at = first + start
    if len(narrow):
        bits = narrow[at : at + len(part)]
        for i in range(len(part)):
            part[i] = _I32(_I32(bits[i]) << 16).view(_F32)
    else:
        values = wide[at : at + len(part)]
        for i in range(len(part)):
            part[i] = values[i]


@njit(inline="always")
def _exp2(x):
    """2**x for x <= 0; 0 below the normal numbers."""
    whole = np.rint(x)
    f = x - whole
    y = (((((f * _C7 + _C6) * f + _C5) * f + _C4) * f + _C3) * f + _C2) * f + _C1
    power = _I32((_I32(max(whole, _F32(-126))) + 127) << 23).view(_F32)
    return _F32(0) if x < _F32(-126) else (y * f + _F32(1)) * power


@_over_numbers
def _to_weights(part, scale, peak, threshold):
    """Logits to weights 2**((logit - peak) * scale); 0 below the threshold."""
    for i in range(len(part)):
        weight = _exp2((part[i] - peak) * scale)
        part[i] = _F32(0) if part[i] < threshold else weight


@_over_numbers
def _subtract(part, factor, other, scale, shift, threshold):
    """Weights to max(factor * weight - q, 0), where the other part are the logits of q = 2**(logit * scale + shift)."""
    for i in range(len(part)):
        q = _exp2(min(other[i] * scale + shift, _F32(0)))
        part[i] = max(part[i] * factor - (_F32(0) if other[i] < threshold else q), _F32(0))


@_over_numbers
def _sum(part):
    total = _F32(0)
    for i in range(len(part)):
        total += part[i]
    return total


@_over_numbers
def _largest(part):
    best = -_INF
    for i in range(len(part)):
        best = max(best, part[i])
    return best


# A row. What is known of the rows of a sequence stands in `infos`: peak, argmax, threshold, and sum of the weights
# exp((logit - peak) / T) of the tokens above it, each [W]. `options` of a sequence are (top-k, top-p, min-p, 1 / T, greedy).


@_inner
def _scratch(size, options):
    """Room to work on a row: two parts of it, the sums of the weights of all blocks, the largest of all groups, and, where there
    is top-k or top-p, as many logits as it has."""
    blocks, groups, few = -(-size // DRAW_BLOCK), -(-size // GROUP), size if len(options[0]) or len(options[1]) else 0
    both = np.empty(DRAW_BLOCK, _F32), np.empty(DRAW_BLOCK, _F32)
    return *both, np.empty(blocks, _F32), np.empty(groups, _F32), np.empty(few, _F32)


@_inner
def _row(rows, sequence, column):
    narrow, wide, size, by_sequence, by_row = rows
    return narrow, wide, sequence * by_sequence + column * by_row, size


@_inner
def _logit(row, token):
    one = np.empty(1, _F32)
    _load(one, row, token)
    return one[0]


@_inner
def _options_of(options, b):
    top_k, top_p, min_p, temperature = options
    greedy = temperature[b] < _GREEDY_BELOW
    inverse = _F32(1) if greedy else max(_F32(1) / temperature[b], _TINY)
    return top_k[b] if len(top_k) else _0, top_p[b] if len(top_p) else 1.0, min_p[b], inverse, greedy


@_inner
def _amount(scratch, row, scale, peak, bound):
    """The sum of the weights 2**((logit - peak) * scale) of the tokens from a bound on; their number where the scale is 0. Those
    of each block stay in the scratch."""
    weights, sums = scratch[0], scratch[2]
    amount = 0.0
    for block in range(len(sums)):
        start = block * DRAW_BLOCK
        part = weights[: min(DRAW_BLOCK, row[3] - start)]
        _load(part, row, start)
        _to_weights(part, scale, peak, bound)
        sums[block] = _sum(part)
        amount += sums[block]
    return amount


@_inner
def _select(values, scale, peak, wanted):
    """The largest of the values from which on the amounts come to what is wanted, or the least, and whether they do; by
    partitions, as quickselect finds a rank. It leaves the values in another order."""
    first, last = 0, len(values)
    found, before = -_INF, 0.0
    # Pivots come from anywhere: those in the middle, say, are the least again and again where a row rises to both ends.
    random = _U64(0)
    while first < last:
        random = (random * _U64(1664525) + _U64(1013904223)) & _U64(0xFFFFFFFF)
        found = values[first + _I64((random * _U64(last - first)) >> _U64(32))]
        above, equal = 0.0, 0.0
        greater, place, less = first, first, last
        while place < less:
            value = values[place]
            if value < found:
                less -= 1
                values[place], values[less] = values[less], value
                continue
            weight = _exp2(max(value - peak, _LOWEST) * scale)
            if value > found:
                values[place], values[greater] = values[greater], value
                greater += 1
                above += weight
            else:
                equal += weight
            place += 1
        if before + above >= wanted:
            last = greater
        elif before + above + equal >= wanted:
            return found, True
        else:
            first, before = less, before + above + equal
    return found, False


@_inner
def _reaching(scratch, row, scale, peak, depth, wanted):
    """The largest logit from which on the amounts of a row come to what is wanted. It is looked for among those of some depth
    below the peak, where these are too few among those twice as far down, and so on, and at last among all."""
    if not wanted > 0:
        return peak
    part, few = scratch[0], scratch[4]
    bound = -_INF
    for tried in range(DEPTHS):
        within = peak - depth * _F32(1 << tried)
        if _amount(scratch, row, scale, peak, within) >= wanted:
            bound = within
            break
    count = 0
    for start in range(0, row[3], DRAW_BLOCK):
        some = part[: min(DRAW_BLOCK, row[3] - start)]
        _load(some, row, start)
        for i in range(len(some)):
            if some[i] >= bound and some[i] > -_INF:
                few[count] = some[i]
                count += 1
    found, reached = _select(few[:count], scale, peak, wanted)
    return found if reached or bound > -_INF else -_INF


@_inner
def _threshold(scratch, row, peak, options):
    """The smallest logit that top-k, top-p of what that left, and min-p keep; -inf where all are off."""
    top_k, top_p, min_p, inverse, _ = options
    scale, depth, least = inverse * _LOG2_E, _F32(4) / inverse, -_INF
    if 0 < top_k < row[3]:
        least = _reaching(scratch, row, _F32(0), peak, depth, float(top_k))
    if top_p < 1:
        wanted = top_p * _amount(scratch, row, scale, peak, least)
        least = max(least, _reaching(scratch, row, scale, peak, depth, wanted))
    if min_p > 0:  # prob >= min_p * max prob  <=>  logit >= max + T log(min_p)
        least = max(least, peak + _F32(math.log(min_p)) / inverse)
    return least


@_inner
def _read_row(infos, scratch, w, row, options):
    """Look at a row; whether it is a distribution."""
    peaks, argmaxes, leasts, totals = infos
    _, _, _, inverse, greedy = options
    weights, sums, size = scratch[0], scratch[2], row[3]
    peak, best = -_INF, _0
    for block in range(len(sums)):
        start = block * DRAW_BLOCK
        part = weights[: min(DRAW_BLOCK, size - start)]
        _load(part, row, start)
        sums[block] = _largest(part)
        if sums[block] > peak:
            peak, best = sums[block], start
    while best < size - 1 and _logit(row, best) != peak:
        best += 1
    least = _threshold(scratch, row, peak, options) if -_INF < peak < _INF and not greedy else -_INF
    total = _amount(scratch, row, inverse * _LOG2_E, peak, least)
    peaks[w], argmaxes[w], leasts[w], totals[w] = peak, best, least, total
    return 0 < total < math.inf and abs(peak * inverse) < _INF


@_inner
def _seen(infos, w):
    """Peak, threshold and sum of a row."""
    return infos[0][w], infos[2][w], infos[3][w]


@_inner
def _logprob(row, token, seen, inverse):
    peak, _, total = seen
    return min(float(_logit(row, token) - peak) * float(inverse) - math.log(total), 0.0)


# Draws: see draw.py; by inversion, `ops.sample_by_inversion`.


@_inner
def _draw_block(sums, noise):
    """The block whose mass / time is largest."""
    best, chosen = 0.0, _0
    for first in range(0, len(sums), 4):
        words = _philox(noise, _BLOCK_INDEX + first // 4)
        for i in range(min(4, len(sums) - first)):
            value = sums[first + i] / _exponential(words[i])
            if value > best:
                best, chosen = value, first + i
    return chosen


@_inner
def _draw_in(weights, start, noise, best, chosen):
    """The token whose weight / time of arrival is largest, of groups from `start` on, if one is above `best`; that and its id."""
    for first in range(0, len(weights), GROUP):
        group = weights[first : first + GROUP]
        time, place = _first_arrival(noise, (start + first) // GROUP)
        if not _largest(group) / time > best:  # the others arrive later
            continue
        for lane in range(len(group)):
            if lane == place:
                value = group[lane] / time
            elif group[lane] / time > best:
                words = _philox(noise, (start + first + lane) // 4)
                value = group[lane] / (time + _exponential(words[lane % 4]))
            else:
                continue
            if value > best:
                best, chosen = value, start + first + lane
    return best, chosen


@_inner
def _draw_by_token(scratch, row, seen, inverse, noise):
    """A token of the row, with noise for each. The first to arrive in each group comes first: after these, few groups matter."""
    weights, largest = scratch[0], scratch[3]
    peak, least, _ = seen
    size = row[3]
    best, chosen = 0.0, _0
    for turn in range(2):
        for group in range(len(largest)):
            start = group * GROUP
            time, place = _first_arrival(noise, group)
            if turn and not largest[group] / time > best:
                continue
            part = weights[: min(GROUP, size - start)]
            _load(part, row, start)
            _to_weights(part, inverse * _LOG2_E, peak, least)
            if turn:
                best, chosen = _draw_in(part, start, noise, best, chosen)
                continue
            largest[group] = _largest(part)
            if place < len(part) and part[place] / time > best:
                best, chosen = part[place] / time, start + place
    return chosen


@_inner
def _place(values, wanted):
    """The first place up to which the values come to more than what is wanted, and what is wanted beyond the sum before. By
    rounding, all may come to no more: then it is the last place that adds something."""
    before, last, rest = 0.0, 0, 0.0
    for i in range(len(values)):
        if values[i] > 0:
            last, rest = i, wanted - before
            before += values[i]
            if before > wanted:
                break
    return last, rest


@_inner
def _draw_by_inversion(scratch, row, seen, inverse, noise):
    """The first token up to which the weights come to more than u times all."""
    weights, sums = scratch[0], scratch[2]
    peak, least, total = seen
    words = _philox(noise, _0)
    u = (float((words[0] << _U64(20)) | (words[1] >> _U64(12))) + 0.5) * 2.0**-52
    block, wanted = _place(sums, u * total)
    start = block * DRAW_BLOCK
    part = weights[: min(DRAW_BLOCK, row[3] - start)]
    _load(part, row, start)
    _to_weights(part, inverse * _LOG2_E, peak, least)
    return start + _place(part, wanted)[0]


@_called_from_python
def sample_rows(
    begin, end, what,
    narrow, wide, size, by_sequence, by_row,
    top_k, top_p, min_p, temperature, seed, position, origin, stream,
    threshold, lse, argmax, tokens, logprobs, decided,
):  # fmt: skip
    """Stats of rows [B, W], and what they draw, for sequences from `begin` up to `end`; see `reference.sample`. The last result is
    of which rows are decided."""
    rows, options = (narrow, wide, size, by_sequence, by_row), (top_k, top_p, min_p, temperature)
    width = tokens.shape[1]
    scratch = _scratch(rows[2], options)
    infos = np.empty(width, _F32), np.empty(width, np.int64), np.empty(width, _F32), np.empty(width)
    for b in range(begin, end):
        its_options = _options_of(options, b)
        _, _, _, inverse, greedy = its_options
        for w in range(width):
            row = _row(rows, b, w)
            decided[b, w] = _read_row(infos, scratch, w, row, its_options)
            if not decided[b, w]:
                continue
            seen, token = _seen(infos, w), infos[1][w]
            threshold[b, w], argmax[b, w] = seen[0] if greedy else seen[1], token
            lse[b, w] = math.log(seen[2]) + float(seen[0]) * float(inverse)
            its_noise = seed[b], position[b] + w, origin[b], stream
            if what == BY_TOKEN and not greedy:
                token = _draw_by_token(scratch, row, seen, inverse, its_noise)
            if what == BY_INVERSION and not greedy:
                token = _draw_by_inversion(scratch, row, seen, inverse, its_noise)
            tokens[b, w], logprobs[b, w] = token, _logprob(row, token, seen, inverse)


# Verification: see reference.py. `drafts` are (tokens [K], how many there are). q is (a row of logits, its lse, its threshold),
# with a vocabulary of 0 for one-hot drafts.


@_inner
def _q_at(draft, stats, b, w):
    if draft[2] == 0:
        return _row(draft, _0, _0), _F32(0), _F32(0)
    return _row(draft, b, w), stats[0, b, w], stats[1, b, w]


@_inner
def _odds(token, row, seen, q, inverse):
    """p and q of a draft; 0 for ids that are not in a vocabulary, and q = 1 for one-hot drafts."""
    peak, least, total = seen
    q_row, q_lse, q_least = q
    p_of = q_of = 0.0
    if token < row[3] and _logit(row, token) >= least:
        p_of = math.exp(float(_logit(row, token) - peak) * float(inverse)) / total
    if q_row[3] == 0:
        q_of = 1.0
    elif token < q_row[3] and _logit(q_row, token) >= q_least:
        q_of = math.exp(float(_logit(q_row, token)) * float(inverse) - float(q_lse))
    return _F32(p_of), _F32(q_of)


@_inner
def _weigh(scratch, start, row, seen, inverse, left_out, s, q):
    """The weights of a block's tokens: exp((logit - peak) / T) but for a draft that is left out; or max(s p - q, 0) if s > 0."""
    peak, least, total = seen
    q_row, q_lse, q_least = q
    part = scratch[0][: min(DRAW_BLOCK, row[3] - start)]
    _load(part, row, start)
    _to_weights(part, inverse * _LOG2_E, peak, least)
    if start <= left_out < start + len(part):
        part[left_out - start] = 0
    if s > 0:
        other = scratch[1][: max(0, min(len(part), q_row[3] - start))]
        _load(other, q_row, start)
        _subtract(part[: len(other)], _F32(s / total), other, inverse * _LOG2_E, -q_lse * _LOG2_E, q_least)
        for i in range(len(other), len(part)):
            part[i] *= _F32(s / total)
    return part


@_inner
def _mass(scratch, row, seen, inverse, left_out, s, q):
    """The sum of these weights. That of each block stays in the scratch."""
    sums = scratch[2]
    mass = 0.0
    for block in range(len(sums)):
        sums[block] = _sum(_weigh(scratch, block * DRAW_BLOCK, row, seen, inverse, left_out, s, q))
        mass += sums[block]
    return mass


@_inner
def _draw(scratch, row, seen, inverse, left_out, s, q, noise):
    """A token drawn by these weights, -1 if they are all 0."""
    if not _mass(scratch, row, seen, inverse, left_out, s, q) > 0:
        return -1
    start = _draw_block(scratch[2], noise) * DRAW_BLOCK
    return _draw_in(_weigh(scratch, start, row, seen, inverse, left_out, s, q), start, noise, 0.0, start)[1]


@_inner
def _accept_in_order(coupled, infos, scratch, rows, options, drafts, draft, stats, b, noise):
    """How many drafts are accepted, one after another, and the token that the row after them gives itself; -1 if undecided."""
    target, first, width = rows
    tokens, count = drafts
    _, _, _, inverse, greedy = options
    seed, position = noise
    for w in range(min(count + 1, width)):
        row = _row(target, first, w)
        if not _read_row(infos, scratch, w, row, options):
            break
        seen, own = _seen(infos, w), infos[1][w]
        if coupled and not greedy:
            own = _draw_by_token(scratch, row, seen, inverse, (seed, position + w, _0, _SAMPLE))
        if w == count:
            return w, own
        passed = tokens[w] == own
        if not greedy and not coupled:
            p_of, q_of = _odds(tokens[w], row, seen, _q_at(draft, stats, b, w), inverse)
            if not 0 < q_of < _INF:
                break
            passed = _uniform(_philox((seed, position + w, position, _ACCEPT), _0)[0]) * q_of < p_of
        if not passed:
            return w, own
    return -1, -1


@_inner
def _accept_longest(prefix, infos, scratch, rows, options, drafts, draft, stats, b, noise):
    """How many drafts `block` accepts; -1 if undecided. `prefix` [K+1] gets s_0 ... s_K."""
    target, first, width = rows
    tokens, count = drafts
    inverse = options[3]
    seed, position = noise
    p_of = np.zeros(count + 1, _F32)
    prefix[:] = 0
    prefix[0] = 1
    for w in range(count):
        if prefix[w] == 0:
            break
        row = _row(target, first, w)
        if w >= width or not _read_row(infos, scratch, w, row, options):
            return -1
        p_of[w], q_of = _odds(tokens[w], row, _seen(infos, w), _q_at(draft, stats, b, w), inverse)
        if not 0 < q_of < _INF:
            return -1
        prefix[w + 1] = min(prefix[w] * p_of[w] / q_of, _F32(1))
    for n in range(count, 0, -1):
        s, u = prefix[n], _uniform(_philox((seed, position + n - 1, position, _ACCEPT), _0)[0])
        if not u < s:
            continue
        row = _row(target, first, n)
        if n == count:
            return n if n < width and _read_row(infos, scratch, n, row, options) else -1
        if s == 1:
            return n
        mass = s * (_F32(1) - p_of[n])
        if draft[2] > 0:
            mass = _F32(_mass(scratch, row, _seen(infos, n), inverse, _NONE, s, _q_at(draft, stats, b, n)))
        if u * (mass + _F32(1) - s) < mass:
            return n
    return 0


@_called_from_python
def verify_sequences(
    begin, end, method,
    narrow, wide, size, by_sequence, by_row, cu,
    top_k, top_p, min_p, temperature, seeds, positions, draft_tokens,
    draft_narrow, draft_wide, draft_size, draft_by_sequence, draft_by_row, draft_stats,
    want_logprobs, tokens, num_accepted, status, logprobs, decided,
):  # fmt: skip
    """Verify sequences from `begin` up to `end`, one after another. The last result is which ones are decided.

    `target` and `draft` are rows, `draft_stats` the lse and the threshold of each of the draft's. The rows of a target that is
    packed begin at `cu`, which is empty otherwise."""
    target, options = (narrow, wide, size, by_sequence, by_row), (top_k, top_p, min_p, temperature)
    draft = draft_narrow, draft_wide, draft_size, draft_by_sequence, draft_by_row
    width = tokens.shape[1]
    scratch = _scratch(target[2], options)
    infos = np.empty(width, _F32), np.empty(width, np.int64), np.empty(width, _F32), np.empty(width)
    prefix = np.ones(width, _F32)
    for b in range(begin, end):
        its_options = _options_of(options, b)
        _, _, _, inverse, greedy = its_options
        rows = (target, b, width) if len(cu) == 0 else (target, int(cu[b]), int(cu[b + 1] - cu[b]))
        count = 0
        while count < width - 1 and draft_tokens[b, count] >= 0:
            count += 1
        drafts, (seed, position) = (draft_tokens[b], count), (seeds[b], positions[b])
        own = -1
        if method == BLOCK and count > 0 and not greedy:
            accepted = _accept_longest(
                prefix, infos, scratch, rows, its_options, drafts, draft, draft_stats, b, (seed, position)
            )
        else:
            accepted, own = _accept_in_order(
                method == COUPLED, infos, scratch, rows, its_options, drafts, draft, draft_stats, b, (seed, position)
            )
        decided[b] = accepted >= 0
        if accepted < 0:
            continue

        # The next token.
        status[b] = 0
        if not greedy and method != COUPLED:
            rejected = accepted < count
            row, seen = _row(target, rows[1], accepted), _seen(infos, accepted)
            its_noise = seed, position + accepted, position if rejected else _0, _RESIDUAL if rejected else _SAMPLE
            q = _q_at(draft, draft_stats, b, accepted if rejected else _0)
            own = -1
            if rejected:
                left_out, s = (drafts[0][accepted], _F32(0)) if draft[2] == 0 else (_NONE, prefix[accepted])
                own = _draw(scratch, row, seen, inverse, left_out, s, q, its_noise)
            if own < 0:
                status[b] = _EMPTY_RESIDUAL if rejected else 0
                own = _draw(scratch, row, seen, inverse, _NONE, _F32(0), q, its_noise)

        num_accepted[b] = accepted
        for w in range(width):
            tokens[b, w] = draft_tokens[b, w] if w < accepted else own if w == accepted else -1
            if want_logprobs:
                logprobs[b, w] = 0
                if w <= accepted:
                    logprobs[b, w] = _logprob(_row(target, rows[1], w), tokens[b, w], _seen(infos, w), inverse)
