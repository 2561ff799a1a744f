"""Decoder layers of Llama's kind that do the same in fewer operations, on a CPU.

Of the 24 ms that SmolLM2-135M takes for one token in bfloat16 on 2 cores of an EPYC with AVX-512, matrix products take 14. Most of
the rest are some 1,500 small operations and calls of transformers' modules, whose number counts and not what they compute. Here a
layer is one call, a norm 5 operations instead of 8, the rotary embedding of queries and keys 9 instead of 16, and what projections
give together (packing.py) is not taken apart and kept until each is asked for: 20 ms. Results are rounded where transformers
rounds them.

How layers are fused, and when they run as they are: fused_layers.py.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import layer_norm

from .attention import attend_grouped
from .fused_layers import WatchedModules, fuse
from .packing import PackedLinear, Product

_MAX_NORMED = 5120  # elements; from 9,000 on transformers' own norm takes less time


def fuse_cpu_layers(model: nn.Module) -> int:
    """Fuse the decoder layers of a model whose linear layers are packed, in place; returns how many.

    All stay as they are if one of them cannot be fused, or the first gives something else then.
    """
    return fuse(model, CpuLayerParts.of)


def rms_norm(input: Tensor, weight: Tensor, eps: float) -> Tensor:
    """input / sqrt(mean(input ** 2) + eps), rounded, times the weight.

    The root mean square of x is the standard deviation of (x, -x), and a layer norm is one operation.

    Args:
        input: [..., D].
        weight: [D].
    """
    size = input.shape[-1]
    both = layer_norm(torch.cat((input, -input), dim=-1), (2 * size,), eps=eps)
    return both[..., :size] * weight


@dataclass(frozen=True)
class _Norm:
    """A norm as Llama has it, looked up once."""

    module: nn.Module
    parameters: dict[str, Any]
    eps: float

    @classmethod
    def of(cls, module: Any) -> "_Norm":
        """
        Raises:
            AttributeError: if it is something else.
        """
        return cls(module, module._parameters, module.variance_epsilon)

    @property
    def weight(self) -> Tensor:
        found: Tensor = self.parameters["weight"]
        return found

    def __call__(self, input: Tensor) -> Tensor:
        if input.numel() <= _MAX_NORMED:
            return rms_norm(input, self.weight, self.eps)
        output: Tensor = self.module(input)
        return output


@dataclass(frozen=True)
class CpuLayerParts(WatchedModules):
    """What a layer consists of, looked up once: finding an attribute takes a module its time."""

    on_gpu = False

    self_attn: nn.Module
    index: int  # of the layer, in a cache
    head_dim: int
    queries: int  # heads
    keys: int  # heads, and as many of values
    has_rope: bool
    projections: Product  # of queries, keys and values
    output: Product
    gates: Product  # gate and up
    down: Product
    activation: Callable[[Tensor], Tensor]
    before_attention: _Norm
    before_mlp: _Norm
    of_queries: _Norm | None
    of_keys: _Norm | None

    @classmethod
    def of(cls, layer: Any) -> "CpuLayerParts":
        """
        Raises:
            AttributeError: if something is missing.
            ValueError: if linear layers are not packed, or attention is not "sdpa", in place of which ours runs.
        """
        attention, mlp = layer.self_attn, layer.mlp
        if (implementation := attention.config._attn_implementation) != "sdpa":
            raise ValueError(f"its attention is {implementation!r}")
        normed = hasattr(attention, "q_norm")
        return cls(
            self_attn=attention,
            index=attention.layer_idx,
            head_dim=attention.head_dim,
            queries=attention.q_proj.out_features // attention.head_dim,
            keys=attention.k_proj.out_features // attention.head_dim,
            has_rope=bool(getattr(attention, "use_rope", True)),
            projections=_product(attention.q_proj, attention.k_proj, attention.v_proj),
            output=_product(attention.o_proj),
            gates=_product(mlp.gate_proj, mlp.up_proj),
            down=_product(mlp.down_proj),
            activation=mlp.act_fn.forward,
            before_attention=_Norm.of(layer.input_layernorm),
            before_mlp=_Norm.of(layer.post_attention_layernorm),
            of_queries=_Norm.of(attention.q_norm) if normed else None,
            of_keys=_Norm.of(attention.k_norm) if normed else None,
            **cls.watch(layer),
        )

    @property
    def scaling(self) -> float:
        scaling: Any = self.self_attn.scaling
        return float(scaling)

    def layer(self, hidden: Tensor, position_embeddings: Any, mask: Any, cache: Any) -> Tensor:
        """What the whole layer makes of hidden states [B, W, H]."""
        hidden = hidden + self.attention(self.before_attention(hidden), position_embeddings, mask, cache)
        return hidden + self.mlp(hidden)

    def attention(
        self,
        normed: Tensor,  # [B, W, H]
        position_embeddings: tuple[Tensor, Tensor],  # cosines and sines, [B, W, head_dim] each
        mask: Any,
        cache: Any,
    ) -> Tensor:
        """What `self_attn` gives in one of our own calls: [B, W, H]."""
        query, key, value = self.heads(normed, *position_embeddings)
        keys, values = cache.ragged_layers[self.index].update(key, value)
        attended, _ = attend_grouped(self.self_attn, query, keys, values, mask, self.scaling)
        return self.joined(attended)

    def joined(self, attended: Tensor) -> Tensor:
        """The output of attention, [B, W, H], from that of its heads, [B, W, heads, head_dim]."""
        return self.output.multiply(attended.flatten(2))

    def heads(self, normed: Tensor, cosines: Tensor, sines: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values, [B, heads, W, head_dim] each."""
        batch, width, _ = normed.shape
        every = self.projections.multiply(normed).view(batch, width, -1, self.head_dim)
        turned, value = every[:, :, : self.queries + self.keys], every[:, :, self.queries + self.keys :]
        if self.of_queries is not None and self.of_keys is not None:
            query, key = self.of_queries(turned[:, :, : self.queries]), self.of_keys(turned[:, :, self.queries :])
            turned = torch.cat((query, key), dim=2)
        if self.has_rope:
            half = self.head_dim // 2
            across = torch.cat((-turned[..., half:], turned[..., :half]), dim=-1)
            turned = turned * cosines.unsqueeze(2) + across * sines.unsqueeze(2)
        turned = turned.transpose(1, 2)
        return turned[:, : self.queries], turned[:, self.queries :], value.transpose(1, 2)

    def mlp(self, hidden: Tensor) -> Tensor:
        """What norm and `mlp` make of hidden states [B, W, H]."""
        gate, up = self.gates.multiply(self.before_mlp(hidden)).chunk(2, dim=-1)
        return self.down.multiply(self.activation(gate) * up)


def _product(*layers: Any) -> Product:
    """That of packed layers which are computed together, and nothing with them.

    Raises:
        ValueError: if they are not packed so.
    """
    packed = [layer for layer in layers if isinstance(layer, PackedLinear)]
    if len(packed) < len(layers) or len({id(layer.product) for layer in packed}) > 1:
        raise ValueError("its linear layers are not packed, or not together")
    return packed[0].product
