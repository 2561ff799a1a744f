"""Rows of logits as distributions, in torch: what `reference` knows of them before anything is drawn.

On CPU it is the passes over memory that cost, so rows are taken in chunks that stay in the cache, and work that would
change nothing (a temperature of 1, a threshold of -inf) is left out. Elsewhere nothing depends on values, because
looking at them would wait for the device, and all rows are one chunk.
"""

import math
from collections.abc import Sequence
from itertools import repeat
from typing import NamedTuple

import torch
from torch import Tensor

from .records import GREEDY_BELOW, RowStats

CHUNK = 1 << 20  # logits


class Rows(NamedTuple):
    """Distributions: logits, their stats, and what both say together."""

    logits: Tensor  # [B, V] or [B, W, V]
    stats: RowStats  # [B] or [B, W]
    temperature: Tensor | None  # [B]
    scale: Tensor | None  # [B] 1 / T, 1 for greedy rows, in the dtype of the computation; None: 1
    filtered: bool  # False: no row has a threshold

    @staticmethod
    def of(logits: Tensor, stats: RowStats, temperature: Tensor | None) -> "Rows":
        filtered = not known(stats.threshold == -torch.inf)
        return Rows(logits, stats, temperature, scale_of(temperature, logits), filtered)

    def head(self, width: int) -> "Rows":
        """The first `width` rows of every sequence."""
        stats = RowStats(*(field[:, :width] for field in self.stats))
        return self._replace(logits=self.logits[:, :width], stats=stats)

    def log_prob(self) -> Tensor:
        """log prob(v) for whole rows; -inf where filtered out."""
        return self._log_prob(self.logits, self.stats.lse, self.stats.threshold, self.scale)

    def log_prob_at(self, sequence: Tensor, index: Tensor) -> Tensor:
        """The same of one row for each of N sequences: [N, V]."""
        where = sequence, index
        threshold = self.stats.threshold[where] if self.filtered else self.stats.threshold
        scale = None if self.scale is None else self.scale[sequence]
        return self._log_prob(self.logits[where], self.stats.lse[where], threshold, scale)

    def log_prob_of(self, tokens: Tensor) -> Tensor:
        """The same of one token for each row, or for the first rows of each sequence; -inf for ids outside [0, V)."""
        ids = tokens.clamp(0, self.logits.shape[-1] - 1)
        lse, threshold = self.stats.lse, self.stats.threshold
        if tokens.shape != lse.shape:
            lse, threshold = lse[:, : tokens.shape[1]], threshold[:, : tokens.shape[1]]
        one = self.logits.gather(-1, ids[..., None])
        return self._log_prob(one, lse, threshold, self.scale).squeeze(-1).where(ids == tokens, -torch.inf)

    def _log_prob(self, logits: Tensor, lse: Tensor, threshold: Tensor, scale: Tensor | None) -> Tensor:
        logits = _computed(logits)
        log_p = (
            logits - lse[..., None] if scale is None else (logits * _spread_scale(scale, logits)).sub_(lse[..., None])
        )
        return log_p.masked_fill(logits < threshold[..., None], -torch.inf) if self.filtered else log_p


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
    return torch.nn.functional.pad(values, (0, missing), value=value) if missing > 0 else values[..., :vocab_size]


def log_prob(logits: Tensor, stats: RowStats, temperature: Tensor | None) -> Tensor:
    """log prob(v) for whole rows: logits [B, ..., V], stats [B, ...], temperature [B]; -inf where filtered out."""
    return Rows.of(logits, stats, temperature).log_prob()


def log_prob_of(logits: Tensor, tokens: Tensor, stats: RowStats, temperature: Tensor | None) -> Tensor:
    """log prob of one token per row: logits [B, ..., V], tokens [B, ...]; -inf for ids outside [0, V)."""
    return Rows.of(logits, stats, temperature).log_prob_of(tokens)


def row_stats(
    logits: Tensor,  # [B, V] or [B, W, V]
    temperature: Tensor | None,
    top_k: Tensor | None,
    top_p: Tensor | None,
    min_p: Tensor | None,
    want_argmax: bool = True,  # False: 0 in its place, except where greedy rows need it
) -> RowStats:
    """See `reference.row_stats`."""
    rows, size = logits.flatten(0, -2), logits.shape[-1]
    options = [temperature, top_k, top_p, min_p]
    if logits.dim() == 3:
        options = [None if value is None else value[:, None].expand(logits.shape[:-1]).flatten() for value in options]
    cut = [repeat(None) if value is None else chunks(value, size) for value in options]
    parts = [_row_stats(part, want_argmax, *rest) for part, *rest in zip(chunks(rows, size), *cut, strict=False)]
    fields = zip(*parts, strict=True)
    return RowStats(*((field[0] if len(parts) == 1 else torch.cat(field)).view(logits.shape[:-1]) for field in fields))


def _row_stats(
    logits: Tensor,  # [R, V]
    want_argmax: bool,
    temperature: Tensor | None,  # [R], as all that follow
    top_k: Tensor | None,
    top_p: Tensor | None,
    min_p: Tensor | None,
) -> RowStats:
    logits = _computed(logits)
    never_greedy = is_never_greedy(temperature)
    scale = scale_of(temperature, logits)
    if want_argmax or not never_greedy:
        maximum, argmax = logits.max(dim=-1)
    else:
        maximum = logits.amax(dim=-1)
        argmax = torch.zeros_like(maximum, dtype=torch.int64)
    unfiltered = top_k is top_p is min_p is None
    threshold = torch.full_like(maximum, -torch.inf)
    if top_k is not None or top_p is not None:
        threshold = _rank_threshold(logits, scale, top_k, top_p)
    if min_p is not None:
        # prob >= min_p * max prob  <=>  logit >= max + T log(min_p)
        log_min_p = torch.log(min_p.to(maximum.dtype))
        threshold = torch.maximum(threshold, maximum + (log_min_p if scale is None else log_min_p / scale))
    if not (unfiltered or never_greedy) and temperature is not None:  # greedy rows have the lse of all their logits
        threshold = threshold.where(temperature >= GREEDY_BELOW, -torch.inf)
    kept = logits if scale is None else logits * scale[:, None]
    if not (unfiltered or known(threshold == -torch.inf)):
        kept = kept.masked_fill(logits < threshold[..., None], -torch.inf)
    peak = maximum if scale is None else maximum * scale  # which is kept
    lse = log_sum_exp(kept, peak).where(maximum < torch.inf, torch.nan)  # NaN for +inf and NaN alike
    if not never_greedy and temperature is not None:
        threshold = threshold.where(temperature >= GREEDY_BELOW, maximum)
    return RowStats(threshold, lse, argmax)


def _rank_threshold(logits: Tensor, scale: Tensor | None, top_k: Tensor | None, top_p: Tensor | None) -> Tensor:
    """The smallest logit [R] that top-k and then top-p keep; -inf where both are off."""
    ordered = logits.sort(dim=-1, descending=True).values
    threshold = torch.full_like(ordered[:, :1], -torch.inf)
    if top_k is not None:
        on = ((top_k > 0) & (top_k < logits.shape[-1]))[:, None]
        rank = top_k[:, None].where(on, 1).long() - 1
        threshold = ordered.gather(-1, rank).where(on, -torch.inf)
    if top_p is not None:
        scaled = ordered if scale is None else ordered * scale[:, None]
        scaled = scaled.masked_fill(ordered < threshold, -torch.inf)
        probs = scaled.softmax(dim=-1, dtype=torch.float64)
        bound = top_p.to(probs.dtype)[:, None]
        last = ((probs.cumsum(dim=-1) - probs < bound).sum(dim=-1, keepdim=True) - 1).clamp(min=0)
        threshold = torch.maximum(threshold, ordered.gather(-1, last).where(bound < 1, -torch.inf))
    return threshold.squeeze(-1)


def _computed(logits: Tensor) -> Tensor:
    """In the dtype of the computation: float64 as it is, float32 for all others."""
    return logits if logits.dtype == torch.float64 else logits.float()


def scale_of(temperature: Tensor | None, logits: Tensor) -> Tensor | None:
    """1 / T [B], and 1 for greedy rows, in the dtype in which `logits` are computed with; None where all are 1."""
    if temperature is None or known(temperature == 1):
        return None
    temperature = temperature.to(torch.float64 if logits.dtype == torch.float64 else torch.float32)
    if not is_never_greedy(temperature):
        temperature = temperature.masked_fill(temperature < GREEDY_BELOW, 1)
    return temperature.reciprocal()


def _spread_scale(scale: Tensor, like: Tensor) -> Tensor:
    """[B] -> [B, 1, ...] to broadcast against `like` [B, ...]."""
    return scale.view(-1, *[1] * (like.dim() - 1))


def exp_(values: Tensor) -> Tensor:
    """Of a tensor that may be overwritten. On CPU the exp of float32 takes three times as long as exp2, and far longer
    where there is -inf; its error grows to |x| / 2 units in the last place."""
    if values.device.type == "cpu" and values.dtype == torch.float32:
        return values.mul_(math.log2(math.e)).exp2_()
    return values.exp_()


def log_sum_exp(values: Tensor, peak: Tensor | None = None) -> Tensor:
    """[..., V] -> [...], as torch.logsumexp; `peak` is their maximum, if it is known."""
    peak = values.amax(dim=-1) if peak is None else peak
    peak = peak.masked_fill(peak.abs() == torch.inf, 0)
    return exp_(values - peak[..., None]).sum(dim=-1).log_().add_(peak)


def finite(values: Tensor) -> Tensor:
    """As torch.isfinite, in two steps instead of four."""
    return values.abs() < torch.inf


def known(condition: Tensor) -> bool:
    """Whether a condition holds throughout; True only where that is known without waiting for a device."""
    return condition.device.type == "cpu" and bool(condition.all())


def is_all_greedy(temperature: Tensor | None) -> bool:
    """True only where that is known."""
    return temperature is not None and known(temperature < GREEDY_BELOW)


def is_never_greedy(temperature: Tensor | None) -> bool:
    """True only where that is known."""
    return temperature is None or known(temperature >= GREEDY_BELOW)


def chunks(values: Tensor, size: int) -> Sequence[Tensor]:
    """Values [N, ...] cut along N, where each of the N stands for `size` numbers to work on."""
    return values.split(max(1, CHUNK // size)) if values.device.type == "cpu" else [values]


def those(condition: Tensor, size: int) -> Sequence[Tensor]:
    """Where a condition [N] holds, in `chunks`; all of 0 ... N-1 where that is not known without waiting."""
    if condition.device.type != "cpu":
        return [torch.arange(len(condition), device=condition.device)]
    where = condition.nonzero().squeeze(1)
    return chunks(where, size) if len(where) else []
