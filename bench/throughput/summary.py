"""Figures of a method, over the prompts of a category or over all."""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from bench.throughput.methods import OUR_PLAIN, Contest
from bench.throughput.prompts import ALL


@dataclass
class CallFigures:
    """One call of one method, whose rows share its time."""

    category: str
    seconds: float
    tokens: int
    prefill_seconds: float | None
    prefill_tokens: int
    rows: list[dict[str, Any]]

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds


@dataclass
class Summary:
    """Figures of a method in a category. None: not known, or not applicable."""

    method: str
    category: str
    synthetic: bool
    num_draft_tokens: int | str | None
    drafter: str | None
    calls: list[CallFigures]
    ratios: list[float] = field(default_factory=list)  # of tokens/s to the reference's, call by call
    ratios_to_plain: list[float] = field(default_factory=list)  # to those of our own plain decoding
    errors: int = 0

    @property
    def rows(self) -> list[dict[str, Any]]:
        return [row for call in self.calls for row in call.rows]

    @property
    def tokens_per_second(self) -> float:
        return sum(call.tokens for call in self.calls) / sum(call.seconds for call in self.calls)

    @property
    def decode_tokens_per_second(self) -> float | None:
        """Without reading the prompts, and without the tokens that came out of that."""
        known = [call for call in self.calls if call.prefill_seconds is not None]
        seconds = sum(call.seconds - (call.prefill_seconds or 0.0) for call in known)
        tokens = sum(call.tokens - call.prefill_tokens for call in known)
        return tokens / seconds if seconds > 0 and tokens > 0 else None

    @property
    def prefill_seconds(self) -> float | None:
        """Median of the calls."""
        known = [call.prefill_seconds for call in self.calls if call.prefill_seconds is not None]
        return statistics.median(known) if known else None

    def total(self, name: str) -> float | None:
        """Of a figure of the rows; None where one does not have it."""
        values = [row[name] for row in self.rows]
        return None if None in values or not values else sum(values)

    @property
    def acceptance(self) -> float | None:
        """Accepted / proposed draft tokens."""
        proposed, accepted = self.total("draft_tokens"), self.total("accepted_tokens")
        return accepted / proposed if proposed and accepted is not None else None

    @property
    def acceptance_per_position(self) -> list[float]:
        """[i]: of the rounds that proposed an (i+1)-th token, the share that took it.

        Older records do not tell how many rounds did, unless all drafts were first ones: there, the mean of the rows that had such
        rounds, weighted by all their rounds.
        """
        longest = max((len(row["acceptance_per_position"]) for row in self.rows), default=0)
        means = []
        for i in range(longest):
            having = [row for row in self.rows if len(row["acceptance_per_position"]) > i]
            rounds = [_rounds_that_proposed(row, i) for row in having]
            stood = sum(row["acceptance_per_position"][i] * n for row, n in zip(having, rounds, strict=True))
            means.append(stood / sum(rounds))
        return means

    @property
    def block_efficiency(self) -> float | None:
        """Tokens per target call."""
        tokens, rounds = self.total("new_tokens"), self.total("rounds")
        return tokens / rounds if rounds and tokens else None

    def parts_per_round(self) -> dict[str, float] | None:
        """Seconds of drafting, verification and all else in a round, mean of a call and median of the calls; None where a
        method does not tell.

        A batch goes through its rounds together, so they are those of its longest-running row. With several batches in a call
        rows come and go, and how many rounds there were is not known.
        """
        names = ("draft", "verify", "overhead")
        if any(len(call.rows) > call.rows[0]["contest"]["batch_size"] for call in self.calls):
            return None
        if not self.calls or any(row[f"{name}_seconds"] is None for row in self.rows for name in names):
            return None
        rounds = [max(row["rounds"] for row in call.rows) for call in self.calls]
        return {
            name: statistics.median(c.rows[0][f"{name}_seconds"] / r for c, r in zip(self.calls, rounds, strict=True))
            for name in names
        }

    @property
    def outside_forwards(self) -> float | None:
        """Share of the time of a call's rounds that is not spent in forward passes, median of the calls; None where it was not
        measured, which older records say by not having it.
        """
        shares = []
        for call in self.calls:
            forward = call.rows[0].get("forward_seconds")
            if forward is None or call.prefill_seconds is None:
                return None
            rounds = call.seconds - call.prefill_seconds
            shares.append((rounds - forward) / rounds)
        return statistics.median(shares) if shares else None

    def compared_with(self, plain: str) -> list[dict[str, Any] | None]:
        """For each row that was compared with a plain decoding: None where they are the same, else the difference."""
        return [row["differences"][plain] for row in self.rows if plain in row["differences"]]


def _rounds_that_proposed(row: Mapping[str, Any], position: int) -> int:
    """Rounds of a row in which a token at this position, counted from 0, was proposed."""
    if "rounds_per_position" in row:
        return int(row["rounds_per_position"][position])
    return int(row["draft_tokens"] if len(row["acceptance_per_position"]) == 1 else row["rounds"])


def summarize(records: Sequence[Mapping[str, Any]], relative_to: str) -> dict[Contest, list[Summary]]:
    """For each contest, the methods in each category, then over all; within a category in the order of the run.

    Args:
        records: as they are kept.
        relative_to: the method that ratios refer to.
    """
    found: dict[Contest, list[Summary]] = {}
    for contest in dict.fromkeys(Contest(**record["contest"]) for record in records):
        mine = [record for record in records if Contest(**record["contest"]) == contest]
        found[contest] = list(_of_contest(mine, relative_to))
    return found


def _of_contest(records: Sequence[Mapping[str, Any]], relative_to: str) -> Iterable[Summary]:
    by_method: dict[str, dict[tuple[Any, ...], list[dict[str, Any]]]] = {}
    for record in records:
        unit = (record["group"], record["turn"], record["repeat"])
        by_method.setdefault(record["method"], {}).setdefault(unit, []).append(dict(record))
    reference, plain = (_rates(by_method.get(name, {})) for name in (relative_to, OUR_PLAIN))
    categories = list(dict.fromkeys(record["group_category"] for record in records))
    for category in [*categories, ALL] if len(categories) > 1 else categories:
        for method, units in by_method.items():
            first = next(iter(units.values()))[0]
            summary = Summary(
                method, category, first["synthetic"], first["num_draft_tokens"], first["drafter"], calls=[]
            )
            for unit, rows in units.items():
                if category not in (ALL, rows[0]["group_category"]):
                    continue
                if rows[0]["error"] is not None:
                    summary.errors += 1
                    continue
                call = _figures(rows)
                summary.calls.append(call)
                if unit in reference:
                    summary.ratios.append(call.tokens_per_second / reference[unit])
                if unit in plain:
                    summary.ratios_to_plain.append(call.tokens_per_second / plain[unit])
            if summary.calls or summary.errors:
                yield summary


def _rates(units: Mapping[tuple[Any, ...], list[dict[str, Any]]]) -> dict[tuple[Any, ...], float]:
    """Tokens/s of each call that did not fail."""
    return {unit: _figures(rows).tokens_per_second for unit, rows in units.items() if rows[0]["error"] is None}


def _figures(rows: list[dict[str, Any]]) -> CallFigures:
    one = rows[0]
    return CallFigures(
        one["group_category"], one["seconds"], one["call_tokens"], one["prefill_seconds"], one["prefill_tokens"], rows
    )


def overall(summaries: Sequence[Summary]) -> list[Summary]:
    """Those over all categories (or over the only one)."""
    last = summaries[-1].category
    return [summary for summary in summaries if summary.category == last]
