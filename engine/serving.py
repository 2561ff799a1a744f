"""The host's loop: prompts into slots, prefill in chunks, rounds, ends.

Where the device runs apart from the host, the packed result of a round is read while the next one is under way: the host
is then one round behind, and what a row emits after its end is dropped.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch

from .config import EngineConfig, SamplingParams
from .draft_length import FixedLength
from .graphs import on_device
from .metrics import Stats
from .parallel import Ranks
from .results import Launched, Results
from .round import Round
from .scheduler import PREFILL_TOKENS, Request, Scheduler, prefill_chunk
from .slots import Slots
from .state import BatchState, Proposal
from .transfers import to_device, to_host


class Server:
    """Runs requests to their ends, as many at a time as there are slots.

    Args:
        state: a slot for each row.
        late: read results one round late.
        ranks: those that share the target.
    """

    def __init__(
        self,
        round_: Round,
        state: BatchState,
        lengths: FixedLength,
        config: EngineConfig,
        eos_token_ids: frozenset[int],
        stats: Stats,
        late: bool,
        ranks: Ranks,
    ) -> None:
        self._round, self._state, self._lengths, self._config = round_, state, lengths, config
        self._device, self._stats, self._late = state.tokens.device, stats, late
        self._slots = Slots(round_, state, config)
        self._results = Results(round_, state, eos_token_ids, stats, ranks)
        self._since = 0.0  # when the step under way began

    def run(self, requests: list[Request]) -> Iterator[tuple[Request, int]]:
        """Yields (request, new tokens) per row and round; a request that has ended has a finish_reason or an error."""
        scheduler = Scheduler(requests, self._config.max_batch_size)
        launched: Launched | None
        waiting: Launched | None = None  # started, not read
        self._round.clock.take()  # marks of a round that failed
        try:
            while scheduler.busy:
                self._since = time.perf_counter()
                with on_device(self._device):
                    self._begin(scheduler.admit())
                    self._prefill(scheduler)
                    launched = self._launch(scheduler, unread=waiting.asked + 1 if waiting else 0)
                    if self._late:
                        launched, waiting = waiting, launched
                    ended = self._read(launched, scheduler) if launched else []
                self._stats.total_seconds = self._seconds()
                yield from ended
        finally:
            self._slots.unclean |= scheduler.running.keys() | scheduler.prefilling.keys()
            self._state.limits.zero_()

    def _seconds(self) -> float:
        """The engine's working time by now: without what readers of a stream do between its pieces."""
        return self._stats.total_seconds + time.perf_counter() - self._since

    def warmup(self, num_rows: int, text_length: int, params: SamplingParams) -> None:
        """Run every kind of round that rows of such texts may need, on rows that are not active: they change nothing.

        However many graphs that takes, none is forgotten for another.
        """
        self._slots.reserve(text_length)
        request = Request(0, [0] * text_length, params, 0, text_length, None)
        state = self._slots.select(slice(0, self._slots.num_rows(num_rows)), [request])
        drafts = {0, *self._lengths.possible} if self._round.drafter is not None else {0}
        with self._round.graphs.keeping_all(), torch.inference_mode(), on_device(self._device):
            for num_draft_tokens in sorted(drafts):
                # Each half first eagerly, then captured; a draft model makes up for rounds without it eagerly as well.
                for _ in range(4 if self._round.graphs.enabled else 1):
                    self._round.run(state, num_draft_tokens, lambda proposal: proposal)
        self._round.clock.take()

    def _begin(self, requests: list[Request]) -> None:
        """Put requests into their slots, not yet active."""
        if not requests:
            return
        for request in requests:
            request.started = self._seconds()
            self._lengths.begin(request.slot)
        self._slots.begin(requests)

    def _prefill(self, scheduler: Scheduler) -> None:
        """Read new prompts: PREFILL_TOKENS of them while others are running, else until somebody is."""
        budget = PREFILL_TOKENS
        while scheduler.prefilling and (budget > 0 or not scheduler.running):
            begin = time.perf_counter()
            group = sorted(scheduler.prefilling.values(), key=lambda request: request.slot)
            target = self._round.target
            group = group[:1] if target.exact else group  # its own length alone decides the shapes of its calls
            group, width = prefill_chunk(group, target.skips_padding)
            spans = [(request.prefilled, min(request.prefilled + width, request.to_prefill)) for request in group]
            if width:
                rows = self._slots.rows(group)
                target.prefill(self._state.tokens[rows], spans, rows)
            for request in group:
                request.prefilled = min(request.prefilled + width, request.to_prefill)
            self._start([request for request in group if request.prefilled == request.to_prefill], scheduler)
            seconds = time.perf_counter() - begin
            for stats in (*(request.stats for request in group), self._stats):
                stats.prefill_seconds += seconds
            budget -= sum(end - begin for begin, end in spans) if target.skips_padding else width * len(group)

    def _start(self, requests: list[Request], scheduler: Scheduler) -> None:
        """Let rows decode whose prompts have been read."""
        if not requests:
            return
        if self._round.drafter is not None:
            lengths = tuple(len(request.prompt) for request in requests)
            state = replace(self._slots.select(self._slots.rows(requests), requests), prompt_lengths=lengths)
            self._round.drafter.prefill(state)
        limits = to_device([request.limit for request in requests], self._device)
        self._state.limits[self._slots.rows(requests)] = limits
        for request in requests:
            scheduler.start(request)

    def _launch(self, scheduler: Scheduler, unread: int) -> Launched:
        """Start a round of all running rows."""
        begin = time.perf_counter()
        running = dict(sorted(scheduler.running.items()))
        # Rows that have ended cost nothing before those that run, and little between them, but where all calls have one shape.
        first = 0 if self._round.graphs.enabled or self._round.target.exact else min(running)
        state = self._slots.select(slice(first, self._slots.num_rows(1 + max(running))), list(running.values()), unread)
        processors = ((slot - first, request.params.logits_processor) for slot, request in running.items())
        state = replace(state, processors=tuple(each for each in processors if each[1] is not None))
        rows = list(running)
        room = max(request.limit - request.length for request in running.values()) - 1
        if self._round.graphs.enabled:
            room = max(room, self._lengths.num_draft_tokens)  # a shorter round would be another graph
        remaining = None if scheduler.queued else [request.limit - request.length for request in running.values()]
        asked = 0
        if self._round.drafter is not None:
            asked = self._lengths.choose(rows, room, self._ends_early(state), remaining)
        set_up = self._round.graphs.set_up
        with torch.inference_mode():
            packed = self._round.run(state, asked, self._trim(rows, first))
            arrived = None
            if self._late:  # the next round may write over it
                packed, arrived = to_host(packed)
        usual = self._round.graphs.set_up == set_up
        without_drafts = frozenset(slot for slot, request in running.items() if request.without_drafts)
        spans = self._round.clock.take()
        return Launched(
            packed=packed,
            with_logprobs=state.logprobs,
            arrived=arrived,
            requests=running,
            first=first,
            asked=asked,
            without_drafts=without_drafts,
            begin=begin,
            late=self._late,
            usual=usual,
            spans=spans,
        )

    def _ends_early(self, state: BatchState) -> bool:
        """Whether the drafter stops by itself where drafting on would not pay, and what it drafts can be cut after it."""
        ends_early = getattr(self._round.drafter, "ends_early", None)
        return (
            ends_early is not None and state.all_greedy and not self._round.graphs.enabled and bool(ends_early(state))
        )

    def _trim(self, rows: list[int], first: int) -> Callable[[Proposal], Proposal]:
        """What cuts proposals of rows from slot `first` on: nothing where looking at them means waiting, or where shapes are captured."""
        if self._round.graphs.enabled or self._state.tokens.device.type != "cpu":
            return lambda proposal: proposal
        return lambda proposal: self._lengths.trim(proposal, rows, first)

    def _read(self, launched: Launched, scheduler: Scheduler) -> list[tuple[Request, int]]:
        """Give a round's tokens to its requests, and free the slots of those that have ended."""
        advanced = self._results.read(launched, self._lengths)
        for request, _ in advanced:
            if request.ended:
                request.stats.total_seconds = self._seconds() - request.started
                scheduler.release(request)
                self._state.limits[request.slot] = 0
                rejected = request.stats.draft_tokens > request.stats.accepted_tokens
                if rejected or self._late:  # as the next round is under way
                    self._slots.unclean.add(request.slot)
        return advanced
