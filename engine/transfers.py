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


def to_host(tensor: Tensor) -> tuple[Tensor, torch.cuda.Event | None]:
    """A copy on the host, and the event after which it is complete; None: it is."""
    if not tensor.is_cuda:
        return tensor.clone(), None
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
    copy.copy_(tensor, non_blocking=True)
    arrived = torch.cuda.Event()
    arrived.record(torch.cuda.current_stream(tensor.device))
    return copy, arrived
