"""Methods of tensors that ask for the real device before they reach the dispatcher, where nothing of it is to be had.

Indexing takes its place among them: of views by numbers, slices and None, and by tensors.
"""

from collections.abc import Callable
from typing import Any

import torch
from pretend_tensors import Device, OnCuda

aten = torch.ops.aten


def basic(device: Device, tensor: torch.Tensor, index: Any) -> tuple[torch.Tensor, list[Any]]:
    """The view by all that is no tensor, and the tensors that remain, None for whole dimensions."""
    index = list(index) if isinstance(index, tuple) else [index]
    taken = sum(
        1 if not isinstance(i, torch.Tensor) or i.dtype != torch.bool else i.dim()
        for i in index
        if i is not None and i is not Ellipsis
    )
    if not any(i is Ellipsis for i in index):
        index.append(Ellipsis)
    at = next(n for n, i in enumerate(index) if i is Ellipsis)
    index[at : at + 1] = [slice(None)] * (tensor.dim() - taken)
    view, dim, left = tensor, 0, []
    for item in index:
        if item is None:
            view = aten.unsqueeze(view, dim)
        elif isinstance(item, slice):
            if item != slice(None):
                view = aten.slice(view, dim, item.start, item.stop, item.step or 1)
        elif isinstance(item, torch.Tensor | list):
            if isinstance(item, list):
                device.wait("an index made from a list")
                item = OnCuda(torch.tensor(item))
            left += [None] * (dim - len(left)) + [item]
            dim += 1
            continue
        else:
            view = aten.select(view, dim, int(item))
            continue
        dim += 1
    return view, left


def get_item(device: Device, tensor: torch.Tensor, index: Any) -> torch.Tensor:
    view, left = basic(device, tensor, index)
    if left:
        return aten.index(view, left)
    return aten.alias(view) if view is tensor else view


def set_item(device: Device, tensor: torch.Tensor, index: Any, value: Any) -> None:
    view, left = basic(device, tensor, index)
    if left:
        if not isinstance(value, torch.Tensor):
            value = aten.full([], value, dtype=tensor.dtype, device=tensor.device)
        aten.index_put_(view, left, value.to(tensor.dtype))
    elif isinstance(value, torch.Tensor):
        aten.copy_(view, value)
    else:  # torch makes a tensor of the number on the host, and copies it
        device.wait("a number is copied to the device")
        aten.fill_(view, value)


def contiguous(device: Device, tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.is_contiguous() else aten.clone(tensor, memory_format=torch.contiguous_format)


def nonzero(device: Device, tensor: torch.Tensor, *, as_tuple: bool = False) -> Any:
    found = aten.nonzero(tensor)
    return tuple(aten.unbind(found, 1)) if as_tuple else found


def to_list(device: Device, tensor: OnCuda) -> Any:
    device.wait("tolist")
    return tensor.value.tolist()


def to_numpy(device: Device, tensor: OnCuda) -> Any:
    raise TypeError(
        "can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() to copy the tensor to host memory first."
    )


METHODS: dict[str, Callable[..., Any]] = {
    "__getitem__": get_item,
    "__setitem__": set_item,
    "__int__": lambda device, tensor: int(aten._local_scalar_dense(tensor)),
    "__float__": lambda device, tensor: float(aten._local_scalar_dense(tensor)),
    "__invert__": lambda device, tensor: aten.bitwise_not(tensor),
    "copy_": lambda device, tensor, *more, **named: aten.copy_(tensor, *more, **named),
    "contiguous": contiguous,
    "nonzero": nonzero,
    "tolist": to_list,
    "numpy": to_numpy,
}
