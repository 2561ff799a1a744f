"""Linear layers whose weights lie in memory as oneDNN's matrix products read them best.

Decoding multiplies a few rows by every weight of the model, so it takes as long as reading the weights. From a row-major
matrix oneDNN reads bfloat16 at half the speed that it reaches from its own blocked layout (measured for 1 to 8 rows on an
EPYC with AVX-512: 10 to 15 against 20 to 28 GB/s), and it never converts on the way. Here that is done once, after loading.
"""

import logging
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

logger = logging.getLogger(__name__)


class PackedLinear(nn.Module):
    """Stands in for an `nn.Linear` on a CPU, for inference. Holds the weight once, in oneDNN's layout."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features, self.bias = linear.in_features, linear.out_features, linear.bias
        # A plain attribute: torch has no parameters of this layout.
        self._packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), 1)

    @property
    def weight(self) -> Tensor:
        """[out_features, in_features], unpacked into a new tensor."""
        return self._packed.to_dense()

    def forward(self, input: Tensor) -> Tensor:
        """[..., in_features] to [..., out_features]."""
        output: Tensor = torch.ops.mkldnn._linear_pointwise(input, self._packed, self.bias, "none", [], "")
        return output

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "weight"] = self.weight


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
        for name, child in list(parent.named_children()):
            if _is_plain(child) and child.weight.dtype == first.dtype:
                setattr(parent, name, PackedLinear(child))
                count += 1
    return count


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
