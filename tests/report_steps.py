"""The GPU report's program with steps of its own, that end in all ways: what tests/test_gpu_report.py runs in processes."""

import os
import signal
import sys
import time
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parent.parent))  # run as a program, which knows its own folder alone

from bench import gpu_report
from bench.figures import Figures
from bench.report import Report
from bench.steps import Step, end_to_end_case

mended = False  # no step fails any more


def raises(report: Report) -> list[str]:
    if not mended:
        raise RuntimeError("out of luck")
    return []


def dies(device: str, figures: Figures) -> None:
    """Between two of its parts."""

    def last() -> int:
        if not mended:
            print("these are its last words", flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        return os.getpid()

    figures.measure({"first": os.getpid, "last": last})


def hangs(report: Report) -> list[str]:
    time.sleep(0 if mended else 1000)
    return []


def fine(device: str, figures: Figures) -> None:
    figures["pid"] = os.getpid()


def plan(device: str, quick: bool) -> list[Step]:
    return [
        Step("raises", raises), end_to_end_case("dies", dies), Step("hangs", hangs, seconds=2), end_to_end_case("fine", fine),
    ]  # fmt: skip


if __name__ == "__main__":
    gpu_report.plan = plan
    gpu_report.main()
