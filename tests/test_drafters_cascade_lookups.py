"""A cascade on a CPU: its lookups go on behind the drafts of a later stage, and spare it the drafts that they make up for."""

import pytest
import torch
from drafter_cases import Chain, Continuing, Fixed, bare_state, cascade_of, state_of

import engine
from engine.state import BatchState, Proposal


def test_lookups_go_on_behind_the_drafts_of_another_stage() -> None:
    """Which may then stop; a continuation that is shorter than there is room ends the proposal."""
    lookup, chain = Continuing({1: [7, 8, 9, 7, 8], 3: [4]}), Chain([[5, 1, 6, 6, 6], [2, 2, 3, 2, 2]])
    both, state = cascade_of(lookup, chain), bare_state(2)
    proposal = both.propose(state, 5)
    assert proposal.tokens.tolist() == [[5, 1, 7, 8, 9], [2, 2, 3, 4, -1]]
    assert chain.steps_read == 3  # the last row was followed up behind its third draft
    state.limits[1] = 0
    assert both.propose(state, 5).tokens[0].tolist() == [5, 1, 7, 8, 9]
    assert chain.steps_read == 5
    state.tokens[0, 4] = 1  # now the lookup has a first token for the only active row
    assert both.propose(state, 5).tokens[0].tolist() == [7, 8, 9, 7, 8]
    assert chain.steps_read == 5


def test_lookups_go_on_behind_the_last_draft_of_a_stage_that_gives_all_at_once() -> None:
    whole = Fixed([[5, 1, 6], [2, 1, -1], [-1, -1, -1], [3, 3, 1]])
    proposal = cascade_of(Continuing({1: [7, 8, 9], 6: [4]}), whole).propose(bare_state(4), 5)
    assert proposal.tokens.tolist() == [[5, 1, 6, 4, -1], [2, 1, 7, 8, 9], [-1] * 5, [3, 3, 1, 7, 8]]


def test_nothing_is_looked_up_behind_more_drafts_than_were_asked_for() -> None:
    """Nor does a lookup have to make room for them in what it is asked for."""
    lookup, state = engine.SuffixDrafter(), state_of([[7, 5, 1, 8]])
    lookup.prefill(state)
    for whole in (Fixed([[3, 6, 5, 5, 1]]), Chain([[3, 6, 5, 5, 1]])):  # all at once, and one by one
        assert cascade_of(lookup, whole).propose(state, 2).tokens.tolist() == [[3, 6]]


@pytest.mark.parametrize("can_look", [True, False])
def test_only_lookups_that_come_first_go_on(can_look: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BatchState, "can_look", can_look)
    lookup, chain = Continuing({1: [7]}), Chain([[5, 1, 6]])
    chain.proposal = Proposal(torch.tensor([[5, 1, 6]]))
    first = cascade_of(chain, lookup).propose(bare_state(1), 3)
    assert first.tokens.tolist() == [[5, 1, 6]]
    if not can_look:  # a device is not waited for
        assert cascade_of(Continuing({}), chain).propose(bare_state(1), 3).tokens.tolist() == [[5, 1, 6]]


def test_any_of_the_lookups_goes_on() -> None:
    """Not the first one only: the second may be the one that knows the text."""
    both = cascade_of(Continuing({2: [3]}), Continuing({1: [7]}), Chain([[5, 1, 6]]))
    assert both.propose(bare_state(1), 3).tokens.tolist() == [[5, 1, 7]]


def test_lookups_see_all_drafts_before_them() -> None:
    """A match of three tokens, of which two are drafts; a lookup that saw the last draft alone would never find it."""
    chain = Chain([[2, 3, 6, 6]])
    proposal = cascade_of(engine.NGramDrafter(3), chain).propose(state_of([[1, 2, 3, 8, 9, 4, 1]]), 4)
    assert proposal.tokens.tolist() == [[2, 3, 8, 9]]
    assert chain.steps_read == 2


def test_a_lookup_that_ends_ends_the_proposal_whoever_shares_the_call() -> None:
    """Else a row is given drafts that stand at the wrong place, because its neighbour needed more of them."""
    lookup, chain = Continuing({1: [7]}), Chain([[5, 1, 6, 6, 6], [2, 2, 2, 2, 2]])
    assert cascade_of(lookup, chain).propose(bare_state(2), 5).tokens.tolist() == [[5, 1, 7, -1, -1], [2] * 5]


def test_rows_that_have_a_proposal_ask_for_no_further_drafts() -> None:
    """Each is a call of the drafting model, for nothing."""
    lookup, chain, state = Continuing({1: [7], 3: [4]}), Chain([[6, 6, 6], [3, 2, 2]]), bare_state(2)
    state.tokens[0, 4] = 1
    assert cascade_of(lookup, chain).propose(state, 3).tokens.tolist() == [[7, -1, -1], [3, 4, -1]]
    assert chain.steps_read == 1


def test_what_lookups_add_has_their_confidence() -> None:
    """Drafts that are not worth verifying are cut by it: all of these, if they had none."""
    whole = Fixed([[5, 1]], None, None, torch.tensor([[0.9, 0.8]]))
    proposal = cascade_of(Continuing({1: [7, 8]}), whole).propose(bare_state(1, 0.0), 5)
    assert proposal.tokens.tolist() == [[5, 1, 7, 8, -1]] and proposal.confidence is not None
    assert proposal.confidence[0].tolist() == pytest.approx([0.9, 0.8, 0.5, 0.5, 0.0])


@pytest.mark.parametrize("lookup", [engine.NGramDrafter(3), engine.SuffixDrafter()])
def test_a_lookup_ends_early_if_the_other_stages_do(lookup: engine.Drafter) -> None:
    """Under "auto", a head that stops by itself is asked for as many drafts as there is room for, behind a lookup too."""

    class Early(Chain):
        def ends_early(self, state: BatchState) -> bool:
            return True

    state = bare_state(1, 0.0)
    assert cascade_of(lookup, Early([[1]])).ends_early(state)
    assert not cascade_of(lookup, Chain([[1]])).ends_early(state)


def test_lookups_are_told_the_slot_and_not_the_row() -> None:
    """One that keeps texts by slot would look into another row's."""

    class Told(Continuing):
        def continuation(self, slot, text, most):  # type: ignore[no-untyped-def]
            slots.append(slot)
            return super().continuation(slot, text, most)

    slots: list[int] = []
    state = bare_state(4).select(slice(2, 4))
    cascade_of(Told({}), Fixed([[5, 1], [2, 3]])).propose(state, 3)
    assert slots == [2, 3, 2, 3]  # behind the text, and behind the drafts
