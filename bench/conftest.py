"""What the benchmarks of `pytest bench` share: options, how a call is timed, and a table of what they took."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from bench.report import environment
from bench.timing import Timing, use_all_cores

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(scope="session")
def facts() -> dict[str, Any]:
    """Device, driver and versions, with as many threads as there are cores."""
    use_all_cores()
    return environment(DEVICE)


@pytest.fixture
def timed(benchmark: Any, facts: dict[str, Any]) -> Callable[..., None]:
    """Lets pytest-benchmark time a call, the wait for the device included; keywords go into the JSON that it writes."""

    def time_call(call: Callable[[], Any], **told: Any) -> None:
        def run() -> None:
            call()
            if DEVICE == "cuda":
                torch.cuda.synchronize()

        benchmark.extra_info.update(facts, **told)
        benchmark(run)
        if benchmark.stats is not None:  # None under --benchmark-disable
            result = Timing.of(benchmark.stats.stats.data)
            benchmark.extra_info.update(p20_us=1e6 * result.p20, p80_us=1e6 * result.p80)

    return time_call


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
