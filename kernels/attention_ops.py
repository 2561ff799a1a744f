"""Attention over a static cache with rows of different lengths, on any device: from Triton or from torch, chosen as in ops.py.

scatter_kv(keys, values, new_keys, new_values, seq_lens, num_valid)
output = ragged_attention(query, keys, values, seq_lens, num_valid=num_valid)
"""

from typing import Any

import torch
from torch import Tensor

from . import attention_reference
from .checks import FLOATS, MAX_GRID, as_float, as_int, check_tensor
from .ops import use_triton

MAX_HEAD_DIM = 256
_LARGEST = 1e30  # scale and softcap, whose products with logits are to stay within float32


def ragged_attention(
    query: Tensor,  # [B, H, W, D] floating, contiguous in the last dimension, other strides free
    keys: Tensor,  # [slots, H_kv, capacity, D] likewise, same dtype
    values: Tensor,  # [slots, H_kv, capacity, D] likewise
    seq_lens: Tensor,  # [B] int64, keys of each row before this call
    *,
    scale: float | None = None,  # None: 1 / sqrt(D)
    window: int | None = None,  # keys that a query sees, its own included; None: all
    softcap: float | None = None,  # None: off
    sinks: Tensor | None = None,  # [H] floating; None: none
    slots: Tensor | None = None,  # [B] int64, the cache row of each batch row; None: 0 ... B-1
    kv_length: int | None = None,  # no query sees a key at or beyond it; None: capacity
    num_valid: Tensor | None = None,  # [B] int64, columns of each row that are no padding; None: W
) -> Tensor:
    """Attention [B, W, H, D], contiguous, of W new columns. The cache must already hold their K and V at seq_lens + i.

    Column i of a row sees the keys up to position seq_lens + i; see `attention_reference.ragged_attention`.

    A row's result does not depend on the other rows, its slot, the capacity or kv_length. The Triton kernel keeps this bit for
    bit, the torch twin to rounding, because torch cuts and sums by the shapes of a call.

    Pass num_valid wherever columns may be padding. Otherwise what the cache holds in their place, if it is not finite, reaches the
    columns before them.

    Raises:
        ValueError: naming the argument whose type, shape, dtype, device, strides or value does not fit.
    """
    _check_caches(keys, values, "query", query)
    num_heads = query.shape[1]
    num_slots, num_kv_heads, capacity = keys.shape[:3]
    if num_kv_heads == 0 or num_heads % num_kv_heads:
        raise ValueError(f"query must have a multiple of the keys' {num_kv_heads} heads, got {num_heads}")
    _check_rows(query, num_slots, seq_lens=seq_lens, slots=slots, num_valid=num_valid)
    if sinks is not None:
        check_tensor("sinks", sinks, query.device)
        if sinks.shape != (num_heads,) or sinks.dtype not in FLOATS:
            got = f"{sinks.dtype} {list(sinks.shape)}"
            raise ValueError(f"sinks must be floating of shape [H] = [{num_heads}], got {got}")
    scale = None if scale is None else as_float("scale", scale)
    window = None if window is None else as_int("window", window)
    softcap = None if softcap is None else as_float("softcap", softcap)
    kv_length = None if kv_length is None else as_int("kv_length", kv_length)
    if window is not None and window < 1:
        raise ValueError(f"window must be >= 1 or None, got {window}")
    if window is not None:
        window = min(window, 2**30)  # sees all; from 2^31 on Triton would compile another kernel
    if softcap is not None and not softcap > 0:
        raise ValueError(f"softcap must be > 0 or None, got {softcap}")
    for name, value in (("scale", scale), ("softcap", softcap)):
        if value is not None and not abs(value) <= _LARGEST:
            raise ValueError(f"{name} must be None or at most {_LARGEST:g} in size, got {value}")
    if kv_length is not None and not 1 <= kv_length <= capacity:
        raise ValueError(f"kv_length must be between 1 and the capacity {capacity}, got {kv_length}")
    more: dict[str, Any] = dict(scale=scale, window=window, softcap=softcap, sinks=sinks, slots=slots)
    more |= dict(kv_length=kv_length, num_valid=num_valid)
    if use_triton(query):
        from .attention import ragged_attention as triton_ragged_attention

        return triton_ragged_attention(query, keys, values, seq_lens, **more)
    return attention_reference.ragged_attention(query, keys, values, seq_lens, **more)


def scatter_kv(
    keys: Tensor,  # [slots, H_kv, capacity, D] floating, contiguous in the last dimension, other strides free; written
    values: Tensor,  # [slots, H_kv, capacity, D] likewise, same dtype; written
    new_keys: Tensor,  # [B, H_kv, W, D] likewise
    new_values: Tensor,  # [B, H_kv, W, D] likewise
    seq_lens: Tensor,  # [B] int64, where column 0 of each row goes
    num_valid: Tensor,  # [B] int64, columns of each row that are written
    *,
    slots: Tensor | None = None,  # [B] int64, the cache row of each batch row, all different; None: 0 ... B-1
) -> None:
    """Write the K and V of the first num_valid columns of each row at seq_lens, seq_lens + 1, ..., in place.

    Other columns are padding and write nothing, nor do those beyond the capacity. The torch twin waits for the device.

    Raises:
        ValueError: naming the argument whose shape, dtype, device, strides or value does not fit.
    """
    _check_caches(keys, values, "new_keys", new_keys)
    _check_caches(keys, values, "new_values", new_values)
    num_slots, num_kv_heads = keys.shape[:2]
    for name, new in (("new_keys", new_keys), ("new_values", new_values)):
        if new.shape != new_keys.shape or new.shape[1] != num_kv_heads:
            raise ValueError(f"{name} must be [B, H_kv, W, D] with H_kv = {num_kv_heads}, got {list(new.shape)}")
    check_tensor("num_valid", num_valid, keys.device)  # not None, as it may be for attention
    _check_rows(new_keys, num_slots, seq_lens=seq_lens, slots=slots, num_valid=num_valid)
    if use_triton(keys):
        from .cache import scatter_kv as triton_scatter_kv

        triton_scatter_kv(keys, values, new_keys, new_values, seq_lens, num_valid, slots=slots)
    else:
        attention_reference.scatter_kv(keys, values, new_keys, new_values, seq_lens, num_valid, slots=slots)


def _check_caches(keys: Tensor, values: Tensor, name: str, new: Tensor) -> None:
    """Of keys and values [slots, H_kv, capacity, D], and of `new` [B, heads, W, D]: dtype, head size, strides, shapes."""
    check_tensor("keys", keys)
    for label, tensor in (("keys", keys), ("values", values), (name, new)):
        check_tensor(label, tensor, keys.device)
        if tensor.dim() != 4 or tensor.dtype not in FLOATS or tensor.dtype != keys.dtype:
            raise ValueError(
                f"{label} must be a floating tensor of 4 dimensions and of one dtype with keys ({keys.dtype}), "
                f"got {tensor.dtype} of shape {list(tensor.shape)}"
            )
        if tensor.shape[3] != keys.shape[3] or not 1 <= tensor.shape[3] <= MAX_HEAD_DIM:
            raise ValueError(
                f"{label} must have the keys' head size D = {keys.shape[3]}, between 1 and {MAX_HEAD_DIM}, "
                f"in its last dimension, got shape {list(tensor.shape)}"
            )
        if tensor.stride(3) != 1 and tensor.shape[3] > 1:
            raise ValueError(f"{label} must be contiguous in its last dimension, got stride {tensor.stride(3)}")
    if keys.shape[2] == 0:
        raise ValueError(f"keys must have a capacity of at least 1, got shape {list(keys.shape)}")
    if values.shape != keys.shape:
        raise ValueError(f"values must have the shape of keys {list(keys.shape)}, got {list(values.shape)}")
    if new.shape[0] > MAX_GRID:
        raise ValueError(f"{name} must have at most {MAX_GRID} rows, got {new.shape[0]}")


def _check_rows(new: Tensor, num_slots: int, **values: Tensor | None) -> None:
    batch = new.shape[0]
    for name, value in values.items():
        if value is None and name != "seq_lens":
            continue
        check_tensor(name, value, new.device)
        assert value is not None
        if value.shape != (batch,) or value.dtype != torch.int64:
            raise ValueError(f"{name} must be int64 of shape [B] = [{batch}], got {value.dtype} {list(value.shape)}")
    if values["slots"] is None and batch > num_slots:
        raise ValueError(f"slots must be given where a batch has more rows than the cache, got {batch} and {num_slots}")
