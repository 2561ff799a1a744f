"""What the kernels and whole generations are meant to reach, and whether they do."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bench.attention_cases import GOAL_CASE
from bench.measure import Record, ratio_to


@dataclass(frozen=True)
class Results:
    """What a run has measured: of kernels, and by title of the cases in bench/end_to_end.py."""

    records: Sequence[Record]
    end_to_end: Mapping[str, Any]


Measure = Callable[[Results], float | None]
GPU_SHAPE = "K=4 V=151936 bf16"  # behind "B=... "


@dataclass(frozen=True)
class Goal:
    """A number to reach.

    Attributes:
        measure: finds what was measured in a report's results, or nothing.
        at_most: the limit is the most that is allowed; else the least.
    """

    name: str
    limit: float
    unit: str
    measure: Measure
    at_most: bool = False
    needs_gpu: bool = True
    card: str | None = None  # the only one that the limit is for

    def outcome(self, results: Results, gpu: str | None) -> dict[str, Any]:
        """Goal, measured, met (None: not known), and the state in words, ready for the report.

        Args:
            gpu: its name; None: the results are a CPU's.
        """
        measured = self.measure(results) if (gpu is not None) == self.needs_gpu else None
        met, state = None, "not measured"
        if measured is not None and self.card is not None and self.card not in (gpu or ""):
            state = f"not comparable ({gpu})"
        elif measured is not None:
            met = measured <= self.limit if self.at_most else measured >= self.limit
            state = "met" if met else "not met"
        sign = "<=" if self.at_most else ">="
        where = "GPU" if self.needs_gpu else "CPU"
        return dict(
            name=self.name, goal=f"{sign} {self.limit:g} {self.unit}", unit=self.unit, device=where,
            measured=measured, met=met, state=state,
        )  # fmt: skip


def _of(results: Results, batch: int) -> list[Record]:
    return [r for r in results.records if r.shape == f"B={batch} {GPU_SHAPE}" and r.median is not None]


def _graph(name: str, batch: int, field: str = "median") -> Measure:
    """A field of the graph replay of one of ours."""

    def measure(results: Results) -> float | None:
        found = [r for r in _of(results, batch) if r.name == name and r.mode == "graph"]
        return getattr(found[0], field) if found else None

    return measure


def _microseconds(name: str, limit: float, case: str, batch: int) -> Goal:
    """Of one of ours, on the card whose bandwidth the limit was worked out for."""
    return Goal(name, limit, "us", _graph(case, batch), at_most=True, card="H200")


def _ours_to_ours(name: str, base: str) -> Measure:
    """How many times as long one of ours takes as another, at B = 64."""
    return lambda results: ratio_to(name, _of(results, 64), ours=base)


def _against(peer: str, batch: int, ours: str = "full") -> Measure:
    return lambda results: ratio_to(peer, _of(results, batch), ours)


def cpu_ratio(batch: int) -> Measure:
    """The lowest ratio to transformers over the shapes of a batch size."""

    def measure(results: Results) -> float | None:
        records = [r for r in results.records if r.batch == batch]
        ratios = [ratio_to("transformers", [r for r in records if r.shape == s]) for s in {r.shape for r in records}]
        return min((ratio for ratio in ratios if ratio is not None), default=None)

    return measure


def _figure(*path: str) -> Measure:
    """Of an end-to-end case: its title, and where the figure is in what it returns."""

    def measure(results: Results) -> float | None:
        place: Any = results.end_to_end
        for name in path:
            place = place.get(name) if isinstance(place, Mapping) else None
        found: float | None = place
        return found

    return measure


def _attention(name: str) -> Measure:
    """A figure of ragged attention in the shape that the goals are for."""
    return _figure("ragged attention", GOAL_CASE.shape, name)


GOALS = (
    _microseconds("one-hot, B=64", 28, "one-hot", 64),
    Goal("one-hot, B=64, of copy bandwidth", 0.8, "x", _graph("one-hot", 64, "share_of_copy")),
    _microseconds("coupled, B=64", 28, "coupled", 64),
    Goal("coupled, B=64, of copy bandwidth", 0.8, "x", _graph("coupled", 64, "share_of_copy")),
    _microseconds("rejection with full q, B=64", 34, "full", 64),
    _microseconds("one-hot, B=1", 6, "one-hot", 1),
    _microseconds("rejection with full q, B=1", 9, "full", 1),
    Goal("top-p 0.9 against unfiltered, one-hot, B=64", 1.6, "x", _ours_to_ours("one-hot, top-p 0.9", "one-hot"), True),
    Goal("top-p 0.9 against unfiltered, full q, B=64", 1.6, "x", _ours_to_ours("full, top-p 0.9", "full"), True),
    Goal("block against rejection, B=64", 2, "x", _ours_to_ours("block", "full"), at_most=True),
    Goal("faster than vLLM's fused sampler, T=0.7, B=64", 4.5, "x", _against("vllm fused", 64)),
    Goal("faster than FlashInfer, softmax of both and chain, ours without draft stats, B=64", 8, "x",
         _against("flashinfer", 64, "full, no draft stats")),
    Goal("faster than transformers, B=1", 15, "x", _against("transformers", 1)),
    Goal("plain decoding, 8B, B=1, after 513 tokens, of copy bandwidth", 0.75, "x",
         _figure("plain decoding", "8B", "share_of_copy_bandwidth")),
    Goal("plain decoding, 1B, B=1, to eager `generate`", 2, "x", _figure("plain decoding", "1B", "ratio")),
    Goal("synthetic acceptance 0.8, K=5, B=1, speedup to theory's", 0.9, "x",
         _figure("synthetic acceptance 0.8, K = 5", "share_of_theory")),
    Goal("host time between rounds, n-gram", 100, "us", _figure("host time", "ngram", "host_us"), at_most=True),
    Goal("host time between rounds, draft model", 100, "us", _figure("host time", "draft model", "host_us"), at_most=True),
    Goal("waits inside rounds, n-gram", 0, "waits", _figure("host time", "ngram", "waits_inside_rounds"), at_most=True),
    Goal("waits inside rounds, draft model", 0, "waits", _figure("host time", "draft model", "waits_inside_rounds"),
         at_most=True),
    Goal(f"ragged attention, {GOAL_CASE.shape}, of copy bandwidth", 0.8, "x", _attention("share_of_copy")),
    Goal(f"ragged attention, {GOAL_CASE.shape}, masked SDPA's time to ours", 3, "x", _attention("sdpa_to_ours")),
    Goal('"auto" to plain where no draft stands, B from 1 to 64, lowest, learning included', 0.98, "x",
         _figure('"auto" against plain', "lowest_all_runs")),
    Goal("warm-up of 4 buckets, kernels compiled before, K=5", 30, "s",
         _figure("warm-up of 4 buckets", "K=5", "seconds"), at_most=True),
    Goal('warm-up of 4 buckets, kernels compiled before, "auto"', 30, "s",
         _figure("warm-up of 4 buckets", "K=auto", "seconds"), at_most=True),
    Goal("transformers' time to ours, B=1, lowest over V", 1, "x", cpu_ratio(1), needs_gpu=False),
    Goal("transformers' time to ours, B=8, lowest over V", 3, "x", cpu_ratio(8), needs_gpu=False),
)  # fmt: skip
