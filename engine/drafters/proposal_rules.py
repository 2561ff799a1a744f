"""What a proposal must be, of whichever drafter it is."""

from typing import Any

import torch
from torch import Tensor

from ..backend import RowStats
from ..errors import EngineError
from ..state import BatchState, Proposal


def proposed(drafter: Any, state: BatchState, num_draft_tokens: int, vocab_size: int) -> Proposal:
    """What a drafter proposes.

    Args:
        vocab_size: the target's.

    Raises:
        EngineError: if that is no proposal for this state.
    """
    proposal: Proposal = drafter.propose(state, num_draft_tokens)
    if broken := broken_rule(proposal, state, vocab_size):
        raise EngineError(f"{type(drafter).__name__}.propose must return {broken}")
    return proposal


def broken_rule(proposal: Any, state: BatchState, vocab_size: int) -> str:
    """The rule that a proposal breaks and what it is instead, as in "tokens [B, K] ..., got ..."; empty if it breaks none.

    Values are checked on a CPU only, where looking at them waits for nothing.
    """
    if not isinstance(proposal, Proposal):
        return f"an engine.Proposal, got {type(proposal).__name__}"
    tokens, logits, stats, confidence = proposal
    batch, device = len(state.seq_lens), state.tokens.device
    if not isinstance(tokens, Tensor) or tokens.dtype != torch.int64 or tokens.device != device or tokens.dim() != 2:
        return f"tokens [B, K] int64 on {device}, got {_described(tokens)}"
    shape = tokens.shape
    if len(tokens) != batch:
        return f"tokens [B, K] with B = {batch}, got {list(shape)}"
    if state.can_look and tokens.numel() and int(tokens.max()) >= vocab_size:
        return f"tokens below {vocab_size}, the size of the target's vocabulary, or -1, got {int(tokens.max())}"
    for name, value, rank in (("logits [B, K, V]", logits, 3), ("confidence [B, K]", confidence, 2)):
        if value is not None and not (
            isinstance(value, Tensor)
            and value.is_floating_point()
            and value.dim() == rank
            and value.shape[:2] == shape
            and (rank == 2 or value.shape[2] > 0)
        ):
            return f"{name} of floats with [B, K] = {list(shape)}, or None, got {_described(value)}"
    if state.can_look and confidence is not None and confidence.numel():
        low, high = confidence.aminmax()
        if not 0 <= float(low) <= float(high) < 1:
            return f"confidence in [0, 1), got values from {float(low):g} to {float(high):g}"
    if stats is not None and (logits is None or not isinstance(stats, RowStats)):
        return f"stats that are RowStats of its logits, or None, got {_described(stats)}"
    for name, value in stats._asdict().items() if stats is not None else ():
        if not isinstance(value, Tensor) or value.shape != shape:
            return f"stats.{name} [B, K] = {list(shape)}, got {_described(value)}"
    return ""


def _described(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{value.dtype} of shape {list(value.shape)} on {value.device}"
    return type(value).__name__
