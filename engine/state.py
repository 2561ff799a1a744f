"""The tensors of a round, all on the target's device."""

from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .backend import RowStats, Verdict

__all__ = ["BatchState", "Proposal", "Verdict"]


class Proposal(NamedTuple):
    """What a drafter proposes for a round."""

    tokens: Tensor  # [B, K] int64, -1 where a row proposes fewer
    logits: Tensor | None = None  # [B, K, V_draft] raw logits that the tokens were drawn from; None: one-hot
    stats: RowStats | None = None  # of logits, [B, K], if the sampler computed them
    # [B, K] float32 in [0, 1): how sure the drafter is of each token if those before it stand, on a scale of its own (the
    # engine learns what it is worth). It decides which drafts "auto" verifies where there are no logits.
    confidence: Tensor | None = None


@dataclass(frozen=True)
class BatchState:
    """The text and the parameters of every row.

    The last token of a row, at index `seq_lens`, is its pending token: in the text, but its K/V is not in the cache.
    A row is active while its text is shorter than its limit; an empty slot has limit 0.
    """

    tokens: Tensor  # [B, T+1] int64, prompt and output; the last column takes what is to be dropped
    seq_lens: Tensor  # [B] int64, tokens whose K/V is in the cache = length of the text - 1
    limits: Tensor  # [B] int64, the text never gets longer than this
    seed: Tensor  # [B] int64
    temperature: Tensor  # [B] float32, 0 = greedy
    top_k: Tensor  # [B] int64, 0 = off
    top_p: Tensor  # [B] float32, 1 = off
    min_p: Tensor  # [B] float32, 0 = off
    repetition_penalty: Tensor  # [B] float32, 1 = off
    without_drafts: Tensor  # [B] bool: nothing that is drafted for this row counts
    rows: slice | Tensor  # the slots that these rows occupy
    max_text_length: int = 0  # no row's text is longer (known to the host, for cutting views)
    max_limit: int = 0  # no row's limit is larger (known to the host, for buffers)
    prompt_lengths: tuple[int, ...] = ()  # of each row, in a drafter's prefill
    filtered: bool = False  # some row uses top-k, top-p or min-p
    penalised: bool = False  # some row has a repetition penalty
    processors: tuple[tuple[int, Any], ...] = ()  # (row, logits processor) of those that have one; work on the host
    logprobs: bool = False  # some row wants those of its tokens
    all_greedy: bool = True  # every row has temperature 0
    coupled: bool = False  # verification is "coupled": drafts are drawn with the target's own noise
    # A drafter that draws may stop where drafting on would not pay. Only of a single row, as it must not stop for what others have
    # drawn, and with "auto".
    may_end_early: bool = False
    _last: "list[tuple[Any, BatchState]]" = field(
        default_factory=list, init=False, repr=False, compare=False
    )  # see `select`

    @classmethod
    @torch.inference_mode(False)  # else rows could not be written outside of it, where it was on
    def allocate(cls, num_slots: int, max_length: int, device: torch.device) -> "BatchState":
        """Empty slots for texts of at most `max_length` tokens."""

        def whole() -> Tensor:
            return torch.zeros(num_slots, dtype=torch.int64, device=device)

        def real(value: float = 0.0) -> Tensor:
            return torch.full((num_slots,), value, dtype=torch.float32, device=device)

        tokens = torch.zeros(num_slots, max_length + 1, dtype=torch.int64, device=device)
        without_drafts = torch.zeros(num_slots, dtype=torch.bool, device=device)
        return cls(
            tokens, whole(), whole(), whole(), real(), whole(), real(1.0), real(), real(1.0), without_drafts,
            rows=slice(0, num_slots),
        )  # fmt: skip

    def select(self, rows: slice | Tensor, **known: Any) -> "BatchState":
        """The rows in these slots of a state of all slots.

        Args:
            rows: a slice, whose rows share this state's memory, or an index [n] int64, whose rows are copies.
            known: of these rows, the fields that are not tensors, see above.

        Returns:
            The object of the last call, if that was the same: on a GPU most rounds are alike, and each costs the host time.
        """
        key = (rows.start, rows.stop, known) if isinstance(rows, slice) and not known.get("processors") else None
        if key is not None and self._last and self._last[0][0] == key:
            return self._last[0][1]
        cut: dict[str, Any] = {f.name: getattr(self, f.name)[rows] for f in fields(self) if f.type is Tensor}
        selected = replace(self, **cut, **known, rows=rows)
        if key is not None:
            self._last[:] = [(key, selected)]
        return selected

    @cached_property
    def key(self) -> tuple[int, ...]:
        """What work on this state depends on beside its tensors, as far as a CUDA graph of it fixes that; `processors` apart."""
        rows = (self.rows.start, self.rows.stop) if isinstance(self.rows, slice) else (-1, self.rows.data_ptr())
        flags = self.filtered, self.penalised, self.logprobs, self.all_greedy, self.coupled
        return (*rows, self.max_text_length, *flags)

    @property
    def slots(self) -> list[int]:
        """The slots of the rows, for the host; a slice needs no copy from the device."""
        return list(range(self.rows.start, self.rows.stop)) if isinstance(self.rows, slice) else self.rows.tolist()

    @property
    def active(self) -> Tensor:
        """[B] bool: rows that still want tokens."""
        return self.seq_lens + 1 < self.limits

    @property
    def pending(self) -> Tensor:
        """[B] int64: the last token of each row."""
        return self.tokens.gather(1, self.seq_lens[:, None])[:, 0]

    @property
    def can_look(self) -> bool:
        """Whether values can be read without waiting for the device."""
        return self.tokens.device.type == "cpu"

    @property
    def position(self) -> Tensor:
        """[B] int64: absolute position of the next token, the first that a round drafts."""
        return self.seq_lens + 1

    @property
    def sampling(self) -> dict[str, Any]:
        """Temperature and filters, [B] each, as keywords of `sample` and `verify`; filters that no row uses are None."""
        on = self.filtered
        return {
            "temperature": self.temperature,
            "top_k": self.top_k if on else None,
            "top_p": self.top_p if on else None,
            "min_p": self.min_p if on else None,
        }

    def gather(self, index: Tensor) -> Tensor:
        """tokens[b, index[b, i]] for index [B, N]; 0 where the index is negative."""
        return self.tokens.gather(1, index.clamp(min=0)).where(index >= 0, 0)

    def commit(self, verdict: Verdict) -> None:
        """Append the verdict's tokens [B, K+1] to the active rows, in place; none beyond a row's limit."""
        position = self.position[:, None] + torch.arange(verdict.tokens.shape[1], device=self.tokens.device)
        stands = (verdict.tokens >= 0) & (position < self.limits[:, None])
        trash = self.tokens.shape[1] - 1
        self.tokens.scatter_(1, position.where(stands, trash), verdict.tokens)
        self.seq_lens.add_(stands.sum(dim=1))
