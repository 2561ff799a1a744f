"""Drafting with a model of any other vocabulary, through text.

As in the "string-level exact match" of Timor et al. (arXiv 2502.05202) and transformers' universal assisted decoding: the text
is encoded by the drafter's tokenizer and continued greedily, and what was added is encoded by the target's.
"""

from itertools import takewhile
from math import ceil
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..config import check_instance
from ..model import RaggedModel
from ..state import BatchState, Proposal, Verdict
from ..transfers import to_device
from .intersection import check_tokenizers
from .own_texts import OwnTexts, Translation
from .vocabulary import SharedVocabulary, decode_after, encode_after, special_ids

_MOST_PER_TOKEN = 4  # drafter tokens that are spent on one of the target's


class ReencodingDraftModel:
    """A causal language model with a tokenizer of any kind.

    Drafts are greedy and one-hot. A row has none where the text ends inside a character, or where the target's tokenizer would
    join the beginning of the continuation with the end of the text. Special tokens are taken over where both vocabularies
    have one of that name.

    Each round, the host decodes and encodes the whole text since the target's last special token (milliseconds for
    thousands of tokens): rounds wait for the device. The model's own work is captured in CUDA graphs.

    Args:
        model: the draft model; on the target's device.
        tokenizer: its tokenizer.
        target_tokenizer: the target's tokenizer.

    Raises:
        ValueError: for a `model` that is no `PreTrainedModel`, or a tokenizer that is none.
    """

    reads_own_texts = True  # what it has not read shows in its own tokens

    def __init__(self, model: PreTrainedModel, tokenizer: Any, target_tokenizer: Any) -> None:
        check_instance("model", model, PreTrainedModel)
        check_tokenizers(tokenizer, target_tokenizer)
        self.model, self.tokenizer, self.target_tokenizer = model, tokenizer, target_tokenizer
        self.ragged: RaggedModel
        self._own: OwnTexts
        self._special_ids = special_ids(tokenizer)

    def attach(self, target: RaggedModel) -> None:
        """Compare the special tokens, and make a cache for the target's slots."""
        self.ragged = RaggedModel(self.model, target.num_slots, role="drafter")
        size, self._target_size = self.ragged.vocab_size, target.vocab_size
        shared = SharedVocabulary(self.tokenizer, self.target_tokenizer, size, target.vocab_size)
        self._to_target = shared.to_target(size).tolist()
        special = special_ids(self.target_tokenizer)
        known = [i if token in special else -1 for token, i in enumerate(shared.to_drafter(target.vocab_size).tolist())]
        # Not self: in a cycle, K/V would stay until it is looked for.
        ours, theirs = self.tokenizer, self.target_tokenizer
        self._own = OwnTexts(self.ragged, target, lambda: Translation(ours, theirs, known, size))

    def reserve(self, length: int) -> None:
        """Make room for rows of this length; where the drafter needs more tokens, more is made in time."""
        self._own.reserve(length)

    def prefill(self, state: BatchState) -> None:
        """Read the prompts of new rows, but for the last token of each."""
        self.reserve(state.max_limit)
        self._own.prefill(state)

    def propose(self, state: BatchState, num_draft_tokens: int) -> Proposal:
        """Go on greedily for as many tokens as the text so far needed for `num_draft_tokens` of the target's, and one more."""
        texts = self._own.follow(state)
        counts = [self._num_steps(text, num_draft_tokens) for text in texts]
        num_steps = max(counts)
        if not num_steps and self._own.graphs.warming_up:  # of no text, as graphs are made in advance
            num_steps = num_draft_tokens + 1
        if self._own.captures(state):
            num_steps += num_steps % 2  # few different numbers, for few graphs

        def work() -> Tensor:
            steps = [self._own.after_text().argmax(dim=-1)]
            for count in range(1, num_steps):
                steps.append(self._own.after_drafts(steps[-1], count).argmax(dim=-1))
            return torch.cat(steps, dim=1)

        continuations: list[list[int]] = [[] for _ in texts]
        if num_steps:
            self._own.begin(state, texts, num_steps)
            tokens = self._own.run(state, num_steps, work)
            continuations = tokens.tolist()
            self._own.end([row[:-1] for row in continuations])
        rows = []
        for text, count, continuation in zip(texts, counts, continuations, strict=True):
            drafts = self._in_target_ids(text, continuation[:count]) if text is not None and count else []
            rows.append((drafts + [-1] * num_draft_tokens)[:num_draft_tokens])
        return Proposal(to_device(rows, state.tokens.device, torch.int64))

    def observe(self, state: BatchState, verdict: Verdict) -> None:
        """Nothing to do: `propose` reads the text."""

    @staticmethod
    def _num_steps(text: Translation | None, num_draft_tokens: int) -> int:
        """Drafter tokens to draw for a row; of its own text alone, as its drafts must not depend on other rows."""
        if text is None or not text.ids or text.last_text is None:
            return 0
        return ceil(num_draft_tokens * min(len(text.ids) / text.num_read, _MOST_PER_TOKEN)) + 1

    def _in_target_ids(self, text: Translation, continuation: list[int]) -> list[int]:
        """The target's tokens for what the drafter has added; none if its first token spans the border."""
        ordinary = list(takewhile(lambda token: token not in self._special_ids, continuation))
        added = decode_after(self.tokenizer, text.ids, ordinary)
        drafts = encode_after(self.target_tokenizer, text.last_text or "", added)
        if drafts is None:
            return []
        if len(ordinary) < len(continuation) and self._to_target[continuation[len(ordinary)]] >= 0:
            drafts.append(self._to_target[continuation[len(ordinary)]])
        return list(takewhile(lambda token: token < self._target_size, drafts))
