"""The host side of a finished round: reads its packed result and hands the tokens to their requests."""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .backend import FATAL_STATUS, Status
from .draft_length import DraftLength
from .metrics import Stats
from .parallel import Ranks
from .round import Round
from .scheduler import Request
from .state import BatchState

logger = logging.getLogger(__name__)
_FATAL, _INVALID_DRAFT = int(FATAL_STATUS), int(Status.INVALID_DRAFT)  # IntFlag is slow, and asked per row


class RowResult(NamedTuple):
    """What a round did to one row, on the host."""

    tokens: list[int]  # K+1; -1 after the new ones
    num_accepted: int
    num_proposed: int
    status: int  # bits of `Status`
    logprobs: list[float] | None  # of the tokens, if the round was asked for them


@dataclass(frozen=True)
class PrefillTime:
    """The time of reading a part of some prompts, before a round began."""

    spans: Callable[[], list[float]]  # seconds, once the round's result has arrived
    stats: tuple[Stats, ...]  # to which the time is added: of the requests, and of the engine


@dataclass
class RoundInFlight:
    """A round that is under way."""

    packed: Tensor  # see `verify_and_commit`; on the host, complete when `arrived` has passed
    with_logprobs: bool
    arrived: torch.cuda.Event | None  # None: it is complete
    requests: dict[int, Request]  # by slot
    first: int  # the slot of its first row
    asked: int  # drafts that the drafter was asked for
    without_drafts: frozenset[int]  # slots whose drafts did not count
    begin: float  # perf_counter() at its start
    late: bool  # the next one begins before this one is read
    usual: bool  # False: it set something up, or captured it, and took longer for it
    spans: Callable[[], list[float]]  # seconds of drafting and of verification, once the result has arrived
    prompts: list[PrefillTime]  # since the round before began


class Results:
    """Reads rounds.

    Args:
        round_: runs them.
        state: of all slots.
        eos_token_ids: tokens that end a text.
        stats: of the engine's life; added to.
        ranks: the processes that share the target.
    """

    def __init__(
        self, round_: Round, state: BatchState, eos_token_ids: frozenset[int], stats: Stats, ranks: Ranks
    ) -> None:
        self._round, self._state, self._stats, self._ranks = round_, state, stats, ranks
        self._eos_token_ids = eos_token_ids
        self._warned = False  # of draft logits that are not a distribution

    def read(self, launched: RoundInFlight, lengths: DraftLength) -> list[tuple[Request, int]]:
        """Give a round's tokens to its requests. `lengths` learns from the round.

        Returns:
            The requests that had not ended before, each with its number of new tokens.

        Raises:
            EngineError: under tensor parallelism, if the ranks have come to different tokens.
        """
        if launched.arrived is not None:
            launched.arrived.synchronize()
        results = unpack(launched.packed, launched.with_logprobs)
        for prompts in launched.prompts:
            seconds = sum(prompts.spans())
            for stats in prompts.stats:
                stats.prefill_seconds += seconds
        draft_seconds, verify_seconds = launched.spans()
        other_seconds = verify_seconds if launched.late else time.perf_counter() - launched.begin - draft_seconds
        # Some may have ended in the round before, which had not been read when this one began.
        going = [request for request in launched.requests.values() if not request.ended]
        told = draft_seconds, other_seconds, float(launched.usual)
        of_rows = [results[request.slot - launched.first] for request in going]
        drafting, other, usual = self._ranks.end_round([result._replace(logprobs=None) for result in of_rows], told)
        news = [self._collect(*each, launched, lengths) for each in zip(going, of_rows, strict=True)]
        if self._round.target.skips_padding:
            size = sum(result.num_proposed for result in of_rows)
        else:
            size = len(results[0].tokens) - 1
        lengths.observe_times(len(launched.requests), launched.asked, size, drafting, other, bool(usual))
        for stats in (self._stats, *(request.stats for request in going)):
            stats.draft_seconds += draft_seconds
            stats.verify_seconds += verify_seconds
        return list(zip(going, news, strict=True))

    def _collect(self, request: Request, result: RowResult, launched: RoundInFlight, lengths: DraftLength) -> int:
        """Append a round's tokens to a request, up to the one that ends it; returns how many."""
        tokens, accepted, proposed, status, logprobs = result
        new_tokens = tokens[: accepted + 1]
        if status & _FATAL:
            self._without_distribution(request, status, launched)
            if request.error is not None:
                return 0
            new_tokens = tokens[:accepted]
        if status & _INVALID_DRAFT and not self._warned:
            self._warned = True
            logger.warning("the drafter returned logits that are not a distribution; the affected drafts are ignored")
        lengths.observe(request.slot, new_tokens, accepted, proposed, launched.asked)
        before = len(request.token_ids)
        for column, token in enumerate(new_tokens):
            self._append(request, token, drafted=column < accepted)
            if request.ended:
                if request.stream:
                    request.stream.finish()
                    if request.stream.stopped:  # by what was held back
                        request.finish_reason = "stop"
                break
        new = len(request.token_ids) - before
        if logprobs is not None and request.params.logprobs:
            request.logprobs += logprobs[:new]
        for stats in (request.stats, self._stats):
            stats.add_round(proposed, accepted, new)
        return new

    def _without_distribution(self, request: Request, status: int, launched: RoundInFlight) -> None:
        """Fail a request whose logits are not a distribution, or have it continue without drafts if there were any.

        The drafts may be to blame, not the text: attention gives weight 0 to the K/V of later, rejected or unverified tokens, but
        0 * NaN is NaN. So a row fails only if its logits are not a distribution without drafts as well.
        """
        slot, cache = request.slot, self._round.target.cache
        if self._round.drafter is not None and slot not in launched.without_drafts:
            cache.clear(slot, self._state.seq_lens[slot])
            self._state.without_drafts[slot].fill_(True)
            request.without_drafts = True
            return
        cache.clear(slot, torch.zeros_like(self._state.seq_lens[slot]))
        source = "the target" if request.params.logits_processor is None else "the target or its logits_processor"
        request.error = (
            f"{source} returned logits that are not a distribution ({Status(status).name}) for prompts[{request.index}] at "
            f"position {request.length}"
        )

    def _append(self, request: Request, token: int, drafted: bool) -> None:
        request.token_ids.append(token)
        if token in self._eos_token_ids and not request.params.ignore_eos:
            request.finish_reason = "eos"
        elif token in request.stop_token_ids or (request.stream and request.stream.push(token, drafted)):
            request.finish_reason = "stop"
        elif request.length >= request.limit:
            request.finish_reason = "length"


def unpack(packed: Tensor, with_logprobs: bool) -> list[RowResult]:
    """The packed result of a round (see `verify_and_commit`), on the host, row by row."""
    logprobs: list[Any] = [None] * len(packed)
    if with_logprobs:
        width = 3 + (packed.shape[1] - 3) // 2
        packed, logprobs = packed[:, :width], packed[:, width:].view(torch.float64).tolist()
    rows = packed.tolist()
    return [
        RowResult(tokens, accepted, proposed, status, of_tokens)
        for (accepted, proposed, status, *tokens), of_tokens in zip(rows, logprobs, strict=True)
    ]
