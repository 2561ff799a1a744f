"""The host's loop: prompts into slots, prefill in chunks, rounds, ends.

A GPU runs apart from the host, which therefore starts the next round before it reads the result of the last one. So the host
is one round behind: a row that has ended runs once more, and what it emits then is dropped.
"""

import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch

from .backend import warmup
from .config import EngineConfig, SamplingParams
from .draft_length import DraftLength
from .drafters.base import model_of, stages_of
from .graphs import on_device
from .huge_pages import huge_pages_for
from .metrics import RoundClock, Stats
from .model import PREFILL_WIDTH
from .parallel import Ranks
from .round import Round
from .round_results import PrefillTime, Results, RoundInFlight
from .scheduler import PREFILL_TOKENS, Request, Scheduler, prefill_chunk
from .slots import Slots
from .state import BatchState, Proposal
from .transfers import HostCopies, to_device


class Server:
    """Runs requests to their ends, as many at a time as there are slots.

    Args:
        round_: runs the rounds.
        state: of all slots.
        lengths: says how many tokens to draft.
        config: the engine's.
        eos_token_ids: tokens that end a text.
        stats: of the engine's life; added to.
        late: read a round's result when the next one has been started.
        ranks: the processes that share the target.
    """

    def __init__(
        self,
        round_: Round,
        state: BatchState,
        lengths: DraftLength,
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
        self._prompt_clock, self._copies = RoundClock(self._device), HostCopies()
        self._prompts_read: list[PrefillTime] = []  # since the last round began
        self._huge_pages = huge_pages_for(round_.target.model)
        self._since = 0.0  # perf_counter() when the step under way began

    def run(self, requests: list[Request]) -> Iterator[tuple[Request, int]]:
        """Yields (request, its number of new tokens) per row and round; one that has ended has a finish_reason or an error."""
        scheduler = Scheduler(requests, self._config.max_batch_size)
        launched: RoundInFlight | None
        waiting: RoundInFlight | None = None  # a round that was started and is not read, if results are read late
        for clock in (self._round.clock, self._prompt_clock):
            clock.take()  # marks of a step that failed
        self._prompts_read = []
        try:
            while scheduler.busy:
                self._since = time.perf_counter()
                with on_device(self._device):
                    self._begin(scheduler.admit())
                    self._prefill(scheduler)
                    launched = None
                    if not _ends_all(waiting, scheduler):
                        launched = self._launch(scheduler, unread=waiting.asked + 1 if waiting else 0)
                    if self._late:
                        launched, waiting = waiting, launched
                    ended = self._read(launched, scheduler) if launched else []
                if self._huge_pages is not None:
                    self._huge_pages.after_round()
                self._stats.total_seconds = self._seconds()
                yield from ended
        finally:
            self._slots.unclean |= scheduler.running.keys() | scheduler.prefilling.keys()
            self._state.limits.zero_()

    def _seconds(self) -> float:
        """Seconds that the engine has worked in its life; without what the reader of a stream does between pieces."""
        return self._stats.total_seconds + time.perf_counter() - self._since

    def warmup(self, num_rows: int, text_length: int, params: SamplingParams) -> None:
        """Run every kind of round that rows of such texts may need. The rows are not active, so nothing changes.

        All graphs that this captures are kept, however many they are. On a CPU there is nothing to capture, and only
        what samples to compile.

        Args:
            num_rows: that decode together.
            text_length: of prompts with their answers, in tokens.
            params: of the rows.
        """
        self._slots.reserve(text_length)
        if self._device.type == "cpu" and not self._round.graphs.planned:
            if params.temperature or params.logprobs:
                target = self._round.target
                warmup(target.vocab_size, 0, target.dtype, self._device)
            return
        request = Request(0, [0] * text_length, params, 0, text_length, None)
        state = self._slots.select(slice(0, self._slots.num_rows(num_rows)), [request])
        with self._round.graphs.warmup(), torch.inference_mode(), on_device(self._device):
            for num_draft_tokens in self._kinds_of_rounds():
                self._round.run(state, num_draft_tokens, lambda proposal: proposal)
        self._round.clock.take()

    def _kinds_of_rounds(self) -> list[int]:
        """Numbers of drafts in rounds one after another, among which are all kinds of rounds; all twice, if work is captured the
        second time that it comes."""
        possible = self._lengths.possible if self._round.drafter is not None else []
        drafts = [number for number in possible if number]
        if not self._round.graphs.planned:
            return [0, *drafts]
        rounds = [0, 0]
        for number in drafts:
            rounds += 4 * [number]  # in the first of them, a drafter may have more to read than in the others
        stages = [stage for stage in stages_of(self._round.drafter) if not getattr(stage, "reads_own_texts", False)]
        reads = any(model_of(stage) is not None for stage in stages)
        if 0 in possible and reads:
            # What a model that drafts has to make up for is another graph behind one round without drafts, ...
            rounds += 2 * [each for number in drafts for each in (0, number)]
            # ... and behind many, after which one draft is tried (`AdaptiveLength`).
            for count in (4, 8, 16, 32):
                rounds += 2 * [*count * [0], drafts[0]]
        return rounds

    def warm_up_reading(self, text_length: int) -> None:
        """Compile what prompts of such texts are read with, and have libraries load what they need for it.

        By having the target, and models that draft, read anything into slots, which are free: into the first one, and into
        another, where kernels are told which.
        """
        if self._device.type == "cpu":
            return
        self._slots.reserve(text_length)
        most = self._state.tokens.shape[1] - 1  # what lies behind is no text
        for slot, power in itertools.product(
            range(min(2, self._config.max_batch_size)), range(text_length.bit_length())
        ):
            width = 1 << power
            if width <= PREFILL_WIDTH:
                rows = slice(slot, slot + 1)
                request = Request(0, [0] * (width + 1), SamplingParams(), 0, text_length, None)
                with on_device(self._device):
                    tokens = torch.zeros(1, width, dtype=torch.int64, device=self._device)
                    self._round.target.prefill(tokens, [(0, width)], rows)
                    state = replace(self._slots.select(rows, [request]), prompt_lengths=(min(width + 1, most),))
                    for stage in stages_of(self._round.drafter):
                        if model_of(stage) is not None:
                            stage.prefill(state)

    def _begin(self, requests: list[Request]) -> None:
        """Put requests into their slots, not yet active."""
        if not requests:
            return
        for request in requests:
            request.started = self._seconds()
            self._lengths.begin(request.slot)
        self._slots.begin(requests)

    def _prefill(self, scheduler: Scheduler) -> None:
        """Read new prompts: about PREFILL_TOKENS tokens while rows are running, else until the first row can run."""
        budget = PREFILL_TOKENS
        while scheduler.prefilling and (budget > 0 or not scheduler.running):
            self._prompt_clock.mark()
            group = sorted(scheduler.prefilling.values(), key=lambda request: request.slot)
            target = self._round.target
            group = group[:1] if target.exact else group  # its own length decides the shapes of its calls
            group, width = prefill_chunk(group, target.skips_padding)
            spans = [(request.prefilled, min(request.prefilled + width, request.to_prefill)) for request in group]
            if width:
                rows = self._slots.rows(group)
                target.prefill(self._state.tokens[rows], spans, rows)
            for request in group:
                request.prefilled = min(request.prefilled + width, request.to_prefill)
            self._start([request for request in group if request.prefilled == request.to_prefill], scheduler)
            self._prompt_clock.mark()
            stats = (*(request.stats for request in group), self._stats)
            self._prompts_read.append(PrefillTime(self._prompt_clock.take(), stats))
            budget -= sum(end - begin for begin, end in spans) if target.skips_padding else width * len(group)

    def _start(self, requests: list[Request], scheduler: Scheduler) -> None:
        """Make rows active whose prompts have been read."""
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

    def _launch(self, scheduler: Scheduler, unread: int) -> RoundInFlight:
        """Start a round of all running rows.

        Args:
            unread: tokens that the round before, which has not been read, may have added to each row.
        """
        begin = time.perf_counter()
        running = dict(sorted(scheduler.running.items()))
        state, first = self._rows_of(running, unread)
        asked = 0
        if self._round.drafter is not None:
            asked = self._num_draft_tokens(running, state, scheduler.queued)
        set_up = self._round.graphs.set_up
        with torch.inference_mode():
            packed = self._round.run(state, asked, self._trim(list(running), first))
            if self._late:  # the next round may write over it
                packed = self._copies.make(packed)
            arrived = self._round.clock.mark()
        usual = self._round.graphs.set_up == set_up
        without_drafts = frozenset(slot for slot, request in running.items() if request.without_drafts)
        spans = self._round.clock.take()
        prompts, self._prompts_read = self._prompts_read, []
        return RoundInFlight(
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
            prompts=prompts,
        )

    def _rows_of(self, running: dict[int, Request], unread: int) -> tuple[BatchState, int]:
        """The state of the slots that a round is run on, from the first running one to the last, and the first of them.

        Slots between these that are free cost little. Where all rounds are to have the same shapes, a round begins at slot 0.
        """
        same_shapes = self._round.graphs.planned or self._round.target.exact
        first = 0 if same_shapes else min(running)
        rows = slice(first, self._slots.num_rows(1 + max(running)))
        processors = ((slot - first, request.params.logits_processor) for slot, request in running.items())
        own = tuple(each for each in processors if each[1] is not None)
        return self._slots.select(rows, list(running.values()), unread, own), first

    def _num_draft_tokens(self, running: dict[int, Request], state: BatchState, queued: bool) -> int:
        """Tokens to draft in a round; `queued`: some requests are yet to run, so that free slots are wanted."""
        remaining = [request.limit - request.length for request in running.values()]
        room = max(remaining) - 1
        if self._round.graphs.planned:
            room = max(room, self._lengths.num_draft_tokens)  # a shorter round would be another graph
        return self._lengths.choose(list(running), room, self._ends_early(state), None if queued else remaining)

    def _ends_early(self, state: BatchState) -> bool:
        """Whether the drafter stops by itself where drafting on would not pay, and `_trim` can cut what it drafts."""
        ends_early = getattr(self._round.drafter, "ends_early", None)
        return (
            ends_early is not None and state.all_greedy and not self._round.graphs.planned and bool(ends_early(state))
        )

    def _trim(self, rows: list[int], first: int) -> Callable[[Proposal], Proposal]:
        """Cuts a proposal to what is worth verifying; nothing where a look at it means waiting, or graphs fix its shape.

        Args:
            rows: the slots that run.
            first: the slot of the proposal's first row.
        """
        if self._round.graphs.planned or not self._state.can_look:
            return lambda proposal: proposal
        return lambda proposal: self._lengths.trim(proposal, rows, first)

    def _read(self, launched: RoundInFlight, scheduler: Scheduler) -> list[tuple[Request, int]]:
        """Give a round's tokens to its requests, and free the slots of those that have ended."""
        advanced = self._results.read(launched, self._lengths)
        if self._late:
            self._copies.give_back(launched.packed)
        for request, _ in advanced:
            if request.ended:
                request.stats.total_seconds = self._seconds() - request.started
                scheduler.release(request)
                self._state.limits[request.slot].zero_()  # to assign 0 would wait for the round under way
                rejected = request.stats.draft_tokens > request.stats.accepted_tokens
                if rejected or self._late:  # as the next round is under way
                    self._slots.unclean.add(request.slot)
        return advanced


def _ends_all(waiting: RoundInFlight | None, scheduler: Scheduler) -> bool:
    """Whether a round that is not read is the last one of all running rows: each has a token in it, and place for no more."""
    return waiting is not None and all(
        waiting.requests.get(slot) is request and request.length + 1 >= request.limit
        for slot, request in scheduler.running.items()
    )
