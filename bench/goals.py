"""What the kernels are meant to reach, and whether they do."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from bench.measure import Record, ratio_to

Measure = Callable[[Sequence[Record]], float | None]
GPU_SHAPE = "K=4 V=151936 bf16"  # behind "B=... "


@dataclass(frozen=True)
class Goal:
    name: str
    limit: float
    unit: str
    measure: Measure
    at_most: bool = False
    needs_gpu: bool = True

    def outcome(self, records: Sequence[Record], on_gpu: bool) -> dict[str, Any]:
        """Goal, measured, met (None: not measured), ready for the report."""
        measured = self.measure(records) if on_gpu == self.needs_gpu else None
        met = None
        if measured is not None:
            met = measured <= self.limit if self.at_most else measured >= self.limit
        sign = "<=" if self.at_most else ">="
        where = "GPU" if self.needs_gpu else "CPU"
        return dict(
            name=self.name, goal=f"{sign} {self.limit:g} {self.unit}", unit=self.unit, device=where,
            measured=measured, met=met,
        )  # fmt: skip


def _of(records: Sequence[Record], batch: int) -> list[Record]:
    return [r for r in records if r.shape == f"B={batch} {GPU_SHAPE}" and r.median is not None]


def _graph(name: str, batch: int, field: str = "median") -> Measure:
    """A field of the graph replay of one of ours."""

    def measure(records: Sequence[Record]) -> float | None:
        found = [r for r in _of(records, batch) if r.name == name and r.mode == "graph"]
        return getattr(found[0], field) if found else None

    return measure


def _ours_to_ours(name: str, base: str) -> Measure:
    """How many times as long one of ours takes as another, at B = 64."""
    return lambda records: ratio_to(name, _of(records, 64), ours=base)


def _against(peer: str, batch: int) -> Measure:
    return lambda records: ratio_to(peer, _of(records, batch))


def cpu_ratio(batch: int) -> Measure:
    """The lowest ratio to transformers over the shapes of a batch size."""

    def measure(records: Sequence[Record]) -> float | None:
        shapes = {r.shape for r in records if r.batch == batch}
        ratios = [ratio_to("transformers", [r for r in records if r.shape == shape]) for shape in shapes]
        return min((ratio for ratio in ratios if ratio is not None), default=None)

    return measure


GOALS = (
    Goal("one-hot, B=64", 28, "us", _graph("one-hot", 64), at_most=True),
    Goal("one-hot, B=64, of copy bandwidth", 0.8, "x", _graph("one-hot", 64, "share_of_copy")),
    Goal("coupled, B=64", 28, "us", _graph("coupled", 64), at_most=True),
    Goal("coupled, B=64, of copy bandwidth", 0.8, "x", _graph("coupled", 64, "share_of_copy")),
    Goal("rejection with full q, B=64", 34, "us", _graph("full", 64), at_most=True),
    Goal("one-hot, B=1", 6, "us", _graph("one-hot", 1), at_most=True),
    Goal("rejection with full q, B=1", 9, "us", _graph("full", 1), at_most=True),
    Goal("top-p 0.9 against unfiltered, one-hot, B=64", 1.6, "x", _ours_to_ours("one-hot, top-p 0.9", "one-hot"), True),
    Goal("top-p 0.9 against unfiltered, full q, B=64", 1.6, "x", _ours_to_ours("full, top-p 0.9", "full"), True),
    Goal("block against rejection, B=64", 2, "x", _ours_to_ours("block", "full"), at_most=True),
    Goal("faster than vLLM's fused sampler, T=0.7, B=64", 4.5, "x", _against("vllm fused", 64)),
    Goal("faster than FlashInfer softmax + chain, B=64", 8, "x", _against("flashinfer", 64)),
    Goal("faster than transformers, B=1", 15, "x", _against("transformers", 1)),
    Goal("transformers' time to ours, B=1, lowest over V", 1, "x", cpu_ratio(1), needs_gpu=False),
    Goal("transformers' time to ours, B=8, lowest over V", 3, "x", cpu_ratio(8), needs_gpu=False),
)
