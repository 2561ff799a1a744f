"""The acceptance tests of the torch twin of `verify`: p(x), q(x) and the formulas of the rules. Papers: reference.py."""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from .numerics import exp, resize, row_sums
from .records import Status
from .rows import Rows


class DraftTests(NamedTuple):
    """What is known of the drafts before random numbers come in."""

    p: Tensor  # [B, K] p(x_i)
    q: Tensor  # [B, K] q(x_i), 1 for one-hot drafts
    # [B, K+1] bool: whether the row and its draft can be tested at all; a draft ends where they cannot.
    testable: Tensor
    status: Tensor  # [B, K] flags where the draft is the reason that they cannot


def draft_tests(p: Rows, q: Rows | None, draft_tokens: Tensor) -> DraftTests:
    """Drafts are [B, K], the rows of p [B, K+1], those of q [B, K] (None: one-hot)."""
    p_of = exp(p.log_prob_of(draft_tokens))
    testable = (pad(draft_tokens, (0, 1), value=-1) >= 0) & p.stats.lse.isfinite()
    if q is None:
        return DraftTests(p_of, torch.ones_like(p_of), testable, torch.zeros_like(draft_tokens))
    q_of = exp(q.log_prob_of(draft_tokens))
    sampled = testable[:, :-1] & ~p.greedy[:, None]
    invalid = sampled & ~q.stats.lse.isfinite()
    zero = sampled & ~invalid & (q_of == 0)
    status = invalid * int(Status.INVALID_DRAFT) + zero * int(Status.ZERO_DRAFT_PROB)
    return DraftTests(p_of, q_of, testable & pad(~invalid & ~zero, (0, 1)), status)


def block_prefix(tests: DraftTests) -> Tensor:
    """s_0 ... s_K [B, K+1]: s_0 = 1, s_i = min(s_{i-1} p(x_i) / q(x_i), 1)."""
    steps = [torch.ones_like(tests.p[:, :1].sum(dim=1))]
    for p, q in zip(tests.p.unbind(dim=1), tests.q.unbind(dim=1), strict=True):
        steps.append((steps[-1] * p / q).clamp(max=1))
    return torch.stack(steps, dim=1)


def block_test(p: Rows, q: Rows | None, tests: DraftTests, prefix: Tensor, u: Tensor) -> Tensor:
    """Whether the prefix of i = 1 ... K drafts passes its own test, u_i < h_i: [B, K] bool. n is the number of testable drafts.

    h_i = r_i / (r_i + 1 - s_i) for i < n, with r_i = sum over v of max(s_i p(v) - q(v), 0) in row i; h_n = s_n.
    """
    s = prefix[:, 1:]
    testable = tests.testable[:, :-1].long().cumprod(dim=1).bool()
    more = pad(testable[:, 1:], (0, 1))  # i < n
    mass = residual_masses(p, q, tests, s)
    # h_i is 1 where s_i is, also where nothing is left.
    inner = (u * (mass + 1 - s) < mass) | (s == 1)
    return (u < s) & testable & torch.where(more, inner, True)  # h_i <= s_i, as r_i <= s_i


def residual_masses(p: Rows, q: Rows | None, tests: DraftTests, s: Tensor) -> Tensor:
    """r_i for s_i, i = 1 ... K [B, K]; 0 for i = K, where there is no row of q."""
    if s.shape[1] < 2:
        return torch.zeros_like(s)
    before = s[:, :-1]
    if q is None:  # max(s p - one-hot, 0) sums to s - s p(x)
        return pad(before * (1 - tests.p[:, 1:]), (0, 1))
    its_q = resize(q.prob()[:, 1:], p.logits.shape[-1], 0.0)
    return pad(row_sums(residual(p.prob()[:, 1:-1] * before[..., None], its_q)), (0, 1))


def entropy(p: Rows) -> Tensor:
    """-sum of p log p per row, in nats."""
    log_p = p.log_prob()
    return -row_sums(exp(log_p) * log_p.clamp(min=-1e30))


def residual(p: Tensor, q: Tensor) -> Tensor:
    """max(p - q, 0), not normalised, of [..., V] each.

    Where p and q are close, its rounding error comes from that of log p and log q. The kernels' p (1 - q / p) had an error
    of up to 1.4 times less in float32, over rows of logits and others that differ from them by 1 to 1e-5. What is below
    1e-45 in float32 is 0 here.
    """
    return (p - q).clamp_(min=0)
