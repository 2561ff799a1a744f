"""The acceptance tests of the torch twin of `verify`: p(x), q(x) and the formulas of the rules. Papers: reference.py."""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from .numerics import bounds, chunks, exp, finite, resize, row_indices, row_sums
from .records import Status
from .rows import Rows


class DraftTests(NamedTuple):
    """What is known of the drafts before random numbers come in."""

    p: Tensor  # [B, K] p(x_i)
    q: Tensor  # [B, K] q(x_i), 1 for one-hot drafts
    sound: bool  # whether all target rows are known to be distributions
    fit: Tensor  # [B, K+1] bool: whether the row and its draft can be tested at all; a draft ends where they cannot
    status: Tensor | None  # [B, K] flags where the draft is the reason that they cannot; None: it never is


def draft_tests(p: Rows, q: Rows | None, draft_tokens: Tensor, column: Tensor, greedy: Tensor) -> DraftTests:
    """Drafts are [B, K], the rows of p [B, K+1], those of q [B, K] (None: one-hot); column is 0 ... K, greedy [B] bool."""
    low, high = bounds(p.stats.lse)
    sound = -torch.inf < low <= high < torch.inf
    p_of = torch.exp_(p.log_prob_of(draft_tokens))
    q_of = torch.ones_like(p_of) if q is None else torch.exp_(q.log_prob_of(draft_tokens))
    # Where q(x) is > 0 and finite, there is a draft, and q.stats.lse is finite.
    (low, high), least = (bounds(q_of), 0.0) if q is not None else (bounds(draft_tokens), -1.0)
    if sound and least < low <= high < torch.inf:
        return DraftTests(p_of, q_of, sound, (column < column[-1]).expand(p.stats.lse.shape), None)
    fit = (pad(draft_tokens, (0, 1), value=-1) >= 0) & finite(p.stats.lse)
    if q is None:
        return DraftTests(p_of, q_of, sound, fit, None)
    sampled = fit[:, :-1] & ~greedy[:, None]
    invalid = sampled & ~finite(q.stats.lse)
    zero = sampled & ~invalid & (q_of == 0)
    status = invalid * int(Status.INVALID_DRAFT) + zero * int(Status.ZERO_DRAFT_PROB)
    return DraftTests(p_of, q_of, sound, fit & pad(~invalid & ~zero, (0, 1)), status)


def block_prefix(tests: DraftTests) -> Tensor:
    """s_0 ... s_K [B, K+1]: s_0 = 1, s_i = min(s_{i-1} p(x_i) / q(x_i), 1)."""
    steps = [torch.ones_like(tests.p[:, :1].sum(dim=1))]
    for p, q in zip(tests.p.unbind(dim=1), tests.q.unbind(dim=1), strict=True):
        steps.append((steps[-1] * p / q).clamp(max=1))
    return torch.stack(steps, dim=1)


def block_test(p: Rows, q: Rows | None, tests: DraftTests, prefix: Tensor, u: Tensor) -> Tensor:
    """Whether the prefix of i = 1 ... K drafts passes its own test, u_i < h_i: [B, K] bool. n is the number of drafts that are fit.

    h_i = r_i / (r_i + 1 - s_i) for i < n, with r_i = sum over v of max(s_i p(v) - q(v), 0) in row i; h_n = s_n.

    Only the longest prefix that passes is right in the result. Shorter ones may be marked as failed, so that their r_i need not be
    computed.
    """
    if u.shape[1] == 0:
        return u > 0
    s = prefix[:, 1:]
    fit = tests.fit[:, :-1].long().cumprod(dim=1).bool()
    more = pad(fit[:, 1:], (0, 1))  # i < n
    possible = (u < s) & fit  # as h_i <= s_i, for r_i <= s_i
    certain = possible & (~more | (s == 1))
    # A test does not matter if a longer prefix passes.
    unclear = possible & (certain.flip(1).cumsum(dim=1).flip(1) == 0)
    mass = _residual_masses(p, q, tests, s, unclear)
    return certain | (unclear & (u * (mass + 1 - s) < mass))


def _residual_masses(p: Rows, q: Rows | None, tests: DraftTests, s: Tensor, wanted: Tensor) -> Tensor:
    """r_i for s_i [B, K] where `wanted` [B, K] bool is true, at i < K only; elsewhere 0 or r_i."""
    if q is None:  # max(s p - one-hot, 0) sums to s - s p(x)
        return pad(s[:, :-1] * (1 - tests.p[:, 1:]), (0, 1))
    mass, size = torch.zeros_like(s), p.logits.shape[-1]
    batch, index = row_indices(s[:, :-1]) if s.device.type != "cpu" else wanted.nonzero(as_tuple=True)
    for sequence, before, s_i in chunks(size, batch, index, s[batch, index]):
        its_p, its_q = p.prob_at(sequence, before + 1), resize(q.prob_at(sequence, before + 1), size, 0.0)
        mass[sequence, before] = row_sums(residual(its_p.mul_(s_i[:, None]), its_q))
    return mass


def entropy(p: Rows) -> Tensor:
    """-sum of p log p per row, in nats."""
    parts = []
    for sequence, index in chunks(p.logits.shape[-1], *row_indices(p.stats.lse)):
        log_p = p.log_prob_at(sequence, index)
        parts.append(row_sums(exp(log_p) * log_p.clamp_(min=-1e30)))
    return -torch.cat(parts).view(p.stats.lse.shape)


def residual(p: Tensor, q: Tensor) -> Tensor:
    """max(p - q, 0), not normalised, of [..., V] each.

    Where p and q are close, its rounding error comes from that of log p and log q. The kernels' p (1 - q / p) had an error of up to
    1.4 times less in float32, over rows of logits and others that differ from them by 1 to 1e-5. What is below 1e-45 in float32 is
    0 here.
    """
    return (p - q).clamp_(min=0)
