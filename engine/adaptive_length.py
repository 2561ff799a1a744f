"""How many tokens to draft: `num_draft_tokens="auto"`, the number with the most expected tokens per second.

With acceptance probabilities a_1, a_2, ... a round that verifies k drafts of each row emits 1 + a_1 + a_1 a_2 + ... tokens
per row (Leviathan et al., arXiv 2211.17192, equation 1, without their assumption that all a_i are alike) and takes as long
as a target call of width k + 1, plus drafting. `AdaptiveLength` chooses the k with most tokens per second. What it expects of
tokens and of times, it learns from the rounds so far (`estimates.py`).

k depends on earlier rounds only, so the target's distribution is unchanged. `trim`, which cuts a proposal after a look at its
tokens, would change the distribution of drafts that were drawn: it cuts only those that were not, proposals without logits.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import accumulate, groupby
from operator import itemgetter, mul

import torch

from .draft_length import DraftLength, without_empty_columns
from .estimates import NUM_BINS, Costs, Experience, Payoff, nearest
from .state import Proposal

MAX_DRAFT_TOKENS = 15  # "auto" tries no more
FEW_CHOICES = (0, 1, 2, 3, 5, 7, 11, 15)  # where each is a graph of its own
_DRAFT_SLOPE = 0.1  # cost of a further draft as a share of the first, until measured: low, so that it is tried
_SURE = 14  # bin of confidence: where all drafts of a row stood, the last in this bin or above, twice as many may come
# With several rows: plain rounds before the first drafts, and then one plain round in so many, to know what it costs.
_PLAIN_CALLS, _PLAIN_AGAIN = 3, 32
_USUAL = 3  # drafts in a round, from which it is guessed how many more rounds a row needs
# Exponents: a token of a row that will have ended after half the time counts 1 / 2^2 = a quarter; with padding, where a draft
# of one row costs as much as one of each, 1 / 2^8. (The best of 0 to 8 in simulated rounds of 4 to 16 rows.)
_URGENCY, _URGENCY_PADDED = 2, 8
_WORTHLESS = 0.01  # a draft that promises fewer tokens than this is not verified
_FREE = 0.05  # of a plain target call: drafting that takes less counts as free
_PRIOR = 0.6  # acceptance of a draft, until it is known
_PROBE_AFTER = (2, 32)  # rounds without a draft until one is tried: at first, at most


class AdaptiveLength(DraftLength):
    """`num_draft_tokens="auto"`.

    Args:
        choices: the numbers to choose from, 0 among them.
        column_cost: by how much one more draft of each row lengthens a target call, as a share of a call without drafts; believed
            until it is measured.
        skips_padding: a target call costs by the drafts of all rows together, and not by those of the row that has most. Each
            row then has a number of its own.
    """

    def __init__(
        self,
        choices: Sequence[int] = range(MAX_DRAFT_TOKENS + 1),
        column_cost: float = 0.03,
        skips_padding: bool = False,
    ) -> None:
        self.num_draft_tokens = max(choices)
        self.choices, self._column_cost, self._skips_padding = frozenset(choices), column_cost, skips_padding
        self._verify: dict[int, Costs] = {}  # by number of rows: seconds over drafts, of all rows or of the longest
        self._draft: dict[int, Costs] = {}  # seconds over drafts
        self._by_position, self._by_confidence = Experience(), Experience()
        self._offered: dict[int, tuple[list[int], list[int]]] = {}  # by row: drafts and their bins, before trimming
        self._most: dict[int, int] = {}  # by row: drafts to verify, where `choose` has decided on a number for each row
        self._next: dict[int, int] = {}  # by row: drafts to ask for at least, as all stood and the last was a sure one
        self._without, self._patience = 0, _PROBE_AFTER[0]  # rounds without drafts: so far, and until one is tried
        self._drafted = 0  # rounds with drafts
        self._weights: dict[int, float] = {}  # by row: what a token is worth, see `_weigh`
        self._judged_by_confidence = False  # the drafter reports its confidence, by which `trim` cuts
        self._payoff = Payoff()  # of rounds with several rows
        self._new: dict[int, int] = {}  # by row: number of tokens in this round

    @property
    def possible(self) -> list[int]:
        return sorted(self.choices)

    def choose(
        self, rows: Sequence[int], room: int, ends_early: bool = False, remaining: Sequence[int] | None = None
    ) -> int:
        self._most = {}
        most = min(self.num_draft_tokens, room)
        if self._plain_is_due(len(rows)):
            return 0
        positions = range(min(most, NUM_BINS))
        # A position that no draft has reached yet is expected to be like the one before.
        chances = [self._by_position.chances(row, positions, prior=_PRIOR, carry=True) for row in rows]
        self._weigh(rows, chances, remaining)
        if self._judged_by_confidence and self._drafting_is_free(len(rows)):
            return most  # `trim` decides
        # One that ends early is asked for all that there may be. Not with several rows, where it would go on for the surest of
        # them: that was measured to be 5 to 8% slower, at 4 and 16 rows, than to ask for as many as pay on average.
        early = ends_early and len(rows) == 1
        lengths = self._best(rows, chances, with_drafting=True, asked=most if early else None)
        longest = max(lengths)
        # A drafter that suddenly knows what follows (a copied passage) is believed sooner than averages would.
        sure = min(most, *(self._next.get(row, 0) for row in rows))
        best = max(longest, *(k for k in self.choices if k <= sure))
        if not best and most:
            return self._probe()
        self._without = 0
        self._drafted += 1
        if len(rows) > 1 and self._drafted % _PLAIN_AGAIN == 0:
            return 0  # what plain decoding costs may have been measured in a bad moment
        if best == longest and self._skips_padding:
            self._most = dict(zip(rows, lengths, strict=True))
        return most if best and early else best

    def _plain_is_due(self, num_rows: int) -> bool:
        """Whether the next round is plain, whatever drafts promise."""
        # What plain decoding costs has to be known; and known well with several rows, where drafting gains less.
        plain = self._verify[num_rows].calls(0) if num_rows in self._verify else 0
        if plain < (1 if num_rows == 1 else _PLAIN_CALLS):
            return True
        return num_rows > 1 and self._payoff.rests()

    def _probe(self) -> int:
        """Drafts in a round in which none pay: nothing is learned without drafting, so now and then it is one all the same."""
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
            return without_empty_columns(proposal)
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
        if accepted and self._by_position.chances(row, (0,), prior=_PRIOR)[0] < 0.5:
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
        """What one more draft is believed to add to a target call, as a share of a call without drafts."""
        return self._column_cost / num_rows if self._skips_padding else self._column_cost

    @staticmethod
    def _costs(known: dict[int, Costs], num_rows: int, slope: float) -> Costs:
        """Those of so many rows. New ones take the slope of the nearest number of rows that is known."""
        if num_rows not in known:
            near = nearest(known, num_rows)
            known[num_rows] = Costs(slope if near is None else near.slope)
        return known[num_rows]

    def _weigh(self, rows: Sequence[int], chances: list[list[float]], remaining: Sequence[int] | None) -> None:
        """Decide what a token of each row is worth: 1, and less where nobody waits for a slot and the row ends before others.

        The row that ends last then decides how long it all takes, at the end in calls that it shares with nobody.
        """
        self._weights = dict.fromkeys(rows, 1.0)
        if remaining is None or len(rows) == 1:
            return
        rounds = [left / (1 + sum(accumulate(c[:_USUAL], mul))) for left, c in zip(remaining, chances, strict=True)]
        last, urgency = max(rounds), _URGENCY if self._skips_padding else _URGENCY_PADDED
        self._weights = {row: (count / last) ** urgency for row, count in zip(rows, rounds, strict=True)}

    def _best(
        self, rows: Sequence[int], chances: list[list[float]], *, with_drafting: bool, asked: int | None = None
    ) -> list[int]:
        """Each row's number of drafts, with most expected tokens per second.

        Drafts are put in order, those that promise most first (with padding whole columns, in their order), and as many of the
        first ones are taken as give the highest rate.

        Args:
            chances: of each row and draft: that it stands if those before it do.
            with_drafting: count the time of drafting, too.
            asked: the drafter makes so many drafts, if any; None: as many as the row has that has most.
        """
        verify = self._verify.get(len(rows)) or Costs(self._size_cost(len(rows)))
        draft = nearest(self._draft, len(rows)) if with_drafting else None
        weights = [self._weights.get(row, 1.0) for row in rows]
        # For each draft: what it promises (the chance that it and all before it stand, times a token's worth), index of its row in
        # `rows`, and its column, from 1.
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
        """Whether drafting all there may be takes next to no time, as far as is known."""
        draft, verify = nearest(self._draft, num_rows), self._verify.get(num_rows)
        return not draft or not verify or draft.at(self.num_draft_tokens) < _FREE * verify.at(0)


def _cut(proposal: Proposal, most: Mapping[int, int], first: int) -> Proposal:
    """A proposal with at most so many drafts of each row, `most` by slot; none of other rows. `first`: slot of its first row."""
    device = proposal.tokens.device
    lengths = torch.zeros(len(proposal.tokens), 1, dtype=torch.int64, device=device)
    lengths[[slot - first for slot in most], 0] = torch.tensor(list(most.values()), device=device)
    column = torch.arange(proposal.tokens.shape[1], device=device)
    return proposal._replace(tokens=proposal.tokens.where(column < lengths, -1))
