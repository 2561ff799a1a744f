"""The report as Markdown: short, where the JSON has all."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from bench.measure import Record

if TYPE_CHECKING:
    from bench.report import Report

METHOD = """\
Times are medians in microseconds per call, with the 20th and 80th percentile over repetitions; contenders of one shape
take turns within one run, and every result is checked before it is timed. *graph*: at least 20 calls in one CUDA graph,
the time of a replay divided by their number; *eager*: calls launched one after another from Python. On a GPU, inputs
of which a call reads less than four times the L2 cache are used in turn with copies of themselves that are as much together,
so that each call reads from memory; where a model has just written its logits, they may still lie in the cache, and the call
be faster. GB/s: the bytes that the kernel may move at most, divided by its time; *of copy*: that as a part of what a copy of
as many bytes (read and written) reaches in the same run. A ratio in a goal compares each contender's better mode. Clocks
are as the machine sets them; on CPU, a load average at the start that is not near 0 means that others were at work, and
that the figures say little."""


def markdown(report: "Report") -> str:
    facts = {key: value for key, value in report.environment.items() if key != "versions" and value not in (None, {})}
    facts |= report.environment["versions"]
    state = []
    if not report.complete:
        state += ["**Not complete: the same command goes on with the steps that are not done.**", ""]
    if report.device != "cuda":
        state += ["**No GPU was found: this is the reduced form on CPU. Goals for a GPU are not measured.**", ""]
    return "\n".join([
        "# Benchmark report", "", *state,
        "## Environment", "", *table(["", ""], [[key, str(value)] for key, value in facts.items()]), "",
        "## Goals", "", GOALS_ARE_FOR, "", *_goal_table(report), "",
        "## Steps", "", *_step_table(report), "",
        "## Tests on the GPU", "", *_test_lines(report), "",
        "## Measurements", "", *table(HEADER, map(cells, report.records)), "", METHOD, "",
        "## Peers", "", *table(["peer", "state"], [list(item) for item in report.peers.items()]), "",
        "Their times to ours:", "", *_ratio_table(report), "",
        "## End to end", "", *(list(_figures(report.end_to_end)) or ["None were run."]), "",
    ])  # fmt: skip


GOALS_ARE_FOR = """\
Those for a GPU are for bf16; of verification, for V = 151936 and K = 4. Times in microseconds are for an H200, and not
comparable elsewhere."""


def _goal_table(report: "Report") -> list[str]:
    rows = [
        [g["name"], g["device"], g["goal"], "" if g["measured"] is None else f"{g['measured']:.3g} {g['unit']}",
         "**not met**" if g["state"] == "not met" else g["state"]]
        for g in report.goals()
    ]  # fmt: skip
    return table(["", "on", "goal", "measured", ""], rows)


def _step_table(report: "Report") -> list[str]:
    """With the clocks of the GPU before and after each; tracebacks and what a process wrote last are in the JSON."""

    def clocks(step: Mapping[str, Any], when: str) -> str:
        state = step.get(f"gpu_{when}") or {}
        return ", ".join(state.get(name, "") for name in ("clocks.sm", "clocks.mem", "power.limit")) if state else ""

    rows = []
    for title in report.plan:
        step = report.steps.get(title, {"outcome": "not run"})
        seconds = f"{step['seconds']:.0f}" if "seconds" in step else ""
        rows.append(
            [title, step["outcome"], seconds, clocks(step, "before"), clocks(step, "after"), step.get("error", "")]
        )
    header = ["", "outcome", "s", "before: SM, memory, power limit", "after", "error"]
    return table(header, rows)


def _test_lines(report: "Report") -> list[str]:
    lines = [f"`pytest -m gpu`: {report.tests['outcome']}"]
    if tail := report.tests.get("tail"):
        lines += ["", "```", *tail, "```"]
    return lines


def _ratio_table(report: "Report") -> list[str]:
    def number(value: float | None) -> str:
        return "" if value is None else f"{value:.3g}"

    rows = [
        [r["shape"], r["peer"], r["ours"], number(r["best"]), number(r["eager"]), number(r["graph"])]
        for r in report.ratios()
    ]
    return table(["shape", "peer", "ours", "each at its best", "both eager", "both graphs"], rows)


def _figures(figures: Mapping[str, Any], depth: int = 0) -> Iterator[str]:
    """A line for each case and for each of its parts."""
    for name, value in figures.items():
        if not isinstance(value, Mapping) or not value:
            continue
        plain = {key: each for key, each in value.items() if not isinstance(each, Mapping) and key != "traceback"}
        told = ", ".join(f"{key}: {_short(each)}" for key, each in plain.items())
        yield f"{'  ' * depth}- **{name}**" + (f": {told}" if told else "")
        yield from _figures(value, depth + 1)


def _short(value: Any) -> str:
    if isinstance(value, list):
        return " / ".join(map(_short, value))
    return f"{value:.4g}" if isinstance(value, float) else str(value) if isinstance(value, str) else json.dumps(value)


HEADER = ["shape", "who", "mode", "median", "p20", "p80", "GB/s", "of copy", "note"]


def cells(record: Record) -> list[str]:
    """A record as a row under HEADER."""
    times = [f"{t:.1f}" if t is not None else "" for t in (record.median, record.p20, record.p80)]
    speed = f"{record.gb_per_s:.3g}" if record.gb_per_s else ""
    share = f"{record.share_of_copy:.0%}" if record.share_of_copy else ""
    return [record.shape, record.name, record.mode, *times, speed, share, record.error or ""]


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Lines of a Markdown table."""
    lines = [list(header), ["---"] * len(header), *[[cell.replace("|", "\\|") for cell in row] for row in rows]]
    return [f"| {' | '.join(line)} |" for line in lines]
