"""Draft models after rounds in which they were not asked; what else they do is in tests/test_engine.py."""

import copy
from typing import Any

import pytest
from drafter_cases import Sometimes
from tiny_models import greedy, tiny

import engine


@pytest.mark.parametrize("kind", [engine.DraftModel, engine.StagedDraftModel])
@pytest.mark.parametrize("silent", [1, 2, 31, 32, 33, 40])
def test_all_that_was_missed_is_read(kind: Any, silent: int) -> None:
    """The drafter is the target: as long as it has read all of the text, every draft stands.

    The last draft before the silence stood too, and the drafter never read it.
    """
    target = tiny("llama", max_position_embeddings=160)
    drafter = Sometimes(kind(copy.deepcopy(target)), lambda number: not 3 <= number < 3 + silent)
    output = engine.load(target, drafter, 3, max_batch_size=1).generate(
        [3, 4, 5], engine.SamplingParams(max_new_tokens=90)
    )
    assert output.token_ids == greedy(target, [3, 4, 5], 90)
    assert output.stats.acceptance_rate == 1.0 and output.stats.draft_tokens > 20
