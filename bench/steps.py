"""The steps of the GPU report, the most wanted first."""

import importlib.util
import os
import sys
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from bench import end_to_end
from bench.cases import Case, all_cases
from bench.figures import Figures, gpu_is_lost
from bench.measure import contest
from bench.peers import PEERS, Compiled, Peer, Transformers
from bench.processes import limited
from bench.report import Report

GPU_CASE = Case(batch=64, num_drafts=4, vocab_size=151936)  # the shape that the goals are for
GOAL_CASES = (
    "one-hot", "full", "full, no draft stats", "block", "coupled", "greedy", "one-hot, top-p 0.9", "full, top-p 0.9",
)  # fmt: skip
CPU_VOCAB_SIZES = (32000, 49152, 128256, 151936)
TESTS = "tests on the GPU"
STEP_SECONDS = 200  # at most for a step; parts that are measured by then are kept
TEST_SECONDS = 300  # for the tests, most of which goes into compiling kernels the first time
MOST_WORKERS = 8  # processes of the tests; each holds a CUDA context
MOST_FAILURES = 20
SUMMARY_SECONDS = 20  # in which tests that are interrupted say which have failed; pytest-xdist waits 10 for its workers


@dataclass(frozen=True)
class Step:
    """A part of the report that is done or not.

    Attributes:
        run: adds to the report what it measures; returns the names of its parts that failed.
        seconds: at most.
        starts_process: by itself, so that it needs no other.
    """

    title: str
    run: Callable[[Report], Sequence[str]]
    seconds: float = STEP_SECONDS
    starts_process: bool = False


def gpu_contest(
    title: str, batch: int, names: Collection[str], peers: Sequence[Peer], *, repeats: int, seconds: float
) -> Step:
    """Cases of `all_cases` by name, and the peers, at one batch size. Who failed in an earlier run does not spoil this one."""
    cases = all_cases(batch, GPU_CASE.num_drafts, GPU_CASE.vocab_size)
    shape = cases["full"].shape

    def run(report: Report) -> list[str]:
        failed = {record.name for record in report.records if record.shape == shape and record.error}
        those = [peer for peer in peers if (batch == 1 or not peer.per_row) and peer.name not in failed]
        new = {name: cases[name] for name in names if name not in failed | measured(report)}
        alone = [{name: cases[name]} for name in names if name in failed]
        for ours, met in (*([(new, those)] if new else []), *((each, []) for each in alone)):
            options: dict[str, Any] = dict(device="cuda", repeats=repeats, seconds=seconds, peers_case=cases["full"])
            report.add(contest(ours, met, **options))
            report.save()
            if gpu_is_lost():
                break
        return [name for name in names if name not in measured(report)]

    def measured(report: Report) -> set[str]:
        those = [record for record in report.records if record.shape == shape]
        return {r.name for r in those if r.median is not None} - {r.name for r in those if r.error}

    return Step(title, run)


def cpu_contest(batch: int, vocab_size: int, dtype: torch.dtype, *, repeats: int, seconds: float) -> Step:
    """Ours against transformers. At temperature 1, which costs transformers nothing."""
    case = Case(batch, 4, vocab_size, temperature=1.0, dtype=dtype)

    def run(report: Report) -> list[str]:
        records = contest({"full": case}, [Transformers()], device="cpu", repeats=repeats, seconds=seconds)
        report.add(records)
        return [record.name for record in records if record.error]

    return Step(f"against transformers, {case.shape}", run)


def gpu_tests(report: Report) -> list[str]:
    """The tests that need a GPU. That some fail is a result: the step is done when they have been run."""
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-q", "--no-header", "--continue-on-collection-errors"]
    command += [f"--maxfail={MOST_FAILURES}"]
    if importlib.util.find_spec("xdist") is not None:
        command += ["-n", str(min(MOST_WORKERS, os.cpu_count() or 1)), "--dist", "worksteal"]
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    start = time.monotonic()
    ended = limited(command, report.seconds, environment, interrupt=SUMMARY_SECONDS)
    outcome = {0: "passed", 5: "no tests were found", None: "not finished"}.get(
        ended.code, f"failed (exit status {ended.code})"
    )
    seconds = round(time.monotonic() - start, 1)
    report.tests = {"outcome": f"{outcome}, {seconds} s", "exit_status": ended.code, "tail": ended.tail}
    return ["not finished"] if ended.code is None else []


def end_to_end_case(title: str, case: Callable[[str, Figures], None]) -> Step:
    def run(report: Report) -> list[str]:
        report.end_to_end[title] = figures = Figures(report.end_to_end.get(title), report.save)
        case(report.device, figures)
        return figures.failed

    return Step(title, run)


def plan(device: str, quick: bool) -> list[Step]:
    """All steps, the most wanted first.

    Tests come behind the two contests that the goals are for, which check what they time and leave the kernels compiled, and
    before the generations, whose figures say little where tests fail.
    """
    cases = [end_to_end_case(title, case) for title, case in end_to_end.CASES.items()]
    if device == "cuda":
        peers = [peer for peer in PEERS if not (quick and isinstance(peer, Compiled))]
        repeats, seconds = (30, 15.0) if quick else (60, 30.0)
        steps = [
            gpu_contest(f"kernels, B = {batch}", batch, GOAL_CASES, peers, repeats=repeats, seconds=seconds)
            for batch in (64, 1)
        ]
        steps += [Step(TESTS, gpu_tests, TEST_SECONDS, starts_process=True), *cases]
        names = list(all_cases(1, GPU_CASE.num_drafts, GPU_CASE.vocab_size))
        others = [name for name in names if name not in GOAL_CASES]
        for batch, more in () if quick else ((64, others), (1, others), (8, names), (256, names)):
            title = f"other kernels, B = {batch}"
            steps.append(gpu_contest(title, batch, more, [], repeats=30, seconds=seconds))
        return steps
    repeats, seconds = (7, 1.0) if quick else (25, 3.0)
    return [
        *(
            cpu_contest(batch, vocab_size, dtype, repeats=repeats, seconds=seconds)
            for batch in (1, 8)
            for dtype in (torch.bfloat16, torch.float32)
            for vocab_size in CPU_VOCAB_SIZES
        ),
        *cases,
    ]
