"""What others may do to a live model between two calls of its engine."""

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn
from torch.nn.modules import module as every_module

from .errors import EngineError
from .graphs import Work
from .model import RaggedModel
from .model_support import compiled_part, compiled_reason, hooks_of_others, vocab_size

_OF_ADAPTERS = ("_disable_adapters", "_active_adapter", "merged_adapters", "scaling")  # attributes of a layer of peft


def make_ready(ragged: RaggedModel, role: str) -> None:
    """Out of training mode, where the model or a module that has been put in since is in it.

    Args:
        ragged: the target, or a model that drafts.
        role: "target" or "drafter", for messages.

    Raises:
        EngineError: if the model has been moved, compiled or given another vocabulary since it was loaded.
    """
    model = ragged.model
    # K/V, packed weights and drafters are as it was.
    if (model.dtype, model.device) != (ragged.dtype, ragged.device):
        raise EngineError(
            f"the {role} must stay in {ragged.dtype} on {ragged.device}, as when this engine was loaded, and is now in "
            f"{model.dtype} on {model.device}: load it again"
        )
    if (size := vocab_size(model)) != ragged.vocab_size:
        raise EngineError(
            f"the {role} must keep its vocabulary of {ragged.vocab_size}, as when this engine was loaded, and now has one of "
            f"{size}: load it again"
        )
    if (part := compiled_part(model)) is not None:
        raise EngineError(compiled_reason(f"the {role}", part))
    if any(module.training for module in model.modules()):
        model.eval()


def work_of(models: Iterable[nn.Module]) -> Work:
    """That of these models: modules, parameters and buffers and where these lie, adapters, and hooks, those of all modules too.

    Values do not count, as a graph reads them where they lie; nor do transformers' own hooks, which its first calls add.
    """
    marks: list[Any] = [*every_module._global_forward_pre_hooks, *every_module._global_forward_hooks]
    objects: list[Any] = []
    for module in (module for model in models for module in model.modules()):
        members = vars(module)
        tensors = [each for each in (*module._parameters.values(), *module._buffers.values()) if each is not None]
        objects += [module, *tensors]
        marks += map(id, (module, *tensors))
        marks += map(_address, tensors)  # another behind `parameter.data = ...`, or when the model has been elsewhere
        if "forward" in members:
            marks.append(members["forward"])
        marks += hooks_of_others(module)
        if "_disable_adapters" in members:
            marks.append(repr([members.get(name) for name in _OF_ADAPTERS]))
    return Work(marks, objects)


def _address(tensor: Tensor) -> int:
    """Where its data lies; 0 where that cannot be told, as of tensors that consist of others."""
    try:
        return int(getattr(tensor, "_local_tensor", tensor).data_ptr())  # a rank's slice
    except RuntimeError:
        return 0
