"""Logits that depend on the text before them."""

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
    """Each row with the penalty on what its own text has: all up to the pending token, and the drafts before that row.

    A logit l becomes l / penalty if it is above 0, else l * penalty (Keskar et al., CTRL, arXiv 1909.05858), once for each token
    however often it stands there, in float32 where the logits are not float64. The last row is behind all drafts, the one
    before it behind all but the last, and so on: with W = K+1, row i is what decides if draft i stands, so that the text has
    the law that it has without drafts.

    Args:
        places: from ids of the target, [B, W, N], to where they stand in a row of logits, V where they do not; None: the ids
            themselves.

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
    """A drafter's logits [B, W, V] of the target's first V ids, as the target's will be; themselves if no row has a penalty.

    Args:
        drafts: [B, n] each, that the last row is behind, see `penalise_repetition`.
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
