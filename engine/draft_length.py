"""How many tokens to draft: a fixed number, or the one that promises most tokens per second.

With acceptance probabilities a_1, a_2, ... a round that verifies k drafts of each row emits 1 + a_1 + a_1 a_2 + ... tokens
per row (Leviathan et al., arXiv 2211.17192, equation 1, without their assumption that all a_i are alike) and takes as long
as a target call of width k + 1, plus drafting. `AdaptiveLength` chooses; what it expects of both, from the rounds so far, is in `estimates.py`.

Which k is chosen depends on earlier rounds only. `trim` also looks at the drafted tokens, which leaves the target's law alone
only where they are not random: proposals without logits.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import accumulate, groupby
from operator import itemgetter, mul

import torch

from .estimates import NUM_BINS, Costs, Experience, Payoff, nearest
from .state import Proposal

MAX_DRAFT_TOKENS = 15  # "auto" tries no more
FEW_CHOICES = (0, 1, 2, 3, 5, 7, 11, 15)  # where each is a graph of its own
_DRAFT_SLOPE = 0.1  # cost of a further draft as a share of the first, until measured: low, so that it is tried
_SURE = 14  # bin of confidence from which a row whose drafts all stood is asked for twice as many
_PLAIN_CALLS, _PLAIN_AGAIN = 3, 32  # with several rows: before there are drafts, and one in so many rounds with drafts
_USUAL = 3  # drafts, for how many rounds a row will need
# A token of a row that will have ended after half the time counts a quarter; with padding, where a draft of one row costs as
# much as one of each, next to nothing. (The best of 0 to 8 in simulated rounds of 4 to 16 rows.)
_URGENCY, _URGENCY_PADDED = 2, 8
_WORTHLESS = 0.01  # tokens: what no draft is verified for
_PROBE_AFTER = (2, 32)  # rounds without a draft until one is tried: at first, at most


class FixedLength:
    """Always the same number."""

    def __init__(self, num_draft_tokens: int) -> None:
        self.num_draft_tokens = num_draft_tokens

    def choose(
        self, rows: Sequence[int], room: int, ends_early: bool = False, remaining: Sequence[int] | None = None
    ) -> int:
        """Tokens to draft in a round of these slots, of which none has place for more than `room`.

        Args:
            ends_early: the drafter itself stops where drafting on would not pay.
            remaining: tokens that each row may still get, if nobody waits for its slot.
        """
        return min(self.num_draft_tokens, room)

    @property
    def possible(self) -> list[int]:
        """All numbers that `choose` may return where there is room."""
        return [self.num_draft_tokens]

    def trim(self, proposal: Proposal, rows: Sequence[int], first: int = 0) -> Proposal:
        """The part of a proposal that is worth verifying, looking at it, which is free on a CPU only.

        Args:
            rows: the slots that run.
            first: the slot of the proposal's first row.
        """
        if proposal.logits is not None:
            return proposal
        # A call costs about 2% more for each column, so none that is empty in all rows.
        return Proposal(proposal.tokens[:, : int((proposal.tokens >= 0).sum(dim=1).max())])

    def begin(self, row: int) -> None:
        """A new text has taken this slot."""

    def observe(self, row: int, tokens: Sequence[int], accepted: int, proposed: int, asked: int) -> None:
        """A row's round: the tokens that it emitted; drafts accepted, verified, and asked for."""

    def observe_times(
        self,
        num_rows: int,
        asked: int,
        size: int,
        draft_seconds: float,
        other_seconds: float,
        usual: bool = True,
    ) -> None:
        """A round's times: drafting `asked` tokens, and all else.

        Args:
            size: drafts that the target's call read: of all rows, or, where it reads padding as well, of the longest.
            usual: False for one that set something up, which later ones need not: its times say nothing about those.
        """


class AdaptiveLength(FixedLength):
    """`num_draft_tokens="auto"`.

    Args:
        choices: the numbers to choose from, 0 among them, ascending.
        column_cost: what a draft of each row adds to a target call, as a share of one without, until it is measured.
        skips_padding: a call costs by the drafts of all rows, not by their longest, so each row has a number of its own.
    """

    def __init__(
        self,
        choices: Sequence[int] = range(MAX_DRAFT_TOKENS + 1),
        column_cost: float = 0.03,
        skips_padding: bool = False,
    ) -> None:
        super().__init__(max(choices))
        self.choices, self._column_cost, self._skips_padding = frozenset(choices), column_cost, skips_padding
        self._verify: dict[int, Costs] = {}  # by number of rows: seconds over drafts, of all rows or of the longest
        self._draft: dict[int, Costs] = {}  # seconds over drafts
        self._by_position, self._by_confidence = Experience(), Experience()
        self._offered: dict[int, tuple[list[int], list[int]]] = {}  # by row: tokens and their bins, before trimming
        self._most: dict[int, int] = {}  # by row: drafts that are verified, if it was decided before they were made
        self._next: dict[int, int] = {}  # by row: at least so many, since all stood and the drafter was sure of them
        self._without, self._patience = 0, _PROBE_AFTER[0]
        self._drafted = 0  # rounds
        self._weights: dict[int, float] = {}  # by row: what a token is worth
        self._judged_by_confidence = False
        self._payoff = Payoff()  # of rounds with several rows
        self._new: dict[int, int] = {}  # by row: tokens of this round

    @property
    def possible(self) -> list[int]:
        return sorted(self.choices)

    def choose(
        self, rows: Sequence[int], room: int, ends_early: bool = False, remaining: Sequence[int] | None = None
    ) -> int:
        self._most = {}
        most = min(self.num_draft_tokens, room)
        plain = self._verify[len(rows)].calls(0) if len(rows) in self._verify else 0
        if plain < (1 if len(rows) == 1 else _PLAIN_CALLS):
            return 0  # what plain decoding costs has to be known; well, where drafting gains less
        if len(rows) > 1 and self._payoff.rests():
            return 0
        positions = range(min(most, NUM_BINS))
        # What is not known yet is like the position before.
        chances = [self._by_position.chances(row, positions, prior=0.6, carry=True) for row in rows]
        self._weigh(rows, chances, remaining)
        if self._judged_by_confidence and self._drafting_is_free(len(rows)):
            return most  # `trim` decides
        # As many are asked for as there may be, and `trim` decides. With several rows a drafter goes on for the surest of
        # them: by measure 5 to 8% slower at 4 and 16 rows than to be asked for as many as pay on average.
        early = ends_early and len(rows) == 1
        lengths = self._best(rows, chances, with_drafting=True, asked=most if early else None)
        best = longest = max(lengths)
        # A drafter that suddenly knows what follows (a copied passage) is believed sooner than averages would.
        best = max(best, max(k for k in self.choices if k <= min(most, *(self._next.get(row, 0) for row in rows))))
        if best or not most:
            self._without = 0
            self._drafted += 1
            if len(rows) > 1 and self._drafted % _PLAIN_AGAIN == 0:
                return 0  # what plain decoding costs may have been measured in a bad moment
            if best == longest and self._skips_padding:
                self._most = dict(zip(rows, lengths, strict=True))
            return most if best and early else best
        # Nothing is learned without drafting, so now and then one token is drafted all the same.
        self._without += 1
        if self._without < self._patience:
            return 0
        self._without = 0
        self._patience = min(2 * self._patience, _PROBE_AFTER[1])
        return min(self.choices - {0})

    def trim(self, proposal: Proposal, rows: Sequence[int], first: int = 0) -> Proposal:
        self._offered = {}
        if proposal.confidence is None or proposal.logits is not None:
            if self._most:
                proposal = _cut(proposal, self._most, first)
            return super().trim(proposal, rows)
        self._most = {}
        self._judged_by_confidence = True
        drafts, confidence = proposal.tokens.tolist(), proposal.confidence.tolist()
        chances = []
        for row in rows:
            offered, sure_of = drafts[row - first], confidence[row - first]
            count = next((i for i, token in enumerate(offered) if token < 0), len(offered))
            bins = [int(sure * NUM_BINS) for sure in sure_of[:count]]
            self._offered[row] = offered[:count], bins
            chances.append(self._by_confidence.chances(row, bins))
        lengths = self._best(rows, chances, with_drafting=False)
        if self._skips_padding and len(rows) > 1:
            proposal = _cut(proposal, dict(zip(rows, lengths, strict=True)), first)
        return Proposal(proposal.tokens[:, : max(lengths)])

    def begin(self, row: int) -> None:
        self._next.pop(row, None)
        self._payoff.begin()
        self._by_position.begin(row)
        self._by_confidence.begin(row)

    def observe(self, row: int, tokens: Sequence[int], accepted: int, proposed: int, asked: int) -> None:
        self._new[row] = len(tokens)
        offered, bins = self._offered.get(row, ((), ()))
        outcomes = [True] * accepted
        if accepted < proposed:
            outcomes.append(False)
        elif accepted < min(len(offered), len(tokens)):
            # Not verified, but the target's own token says whether it would have stood.
            outcomes.append(offered[accepted] == tokens[accepted])
        self._by_confidence.add(row, bins, outcomes)
        sure = 0 < accepted == proposed <= len(bins) and bins[accepted - 1] >= _SURE
        self._next[row] = 2 * accepted + 1 if sure else 0
        if len(outcomes) == accepted < min(asked, self._most.get(row, asked)):
            outcomes.append(False)  # a draft that was asked for and did not come
        if accepted and self._by_position.chances(row, (0,), prior=0.6)[0] < 0.5:
            self._patience = _PROBE_AFTER[0]  # more than was expected: the text may have become easier
        self._by_position.add(row, range(NUM_BINS), outcomes)

    def observe_times(
        self,
        num_rows: int,
        asked: int,
        size: int,
        draft_seconds: float,
        other_seconds: float,
        usual: bool = True,
    ) -> None:
        rows, self._new = self._new, {}
        if not usual:
            return
        self._costs(self._verify, num_rows, self._size_cost(num_rows)).add(size, other_seconds)
        if asked:
            self._costs(self._draft, num_rows, _DRAFT_SLOPE).add(asked, draft_seconds)
            if num_rows > 1 and rows:
                worth = {row: self._weights.get(row, 1.0) for row in rows}
                gain = sum(worth[row] * count for row, count in rows.items()) / sum(worth.values())
                self._payoff.add(gain * self._verify[num_rows].at(0), draft_seconds + other_seconds)

    def _size_cost(self, num_rows: int) -> float:
        """What one more adds to a target call, as a share of one without drafts, before any was seen."""
        return self._column_cost / num_rows if self._skips_padding else self._column_cost

    @staticmethod
    def _costs(known: dict[int, Costs], num_rows: int, slope: float) -> Costs:
        """Of so many rows. New ones expect that one more adds as large a share as with the nearest number of rows."""
        if num_rows not in known:
            near = nearest(known, num_rows)
            known[num_rows] = Costs(slope if near is None else near.slope)
        return known[num_rows]

    def _weigh(self, rows: Sequence[int], chances: list[list[float]], remaining: Sequence[int] | None) -> None:
        """Where nobody waits, the row that ends last decides how long it all takes: tokens of rows that will have ended
        before are worth little, as there are fewer and fewer rows then that share a call."""
        self._weights = dict.fromkeys(rows, 1.0)
        if remaining is None or len(rows) == 1:
            return
        rounds = [left / (1 + sum(accumulate(c[:_USUAL], mul))) for left, c in zip(remaining, chances, strict=True)]
        last, urgency = max(rounds), _URGENCY if self._skips_padding else _URGENCY_PADDED
        self._weights = {row: (count / last) ** urgency for row, count in zip(rows, rounds, strict=True)}

    def _best(
        self, rows: Sequence[int], chances: list[list[float]], *, with_drafting: bool, asked: int | None = None
    ) -> list[int]:
        """Each row's number of drafts, with most expected tokens per second; asked: so many are made, if there are any."""
        verify = self._verify.get(len(rows)) or Costs(self._size_cost(len(rows)))
        draft = nearest(self._draft, len(rows)) if with_drafting else None
        weights = [self._weights.get(row, 1.0) for row in rows]
        # That a draft and all before it stand, times a token's worth; its index among the rows, its column.
        drafts = [
            (promise, index, column)
            for index, (weight, row_chances) in enumerate(zip(weights, chances, strict=True))
            for column, promise in enumerate(accumulate(row_chances, mul, initial=weight))
            if column and promise > _WORTHLESS
        ]
        if self._skips_padding:  # one after the other; a row's are in order, as each promises less than the one before
            steps = [[each] for each in sorted(drafts, key=itemgetter(0), reverse=True)]
        else:
            by_column = sorted(drafts, key=itemgetter(2))
            steps = [list(group) for _, group in groupby(by_column, key=itemgetter(2))]
        tokens, longest, best, best_rate = sum(weights), 0, 0, sum(weights) / verify.at(0)
        for size, step in enumerate(steps, start=1):
            tokens += sum(promise for promise, _, _ in step)
            longest = max(longest, step[0][2])
            if longest not in self.choices:
                continue
            rate = tokens / (verify.at(size) + (draft.at(asked or longest) if draft else 0.0))
            if rate > best_rate:
                best, best_rate = size, rate
        lengths = Counter(index for step in steps[:best] for _, index, _ in step)
        return [lengths[index] for index in range(len(rows))]

    def _drafting_is_free(self, num_rows: int) -> bool:
        draft, verify = nearest(self._draft, num_rows), self._verify.get(num_rows)
        return not draft or not verify or draft.at(self.num_draft_tokens) < 0.05 * verify.at(0)


def _cut(proposal: Proposal, most: Mapping[int, int], first: int) -> Proposal:
    """Without the drafts of a slot that are more than this; `first` is that of the first row."""
    lengths = torch.zeros(len(proposal.tokens), 1, dtype=torch.int64)
    lengths[[slot - first for slot in most], 0] = torch.tensor(list(most.values()))
    column = torch.arange(proposal.tokens.shape[1])
    return proposal._replace(tokens=proposal.tokens.where(column < lengths, -1))
