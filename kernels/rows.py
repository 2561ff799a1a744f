"""Rows of logits as distributions, in torch: what `reference` knows of them before anything is drawn.

On CPU it is the passes over memory that cost, so rows are taken in chunks that stay in the cache, and work that would
change nothing (a temperature of 1, a threshold of -inf) is left out: `bounds` tells. Elsewhere nothing depends on
values, because looking at them would wait for the device, and all rows are one chunk.
"""

import math
from collections.abc import Iterator
from functools import partial
from itertools import repeat
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .records import GREEDY_BELOW, RowStats

CHUNK = 1 << 20  # logits
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
        values = _computed(logits)
        if scale is None:
            log_p = values - lse[..., None]
        else:
            log_p = (values * scale.view(-1, *[1] * (values.dim() - 1))).sub_(lse[..., None])
        return log_p.masked_fill_(values < threshold[..., None], -torch.inf) if self.filtered else log_p


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
    values = _computed(logits)
    if want_argmax or min_p is not None:
        maximum, argmax = values.max(dim=-1)
    else:
        maximum, argmax = None, values.new_zeros(values.shape[:-1], dtype=torch.int64)
    threshold = values.new_full(values.shape[:-1], -torch.inf)
    if top_k is not None or top_p is not None:
        threshold = _rank_threshold(values, scale, top_k, top_p)
    if min_p is not None and maximum is not None:
        # prob >= min_p * max prob  <=>  logit >= max + T log(min_p)
        log_min_p = torch.log(min_p.to(maximum.dtype))
        threshold = torch.maximum(threshold, maximum + (log_min_p if scale is None else log_min_p / scale))
    unfiltered = top_k is top_p is min_p is None
    if not (unfiltered or never_greedy) and temperature is not None:  # greedy rows have the lse of all their logits
        threshold = threshold.where(temperature >= GREEDY_BELOW, -torch.inf)
    kept = values if scale is None else values * scale[..., None]
    if not (unfiltered or bounds(threshold)[1] == -torch.inf):
        kept = kept.masked_fill(values < threshold[..., None], -torch.inf)
    lse = log_sum_exp(kept)
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


def exp(values: Tensor) -> Tensor:
    """On CPU the exp of float32 takes three times as long as exp2, and far longer where there is -inf; its error grows to
    |x| / 2 units in the last place."""
    if values.device.type == "cpu" and values.dtype == torch.float32:
        return (values * math.log2(math.e)).exp2_()
    return values.exp()


def log_sum_exp(values: Tensor) -> Tensor:
    """[..., V] -> [...], as torch.logsumexp, but NaN where there is +inf."""
    total = exp(values).sum(dim=-1)
    low, high = bounds(total)
    if SMALL < low <= high < LARGE:  # as they mostly are; nothing that was lost counts beside such a sum
        return total.log_()
    peak = finite_peak(values).masked_fill_((total > SMALL) & (total < LARGE), 0)
    return exp(values - peak[..., None]).sum(dim=-1).log_().add_(peak)


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
