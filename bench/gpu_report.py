"""`python -m bench.gpu_report --out DIR`: tests, microbenchmarks and goals on a GPU, in one report.

On a GPU every step has a process of its own and a time limit: one that crashes or hangs is noted, and the next one begins. The
same command resumes a report that is there: steps that are done are not run again, those that failed or were cut off come last,
and of their parts those that have figures are kept. The exit status is 1 while a step that was asked for is not done.

Needs torch, triton, transformers and pytest, and a checkout. Without a GPU it runs in a reduced form, in one process, and says so.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from bench import timing
from bench.figures import failure
from bench.out_file import check_out_folder
from bench.peers import PEERS
from bench.processes import limited
from bench.report import BEGUN, DONE, NAMES, Report, environment, gpu_state
from bench.steps import Step, plan

SECONDS = 540  # for a command, unless more are asked for
LEAST_SECONDS = 20  # in which a process of its own can do anything
PROGRAM = (sys.executable, "-X", "faulthandler", "-m", "bench.gpu_report")
SAME = ("device", "gpu", "driver", "code")  # of the environment, beside versions, in all that stands in one report


def execute(step: Step, report: Report) -> None:
    """Run a step in this process, and save what became of it."""
    start, before = time.monotonic(), gpu_state() if report.device == "cuda" else None
    report.steps[step.title] = {"outcome": BEGUN}
    report.save()
    try:
        failed = step.run(report)
        became = {"outcome": "failed", "error": f"parts failed: {', '.join(failed)}"} if failed else {"outcome": DONE}
    except Exception as error:
        became = {"outcome": "failed", **failure(error)}
    report.steps[step.title] = {**became, "seconds": round(time.monotonic() - start, 1)}
    if before is not None:
        report.steps[step.title] |= {"gpu_before": before, "gpu_after": gpu_state()}
    report.save()


def execute_apart(step: Step, report: Report) -> Report:
    """Run a step in a process of its own; returns the report as it is then."""
    start = time.monotonic()
    report.steps[step.title] = {"outcome": BEGUN}
    report.save()
    ended = limited([*PROGRAM, "--out", str(report.folder), "--step", step.title], report.seconds)
    report = Report.load(report.folder)
    if report.steps[step.title]["outcome"] == BEGUN:
        seconds = round(time.monotonic() - start, 1)
        outcome, error = "crashed", f"exit status {ended.code}"
        if ended.code is None:
            outcome, error = "cut off", f"not done after {seconds} s"
        became = {"outcome": outcome, "error": error, "seconds": seconds, "output": ended.tail}
        report.steps[step.title] = became
        report.save()
    return report


def run(report: Report, steps: Sequence[Step], *, seconds: float, apart: bool) -> Report:
    """Run the steps that are not done, and save after each.

    Args:
        seconds: after which nothing new is started and, where steps run apart, nothing is under way.
        apart: each in a process of its own.
    """
    start = time.monotonic()

    def progress(text: str) -> None:
        print(f"[{time.monotonic() - start:5.0f} s] {text}", flush=True)

    progress(f"{report.environment.get('gpu', 'no GPU: reduced form on CPU')}, report in {report.folder}")
    for step in sorted(steps, key=lambda step: step.title in report.steps):
        if report.is_done(step.title):
            continue
        left = start + seconds - time.monotonic()
        if left < (LEAST_SECONDS if apart else 0):
            progress(f"left out for lack of time: {step.title}")
            continue
        progress(step.title)
        report.seconds = min(step.seconds, left)
        if apart and not step.starts_process:
            report = execute_apart(step, report)
        else:
            execute(step, report)
        if not report.is_done(step.title):
            progress(f"{step.title} {report.steps[step.title]['outcome']}: {report.steps[step.title]['error']}")
    for goal in report.goals():
        measured = "" if goal["measured"] is None else f"{goal['measured']:.3g} {goal['unit']}, "
        print(f"  {goal['name']} ({goal['device']}): {measured}{goal['state']}, goal {goal['goal']}")
    return report


def begin(folder: Path, device: str, titles: Sequence[str], quick: bool, force: bool) -> Report:
    """A new report, or the one in the folder, if what it is of is the same.

    Raises:
        ValueError: if there is another one, or the folder cannot be written.
    """
    check_out_folder(folder)
    report = Report(folder, environment(device), titles, quick)
    existing = [name for name in NAMES if (folder / name).exists()]
    if force or not existing:
        report.peers = {peer.name: peer.available() or f"available, {peer.version()}" for peer in PEERS}
        if device == "cpu":
            report.tests = {"outcome": "not run: no GPU"}
        report.save()
        return report
    otherwise = "choose another --out, or begin anew with --force"
    try:
        before = Report.load(folder)
    except ValueError as error:
        raise ValueError(f"{folder} holds {' and '.join(existing)}, and {error}: {otherwise}") from error
    if others := differences(before, report):
        raise ValueError(f"{folder} holds a report of something else ({'; '.join(others)}): {otherwise}")
    return before


def differences(before: Report, now: Report) -> list[str]:
    """What keeps one from being continued by the other."""

    def facts(report: Report) -> dict[str, object]:
        found = {name: report.environment.get(name) for name in SAME}
        return {**found, **report.environment["versions"], "--quick": report.quick}

    there, here = facts(before), facts(now)
    names = [name for name in there | here if there.get(name) != here.get(name)]
    return [f"{name}: {there.get(name)} there, {here.get(name)} here" for name in names]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.gpu_report", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="for report.json and report.md; created")
    parser.add_argument("--quick", action="store_true", help="only what the goals need, with fewer repetitions")
    parser.add_argument(
        "--only", nargs="+", metavar="TITLE", help="these steps, this time; another title lists all there are"
    )
    parser.add_argument("--seconds", type=float, default=SECONDS, metavar="S", help="for this command (%(default)s)")
    parser.add_argument("--force", action="store_true", help="begin anew, whatever report is there")
    parser.add_argument("--step", metavar="TITLE", help="one step of a report that is there, in this process")
    options = parser.parse_args(arguments)
    folder: Path = options.out.expanduser().resolve()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    timing.use_all_cores()
    if options.step is not None:
        report = Report.load(folder)
        (step,) = (step for step in plan(report.device, report.quick) if step.title == options.step)
        execute(step, report)
        return 0  # what became of it is in the report
    steps = plan(device, options.quick)
    titles = [step.title for step in steps]
    if unknown := [title for title in options.only or () if title not in titles]:
        parser.error(f"--only: there is no step {unknown[0]!r}; there are:\n  " + "\n  ".join(titles))
    try:
        report = begin(folder, device, titles, options.quick, options.force)
    except ValueError as error:
        parser.error(str(error))
    chosen = [step for step in steps if options.only is None or step.title in options.only]
    report = run(report, chosen, seconds=options.seconds, apart=device == "cuda")
    return 0 if all(report.is_done(step.title) for step in chosen) else 1


if __name__ == "__main__":
    sys.exit(main())
