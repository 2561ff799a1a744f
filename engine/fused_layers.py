"""Decoder layers of Llama's kind that run in one call of parts of our own: cpu_layers.py and gpu_layers.py have the parts.

Layers keep their modules. In calls that are not ours or are compiled, and if one of those modules has got a hook or another
forward or been replaced, or all modules of torch have got a hook, these run as they are.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from torch.nn.modules.module import _has_any_global_hook

from .attention import is_own_call

logger = logging.getLogger(__name__)

# Whose attention has norms of queries and keys, or leaves out the rotary embedding in some layers, but is Llama's otherwise.
_FUSED = (
    "LlamaDecoderLayer",
    "MistralDecoderLayer",
    "Qwen2DecoderLayer",
    "Qwen3DecoderLayer",
    "SmolLM3DecoderLayer",
)
_MOST_ROUNDING = 0.02  # of a result, in norm


def fuse(model: nn.Module, parts_of: Callable[[Any], Any]) -> int:
    """Fuse the decoder layers of a model with the parts that a function finds in each, in place; returns how many.

    All stay as they are if one of them cannot be fused, or the first gives something else then. Those that were fused before get
    these parts.
    """
    layers: list[Any] = [module for module in model.modules() if _own_class(module).__name__ in _FUSED]
    try:
        parts = [parts_of(layer) for layer in layers]
        if layers:
            _check(layers[0], parts[0])
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # a release of transformers may have changed anything
        logger.info("%s is not fused: %s", type(layers[0]).__name__, error)
        return 0
    for layer, own in zip(layers, parts, strict=True):
        layer.__class__ = _fused(_own_class(layer))
        layer.parts = own
    return len(layers)


def _own_class(module: nn.Module) -> type:
    return type(module).__bases__[1] if isinstance(module, _Fused) else type(module)


def usable_parts(layer: Any, cache: Any) -> Any:
    """Those of a fused layer, None if the call with this cache may not run them."""
    parts = getattr(layer, "parts", None)
    if parts is None or torch.compiler.is_dynamo_compiling() or not is_own_call(cache) or parts.touched():
        return None
    return parts if parts.on_gpu == cache.whole_buffers else None  # a head may have been moved to a GPU


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


class _Fused(nn.Module):
    """In front of a layer's class."""

    parts: Any

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Models of transformers give their layers the hidden states by position and all else by name."""
        cache = kwargs.get("cache", kwargs.get("past_key_values"))  # its name from transformers 5.24 on, and before
        parts = usable_parts(self, cache) if len(args) == 1 else None
        if parts is None:
            output: Tensor = super().forward(*args, **kwargs)
            return output
        hidden: Tensor = parts.layer(args[0], kwargs.get("position_embeddings"), kwargs.get("attention_mask"), cache)
        return hidden

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
