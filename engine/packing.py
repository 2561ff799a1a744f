"""Linear layers whose weights lie in memory as the matrix products of a CPU read them best; see `weight_layouts.py`.

Decoding multiplies a few rows by every weight of the model, so it should take as long as reading the weights. Weights are laid out
once, after loading.
"""

from collections.abc import Callable, Sequence
from itertools import count
from typing import Any, TypeGuard
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from .weight_layouts import Layout, layout_of, packed

# Siblings that stock models call with one input: their weights lie one below the other, and the first call computes for all.
# Each product costs some 30 us beside its work (2 threads), in a layer whose work takes 500.
_TOGETHER = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


class PackedLinear(nn.Module):
    """Stands in for an `nn.Linear` on a CPU, or for a `Conv1D` as GPT-2 has it, for inference. Holds the weight once, packed.

    Args:
        transposed: the weight is to be seen as that of a `Conv1D`.

    Attributes:
        product: with its siblings.

    Raises:
        ValueError: if this build of torch or this processor has no layout for the weight.
    """

    def __init__(
        self, linear: nn.Linear, product: "Product | None" = None, index: int = 0, transposed: bool = False
    ) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        # No parameter, as the weight is none: both are in the product, and changing this changes nothing.
        self.bias: Tensor | None = None if linear.bias is None else linear.bias.detach()
        self.product, self._index, self._transposed = product or Product([linear]), index, transposed

    @property
    def weight(self) -> Tensor:
        """[out_features, in_features], of a Conv1D [in_features, out_features]; a new tensor if held in another layout."""
        weight = self.product.weight(self._index)
        return weight.T.contiguous() if self._transposed else weight

    @property
    def nbytes(self) -> int:
        """Of the weight."""
        return self.in_features * self.out_features * self.product.dtype.itemsize

    def forward(self, input: Tensor) -> Tensor:
        """[..., in_features] to [..., out_features]; part of a larger tensor where siblings are computed together."""
        return self.product(input, self._index)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "PackedLinear":
        """What `to`, `half` and the like do to each module of a model."""
        super()._apply(fn, recurse)
        self.product.convert(fn)
        self.bias = None if self.bias is None else fn(self.bias)
        return self

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "weight"] = self.weight
        if self.bias is not None:
            destination[prefix + "bias"] = self.bias

    def _load_from_state_dict(
        self,
        state_dict: Any,
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing: Any,
        unexpected: Any,
        errors: Any,
    ) -> None:
        """Pack the weights that `load_state_dict` is given; what does not fit is noted in the lists, as other modules do."""
        own = {"weight": self.weight} | ({} if self.bias is None else {"bias": self.bias})
        new = {name: state_dict[prefix + name] for name in own if prefix + name in state_dict}
        if strict:
            missing += [prefix + name for name in own if name not in new]
            known = {prefix + name for name in own}
            unexpected += [key for key in state_dict if key.startswith(prefix) and key not in known]
        for name, value in new.items():
            if value.shape != own[name].shape:
                shapes = f"{list(value.shape)}, where {list(own[name].shape)} was expected"
                errors.append(f"size mismatch for {prefix}{name}: {shapes}")
                return
        if new:
            weight = new.get("weight", own["weight"])
            self.bias = self.product.replace(self._index, weight.T if self._transposed else weight, new.get("bias"))


class Product:
    """What linear layers of one input size give, computed together when the first of them is called.

    Calls with the same tensor belong together, which nobody may change between them; any other order costs time only.
    """

    def __init__(self, linears: Sequence[nn.Linear]) -> None:
        self._sizes = [linear.out_features for linear in linears]
        weights, biases = [linear.weight.detach() for linear in linears], [linear.bias for linear in linears]
        joined = weights[0] if len(weights) == 1 else torch.cat(weights)
        self._bias = None if biases[0] is None else torch.cat([bias.detach() for bias in biases])
        self._like = joined.new_empty(0)  # of the dtype and on the device that the weights have
        if layout_of(joined.dtype) is None:
            raise ValueError(f"linear must have weights of a dtype that can be packed here, got {joined.dtype}")
        self._packed: Layout = packed(joined, self._bias)
        self._number = -1  # by which an operator in a compiled graph finds it
        self.number()  # others may compile a module that has this
        self._kept: tuple[Tensor, dict[int, Tensor]] | None = None  # an input, and the results not yet asked for

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self.number()

    @property
    def dtype(self) -> torch.dtype:
        """Of the weights."""
        return self._like.dtype

    @property
    def device(self) -> torch.device:
        """Of the weights."""
        return self._like.device

    def __call__(self, input: Tensor, index: int) -> Tensor:
        kept = self._kept  # read once: another thread may be at work
        if kept is not None and kept[0] is input and (found := kept[1].pop(index, None)) is not None:
            if not kept[1]:
                self._kept = None
            return found
        output = self.multiply(input)
        if len(self._sizes) == 1:
            return output
        results = dict(enumerate(torch.split(output, self._sizes, dim=-1)))
        found = results.pop(index)
        self._kept = input, results
        return found

    def multiply(self, input: Tensor) -> Tensor:
        """[..., in_features] to what the layers give, side by side."""
        if torch.compiler.is_dynamo_compiling():  # which cannot look into packed weights
            output: Tensor = torch.ops.speculative_engine.product(input, self._number, sum(self._sizes))
            return output
        return self._packed.multiply(input)

    def convert(self, fn: Callable[[Tensor], Tensor]) -> None:
        """Pack what a function, which gives a tensor in a dtype and on a device, makes of the weights, if it changes them."""
        like = fn(self._like)
        if (like.dtype, like.device) == (self._like.dtype, self._like.device):
            return
        weight, self._bias = fn(self._packed.weight()), None if self._bias is None else fn(self._bias)
        self._packed, self._like, self._kept = packed(weight, self._bias), like, None

    def replace(self, index: int, weight: Tensor, bias: Tensor | None) -> Tensor | None:
        """Pack another weight [out_features, in_features] of one of the layers, and bias [out_features], if one is given.

        Returns:
            The layer's bias from now on, if it has one.
        """
        weights, biases = list(self._split(self._packed.weight())), None
        weights[index] = weight.detach().to(weights[index])
        if self._bias is not None:
            biases = list(self._split(self._bias))
            biases[index] = biases[index] if bias is None else bias.detach().to(biases[index])
            self._bias = torch.cat(biases)
        self._packed, self._kept = packed(torch.cat(weights), self._bias), None
        return None if biases is None else biases[index].clone()

    def _split(self, joined: Tensor) -> tuple[Tensor, ...]:
        return torch.split(joined, self._sizes)

    def number(self) -> None:
        """Have a number that no other product of this process has; a copy comes with that of the one it was copied from."""
        if _numbered.get(self._number) is not self:
            self._number = next(_numbers)
            _numbered[self._number] = self

    def weight(self, index: int) -> Tensor:
        """Of one of the layers: [out_features, in_features]."""
        return self._split(self._packed.weight())[index]


_numbers, _numbered = count(), WeakValueDictionary[int, Product]()


def _numbered_product(input: Tensor, number: int, out_features: int) -> Tensor:
    return _numbered[number].multiply(input)


def _shape_of_product(input: Tensor, number: int, out_features: int) -> Tensor:
    return input.new_empty(*input.shape[:-1], out_features)


torch.library.define("speculative_engine::product", "(Tensor input, int number, int out_features) -> Tensor")
torch.library.impl("speculative_engine::product", "cpu", _numbered_product)
torch.library.register_fake("speculative_engine::product", _shape_of_product)


def pack_linears(model: nn.Module) -> int:
    """Replace the linear layers of a model on a CPU, in place; returns how many.

    A head that is tied to the embeddings gets a copy of its own, but in float32. Everything stays as it is where this build of
    torch or this processor cannot do it.
    """
    first = next((parameter for parameter in model.parameters() if parameter.is_floating_point()), None)
    if first is None or first.device.type != "cpu" or layout_of(first.dtype) is None:
        return 0
    packed = 0
    for parent in list(model.modules()):
        plain = {
            name: child
            for name, child in parent.named_children()
            if _is_plain(child) and child.weight.dtype == first.dtype
        }
        linears = {name: _as_linear(child) for name, child in plain.items()}
        for names in _groups(linears):
            product = Product([linears[name] for name in names])
            for index, name in enumerate(names):
                transposed = isinstance(plain[name], Conv1D)
                setattr(parent, name, PackedLinear(linears[name], product, index, transposed))
            packed += len(names)
    return packed


def _groups(linears: dict[str, nn.Linear]) -> list[tuple[str, ...]]:
    """The names of the layers that are computed together."""
    groups = []
    for names in _TOGETHER:
        there = [linears[name] for name in names if name in linears]
        if len(there) == len(names) and len({(each.in_features, each.bias is None) for each in there}) == 1:
            groups.append(names)
    taken = {name for names in groups for name in names}
    return groups + [(name,) for name in linears if name not in taken]


def _is_plain(module: nn.Module) -> "TypeGuard[nn.Linear | Conv1D]":
    """Neither a subclass, nor hooked, nor sharded: what these do besides multiplying is their own affair."""
    hooked = module._forward_hooks or module._forward_pre_hooks
    return type(module) in (nn.Linear, Conv1D) and type(module.weight) is nn.Parameter and not hooked


def _as_linear(module: Any) -> nn.Linear:
    """A Conv1D's weight is that of a linear layer, transposed."""
    if isinstance(module, nn.Linear):
        return module
    linear = nn.Linear(module.nx, module.nf, device="meta")
    linear.weight = nn.Parameter(module.weight.detach().T.contiguous(), requires_grad=False)
    linear.bias = module.bias
    return linear
