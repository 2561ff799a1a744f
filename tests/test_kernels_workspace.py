"""The memory of the kernels, and launchers that a CUDA graph can capture: what they launch depends on no value.

That every counter is 0 again after a launch is asserted by kernel_cases.py, after every call that is compared with its twin.
"""

import itertools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from kernel_cases import (
    DEVICE,
    TILED,
    check_verify,
    random_filters,
    random_logits,
    random_rows,
    temperatures,
    verify_case,
)
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.interpreter import InterpreterBuilder

from engine.kernels import ops, workspace
from engine.kernels.ops import METHODS
from engine.kernels.verify import verify_kernel

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
Launch = tuple[str, Any, dict[str, Any]]  # kernel, grid, arguments without the values of tensors


@pytest.fixture
def own_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    memory: dict[Any, Any] = {}
    monkeypatch.setattr(workspace, "stream_memory", lambda: memory)


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch, own_memory: None) -> list[Launch]:
    """What is launched from now on, in place of launching it."""
    recorded: list[Launch] = []

    def shape_of(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(shape_of(each) for each in value)
        return (value.dtype, value.shape, value.stride()) if isinstance(value, Tensor) else value

    def record(kernel: Any, grid: Any) -> Callable[..., None]:
        def launch(scratch: Tensor, counters: Tensor, **arguments: Any) -> None:  # memory is as large as it ever was
            recorded.append((kernel.__name__, grid, {name: shape_of(value) for name, value in arguments.items()}))

        return launch

    monkeypatch.setattr(type(verify_kernel), "__getitem__", record)
    monkeypatch.setenv("ENGINE_KERNELS", "triton")
    return recorded


def of_other_values(case: dict[str, Any]) -> list[dict[str, Any]]:
    """The same shapes with logits of NaN, with everything 0, and without any values: a tensor on "meta" has none to read."""
    nan = {name: torch.full_like(value, torch.nan) for name, value in case.items() if "logits" in name}
    zero = {name: torch.zeros_like(value) for name, value in case.items()}
    return [case | nan, zero, {name: value.to("meta") for name, value in case.items()}]


def assert_the_same(launches: list[Launch], call: Callable[..., object], case: dict[str, Any], count: int) -> None:
    call(**case)
    first = launches.copy()
    assert len(first) == count
    for other in of_other_values(case):
        launches.clear()
        call(**other)
        assert launches == first


@pytest.mark.parametrize("filtered", [False, True], ids=["plain", "filtered"])
@pytest.mark.parametrize("kind", ["full", "one-hot"])
@pytest.mark.parametrize("method", METHODS)
def test_launches_of_verify_do_not_depend_on_values(
    launches: list[Launch], method: str, kind: str, filtered: bool
) -> None:
    generator = torch.Generator().manual_seed(1)
    case = verify_case(generator, 6, 3, 9_000, 9_000 if kind == "full" else None)
    case |= random_filters(generator, 6, 9_000) if filtered else {}
    case = {name: value for name, value in case.items() if value is not None}
    with_draft_rows = kind == "full" and method in ("rejection", "block")
    assert_the_same(
        launches, lambda **each: ops.verify(**each, method=method, return_logprobs=True), case,
        count=3 if with_draft_rows else 1,  # the draft rows' stats, verify, residuals
    )  # fmt: skip


@pytest.mark.parametrize("filtered", [False, True], ids=["plain", "filtered"])
def test_launches_of_row_stats_and_sample_do_not_depend_on_values(launches: list[Launch], filtered: bool) -> None:
    generator = torch.Generator().manual_seed(2)
    case = dict(logits=random_logits(generator, 6, 3, 9_000), temperature=temperatures(6))
    case |= random_filters(generator, 6, 9_000) if filtered else {}
    assert_the_same(launches, ops.row_stats, case, count=1)
    launches.clear()
    assert_the_same(launches, ops.sample, case | random_rows(6, generator), count=1)


class Copies(TorchDispatchMode):
    """Counts the tensors of shape [B] that are copied."""

    def __init__(self, batch: int) -> None:
        super().__init__()
        self.batch, self.count = batch, 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += function is torch.ops.aten.clone.default and args[0].shape == (self.batch,)
        return function(*args, **kwargs or {})


@pytest.mark.parametrize("kind", ["full", "one-hot"])
def test_what_is_not_contiguous_is_copied_once(launches: list[Launch], kind: str) -> None:
    """Columns of a table of rows, as a serving engine keeps them."""
    generator = torch.Generator().manual_seed(3)
    case = verify_case(generator, 6, 3, 300, 300 if kind == "full" else None) | random_filters(generator, 6, 300)
    names = ("temperature", "top_k", "top_p", "min_p", "seed", "position")
    columns = {name: torch.stack([case[name]] * 2, dim=1)[:, 0] for name in names}
    for given, count in (({}, 0), (columns, len(names))):
        with Copies(6) as copies:
            ops.verify(**case | given)
        assert copies.count == count


@pytest.mark.parametrize("read", [Tensor.item, Tensor.tolist, Tensor.cpu, Tensor.nonzero, bool, lambda x: x[x > 0]])
def test_reading_is_caught(read: Callable[[Tensor], object]) -> None:
    """Negative control: whatever would wait for a GPU."""
    with pytest.raises((RuntimeError, NotImplementedError)):
        read(torch.ones(1, device="meta"))


def test_memory_is_kept_and_grows(own_memory: None) -> None:
    counters, scratch = workspace.workspace(CPU, 10, 20)
    assert counters.numel() >= 10 and scratch.numel() >= 20 and not counters.any()
    again = workspace.workspace(CPU, 5, 21)
    assert again[0] is counters and again[1].numel() >= 21
    assert workspace.workspace(CPU, 11, 3)[1] is again[1]


def test_memory_of_inference_mode_serves_calls_outside_of_it(own_memory: None) -> None:
    with torch.inference_mode():
        inside = workspace.workspace(CPU, 10, 20)
    outside = workspace.workspace(CPU, 10, 20)
    assert outside[0] is inside[0] and not outside[0].any()


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch, own_memory: None) -> Tensor:
    """The reserved counters of a graph that is being captured."""
    counters = torch.zeros(96, dtype=torch.int32, device=DEVICE)
    monkeypatch.setattr(workspace, "_capturing", lambda device: True)
    monkeypatch.setattr(workspace, "_reserved", {counters.device: counters})
    return counters


def test_an_interrupted_launch_harms_no_later_one(own_memory: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C in the interpreter, after some programs have arrived."""
    if DEVICE != "cpu":
        pytest.skip("a launch on a GPU is not interrupted")
    case = verify_case(torch.Generator().manual_seed(3), 2, 1, TILED)
    check_verify(case)
    load, loads = InterpreterBuilder.create_masked_load, itertools.count()

    def interrupted(self: InterpreterBuilder, *args: Any, **kwargs: Any) -> Any:
        if next(loads) == 20:
            raise KeyboardInterrupt
        return load(self, *args, **kwargs)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(InterpreterBuilder, "create_masked_load", interrupted)
        check_verify(case)
    assert any(counters.any() for counters, _ in workspace.stream_memory().values())
    check_verify(case | dict(target_logits=case["target_logits"].flip(-1)))


def test_threads_share_no_memory() -> None:
    """Of a kernel in two launches, another thread's may come in between."""
    mine = [workspace.workspace(CPU, 3, 5) for _ in range(2)]
    with ThreadPoolExecutor(1) as executor:
        others = executor.submit(workspace.workspace, CPU, 3, 5).result()
    assert all(mine[0][i].data_ptr() == mine[1][i].data_ptr() != others[i].data_ptr() for i in range(2))


def test_graphs_share_no_counters(pool: Tensor) -> None:
    """Each call gets reserved ones of its own, on 128 bytes of their own, and zeros of its own when they are used up."""
    parts = [workspace.workspace(pool.device, count, 7) for count in (5, 33, 2)]
    starts = [(counters.data_ptr() - pool.data_ptr()) // pool.element_size() for counters, _ in parts]
    assert starts[:2] == [0, 32] and not 0 <= starts[2] < 96  # 32 + 64 of 96
    assert [counters.numel() for counters, _ in parts] == [5, 33, 2]
    assert not any(counters.any() for counters, _ in parts)
    assert len({scratch.data_ptr() for _, scratch in parts}) == 3
    assert not workspace.stream_memory()  # which other graphs and calls on the stream use


def test_without_a_reserve_a_graph_has_zeros_of_its_own(pool: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workspace, "_reserved", {})
    counters, _ = workspace.workspace(pool.device, 40, 1)
    assert counters.numel() == 40 and not counters.any()


def test_counters_are_reserved_once_and_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    zeros = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda count, dtype, device: zeros(count, dtype=dtype))
    monkeypatch.setattr(workspace, "_reserved", {})
    monkeypatch.setattr(workspace, "_pools", [])
    workspace.reserve_counters(CPU)
    assert not workspace._reserved
    workspace.reserve_counters(GPU)
    reserved = workspace._reserved[GPU]
    assert reserved.numel() == workspace.RESERVED_COUNTERS and reserved.dtype == torch.int32
    taken = workspace._captured_counters(GPU, 3)
    assert taken.data_ptr() == reserved.data_ptr()
    workspace.reserve_counters(GPU)  # again: nothing is handed out twice
    assert workspace._captured_counters(GPU, 3).data_ptr() == reserved.data_ptr() + 128
    workspace._captured_counters(GPU, reserved.numel() * 3 // 4)
    workspace.reserve_counters(GPU)  # there are few left: new ones, and the old ones stay where graphs know them
    assert workspace._reserved[GPU].numel() == workspace.RESERVED_COUNTERS
    assert [pool.data_ptr() for pool in workspace._pools] == [reserved.data_ptr(), workspace._reserved[GPU].data_ptr()]


@pytest.mark.parametrize("method", ["rejection", "block"])
def test_verdicts_with_the_memory_of_a_graph(pool: Tensor, method: str) -> None:
    case = verify_case(torch.Generator().manual_seed(3), 4, 2, 60, 60)
    case |= random_filters(torch.Generator().manual_seed(4), 4, 60)
    for _ in range(3):  # the third finds the reserve used up
        check_verify(case, method=method)
    assert not pool.any() and workspace._reserved[pool.device].numel() < 32
