"""Training Medusa heads, an MLP speculator and a draft model, with the target's distribution as the label.

Medusa: Cai et al., arXiv 2401.10774. MLP speculator: Wertheimer et al., arXiv 2404.19124. Draft model: distillation (Hinton et
al., arXiv 1503.02531; for drafting, Zhou et al., arXiv 2310.08461) into a copy of some of the target's layers.
"""

import copy
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..drafters.medusa import MedusaDrafter, MedusaHeads
from ..drafters.mlp import MlpSpeculator, MlpSpeculatorDrafter
from .batches import Batch

MAX_CHAINS = 1024  # of a batch, evenly spread: rows of the whole vocabulary are large


class HeadTraining(nn.Module):
    """What the three have in common: labels from the target's last hidden states, and the loss.

    Args:
        target: not changed.
        num_steps: drafts that a chain is trained on.
        step_decay: weight of a draft against the one before it.
    """

    def __init__(self, target: PreTrainedModel, num_steps: int, step_decay: float = 0.9) -> None:
        super().__init__()
        self.target_head: Tensor
        self.register_buffer("target_head", weight_of(target.get_output_embeddings()).bfloat16(), persistent=False)
        self.num_steps, self.step_decay = num_steps, step_decay

    def chains(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Rows and start positions of chains, [M] int64 each: all whose last draft still has a label."""
        place = torch.arange(batch.tokens.shape[1], device=batch.tokens.device)
        good = (place >= batch.prompt_lengths[:, None] - 2) & (place + self.num_steps < batch.lengths[:, None])
        rows, starts = good.nonzero(as_tuple=True)
        if len(rows) > MAX_CHAINS:
            some = torch.linspace(0, len(rows) - 1, MAX_CHAINS, device=rows.device).long()
            rows, starts = rows[some], starts[some]
        return rows, starts

    def final(self, batch: Batch) -> Tensor:
        """What the target's head reads: [B, T, H]."""
        return batch.hidden[..., -self.target_head.shape[1] :]

    def compare(self, logits: Tensor, label_hidden: Tensor, right: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Cross entropy of logits [M, V] to the target's distribution, an outcome, and which chains still stand."""
        with torch.no_grad():
            wanted = (label_hidden.to(torch.bfloat16) @ self.target_head.T).float()
            label = wanted.softmax(-1)
        entropy = -(label * logits.float().log_softmax(-1)).sum(-1).mean()
        now = right & (logits.argmax(-1) == wanted.argmax(-1))
        return entropy, torch.stack([right.sum(), now.sum()]), now

    def forward(self, batch: Batch) -> tuple[Tensor, list[Tensor]]:
        """The loss and the outcomes of each draft."""
        rows, starts = self.chains(batch)
        final, loss = self.final(batch), torch.zeros((), device=batch.tokens.device)
        outcomes: list[Tensor] = []
        if not len(rows):
            return loss, outcomes
        right = torch.ones_like(rows, dtype=torch.bool)
        for step, logits in enumerate(self.drafts(batch, rows, starts)):
            entropy, outcome, right = self.compare(logits, final[rows, starts + 1 + step], right)
            loss = loss + self.step_decay**step * entropy
            outcomes.append(outcome)
        return loss, outcomes

    def drafts(self, batch: Batch, rows: Tensor, starts: Tensor) -> Any:
        """Logits [M, V] for draft after draft: those of the tokens at starts + 2, starts + 3, ..."""
        raise NotImplementedError


class MedusaTraining(HeadTraining):
    """Medusa heads that use the target's output matrix."""

    def __init__(self, target: PreTrainedModel, num_steps: int = 4, num_blocks: int = 1) -> None:
        super().__init__(target, num_steps)
        self.head = MedusaHeads(self.target_head.shape[1], None, num_steps, num_blocks, output="target").float()
        self._output = nn.Linear(1, 1, bias=False)
        self._output.weight = nn.Parameter(self.target_head.float(), requires_grad=False)
        self.head.borrow(self._output)

    def drafts(self, batch: Batch, rows: Tensor, starts: Tensor) -> Any:
        hidden = self.final(batch)[rows, starts].float()
        yield from self.head(hidden).unbind(dim=-2)

    def save(self, folder: Any) -> None:
        """As the Medusa repository does."""
        MedusaDrafter(self.head.to(torch.bfloat16)).save(folder)


class MlpTraining(HeadTraining):
    """An MLP speculator with tied weights, whose embeddings and output matrix start as the target's."""

    def __init__(self, target: PreTrainedModel, num_steps: int = 4) -> None:
        super().__init__(target, num_steps)
        vocab_size, hidden_size = self.target_head.shape
        self.head = MlpSpeculator(hidden_size, vocab_size, num_steps, tie_weights=True, scale_input=True).float()
        with torch.no_grad():
            weight_of(self.head.emb[0]).copy_(weight_of(target.get_input_embeddings()))
            weight_of(self.head.head[0]).copy_(self.target_head)

    def drafts(self, batch: Batch, rows: Tensor, starts: Tensor) -> Any:
        state = self.head.first_state(self.final(batch)[rows, starts].float())
        for step in range(self.num_steps):
            state, logits = self.head(step, state, batch.tokens[rows, starts + 1 + step])
            yield logits

    def save(self, folder: Any) -> None:
        """As a checkpoint of model_type "mlp_speculator"."""
        MlpSpeculatorDrafter(self.head.to(torch.bfloat16)).save(folder)


class DraftModelTraining(HeadTraining):
    """A copy of the target with some of its layers, evenly spread: embeddings, norms and head stay as they are.

    A draft model sees the text alone, so one draft of a chain is as good as any other, and one is looked at.
    """

    def __init__(self, target: PreTrainedModel, num_layers: int = 4) -> None:
        super().__init__(target, num_steps=1)
        config = copy.deepcopy(target.config)
        count = config.get_text_config().num_hidden_layers
        if not 1 <= num_layers <= count:
            raise ValueError(f"num_layers must be in [1, {count}], the target's, got {num_layers}")
        kept = [round(i * (count - 1) / max(num_layers - 1, 1)) for i in range(num_layers)]
        text = config.get_text_config()
        text.num_hidden_layers = num_layers
        if getattr(text, "layer_types", None):
            text.layer_types = [text.layer_types[i] for i in kept]
        self.head: Any = type(target)(config).float()
        theirs = target.state_dict()
        wanted = self.head.state_dict()
        self.head.load_state_dict({name: theirs[_of_layer(name, kept)].float() for name in wanted})
        self.head.get_input_embeddings().weight.requires_grad = False
        self.head.get_output_embeddings().weight.requires_grad = False

    def drafts(self, batch: Batch, rows: Tensor, starts: Tensor) -> Any:
        mask = torch.arange(batch.tokens.shape[1], device=batch.tokens.device) < batch.lengths[:, None]
        hidden = self.head.base_model(input_ids=batch.tokens, attention_mask=mask, use_cache=False)[0]
        yield self.head.get_output_embeddings()(hidden[rows, starts + 1])

    def save(self, folder: Any) -> None:
        """As a checkpoint of transformers."""
        self.head.to(torch.bfloat16).save_pretrained(folder)


def weight_of(module: nn.Module) -> Tensor:
    """The weight of an embedding or a linear layer, packed or not; no gradient reaches it."""
    weight = module.weight
    assert isinstance(weight, Tensor)
    return weight.detach()


def _of_layer(name: str, kept: list[int]) -> str:
    """The target's name of a tensor: layer i here is layer kept[i] there."""
    parts = name.split(".")
    for index, part in enumerate(parts[:-1]):
        if part in ("layers", "h", "blocks") and parts[index + 1].isdigit():
            parts[index + 1] = str(kept[int(parts[index + 1])])
            break
    return ".".join(parts)
