"""Drafting by looking back: what followed the last time that the text ended like this?

Prompt lookup decoding (Saxena 2023; Yang et al., "Inference with reference", arXiv 2304.04487): costs no model, and pays
where the output repeats parts of the prompt or of itself.
"""

from collections.abc import Hashable
from functools import cache

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from ..config import check_int
from ..state import BatchState, Proposal, Verdict
from ..transfers import to_device
from .lookup import LookupDrafter, Tokens, matches

# How often the token after a match of 1, 2, ... tokens comes again: greedy answers of SmolLM2-135M-Instruct to 800 prompts.
_CHANCES = (0.21, 0.54, 0.61, 0.68, 0.73, 0.79, 0.79, 0.93)


class NGramDrafter(LookupDrafter):
    """Proposes the continuation of the most recent among the longest earlier matches of the text's end.

    Where the continuation runs into the end of the text, the text is periodic there, and the period goes on.

    Args:
        min_ngram: shortest match that counts, >= 1.
        max_ngram: longest match looked for, >= min_ngram.

    Raises:
        ValueError: naming the argument, the value and the rule.
    """

    observes_width_only = True  # see `Drafter`

    def __init__(self, min_ngram: int = 1, max_ngram: int = 8) -> None:
        check_int("min_ngram", min_ngram, 1)
        check_int("max_ngram", max_ngram, 1)
        if max_ngram < min_ngram:
            raise ValueError(f"max_ngram must be >= min_ngram = {min_ngram}, got {max_ngram}")
        self.min_ngram, self.max_ngram = min_ngram, max_ngram

    def prefill(self, state: BatchState) -> None:
        """Nothing is kept."""

    def continuation(self, slot: int, text: Tokens, most: int) -> list[tuple[int, float]]:
        """See the class and `LookupDrafter`."""
        places, context = matches(text[:-1], text[-self.max_ngram :])
        if context < self.min_ngram:
            return []
        begin = int(places[-1]) + 1
        tokens = text[begin + np.arange(most) % (len(text) - begin)].tolist()
        # If a draft stands, the match is one longer for the next.
        chances = (_CHANCES[min(context + step, len(_CHANCES)) - 1] for step in range(most))
        return list(zip(tokens, chances, strict=True))

    def propose(self, state: BatchState, num_draft_tokens: int) -> Proposal:
        """See the class; on a CPU, where it is faster, row by row."""
        if state.can_look:
            return super().propose(state, num_draft_tokens)
        length = state.max_text_length
        text = state.tokens[:, :length]
        end = state.seq_lens[:, None]  # index of the last token
        place = torch.arange(length, device=text.device)

        # matched[b, j]: how many tokens up to and including j equal the last ones of the text
        matched = torch.zeros_like(text)
        unbroken = place < end
        for back in range(self.max_ngram):
            unbroken = unbroken & (pad(text, (back, 0), value=-1)[:, :length] == state.gather(end - back))
            matched += unbroken

        best = (matched * length + place).argmax(dim=1, keepdim=True)
        context = matched.gather(1, best)
        step = torch.arange(num_draft_tokens, device=text.device)
        tokens = state.gather(best + 1 + step % (end - best).clamp(min=1))
        confidence = _chances_on(text.device)[(context + step - 1).clamp(0, len(_CHANCES) - 1)]
        return Proposal(tokens.where(context >= self.min_ngram, -1), confidence=confidence)

    def observe(self, state: BatchState, verdict: Verdict) -> None:
        """Nothing is kept."""

    def graph_key(self) -> Hashable | None:
        """Proposals depend on the state alone."""
        return ()


@cache
def _chances_on(device: torch.device) -> Tensor:
    """`_CHANCES` [8] float32. Made once: copying from the host is not allowed while a CUDA graph is captured."""
    return to_device(_CHANCES, device)
