"""What all tests share. Without a GPU, Triton kernels run in Triton's interpreter, on CPU tensors."""

import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch


def patch_the_language_once() -> None:
    """Make Triton's interpreter several times faster where jit functions call each other.

    It patches `triton.language` for each such call anew, 1 ms each, and wraps what it has wrapped before. The launch has
    done that already; what a launch does not patch (`triton.language.core`) stays patched after the first time.
    """
    import triton.language as tl
    from triton.runtime.interpreter import InterpretedFunction

    call_and_patch = InterpretedFunction.__call__
    patched = {tl}  # by the launch

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        modules = self.__dict__.get("languages")
        if modules is None:
            known = (tl, tl.core)
            modules = self.languages = {
                value for value in self.fn.__globals__.values() if any(value is m for m in known)
            }
        if modules <= patched:
            return self.rewrite()(*args, **kwargs)
        patched.update(modules)
        return call_and_patch(self, *args, **kwargs)

    InterpretedFunction.__call__ = call


def look_up_dtypes_once() -> None:
    """The interpreter asks for the NumPy dtype of every value, and makes the table of all for it each time."""
    from triton.runtime import interpreter

    derive = interpreter._get_np_dtype
    known: dict[str, Any] = {}

    def get(dtype: Any) -> Any:
        if dtype.name not in known:
            known[dtype.name] = derive(dtype)
        return known[dtype.name]

    interpreter._get_np_dtype = get


def check_overflow(on: bool) -> None:
    """Whether the interpreter works every sum, difference and product of integers out again in 64 bits, and fails where fewer are not
    enough. As it comes, it does the work, a third of its time, and says nothing."""
    from triton.runtime.interpreter import interpreter_builder

    interpreter_builder.options = replace(interpreter_builder.options, sanitize_overflow=on, debug=on)


sys.path.append(str(Path(__file__).resolve().parent.parent))  # bench/ and recipes/ are not installed
torch.set_num_threads(1)  # tiny models lose more by handing work over than a second core gives

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # triton reads it when it is imported, so before any test module
    patch_the_language_once()
    look_up_dtypes_once()
    check_overflow(False)


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
