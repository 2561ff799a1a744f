"""Drafting with a smaller language model of the same vocabulary (Leviathan et al., arXiv 2211.17192)."""

from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..config import check_bool, check_instance
from ..graphs import bucket
from ..model import RaggedModel, last_valid
from ..penalty import penalise_drafter
from ..state import BatchState, Proposal, Verdict
from .proposals import drafts_of, side_by_side

WIDEST_CATCH_UP = 32  # columns that go through the head; what lies before them is read without


class DraftModel:
    """Any causal language model whose tokenizer is the target's.

    Its cache follows the target's `seq_lens`: after a round, the K/V of all committed tokens but the last two is in it.
    (The round fed it every draft but its last, so after full acceptance that one is missing.) A round therefore begins by
    feeding the last two tokens of the text, one of them perhaps again, and those of rounds in which nothing was drafted.

    Args:
        model: the draft model; on the target's device.
        tokenizer: its tokenizer, to be compared with the target's; None where they are known to be the same.
        greedy: propose the likeliest token at any temperature, as a one-hot draft with its probability (at temperature 1) as
            confidence. Sampled drafts are accepted more often; of greedy ones, "auto" knows which are worth verifying.

    Raises:
        ValueError: for a `model` that is no `PreTrainedModel`, or a `greedy` that is no bool.
    """

    observes_width_only = True  # see `Drafter`

    def __init__(self, model: PreTrainedModel, tokenizer: Any = None, greedy: bool = False) -> None:
        check_instance("model", model, PreTrainedModel)
        check_bool("greedy", greedy)
        self.model, self.tokenizer, self.greedy = model, tokenizer, greedy
        self.ragged: RaggedModel  # the model over its cache, from `attach` on
        self._shared_vocab_size = 0
        self._rounds_missed = 0  # rounds without drafts since it drafted last; its cache lacks the token of each
        self._caught_up = 0  # so many of them has a proposal read whose round has not been observed yet

    def attach(self, target: RaggedModel) -> None:
        """Make a cache for the target's slots; drafts are drawn from ids that both models have.

        Raises:
            UnsupportedModelError: if the draft model cannot be decoded over a ragged cache.
        """
        self.ragged = RaggedModel(self.model, target.num_slots, role="drafter")
        embeddings: Any = self.model.get_input_embeddings()
        if target.vocab_size > embeddings.num_embeddings:
            self.ragged.known_ids = embeddings.num_embeddings
        self._shared_vocab_size = min(self.ragged.vocab_size, target.vocab_size)

    def reserve(self, length: int) -> None:
        """Make room for rows of this length."""
        self.ragged.cache.reserve(length)

    def prefill(self, state: BatchState) -> None:
        """Read the prompts of new rows, but for their pending tokens."""
        self.reserve(state.max_limit)
        self.ragged.cache.begin_rows(state.rows)
        self.ragged.prefill(state.tokens, [(0, length - 1) for length in state.prompt_lengths], state.rows)

    def propose(self, state: BatchState, num_draft_tokens: int) -> Proposal:
        """Draw token after token, each row under its own temperature and filters."""
        start, fed, width = self._unread(state)
        ends = state.gather(start[:, None] + torch.arange(width, device=start.device))
        logits = self._decode(state, ends, start, fed, extra=0)
        steps = [self._draw(state, penalise_drafter(last_valid(logits, fed), state), 0)]
        for step in range(1, num_draft_tokens):
            start = state.seq_lens + step
            inside = (start < state.limits).long()
            logits = self._decode(state, steps[-1].tokens.clamp(min=0), start, inside, extra=step)
            logits = penalise_drafter(logits, state, [each.tokens for each in steps])
            steps.append(self._draw(state, logits, step))
        return side_by_side(steps)

    def observe(self, state: BatchState, verdict: Verdict) -> None:
        """Rolling back is the state's lower `seq_lens`; only rounds without drafts have to be made up for."""
        if verdict.tokens.shape[1] > 1:
            self._rounds_missed = 0
        else:  # no draft may have been found worth verifying
            self._rounds_missed += 1 - self._caught_up
        self._caught_up = 0

    def graph_key(self) -> Hashable | None:
        """What `propose` depends on beside the state; None: this time it may not be captured."""
        if self._rounds_missed > WIDEST_CATCH_UP or not self.ragged.capturable:
            return None
        return self.ragged.cache.capacity, self._made_up_for

    @property
    def _made_up_for(self) -> int:
        """Rounds to make up for: those that were missed. On a GPU, where each number is a graph, a few more, read once again."""
        missed = self._rounds_missed
        return missed if not missed or self.ragged.device.type == "cpu" else bucket(missed, 2)

    def _unread(self, state: BatchState) -> tuple[Tensor, Tensor, int]:
        """What a round begins by reading: the last two tokens of a text, and those of the rounds missed.

        Returns:
            [B] int64, the first position to read; [B] int64, how many, with the pending token (fewer where the text has no
            more, 0 in rows that are not active); and the largest number that this can be.
        """
        self._caught_up = self._rounds_missed  # which stays, for a proposal that fails and is made once more
        width = 2 + self._made_up_for
        if self._rounds_missed > WIDEST_CATCH_UP:
            self._catch_up(state)
            width = 2
        width = min(width, state.max_text_length)
        start = (state.seq_lens + 1 - width).clamp(min=0)
        return start, (state.seq_lens - start + 1) * state.active, width

    def _catch_up(self, state: BatchState) -> None:
        """Read what was missed, but for the last two tokens, without the head. Waits for the device, to learn where."""
        ends = (state.seq_lens - 1).clamp(min=0).tolist()
        spans = [(max(end - self._rounds_missed, 0), end) for end in ends]
        self.ragged.prefill(state.tokens, spans, state.rows)

    def _decode(self, state: BatchState, tokens: Tensor, start: Tensor, valid: Tensor, extra: int) -> Tensor:
        length = state.max_text_length + extra
        return self.ragged.decode(tokens, start, valid, state.rows, length)[..., : self._shared_vocab_size]

    def _draw(self, state: BatchState, logits: Tensor, step: int | Tensor) -> Proposal:
        """Drafts by logits [B, W, V], of which the first is draft number `step` (an int, or [B])."""
        return drafts_of(state, logits, step, self.greedy)
