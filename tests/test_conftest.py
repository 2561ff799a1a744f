"""The tests' own changes to Triton's interpreter, and what they do on a GPU that a fault has made unusable."""

import os
from types import SimpleNamespace

import conftest
import pytest
import torch
import triton
import triton.language as tl

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled here")


@triton.jit
def double(values, results):
    value = tl.load(values)
    tl.store(results, value + value)


def doubled(value: int, dtype: torch.dtype) -> int:
    values, results = torch.tensor([value], dtype=dtype), torch.zeros(1, dtype=dtype)
    double[(1,)](values, results)
    return int(results.item())


def test_a_sum_that_does_not_fit_is_caught(overflow_checked: None) -> None:
    assert doubled(2**30, torch.int64) == 2**31
    with pytest.raises(Exception, match="int32 overflow"):
        doubled(2**30, torch.int32)


def test_unless_that_is_off() -> None:
    assert doubled(2**30, torch.int32) == -(2**31)
    assert doubled(3, torch.int16) == 6 and doubled(200, torch.uint8) == 144


@triton.jit
def outer_sum(results, ROWS: tl.constexpr, COLUMNS: tl.constexpr, ADDED: tl.constexpr):
    row, column = tl.arange(0, ROWS)[:, None], tl.arange(0, COLUMNS)[None, :]
    total = 10 * row + column
    tl.store(results + row * COLUMNS + column, total + tl.full((ROWS, ADDED), 100, tl.int32))


@pytest.mark.parametrize("rows, columns", [(2, 8), (8, 2), (4, 4)])
def test_shapes_that_are_derived_once_are_those_of_each_value(rows: int, columns: int) -> None:
    """Twice: first derived, then known."""
    for _ in range(2):
        for added in (columns, 1):
            results = torch.zeros(rows, columns, dtype=torch.int32)
            outer_sum[(1,)](results, rows, columns, added)
            assert results.tolist() == [[100 + 10 * row + column for column in range(columns)] for row in range(rows)]
        with pytest.raises(Exception, match="incompatible dimensions at index 1"):
            outer_sum[(1,)](results, rows, columns, 2 * columns)
        with pytest.raises(Exception, match="must be a power of 2"):
            outer_sum[(1,)](results, rows, 3, 1)


@triton.jit
def mixed(results, COUNT: tl.constexpr):
    i = tl.arange(0, COUNT)
    x = i.to(tl.float32)
    tl.store(results + i, (i.to(tl.uint32) * 3_000_000_000).to(tl.int64))
    tl.store(results + COUNT + i, i + (i.to(tl.int64) << 40))
    tl.store(results + 2 * COUNT + i, (tl.where(x > 1.5, x * 0.5, -1.0) * 1000).to(tl.int64))
    tl.store(results + 3 * COUNT + i, ((i >= 1) & (x != 2)).to(tl.int64) - 2)


def test_numbers_of_several_dtypes() -> None:
    """Unsigned products wrap, the wider of two dtypes is that of a sum, a number takes the dtype of what it is beside."""
    results = torch.zeros(4, 4, dtype=torch.int64)
    mixed[(1,)](results, 4)
    products, sums, chosen, truths = results.tolist()
    assert products == [3_000_000_000 * i % 2**32 for i in range(4)] and sums == [i + (i << 40) for i in range(4)]
    assert chosen == [-1000, -1000, 1000, 1500] and truths == [-2, -1, -2, -1]


@triton.jit
def converted(values, results, COUNT: tl.constexpr):
    i = tl.arange(0, COUNT)
    tl.store(results + i, tl.load(values + i).to(results.dtype.element_ty))


def test_numbers_become_bfloat16_as_on_a_gpu() -> None:
    """Each that it has both ways, and what lies between two, at the middle and beside it: to the nearest, of two the even one."""
    below = torch.arange(-(2**15), 2**15, dtype=torch.int32) << 16
    bits = torch.cat([below, below + 0x7FFF, below + 0x8000, below + 0x8001])
    wide = bits.view(torch.float32)
    narrow, back = torch.empty(wide.shape, dtype=torch.bfloat16), torch.empty(wide.shape)
    converted[(1,)](wide, narrow, wide.numel())
    converted[(1,)](narrow, back, wide.numel())
    assert torch.equal(wide.isnan(), narrow.isnan()) and torch.equal(wide.isnan(), back.isnan())
    number = ~wide.isnan()
    assert torch.equal(narrow.view(torch.int16)[number], wide.bfloat16().view(torch.int16)[number])
    assert torch.equal(back.view(torch.int32)[number], wide.bfloat16().float().view(torch.int32)[number])


@pytest.mark.parametrize("lost", [True, False])
@pytest.mark.parametrize("worker", [True, False])
@pytest.mark.parametrize("marked", [True, False])
def test_a_process_that_has_lost_the_gpu_runs_no_other_test(
    lost: bool, worker: bool, marked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or all would fail there; a worker that fails fast would even take those of the others."""
    exits: list[int] = []
    monkeypatch.setattr("bench.figures.gpu_is_lost", lambda: lost)
    monkeypatch.setattr(os, "_exit", exits.append)
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)
    if worker:
        monkeypatch.setenv("PYTEST_XDIST_WORKER", "gw0")
    item = SimpleNamespace(get_closest_marker=lambda name: marked and name == "gpu")
    protocol = conftest.pytest_runtest_protocol(item)
    next(protocol)
    with pytest.raises(pytest.exit.Exception if lost and marked else StopIteration):
        protocol.send(None)
    assert exits == [1] * (lost and worker and marked)
