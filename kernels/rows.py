"""Rows of logits as distributions, in torch: their stats and probabilities, for `reference`.

Work that would change nothing (a temperature of 1, a threshold of -inf) is left out where this can be known (numerics.py).
"""

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from .numerics import (
    CHUNK,
    argmax,
    bounds,
    chunks,
    computed,
    exp_,
    log_sum_exp,
    resize,
    scaled_logits,
    take,
    with_leading_dims,
)
from .rank_threshold import rank_threshold
from .records import GREEDY_BELOW, RowStats

Filters = tuple[Tensor | None, Tensor | None, Tensor | None]  # top_k, top_p, min_p: [B] each


class Temperatures(NamedTuple):
    """The temperatures of the sequences, and what is known of all of them."""

    values: Tensor | None  # [B]; None: all are 1
    never_greedy: bool  # this and the next are True only where that is known without waiting
    all_greedy: bool

    @staticmethod
    def of(values: Tensor | None) -> "Temperatures":
        """Of `temperature` as the calls take it, [B]."""
        if values is None:
            return Temperatures(None, never_greedy=True, all_greedy=False)
        low, high = bounds(values.float())
        every_1 = low == high == 1 and values.dtype != torch.float64
        return Temperatures(None if every_1 else values, low >= GREEDY_BELOW, high < GREEDY_BELOW)

    def greedy(self, like: Tensor) -> Tensor:
        """Which rows are greedy: [B] bool on the device of `like` [B]. Compared in float32 whatever the dtype, as kernels do."""
        return torch.zeros_like(like, dtype=torch.bool) if self.values is None else self.values.float() < GREEDY_BELOW

    def scale(self, logits: Tensor) -> Tensor | None:
        """1 / T [B], and 1 for greedy rows, in the dtype that `logits` are computed with; None: all are 1.

        It is never 0, because 0 times a logit of -inf is NaN."""
        if self.values is None or self.all_greedy:
            return None
        values = self.values.to(torch.float64 if logits.dtype == torch.float64 else torch.float32)
        if not self.never_greedy:
            values = values.masked_fill(self.greedy(values), 1)
        return values.reciprocal().clamp_(min=torch.finfo(values.dtype).tiny)


class Rows(NamedTuple):
    """Distributions: logits, their stats, and probabilities from both."""

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
        """Logits [B, V] or [B, W, V] with their stats."""
        scale = temperatures.scale(logits)
        if stats is None:
            stats = row_stats(logits, temperatures, scale, filters, want_argmax)
        filtered = bounds(stats.threshold)[1] != -torch.inf
        return Rows(logits, stats, temperatures, scale, filtered)

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

    def prob_at(self, sequence: Tensor, index: Tensor) -> Tensor:
        """prob(v) of one row for each of N sequences: [N, V]."""
        return exp_(self.log_prob_at(sequence, index))

    def log_prob_of(self, tokens: Tensor) -> Tensor:
        """log prob of one token for each row, or for the first rows of each sequence; -inf for ids outside [0, V)."""
        ids = tokens.clamp(0, self.logits.shape[-1] - 1)
        lse, threshold = self.stats.lse, self.stats.threshold
        if tokens.shape != lse.shape:
            lse, threshold = lse[:, : tokens.shape[1]], threshold[:, : tokens.shape[1]]
        one = self.logits.gather(-1, ids[..., None])
        return self._log_prob(one, lse, threshold, self.scale).squeeze(-1).masked_fill_(ids != tokens, -torch.inf)

    def _log_prob(self, logits: Tensor, lse: Tensor, threshold: Tensor, scale: Tensor | None) -> Tensor:
        factor = 1.0 if scale is None else scale.view(-1, *[1] * (logits.dim() - 1))
        return scaled_logits(logits, factor, threshold if self.filtered else None).sub_(lse[..., None])


def unpacked(values: Tensor, cu: Tensor, width: int, fill: float) -> Tensor:
    """Packed rows [N, V] as [B, width, V]. Sequence b has the rows from cu[b] up to cu[b+1]; those that are missing hold `fill`."""
    at = cu[:-1, None] + torch.arange(width, device=cu.device)
    missing = (at >= cu[1:, None])[..., None]
    if not len(values):
        return values.new_full((*at.shape, values.shape[1]), fill)
    return values[at.clamp(max=len(values) - 1)].masked_fill_(missing, fill)


def unpacked_with(
    target_logits: Tensor, logit_bias: Tensor | None, token_mask: Tensor | None, cu: Tensor, width: int
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Packed rows with their bias and mask, as `ops.verify` takes them, as [B, width, V]. Rows that are missing are -inf throughout."""
    if logit_bias is not None and logit_bias.dim() == 2:
        logit_bias = unpacked(logit_bias, cu, width, 0)
    if token_mask is not None and token_mask.dim() == 2:
        token_mask = unpacked(token_mask, cu, width, True)
    return unpacked(target_logits, cu, width, -torch.inf), logit_bias, token_mask


def head(value: Tensor | None, width: int) -> Tensor | None:
    """The first `width` rows of a bias or mask [B, W, V]; [V] and [B, V] serve every row."""
    return value[:, :width] if value is not None and value.dim() == 3 else value


def adjusted(logits: Tensor, logit_bias: Tensor | None, token_mask: Tensor | None) -> Tensor:
    """Logits [B, V] or [B, W, V] with the bias [V], [B, V] or [B, W, V] added, in the dtype of the computation, and with tokens
    outside the mask at -inf. If the vocabulary is larger than that of bias and mask, its further tokens have neither.

    Without bias and mask the logits are returned as they are, and converted where they are used."""
    if logit_bias is not None:
        logits = computed(logits)
        logits = logits + resize(with_leading_dims(logit_bias, logits.dim()), logits.shape[-1], 0.0).to(logits.dtype)
    if token_mask is not None:
        logits = logits.masked_fill(
            ~resize(with_leading_dims(token_mask, logits.dim()), logits.shape[-1], True), -torch.inf
        )
    return logits


def log_prob(logits: Tensor, stats: RowStats, temperature: Tensor | None) -> Tensor:
    """log prob(v) for whole rows: logits [B, ..., V], stats [B, ...], temperature [B]; -inf where filtered out."""
    return Rows.of(logits, Temperatures.of(temperature), stats=stats).log_prob()


def row_stats(
    logits: Tensor,  # [B, V] or [B, W, V]
    temperatures: Temperatures,
    scale: Tensor | None,  # temperatures.scale(logits)
    filters: Filters,
    want_argmax: bool = True,  # False: 0 in its place, except where greedy rows need it
) -> RowStats:
    """See `reference.row_stats`."""
    never_greedy, values = temperatures.never_greedy, temperatures.values
    greedy = None if never_greedy or values is None else temperatures.greedy(values)
    options: list[Tensor | None] = [greedy, scale, *filters]
    if logits.dim() == 3:
        options = [None if value is None else value[:, None].expand(logits.shape[:-1]) for value in options]
    work = partial(_row_stats, want_argmax=want_argmax or not never_greedy)
    if logits.device.type != "cpu" or logits.numel() <= CHUNK:
        return work(logits, *options)
    flat = [None if value is None else value.flatten() for value in options]
    parts = [work(*part) for part in chunks(logits.shape[-1], logits.flatten(0, -2), *flat)]
    return RowStats(*(torch.cat(field).view(logits.shape[:-1]) for field in zip(*parts, strict=True)))


def _row_stats(
    logits: Tensor,  # [..., V]
    greedy: Tensor | None,  # [...] bool, None: nowhere; the four that follow [...] too
    scale: Tensor | None,
    top_k: Tensor | None,
    top_p: Tensor | None,
    min_p: Tensor | None,
    *,
    want_argmax: bool,
) -> RowStats:
    if want_argmax or min_p is not None:
        logits = computed(logits)
        largest = argmax(logits)
        maximum = logits.gather(-1, largest[..., None]).squeeze(-1)
    else:
        maximum, largest = None, logits.new_zeros(logits.shape[:-1], dtype=torch.int64)
    dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
    threshold = logits.new_full(logits.shape[:-1], -torch.inf, dtype=dtype)
    if top_k is not None or top_p is not None:
        threshold = rank_threshold(computed(logits), scale, top_k, top_p)
    if min_p is not None and maximum is not None:
        # prob >= min_p * max prob  <=>  logit >= max + T log(min_p)
        log_min_p = torch.log(min_p.to(maximum.dtype))
        threshold = torch.maximum(threshold, maximum + (log_min_p if scale is None else log_min_p / scale))
    unfiltered = top_k is top_p is min_p is None
    if greedy is not None and not unfiltered:  # greedy rows have the lse of all their logits
        threshold = threshold.masked_fill(greedy, -torch.inf)
    lse = log_sum_exp(logits, scale, None if unfiltered or bounds(threshold)[1] == -torch.inf else threshold)
    if greedy is not None and maximum is not None:
        threshold = maximum.where(greedy, threshold)
    return RowStats(threshold, lse, largest)
