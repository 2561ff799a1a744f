"""A drafter that is right with a given probability, to measure what the engine itself costs.

It is not a real drafter: it knows the text that plain decoding gave. What it proposes is that text, each token replaced by
another one with probability 1 - acceptance, independently: the assumption under which Leviathan et al. (arXiv 2211.17192)
derive the expected number of tokens in a round. It costs no model.
"""

import random
from collections.abc import Hashable, Sequence

import torch

from engine import BatchState, Proposal, Verdict


class SyntheticDrafter:
    """Proposes the known continuation of each prompt, corrupted.

    Args:
        acceptance: probability that a drafted token is the known one, in [0, 1].
        vocab_size: ids are below this, >= 2.
        seed: of the corruption.

    Raises:
        ValueError: for an argument out of its range.
    """

    def __init__(self, acceptance: float, vocab_size: int, seed: int = 0) -> None:
        if not 0 <= acceptance <= 1:
            raise ValueError(f"acceptance must be in [0, 1], got {acceptance}")
        if vocab_size < 2:
            raise ValueError(f"vocab_size must be >= 2, got {vocab_size}")
        self.acceptance, self.vocab_size = acceptance, vocab_size
        self._random = random.Random(seed)
        self._waiting: list[tuple[list[int], list[int]]] = []
        self._texts: dict[int, list[int]] = {}  # by slot: what will be drafted, position by position
        self._drafts = torch.empty(0, 0, dtype=torch.int64)  # [slots, T], -1: nothing

    def expect(self, prompts: Sequence[list[int]], continuations: Sequence[list[int]]) -> None:
        """What the prompts of the next call will be continued with."""
        self._waiting = list(zip(prompts, continuations, strict=True))

    def prefill(self, state: BatchState) -> None:
        """Recognise the new rows by their prompts, and corrupt their texts. (The only place where it waits for the device.)

        No position is drafted twice, once it has been decided, so each may be corrupted beforehand.
        """
        for slot, row, length in zip(state.slots, state.tokens.tolist(), (state.seq_lens + 1).tolist(), strict=True):
            prompt = row[:length]
            match = next((i for i, (known, _) in enumerate(self._waiting) if known == prompt), None)
            self._texts[slot] = [] if match is None else prompt + self._corrupted(self._waiting.pop(match)[1])
        longest = max(map(len, self._texts.values()))
        rows = [self._texts.get(slot, []) for slot in range(max(self._texts) + 1)]
        padded = [text + [-1] * (longest - len(text)) for text in rows]
        drafts = torch.tensor(padded, dtype=torch.int64, device=state.tokens.device)
        if drafts.shape == self._drafts.shape:
            self._drafts.copy_(drafts)  # where captured rounds read them
        else:
            self._drafts = drafts

    def _corrupted(self, text: list[int]) -> list[int]:
        right = [self._random.random() < self.acceptance for _ in text]
        return [token if ok else (token + 1) % self.vocab_size for token, ok in zip(text, right, strict=True)]

    def propose(self, state: BatchState, num_draft_tokens: int) -> Proposal:
        """The corrupted text from each row's position on."""
        drafts = self._drafts[state.rows]
        index = state.position[:, None] + torch.arange(num_draft_tokens, device=state.tokens.device)
        inside = index < drafts.shape[1]
        return Proposal(drafts.gather(1, index.clamp(max=drafts.shape[1] - 1)).where(inside, -1))

    def observe(self, state: BatchState, verdict: Verdict) -> None:
        """Nothing is kept."""

    def graph_key(self) -> Hashable:
        """A graph reads the drafts where they lie."""
        return self._drafts.data_ptr(), tuple(self._drafts.shape)
