"""The torch twin of every kernel: the specification that the Triton versions are held against.

Everything is computed in float32, or in float64 when the logits are float64. p is the target's distribution, q the
drafter's, both after logit bias, token mask, temperature and filters.

- rejection: Leviathan et al., arXiv 2211.17192; Chen et al., arXiv 2302.01318
- block: Sun et al., arXiv 2403.10444
- coupled: Daliri et al., arXiv 2408.07978
- typical: Cai et al. (Medusa), arXiv 2401.10774; the only one that is not lossless
- drawing by argmax(log weight + Gumbel noise): Gumbel 1954; Maddison et al., arXiv 1411.0030
"""

from typing import NamedTuple

import torch
from torch import Tensor

from . import philox
from .records import DRAW_BLOCK, Draws, RowStats, Status, Verdict


def row_stats(
    logits: Tensor,  # [B, V] or [B, W, V] any floating dtype
    temperature: Tensor | None = None,  # [B] float, 0 = greedy; None: 1
    top_k: Tensor | None = None,  # [B] int, <= 0 = off
    top_p: Tensor | None = None,  # [B] float in (0, 1], 1 = off
    min_p: Tensor | None = None,  # [B] float in [0, 1], 0 = off
    *,
    logit_bias: Tensor | None = None,  # [V], [B, V] or [B, W, V] float
    token_mask: Tensor | None = None,  # likewise, bool, False = excluded
) -> RowStats:
    """Threshold, log-sum-exp and argmax per row: fields of shape [B] or [B, W].

    top-k, then top-p of what top-k left, then min-p move the threshold, with the meaning of transformers' warpers,
    except that every token that ties with the last kept one stays.
    """
    return _row_stats(adjusted(logits, logit_bias, token_mask), temperature, top_k, top_p, min_p)


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
    logit_bias: Tensor | None = None,  # [V], [B, V] or [B, W, V] float
    token_mask: Tensor | None = None,  # likewise, bool
    return_logprobs: bool = False,
) -> Draws:
    """One token per row: argmax(logit / T + Gumbel(seed, position, token)) over the kept tokens; column w decides the
    token at position + w. Greedy rows take the argmax."""
    logits = adjusted(logits, logit_bias, token_mask)
    stats = _row_stats(logits, temperature, top_k, top_p, min_p)
    tokens = stats.argmax
    if not _all_greedy(temperature):
        tokens = _own_tokens(logits, stats, temperature, seed, position, origin, stream)
    logprobs = None
    if return_logprobs:
        logprobs = log_prob_of(logits, tokens, stats, temperature).where(stats.lse.isfinite(), 0)
    return Draws(tokens.masked_fill(~stats.lse.isfinite(), -1), stats, logprobs)


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
    method: str = "rejection",
    logit_bias: Tensor | None = None,  # [V], [B, V] or [B, K+1, V] float, of p and q alike
    token_mask: Tensor | None = None,  # likewise, bool
    return_logprobs: bool = False,
    typical_epsilon: float = 0.09,
    typical_delta: float = 0.3,
) -> Verdict:
    """How many drafts stand, and the next token; with u_i a uniform number per drafted position:

    - rejection: draft i stands while u_i q(x_i) < p(x_i); after a rejection the next token comes from max(p - q, 0).
    - block: with s_0 = 1 and s_i = min(s_{i-1} p(x_i) / q(x_i), 1), the longest prefix of i drafts stands for which
      u_i < h_i; the next token comes from max(s_i p - q, 0). h_i is in `_block_test`.
    - coupled: draft i stands while it is what `sample` draws from the target's row with the same noise.
    - typical: draft i stands while p(x_i) > min(epsilon, delta exp(-entropy of p)); q is not looked at. Lossy.

    Where all stand, the next token comes from the target's next row. Greedy rows keep drafts while they are the argmax.
    """
    num_drafts = draft_tokens.shape[1]
    if method in ("coupled", "typical"):
        draft_logits = draft_stats = None
    filters = (top_k, top_p, min_p)
    target = adjusted(target_logits, logit_bias, token_mask)
    stats = _row_stats(target, temperature, *filters)
    draft = None
    if draft_logits is not None and num_drafts:
        bias, mask = (_head(value, num_drafts) for value in (logit_bias, token_mask))
        draft = adjusted(draft_logits, bias, mask)
        draft_stats = draft_stats or _row_stats(draft, temperature, *filters)
    greedy = torch.zeros_like(seed, dtype=torch.bool) if temperature is None else temperature == 0
    tests = _test_drafts(target, stats, draft_tokens, draft, draft_stats, temperature, greedy)
    own = stats.argmax
    if method == "coupled" and not _all_greedy(temperature):
        own = _own_tokens(target, stats, temperature, seed, position, None, philox.SAMPLE)

    # How many drafts stand.
    offset = torch.arange(num_drafts, device=seed.device)
    u = philox.uniform(seed[:, None], position[:, None] + offset, position[:, None], philox.ACCEPT)
    prefix = torch.ones_like(stats.lse)  # s_0 ... s_K of block, 1 for the others
    if method == "rejection":
        passed = u * tests.q < tests.p
    elif method == "typical":
        entropy = _entropy(target, stats, temperature)[:, :num_drafts]
        passed = tests.p > torch.clamp(typical_delta * torch.exp(-entropy), max=typical_epsilon)
    elif method == "coupled":
        passed = draft_tokens == own[:, :num_drafts]
    else:
        prefix = _block_prefix(tests)
        passed = _block_test(target, stats, draft_tokens, draft, draft_stats, temperature, tests, prefix, u)
    passed = torch.where(greedy[:, None], draft_tokens == stats.argmax[:, :num_drafts], passed) & tests.fit
    num_accepted = passed.long().cumprod(dim=1).sum(dim=1)
    if method == "block":
        longest = (passed * (offset + 1)).amax(dim=1) if num_drafts else num_accepted
        num_accepted = torch.where(greedy, num_accepted, longest)

    # The deciding row.
    decider = RowStats(*(field.gather(1, num_accepted[:, None]).squeeze(1) for field in stats))
    rejected = _at(tests.fit, num_accepted, default=False)
    status = (
        decider.lse.isnan() * int(Status.NAN_TARGET)
        | (decider.lse == -torch.inf) * int(Status.EMPTY_TARGET)
        | _at(tests.invalid, num_accepted, default=False) * int(Status.INVALID_DRAFT)
        | _at(tests.q_zero, num_accepted, default=False) * int(Status.ZERO_DRAFT_PROB)
    )
    next_token = own.gather(1, num_accepted[:, None]).squeeze(1)
    if method != "coupled" and not _all_greedy(temperature):
        log_p = log_prob(_row(target, num_accepted), decider, temperature)
        weights = log_p
        if num_drafts and method != "typical":
            last = num_accepted.clamp(max=num_drafts - 1)
            if draft is None:
                log_q = _one_hot_log(draft_tokens.gather(1, last[:, None]), log_p)
            else:
                row = RowStats(*(field.gather(1, last[:, None]).squeeze(1) for field in draft_stats))
                log_q = _resize(log_prob(_row(draft, last), row, temperature), log_p.shape[-1])
            residual = log_residual(log_p + prefix.gather(1, num_accepted[:, None]).log(), log_q)
            empty = rejected & ~greedy & (residual == -torch.inf).all(dim=-1)
            status = status | empty * int(Status.EMPTY_RESIDUAL)
            weights = torch.where((rejected & ~empty)[:, None], residual, log_p)
        replaced = rejected & (method != "typical")
        where = position + num_accepted
        drawn = torch.where(
            replaced,
            draw(weights, seed, where, position, philox.RESIDUAL),
            draw(weights, seed, where, 0, philox.SAMPLE),
        )
        next_token = torch.where(greedy, decider.argmax, drawn)

    column = torch.arange(num_drafts + 1, device=seed.device)
    valid = decider.lse.isfinite()
    tokens = torch.nn.functional.pad(draft_tokens, (0, 1), value=-1)
    tokens = torch.where(column < num_accepted[:, None], tokens, -1)
    tokens = torch.where((column == num_accepted[:, None]) & valid[:, None], next_token[:, None], tokens)
    logprobs = None
    if return_logprobs:
        logprobs = log_prob_of(target, tokens, stats, temperature).where(tokens >= 0, 0)
    return Verdict(tokens, num_accepted.to(torch.int32), status.to(torch.int32), logprobs)


class _Tests(NamedTuple):
    """What is known of the drafts before a uniform number is looked at; all [B, K]."""

    p: Tensor  # p(x_i)
    q: Tensor  # q(x_i), 1 for one-hot drafts
    fit: Tensor  # bool: the row and its draft can be tested at all; the draft ends where they cannot
    invalid: Tensor  # bool: the draft's row has no distribution
    q_zero: Tensor  # bool: q(x_i) = 0


def _test_drafts(
    target: Tensor,  # [B, K+1, V_target]
    stats: RowStats,  # [B, K+1]
    draft_tokens: Tensor,  # [B, K]
    draft: Tensor | None,  # [B, K, V_draft]
    draft_stats: RowStats | None,  # [B, K]
    temperature: Tensor | None,  # [B]
    greedy: Tensor,  # [B] bool
) -> _Tests:
    num_drafts = draft_tokens.shape[1]
    head = RowStats(*(field[:, :num_drafts] for field in stats))
    p = torch.exp(log_prob_of(target[:, :num_drafts], draft_tokens, head, temperature))
    testable = (draft_tokens >= 0) & head.lse.isfinite()
    none = torch.zeros_like(testable)
    if draft is None or draft_stats is None:
        return _Tests(p, torch.ones_like(p), testable, none, none)
    q = torch.exp(log_prob_of(draft, draft_tokens, draft_stats, temperature))
    sampled = testable & ~greedy[:, None]
    invalid = sampled & ~draft_stats.lse.isfinite()
    q_zero = sampled & ~invalid & (q == 0)
    return _Tests(p, q, testable & ~invalid & ~q_zero, invalid, q_zero)


def _block_prefix(tests: _Tests) -> Tensor:
    """s_0 ... s_K [B, K+1]: s_0 = 1, s_i = min(s_{i-1} p(x_i) / q(x_i), 1)."""
    steps = [torch.ones_like(tests.p[:, :1].sum(dim=1))]
    for p, q in zip(tests.p.unbind(dim=1), tests.q.unbind(dim=1), strict=True):
        steps.append((steps[-1] * p / q).clamp(max=1))
    return torch.stack(steps, dim=1)


def _block_test(
    target: Tensor,  # [B, K+1, V_target]
    stats: RowStats,  # [B, K+1]
    draft_tokens: Tensor,  # [B, K]
    draft: Tensor | None,  # [B, K, V_draft]
    draft_stats: RowStats | None,  # [B, K]
    temperature: Tensor | None,  # [B]
    tests: _Tests,
    prefix: Tensor,  # [B, K+1]
    u: Tensor,  # [B, K]
) -> Tensor:
    """[B, K] bool: whether the prefix of i = 1 ... K drafts passes its own test, u_i < h_i, where n drafts are fit:

    h_i = r_i / (r_i + 1 - s_i) for i < n, with r_i = sum over v of max(s_i p(v) - q(v), 0) in row i; h_n = s_n.
    """
    num_drafts = draft_tokens.shape[1]
    if num_drafts == 0:
        return tests.fit
    s = prefix[:, 1:]
    if draft is None or draft_stats is None:  # max(s p - one-hot, 0) sums to s - s p(x)
        mass = prefix[:, :-1] * (1 - tests.p)
    else:
        head = RowStats(*(field[:, :num_drafts] for field in stats))
        log_p = log_prob(target[:, :num_drafts], head, temperature) + prefix[:, :-1, None].log()
        log_q = _resize(log_prob(draft, draft_stats, temperature), log_p.shape[-1])
        mass = torch.exp(log_residual(log_p, log_q)).sum(dim=-1)
    mass = torch.nn.functional.pad(mass[:, 1:], (0, 1))  # r_1 ... r_{K-1}, and none behind the last draft
    fit = tests.fit.long().cumprod(dim=1)
    more = torch.nn.functional.pad(fit[:, 1:], (0, 1)).bool()  # i < n
    passed = torch.where(more, u * (mass + 1 - s) < mass, u < s)
    return passed & fit.bool()


def adjusted(logits: Tensor, logit_bias: Tensor | None, token_mask: Tensor | None) -> Tensor:
    """Logits [B, V] or [B, W, V] in the dtype of the computation, with bias [V], [B, V] or [B, W, V] added and tokens
    outside the mask at -inf. A vocabulary larger than theirs has no bias and no mask beyond it."""
    logits = logits if logits.dtype == torch.float64 else logits.float()
    if logit_bias is not None:
        logits = logits + _resize(spread(logit_bias, logits.dim()), logits.shape[-1], 0.0).to(logits.dtype)
    if token_mask is not None:
        logits = logits.masked_fill(~_resize(spread(token_mask, logits.dim()), logits.shape[-1], True), -torch.inf)
    return logits


def spread(value: Tensor, dims: int) -> Tensor:
    """[V], [B, V] or [B, W, V] with dimensions of size 1 put before V until there are `dims`."""
    while value.dim() < dims:
        value = value[:, None] if value.dim() > 1 else value[None]
    return value


def log_prob(logits: Tensor, stats: RowStats, temperature: Tensor | None) -> Tensor:
    """log prob(v) for whole rows: logits [B, ..., V], stats [B, ...], temperature [B]; -inf where filtered out."""
    _, inverse_temperature = _temperature(temperature, logits)
    log_p = logits * inverse_temperature - stats.lse[..., None]
    return log_p.masked_fill(logits < stats.threshold[..., None], -torch.inf)


def log_prob_of(logits: Tensor, tokens: Tensor, stats: RowStats, temperature: Tensor | None) -> Tensor:
    """log prob of one token per row: logits [B, ..., V], tokens [B, ...]; -inf for ids outside [0, V)."""
    inside = (tokens >= 0) & (tokens < logits.shape[-1])
    one = logits.gather(-1, tokens.where(inside, 0)[..., None])
    return log_prob(one, stats, temperature).squeeze(-1).where(inside, -torch.inf)


def log_residual(log_p: Tensor, log_q: Tensor) -> Tensor:
    """log max(p - q, 0), not normalised, as log p + log(1 - q/p): stable where p and q are both tiny."""
    ratio = torch.exp(log_q - log_p)  # NaN where both are 0
    return torch.where(ratio < 1, log_p + torch.log1p(-ratio), -torch.inf)


def draw_by_token(log_weights: Tensor, seed: Tensor, position: Tensor, origin: Tensor | int, stream: int) -> Tensor:
    """One id per row with probability proportional to exp(log_weights): log_weights [..., V] -> [...] int64.

    Every token has its own noise, so that two rows that are close draw the same token as often as they can.
    """
    noise = philox.gumbel(seed, position, origin, stream, log_weights.shape[-1])
    return (log_weights + noise).argmax(dim=-1)


def draw(log_weights: Tensor, seed: Tensor, position: Tensor, origin: Tensor | int, stream: int) -> Tensor:
    """As `draw_by_token`, in two levels: first a block of DRAW_BLOCK tokens by its mass, then a token inside it. Costs
    noise for one block instead of all of them, and where there is only one block it draws the same tokens."""
    size = log_weights.shape[-1]
    if size <= DRAW_BLOCK:
        return draw_by_token(log_weights, seed, position, origin, stream)
    blocks = torch.nn.functional.pad(log_weights, (0, -size % DRAW_BLOCK), value=-torch.inf)
    blocks = blocks.unflatten(-1, (-1, DRAW_BLOCK))
    mass = blocks.logsumexp(dim=-1)
    noise = philox.gumbel(seed, position, origin, stream, mass.shape[-1], first=philox.BLOCK_LEVEL)
    block = (mass + noise).argmax(dim=-1)
    inside = blocks.gather(-2, block[..., None, None].expand(*block.shape, 1, DRAW_BLOCK)).squeeze(-2)
    first = block * DRAW_BLOCK
    return first + (inside + philox.gumbel(seed, position, origin, stream, DRAW_BLOCK, first)).argmax(dim=-1)


def _own_tokens(
    logits: Tensor,
    stats: RowStats,
    temperature: Tensor | None,
    seed: Tensor,
    position: Tensor,
    origin: Tensor | None,
    stream: int,
) -> Tensor:
    """What each row draws by itself, with noise per token; greedy rows their argmax."""
    if logits.dim() == 3:
        column = torch.arange(logits.shape[1], device=logits.device)
        seed, position = seed[:, None], position[:, None] + column
        origin = None if origin is None else origin[:, None]
    log_p = log_prob(logits, stats, temperature)
    tokens = draw_by_token(log_p, seed, position, 0 if origin is None else origin, stream)
    if temperature is None:
        return tokens
    return torch.where(_per_row(temperature, stats.lse) == 0, stats.argmax, tokens)


def _row_stats(
    logits: Tensor, temperature: Tensor | None, top_k: Tensor | None, top_p: Tensor | None, min_p: Tensor | None
) -> RowStats:
    greedy, inverse_temperature = _temperature(temperature, logits)
    maximum, argmax = logits.max(dim=-1)
    threshold = torch.full_like(maximum, -torch.inf)
    if top_k is not None or top_p is not None:
        threshold = _rank_threshold(logits, inverse_temperature, top_k, top_p)
    if min_p is not None:
        # prob >= min_p * max prob  <=>  logit >= max + T log(min_p)
        min_p = _per_row(min_p, maximum)
        threshold = torch.maximum(threshold, maximum + torch.log(min_p) / inverse_temperature.squeeze(-1))
    kept = logits * inverse_temperature
    if not _is_unfiltered(threshold):
        kept = kept.masked_fill((logits < threshold[..., None]) & ~greedy, -torch.inf)
    lse = torch.logsumexp(kept, dim=-1)
    lse = torch.where(maximum < torch.inf, lse, torch.nan)  # +inf and NaN alike
    return RowStats(torch.where(greedy.squeeze(-1), maximum, threshold), lse, argmax)


def _entropy(logits: Tensor, stats: RowStats, temperature: Tensor | None) -> Tensor:
    """-sum of p log p per row, in nats: [B, ..., V] -> [B, ...]."""
    log_p = log_prob(logits, stats, temperature)
    return -(log_p.exp() * log_p.clamp(min=-1e30)).sum(dim=-1)


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
    """The smallest logit that top-k and then top-p keep; -inf where both are off."""
    ordered = logits.sort(dim=-1, descending=True).values
    vocab_size = logits.shape[-1]
    threshold = torch.full_like(ordered[..., 0], -torch.inf)
    if top_k is not None:
        top_k = top_k.reshape(-1, *[1] * (logits.dim() - 1))
        on = (top_k > 0) & (top_k < vocab_size)
        rank = (top_k.where(on, 1).long() - 1).expand(*ordered.shape[:-1], 1)
        threshold = ordered.gather(-1, rank).where(on, -torch.inf).squeeze(-1)
    if top_p is not None:
        scaled = (ordered * inverse_temperature).masked_fill(ordered < threshold[..., None], -torch.inf)
        probs = scaled.softmax(dim=-1, dtype=torch.float64)
        bound = _per_row(top_p, probs)
        last = ((probs.cumsum(dim=-1) - probs < bound).sum(dim=-1, keepdim=True) - 1).clamp(min=0)
        lowest = ordered.gather(-1, last).where(bound < 1, -torch.inf).squeeze(-1)
        threshold = torch.maximum(threshold, lowest)
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


def _resize(values: Tensor, vocab_size: int, value: float = -torch.inf) -> Tensor:
    """Cut or pad rows [..., V] to [..., vocab_size]."""
    missing = vocab_size - values.shape[-1]
    return torch.nn.functional.pad(values, (0, missing), value=value) if missing > 0 else values[..., :vocab_size]


def _head(value: Tensor | None, width: int) -> Tensor | None:
    """The first `width` rows of [B, W, V]; [V] and [B, V] serve every row."""
    return value[:, :width] if value is not None and value.dim() == 3 else value
