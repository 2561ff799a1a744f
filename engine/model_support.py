"""Which models can be decoded over a ragged cache, checked at load."""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import transformers
from packaging.version import Version
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    MODEL_FOR_MASKED_LM_MAPPING_NAMES,
)

from .errors import UnsupportedModelError

# Held against `generate` in the tests. Any other architecture is probed with a few tokens when it is loaded.
TESTED = frozenset(
    (
        *("llama", "qwen2", "qwen3", "mistral", "mixtral", "gemma2", "gemma3_text", "gpt2"),
        *("opt", "gpt_neox", "phi", "phi3", "falcon", "olmo2", "starcoder2", "smollm3", "gpt_oss"),
    )
)
# These tell their attention function of a window by the mask alone, which our kernel on a GPU does without.
WINDOW_IN_MASK_ALONE = frozenset({"phimoe", "qwen2_moe"})
OWN_MASK = frozenset({"doge"})  # these add a bias of their own to the mask
_ATTENTION = {"full_attention", "sliding_attention"}  # layer types whose K/V can be rolled back
_RECURRENT = {
    "mamba",
    "mamba2",
    "falcon_mamba",
    "rwkv",
    "recurrent_gemma",
    "jamba",
    "bamba",
    "zamba",
    "zamba2",
    "xlstm",
}
# What copies from the host or waits for the device inside a forward cannot be captured in a CUDA graph: falcon indexes with
# lists in every layer, and dynamic rotary embeddings look at the longest position, as longrope did before transformers 5.21.
_EAGER_TYPES, _EAGER_ROPE = {"falcon"}, {"dynamic"}
if Version(transformers.__version__) < Version("5.21"):
    _EAGER_ROPE.add("longrope")


def check_config(config: PretrainedConfig, role: str) -> None:
    """What can be told before any weights are read.

    Raises:
        UnsupportedModelError: naming the model type and the reason.
    """
    name, text = config.model_type, config.get_text_config()
    if config.is_encoder_decoder or text.is_encoder_decoder:
        raise UnsupportedModelError(f"{role} must be a decoder-only language model, got {name!r}, an encoder-decoder")
    # Of those that take images, too, the text side is served.
    is_known = name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES or name in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
    if not is_known or _is_encoder(name, text):
        raise UnsupportedModelError(f"{role} must be a causal language model, got {name!r}, which is not one")
    if getattr(text, "alibi", False) or name in ("bloom", "mpt"):
        raise UnsupportedModelError(
            f"{role} of type {name!r} uses ALiBi, which derives positions from a 2D mask, so it cannot handle rows of "
            f"different lengths in one static cache"
        )
    if getattr(text, "use_bidirectional_attention", None) is True:
        raise UnsupportedModelError(
            f"{role} of type {name!r} attends to later tokens too (use_bidirectional_attention)"
        )
    # gpt_neo's, whose window is wider than what the probe reads
    if "local" in (getattr(text, "attention_layers", None) or ()):
        raise UnsupportedModelError(
            f"{role} of type {name!r} has local attention with a window counted from the last key, but in a static cache a "
            f"row may end earlier"
        )
    other = set(getattr(text, "layer_types", None) or ()) - _ATTENTION
    if other or name in _RECURRENT:
        kinds = ", ".join(sorted(other)) or "recurrent"
        raise UnsupportedModelError(
            f"{role} of type {name!r} has layers other than full or sliding attention ({kinds}): their state cannot be "
            f"rolled back after rejected drafts"
        )


def _is_encoder(name: str, text: PretrainedConfig) -> bool:
    """BERT and its kin are in the causal mapping too, for use as a decoder; their config says whether they are one."""
    return name in MODEL_FOR_MASKED_LM_MAPPING_NAMES and not getattr(text, "is_decoder", False)


def check_supported(model: PreTrainedModel, role: str) -> None:
    """What can be told of a loaded model without calling it.

    Raises:
        UnsupportedModelError: naming the model type and the reason.
    """
    config = model.config
    check_config(config, role)
    name, text = config.model_type, config.get_text_config()
    devices = {parameter.device for parameter in model.parameters()}
    if len(devices) > 1 or torch.device("meta") in devices:
        raise UnsupportedModelError(
            f"{role} must have all parameters on one device, and none on 'meta', got {sorted(map(str, devices))}"
        )
    if getattr(model, "_is_stateful", False) and not getattr(text, "layer_types", None):
        raise UnsupportedModelError(f"{role} of type {name!r} has recurrent state, which cannot be rolled back")
    if "position_ids" not in inspect.signature(model.base_model.forward).parameters:
        raise UnsupportedModelError(f"{role} of type {name!r} takes no position_ids, which a ragged batch needs")
    if text._attn_implementation not in ("sdpa", "eager"):
        raise UnsupportedModelError(
            f"{role} must use the attention implementation 'sdpa' or 'eager', got {text._attn_implementation!r}: call "
            f"model.set_attn_implementation('sdpa') first"
        )
    if (part := compiled_part(model)) is not None:
        raise UnsupportedModelError(compiled_reason(role, part))
    for part, module in model.named_modules():
        if type(module).__module__.startswith("torch.ao.nn.quantized.dynamic"):
            raise UnsupportedModelError(
                f"{role} must not be quantized dynamically by torch, got {part}: one scale is shared by all tokens of a call, so "
                f"logits would depend on later tokens and other rows"
            )
    if model.get_output_embeddings() is None:
        raise UnsupportedModelError(
            f"{role} must be a causal language model, got {type(model).__name__} without a head"
        )


def compiled_part(model: PreTrainedModel) -> str | None:
    """The name of a module with attention in it that others have compiled; None: there is none."""
    for name, module in model.named_modules():
        forward = vars(module).get("forward")
        wrapped = hasattr(forward, "_torchdynamo_orig_callable") and not hasattr(forward, "_torchdynamo_disable")
        compiled = module._compiled_call_impl is not None or wrapped
        if compiled and any(hasattr(part, "layer_idx") for part in module.modules()):
            return name or type(module).__name__
    return None


def compiled_reason(role: str, part: str) -> str:
    """Why a model with this compiled part is refused."""
    return (
        f"{role} must not have compiled attention modules, got {part} compiled: its graph does not know the engine's K/V "
        f"cache. Load the uncompiled model (on a CPU with compile=True, if wanted)"
    )


def windows(config: PretrainedConfig) -> dict[str, int | None]:
    """The attention windows, in tokens, by layer type; None: all tokens are seen.

    `{"all": window}` where all layers are alike. Of settings that the config's class does not declare, none is a window: a
    config keeps whatever else its file has.
    """
    text = config.get_text_config()
    layer_types = set(getattr(text, "layer_types", None) or ()) if _declares(text, "layer_types") else set()
    window = getattr(text, "sliding_window", None) if layer_types or _declares(text, "sliding_window") else None
    if _declares(text, "use_sliding_window") and text.use_sliding_window is False:
        window = None
    if "sliding_attention" in layer_types:
        return {kind: window if kind == "sliding_attention" else None for kind in sorted(layer_types)}
    return {"all": None if layer_types else window}


@contextmanager
def narrow_windows(model: PreTrainedModel, length: int) -> Iterator[None]:
    """While this is entered, every sliding window of a model is `length` tokens wide, wherever a config or a layer keeps it."""
    configs = [model.config.get_text_config(), *(getattr(module, "config", None) for module in model.modules())]
    holders: Any = {id(each): each for each in (*configs, *model.modules())}.values()
    found = [(each, width) for each in holders if isinstance(width := getattr(each, "sliding_window", None), int)]
    try:
        for holder, _ in found:
            holder.sliding_window = length
        yield
    finally:
        for holder, width in found:
            holder.sliding_window = width


def _declares(config: PretrainedConfig, name: str) -> bool:
    """Whether models of this class know the name, or the one that this config was made for (`eagle_config`)."""
    return (
        name in getattr(config, "_declared", ())
        or config.attribute_map.get(name, name) in inspect.signature(type(config)).parameters
    )


def why_eager(model: PreTrainedModel) -> str | None:
    """What is known to keep a model from being captured in CUDA graphs; None: nothing."""
    config = model.config
    if config.model_type in _EAGER_TYPES:
        return f"layers of type {config.model_type!r} copy from the host"
    kinds = {each.get("rope_type") for each in _ropes(config.get_text_config())}
    if found := kinds & _EAGER_ROPE:
        return f"rotary embeddings of type {found.pop()!r} wait for the device"
    return _why_experts_wait(model)


def _why_experts_wait(model: PreTrainedModel) -> str | None:
    """Why those of a mixture on a CUDA device do; None: there are none, or they do not."""
    has_experts = getattr(model, "_can_set_experts_implementation", lambda: False)()
    if model.device.type != "cuda" or not has_experts:
        return None
    way = getattr(model.config, "_experts_implementation", None)
    if way == "eager":
        return "experts are called one by one, as many as the host finds to be wanted"
    # torch has a kernel for bf16 on sm_90 and sm_100. Elsewhere its grouped product reads the groups' sizes on the host.
    has_kernel = model.dtype == torch.bfloat16 and torch.cuda.get_device_capability(model.device)[0] in (9, 10)
    if way == "grouped_mm" and not has_kernel:
        return (
            f"torch's grouped products wait for the device in {model.dtype} here (not in bfloat16 on sm_90 and sm_100)"
        )
    return None


def head_sizes(config: PretrainedConfig) -> set[int]:
    """Elements of a query, key or value of one head: one number for most models, none where the config does not tell."""
    text = config.get_text_config()
    names = ("head_dim", "global_head_dim", "qk_head_dim", "v_head_dim")
    layers = list(getattr(text, "per_layer_config", ())) or [text]
    given = {size for layer in layers for name in names if (size := getattr(layer, name, None))}
    hidden, heads = getattr(layers[0], "hidden_size", None), getattr(layers[0], "num_attention_heads", None)
    if not given and isinstance(hidden, int) and isinstance(heads, int):
        return {hidden // heads}
    return given


def hooks_of_others(module: nn.Module) -> Iterator[int]:
    """Numbers of a module's forward hooks, which no other hook gets; but for those that transformers adds at its first calls."""
    for hooks in (module._forward_pre_hooks, module._forward_hooks):
        for number, hook in hooks.items():
            if not str(getattr(hook, "__module__", "")).startswith("transformers."):
                yield number


def vocab_size(model: PreTrainedModel) -> int:
    """Ids that the model has logits for."""
    head = model.get_output_embeddings()
    return int(getattr(head, "out_features", None) or head.weight.shape[0])


def context_length(config: PretrainedConfig) -> int:
    """Positions that the model was made for.

    Rotary embeddings that change their frequencies beyond the original length would make earlier K/V depend on later
    text and on the neighbours in a batch, so such a model is served up to the original length.
    """
    length = getattr(config, "max_position_embeddings", None)
    lengths = [max(length, *_stretched(config))] if length else []
    for rope in _dynamic_ropes(config):
        lengths.append(
            rope.get("original_max_position_embeddings") or getattr(config, "original_max_position_embeddings", None)
        )
    return min((int(length) for length in lengths if length), default=1 << 20)


def _stretched(config: PretrainedConfig) -> list[int]:
    """What yarn and linear scaling make of the original lengths, and 0. Many a config that turns one of them on leaves
    max_position_embeddings as it was; where that is the stretched length already, texts may become longer than they should. (Not
    gemma3's, which scales the positions of some layers.)"""
    yarns = [rope for rope in _ropes(config) if rope.get("rope_type") == "yarn"]
    lengths = [(rope.get("original_max_position_embeddings") or 0) * (rope.get("factor") or 1) for rope in yarns]
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") == "linear":
        lengths.append(config.max_position_embeddings * (rope.get("factor") or 1))
    return [0, *map(int, lengths)]


def has_dynamic_rope(config: PretrainedConfig) -> bool:
    """Whether rotary frequencies depend on the length of a text."""
    return bool(_dynamic_ropes(config))


def _dynamic_ropes(config: PretrainedConfig) -> list[dict[str, Any]]:
    return [rope for rope in _ropes(config) if rope.get("rope_type") in ("longrope", "dynamic")]


def _ropes(config: PretrainedConfig) -> list[dict[str, Any]]:
    """The parameters of rotary embeddings: of all layers, or of each layer type."""
    rope = getattr(config, "rope_parameters", None) or {}
    return [each for each in (rope, *rope.values()) if isinstance(each, dict)]


def beyond_rounding(logits: Tensor, expected: Tensor) -> str | None:
    """How far two calls differ that should give the same logits, for messages; None: by no more than rounding."""
    difference, scale = (logits - expected).abs().max(), expected.std()
    if difference <= 0.1 * scale:  # NaN is not
        return None
    return f"difference {difference:.2g} at a standard deviation of {scale:.2g}"
