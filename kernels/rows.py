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

from .records import RowStats

CHUNK = 1 << 20  # logits


class Rows(NamedTuple):
    """Distributions: logits, their stats, and the temperature of each sequence."""

    logits: Tensor  # [B, V] or [B, W, V]
    stats: RowStats  # [B] or [B, W]
    temperature: Tensor | None  # [B]

    def head(self, width: int) -> "Rows":
        """The first `width` rows of every sequence."""
        return Rows(self.logits[:, :width], RowStats(*(field[:, :width] for field in self.stats)), self.temperature)

    def at(self, sequence: Tensor, index: Tensor) -> "Rows":
        """One row for each of N sequences: [N, V]."""
        stats = RowStats(*(field[sequence, index] for field in self.stats))
        temperature = None if self.temperature is None else self.temperature[sequence]
        return Rows(self.logits[sequence, index], stats, temperature)

    def log_prob(self) -> Tensor:
        return log_prob(*self)

    def log_prob_of(self, tokens: Tensor) -> Tensor:
        return log_prob_of(self.logits, tokens, self.stats, self.temperature)


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
    logits = _computed(logits)
    log_p = _scaled(logits, temperature) - stats.lse[..., None]
    if logits.shape[-1] > 1 and known(stats.threshold == -torch.inf):
        return log_p
    return log_p.masked_fill(logits < stats.threshold[..., None], -torch.inf)


def log_prob_of(logits: Tensor, tokens: Tensor, stats: RowStats, temperature: Tensor | None) -> Tensor:
    """log prob of one token per row: logits [B, ..., V], tokens [B, ...]; -inf for ids outside [0, V)."""
    inside = (tokens >= 0) & (tokens < logits.shape[-1])
    one = logits.gather(-1, tokens.where(inside, 0)[..., None])
    return log_prob(one, stats, temperature).squeeze(-1).where(inside, -torch.inf)


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
        options = [None if value is None else value.repeat_interleave(logits.shape[1]) for value in options]
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
    if want_argmax or not is_never_greedy(temperature):
        maximum, argmax = logits.max(dim=-1)
    else:
        maximum = logits.amax(dim=-1)
        argmax = torch.zeros_like(maximum, dtype=torch.int64)
    kept = _scaled(logits, temperature)
    threshold = torch.full_like(maximum, -torch.inf)
    if top_k is not None or top_p is not None:
        threshold = _rank_threshold(logits, temperature, top_k, top_p)
    if min_p is not None:
        # prob >= min_p * max prob  <=>  logit >= max + T log(min_p)
        log_min_p = torch.log(min_p.to(maximum.dtype))
        threshold = torch.maximum(threshold, maximum + log_min_p / _inverse(temperature, log_min_p))
    if temperature is not None:  # greedy rows have the lse of all their logits
        threshold = threshold.where(temperature != 0, -torch.inf)
    if not (top_k is top_p is min_p is None or known(threshold == -torch.inf)):
        kept = kept.masked_fill(logits < threshold[..., None], -torch.inf)
    lse = log_sum_exp(kept).where(maximum < torch.inf, torch.nan)  # NaN for +inf and NaN alike
    if temperature is not None:
        threshold = threshold.where(temperature != 0, maximum)
    return RowStats(threshold, lse, argmax)


def _rank_threshold(logits: Tensor, temperature: Tensor | None, top_k: Tensor | None, top_p: Tensor | None) -> Tensor:
    """The smallest logit [R] that top-k and then top-p keep; -inf where both are off."""
    ordered = logits.sort(dim=-1, descending=True).values
    threshold = torch.full_like(ordered[:, :1], -torch.inf)
    if top_k is not None:
        on = ((top_k > 0) & (top_k < logits.shape[-1]))[:, None]
        rank = top_k[:, None].where(on, 1).long() - 1
        threshold = ordered.gather(-1, rank).where(on, -torch.inf)
    if top_p is not None:
        scaled = _scaled(ordered, temperature).masked_fill(ordered < threshold, -torch.inf)
        probs = scaled.softmax(dim=-1, dtype=torch.float64)
        bound = top_p.to(probs.dtype)[:, None]
        last = ((probs.cumsum(dim=-1) - probs < bound).sum(dim=-1, keepdim=True) - 1).clamp(min=0)
        threshold = torch.maximum(threshold, ordered.gather(-1, last).where(bound < 1, -torch.inf))
    return threshold.squeeze(-1)


def _computed(logits: Tensor) -> Tensor:
    """In the dtype of the computation: float64 as it is, float32 for all others."""
    return logits if logits.dtype == torch.float64 else logits.float()


def _scaled(logits: Tensor, temperature: Tensor | None) -> Tensor:
    """logits / T: [B, ..., V] with T [B]; greedy rows as they are."""
    if temperature is None or known(temperature == 1):
        return logits
    return logits * _inverse(temperature, logits)


def _inverse(temperature: Tensor | None, like: Tensor) -> Tensor:
    """1 / T, and 1 for greedy rows: [B] -> [B, 1, ...] to broadcast against `like` [B, ...], in its dtype."""
    if temperature is None:
        return torch.ones_like(like)
    temperature = temperature.to(like.dtype).reshape(-1, *[1] * (like.dim() - 1))
    return 1 / temperature.masked_fill(temperature == 0, 1)


def exp_(values: Tensor) -> Tensor:
    """Of a tensor that may be overwritten. On CPU the exp of float32 takes three times as long as exp2, and far longer
    where there is -inf; its error grows to |x| / 2 units in the last place."""
    if values.device.type == "cpu" and values.dtype == torch.float32:
        return values.mul_(math.log2(math.e)).exp2_()
    return values.exp_()


def log_sum_exp(values: Tensor) -> Tensor:
    """[..., V] -> [...], as torch.logsumexp."""
    peak = values.amax(dim=-1, keepdim=True)
    peak = peak.where(peak.abs() != torch.inf, 0)
    return exp_(values - peak).sum(dim=-1).log_().add_(peak.squeeze(-1))


def finite(values: Tensor) -> Tensor:
    """As torch.isfinite, in two steps instead of four."""
    return values.abs() < torch.inf


def known(condition: Tensor) -> bool:
    """Whether a condition holds throughout; True only where that is known without waiting for a device."""
    return condition.device.type == "cpu" and bool(condition.all())


def is_all_greedy(temperature: Tensor | None) -> bool:
    """True only where that is known."""
    return temperature is not None and known(temperature == 0)


def is_never_greedy(temperature: Tensor | None) -> bool:
    """True only where that is known."""
    return temperature is None or known(temperature != 0)


def chunks(values: Tensor, size: int) -> Sequence[Tensor]:
    """Values [N, ...] cut along N, where each of the N stands for `size` numbers to work on."""
    return values.split(max(1, CHUNK // size)) if values.device.type == "cpu" else [values]


def those(condition: Tensor, size: int) -> Sequence[Tensor]:
    """Where a condition [N] holds, in `chunks`; all of 0 ... N-1 where that is not known without waiting."""
    if condition.device.type != "cpu":
        return [torch.arange(len(condition), device=condition.device)]
    where = condition.nonzero().squeeze(1)
    return chunks(where, size) if len(where) else []
