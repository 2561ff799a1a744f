"""A CUDA device that is pretended on the CPU, so that what only runs on a GPU can be run without one.

Tensors of the device hold their data on the CPU and say that they are on `cuda:0`. What a real device would refuse fails here too:
an operation on tensors of both devices, a kernel that is given the host's memory, and, while a graph is captured, reading values
or copying from the host. A captured graph is a log of operations and of launches (in Triton's interpreter); capturing changes
nothing, and replaying it fills the tensors that it left, and spoils those of graphs that were captured later, as these may lie where
it works. What is not seen: compiled code, the order of streams, and time.

`pretended()` turns it on.
"""

import gc
import itertools
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
from pretend_modes import Functions, Operations
from pretend_tensors import DEVICE, Device, Log, OnCuda, bare, leaves

from engine import cuda_capture, graphs
from engine.drafters import ngram
from engine.kernels import workspace


class Event:
    """Each that is recorded is 0.01 ms after the one before: no time passes."""

    numbers = itertools.count()

    def __init__(self, enable_timing: bool = False, **_: Any) -> None:
        self.at: int | None = None

    def record(self, stream: Any = None) -> None:
        self.at = next(self.numbers)

    def synchronize(self) -> None:
        assert self.at is not None, "an event that was never recorded"

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: "Event") -> float:
        assert self.at is not None and other.at is not None
        return 0.01 * (other.at - self.at)


class Stream(SimpleNamespace):
    def __init__(self, device: Any = None, **_: Any) -> None:
        super().__init__(cuda_stream=7, device=DEVICE, device_index=0)

    def wait_stream(self, other: Any) -> None: ...

    def synchronize(self) -> None: ...


def forget() -> None:
    """What the engine keeps of a device for the life of a process: other tests must not find it."""
    graphs.clear_all()
    cuda_capture.capture_stream.cache_clear()
    cuda_capture._not_ended.clear()
    ngram._chances_on.cache_clear()
    workspace.stream_memory().clear()
    workspace._reserved.clear()
    workspace._pools.clear()
    gc.collect()


@contextmanager
def pretended() -> Iterator[Device]:
    """The device is there while this is entered."""
    from triton.runtime import interpreter

    device = Device()

    class Graph:
        def __init__(self) -> None:
            self.log: Log | None = None
            self.ended = False

        def pool(self) -> None:
            if not self.ended:
                raise RuntimeError("Called CUDAGraph::pool() without a preceding successful capture.")

        def replay(self) -> None:
            assert self.log is not None, "a graph that was not captured"
            device.replay(self.log)

    @contextmanager
    def capture(
        graph: Graph, pool: Any = None, stream: Any = None, capture_error_mode: str = "global"
    ) -> Iterator[None]:
        assert device.capturing is None
        device.capturing = log = Log()
        try:
            yield
            graph.log = log
            graph.ended = True
        except torch.OutOfMemoryError:  # breaks off what is captured, and does not invalidate the capture
            graph.ended = True
            raise
        finally:
            device.capturing = None
            device.has_captured(log)

    launch, builder = interpreter.GridExecutor.__call__, interpreter.InterpreterBuilder

    def dot(self: Any, a: Any, b: Any, d: Any, *_: Any) -> Any:
        """What BLAS makes of a row depends, in its last bit, on the row's place in the matrix; not so in float64, rounded."""
        product = np.matmul(a.data.astype(np.float64), b.data.astype(np.float64)) + d.data
        return interpreter.TensorHandle(product.astype(d.data.dtype), d.dtype.scalar)

    def launched(self: Any, *args: Any, **kwargs: Any) -> Any:
        for value in leaves((args, kwargs)):
            if isinstance(value, torch.Tensor) and not isinstance(value, OnCuda):
                raise ValueError("Pointer argument cannot be accessed from Triton (cpu tensor?)")
        device.launches += 1
        given, named = bare(args), bare(kwargs)
        log = device.capturing
        if log is not None:
            log.will_change((given, named))
            log.steps.append(lambda: launch(self, *given, **named))
        with torch._C.DisableTorchFunction(), torch.utils._python_dispatch._disable_current_modes():
            return launch(self, *given, **named)

    properties = SimpleNamespace(
        name="pretended", total_memory=1 << 34, multi_processor_count=4, major=9, minor=0, L2_cache_size=0
    )
    real = torch.Generator

    class Generator:
        """One on the CPU, whatever the device; a class because annotations name it."""

        def __new__(cls, device: Any = "cpu") -> Any:
            return real()

    replaced = dict(
        is_available=lambda: True, device_count=lambda: 1, current_device=lambda: 0, is_initialized=lambda: True,
        synchronize=lambda *_: device.wait("synchronize"), empty_cache=lambda: None, device=lambda *_: nullcontext(),
        device_of=lambda *_: nullcontext(), current_stream=lambda *_: Stream(), set_stream=lambda *_: None, Stream=Stream,
        stream=lambda *_: nullcontext(), Event=Event, CUDAGraph=Graph, graph=capture, graph_pool_handle=object,
        is_current_stream_capturing=lambda: device.capturing is not None, get_device_properties=lambda *_: properties,
        get_device_name=lambda *_: "pretended", get_device_capability=lambda *_: (9, 0), is_bf16_supported=lambda *_: True,
        reset_peak_memory_stats=lambda *_: None, max_memory_allocated=lambda *_: 0, memory_allocated=lambda *_: 0,
        get_rng_state=lambda *_: None, set_rng_state=lambda *_: None, manual_seed_all=lambda *_: None,
        mem_get_info=lambda *_: (1 << 34, 1 << 34),
    )  # fmt: skip
    with ExitStack() as entered:
        entered.callback(forget)
        for name, value in replaced.items():
            entered.enter_context(mock.patch.object(torch.cuda, name, value))
        entered.enter_context(mock.patch.object(torch, "Generator", Generator))
        entered.enter_context(
            mock.patch.object(torch.Tensor, "is_pinned", lambda self, *_: hasattr(self, "pretended_pinned"))
        )
        entered.enter_context(mock.patch.object(interpreter.GridExecutor, "__call__", launched))
        entered.enter_context(mock.patch.object(builder, "create_dot", dot))
        old = torch.__future__.get_overwrite_module_params_on_conversion()
        entered.callback(torch.__future__.set_overwrite_module_params_on_conversion, old)
        torch.__future__.set_overwrite_module_params_on_conversion(True)
        entered.enter_context(Operations(device))
        entered.enter_context(Functions(device))
        yield device
