"""A language model from a checkpoint by transformers, whole or not at all."""

import os
from pathlib import Path
from typing import Any

from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PretrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from .hub import split_revision


def auto_class(config: PretrainedConfig) -> Any:
    """The class of transformers that loads such a model: another one for many that take images, too."""
    is_causal = config.model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    return AutoModelForCausalLM if is_causal else AutoModelForImageTextToText


def whole_model(location: str | Path, config: PretrainedConfig | None = None, **options: Any) -> PreTrainedModel:
    """As `from_pretrained`, which draws what is missing at random, loads it.

    Args:
        config: the checkpoint's; None: it is a GGUF file.

    Raises:
        ValueError: naming tensors that are missing or of another shape than the config says.
    """
    # Else a thread asks another server to convert *.bin files of the hub, and the process waits for it at its end.
    os.environ.setdefault("DISABLE_SAFETENSORS_CONVERSION", "1")
    loader = AutoModelForCausalLM if config is None else auto_class(config)
    source, revision = split_revision(str(location))
    found: Any = loader.from_pretrained(
        source, revision=revision or "main", output_loading_info=True, trust_remote_code=False, ignore_mismatched_sizes=True,
        **options,
    )  # fmt: skip
    model: PreTrainedModel = found[0]
    if wrong := sorted(found[1]["mismatched_keys"]):
        told = [f"{name} must be {list(wanted)}, got {list(there)}" for name, there, wanted in wrong[:3]]
        raise ValueError("; ".join(told) + ("; ..." if wrong[3:] else ""))
    if missing := sorted(found[1]["missing_keys"]):
        names = ", ".join(missing[:3]) + (", ..." if missing[3:] else "")
        raise ValueError(f"{len(missing)} tensors of a {type(model).__name__} are missing: {names}")
    return model
