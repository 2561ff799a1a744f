"""Linear layers whose weights lie in memory as oneDNN's matrix products read them best.

Decoding multiplies a few rows by every weight of the model, so it takes as long as reading the weights. From a row-major
matrix oneDNN reads bfloat16 at half the speed that it reaches from its own blocked layout (measured for 1 to 8 rows on an
EPYC with AVX-512: 10 to 15 against 20 to 28 GB/s), and it never converts on the way. Here that is done once, after loading.
"""

import logging
from collections.abc import Sequence
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

logger = logging.getLogger(__name__)

# Siblings that stock models call with one input: their weights lie one below the other, and the first call computes for all.
# Each product costs some 30 us beside its work (2 threads), in a layer whose work takes 500.
_TOGETHER = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


class PackedLinear(nn.Module):
    """Stands in for an `nn.Linear` on a CPU, for inference. Holds the weight once, in oneDNN's layout."""

    def __init__(self, linear: nn.Linear, product: "_Product | None" = None, index: int = 0) -> None:
        super().__init__()
        self.in_features, self.out_features, self.bias = linear.in_features, linear.out_features, linear.bias
        self._product, self._index = product or _Product([linear]), index

    @property
    def weight(self) -> Tensor:
        """[out_features, in_features], unpacked into a new tensor."""
        return self._product.weight(self._index)

    def forward(self, input: Tensor) -> Tensor:
        """[..., in_features] to [..., out_features]; part of a larger tensor where siblings are computed together."""
        return self._product(input, self._index)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "weight"] = self.weight


class _Product:
    """What linear layers of one input size give, computed together when the first of them is called.

    Calls with the same tensor belong together, which nobody may change between them; any other order costs time only.
    """

    def __init__(self, linears: Sequence[nn.Linear]) -> None:
        self._sizes = [linear.out_features for linear in linears]
        weights, biases = [linear.weight.detach() for linear in linears], [linear.bias for linear in linears]
        joined = weights[0] if len(weights) == 1 else torch.cat(weights)
        self._packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(joined, 1)
        self._bias = None if biases[0] is None else torch.cat([bias.detach() for bias in biases])
        self._kept: tuple[Tensor, dict[int, Tensor]] | None = None  # an input, and the results not yet asked for

    def __call__(self, input: Tensor, index: int) -> Tensor:
        kept = self._kept  # read once: another thread may be at work
        if kept is not None and kept[0] is input and (found := kept[1].pop(index, None)) is not None:
            if not kept[1]:
                self._kept = None
            return found
        output = self._multiply(input)
        if len(self._sizes) == 1:
            return output
        results = dict(enumerate(torch.split(output, self._sizes, dim=-1)))
        found = results.pop(index)
        self._kept = input, results
        return found

    def _multiply(self, input: Tensor) -> Tensor:
        output: Tensor = torch.ops.mkldnn._linear_pointwise(input, self._packed, self._bias, "none", [], "")
        return output

    def weight(self, index: int) -> Tensor:
        """Of one of the layers: [out_features, in_features]."""
        return torch.split(self._packed.to_dense(), self._sizes)[index]


def pack_linears(model: nn.Module) -> int:
    """Replace the linear layers of a model on a CPU, in place; returns how many.

    A head that is tied to the embeddings gets a copy of its own. Everything stays as it is where this build of torch or
    this processor cannot do it.
    """
    first = next((parameter for parameter in model.parameters() if parameter.is_floating_point()), None)
    if first is None or first.device.type != "cpu" or not _supported(first.dtype):
        return 0
    count = 0
    for parent in list(model.modules()):
        plain = {
            name: child
            for name, child in parent.named_children()
            if _is_plain(child) and child.weight.dtype == first.dtype
        }
        for names in _groups(plain):
            product = _Product([plain[name] for name in names])
            for index, name in enumerate(names):
                setattr(parent, name, PackedLinear(plain[name], product, index))
            count += len(names)
    return count


def _groups(linears: dict[str, nn.Linear]) -> list[tuple[str, ...]]:
    """The names of the layers that are computed together."""
    groups = []
    for names in _TOGETHER:
        there = [linears[name] for name in names if name in linears]
        if len(there) == len(names) and len({(each.in_features, each.bias is None) for each in there}) == 1:
            groups.append(names)
    taken = {name for names in groups for name in names}
    return groups + [(name,) for name in linears if name not in taken]


def _is_plain(module: nn.Module) -> TypeGuard[nn.Linear]:
    """Neither a subclass, nor hooked, nor sharded: what these do besides multiplying is their own affair."""
    hooked = module._forward_hooks or module._forward_pre_hooks
    return type(module) is nn.Linear and type(module.weight) is nn.Parameter and not hooked


def _supported(dtype: torch.dtype) -> bool:
    """Whether a packed layer gives here what a plain one gives."""
    if dtype not in (torch.bfloat16, torch.float32) or not torch.backends.mkldnn.is_available():
        return False
    plain = nn.Linear(64, 32, dtype=dtype)
    rows = torch.ones(3, 64, dtype=dtype)
    try:
        with torch.no_grad():
            return torch.allclose(PackedLinear(plain)(rows), plain(rows), rtol=0.05, atol=0.05)
    except (RuntimeError, AttributeError, NotImplementedError) as error:
        logger.info("linear layers are left as they are, oneDNN does not take them: %s", error)
        return False
