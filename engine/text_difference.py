"""Where two texts diverge, and how nearly the target was undecided there."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel, RepetitionPenaltyLogitsProcessor


@dataclass(frozen=True)
class Difference:
    """The first token at which a text leaves plain decoding's."""

    position: int  # among the new tokens, from 0
    token: int | None  # of the text; None: it ends before
    plain_token: int | None  # of plain decoding's text; None: that one ends before
    # log p(plain token) - log p(token) under the target, from one plain call over what both have in common: near 0 where
    # rounding may decide. None where one of the texts ends, or one of the logits overflows.
    log_prob_gap: float | None


class Comparer:
    """Compares texts; remembers a gap, since several methods often part from plain at one token.

    Args:
        target: decoded them.
        repetition_penalty: with this penalty; 1: off.
    """

    def __init__(self, target: PreTrainedModel, repetition_penalty: float = 1.0) -> None:
        self._target, self._penalty = target, repetition_penalty
        self._gaps: dict[tuple[int, ...], float] = {}

    def difference(self, prompt: list[int], tokens: list[int], plain: list[int]) -> Difference | None:
        """None where the texts are the same."""
        position = first_difference(plain, tokens)
        if position is None:
            return None
        token, plain_token = (ids[position] if position < len(ids) else None for ids in (tokens, plain))
        gap = None
        if token is not None and plain_token is not None:
            key = (*prompt, *plain[:position], -1, token, plain_token)
            if key not in self._gaps:
                text = prompt + plain[:position]
                self._gaps[key] = log_prob_gap(self._target, text, plain_token, token, self._penalty)
            gap = self._gaps[key] if math.isfinite(self._gaps[key]) else None
        return Difference(position, token, plain_token, gap)


def first_difference(a: list[int], b: list[int]) -> int | None:
    """Index of the first token at which two texts part; None if they are the same."""
    if a == b:
        return None
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def log_prob_gap(
    target: PreTrainedModel, text: list[int], token: int, other: int, repetition_penalty: float = 1.0
) -> float:
    """log p(token | text) - log p(other | text), in nats, from one plain call."""
    inputs: dict[str, Any] = {"input_ids": torch.tensor([text], device=target.device), "use_cache": False}
    with torch.no_grad():
        logits = target(**inputs).logits[:, -1].double()
    if repetition_penalty != 1:
        logits = RepetitionPenaltyLogitsProcessor(repetition_penalty)(inputs["input_ids"], logits)
    return float(logits[0, token] - logits[0, other])
