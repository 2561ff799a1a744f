"""Copies between the host and the device that nobody waits for.

The host is named wherever its memory is pinned: torch may have been told to make tensors elsewhere (`torch.set_default_device`).
"""

from typing import Any

import torch
from torch import Tensor


def to_device(values: Any, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """A tensor of the host's numbers.

    On a CUDA device by way of pinned memory: a copy from any other makes the host wait for all that the device has yet to do.
    """
    if device.type != "cuda":
        return torch.tensor(values, dtype=dtype, device=device)
    return torch.tensor(values, dtype=dtype, device="cpu", pin_memory=True).to(device, non_blocking=True)


class HostCopies:
    """Copies on the host, in memory that is used again once they have been read: to pin new memory costs the host time."""

    def __init__(self) -> None:
        self._read: dict[tuple[torch.Size, torch.dtype], list[Tensor]] = {}

    def make(self, tensor: Tensor) -> Tensor:
        """A copy that is complete when the device has done all that it was given so far."""
        read = self._read.get((tensor.shape, tensor.dtype))
        if read:
            copy = read.pop()
        else:
            copy = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=tensor.is_cuda)
        return copy.copy_(tensor, non_blocking=True)

    def give_back(self, copy: Tensor) -> None:
        """It has been read. One that never is may be dropped: torch keeps its memory until the device has written it."""
        self._read.setdefault((copy.shape, copy.dtype), []).append(copy)
