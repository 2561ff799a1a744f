"""The target's output layer, as the labels of a training need it."""

from typing import Self

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel


class TargetHead(nn.Module):
    """What the target says of hidden states. Nothing here is trained or saved.

    Args:
        weight: [V, H], kept in bfloat16.
        bias: [V] or None.
        scale: logits are multiplied by it (Cohere, Granite).
        softcap: logits become softcap * tanh(logits / softcap) (Gemma 2).
    """

    weight: Tensor
    bias: Tensor | None

    def __init__(
        self, weight: Tensor, bias: Tensor | None = None, scale: float = 1.0, softcap: float | None = None
    ) -> None:
        super().__init__()
        self.scale, self.softcap = scale, softcap
        self.register_buffer("weight", weight.detach().to(torch.bfloat16), persistent=False)
        self.register_buffer("bias", None if bias is None else bias.detach().float(), persistent=False)

    @classmethod
    def of(cls, target: PreTrainedModel) -> Self:
        """That of a model of transformers."""
        head, config = target.get_output_embeddings(), target.config.get_text_config()
        bias = getattr(head, "bias", None)
        scale = getattr(config, "logit_scale", None) or 1 / (getattr(config, "logits_scaling", None) or 1)
        return cls(weight_of(head), bias, scale, getattr(config, "final_logit_softcapping", None))

    def rows(self, ids: Tensor) -> Self:
        """The part for these token ids [N] int64, in their order."""
        ids = ids.to(self.weight.device)
        bias = None if self.bias is None else self.bias[ids]
        return type(self)(self.weight[ids], bias, self.scale, self.softcap)

    def forward(self, hidden: Tensor) -> Tensor:
        """Float32 logits [..., V] of what the head reads [..., H]."""
        logits = (hidden.to(self.weight.dtype) @ self.weight.T).float()
        return self.finish(logits if self.bias is None else logits + self.bias)

    def finish(self, logits: Tensor) -> Tensor:
        """What comes behind the matrix product: scale and softcap."""
        logits = logits if self.scale == 1 else logits * self.scale
        return logits if self.softcap is None else self.softcap * (logits / self.softcap).tanh()


def weight_of(module: nn.Module) -> Tensor:
    """The weight of an embedding or a linear layer, packed or not; no gradient reaches it."""
    weight = module.weight
    assert isinstance(weight, Tensor)
    return weight.detach()
