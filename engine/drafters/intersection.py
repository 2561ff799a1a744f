"""Drafting with a model of another vocabulary, in the tokens that both have.

Token-level intersection (Timor et al., "Accelerating LLM inference with lossless speculative decoding algorithms for
heterogeneous vocabularies", arXiv 2502.05202): the drafter's distribution, restricted to the shared tokens, is a distribution
over the target's vocabulary like any other, so that every verification rule stays lossless.
"""

from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..config import check_instance
from ..model import RaggedModel
from ..penalty import penalise_drafter
from ..state import BatchState, Proposal, Verdict
from ..transfers import to_device
from .model import DraftModel
from .own_texts import OwnTexts, Translation
from .proposals import copied, side_by_side
from .vocabulary import SharedVocabulary


class IntersectionDraftModel(DraftModel):
    """A causal language model whose tokenizer has many tokens in common with the target's, at other ids.

    It reads the text in its own tokens: the shared ones as they are, others encoded anew from their text (see `Translation`).
    It draws from the shared tokens only, in the target's ids. Special tokens are shared where both have one of that name.

    Each round, the host reads the text and keeps the drafter's tokens: rounds wait for the device. What it does then is
    captured in CUDA graphs.

    Args:
        model: the draft model; on the target's device.
        tokenizer: its tokenizer.
        target_tokenizer: the target's tokenizer.
        greedy: see `DraftModel`.

    Raises:
        ValueError: for something that is not a tokenizer; by `attach`, for vocabularies that share nothing.
    """

    reads_own_texts = True  # what it has not read shows in its own tokens

    def __init__(self, model: PreTrainedModel, tokenizer: Any, target_tokenizer: Any, greedy: bool = False) -> None:
        check_tokenizers(tokenizer, target_tokenizer)
        super().__init__(model, tokenizer, greedy)
        self.target_tokenizer = target_tokenizer
        self._own: OwnTexts
        self._place = object()  # of its proposals, for CUDA graphs

    def attach(self, target: RaggedModel) -> None:
        """Compare the vocabularies, and make a cache for the target's slots."""
        super().attach(target)
        size, device = self.ragged.vocab_size, self.ragged.device
        shared = SharedVocabulary(self.tokenizer, self.target_tokenizer, size, target.vocab_size)
        if not shared.share:
            raise ValueError(
                "target_tokenizer must have tokens in common with the drafter's, got none: use ReencodingDraftModel instead"
            )
        counterparts = shared.to_drafter(target.vocab_size)
        self._target_ids, self._drafter_ids = shared.target_ids.to(device), shared.drafter_ids.to(device)
        self._counterparts = counterparts.clamp(min=0).to(device)  # those that are asked for are there
        self._width = int(shared.target_ids[-1]) + 1
        known = counterparts.tolist()
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
        """Draw token after token, each row under its own temperature and filters."""
        texts = self._own.follow(state)

        def work() -> Proposal:
            logits, steps = self._own.after_text(), list[Proposal]()
            for step in range(num_draft_tokens):
                if step:
                    logits = self._own.after_drafts(self._in_own_ids(steps[-1].tokens), step)
                shared = penalise_drafter(self._in_target_ids(logits), state, [each.tokens for each in steps])
                steps.append(self._draw(state, shared, step))
            proposal = side_by_side(steps)
            return copied(proposal, self._own.graphs, self._place) if self._own.captures(state) else proposal

        self._own.begin(state, texts, num_draft_tokens)
        proposal = self._own.run(state, num_draft_tokens, work)
        self._own.end(self._in_own_ids(proposal.tokens[:, :-1]))
        # A text of nothing but special tokens that the drafter does not have is empty for it.
        drafting = to_device([bool(text and text.ids) for text in texts], proposal.tokens.device)
        return proposal._replace(tokens=proposal.tokens.where(drafting[:, None], -1))

    def observe(self, state: BatchState, verdict: Verdict) -> None:
        """Nothing to do: `propose` reads the text."""

    def graph_key(self) -> Hashable | None:
        """None: the host has work in each round; `OwnTexts.run` captures the rest."""
        return None

    def _in_own_ids(self, drafts: Tensor) -> Tensor:
        return self._counterparts[drafts.clamp(min=0)]

    def _in_target_ids(self, logits: Tensor) -> Tensor:
        """[B, W, V_drafter] -> [B, W, V]; -inf for tokens that are not shared."""
        wide = logits.new_full((*logits.shape[:-1], self._width), -torch.inf)
        wide[..., self._target_ids] = logits[..., self._drafter_ids]
        return wide


def check_tokenizers(tokenizer: Any, target_tokenizer: Any) -> None:
    """Raise a ValueError if one is missing, or is something else."""
    for name, value in (("tokenizer", tokenizer), ("target_tokenizer", target_tokenizer)):
        if value is None:
            raise ValueError(f"{name} must be a tokenizer, got None: texts are passed on between the two")
        check_instance(name, value, PreTrainedTokenizerBase)
