"""Options of `pytest bench`, and a table of what its benchmarks took."""

from collections.abc import Iterator
from typing import Any

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="the whole matrix, which takes hours")


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    session = getattr(config, "_benchmarksession", None)  # none under `-p no:benchmark`
    for line in quantile_lines(session.benchmarks if session else []):
        terminalreporter.write_line(line)


def quantile_lines(benchmarks: list[Any]) -> Iterator[str]:
    """Median, p20 and p80 of the benchmarks that say what theirs are; pytest-benchmark shows only the median."""
    timed = [each for each in benchmarks if each and "p20_us" in each.extra_info]
    if not timed:
        return
    width = max(len(each.name) for each in timed)
    yield ""
    yield f"{'us per call':{width}} {'p20':>11} {'median':>11} {'p80':>11}"
    for each in timed:
        p20, median, p80 = each.extra_info["p20_us"], 1e6 * each.stats.median, each.extra_info["p80_us"]
        yield f"{each.name:{width}} {p20:11,.1f} {median:11,.1f} {p80:11,.1f}"
