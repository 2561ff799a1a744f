"""What slots hold: the state of their rows, and room for their texts in the caches."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from .config import EngineConfig
from .graphs import SHORTEST_TEXT, bucket
from .round import Round
from .scheduler import Request
from .state import BatchState
from .transfers import to_device


class Slots:
    """Puts requests into slots, and cuts the state of rows for rounds.

    Args:
        round_: its target and drafter keep K/V of these slots.
        state: of all slots.
        config: the engine's.

    Attributes:
        unclean: slots in whose K/V drafts, or a text that was broken off, may have left NaN.
    """

    def __init__(self, round_: Round, state: BatchState, config: EngineConfig) -> None:
        self._round, self._config = round_, config
        self.state, self._device = state, state.tokens.device
        self.unclean: set[int] = set()
        self._reserved = 0  # length of the rows that there is room for everywhere

    def begin(self, requests: list[Request]) -> None:
        """Put requests, of which there is at least one, into their slots, not yet active."""
        taken = [request.slot for request in requests]
        slots = to_device(taken, self._device)
        for slot in self.unclean.intersection(taken):
            self._round.target.cache.begin_rows(slice(slot, slot + 1))
            self.unclean.remove(slot)
        longest = max(request.length for request in requests)
        padded = [request.prompt + [0] * (longest - len(request.prompt)) for request in requests]
        self.state.tokens[slots, :longest] = to_device(padded, self._device)
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
            column = getattr(self.state, name)
            column[slots] = to_device(values, self._device, column.dtype)
        self.reserve(max(request.limit for request in requests))

    def reserve(self, length: int) -> None:
        """Make room for rows of this length, in the target's cache and in what the drafter keeps.

        Graphs are forgotten before buffers move for it: some may have moved when memory runs out.
        """
        if length <= self._reserved:
            return
        self._round.graphs.clear()
        cache = self._round.target.cache
        if 0 < cache.capacity < length:  # growing copies, so not each time a little
            length = min(max(length, cache.capacity * 5 // 4), self.state.tokens.shape[1] - 1)
        cache.reserve(length)
        if (reserve := getattr(self._round.drafter, "reserve", None)) is not None:
            reserve(cache.capacity)  # grows when the target's does, and not in between
        self._reserved = cache.capacity

    def num_rows(self, num_rows: int) -> int:
        """How many rows a round is run on that needs at least so many.

        With CUDA graphs few different numbers, as each is a graph; always the same for exact calls, which read all rows anyway.
        """
        if not self._round.graphs.planned:
            return num_rows
        most = self._config.max_batch_size
        return most if self._round.target.exact else min(bucket(num_rows, 1), most)

    def rows(self, requests: Sequence[Request]) -> slice | Tensor:
        """The slots of requests, which come by ascending slot: a slice, which needs no copy, where they lie side by side."""
        first, last = requests[0].slot, requests[-1].slot
        if last - first + 1 == len(requests):
            return slice(first, last + 1)
        return to_device([request.slot for request in requests], self._device)

    def select(
        self, rows: slice | Tensor, requests: Sequence[Request], unread: int = 0, processors: tuple[Any, ...] = ()
    ) -> BatchState:
        """The state of some slots.

        Args:
            rows: the slots.
            requests: those that are in them, at least one.
            unread: tokens that may have been added to each row and that the host does not know yet.
            processors: as in the state.
        """
        params = [request.params for request in requests]
        longest = max(min(request.length + unread, request.limit) for request in requests)
        if self._round.graphs.planned:  # few different numbers, for few graphs
            longest = min(bucket(longest, SHORTEST_TEXT), self.state.tokens.shape[1] - 1)
        return self.state.select(
            rows,
            max_text_length=longest,
            max_limit=max(request.limit for request in requests),
            filtered=any(p.temperature and (p.top_k or p.top_p < 1 or p.min_p) for p in params),
            processors=processors,
            penalised=any(p.repetition_penalty != 1 for p in params),
            logprobs=any(p.logprobs for p in params),
            all_greedy=all(p.temperature == 0 for p in params),
            coupled=self._config.verification == "coupled",
            may_end_early=len(requests) == 1 and self._config.num_draft_tokens == "auto",
        )
