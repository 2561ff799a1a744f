"""A CUDA graph that is captured or gives back what it took."""

import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from typing import Any

import torch

_one_at_a_time = threading.Lock()  # of all threads' captures, which share a stream and the kernels' counters
# CUDA graphs of captures that could not be ended: torch's allocators go on asking them which memory is theirs, so they must live.
_not_ended: list[Any] = []


class CudaCapture:
    """A CUDA graph. The device that it is for is the current one.

    Args:
        pool: memory that several graphs share, from `torch.cuda.graph_pool_handle`. What a graph computes on the way may be
            overwritten by another; its results may be by one that was captured before them, and by no later one, as they are held.
        stream: to capture on; one for all graphs of a pool. (torch's own would be that of the first device ever used.)
    """

    def __init__(self, pool: Any, stream: torch.cuda.Stream) -> None:
        self._graph, self._pool, self._stream = torch.cuda.CUDAGraph(), pool, stream

    def record(self, work: Callable[[], Any]) -> Any:
        before, begun = torch.cuda.current_stream(self._stream.device), False
        try:
            # Thread-local: other threads of the process may use CUDA meanwhile.
            graph = torch.cuda.graph(
                self._graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
            )
            with _one_at_a_time, _garbage_kept(), graph:
                begun = True
                return work()
        except BaseException:  # Ctrl-C too, which may come when the capture has just ended
            torch.cuda.set_stream(before)
            if not self._has_ended():
                self._give_up(begun)
            raise

    def _has_ended(self) -> bool:
        """Whether the capture did, though what was captured may have failed; such a graph gives back its part of the pool."""
        try:
            self._graph.pool()
        except RuntimeError:
            return False
        return True

    def _give_up(self, begun: bool) -> None:
        """A capture that cannot be ended leaves all new memory going to its pool, and a share of that taken."""
        _not_ended.append(self._graph)
        for undo in ("_cuda_endAllocateToPool", "_cuda_releasePool")[: 1 + begun]:  # not public
            with suppress(Exception):
                getattr(torch._C, undo)(self._stream.device_index, self._pool)
        # Else torch's own generator goes on believing that it is being captured, and refuses to draw.
        with suppress(Exception):
            generator = torch.cuda.default_generators[self._stream.device_index]
            generator.graphsafe_set_state(generator.clone_state())

    def replay(self) -> None:
        self._graph.replay()


@contextmanager
def _garbage_kept() -> Iterator[None]:
    """While this is entered, Python's garbage collector does not run by itself.

    A graph that it finds, as of an engine that is gone, cannot be destroyed while another is captured: the capture would fail.
    (Nor can Triton's kernels be unloaded then.) torch has not collected garbage before a capture since 2.9.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@cache
def capture_stream(device: torch.device) -> torch.cuda.Stream:
    """One for all engines: cuBLAS keeps tens of megabytes for each stream for good, and captures do not overlap."""
    return torch.cuda.Stream(device)
