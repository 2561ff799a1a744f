"""The threshold of top-k and top-p, in torch, and on a CPU in numpy, which sorts floats in a thirtieth of the time."""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_FEW = 2048  # logits of a row, the largest, that are sorted; the others only if top-k or top-p may keep more


def rank_threshold(logits: Tensor, scale: Tensor | None, top_k: Tensor | None, top_p: Tensor | None) -> Tensor:
    """The smallest logit [...] that top-k and then top-p keep; -inf where both are off.

    Args:
        logits: [..., V] float32 or float64.
        scale: [...] 1 / T; None: 1.
        top_k: [...] int, <= 0 = off; None: off.
        top_p: [...] float, 1 = off; None: off.
    """
    size = logits.shape[-1]
    if logits.device.type != "cpu" or size <= _FEW:
        return _by_sorting(logits, scale, top_k, top_p)
    rows = logits.detach().reshape(-1, size).numpy()
    options = [(scale, 1.0), (None if top_k is None else top_k.long(), 0), (top_p, 1.0)]
    each = [len(rows) * [off] if value is None else value.flatten().tolist() for value, off in options]
    found = [_of_row(row, *its) for row, *its in zip(rows, *each, strict=True)]
    return logits.new_tensor(found).view(logits.shape[:-1])


@np.errstate(over="ignore")  # a logit that masks, times 1/T, is -inf; what is +inf is no distribution
def _of_row(row: NDArray[Any], scale: float, top_k: int, top_p: float) -> float:
    """That of a row [V]."""
    size, peak = len(row), row.max()
    threshold: Any = -np.inf
    limited = 0 < top_k < size
    if not limited and not top_p < 1:
        return -np.inf
    if not -np.inf < peak < np.inf:  # no distribution
        whole = (torch.tensor([value], device="cpu") for value in (scale, top_k, top_p))
        return float(_by_sorting(torch.from_numpy(row)[None], *whole))
    few = np.sort(np.partition(row, size - _FEW)[-_FEW:])
    kept = row
    if limited:
        # Those that tie with the last one stay, too.
        kept = few if top_k <= len(few) and few[0] < few[-top_k] else np.sort(row)
        threshold = kept[-top_k]
        kept = kept[np.searchsorted(kept, threshold) :]
    if top_p < 1:
        factor = row.dtype.type(scale)
        highest = np.float64(peak * factor)
        wanted = top_p * np.exp(kept * factor - highest).sum()
        ordered = kept if limited else few
        before = _masses_before(ordered, factor, highest)
        if before[-1] < wanted and not limited:  # more than the few may be kept
            ordered = np.sort(row)
            before = _masses_before(ordered, factor, highest)
        threshold = ordered[-max(int(np.count_nonzero(before[:-1] < wanted)), 1)]
    return float(threshold)


def _masses_before(ordered: NDArray[Any], factor: Any, highest: Any) -> NDArray[np.float64]:
    """Of logits [N] in ascending order, from the last to the first: the mass of those after it; and the mass of all, [N + 1]."""
    return np.concatenate(([0.0], np.cumsum(np.exp(ordered[::-1] * factor - highest))))


def _by_sorting(logits: Tensor, scale: Tensor | None, top_k: Tensor | None, top_p: Tensor | None) -> Tensor:
    """`rank_threshold` on any device, of any rows."""
    ordered = logits.sort(dim=-1, descending=True).values
    threshold = torch.full_like(ordered[..., :1], -torch.inf)
    if top_k is not None:
        top_k = top_k.long()  # compared with a dtype that cannot hold V, V would wrap
        on = ((top_k > 0) & (top_k < logits.shape[-1]))[..., None]
        rank = top_k[..., None].where(on, 1) - 1
        threshold = ordered.gather(-1, rank).where(on, -torch.inf)
    if top_p is not None:
        scaled = ordered if scale is None else ordered * scale[..., None]
        scaled = scaled.masked_fill(ordered < threshold, -torch.inf)
        probs = scaled.softmax(dim=-1, dtype=torch.float64)
        bound = top_p.to(probs.dtype)[..., None]
        last = ((probs.cumsum(dim=-1) - probs < bound).sum(dim=-1, keepdim=True) - 1).clamp(min=0)
        threshold = torch.maximum(threshold, ordered.gather(-1, last).where(bound < 1, -torch.inf))
    return threshold.squeeze(-1)
