"""Training Medusa heads, an MLP speculator and a draft model, with the target's distribution as the label.

Medusa: Cai et al., arXiv 2401.10774. MLP speculator: Wertheimer et al., arXiv 2404.19124. Draft model: distillation (Hinton et
al., arXiv 1503.02531; for drafting, Zhou et al., arXiv 2310.08461) into a copy of some of the target's layers.
"""

import copy
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..config import check_int
from ..decoder_layers import DecoderLayers
from ..drafters.medusa import MedusaDrafter
from ..drafters.medusa_model import MedusaHeads
from ..drafters.mlp import MlpSpeculator, MlpSpeculatorDrafter
from .batches import Batch
from .losses import draft_loss
from .options import check_loss
from .target_head import TargetHead, weight_of

STEP_DECAY = 0.9  # weight of a draft against the one before it
MAX_CHAINS = 1024  # of a batch, evenly spread: rows of the whole vocabulary are large
_PER_LAYER = ("layer_types", "mlp_layer_types", "no_rope_layers")  # lists in a config, with an entry for each layer
# How many layers come before the first with experts.
_FIRST_DENSE = ("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index")
_DENSE = "mlp_only_layers"  # a list of the layers that have no experts


class HeadTraining(nn.Module, ABC):
    """What the three have in common: labels from the target's last hidden states, and the loss.

    A chain starts at a position j of the text, from prompt_length - 2 on; its draft s (from 0) is of the token at j + 2 + s. The
    label of that is what the target says from its hidden state at j + 1 + s.

    Args:
        target: not changed.
        num_steps: drafts that a chain is trained on.
        loss: one of LOSSES.

    Raises:
        ValueError: for another loss, or fewer than 1 draft.
    """

    def __init__(self, target: PreTrainedModel, num_steps: int, loss: str) -> None:
        super().__init__()
        check_loss(loss)
        check_int("num_steps", num_steps, 1)
        self.target_head = TargetHead.of(target)
        self.num_steps, self.loss = num_steps, loss

    def forward(self, batch: Batch) -> tuple[Tensor, list[Tensor]]:
        """The loss and, for each draft, [2] int64: chains whose earlier drafts were right, and those where it is right too."""
        rows, starts = self._chains(batch)
        final, loss = self.final(batch), torch.zeros((), device=batch.tokens.device)
        right = torch.ones_like(rows, dtype=torch.bool)
        outcomes: list[Tensor] = []
        for step, logits in enumerate(self.drafts(batch, rows, starts)):
            at = starts + 1 + step
            there = at < batch.lengths[rows]  # a text's last draft has no label any more
            if not bool(there.any()):
                break
            with torch.no_grad():
                wanted = self.target_head(final[rows[there], at[there]])
            found = logits[there].float()
            loss = loss + STEP_DECAY**step * draft_loss(self.loss, wanted.softmax(-1), found).mean()
            before = right & there
            right = torch.zeros_like(right)
            right[there] = before[there] & (found.argmax(-1) == wanted.argmax(-1))
            outcomes.append(torch.stack([before.sum(), right.sum()]))
        return loss, outcomes

    @abstractmethod
    def drafts(self, batch: Batch, rows: Tensor, starts: Tensor) -> Iterator[Tensor]:
        """Logits [M, V] for draft after draft of the M chains; those whose label lies behind the text may be anything."""

    @abstractmethod
    def save(self, folder: Path) -> None:
        """Write a checkpoint that `engine.load(drafter=folder)` reads, in bfloat16."""

    def final(self, batch: Batch) -> Tensor:
        """What the target's head reads: [B, T, H]."""
        return batch.hidden[..., -self.target_head.weight.shape[1] :]

    def _chains(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Rows and start positions of chains, [M] int64 each."""
        place = torch.arange(batch.tokens.shape[1], device=batch.tokens.device)
        good = (place >= batch.prompt_lengths[:, None] - 2) & (place + 1 < batch.lengths[:, None])
        rows, starts = good.nonzero(as_tuple=True)
        if len(rows) > MAX_CHAINS:
            some = torch.linspace(0, len(rows) - 1, MAX_CHAINS, device=rows.device).long()
            rows, starts = rows[some], starts[some]
        return rows, starts


class MedusaTraining(HeadTraining):
    """Medusa heads that use the target's output matrix.

    Args:
        num_steps: heads.
        loss: one of LOSSES.
    """

    def __init__(self, target: PreTrainedModel, num_steps: int = 4, loss: str = "kl") -> None:
        super().__init__(target, num_steps, loss)
        weight = self.target_head.weight
        self.head = MedusaHeads(weight.shape[1], None, num_steps, output="target").float()
        with torch.device("meta"):  # its own weights are not wanted
            self._output = nn.Linear(weight.shape[1], weight.shape[0], bias=self.target_head.bias is not None)
        self._output.weight = nn.Parameter(weight, requires_grad=False)
        if self.target_head.bias is not None:
            self._output.bias = nn.Parameter(self.target_head.bias, requires_grad=False)
        self.head.borrow(self._output)

    def drafts(self, batch: Batch, rows: Tensor, starts: Tensor) -> Iterator[Tensor]:
        hidden = self.final(batch)[rows, starts].float()
        yield from self.head(hidden).unbind(dim=-2)

    def save(self, folder: Path) -> None:
        """As the Medusa repository does."""
        MedusaDrafter(copy.deepcopy(self.head).to(torch.bfloat16)).save(folder)


class MlpTraining(HeadTraining):
    """An MLP speculator with tied weights, whose embeddings and output matrix start as the target's.

    Args:
        num_steps: the longest draft.
        loss: one of LOSSES.

    Raises:
        ValueError: for a target whose embeddings have another size than its hidden states.
    """

    def __init__(self, target: PreTrainedModel, num_steps: int = 4, loss: str = "kl") -> None:
        super().__init__(target, num_steps, loss)
        vocab_size, hidden_size = self.target_head.weight.shape
        self.head = MlpSpeculator(hidden_size, vocab_size, num_steps, tie_weights=True, scale_input=True).float()
        embeddings = weight_of(target.get_input_embeddings())
        with torch.no_grad():
            weight_of(self.head.emb[0]).copy_(embeddings[:vocab_size])
            weight_of(self.head.head[0]).copy_(self.target_head.weight)

    def drafts(self, batch: Batch, rows: Tensor, starts: Tensor) -> Iterator[Tensor]:
        state = self.head.first_state(self.final(batch)[rows, starts].float())
        last = batch.tokens.shape[1] - 1
        for step in range(self.num_steps):
            state, logits = self.head(step, state, batch.tokens[rows, (starts + 1 + step).clamp(max=last)])
            yield logits

    def save(self, folder: Path) -> None:
        """As a checkpoint of model_type "mlp_speculator"."""
        MlpSpeculatorDrafter(copy.deepcopy(self.head).to(torch.bfloat16)).save(folder)


class DraftModelTraining(HeadTraining):
    """A copy of the target with some of its layers, evenly spread; embeddings and head stay as they are.

    A draft model sees the text alone, so one draft of a chain is as good as any other, and one is looked at.

    Args:
        num_layers: kept, in [1, the target's].
        loss: one of LOSSES.

    Raises:
        ValueError: for another number of layers, or for a target that cannot do with fewer.
    """

    def __init__(self, target: PreTrainedModel, num_layers: int = 4, loss: str = "kl") -> None:
        super().__init__(target, num_steps=1, loss=loss)
        config, kept = check_num_layers(target, num_layers)
        self.head: Any = type(target)(config).float()
        theirs, prefix = target.state_dict(), DecoderLayers(target).prefix
        self.head.load_state_dict({name: theirs[_of_layer(name, prefix, kept)] for name in self.head.state_dict()})
        for module in (self.head.get_input_embeddings(), self.head.get_output_embeddings()):
            module.requires_grad_(False)
        self.head.eval()  # see `train`

    def train(self, mode: bool = True) -> Self:
        """Dropout stays off: what a step does must depend on the batch alone."""
        super().train(mode)
        self.head.eval()
        return self

    def drafts(self, batch: Batch, rows: Tensor, starts: Tensor) -> Iterator[Tensor]:
        mask = torch.arange(batch.tokens.shape[1], device=batch.tokens.device) < batch.lengths[:, None]
        hidden = self.head.base_model(input_ids=batch.tokens, attention_mask=mask.long(), use_cache=False)[0]
        logits = self.head.get_output_embeddings()(hidden[rows, starts + 1])
        yield self.target_head.finish(logits)

    def save(self, folder: Path) -> None:
        """As a checkpoint of transformers."""
        copy.deepcopy(self.head).to(torch.bfloat16).save_pretrained(folder)


def check_num_layers(target: PreTrainedModel, num_layers: int) -> tuple[Any, list[int]]:
    """The config of a copy of the target with so many layers, evenly spread, and which ones these are.

    Raises:
        ValueError: if the target has not so many, or one of them would be of another kind than its config makes it there.
    """
    config = copy.deepcopy(target.config)
    text = config.get_text_config()
    count, prefix = text.num_hidden_layers, DecoderLayers(target).prefix
    check_int("num_layers", num_layers, 1, count)
    kept = [round(i * (count - 1) / max(num_layers - 1, 1)) for i in range(num_layers)]
    for name in _PER_LAYER:
        if getattr(text, name, None):
            setattr(text, name, [getattr(text, name)[i] for i in kept])
    for name in _FIRST_DENSE:
        if isinstance(first := getattr(text, name, None), int):
            setattr(text, name, sum(layer < first for layer in kept))
    if dense := getattr(text, _DENSE, None):
        setattr(text, _DENSE, [i for i, layer in enumerate(kept) if layer in dense])
    text.num_hidden_layers = num_layers
    with torch.device("meta"):
        wanted, theirs = (type(target)(each).state_dict() for each in (config, target.config))
    for name, value in wanted.items():
        if (found := theirs.get(_of_layer(name, prefix, kept))) is None or found.shape != value.shape:
            raise ValueError(
                f"method draft-model needs a target whose layers are alike, or which says how they differ in a way that is known "
                f"here; with num_layers = {num_layers} of {type(target).__name__}'s {count}, {name} would not be a copy"
            )
    return config, kept


def _of_layer(name: str, prefix: str, kept: list[int]) -> str:
    """The target's name of a tensor: layer i here is layer kept[i] there."""
    if not name.startswith(prefix):
        return name
    place, _, rest = name.removeprefix(prefix).partition(".")
    return f"{prefix}{kept[int(place)]}.{rest}"
