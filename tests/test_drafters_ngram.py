"""NGramDrafter: what followed the most recent of the longest earlier matches; on the host and on the device alike."""

import itertools
import random
from typing import Any

import numpy as np
import pytest
import torch
from drafter_cases import NOT_DISPUTED, state_of

import engine
from engine.drafters import lookup
from engine.drafters.lookup import DENSE
from engine.drafters.ngram import _CHANCES
from engine.state import BatchState


def expected_drafts(text: list[int], shortest: int, longest: int, most: int) -> list[tuple[int, float]]:
    """The rule, spelled out."""
    for length in range(min(longest, len(text) - 1), shortest - 1, -1):
        for end in range(len(text) - 1, length - 1, -1):  # of an earlier match: the token that follows it
            if text[end - length : end] == text[-length:]:
                drafts: list[tuple[int, float]] = []
                whole = list(text)
                for step in range(most):
                    whole.append(whole[end + step])
                    drafts.append((whole[-1], _CHANCES[min(length + step, len(_CHANCES)) - 1]))
                return drafts
    return []


@pytest.fixture(params=[True, False], ids=["host", "device"])
def looking(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BatchState, "can_look", request.param)


def proposed(drafter: engine.NGramDrafter, texts: list[list[int]], most: int) -> list[list[tuple[int, float]]]:
    tokens, _, _, confidence = drafter.propose(state_of(texts), most)
    assert tokens.shape == (len(texts), most) and confidence is not None
    rows = zip(tokens.tolist(), confidence.tolist(), strict=True)
    return [[(token, sure) for token, sure in zip(*row, strict=True) if token >= 0] for row in rows]


@pytest.mark.parametrize("seed", range(40))
def test_the_most_recent_of_the_longest_matches(seed: int, looking: None) -> None:
    rng = random.Random(seed)
    vocab, shortest = rng.choice([1, 2, 3, 6, 20]), rng.choice([1, 1, 2, 3])
    longest, most = shortest + rng.choice([0, 1, 7]), rng.choice([1, 4, 15])
    texts = [[rng.randrange(vocab) for _ in range(rng.randint(1, 40))] for _ in range(5)]
    found = proposed(engine.NGramDrafter(shortest, longest), texts, most)
    for text, drafts in zip(texts, found, strict=True):
        expected = expected_drafts(text, shortest, longest, most)
        assert [token for token, _ in drafts] == [token for token, _ in expected]
        assert [sure for _, sure in drafts] == pytest.approx([sure for _, sure in expected])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        *NOT_DISPUTED,
        ([1, 9, 4, 2, 9, 7, 1, 9], [4, 2, 9, 7]),  # the longer match, though the shorter one is later
        ([1, 9, 4, 1, 9, 7, 1, 9], [7, 1, 9, 7]),  # the later of two
    ],
)
def test_by_hand(text: list[int], expected: list[int], looking: None) -> None:
    assert [token for token, _ in proposed(engine.NGramDrafter(), [text], 4)[0]] == expected


def test_rows_that_want_nothing_are_proposed_what_they_may(looking: None) -> None:
    """Slots without a request: whatever stands there, the others get theirs."""
    state = state_of([[1, 2, 1], [3, 4, 3]])
    state.limits[0] = 0
    assert engine.NGramDrafter().propose(state, 2).tokens[1].tolist() == [4, 3]


@pytest.mark.parametrize("vocab_size", [1, 2, 5])
@pytest.mark.parametrize("dense", [0, DENSE, 1000])
def test_longest_matches_are_those_found_place_by_place(
    vocab_size: int, dense: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether all tokens are compared, or the places of matches alone."""
    monkeypatch.setattr(lookup, "DENSE", dense)
    rng = np.random.default_rng(vocab_size)
    for _ in range(200):
        text = rng.integers(0, vocab_size, rng.integers(0, 60))
        tail = np.concatenate([text, rng.integers(0, vocab_size, 3)])[rng.integers(0, len(text) + 3) :][:12]

        def length_at(place: int, text: Any = text, tail: Any = tail) -> int:
            both = zip(text[place::-1], tail[::-1], strict=False)
            return len(list(itertools.takewhile(lambda pair: pair[0] == pair[1], both)))

        lengths = list(map(length_at, range(len(text))))
        longest = max(lengths, default=0)
        places, length = lookup.matches(text, tail)
        assert length == longest
        assert places.tolist() == [place for place, found in enumerate(lengths) if found == longest > 0]


@pytest.mark.parametrize(
    ("sizes", "rule"),
    [((0, 8), "min_ngram must be >= 1, got 0"), ((3, 2), "max_ngram must be >= min_ngram = 3, got 2")],
)
def test_bad_sizes(sizes: tuple[int, int], rule: str) -> None:
    with pytest.raises(ValueError, match=rule):
        engine.NGramDrafter(*sizes)


def test_proposals_are_one_hot() -> None:
    assert torch.is_tensor(engine.NGramDrafter().propose(state_of([[1, 1]]), 3).confidence)
    assert engine.NGramDrafter().propose(state_of([[1, 1]]), 3).logits is None


def test_a_long_match_goes_before_a_later_shorter_one() -> None:
    """By default, too: in a text that quotes itself, the longer match is the right place."""
    head = [11, 12, 13, 14, 15, 16, 17, 18]
    text = [*head, 1, 0, *head[1:], 2, 0, *head]
    assert engine.NGramDrafter().propose(state_of([text]), 1).tokens.tolist() == [[1]]


def test_the_longer_the_match_the_surer() -> None:
    """Else the drafts are cut that would have stood, and those verified that fall."""
    texts = [[1, 2, 3, 4, 5, 6, 1, 2, 3, 4], [9, 4, 5, 7, 3, 4, 0, 0, 8, 4]]
    sure = engine.NGramDrafter().propose(state_of(texts), 6).confidence
    assert sure is not None and sure[0, 0] > sure[1, 0] > 0
    assert sure[0].tolist() == sorted(sure[0].tolist())  # each draft makes the match longer
