"""The report of a run: what was measured, on what, as JSON and as Markdown."""

import json
import os
import platform
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from bench.goals import GOALS, Results
from bench.measure import Record

ROOT = Path(__file__).resolve().parent.parent
NAMES = ("report.json", "report.md")
METHOD = """\
Times are medians in microseconds per call, with the 20th and 80th percentile over repetitions; contenders of one shape
take turns within one run, and every result is checked before it is timed. *graph*: at least 20 calls in one CUDA graph,
the time of a replay divided by their number; *eager*: calls launched one after another from Python. On a GPU, inputs
smaller than twice the L2 cache are used in turn with copies of themselves, so that each call reads from memory; where a
model has just written its logits, they may still lie in the cache, and the call be faster. GB/s: the bytes that the
kernel may move at most, divided by its time; *of copy*: that as a part of what a copy of as many bytes (read and written)
reaches in the same run. A ratio compares each contender's better mode. Clocks are as the machine sets them; on CPU, a
load average at the start that is not near 0 means that others were at work, and that the figures say little."""


def environment(device: str) -> dict[str, Any]:
    """Device, driver, versions and date."""
    versions = {"python": platform.python_version(), "cuda": torch.version.cuda, "hip": torch.version.hip}
    versions["torch"] = torch.__version__  # with what it was built for
    for package in ("triton", "transformers", "pytest", "pytest-benchmark", "vllm", "flashinfer-python"):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = None
    found: dict[str, Any] = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": device,
        "commit": _first_line("git", "-C", str(ROOT), "rev-parse", "HEAD"),
        "cpu": f"{_processor()}, {os.cpu_count()} cores, {torch.get_num_threads()} threads",
        "load_average": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
        "versions": {name: value for name, value in versions.items() if value is not None},
    }
    if device == "cuda":
        properties = torch.cuda.get_device_properties(0)
        found |= {
            "gpu": properties.name,
            "driver": _first_line("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
            "gpu_memory_gib": round(properties.total_memory / 2**30, 1),
            "l2_mib": round(properties.L2_cache_size / 2**20, 1),
            "multiprocessors": properties.multi_processor_count,
        }
    return found


def _processor() -> str:
    """Its architecture, the widest instructions that torch uses on it, and those for bf16, whose times differ manifold by them."""
    capabilities: Mapping[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()  # torch 2.11 has none
    names = [torch.backends.cpu.get_cpu_capability()]
    names += [name for name in ("avx512_bf16", "amx_bf16") if capabilities.get(name)]
    return f"{platform.processor() or platform.machine()} with {', '.join(names)}"


def _first_line(*command: str) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return (done.stdout.splitlines() or [""])[0].strip() or None


class Report:
    """What is known so far. `save` writes all of it, so an interrupted run keeps what it measured."""

    def __init__(self, folder: Path, device: str, deadline: float) -> None:
        self.folder = folder
        self.device = device
        self.deadline = deadline  # by time.monotonic(); no step should start after it, or run much longer
        self.environment = environment(device)
        self.complete = False
        self.records: list[Record] = []
        self.tests: dict[str, Any] = {"outcome": "not run"}
        self.end_to_end: dict[str, Any] = {}
        self.peers: dict[str, str] = {}
        self.notes: list[str] = []  # what failed or was left out

    def goals(self) -> list[dict[str, Any]]:
        results = Results(self.records, self.end_to_end)
        return [goal.outcome(results, self.device == "cuda") for goal in GOALS]

    def as_dict(self) -> dict[str, Any]:
        records = [asdict(record) | {"share_of_copy": record.share_of_copy} for record in self.records]
        return dict(
            complete=self.complete, environment=self.environment, goals=self.goals(), tests=self.tests,
            end_to_end=self.end_to_end, peers=self.peers, notes=self.notes, records=records,
        )  # fmt: skip

    def save(self) -> None:
        """Each file appears whole or not at all."""
        texts = (json.dumps(self.as_dict(), indent=1) + "\n", self.markdown())
        for name, text in zip(NAMES, texts, strict=True):
            partial = self.folder / f".{name}.partial"
            partial.write_text(text, encoding="utf-8")
            partial.replace(self.folder / name)

    def markdown(self) -> str:
        facts = {key: value for key, value in self.environment.items() if key != "versions"}
        facts |= self.environment["versions"]
        state = [] if self.complete else ["**This run is not complete: what follows is what it measured so far.**", ""]
        if self.device != "cuda":
            state += ["**No GPU was found: this is the reduced form on CPU. Goals for a GPU are not measured.**", ""]
        return "\n".join([
            "# Benchmark report", "", *state,
            "## Environment", "", *table(["", ""], [[key, str(value)] for key, value in facts.items()]), "",
            "## Goals", "", "Those for a GPU are for an H200 and bf16; of verification, for V = 151936 and K = 4.", "", *self._goal_table(), "",
            "## Tests on the GPU", "", *self._test_lines(), "",
            "## Measurements", "", *table(HEADER, map(cells, self.records)), "", METHOD, "",
            "## Peers", "", *table(["peer", "state"], [list(item) for item in self.peers.items()]), "",
            "## End to end", "",
            *([f"- {name}: `{json.dumps(result)}`" for name, result in self.end_to_end.items()] or ["None were run."]), "",
            "## Notes", "", *([f"- {note}" for note in self.notes] or ["None."]), "",
        ])  # fmt: skip

    def _goal_table(self) -> list[str]:
        met = {True: "met", False: "**not met**", None: "not measured"}
        rows = [
            [g["name"], g["device"], g["goal"], "" if g["measured"] is None else f"{g['measured']:.3g} {g['unit']}",
             met[g["met"]]]
            for g in self.goals()
        ]  # fmt: skip
        return table(["", "on", "goal", "measured", ""], rows)

    def _test_lines(self) -> list[str]:
        lines = [f"`pytest -m gpu`: {self.tests['outcome']}"]
        if tail := self.tests.get("tail"):
            lines += ["", "```", *tail, "```"]
        return lines


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
