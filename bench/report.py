"""The report of a run: what was measured, on what, as JSON and as Markdown."""

import hashlib
import json
import math
import os
import platform
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, fields
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from bench.goals import GOALS, Results
from bench.markdown import markdown
from bench.measure import Record, ratios
from bench.out_file import write_whole
from bench.processes import ROOT

NAMES = ("report.json", "report.md")
CODE = ("engine", "kernels", "bench")
VARIABLES = ("ENGINE_KERNELS", "ENGINE_HUGE_PAGES", "GLIBC_TUNABLES", "TRITON_INTERPRET")  # of the environment
GPU_STATE = ("clocks.sm", "clocks.mem", "power.draw", "power.limit", "temperature.gpu")
DONE, BEGUN = "done", "begun"  # outcomes of steps


def environment(device: str) -> dict[str, Any]:
    """Device, driver, versions, date, and what the shell has set that times depend on.

    Args:
        device: "cpu", "cuda", or "cuda:1" for one of several.
    """
    versions = {"python": platform.python_version(), "cuda": torch.version.cuda, "hip": torch.version.hip}
    versions["torch"] = torch.__version__  # with what it was built for
    for package in ("triton", "numba", "transformers", "pytest", "pytest-benchmark", "vllm", "flashinfer-python"):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = None
    found: dict[str, Any] = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": torch.device(device).type,
        "commit": _first_line("git", "-C", str(ROOT), "rev-parse", "HEAD"),
        "code": code_digest(*CODE),
        "cpu": f"{_processor()}, {os.cpu_count()} cores, {torch.get_num_threads()} threads",
        "load_average": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
        "versions": {name: value for name, value in versions.items() if value is not None},
        "variables": {name: os.environ[name] for name in VARIABLES if name in os.environ},
    }
    if found["device"] == "cuda":
        properties = torch.cuda.get_device_properties(torch.device(device))
        found |= {
            "gpu": properties.name,
            "driver": _first_line("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
            "gpu_memory_gib": round(properties.total_memory / 2**30, 1),
            "l2_mib": round(properties.L2_cache_size / 2**20, 1),
            "multiprocessors": properties.multi_processor_count,
        }
    return found


def digest(*texts: str) -> str:
    """A short hash over all of them."""
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:16]


def code_digest(*folders: str) -> str:
    """Of the Python files in folders of the repository: the same code has the same, with a commit or without."""
    paths = sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))
    return digest(*(path.read_text(encoding="utf-8") for path in paths))


def gpu_state() -> dict[str, str] | None:
    """Clocks, power and temperature, as nvidia-smi gives them."""
    line = _first_line("nvidia-smi", f"--query-gpu={','.join(GPU_STATE)}", "--format=csv,noheader")
    return dict(zip(GPU_STATE, line.split(", "), strict=False)) if line else None


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
    """What is known so far. `save` writes all of it, and `load` reads it again: an interrupted run goes on with what it measured.

    Attributes:
        plan: titles of the steps that make it complete.
        steps: by title: outcome, seconds, and of one that did not get through its error, with a traceback or the output's end.
        end_to_end: figures by title of the cases in bench/end_to_end.py.
        peers: their states.
        tests: outcome of those that need a GPU.
        seconds: that the step under way may take; not saved.
    """

    SAVED = ("environment", "quick", "plan", "steps", "tests", "end_to_end", "peers")

    def __init__(self, folder: Path, environment: dict[str, Any], plan: Sequence[str], quick: bool) -> None:
        self.folder, self.environment, self.plan, self.quick = folder, environment, list(plan), quick
        self.seconds = math.inf
        self.records: list[Record] = []
        self.steps: dict[str, dict[str, Any]] = {}
        self.tests: dict[str, Any] = {"outcome": "not run"}
        self.end_to_end: dict[str, dict[str, Any]] = {}
        self.peers: dict[str, str] = {}

    @classmethod
    def load(cls, folder: Path) -> "Report":
        """The one that was saved in a folder.

        Raises:
            ValueError: if what is there is none, or of another form.
        """
        try:
            saved = json.loads((folder / NAMES[0]).read_text(encoding="utf-8"))
            report = cls(folder, saved["environment"], saved["plan"], saved["quick"])
            for name in cls.SAVED:
                setattr(report, name, saved[name])
            names = {field.name for field in fields(Record)}
            records = [{name: value for name, value in each.items() if name in names} for each in saved["records"]]
            report.records = [Record(**each) for each in records]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{folder / NAMES[0]} is not a report that can be continued") from error
        return report

    @property
    def device(self) -> str:
        return str(self.environment["device"])

    @property
    def complete(self) -> bool:
        return all(self.is_done(title) for title in self.plan)

    def is_done(self, title: str) -> bool:
        return self.steps.get(title, {}).get("outcome") == DONE

    def add(self, records: Iterable[Record]) -> None:
        """Those of the same name, mode and shape give way."""

        def key(record: Record) -> tuple[str, ...]:
            return record.name, record.mode, record.shape

        self.records = list(({key(r): r for r in self.records} | {key(r): r for r in records}).values())

    def goals(self) -> list[dict[str, Any]]:
        """What became of each goal."""
        results = Results(self.records, self.end_to_end)
        return [goal.outcome(results, self.environment.get("gpu")) for goal in GOALS]

    def ratios(self) -> list[dict[str, Any]]:
        """How many times as long as ours the peers took, shape by shape."""
        return ratios(self.records, list(self.peers))

    def as_dict(self) -> dict[str, Any]:
        records = [asdict(record) | {"share_of_copy": record.share_of_copy} for record in self.records]
        saved = {name: getattr(self, name) for name in self.SAVED}
        return dict(complete=self.complete, goals=self.goals()) | saved | dict(ratios=self.ratios(), records=records)

    def save(self) -> None:
        """Each file appears whole or not at all."""
        texts = (json.dumps(self.as_dict(), indent=1) + "\n", markdown(self))
        for name, text in zip(NAMES, texts, strict=True):
            write_whole(self.folder / name, text)
