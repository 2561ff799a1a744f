"""`verify` on a CPU where all rows are greedy: their argmaxes alone decide.

It needs no Numba, which takes half a second to import.
"""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .numerics import computed
from .records import Verdict

_INF, _MINUS_INF = 0x7F80, 0xFF80  # of bfloat16, as 16 bits


def verify(target_logits: Tensor, draft_tokens: Tensor) -> Verdict | None:
    """The verdict on drafts [B, K] by logits [B, K+1, V] with bias and mask; None if some row may be no distribution.

    Of bfloat16 the bits are compared, in a third of the time: as integers, numbers above 0 keep their order, above all others.
    """
    target_logits = target_logits.detach()
    if target_logits.dtype == torch.bfloat16:
        bits = target_logits.view(torch.int16).numpy()
        places, largest = _argmax(bits)
        # As integers without a sign, only negative NaN is above -inf.
        if (largest > 0).all() and (largest < _INF).all() and bits.view(np.uint16).max(initial=0) <= _MINUS_INF:
            return _verdict(places, draft_tokens)
    places, largest = _argmax(computed(target_logits).numpy())
    return _verdict(places, draft_tokens) if np.isfinite(largest).all() else None


def _argmax(rows: NDArray[Any]) -> tuple[NDArray[np.int64], NDArray[Any]]:
    """The first places of the largest numbers, or of NaN, and these: [B, W, V] -> [B, W] each."""
    places = rows.argmax(axis=-1)
    return places, np.take_along_axis(rows, places[..., None], axis=-1)[..., 0]


def _verdict(likeliest: NDArray[np.int64], draft_tokens: Tensor) -> Verdict:
    """Accepted drafts are the argmaxes, and so is the next token."""
    stands = (draft_tokens.numpy() == likeliest[:, :-1]).cumprod(axis=1)
    tokens = likeliest.copy()
    tokens[:, 1:][stands == 0] = -1
    num_accepted = stands.sum(axis=1, dtype=np.int32)
    return Verdict(*map(torch.from_numpy, (tokens, num_accepted, np.zeros_like(num_accepted))))
