"""Attention over the ragged cache, as transformers' models call it (`transformers.AttentionInterface`)."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward

GROUPED = "speculative_engine_grouped"


def grouped_attention(
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


AttentionInterface.register(GROUPED, grouped_attention)


class AttentionSwitch:
    """Has a model use our attention during our calls, and its own in everybody else's.

    Models that do not look their attention function up (`_supports_attention_backend`), and those that use another than
    "sdpa", keep their own.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        configs = {id(config): config for config in (getattr(m, "config", None) for m in model.modules()) if config}
        self._configs = [config for config in configs.values() if _implementation(config) == "sdpa"]
        if not getattr(model, "_supports_attention_backend", False):
            self._configs = []

    @contextmanager
    def on(self) -> Iterator[None]:
        """While this is entered, the model attends our way."""
        for config in self._configs:
            config._attn_implementation_internal = GROUPED
        try:
            yield
        finally:
            for config in self._configs:
                config._attn_implementation_internal = "sdpa"


def _implementation(config: Any) -> str | None:
    return getattr(config, "_attn_implementation_internal", None)
