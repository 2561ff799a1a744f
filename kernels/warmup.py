"""Compile the kernels before they are needed, so that nothing compiles while serving or inside a CUDA graph."""

from collections.abc import Sequence
from typing import Any

import torch

from . import philox
from .ops import METHODS, row_stats, sample, verify
from .workspace import reserve


def warmup(
    vocab_size: int,
    num_draft_tokens: int,
    dtype: torch.dtype,
    device: torch.device | str,
    methods: Sequence[str] = ("rejection",),
    draft_vocab_size: int | None = None,
    *,
    filters: bool = False,
    logit_bias: bool = False,
    token_mask: bool = False,
    return_logprobs: bool = False,
) -> None:
    """Run every variant that such calls of `row_stats`, `sample` and `verify` can need, and reserve memory for graphs.

    Batch size, number of drafts and where a batch begins in larger tensors do not matter to what is compiled, except
    that there is one variant of `verify` for each power of two up to num_draft_tokens + 1.

    Args:
        vocab_size: V of the target's logits.
        num_draft_tokens: the largest K, >= 0.
        dtype: of the logits.
        device: where they are; nothing is done where it is a CPU, unless ENGINE_KERNELS=triton.
        methods: those of `verify` that will be used.
        draft_vocab_size: V of the draft's logits; None: drafts are one-hot.
        filters: temperature comes with top_k, top_p and min_p (each call: all three or none). False: with none of them.
        logit_bias, token_mask: whether [V] tensors of them are given.
        return_logprobs: whether log-probabilities are asked for.

    Raises:
        ValueError: naming the argument whose value does not fit.
    """
    if vocab_size < 1 or num_draft_tokens < 0:
        raise ValueError(f"vocab_size must be >= 1 and num_draft_tokens >= 0, got {vocab_size} and {num_draft_tokens}")
    for method in methods:
        if method not in METHODS:
            raise ValueError(f"methods must be among {', '.join(METHODS)}, got {method!r}")
    device = torch.empty(0, device=device).device  # with its index
    reserve(device)
    whole = torch.zeros(1, dtype=torch.int64, device=device)
    real = torch.ones(1, device=device)
    where: dict[str, Any] = dict(seed=whole, position=whole)
    for filtered in {False, filters}:
        rows: dict[str, Any] = dict(temperature=real)
        rows |= dict(top_k=whole, top_p=real, min_p=real) if filtered else {}
        for size in {vocab_size, draft_vocab_size or vocab_size}:
            words = _words(size, logit_bias, token_mask, device)
            logits = torch.zeros(1, 1, size, dtype=dtype, device=device)
            row_stats(logits, **rows, **words)
            for origin, stream in ((None, philox.SAMPLE), (whole, philox.DRAFT)):
                more: dict[str, Any] = dict(origin=origin, stream=stream, return_logprobs=return_logprobs)
                sample(logits, **rows, **where, **words, **more)
        words = _words(vocab_size, logit_bias, token_mask, device)
        for width in [1 << i for i in range((num_draft_tokens).bit_length() + 1)]:
            logits = torch.zeros(1, width, vocab_size, dtype=dtype, device=device)
            drafts = torch.zeros(1, width - 1, dtype=torch.int64, device=device)
            draft = torch.zeros(1, width - 1, draft_vocab_size or 1, dtype=dtype, device=device)
            for method in methods:
                for proposed in (None, draft) if draft_vocab_size else (None,):
                    more = dict(method=method, return_logprobs=return_logprobs)
                    verify(logits, drafts, proposed, **rows, **where, **words, **more)


def _words(size: int, logit_bias: bool, token_mask: bool, device: torch.device) -> dict[str, Any]:
    """A bias and a mask that change nothing, as far as they are wanted."""
    words = {"logit_bias": torch.zeros(size, device=device)} if logit_bias else {}
    return words | ({"token_mask": torch.ones(size, dtype=torch.bool, device=device)} if token_mask else {})
