"""Writing new K and V into a static cache in which each row has its own length; see `attention_reference.scatter_kv`.

One program writes K and V of one column of one row, for as many heads as make BLOCK elements. One launch.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import cdiv, next_power_of_2, row_arguments, view_4d

BLOCK = 2048  # elements of K, and of V: two stores of 16 bytes for each of 128 threads in bf16


@triton.jit(
    do_not_specialize=["capacity"],
    do_not_specialize_on_alignment=["seq_lens", "num_valid", "slots"],
)
def scatter_kernel(
    keys, values,  # views [slots, H_kv, capacity, D]: (pointer, strides of slot, head, key); written
    new_keys, new_values,  # views [B, H_kv, W, D]: (pointer, strides of batch, head, column)
    seq_lens, num_valid, slots,  # [B] int64; slots or None
    capacity, num_heads,
    HEAD_DIM: tl.constexpr, HEADS: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    column, batch = tl.program_id(0).to(tl.int64), tl.program_id(2).to(tl.int64)
    position = tl.load(seq_lens + batch) + column
    if (column >= tl.load(num_valid + batch)) | (position < 0) | (position >= capacity):
        return
    slot = batch
    if slots is not None:
        slot = tl.load(slots + batch)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    dim = tl.arange(0, BLOCK_D)
    inside = (head < num_heads)[:, None] & (dim < HEAD_DIM)[None, :]
    head = head.to(tl.int64)[:, None]
    k = tl.load(new_keys[0] + batch * new_keys[1] + head * new_keys[2] + column * new_keys[3] + dim, mask=inside)
    v = tl.load(
        new_values[0] + batch * new_values[1] + head * new_values[2] + column * new_values[3] + dim, mask=inside
    )
    tl.store(keys[0] + slot * keys[1] + head * keys[2] + position * keys[3] + dim, k, mask=inside)
    tl.store(values[0] + slot * values[1] + head * values[2] + position * values[3] + dim, v, mask=inside)


def scatter_kv(
    keys: Tensor,  # [slots, H_kv, capacity, D] float32, bfloat16 or float16, contiguous in the last dimension
    values: Tensor,  # [slots, H_kv, capacity, D] likewise; both are written
    new_keys: Tensor,  # [B, H_kv, W, D] likewise
    new_values: Tensor,  # [B, H_kv, W, D] likewise
    seq_lens: Tensor,  # [B] int64, where column 0 of each row goes
    num_valid: Tensor,  # [B] int64, columns of each row that are written
    *,
    slots: Tensor | None = None,  # [B] int64, the cache row of each batch row, all different; None: 0 ... B-1
) -> None:
    """Write new K and V in place; see `attention_reference.scatter_kv`."""
    batch, num_heads, width, head_dim = new_keys.shape
    if new_keys.numel() == 0:
        return
    block_d = next_power_of_2(head_dim)
    heads = min(next_power_of_2(num_heads), max(1, BLOCK // block_d))
    with torch.cuda.device_of(keys):
        scatter_kernel[(width, cdiv(num_heads, heads), batch)](
            keys=view_4d(keys),
            values=view_4d(values),
            new_keys=view_4d(new_keys),
            new_values=view_4d(new_values),
            **row_arguments(seq_lens=seq_lens, num_valid=num_valid, slots=slots),
            capacity=keys.shape[2],
            num_heads=num_heads,
            HEAD_DIM=head_dim,
            HEADS=heads,
            BLOCK_D=block_d,
            enable_fp_fusion=False,  # there is no arithmetic
        )
