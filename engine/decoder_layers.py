"""The decoder layers of a transformers model, found where its class keeps them."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from .errors import UnsupportedModelError
from .model_support import beyond_rounding


class DecoderLayers:
    """The decoder layers of a model, of which some can be left out for a while.

    The model's own forward runs: it is given a shorter list. Each layer knows its place in the cache by itself; what a model
    looks up by a layer's place in the list is in the config, which is shortened likewise.

    Args:
        model: any decoder that keeps its layers in one `nn.ModuleList`.

    Attributes:
        parent: the module that holds the list; in a model that takes images too, of its text side.
        layers: the list.

    Raises:
        UnsupportedModelError: if there is no such list.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._model, self._text_config = model, model.config.get_text_config()
        self.parent, self._name = _find(model, self._text_config)
        self.layers: nn.ModuleList = getattr(self.parent, self._name)
        self._config = getattr(self.parent, "config", self._text_config)
        names = ("num_hidden_layers", "layer_types")
        self._own = {name: value for name in names if (value := getattr(self._config, name, None)) is not None}

    def __len__(self) -> int:
        return len(self.layers)

    @property
    def prefix(self) -> str:
        """What the names of the layers' tensors begin with in the model's `state_dict`, before a layer's number."""
        names: Iterator[str] = (name for name, module in self._model.named_modules() if module is self.layers)
        return f"{next(names)}."

    @contextmanager
    def only(self, layers: Sequence[int]) -> Iterator[None]:
        """While this is entered, the model has these layers alone."""
        changes: dict[str, Any] = {"num_hidden_layers": len(layers)}
        if (types := self._own.get("layer_types")) is not None:
            changes["layer_types"] = [types[layer] for layer in layers]
        try:
            setattr(self.parent, self._name, nn.ModuleList([self.layers[layer] for layer in layers]))
            for name, value in changes.items():
                setattr(self._config, name, value)
            yield
        finally:
            self.restore()

    def restore(self) -> None:
        """Give the model all its layers again. An interrupt can end this half-way: call it again then."""
        setattr(self.parent, self._name, self.layers)
        for name, value in self._own.items():
            setattr(self._config, name, value)

    @torch.inference_mode()
    def probe(self, layers: Sequence[int]) -> None:
        """Hold a plain call with these layers against one in which the others run and hand on what they were given.

        Raises:
            UnsupportedModelError: if they differ by more than rounding.
        """
        kind = self._text_config.model_type
        tokens = torch.arange(6, device=self._model.device)[None] % self._text_config.vocab_size
        with ExitStack() as hooks:
            for layer in set(range(len(self))) - set(layers):
                hooks.enter_context(self.layers[layer].register_forward_hook(_hand_on, with_kwargs=True))
            expected = self._model(input_ids=tokens, use_cache=False).logits.float()
        try:
            with self.only(layers):
                logits = self._model(input_ids=tokens, use_cache=False).logits.float()
        except (MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            raise UnsupportedModelError(f"layers of type {kind!r} cannot be left out: {error}") from error
        if (difference := beyond_rounding(logits, expected)) is not None:
            raise UnsupportedModelError(
                f"layers of type {kind!r} cannot be left out: those after them depend on more than the hidden states "
                f"({difference})"
            )


def _find(model: PreTrainedModel, config: Any) -> tuple[nn.Module, str]:
    """The module that holds the list of decoder layers, and the list's name there."""
    for parent in model.base_model.modules():  # outer ones first
        for name, child in parent.named_children():
            if isinstance(child, nn.ModuleList) and len(child) == config.num_hidden_layers:
                places = [{getattr(part, "layer_idx", None) for part in layer.modules()} - {None} for layer in child]
                if places == [{layer} for layer in range(len(child))]:
                    return parent, name
    raise UnsupportedModelError(
        f"target of type {config.model_type!r} has no list of {config.num_hidden_layers} decoder layers that know their "
        f"place in the cache (layer_idx)"
    )


def _hand_on(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
    """A forward hook: the hidden states that a layer was given, in place of those that it returns."""
    given = args[0] if args else kwargs["hidden_states"]
    return (given, *output[1:]) if isinstance(output, tuple) else given


@contextmanager
def outputs_of(layer: nn.Module | None) -> Iterator[list[Tensor]]:
    """While this is entered, the hidden states that a layer gives are added to the list; None: nothing is."""
    found: list[Tensor] = []
    if layer is None:
        yield found
        return

    def keep(module: nn.Module, args: Any, output: Any) -> None:
        found.append(output[0] if isinstance(output, tuple) else output)

    handle = layer.register_forward_hook(keep)
    try:
        yield found
    finally:
        handle.remove()
