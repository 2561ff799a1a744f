"""Where operations on tensors of the pretended device are caught, before torch's dispatcher and in it; see pretend_cuda.py."""

from typing import Any

import torch
from pretend_methods import METHODS
from pretend_tensors import DEVICE, Device, OnCuda, is_cuda, leaves, run, uses
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten
WAITING = {aten._local_scalar_dense.default, aten.nonzero.default, aten.masked_select.default, aten.equal.default}


class Functions(TorchFunctionMode):
    """What does not reach the dispatcher as it should without a real device."""

    def __init__(self, device: Device) -> None:
        super().__init__()
        self.device = device

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        if name in METHODS and func is getattr(torch.Tensor, name, None) and uses(args):
            return METHODS[name](self.device, *args, **kwargs)
        if name in ("to", "cuda", "cpu") and isinstance(args[0], torch.Tensor):
            return self.moved(name, args, kwargs)
        if func is torch.nn.functional.scaled_dot_product_attention and isinstance(args[0], OnCuda):
            return run(self.device, func, args, kwargs)
        if kwargs.pop("pin_memory", False):
            if is_cuda(kwargs.get("device")):
                raise RuntimeError("Only dense CPU tensors can be pinned")
            made = func(*args, **kwargs)
            made.pretended_pinned = True
            return made
        if is_cuda(kwargs.get("device")) and name in ("tensor", "as_tensor", "scalar_tensor"):
            if not isinstance(args[0], torch.Tensor):  # from a tensor, the copy is under way
                self.device.wait("a tensor is made from the host's data")
            del kwargs["device"]
            made = func(*args, **kwargs)
            return OnCuda(made) if not isinstance(made, OnCuda) else made
        return func(*args, **kwargs)

    def moved(self, name: str, args: Any, kwargs: Any) -> torch.Tensor:
        """`to`, `cuda` and `cpu`."""
        tensor, *rest = args
        to: Any = {"cuda": DEVICE, "cpu": torch.device("cpu")}.get(name)
        dtype, copy = None, kwargs.get("copy", False)
        for arg in (*rest, *kwargs.values()) if name == "to" else ():
            if isinstance(arg, str | torch.device):
                to = torch.device(arg)
            elif isinstance(arg, torch.dtype):
                dtype = arg
            elif isinstance(arg, torch.Tensor):
                to, dtype = arg.device, arg.dtype
        value = tensor
        if to is not None and (to.type == "cuda") != isinstance(tensor, OnCuda):
            copy = False
            if to.type == "cpu":
                self.device.wait("a copy to the host")
                value = tensor.value.clone()
            else:
                self.device.from_host(tensor)
                value = OnCuda(tensor.detach().clone())
        if copy or dtype not in (None, value.dtype):
            return aten._to_copy(value, dtype=dtype or value.dtype)
        return value


class Operations(TorchDispatchMode):
    """All that reaches the dispatcher is done on the CPU, or refused."""

    def __init__(self, device: Device) -> None:
        super().__init__()
        self.device = device

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        tensors = [leaf for leaf in leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        here = [tensor for tensor in tensors if isinstance(tensor, OnCuda)]
        makes = is_cuda(kwargs.get("device"))
        if not here and not makes:
            return func(*args, **kwargs)
        if func in (aten.copy_.default, aten._to_copy.default):
            return self.copied(func, args, kwargs)
        for tensor in tensors:
            if not isinstance(tensor, OnCuda) and tensor.dim():
                raise RuntimeError(f"expected all tensors to be on the same device, but found cuda:0 and cpu in {func}")
        if func in WAITING or (
            func is aten.index.Tensor and any(i is not None and i.dtype == torch.bool for i in args[1])
        ):
            self.device.wait(str(func))
        if "device" in kwargs and kwargs["device"] is not None:
            if not makes:
                raise NotImplementedError(func)
            kwargs["device"] = torch.device("cpu")
        if func is aten.histc.default:  # on a CPU it does not know integers
            return run(self.device, lambda values, *more: func(values.double(), *more).to(values.dtype), args, kwargs)
        return run(self.device, func, args, kwargs)

    def copied(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Between the devices or on ours: into a tensor that is there, or into a new one."""
        if func is aten.copy_.default:
            place, value = args[:2]
            on = [isinstance(t, OnCuda) for t in (place, value)]
            if on == [False, True]:
                if not (place.is_pinned() and ((len(args) > 2 and args[2]) or kwargs.get("non_blocking"))):
                    self.device.wait("a copy to the host")
                place.copy_(value.value)
                return place
            if on == [True, False]:
                self.device.from_host(value)
            return run(self.device, func, args, kwargs)
        (value,) = args
        to = kwargs.pop("device", None)
        to = value.device if to is None else torch.device(to)
        kwargs.pop("non_blocking", None)
        if to.type == "cuda":
            if not isinstance(value, OnCuda):
                self.device.from_host(value)
            return run(self.device, func, args, kwargs)
        self.device.wait("a copy to the host")
        return func(value.value, **kwargs)
