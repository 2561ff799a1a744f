"""The torch twin of every kernel: the specification that the Triton versions are held against.

Everything is computed in float32, or in float64 when the logits are float64. p is the target's distribution, q the
drafter's, both after temperature and filters.

- speculative sampling: Leviathan et al., arXiv 2211.17192; Chen et al., arXiv 2302.01318
- drawing by argmax(logit / T + Gumbel noise): Gumbel 1954; Maddison et al., arXiv 1411.0030
"""

import torch
from torch import Tensor

from . import philox
from .records import Draws, RowStats, Status, Verdict


def row_stats(
    logits: Tensor,  # [B, V] or [B, W, V] any floating dtype
    temperature: Tensor | None = None,  # [B] float, 0 = greedy; None: 1
    top_k: Tensor | None = None,  # [B] int, <= 0 = off
    top_p: Tensor | None = None,  # [B] float in (0, 1], 1 = off
    min_p: Tensor | None = None,  # [B] float in [0, 1], 0 = off
) -> RowStats:
    """Threshold, log-sum-exp and argmax per row: fields of shape [B] or [B, W].

    top-k, then top-p of what top-k left, then min-p move the threshold, with the meaning of transformers' warpers,
    except that every token that ties with the last kept one stays.
    """
    logits = _as_computed(logits)
    greedy, inverse_temperature = _temperature(temperature, logits)
    maximum, argmax = logits.max(dim=-1)
    threshold = torch.full_like(maximum, -torch.inf)
    if top_k is not None or top_p is not None:
        threshold = _rank_threshold(logits, inverse_temperature, top_k, top_p)
    if min_p is not None:
        # prob >= min_p * max prob  <=>  logit >= max + T log(min_p)
        min_p = _per_row(min_p, maximum)
        threshold = torch.maximum(threshold, maximum + torch.log(min_p) / inverse_temperature.squeeze(-1))
    threshold = torch.where(greedy.squeeze(-1), maximum, threshold)
    kept = logits * inverse_temperature
    if not _is_unfiltered(threshold):
        kept = kept.masked_fill(logits < threshold[..., None], -torch.inf)
    lse = torch.logsumexp(kept, dim=-1)
    lse = torch.where(maximum < torch.inf, lse, torch.nan)  # +inf and NaN alike
    return RowStats(threshold, lse, argmax)


def sample(
    logits: Tensor,  # [B, V] or [B, W, V] any floating dtype
    temperature: Tensor | None = None,  # [B] float, 0 = greedy; None: 1
    top_k: Tensor | None = None,  # [B] int
    top_p: Tensor | None = None,  # [B] float
    min_p: Tensor | None = None,  # [B] float
    *,
    seed: Tensor,  # [B] int64
    position: Tensor,  # [B] int64, absolute position of the token drawn from column 0
    origin: Tensor | None = None,  # [B] int64, position of the round's first drafted token; None: 0
    stream: int = philox.SAMPLE,
) -> Draws:
    """One token per row: argmax(logit / T + Gumbel(seed, position, token)) over the kept tokens; column w decides the
    token at position + w. Greedy rows take the argmax."""
    stats = row_stats(logits, temperature, top_k, top_p, min_p)
    if logits.dim() == 3:
        column = torch.arange(logits.shape[1], device=logits.device)
        seed, position = seed[:, None], position[:, None] + column
        origin = None if origin is None else origin[:, None]
    tokens = stats.argmax
    if not _all_greedy(temperature):
        log_p = log_prob(logits, stats, temperature)
        tokens = draw(log_p, seed, position, 0 if origin is None else origin, stream)
        if temperature is not None:
            tokens = torch.where(_per_row(temperature, stats.lse) == 0, stats.argmax, tokens)
    return Draws(tokens.masked_fill(~stats.lse.isfinite(), -1), stats)


def verify(
    target_logits: Tensor,  # [B, K+1, V_target] any floating dtype
    draft_tokens: Tensor,  # [B, K] int64, -1 where a row proposes fewer
    draft_logits: Tensor | None = None,  # [B, K, V_draft]; None: one-hot
    draft_stats: RowStats | None = None,  # of draft_logits, fields [B, K]
    *,
    temperature: Tensor | None = None,  # [B] float, 0 = greedy; None: 1
    top_k: Tensor | None = None,  # [B] int
    top_p: Tensor | None = None,  # [B] float
    min_p: Tensor | None = None,  # [B] float
    seed: Tensor,  # [B] int64
    position: Tensor,  # [B] int64, absolute position of the first drafted token
) -> Verdict:
    """Rejection verification: how many drafts stand, and the next token.

    Draft i stands while u * q(x_i) < p(x_i) (greedy rows: while it is the argmax). The first that falls is replaced by
    a draw from the residual max(p - q, 0); where all stand, the bonus token is drawn from the target's next row.
    """
    num_drafts = draft_tokens.shape[1]
    filters = (top_k, top_p, min_p)
    stats = row_stats(target_logits, temperature, *filters)
    if draft_logits is not None and draft_stats is None and num_drafts:
        draft_stats = row_stats(draft_logits, temperature, *filters)
    greedy = torch.zeros_like(seed, dtype=torch.bool) if temperature is None else temperature == 0

    # How many drafts stand. `fit` says that a row and its draft can be tested at all; the draft ends where it is not.
    head = RowStats(*(field[:, :num_drafts] for field in stats))
    p = torch.exp(log_prob_of(target_logits[:, :num_drafts], draft_tokens, head, temperature))
    proposed = draft_tokens >= 0
    target_ok, draft_ok = head.lse.isfinite(), torch.ones_like(proposed)
    q, q_zero = torch.ones_like(p), torch.zeros_like(proposed)
    if draft_logits is not None and draft_stats is not None:
        q = torch.exp(log_prob_of(draft_logits, draft_tokens, draft_stats, temperature))
        draft_ok = draft_stats.lse.isfinite() | greedy[:, None]
        q_zero = proposed & draft_ok & (q == 0) & ~greedy[:, None]
    fit = proposed & target_ok & draft_ok & ~q_zero
    offset = torch.arange(num_drafts, device=seed.device)
    u = philox.uniform(seed[:, None], position[:, None] + offset, position[:, None], philox.ACCEPT)
    accepted = fit & torch.where(greedy[:, None], draft_tokens == head.argmax, u * q < p)
    num_accepted = accepted.long().cumprod(dim=1).sum(dim=1)

    # The deciding row.
    decider = RowStats(*(field.gather(1, num_accepted[:, None]).squeeze(1) for field in stats))
    rejected = _at(fit, num_accepted, default=False)
    status = (
        decider.lse.isnan() * int(Status.NAN_TARGET)
        | (decider.lse == -torch.inf) * int(Status.EMPTY_TARGET)
        | _at(proposed & target_ok & ~draft_ok, num_accepted, default=False) * int(Status.INVALID_DRAFT)
        | _at(target_ok & q_zero, num_accepted, default=False) * int(Status.ZERO_DRAFT_PROB)
    )
    next_token = decider.argmax
    if not _all_greedy(temperature):
        log_p = log_prob(_row(target_logits, num_accepted), decider, temperature)
        log_r = log_p
        if num_drafts:
            last = num_accepted.clamp(max=num_drafts - 1)
            if draft_logits is None or draft_stats is None:
                log_q = _one_hot_log(draft_tokens.gather(1, last[:, None]), log_p)
            else:
                row = RowStats(*(field.gather(1, last[:, None]).squeeze(1) for field in draft_stats))
                log_q = _resize(log_prob(_row(draft_logits, last), row, temperature), log_p.shape[-1])
            log_r = log_residual(log_p, log_q)
            empty = rejected & ~greedy & (log_r == -torch.inf).all(dim=-1)
            status = status | empty * int(Status.EMPTY_RESIDUAL)
            log_r = torch.where((rejected & ~empty)[:, None], log_r, log_p)
        where = position + num_accepted
        drawn = torch.where(
            rejected,
            draw(log_r, seed, where, position, philox.RESIDUAL),
            draw(log_r, seed, where, 0, philox.SAMPLE),
        )
        next_token = torch.where(greedy, decider.argmax, drawn)
    next_token = next_token.masked_fill(~decider.lse.isfinite(), -1)

    column = torch.arange(num_drafts + 1, device=seed.device)
    tokens = torch.nn.functional.pad(draft_tokens, (0, 1), value=-1)
    tokens = torch.where(column < num_accepted[:, None], tokens, -1)
    tokens = torch.where(column == num_accepted[:, None], next_token[:, None], tokens)
    return Verdict(tokens, num_accepted.to(torch.int32), status.to(torch.int32))


def log_prob(logits: Tensor, stats: RowStats, temperature: Tensor | None) -> Tensor:
    """log prob(v) for whole rows: logits [B, ..., V], stats [B, ...], temperature [B]; -inf where filtered out."""
    logits = _as_computed(logits)
    _, inverse_temperature = _temperature(temperature, logits)
    log_p = logits * inverse_temperature - stats.lse[..., None]
    return log_p.masked_fill(logits < stats.threshold[..., None], -torch.inf)


def log_prob_of(logits: Tensor, tokens: Tensor, stats: RowStats, temperature: Tensor | None) -> Tensor:
    """log prob of one token per row: logits [B, K, V], tokens [B, K]; -inf for ids outside [0, V)."""
    inside = (tokens >= 0) & (tokens < logits.shape[-1])
    one = logits.gather(-1, tokens.where(inside, 0)[..., None])
    return log_prob(one, stats, temperature).squeeze(-1).where(inside, -torch.inf)


def log_residual(log_p: Tensor, log_q: Tensor) -> Tensor:
    """log max(p - q, 0), not normalised, as log p + log(1 - q/p): stable where p and q are both tiny."""
    ratio = torch.exp(log_q - log_p)  # NaN where both are 0
    return torch.where(ratio < 1, log_p + torch.log1p(-ratio), -torch.inf)


def draw(log_weights: Tensor, seed: Tensor, position: Tensor, origin: Tensor | int, stream: int) -> Tensor:
    """One id per row with probability proportional to exp(log_weights): log_weights [..., V] -> [...] int64."""
    noise = philox.gumbel(seed, position, origin, stream, log_weights.shape[-1])
    return (log_weights + noise).argmax(dim=-1)


def _as_computed(logits: Tensor) -> Tensor:
    return logits if logits.dtype == torch.float64 else logits.float()


def _per_row(value: Tensor, like: Tensor) -> Tensor:
    """[B] -> [B, 1, ...] to broadcast against `like` [B, ...], in its dtype."""
    return value.to(like.dtype).reshape(-1, *[1] * (like.dim() - 1))


def _temperature(temperature: Tensor | None, logits: Tensor) -> tuple[Tensor, Tensor]:
    """Whether a row is greedy, and 1/T (1 for greedy rows): [B, ..., 1] each."""
    if temperature is None:
        one = logits.new_ones([1] * logits.dim())
        return one == 0, one
    temperature = _per_row(temperature, logits)
    greedy = temperature == 0
    return greedy, 1 / temperature.masked_fill(greedy, 1)


def _rank_threshold(logits: Tensor, inverse_temperature: Tensor, top_k: Tensor | None, top_p: Tensor | None) -> Tensor:
    """The smallest logit that top-k and then top-p keep."""
    ordered = logits.sort(dim=-1, descending=True).values
    vocab_size = logits.shape[-1]
    threshold = torch.full_like(ordered[..., 0], -torch.inf)
    if top_k is not None:
        top_k = top_k.reshape(-1, *[1] * (logits.dim() - 1))
        rank = top_k.where((top_k > 0) & (top_k < vocab_size), vocab_size).long() - 1
        threshold = ordered.gather(-1, rank.expand(*ordered.shape[:-1], 1)).squeeze(-1)
    if top_p is not None:
        scaled = (ordered * inverse_temperature).masked_fill(ordered < threshold[..., None], -torch.inf)
        probs = scaled.softmax(dim=-1)
        mass_before = probs.cumsum(dim=-1) - probs
        bound = _per_row(top_p, logits)
        kept = (mass_before < bound) | (bound >= 1)
        last = (kept.cumprod(dim=-1).sum(dim=-1, keepdim=True) - 1).clamp(min=0)
        threshold = torch.maximum(threshold, ordered.gather(-1, last).squeeze(-1))
    return threshold


def _is_unfiltered(threshold: Tensor) -> bool:
    """True only where that is known without waiting for a device."""
    return threshold.device.type == "cpu" and bool((threshold == -torch.inf).all())


def _all_greedy(temperature: Tensor | None) -> bool:
    """True only where that is known without waiting for a device."""
    return temperature is not None and temperature.device.type == "cpu" and bool((temperature == 0).all())


def _at(values: Tensor, index: Tensor, default: bool) -> Tensor:
    """values[b, index[b]] for values [B, K], and `default` where index[b] = K."""
    return torch.nn.functional.pad(values, (0, 1), value=default).gather(1, index[:, None]).squeeze(1)


def _row(logits: Tensor, index: Tensor) -> Tensor:
    """logits[b, index[b]]: [B, W, V] -> [B, V]."""
    return logits[torch.arange(logits.shape[0], device=logits.device), index]


def _one_hot_log(tokens: Tensor, like: Tensor) -> Tensor:
    """log of the one-hot distribution at tokens [B, 1], shaped like `like` [B, V]; all -inf for an id outside it."""
    ids = torch.arange(like.shape[-1], device=like.device)
    return torch.where(ids == tokens, 0.0, -torch.inf).to(like.dtype)


def _resize(log_q: Tensor, vocab_size: int) -> Tensor:
    """Cut or pad a row [B, V_draft] with -inf to [B, vocab_size]."""
    missing = vocab_size - log_q.shape[-1]
    return torch.nn.functional.pad(log_q, (0, missing), value=-torch.inf) if missing > 0 else log_q[:, :vocab_size]
