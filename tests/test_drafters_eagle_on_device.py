"""EAGLE heads as they run on a GPU: attention is a kernel (here its torch twin), and values may not be looked at."""

from pathlib import Path
from typing import Any

import pytest
from drafter_cases import proposals_of
from eagle_checkpoints import REDUCED, Head, check_drafts, drafter_of
from tiny_models import tiny
from transformers import PreTrainedModel

import engine


@pytest.fixture(scope="module")
def target() -> PreTrainedModel:
    return tiny("llama", num_hidden_layers=7)


@pytest.mark.parametrize("options", [dict(window=5), dict(kind="qwen3", window=5, num_layers=2)])
def test_a_heads_window_where_attention_is_a_kernel(
    target: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    """A head that was trained with one drafts worse and worse without."""
    monkeypatch.setattr("engine.model.uses_ragged_kernel", lambda model: True)
    head = Head(**REDUCED, **options)
    llm = check_drafts(target, drafter_of(head.speculators(tmp_path)), head)
    assert llm.drafter.ragged.cache.whole_buffers


@pytest.mark.parametrize("can_look", [True, False])
def test_greedy_drafts_of_sampled_rows_are_the_likeliest(
    target: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, can_look: bool
) -> None:
    """Whatever the row's temperature."""
    monkeypatch.setattr(engine.BatchState, "can_look", can_look)
    head = Head(**REDUCED)
    drafter = drafter_of(head.speculators(tmp_path), greedy=True)
    seen = proposals_of(drafter)
    params = engine.SamplingParams(temperature=3.0, seed=1, max_new_tokens=8)
    engine.load(target, drafter, 3).generate([3, 4, 5, 6], params)
    assert seen
    for text, proposal in seen:
        assert proposal.logits is None
        assert proposal.tokens[0].tolist() == head.of(target).drafts(target, text, 3)[: proposal.tokens.shape[1]]


def test_a_round_reads_as_many_positions_as_the_last_one_had(
    target: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where nobody can tell how many of them stood; not more and more, which would make every round slower."""
    monkeypatch.setattr(engine.BatchState, "can_look", False)
    drafter, widths = drafter_of(Head(**REDUCED).speculators(tmp_path)), []
    drafter.model.register_forward_pre_hook(
        lambda module, args, given: widths.append(given["input_ids"].shape[1]), with_kwargs=True
    )
    engine.load(target, drafter, 3).generate([3, 4, 5], engine.SamplingParams(max_new_tokens=30, ignore_eos=True))
    assert widths.count(4) > 6 and max(widths) == 4
