"""A drafter that is right with a given probability, to measure what the engine itself costs.

It is no real drafter: it knows the text that plain decoding gave. What it proposes is that text, each token replaced by
another one with probability 1 - acceptance, independently: the assumption under which Leviathan et al. (arXiv 2211.17192)
derive the expected number of tokens in a round. It costs no model.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

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
        self.acceptance, self.vocab_size, self.seed = acceptance, vocab_size, seed
        self._waiting: list[tuple[list[int], list[int]]] = []
        self._texts: dict[int, list[int]] = {}  # by slot
        self._known = torch.empty(0, 0, dtype=torch.int64)  # [slots, T], -1: not known
        self._generator: torch.Generator | None = None

    def expect(self, prompts: Sequence[list[int]], continuations: Sequence[list[int]]) -> None:
        """What the prompts of the next call will be continued with."""
        self._waiting = list(zip(prompts, continuations, strict=True))

    def prefill(self, state: BatchState) -> None:
        """Recognise the new rows by their prompts. (The only place where it waits for the device.)"""
        slots = state.rows.tolist() if isinstance(state.rows, Tensor) else range(state.rows.start, state.rows.stop)
        for slot, row, length in zip(slots, state.tokens.tolist(), (state.seq_lens + 1).tolist(), strict=True):
            prompt = row[:length]
            match = next((i for i, (known, _) in enumerate(self._waiting) if known == prompt), None)
            self._texts[slot] = [] if match is None else prompt + self._waiting.pop(match)[1]
        longest = max(map(len, self._texts.values()))
        rows = [self._texts.get(slot, []) for slot in range(max(self._texts) + 1)]
        padded = [text + [-1] * (longest - len(text)) for text in rows]
        self._known = torch.tensor(padded, dtype=torch.int64, device=state.tokens.device)

    def propose(self, state: BatchState, num_draft_tokens: int) -> Proposal:
        """The known text from each row's position on, corrupted."""
        known, device = self._known[state.rows], state.tokens.device
        index = state.position[:, None] + torch.arange(num_draft_tokens, device=device)
        inside = index < known.shape[1]
        tokens = known.gather(1, index.clamp(max=known.shape[1] - 1)).where(inside, -1)
        if self._generator is None:
            self._generator = torch.Generator(device).manual_seed(self.seed)
        wrong = torch.rand(tokens.shape, generator=self._generator, device=device) >= self.acceptance
        return Proposal(torch.where(wrong & (tokens >= 0), (tokens + 1) % self.vocab_size, tokens))

    def observe(self, state: BatchState, verdict: Verdict) -> None:
        """Nothing is kept."""
