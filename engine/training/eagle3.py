"""Training an EAGLE-3 head: its own steps are unrolled, with the target's distribution as the label of each.

Li et al., arXiv 2503.01840 (training-time test); Zhang et al., arXiv 2408.15766 (HASS). A chain starts at every position j.
Its step s reads the text's token j + 1 + s and the feature that step s - 1 gave it (at s = 0: the target's hidden states at
j), attends to the first steps of positions up to j and to the chain's own steps, and predicts the token j + 2 + s.
"""

import copy
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, PreTrainedModel
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from ..decoder_layers import DecoderLayers
from ..drafters.eagle_model import EagleModel, eagle_config
from ..model_support import context_length, windows
from .batches import Batch
from .objectives import STEP_DECAY
from .options import check_loss
from .soft_labels import SoftLabels
from .target_head import TargetHead

_LIKE_LLAMA = ("llama", "mistral", "qwen2", "qwen3", "smollm3")  # a head's layer has all that theirs have, biases apart
# Rotary embeddings that do not change with the length of the text.
_FIXED_ROPE = ("default", "linear", "llama3", "yarn")


class Eagle3Training(nn.Module):
    """A head and what it takes to train it.

    Args:
        target: whose embeddings, and rows of whose head, it starts with; not changed.
        layers: hidden states that the head reads. Those of a `Batch` are these and, last, what the target's head reads.
        draft_ids: [V_draft] int64, the target ids of the draft vocabulary, ascending.
        num_steps: own steps that are unrolled.
        freeze_head: keep the target's rows as the head's output matrix; a batch then adds its own tokens to the draft
            vocabulary, as a text does that is drafted (`DraftVocabulary`).
        start: begin with the weights of this head, which passed `check_start`, and go by its config; with its output matrix,
            unless that is the target's.
        loss: one of LOSSES.

    Raises:
        ValueError: for another loss.
    """

    def __init__(
        self,
        target: PreTrainedModel,
        layers: tuple[int, ...],
        draft_ids: Tensor,
        num_steps: int = 4,
        freeze_head: bool = False,
        start: EagleModel | None = None,
        loss: str = "kl",
    ) -> None:
        super().__init__()
        check_loss(loss)
        config = target.config.get_text_config()
        self.layers, self.num_steps, self.freeze_head, self.loss = layers, num_steps, freeze_head, loss
        own = head_config(config, len(layers), len(draft_ids)) if start is None else copy.deepcopy(start.config)
        own.draft_vocab_size = len(draft_ids)
        own.last_state_normed = config.num_hidden_layers in layers  # as `Batch.hidden` is
        self.head = EagleModel(own).float()
        # A copy of the module: some scale what they look up.
        self.embeddings = copy.deepcopy(target.get_input_embeddings()).float().requires_grad_(False)
        self.head.borrow(self.embeddings)
        self.target_head = TargetHead.of(target)
        with torch.no_grad():
            self.head.lm_head.weight.copy_(self.target_head.rows(draft_ids).weight)
            if hasattr(self.head, "d2t"):
                self.head.d2t.copy_(draft_ids - torch.arange(len(draft_ids)))
                self.head.t2d[draft_ids] = True
            if start is None:
                start_as_last_layer(self.head, target, layers)
            else:
                skipped = ("d2t", "t2d", "lm_head.weight") if start.head_is_targets else ()
                found = {name: value for name, value in start.state_dict().items() if name not in skipped}
                self.head.load_state_dict(found, strict=False)
        self.head.lm_head.weight.requires_grad = not freeze_head
        self.draft_ids: Tensor
        self.register_buffer("draft_ids", draft_ids, persistent=False)

    def forward(self, batch: Batch) -> tuple[Tensor, list[Tensor]]:
        """The loss and, for each step, [2] int64: chains whose earlier drafts the target would accept greedily, and those of them
        whose draft of this step it would accept too."""
        first = max(int(batch.prompt_lengths.min()) - 2, 0)  # chains before that belong to no answer
        size = self.target_head.weight.shape[1]
        features = batch.hidden if len(self.layers) * size == batch.hidden.shape[-1] else batch.hidden[..., :-size]
        final = batch.hidden[:, first + 1 :, -size:]
        tokens, count = batch.tokens, batch.tokens.shape[1] - 1 - first
        chain = torch.arange(first, tokens.shape[1] - 1, device=tokens.device)
        answers = chain >= batch.prompt_lengths[:, None] - 2
        ids = self._vocabulary(tokens)
        with torch.no_grad():  # row [b, c + s] is the label of chain c's step s
            target_rows = self.target_head.rows(ids)
            labels = torch.cat([target_rows(rows).softmax(-1).to(torch.bfloat16) for rows in final])
            chosen = labels.argmax(-1).view(final.shape[:2]) if self.training else self._argmax(final)
        soft = SoftLabels(labels, target_rows.weight if self.freeze_head else self.head.lm_head.weight, self.loss)
        row = torch.arange(len(labels), device=tokens.device).view(chosen.shape)
        unroll = Unroll(self.head, tokens, self.head.fuse(features[:, :-1].to(self.head.fc.weight.dtype)), first)
        loss, outcomes = torch.zeros((), device=tokens.device), []
        right = torch.ones_like(answers)
        for step in range(self.num_steps):
            hidden = unroll.step()
            there = (answers & (chain + 1 + step < batch.lengths[:, None]))[:, : count - step]
            if not bool(there.any()):
                break
            normed = self.head.normed(hidden[:, : count - step][there])
            where = row[:, step:][there]
            of_step, drafts = soft.loss(normed, where)
            loss = loss + STEP_DECAY**step * of_step
            stood = (drafts if self.training else ids[drafts]) == chosen.flatten()[where]
            before = right[:, : count - step][there]
            outcomes.append(torch.stack([before.sum(), (stood & before).sum()]))
            right = torch.zeros_like(right)
            right[:, : count - step][there] = stood & before
        return loss, outcomes

    def _vocabulary(self, tokens: Tensor) -> Tensor:
        """Target ids [V] of what is drafted in a batch of these tokens [B, T]."""
        if not self.freeze_head:
            return self.draft_ids
        there = torch.zeros(len(self.target_head.weight), dtype=torch.bool, device=tokens.device)
        there[tokens] = True
        there[self.draft_ids] = False
        return torch.cat([self.draft_ids, there.nonzero()[:, 0]])

    def _argmax(self, hidden: Tensor) -> Tensor:
        """Over the target's whole vocabulary: [B, T] int64, for hidden [B, T, H]."""
        return torch.stack([self.target_head(row).argmax(-1) for row in hidden])

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
        hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
        self._features = self._head.norm(hidden) if self._head.config.norm_output else hidden
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
        grouped = (queries * size**-0.5).reshape(batch, groups, heads // groups, count, size)
        place = torch.arange(self._keys.shape[2], device=queries.device)
        visible = place <= self._first + torch.arange(count, device=queries.device)[:, None]
        first = torch.einsum("bgqnd,bgkd->bgqnk", grouped, self._keys).float()
        scores = [first.masked_fill(~visible, -torch.inf)]
        own = [(keys[:, :, None, :count], values[:, :, None, :count]) for keys, values in self._own]
        scores += [(grouped * keys).float().sum(-1, keepdim=True) for keys, _ in own]
        weights = torch.cat(scores, dim=-1).softmax(-1).to(queries.dtype)
        output = torch.einsum("bgqnk,bgkd->bgqnd", weights[..., : len(place)], self._values)
        for index, (_, values) in enumerate(own):
            output = output + weights[..., len(place) + index, None] * values
        return output.reshape(batch, heads, count, size).transpose(1, 2).flatten(2)


def start_as_last_layer(head: EagleModel, target: PreTrainedModel, layers: tuple[int, ...]) -> None:
    """Copy what the head's layer has in common with the target's last one, if that is of a llama's kind.

    The head then begins as a layer that carries on from the last of the layers that it reads, what the target's head reads apart,
    and looks at no embeddings. For SmolLM2-135M the loss after 60,000 tokens was lower than after 90,000 from random weights.
    """
    if target.config.get_text_config().model_type not in _LIKE_LLAMA:
        return
    decoder = DecoderLayers(target)
    own: Any = head.layers[0]
    theirs: Any = decoder.layers[-1]
    size = target.config.get_text_config().hidden_size
    for name, part in theirs.named_modules():
        if name.endswith(("q_proj", "k_proj", "v_proj")):
            projection = own.get_submodule(name).weight
            projection[:, :size] = 0
            projection[:, size:] = part.weight
        elif name.endswith("_proj"):
            own.get_submodule(name).weight.copy_(part.weight)
    own.hidden_norm.weight.copy_(theirs.input_layernorm.weight)
    own.post_attention_layernorm.weight.copy_(theirs.post_attention_layernorm.weight)
    head.norm.weight.copy_(decoder.parent.get_submodule("norm").weight)
    if head.config.num_features > 1:
        last = max(i for i, layer in enumerate(layers) if layer < len(decoder))
        head.fc.weight.zero_()
        head.fc.weight[:, last * size : (last + 1) * size] = torch.eye(size)


def check_start(head: EagleModel, layers: tuple[int, ...], target: PreTrainedModel) -> None:
    """Check that a training for the target can begin with this head, which reads these hidden states.

    Raises:
        ValueError: naming the tensors or the setting by which it differs from the heads that `Eagle3Training` makes, or the layer.
    """
    config = target.config.get_text_config()
    if len(layers) != head.config.num_features:
        raise ValueError(
            f"layers must be {head.config.num_features}, as many as the head of start_from reads, got {list(layers)}"
        )
    if config.num_hidden_layers in layers and not head.config.last_state_normed:
        raise ValueError(
            f"start_from must be a head that reads the target between layers or after its last norm, got one that reads "
            f"what comes before that norm ({config.num_hidden_layers} in {list(layers)})"
        )
    if any(windows(head.config).values()):
        raise ValueError("start_from must be a head that attends to all of a text, got one with a sliding window")
    with torch.device("meta"):
        own = EagleModel(head_config(config, head.config.num_features, head.config.draft_vocab_size)).state_dict()
    theirs = head.state_dict()
    wrong = sorted(
        name
        for name in own.keys() | theirs.keys()
        if name not in own or name not in theirs or own[name].shape != theirs[name].shape
    )
    if head.own_embeddings is not None:
        wrong.append("embed_tokens.weight")
    if wrong:
        raise ValueError(f"start_from must be a head of one layer like the target's; it differs in {wrong}")


def head_config(target: Any, num_features: int, draft_vocab_size: int) -> Any:
    """A llama layer of the target's size, with the target's rotary embedding where it has one that a llama knows."""
    heads = target.num_attention_heads
    layer = LlamaConfig(
        vocab_size=target.vocab_size,
        hidden_size=target.hidden_size,
        intermediate_size=_of_all_layers(target, "intermediate_size") or 4 * target.hidden_size,
        num_hidden_layers=1,
        num_attention_heads=heads,
        num_key_value_heads=_of_all_layers(target, "num_key_value_heads") or heads,
        head_dim=_of_all_layers(target, "head_dim") or target.hidden_size // heads,
        max_position_embeddings=context_length(target),
        rms_norm_eps=getattr(target, "rms_norm_eps", 1e-5),
        rope_parameters=_rope(target),
        tie_word_embeddings=False,
    )
    return eagle_config(
        layer, num_features=num_features, feature_size=target.hidden_size, draft_vocab_size=draft_vocab_size
    )


def check_head_config(target: Any, num_features: int) -> None:
    """Check that a head of the target's size can be made.

    Raises:
        ValueError: naming the method, and why a llama's layer cannot have the target's sizes.
    """
    try:
        with torch.device("meta"):
            EagleModel(head_config(target, num_features, draft_vocab_size=1))
    except Exception as error:  # of transformers' checks, which have several types
        raise ValueError(
            f"method eagle3 needs a target of whose size there can be a llama's layer, got {target.model_type!r}: {error}"
        ) from error


def _of_all_layers(target: Any, name: str) -> Any:
    """What a config says of its layers; None if it says nothing, or not the same of each, as of gemma4's heads."""
    try:
        return getattr(target, name, None)
    except RuntimeError:  # AmbiguousGlobalPerLayerAttributeError, which not all releases of transformers have
        return None


def _rope(target: Any) -> dict[str, Any] | None:
    """Of the target's full attention, over whole heads; without what changes with the length of the text."""
    rope = getattr(target, "rope_parameters", None) or {}
    rope = rope.get("full_attention", rope) or {}
    rope = {name: value for name, value in rope.items() if name != "partial_rotary_factor"}
    if not rope:
        return None
    fixed = rope.get("rope_type", "default") in _FIXED_ROPE
    return rope if fixed else {"rope_type": "default", "rope_theta": rope.get("rope_theta", 10000.0)}
