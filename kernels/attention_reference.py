"""The torch twins of `attention.ragged_attention` and `cache.scatter_kv`: their specification.

Attention is computed from the whole matrix of logits, in float32, or in float64 when the tensors are float64.
"""

import torch
from torch import Tensor


@torch.no_grad()
def ragged_attention(
    query: Tensor,  # [B, H, W, D] any floating dtype
    keys: Tensor,  # [slots, H_kv, capacity, D]
    values: Tensor,  # [slots, H_kv, capacity, D]
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
    """Attention [B, W, H, D], contiguous, in the dtype of the query, of W new columns whose K and V the cache already holds.

    - The query of column i is at position p = seq_lens + i. It sees the keys j <= p with j > p - window, j < kv_length and
      j < seq_lens + num_valid. The rest of the cache may hold anything.
    - Head h reads key head h // (H / H_kv).
    - A softcap c turns a logit s into c tanh(s / c) (Gemma 2, arXiv 2408.00118).
    - A sink is one more logit of its head, whose value vector is 0 (gpt-oss).
    - A query that sees nothing gives 0.
    """
    batch, _, width, head_dim = query.shape
    num_kv_heads, capacity = keys.shape[1:3]
    kv_length = capacity if kv_length is None else kv_length
    dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
    rows = slice(batch) if slots is None else slots

    position = seq_lens[:, None] + torch.arange(width, device=query.device)  # [B, W]
    key = torch.arange(kv_length, device=query.device)
    written = key < (seq_lens + (width if num_valid is None else num_valid))[:, None]  # [B, L]
    visible = written[:, None] & (key <= position[..., None])  # [B, W, L]
    if window is not None:
        visible &= key > position[..., None] - window
    visible = visible[:, None, None]  # [B, 1, 1, W, L]

    k = keys[:, :, :kv_length][rows].to(dtype)
    # 0 times NaN is NaN, so values that no query sees are set to 0.
    v = values[:, :, :kv_length][rows].to(dtype).where(written[:, None, :, None], 0)
    q = query.to(dtype).unflatten(1, (num_kv_heads, -1))  # [B, H_kv, H / H_kv, W, D]
    logits = _product("bhgwd, bhld -> bhgwl", q, k) * (head_dim**-0.5 if scale is None else scale)
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    logits = logits.masked_fill(~visible, -torch.inf)
    lse = logits.logsumexp(dim=-1, keepdim=True)
    if sinks is not None:
        lse = torch.logaddexp(lse, sinks.to(dtype).view(num_kv_heads, -1, 1, 1))
    weights = torch.exp(logits - lse).where(visible, 0)
    return _product("bhgwl, bhld -> bwhgd", weights, v).flatten(2, 3).to(query.dtype).contiguous()


def _product(equation: str, a: Tensor, b: Tensor) -> Tensor:
    """einsum in the dtype of both, also where autocast would make it bfloat16."""
    with torch.autocast(a.device.type, enabled=False):
        return torch.einsum(equation, a, b)


@torch.no_grad()
def scatter_kv(
    keys: Tensor,  # [slots, H_kv, capacity, D]; written
    values: Tensor,  # [slots, H_kv, capacity, D]; written
    new_keys: Tensor,  # [B, H_kv, W, D]
    new_values: Tensor,  # [B, H_kv, W, D]
    seq_lens: Tensor,  # [B] int64
    num_valid: Tensor,  # [B] int64
    *,
    slots: Tensor | None = None,  # [B] int64; None: 0 ... B-1
) -> None:
    """Write the K and V of the first num_valid columns of each row at seq_lens, seq_lens + 1, ... of its slot.

    Other columns write nothing, nor do those whose position is outside [0, capacity).
    """
    batch, _, width, _ = new_keys.shape
    column = torch.arange(width, device=keys.device)
    position = seq_lens[:, None] + column  # [B, W]
    written = (column < num_valid[:, None]) & (position >= 0) & (position < keys.shape[2])
    slot = torch.arange(batch, device=keys.device) if slots is None else slots
    slot, position = slot[:, None].expand_as(written)[written], position[written]  # [columns that are written]
    for cache, new in ((keys, new_keys), (values, new_values)):
        cache[slot, :, position] = new.transpose(1, 2)[written]
