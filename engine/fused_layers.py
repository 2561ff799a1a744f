"""Decoder layers of Llama's kind that do the same in fewer operations, on a CPU.

Of the 24 ms that SmolLM2-135M takes for one token in bfloat16 on 2 cores of an EPYC with AVX-512, matrix products take 14. Most of
the rest are some 1,500 small operations and calls of transformers' modules, whose number counts and not what they compute. Here a
layer is one call, a norm 5 operations instead of 8, the rotary embedding of queries and keys 9 instead of 16, and what projections
give together (packing.py) is not taken apart and kept until each is asked for: 20 ms. Results are rounded where transformers
rounds them.

Layers keep their modules. In calls that are not ours or are compiled, and if one of those modules has got a hook or another
forward or been replaced, or all modules of torch have got a hook, these run as they are.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import layer_norm, scaled_dot_product_attention
from torch.nn.modules.module import _has_any_global_hook

from .attention import attend_grouped, is_own_call
from .packing import PackedLinear, Product

logger = logging.getLogger(__name__)

# Whose attention has norms of queries and keys, or leaves out the rotary embedding in some layers, but is Llama's otherwise.
_LIKE_LLAMA = (
    "LlamaDecoderLayer",
    "MistralDecoderLayer",
    "Qwen2DecoderLayer",
    "Qwen3DecoderLayer",
    "SmolLM3DecoderLayer",
)
_MAX_NORMED = 5120  # elements; from 9,000 on transformers' own norm takes less time
_MOST_ROUNDING = 0.02  # of a result, in norm


def fuse_layers(model: nn.Module) -> int:
    """Fuse the decoder layers of a model whose linear layers are packed, in place; returns how many.

    All stay as they are if the first cannot be fused, or gives something else then.
    """
    return fuse(model, LayerParts.of)


def fuse(model: nn.Module, parts_of: Callable[[Any], Any]) -> int:
    """The same with the parts that a function finds in a layer; layers that are fused already are those of their first class."""
    layers: list[Any] = [module for module in model.modules() if _own_class(module).__name__ in _LIKE_LLAMA]
    try:
        parts = [parts_of(layer) for layer in layers]
        if layers:
            _check(layers[0], parts[0])
    except Exception as error:  # a release of transformers may have changed anything
        logger.info("%s is not fused: %s", type(layers[0]).__name__, error)
        return 0
    for layer, own in zip(layers, parts, strict=True):
        layer.__class__ = _fused(_own_class(layer))
        layer.parts = own
    return len(layers)


def _own_class(module: nn.Module) -> type:
    return type(module).__bases__[1] if isinstance(module, _Fused) else type(module)


def usable_parts(layer: Any, past_key_values: Any) -> "LayerParts | None":
    """Those of a fused layer, if the call with this cache may run them."""
    parts: LayerParts | None = getattr(layer, "parts", None)
    if parts is None or torch.compiler.is_compiling() or not is_own_call(past_key_values) or parts.touched():
        return None
    return parts if parts.on_gpu == past_key_values.whole_buffers else None  # a head may have been moved to a GPU


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
class WatchedModules:
    """Those of a layer, to see whether they are what they were."""

    places: tuple[tuple[dict[str, Any], str, nn.Module], ...]  # of all modules in the layer
    hooks: tuple[dict[int, Any], ...]  # of these, but for the next
    attention_hooks: dict[int, Any]

    @staticmethod
    def watch(layer: Any) -> dict[str, Any]:
        """The fields."""
        places = [
            (parent._modules, name, child) for parent in layer.modules() for name, child in parent.named_children()
        ]
        hooks = [found for *_, module in places for found in (module._forward_pre_hooks, module._forward_hooks)]
        seen = layer.self_attn._forward_hooks
        return dict(
            places=tuple(places), hooks=tuple(found for found in hooks if found is not seen), attention_hooks=seen
        )

    def touched(self) -> bool:
        """Whether a module has been replaced, or has got another forward, or somebody wants to see what it is given.

        transformers itself hooks attention where hidden states are asked for, to see its weights, if they are too.
        """
        if any(self.hooks) or _has_any_global_hook():
            return True
        if any(found.get(name) is not module or "forward" in module.__dict__ for found, name, module in self.places):
            return True
        return any(not f"{hook.__module__}.".startswith("transformers.") for hook in self.attention_hooks.values())


@dataclass(frozen=True)
class LayerParts(WatchedModules):
    """What a layer consists of, looked up once: finding an attribute takes a module its time."""

    on_gpu = False

    self_attn: nn.Module
    index: int  # of the layer, in a cache
    head_dim: int
    queries: int  # heads
    keys: int  # heads, and as many of values
    scaling: float
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
    def of(cls, layer: Any) -> "LayerParts":
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
            scaling=attention.scaling,
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

    def layer(self, hidden: Tensor, position_embeddings: Any, mask: Any, past_key_values: Any) -> Tensor:
        """What the whole layer makes of hidden states [B, W, H]."""
        hidden = hidden + self.attention(self.before_attention(hidden), position_embeddings, mask, past_key_values)
        return hidden + self.mlp(hidden)

    def attention(
        self,
        normed: Tensor,  # [B, W, H]
        position_embeddings: tuple[Tensor, Tensor],  # cosines and sines, [B, W, head_dim] each
        mask: Any,
        past_key_values: Any,
    ) -> Tensor:
        """What `self_attn` gives in one of our own calls: [B, W, H]."""
        query, key, value = self.heads(normed, *position_embeddings)
        keys, values = past_key_values.ragged_layers[self.index].update(key, value)
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


class _Fused(nn.Module):
    """In front of a layer's class."""

    parts: LayerParts

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Any = None,
        position_ids: Any = None,
        past_key_values: Any = None,
        use_cache: Any = False,
        position_embeddings: Any = None,
        **others: Any,
    ) -> Tensor:
        parts = usable_parts(self, past_key_values)
        if parts is None:
            output: Tensor = super().forward(
                hidden_states, attention_mask=attention_mask, position_ids=position_ids, past_key_values=past_key_values,
                use_cache=use_cache, position_embeddings=position_embeddings, **others,
            )  # fmt: skip
            return output
        return parts.layer(hidden_states, position_embeddings, attention_mask, past_key_values)

    def __reduce__(self) -> Any:  # its class is in no module where pickle would find it
        return _unfilled, (type(self).__bases__[1],), self.__dict__


def _unfilled(own: type) -> nn.Module:
    """A fused layer without its attributes, which are to be set."""
    made: nn.Module = object.__new__(_fused(own))
    return made


def _fused(own: type) -> type:
    """The subclass of a layer's class that runs fused."""
    if own not in _classes:
        _classes[own] = type(f"Fused{own.__name__}", (_Fused, own), {"__module__": __name__})
    return _classes[own]


_classes: dict[type, type] = {}


def _product(*layers: Any) -> Product:
    """That of packed layers which are computed together, and nothing with them.

    Raises:
        ValueError: if they are not packed so.
    """
    packed = [layer for layer in layers if isinstance(layer, PackedLinear)]
    if len(packed) < len(layers) or len({id(layer.product) for layer in packed}) > 1:
        raise ValueError("its linear layers are not packed, or not together")
    return packed[0].product


@torch.no_grad()
def _check(layer: Any, parts: Any) -> None:
    """Hold a layer and its parts, for a few random rows, against what its modules give.

    Raises:
        ValueError: if they differ by more than rounding.
    """
    own = torch.Generator().manual_seed(0)  # whoever draws from torch's sees nothing of this
    weight, width = layer.post_attention_layernorm.weight, layer.self_attn.q_proj.in_features
    size = len(weight)

    def random(size: int) -> Tensor:
        return torch.rand((1, 3, size), generator=own, device="cpu").sub_(0.5).to(weight)

    def attention(normed: Tensor) -> Tensor:
        query, key, value = parts.heads(normed, *angles)
        attended = scaled_dot_product_attention(query, key, value, is_causal=True, scale=parts.scaling, enable_gqa=True)
        output: Tensor = parts.joined(attended.transpose(1, 2))
        return output

    hidden, normed, angles = random(size), random(width), (random(parts.head_dim), random(parts.head_dim))
    others = dict(position_embeddings=angles, attention_mask=None)
    pairs = [
        (attention(normed), layer.self_attn(normed, **others)[0]),
        (parts.mlp(hidden), layer.mlp(layer.post_attention_layernorm(hidden))),
    ]
    if width == size:  # not the first layer of an EAGLE-3 head, which is not called as a whole
        between = hidden + attention(parts.before_attention(hidden))
        pairs.append((between + parts.mlp(between), layer(hidden, **others)))
    for given, meant in pairs:
        if not (given.float() - meant.float()).norm() <= _MOST_ROUNDING * meant.float().norm():  # NaN is not
            raise ValueError("fused, it gives something else")
