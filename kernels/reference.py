"""The torch twins of `row_stats`, `sample` and `verify`: the specification of the Triton kernels and of the loops of CPUs.

Everything is computed in float32, or in float64 when the logits (of the target, for `verify`) are float64. p is the target's
distribution, q the drafter's, both after logit bias, token mask, temperature and filters.

- rejection: Leviathan et al., arXiv 2211.17192; Chen et al., arXiv 2302.01318
- block: Sun et al., arXiv 2403.10444
- coupled: Daliri et al., arXiv 2408.07978
- typical: Cai et al. (Medusa), arXiv 2401.10774; the only one that is not lossless

Rows as distributions are in rows.py, the acceptance tests in reference_acceptance.py, draws in draw.py, random numbers in
philox.py.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

from . import philox
from .draw import draw, draw_by_token
from .numerics import resize
from .records import Draws, RowStats, Status, Verdict
from .reference_acceptance import block_prefix, block_test, draft_tests, entropy, residual
from .rows import Rows, adjusted, head, unpacked_with


@torch.no_grad()
def row_stats(
    logits: Tensor,  # [B, V] or [B, W, V] any floating dtype
    temperature: Tensor | None = None,  # [B] float, below 1e-5 = greedy; None: 1
    top_k: Tensor | None = None,  # [B] int, <= 0 = off
    top_p: Tensor | None = None,  # [B] float in (0, 1], 1 = off
    min_p: Tensor | None = None,  # [B] float in [0, 1], 0 = off
    *,
    logit_bias: Tensor | None = None,  # [V], [B, V] or [B, W, V] float
    token_mask: Tensor | None = None,  # likewise, bool, False = excluded
) -> RowStats:
    """Threshold, log-sum-exp and argmax per row: fields of shape [B] or [B, W].

    Three filters move the threshold, in this order: top-k, top-p of what top-k left, min-p. They mean what transformers' warpers
    mean, except that every token that ties with the last kept one is kept.
    """
    return Rows.of(adjusted(logits, logit_bias, token_mask), temperature, (top_k, top_p, min_p)).stats


@torch.no_grad()
def sample(
    logits: Tensor,  # [B, V] or [B, W, V] any floating dtype
    temperature: Tensor | None = None,  # [B] float, below 1e-5 = greedy; None: 1
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
    """One token per row: argmax(logit / T + Gumbel(seed, position, origin, stream, token)) over the kept tokens.

    Column w decides the token at position + w. Greedy rows take the argmax."""
    p = Rows.of(adjusted(logits, logit_bias, token_mask), temperature, (top_k, top_p, min_p))
    tokens = _own_tokens(p, seed, position, 0 if origin is None else origin, stream)
    valid = p.stats.lse.isfinite()
    # By rounding, some would be above 0.
    logprobs = p.log_prob_of(tokens).where(valid, 0).clamp_(max=0) if return_logprobs else None
    return Draws(tokens.where(valid, -1), p.stats, logprobs)


@torch.no_grad()
def verify(
    target_logits: Tensor,  # [B, K+1, V_target], or packed [N, V_target], any floating dtype
    draft_tokens: Tensor,  # [B, K] int64; the draft of a sequence ends at its first -1
    draft_logits: Tensor | None = None,  # [B, K, V_draft]; None: one-hot
    draft_stats: RowStats | None = None,  # of draft_logits, fields [B, K]
    *,
    temperature: Tensor | None = None,  # [B] float, below 1e-5 = greedy; None: 1
    top_k: Tensor | None = None,  # [B] int
    top_p: Tensor | None = None,  # [B] float
    min_p: Tensor | None = None,  # [B] float
    seed: Tensor,  # [B] int64
    position: Tensor,  # [B] int64, absolute position of the first drafted token
    method: str = "rejection",
    logit_bias: Tensor | None = None,  # [V], [B, V] or [B, K+1, V] float, of p and q alike; packed: see `ops.verify`
    token_mask: Tensor | None = None,  # likewise, bool
    cu_num_logits: Tensor | None = None,  # [B+1] int32, where each sequence's rows begin in packed ones
    return_logprobs: bool = False,
    typical_epsilon: float = 0.09,
    typical_delta: float = 0.3,
) -> Verdict:
    """How many drafts are accepted, and the next token. With u_i a uniform number per drafted position:

    - rejection: draft i is accepted while u_i q(x_i) < p(x_i). After a rejection the next token comes from max(p - q, 0).
    - block: s_0 = 1 and s_i = min(s_{i-1} p(x_i) / q(x_i), 1). The longest prefix of i drafts with u_i < h_i is accepted; h_i is
      in `block_test`. After a rejection the next token comes from max(s_i p - q, 0).
    - coupled: draft i is accepted while it is what `sample` draws from the target's row with the same noise.
    - typical: draft i is accepted while p(x_i) > min(epsilon, delta exp(-entropy of p)). q is ignored. Lossy.

    If all are accepted, the next token comes from the target's next row. Greedy rows accept drafts while they are the argmax.
    """
    num_drafts = draft_tokens.shape[1]
    if cu_num_logits is not None:
        target_logits, logit_bias, token_mask = unpacked_with(
            target_logits, logit_bias, token_mask, cu_num_logits, num_drafts + 1
        )
    if method in ("coupled", "typical") or num_drafts == 0:
        draft_logits = None
    target, filters = adjusted(target_logits, logit_bias, token_mask), (top_k, top_p, min_p)
    p, q = Rows.of(target, temperature, filters), None
    if draft_logits is not None:
        draft = adjusted(draft_logits, *(head(value, num_drafts) for value in (logit_bias, token_mask)))
        if target_logits.dtype != torch.float64:  # behind the bias, as `sample` rounds its threshold behind it, too
            draft, draft_stats = _narrow(draft), None if draft_stats is None else _narrow_stats(draft_stats)
        q = Rows.of(draft, temperature, filters, draft_stats)
    greedy, argmaxes = p.greedy[:, None], p.stats.argmax
    column = torch.arange(num_drafts + 1, device=seed.device)

    # How many drafts are accepted.
    tests = draft_tests(p, q, draft_tokens)
    own, prefix = argmaxes, torch.ones_like(p.stats.lse)
    if method == "coupled":
        own = _own_tokens(p, seed, position, 0, philox.SAMPLE)
        passed = draft_tokens == own[:, :num_drafts]
    elif method == "typical":
        most = min(typical_epsilon, 2.0)  # p < 2 anyway, and clamp takes no number beyond float32
        passed = tests.p > torch.clamp(typical_delta * torch.exp(-entropy(p)[:, :num_drafts]), max=most)
    else:
        u = philox.uniform(seed[:, None], position[:, None] + column[:-1], position[:, None], philox.ACCEPT)
        if method == "block":
            prefix = block_prefix(tests)  # s_0 ... s_K
            passed = block_test(p, q, tests, prefix, u)
        else:
            passed = u * tests.q < tests.p
    passed = torch.where(greedy, draft_tokens == argmaxes[:, :num_drafts], passed) & tests.testable[:, :-1]
    num_accepted = passed.cumprod(dim=1).sum(dim=1)
    if method == "block":
        longest = pad(passed * column[1:], (1, 0)).amax(dim=1)
        num_accepted = torch.where(p.greedy, num_accepted, longest)

    # The deciding row, and the next token.
    last = num_accepted[:, None]
    status, next_token = _at(pad(tests.status, (0, 1)), last), own.gather(1, last)
    if method != "coupled":
        rejected = _at(tests.testable, last) & ~p.greedy if method != "typical" else torch.zeros_like(p.greedy)
        weights, empty = _next_weights(p, q, draft_tokens, prefix, num_accepted, rejected)
        status = status + empty * int(Status.EMPTY_RESIDUAL)
        origin, stream = position * rejected, torch.where(rejected, philox.RESIDUAL, philox.SAMPLE)
        drawn = draw(weights, seed, position + num_accepted, origin, stream)[:, None]
        next_token = torch.where(greedy, next_token, drawn)
    lse = _at(p.stats.lse, last)
    status = status + lse.isnan() * int(Status.NAN_TARGET) + (lse == -torch.inf) * int(Status.EMPTY_TARGET)
    next_token = next_token.where(lse.isfinite()[:, None], -1)

    tokens = torch.cat([draft_tokens, next_token], dim=1).masked_fill_(column >= last, -1).scatter_(1, last, next_token)
    logprobs = p.log_prob_of(tokens).where(tokens >= 0, 0).clamp_(max=0) if return_logprobs else None
    return Verdict(tokens, num_accepted.to(torch.int32), status.to(torch.int32), logprobs)


def _narrow(values: Tensor) -> Tensor:
    """float64 as float32, all others as they are."""
    return values.float() if values.dtype == torch.float64 else values


def _narrow_stats(stats: RowStats) -> RowStats:
    return RowStats(_narrow(stats.threshold), _narrow(stats.lse), stats.argmax)


def _next_weights(
    p: Rows,  # [B, K+1, V_target]
    q: Rows | None,  # [B, K, V_draft]
    draft_tokens: Tensor,  # [B, K]
    prefix: Tensor,  # [B, K+1] s_0 ... s_K
    num_accepted: Tensor,  # [B]
    rejected: Tensor,  # [B] bool
) -> tuple[Tensor, Tensor]:
    """Weights [B, V] that the next token is drawn by, and where a residual is empty, [B] bool.

    The weights are the residual max(s p - q, 0) where a draft was rejected, and p elsewhere or where the residual is empty."""
    its_p, num_drafts = p.at(num_accepted).prob(), draft_tokens.shape[1]
    if not num_drafts:
        return its_p, rejected
    sp, index = its_p * prefix.gather(1, num_accepted[:, None]), num_accepted.clamp(max=num_drafts - 1)
    if q is None:
        left = _without(sp, draft_tokens.gather(1, index[:, None]))
    else:
        left = residual(sp, resize(q.at(index).prob(), sp.shape[-1], 0.0))
    found = left.amax(dim=-1) > 0
    return left.where((found & rejected)[:, None], its_p), rejected & ~found


def _without(weights: Tensor, tokens: Tensor) -> Tensor:
    """Weights [B, V] with 0 for one token of each row, [B, 1]; an id outside them changes nothing."""
    ids = tokens.clamp(0, weights.shape[-1] - 1)
    return weights.scatter(-1, ids, weights.gather(-1, ids).masked_fill_(ids == tokens, 0))


def _own_tokens(p: Rows, seed: Tensor, position: Tensor, origin: Tensor | int, stream: int) -> Tensor:
    """What each row draws by itself, with noise per token; greedy rows their argmax."""
    greedy = p.greedy
    if p.logits.dim() == 3:
        column = torch.arange(p.logits.shape[1], device=seed.device)
        seed, position, greedy = seed[:, None], position[:, None] + column, greedy[:, None]
        origin = origin[:, None] if isinstance(origin, Tensor) else origin
    return torch.where(greedy, p.stats.argmax, draw_by_token(p.log_prob(), seed, position, origin, stream))


def _at(values: Tensor, index: Tensor) -> Tensor:
    """values[b, index[b]]: [B, W], [B, 1] -> [B]."""
    return values.gather(1, index).squeeze(1)
