"""Losslessness of `verify`: the law of what it emits is the target's, exactly.

That law is worked out from the real `reference.verify`. Chains of target and draft distributions that depend on the
prefix are random tables; every draft sequence x is verified, as one batch, and
- the probability that x_i is accepted is searched for with the uniforms that `verify` is made to see;
- the law of the next token is read off the log weights that it hands to `draw`.
What a round emits, completed by the target's own conditional law, must have the target's joint law over K+1 tokens.
"""

from collections.abc import Callable

import pytest
import torch
from chains import FILTERS, Chain, law, random_chain, rows, target_joint, target_law
from torch import Tensor

from engine.kernels import reference

EXACT = 1e-12


class Probe:
    """`reference.verify` with its uniforms chosen and its draws captured."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.uniform = torch.empty(0)
        self.log_weights = torch.empty(0)
        monkeypatch.setattr(reference.philox, "uniform", lambda *args: self.uniform)
        monkeypatch.setattr(reference, "draw", self.capture)

    def capture(self, log_weights: Tensor, seed: Tensor, *args: object) -> Tensor:
        self.log_weights = log_weights
        return torch.zeros_like(seed)

    def verify(self, uniform: Tensor, *args: Tensor | None, **filters: Tensor) -> Tensor:
        """num_accepted [B] with uniforms [B, K]."""
        self.uniform = uniform
        where = torch.zeros(uniform.shape[0], dtype=torch.int64)
        return reference.verify(*args, seed=where, position=where, **filters).num_accepted


def acceptance(probe: Probe, num_drafts: int, *args: Tensor | None, **filters: Tensor) -> Tensor:
    """P(x_i accepted | all before it were): [B, K] to 2**-53, by narrowing it 13 times to a sixteenth."""
    batch, parts = args[0].shape[0], 16
    low = torch.zeros(batch, num_drafts, dtype=torch.float64)
    if num_drafts == 0:
        return low
    # One row of a large batch for each sequence, position and uniform that is tried.
    copies = num_drafts * (parts - 1)
    args = [None if value is None else value.repeat_interleave(copies, dim=0) for value in args]
    filters = {name: value.repeat_interleave(copies) for name, value in filters.items()}
    position = torch.arange(num_drafts)[:, None]
    earlier = position[..., None] > torch.arange(num_drafts)  # [K, 1, K]: drafts before the one in question pass
    for step in range(13):
        width = float(parts) ** -step
        tried = low[..., None] + width * torch.arange(1, parts) / parts  # [B, K, 15]
        uniform = torch.where(earlier, 1e-300, tried[..., None]).flatten(0, 2)
        passed = probe.verify(uniform, *args, **filters).reshape(tried.shape) > position
        assert (passed.int().diff(dim=-1) <= 0).all()  # what passes at one uniform passes at all below it
        low = low + width / parts * passed.sum(dim=-1)
    return low + 2.0**-53


def emitted_law(
    probe: Probe, chain: Chain, drafts: Tensor, draft_logits: Tensor | None, weight: Tensor
) -> list[Tensor]:
    """P(a round emits exactly these tokens): entry n has shape [V] * (n + 1). weight [B] is the law of the drafts."""
    batch, num_drafts = drafts.shape
    vocab_size = chain.target[0].shape[-1]
    filters = rows(chain.filters, batch)
    args = (chain.rows_of(chain.target, drafts), drafts, draft_logits)
    accept = acceptance(probe, num_drafts, *args, **filters)
    out, reached = [], weight
    for n in range(num_drafts + 1):
        stops = reached * (1 - accept[:, n]) if n < num_drafts else reached
        uniform = torch.full((batch, num_drafts), 1e-300, dtype=torch.float64)
        uniform[:, n:] = 1 - 2.0**-53
        num_accepted = probe.verify(uniform, *args, **filters)
        stops = stops.where(stops > 1e-14, 0)  # what the search leaves of 0
        assert (num_accepted[stops > 0] == n).all()
        next_law = probe.log_weights.softmax(dim=-1)  # [B, V]
        kept = stops > 0
        prefix = (drafts[kept, :n] * vocab_size ** torch.arange(n).flip(0)).sum(dim=1)
        emitted = torch.zeros(vocab_size**n, vocab_size, dtype=torch.float64)
        emitted.index_add_(0, prefix, stops[kept, None] * next_law[kept])
        out.append(emitted.reshape([vocab_size] * (n + 1)))
        reached = reached * accept[:, n] if n < num_drafts else reached
    return out


def completed(emitted: list[Tensor], chain: Chain) -> Tensor:
    """The joint law of K+1 tokens, where those that a round did not emit follow the target's conditional law."""
    joint = emitted[0]
    for n in range(1, chain.num_drafts + 1):
        joint = joint[..., None] * target_law(chain, n) + emitted[n]
    return joint


def error(
    probe: Probe, chain: Chain, tamper: Callable[[Tensor], Tensor | None] = lambda draft_logits: draft_logits
) -> float:
    """Largest error of the joint law with full draft distributions, of which `verify` sees what `tamper` returns."""
    drafts = chain.drafts()
    draft_logits = chain.rows_of(chain.draft, drafts)
    q = law(draft_logits, chain.filters).gather(-1, drafts[..., None]).squeeze(-1)
    drawn = q.prod(dim=1) > 0
    drafts, draft_logits, weight = drafts[drawn], draft_logits[drawn], q.prod(dim=1)[drawn]
    emitted = emitted_law(probe, chain, drafts, tamper(draft_logits), weight)
    return (completed(emitted, chain) - target_joint(chain)).abs().max().item()


KINDS = ("any", "zeros", "equal", "disjoint")
SIZES = [(3, 1), (3, 3), (4, 2), (5, 2), (5, 3)]


@pytest.mark.parametrize("filters", FILTERS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_full_drafts(monkeypatch: pytest.MonkeyPatch, size: tuple[int, int], kind: str, filters: str) -> None:
    chain = random_chain(size[0] * 10 + size[1], *size, kind, FILTERS[filters])
    assert error(Probe(monkeypatch), chain) < EXACT


@pytest.mark.parametrize("sizes", [(3, 5), (5, 3), (4, 5)], ids=str)
def test_vocabularies_of_different_size(monkeypatch: pytest.MonkeyPatch, sizes: tuple[int, int]) -> None:
    for seed, kind in enumerate(("any", "zeros")):
        chain = random_chain(seed, sizes[0], 2, kind, FILTERS["temperature"], draft_vocab=sizes[1])
        assert error(Probe(monkeypatch), chain) < EXACT


@pytest.mark.parametrize("filters", FILTERS)
@pytest.mark.parametrize("kind", ["any", "zeros"])
def test_one_hot_drafts_of_any_length(monkeypatch: pytest.MonkeyPatch, kind: str, filters: str) -> None:
    """For each sequence by itself, whoever proposed it, also where it ends early."""
    chain = random_chain(7, 4, 3, kind, FILTERS[filters])
    probe = Probe(monkeypatch)
    for sequence in ([0, 1, 2], [3, 3, 3], [2, -1, -1], [1, 0, -1], [-1, -1, -1]):
        emitted = emitted_law(probe, chain, torch.tensor([sequence]), None, torch.ones(1, dtype=torch.float64))
        assert (completed(emitted, chain) - target_joint(chain)).abs().max().item() < EXACT


def test_no_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    chain = random_chain(1, 5, 0, "zeros", FILTERS["all"])
    none = torch.zeros(1, 0, dtype=torch.int64)
    emitted = emitted_law(Probe(monkeypatch), chain, none, None, torch.ones(1, dtype=torch.float64))
    assert (emitted[0] - target_joint(chain)).abs().max().item() < EXACT


def test_drawn_drafts_verified_as_one_hot(monkeypatch: pytest.MonkeyPatch) -> None:
    """Accepts less than with q, and is as exact."""
    chain = random_chain(3, 5, 2, "zeros", FILTERS["all"])
    assert error(Probe(monkeypatch), chain, lambda draft_logits: None) < EXACT


@pytest.mark.parametrize("wrong", ["reversed", "without temperature"])
def test_another_q_than_the_one_sampled_from_is_caught(monkeypatch: pytest.MonkeyPatch, wrong: str) -> None:
    """Negative controls: the harness that finds errors below 1e-12 above sees these plainly."""
    chain = random_chain(3, 5, 2, "any", FILTERS["temperature"])
    tamper = dict(reversed=lambda q: q.flip(-1)).get(wrong, lambda q: q * FILTERS["temperature"]["temperature"])
    assert error(Probe(monkeypatch), chain, tamper) > 1e-3


def test_p_and_q_swapped_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    chain = random_chain(4, 4, 1, "any", {})
    swapped = Chain([chain.draft[0], chain.target[1]], [chain.target[0]])
    probe = Probe(monkeypatch)
    drafts = chain.drafts()
    weight = law(chain.draft[0], {})
    target_rows = chain.rows_of(chain.target, drafts)
    emitted = emitted_law(probe, swapped, drafts, target_rows[:, :1], weight)
    assert (completed(emitted, chain) - target_joint(chain)).abs().max().item() > 1e-3
