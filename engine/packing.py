"""Linear layers whose weights lie in memory as the matrix products of a CPU read them best.

Decoding multiplies a few rows by every weight of the model, so it should take as long as reading the weights. From a
row-major matrix oneDNN reads bfloat16 at half the speed that it reaches from its own blocked layout (measured for 1 to 8 rows on
an EPYC with AVX-512: 10 to 15 against 20 to 28 GB/s), and it never converts on the way. Here that is done once, after loading.

oneDNN's products of bfloat16 are fast with AVX-512's instructions for it (AMD since Zen 4, Intel's servers since Sapphire Rapids).
With AVX-512 alone they are emulated, and without it there are only torch's own, which take as long for every row as for the first:
drafts would hardly ever pay. There FBGEMM reads the weights as float16 and computes in float32. All 211 layers of SmolLM2-135M
on 2 cores, 1 row and 6 rows: on an EPYC with AVX2 torch takes 20 and 89 ms, FBGEMM 18 and 22; on another, with oneDNN kept from
using the instructions for bfloat16, oneDNN takes 8.5 and 24 ms, FBGEMM 7.0 and 9.6. On an Intel with AMX, where each
product reads its weights from memory, oneDNN takes 13.0 ms for 1 row, 13.2 for 6 and 13.4 for 16.

float32 stays as it is, but for siblings, which become one matrix: there torch's own products (MKL's) read a row-major one at 26 to
31 GB/s for one row, oneDNN its own layout at 12 to 28, and for up to 8 rows are the faster nearly everywhere (that Intel; for 16 to
512 rows neither is). In oneDNN's a plain step of eight layers of SmolLM2's size took 1.4 times as long as in `transformers`.
"""

import logging
from collections.abc import Mapping, Sequence
from functools import cache
from itertools import count
from typing import Any, Protocol, TypeGuard
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers.pytorch_utils import Conv1D

logger = logging.getLogger(__name__)

# Siblings that stock models call with one input: their weights lie one below the other, and the first call computes for all.
# Each product costs some 30 us beside its work (2 threads), in a layer whose work takes 500.
_TOGETHER = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


class PackedLinear(nn.Module):
    """Stands in for an `nn.Linear` on a CPU, or for a `Conv1D` as GPT-2 has it, for inference. Holds the weight once, packed.

    Args:
        transposed: the weight is to be seen as that of a `Conv1D`.

    Raises:
        ValueError: if this build of torch or this processor has no layout for the weight.
    """

    def __init__(
        self, linear: nn.Linear, product: "_Product | None" = None, index: int = 0, transposed: bool = False
    ) -> None:
        super().__init__()
        self.in_features, self.out_features, self.bias = linear.in_features, linear.out_features, linear.bias
        self._product, self._index, self._transposed = product or _Product([linear]), index, transposed

    @property
    def weight(self) -> Tensor:
        """[out_features, in_features], of a Conv1D [in_features, out_features]; a new tensor where it is held in another layout."""
        weight = self._product.weight(self._index)
        return weight.T.contiguous() if self._transposed else weight

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
        bias = None if biases[0] is None else torch.cat([bias.detach() for bias in biases])
        layout = _layout(joined.dtype)
        if layout is None:
            raise ValueError(f"linear must have weights of a dtype that can be packed here, got {joined.dtype}")
        self._packed = layout(joined, bias)
        self._number = -1  # by which an operator in a compiled graph finds it
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
        if torch.compiler.is_compiling():  # which cannot look into packed weights
            output: Tensor = torch.ops.speculative_engine.product(input, self._number, sum(self._sizes))
            return output
        return self._packed.multiply(input)

    def number(self) -> None:
        """Have a number that no other product of this process has; a copy has that of the one it was copied from."""
        if _numbered.get(self._number) is not self:
            self._number = next(_numbers)
            _numbered[self._number] = self

    def weight(self, index: int) -> Tensor:
        """Of one of the layers: [out_features, in_features]."""
        return torch.split(self._packed.weight(), self._sizes)[index]


_numbers, _numbered = count(), WeakValueDictionary[int, _Product]()


def _numbered_product(input: Tensor, number: int, out_features: int) -> Tensor:
    return _numbered[number]._multiply(input)


def _shape_of_product(input: Tensor, number: int, out_features: int) -> Tensor:
    return input.new_empty(*input.shape[:-1], out_features)


torch.library.define("speculative_engine::product", "(Tensor input, int number, int out_features) -> Tensor")
torch.library.impl("speculative_engine::product", "cpu", _numbered_product)
torch.library.register_fake("speculative_engine::product", _shape_of_product)


def number_products(model: nn.Module) -> None:
    """Before the model is compiled: in a graph, each packed product is one operator."""
    for module in model.modules():
        if isinstance(module, PackedLinear):
            module._product.number()


class _Layout(Protocol):
    """A packed matrix."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        """Of a weight [out, in] and a bias [out]; RuntimeError where it cannot be."""

    def multiply(self, input: Tensor) -> Tensor:
        """[..., in] to [..., out], in the weight's dtype. What a row gives depends on how many there are, at most."""

    def weight(self) -> Tensor:
        """Unpacked: [out, in]."""


class _OneDNN:
    """In oneDNN's blocked layout."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, 1)
        self._bias = bias

    def multiply(self, input: Tensor) -> Tensor:
        output: Tensor = torch.ops.mkldnn._linear_pointwise(input, self._packed, self._bias, "none", [], "")
        return output

    def weight(self) -> Tensor:
        return self._packed.to_dense()


class _RowMajor:
    """As it is."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight, self._bias = weight, bias

    def multiply(self, input: Tensor) -> Tensor:
        return nn.functional.linear(input, self._weight, self._bias)

    def weight(self) -> Tensor:
        return self._weight


class _FBGEMM:
    """In FBGEMM's blocked layout, as float16; sums in float32, which are rounded once.

    Where float16 has too small a range, the weights are held times a power of two, the largest between 2^14 and 2^15. A
    bfloat16 has three bits less than a float16, so that this is exact down to 2^-31 of the largest weight.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._dtype = weight.dtype
        self._scale, held = 1.0, weight.float()
        if not held.half().float().equal(held):
            self._scale = 2.0 ** (15 - int(held.abs().max().frexp().exponent))
            held = held * self._scale
        self._packed = torch.ops.quantized.linear_prepack_fp16(held, None if bias is None else bias.float())

    def multiply(self, input: Tensor) -> Tensor:
        rows = input.numel() // input.shape[-1]
        wide = input.float()
        if self._scale != 1:
            wide = wide / self._scale
        # FBGEMM takes 3 to 6 rows at a time, and one or two that are left over by kernels that sum in another order.
        if rows > 6 and (left := rows % 6) in (1, 2):
            output = self._product(pad(wide.view(rows, -1), (0, 0, 0, 3 - left)))[:rows]
            return output.view(*input.shape[:-1], -1).to(self._dtype)
        return self._product(wide).to(self._dtype)

    def _product(self, input: Tensor) -> Tensor:
        output: Tensor = torch.ops.quantized.linear_dynamic_fp16(input, self._packed)
        return output

    def weight(self) -> Tensor:
        held: Tensor = torch.ops.quantized.linear_unpack_fp16(self._packed)[0]
        return (held / self._scale).to(self._dtype)


def pack_linears(model: nn.Module) -> int:
    """Replace the linear layers of a model on a CPU, in place; returns how many.

    A head that is tied to the embeddings gets a copy of its own. Everything stays as it is where this build of torch or
    this processor cannot do it.
    """
    first = next((parameter for parameter in model.parameters() if parameter.is_floating_point()), None)
    if first is None or first.device.type != "cpu" or _layout(first.dtype) is None:
        return 0
    count = 0
    for parent in list(model.modules()):
        plain = {
            name: child
            for name, child in parent.named_children()
            if _is_plain(child) and child.weight.dtype == first.dtype
        }
        linears = {name: _as_linear(child) for name, child in plain.items()}
        for names in _groups(linears):
            product = _Product([linears[name] for name in names])
            for index, name in enumerate(names):
                transposed = isinstance(plain[name], Conv1D)
                setattr(parent, name, PackedLinear(linears[name], product, index, transposed))
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


@cache
def _layout(dtype: torch.dtype) -> type[_Layout] | None:
    """The first layout in which a packed layer gives here what a plain one gives, None if there is none."""
    own = torch.Generator().manual_seed(0)  # whoever draws from torch's sees nothing of this
    weight, bias = (torch.rand(shape, generator=own).sub_(0.5).div_(4).to(dtype) for shape in ((32, 64), (32,)))
    row = torch.linspace(-1, 1, 64, dtype=dtype)
    with torch.inference_mode():
        expected = nn.functional.linear(row.float(), weight.float(), bias.float())
        for layout in _layouts(dtype):
            try:
                packed = layout(weight, bias)
                given = [packed.multiply(row.expand(rows, -1)) for rows in range(1, 33)]
            except (RuntimeError, AttributeError, NotImplementedError) as error:
                logger.info("no linear layers of %s in the layout %s: %s", dtype, layout.__name__[1:], error)
                continue
            right = all(torch.allclose(rows[0].float(), expected, rtol=0.05, atol=0.05) for rows in given)
            # Which kernel takes a row depends on the processor.
            same = all(bool((rows == rows[0]).all()) for rows in given)
            if right and (same or layout is not _FBGEMM):
                return layout
    return None


def _layouts(dtype: torch.dtype) -> tuple[type[_Layout], ...]:
    """Those that may do for a dtype, the fastest first."""
    if dtype == torch.float32:
        return (_RowMajor,)
    if dtype not in (torch.bfloat16, torch.float16):
        return ()
    capabilities: Mapping[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()  # torch 2.11 has none
    emulated = dtype == torch.bfloat16 and capabilities.get("avx512_bf16") is False
    return (_FBGEMM, _OneDNN) if emulated else (_OneDNN, _FBGEMM)
