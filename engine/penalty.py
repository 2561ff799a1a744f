"""The repetition penalty, by which logits depend on the text before them."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from .state import BatchState


def penalise_repetition(
    logits: Tensor,  # [B, W, V] floating; in float32 and float64 they are changed in place, without `places`
    state: BatchState,
    drafts: Tensor,  # [B, K] int64, -1 = none
    places: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """Apply each sequence's penalty to its W rows of logits: to the tokens of the text before each row.

    A logit l becomes l / penalty if it is above 0, else l * penalty (Keskar et al., CTRL, arXiv 1909.05858), once for each token
    however often it stands there, in float32 where the logits are not float64.

    The text before the last row is that of the sequence with all its drafts, before the row in front of it that with all
    drafts but the last, and so on. With W = K+1, row i is then the one that decides whether draft i stands, and the text has
    the law that it has without drafts.

    Args:
        places: maps ids of the target [B, W, N] to their columns in the rows of logits, V where they have none; None: an id is
            its column.

    Returns:
        [B, W, V] float32 or float64.
    """
    if logits.dtype != torch.float64:
        logits = logits.float()
    size, seen = logits.shape[2], _texts_before(state, drafts, logits.shape[1])
    if places is not None:
        logits, seen = pad(logits, (0, 1)), places(seen)
    penalty = state.repetition_penalty[:, None, None]
    values = logits.gather(2, seen)
    return logits.scatter_(2, seen, torch.where(values > 0, values / penalty, values * penalty))[..., :size]


def penalise_drafter(logits: Tensor, state: BatchState, drafts: Sequence[Tensor] = ()) -> Tensor:
    """A drafter's logits [B, W, V], of the target's first V ids, with the penalty that the target's will have.

    Args:
        drafts: those before the last row, [B, n] each, see `penalise_repetition`.
    """
    if not state.penalised:
        return logits
    before = torch.cat([state.tokens[:, :0], *drafts], dim=1)
    return penalise_repetition(logits, state, before, lambda ids: ids.clamp(max=logits.shape[2]))


def _texts_before(state: BatchState, drafts: Tensor, width: int) -> Tensor:
    """[B, width, N] int64: the tokens of the text before each row, some of them several times."""
    pending = state.pending[:, None]
    index = torch.arange(state.max_text_length, device=drafts.device)
    # The pending token stands in every row's text: in place of what does not, it changes nothing.
    text = state.tokens[:, : len(index)].where(index <= state.seq_lens[:, None], pending)
    draft = torch.arange(drafts.shape[1], device=drafts.device)
    count = torch.arange(1 - width, 1, device=drafts.device)[:, None] + len(draft)  # of those before each row
    drafted = drafts[:, None].where((draft < count) & (drafts >= 0)[:, None], pending[:, None])
    return torch.cat([text[:, None].expand(-1, width, -1), drafted], dim=2)
