"""Losslessness of `ops` by G-test: two tokens of a chain over 16, on fixed seeds, in as many rounds as it takes.

What the exact law cannot see, because it integrates the uniforms out, is how the streams of numbers depend on each
other. At 16 tokens a shared stream shows plainly, at 4,096 it would not.
"""

import pytest
import torch
from chains import Chain, Filters, random_chain, rows, target_law
from scipy import stats as scipy_stats
from torch import Tensor

from engine.kernels import ops, philox

SAMPLES, VOCAB = 200_000, 16


def sampled_pairs(chain: Chain, one_hot: bool, count: int = SAMPLES, batch: int = 10_000) -> Tensor:
    """The first two tokens of `count` sequences that differ in their seed: [count, 2]."""
    return torch.cat([sampled_batch(chain, one_hot, start, batch) for start in range(0, count, batch)])


def sampled_batch(chain: Chain, one_hot: bool, start: int, count: int) -> Tensor:
    """Two drafts and a verdict for `count` sequences, and one more token for those that are short of two."""
    filters = rows(chain.filters, count, torch.float32)
    where = dict(seed=torch.arange(start, start + count) * 7919 + 3, position=torch.full((count,), 20))
    first, second = (table.float() for table in chain.draft)
    if one_hot:
        a = first.argmax().expand(count)
        drafts, draft_logits = torch.stack([a, second[a].argmax(dim=-1)], dim=1), None
    else:
        drafter = dict(origin=where["position"], stream=philox.DRAFT, **filters)
        a = ops.sample(first.expand(count, VOCAB), **where, **drafter).tokens
        later = dict(seed=where["seed"], position=where["position"] + 1)
        b = ops.sample(second[a], **later, **drafter).tokens
        drafts, draft_logits = torch.stack([a, b], dim=1), torch.stack([first.expand(count, VOCAB), second[a]], dim=1)
    target = chain.rows_of([table.float() for table in chain.target], drafts)
    tokens = ops.verify(target, drafts, draft_logits, **where, **filters).tokens[:, :2]
    # The second token of those drawn in a round of its own.
    later = dict(seed=where["seed"], position=where["position"] + 1)
    row = chain.target[1].float()[tokens[:, 0]][:, None]
    again = ops.verify(row, torch.empty(count, 0, dtype=torch.int64), **later, **filters).tokens[:, 0]
    return torch.stack([tokens[:, 0], torch.where(tokens[:, 1] < 0, again, tokens[:, 1])], dim=1)


def g_test(pairs: Tensor, joint: Tensor) -> float:
    """The p-value of pairs [N, 2] against their law [V, V]. What is impossible must not occur."""
    size = joint.shape[-1]
    observed = torch.bincount(pairs[:, 0] * size + pairs[:, 1], minlength=size * size).double()
    expected = joint.flatten() * pairs.shape[0]
    possible = expected > 0
    assert (observed[~possible] == 0).all()
    rare = possible & (expected < 5)  # pooled, as the chi-square law of G asks for
    cells = possible & ~rare
    observed = torch.cat([observed[cells], observed[rare].sum()[None]])
    expected = torch.cat([expected[cells], expected[rare].sum()[None]])
    observed, expected = observed[expected > 0], expected[expected > 0]
    g = 2 * torch.xlogy(observed, observed / expected).sum().item()
    return float(scipy_stats.chi2.sf(g, expected.numel() - 1))


def sampled_chain(filters: Filters) -> Chain:
    chain = random_chain(11, VOCAB, 1, "any", filters)
    draft = [*chain.draft, random_chain(12, VOCAB, 1, "any", filters).target[1]]
    third = chain.target[1].expand(VOCAB, VOCAB, VOCAB)  # the row behind both drafts, whose token is not looked at
    return Chain([logits * 0.7 for logits in (*chain.target, third)], [logits * 0.7 for logits in draft], filters)


def pair_law(chain: Chain) -> Tensor:
    return target_law(chain, 0)[:, None] * target_law(chain, 1)


SAMPLED_FILTERS = [{}, dict(temperature=0.7, top_k=9), dict(temperature=0.7, top_p=0.8, top_k=12)]


@pytest.mark.parametrize("filters", SAMPLED_FILTERS, ids=["plain", "top-k", "top-k and top-p"])
@pytest.mark.parametrize("one_hot", [False, True], ids=["full", "one-hot"])
def test_sampled_pairs_have_the_law_of_the_target(filters: Filters, one_hot: bool) -> None:
    chain = sampled_chain(filters)
    assert g_test(sampled_pairs(chain, one_hot), pair_law(chain)) > 1e-3


def test_one_stream_for_drafting_and_accepting_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: the acceptance test sees the number that token 0's noise was made of."""
    monkeypatch.setattr(philox, "ACCEPT", philox.DRAFT)
    chain = sampled_chain({})
    assert g_test(sampled_pairs(chain, one_hot=False, count=50_000), pair_law(chain)) < 1e-9


def test_the_wrong_q_is_caught_by_sampling_too(monkeypatch: pytest.MonkeyPatch) -> None:
    verify = ops.verify

    def reversed_q(target: Tensor, drafts: Tensor, draft_logits: Tensor | None = None, **rest: Tensor) -> object:
        return verify(target, drafts, None if draft_logits is None else draft_logits.flip(-1), **rest)

    monkeypatch.setattr(ops, "verify", reversed_q)
    chain = sampled_chain({})
    assert g_test(sampled_pairs(chain, one_hot=False, count=50_000), pair_law(chain)) < 1e-9
