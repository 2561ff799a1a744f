"""A head's vocabulary with the tokens of each text beside it."""

from typing import Any

import pytest
import torch
from torch import Tensor

import engine
from engine.drafters import draft_vocabulary
from engine.drafters.draft_vocabulary import DraftVocabulary

IDS, VOCAB, HIDDEN = torch.tensor([1, 4, 7]), 12, 5


@pytest.fixture
def output() -> Tensor:
    return torch.randn(VOCAB, HIDDEN, generator=torch.Generator().manual_seed(0))


def state_of(*texts: list[int], room: int = 20) -> engine.BatchState:
    """Behind each text, and in a column that no text reaches, stand tokens of others."""
    state = engine.BatchState.allocate(len(texts), room, torch.device("cpu"))
    state.tokens.fill_(11)
    for row, text in enumerate(texts):
        state.tokens[row, : len(text)] = torch.tensor(text)
        state.seq_lens[row] = len(text) - 1
    return state.select(slice(0, len(texts)), max_text_length=max(map(len, texts)) + 3)


def found(ids: Tensor, valid: Tensor) -> list[list[int]]:
    return [sorted(row[there].tolist()) for row, there in zip(ids, valid, strict=True)]


def test_each_text_adds_its_own_tokens_once(output: Tensor) -> None:
    vocabulary, state = DraftVocabulary(IDS, VOCAB, output), state_of([4, 0, 2, 0, 1, 5], [4, 4, 7], [3])
    seen = vocabulary.seen(state)
    assert seen is not None and seen.ids.shape == seen.valid.shape == (3, 3)
    assert found(seen.ids, seen.valid) == [[0, 2, 5], [], [3]]
    assert torch.equal(seen.rows, output[seen.ids])
    ids, valid = vocabulary._on_device(state)
    assert ids.shape == valid.shape == (3, draft_vocabulary.MAX_SEEN) and found(ids, valid) == [[0, 2, 5], [], [3]]


def test_of_a_long_text_the_latest(output: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draft_vocabulary, "MAX_SEEN", 3)
    vocabulary, state = DraftVocabulary(IDS, VOCAB, output), state_of([0, 2, 3, 4, 5, 6], [8, 0, 2, 2, 2])
    for ids, valid in (vocabulary._on_host(state), vocabulary._on_device(state)):
        assert found(ids, valid) == [[3, 5, 6], [2]]  # of the second, the last three are one


def test_where_a_row_has_a_token_does_not_depend_on_the_others(output: Tensor) -> None:
    vocabulary, text = DraftVocabulary(IDS, VOCAB, output), [4, 5, 2, 0, 1, 5]
    alone: Any = vocabulary.seen(state_of(text))
    beside: Any = vocabulary.seen(state_of([3, 6, 0, 2, 8, 9, 10], text, [4]))
    assert alone.ids.tolist() == [[0, 2, 5]] and bool(alone.valid.all())
    assert beside.ids[1][beside.valid[1]].tolist() == [0, 2, 5] and bool(beside.valid[1, :3].all())


def test_texts_within_the_draft_vocabulary_add_nothing(output: Tensor) -> None:
    assert DraftVocabulary(IDS, VOCAB, output).seen(state_of([4, 7, 1], [7])) is None


def test_without_an_output_matrix_a_text_adds_nothing() -> None:
    vocabulary, logits = DraftVocabulary(IDS, VOCAB), torch.randn(2, 1, 3)
    assert vocabulary.seen(state_of([0, 2], [3])) is None
    assert vocabulary.widened(logits, torch.randn(2, 1, HIDDEN), None) is logits
    assert vocabulary.target_ids(torch.tensor([[2], [-1]]), None).tolist() == [[7], [-1]]
    whole = vocabulary.of_target(logits, None)
    assert torch.equal(whole[..., IDS], logits) and int(whole.isfinite().sum()) == 6
    assert DraftVocabulary(torch.arange(3), 3).of_target(logits, None) is logits
    turned = DraftVocabulary(torch.tensor([2, 0, 1]), 3).of_target(logits, None)
    assert torch.equal(turned[..., [2, 0, 1]], logits)


def test_logits_are_the_output_matrixs_for_ids_of_both_kinds(output: Tensor) -> None:
    texts = [[4, 0, 2, 0, 1, 5], [4, 4, 7], [3]]
    vocabulary, hidden = DraftVocabulary(IDS, VOCAB, output), torch.randn(3, 1, HIDDEN)
    seen: Any = vocabulary.seen(state_of(*texts))
    logits = vocabulary.widened(hidden @ output[IDS].T, hidden, seen)
    whole = vocabulary.of_target(logits, seen)
    expected = torch.full((3, 1, VOCAB), -torch.inf)
    for row, text in enumerate(texts):
        ids = sorted({*IDS.tolist(), *text})
        expected[row, 0, ids] = output[ids] @ hidden[row, 0]
    torch.testing.assert_close(whole, expected)
    for index in range(logits.shape[-1]):
        here = logits[:, 0, index].isfinite()
        ids = vocabulary.target_ids(torch.full((3, 1), index), seen)
        torch.testing.assert_close(
            whole.gather(-1, ids.clamp(max=VOCAB - 1)[..., None])[here, 0, 0], logits[here, 0, index]
        )
    assert vocabulary.target_ids(torch.full((3, 1), -1), seen).tolist() == [[-1]] * 3
