"""Inputs for the attention and cache kernels, and the comparison of a kernel with its torch twin.

As in kernel_cases.py, the twin runs on the CPU, and the kernels in the interpreter there or compiled on a GPU.
"""

from collections.abc import Sequence
from typing import Any

import torch
from kernel_cases import DEVICE, to_device
from torch import Tensor

from engine.kernels import attention_reference
from engine.kernels.attention import ragged_attention

Case = dict[str, Any]  # the arguments of ragged_attention

# Outputs are averages of values of size 1, up to 4 where a query sees one key. Both sides widen their inputs to float32
# without loss. float32: logits of size 30 differ by some roundings of their size (30 x 6e-8), which shows as a relative
# difference of the weights. bfloat16 and float16: the kernel rounds each weight once (half of 2^-7 and 2^-10), which a
# tensor core asks for, the twin none; the results are rounded too, so that they may lie one unit in the last place apart.
TOLERANCE = {
    torch.float32: dict(rtol=1e-5, atol=1e-5),
    torch.bfloat16: dict(rtol=2**-7, atol=2**-7),
    torch.float16: dict(rtol=2**-10, atol=2**-10),
}


def attention_case(
    lengths: Sequence[int],
    width: int = 3,
    group: int = 2,
    kv_heads: int = 2,
    head_dim: int = 32,
    dtype: torch.dtype = torch.float32,
    capacity: int | None = None,
    num_valid: Sequence[int] | None = None,
    slots: Sequence[int] | None = None,
    seed: int = 0,
) -> Case:
    """A query as transformers' models hand it over, a view of [B, W, H, D]; a cache that is NaN wherever no column may look."""
    generator = torch.Generator().manual_seed(seed)
    batch = len(lengths)
    capacity = max(lengths) + width if capacity is None else capacity
    query = torch.randn(batch, width, kv_heads * group, head_dim, generator=generator).to(dtype).transpose(1, 2)
    num_slots = batch if slots is None else max(slots) + 2
    shape = (num_slots, kv_heads, capacity, head_dim)
    keys, values = (torch.randn(shape, generator=generator).to(dtype) for _ in range(2))
    written = torch.zeros(num_slots, capacity, dtype=torch.bool)
    for row, length in enumerate(lengths):
        written[row if slots is None else slots[row], : length + (width if num_valid is None else num_valid[row])] = (
            True
        )
    for cache in (keys, values):
        cache.masked_fill_(~written[:, None, :, None], torch.nan)
    case = dict(query=query, keys=keys, values=values, seq_lens=torch.tensor(lengths))
    return case | {
        name: torch.tensor(value) for name, value in (("num_valid", num_valid), ("slots", slots)) if value is not None
    }


def on_device(case: Case, device: str = DEVICE) -> Case:
    return {name: to_device(value, device) for name, value in case.items()}


def far_apart(tensor: Tensor, dimension: int, stride: int) -> Tensor:
    """The same on DEVICE, with this stride in one dimension; of the memory only the pages that hold it are ever touched."""
    strides = list(tensor.contiguous().stride())
    strides[dimension] = stride
    size = sum(step * (length - 1) for step, length in zip(strides, tensor.shape, strict=True)) + 1
    assert size > 2**31
    storage = torch.UntypedStorage(tensor.element_size() * size, device=DEVICE)
    buffer = torch.tensor([], dtype=tensor.dtype, device=DEVICE).set_(storage)
    return buffer.as_strided(tensor.shape, strides).copy_(tensor)


def check_attention(case: Case, **more: Any) -> Tensor:
    """The kernel's result, on the CPU, once it equals the twin's."""
    case = case | more
    query = case["query"]
    actual = ragged_attention(**on_device(case))
    batch, heads, width, head_dim = query.shape
    assert actual.shape == (batch, width, heads, head_dim) and actual.dtype == query.dtype and actual.is_contiguous()
    expected = attention_reference.ragged_attention(**case)
    assert expected.dtype == query.dtype and expected.is_contiguous()
    torch.testing.assert_close(actual.cpu(), expected, **TOLERANCE[query.dtype])
    return actual.cpu()


def rows_of(case: Case, rows: list[int]) -> Case:
    """The same batch rows, in another order or fewer, each over the slot that it had."""
    slots = case.get("slots", torch.arange(len(case["seq_lens"])))
    chosen = {name: case[name][rows] for name in ("query", "seq_lens", "num_valid") if name in case}
    return case | chosen | dict(slots=slots[rows])
