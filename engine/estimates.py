"""What is expected of the next round, from those before: how likely drafts are accepted, and how long a kind of work takes."""

from collections.abc import Sequence

NUM_BINS = 16  # of confidence, or positions in the draft
_HALVES_AFTER = 10.0  # a row's acceptance: observations after which one counts half
_ENGINE_HALVES_AFTER = 200.0  # all rows' together
_PRIOR_WEIGHT = 4.0  # what is believed beforehand counts as so many observations


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
        """For each bin, how likely a draft in it is to stand if those before it do.

        The estimate from the row's own drafts, for which the estimate from all rows is the prior.

        Args:
            prior: of the estimate from all rows: what is believed before anything is known; None: the middle of the bin, as of
                a confidence.
            carry: for all bins but the first, the prior is the result for the bin before, in place of `prior`.
        """
        found: list[float] = []
        for bin_ in bins:
            if prior is None:
                believed = (bin_ + 0.5) / NUM_BINS
            else:
                believed = found[-1] if carry and found else prior
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
        """Note whether a draft in this bin stood."""
        self._stood[bin_] = self._keep * self._stood[bin_] + stood
        self._seen[bin_] = self._keep * self._seen[bin_] + 1

    def estimate(self, bin_: int, prior: float, weight: float) -> float:
        """The share that stood, with `weight` imagined observations of `prior`."""
        return (self._stood[bin_] + weight * prior) / (self._seen[bin_] + weight)


class Costs:
    """What a kind of work costs, in seconds, by its size: a line through the calls so far, and each size's deviation from it.

    Single calls scatter by more than neighbouring sizes differ, so a size's own deviation is believed after many calls only.

    Args:
        slope: seconds that one more adds, as a share of size 0: what is believed beforehand.
    """

    _KEEP = 0.5 ** (1 / 200)  # a call counts half after 200 others
    _BELIEF = 8.0  # the slope that is believed beforehand counts as much as so many calls at a distance of 1 from their mean size
    _CALLS = 50.0  # calls of a size after which its own deviation counts half
    _MOST = 1.7  # times what was expected: a call that took longer counts as this, as something else had the machine

    def __init__(self, slope: float) -> None:
        self._slope = slope
        self._deviations: dict[int, tuple[float, float]] = {}  # by size: their sum, calls
        self._forget()

    def _forget(self) -> None:
        self._calls = self._mean_size = self._mean_seconds = self._spread = self._rise = 0.0
        self._per_size = 0.0  # the slope of the line, in seconds
        self._seconds_of_0 = 0.0  # sum
        self._deviations.clear()

    def calls(self, size: int) -> int:
        """Of this size, so far; old ones count less."""
        return round(self._deviations.get(size, (0.0, 0.0))[1])

    def add(self, size: int, seconds: float) -> None:
        """Note what a call of this size took."""
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
        believed = self._slope * self._mean_seconds / (1 + self._slope * self._mean_size)
        self._per_size = max((self._rise + self._BELIEF * believed) / (self._spread + self._BELIEF), 0.0)
        deviation, count = self._deviations.get(size, (0.0, 0.0))
        self._deviations[size] = self._KEEP * deviation + seconds - self._line(size), self._KEEP * count + 1
        if not size:
            self._seconds_of_0 = self._KEEP * self._seconds_of_0 + seconds

    @property
    def slope(self) -> float:
        """What one more adds by now, as a share of size 0."""
        return self._per_size / max(self._line(0), 1e-9) if self._calls else self._slope

    def at(self, size: int) -> float:
        """Seconds expected; in units of size 0 before anything is known."""
        if not self._calls:
            return 1 + self._slope * size
        deviation, count = self._deviations.get(size, (0.0, 0.0))
        if not size:  # may lie below the line: with many rows, the first draft costs more than others; never above it
            line = max(self._line(0), 1e-9)
            return min((self._seconds_of_0 + line) / (count + 1), line)
        return max(self._line(size) + deviation / (count + self._CALLS), 1e-9)

    def _line(self, size: int) -> float:
        return self._mean_seconds + self._per_size * (size - self._mean_size)


class Payoff:
    """What rounds with drafts gave of late, beside what plain ones would have given in the same time.

    Estimates that are a little too hopeful, and what looking for drafts takes, show here alone.
    """

    _KEEP = 0.5 ** (1 / 30)  # a round counts half after 30 others
    _ROUNDS = 12  # rounds before it is judged
    _REST = (16, 64)  # rounds without drafts if drafting has not paid: at first, at most

    def __init__(self) -> None:
        self._gained = self._spent = 0.0
        self._rounds = 0
        self._length = self._REST[0]  # of the next rest, in rounds
        self._left = 0  # rounds of the present rest

    def begin(self) -> None:
        """A new text, which may be another kind of text."""
        self._length = self._REST[0]
        self._left = min(self._left, self._length)

    def rests(self) -> bool:
        """Whether the next round should be plain; counts it."""
        if not self._left:
            return False
        self._left -= 1
        return True

    def add(self, plain_seconds: float, seconds: float) -> None:
        """A round with drafts: what plain decoding takes for as much, and what it took."""
        self._gained = self._KEEP * self._gained + plain_seconds
        self._spent = self._KEEP * self._spent + seconds
        self._rounds += 1
        if self._rounds < self._ROUNDS:
            return
        if self._gained >= self._spent:
            self._length = self._REST[0]
            return
        self._left, self._length = self._length, min(2 * self._length, self._REST[1])
        self._gained = self._spent = 0.0
        self._rounds = 0


def nearest(costs: dict[int, Costs], num_rows: int) -> Costs | None:
    """Those of the number of rows that is nearest to this one, of those that are known."""
    near = min(costs, key=lambda known: abs(known - num_rows), default=None)
    return None if near is None else costs[near]
