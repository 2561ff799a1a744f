"""The small records that cross the kernel boundary, and the status flags."""

from enum import IntFlag
from typing import NamedTuple

from torch import Tensor

# A temperature below this is greedy, because logit / T could overflow float32. The value is 1e-5 rounded to float32, so that a
# number of Python compares with it as one in a float32 tensor does. 1e-5 itself is not below it.
GREEDY_BELOW = 10_995_116 * 2.0**-40
DRAW_BLOCK = 1024  # tokens; a draw in two levels first chooses a block of this size, then a token inside it


class Status(IntFlag):
    """What was wrong with the logits of a sequence. 0 means that all is well.

    Only rows up to the deciding one, which the next token comes from, influence the status. So it does not depend on what a
    drafter proposed after a rejection.
    """

    NAN_TARGET = 1  # a target row with NaN or +inf: nothing is drawn from it, the verdict ends before it
    EMPTY_TARGET = 2  # a target row that is -inf throughout: the same
    INVALID_DRAFT = 4  # a draft row without a distribution (NaN, +inf, all -inf): the draft ends before it
    ZERO_DRAFT_PROB = 8  # q(token) = 0 for a proposed token, so q did not draw it: the draft ends before it
    EMPTY_RESIDUAL = 16  # p <= q everywhere after a rejection (rounding): the target's own distribution is used


FATAL_STATUS = Status.NAN_TARGET | Status.EMPTY_TARGET


class RowStats(NamedTuple):
    """A distribution is its logits and these numbers: prob(v) = exp(logit_v / T - lse) where logit_v >= threshold, else 0.

    Greedy rows (temperature below GREEDY_BELOW): threshold is the row's maximum. lse is that of all logits at temperature 1, so
    logit - lse is the model's own log-probability of the token.

    Rows without a distribution: lse is NaN if there is NaN or +inf in the row, and -inf if the row is -inf throughout.
    Their threshold means nothing.
    """

    threshold: Tensor  # [...] float32 (float64 for float64 logits), in units of the raw logits; -inf: unfiltered
    lse: Tensor  # [...] same dtype, log-sum-exp of the kept logits / T
    argmax: Tensor  # [...] int64, the lowest id among the largest logits; some id of the row at a temperature of NaN


class Draws(NamedTuple):
    """What `sample` returns."""

    tokens: Tensor  # [B] or [B, W] int64; -1 where the row has no distribution
    stats: RowStats  # of the rows that were drawn from
    logprobs: Tensor | None = None  # [B] or [B, W], dtype of stats.lse, log p of the tokens; 0 where there is none


class Verdict(NamedTuple):
    """What `verify` returns."""

    tokens: Tensor  # [B, K+1] int64: accepted drafts, then the next token, then -1
    num_accepted: Tensor  # [B] int32
    status: Tensor  # [B] int32, bits of Status
    logprobs: Tensor | None = None  # [B, K+1] float32 (or float64), log p of the emitted tokens; 0 after them
