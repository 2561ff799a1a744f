"""A draft model that is itself decoded speculatively.

Staged speculative decoding (Spector & Re, arXiv 2308.04623): a cheap drafter proposes to the draft model, which scores several
tokens in one call, so that K drafts take fewer than K of its calls.
"""

from collections.abc import Hashable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import PreTrainedModel

from ..backend import RowStats
from ..config import check_int
from ..penalty import penalise_drafter
from ..state import BatchState, Proposal, Verdict
from .base import Drafter
from .model import DraftModel
from .ngram import NGramDrafter


class StagedDraftModel(DraftModel):
    """Drafts what `DraftModel` would draft, token for token, in fewer calls of the model.

    In each of these, the model draws its own token, from the same noise, at every place that the inner drafter proposes a token
    for; the proposals stand while they equal its draws. Whatever the inner drafter says, drafts and logits are therefore those
    of `DraftModel` (up to the rounding of calls of another width).

    The host asks after each call whether all rows have their drafts: rounds wait for the device, and drafting is not
    captured in CUDA graphs.

    Args:
        model: the draft model; on the target's device.
        drafter: the inner drafter. It sees texts that become shorter again when drafts are rejected, so it must propose from
            the text alone; None: an `NGramDrafter`.
        num_draft_tokens: tokens that it proposes for a call of the draft model, >= 1.
        tokenizer, greedy: see `DraftModel`.

    Raises:
        ValueError: for options out of their range, and for an inner drafter that reads a model's state (has `attach`).
    """

    observes_width_only = False  # the inner drafter may look at more

    def __init__(
        self,
        model: PreTrainedModel,
        drafter: Drafter | None = None,
        num_draft_tokens: int = 3,
        tokenizer: Any = None,
        greedy: bool = False,
    ) -> None:
        super().__init__(model, tokenizer, greedy)
        check_int("num_draft_tokens", num_draft_tokens, 1)
        drafter = NGramDrafter() if drafter is None else drafter
        if not isinstance(drafter, Drafter) or hasattr(drafter, "attach"):
            raise ValueError(
                f"drafter must have prefill, propose and observe, and propose from the text alone (no attach), "
                f"got {type(drafter).__name__}"
            )
        self.drafter, self.num_draft_tokens = drafter, num_draft_tokens
        self.num_calls = 0  # of the draft model, for drafting

    def prefill(self, state: BatchState) -> None:
        """Read the prompts of new rows, but for their pending tokens."""
        super().prefill(state)
        self.drafter.prefill(state)

    def propose(self, state: BatchState, num_draft_tokens: int) -> Proposal:
        """Draw tokens, each row under its own temperature and filters, until every row has as many as it has room for."""
        start, fed, width = self._unread(state)
        drafts = _Drafts(state, num_draft_tokens, self.num_draft_tokens)
        while missing := drafts.missing():
            guesses = self._guess(drafts, min(missing - 1, self.num_draft_tokens))
            num_fed = fed + (guesses >= 0).sum(dim=1)
            logits = self._decode(
                state, drafts.read(start, width + guesses.shape[1]), start, num_fed, extra=num_draft_tokens
            )
            at = (fed - 1)[:, None] + torch.arange(guesses.shape[1] + 1, device=fed.device)
            at = at.clamp(0, logits.shape[1] - 1)[..., None].expand(-1, -1, logits.shape[-1])
            logits = penalise_drafter(logits.gather(1, at), drafts.state(), [guesses])
            drafts.append(guesses, self._draw(state, logits, drafts.count))
            # What the model has not read is the last draft.
            start, fed, width = state.seq_lens + drafts.count, drafts.unfinished.long(), 1
            self.num_calls += 1
        return drafts.proposal()

    def observe(self, state: BatchState, verdict: Verdict) -> None:
        """See `DraftModel`."""
        super().observe(state, verdict)
        self.drafter.observe(state, verdict)

    def graph_key(self) -> Hashable | None:
        """None: how many calls are needed depends on the drafts."""
        return None

    def _guess(self, drafts: "_Drafts", count: int) -> Tensor:
        """At most `count` tokens of the inner drafter for each row, [B, N] int64, then -1; entered in the drafts' text."""
        if not count:
            return drafts.state().tokens[:, :0]
        return drafts.guess(self.drafter.propose(drafts.state(), count).tokens)


class _Drafts:
    """The drafts of a round as they come, and the text that they make.

    Args:
        most: drafts of a row.
        most_guesses: proposals of the inner drafter at a time.

    Attributes:
        count: [B] int64, drafts so far.
    """

    def __init__(self, state: BatchState, most: int, most_guesses: int) -> None:
        self._state, self._most = state, most
        self._text = pad(state.tokens, (0, most + most_guesses))
        # One more token has to follow the last draft.
        self._wanted = (state.limits - state.seq_lens - 2).clamp(0, most) * state.active
        self.count = torch.zeros_like(state.seq_lens)
        tokens = torch.full((len(self.count), most + 1), -1, device=self.count.device)
        # Tokens, and what the model says of them, by name: [B, most + 1, ...]. The last column takes what is to be dropped.
        self._drafts = {"tokens": tokens}

    @property
    def unfinished(self) -> Tensor:
        """[B] bool: rows that want more drafts."""
        return self.count < self._wanted

    def missing(self) -> int:
        """The most that a row still wants; waits for the device."""
        return int((self._wanted - self.count).max())

    def state(self) -> BatchState:
        """The state as if all drafts stood."""
        length = self._state.max_text_length + self._most
        return replace(
            self._state, tokens=self._text, seq_lens=self._state.seq_lens + self.count, max_text_length=length
        )

    def guess(self, tokens: Tensor) -> Tensor:
        """Put guesses [B, N] behind the text: those that a row has use for, without columns that are empty in all rows."""
        column = torch.arange(tokens.shape[1], device=tokens.device)
        # The model draws one more than it is given.
        useful = ((tokens >= 0) & (column < (self._wanted - self.count - 1)[:, None])).cumprod(dim=1).bool()
        tokens = tokens.where(useful, -1)[:, : int(useful.sum(dim=1).max())]
        self._write(tokens, torch.ones_like(tokens, dtype=torch.bool))
        return tokens

    def read(self, start: Tensor, width: int) -> Tensor:
        """[B, width] int64: the text from these positions on."""
        index = start[:, None] + torch.arange(width, device=start.device)
        return self._text.gather(1, index.clamp(max=self._text.shape[1] - 1))

    def append(self, guesses: Tensor, own: Proposal) -> None:
        """The model's own tokens [B, N + 1], with what it says of them: those after guesses that it agrees with, and one more."""
        tokens = own.tokens
        agreed = ((guesses >= 0) & (guesses == tokens[:, :-1])).long().cumprod(dim=1).sum(dim=1)
        column = torch.arange(tokens.shape[1], device=tokens.device)
        stands = (column <= agreed[:, None]) & self.unfinished[:, None]
        at = (self.count[:, None] + column).where(stands, self._most)
        for name, new in _tensors(own).items():
            if name not in self._drafts:
                self._drafts[name] = new.new_zeros(len(at), self._most + 1, *new.shape[2:])
            self._drafts[name].scatter_(1, at if new.dim() == 2 else at[..., None].expand_as(new), new)
        self._write(tokens, stands)
        self.count = self.count + stands.sum(dim=1)

    def proposal(self) -> Proposal:
        """All drafts."""
        drafts = {name: field[:, : self._most] for name, field in self._drafts.items()}
        stats = RowStats(*(drafts[name] for name in RowStats._fields)) if "lse" in drafts else None
        return Proposal(drafts["tokens"], drafts.get("logits"), stats, drafts.get("confidence"))

    def _write(self, tokens: Tensor, where: Tensor) -> None:
        """Put tokens [B, N] behind the text and the drafts so far."""
        column = torch.arange(tokens.shape[1], device=tokens.device)
        at = (self._state.position + self.count)[:, None] + column
        self._text.scatter_(1, at.where(where, self._text.shape[1] - 1), tokens.clamp(min=0))


def _tensors(proposal: Proposal) -> dict[str, Tensor]:
    """Those of a proposal and of its stats, by name."""
    fields = proposal._asdict() | (proposal.stats._asdict() if proposal.stats is not None else {})
    return {name: field for name, field in fields.items() if isinstance(field, Tensor)}
