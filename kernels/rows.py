"""Rows of logits as distributions, in torch: what `reference` knows of them before anything is drawn.

On CPU it is the passes over memory that cost, so rows are taken in chunks, and work that would change nothing (a temperature
of 1, a threshold of -inf) is left out: `bounds` tells. Elsewhere nothing depends on values, because looking at them would wait
for the device, and all rows are one chunk.
"""

import math
from collections.abc import Iterator
from functools import partial
from itertools import repeat
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .records import GREEDY_BELOW, RowStats

# Logits. Of larger chunks the intermediate results leave the cache, and malloc may ask the system for their memory anew in
# every call, whose page faults cost more than the work: 4,000 of them for 8 rows of 5 times 49,152. Smaller ones are more calls.
CHUNK = 1 << 19
LOG2_E = math.log2(math.e)
SMALL, LARGE = 2.0**-60, 2.0**60  # between them a sum of float32 has lost nothing by underflow or overflow

Filters = tuple[Tensor | None, Tensor | None, Tensor | None]  # top_k, top_p, min_p: [B] each


class Temperatures(NamedTuple):
    """The temperatures of the sequences, and what is known of all of them."""

    values: Tensor | None  # [B]; None: all are 1
    never_greedy: bool  # both True only where that is known
    all_greedy: bool

    @staticmethod
    def of(values: Tensor | None) -> "Temperatures":
        low, high = (1.0, 1.0) if values is None else bounds(values)
        return Temperatures(None if low == high == 1 else values, low >= GREEDY_BELOW, high < GREEDY_BELOW)

    def greedy(self, like: Tensor) -> Tensor:
        """[B] bool, on the device of `like` [B]."""
        return torch.zeros_like(like, dtype=torch.bool) if self.values is None else self.values < GREEDY_BELOW

    def scale(self, logits: Tensor) -> Tensor | None:
        """1 / T [B], and 1 for greedy rows, in the dtype in which `logits` are computed with; None: all are 1."""
        if self.values is None:
            return None
        values = self.values.to(torch.float64 if logits.dtype == torch.float64 else torch.float32)
        if not self.never_greedy:
            values = values.masked_fill(values < GREEDY_BELOW, 1)
        return values.reciprocal()


class Rows(NamedTuple):
    """Distributions: logits, their stats, and what both say together."""

    logits: Tensor  # [B, V] or [B, W, V]
    stats: RowStats  # [B] or [B, W]
    temperatures: Temperatures
    scale: Tensor | None  # [B] 1 / T, 1 for greedy rows, in the dtype of the computation; None: 1
    filtered: bool  # False: no row has a threshold

    @staticmethod
    def of(
        logits: Tensor,
        temperatures: Temperatures,
        filters: Filters = (None, None, None),
        stats: RowStats | None = None,  # None: they are worked out
        want_argmax: bool = True,
    ) -> "Rows":
        scale = temperatures.scale(logits)
        if stats is None:
            stats = row_stats(logits, temperatures, scale, filters, want_argmax)
        filtered = bounds(stats.threshold)[1] != -torch.inf
        return Rows(logits, stats, temperatures, scale, filtered)

    def head(self, width: int) -> "Rows":
        """The first `width` rows of every sequence."""
        stats = RowStats(*(field[:, :width] for field in self.stats))
        return self._replace(logits=self.logits[:, :width], stats=stats)

    def log_prob(self) -> Tensor:
        """log prob(v) for whole rows; -inf where filtered out."""
        return self._log_prob(self.logits, self.stats.lse, self.stats.threshold, self.scale)

    def log_prob_at(self, sequence: Tensor, index: Tensor) -> Tensor:
        """The same of one row for each of N sequences: [N, V]."""
        threshold = take(self.stats.threshold, sequence, index) if self.filtered else self.stats.threshold
        scale = None if self.scale is None else self.scale[sequence]
        return self._log_prob(
            take(self.logits, sequence, index), take(self.stats.lse, sequence, index), threshold, scale
        )

    def log_prob_of(self, tokens: Tensor) -> Tensor:
        """The same of one token for each row, or for the first rows of each sequence; -inf for ids outside [0, V)."""
        ids = tokens.clamp(0, self.logits.shape[-1] - 1)
        lse, threshold = self.stats.lse, self.stats.threshold
        if tokens.shape != lse.shape:
            lse, threshold = lse[:, : tokens.shape[1]], threshold[:, : tokens.shape[1]]
        one = self.logits.gather(-1, ids[..., None])
        return self._log_prob(one, lse, threshold, self.scale).squeeze(-1).masked_fill_(ids != tokens, -torch.inf)

    def _log_prob(self, logits: Tensor, lse: Tensor, threshold: Tensor, scale: Tensor | None) -> Tensor:
        factor = 1.0 if scale is None else scale.view(-1, *[1] * (logits.dim() - 1))
        return _kept(logits, factor, threshold if self.filtered else None).sub_(lse[..., None])


def adjusted(logits: Tensor, logit_bias: Tensor | None, token_mask: Tensor | None) -> Tensor:
    """Logits [B, V] or [B, W, V] with bias [V], [B, V] or [B, W, V] added, in the dtype of the computation, and tokens
    outside the mask at -inf. A vocabulary larger than theirs has no bias and no mask beyond it.

    With neither, the logits as they are: they are converted where they are used."""
    if logit_bias is not None:
        logits = _computed(logits)
        logits = logits + resize(spread(logit_bias, logits.dim()), logits.shape[-1], 0.0).to(logits.dtype)
    if token_mask is not None:
        logits = logits.masked_fill(~resize(spread(token_mask, logits.dim()), logits.shape[-1], True), -torch.inf)
    return logits


def spread(value: Tensor, dims: int) -> Tensor:
    """[V], [B, V] or [B, W, V] with dimensions of size 1 put before V until there are `dims`."""
    while value.dim() < dims:
        value = value[:, None] if value.dim() > 1 else value[None]
    return value


def resize(values: Tensor, vocab_size: int, value: float = -torch.inf) -> Tensor:
    """Cut or pad rows [..., V] to [..., vocab_size]."""
    missing = vocab_size - values.shape[-1]
    if missing > 0:
        return torch.nn.functional.pad(values, (0, missing), value=value)
    return values[..., :vocab_size] if missing else values


def log_prob(logits: Tensor, stats: RowStats, temperature: Tensor | None) -> Tensor:
    """log prob(v) for whole rows: logits [B, ..., V], stats [B, ...], temperature [B]; -inf where filtered out."""
    return Rows.of(logits, Temperatures.of(temperature), stats=stats).log_prob()


def log_prob_of(logits: Tensor, tokens: Tensor, stats: RowStats, temperature: Tensor | None) -> Tensor:
    """log prob of one token per row: logits [B, ..., V], tokens [B, ...]; -inf for ids outside [0, V)."""
    return Rows.of(logits, Temperatures.of(temperature), stats=stats).log_prob_of(tokens)


def row_stats(
    logits: Tensor,  # [B, V] or [B, W, V]
    temperatures: Temperatures,
    scale: Tensor | None,  # temperatures.scale(logits)
    filters: Filters,
    want_argmax: bool = True,  # False: 0 in its place, except where greedy rows need it
) -> RowStats:
    """See `reference.row_stats`."""
    options: list[Tensor | None] = [temperatures.values, scale, *filters]
    if logits.dim() == 3:
        options = [None if value is None else value[:, None].expand(logits.shape[:-1]) for value in options]
    want_argmax = want_argmax or not temperatures.never_greedy
    work = partial(_row_stats, want_argmax=want_argmax, never_greedy=temperatures.never_greedy)
    if logits.device.type != "cpu" or logits.numel() <= CHUNK:
        return work(logits, *options)
    flat = [None if value is None else value.flatten() for value in options]
    parts = [work(*part) for part in chunks(logits.shape[-1], logits.flatten(0, -2), *flat)]
    return RowStats(*(torch.cat(field).view(logits.shape[:-1]) for field in zip(*parts, strict=True)))


def _row_stats(
    logits: Tensor,  # [..., V]
    temperature: Tensor | None,  # [...], as the four that follow
    scale: Tensor | None,
    top_k: Tensor | None,
    top_p: Tensor | None,
    min_p: Tensor | None,
    *,
    want_argmax: bool,
    never_greedy: bool,
) -> RowStats:
    if want_argmax or min_p is not None:
        maximum, argmax = _computed(logits).max(dim=-1)
    else:
        maximum, argmax = None, logits.new_zeros(logits.shape[:-1], dtype=torch.int64)
    threshold = _computed(logits[..., :1]).new_full(logits.shape[:-1], -torch.inf)
    if top_k is not None or top_p is not None:
        threshold = _rank_threshold(_computed(logits), scale, top_k, top_p)
    if min_p is not None and maximum is not None:
        # prob >= min_p * max prob  <=>  logit >= max + T log(min_p)
        log_min_p = torch.log(min_p.to(maximum.dtype))
        threshold = torch.maximum(threshold, maximum + (log_min_p if scale is None else log_min_p / scale))
    unfiltered = top_k is top_p is min_p is None
    if not (unfiltered or never_greedy) and temperature is not None:  # greedy rows have the lse of all their logits
        threshold = threshold.where(temperature >= GREEDY_BELOW, -torch.inf)
    lse = log_sum_exp(logits, scale, None if unfiltered or bounds(threshold)[1] == -torch.inf else threshold)
    if not never_greedy and temperature is not None and maximum is not None:
        threshold = threshold.where(temperature >= GREEDY_BELOW, maximum)
    return RowStats(threshold, lse, argmax)


def _rank_threshold(logits: Tensor, scale: Tensor | None, top_k: Tensor | None, top_p: Tensor | None) -> Tensor:
    """The smallest logit [...] that top-k and then top-p keep; -inf where both are off."""
    ordered = logits.sort(dim=-1, descending=True).values
    threshold = torch.full_like(ordered[..., :1], -torch.inf)
    if top_k is not None:
        on = ((top_k > 0) & (top_k < logits.shape[-1]))[..., None]
        rank = top_k[..., None].where(on, 1).long() - 1
        threshold = ordered.gather(-1, rank).where(on, -torch.inf)
    if top_p is not None:
        scaled = ordered if scale is None else ordered * scale[..., None]
        scaled = scaled.masked_fill(ordered < threshold, -torch.inf)
        probs = scaled.softmax(dim=-1, dtype=torch.float64)
        bound = top_p.to(probs.dtype)[..., None]
        last = ((probs.cumsum(dim=-1) - probs < bound).sum(dim=-1, keepdim=True) - 1).clamp(min=0)
        threshold = torch.maximum(threshold, ordered.gather(-1, last).where(bound < 1, -torch.inf))
    return threshold.squeeze(-1)


def _computed(logits: Tensor) -> Tensor:
    """In the dtype of the computation: float64 as it is, float32 for all others."""
    return logits if logits.dtype in (torch.float32, torch.float64) else logits.float()


def _has_fast_exp2(values: Tensor) -> bool:
    """On CPU the exp of float32 takes three times as long as exp2, and far longer where there is -inf; the error of
    exp2(x log2(e)) grows to |x| / 2 units in the last place."""
    return values.device.type == "cpu" and values.dtype != torch.float64


def exp(values: Tensor) -> Tensor:
    """Of float32 or float64."""
    return (values * LOG2_E).exp2_() if _has_fast_exp2(values) else values.exp()


def exp_(values: Tensor) -> Tensor:
    """The same in place, where no new memory has to be had from the system, which can take longer than the work."""
    return values.mul_(LOG2_E).exp2_() if _has_fast_exp2(values) else values.exp_()


def log_sum_exp(logits: Tensor, scale: Tensor | None = None, threshold: Tensor | None = None) -> Tensor:
    """log of the sum of exp(logit * scale) over tokens with logit >= threshold: logits [..., V], the others and the result
    [...]. NaN where there is +inf."""
    factor = 1.0 if scale is None else scale[..., None]
    if _has_fast_exp2(logits):
        total = _kept(logits, factor * LOG2_E, threshold).exp2_().sum(dim=-1)
    else:
        total = _kept(logits, factor, threshold).exp_().sum(dim=-1)
    low, high = bounds(total)
    if SMALL < low <= high < LARGE:  # as they mostly are; nothing that was lost counts beside such a sum
        return total.log_()
    values = _kept(logits, factor, threshold)
    peak = finite_peak(values).masked_fill_((total > SMALL) & (total < LARGE), 0)
    return exp_(values.sub_(peak[..., None])).sum(dim=-1).log_().add_(peak)


def _kept(logits: Tensor, scale: Tensor | float, threshold: Tensor | None) -> Tensor:
    """logit * scale where the logit is not below the threshold and -inf elsewhere, in memory of its own.

    Logits [..., V], scale a number or [..., 1], threshold [...]."""
    values = _computed(logits)
    below = None if threshold is None else values < threshold[..., None]
    kept = values * scale if values is logits else values.mul_(scale)
    return kept if below is None else kept.masked_fill_(below, -torch.inf)


def finite_peak(values: Tensor) -> Tensor:
    """The largest of each row [..., V] -> [...], and the smallest finite number instead of -inf: -inf - -inf is NaN."""
    return values.amax(dim=-1).clamp_(min=torch.finfo(values.dtype).min)


def finite(values: Tensor) -> Tensor:
    """As torch.isfinite, in two steps instead of four."""
    return values.abs() < torch.inf


def bounds(values: Tensor) -> tuple[float, float]:
    """The smallest and the largest of the values, NaN if one of them is; (-inf, inf) where reading them would wait for a
    device, so that nothing seems to be known."""
    if values.device.type != "cpu":
        return -math.inf, math.inf
    if not values.numel():
        return math.inf, -math.inf
    low, high = values.aminmax()
    return low.item(), high.item()


def take(values: Tensor, sequence: Tensor, index: Tensor) -> Tensor:
    """values[sequence[n], index[n]]: [B, W, ...] -> [N, ...]; may be a view."""
    if len(sequence) == 1 and values.device.type == "cpu":
        return values[int(sequence.item()), int(index.item())][None]
    if values.is_contiguous():  # in a third of the time
        return values.flatten(0, 1).index_select(0, sequence * values.shape[1] + index)
    return values[sequence, index]


def places(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Sequence and index [B * W] of each of the rows [B, W]."""
    row = torch.arange(rows.numel(), device=rows.device)
    return row // rows.shape[1], row % rows.shape[1]


def chunks(size: int, *values: Tensor | None) -> Iterator[tuple[Any, ...]]:
    """Values [N, ...] cut along N, None where one is None, as the first is not; each of the N stands for `size` numbers to work on."""
    first, most = values[0], max(1, CHUNK // size)
    if first is None or first.device.type != "cpu" or len(first) <= most:
        yield values
    else:
        yield from zip(*(repeat(None) if value is None else value.split(most) for value in values), strict=False)


def those(condition: Tensor) -> Tensor | None:
    """Where a condition [N] holds; None: throughout, or it is not known where without waiting for a device."""
    if condition.device.type != "cpu" or all(condition.tolist()):
        return None
    return condition.nonzero().squeeze(1)
