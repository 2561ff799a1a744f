"""How the weights of linear layers lie in memory, for the matrix products of a CPU.

From a row-major matrix oneDNN reads bfloat16 at half the speed that it reaches from its own blocked layout (measured for 1 to 8
rows on an EPYC with AVX-512: 10 to 15 against 20 to 28 GB/s), and it never converts on the way.

oneDNN's products of bfloat16 are fast with AVX-512's instructions for it (AMD since Zen 4, Intel's servers since Sapphire Rapids).
With AVX-512 alone they are emulated, and without it there are only torch's own, which take as long for every row as for the first:
drafts would hardly ever pay. There FBGEMM reads the weights as float16 and computes in float32. All 211 layers of SmolLM2-135M
on 2 cores, 1 row and 6 rows: on an EPYC with AVX2 torch takes 20 and 89 ms, FBGEMM 18 and 22; on another, with oneDNN kept from
using the instructions for bfloat16, oneDNN takes 8.5 and 24 ms, FBGEMM 7.0 and 9.6. On an Intel with AMX, where each
product reads its weights from memory, oneDNN takes 13.0 ms for 1 row, 13.2 for 6 and 13.4 for 16.

float32 stays as it is, but for siblings, which become one matrix: there torch's own products (MKL's) read a row-major one at 26 to
31 GB/s for one row, oneDNN its own layout at 12 to 28, and for up to 8 rows are the faster nearly everywhere (that Intel; for 16
to 512 rows neither is). In oneDNN's a plain step of eight layers of SmolLM2's size took 1.4 times as long as in `transformers`.
But on the EPYC with AVX2, rows times a matrix take twice as long for two as for one, and a matrix times columns does not: all 211
layers take 41 ms for one row, 88 ms for four, and for four columns 40 ms. Which it is is measured before weights are packed.
"""

import logging
import time
from collections.abc import Mapping
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

logger = logging.getLogger(__name__)
_MOST_COLUMNS = 64  # beyond, rows are as quick


class Layout(Protocol):
    """A packed matrix."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        """Of a weight [out, in] and a bias [out]; RuntimeError where it cannot be."""

    def multiply(self, input: Tensor) -> Tensor:
        """[..., in] to [..., out], in the weight's dtype. A row's result may depend on how many there are, not on the others."""

    def weight(self) -> Tensor:
        """Unpacked: [out, in]."""


class OneDNN:
    """In oneDNN's blocked layout."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, 1)
        self._bias = bias

    def multiply(self, input: Tensor) -> Tensor:
        output: Tensor = torch.ops.mkldnn._linear_pointwise(input, self._packed, self._bias, "none", [], "")
        return output

    def weight(self) -> Tensor:
        return self._packed.to_dense()

    def __reduce__(self) -> Any:  # torch neither copies nor pickles what is in this layout
        return type(self), (self.weight(), self._bias)


class RowMajor:
    """As it is."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight, self._bias = weight, bias

    def multiply(self, input: Tensor) -> Tensor:
        return nn.functional.linear(input, self._weight, self._bias)

    def weight(self) -> Tensor:
        return self._weight


class Columns(RowMajor):
    """As it is, times the rows of an input as columns, unless they are one or many.

    They come in fours: MKL sums those that are left over in another order (and three take longer than four).
    """

    def multiply(self, input: Tensor) -> Tensor:
        rows = input.numel() // input.shape[-1]
        if not 1 < rows <= _MOST_COLUMNS:
            return super().multiply(input)
        columns = pad(input.reshape(rows, -1), (0, 0, 0, -rows % 4)).T
        bias = self._bias
        output = self._weight @ columns if bias is None else torch.addmm(bias[:, None], self._weight, columns)
        return output.T[:rows].contiguous().view(*input.shape[:-1], -1)


class FBGEMM:
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
            output = self._product(pad(wide.reshape(rows, -1), (0, 0, 0, 3 - left)))[:rows]
            return output.view(*input.shape[:-1], -1).to(self._dtype)
        return self._product(wide).to(self._dtype)

    def _product(self, input: Tensor) -> Tensor:
        output: Tensor = torch.ops.quantized.linear_dynamic_fp16(input, self._packed)
        return output

    def weight(self) -> Tensor:
        held: Tensor = torch.ops.quantized.linear_unpack_fp16(self._packed)[0]
        return (held / self._scale).to(self._dtype)


def packed(weight: Tensor, bias: Tensor | None) -> Layout:
    """A weight [out, in] in the layout for its dtype; as it is where there is none here, or that cannot hold it."""
    layout = layout_of(weight.dtype) if weight.device.type == "cpu" else None
    if layout is FBGEMM and not bool(weight.isfinite().all()):
        layout = RowMajor  # FBGEMM would make NaN and inf finite
    return (layout or RowMajor)(weight, bias)


@cache
def layout_of(dtype: torch.dtype) -> type[Layout] | None:
    """The first layout in which a packed layer gives here what a plain one gives, None if there is none."""
    own = torch.Generator().manual_seed(0)  # whoever draws from torch's sees nothing of this
    drawn = (torch.rand(shape, generator=own, device="cpu") for shape in ((32, 64), (32,)))
    weight, bias = (values.sub_(0.5).div_(4).to(dtype) for values in drawn)
    row = torch.linspace(-1, 1, 64, dtype=dtype, device="cpu")
    with torch.inference_mode(), torch.autocast("cpu", enabled=False):  # as engines work
        expected = nn.functional.linear(row.float(), weight.float(), bias.float())
        for layout in layouts_for(dtype):
            try:
                packed = layout(weight, bias)
                given = [packed.multiply(row.expand(rows, -1)) for rows in range(1, 33)]
            except (RuntimeError, AttributeError, NotImplementedError) as error:
                logger.info("no linear layers of %s in the layout %s: %s", dtype, layout.__name__, error)
                continue
            right = all(torch.allclose(rows[0].float(), expected, rtol=0.05, atol=0.05) for rows in given)
            # Which kernel takes a row depends on the processor.
            same = all(bool((rows == rows[0]).all()) for rows in given)
            if right and (same or layout not in (FBGEMM, Columns)):
                return layout
    return None


def layouts_for(dtype: torch.dtype) -> tuple[type[Layout], ...]:
    """Those that may do for a dtype, the fastest first."""
    if dtype == torch.float32:
        return (Columns, RowMajor) if _columns_are_quicker() else (RowMajor,)
    if dtype not in (torch.bfloat16, torch.float16):
        return ()
    capabilities: Mapping[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()  # torch 2.11 has none
    emulated = dtype == torch.bfloat16 and capabilities.get("avx512_bf16") is False
    return (FBGEMM, OneDNN) if emulated else (OneDNN, FBGEMM)


@cache
def _columns_are_quicker() -> bool:
    """Whether a matrix times four columns takes far less time here than four rows times a matrix. Finding out takes some 50 ms."""
    weight, rows = torch.ones(8192, 1024, device="cpu"), torch.ones(4, 1024, device="cpu")
    seconds: dict[type[RowMajor], list[float]] = {RowMajor: [], Columns: []}
    with torch.inference_mode(), torch.autocast("cpu", enabled=False):
        for _ in range(5):
            for layout, found in seconds.items():
                began = time.perf_counter()
                layout(weight, None).multiply(rows)
                found.append(time.perf_counter() - began)
    return min(seconds[RowMajor]) > 2 * min(seconds[Columns])  # 3.4 times as long on that EPYC, with one thread 1.7
