"""What a run trains: the hidden states that it takes, the head that it may start from, and the module with its first weights."""

from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from ..drafters.eagle import EagleDrafter
from ..drafters.eagle_model import usual_layers
from ..drafters.named import named
from ..heads import find_head
from ..hub import existing_path
from ..model_support import vocab_size
from .answers import Answer
from .eagle3 import Eagle3Training, check_head_config
from .objectives import DraftModelTraining, MedusaTraining, MlpTraining, check_num_layers
from .options import TrainingOptions


def layers_to_keep(target: PreTrainedModel, options: TrainingOptions) -> tuple[int, ...]:
    """Hidden states that are kept, of which the last are what the head reads; and whether the target suits the method.

    Raises:
        ValueError: naming the option or the method, and what the target has.
    """
    config = target.config.get_text_config()
    count: int = config.num_hidden_layers
    if options.method == "draft-model":
        check_num_layers(target, options.num_layers)
    embeddings: Any = target.get_input_embeddings()
    if options.method in ("eagle3", "mlp") and embeddings.weight.shape[1] != config.hidden_size:
        raise ValueError(
            f"method {options.method} needs a target with embeddings of the size of its hidden states, {config.hidden_size}, "
            f"got {embeddings.weight.shape[1]}"
        )
    if options.method != "eagle3":
        return (count,)
    layers = options.layers
    if max(layers) > count:
        raise ValueError(f"layers must be in [0, {count}], as the target has {count} layers, got {list(layers)}")
    check_head_config(config, len(layers))
    return layers if layers[-1] == count else (*layers, count)


def layers_of_head(options: TrainingOptions, start: EagleDrafter | None, count: int) -> tuple[int, ...]:
    """Those of a target of so many that an EAGLE-3 head is to read: the first head's, those asked for, or the usual ones."""
    if start is None:
        return options.layers or layers_of_new_head(count)
    return start.layers or options.layers or usual_layers(count)


def layers_of_new_head(count: int) -> tuple[int, ...]:
    """The hidden states of a target of so many layers that a new EAGLE-3 head reads, unless told otherwise: three, or all there
    are."""
    if count >= 7:  # with fewer, two are the same one
        return usual_layers(count)
    return tuple(range(count - 3, count) if count >= 3 else range(count + 1))


def head_to_start_from(options: TrainingOptions) -> EagleDrafter:
    """The EAGLE-3 head that the options name.

    Raises:
        ValueError: if it is something else, or does not go with the other options.
        OSError: for an inaccessible hub id.
    """
    name = str(options.start_from)
    if find_head(name) is None:
        existing_path(name, "start_from")
    found = named(name, role="start_from")
    if not isinstance(found, EagleDrafter) or found.model.config.eagle != 3:
        raise ValueError(f"start_from must be an EAGLE-3 head, got {name!r}")
    if options.layers and found.layers and options.layers != found.layers:
        raise ValueError(f"layers must be {list(found.layers)}, those of the head {name}, got {list(options.layers)}")
    if options.freeze_head and not found.model.head_is_targets:
        raise ValueError(f"freeze_head must be False, as the head {name} has an output matrix of its own")
    return found


def objective_of(
    target: PreTrainedModel,
    answers: Sequence[Answer],
    options: TrainingOptions,
    start: EagleDrafter | None,
) -> torch.nn.Module:
    """What is trained, on the target's device. Its first weights depend on the seed alone."""
    made: torch.nn.Module
    torch.default_generator.manual_seed(options.seed)  # torch.manual_seed would seed GPUs as well
    if options.method == "medusa":
        made = MedusaTraining(target, options.num_steps, options.loss)
    elif options.method == "mlp":
        made = MlpTraining(target, options.num_steps, options.loss)
    elif options.method == "draft-model":
        made = DraftModelTraining(target, options.num_layers, options.loss)
    else:
        if start is None or start.model.head_is_targets:
            known = None if start is None else start.model.target_ids
            ids = frequent_tokens(answers, vocab_size(target), options.draft_vocab_size, known)
        else:
            ids = start.model.target_ids
        begin_with = None if start is None else start.model
        made = Eagle3Training(
            target, options.layers, ids, options.num_steps, options.freeze_head, begin_with, options.loss
        )
    return made.to(target.device)


def frequent_tokens(
    answers: Sequence[Answer], num_tokens: int, count: int, known: torch.Tensor | None = None
) -> torch.Tensor:
    """The `count` most frequent of the ids below `num_tokens`, ascending; one in a prompt counts a tenth. [count] int64.

    Args:
        known: ids, [n] int64, that come before others which are as frequent, above all those that there are none of.
    """
    counts = torch.zeros(num_tokens, dtype=torch.float64)
    if known is not None:
        counts[known] = 0.01
    for answer in answers:
        for ids, weight in ((answer.token_ids, 1.0), (answer.prompt_token_ids, 0.1)):
            counts.index_add_(0, torch.tensor(ids), torch.full((len(ids),), weight, dtype=torch.float64))
    # Ties by id: a sort that is not stable may depend on the number of threads.
    return counts.sort(descending=True, stable=True).indices[: min(count, num_tokens)].sort().values
