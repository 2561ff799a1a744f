"""What a GGUF file says of a model and transformers' reader leaves out, written into the config that it makes.

Without this Llama 3.1 and 3.2, Gemma 3 from 4B, StarCoder2 and models with a stretched context would load, and give other texts
than they should. Fields have the names of https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""

from typing import Any

import torch
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

# Fields, and the attributes of configs that hold the same, of which a config has at most one.
_SAME = {
    "attention.sliding_window": ("sliding_window",),
    "attn_logit_softcapping": ("attn_logit_softcapping",),
    "final_logit_softcapping": ("final_logit_softcapping",),
    "attention.layer_norm_epsilon": ("layer_norm_eps", "layer_norm_epsilon", "norm_epsilon", "norm_eps"),
}
# Of rope_type "llama3", as Llama 3.1 and 3.2 have them. A file has what they come to: a divisor of each frequency.
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}

# Of yarn, what configs of transformers have no names for, or other meanings.
_USUAL = {"attn_factor": 1.0, "yarn_attn_factor": 1.0, "yarn_ext_factor": 1.0, "yarn_log_multiplier": 0.0}


def complete(model: PreTrainedModel, reader: Any) -> None:
    """Write into a model's config what transformers left out when it read the model from a file.

    Args:
        reader: the file's `gguf.GGUFReader`.

    Raises:
        ValueError: if the file has weights that no part of the model takes, or rotary frequencies that no config describes.
    """
    _check_weights(model, reader)
    architecture = reader.fields["general.architecture"].contents()
    prefix = f"{architecture}."
    fields = {
        name.removeprefix(prefix): reader.fields[name].contents() for name in reader.fields if name.startswith(prefix)
    }
    config = model.config
    for name, attributes in _SAME.items():
        for attribute in attributes:
            if name in fields and hasattr(config, attribute):
                setattr(config, attribute, fields[name])
    rope = getattr(config, "rope_parameters", None) or {}
    rope = rope.get("full_attention", rope)  # Gemma 3's; those of layers with a window stay as they are
    if rope.get("rope_type") == "default":  # else transformers knows the architecture's own
        rope |= _plain(fields, rope, config) | _scaled(fields)
        _read_divisors(reader, config, rope)


def _check_weights(model: PreTrainedModel, reader: Any) -> None:
    """transformers passes over tensors that its model has no place for, such as biases."""
    taken = {tensor.data_ptr(): tensor.numel() for tensor in model.state_dict().values()}
    counted = [tensor for tensor in reader.tensors if not tensor.name.startswith("rope_")]
    if model.config.tie_word_embeddings:
        counted = [tensor for tensor in counted if tensor.name != "output.weight"]  # falcon's, which has it twice
    found = sum(int(tensor.n_elements) for tensor in counted)
    if found > sum(taken.values()):
        raise ValueError(
            f"it has {found} weights, and a {type(model).__name__} takes {sum(taken.values())} of them: others, such as biases, "
            f"would be left out"
        )


def _plain(fields: dict[str, Any], rope: dict[str, Any], config: PretrainedConfig) -> dict[str, Any]:
    """Base of the frequencies, and the part of each head that is rotated where that can be another than the whole."""
    found = {}
    if "rope.freq_base" in fields:
        found["rope_theta"] = fields["rope.freq_base"]
    if "rope.dimension_count" in fields and "partial_rotary_factor" in rope:
        found["partial_rotary_factor"] = fields["rope.dimension_count"] / _head_dim(config)
    return found


def _scaled(fields: dict[str, Any]) -> dict[str, Any]:
    """How positions are stretched."""
    kind, factor = fields.get("rope.scaling.type", "none"), fields.get("rope.scaling.factor", 1.0)
    if "rope.scale_linear" in fields:  # of older files
        kind, factor = "linear", fields["rope.scale_linear"]
    if kind == "none" or (kind != "longrope" and factor in (0.0, 1.0)):  # 0 is none, too
        return {}
    others = [name for name, usual in _USUAL.items() if fields.get(f"rope.scaling.{name}", usual) != usual]
    if kind not in ("linear", "yarn") or others:
        told = "".join(f" with {name} {fields[f'rope.scaling.{name}']}" for name in others)
        raise ValueError(f"it scales positions by {kind!r}{told}, which is not read from GGUF files")
    found = {"rope_type": kind, "factor": factor}
    if kind == "yarn":
        length = fields.get("rope.scaling.original_context_length", fields.get("context_length"))
        found["original_max_position_embeddings"] = length
        for name in ("beta_fast", "beta_slow"):
            if f"rope.scaling.yarn_{name}" in fields:
                found[name] = fields[f"rope.scaling.yarn_{name}"]
    return found


def _read_divisors(reader: Any, config: PretrainedConfig, rope: dict[str, Any]) -> None:
    """Find the parameters of rope_type "llama3" that the divisors of the frequencies come from."""
    tensors = {tensor.name: tensor.data for tensor in reader.tensors}
    if "rope_factors_long.weight" in tensors:
        raise ValueError("it has rotary frequencies for short and for long texts, which are not read from GGUF files")
    divisors = torch.tensor(tensors.get("rope_freqs.weight", [1.0]), dtype=torch.float64)
    if bool((divisors == 1).all()):
        return
    size = 2 * len(divisors)
    frequencies = rope["rope_theta"] ** (-torch.arange(0, size, 2, dtype=torch.float64) / size) / divisors
    if rope is config.rope_parameters and rope["rope_type"] == "default":
        rope |= {"rope_type": "llama3", "factor": float(divisors.max()), **_LLAMA3}
        found, _ = ROPE_INIT_FUNCTIONS["llama3"](config)
        if found.shape == frequencies.shape and torch.allclose(found.double(), frequencies, rtol=1e-4, atol=0.0):
            return
    raise ValueError(
        "its rotary frequencies are divided by other numbers (rope_freqs.weight) than those of Llama 3.1 and 3.2"
    )


def _head_dim(config: PretrainedConfig) -> int:
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)
