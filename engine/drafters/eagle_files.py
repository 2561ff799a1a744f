"""Checkpoints of EAGLE heads, 1, 2 and 3: the speculators format, and the EAGLE repository's."""

import logging
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig

from .eagle_model import EagleModel, eagle_config
from .head_files import HeadFiles, fill

logger = logging.getLogger(__name__)

_LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
_OUTPUT_IDS = "aux_hidden_states_layer_ids"  # AngelSlim's: outputs of layers, counted from 0
# In the EAGLE repository's EAGLE-3, and in EAGLE-1 of the speculators format.
_OTHER_PREFIXES = {"midlayer.": "layers.0.", "transformer.": "layers.0.", "fusion_fc.": "fc."}


def build(files: HeadFiles) -> tuple[EagleModel, tuple[int, ...] | None]:
    """The network in a folder, and the hidden states that it reads, if the folder says so.

    Raises:
        ValueError: for tensors that are missing, extra or of another shape than the config says; for a config or a
            vocabulary that cannot be.
    """
    nested = _dictionary(files, "eagle_config")  # NVIDIA's and SpecForge's heads have theirs one level down
    layers = _layers(files.config, nested, files.config_file)
    files = replace(files, config={**nested, **files.config})
    config, tensors = files.config, _by_usual_names(files.tensors)
    embeddings = tensors.pop("embed_tokens.weight", None)
    eagle3 = _is_eagle3(config, tensors)
    if config.get("speculators_model_type") == "eagle3" and "norm_before_residual" not in config:
        logger.info(
            "%s does not say norm_before_residual: taken for false, as speculators does; vLLM takes it for true",
            files.folder,
        )
    if config.get("layernorms"):
        raise ValueError(f"{files.config_file} must have layernorms off: an EAGLE-1 head with them is not known")
    if not eagle3 and "norm.weight" in tensors:
        raise ValueError(f"{files.folder} must hold no norm.weight: an EAGLE-1 head with norms is not known")
    if not eagle3:
        tensors.pop("lm_head.weight", None)  # the target's is used
    fuses = eagle3 and config.get("use_aux_hidden_state") is not False
    layers = layers if fuses else None
    own = _head_config(files, tensors, eagle3, fuses, num_layers=len(layers) if layers else 3)
    if own.draft_vocab_size == own.vocab_size and not tensors.get("d2t", torch.zeros(1)).any():
        tensors = {name: value for name, value in tensors.items() if name not in ("d2t", "t2d")}  # they say nothing
    try:
        model = EagleModel(own)
    except Exception as error:  # of many kinds, as for names that transformers does not know
        raise ValueError(
            f"{files.config_file} must describe layers of {own.model_type} that can be made: {error!r}"
        ) from error
    attention: Any = model.layers[0].self_attn
    if 2 * len(model.rotary_emb.inv_freq) != attention.head_dim:
        raise ValueError(
            f"{files.config_file} must describe rotary embeddings of whole heads of {attention.head_dim}, "
            f"got {own.rope_parameters}"
        )
    missing = fill(model, tensors, files.folder, optional=("lm_head.weight", "t2d"))
    model.head_is_targets = "lm_head.weight" in missing
    _check_draft_vocabulary(model.target_ids, own.vocab_size, files.folder)
    if embeddings is not None:
        expected = [own.vocab_size, own.hidden_size]
        if list(embeddings.shape) != expected:
            raise ValueError(f"{files.folder}: embed_tokens.weight must be {expected}, got {list(embeddings.shape)}")
        model.own_embeddings = torch.nn.Embedding.from_pretrained(embeddings)
    return model, layers


def _is_eagle3(config: dict[str, Any], tensors: dict[str, Tensor]) -> bool:
    """By the config if it says so, or else by tensors that an EAGLE-1 head has not."""
    if "speculators_model_type" in config:
        return bool(config["speculators_model_type"] == "eagle3")
    return "layers.0.hidden_norm.weight" in tensors or "d2t" in tensors or _first_layer_reads_two(tensors)


def _check_draft_vocabulary(target_ids: Tensor, vocab_size: int, folder: Path) -> None:
    if target_ids.min() < 0 or target_ids.max() >= vocab_size or len(target_ids.unique()) < len(target_ids):
        raise ValueError(
            f"{folder}: i + d2t[i] must be distinct ids in [0, {vocab_size}), got {target_ids.tolist()[:8]} ..."
        )


def _by_usual_names(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Those of EAGLE-1 and 3 without a prefix that some have; a lone layer has other names. Frequencies are worked out."""
    usual: dict[str, Tensor] = {}
    for name, value in tensors.items():
        name = name.removeprefix("model.")
        for other, prefix in _OTHER_PREFIXES.items():
            if name.startswith(other):
                name = prefix + name.removeprefix(other)
        if not name.endswith("rotary_emb.inv_freq"):
            usual[name] = value
    return usual


def _first_layer_reads_two(tensors: dict[str, Tensor]) -> bool:
    """Vectors of the hidden size, as in EAGLE-3: an embedding and a state."""
    query, output = (tensors.get(f"layers.0.self_attn.{name}_proj.weight") for name in "qo")
    return query is not None and output is not None and query.shape[-1] == 2 * len(output)


def _dictionary(files: HeadFiles, name: str) -> dict[str, Any]:
    """A part of the config; empty where there is none."""
    value = files.config.get(name) or {}
    if not isinstance(value, dict):
        raise ValueError(f"{files.config_file} must hold an object {name!r}, got {value!r}")
    return value


def _head_config(files: HeadFiles, tensors: dict[str, Tensor], eagle3: bool, fuses: bool, num_layers: int) -> Any:
    """What `EagleModel` is made from.

    Args:
        fuses: the head has an `fc` for several hidden states of the target.
        num_layers: how many these are.
    """
    config, layer_config = files.config, _layer_config(files, tensors)
    if eagle3 and "t2d" in tensors:
        layer_config.vocab_size = tensors["t2d"].numel()
    elif "target_vocab_size" in config:
        layer_config.vocab_size = files.number("target_vocab_size")
    vocab_size = layer_config.vocab_size
    drafted = tensors["d2t"].numel() if "d2t" in tensors else vocab_size
    return eagle_config(
        layer_config,
        eagle=3 if eagle3 else 1,
        feature_size=files.number("target_hidden_size", layer_config.hidden_size),
        num_features=num_layers if fuses else 1,
        draft_vocab_size=files.number("draft_vocab_size", drafted) if eagle3 else vocab_size,
        fuses=fuses,
        fc_bias="fc.bias" in tensors,
        output_bias="layers.0.self_attn.o_proj.bias" in tensors,
        last_state_normed=not fuses or bool(config.get("last_state_normed")),
        **{
            name: bool(config.get(name))
            for name in ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
        },
    )


def _layer_config(files: HeadFiles, tensors: dict[str, Tensor]) -> Any:
    """Of the decoder layers. They are a llama's, whatever target `model_type` names, or those of qwen3 with their norms."""
    layer = dict(_dictionary(files, "transformer_layer_config") or files.config)
    if layer.pop("model_type", None) == "llama4_text" and "intermediate_size_mlp" in layer:
        layer["intermediate_size"] = layer["intermediate_size_mlp"]  # that of layers without experts
    kind = "qwen3" if "layers.0.self_attn.q_norm.weight" in tensors else "llama"
    layer["attention_bias"] = "layers.0.self_attn.q_proj.bias" in tensors
    layer["mlp_bias"] = "layers.0.mlp.gate_proj.bias" in tensors
    for key in ("rope_scaling", "rope_parameters"):
        rope = layer.get(key)
        if isinstance(rope, dict) and "mrope" in (rope.get("type"), rope.get("rope_type")):
            # Of text, the usual positions.
            layer[key] = {**rope, "type": "default", "rope_type": "default"}
    if "speculators_model_type" not in files.config:
        # It may be the target's config, which tells of the target's layers.
        numbers = [int(found[1]) for name in tensors if (found := re.match(r"layers\.(\d+)\.", name))]
        told, layer["num_hidden_layers"] = layer.get("num_hidden_layers", 1), 1 + max(numbers, default=0)
        if told != layer["num_hidden_layers"]:
            logger.info(
                "%s tells of %s layers and holds %s, which are used", files.folder, told, layer["num_hidden_layers"]
            )
        if isinstance(types := layer.get("layer_types"), list) and len(types) != layer["num_hidden_layers"]:
            del layer["layer_types"]
    try:
        return AutoConfig.for_model(kind, **{**layer, "num_hidden_layers": layer.get("num_hidden_layers", 1)})
    except Exception as error:  # of many kinds, for values that cannot be
        raise ValueError(f"{files.config_file} must describe layers of {kind}: {error}") from error


def _layers(config: dict[str, Any], nested: dict[str, Any], file: Path) -> tuple[int, ...] | None:
    """The hidden states that the config names, in the counting of `HiddenStates`.

    In the nested part they are outputs of layers, counted from 0, if the first is 1 (SpecForge and ModelOpt write it so, and
    SGLang reads it so; sgl-project/sglang#25454), and inputs otherwise, as at the top level.
    """
    for name, given in ((_LAYER_IDS, config), (_LAYER_IDS, nested), (_OUTPUT_IDS, config)):
        if layers := given.get(name):
            break
    else:
        return None
    if not isinstance(layers, list) or not all(type(layer) is int for layer in layers):
        raise ValueError(f"{file} must hold a list of layers {name!r}, got {layers!r}")
    outputs = name == _OUTPUT_IDS or (given is nested and layers[0] == 1)
    return tuple(layer + outputs for layer in layers)
