"""Tensors of the pretended device, what is done with them, and the log of that which a captured graph is; see pretend_cuda.py."""

import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch

DEVICE = torch.device("cuda", 0)


class OnCuda(torch.Tensor):
    """A tensor on the device."""

    value: torch.Tensor  # its data, on the CPU

    @staticmethod
    def __new__(cls, value: torch.Tensor) -> "OnCuda":
        with torch.inference_mode(False):  # a view of an ordinary tensor must be one
            tensor = torch.Tensor._make_wrapper_subclass(
                cls,
                value.shape,
                strides=value.stride(),
                storage_offset=value.storage_offset(),
                dtype=value.dtype,
                device=DEVICE,
            )
        tensor.value = value
        return tensor

    def data_ptr(self) -> int:
        return self.value.data_ptr()

    def untyped_storage(self) -> torch.UntypedStorage:
        return self.value.untyped_storage()

    def __deepcopy__(self, memo: dict[int, Any]) -> "OnCuda":
        if id(self) not in memo:
            memo[id(self)] = copy = OnCuda(self.value.clone())
            if isinstance(self, torch.nn.Parameter):
                memo[id(self)] = torch.nn.Parameter(copy, self.requires_grad)
        return memo[id(self)]

    def __repr__(self, **_: Any) -> str:
        return f"OnCuda({self.value!r})"

    def __torch_dispatch__(self, *_: Any) -> Any:
        raise AssertionError("the pretended device is off")


def is_cuda(device: Any) -> bool:
    return device is not None and not isinstance(device, int) and torch.device(device).type == "cuda"


def leaves(values: Any) -> Iterator[Any]:
    """What is in tuples, lists and dicts, in a third of the time that torch's pytree takes."""
    if isinstance(values, dict):
        values = values.values()
    elif not isinstance(values, tuple | list):
        yield values
        return
    for value in values:
        yield from leaves(value)


def mapped(function: Callable[[Any], Any], values: Any) -> Any:
    """The same tuples, lists and dicts with what a function makes of each leaf."""
    if isinstance(values, dict):
        return {name: mapped(function, value) for name, value in values.items()}
    if not isinstance(values, tuple | list):
        return function(values)
    inside = [mapped(function, value) for value in values]
    return type(values)(*inside) if hasattr(values, "_fields") else type(values)(inside)


def uses(values: Any) -> bool:
    """Whether one of them is on the device."""
    return any(isinstance(leaf, OnCuda) for leaf in leaves(values))


def bare(value: Any) -> Any:
    """With the data on the CPU in the place of tensors of the device."""
    return mapped(lambda leaf: leaf.value if isinstance(leaf, OnCuda) else leaf, value)


def storages(values: Any) -> dict[int, torch.Tensor]:
    """The memory of tensors on the CPU, as bytes, by address."""
    found = [leaf.untyped_storage() for leaf in leaves(values) if isinstance(leaf, torch.Tensor)]
    return {s.data_ptr(): torch.empty(0, dtype=torch.uint8, device="cpu").set_(s) for s in found if s.nbytes()}


class Device:
    """What has happened on it.

    Attributes:
        waits: how often the host has waited for it.
        launches: of Triton kernels, replayed ones not counted.
    """

    def __init__(self) -> None:
        self.waits = self.launches = 0
        self.capturing: Log | None = None
        self._captured: list[weakref.ref[Log]] = []  # in the order in which they were

    def wait(self, what: str) -> None:
        if self.capturing is not None:
            raise RuntimeError(f"operation not permitted when stream is capturing: {what}")
        self.waits += 1

    def has_captured(self, log: "Log") -> None:
        log.end()
        self._captured.append(weakref.ref(log))

    def replay(self, log: "Log") -> None:
        """Do its work. What graphs that were captured later have made may lie where this one works, as they share a pool."""
        known = [found for each in self._captured if (found := each()) is not None]
        for later in known[known.index(log) + 1 :]:
            later.spoil()
        for step in log.steps:
            step()

    def from_host(self, tensor: torch.Tensor) -> None:
        """A copy of it to the device begins; one from memory that is not pinned waits."""
        if tensor.dim() and not tensor.is_pinned():
            self.wait("a copy from the host's memory")


class Log:
    """A captured graph."""

    def __init__(self) -> None:
        self.steps: list[Callable[[], Any]] = []
        self._before: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # by storage: its bytes, what they were
        self._own: dict[int, torch.Tensor] = {}  # by storage made while capturing: its bytes
        self._kept: list[Any] = []  # so that no address is used twice

    def will_change(self, values: Any) -> None:
        """What is in these tensors is put back when the capture ends."""
        for key, whole in storages(values).items():
            if key not in self._own and key not in self._before:
                self._before[key] = whole, whole.clone()

    def has_made(self, result: Any, given: Any) -> set[int]:
        """The storages that these tensors have and those had not."""
        self._kept += [result, given]
        new = {key: whole for key, whole in storages(result).items() if key not in storages(given)}
        self._own |= new
        return set(new)

    def end(self) -> None:
        """Nothing has been done yet."""
        for whole, old in self._before.values():
            whole.copy_(old)
        self.spoil()

    def spoil(self) -> None:
        """All memory that it has made holds something else."""
        for whole in self._own.values():
            whole.fill_(0x5A)


def run(device: Device, func: Any, args: Any, kwargs: Any) -> Any:
    """Do it on the CPU; if a graph is captured, also whenever that is replayed."""
    given, named = bare((args, kwargs))
    schema = getattr(func, "_schema", None)
    mutable = schema is not None and schema.is_mutable
    log = device.capturing
    if log is not None and mutable:
        log.will_change(changed(schema, given, named))
    result = func(*given, **named)
    if log is not None:
        new = log.has_made(result, (given, named))

        def again() -> None:
            places, values = (leaves(each) for each in (result, func(*given, **named)))
            for place, value in zip(places, values, strict=True):
                if isinstance(place, torch.Tensor) and place.untyped_storage().data_ptr() in new:
                    place.copy_(value)

        if new or mutable:
            log.steps.append(again)
    # What was changed in place is the tensor that was given.
    same = {id(leaf.value): leaf for leaf in leaves((args, kwargs)) if isinstance(leaf, OnCuda)}

    def on_device(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        return same[id(leaf)] if id(leaf) in same else OnCuda(leaf)

    return mapped(on_device, result)


def changed(schema: Any, args: Any, kwargs: Any) -> list[Any]:
    """The arguments that an operation writes to."""
    found = []
    for index, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            found.append(args[index] if index < len(args) else kwargs.get(argument.name))
    return found
