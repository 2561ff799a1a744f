"""Cross entropy of a head's logits to whole distributions, without ever holding all logits.

Rows of the vocabulary are large: for 2,000 chains and 8,192 tokens, logits, probabilities and their gradients take 65 MB each.
Done a few rows at a time, forward and backward together, they stay in a processor's cache. And since logits are
hidden @ weight.T, a label is read once however often it is used: sum_v label(v) logit(v) = hidden . sum_v label(v) weight(v).
"""

from typing import Any

import torch
from torch import Tensor

_ROWS_ON_CPU, _ROWS = 64, 2048  # at a time; elsewhere many small calls would cost more than the cache gives


class SoftLabels:
    """Distributions that an output matrix is to give.

    Args:
        labels: [N, V] probabilities; products are computed in their dtype.
        weight: [V, H], of any dtype; gradients reach it if it requires them.
    """

    def __init__(self, labels: Tensor, weight: Tensor) -> None:
        self._labels, self._weight = labels, weight
        with torch.no_grad():
            self._means = labels @ weight.to(labels.dtype)  # [N, H]

    def cross_entropy(self, hidden: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Mean over rows of -sum_v label(v) log softmax(hidden @ weight.T)(v), and the likeliest token of each row.

        Args:
            hidden: [M, H].
            rows: [M] int64, the label of each.

        Returns:
            [] float32 and [M] int64.
        """
        loss, best = _SoftCrossEntropy.apply(hidden, self._weight, self._labels, self._means, rows)
        return loss, best


class _SoftCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, means: Tensor, rows: Tensor
    ) -> tuple[Tensor, Tensor]:
        wants_weight = ctx.needs_input_grad[1]
        hidden, weight, means = hidden.to(labels.dtype), weight.to(labels.dtype), means[rows]
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if wants_weight else None
        lse, best = torch.empty(len(hidden), device=hidden.device), torch.empty_like(rows)
        size = _ROWS_ON_CPU if hidden.device.type == "cpu" else _ROWS
        for begin in range(0, len(hidden), size):
            part = slice(begin, begin + size)
            logits = hidden[part] @ weight.T
            highest, best[part] = logits.max(-1)
            probs = logits.softmax(-1)
            # The likeliest has at least 1 / V: its logarithm is finite.
            lse[part] = highest.float() - probs.gather(-1, best[part, None])[:, 0].float().log()
            torch.sub(probs @ weight, means[part], out=grad_hidden[part])
            if grad_weight is not None:
                grad_weight += (probs.sub_(labels[rows[part]]).T @ hidden[part]).float()
        loss = (lse - (means.float() * hidden.float()).sum(-1)).mean()  # the labels of a row sum to 1
        ctx.save_for_backward(grad_hidden, grad_weight)
        ctx.mark_non_differentiable(best)
        return loss, best

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        grad_hidden, grad_weight = ctx.saved_tensors
        scale = grad_loss / len(grad_hidden)
        return grad_hidden * scale, None if grad_weight is None else grad_weight * scale, None, None, None
