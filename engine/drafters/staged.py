"""A draft model that is itself decoded speculatively.

Staged speculative decoding (Spector & Re, arXiv 2308.04623): a cheap drafter proposes to the draft model, which scores several
tokens in one call, so that K drafts take fewer than K of its calls.
"""

from collections.abc import Callable, Hashable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import PreTrainedModel

from ..backend import RowStats
from ..config import check_int
from ..model import RaggedModel
from ..penalty import penalise_drafter
from ..state import BatchState, Proposal, Verdict
from .base import Drafter
from .model import DraftModel
from .ngram import NGramDrafter
from .proposal_rules import proposed
from .proposals import tensors_of

_PARTS = 5  # graphs of a round: its beginning, guesses, two kinds of calls, and the verification


class StagedDraftModel(DraftModel):
    """Drafts what `DraftModel` would draft, token for token, in fewer calls of the model.

    In each of these, the model draws its own token, from the same noise, at every place that the inner drafter proposes a token
    for; the proposals stand while they equal its draws. Whatever the inner drafter says, drafts and logits are therefore those
    of `DraftModel` (up to the rounding of calls of another width).

    The host asks after each call whether all rows have their drafts: rounds wait for the device. What it does in between is
    captured in CUDA graphs, the inner drafter's work apart if that cannot be (has no `graph_key`).

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
        self._target: RaggedModel
        self._kept: dict[Hashable, _Drafts] = {}  # that graphs work on, see `_drafts`

    def attach(self, target: RaggedModel) -> None:
        """See `DraftModel`."""
        super().attach(target)
        self._target = target
        self._kept.clear()

    def prefill(self, state: BatchState) -> None:
        """Read the prompts of new rows, but for their pending tokens."""
        super().prefill(state)
        self.drafter.prefill(state)

    def propose(self, state: BatchState, num_draft_tokens: int) -> Proposal:
        """Draw tokens, each row under its own temperature and filters, until every row has as many as it has room for."""
        captured = self._captures(state)
        key = (id(self), state.key, num_draft_tokens, self.ragged.cache.capacity) if captured else None
        drafts = self._drafts(state, num_draft_tokens, captured)
        inner_key = getattr(self.drafter, "graph_key", lambda: None)()
        guess_key = None if None in (key, inner_key) else (key, inner_key)
        first_key = None if key is None else (key, self._made_up_for)
        width = self.num_draft_tokens if captured else None
        # While graphs are made in advance, no row wants drafts.
        calls, fewest = 0, 2 if captured and self._target.graphs.warming_up else 0
        drafts.rows = state
        self._run("begin", key, drafts.begin)
        while (missing := drafts.missing()) or calls < fewest:
            count = width or min(missing - 1, self.num_draft_tokens)
            self._run("guess", guess_key, partial(self._guess, drafts, count, width))
            if not calls:
                self._run("first call", first_key, partial(self._score, state, drafts, is_first=True))
            else:
                self._run("later call", key, partial(self._score, state, drafts, is_first=False))
            calls += 1
        self.num_calls += calls
        return drafts.proposal()

    def _captures(self, state: BatchState) -> bool:
        """Whether the steps of a round of these rows are captured."""
        graphs = self._target.graphs
        if not graphs.enabled or graphs.room < _PARTS or not isinstance(state.rows, slice):
            return False
        return super().graph_key() is not None

    def _run(self, step: str, key: Hashable | None, work: Callable[[], None]) -> None:
        if key is None:
            work()
        else:
            self._target.graphs.run(("staged", step, key), work)

    def _drafts(self, state: BatchState, num_draft_tokens: int, kept: bool) -> "_Drafts":
        """Those of a round; the same ones for all that are alike if they are kept."""
        if not kept:
            return _Drafts(state, num_draft_tokens, self.num_draft_tokens)
        # What decides which tensors there are, of which shape and dtype.
        like = len(state.seq_lens), num_draft_tokens, state.all_greedy, state.coupled, state.penalised
        if like not in self._kept:
            self._kept[like] = _Drafts(state, num_draft_tokens, self.num_draft_tokens)
        return self._kept[like]

    def _guess(self, drafts: "_Drafts", count: int, width: int | None) -> None:
        """Have the inner drafter propose at most `count` tokens for each row; for `width` see `_Drafts.guess`."""
        tokens = drafts.guesses[:, :0]
        if count:
            tokens = proposed(self.drafter, drafts.state(), count, self._target.vocab_size).tokens
        drafts.guess(tokens, width)

    def _score(self, state: BatchState, drafts: "_Drafts", is_first: bool) -> None:
        """Call the model on what it has not read and the guesses, and have it draw at each of their places."""
        if is_first:
            start, fed, width = self._unread(state)
        else:  # the last draft
            start, fed, width = state.seq_lens + drafts.count, drafts.unfinished.long(), 1
        guesses = drafts.guesses
        num_fed = fed + (guesses >= 0).sum(dim=1)
        tokens = drafts.read(start, width + guesses.shape[1])
        logits = self._decode(state, tokens, start, num_fed, extra=drafts.most)
        at = (fed - 1)[:, None] + torch.arange(guesses.shape[1] + 1, device=fed.device)
        at = at.clamp(0, logits.shape[1] - 1)[..., None].expand(-1, -1, logits.shape[-1])
        logits = penalise_drafter(logits.gather(1, at), drafts.state(), [guesses])
        drafts.append(self._draw(state, logits, drafts.count))

    def observe(self, state: BatchState, verdict: Verdict) -> None:
        """See `DraftModel`."""
        super().observe(state, verdict)
        self.drafter.observe(state, verdict)

    def graph_key(self) -> Hashable | None:
        """None: how many calls are needed depends on the drafts. Each is captured by itself."""
        return None


class _Drafts:
    """The drafts of a round as they come, and the text that they make; of many rounds, one after the other, with CUDA graphs.

    Args:
        state: of some rows.
        most: drafts of a row.
        most_guesses: proposals of the inner drafter at a time.

    Attributes:
        rows: the state of the rows of this round, which are as many.
        count: [B] int64, drafts so far.
        guesses: [B, N] int64, what the inner drafter has proposed to follow these, then -1.
    """

    def __init__(self, state: BatchState, most: int, most_guesses: int) -> None:
        self.rows, self.most = state, most
        batch, length = state.tokens.shape
        # Here and below, the last column takes what is to be dropped.
        self._text = state.tokens.new_zeros(batch, length + most + most_guesses)
        self._wanted, self.count = torch.zeros_like(state.seq_lens), torch.zeros_like(state.seq_lens)
        self.guesses = state.tokens.new_zeros(batch, most_guesses)
        # Tokens, and what the model says of them, by name: [B, most + 1, ...].
        self._drafts = {"tokens": state.tokens.new_zeros(batch, most + 1)}

    def begin(self) -> None:
        """A round of these rows begins: there are no drafts."""
        state = self.rows
        self._text[:, : state.max_text_length] = state.tokens[:, : state.max_text_length]
        # One more token has to follow the last draft.
        self._wanted.copy_((state.limits - state.seq_lens - 2).clamp(0, self.most) * state.active)
        self.count.zero_()
        self._drafts["tokens"].fill_(-1)

    @property
    def unfinished(self) -> Tensor:
        """[B] bool: rows that want more drafts."""
        return self.count < self._wanted

    def missing(self) -> int:
        """The most that a row still wants; waits for the device."""
        return int((self._wanted - self.count).max())

    def state(self) -> BatchState:
        """The state as if all drafts stood."""
        length = self.rows.max_text_length + self.most
        return replace(self.rows, tokens=self._text, seq_lens=self.rows.seq_lens + self.count, max_text_length=length)

    def guess(self, tokens: Tensor, width: int | None) -> None:
        """Put guesses [B, N] behind the text: those that a row has use for.

        Args:
            width: columns of `guesses`, whose memory stays where it is; None: as many as are not empty in all rows.
        """
        column = torch.arange(tokens.shape[1], device=tokens.device)
        # The model draws one more than it is given.
        useful = ((tokens >= 0) & (column < (self._wanted - self.count - 1)[:, None])).cumprod(dim=1).bool()
        tokens = tokens.where(useful, -1)
        if width is None:
            self.guesses = tokens[:, : int(useful.sum(dim=1).max())]
        else:
            self.guesses.copy_(pad(tokens, (0, width - tokens.shape[1]), value=-1))
        self._write(self.guesses, torch.ones_like(self.guesses, dtype=torch.bool))

    def read(self, start: Tensor, width: int) -> Tensor:
        """[B, width] int64: the text from these positions on."""
        index = start[:, None] + torch.arange(width, device=start.device)
        return self._text.gather(1, index.clamp(max=self._text.shape[1] - 1))

    def append(self, own: Proposal) -> None:
        """The model's own tokens [B, N + 1], with what it says of them: those after guesses that it agrees with, and one more."""
        tokens, guesses = own.tokens, self.guesses
        agreed = ((guesses >= 0) & (guesses == tokens[:, :-1])).long().cumprod(dim=1).sum(dim=1)
        column = torch.arange(tokens.shape[1], device=tokens.device)
        stands = (column <= agreed[:, None]) & self.unfinished[:, None]
        at = (self.count[:, None] + column).where(stands, self.most)
        for name, new in tensors_of(own).items():
            if name not in self._drafts:
                self._drafts[name] = new.new_zeros(len(at), self.most + 1, *new.shape[2:])
            self._drafts[name].scatter_(1, at if new.dim() == 2 else at[..., None].expand_as(new), new)
        self._write(tokens, stands)
        self.count += stands.sum(dim=1)

    def proposal(self) -> Proposal:
        """All drafts."""
        drafts = {name: field[:, : self.most] for name, field in self._drafts.items()}
        stats = RowStats(*(drafts[name] for name in RowStats._fields)) if "lse" in drafts else None
        return Proposal(drafts["tokens"], drafts.get("logits"), stats, drafts.get("confidence"))

    def _write(self, tokens: Tensor, where: Tensor) -> None:
        """Put tokens [B, N] behind the text and the drafts so far."""
        column = torch.arange(tokens.shape[1], device=tokens.device)
        at = (self.rows.position + self.count)[:, None] + column
        self._text.scatter_(1, at.where(where, self._text.shape[1] - 1), tokens.clamp(min=0))
