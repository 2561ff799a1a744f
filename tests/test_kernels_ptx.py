"""The kernels as compiled for an NVIDIA GPU, run without one: they come to what the twins say, in whatever order blocks run, and
no two threads touch memory without an order. See run_ptx.py, which runs as a process of its own. `-s` shows the table.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
KERNELS = {"row_stats_kernel", "sample_kernel", "verify_kernel", "residual_kernel"}


def run_ptx(*arguments: str) -> "subprocess.CompletedProcess[str]":
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"PYTHONPATH": str(ROOT), "ENGINE_KERNELS": "triton"}
    script = str(ROOT / "tests" / "run_ptx.py")
    return subprocess.run([sys.executable, script, *arguments], env=environment, capture_output=True, text=True)


def launches(*arguments: str) -> list[dict[str, Any]]:
    done = run_ptx(*arguments)
    assert done.returncode == 0, done.stderr
    records = [json.loads(line) for line in done.stdout.splitlines()]
    for r in records:
        print(f"{r['kernel']:17} {r['target']:9} {r['instructions']:9,} instructions of warps  {r['variant']}")
    assert {r["kernel"] for r in records} == KERNELS
    return records


def test_a_sample_of_the_kernels() -> None:
    """Unfiltered rows are read once, and what is drawn from a block once more: of 20,000 tokens in bf16."""
    records = [r for r in launches("cuda:90") if "plain" in r["variant"] and r["kernel"] != "residual_kernel"]
    assert len(records) == 4
    for r in records:
        rows = {"sample_kernel": 3, "row_stats_kernel": 6, "verify_kernel": 9}[r["kernel"]]
        read = r["loaded"].get("target") or r["loaded"]["logits"]
        assert 1.0 <= read / (rows * 20_000 * 2) <= 1.05, r


@pytest.mark.slow
@pytest.mark.parametrize("target", ["cuda:80", "cuda:90", "cuda:100"])
def test_every_variant(target: str) -> None:
    launches(target, "--whole")


@pytest.mark.parametrize("control, fault", [
    ("--without-barriers", "no barrier since another thread wrote to"),
    ("--unordered", "nothing orders this behind another block's store to scratch"),
])  # fmt: skip
def test_kernels_without_their_order_fail(control: str, fault: str) -> None:
    done = run_ptx("cuda:90", control)
    assert done.returncode != 0 and fault in done.stderr
