"""Drafts of a sampler that goes its own way: handed over as kernels/README.md says, they leave the target's law as it is.

By G-test on fixed seeds, of the first token and of the second where there is one; what comes close to the right way must fail.
"""

from typing import Any

import pytest
import torch
from chains import g_test
from torch import Tensor

from engine.kernels import ops, philox
from engine.kernels.records import Draws, RowStats, Status, Verdict

COUNT, DRAFTS = 30_000, 2
METHODS = ("rejection", "block")
SEED = torch.arange(COUNT) * 7919 + 5
POSITION = torch.full((COUNT,), 20)
TARGET, DRAFT = torch.tensor([2.0, 0.5, 1.0, 1.5, 0.0]), torch.tensor([0.5, 1.0, 2.0, 0.0, 1.0])
MASK, BIAS = torch.tensor([True, True, False, True, False]), torch.tensor([1.0, -1.0, 0.0, 2.0, 0.0])


def every(logits: Tensor, width: int = DRAFTS) -> Tensor:
    """[V] as the rows of all sequences."""
    return logits.expand(COUNT, width, -1)


def temperature(value: float) -> Tensor:
    return torch.full((COUNT,), value)


def drafted(logits: Tensor, value: float = 1.0) -> Draws:
    """By the drafter, at a temperature of its own; it knows neither bias nor mask."""
    where = dict(seed=SEED, position=POSITION, origin=POSITION)
    return ops.sample(every(logits), temperature(value), **where, stream=philox.DRAFT)


def verified(target: Tensor, *proposal: Any, **options: Any) -> Verdict:
    return ops.verify(every(target, DRAFTS + 1), *proposal, seed=SEED, position=POSITION, **options)


def p_value(verdict: Verdict, expected: Tensor) -> float:
    """Of the tokens, against the law of these logits."""
    law = expected.double().softmax(dim=-1)
    first, second = verdict.tokens[:, 0], verdict.tokens[:, 1]
    return min(g_test(first, law), g_test(second[second >= 0], law))


@pytest.mark.parametrize("method", METHODS)
def test_drafts_of_one_that_knows_no_mask(method: str) -> None:
    draws, masked = drafted(DRAFT), TARGET.masked_fill(~MASK, -torch.inf)
    proposal, options = (draws.tokens, every(DRAFT)), dict(method=method, token_mask=MASK)
    verdict = verified(TARGET, *proposal, **options)
    assert p_value(verdict, masked) > 1e-3
    # A draft that the mask excludes is no error.
    assert set(verdict.status.tolist()) == {0, Status.ZERO_DRAFT_PROB}
    assert p_value(verified(masked, *proposal, draws.stats, method=method), masked) > 1e-3
    assert p_value(verified(TARGET, *proposal, draws.stats, **options), masked) < 1e-9


@pytest.mark.parametrize("method", METHODS)
def test_drafts_of_one_that_knows_no_bias(method: str) -> None:
    draws, biased = drafted(DRAFT), TARGET + BIAS
    proposal, options = (draws.tokens, every(DRAFT)), dict(method=method, logit_bias=BIAS)
    assert p_value(verified(biased, *proposal, draws.stats, method=method), biased) > 1e-3
    for stats in (None, draws.stats):
        assert p_value(verified(TARGET, *proposal, stats, **options), biased) < 1e-9


@pytest.mark.parametrize("method", METHODS)
def test_drafts_of_another_temperature(method: str) -> None:
    """In float32: in bfloat16 the product of large logits is another distribution."""
    target, draft = (logits.bfloat16() + 30 for logits in (TARGET / 4, DRAFT / 4))
    row, drawn = temperature(0.6), 0.9
    tokens, expected = drafted(draft, drawn).tokens, target.double() / 0.6
    scaled = every(draft).float() * (row / temperature(drawn))[:, None, None]
    for logits, right in ((scaled, True), (scaled.bfloat16(), False), (every(draft), False)):
        found = p_value(verified(target, tokens, logits, temperature=row, method=method), expected)
        assert found > 1e-3 if right else found < 1e-4


@pytest.mark.parametrize("method", METHODS)
def test_drafts_as_probabilities(method: str) -> None:
    """Those of any sampler with numbers of its own, here after a top-k of the drafter's; beside greedy rows, which ask for none."""
    q = every(DRAFT.masked_fill(DRAFT < 1, -torch.inf).softmax(dim=-1))
    tokens = torch.multinomial(q[0, 0], COUNT * DRAFTS, True, generator=torch.Generator().manual_seed(3)).view(
        COUNT, DRAFTS
    )
    row = temperature(0.6)
    row[::2] = 0.0
    stats = RowStats(torch.full(tokens.shape, -torch.inf), torch.zeros(tokens.shape), torch.zeros_like(tokens))
    verdict = verified(TARGET, tokens, row[:, None, None] * q.log(), stats, temperature=row, method=method)
    assert not verdict.status.any() and (verdict.tokens[::2, 0] == TARGET.argmax()).all()
    assert p_value(verdict._replace(tokens=verdict.tokens[1::2]), TARGET / 0.6) > 1e-3
    other = verified(TARGET, tokens, q.log(), stats, temperature=row, method=method)
    assert p_value(other._replace(tokens=other.tokens[1::2]), TARGET / 0.6) < 1e-9
