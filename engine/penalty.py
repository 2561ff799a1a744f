"""Logits that depend on the text before them."""

import torch
from torch import Tensor

from .state import BatchState


def penalise_repetition(
    logits: Tensor,  # [B, K+1, V] floating, the target's; in float32 and float64 they are changed in place
    state: BatchState,
    drafts: Tensor,  # [B, K] int64, -1 = none
) -> Tensor:
    """Each row with the penalty on what its own text has: all up to the pending token, and the drafts before that row.

    A logit l becomes l / penalty if it is above 0, else l * penalty (Keskar et al., CTRL, arXiv 1909.05858), once for each token
    however often it stands there, in float32 where the logits are not float64. Row i is what decides if draft i stands,
    so that the text has the law that it has without drafts.

    Returns:
        [B, K+1, V] float32 or float64.
    """
    if logits.dtype != torch.float64:
        logits = logits.float()
    width, pending = logits.shape[1], state.pending[:, None]
    index = torch.arange(state.max_text_length, device=logits.device)
    # The pending token stands in every row's text: in place of what does not, it changes nothing.
    text = state.tokens[:, : len(index)].where(index <= state.seq_lens[:, None], pending)
    column = torch.arange(width, device=logits.device)
    before = (column[: width - 1] < column[:, None]) & (drafts >= 0)[:, None]  # [B, K+1, K]
    drafted = drafts[:, None].where(before, pending[:, None])
    seen = torch.cat([text[:, None].expand(-1, width, -1), drafted], dim=2)
    penalty = state.repetition_penalty[:, None, None]
    values = logits.gather(2, seen)
    return logits.scatter_(2, seen, torch.where(values > 0, values / penalty, values * penalty))
