"""Looking back: what drafters share that find the end of a row's text again in earlier text."""

from abc import ABC, abstractmethod
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ..state import BatchState, Proposal
from ..transfers import to_device

Tokens = npt.NDArray[np.integer[Any]]
Places = npt.NDArray[np.intp]

# Where more than one in so many tokens is the place of a match, all tokens are compared in less time than these places.
DENSE = 8


class LookupDrafter(ABC):
    """Drafts that are a function of a row's text, and of what is known of other texts; one-hot, and almost free.

    The text may be the committed one, or that with another drafter's drafts behind it: `CascadeDrafter` asks for both.
    """

    @abstractmethod
    def continuation(self, slot: int, text: Tokens, most: int) -> list[tuple[int, float]]:
        """At most so many tokens that may follow the text [N] of the row in this slot, each with its confidence in [0, 1)."""

    def propose(self, state: BatchState, num_draft_tokens: int) -> Proposal:
        """The continuations of all active rows: tokens [B, K] and their confidence. Work on the host, row by row."""
        rows = zip(state.slots, texts(state), state.active.tolist(), strict=True)
        found = [self.continuation(slot, text, num_draft_tokens) if active else [] for slot, text, active in rows]
        padded = [drafts + [(-1, 0.0)] * (num_draft_tokens - len(drafts)) for drafts in found]
        device, shape = state.tokens.device, (len(found), num_draft_tokens)
        tokens = to_device([[token for token, _ in row] for row in padded], device, torch.int64)
        sure = to_device([[chance for _, chance in row] for row in padded], device, torch.float32)
        return Proposal(tokens.view(shape), confidence=sure.view(shape))

    def ends_early(self, state: BatchState) -> bool:
        """Drafts that are not worth verifying cost nothing."""
        return True


def texts(state: BatchState) -> list[Tokens]:
    """Each row's text up to its pending token; those on a CPU share the state's memory."""
    lengths = (state.seq_lens + 1).tolist()
    tokens = state.tokens[:, : max(lengths)].cpu().numpy()
    return [row[:length] for row, length in zip(tokens, lengths, strict=True)]


def matches(text: Tokens, tail: Tokens) -> tuple[Places, int]:
    """The longest matches of the end of `tail`, which has a token: the places of their last tokens, ascending; their length."""
    hits, length = text == tail[-1], 1
    count = np.count_nonzero(hits)
    while length < len(tail) and count * DENSE > len(text):
        longer_hits = np.zeros_like(hits)
        longer_hits[length:] = hits[length:] & (text[:-length] == tail[-1 - length])
        count = np.count_nonzero(longer_hits)
        if not count:
            break
        hits, length = longer_hits, length + 1
    places = np.flatnonzero(hits)
    if not len(places):
        return places, 0
    while length < len(tail):
        longer = places[places >= length]
        longer = longer[text[longer - length] == tail[-1 - length]]
        if not len(longer):
            break
        places, length = longer, length + 1
    return places, length
