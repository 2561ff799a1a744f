"""The engine's samples follow the target's own law, for every drafter."""

from typing import Any

import pytest
import torch
from sampled_laws import SETTINGS, SOME, VOCAB, every_rule, flat_target, p_value
from tiny_models import perturbed
from transformers import PreTrainedModel

import engine

SAMPLES = 200_000


@pytest.fixture(scope="module")
def target() -> PreTrainedModel:
    return flat_target()


@pytest.mark.parametrize(("verification", "setting", "count"), every_rule(SAMPLES))
@pytest.mark.parametrize("drafter", ["ngram", "model"])
def test_two_token_continuations(
    target: PreTrainedModel, drafter: str, verification: str, setting: dict[str, Any], count: int
) -> None:
    check(target, drafter, verification, setting, count)


@pytest.mark.parametrize(
    ("drafter", "setting", "count"),
    [
        ("model", 0, SAMPLES // 4),
        *(pytest.param(*case, SAMPLES // 2, marks=pytest.mark.slow) for case in (("ngram", 1), ("model", 0))),
    ],
)
def test_many_continuations(target: PreTrainedModel, drafter: str, setting: int, count: int) -> None:
    check(target, drafter, "rejection", SETTINGS[setting], count)


def check(target: PreTrainedModel, drafter: str, verification: str, setting: dict[str, Any], count: int) -> None:
    draft = perturbed(target, 0.3) if drafter == "model" else drafter
    llm = engine.load(target, drafter=draft, num_draft_tokens=3, max_batch_size=4096, verification=verification)
    assert p_value(llm, target, setting, count) > 1e-3
    assert 0.1 < llm.stats.acceptance_rate < 0.95, "neither acceptance nor rejection is tested"


@pytest.mark.parametrize("verification", ["rejection", "block"])
def test_a_number_of_drafts_that_changes(target: PreTrainedModel, verification: str) -> None:
    """num_draft_tokens="auto", with the times of a drafter that pays."""
    llm = engine.load(
        target, drafter=perturbed(target, 0.3), num_draft_tokens="auto", max_batch_size=256, verification=verification
    )
    lengths: Any = llm._server._lengths
    observe = lengths.observe_times
    lengths.observe_times = lambda rows, asked, size, *_: observe(rows, asked, size, asked / 20, 1 + size / rows / 30)
    assert p_value(llm, target, SETTINGS[0], SOME) > 1e-3
    assert SOME / 10 < llm.stats.draft_tokens < SOME, "rounds with drafts, and without"


def test_a_wrong_law_is_caught(target: PreTrainedModel) -> None:
    """The same test, for a drafter that lies about what it drew from."""

    class Lying(engine.DraftModel):
        def propose(self, state: engine.BatchState, num_draft_tokens: int) -> engine.Proposal:
            proposal = super().propose(state, num_draft_tokens)
            assert proposal.logits is not None
            return proposal._replace(logits=proposal.logits * 0.9, stats=None)

    draft = Lying(perturbed(target, 0.3))
    llm = engine.load(target, drafter=draft, num_draft_tokens=3, max_batch_size=4096)
    assert p_value(llm, target, SETTINGS[0], SAMPLES // 3) < 1e-6


@pytest.mark.parametrize("verification", ["rejection", "block"])
def test_lookups_passed_off_as_draws_are_caught(target: PreTrainedModel, verification: str) -> None:
    """The same test, for drafts that are certain and are said to be drawn from even logits."""

    class Lying(engine.NGramDrafter):
        def propose(self, state: engine.BatchState, num_draft_tokens: int) -> engine.Proposal:
            proposal = super().propose(state, num_draft_tokens)
            return proposal._replace(logits=torch.zeros(*proposal.tokens.shape, VOCAB))

    llm = engine.load(target, drafter=Lying(), num_draft_tokens=3, max_batch_size=4096, verification=verification)
    assert p_value(llm, target, SETTINGS[0], SOME) < 1e-6
