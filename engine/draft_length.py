"""How many tokens to draft: a fixed number, or the one that promises most tokens per second.

With acceptance probabilities a_1, a_2, ... a round that verifies k drafts of each row emits 1 + a_1 + a_1 a_2 + ... tokens
per row (Leviathan et al., arXiv 2211.17192, equation 1, without their assumption that all a_i are alike) and takes as long
as a target call of width k + 1, plus drafting. `AdaptiveLength` estimates both from the rounds that it has seen.

Which k is chosen depends on earlier rounds only. `trim` also looks at the drafted tokens, which leaves the target's law alone
only where they are not random: proposals without logits.
"""

from collections.abc import Sequence

from .state import Proposal

NUM_BINS = 16  # of confidence, or positions in the draft
MAX_DRAFT_TOKENS = 15  # "auto" tries no more
FEW_CHOICES = (0, 1, 2, 3, 5, 7, 11, 15)  # where each is a graph of its own
_HALVES_AFTER = 10.0  # a row's acceptance: observations after which one counts half
_ENGINE_HALVES_AFTER = 200.0  # all rows' together
_PRIOR_WEIGHT = 4.0  # what is believed beforehand counts as so many observations
_DRAFT_SLOPE = 0.1  # cost of a further draft as a share of the first, until measured: low, so that it is tried
_SURE = 14  # bin of confidence from which a row whose drafts all stood is asked for twice as many
_PLAIN_CALLS, _PLAIN_AGAIN = 3, 32  # with several rows: before there are drafts, and one in so many rounds with drafts
_PROBE_AFTER = (2, 32)  # rounds without a draft until one is tried: at first, at most


class FixedLength:
    """Always the same number."""

    def __init__(self, num_draft_tokens: int) -> None:
        self.num_draft_tokens = num_draft_tokens

    def choose(self, rows: Sequence[int], room: int, ends_early: bool = False) -> int:
        """Tokens to draft in a round of these slots, of which none has place for more than `room`.

        Args:
            ends_early: the drafter itself stops where drafting on would not pay.
        """
        return min(self.num_draft_tokens, room)

    @property
    def possible(self) -> list[int]:
        """All numbers that `choose` may return where there is room."""
        return [self.num_draft_tokens]

    def trim(self, proposal: Proposal, rows: Sequence[int]) -> Proposal:
        """The part of a proposal that is worth verifying, looking at it, which is free on a CPU only."""
        if proposal.logits is not None:
            return proposal
        # A call costs about 2% more for each column, so none that is empty in all rows.
        return Proposal(proposal.tokens[:, : int((proposal.tokens >= 0).sum(dim=1).max())])

    def begin(self, row: int) -> None:
        """A new text has taken this slot."""

    def observe(self, row: int, tokens: Sequence[int], accepted: int, proposed: int, asked: int) -> None:
        """A row's round: the tokens that it emitted; drafts accepted, verified, and asked for."""

    def observe_times(self, num_rows: int, asked: int, width: int, draft_seconds: float, other_seconds: float) -> None:
        """A round's times: drafting `asked` tokens, and all else, with a target call of this width."""


class AdaptiveLength(FixedLength):
    """`num_draft_tokens="auto"`.

    Args:
        choices: the numbers to choose from, 0 among them, ascending.
        column_cost: what a further column adds to a target call, as a share of a call of width 1, until it is measured.
    """

    def __init__(self, choices: Sequence[int] = range(MAX_DRAFT_TOKENS + 1), column_cost: float = 0.03) -> None:
        super().__init__(max(choices))
        self.choices, self._column_cost = frozenset(choices), column_cost
        self._verify: dict[int, Costs] = {}  # by number of rows: seconds over width - 1
        self._draft: dict[int, Costs] = {}  # seconds over drafts
        self._by_position, self._by_confidence = Experience(), Experience()
        self._offered: dict[int, tuple[list[int], list[int]]] = {}  # by row: tokens and their bins, before trimming
        self._next: dict[int, int] = {}  # by row: at least so many, since all stood and the drafter was sure of them
        self._without, self._patience = 0, _PROBE_AFTER[0]
        self._drafted = 0  # rounds
        self._judged_by_confidence = False

    @property
    def possible(self) -> list[int]:
        return sorted(self.choices)

    def choose(self, rows: Sequence[int], room: int, ends_early: bool = False) -> int:
        most = min(self.num_draft_tokens, room)
        plain = self._verify[len(rows)].calls(0) if len(rows) in self._verify else 0
        if plain < (1 if len(rows) == 1 else _PLAIN_CALLS):
            return 0  # what plain decoding costs has to be known; well, where drafting gains less
        if self._judged_by_confidence and self._drafting_is_free(len(rows)):
            return most  # `trim` decides
        positions = range(min(most, NUM_BINS))
        # What is not known yet is like the position before.
        chances = [self._by_position.chances(row, positions, prior=0.6, carry=True) for row in rows]
        early = ends_early and self._judged_by_confidence  # as many are asked for as there may be, and `trim` decides
        best = self._best(chances, len(rows), with_drafting=True, asked=most if early else None)
        # A drafter that suddenly knows what follows (a copied passage) is believed sooner than averages would.
        best = max(best, max(k for k in self.choices if k <= min(most, *(self._next.get(row, 0) for row in rows))))
        if best or not most:
            self._without = 0
            self._drafted += 1
            if len(rows) > 1 and self._drafted % _PLAIN_AGAIN == 0:
                return 0  # what plain decoding costs may have been measured in a bad moment
            return most if best and early else best
        # Nothing is learned without drafting, so now and then one token is drafted all the same.
        self._without += 1
        if self._without < self._patience:
            return 0
        self._without = 0
        self._patience = min(2 * self._patience, _PROBE_AFTER[1])
        return min(self.choices - {0})

    def trim(self, proposal: Proposal, rows: Sequence[int]) -> Proposal:
        self._offered = {}
        if proposal.confidence is None or proposal.logits is not None:
            return super().trim(proposal, rows)
        self._judged_by_confidence = True
        drafts, bins = proposal.tokens.tolist(), (proposal.confidence * NUM_BINS).long().clamp(0, NUM_BINS - 1).tolist()
        chances = []
        for row in rows:
            count = next((i for i, token in enumerate(drafts[row]) if token < 0), len(drafts[row]))
            self._offered[row] = drafts[row][:count], bins[row][:count]
            chances.append(self._by_confidence.chances(row, bins[row][:count]))
        best = self._best(chances, len(rows), with_drafting=False)
        return Proposal(proposal.tokens[:, :best])

    def begin(self, row: int) -> None:
        self._next.pop(row, None)
        self._by_position.begin(row)
        self._by_confidence.begin(row)

    def observe(self, row: int, tokens: Sequence[int], accepted: int, proposed: int, asked: int) -> None:
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
        if len(outcomes) == accepted < asked:
            outcomes.append(False)  # a draft that was asked for and did not come
        if accepted and self._by_position.chances(row, (0,), prior=0.6)[0] < 0.5:
            self._patience = _PROBE_AFTER[0]  # more than was expected: the text may have become easier
        self._by_position.add(row, range(NUM_BINS), outcomes)

    def observe_times(self, num_rows: int, asked: int, width: int, draft_seconds: float, other_seconds: float) -> None:
        self._costs(self._verify, num_rows, self._column_cost).add(width - 1, other_seconds)
        if asked:
            self._costs(self._draft, num_rows, _DRAFT_SLOPE).add(asked, draft_seconds)

    @staticmethod
    def _costs(known: "dict[int, Costs]", num_rows: int, slope: float) -> "Costs":
        """Of so many rows. New ones expect that one more adds as large a share as with the nearest number of rows."""
        if num_rows not in known:
            near = nearest(known, num_rows)
            known[num_rows] = Costs(slope if near is None else near.slope)
        return known[num_rows]

    def _best(self, chances: list[list[float]], num_rows: int, *, with_drafting: bool, asked: int | None = None) -> int:
        """The number of drafts with most expected tokens per second; asked: so many are made in any case, if there are any."""
        verify = self._verify.get(num_rows) or Costs(self._column_cost)
        draft = nearest(self._draft, num_rows) if with_drafting else None
        reach = [1.0] * len(chances)  # that all drafts so far stand
        tokens, best, best_rate = float(num_rows), 0, 0.0
        for k in range(max(map(len, chances), default=0) + 1):
            if k:
                reach = [r * c[k - 1] if k <= len(c) else 0.0 for r, c in zip(reach, chances, strict=True)]
                tokens += sum(reach)
            if k not in self.choices:
                continue
            rate = tokens / (verify.at(k) + (draft.at(asked or k) if draft and k else 0.0))
            if rate > best_rate:
                best, best_rate = k, rate
        return best

    def _drafting_is_free(self, num_rows: int) -> bool:
        draft, verify = nearest(self._draft, num_rows), self._verify.get(num_rows)
        return not draft or not verify or draft.at(self.num_draft_tokens) < 0.05 * verify.at(0)


def nearest(costs: "dict[int, Costs]", num_rows: int) -> "Costs | None":
    """Those of the number of rows that is nearest to this one, of those that are known."""
    near = min(costs, key=lambda known: abs(known - num_rows), default=None)
    return None if near is None else costs[near]


class Experience:
    """How often drafts stood, by bin: of each row, and of all rows of the engine's life."""

    def __init__(self) -> None:
        self._all_rows = Acceptance(_ENGINE_HALVES_AFTER)
        self._rows: dict[int, Acceptance] = {}

    def begin(self, row: int) -> None:
        """A new text has taken this slot."""
        self._rows[row] = Acceptance(_HALVES_AFTER)

    def add(self, row: int, bins: Sequence[int], outcomes: Sequence[bool]) -> None:
        """Note whether the drafts in these bins stood."""
        for bin_, stood in zip(bins, outcomes, strict=False):
            self._rows[row].add(bin_, stood)
            self._all_rows.add(bin_, stood)

    def chances(self, row: int, bins: Sequence[int], prior: float | None = None, carry: bool = False) -> list[float]:
        """That each draft stands if those before it do: the row's own experience, else all rows', else the prior.

        Args:
            prior: believed before anything is known; None: the middle of the bin.
            carry: a bin's prior is what is expected of the one before it.
        """
        found: list[float] = []
        for bin_ in bins:
            believed = (bin_ + 0.5) / NUM_BINS if prior is None else found[-1] if carry and found else prior
            everywhere = self._all_rows.estimate(bin_, believed, _PRIOR_WEIGHT)
            found.append(self._rows[row].estimate(bin_, everywhere, _PRIOR_WEIGHT))
        return found


class Acceptance:
    """How often drafts stood, by bin, with recent ones counting more.

    Args:
        halves_after: observations of a bin after which an older one counts half.
    """

    def __init__(self, halves_after: float) -> None:
        self._keep = 0.5 ** (1 / halves_after)
        self._stood, self._seen = [0.0] * NUM_BINS, [0.0] * NUM_BINS

    def add(self, bin_: int, stood: bool) -> None:
        self._stood[bin_] = self._keep * self._stood[bin_] + stood
        self._seen[bin_] = self._keep * self._seen[bin_] + 1

    def estimate(self, bin_: int, prior: float, weight: float) -> float:
        """The share that stood, with `weight` imagined observations of `prior`."""
        return (self._stood[bin_] + weight * prior) / (self._seen[bin_] + weight)


class Costs:
    """Seconds of a kind of work by its size: a line through what was seen, and how far each size lies off it.

    Single calls scatter by more than neighbouring sizes differ, so a size's own deviation is believed after many calls only.

    Args:
        slope: seconds that one more adds, as a share of size 0: what is believed beforehand.
    """

    _KEEP = 0.5 ** (1 / 200)  # calls after which one counts half
    _BELIEF = 8.0  # in the slope: as that of so many calls at a distance of 1 from their mean size
    _CALLS = 50.0  # of a size, until its own deviation counts half
    _MOST = 1.7  # times what was expected: beyond this, something else had the machine

    def __init__(self, slope: float) -> None:
        self._slope = slope
        self._deviations: dict[int, tuple[float, float]] = {}  # by size: their sum, calls
        self._forget()

    def _forget(self) -> None:
        self._calls = self._mean_size = self._mean_seconds = self._spread = self._rise = 0.0
        self._seconds_of_0 = 0.0  # sum
        self._deviations.clear()

    def calls(self, size: int) -> int:
        """Of this size, so far; old ones count less."""
        return round(self._deviations.get(size, (0.0, 0.0))[1])

    def add(self, size: int, seconds: float) -> None:
        if self._calls == 1 and seconds < 0.8 * self.at(size):
            self._forget()  # the first call had something to set up
        if self._calls:
            seconds = min(seconds, self._MOST * self.at(size))
        calls = self._KEEP * self._calls
        self._calls = calls + 1
        off_size, off_seconds = size - self._mean_size, seconds - self._mean_seconds
        self._mean_size += off_size / self._calls
        self._mean_seconds += off_seconds / self._calls
        # sums of squares and products around the means
        self._spread = self._KEEP * self._spread + calls / self._calls * off_size**2
        self._rise = self._KEEP * self._rise + calls / self._calls * off_size * off_seconds
        deviation, count = self._deviations.get(size, (0.0, 0.0))
        self._deviations[size] = self._KEEP * deviation + seconds - self._line(size), self._KEEP * count + 1
        if not size:
            self._seconds_of_0 = self._KEEP * self._seconds_of_0 + seconds

    @property
    def slope(self) -> float:
        """What one more adds by now, as a share of size 0."""
        return self._line(1) / max(self._line(0), 1e-9) - 1 if self._calls else self._slope

    def at(self, size: int) -> float:
        """Seconds expected; in units of size 0 before anything is known."""
        if not self._calls:
            return 1 + self._slope * size
        deviation, count = self._deviations.get(size, (0.0, 0.0))
        if not size:  # the line need not go through it: with many rows, the first column more costs more than others
            return (self._seconds_of_0 + max(self._line(0), 1e-9)) / (count + 1)
        return max(self._line(size) + deviation / (count + self._CALLS), 1e-9)

    def _line(self, size: int) -> float:
        believed = self._slope * self._mean_seconds / (1 + self._slope * self._mean_size)
        rise = (self._rise + self._BELIEF * believed) / (self._spread + self._BELIEF)
        return self._mean_seconds + max(rise, 0.0) * (size - self._mean_size)
