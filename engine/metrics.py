"""Statistics of a run."""

import itertools
import time
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import torch

_FIGURES = (
    "rounds", "new_tokens", "draft_tokens", "accepted_tokens", "acceptance_rate", "acceptance_per_position",
    "block_efficiency", "prefill_seconds", "draft_seconds", "verify_seconds", "total_seconds", "tokens_per_second",
)  # fmt: skip


@dataclass
class Stats:
    """Counts and times, of one request or of an engine's life.

    Times are wall-clock seconds. A request's draft and verify seconds are those of the rounds that it took part in, which
    it may have shared with other rows; its total runs from its prefill to its last token, and leaves out
    what the reader of a stream does between pieces.

    Attributes:
        rounds: target calls, counted once per row (for `exact`, the several of more than 7 drafts are one).
        new_tokens: emitted.
        draft_tokens: proposed and verified.
        accepted_tokens: of these, accepted.
        prefill_seconds: reading the prompt, in calls that it may have shared with others.
        draft_seconds: drafting.
        verify_seconds: target forward and verification.
        total_seconds: all of it.
    """

    rounds: int = 0
    new_tokens: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    prefill_seconds: float = 0.0
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    total_seconds: float = 0.0
    _counts: list[list[int]] = field(default_factory=list)  # rounds, by tokens [proposed][accepted]

    def add_round(self, proposed: int, accepted: int, emitted: int) -> None:
        """Count one round of one row."""
        self.rounds += 1
        self.new_tokens += emitted
        self.draft_tokens += proposed
        self.accepted_tokens += accepted
        self._counts.extend([] for _ in range(len(self._counts), proposed + 1))
        counts = self._counts[proposed]
        counts.extend([0] * (accepted + 1 - len(counts)))
        counts[accepted] += 1

    def rounds_with(self, proposed: int, accepted: int) -> int:
        """Those that proposed, and accepted, at least so many tokens."""
        return sum(sum(counts[accepted:]) for counts in self._counts[proposed:])

    @property
    def acceptance_rate(self) -> float:
        """Accepted / proposed draft tokens; 0 if none was proposed."""
        return self.accepted_tokens / self.draft_tokens if self.draft_tokens else 0.0

    @property
    def acceptance_per_position(self) -> list[float]:
        """[i]: of the rounds that proposed an (i+1)-th token, the share that accepted it."""
        return [self.rounds_with(n, n) / self.rounds_with(n, 0) for n in range(1, len(self._counts))]

    @property
    def block_efficiency(self) -> float:
        """Tokens emitted per target call, between 1 and K+1 (a last round that an end cuts short may pull it below)."""
        return self.new_tokens / self.rounds if self.rounds else 0.0

    @property
    def tokens_per_second(self) -> float:
        """New tokens, over all seconds, reading the prompt included; 0 before there are any."""
        return self.new_tokens / self.total_seconds if self.total_seconds else 0.0

    def __copy__(self) -> "Stats":
        """With counts of its own, which later rounds leave alone."""
        return deepcopy(self)

    def as_dict(self) -> dict[str, Any]:
        """All figures, for JSON."""
        return {name: getattr(self, name) for name in _FIGURES}


class RoundClock:
    """Splits the time of a round, and of what goes before it. On CUDA by events, which are read after the round's one
    synchronisation: the host is long done with what it has the device do."""

    def __init__(self, device: torch.device) -> None:
        self._cuda, self._device = device.type == "cuda", device
        self._marks: list[Any] = []
        self._read: list[torch.cuda.Event] = []  # to be used again, as to make one costs the host time
        self._stream: torch.cuda.Stream | None = None  # of the marks since the last `take`

    def mark(self) -> torch.cuda.Event | None:
        """Note the present moment of the device; returns the event that passes then, on CUDA."""
        if not self._cuda:
            self._marks.append(time.perf_counter())
            return None
        if not self._marks:
            self._stream = torch.cuda.current_stream(self._device)
        event = self._read.pop() if self._read else torch.cuda.Event(enable_timing=True)
        event.record(self._stream)
        self._marks.append(event)
        return event

    def take(self) -> Callable[[], list[float]]:
        """Forget the marks so far. What comes back gives the seconds between them, once the device has passed the last.

        It may be called once: the events are then used again.
        """
        marks, self._marks = self._marks, []
        if not self._cuda:
            return lambda: [b - a for a, b in itertools.pairwise(marks)]

        def seconds() -> list[float]:
            found = [a.elapsed_time(b) / 1e3 for a, b in itertools.pairwise(marks)]
            self._read += marks
            return found

        return seconds


def expected_tokens(acceptance: float, num_draft_tokens: int) -> float:
    """Expected tokens per round, (1 - a^(K+1)) / (1 - a) (Leviathan et al., arXiv 2211.17192, equation 1).

    Args:
        acceptance: a, with which each draft is accepted, whatever came before.
        num_draft_tokens: K.

    Raises:
        ValueError: for an acceptance outside [0, 1] or K < 0.
    """
    if not 0 <= acceptance <= 1:
        raise ValueError(f"acceptance must be in [0, 1], got {acceptance}")
    if num_draft_tokens < 0:
        raise ValueError(f"num_draft_tokens must be >= 0, got {num_draft_tokens}")
    return sum(acceptance**i for i in range(num_draft_tokens + 1))  # the same, and defined at 1


def expected_speedup(acceptance: float, num_draft_tokens: int, cost_ratio: float) -> float:
    """Expected speedup over plain decoding (theorem 3.8 there), if a target call takes as long for one token as for K+1.

    Args:
        cost_ratio: the time to draft one token, as a share of a target call.

    Raises:
        ValueError: for a cost_ratio < 0, and as `expected_tokens`.
    """
    if cost_ratio < 0:
        raise ValueError(f"cost_ratio must be >= 0, got {cost_ratio}")
    return expected_tokens(acceptance, num_draft_tokens) / (num_draft_tokens * cost_ratio + 1)
