"""What lies between the matrix products of a decoder layer of Llama's kind, each in one launch.

    rms_norm    x / sqrt(mean(x ** 2) + eps), rounded, times the weight (Zhang and Sennrich, arXiv 1910.07467);
                of a sum x + y, if wanted
    rotate      rotary position embedding (Su et al., arXiv 2104.09864) of queries and keys, in place
    gated_silu  silu(gate) up (Shazeer, arXiv 2002.05202)

While decoding, each of these is a few microseconds of launching and next to no work; transformers' modules take 7, 10 and 2
launches. Results are rounded to the tensors' dtype where transformers rounds them. A row's result does not depend on the others.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import cdiv, next_power_of_2, view_4d

_BLOCK = 1024  # elements of a program of gated_silu


@triton.jit
def rms_norm_kernel(
    x,  # [N, D]
    y,  # [N, D] or None
    weight,  # [D]
    summed,  # [N, D], written, or None
    normed,  # [N, D], written
    eps,
    SIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    inside = column < SIZE
    values = tl.load(x + row * SIZE + column, mask=inside, other=0.0)
    if y is not None:
        other = tl.load(y + row * SIZE + column, mask=inside, other=0.0)
        values = (values.to(tl.float32) + other.to(tl.float32)).to(values.dtype)
        tl.store(summed + row * SIZE + column, values, mask=inside)
    wide = values.to(tl.float32)
    mean = tl.sum(wide * wide, axis=0) / SIZE
    rounded = (wide * tl.rsqrt(mean + eps)).to(values.dtype).to(tl.float32)
    factor = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(normed + row * SIZE + column, (factor * rounded).to(values.dtype), mask=inside)


@triton.jit(do_not_specialize=["width", "num_heads"])
def rotate_kernel(
    query, key,  # views [B, H, W, D]: (pointer, strides of batch, head, column); written
    cosines, sines,  # views [B, W, D]: (pointer, strides of batch, column)
    width, num_heads,  # of the queries
    HALF: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    head, lane = tl.program_id(1), tl.arange(0, BLOCK)
    batch, column = (tl.program_id(0) // width).to(tl.int64), (tl.program_id(0) % width).to(tl.int64)
    inside = lane < HALF
    if head < num_heads:
        at = query[0] + batch * query[1] + head.to(tl.int64) * query[2] + column * query[3]
    else:
        at = key[0] + batch * key[1] + (head - num_heads).to(tl.int64) * key[2] + column * key[3]
    c = cosines[0] + batch * cosines[1] + column * cosines[2] + lane
    s = sines[0] + batch * sines[1] + column * sines[2] + lane
    first, second = tl.load(at + lane, mask=inside), tl.load(at + HALF + lane, mask=inside)
    left = _product(first, tl.load(c, mask=inside)) - _product(second, tl.load(s, mask=inside))
    right = _product(second, tl.load(c + HALF, mask=inside)) + _product(first, tl.load(s + HALF, mask=inside))
    tl.store(at + lane, left.to(first.dtype), mask=inside)
    tl.store(at + HALF + lane, right.to(first.dtype), mask=inside)


@triton.jit
def _product(a, b):
    """a b, rounded to their dtype, as float32."""
    return (a.to(tl.float32) * b.to(tl.float32)).to(a.dtype).to(tl.float32)


@triton.jit(do_not_specialize=["count"])
def gated_silu_kernel(gate, up, output, count, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    x = tl.load(gate + at, mask=inside, other=0.0)
    wide = x.to(tl.float32)
    activated = (wide / (1.0 + tl.exp(-wide))).to(x.dtype)
    tl.store(output + at, _product(activated, tl.load(up + at, mask=inside, other=0.0)).to(x.dtype), mask=inside)


def rms_norm(
    x: Tensor,  # [..., D] float32, bfloat16 or float16, contiguous
    weight: Tensor,  # [D] likewise
    eps: float,
    y: Tensor | None = None,  # [..., D] likewise
) -> tuple[Tensor, Tensor]:
    """x, or x + y if y is given, and its norm, [..., D] each; one launch."""
    size = x.shape[-1]
    summed, normed = x if y is None else torch.empty_like(x), torch.empty_like(x)
    block = next_power_of_2(size)
    if x.numel():
        with torch.cuda.device_of(x):
            rms_norm_kernel[(x.numel() // size,)](
                x, y, weight, None if y is None else summed, normed, eps, SIZE=size, BLOCK=block,
                num_warps=min(8, max(1, block // 512)), enable_fp_fusion=False,
            )  # fmt: skip
    return summed, normed


def rotate(
    query: Tensor,  # [B, H, W, D] float32, bfloat16 or float16, contiguous in the last dimension; written
    key: Tensor,  # [B, H_kv, W, D] likewise; written
    cosines: Tensor,  # [B or 1, W, D] likewise; left as they are
    sines: Tensor,  # [B or 1, W, D] likewise
) -> None:
    """Rotate the pairs (i, i + D / 2) of queries and keys, in place; one launch."""
    batch, num_heads, width, head_dim = query.shape
    half = head_dim // 2
    if query.numel():
        with torch.cuda.device_of(query):
            rotate_kernel[(batch * width, num_heads + key.shape[1])](
                view_4d(query), view_4d(key), _angles(cosines), _angles(sines), width, num_heads,
                HALF=half, BLOCK=next_power_of_2(half), num_warps=1, enable_fp_fusion=False,
            )  # fmt: skip


def _angles(values: Tensor) -> tuple[Tensor, int, int]:
    """[B or 1, W, D] as the kernel takes them: tensor and strides of batch and column."""
    return values, 0 if values.shape[0] == 1 else values.stride(0), values.stride(1)


def gated_silu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up of two contiguous tensors of one shape, float32, bfloat16 or float16; one launch."""
    output = torch.empty_like(gate)
    if gate.numel():
        with torch.cuda.device_of(gate):
            gated_silu_kernel[(cdiv(gate.numel(), _BLOCK),)](
                gate, up, output, gate.numel(), BLOCK=_BLOCK, enable_fp_fusion=False
            )
    return output
