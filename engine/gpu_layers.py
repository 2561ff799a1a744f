"""Decoder layers of Llama's kind that do the same in fewer launches, on a GPU.

A captured round costs no host time per operation, but a GPU takes 2 us for each, however small. On an H100 the layers of a Llama
of 8B took 245 us each for one token, of which reading their weights takes 150; the rest were some 30 launches for norms, rotary
embedding, activation and sums, which are 5 here (kernels/layers.py). Results are rounded where transformers rounds them.

How layers are fused, and when they run as they are: fused_layers.py.
"""

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from .attention import attend_ragged
from .backend import gated_silu, rms_norm, rotate, use_triton
from .fused_layers import WatchedModules, fuse


def fuse_gpu_layers(model: nn.Module) -> int:
    """Fuse the decoder layers of a model on a GPU whose attention is the ragged kernel, in place; returns how many.

    All stay as they are if one of them cannot be fused, or the first gives something else then.
    """
    first = next(model.parameters(), None)
    return fuse(model, GpuLayerParts.of) if first is not None and use_triton(first) else 0


@dataclass(frozen=True)
class GpuLayerParts(WatchedModules):
    """What a layer consists of. Its matrix products are its own modules."""

    on_gpu = True
    self_attn: Any
    layer_norms: tuple[Any, Any]  # before attention, and before the MLP
    mlp_modules: Any
    is_silu: bool
    has_rope: bool

    @classmethod
    def of(cls, layer: Any) -> "GpuLayerParts":
        """
        Raises:
            AttributeError: if something is missing.
        """
        attention, config = layer.self_attn, layer.self_attn.config
        norms = [layer.input_layernorm, layer.post_attention_layernorm]
        for norm in norms + ([attention.q_norm, attention.k_norm] if hasattr(attention, "q_norm") else []):
            _ = norm.variance_epsilon  # others are no norms of Llama's kind
        return cls(
            self_attn=attention,
            layer_norms=(norms[0], norms[1]),
            mlp_modules=layer.mlp,
            is_silu=config.hidden_act == "silu",
            has_rope=bool(getattr(attention, "use_rope", True)),
            **cls.watch(layer),
        )

    @property
    def head_dim(self) -> int:
        return int(self.self_attn.head_dim)

    @property
    def window(self) -> int | None:
        """Of attention, in tokens; None: all are seen."""
        attention = self.self_attn
        of_all = attention.config.sliding_window if attention.config.model_type == "mistral" else None
        return getattr(attention, "sliding_window", of_all)

    @property
    def scaling(self) -> float:
        return float(self.self_attn.scaling)

    def layer(self, hidden: Tensor, position_embeddings: Any, mask: Any, cache: Any) -> Tensor:
        """What the whole layer makes of hidden states [B, W, H]."""
        attended = self.attention(self.before_attention(hidden), position_embeddings, mask, cache)
        hidden, normed = _normed(self.layer_norms[1], hidden, attended)
        return hidden + self._mlp(normed)

    def before_attention(self, hidden: Tensor) -> Tensor:
        """What attention reads, [B, W, H]: the hidden states through the layer's first norm."""
        return _normed(self.layer_norms[0], hidden)[1]

    def attention(
        self,
        normed: Tensor,  # [B, W, H]
        position_embeddings: tuple[Tensor, Tensor],  # cosines and sines, [B or 1, W, head_dim] each
        mask: Any,
        cache: Any,
    ) -> Tensor:
        """What `self_attn` gives in one of our own calls: [B, W, H]."""
        query, key, value = self.heads(normed, *position_embeddings)
        keys, values = cache.ragged_layers[self.self_attn.layer_idx].update(key, value)
        attended, _ = attend_ragged(self.self_attn, query, keys, values, mask, self.scaling, sliding_window=self.window)
        return self.joined(attended)

    def joined(self, attended: Tensor) -> Tensor:
        """The output of attention, [B, W, H], from that of its heads, [B, W, heads, head_dim]."""
        output: Tensor = self.self_attn.o_proj(attended.flatten(2))
        return output

    def heads(self, normed: Tensor, cosines: Tensor, sines: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values, [B, heads, W, head_dim] each."""
        own = self.self_attn
        query, key, value = (
            project(normed).unflatten(-1, (-1, self.head_dim)) for project in (own.q_proj, own.k_proj, own.v_proj)
        )
        if hasattr(own, "q_norm"):
            query, key = _normed(own.q_norm, query)[1], _normed(own.k_norm, key)[1]
        query, key = query.transpose(1, 2), key.transpose(1, 2)
        if self.has_rope:
            rotate(query, key, cosines, sines)
        return query, key, value.transpose(1, 2)

    def mlp(self, hidden: Tensor) -> Tensor:
        """What norm and `mlp` make of hidden states [B, W, H]."""
        return self._mlp(_normed(self.layer_norms[1], hidden)[1])

    def _mlp(self, normed: Tensor) -> Tensor:
        own = self.mlp_modules
        gate, up = (
            own.gate_proj(normed).contiguous(),
            own.up_proj(normed).contiguous(),
        )  # packed, they are parts of one tensor
        output: Tensor = own.down_proj(gated_silu(gate, up) if self.is_silu else own.act_fn(gate) * up)
        return output


def _normed(norm: Any, x: Tensor, y: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """x, or x + y, and its norm, [..., D] each."""
    return rms_norm(x.contiguous(), norm.weight, norm.variance_epsilon, None if y is None else y.contiguous())
