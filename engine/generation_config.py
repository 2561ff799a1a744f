"""What a checkpoint's generation config asks for, beside what `SamplingParams` is for."""

import logging
from collections.abc import Iterable
from numbers import Integral
from reprlib import repr as shortened
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from .config import check_repetition_penalty

logger = logging.getLogger(__name__)

# What `generate` of transformers applies and this engine does not, each with the value that leaves it off.
NOT_APPLIED: dict[str, Any] = {
    "num_beams": 1,
    "guidance_scale": 1,
    "sequence_bias": None,
    "encoder_repetition_penalty": 1,
    "no_repeat_ngram_size": 0,
    "encoder_no_repeat_ngram_size": 0,
    "bad_words_ids": None,
    "min_length": 0,
    "min_new_tokens": 0,
    "forced_bos_token_id": None,
    "forced_eos_token_id": None,
    "exponential_decay_length_penalty": None,
    "suppress_tokens": None,
    "begin_suppress_tokens": None,
    "watermarking_config": None,
    "token_healing": False,
    "stop_strings": None,
    "max_time": None,
    "typical_p": 1,
    "top_h": None,
    "epsilon_cutoff": 0,
    "eta_cutoff": 0,
}


def eos_token_ids(model: PreTrainedModel, tokenizer: Any) -> frozenset[int]:
    """Tokens that end a text; some models have several.

    What the generation config says counts, also None, as in `transformers`, which makes one from the model's config where a
    checkpoint has none. The tokenizer is asked where neither config knows of any.

    Raises:
        ValueError: if it is neither an int nor ints.
    """
    generation = getattr(model, "generation_config", None)
    ids = getattr(model.config if generation is None else generation, "eos_token_id", None)
    if ids is None and getattr(model.config, "eos_token_id", None) is None:
        ids = getattr(tokenizer, "eos_token_id", None)
    if isinstance(ids, Tensor):
        ids = ids.flatten().tolist()
    ids = () if ids is None else ids if isinstance(ids, Iterable) else [ids]
    if not all(isinstance(token, Integral) for token in ids):
        raise ValueError(
            f"eos_token_id in the target's generation_config.json must be an int or a list of ints, got {ids!r}"
        )
    return frozenset(map(int, ids))


def warn_of_not_applied(model: PreTrainedModel) -> None:
    """Name the settings of the target's generation config that its text will not follow."""
    generation = getattr(model, "generation_config", None)
    values = {name: getattr(generation, name, None) for name in NOT_APPLIED}
    found = [
        f"{name}={shortened(value)}" for name, value in values.items() if value not in (None, [], NOT_APPLIED[name])
    ]
    if found:
        logger.warning(
            "the target's generation_config.json has settings that generate of transformers applies and this engine does not "
            "(those that have a logits processor can be given as SamplingParams.logits_processor): %s",
            ", ".join(found),
        )


def repetition_penalty(model: PreTrainedModel) -> float:
    """The one that a request has which does not name another; 1: off.

    Raises:
        ValueError: if it is no such number.
    """
    value = getattr(getattr(model, "generation_config", None), "repetition_penalty", None)
    name = "repetition_penalty in the target's generation_config.json"
    return 1.0 if value is None else check_repetition_penalty(name, value)
