"""What the host does while rounds are served: how long it works between two, and whether it waits inside one.

The host launches a round while the one before is still under way, and then reads that one. Its time between rounds is all
that it does from one launch to the next, launching included, but for waiting until the result is there. What it does once for
a text, before the first launch and after the last read, is not part of it.

A round is inside from its launch to its read. The read waits once, for the event after the round's packed result; any
other call that waits for the device, from the first launch on, is a wait inside a round. A profile shows them all.
"""

import re
import time
from collections import Counter
from collections.abc import Iterable
from contextlib import nullcontext
from typing import Any

from torch.autograd import DeviceType  # type: ignore[attr-defined]
from torch.profiler import ProfilerActivity, profile, record_function

import engine
from bench.targets import SETUP_TURNS, num_graphs, wait

LAUNCH, READ = "round: launch", "round: read"
# A copy to memory that is not pinned blocks the host, even where it is asked for without.
WAITS = re.compile(r"(cuda|hip)(\w*Synchronize|Memcpy(2D|3D)?)|Memcpy DtoH \(Device -> Pageable\)")
THE_READS_OWN = re.compile(r"(cuda|hip)EventSynchronize")


class Watched:
    """Marks a server's rounds for a profile, and takes the time from a text's first launch to its last read.

    Attributes:
        begin: `perf_counter()` at the first launch since `restart`.
        end: that behind the last read.
        waited: seconds in which the host waited for results in between.
        marking: for a profile. Marks cost the host time, also where nobody looks.
    """

    def __init__(self, server: Any) -> None:
        self._launch, self._read = server._launch, server._read
        server._launch, server._read = self.launch, self.read
        self.restart()

    def restart(self, marking: bool = False) -> None:
        self.begin = self.end = self.waited = 0.0
        self.marking = marking

    def launch(self, *args: Any, **kwargs: Any) -> Any:
        self.begin = self.begin or time.perf_counter()
        with record_function(LAUNCH) if self.marking else nullcontext():
            return self._launch(*args, **kwargs)

    def read(self, launched: Any, scheduler: Any) -> list[Any]:
        with record_function(READ) if self.marking else nullcontext():
            if launched.arrived is not None:
                begin = time.perf_counter()
                launched.arrived.synchronize()
                self.waited += time.perf_counter() - begin
                launched.arrived = None  # to wait once
            advanced: list[Any] = self._read(launched, scheduler)
        self.end = time.perf_counter()
        return advanced


def host_figures(llm: engine.Engine, text: list[int], params: engine.SamplingParams) -> dict[str, Any]:
    """Microseconds of a round, of the host's own work for it, and of the device's idleness between two; waits inside.

    Times are those of a run without the profiler. Where the device is the host, its work is what lies outside drafting and
    verification, which is the time between rounds as well.
    """
    cuda = llm.target_model.device.type == "cuda"
    watched = Watched(llm._server)
    for _ in range(SETUP_TURNS["cuda" if cuda else "cpu"]):
        llm.generate([text], params)
    watched.restart()
    graphs = num_graphs(llm)
    wait(llm.target_model.device)  # for what is under way behind the last text's end
    stats = llm.generate([text], params)[0].stats
    seconds, inside = stats.total_seconds - stats.prefill_seconds, stats.draft_seconds + stats.verify_seconds
    # On a GPU the wait for the first round is for the prompt as well.
    working = watched.end - watched.begin - watched.waited if cuda else seconds - inside
    watched.restart(marking=True)
    with profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]) as profiler:
        llm.generate([text], params)
    found: dict[str, Any] = {
        "rounds": stats.rounds, "round_us": seconds / stats.rounds * 1e6, "host_us": working / stats.rounds * 1e6,
        "idle_us": (seconds - inside) / stats.rounds * 1e6, "captured_while_timed": num_graphs(llm) - graphs,
    }  # fmt: skip
    try:
        waits, reads = waits_inside(profiler.events(), on_gpu=cuda)
    except AssertionError as error:  # the times are known all the same
        return {**found, "waits": f"not known: {error}"}
    return {**found, "profiled_rounds": reads, "waits_inside_rounds": sum(waits.values()), "waits": dict(waits)}


def waits_inside(events: Iterable[Any], on_gpu: bool) -> tuple[Counter[str], int]:
    """Calls of a profile that waited for the device inside rounds, by name; the number of rounds that were read.

    Raises:
        AssertionError: if the profile cannot tell: without rounds or, on a GPU, without the reads' own waiting.
    """
    events = list(events)
    launches, reads = (
        [e.time_range for e in events if e.name == name and e.device_type == DeviceType.CPU] for name in (LAUNCH, READ)
    )
    assert launches and reads, "the profile shows no rounds"
    first, last = min(span.start for span in launches), max(span.end for span in reads)
    waits: Counter[str] = Counter()
    own = 0
    for event in events:
        start = event.time_range.start
        if not WAITS.fullmatch(event.name) or not first <= start <= last:
            continue
        if THE_READS_OWN.fullmatch(event.name) and any(span.start <= start <= span.end for span in reads):
            own += 1
        else:
            waits[event.name] += 1
    assert own or not on_gpu, "the profile shows no calls of the CUDA runtime: it cannot tell where the host waits"
    return waits, len(reads)
