"""`row_stats`, `sample` and `verify` on a CPU, in compiled loops (cpu_loops.py); see `reference` for what they are.

Torch's operations take tens of microseconds each after a model's forward pass, when nothing of them is in the caches, and a call
of the reference is a hundred of them. A call here is one.
"""

import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from . import cpu_loops, philox, reference
from .records import Draws, RowStats, Verdict
from .rows import Filters, adjusted, head, unpacked_with

logger = logging.getLogger(__name__)
SHARED = 1 << 20  # logits, a millisecond's work, for which one more thread is started
_RULES = dict(rejection=cpu_loops.REJECTION, block=cpu_loops.BLOCK, coupled=cpu_loops.COUPLED)


def row_stats(
    logits: Tensor,  # [B, V] or [B, W, V] float32, bfloat16 or float16, any strides; so below
    temperature: Tensor | None = None,  # [B] float
    top_k: Tensor | None = None,  # [B] int
    top_p: Tensor | None = None,  # [B] float
    min_p: Tensor | None = None,  # [B] float
    *,
    logit_bias: Tensor | None = None,  # [V], [B, V] or [B, W, V] float
    token_mask: Tensor | None = None,  # likewise, bool
) -> RowStats:
    """Stats of rows: fields [B] or [B, W]."""
    rows = adjusted(logits, logit_bias, token_mask)
    return _of_rows(cpu_loops.STATS, rows, temperature, (top_k, top_p, min_p), (None, None, None), 0).stats


def sample(
    logits: Tensor,  # [B, V] or [B, W, V]
    temperature: Tensor | None = None,  # [B] float
    top_k: Tensor | None = None,  # [B] int
    top_p: Tensor | None = None,  # [B] float
    min_p: Tensor | None = None,  # [B] float
    *,
    seed: Tensor,  # [B] int64
    position: Tensor,  # [B] int64
    origin: Tensor | None = None,  # [B] int64
    stream: int = philox.SAMPLE,
    logit_bias: Tensor | None = None,  # [V], [B, V] or [B, W, V] float
    token_mask: Tensor | None = None,  # likewise, bool
    return_logprobs: bool = False,
    by_inversion: bool = False,
) -> Draws:
    """One token per row, with noise for each token, so that rows that are close draw the same as often as they can.

    By inversion it is the first token up to which the probabilities come to more than a single random number: others are drawn,
    with the same probabilities and in less time."""
    rows, filters = adjusted(logits, logit_bias, token_mask), (top_k, top_p, min_p)
    what = cpu_loops.BY_INVERSION if by_inversion else cpu_loops.BY_TOKEN
    draws = _of_rows(what, rows, temperature, filters, (seed, position, origin), stream)
    return draws if return_logprobs else draws._replace(logprobs=None)


def verify(
    target_logits: Tensor,  # [B, K+1, V_target], or packed [N, V_target]
    draft_tokens: Tensor,  # [B, K] int64
    draft_logits: Tensor | None = None,  # [B, K, V_draft]
    draft_stats: RowStats | None = None,  # of draft_logits, fields [B, K]
    *,
    temperature: Tensor | None = None,  # [B] float
    top_k: Tensor | None = None,  # [B] int
    top_p: Tensor | None = None,  # [B] float
    min_p: Tensor | None = None,  # [B] float
    seed: Tensor,  # [B] int64
    position: Tensor,  # [B] int64
    method: str = "rejection",  # or block or coupled
    logit_bias: Tensor | None = None,  # see `ops.verify`
    token_mask: Tensor | None = None,
    cu_num_logits: Tensor | None = None,  # [B+1] int32
    return_logprobs: bool = False,
) -> Verdict:
    """How many drafts are accepted, and the next token. Sequences with rows that are not a distribution go to the reference."""
    batch, num_drafts = draft_tokens.shape
    filters = top_k, top_p, min_p
    if cu_num_logits is not None and not (
        logit_bias is None and token_mask is None and _inside(cu_num_logits, len(target_logits))
    ):
        target_logits, logit_bias, token_mask = unpacked_with(
            target_logits, logit_bias, token_mask, cu_num_logits, num_drafts + 1
        )
        cu_num_logits = None
    target = adjusted(target_logits, logit_bias, token_mask)
    draft, its_stats = None, np.empty((2, 0, 0), np.float32)
    if draft_logits is not None and num_drafts and method != "coupled":
        draft = adjusted(draft_logits, *(head(value, num_drafts) for value in (logit_bias, token_mask)))
        draft_stats = draft_stats or row_stats(draft, temperature, *filters)
        its_stats = np.stack([_array(each, np.float32) for each in (draft_stats.lse, draft_stats.threshold)])

    tokens, logprobs = np.empty((batch, num_drafts + 1), np.int64), np.empty((batch, num_drafts + 1), np.float32)
    num_accepted, status = np.empty((2, batch), np.int32)
    decided = np.empty(batch, np.bool_)
    _in_threads(
        cpu_loops.verify_sequences,
        *(batch, target.numel()),
        _RULES[method],
        *_memory(target),
        _array(cu_num_logits, np.int32),
        *_options(batch, temperature, filters),
        *(_array(value, np.int64) for value in (seed, position, draft_tokens)),
        *_memory(draft),
        its_stats,
        return_logprobs,
        *(tokens, num_accepted, status, logprobs, decided),
    )
    if not decided.all():
        rest = torch.from_numpy(np.flatnonzero(~decided))
        if cu_num_logits is not None:
            target, _, _ = unpacked_with(target, None, None, cu_num_logits, num_drafts + 1)
        stats = None if draft is None or draft_stats is None else RowStats(*(field[rest] for field in draft_stats))
        theirs = reference.verify(
            target[rest],
            draft_tokens[rest],
            _at(draft, rest),
            stats,
            temperature=_at(temperature, rest),
            top_k=_at(top_k, rest),
            top_p=_at(top_p, rest),
            min_p=_at(min_p, rest),
            seed=seed[rest],
            position=position[rest],
            method=method,
            return_logprobs=return_logprobs,
        )
        tokens[~decided], num_accepted[~decided], status[~decided] = (field.numpy() for field in theirs[:3])
        if theirs.logprobs is not None:
            logprobs[~decided] = theirs.logprobs.numpy()
    return Verdict(
        torch.from_numpy(tokens),
        torch.from_numpy(num_accepted),
        torch.from_numpy(status),
        torch.from_numpy(logprobs) if return_logprobs else None,
    )


def warmup() -> None:
    """Compile the loops, or load what an earlier process has compiled."""
    logits, number = torch.zeros(1, 1, 2, dtype=torch.float32), torch.zeros(1, dtype=torch.int64)
    sample(logits, seed=number, position=number)
    verify(logits, number.new_empty(1, 0), seed=number, position=number)


def _of_rows(
    what: int,
    logits: Tensor,
    temperature: Tensor | None,
    filters: Filters,
    noise: tuple[Tensor | None, Tensor | None, Tensor | None],  # seed, position, origin
    stream: int,
) -> Draws:
    """The stats of rows, and what they draw by `what`, one of the numbers in cpu_loops.py. Rows that are no distribution go to the
    reference."""
    shape, size = logits.shape[:-1], logits.shape[-1]
    batch, width = shape if len(shape) == 2 else (len(logits), 1)
    threshold, lse, logprobs = np.empty((3, batch, width), np.float32)
    argmax, tokens = np.empty((2, batch, width), np.int64)
    decided = np.empty((batch, width), np.bool_)
    seed, position, origin = (_array(value, np.int64, batch) for value in noise)
    _in_threads(
        cpu_loops.sample_rows,
        *(batch, logits.numel()),
        what,
        *_memory(logits),
        *_options(batch, temperature, filters),
        *(seed, position, origin, stream),
        *(threshold, lse, argmax, tokens, logprobs, decided),
    )
    if not decided.all():
        b, w = map(torch.from_numpy, np.nonzero(~decided))
        theirs = reference.row_stats(
            logits.reshape(batch, width, size)[b, w],
            *(_at(value, b) for value in (temperature, *filters)),
        )
        tokens[~decided], logprobs[~decided] = -1, 0
        threshold[~decided], lse[~decided], argmax[~decided] = (field.numpy() for field in theirs)
    tokens_, logprobs_, *stats = (
        torch.from_numpy(each.reshape(shape)) for each in (tokens, logprobs, threshold, lse, argmax)
    )
    return Draws(tokens_, RowStats(*stats), logprobs_)


def _in_threads(loop: Callable[..., None], batch: int, work: int, *arguments: Any) -> None:
    """Run a loop over all sequences of a batch, each worked on by itself, in several threads if there is much to do."""
    if not cpu_loops.kept(loop):
        logger.warning("compiling %s for this CPU, which takes some ten seconds once on a machine", loop.__name__)

    def run(begin: int, end: int) -> None:
        try:
            loop(begin, end, *arguments)
        except OSError:  # it has been compiled, but there is no room on disk to keep it
            loop(begin, end, *arguments)

    threads = min(torch.get_num_threads(), batch, work // SHARED)
    if threads < 2:
        run(0, batch)
        return
    ends = [batch * part // threads for part in range(threads + 1)]
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(run, ends[:-1], ends[1:]))


def _inside(cu_num_logits: Tensor, num_rows: int) -> bool:
    """Whether packed rows are where there are any: loops do not look before they read."""
    begins = cu_num_logits.numpy()
    return bool((begins >= 0).all() and (begins <= num_rows).all())


def _at(values: Tensor | None, index: Tensor) -> Tensor | None:
    return None if values is None else values[index]


def _memory(logits: Tensor | None) -> tuple[NDArray[np.int16], NDArray[np.float32], int, int, int]:
    """Rows [B, W, V], [B, V] or [N, V] as the loops take them: the memory, of bfloat16 or else of float32 numbers, V, and how many
    there are from a sequence to the next and from a row to the next."""
    none = np.empty(0, np.int16), np.empty(0, np.float32)
    if logits is None or not logits.numel():
        return *none, 0, 0, 0
    logits = logits.detach().float() if logits.dtype == torch.float16 else logits.detach()
    if logits.stride(-1) != 1:
        logits = logits.contiguous()
    sizes, strides = logits.shape, logits.stride()
    if not logits.is_contiguous():  # all from the first number to the last
        logits = logits.as_strided((1 + sum((n - 1) * step for n, step in zip(sizes, strides, strict=True)),), (1,))
    if logits.dtype == torch.float32:
        both = none[0], logits.numpy().reshape(-1)
    else:
        both = logits.view(torch.int16).numpy().reshape(-1), none[1]
    return *both, sizes[-1], strides[0], strides[-2]


def _options(batch: int, temperature: Tensor | None, filters: Filters) -> tuple[NDArray[Any], ...]:
    """top-k, top-p, min-p and the temperatures of sequences, [B] each. Nothing where there is no top-k or top-p at all."""
    top_k, top_p, min_p = filters
    temperatures = np.ones(batch, np.float32) if temperature is None else _array(temperature, np.float32)
    return _array(top_k, np.int64), _array(top_p, np.float64), _array(min_p, np.float32, batch), temperatures


def _array(values: Tensor | None, dtype: type, size: int = 0) -> NDArray[Any]:
    """The numbers of a tensor in memory, or zeros where there is none. Contiguous, as loops are compiled for that."""
    if values is None:
        return np.zeros(size, dtype)
    values = values.detach()
    return np.ascontiguousarray((values.float() if values.dtype == torch.bfloat16 else values).numpy(), dtype)
