"""How many tokens to draft in a round: what the server asks, and a fixed number; `adaptive_length.py` has "auto"."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

from .state import Proposal


class DraftLength(ABC):
    """Says how many tokens to draft, and is told what came of it, from which it need not learn.

    Attributes:
        num_draft_tokens: at most so many.
    """

    num_draft_tokens: int

    @abstractmethod
    def choose(
        self, rows: Sequence[int], room: int, ends_early: bool = False, remaining: Sequence[int] | None = None
    ) -> int:
        """The number of tokens to draft in the next round.

        Args:
            rows: the slots that run.
            room: at most so many.
            ends_early: the drafter itself stops where drafting on would not pay.
            remaining: tokens that each of `rows` may still get; None if requests wait for their slots.
        """

    @property
    @abstractmethod
    def possible(self) -> list[int]:
        """All numbers that `choose` may return where there is room."""

    @abstractmethod
    def trim(self, proposal: Proposal, rows: Sequence[int], first: int = 0) -> Proposal:
        """The part of a proposal that is worth verifying. It looks at the proposal's values, which is free on a CPU only.

        Args:
            rows: the slots that run.
            first: the slot of the proposal's first row.
        """

    def begin(self, row: int) -> None:
        """A new text has taken this slot."""
        return

    def observe(self, row: int, tokens: Sequence[int], accepted: int, proposed: int, asked: int) -> None:
        """Learn from a row's part in a round.

        Args:
            row: its slot.
            tokens: that it emitted.
            accepted: of its drafts, as `Verdict.num_accepted` counts them.
            proposed: drafts that were verified.
            asked: drafts that the drafter was asked for, before it ended early or `trim` cut.
        """
        return

    def observe_times(
        self,
        num_rows: int,
        asked: int,
        size: int,
        draft_seconds: float,
        other_seconds: float,
        usual: bool = True,
    ) -> None:
        """Learn from a round's times, after `observe` for each of its rows.

        Args:
            num_rows: that ran.
            asked: tokens that the drafter was asked for.
            size: drafts that the target's call read: of all rows, or, where it reads padding as well, of the longest.
            draft_seconds: that drafting took.
            other_seconds: that all else took.
            usual: False if the round set something up that later ones will find: its times say nothing about those.
        """
        return


class FixedLength(DraftLength):
    """Always the same number of drafts.

    Args:
        num_draft_tokens: the number, >= 0.
    """

    def __init__(self, num_draft_tokens: int) -> None:
        self.num_draft_tokens = num_draft_tokens

    def choose(
        self, rows: Sequence[int], room: int, ends_early: bool = False, remaining: Sequence[int] | None = None
    ) -> int:
        return min(self.num_draft_tokens, room)

    @property
    def possible(self) -> list[int]:
        return [self.num_draft_tokens]

    def trim(self, proposal: Proposal, rows: Sequence[int], first: int = 0) -> Proposal:
        return without_empty_columns(proposal)


def without_empty_columns(proposal: Proposal) -> Proposal:
    """A proposal up to the last column in which any row has a draft; one with logits as it is."""
    if proposal.logits is not None:
        return proposal
    # A call costs about 2% more for each column.
    return Proposal(proposal.tokens[:, : int((proposal.tokens >= 0).sum(dim=1).max())])
