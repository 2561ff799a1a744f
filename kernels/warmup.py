"""Compile the kernels before they are needed, so that nothing compiles while serving or inside a CUDA graph."""

from collections.abc import Sequence
from typing import Any

import torch

from . import philox
from .checks import FLOATS, as_int
from .ops import METHODS, row_stats, sample, use_loops, use_triton, verify
from .workspace import reserve_counters


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
    packed: bool = False,
) -> None:
    """Run every variant that such calls of `row_stats`, `sample` and `verify` can need, and reserve memory for graphs.

    Covered:

    - Calls that pass `temperature`. With `filters`, also those that pass all of `top_k`, `top_p` and `min_p` beside it. (To leave
      one out, pass a value that turns it off.) `top_k` is int64; the others are float32, as is a bias.
    - Logits that are contiguous and begin on 16 bytes. Where V is a multiple of 16, also the first rows, or one row, of each
      sequence of such a batch.

    Not covered, so compiled at first use:

    - calls without `temperature`, or with one or two of the filters;
    - calls without the bias or the mask that is warmed up for;
    - calls with a bias or a mask where V is no multiple of 16;
    - other layouts and dtypes.

    Batch size, number of drafts and where a batch begins in larger tensors do not change what is compiled, with two exceptions.
    `verify` has one variant for no draft, one for up to 7, and one each for up to 15, 31 and so on. Where V is no multiple of 16
    there are more, because a sequence of rows then begins on 16 elements at some numbers of drafts only.

    Args:
        vocab_size: V of the target's logits.
        num_draft_tokens: the largest K, >= 0.
        dtype: of the logits.
        device: of the logits. Where Numba serves, what it compiles is compiled, or loaded if it was before on this machine.
            Nothing is done where the torch twins serve: under ENGINE_KERNELS=torch, and in float64.
        methods: those of `verify` that will be used.
        draft_vocab_size: V of the draft's logits, >= 1; None: drafts are one-hot.
        filters: whether some calls pass top_k, top_p and min_p (each call: all three or none).
        logit_bias, token_mask: whether calls pass them, as [V] tensors.
        return_logprobs: whether calls ask for log-probabilities.
        packed: whether `verify` gets packed logits, with cu_num_logits.

    Raises:
        ValueError: naming the argument whose type or value does not fit.
    """
    vocab_size, num_draft_tokens = as_int("vocab_size", vocab_size), as_int("num_draft_tokens", num_draft_tokens)
    draft_vocab_size = None if draft_vocab_size is None else as_int("draft_vocab_size", draft_vocab_size)
    if vocab_size < 1 or num_draft_tokens < 0:
        raise ValueError(f"vocab_size must be >= 1 and num_draft_tokens >= 0, got {vocab_size} and {num_draft_tokens}")
    if draft_vocab_size is not None and draft_vocab_size < 1:
        raise ValueError(f"draft_vocab_size must be >= 1 or None, got {draft_vocab_size}")
    if not isinstance(methods, list | tuple | set | frozenset) or not all(each in METHODS for each in methods):
        raise ValueError(f"methods must be a list of some of {', '.join(METHODS)}, got {methods!r:.100}")
    if dtype not in FLOATS:
        raise ValueError(f"dtype must be floating (of 16, 32 or 64 bits), got {dtype}")
    try:
        example = torch.empty(0, dtype=dtype, device=device)
    except (RuntimeError, TypeError, AssertionError) as error:
        raise ValueError(f"device must be one that torch can make tensors on, got {device!r}: {error}") from error
    if not use_triton(example):
        if use_loops(example):
            from .cpu import warmup as warm_up_loops

            warm_up_loops()
        return
    device = example.device  # with its index
    reserve_counters(device)
    whole = torch.zeros(1, dtype=torch.int64, device=device)
    real = torch.ones(1, dtype=torch.float32, device=device)  # whatever torch's default dtype is
    where: dict[str, Any] = dict(seed=whole, position=whole)
    for filtered in {False, filters}:
        rows: dict[str, Any] = dict(temperature=real)
        rows |= dict(top_k=whole, top_p=real, min_p=real) if filtered else {}
        for size in {vocab_size, draft_vocab_size or vocab_size}:
            adjust = _bias_and_mask(size, logit_bias, token_mask, device)
            for width in _widths(num_draft_tokens, size):
                logits = torch.zeros(1, width, size, dtype=dtype, device=device)
                row_stats(logits, **rows, **adjust)
                for origin, stream in ((None, philox.SAMPLE), (whole, philox.DRAFT)):
                    more: dict[str, Any] = dict(origin=origin, stream=stream, return_logprobs=return_logprobs)
                    sample(logits, **rows, **where, **adjust, **more)
        adjust = _bias_and_mask(vocab_size, logit_bias, token_mask, device)
        for width in _widths(num_draft_tokens, vocab_size, draft_vocab_size or vocab_size):
            logits = torch.zeros(1, width, vocab_size, dtype=dtype, device=device)
            layout: dict[str, Any] = {}
            if packed:
                logits = logits[0]
                layout = dict(cu_num_logits=torch.tensor([0, width], dtype=torch.int32, device=device))
            drafts = torch.zeros(1, width - 1, dtype=torch.int64, device=device)
            draft = torch.zeros(1, width - 1, draft_vocab_size or 1, dtype=dtype, device=device)
            for method in methods:
                for proposed in (None, draft) if draft_vocab_size else (None,):
                    more = dict(method=method, return_logprobs=return_logprobs)
                    verify(logits, drafts, proposed, **rows, **where, **adjust, **layout, **more)


def _widths(num_draft_tokens: int, vocab_size: int, draft_vocab_size: int | None = None) -> list[int]:
    """One of the widths up to K+1 for each variant.

    Variants differ in the lanes that hold the rows, and in whether the logits of a sequence begin on 16 elements, which decides
    how the compiler loads them."""
    from .launch import lanes  # here, as that needs Triton

    def variant(width: int) -> tuple[int, ...]:
        aligned = width * vocab_size % 16, (width - 1) * (draft_vocab_size or 16) % 16
        return lanes(width), *(rest == 0 for rest in aligned)

    return list({variant(width): width for width in range(1, num_draft_tokens + 2)}.values())


def _bias_and_mask(size: int, logit_bias: bool, token_mask: bool, device: torch.device) -> dict[str, Any]:
    """A bias and a mask that change nothing, where they are asked for."""
    found = {"logit_bias": torch.zeros(size, dtype=torch.float32, device=device)} if logit_bias else {}
    return found | ({"token_mask": torch.ones(size, dtype=torch.bool, device=device)} if token_mask else {})
