"""Checkpoints of EAGLE heads: the speculators format (EAGLE-3), and the EAGLE repository's (EAGLE-1, 2 and 3)."""

from typing import Any

import torch
from transformers import AutoConfig

from .eagle_model import EagleModel, eagle_config
from .head_files import HeadFiles, fill


def build(files: HeadFiles) -> tuple[EagleModel, tuple[int, ...] | None]:
    """The network in a folder, and the hidden states that it reads, if the folder says so.

    Raises:
        ValueError: for tensors that are missing, extra or of another shape than the config says; for a config or a
            vocabulary that cannot be.
    """
    tensors = {name.replace("midlayer.", "layers.0."): value for name, value in files.tensors.items()}
    embeddings = tensors.pop("embed_tokens.weight", None)
    config = {**_dictionary(files, "eagle_config"), **files.config}  # NVIDIA's heads have theirs one level down
    eagle3 = config.get("speculators_model_type") == "eagle3" or any(
        name in tensors for name in ("layers.0.hidden_norm.weight", "norm.weight", "d2t")
    )
    layer_config = _layer_config(files)
    if eagle3 and "t2d" in tensors:
        layer_config.vocab_size = len(tensors["t2d"])
    elif "target_vocab_size" in config:
        layer_config.vocab_size = files.number("target_vocab_size")
    vocab_size = layer_config.vocab_size
    layers = _layers(files, config) if eagle3 else None
    own = eagle_config(
        layer_config,
        eagle=3 if eagle3 else 1,
        feature_size=files.number("target_hidden_size")
        if config.get("target_hidden_size")
        else layer_config.hidden_size,
        num_features=len(layers) if layers else 3,
        draft_vocab_size=files.number("draft_vocab_size", vocab_size) if eagle3 else vocab_size,
        fc_bias="fc.bias" in tensors,
        **{
            name: bool(config.get(name))
            for name in ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
        },
    )
    if own.draft_vocab_size == vocab_size and not tensors.get("d2t", torch.zeros(1)).any():
        tensors = {name: value for name, value in tensors.items() if name not in ("d2t", "t2d")}  # they say nothing
    model = EagleModel(own)
    missing = fill(model, tensors, files.folder, optional=("lm_head.weight", "t2d"))
    model.head_is_targets = "lm_head.weight" in missing
    ids = model.target_ids
    if ids.min() < 0 or ids.max() >= vocab_size or len(ids.unique()) < len(ids):
        raise ValueError(
            f"{files.folder}: i + d2t[i] must be distinct ids in [0, {vocab_size}), got {ids.tolist()[:8]} ..."
        )
    if embeddings is not None:
        expected = [own.vocab_size, own.hidden_size]
        if list(embeddings.shape) != expected:
            raise ValueError(f"{files.folder}: embed_tokens.weight must be {expected}, got {list(embeddings.shape)}")
        model.own_embeddings = torch.nn.Embedding.from_pretrained(embeddings)
    return model, layers


def _dictionary(files: HeadFiles, name: str) -> dict[str, Any]:
    """A part of the config; empty where there is none."""
    value = files.config.get(name) or {}
    if not isinstance(value, dict):
        raise ValueError(f"{files.folder / 'config.json'} must hold an object {name!r}, got {value!r}")
    return value


def _layer_config(files: HeadFiles) -> Any:
    """Of the decoder layers."""
    layer = dict(_dictionary(files, "transformer_layer_config") or files.config)
    kind = layer.pop("model_type", "llama")
    if kind not in ("llama", "qwen3"):
        raise ValueError(f"{files.folder} must hold a head with layers of llama or qwen3, got {kind!r}")
    try:
        return AutoConfig.for_model(kind, **{**layer, "num_hidden_layers": layer.get("num_hidden_layers", 1)})
    except Exception as error:  # of many kinds, for values that cannot be
        raise ValueError(f"{files.folder / 'config.json'} must describe layers of {kind}: {error}") from error


def _layers(files: HeadFiles, config: dict[str, Any]) -> tuple[int, ...] | None:
    """The hidden states that the config names."""
    name = "eagle_aux_hidden_state_layer_ids"
    layers = config.get(name) or _dictionary(files, "eagle_config").get(name)
    if not layers:
        return None
    if not isinstance(layers, list) or not all(type(layer) is int for layer in layers):
        raise ValueError(f"{files.folder / 'config.json'} must hold a list of layers {name!r}, got {layers!r}")
    return tuple(layers)
