"""The public calls `row_stats`, `sample` and `verify`: the same operations on any device, by Triton, Numba or torch.

Triton serves CUDA and ROCm tensors, Numba those on a CPU, torch all others. On a CPU numpy serves a call of `verify` all of whose
rows are greedy, float64 too, unless they are packed or log-probabilities are asked for; other float64 goes to torch.
ENGINE_KERNELS=triton|torch overrides the choice; `triton` with TRITON_INTERPRET=1 runs the kernels on CPU tensors.
"""

import os
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from . import cpu_greedy, philox, reference
from .checks import FLOATS, NUMBERS, as_float, check_bool, check_tensor
from .records import GREEDY_BELOW, Draws, RowStats, Verdict
from .rows import adjusted

LOSSLESS_METHODS = ("rejection", "block", "coupled")
METHODS = (*LOSSLESS_METHODS, "typical")
_NEEDED, _WHOLE = ("seed", "position"), ("seed", "position", "origin")  # required; int64


def row_stats(
    logits: Tensor,  # [B, V] or [B, W, V] any floating dtype, any row stride
    temperature: Tensor | None = None,  # [B] float, below 1e-5 = greedy; None: 1
    top_k: Tensor | None = None,  # [B] int, <= 0 = off; None: off
    top_p: Tensor | None = None,  # [B] float in (0, 1]; None: off
    min_p: Tensor | None = None,  # [B] float in [0, 1]; None: off
    *,
    logit_bias: Tensor | None = None,  # [V], [B, V] or [B, W, V] floating, added to the logits
    token_mask: Tensor | None = None,  # [V], [B, V] or [B, W, V] bool, False = excluded
) -> RowStats:
    """Threshold, log-sum-exp and argmax of every row; see `RowStats` and `reference.row_stats`.

    Raises:
        ValueError: naming the argument whose type, shape, dtype or device does not fit.
    """
    _check_logits("logits", logits, "[B, V]", "[B, W, V]")
    _check_rows(len(logits), logits.device, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    _check_vocabulary(logits, logit_bias, token_mask)
    more: dict[str, Any] = dict(logit_bias=logit_bias, token_mask=token_mask)
    if use_triton(logits):
        from .row_stats import row_stats as triton_row_stats

        return triton_row_stats(logits, temperature, top_k, top_p, min_p, **more)
    if use_loops(logits):
        from .cpu import row_stats as cpu_row_stats

        return cpu_row_stats(logits, temperature, top_k, top_p, min_p, **more)
    return reference.row_stats(logits, temperature, top_k, top_p, min_p, **more)


def sample(
    logits: Tensor,  # [B, V] or [B, W, V] any floating dtype, any row stride
    temperature: Tensor | None = None,  # [B] float, below 1e-5 = greedy; None: 1
    top_k: Tensor | None = None,  # [B] int; None: off
    top_p: Tensor | None = None,  # [B] float; None: off
    min_p: Tensor | None = None,  # [B] float; None: off
    *,
    seed: Tensor,  # [B] int64
    position: Tensor,  # [B] int64, absolute position of the token drawn from column 0
    origin: Tensor | None = None,  # [B] int64, position of the round's first drafted token; None: 0
    stream: int = philox.SAMPLE,  # philox.DRAFT when drafting for rejection or block
    logit_bias: Tensor | None = None,  # [V], [B, V] or [B, W, V] floating, added to the logits
    token_mask: Tensor | None = None,  # [V], [B, V] or [B, W, V] bool, False = excluded
    return_logprobs: bool = False,
) -> Draws:
    """One token per row, and the stats of the rows; see `reference.sample`.

    Raises:
        ValueError: naming the argument whose type, shape, dtype, device or value does not fit.
    """
    _check_logits("logits", logits, "[B, V]", "[B, W, V]")
    rows = dict(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    _check_rows(len(logits), logits.device, **rows, seed=seed, position=position, origin=origin)
    if not isinstance(stream, int) or isinstance(stream, bool) or stream not in philox.STREAMS:
        raise ValueError(
            f"stream must be one of {', '.join(map(str, philox.STREAMS))} (see philox), got {stream!r:.100}"
        )
    _check_vocabulary(logits, logit_bias, token_mask)
    check_bool("return_logprobs", return_logprobs)
    more: dict[str, Any] = dict(rows, seed=seed, position=position, origin=origin, stream=stream)
    more |= dict(logit_bias=logit_bias, token_mask=token_mask, return_logprobs=return_logprobs)
    if use_triton(logits):
        from .sample import sample as triton_sample

        return triton_sample(logits, **more)
    if use_loops(logits):
        from .cpu import sample as cpu_sample

        return cpu_sample(logits, **more)
    return reference.sample(logits, **more)


def sample_by_inversion(
    logits: Tensor,  # [B, W, V]
    temperature: Tensor | None = None,  # [B] float
    top_k: Tensor | None = None,  # [B] int
    top_p: Tensor | None = None,  # [B] float
    min_p: Tensor | None = None,  # [B] float
    *,
    seed: Tensor,  # [B] int64
    position: Tensor,  # [B] int64
    origin: Tensor,  # [B] int64
    stream: int,
) -> Draws:
    """Like `sample(..., return_logprobs=True)`, but cheaper where the compiled CPU loops run: they take one random number
    per row, and check no arguments. They draw different tokens from the same distribution; use this for drafts that are
    verified against their distribution."""
    rows = temperature, top_k, top_p, min_p
    more: dict[str, Any] = dict(seed=seed, position=position, origin=origin, stream=stream, return_logprobs=True)
    if not use_triton(logits) and use_loops(logits):
        from .cpu import sample as cpu_sample

        return cpu_sample(logits, *rows, **more, by_inversion=True)
    return sample(logits, *rows, **more)


def verify(
    target_logits: Tensor,  # [B, K+1, V_target], or packed [N, V_target], any floating dtype, any row stride
    draft_tokens: Tensor,  # [B, K] int64; the draft of a sequence ends at its first -1
    draft_logits: Tensor | None = None,  # [B, K, V_draft] the logits the drafts were drawn from; None: one-hot
    draft_stats: RowStats | None = None,  # of draft_logits, [B, K], if the sampler already computed them
    *,
    temperature: Tensor | None = None,  # [B] float, below 1e-5 = greedy; None: 1
    top_k: Tensor | None = None,  # [B] int; None: off
    top_p: Tensor | None = None,  # [B] float; None: off
    min_p: Tensor | None = None,  # [B] float; None: off
    seed: Tensor,  # [B] int64
    position: Tensor,  # [B] int64, absolute position of the first drafted token
    method: str = "rejection",
    logit_bias: Tensor | None = None,  # [V], [B, V] or [B, K+1, V] floating, added to target and draft logits
    token_mask: Tensor | None = None,  # [V], [B, V] or [B, K+1, V] bool, False = excluded from both
    cu_num_logits: Tensor | None = None,  # [B+1] int32, where the rows of each sequence begin in packed target_logits
    return_logprobs: bool = False,
    typical_epsilon: float = 0.09,
    typical_delta: float = 0.3,
) -> Verdict:
    """How many drafts are accepted, and the next token; see `reference.verify` for the rules and `Status` for the flags.

    `rejection`, `block` and `coupled` are lossless. `typical` is lossy: it is Medusa's acceptance, where a draft is accepted
    while p(x) > min(typical_epsilon, typical_delta * exp(-entropy of p)). `coupled` and `typical` ignore draft_logits.

    Target and draft rows go through the same bias, mask, temperature and filters. V_draft may differ from V_target: a
    token that a vocabulary lacks has probability 0 in it.

    With `cu_num_logits` the target's rows are packed. Those from cu_num_logits[b] up to cu_num_logits[b+1] (exclusive) belong to
    sequence b, in ascending order. They may be fewer than K+1 where its drafts are fewer. A row that is missing counts as -inf
    throughout and is not read. logit_bias and token_mask are then [V], [B, 1, V] or packed as well, [N, V].

    Raises:
        ValueError: naming the argument whose type, shape, dtype, device or value does not fit.
    """
    if not isinstance(method, str) or method not in METHODS:
        raise ValueError(f"method must be one of {', '.join(METHODS)}, got {method!r:.100}")
    _check_logits("target_logits", target_logits, "[B, K+1, V]" if cu_num_logits is None else "[N, V]")
    device = target_logits.device
    _check_drafts(draft_tokens, draft_logits, draft_stats, device)
    batch = len(draft_tokens)
    _check_layout(target_logits, draft_tokens, cu_num_logits)
    rows = dict(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    _check_rows(batch, device, **rows, seed=seed, position=position)
    _check_vocabulary(target_logits, logit_bias, token_mask, None if cu_num_logits is None else batch)
    check_bool("return_logprobs", return_logprobs)
    typical_epsilon = as_float("typical_epsilon", typical_epsilon, 0)
    typical_delta = as_float("typical_delta", typical_delta, 0)
    more: dict[str, Any] = dict(
        rows, seed=seed, position=position, method=method, logit_bias=logit_bias, token_mask=token_mask
    )
    more |= dict(cu_num_logits=cu_num_logits, return_logprobs=return_logprobs)
    of_typical: dict[str, Any] = dict(typical_epsilon=typical_epsilon, typical_delta=typical_delta)
    if use_triton(target_logits, draft_logits, *(draft_stats or ())):
        from .verify import verify as triton_verify

        return triton_verify(target_logits, draft_tokens, draft_logits, draft_stats, **more, **of_typical)
    if not return_logprobs and cu_num_logits is None and _all_greedy(temperature) and _choice() != "torch":
        verdict = cpu_greedy.verify(adjusted(target_logits, logit_bias, token_mask), draft_tokens)
        if verdict is not None:  # else the reference tells what is wrong with a row
            return verdict
    elif method != "typical" and use_loops(target_logits, draft_logits, *(draft_stats or ())):
        from .cpu import verify as cpu_verify

        return cpu_verify(target_logits, draft_tokens, draft_logits, draft_stats, **more)
    return reference.verify(target_logits, draft_tokens, draft_logits, draft_stats, **more, **of_typical)


def use_loops(tensor: Tensor, *others: Tensor | None) -> bool:
    """Whether the compiled CPU loops, rather than the torch twins, serve these tensors. Assumes that Triton does not."""
    if tensor.device.type != "cpu" or _choice() == "torch" or not _has_numba():
        return False
    return all(each is None or each.dtype != torch.float64 for each in (tensor, *others))


def _all_greedy(temperature: Tensor | None) -> bool:
    """Of temperatures on a CPU, whether argmaxes are all that is wanted."""
    if temperature is None or temperature.device.type != "cpu":
        return False
    return all(each < GREEDY_BELOW for each in temperature.float().tolist())


@cache
def _has_numba() -> bool:
    return find_spec("numba") is not None


def use_triton(tensor: Tensor, *others: Tensor | None) -> bool:
    """Whether the kernels serve these tensors, which are on one device, and not their torch twins.

    Raises:
        ValueError: if ENGINE_KERNELS says so and it is not available.
    """
    choice = _choice()
    if any(each is not None and each.dtype == torch.float64 for each in (tensor, *others)):
        return False  # the kernels compute in float32
    if choice == "triton" and not tensor.is_cuda:
        check_kernels(tensor.device)
    return choice == "triton" or (choice == "" and tensor.is_cuda)


def check_kernels(device: torch.device) -> None:
    """Check that what ENGINE_KERNELS says is available for tensors on this device, as far as that is known before any call.

    Raises:
        ValueError: if it is not.
    """
    if _choice() != "triton":
        return
    if find_spec("triton") is None:
        raise ValueError("ENGINE_KERNELS must be 'torch' or unset where Triton is not installed, got 'triton'")
    from triton import knobs

    if device.type != "cuda" and not knobs.runtime.interpret:
        raise ValueError(
            f"ENGINE_KERNELS must be 'torch' or unset for tensors on {device} (or else TRITON_INTERPRET=1, for Triton's slow "
            f"interpreter), got 'triton'"
        )


def _choice() -> str:
    """What ENGINE_KERNELS says."""
    choice = os.environ.get("ENGINE_KERNELS", "")
    if choice not in ("", "triton", "torch"):
        raise ValueError(f"ENGINE_KERNELS must be 'triton' or 'torch', got {choice!r}")
    return choice


def _check_logits(name: str, logits: Tensor, *shapes: str, device: torch.device | None = None) -> None:
    check_tensor(name, logits, device)
    dims = [len(shape.split(", ")) for shape in shapes]
    if logits.dtype not in FLOATS or logits.dim() not in dims or logits.shape[-1] == 0:
        raise ValueError(
            f"{name} must be floating (of 16, 32 or 64 bits) and {' or '.join(shapes)} with V > 0, "
            f"got {logits.dtype} of shape {list(logits.shape)}"
        )


def _check_drafts(
    draft_tokens: Tensor, draft_logits: Tensor | None, draft_stats: RowStats | None, device: torch.device
) -> None:
    check_tensor("draft_tokens", draft_tokens, device)
    if draft_tokens.dim() != 2 or draft_tokens.dtype != torch.int64:
        raise ValueError(
            f"draft_tokens must be int64 of shape [B, K], got {draft_tokens.dtype} of shape {list(draft_tokens.shape)}"
        )
    if draft_logits is not None:
        _check_logits("draft_logits", draft_logits, "[B, K, V]", device=device)
        if draft_logits.shape[:2] != draft_tokens.shape:
            raise ValueError(
                f"draft_logits must be [B, K, V_draft] with [B, K] = {list(draft_tokens.shape)}, "
                f"got shape {list(draft_logits.shape)}"
            )
    elif draft_stats is not None:
        raise ValueError("draft_stats must be None where draft_logits is None (a one-hot draft has none)")
    if draft_stats is not None:
        _check_stats(draft_stats, draft_tokens)


def _check_layout(target_logits: Tensor, draft_tokens: Tensor, cu_num_logits: Tensor | None) -> None:
    """The target must have K+1 rows of logits for K drafts, unless they are packed."""
    batch, num_drafts = draft_tokens.shape
    if cu_num_logits is not None:
        check_tensor("cu_num_logits", cu_num_logits, target_logits.device)
        if cu_num_logits.dtype != torch.int32 or cu_num_logits.shape != (batch + 1,):
            raise ValueError(
                f"cu_num_logits must be int32 of shape [B+1] = [{batch + 1}] for draft_tokens of shape "
                f"{list(draft_tokens.shape)}, got {cu_num_logits.dtype} of shape {list(cu_num_logits.shape)}"
            )
    elif target_logits.shape[:2] != (batch, num_drafts + 1):
        raise ValueError(
            f"draft_tokens must be of shape [B, K] for target_logits of shape [B, K+1, V] = {list(target_logits.shape)}, "
            f"got shape {list(draft_tokens.shape)}"
        )


def _check_stats(stats: RowStats, draft_tokens: Tensor) -> None:
    shape = draft_tokens.shape
    if not isinstance(stats, RowStats):
        raise ValueError(
            f"draft_stats must be RowStats with fields of shape [B, K] = {list(shape)}, got {stats!r:.100}"
        )
    device = draft_tokens.device
    for name, value in zip(RowStats._fields, stats, strict=True):
        check_tensor(f"draft_stats.{name}", value, device)
        if value.shape != shape:
            raise ValueError(f"draft_stats.{name} must have shape [B, K] = {list(shape)}, got {list(value.shape)}")
        if name != "argmax" and value.dtype not in FLOATS:
            raise ValueError(f"draft_stats.{name} must be floating, got {value.dtype}")


def _check_rows(batch: int, device: torch.device, **values: Tensor | None) -> None:
    """Arguments with one value per sequence, [B]; None: the argument was left out."""
    for name, value in values.items():
        if value is None and name not in _NEEDED:
            continue
        check_tensor(name, value, device)
        assert value is not None
        if value.shape != (batch,):
            raise ValueError(f"{name} must have shape [B] = [{batch}], got {list(value.shape)}")
        if name in _WHOLE:
            if value.dtype != torch.int64:
                raise ValueError(f"{name} must be int64, got {value.dtype}")
        elif name == "top_k":
            if value.dtype in FLOATS or value.dtype not in NUMBERS:
                raise ValueError(f"top_k must be int, got {value.dtype}")
        elif value.dtype not in NUMBERS:
            raise ValueError(f"{name} must be float, got {value.dtype}")


def _check_vocabulary(
    logits: Tensor, logit_bias: Tensor | None, token_mask: Tensor | None, packed: int | None = None
) -> None:
    """`packed`: the number of sequences whose rows are packed in `logits`; None: they are not packed."""
    if logit_bias is token_mask is None:
        return
    size = logits.shape[-1]
    shapes = [(size,), (len(logits), size) if packed is None else (packed, 1, size), logits.shape]
    for name, value in (("logit_bias", logit_bias), ("token_mask", token_mask)):
        if value is None:
            continue
        check_tensor(name, value, logits.device)
        kind = "bool" if name == "token_mask" else "floating"
        if not (value.dtype == torch.bool if kind == "bool" else value.dtype in FLOATS):
            raise ValueError(f"{name} must be {kind}, got {value.dtype}")
        if value.shape not in shapes:
            allowed = ", ".join(str(list(shape)) for shape in shapes)
            raise ValueError(
                f"{name} must have shape [V], {'[B, V]' if packed is None else '[B, 1, V]'} or that of the logits "
                f"({allowed}), got {list(value.shape)}"
            )
