"""The threshold of top-k and top-p, in torch; jit_filters.py finds the same without sorting."""

import torch
from torch import Tensor

from .numerics import sort_descending


def rank_threshold(logits: Tensor, scale: Tensor, top_k: Tensor | None, top_p: Tensor | None) -> Tensor:
    """The smallest logit [...] that top-k and then top-p keep; -inf where both are off.

    Args:
        logits: [..., V] float32 or float64.
        scale: [...] 1 / T.
        top_k: [...] int, <= 0 = off; None: off.
        top_p: [...] float, 1 = off; None: off.
    """
    threshold = torch.full_like(logits[..., :1], -torch.inf)
    if top_k is None and top_p is None:
        return threshold.squeeze(-1)
    ordered = sort_descending(logits)
    if top_k is not None:
        top_k = top_k.long()  # compared with a dtype that cannot hold V, V would wrap
        on = ((top_k > 0) & (top_k < logits.shape[-1]))[..., None]
        rank = top_k[..., None].where(on, 1) - 1
        threshold = ordered.gather(-1, rank).where(on, -torch.inf)
    if top_p is not None:
        scaled = (ordered * scale[..., None]).masked_fill(ordered < threshold, -torch.inf)
        probs = scaled.softmax(dim=-1, dtype=torch.float64)
        bound = top_p.to(probs.dtype)[..., None]
        last = ((probs.cumsum(dim=-1) - probs < bound).sum(dim=-1, keepdim=True) - 1).clamp(min=0)
        threshold = torch.maximum(threshold, ordered.gather(-1, last).where(bound < 1, -torch.inf))
    return threshold.squeeze(-1)
