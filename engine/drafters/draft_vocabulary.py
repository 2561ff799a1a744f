"""Which of the target's tokens a head with a vocabulary of its own may draft."""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence

from ..state import BatchState
from .lookup import texts

# Places of a text that bring such tokens, the latest ones. 8% of the tokens of SmolLM2's answers are outside the 8,192 most
# frequent, and of these two thirds stand in the text before. On 2 cores `seen` takes 37 to 70 us for texts of 100 to 4,000
# tokens and a draft 25 to 80 us more, where a round takes 20 ms.
MAX_SEEN = 128
# Columns behind the target's vocabulary, the first of which takes what is not valid. With so many, rows that kernels can read 16
# bytes at a time stay such.
BEHIND = 16


class SeenTokens(NamedTuple):
    """What the texts of a batch add to a draft vocabulary, N tokens at most."""

    ids: Tensor  # [B, N] int64, target ids, none twice where valid
    valid: Tensor  # [B, N] bool
    rows: Tensor  # [B, N, H], of the target's output matrix
    # [B, V_draft + N] int64, the target's ids of the draft vocabulary and these; the size of its vocabulary where not valid
    all_ids: Tensor


class DraftVocabulary:
    """A head's vocabulary, and where its output matrix is the target's own, each text's tokens beside it.

    A head of a reduced vocabulary cannot draft a name that its prompt is about. But where its output matrix consists of the
    target's rows, it has logits for every token of the target; those of the text's own tokens cost next to nothing. For
    the head of SmolLM2-135M-Instruct, 59 of 100 first drafts then stood instead of 57, with no training of its own.

    Args:
        ids: [V_draft] int64, the target's ids of the draft vocabulary.
        vocab_size: the target's.
        output: [vocab_size, H], the target's output matrix, if the head has no other; None: a text adds nothing.
    """

    def __init__(self, ids: Tensor, vocab_size: int, output: Tensor | None = None) -> None:
        self.ids, self.vocab_size = ids, vocab_size
        self._output = output
        self._is_targets = len(ids) == vocab_size and bool((ids == torch.arange(vocab_size, device=ids.device)).all())
        place = torch.arange(len(ids), device=ids.device)
        self._place = torch.full((vocab_size,), -1, device=ids.device).index_copy(0, ids, place)
        self._own = self._place >= 0

    def seen(self, state: BatchState) -> SeenTokens | None:
        """The tokens outside the draft vocabulary that each text has, the latest MAX_SEEN; None if those are not drafted."""
        if self._output is None:
            return None
        ids, valid = self._on_host(state) if state.can_look else self._on_device(state)
        if not ids.shape[1]:
            return None
        all_ids = torch.cat([self.ids.expand(len(ids), -1), ids.masked_fill(~valid, self.vocab_size)], dim=1)
        return SeenTokens(ids, valid, self._output[ids], all_ids)

    def _on_host(self, state: BatchState) -> tuple[Tensor, Tensor]:
        """Ids and which are valid, of no more columns than a row needs."""
        own = self._own.numpy()
        found = [torch.from_numpy(np.unique(text[~own[text]][-MAX_SEEN:])) for text in texts(state)]
        ids = pad_sequence(found, batch_first=True, padding_value=-1)
        return ids.clamp(min=0), ids >= 0

    def _on_device(self, state: BatchState) -> tuple[Tensor, Tensor]:
        """The same of MAX_SEEN columns: shapes do not depend on the text."""
        tokens = state.tokens[:, : max(state.max_text_length, 1)]
        place = torch.arange(tokens.shape[1], device=tokens.device)
        wanted = ~self._own[tokens] & (place <= state.seq_lens[:, None])
        last = place.where(wanted, -1).topk(min(MAX_SEEN, len(place)), dim=1).values
        last = pad(last, (0, MAX_SEEN - last.shape[1]), value=-1)
        ids = tokens.gather(1, last.clamp(min=0))
        again = (ids[:, :, None] == ids[:, None, :]).tril(-1).any(dim=-1)
        return ids, (last >= 0) & ~again

    def widened(self, logits: Tensor, hidden: Tensor, seen: SeenTokens | None) -> Tensor:
        """Logits [B, 1, V_draft] with those of the seen tokens behind, -inf where there is none.

        Args:
            hidden: [B, 1, H] that the output matrix gave these logits from.
        """
        if seen is None:
            return logits
        more = (hidden @ seen.rows.mT).masked_fill(~seen.valid[:, None], -torch.inf)
        return torch.cat([logits, more], dim=-1)

    def places(self, ids: Tensor, seen: SeenTokens | None) -> Tensor:
        """Where in such logits the ids [B, W, N] of a text stand, behind the last if nowhere; and the S seen tokens, which are of
        the text: [B, W, N + S] int64.
        """
        num_own, num_seen = len(self.ids), 0 if seen is None else seen.ids.shape[1]
        places = self._place[ids]
        behind = torch.arange(num_own, num_own + num_seen, device=ids.device).expand(*ids.shape[:2], -1)
        return torch.cat([places.where(places >= 0, num_own + num_seen), behind], dim=2)

    def target_ids(self, tokens: Tensor, seen: SeenTokens | None) -> Tensor:
        """Ids [B, 1] of such logits, -1 for none, as the target's."""
        found = tokens.clamp(min=0)
        ids = self.ids[found] if seen is None else seen.all_ids.gather(1, found)
        return ids.where(tokens >= 0, -1)

    def of_target(self, logits: Tensor, seen: SeenTokens | None) -> Tensor:
        """Such logits as [B, 1, vocab_size]; tokens that are not drafted get -inf."""
        if self._is_targets:
            return logits
        ids = self.ids[None] if seen is None else seen.all_ids
        whole = logits.new_full((*logits.shape[:-1], self.vocab_size + BEHIND), -torch.inf)
        return whole.scatter_(-1, ids[:, None].expand(logits.shape), logits)[..., : self.vocab_size]
