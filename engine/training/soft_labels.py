"""Cross entropy of a head's logits to whole distributions, without ever holding all logits.

Rows of the vocabulary are large: for 2,000 chains and 8,192 tokens, logits, probabilities and their gradients take 65 MB each.
Done a few rows at a time, forward and backward together, they stay in a processor's cache.
"""

from typing import Any

import torch
from torch import Tensor

_ROWS = 256


class SoftCrossEntropy(torch.autograd.Function):
    """Mean over rows of -sum_v label(v) log softmax(hidden @ weight.T)(v)."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,  # [M, H]
        weight: Tensor,  # [V, H]
        labels: Tensor,  # [N, V] probabilities
        rows: Tensor,  # [M] int64, of `labels`
    ) -> tuple[Tensor, Tensor]:
        """The loss, and the likeliest token of each row, [M] int64."""
        loss = hidden.new_zeros((), dtype=torch.float32)
        hidden, weight = hidden.to(labels.dtype), weight.to(labels.dtype)
        wants_weight = ctx.needs_input_grad[1]
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if wants_weight else None
        best = torch.empty_like(rows)
        for begin in range(0, len(hidden), _ROWS):
            part = slice(begin, begin + _ROWS)
            logits = (hidden[part] @ weight.T).float()
            label = labels[rows[part]].float()
            best[part] = logits.argmax(-1)
            lse = logits.logsumexp(-1, keepdim=True)
            loss += lse.sum() - (label * logits).sum()  # the labels of a row sum to 1
            grad = ((logits - lse).exp_() - label).mul_(1 / len(hidden)).to(labels.dtype)
            grad_hidden[part] = grad @ weight
            if grad_weight is not None:
                grad_weight += (grad.T @ hidden[part]).float()
        ctx.save_for_backward(grad_hidden, grad_weight)
        ctx.mark_non_differentiable(best)
        return loss / len(hidden), best

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        grad_hidden, grad_weight = ctx.saved_tensors
        return grad_hidden * grad_loss, None if grad_weight is None else grad_weight * grad_loss, None, None


def soft_cross_entropy(hidden: Tensor, weight: Tensor, labels: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Loss, and likeliest tokens [M] int64: see `SoftCrossEntropy`."""
    loss, best = SoftCrossEntropy.apply(hidden, weight, labels, rows)
    return loss, best
