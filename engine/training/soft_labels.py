"""Losses of a head's logits against whole distributions, without ever holding all logits; the formulas are those of losses.py.

Rows of the vocabulary are large: for 2,000 chains and 8,192 tokens, logits, probabilities and their gradients take 65 MB each.
Done a few rows at a time, forward and backward together, they stay in a processor's cache. And since logits are
hidden @ weight.T, "kl" reads a label once however often it is used: sum_v label(v) logit(v) = hidden . sum_v label(v) weight(v).
"""

from typing import Any

import torch
from torch import Tensor

from .losses import LOWEST_RATE
from .options import check_loss

_ROWS_ON_CPU, _ROWS = 64, 2048  # at a time; elsewhere many small calls would cost more than the cache gives


class SoftLabels:
    """Distributions that an output matrix is to give.

    Args:
        labels: [N, V] probabilities; products are computed in their dtype.
        weight: [V, H], of any dtype; gradients reach it if it requires them.
        loss: one of LOSSES.

    Raises:
        ValueError: for another loss.
    """

    def __init__(self, labels: Tensor, weight: Tensor, loss: str = "kl") -> None:
        check_loss(loss)
        self._labels, self._weight, self._means = labels, weight, None
        if loss == "kl":
            with torch.no_grad():
                self._means = labels @ weight.to(labels.dtype)  # [N, H]

    def loss(self, hidden: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Mean over rows of the loss of softmax(hidden @ weight.T), and the likeliest token of each row.

        Args:
            hidden: [M, H].
            rows: [M] int64, the label of each.

        Returns:
            [] float32 and [M] int64.
        """
        loss, best = _SoftLabelLoss.apply(hidden, self._weight, self._labels, self._means, rows)
        return loss, best


class _SoftLabelLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, all_means: Tensor | None, rows: Tensor
    ) -> tuple[Tensor, Tensor]:
        """all_means: None for "lk"."""
        wants_weight = ctx.needs_input_grad[1]
        hidden, weight = hidden.to(labels.dtype), weight.to(labels.dtype)
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if wants_weight else None
        losses, best = torch.empty(len(hidden), device=hidden.device), torch.empty_like(rows)
        size = _ROWS_ON_CPU if hidden.device.type == "cpu" else _ROWS
        for begin in range(0, len(hidden), size):
            part = slice(begin, begin + size)
            logits = hidden[part] @ weight.T
            highest, best[part] = logits.max(-1)
            probs = logits.softmax(-1)
            if all_means is None:
                losses[part], grad_logits = _lk(probs, labels[rows[part]])
                grad_hidden[part] = grad_logits @ weight
            else:
                means = all_means[rows[part]]
                # The likeliest has at least 1 / V: its logarithm is finite.
                lse = highest.float() - probs.gather(-1, best[part, None])[:, 0].float().log()
                losses[part] = lse - (means.float() * hidden[part].float()).sum(-1)  # the labels of a row sum to 1
                torch.sub(probs @ weight, means, out=grad_hidden[part])
                grad_logits = probs
                if wants_weight:  # a label is read for nothing else
                    grad_logits.sub_(labels[rows[part]])
            if grad_weight is not None:
                grad_weight += (grad_logits.T @ hidden[part]).float()
        ctx.save_for_backward(grad_hidden, grad_weight)
        ctx.mark_non_differentiable(best)
        return losses.mean(), best

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        grad_hidden, grad_weight = ctx.saved_tensors
        scale = grad_loss / len(grad_hidden)
        return grad_hidden * scale, None if grad_weight is None else grad_weight * scale, None, None, None


def _lk(probs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """The loss "lk" of rows of probabilities q [M, V], [M] float32, and its gradient by their logits, [M, V].

    Of the acceptance rate, sum_v min(p(v), q(v)), only the terms with q(v) < p(v) move. With m their sum, the gradient is
    q(v) (m - [q(v) < p(v)]) / rate.
    """
    rate = torch.minimum(probs, labels).sum(-1, dtype=torch.float32).clamp(min=LOWEST_RATE)
    below = probs < labels
    moving = (probs * below).sum(-1, keepdim=True, dtype=torch.float32)
    return -rate.log(), probs * ((moving - below.float()) / rate[:, None]).to(probs.dtype)
