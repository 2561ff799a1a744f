"""What the calls ask of their arguments before anything is worked out: by type, dtype, shape and device, never by the values of a
tensor, which would wait for its device."""

from numbers import Real
from typing import Any

import torch
from torch import Tensor

MAX_GRID = 65_535  # programs along the second and third dimension of a grid
FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
NUMBERS = (*FLOATS, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def check_tensor(name: str, value: Any, device: torch.device | None = None) -> None:
    """ValueError unless it is a tensor, on this device if one is given."""
    if not isinstance(value, Tensor):
        raise ValueError(f"{name} must be a tensor{'' if device is None else f' on {device}'}, got {value!r:.100}")
    if device is not None and value.device != device:
        raise ValueError(f"{name} must be a tensor on {device}, got one on {value.device}")


def check_real(name: str, value: Any) -> None:
    """ValueError unless it is a number >= 0 of Python or NumPy."""
    number = isinstance(value, float) or (isinstance(value, Real) and not isinstance(value, bool))
    if not number or not value >= 0:
        raise ValueError(f"{name} must be a number >= 0, got {value!r:.100}")
