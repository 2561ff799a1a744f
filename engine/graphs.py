"""Capture of device work in CUDA graphs, and its replay: one graph for each bucket of shapes.

A round launches hundreds of kernels, and with a small batch the device computes each in less time than the host needs to
launch it. A graph launches them all at once. A replay reads and writes the same memory, and repeats what the Python code has
decided while it was captured: so tensors must stay where they are, and Python numbers that matter are part of the key.
"""

import logging
import sys
from collections.abc import Callable, Hashable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any, NamedTuple, Protocol
from weakref import WeakSet, ref

import torch

from .backend import reserve_counters
from .cuda_capture import CudaCapture, capture_stream
from .errors import EngineError

logger = logging.getLogger(__name__)
_all: "WeakSet[Graphs]" = WeakSet()
SHORTEST_TEXT = 256  # tokens: texts up to this length are one bucket, and beyond there is one for each power of two
_FEWEST = 2  # graphs that there must be memory for: the two halves of a round


def on_device(device: torch.device) -> AbstractContextManager[None]:
    """Makes a CUDA device the current one, by which streams, events and captures go, and keeps its user's autocast out.

    Models work in their own dtype. In another, new K/V would not fit to that of calls before, nor a graph to calls behind.
    Mostly all is as it should be, and to ask costs the host less than to enter what would change nothing.
    """
    current = device.type != "cuda" or torch.cuda.current_device() == device.index
    if current and not torch.is_autocast_enabled(device.type):
        return nullcontext()
    return _moved_to(device)


@contextmanager
def _moved_to(device: torch.device) -> Iterator[None]:
    current = torch.cuda.device(device) if device.type == "cuda" else nullcontext()
    with current, torch.autocast(device.type, enabled=False):
        yield


def clear_all() -> None:
    """Forget the graphs of all engines: one that holds work of NCCL keeps its communicator from being destroyed."""
    for graphs in list(_all):
        graphs.clear()
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


class Capture(Protocol):
    """Something that records device work without doing it, and then does it again and again."""

    def record(self, work: Callable[[], Any]) -> Any:
        """Call `work`; returns its result, whose tensors every replay fills anew."""

    def replay(self) -> None:
        """Do the work."""


class Work(NamedTuple):
    """What decides which work the forward passes of models are, beside their input; `target_changes.work_of` finds it."""

    marks: list[Any]
    objects: list[Any]  # those whose ids are among the marks: an id may be another's when its object is gone


class Graphs:
    """Does work eagerly the first time that its key is seen, captures it the second time, and replays it from then on.

    The first, eager call sets up what may not be set up while capturing (library handles, compiled kernels, buffers).

    Args:
        make_capture: makes a `Capture` in a pool of memory; None: everything is done eagerly.
        max_graphs: more are not kept, which bounds memory: the least recently used one is forgotten. `warmup` raises it.
            An engine with "auto" has 15 for each bucket of lengths, and up to 50 where a model drafts; a long text goes through
            five buckets.
        make_pool: makes a pool.

    Attributes:
        planned: whether work was to be captured. Shapes of rounds go by this, so that they stay the same on all ranks that share a
            model if one of them cannot capture.
        set_up: number of calls of `run` so far that did not only replay, where graphs are captured at all. Such calls take
            longer than later ones will.
        warming_up: what later rounds may need is to be captured now, though this one needs it not.
        buffers: what graphs read and write that nobody else keeps; forgotten with them.
    """

    def __init__(
        self,
        make_capture: Callable[[Any], Capture] | None,
        max_graphs: int = 128,
        make_pool: Callable[[], Any] = object,
    ) -> None:
        self._make, self._max, self._make_pool = make_capture, max_graphs, make_pool
        self._seen: set[Hashable] = set()
        self._captured: dict[Hashable, tuple[Capture, Any]] = {}  # the most recently used one last
        self._pool: Any = None
        self._told_full = self._told_short = False  # warnings that are given once: more than max_graphs; no memory
        self._marks: list[Any] = []  # of a `Work`, see `follow`
        self._objects: list[ref[Any]] = []
        self.planned = make_capture is not None
        self.set_up = 0
        self.warming_up = False
        self.buffers: dict[Hashable, Any] = {}
        _all.add(self)

    @classmethod
    def for_device(cls, device: torch.device) -> "Graphs":
        """CUDA graphs on a CUDA device, nothing elsewhere."""
        if device.type != "cuda":
            return cls(None)
        stream = capture_stream(device)

        def make_capture(pool: Any) -> CudaCapture:
            reserve_counters(device)  # what the graph's kernels take of them, none else gets
            return CudaCapture(pool, stream)

        return cls(make_capture, make_pool=torch.cuda.graph_pool_handle)

    @property
    def enabled(self) -> bool:
        """Whether work is captured: no more, if it once could not be."""
        return self._make is not None

    @property
    def room(self) -> int:
        """How many may be kept: few, if memory has run out."""
        return self._max

    def __len__(self) -> int:
        return len(self._captured)

    @contextmanager
    def warmup(self) -> Iterator[None]:
        """While this is entered, no graph is forgotten for another, and as many as there are at its end may stay from then on."""
        bound, self._max, self.warming_up = self._max, sys.maxsize, True
        try:
            yield
        finally:
            self.warming_up = False
            if self._max == sys.maxsize:  # there was memory for all
                self._max = max(bound, len(self._captured))

    def run(self, key: Hashable, work: Callable[[], Any]) -> Any:
        """Do the work: eagerly, captured or replayed, see the class.

        Args:
            key: the same for calls that are the same work on the same memory.
            work: a function of tensors that it reads where they lie.

        Returns:
            What `work` returns. From the second call with a key on, its tensors are overwritten by the next one, and those
            that it has made itself may be by a replay of any other work.
        """
        if key in self._captured:
            self._captured[key] = capture, result = self._captured.pop(key)
            capture.replay()
            return result
        if self._make is None:
            return work()
        self.set_up += 1
        if key not in self._seen:
            result = work()
            self._seen.add(key)  # not of work that failed halfway: the rest would be set up while capturing
            return result
        if not self._captured:
            self._pool = self._make_pool()  # with its last graph, torch has given up the one before
        if (captured := self._capture(work)) is None:
            return work()
        self._captured[key] = captured
        if len(self._captured) > self._max:
            self._forget_one()
        return captured[1]

    def _capture(self, work: Callable[[], Any]) -> tuple[Capture, Any] | None:
        """The capture and its result, replayed once; None if it failed, after which there are fewer graphs, or none any more.

        Raises:
            EngineError: if the work itself raises one.
        """
        try:
            return self._captured_anew(work)
        except Exception as error:  # which keeps what has been computed so far, and is gone before room is made
            lacks_memory, told = _what_failed(error)
        if lacks_memory and self._max > _FEWEST:
            self._make_room()
        else:  # whatever the model does that cannot be captured
            logger.warning("CUDA graphs are off, rounds run eagerly: %s", told)
            self._make = None  # for all work: torch makes no promises about captures after one that failed
            self.clear()
        return None

    def _captured_anew(self, work: Callable[[], Any]) -> tuple[Capture, Any]:
        assert self._make is not None
        capture = self._make(self._pool)
        result = capture.record(work)
        capture.replay()  # the first time takes memory, too
        return capture, result

    def _make_room(self) -> None:
        """Memory has run out: from now on, half as many graphs as there were may stay."""
        self._max = max(len(self._captured) // 2, _FEWEST)
        if not self._told_short:
            self._told_short = True
            logger.warning(
                "out of memory for CUDA graphs: all are dropped, and at most %d will be kept from now on", self._max
            )
        self.clear()
        with suppress(RuntimeError):  # where the capture could not be ended
            torch.cuda.empty_cache()  # what torch holds for other work, it does not take for a capture

    def _forget_one(self) -> None:
        """The least recently used graph. Its key stays known, so that it is captured anew when it is next seen."""
        del self._captured[next(iter(self._captured))]
        if not self._told_full:
            self._told_full = True
            logger.warning("more than %d CUDA graphs are needed: the least recently used are dropped", self._max)

    def follow(self, work: Work) -> None:
        """Forget all graphs if this is not the work that it was at the last call."""
        if work.marks != self._marks or any(known() is None for known in self._objects):
            self.clear()
            self._marks, self._objects = work.marks, [ref(each) for each in work.objects]

    def clear(self) -> None:
        """Forget all graphs, as a buffer that they use moves."""
        self._captured.clear()
        self._seen.clear()
        self.buffers.clear()


def _what_failed(error: Exception) -> tuple[bool, str]:
    """Whether a capture lacked memory, and what to say of it.

    Raises:
        EngineError: if the work itself has raised one.
    """
    causes = [each for each in (error.__context__, error) if each]  # two, where it could not be ended either
    for cause in causes:
        if isinstance(cause, EngineError):  # what the work itself has to say
            raise cause from None
    of_driver = [each for each in causes if isinstance(each, torch.AcceleratorError) and "out of memory" in str(each)]
    lacks_memory = bool(of_driver) or any(isinstance(cause, torch.OutOfMemoryError) for cause in causes)
    return lacks_memory, f"{type(causes[0]).__name__}: {causes[0]}"


def bucket(size: int, smallest: int) -> int:
    """The smallest of `smallest`, 2 * `smallest`, 4 * `smallest`, ... that is not below `size`."""
    while smallest < size:
        smallest *= 2
    return smallest
