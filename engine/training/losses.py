"""What a training minimises: how far a drafter's distribution q is from p, the target's, at each draft."""

from torch import Tensor, minimum

from .options import check_loss

LOWEST_RATE = 1e-6  # an acceptance rate counts as at least this, so that its logarithm is finite


def draft_loss(name: str, target_probs: Tensor, draft_logits: Tensor) -> Tensor:
    """The loss of each row.

    Args:
        name: one of LOSSES (options.py). "kl" is the Kullback-Leibler divergence sum_v p(v) log(p(v) / q(v)), without the part
            that the drafter has no hand in: -sum_v p(v) log q(v). "lk" is the negative logarithm of the share of drafts that
            `rejection` accepts, -log sum_v min(p(v), q(v)) (Samarin et al., LK losses, arXiv 2602.23881, their LK-alpha).
        target_probs: p, [..., V] float32; of a reduced draft vocabulary, as shares of what its tokens have together.
        draft_logits: those of q, [..., V] float32.

    Returns:
        [...] float32.

    Raises:
        ValueError: for another name.
    """
    check_loss(name)
    if name == "kl":
        return -(target_probs * draft_logits.log_softmax(-1)).sum(-1)
    return -minimum(target_probs, draft_logits.softmax(-1)).sum(-1).clamp(min=LOWEST_RATE).log()
