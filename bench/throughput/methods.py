"""What a contender is: prompts as token ids in, new token ids and what it tells about its rounds out."""

import importlib
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from bench.throughput.shared_models import SharedModels


OUR_PLAIN = "ours plain"  # our plain decoding, which no method of ours should be slower than
OUR_PLAIN_COUPLED = "ours plain coupled"  # the text that all methods with this rule are to give


@dataclass(frozen=True)
class Contest:
    """What all methods that are compared with each other have in common."""

    dtype: str
    batch_size: int
    temperature: float
    max_new_tokens: int
    batches_per_call: int = 1
    top_p: float = 1.0  # of the sampled ones

    @property
    def prompts_per_call(self) -> int:
        return self.batch_size * self.batches_per_call

    @property
    def rule(self) -> str:
        """How tokens are chosen, and how many of them."""
        rule = "greedy" if self.temperature == 0 else f"temperature {self.temperature:g}"
        if self.temperature and self.top_p < 1:
            rule += f", top-p {self.top_p:g}"
        return f"{rule}, {self.max_new_tokens} new tokens"

    @property
    def label(self) -> str:
        size = f"batch {self.batch_size}"
        if self.batches_per_call > 1:
            size += f" of {self.prompts_per_call} prompts a call"
        return f"{self.dtype}, {size}, {self.rule}"


@dataclass
class Row:
    """One answer. Rounds are target calls behind which tokens came out."""

    token_ids: list[int]
    rounds: int | None = None
    draft_tokens: int | None = None  # proposed
    accepted_tokens: int | None = None
    acceptance_per_position: list[float] = field(default_factory=list)
    rounds_per_position: list[int] = field(default_factory=list)  # those that proposed a token there

    @classmethod
    def plain(cls, token_ids: list[int]) -> "Row":
        """One target call for each token."""
        return cls(token_ids, len(token_ids), 0, 0)

    @classmethod
    def of_rounds(cls, token_ids: list[int], rounds: Sequence[tuple[int, int]]) -> "Row":
        """From (proposed, accepted) of each round."""
        longest = max((proposed for proposed, _ in rounds), default=0)
        proposing = [sum(proposed > i for proposed, _ in rounds) for i in range(longest)]
        per_position = [sum(accepted > i for _, accepted in rounds) / proposing[i] for i in range(longest)]
        proposed, accepted = (sum(counts) for counts in zip(*rounds, strict=True)) if rounds else (0, 0)
        return cls(token_ids, len(rounds), proposed, accepted, per_position, proposing)


@dataclass
class Call:
    """What one call gave. Seconds are those of the whole call, which its rows share; None: not known."""

    rows: list[Row]
    prefill_seconds: float | None = None  # from the start until the prompts are read
    prefill_tokens: int = 0  # tokens, of all rows, that came out of reading the prompts
    draft_seconds: float | None = None
    verify_seconds: float | None = None  # target calls and verification, in rounds
    forward_seconds: float | None = None  # of both, those in the target's and the drafter's forward passes


def together(calls: Iterable[Call]) -> Call:
    """Calls for one batch after another, as one; of their times, those until the prompts are read."""
    made = list(calls)
    rows = [row for call in made for row in call.rows]
    known = [call.prefill_seconds for call in made if call.prefill_seconds is not None]
    seconds = sum(known) if len(known) == len(made) else None
    return Call(rows, seconds, sum(call.prefill_tokens for call in made))


class Method(ABC):
    """One way to continue prompts.

    Attributes:
        name: in the tables; unique in a contest.
        num_draft_tokens: K, or None where it is not a number that was asked for.
        drafter: what drafts, or None.
        synthetic: its drafter is no real one; every table says so.
        one_at_a_time: it serves one prompt per call.
        needs_gpu: it makes no sense elsewhere.
        module: what must be importable for it.
        full_warmup: to be warm it needs a call of full length.
    """

    name: str
    num_draft_tokens: int | str | None = None
    drafter: str | None = None
    synthetic = False
    one_at_a_time = False
    needs_gpu = False
    module: str | None = None
    full_warmup = False

    def unavailable(self, contest: Contest, device: str) -> str | None:
        """Why it cannot take part, as far as can be told without a model; None: it can."""
        if self.module is not None:
            try:
                importlib.import_module(self.module)
            except Exception as error:  # a half-installed package fails in its own ways
                return f"cannot import {self.module}: {type(error).__name__}: {error}".splitlines()[0]
        if self.needs_gpu and device != "cuda":
            return "needs a GPU"
        if self.one_at_a_time and contest.prompts_per_call > 1:
            return "serves one prompt at a time, no batches"
        return None

    @abstractmethod
    def prepare(self, models: "SharedModels", contest: Contest) -> None:
        """Get ready for calls of a contest."""

    @abstractmethod
    def generate(self, prompts: list[list[int]], seeds: list[int], max_new_tokens: int) -> Call:
        """Continue the prompts; the time of the call is taken outside."""

    def forget(self) -> None:  # noqa: B027  # most keep nothing
        """Drop what earlier answers taught it, as their prompts come again."""

    def recall(self, prompts: list[list[int]], seeds: list[int], answers: list[list[int]]) -> None:  # noqa: B027
        """Learn what it learned when it gave these answers, in a run that was interrupted."""

    def close(self) -> None:  # noqa: B027  # most have nothing of their own
        """Let go of what `prepare` made."""


class FirstLogits:
    """Notes when a model's head first ran: then its prompts are read. Costs later calls nothing."""

    def __init__(self, model: Any) -> None:
        self._begin = time.perf_counter()
        self.seconds: float | None = None
        self._handle = model.get_output_embeddings().register_forward_hook(self._note)

    def _note(self, head: torch.nn.Module, inputs: Any, logits: Any) -> None:
        synchronize(logits.device)
        self.seconds = time.perf_counter() - self._begin
        self._handle.remove()


def synchronize(device: torch.device) -> None:
    """Wait for a GPU; a CPU has always finished."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def up_to_end(token_ids: list[int], eos_token_ids: frozenset[int]) -> list[int]:
    """The ids up to the first end of sequence, which counts as a token."""
    end = next((i for i, token in enumerate(token_ids) if token in eos_token_ids), len(token_ids))
    return token_ids[: end + 1]
