"""Waiting prompts and free slots, and which prompts to read next."""

import heapq
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from .config import SamplingParams
from .detokenize import TextStream
from .metrics import Stats
from .model import PREFILL_WIDTH

# Read per step, padding included where there is some: running rows wait for no more than about this.
PREFILL_TOKENS = 2048


@dataclass
class Request:
    """One prompt on its way, on the host."""

    index: int  # among the prompts of its call
    prompt: list[int]
    params: SamplingParams
    seed: int
    limit: int  # the text never gets longer than this, prompt included
    stream: TextStream | None  # where text is needed on the way: streaming or stop strings
    stop_token_ids: frozenset[int] = frozenset()
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)  # of these, where they are asked for
    finish_reason: str | None = None
    error: str | None = None  # why it has no output
    slot: int = -1
    without_drafts: bool = False  # its drafts no longer count: with them, the target's logits were not a distribution
    prefilled: int = 0  # tokens whose K/V is in the cache, before it runs
    started: float = 0.0
    stats: Stats = field(default_factory=Stats)

    @property
    def length(self) -> int:
        """Of the text, prompt included."""
        return len(self.prompt) + len(self.token_ids)

    @property
    def to_prefill(self) -> int:
        """Tokens to read before it runs: all but the last one, which is pending."""
        return len(self.prompt) - 1

    @property
    def ended(self) -> bool:
        return self.finish_reason is not None or self.error is not None


class Scheduler:
    """Gives free slots, lowest first, to waiting requests, first come first served."""

    def __init__(self, requests: Iterable[Request], num_slots: int) -> None:
        self._waiting = deque(requests)
        self._free = list(range(num_slots))
        self.prefilling: dict[int, Request] = {}  # by slot
        self.running: dict[int, Request] = {}

    @property
    def busy(self) -> bool:
        return bool(self._waiting or self.prefilling or self.running)

    @property
    def queued(self) -> bool:
        """Whether somebody is yet to run."""
        return bool(self._waiting or self.prefilling)

    def admit(self) -> list[Request]:
        """Requests that have just been given a slot, by ascending slot."""
        admitted = []
        while self._waiting and self._free:
            request = self._waiting.popleft()
            request.slot = heapq.heappop(self._free)
            self.prefilling[request.slot] = request
            admitted.append(request)
        return admitted

    def start(self, request: Request) -> None:
        """Its prompt has been read."""
        self.running[request.slot] = self.prefilling.pop(request.slot)

    def release(self, request: Request) -> None:
        """Free the slot of a request that has ended."""
        del self.running[request.slot]
        heapq.heappush(self._free, request.slot)


def prefill_chunk(requests: list[Request], skips_padding: bool) -> tuple[list[Request], int]:
    """Which requests to read next, and how many tokens of each at most, for calls that are wide and have little padding.

    Args:
        requests: whose prompts are not read yet, at least one.
        skips_padding: of the model, see `RaggedModel`. If it does not, at most a quarter of a call is padding.

    Returns:
        Requests and a width in tokens, of which a request takes what it lacks; width 0 for requests that lack nothing.
    """
    done = [request for request in requests if request.prefilled == request.to_prefill]
    if done:
        return done, 0
    missing = sorted(request.to_prefill - request.prefilled for request in requests)
    widest = max(PREFILL_TOKENS // len(requests), 64)
    if skips_padding:
        widths = {min(width, PREFILL_WIDTH) for width in missing}
        good = [width for width in widths if sum(min(m, width) for m in missing) <= PREFILL_TOKENS]
        good = [width for width in good if len(missing) * width <= 4 * PREFILL_TOKENS]  # masks do have padding
        return requests, max([*good, min(widest, PREFILL_WIDTH, missing[-1])])
    widths = {min(width, widest, PREFILL_WIDTH) for width in missing}
    good = [width for width in widths if 4 * sum(min(m, width) for m in missing) >= 3 * len(missing) * width]
    return requests, max(good)
