"""The attention kernels compiled ahead of time for GPUs that are not here: no spills, wide copies, nothing new while serving.

See compile_attention.py, which runs as a process of its own because the interpreter is on in this one. `-s` shows the table.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
TARGETS = ("cuda:80", "cuda:90", "cuda:100", "hip:gfx942")
KERNELS = {"attention_kernel", "combine_kernel", "scatter_kernel"}
# Shared memory of a processor, less 1 KiB that the driver keeps per program, so that two of the widest programs fit.
SHARED = {"cuda:80": 164 - 2, "cuda:90": 228 - 2, "cuda:100": 228 - 2, "hip:gfx942": 64}


def compiled(cache: Path, *arguments: str) -> list[dict[str, Any]]:
    """The records that compile_attention.py prints, from an empty compilation cache."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    environment |= {"TRITON_CACHE_DIR": str(cache), "ENGINE_KERNELS": "triton"}
    script = str(ROOT / "tests" / "compile_attention.py")
    done = subprocess.run([sys.executable, script, *arguments], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def show(records: list[dict[str, Any]]) -> None:
    print(
        f"\n{'kernel':17} {'target':11} {'registers':>9} {'shared':>7} {'spills':>6} {'load':>5} {'copy':>5}  variant"
    )
    for r in records:
        print(
            f"{r['kernel']:17} {r['target']:11} {r['registers']:9} {r['shared']:7} {r['spills']:6} "
            f"{r['widest_load']:4}B {r['narrowest_copy'] or '':>5}  {r['variant']}"
        )


def assert_good(records: list[dict[str, Any]]) -> None:
    show(records)
    assert [r for r in records if r["spills"] != 0] == []
    assert [r for r in records if 2 * r["shared"] > SHARED[r["target"]] * 1024] == []
    for r in records:
        if r["kernel"] == "attention_kernel":
            # Whole rows of K and V of 16 bytes and more go to shared memory 16 bytes at a time.
            narrow = "D=16," in r["variant"] or "D=8," in r["variant"]
            assert narrow or (r["widest_load"] if r["target"].startswith("hip") else r["narrowest_copy"]) == 16, r


def test_a_sample_for_every_target(tmp_path: Path) -> None:
    records = compiled(tmp_path, "cuda:90", "--dtype", "bfloat16", "float32")
    records += compiled(tmp_path, "cuda:80", "cuda:100", "hip:gfx942", "--dtype", "bfloat16")
    assert_good(records)
    assert {(r["kernel"], r["target"]) for r in records} == {(k, t) for k in KERNELS for t in TARGETS}


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
def test_every_variant(tmp_path: Path, target: str) -> None:
    records = compiled(tmp_path, target, "--whole")
    assert_good(records)
    assert {r["variant"].split(",")[0] for r in records} == {"float32", "bfloat16", "float16"}


def test_nothing_compiles_while_serving(tmp_path: Path) -> None:
    """Whatever batch, widths of as many query rows, lengths, capacity and slots come, after one call of each size."""
    records = compiled(tmp_path, "cuda:90", "--serving")
    show(records)
    assert {r["kernel"] for r in records} == KERNELS and {r["variant"] for r in records} == {"first"}
