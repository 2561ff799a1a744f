"""Shared by the launchers: how tensors are passed to the kernels, sizes, and launch options."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .checks import MAX_GRID, MAX_WIDTH
from .jit_bounds import key_shift, sample_shift
from .jit_groups import GROUPS, SEARCH_ROOM, group_floats
from .jit_rows import BLOCK, THREADS, TILE_BLOCKS, floats_per_row
from .numerics import with_leading_dims
from .records import RowStats
from .workspace import workspace

# Programs that read several tiles read one while they work on another. So they read faster where there are many more of them than
# processors can run at once, and later where there are few.
MOST_TILES, ENOUGH_PROGRAMS = 4, 1024
MAX_INT32 = 2**31 - 1  # which places in the scratch memory's fields are counted by


def cdiv(number: int, by: int) -> int:
    """The quotient, rounded up. (Triton's own, which kernels may call as well, costs the host more than 1 us.)"""
    return -(-number // by)


def next_power_of_2(number: int) -> int:
    """The smallest power of two that is at least the number, >= 1."""
    return 1 << (number - 1).bit_length()


def as_rows(logits: Tensor) -> Tensor:
    """[B, V] or [B, W, V] as [B, W, V]."""
    return logits if logits.dim() == 3 else logits[:, None]


def view(rows: Tensor) -> tuple[Tensor, int, int, int, int]:
    """Logits [B, W, V], or packed [N, V], as a kernel takes them: tensor, V, strides of batch, row and token."""
    batch = rows.stride(0) if rows.dim() == 3 else 0
    return rows, rows.shape[-1], batch, rows.stride(-2), rows.stride(-1)


def view_4d(tensor: Tensor) -> tuple[Tensor, int, int, int]:
    """A tensor of 4 dimensions as a kernel takes it: tensor and three strides. Strides of dimensions of size 1 are never used;
    they are set to 0, so that they cause no variant of their own."""
    batch, head, column = (
        0 if size == 1 else stride for size, stride in zip(tensor.shape[:3], tensor.stride()[:3], strict=True)
    )
    return tensor, batch, head, column


def vocabulary_view(
    value: Tensor | None, rows: Tensor, cu: Tensor | None = None
) -> tuple[Tensor, int, int, int, int] | None:
    """A bias or mask as a kernel takes it: [V], [B, V] or [B, W, V] for logits [B, W, V], or with `cu` [B+1] [V], [B, 1, V] or
    packed [N, V]. Strides are 0 in dimensions that it is broadcast over."""
    if value is None:
        return None
    if cu is not None and value.dim() == 2:
        return view(value)
    shape = rows.shape[:2] if cu is None else (len(cu) - 1, 2)  # broadcast over rows: two are enough for a stride of 0
    return view(with_leading_dims(value, 3).expand(*shape, -1))


def row_arguments(**values: Tensor | None) -> dict[str, Tensor | None]:
    """Small tensors [B] as the kernels read them: contiguous."""
    return {name: None if value is None else value.contiguous() for name, value in values.items()}


def is_filtered(top_k: Tensor | None, top_p: Tensor | None, min_p: Tensor | None) -> bool:
    """Whether any filter was passed, whatever its values."""
    return not (top_k is None and top_p is None and min_p is None)


def shape_arguments(
    rows: Tensor,
    shape: Sequence[int],
    filtered: bool,
    by_token: bool,
    logit_bias: Tensor | None,
    token_mask: Tensor | None,
    batched: bool,
) -> dict[str, Any]:
    """Sizes, memory and options for a pass over logits [B, W, V], or over packed ones; shape: B and W.

    by_token: whether rows draw by themselves; batched: whether there is a counter per sequence too."""
    (batch, width), vocab_size = shape, rows.shape[-1]
    for name, size, most in (("B", batch, MAX_GRID), ("W", width, MAX_WIDTH if batched else MAX_GRID)):
        if size > most:
            raise ValueError(f"{name} must be <= {most:,}, got {size:,} with logits of shape {list(rows.shape)}")
    num_rows, num_blocks = batch * width, cdiv(vocab_size, BLOCK)
    if filtered and num_blocks * GROUPS.value > SEARCH_ROOM.value:
        most = SEARCH_ROOM.value // GROUPS.value * BLOCK
        raise ValueError(f"V must be <= {most:,} with filters, got {vocab_size:,}")
    if num_rows * floats_per_row(num_blocks) + 3 > MAX_INT32:
        most = (MAX_INT32 - 3) // floats_per_row(num_blocks)
        raise ValueError(f"B * W must be <= {most:,} with V = {vocab_size:,}, got {num_rows:,}")
    blocks = min(TILE_BLOCKS, next_power_of_2(num_blocks))
    grouped = filtered or by_token
    num_tiles = cdiv(num_blocks, blocks)
    tiles = min(MOST_TILES, num_tiles, max(1, num_rows * num_tiles // ENOUGH_PROGRAMS)) if grouped else 1
    per_row = floats_per_row(num_blocks) + (group_floats(num_blocks, filtered) if grouped else 0)
    counters, scratch = workspace(rows.device, num_rows + (batch if batched else 0), num_rows * per_row + 3)
    return dict(
        scratch=scratch,
        counters=counters,
        num_rows=num_rows,
        width=width,
        num_blocks=num_blocks,
        num_programs=cdiv(num_tiles, tiles),
        tiles=tiles,
        SHIFT=key_shift(rows.dtype, logit_bias is not None),
        SAMPLE_SHIFT=sample_shift(vocab_size),
        NUM_BLOCKS=max(4, next_power_of_2(num_blocks)),
        NUM_GROUPS=next_power_of_2(num_blocks) * GROUPS.value,
        BLOCKS=blocks,
        BLOCK=BLOCK,
        FILTERED=filtered,
        num_warps=THREADS // (64 if torch.version.hip else 32),
        enable_fp_fusion=False,  # so that the arithmetic is the twin's on every release of Triton
        **(registers(128 if is_simple(rows, logit_bias, token_mask) else 255) if grouped else {}),
    )


def registers(most: int) -> dict[str, int]:
    """Launch option: the most registers of a thread.

    A processor has 65,536: enough for two programs of 256 threads with 128 each, three with 80 or four with 64. Without the option
    the compiler may take a few more, or keep to 128 at the price of spills."""
    return {} if torch.version.hip else dict(maxnreg=most)


def lanes(width: int) -> int:
    """Lanes for the K+1 rows of a sequence: 1 without drafts, else at least 8, and a power of two. So only few numbers of drafts
    need a kernel of their own."""
    return 1 if width == 1 else max(8, next_power_of_2(width))


def is_simple(rows: Tensor, logit_bias: Tensor | None, token_mask: Tensor | None) -> bool:
    """Whether logits [..., V] are read 16 bytes at a time, without a bias or mask. Both take fewer registers."""
    return logit_bias is token_mask is None and all(stride % 16 == 0 for stride in rows.stride()[:-1])


def empty_stats(logits: Tensor) -> RowStats:
    """Room for the stats of logits [..., V]."""
    shape, device = logits.shape[:-1], logits.device
    return RowStats(
        threshold=torch.empty(shape, dtype=torch.float32, device=device),
        lse=torch.empty(shape, dtype=torch.float32, device=device),
        argmax=torch.empty(shape, dtype=torch.int64, device=device),
    )
