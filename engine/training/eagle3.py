"""Training an EAGLE-3 head: its own steps are unrolled, with the target's distribution as the label of each.

Li et al., arXiv 2503.01840 (training-time test); Zhang et al., arXiv 2408.15766 (HASS). A chain starts at every position j.
Its step s reads the text's token j + 1 + s and the feature that step s - 1 gave it (at s = 0: the target's hidden states at
j), attends to the first steps of positions up to j and to the chain's own steps, and predicts the token j + 2 + s.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, PreTrainedModel
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from ..drafters.eagle_model import EagleModel, eagle_config
from .batches import Batch
from .heads import weight_of
from .soft_labels import soft_cross_entropy


class Eagle3Training(nn.Module):
    """A head and what it takes to train it.

    Args:
        target: whose embeddings, and rows of whose head, it starts with; not changed.
        layers: hidden states that the head reads. Those of a `Batch` are these and, last, what the target's head reads.
        draft_ids: [V_draft] int64, the target ids of the draft vocabulary, ascending.
        num_steps: own steps that are unrolled.
        freeze_head: keep the target's rows as the head's output matrix.
        intermediate_size: of its MLP; None: the target's.
    """

    def __init__(
        self,
        target: PreTrainedModel,
        layers: tuple[int, ...],
        draft_ids: Tensor,
        num_steps: int = 4,
        step_decay: float = 0.9,
        freeze_head: bool = False,
        intermediate_size: int | None = None,
    ) -> None:
        super().__init__()
        config = target.config.get_text_config()
        self.layers, self.num_steps, self.step_decay, self.freeze_head = layers, num_steps, step_decay, freeze_head
        self.head = EagleModel(head_config(config, len(layers), len(draft_ids), intermediate_size)).float()
        weights = weight_of(target.get_output_embeddings()).float()
        self.embeddings = nn.Embedding.from_pretrained(weight_of(target.get_input_embeddings()).float())
        self.head.borrow(self.embeddings)
        with torch.no_grad():
            self.head.lm_head.weight.copy_(weights[draft_ids])
            if hasattr(self.head, "d2t"):
                self.head.d2t.copy_(draft_ids - torch.arange(len(draft_ids)))
                self.head.t2d[draft_ids] = True
        self.head.lm_head.weight.requires_grad = not freeze_head
        self.target_rows: Tensor
        self.target_head: Tensor
        self.draft_ids: Tensor
        self.register_buffer("target_rows", weights[draft_ids].to(torch.bfloat16), persistent=False)
        self.register_buffer("target_head", weights.to(torch.bfloat16), persistent=False)
        self.register_buffer("draft_ids", draft_ids, persistent=False)

    def forward(self, batch: Batch) -> tuple[Tensor, list[Tensor]]:
        """The loss, and for each step the number of chains and of those whose draft the target would accept greedily."""
        first = max(int(batch.prompt_lengths.min()) - 2, 0)  # chains before that belong to no answer
        size = self.target_rows.shape[1]
        features = batch.hidden if len(self.layers) * size == batch.hidden.shape[-1] else batch.hidden[..., :-size]
        final = batch.hidden[:, first + 1 :, -size:]
        tokens, count = batch.tokens, batch.tokens.shape[1] - 1 - first
        chain = torch.arange(first, tokens.shape[1] - 1, device=tokens.device)
        answers = chain >= batch.prompt_lengths[:, None] - 2
        with torch.no_grad():  # row [b, c + s] is the label of chain c's step s
            labels = (final.to(torch.bfloat16) @ self.target_rows.T).float().softmax(-1).to(torch.bfloat16)
            chosen = labels.argmax(-1) if self.training else self._argmax(final)
        row = torch.arange(labels[..., 0].numel(), device=tokens.device).view(chosen.shape)
        unroll = Unroll(self.head, tokens, self.head.fuse(features[:, :-1].to(self.head.fc.weight.dtype)), first)
        loss, outcomes = torch.zeros((), device=tokens.device), []
        right = torch.ones_like(answers)
        for step in range(self.num_steps):
            hidden = unroll.step()
            there = (answers & (chain + 1 + step < batch.lengths[:, None]))[:, : count - step]
            if not bool(there.any()):
                break
            normed = self.head.norm(hidden[:, : count - step][there])
            where = row[:, step:][there]
            entropy, drafts = soft_cross_entropy(normed, self.head.lm_head.weight, labels.flatten(0, 1), where)
            loss = loss + self.step_decay**step * entropy
            stood = (drafts if self.training else self.draft_ids[drafts]) == chosen.flatten()[where]
            before = right[:, : count - step][there]
            outcomes.append(torch.stack([before.sum(), (stood & before).sum()]))
            right = torch.zeros_like(right)
            right[:, : count - step][there] = stood & before
        return loss, outcomes

    def _argmax(self, hidden: Tensor) -> Tensor:
        """Over the target's whole vocabulary: [B, T] int64."""
        return torch.stack([(row.to(torch.bfloat16) @ self.target_head.T).argmax(-1) for row in hidden])

    def tensors(self) -> dict[str, Tensor]:
        """What is saved, in bfloat16; without the output matrix where it is the target's."""
        found = self.head.state_dict()
        if self.freeze_head:
            del found["lm_head.weight"]
        return {name: v.to(torch.bfloat16) if v.is_floating_point() else v for name, v in found.items()}


class Unroll:
    """The steps of all chains of a batch; chain c starts at position first + c."""

    def __init__(self, head: EagleModel, tokens: Tensor, features: Tensor, first: int) -> None:
        self._head, self._tokens, self._first, self._steps = head, tokens, first, 0
        self._layer: Any = head.layers[0]
        self._features = features  # [B, T - 1, H]
        self._own: list[tuple[Tensor, Tensor]] = []  # keys and values of the chains' own steps
        self._keys: Tensor
        self._values: Tensor

    def step(self) -> Tensor:
        """The features [B, chains, H] that this step gives."""
        layer, step, first = self._layer, self._steps, self._first
        begin = first if step else 0
        tokens = self._tokens[:, begin + 1 + step :]
        feature = self._features[:, : tokens.shape[1]]
        normed = layer.hidden_norm(feature)
        both = torch.cat([layer.input_layernorm(self._head.get_input_embeddings()(tokens)), normed], dim=-1)
        position = torch.arange(begin + step, begin + step + tokens.shape[1], device=tokens.device)[None]
        keys, values = self._heads(layer.self_attn.k_proj(both)), self._heads(layer.self_attn.v_proj(both))
        if not step:
            both, normed, feature = both[:, first:], normed[:, first:], feature[:, first:]
        queries = self._heads(layer.self_attn.q_proj(both))
        cos, sin = self._head.rotary_emb(feature, position)
        keys = apply_rotary_pos_emb(keys, keys, cos, sin)[0]
        skip = 0 if step else first
        queries = apply_rotary_pos_emb(queries, queries, cos[:, skip:], sin[:, skip:])[0]
        if step:
            self._own.append((keys, values))
        else:
            self._keys, self._values = keys, values
        residual = normed if self._head.config.norm_before_residual else feature
        hidden = residual + layer.self_attn.o_proj(self._attend(queries))
        self._features = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
        self._steps += 1
        return self._features

    def _heads(self, projected: Tensor) -> Tensor:
        batch, width, size = projected.shape
        head_dim: int = self._layer.self_attn.head_dim
        return projected.view(batch, width, size // head_dim, head_dim).transpose(1, 2)

    def _attend(self, queries: Tensor) -> Tensor:
        """To first steps of positions up to the chain's start, and to its own later ones: [B, N, heads * D]."""
        batch, heads, count, size = queries.shape
        groups = self._keys.shape[1]
        grouped = queries.reshape(batch, groups, heads // groups, count, size)
        place = torch.arange(self._keys.shape[2], device=queries.device)
        visible = place <= self._first + torch.arange(count, device=queries.device)[:, None]
        first = torch.einsum("bgqnd,bgkd->bgqnk", grouped, self._keys).float()
        scores = [first.masked_fill(~visible, -torch.inf)]
        own = [(keys[:, :, None, :count], values[:, :, None, :count]) for keys, values in self._own]
        scores += [(grouped * keys).float().sum(-1, keepdim=True) for keys, _ in own]
        weights = (torch.cat(scores, dim=-1) * size**-0.5).softmax(-1).to(queries.dtype)
        output = torch.einsum("bgqnk,bgkd->bgqnd", weights[..., : len(place)], self._values)
        for index, (_, values) in enumerate(own):
            output = output + weights[..., len(place) + index, None] * values
        return output.reshape(batch, heads, count, size).transpose(1, 2).flatten(2)


def head_config(target: Any, num_features: int, draft_vocab_size: int, intermediate_size: int | None) -> Any:
    """A llama layer of the target's size."""
    heads = target.num_attention_heads
    layer = LlamaConfig(
        vocab_size=target.vocab_size,
        hidden_size=target.hidden_size,
        intermediate_size=intermediate_size or getattr(target, "intermediate_size", None) or 4 * target.hidden_size,
        num_hidden_layers=1,
        num_attention_heads=heads,
        num_key_value_heads=getattr(target, "num_key_value_heads", None) or heads,
        head_dim=getattr(target, "head_dim", None) or target.hidden_size // heads,
        max_position_embeddings=target.max_position_embeddings,
        rms_norm_eps=getattr(target, "rms_norm_eps", 1e-5),
        rope_parameters=getattr(target, "rope_parameters", None),
        tie_word_embeddings=False,
    )
    return eagle_config(
        layer, num_features=num_features, feature_size=target.hidden_size, draft_vocab_size=draft_vocab_size
    )
