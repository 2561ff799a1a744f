"""The host's loop: prompts into slots, prefill in chunks, rounds, ends.

Where the device runs apart from the host, the packed result of a round is read while the next one is under way: the host
is then one round behind, and what a row emits after its end is dropped.
"""

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .backend import FATAL_STATUS, Status
from .config import EngineConfig, SamplingParams
from .draft_length import FixedLength
from .graphs import bucket, on_device
from .metrics import Stats
from .parallel import Ranks
from .round import Round, RowResult, unpack
from .scheduler import PREFILL_TOKENS, Request, Scheduler, prefill_chunk
from .state import BatchState, Proposal

logger = logging.getLogger(__name__)
_FATAL, _INVALID_DRAFT = int(FATAL_STATUS), int(Status.INVALID_DRAFT)  # IntFlag is slow, and asked per row


@dataclass
class Launched:
    """A round that is under way."""

    packed: Tensor  # on the host, complete when `arrived` has passed
    with_logprobs: bool
    arrived: torch.cuda.Event | None
    requests: dict[int, Request]  # by slot
    first: int  # the slot of its first row
    asked: int  # drafts
    without_drafts: frozenset[int]  # slots for which they did not count
    begin: float
    usual: bool  # took no longer for having set something up, or captured it
    spans: Callable[[], list[float]]  # draft and verify seconds, once the result has arrived


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
        self._device = state.tokens.device
        self._eos_token_ids, self._stats, self._late, self._ranks = eos_token_ids, stats, late, ranks
        self._warned = False  # of draft logits that are no distribution
        self._unclean: set[int] = set()  # slots in whose K/V drafts, or a text that was broken off, may have left NaN
        self._reserved = 0  # length of the rows that there is room for everywhere
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
                    ended = list(self._read(launched, scheduler)) if launched else []
                self._stats.total_seconds = self._seconds()
                yield from ended
        finally:
            self._unclean |= scheduler.running.keys() | scheduler.prefilling.keys()
            self._state.limits.zero_()

    def _seconds(self) -> float:
        """The engine's working time by now: without what readers of a stream do between its pieces."""
        return self._stats.total_seconds + time.perf_counter() - self._since

    def warmup(self, num_rows: int, text_length: int, params: SamplingParams) -> None:
        """Run every kind of round that rows of such texts may need, on rows that are not active: they change nothing.

        However many graphs that takes, none is forgotten for another.
        """
        self._reserve(text_length)
        request = Request(0, [0] * text_length, params, 0, text_length, None)
        state = self._select(slice(0, self._num_rows(num_rows)), [request])
        drafts = {0, *self._lengths.possible} if self._round.drafter is not None else {0}
        with self._round.graphs.keeping_all(), torch.inference_mode(), on_device(self._device):
            for num_draft_tokens in sorted(drafts):
                # Each half first eagerly, then captured; a draft model makes up for rounds without it eagerly as well.
                for _ in range(4 if self._round.graphs.enabled else 1):
                    self._round.run(state, num_draft_tokens, lambda proposal: proposal)
        self._round.clock.take()

    def _reserve(self, length: int) -> None:
        """Make room for rows of this length, in the target's cache and in what the drafter keeps.

        Graphs are forgotten before buffers move for it: some may have moved when memory runs out.
        """
        if length <= self._reserved:
            return
        self._round.graphs.clear()
        cache = self._round.target.cache
        if cache.capacity:  # growing copies, so not each time a little
            length = min(max(length, cache.capacity * 5 // 4), self._state.tokens.shape[1] - 1)
        cache.reserve(length)
        if (reserve := getattr(self._round.drafter, "reserve", None)) is not None:
            reserve(cache.capacity)  # grows when the target's does, and not in between
        self._reserved = cache.capacity

    def _num_rows(self, num_rows: int) -> int:
        """Rows of a round that has so many at least: few different numbers where each is a graph, and one for exact calls, whose
        target reads all rows anyway."""
        if not self._round.graphs.enabled:
            return num_rows
        most = self._config.max_batch_size
        return most if self._round.target.exact else min(bucket(num_rows, 1), most)

    def _begin(self, requests: list[Request]) -> None:
        """Put requests into their slots, not yet active."""
        if not requests:
            return
        taken = [request.slot for request in requests]
        slots = torch.tensor(taken, device=self._state.tokens.device)
        for slot in self._unclean.intersection(taken):
            self._round.target.cache.begin_rows(slice(slot, slot + 1))
            self._unclean.remove(slot)
        longest = max(request.length for request in requests)
        padded = [request.prompt + [0] * (longest - len(request.prompt)) for request in requests]
        self._state.tokens[slots, :longest] = torch.tensor(padded, device=slots.device)
        columns = {
            "seq_lens": [len(request.prompt) - 1 for request in requests],
            "limits": [0 for _ in requests],
            "seed": [request.seed for request in requests],
            "temperature": [request.params.temperature for request in requests],
            "top_k": [request.params.top_k for request in requests],
            "top_p": [request.params.top_p for request in requests],
            "min_p": [request.params.min_p for request in requests],
            "repetition_penalty": [request.params.repetition_penalty for request in requests],
            "without_drafts": [False for _ in requests],
        }
        for name, values in columns.items():
            column = getattr(self._state, name)
            column[slots] = torch.tensor(values, dtype=column.dtype, device=column.device)
        for request in requests:
            request.started = self._seconds()
            self._lengths.begin(request.slot)
        self._reserve(max(request.limit for request in requests))

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
                rows = self._rows(group)
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
            state = replace(self._select(self._rows(requests), requests), prompt_lengths=lengths)
            self._round.drafter.prefill(state)
        limits = torch.tensor([request.limit for request in requests], device=self._state.limits.device)
        self._state.limits[self._rows(requests)] = limits
        for request in requests:
            scheduler.start(request)

    def _rows(self, requests: Sequence[Request]) -> slice | Tensor:
        """Their slots; a slice, which needs no copy, where they lie side by side."""
        first, last = requests[0].slot, requests[-1].slot
        if last - first + 1 == len(requests):
            return slice(first, last + 1)
        return torch.tensor([request.slot for request in requests], device=self._state.tokens.device)

    def _select(self, rows: slice | Tensor, requests: Sequence[Request], unread: int = 0) -> BatchState:
        """These rows of the state; `unread` tokens may have been added to each that the host does not know yet."""
        params = [request.params for request in requests]
        longest = max(min(request.length + unread, request.limit) for request in requests)
        if self._round.graphs.enabled:  # few different numbers, for few graphs
            longest = min(bucket(longest, 256), self._state.tokens.shape[1] - 1)
        return self._state.select(
            rows,
            max_text_length=longest,
            max_limit=max(request.limit for request in requests),
            filtered=any(p.temperature and (p.top_k or p.top_p < 1 or p.min_p) for p in params),
            penalised=any(p.repetition_penalty != 1 for p in params),
            logprobs=any(p.logprobs for p in params),
            all_greedy=all(p.temperature == 0 for p in params),
            coupled=self._config.verification == "coupled",
            may_end_early=len(requests) == 1 and self._config.num_draft_tokens == "auto",
        )

    def _launch(self, scheduler: Scheduler, unread: int) -> Launched:
        """Start a round of all running rows."""
        begin = time.perf_counter()
        running = dict(sorted(scheduler.running.items()))
        # Rows that have ended cost nothing before those that run, and little between them, but where all calls have one shape.
        first = 0 if self._round.graphs.enabled or self._round.target.exact else min(running)
        state = self._select(slice(first, self._num_rows(1 + max(running))), list(running.values()), unread)
        processors = {slot - first: request.params.logits_processor for slot, request in running.items()}
        state = replace(state, processors=tuple(each for each in processors.items() if each[1] is not None))
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
                packed, arrived = _sent_to_host(packed)
        usual = self._round.graphs.set_up == set_up
        without_drafts = frozenset(slot for slot, request in running.items() if request.without_drafts)
        spans = self._round.clock.take()
        return Launched(packed, state.logprobs, arrived, running, first, asked, without_drafts, begin, usual, spans)

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

    def _read(self, launched: Launched, scheduler: Scheduler) -> Iterator[tuple[Request, int]]:
        """Give a round's tokens to its requests."""
        if launched.arrived is not None:
            launched.arrived.synchronize()
        results = unpack(launched.packed, launched.with_logprobs)
        draft_seconds, verify_seconds = launched.spans()
        other_seconds = verify_seconds if self._late else time.perf_counter() - launched.begin - draft_seconds
        # Some may have ended in the round before, which had not been read when this one began.
        going = [request for request in launched.requests.values() if not request.ended]
        told = draft_seconds, other_seconds, float(launched.usual)
        of_rows = [results[request.slot - launched.first] for request in going]
        drafting, other, usual = self._ranks.end_round([result._replace(logprobs=None) for result in of_rows], told)
        news = [self._collect(*each, launched) for each in zip(going, of_rows, strict=True)]
        if self._round.target.skips_padding:
            size = sum(result.num_proposed for result in of_rows)
        else:
            size = len(results[0].tokens) - 1
        self._lengths.observe_times(len(launched.requests), launched.asked, size, drafting, other, bool(usual))
        self._add_times(self._stats, draft_seconds, verify_seconds)
        for request, new in zip(going, news, strict=True):
            self._add_times(request.stats, draft_seconds, verify_seconds)
            if request.ended:
                request.stats.total_seconds = self._seconds() - request.started
                scheduler.release(request)
                self._state.limits[request.slot] = 0
                rejected = request.stats.draft_tokens > request.stats.accepted_tokens
                if rejected or self._late:  # as the next round is under way
                    self._unclean.add(request.slot)
            yield request, new

    def _collect(self, request: Request, result: RowResult, launched: Launched) -> int:
        """Append a round's tokens to a request, up to the one that ends it; returns how many."""
        tokens, accepted, proposed, status, logprobs = result
        new_tokens = tokens[: accepted + 1]
        if status & _FATAL:
            slot, cache = request.slot, self._round.target.cache
            if self._round.drafter is None or slot in launched.without_drafts:
                cache.clear(slot, torch.zeros_like(self._state.seq_lens[slot]))
                request.error = (
                    f"the target returned logits that are no distribution ({Status(status).name}) for "
                    f"prompts[{request.index}] at position {request.length}"
                )
                return 0
            # Attention weighs the drafts behind a token with 0, but 0 * NaN is NaN: what a draft gives may have spoilt it, also one
            # of an earlier round, or one that was not verified.
            cache.clear(slot, self._state.seq_lens[slot])
            self._state.without_drafts[slot] = request.without_drafts = True
            new_tokens = tokens[:accepted]
        if status & _INVALID_DRAFT and not self._warned:
            self._warned = True
            logger.warning("the drafter returned logits that are no distribution; its drafts are ignored there")
        self._lengths.observe(request.slot, new_tokens, accepted, proposed, launched.asked)
        before = len(request.token_ids)
        for column, token in enumerate(new_tokens):
            self._append(request, token, drafted=column < accepted)
            if request.ended:
                if request.text:
                    request.text.finish()
                    if request.text.stopped:  # by what was held back
                        request.finish_reason = "stop"
                break
        new = len(request.token_ids) - before
        if logprobs is not None and request.params.logprobs:
            request.logprobs += logprobs[:new]
        for stats in (request.stats, self._stats):
            stats.add_round(proposed, accepted, new)
        return new

    def _append(self, request: Request, token: int, drafted: bool) -> None:
        request.token_ids.append(token)
        if token in self._eos_token_ids and not request.params.ignore_eos:
            request.finish_reason = "eos"
        elif token in request.stop_token_ids or (request.text and request.text.push(token, drafted)):
            request.finish_reason = "stop"
        elif request.length >= request.limit:
            request.finish_reason = "length"

    @staticmethod
    def _add_times(stats: Stats, draft_seconds: float, verify_seconds: float) -> None:
        stats.draft_seconds += draft_seconds
        stats.verify_seconds += verify_seconds


def _sent_to_host(tensor: Tensor) -> "tuple[Tensor, torch.cuda.Event | None]":
    """A copy on the host, and the event after which it is complete."""
    if not tensor.is_cuda:
        return tensor.clone(), None
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    copy.copy_(tensor, non_blocking=True)
    arrived = torch.cuda.Event()
    arrived.record(torch.cuda.current_stream(tensor.device))
    return copy, arrived
