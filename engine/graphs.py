"""Capture of device work in CUDA graphs, and its replay: one graph for each bucket of shapes.

A round launches hundreds of kernels, each of which takes the host longer to launch than a small batch takes the device to
compute. A graph launches them all at once. What is captured must not depend on values that change: tensors are read where
they lie, Python numbers are part of the key.
"""

import logging
from collections.abc import Callable, Hashable
from typing import Any, Protocol

import torch

logger = logging.getLogger(__name__)


class Capture(Protocol):
    """Something that records device work without doing it, and then does it again and again."""

    def record(self, work: Callable[[], Any]) -> Any:
        """Call `work`; returns its result, whose tensors every replay fills anew."""

    def replay(self) -> None:
        """Do the work."""


class CudaCapture:
    """A CUDA graph.

    Args:
        pool: memory that all graphs share, from `torch.cuda.graph_pool_handle`. What one graph leaves behind while it runs
            may be overwritten by another; its results may not, for they are held.
    """

    def __init__(self, pool: Any) -> None:
        self._graph, self._pool = torch.cuda.CUDAGraph(), pool

    def record(self, work: Callable[[], Any]) -> Any:
        # Thread-local: other threads of the process may use CUDA meanwhile.
        with torch.cuda.graph(self._graph, pool=self._pool, capture_error_mode="thread_local"):
            return work()

    def replay(self) -> None:
        self._graph.replay()


class Graphs:
    """Does work eagerly the first time that its key is seen, captures it the second time, and replays it from then on.

    The first, eager call sets up what may not be set up while capturing (library handles, compiled kernels, buffers).

    Args:
        make_capture: makes a `Capture`; None: everything is done eagerly.
        max_graphs: keys beyond these stay eager, which bounds memory.
    """

    def __init__(self, make_capture: Callable[[], Capture] | None, max_graphs: int = 64) -> None:
        self._make, self._max = make_capture, max_graphs
        self._seen: set[Hashable] = set()
        self._captured: dict[Hashable, tuple[Capture, Any]] = {}

    @classmethod
    def for_device(cls, device: torch.device) -> "Graphs":
        """CUDA graphs on a CUDA device, nothing elsewhere."""
        if device.type != "cuda":
            return cls(None)
        pool = torch.cuda.graph_pool_handle()
        return cls(lambda: CudaCapture(pool))

    @property
    def enabled(self) -> bool:
        return self._make is not None

    def __contains__(self, key: Hashable) -> bool:
        """Whether it is captured: the results of `run` lie in one place."""
        return key in self._captured

    def __len__(self) -> int:
        return len(self._captured)

    def run(self, key: Hashable, work: Callable[[], Any]) -> Any:
        """The result of `work`; its tensors are overwritten the next time that this key is run."""
        if key in self._captured:
            capture, result = self._captured[key]
            capture.replay()
            return result
        if self._make is None or len(self._captured) >= self._max:
            return work()
        if key not in self._seen:
            self._seen.add(key)
            return work()
        capture = self._make()
        try:
            result = capture.record(work)
        except Exception as error:  # whatever the model does that cannot be captured
            logger.warning("CUDA graphs are off, rounds run eagerly: %s: %s", type(error).__name__, error)
            self._make = None
            self.clear()
            return work()
        self._captured[key] = capture, result
        capture.replay()
        return result

    def clear(self) -> None:
        """Forget all graphs: a buffer that they use has moved."""
        self._captured.clear()
        self._seen.clear()
