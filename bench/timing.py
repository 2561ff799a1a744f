"""Timing: contenders take turns within one run, on the host's clock or the device's."""

import itertools
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from engine import threads
from engine.backend import reserve_counters
from engine.cuda_capture import CudaCapture

Call = Callable[[], Any]
COLD = 4  # times the L2
MAX_COPIES = 1024  # of an input; where even they fit into the L2, a case is timed with a warm cache
CALLS_PER_REPETITION = 20  # at least, on a GPU: what one launch from the host costs is then spread thin


@dataclass(frozen=True)
class Timing:
    """Seconds per call."""

    median: float
    p20: float
    p80: float
    repeats: int

    @staticmethod
    def of(samples: Sequence[float]) -> "Timing":
        if len(samples) < 2:
            raise ValueError(f"a timing needs at least 2 samples, got {len(samples)}")
        p20, _, _, p80 = statistics.quantiles(samples, n=5, method="inclusive")
        return Timing(statistics.median(samples), p20, p80, len(samples))


@dataclass(frozen=True)
class Contender:
    """What one repetition runs, and how many calls that is: its time is divided by them.

    Attributes:
        holds: calls whose tensors a CUDA graph reads and writes by address, which must not be given to anybody else.
    """

    run: Call
    calls: int = 1
    holds: Sequence[Call] = ()

    @staticmethod
    def in_turn(calls: Sequence[Call], at_least: int = 1) -> "Contender":
        """One call after another, from the start again until there are `at_least`."""
        several = at_least_so_many(calls, at_least)

        def run() -> None:
            for call in several:
                call()

        return Contender(run, len(several))


def at_least_so_many(calls: Sequence[Call], count: int) -> list[Call]:
    return list(itertools.islice(itertools.cycle(calls), max(count, len(calls))))


def interleave(
    contenders: Mapping[str, Contender],
    *,
    repeats: int,
    warmup: int = 2,
    seconds: float = math.inf,
    cuda: bool = False,
) -> dict[str, Timing]:
    """Time contenders that take turns, so that what disturbs the machine disturbs them alike.

    Args:
        contenders: by name.
        repeats: of each, at least 2. Who goes first changes from one turn to the next.
        warmup: repetitions that are not counted.
        seconds: start no new turn after so long, once there are 5.
        cuda: time on the device, between two events, and not on the host.
    """
    if repeats < 2:
        raise ValueError(f"repeats must be >= 2, got {repeats}")
    clock = _cuda_seconds if cuda else _host_seconds
    names = list(contenders)
    samples: dict[str, list[float]] = {name: [] for name in names}
    for name, _ in itertools.product(names, range(warmup)):
        clock(contenders[name].run)
    start = time.perf_counter()
    for turn in range(repeats if names else 0):
        if turn >= 5 and time.perf_counter() - start > seconds:
            break
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            samples[name].append(clock(contenders[name].run) / contenders[name].calls)
    return {name: Timing.of(values) for name, values in samples.items()}


def _host_seconds(run: Call) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def _cuda_seconds(run: Call) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    start.record()
    run()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3


def capture(calls: Sequence[Call]) -> tuple[Contender, Any]:
    """The calls in one CUDA graph, one after another, and the result of the first, after a replay.

    Divided by their number, the time of a replay is what a call costs inside a larger graph, which is where a decoding
    round has it.
    """
    several = at_least_so_many(calls, CALLS_PER_REPETITION)
    reserve_counters(torch.device("cuda", torch.cuda.current_device()))
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for call in several[:3]:
            call()
    torch.cuda.current_stream().wait_stream(side)

    def work() -> Any:
        first = several[0]()  # kept, so that no later call of the graph writes where it lies
        for call in several[1:]:
            call()
        return first

    graph = CudaCapture(torch.cuda.graph_pool_handle(), side)
    first = graph.record(work)
    graph.replay()
    torch.cuda.synchronize()
    return Contender(graph.replay, len(several), holds=calls), first


def l2_bytes() -> int:
    """Size of the GPU's L2 cache; 0 without a GPU."""
    return (
        int(torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size)
        if torch.cuda.is_available()
        else 0
    )


def copies_for_cold_cache(distinct_bytes: int) -> int:
    """So many copies of an input, used in turn, are four times the L2 together: each is read from memory, not from L2.

    Not twice: what a cache replaces by chance is still there in one case of five after as many bytes as it holds have been read
    twice, and in one of fifty after four times as many. 1 where the input alone is as large as that, and on CPU.

    Args:
        distinct_bytes: that a call reads or writes; what it reads again does not count.
    """
    return min(MAX_COPIES, max(1, math.ceil(COLD * l2_bytes() / distinct_bytes)))


def device_copies(bytes_moved: int, copies: int) -> list[Call]:
    """Copies within the device that move so many bytes each, half of them read and half written: what memory gives."""

    def one() -> Call:
        target, source = (torch.zeros(max(1, bytes_moved // 2), dtype=torch.uint8, device="cuda") for _ in range(2))
        return lambda: target.copy_(source)

    return [one() for _ in range(copies)]


def use_all_cores() -> int:
    """As the command line does; returns how many threads torch has then."""
    threads.use_all_cores()
    return torch.get_num_threads()
