"""What is peculiar to `block`, from its exact law: it accepts no less than `rejection`, and its plausible mistakes show.

That its law is the target's is in test_kernels_law.py.
"""

import pytest
import torch
from chains import FILTERS, Chain, Probe, drawn_law, error, random_chain, uniforms
from torch import Tensor

KINDS = ("any", "zeros", "equal", "disjoint")


def mean_accepted(monkeypatch: pytest.MonkeyPatch, chain: Chain, method: str) -> float:
    """Accepted drafts per round, in expectation."""
    return sum(n * emitted.sum().item() for n, emitted in enumerate(drawn_law(Probe(monkeypatch, method), chain)))


@pytest.mark.parametrize("filters", FILTERS)
@pytest.mark.parametrize("kind", KINDS)
def test_accepts_at_least_as_much_as_rejection(monkeypatch: pytest.MonkeyPatch, kind: str, filters: str) -> None:
    """Sun et al., arXiv 2403.10444. With one draft the two rules are one; with more, random chains gain."""
    for num_drafts in (1, 2, 3):
        for seed in range(2):
            chain = random_chain(seed, 4, num_drafts, kind, FILTERS[filters])
            gain = mean_accepted(monkeypatch, chain, "block") - mean_accepted(monkeypatch, chain, "rejection")
            assert gain > -1e-12
            if num_drafts == 1 or kind in ("equal", "disjoint"):
                assert gain < 1e-12
            elif kind == "any" and filters in ("plain", "temperature"):
                assert gain > 1e-3


def test_every_prefix_has_a_test_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """The longest prefix that passes stands, whatever the shorter ones did."""
    chain = random_chain(2, 3, 3, "any", {})
    drafts = torch.tensor([[0, 1, 2]]).expand(8, 3)
    passes = torch.cartesian_prod(*[torch.tensor([False, True])] * 3)
    args = (chain.rows_of(chain.target, drafts), drafts, chain.rows_of(chain.draft, drafts))
    num_accepted = Probe(monkeypatch, "block").verify(uniforms(passes), *args)
    assert num_accepted.tolist() == [0, 3, 2, 3, 1, 3, 2, 3]


def test_stopping_at_the_first_failure_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: the same tests, of which all behind the first failure are taken to fail."""
    chain = random_chain(3, 4, 3, "any", {})

    def until_failure(passes: Tensor) -> Tensor:
        return passes.cumprod(dim=0).bool()

    assert error(drawn_law(Probe(monkeypatch, "block"), chain, seen=until_failure), chain) > 1e-3


class PlainResidual(Probe):
    """`block` with the next token of `rejection`, which comes from max(p - q, 0)."""

    def verify(self, uniform: Tensor, *args: Tensor | None, **filters: Tensor) -> Tensor:
        self.method = "block"
        num_accepted = super().verify(uniform, *args, **filters)
        self.method = "rejection"
        stands = torch.arange(uniform.shape[1]) < num_accepted[:, None]
        assert torch.equal(super().verify(uniforms(stands), *args, **filters), num_accepted)
        return num_accepted


def test_the_residual_of_rejection_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    chain = random_chain(3, 4, 3, "any", {})
    assert error(drawn_law(PlainResidual(monkeypatch, "block"), chain), chain) > 1e-3
