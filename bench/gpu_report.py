"""`python -m bench.gpu_report --out DIR [--quick]`: tests, microbenchmarks and goals on a GPU, in one report.

Needs torch, triton, transformers and pytest, and a checkout. Without a GPU it runs in a reduced form and says so.
"""

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from bench import end_to_end, timing
from bench.cases import Case, all_cases
from bench.measure import contest
from bench.peers import PEERS, Compiled, Peer, Transformers
from bench.report import NAMES, ROOT, Report

SECONDS = 400  # after which nothing new is started, unless more are asked for
GPU_CASE = Case(batch=64, num_drafts=4, vocab_size=151936)  # the shape that the goals are for
GOAL_CASES = ("one-hot", "full", "block", "coupled", "greedy", "one-hot, top-p 0.9", "full, top-p 0.9")
CPU_VOCAB_SIZES = (32000, 49152, 128256, 151936)
TEST_SECONDS = 1200  # at most; the first time, several hundred compilations are among them

Step = tuple[str, Callable[[Report], None]]


def gpu_contest(batch: int, names: Collection[str], peers: Sequence[Peer], *, repeats: int, seconds: float) -> Step:
    """Cases of `all_cases` by name, and the peers, at one batch size."""

    def run(report: Report) -> None:
        cases = all_cases(batch, GPU_CASE.num_drafts, GPU_CASE.vocab_size)
        chosen = {name: cases[name] for name in names}
        those = [peer for peer in peers if batch == 1 or not peer.per_row]
        report.records += contest(chosen, those, device="cuda", repeats=repeats, seconds=seconds)

    return f"{len(names)} cases and {len(peers)} peers at B = {batch}", run


def cpu_contest(batch: int, vocab_size: int, dtype: torch.dtype, *, repeats: int, seconds: float) -> Step:
    """Ours against transformers. At temperature 1, which costs transformers nothing."""
    case = Case(batch, 4, vocab_size, temperature=1.0, dtype=dtype)

    def run(report: Report) -> None:
        report.records += contest({"full": case}, [Transformers()], device="cpu", repeats=repeats, seconds=seconds)

    return f"against transformers, {case.shape}", run


def gpu_tests(report: Report) -> None:
    """The tests that need a GPU, in a process of their own: whatever they do, the report goes on."""
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-q", "--no-header", "--continue-on-collection-errors"]
    start = time.monotonic()
    limit = max(30.0, min(TEST_SECONDS, report.deadline - start))
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    try:
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=limit)
        output, code = done.stdout + done.stderr, done.returncode
        outcome = {0: "passed", 5: "no tests were found"}.get(code, f"failed (exit status {code})")
    except subprocess.TimeoutExpired as error:
        output = error.stdout.decode(errors="replace") if isinstance(error.stdout, bytes) else error.stdout or ""
        code, outcome = None, f"not finished after {limit:.0f} s"
    seconds = round(time.monotonic() - start, 1)
    report.tests = {"outcome": f"{outcome}, {seconds} s", "exit_status": code, "tail": output.splitlines()[-25:]}


def end_to_end_case(case: tuple[str, Callable[[str], Any]]) -> Step:
    title, function = case

    def run(report: Report) -> None:
        report.end_to_end[title] = function(report.device)

    return title, run


def plan(device: str, quick: bool, tests: bool = True) -> Iterator[Step]:
    """What is run, the most wanted first; tests last, as they compile every variant of every kernel, for minutes."""
    if device == "cuda":
        peers = [peer for peer in PEERS if not (quick and isinstance(peer, Compiled))]
        repeats, seconds = (30, 15.0) if quick else (60, 30.0)
        for batch in (64, 1):
            yield gpu_contest(batch, GOAL_CASES, peers, repeats=repeats, seconds=seconds)
        yield from map(end_to_end_case, end_to_end.CASES.items())
        names = list(all_cases(1, GPU_CASE.num_drafts, GPU_CASE.vocab_size))
        others = [name for name in names if name not in GOAL_CASES]
        for batch, more in () if quick else ((64, others), (1, others), (8, names), (256, names)):
            yield gpu_contest(batch, more, [], repeats=30, seconds=seconds)
        if tests:
            yield "tests on the GPU", gpu_tests
    else:
        repeats, seconds = (7, 1.0) if quick else (25, 3.0)
        for batch in (1, 8):
            for dtype in (torch.bfloat16, torch.float32):
                for vocab_size in CPU_VOCAB_SIZES:
                    yield cpu_contest(batch, vocab_size, dtype, repeats=repeats, seconds=seconds)
        yield from map(end_to_end_case, end_to_end.CASES.items())


def run(folder: Path, *, quick: bool, tests: bool = True, seconds: float | None = None) -> Report:
    """Run the plan and save after every step. A step that fails becomes a note.

    Args:
        quick: only what the goals need, with fewer repetitions.
        tests: also those that need a GPU, if there is one.
        seconds: after which nothing new is started; None: `SECONDS`.
    """
    start = time.monotonic()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    timing.use_all_cores()
    report = Report(folder, device, deadline=start + (SECONDS if seconds is None else seconds))

    def progress(text: str) -> None:
        print(f"[{time.monotonic() - start:5.0f} s] {text}", flush=True)

    progress(f"{report.environment.get('gpu', 'no GPU: reduced form on CPU')}, report in {folder}")
    report.peers = {peer.name: peer.available() or f"available, {peer.version()}" for peer in PEERS}
    if device == "cpu":
        report.tests = {"outcome": "not run: no GPU"}
    report.save()
    for title, step in plan(device, quick, tests):
        if time.monotonic() > report.deadline:
            report.notes.append(f"left out for lack of time: {title}")
            continue
        progress(title)
        try:
            step(report)
        except Exception as error:
            report.notes.append(f"{title} failed: {type(error).__name__}: {error}")
            progress(report.notes[-1])
        report.save()
    report.complete = True
    report.save()
    for goal in report.goals():
        measured = "not measured" if goal["measured"] is None else f"{goal['measured']:.3g} {goal['unit']}"
        print(f"  {goal['name']} ({goal['device']}): {measured}, goal {goal['goal']}")
    return report


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu_report", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="for report.json and report.md; created")
    parser.add_argument("--quick", action="store_true", help="only what the goals need, with fewer repetitions")
    parser.add_argument("--no-tests", action="store_true", help="figures only: `pytest -m gpu` is run by hand")
    parser.add_argument(
        "--seconds", type=float, metavar="S", help=f"start nothing new after so long (default: {SECONDS})"
    )
    parser.add_argument("--force", action="store_true", help="overwrite a report that is there")
    options = parser.parse_args(arguments)
    folder: Path = options.out.expanduser().resolve()
    existing = [name for name in NAMES if (folder / name).exists()]
    if existing and not options.force:
        parser.error(f"{folder} holds {' and '.join(existing)} already: choose another --out, or add --force")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / ".report.json.partial"
        probe.touch()
        probe.unlink()
    except OSError as error:
        parser.error(f"--out {folder} cannot be written: {error.strerror}")
    run(folder, quick=options.quick, tests=not options.no_tests, seconds=options.seconds)


if __name__ == "__main__":
    main()
