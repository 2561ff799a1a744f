"""What the torch twins compute with, some of which numpy does on a CPU.

A row has to come to the same bits whatever is beside it. numpy adds up a row in the same order however many there are, which
torch does not; and its exp, argmax and sort take a tenth of torch's time or less.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor


def computed(logits: Tensor) -> Tensor:
    """Logits in the dtype of the computation: float64 stays, all others become float32."""
    return logits if logits.dtype in (torch.float32, torch.float64) else logits.float()


def exp(values: Tensor) -> Tensor:
    """exp of float32 or float64."""
    return _in_numpy(np.exp, values) if values.device.type == "cpu" else values.exp()


def row_sums(values: Tensor) -> Tensor:
    """The sum of each row: [..., V] -> [...]."""
    return _in_numpy(np.sum, values, axis=-1) if values.device.type == "cpu" else values.sum(dim=-1)


def argmax(values: Tensor) -> Tensor:
    """The first place of the largest, or of NaN if there is one: [..., V] float32 or float64 -> [...] int64."""
    return _in_numpy(np.argmax, values, axis=-1) if values.device.type == "cpu" else values.argmax(dim=-1)


def sort_descending(values: Tensor) -> Tensor:
    """Rows [..., V], NaN first."""
    if values.device.type == "cpu":
        return _in_numpy(np.sort, values).flip(-1)
    return values.sort(dim=-1, descending=True).values


@np.errstate(all="ignore")
def _in_numpy(function: Callable[..., Any], values: Tensor, **options: Any) -> Tensor:
    return torch.from_numpy(np.asarray(function(values.detach().contiguous().numpy(), **options)))


def log_sum_exp(values: Tensor) -> Tensor:
    """log of the sum of exp of each row: [..., V] -> [...]. NaN where there is NaN or +inf."""
    # Of a row of nothing but -inf the smallest finite number, because -inf - -inf is NaN.
    peak = values.amax(dim=-1).clamp_(min=torch.finfo(values.dtype).min)
    return row_sums(exp(values - peak[..., None])).log_().add_(peak)


def with_leading_dims(value: Tensor, dims: int) -> Tensor:
    """[V], [B, V] or [B, W, V] with dimensions of size 1 put before V until there are `dims`."""
    while value.dim() < dims:
        value = value[:, None] if value.dim() > 1 else value[None]
    return value


def resize(values: Tensor, vocab_size: int, value: float) -> Tensor:
    """Cut rows [..., V] to [..., vocab_size], or pad them with a value."""
    missing = vocab_size - values.shape[-1]
    if missing > 0:
        return torch.nn.functional.pad(values, (0, missing), value=value)
    return values[..., :vocab_size] if missing else values
