"""The models that all methods share, loaded once for a dtype.

Twice, to be exact: ours as `engine.load` makes them from their names, since it may lay weights out anew, and for everybody
else as transformers loads them, when somebody first asks.
"""

import copy
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel

import engine
from bench.throughput.options import Options
from engine.default_model import find_model
from engine.generation_config import eos_token_ids
from engine.hub import files_of
from engine.pretrained import auto_class
from engine.terminal import loading

TARGET = ""  # the key of the target among the models; draft models go by the locations that the user gave


@dataclass
class SharedModels:
    """A target, its tokenizer and the draft models; all on one device.

    Attributes:
        ours: models as our engine loads them, with their tokenizers.
        context_length: prompt and new tokens together fit in.
        eos_token_ids: where an answer ends; empty where the end of sequence is ignored.
        target_name: as the user gave it.
    """

    ours: dict[str, tuple[PreTrainedModel, Any]]
    context_length: int
    eos_token_ids: frozenset[int]
    ignore_eos: bool
    target_name: str = ""
    _stock: dict[str, PreTrainedModel] = field(default_factory=dict)

    @property
    def target(self) -> PreTrainedModel:
        return self.ours[TARGET][0]

    @property
    def tokenizer(self) -> Any:
        return self.ours[TARGET][1]

    @property
    def device(self) -> torch.device:
        return self.target.device

    @property
    def dtype(self) -> str:
        return str(self.target.dtype).removeprefix("torch.")

    @property
    def vocab_size(self) -> int:
        return int(self.target.config.get_text_config().vocab_size)

    @property
    def pad_token_id(self) -> int:
        """Any id does: padding is masked."""
        pad = getattr(self.tokenizer, "pad_token_id", None)
        return pad if pad is not None else min(self.eos_token_ids, default=0)

    def source(self, name: str = TARGET) -> str:
        """The folder that a model was read from: its own, the cache's for a hub id, or that of a GGUF file's conversion."""
        place = str(self.ours[name][0].name_or_path)
        return place if Path(place).exists() else str(files_of(name or self.target_name, "target"))

    def stock_copy(self, name: str = TARGET) -> PreTrainedModel:
        """A model as transformers loads it, in modules and with a config of its own, sharing the weights with other copies.

        Its generation ends as ours does, and does nothing else that a checkpoint may ask for.
        """
        if name not in self._stock:
            ours = self.ours[name][0]
            model: Any = auto_class(ours.config).from_pretrained(self.source(name), dtype=ours.dtype)
            self._stock[name] = model.to(self.device).eval()
        model = self._stock[name]
        weights = {id(tensor): tensor for tensor in chain(model.parameters(), model.buffers())}
        twin: PreTrainedModel = copy.deepcopy(model, weights)
        eos: Any = sorted(self.eos_token_ids) or None
        twin.generation_config = GenerationConfig(eos_token_id=eos, pad_token_id=self.pad_token_id)
        return twin


def load_models(options: Options, dtype: str) -> SharedModels:
    """Load the target and all draft models.

    Raises:
        ValueError: for a checkpoint that the engine refuses, or without a tokenizer.
        OSError: for an inaccessible hub id.
    """
    target = options.target or find_model()
    main = _load(target, dtype, options.device)
    if main.tokenizer is None:
        raise ValueError(f"target must have a tokenizer, {target} has none")
    ours = {TARGET: (main.target_model, main.tokenizer)}
    for name in options.shared_models:
        draft = _load(name, main.target_model.dtype, str(main.target_model.device))
        ours[name] = (draft.target_model, draft.tokenizer)
    eos = frozenset() if options.ignore_eos else eos_token_ids(main.target_model, main.tokenizer)
    return SharedModels(ours, main.max_length, eos, options.ignore_eos, target_name=str(target))


def _load(source: str, dtype: Any, device: str) -> engine.Engine:
    with loading(source, note=True):
        return engine.load(source, drafter=None, dtype=dtype, device=device, max_batch_size=1)
