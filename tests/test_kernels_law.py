"""Losslessness of `rejection` and `block`: the law of what `verify` emits is the target's, exactly.

Chains of target and draft distributions that depend on the prefix are random tables; every draft sequence is verified,
with the uniforms integrated out (see chains.py). What a round emits, completed by the target's own conditional law,
must have the target's joint law over K+1 tokens.
"""

import pytest
import torch
from chains import FILTERS, Chain, Probe, drawn_law, emitted_law, error, law, random_chain
from torch import Tensor

EXACT = 1e-12
ONE = torch.ones(1, dtype=torch.float64)

KINDS = ("any", "zeros", "equal", "disjoint")
SIZES = [(3, 1), (3, 3), (4, 2), (5, 2), (5, 3)]

pytestmark = pytest.mark.parametrize("method", ["rejection", "block"])


@pytest.fixture
def probe(monkeypatch: pytest.MonkeyPatch, method: str) -> Probe:
    return Probe(monkeypatch, method)


@pytest.mark.parametrize("filters", FILTERS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_full_drafts(probe: Probe, size: tuple[int, int], kind: str, filters: str) -> None:
    chain = random_chain(size[0] * 10 + size[1], *size, kind, FILTERS[filters])
    assert error(drawn_law(probe, chain), chain) < EXACT


@pytest.mark.parametrize("sizes", [(3, 5), (5, 3), (4, 5)], ids=str)
def test_vocabularies_of_different_size(probe: Probe, sizes: tuple[int, int]) -> None:
    for seed, kind in enumerate(("any", "zeros")):
        chain = random_chain(seed, sizes[0], 2, kind, FILTERS["temperature"], draft_vocab=sizes[1])
        assert error(drawn_law(probe, chain), chain) < EXACT


@pytest.mark.parametrize("filters", FILTERS)
@pytest.mark.parametrize("kind", ["any", "zeros"])
def test_one_hot_drafts_of_any_length(probe: Probe, kind: str, filters: str) -> None:
    """For each sequence by itself, whoever proposed it, also where it ends early."""
    chain = random_chain(7, 4, 3, kind, FILTERS[filters])
    for sequence in ([0, 1, 2], [3, 3, 3], [2, -1, -1], [1, 0, -1], [-1, -1, -1]):
        assert error(emitted_law(probe, chain, torch.tensor([sequence]), None, ONE), chain) < EXACT


@pytest.mark.parametrize("length", [0, 1, 2])
@pytest.mark.parametrize("kind", ["any", "zeros"])
def test_full_drafts_that_end_early(probe: Probe, kind: str, length: int) -> None:
    """Drafts of one length with logits behind it: the last draft that there is decides as the K-th does."""
    chain = random_chain(8, 4, 3, kind, FILTERS["all"])
    short = Chain(chain.target, chain.draft[:length], chain.filters)
    drafts = short.drafts() if length else torch.zeros(1, 0, dtype=torch.int64)
    weight = torch.ones(len(drafts), dtype=torch.float64)
    for i, row in enumerate(short.rows_of(short.draft, drafts).unbind(dim=1)):
        weight = weight * law(row, chain.filters).gather(1, drafts[:, i : i + 1]).squeeze(1)
    drafts, weight = drafts[weight > 0], weight[weight > 0]
    draft_logits = chain.rows_of(chain.draft, torch.nn.functional.pad(drafts, (0, 3 - length)))
    padded = torch.nn.functional.pad(drafts, (0, 3 - length), value=-1)
    assert error(emitted_law(probe, chain, padded, draft_logits, weight), chain) < EXACT


@pytest.mark.parametrize("filters", FILTERS)
@pytest.mark.parametrize("kind", KINDS)
def test_drafting_that_ends_by_what_was_drawn(probe: Probe, kind: str, filters: str) -> None:
    """Behind a draft that is unlikely, no other is drawn: a drafter may stop by the drafts that there are."""
    chain = random_chain(9, 4, 3, kind, FILTERS[filters])
    assert stopped_law_error(probe, chain, keep_the_unlikely=True) < EXACT


@pytest.mark.parametrize("filters", ["plain", "temperature"])
def test_a_draft_that_is_dropped_for_what_it_is_is_caught(probe: Probe, filters: str) -> None:
    """Negative control: what is unlikely is drawn and not proposed."""
    chain = random_chain(9, 4, 3, "any", FILTERS[filters])
    assert stopped_law_error(probe, chain, keep_the_unlikely=False) > 1e-3


def stopped_law_error(probe: Probe, chain: Chain, keep_the_unlikely: bool) -> float:
    drafts = chain.drafts()
    draft_logits = chain.rows_of(chain.draft, drafts)
    q = law(draft_logits, chain.filters).gather(-1, drafts[..., None]).squeeze(-1)
    likely = (q.cumprod(dim=1) >= 0.3).long().cumprod(dim=1)
    there = torch.cat([torch.ones_like(likely[:, :1]), likely[:, :-1]], dim=1) if keep_the_unlikely else likely
    assert 0 < there[:, 1:].sum() < there[:, 1:].numel()
    drawn = q.prod(dim=1) > 0
    seen = drafts.where(there > 0, -1)
    return error(emitted_law(probe, chain, seen[drawn], draft_logits[drawn], q.prod(dim=1)[drawn]), chain)


class Adjusting(Probe):
    """`verify` with a bias and a mask that make the chain's logits of others, of which masked tokens are the likeliest."""

    bias = torch.tensor([3.0, -1.0, 0.5, 2.0, -4.0], dtype=torch.float64)
    mask = torch.tensor([True, True, False, True, True])

    def verify(self, uniform: Tensor, *args: Tensor | None, **filters: Tensor) -> Tensor:
        target, drafts, draft = args
        target, draft = ((logits - self.bias).where(self.mask, 9.0) for logits in (target, draft))
        return super().verify(uniform, target, drafts, draft, logit_bias=self.bias, token_mask=self.mask, **filters)


@pytest.mark.parametrize("filters", FILTERS)
def test_logit_bias_and_token_mask(monkeypatch: pytest.MonkeyPatch, method: str, filters: str) -> None:
    """Of target and drafter alike; the law is that of the target with both."""
    chain = random_chain(9, 5, 2, "any", FILTERS[filters])
    tables = (
        [logits.masked_fill(~Adjusting.mask, -torch.inf) for logits in part] for part in (chain.target, chain.draft)
    )
    masked = Chain(*tables, chain.filters)
    probe = Adjusting(monkeypatch, method)
    assert error(drawn_law(probe, masked), masked) < EXACT


def test_no_drafts(probe: Probe) -> None:
    chain = random_chain(1, 5, 0, "zeros", FILTERS["all"])
    assert error(emitted_law(probe, chain, torch.zeros(1, 0, dtype=torch.int64), None, ONE), chain) < EXACT


def test_drawn_drafts_verified_as_one_hot(probe: Probe) -> None:
    """Accepts less than with q, and is as exact."""
    chain = random_chain(3, 5, 2, "zeros", FILTERS["all"])
    assert error(drawn_law(probe, chain, lambda draft_logits: None), chain) < EXACT


@pytest.mark.parametrize("wrong", ["reversed", "without temperature"])
def test_another_q_than_the_one_sampled_from_is_caught(probe: Probe, wrong: str) -> None:
    """Negative controls: the harness that finds errors below 1e-12 above sees these plainly."""
    chain = random_chain(3, 5, 2, "any", FILTERS["temperature"])
    tamper = dict(reversed=lambda q: q.flip(-1)).get(wrong, lambda q: q * FILTERS["temperature"]["temperature"])
    assert error(drawn_law(probe, chain, tamper), chain) > 1e-3


def test_p_and_q_swapped_is_caught(probe: Probe) -> None:
    chain = random_chain(4, 4, 1, "any", {})
    swapped = Chain([chain.draft[0], chain.target[1]], [chain.target[0]])
    drafts = chain.drafts()
    target_rows = chain.rows_of(chain.target, drafts)
    emitted = emitted_law(probe, swapped, drafts, target_rows[:, :1], law(chain.draft[0], {}))
    assert error(emitted, chain) > 1e-3
