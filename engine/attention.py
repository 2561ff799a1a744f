"""Attention over the ragged cache, as transformers' models call it (`transformers.AttentionInterface`).

On a GPU it is the ragged kernel, which reads the static buffers where they lie, up to each row's own length: no mask, and no
repeated or gathered K and V. On a CPU it is `scaled_dot_product_attention` over the part of the buffers that is in use.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from .backend import ragged_attention
from .cache import RaggedCache

GROUPED, RAGGED = "speculative_engine_grouped", "speculative_engine_ragged"
_caches: list[
    RaggedCache
] = []  # of the call that is under way, last; the function that models call cannot be told more


def _grouped(
    module: torch.nn.Module,
    query: Tensor,  # [B, heads, W, D]
    key: Tensor,  # [B, K/V heads, L, D]
    value: Tensor,  # [B, K/V heads, L, D]
    attention_mask: Tensor | None,  # [B, 1, W, L]
    scaling: float | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """`scaled_dot_product_attention` in which the heads of a group are further queries of their K/V head.

    Repeating K and V for every query head instead, as transformers does for W > 1, copies the whole cache in every layer.

    Returns:
        [B, W, heads, D], and no weights.
    """
    batch, heads, width, head_dim = query.shape
    group = heads // key.shape[1]
    if group == 1 or width == 1 or attention_mask is None or attention_mask.shape[1] != 1:
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **others)
    query = query.reshape(batch, heads // group, group * width, head_dim)
    mask = attention_mask.expand(-1, group, -1, -1).reshape(batch, 1, group * width, -1)
    output = torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scaling)
    return output.reshape(batch, heads, width, head_dim).transpose(1, 2), None


def _ragged(
    module: torch.nn.Module,
    query: Tensor,  # [B, heads, W, D]
    key: Tensor,  # [slots, K/V heads, capacity, D], the whole buffers
    value: Tensor,  # likewise
    attention_mask: None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,  # [heads], attention sinks
    **others: Any,
) -> tuple[Tensor, None]:
    """The ragged kernel. Returns [B, W, heads, D], and no weights."""
    plan = _caches[-1].plan
    output = ragged_attention(
        query, key, value, plan.start, scale=scaling, window=sliding_window, softcap=softcap, sinks=s_aux,
        slots=plan.slots_or_none, kv_length=plan.kv_length, num_valid=plan.num_valid,
    )  # fmt: skip
    return output, None


AttentionInterface.register(GROUPED, _grouped)
AttentionInterface.register(RAGGED, _ragged)


class AttentionSwitch:
    """Has a model use our attention during our calls, and its own in everybody else's.

    Models that do not look their attention function up (`_supports_attention_backend`), and those that use another than
    "sdpa" or "eager", keep their own.

    Attributes:
        ragged: the ragged kernel is used: calls need no mask, and `RaggedCache.update` has to return whole buffers.
    """

    def __init__(self, model: PreTrainedModel, cache: RaggedCache, ragged: bool) -> None:
        replaced = ("sdpa", "eager") if ragged else ("sdpa",)
        configs = {id(config): config for config in (getattr(m, "config", None) for m in model.modules()) if config}
        self._own = [(config, own) for config in configs.values() if (own := _implementation(config)) in replaced]
        if not getattr(model, "_supports_attention_backend", False):
            self._own = []
        self.ragged = ragged and bool(self._own)
        self._cache, self._name = cache, RAGGED if ragged else GROUPED

    @contextmanager
    def on(self) -> Iterator[None]:
        """While this is entered, the model attends our way."""
        _caches.append(self._cache)
        for config, _ in self._own:
            config._attn_implementation_internal = self._name
        try:
            yield
        finally:
            for config, own in self._own:
                config._attn_implementation_internal = own
            _caches.pop()


def _implementation(config: Any) -> str | None:
    return getattr(config, "_attn_implementation_internal", None)
