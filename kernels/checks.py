"""Checks of arguments before a call: of type, dtype, shape and device. Never of the values of a tensor: reading them would
wait for its device."""

import math
import operator
from contextlib import suppress
from numbers import Real
from typing import Any

import torch
from torch import Tensor

MAX_GRID = 65_535  # programs along the second and third dimension of a grid
MAX_WIDTH = 32_768  # rows of a sequence in `verify`, whose last program holds 32 numbers of each, and 2**20 at most
FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
NUMBERS = (*FLOATS, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def check_tensor(name: str, value: Any, device: torch.device | None = None) -> None:
    """ValueError unless it is a tensor whose numbers lie in memory as they are, on this device if one is given."""
    if not isinstance(value, Tensor):
        got = repr(value)
        if "\n" in got or len(got) > 100:  # as of arrays
            got = f"a {type(value).__name__}"
        raise ValueError(f"{name} must be a tensor{'' if device is None else f' on {device}'}, got {got}")
    if device is not None and value.device != device:
        raise ValueError(f"{name} must be a tensor on {device}, got one on {value.device}")
    plain = value.layout == torch.strided and not value.is_nested
    if not plain or (not torch.compiler.is_dynamo_compiling() and value.is_neg()):
        raise ValueError(
            f"{name} must be a plain tensor, got a {'negated view' if plain else f'{value.layout} tensor'}"
        )


def check_bool(name: str, value: Any) -> None:
    """ValueError unless it is True or False. A tensor is refused: reading it would wait for its device."""
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be True or False, got {value!r:.100}")


def as_float(name: str, value: Any, least: float = -math.inf) -> float:
    """A number of Python or NumPy as a float of Python, the only kind that Triton takes; ValueError unless it is >= `least`."""
    if isinstance(value, Real) and not isinstance(value, bool):
        with suppress(OverflowError):
            if (number := float(value)) >= least:
                return number
    raise ValueError(f"{name} must be a number{'' if least == -math.inf else f' >= {least:g}'}, got {value!r:.100}")


def as_int(name: str, value: Any) -> int:
    """The same for a whole number. A tensor is refused: reading it would wait for its device."""
    if not isinstance(value, (bool, Tensor)):
        with suppress(TypeError):
            return operator.index(value)
    raise ValueError(f"{name} must be an int, got {value!r:.100}")
