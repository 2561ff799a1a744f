"""The network of EAGLE heads (Li et al., arXiv 2401.15077, 2406.16858 and 2503.01840), as chains.

At position j a head reads the token at j + 1 and a feature of position j: the target's hidden state, or in later steps of
a draft its own output. It predicts the feature of j + 1, from which a language model head gives the token at j + 2.

- EAGLE-1 and 2: the feature is what the target's head reads; fc([embedding, feature]) goes through a decoder layer without
  its first norm; the target's own head gives the logits.
- EAGLE-3: the feature is fc(hidden states of several layers), at first; [norm(embedding), norm(feature)] goes into the
  attention of a decoder layer, around which the feature is the residual; norm and a head of a reduced vocabulary follow.
"""

import copy
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm, LlamaRotaryEmbedding
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer, Qwen3RMSNorm, Qwen3RotaryEmbedding

from ..cache import cache_argument
from ..fused_layers import usable_parts

_FAMILIES: dict[str, tuple[Any, Any, Any]] = {
    "llama": (LlamaDecoderLayer, LlamaRMSNorm, LlamaRotaryEmbedding),
    "qwen3": (Qwen3DecoderLayer, Qwen3RMSNorm, Qwen3RotaryEmbedding),
}


class EagleModel(PreTrainedModel):
    """An EAGLE head over K/V of its own.

    Args:
        config: of a decoder of one layer or a few, with these attributes: `eagle` (1 or 3), `num_features` (hidden states
            side by side), `feature_size`, `draft_vocab_size`, `fc_bias`, `output_bias` (of attention, which may have
            one for queries, keys and values alone); for EAGLE-3 `fuses` (states by `fc`, or else it reads one state as
            it is), `last_state_normed` (whether the state behind all layers is meant behind the target's last norm),
            `norm_before_residual`, `norm_before_fc`, `fc_norm`, `norm_output`.

    Attributes:
        d2t, t2d: with a reduced vocabulary: draft id i is target id i + d2t[i] (int64); which target ids are among them.
        own_embeddings: those of the checkpoint; None: the target's are borrowed.
        head_is_targets: the checkpoint has no `lm_head.weight`, as it is the target's rows of the draft vocabulary.
    """

    d2t: Tensor
    t2d: Tensor
    own_embeddings: nn.Embedding | None
    head_is_targets = False

    base_model_prefix = ""
    _supports_sdpa = True
    _supports_attention_backend = True

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        if config.model_type not in _FAMILIES:
            raise ValueError(f"an EAGLE head must have layers of llama or qwen3, got {config.model_type!r}")
        layer, norm, rotary = _FAMILIES[config.model_type]
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.layers = nn.ModuleList(layer(config, index) for index in range(config.num_hidden_layers))
        self.rotary_emb = rotary(config)
        if config.eagle == 3:
            fused = config.num_features * config.feature_size
            if config.fuses:
                self.fc = nn.Linear(fused, hidden, bias=config.fc_bias)
            attention = self.layers[0].self_attn
            for name in ("q_proj", "k_proj", "v_proj"):
                old = getattr(attention, name)
                setattr(attention, name, nn.Linear(2 * hidden, old.out_features, bias=old.bias is not None))
            self.layers[0].hidden_norm = norm(hidden, eps=eps)
            self.norm = norm(hidden, eps=eps)
            self.lm_head = nn.Linear(hidden, config.draft_vocab_size, bias=False)
            self.input_norm = norm(fused, eps=eps) if config.norm_before_fc else None
            self.fc_norm = (
                nn.ModuleList(norm(config.feature_size, eps=eps) for _ in range(config.num_features))
                if config.fc_norm
                else None
            )
            if config.draft_vocab_size != config.vocab_size:
                self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.int64))
                self.register_buffer("t2d", torch.zeros(config.vocab_size, dtype=torch.bool))
        else:
            self.fc = nn.Linear(2 * hidden, hidden, bias=config.fc_bias)
            self.layers[0].input_layernorm = nn.Identity()
        if not config.output_bias:
            for own in self.layers:
                own.get_submodule("self_attn.o_proj").register_parameter("bias", None)
        self.own_embeddings = None
        self._borrowed: dict[str, nn.Module] = {}
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=self.config.initializer_range)
            if module.bias is not None:
                nn.init.zeros_(module.bias)

    @property
    def target_ids(self) -> Tensor:
        """[draft_vocab_size] int64: of the draft vocabulary."""
        ids = torch.arange(self.config.draft_vocab_size, device=self.device)
        return ids + self.d2t if hasattr(self, "d2t") else ids

    def place(self, device: torch.device, dtype: torch.dtype) -> None:
        """Move to a device and a dtype, but leave the rotary frequencies in float32: rounded, they tell positions apart badly."""
        exact = dict(self.rotary_emb.named_buffers())
        self.to(device, dtype)  # type: ignore[arg-type]  # a wrapper hides the signature
        for name, buffer in exact.items():
            setattr(self.rotary_emb, name, buffer.to(device))

    def borrow(self, embed_tokens: nn.Module, lm_head: nn.Module | None = None) -> None:
        """Use these of the target; they are no part of this module's own tensors."""
        self._borrowed["embed_tokens"] = embed_tokens
        if lm_head is not None:
            self._borrowed["lm_head"] = lm_head

    def get_input_embeddings(self) -> nn.Module:
        return self.own_embeddings or self._borrowed["embed_tokens"]

    def get_output_embeddings(self) -> nn.Module:
        return self._borrowed.get("lm_head") or self.lm_head

    def fuse(self, features: Tensor) -> Tensor:
        """The target's hidden states [..., num_features * feature_size] to a feature [..., H]."""
        if self.config.eagle != 3 or not self.config.fuses:
            return features
        if self.fc_norm is not None:
            parts = features.split(self.config.feature_size, dim=-1)
            features = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], dim=-1)
        elif self.input_norm is not None:
            features = self.input_norm(features)
        fused: Tensor = self.fc(features)
        return fused

    def forward(
        self,
        input_ids: Tensor,  # [B, W] int64, target ids of the tokens after those that the features belong to
        hidden_states: Tensor,  # [B, W, H] features
        position_ids: Tensor,  # [B, W] int64
        attention_mask: Any = None,
        cache: Any = None,
        use_cache: bool = True,
        **others: Any,
    ) -> tuple[Tensor]:
        """Features [B, W, H] of the next positions."""
        first: Any = self.layers[0]
        embeddings = self.get_input_embeddings()(input_ids).to(hidden_states.dtype)
        shared = {cache_argument(type(first.self_attn).forward): cache} | dict(
            position_ids=position_ids,
            use_cache=use_cache,
            position_embeddings=self.rotary_emb(hidden_states, position_ids),
        )
        own = [shared | self._attention(index, attention_mask) for index in range(len(self.layers))]
        if self.config.eagle == 3:
            hidden = self._first_of_eagle3(first, embeddings, hidden_states, cache, own[0])
        else:
            hidden = first(self.fc(torch.cat([embeddings, hidden_states], dim=-1)), **own[0])
        for layer, arguments in zip(self.layers[1:], own[1:], strict=True):
            hidden = layer(hidden, **arguments)
        return (self.norm(hidden) if self.config.eagle == 3 and self.config.norm_output else hidden,)

    def _attention(self, index: int, mask: Any) -> dict[str, Any]:
        """What tells a layer its window, if it has one; transformers' llama layers know of none themselves."""
        kinds = getattr(self.config, "layer_types", None)
        kind = kinds[index] if kinds else None
        found = {"attention_mask": mask[kind] if isinstance(mask, dict) else mask}
        if kind == "sliding_attention" and self.config.model_type == "llama":
            found["sliding_window"] = self.config.sliding_window
        return found

    def _first_of_eagle3(
        self, layer: Any, embeddings: Tensor, feature: Tensor, cache: Any, shared: dict[str, Any]
    ) -> Tensor:
        normed = layer.hidden_norm(feature)
        residual = normed if self.config.norm_before_residual else feature
        both = torch.cat([layer.input_layernorm(embeddings), normed], dim=-1)
        if (parts := usable_parts(layer, cache)) is not None:
            hidden = residual + parts.attention(both, shared["position_embeddings"], shared["attention_mask"], cache)
            output: Tensor = hidden + parts.mlp(hidden)
            return output
        hidden = residual + layer.self_attn(hidden_states=both, **shared)[0]
        output = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
        return output

    def normed(self, hidden: Tensor) -> Tensor:
        """Features [..., H] as the output matrix reads them."""
        if self.config.eagle == 3 and not self.config.norm_output:
            hidden = self.norm(hidden)
        return hidden


def usual_layers(num_layers: int) -> tuple[int, ...]:
    """The hidden states that EAGLE-3 reads of a target with so many layers, where a checkpoint names no others."""
    return (2, num_layers // 2, num_layers - 3)


def eagle_config(layer_config: Any, **attributes: Any) -> Any:
    """A copy of a llama or qwen3 config with what `EagleModel` needs beside it."""
    config = copy.deepcopy(layer_config)
    defaults = dict(
        eagle=3, num_features=3, fuses=True, feature_size=config.hidden_size, draft_vocab_size=config.vocab_size,
        fc_bias=False, output_bias=getattr(config, "attention_bias", False), last_state_normed=True,
        norm_before_residual=False, norm_before_fc=False, fc_norm=False, norm_output=False,
        _declared=("layer_types",),  # unlike a llama, see `EagleModel._attention`
    )  # fmt: skip
    for name, value in {**defaults, **attributes}.items():
        setattr(config, name, value)
    return config
