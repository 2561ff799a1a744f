"""The kernels compiled ahead of time for GPUs that are not here: it compiles, spills no more than is known, loads are wide.

See compile_kernels.py, which runs as a process of its own because the interpreter is on in this one. `-s` shows the table.
"""

import json
import os
import subprocess
import sys
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import triton

from engine.kernels.ops import METHODS

ROOT = Path(__file__).parents[1]
TARGETS = ("cuda:80", "cuda:90", "cuda:100", "hip:gfx942")
TRITON = triton.__version__.rpartition(".")[0]
KERNELS = {"row_stats_kernel", "sample_kernel", "verify_kernel", "residual_kernel"}


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of compiled kernels, empty at first."""
    return tmp_path_factory.mktemp("cache")


def compiled(cache: Path, *arguments: str) -> list[dict[str, Any]]:
    """The records that compile_kernels.py prints, which tells kernels apart whether they are in the cache or not."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"PYTHONPATH": str(ROOT), "TRITON_CACHE_DIR": str(cache), "ENGINE_KERNELS": "triton"}
    script = str(ROOT / "tests" / "compile_kernels.py")
    done = subprocess.run([sys.executable, script, *arguments], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def show(records: list[dict[str, Any]]) -> None:
    print(
        f"\n{'kernel':17} {'target':11} {'registers':>9} {'shared':>7} {'spills':>6} {'scalars in lanes':>16} {'load':>5}  variant"
    )
    for r in records:
        print(
            f"{r['kernel']:17} {r['target']:11} {r['registers']:9} {r['shared']:7} {r['spills']:6} "
            f"{r['scalars_in_lanes']:16} {r['widest_load']:4}B  {r['variant']}"
        )


# Bytes a thread that fp32 kernels are known to spill under Triton 3.7 (see kernels/README.md), by target, kernel and whether there are
# filters: more than 128 registers would let half as many programs run.
KNOWN_SPILLS = {
    ("cuda:80", "verify_kernel", True): 8,
    ("cuda:100", "verify_kernel", True): 8,
    ("cuda:100", "sample_kernel", True): 16,
    ("cuda:100", "sample_kernel", False): 32,
}


def most_spilled(record: dict[str, Any]) -> int:
    """Bytes a thread that may be spilled: those that are known."""
    if TRITON == "3.9":
        return 32
    if TRITON != "3.7" or not record["variant"].startswith("float32"):
        return 0
    return KNOWN_SPILLS.get((record["target"], record["kernel"], "filtered" in record["variant"]), 0)


def assert_good(records: list[dict[str, Any]]) -> None:
    show(records)
    assert [r for r in records if r["spills"] > most_spilled(r)] == []
    # Rows that begin on 16 bytes are read 16 bytes at a time.
    assert [r for r in records if "even rows" in r["variant"] and r["widest_load"] != 16] == []


def test_a_sample_of_every_kernel_dtype_and_target(cache: Path) -> None:
    """Everything in bf16 for one target; for each other target, in one dtype, some of what has no filters and is not packed."""
    records = compiled(cache, "cuda:90", "--dtype", "bfloat16")
    records += compiled(cache, "cuda:80", "--dtype", "float32", "--brief")
    records += compiled(cache, "cuda:100", "--dtype", "float16", "--brief")
    records += compiled(cache, "hip:gfx942", "--dtype", "bfloat16", "--brief")
    assert_good(records)
    # Warps have whole blocks (see jit_rows.py): what is found in a block goes through no memory, only noise and lists do.
    assert [r for r in records if r["shared"] > 8192] == []
    assert {(r["kernel"], r["target"]) for r in records} == {(k, t) for k in KERNELS for t in TARGETS}
    dtypes = {(r["kernel"], r["variant"].split(",")[0]) for r in records}
    assert dtypes == {(k, dtype) for k in KERNELS for dtype in ("float32", "bfloat16", "float16")}
    for option, method in product(("plain", "filtered"), METHODS):
        assert any(f"{option}, {method}" in r["variant"] for r in records if r["kernel"] == "verify_kernel")


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
def test_every_variant(cache: Path, target: str) -> None:
    assert_good(compiled(cache, target, "--whole"))


def test_nothing_compiles_after_a_warm_up(cache: Path) -> None:
    """Whatever batch, number of drafts and slot are served after it."""
    warmed_up, *later = compiled(cache, "cuda:90", "--serving")
    assert warmed_up["warmed_up"] > 25 and later == []
