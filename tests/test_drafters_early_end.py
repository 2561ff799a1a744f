"""Where a learned head stops drafting because nobody would accept what comes, and how sure it says that it is."""

from pathlib import Path
from typing import Any

import pytest
import torch
from drafter_cases import proposals_of
from random_heads import random_head
from tiny_models import tiny
from transformers import PreTrainedModel

import engine

REACHES = [0.001, 0.01, 0.03, 0.1, 0.2, 0.3, 0.5, 0.8]


@pytest.fixture(scope="module")
def target() -> PreTrainedModel:
    return tiny("llama", num_hidden_layers=7)


@pytest.mark.parametrize("kind", ["mlp", "eagle3"])
def test_drafting_goes_on_while_any_row_may_accept_more(target: PreTrainedModel, tmp_path: Path, kind: str) -> None:
    """That is, while the product of the probabilities of a running row's drafts reaches `min_reach`.

    Of the whole chain, as a draft stands only behind those before it; and in any row, as one that stops for its neighbour's
    sake loses speed.
    """
    drafter = random_head(kind, tmp_path, min_reach=0.0)
    propose, compared = drafter.propose, []

    def with_every_reach(state: engine.BatchState, num_draft_tokens: int) -> engine.Proposal:
        whole = again(state, 0.0)
        assert whole.confidence is not None
        chances = whole.confidence.cumprod(dim=1)[state.active].amax(dim=0)
        for reach in REACHES:
            expected = 1 + int((chances[:2] >= reach).long().cumprod(dim=0).sum())
            compared.append((again(state, reach).tokens.shape[1], expected))
        return again(state, 0.0)

    def again(state: engine.BatchState, reach: float) -> engine.Proposal:
        drafter.min_reach = reach
        if kind == "eagle3":
            drafter._filled.zero_()  # nothing of this round has been read yet
        return propose(state, 3)

    drafter.propose = with_every_reach
    engine.load(target, drafter, 3, max_batch_size=3).generate(
        [[3, 4, 5, 6], [9, 8], [7, 1, 2]],
        [engine.SamplingParams(max_new_tokens=count, ignore_eos=True) for count in (5, 12, 20)],
    )
    assert all(found == expected for found, expected in compared)
    assert sum(1 < expected < 3 for _, expected in compared) > 5


@pytest.mark.parametrize("kind", ["mlp", "eagle3"])
def test_a_likely_draft_is_made_by_default(tmp_path: Path, kind: str) -> None:
    """One step of a head costs a small part of a target call, so that it pays at even odds; without an end, it never stops."""
    assert 0 < random_head(kind, tmp_path).min_reach <= 0.5


@pytest.mark.parametrize("kind", ["mlp", "eagle3"])
def test_who_ends_early(tmp_path: Path, kind: str) -> None:
    """Not drawn drafts: a seed's text would depend on who shares the batch."""
    drafter, greedy_drafter = random_head(kind, tmp_path / "a"), random_head(kind, tmp_path / "b", greedy=True)
    never = random_head(kind, tmp_path / "c", min_reach=0.0)
    state = engine.BatchState.allocate(1, 8, torch.device("cpu"))
    for all_greedy in (False, True):
        view = state.select(slice(0, 1), all_greedy=all_greedy)
        assert drafter.ends_early(view) == all_greedy
        assert greedy_drafter.ends_early(view) and not never.ends_early(view)


@pytest.mark.parametrize("kind", ["medusa", "mlp", "eagle3"])
def test_greedy_drafts_come_with_their_confidence(target: PreTrainedModel, tmp_path: Path, kind: str) -> None:
    """By which drafts are cut that are not worth verifying; and without logits, which nobody reads."""
    drafter: Any = random_head(kind, tmp_path)
    seen = proposals_of(drafter)
    engine.load(target, drafter, 3).generate([3, 4, 5], engine.SamplingParams(max_new_tokens=4))
    assert seen and all(found.confidence is not None and found.logits is None for _, found in seen)
