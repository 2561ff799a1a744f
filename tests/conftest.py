"""What all tests share. Without a GPU, Triton kernels run in Triton's interpreter, on CPU tensors."""

import gc
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from quick_interpreter import check_overflow, quicken

sys.path.append(str(Path(__file__).resolve().parent.parent))  # bench/ and recipes/ are not installed
os.environ["HF_HUB_OFFLINE"] = "1"  # where there is no network, each look at the hub is tried for a minute
torch.set_num_threads(1)  # tiny models lose more by handing work over than a second core gives

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # triton reads it when it is imported, so before any test module
    quicken()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[Any]:
    """A kernel that makes the GPU unusable for its process fails no other test: pytest-xdist goes on in a new process, and without it
    the run ends there."""
    result = yield
    from bench.figures import gpu_is_lost

    if item.get_closest_marker("gpu") and gpu_is_lost():
        if "PYTEST_XDIST_WORKER" in os.environ:
            os._exit(1)
        pytest.exit("a fault has left the GPU unusable for this process", returncode=1)
    return result


def pytest_collection_finish() -> None:
    """What has been imported and collected stays to the end, and is not looked through again for what nobody holds."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def threads_as_before() -> Iterator[None]:
    """The benchmarks and the demo, which some tests run in their own process, take all cores. Threads that wait for those of another
    worker made what came after them five times as slow."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture
def overflow_checked() -> Iterator[None]:
    """An integer that does not fit fails in the interpreter; a GPU does not tell."""
    if torch.cuda.is_available():
        yield
        return
    check_overflow(True)
    yield
    check_overflow(False)


@pytest.fixture
def poisoned_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill what torch.empty and torch.empty_like return, so that an output left unwritten shows."""

    def poisoned(allocate: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def wrapper(*args: object, **kwargs: object) -> torch.Tensor:
            tensor = allocate(*args, **kwargs)
            return tensor.fill_(torch.nan if tensor.is_floating_point() else -77)

        return wrapper

    monkeypatch.setattr(torch, "empty", poisoned(torch.empty))
    monkeypatch.setattr(torch, "empty_like", poisoned(torch.empty_like))
