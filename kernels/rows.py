"""Rows of logits as distributions, in torch: their stats and probabilities, for `reference`."""

from typing import NamedTuple

import torch
from torch import Tensor

from .numerics import argmax, computed, exp, log_sum_exp, resize, with_leading_dims
from .rank_threshold import rank_threshold
from .records import GREEDY_BELOW, RowStats

Filters = tuple[Tensor | None, Tensor | None, Tensor | None]  # top_k, top_p, min_p: [B] each


class Rows(NamedTuple):
    """Distributions: logits, their stats, and probabilities from both."""

    logits: Tensor  # [B, V] or [B, W, V]
    stats: RowStats  # [B] or [B, W]
    scale: Tensor  # [B] 1 / T, 1 for greedy rows, in the dtype of the computation
    greedy: Tensor  # [B] bool

    @staticmethod
    def of(
        logits: Tensor,
        temperature: Tensor | None = None,  # [B]; None: 1
        filters: Filters = (None, None, None),
        stats: RowStats | None = None,  # None: they are worked out
    ) -> "Rows":
        """Logits [B, V] or [B, W, V] with their stats."""
        dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
        if temperature is None:
            temperature = logits.new_ones(len(logits), dtype=dtype)
        greedy = temperature.float() < GREEDY_BELOW  # compared in float32 whatever the dtype, as kernels do
        # Never 0, because 0 times a logit of -inf is NaN.
        scale = temperature.to(dtype).masked_fill(greedy, 1).reciprocal().clamp_(min=torch.finfo(dtype).tiny)
        if stats is None:
            stats = row_stats(logits, scale, greedy, filters)
        return Rows(logits, stats, scale, greedy)

    def at(self, index: Tensor) -> "Rows":
        """One row of each sequence: of [B, W, V], the rows index [B]."""
        sequence = torch.arange(len(index), device=index.device)
        stats = RowStats(*(field[sequence, index] for field in self.stats))
        return self._replace(logits=self.logits[sequence, index], stats=stats)

    def log_prob(self) -> Tensor:
        """log prob(v), of the shape of the logits; -inf where filtered out."""
        return self._log_prob(computed(self.logits), self.stats.lse, self.stats.threshold)

    def prob(self) -> Tensor:
        """prob(v)."""
        return exp(self.log_prob())

    def log_prob_of(self, tokens: Tensor) -> Tensor:
        """log prob of one token for each row, or for the first rows of each sequence; -inf for ids outside [0, V)."""
        ids = tokens.clamp(0, self.logits.shape[-1] - 1)
        lse, threshold = self.stats.lse, self.stats.threshold
        if tokens.shape != lse.shape:
            lse, threshold = lse[:, : tokens.shape[1]], threshold[:, : tokens.shape[1]]
        one = computed(self.logits.gather(-1, ids[..., None]))
        return self._log_prob(one, lse, threshold).squeeze(-1).masked_fill_(ids != tokens, -torch.inf)

    def _log_prob(self, logits: Tensor, lse: Tensor, threshold: Tensor) -> Tensor:
        scaled = logits * per_row(self.scale, logits.dim())
        return scaled.masked_fill_(logits < threshold[..., None], -torch.inf).sub_(lse[..., None])


def per_row(values: Tensor, dims: int) -> Tensor:
    """A value of each sequence [B] as [B, 1, ...] of so many dimensions."""
    return values.view(-1, *[1] * (dims - 1))


def unpacked(values: Tensor, cu: Tensor, width: int, fill: float) -> Tensor:
    """Packed rows [N, V] as [B, width, V]. Sequence b has the rows from cu[b] up to cu[b+1]; missing ones hold `fill`."""
    at = cu[:-1, None] + torch.arange(width, device=cu.device)
    missing = ((at < 0) | (at >= cu[1:, None]))[..., None]
    if not len(values):
        return values.new_full((*at.shape, values.shape[1]), fill)
    return values[at.clamp(0, len(values) - 1)].masked_fill_(missing, fill)


def unpacked_with(
    target_logits: Tensor, logit_bias: Tensor | None, token_mask: Tensor | None, cu: Tensor, width: int
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Packed rows with their bias and mask, as `ops.verify` takes them, as [B, width, V]. Missing rows are -inf throughout."""
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


def row_stats(
    logits: Tensor,  # [B, V] or [B, W, V]
    scale: Tensor,  # [B] 1 / T, 1 for greedy rows
    greedy: Tensor,  # [B] bool
    filters: Filters,
) -> RowStats:
    """See `reference.row_stats`."""
    logits = computed(logits)
    scale, greedy = (per_row(value, logits.dim() - 1) for value in (scale, greedy))
    top_k, top_p, min_p = (
        None if value is None else per_row(value, logits.dim() - 1).expand(logits.shape[:-1]) for value in filters
    )
    likeliest = argmax(logits)
    maximum = logits.gather(-1, likeliest[..., None]).squeeze(-1)
    threshold = rank_threshold(logits, scale, top_k, top_p)
    if min_p is not None:
        # prob >= min_p * max prob  <=>  logit >= max + T log(min_p)
        log_min_p = min_p.where(min_p > 0, 0).to(maximum.dtype).log()
        threshold = torch.maximum(threshold, maximum + log_min_p / scale)
    threshold = threshold.masked_fill(greedy, -torch.inf)  # greedy rows have the lse of all their logits
    lse = log_sum_exp((logits * scale[..., None]).masked_fill_(logits < threshold[..., None], -torch.inf))
    return RowStats(maximum.where(greedy, threshold), lse, likeliest)
