"""The kernels compiled ahead of time for GPUs that are not here: it compiles, nothing spills, loads are wide.

See compile_kernels.py, which runs as a process of its own because the interpreter is on in this one. `-s` shows the table.
"""

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
TARGETS = ("cuda:80", "cuda:90", "cuda:100", "hip:gfx942")
KERNELS = {"row_stats_kernel", "sample_kernel", "verify_kernel"}


def compiled(cache: Path, *arguments: str) -> list[dict[str, Any]]:
    """The records that compile_kernels.py prints, from an empty compilation cache."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"PYTHONPATH": str(ROOT), "TRITON_CACHE_DIR": str(cache)}
    script = str(ROOT / "tests" / "compile_kernels.py")
    done = subprocess.run([sys.executable, script, *arguments], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def show(records: list[dict[str, Any]]) -> None:
    print(f"\n{'kernel':17} {'target':11} {'registers':>9} {'shared':>7} {'spills':>6} {'load':>5}  variant")
    for r in records:
        print(
            f"{r['kernel']:17} {r['target']:11} {r['registers']:9} {r['shared']:7} {r['spills']:6} "
            f"{r['widest_load']:4}B  {r['variant']}"
        )


def assert_good(records: list[dict[str, Any]]) -> None:
    show(records)
    assert [r for r in records if r["spills"] != 0] == []
    # Rows that begin on 16 bytes are read 16 bytes at a time.
    assert [r for r in records if "even rows" in r["variant"] and r["widest_load"] != 16] == []


def test_a_sample_of_every_kernel_dtype_and_target(tmp_path: Path) -> None:
    records = compiled(tmp_path, "cuda:80", "cuda:100", "hip:gfx942", "--dtype", "bfloat16")
    records += compiled(tmp_path, "cuda:90")
    assert_good(records)
    assert {(r["kernel"], r["target"]) for r in records} == {(k, t) for k in KERNELS for t in TARGETS}
    dtypes = {(r["kernel"], r["variant"].split(",")[0]) for r in records}
    assert dtypes == {(k, dtype) for k in KERNELS for dtype in ("float32", "bfloat16", "float16")}
    assert sum(r["kernel"] == "verify_kernel" and "full" in r["variant"] for r in records) == 6


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
def test_every_variant(tmp_path: Path, target: str) -> None:
    assert_good(compiled(tmp_path, target, "--whole"))


def test_sizes_that_vary_while_serving_compile_nothing_new(tmp_path: Path) -> None:
    """One variant for any batch, width and slot; of verify one per power of two that holds the width."""
    records = compiled(tmp_path, "cuda:90", "--serving")
    show(records)
    assert Counter(r["kernel"] for r in records) == dict(row_stats_kernel=1, sample_kernel=1, verify_kernel=5)
    assert len({r["variant"] for r in records if r["kernel"] == "verify_kernel"}) == 5
