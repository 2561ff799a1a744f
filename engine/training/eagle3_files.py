"""An EAGLE-3 head as a checkpoint in the speculators format.

Others that read the format (the speculators package 0.9, vLLM) load a head with three hidden states, taken in ascending order
between the target's layers, and with its output matrix in the file. That is what is trained by default; `for_this_engine_alone`
tells others apart, and `last_state_normed`, a key of our own, those that read the target after its last norm.
`embed_tokens.weight` is never in the file: everyone takes it from the target. SGLang does not read this format but the EAGLE
repository's, with `midlayer.` for `layers.0.` and the layer's sizes beside the other keys of the config.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..drafters.head_files import write_head
from ..hub import split_revision
from .eagle3 import Eagle3Training

# Hidden states that others fuse: `fc` in vLLM's and SGLang's llama_eagle3.py has 3 * hidden_size columns.
NUM_LAYERS = 3
_KEPT = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "head_dim", "hidden_act", "max_position_embeddings", "rms_norm_eps", "rope_parameters", "attention_bias", "mlp_bias",
)  # fmt: skip


def save_eagle3(training: Eagle3Training, folder: Path, target: str, architecture: str) -> None:
    """Write config.json and model.safetensors, each under another name first.

    With a frozen head, `lm_head.weight` is left out: it is the target's rows of the ids in `d2t`, where `EagleDrafter` takes
    it from.

    Args:
        target: what it is a drafter for.
        architecture: the target's.

    Raises:
        OSError: if there is no room; a file that was there is still there.
    """
    write_head(folder, config(training, target, architecture), training.tensors(), "model.safetensors")


def for_this_engine_alone(layers: Sequence[int], num_target_layers: int, freeze_head: bool) -> list[str]:
    """Why others do not load such a head; empty: they do."""
    reasons = []
    if len(layers) != NUM_LAYERS:
        reasons.append(f"it reads {len(layers)} hidden states and not {NUM_LAYERS}")
    if list(layers) != sorted(set(layers)):  # vLLM takes hidden states in this order, whatever the config's
        reasons.append(f"it reads hidden states as {list(layers)}, not in ascending order and each once")
    if num_target_layers in layers:
        reasons.append(
            "it reads what the target's head reads, behind the last norm, where others have what is before it"
        )
    if freeze_head:
        reasons.append("its output matrix is the target's and not in the file")
    return reasons


def config(training: Eagle3Training, target: str, architecture: str) -> dict[str, Any]:
    """What config.json holds."""
    own = training.head.config
    layer = {name: getattr(own, name) for name in _KEPT if hasattr(own, name)}
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.9.0",
        "draft_vocab_size": own.draft_vocab_size,
        "norm_before_residual": own.norm_before_residual,
        "norm_before_fc": False,
        "fc_norm": False,
        "norm_output": own.norm_output,
        **({"last_state_normed": True} if own.last_state_normed else {}),
        "target_hidden_size": own.feature_size,
        "eagle_aux_hidden_state_layer_ids": list(training.layers),
        "transformer_layer_config": {"model_type": own.model_type, **layer},
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {
                    "proposal_type": "greedy",
                    "speculative_tokens": training.num_steps,
                    "verifier_accept_k": 1,
                    "accept_tolerance": 0.0,
                }
            ],
            "verifier": {"name_or_path": split_revision(target)[0], "architectures": [architecture]},
        },
        "tie_word_embeddings": False,
    }
