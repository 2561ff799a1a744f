"""A contest: ours, peers and a plain copy of memory, checked, then timed in turns within one run."""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from bench import timing
from bench.cases import Case, check_emitted, check_ours, make_inputs, our_call, rotated
from bench.figures import failure, gpu_is_lost, tidy
from bench.peers import Peer
from bench.timing import Call, Contender

PEERS_MEET = ("full", "full, no draft stats")  # cases of ours


@dataclass
class Record:
    """One row of the results. Times are in microseconds per call."""

    name: str
    mode: str  # "eager" | "graph"
    shape: str
    batch: int
    contract_bytes: int | None = None  # what ours may move at most
    copies: int = 1  # of the input, used in turn; with enough of them the L2 is cold
    median: float | None = None
    p20: float | None = None
    p80: float | None = None
    repeats: int = 0
    gb_per_s: float | None = None  # contract_bytes / median
    copy_gb_per_s: float | None = None  # of a copy within the device that moves as many bytes, in the same run
    error: str | None = None
    traceback: str | None = None

    @property
    def share_of_copy(self) -> float | None:
        return self.gb_per_s / self.copy_gb_per_s if self.gb_per_s and self.copy_gb_per_s else None


class Contenders:
    """Contenders of one shape. What fails to start is kept as a record with its error and stops nobody else."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.cuda = device == "cuda"
        self.entries: list[tuple[Record, Contender]] = []
        self.failed: list[Record] = []
        self.copies: dict[str, Contender] = {}  # of memory, by name

    def add_ours(self, name: str, case: Case) -> None:
        copies = self._copies(case.distinct_bytes)
        self._add_copy(case)
        record = Record(name, "eager", case.shape, case.batch, case.bytes_moved, copies)

        def start() -> tuple[list[Call], Callable[[Any], None]]:
            several = rotated(make_inputs(case, self.device), copies)
            return [our_call(case, each) for each in several], lambda result: check_ours(case, several[0], result)

        self._enter(record, start, captures=True, at_least=timing.CALLS_PER_REPETITION if self.cuda else 1)

    def _copies(self, distinct_bytes: int) -> int:
        return timing.copies_for_cold_cache(distinct_bytes) if self.cuda else 1

    def _add_copy(self, case: Case) -> None:
        """Before anybody whose capture may fail: torch makes no promises about captures after that."""
        name = f"copy {case.bytes_moved}"
        if not self.cuda or name in self.copies:
            return
        copies = self._copies(case.bytes_moved)
        try:
            self.copies[name], _ = timing.capture(timing.device_copies(case.bytes_moved, copies))
        except Exception as error:
            self.failed.append(Record(name, "graph", case.shape, case.batch, copies=copies, **failure(error)))

    def add_peer(self, peer: Peer, case: Case) -> None:
        """A peer on the inputs that ours gets; where it is not available, the record says why."""
        copies = self._copies(case.distinct_bytes)
        record = Record(peer.name, "eager", case.shape, case.batch, copies=copies, error=peer.available())
        if record.error is not None:
            self.failed.append(record)
            return

        def start() -> tuple[list[Call], Callable[[Any], None]]:
            several = rotated(make_inputs(case, self.device), copies)
            drafts = several[0]["draft_tokens"]
            calls = [peer.prepare(case, each) for each in several]
            return calls, lambda result: check_emitted(drafts, peer.emitted(result), case.vocab_size)

        at_least = 1 if peer.per_row or not self.cuda else timing.CALLS_PER_REPETITION
        self._enter(record, start, captures=peer.captures, at_least=at_least)

    def _enter(
        self,
        record: Record,
        start: Callable[[], tuple[list[Call], Callable[[Any], None]]],
        *,
        captures: bool,
        at_least: int,
    ) -> None:
        """Check the results of a contender, then let it take part: called one by one, and as a graph where it can be."""
        try:
            calls, check = start()
            check(calls[0]())
            self.entries.append((record, Contender.in_turn(calls, at_least)))
            if self.cuda and captures:
                record = replace(record, mode="graph")
                graph, result = timing.capture(calls)
                check(result)
                self.entries.append((record, graph))
        except Exception as error:  # a contender that fails is a result too
            self.failed.append(replace(record, **failure(error)))

    def run(self, repeats: int, seconds: float = math.inf) -> list[Record]:
        """Time all in turns; `seconds` is about how long that may take."""
        self._leave_out_failing()
        contenders = {str(number): contender for number, (_, contender) in enumerate(self.entries)} | self.copies
        timings = timing.interleave(contenders, repeats=repeats, seconds=seconds, cuda=self.cuda)
        for number, (record, _) in enumerate(self.entries):
            result = timings[str(number)]
            record.median, record.p20, record.p80 = (1e6 * t for t in (result.median, result.p20, result.p80))
            record.repeats = result.repeats
            if record.contract_bytes is not None:
                record.gb_per_s = record.contract_bytes / result.median / 1e9
                copy = timings.get(f"copy {record.contract_bytes}")
                record.copy_gb_per_s = record.contract_bytes / copy.median / 1e9 if copy else None
        return [record for record, _ in self.entries] + self.failed

    def _leave_out_failing(self) -> None:
        """Those that no longer run once all others have begun, as after somebody's failed capture; they stop nobody else."""
        running = []
        for record, contender in self.entries:
            try:
                contender.run()
                if self.cuda:
                    torch.cuda.synchronize()
                running.append((record, contender))
            except Exception as error:
                self.failed.append(replace(record, **failure(error)))
        self.entries = running


def contest(
    ours: dict[str, Case],
    peers: Sequence[Peer] = (),
    *,
    device: str,
    repeats: int,
    seconds: float = math.inf,
    peers_case: Case | None = None,
) -> list[Record]:
    """Time cases of one shape, and the peers on the inputs of one; None: of that called "full".

    Where somebody fails in a way that the GPU is lost, nobody is timed, and there are records of those who failed only.
    """
    run = Contenders(device)
    entrants = [partial(run.add_ours, name, case) for name, case in ours.items()]
    entrants += [partial(run.add_peer, peer, peers_case or ours["full"]) for peer in peers]
    for enter in entrants:
        enter()
        if gpu_is_lost():
            return run.failed
    records = run.run(repeats, seconds)
    del run, entrants
    tidy()
    return records


def ratio_to(peer: str, records: Sequence[Record], ours: str = "full", mode: str | None = None) -> float | None:
    """How many times as long as ours a peer takes, both in one mode or each at its best; None where one was not measured."""

    def best(name: str) -> float | None:
        found = (r.median for r in records if r.name == name and mode in (None, r.mode))
        return min((median for median in found if median is not None), default=None)

    theirs, own = best(peer), best(ours)
    return theirs / own if theirs is not None and own is not None else None


def ratios(records: Sequence[Record], peers: Sequence[str]) -> list[dict[str, Any]]:
    """`ratio_to` by shape, peer and case of ours: each at its best, both called from Python, and both as graphs."""
    found = []
    for shape, peer, ours in itertools.product(dict.fromkeys(r.shape for r in records), peers, PEERS_MEET):
        those = [record for record in records if record.shape == shape]
        modes = {"best": None, "eager": "eager", "graph": "graph"}
        values = {name: ratio_to(peer, those, ours, mode) for name, mode in modes.items()}
        if values["best"] is not None:
            found.append({"shape": shape, "peer": peer, "ours": ours} | values)
    return found
