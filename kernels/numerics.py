"""Passes over rows of numbers in torch: exponentials and their sums, selected rows, and rows chunk by chunk.

On a CPU the passes over memory are what costs. So rows are taken in chunks, and work that would change nothing is left out, as
`bounds` tells. On other devices nothing depends on values, because looking at them would wait for the device, and all rows are
one chunk.
"""

import math
from collections.abc import Iterator
from itertools import repeat
from typing import Any

import numpy as np
import torch
from torch import Tensor

# Logits. With larger chunks, intermediate results leave the cache, and malloc may ask the system for their memory anew in every
# call. The page faults then cost more than the work: 4,000 of them for 8 rows of 5 times 49,152. Smaller chunks are more calls.
CHUNK = 1 << 19
LOG2_E = math.log2(math.e)
SHARED = 1 << 15  # numbers; torch divides the work on more of them among its threads
LANES = 32  # numbers in two vectors of AVX-512, which torch processes at once
SMALL, LARGE = 2.0**-60, 2.0**60  # between them a sum of float32 has lost nothing by underflow or overflow


def computed(logits: Tensor) -> Tensor:
    """Logits in the dtype of the computation: float64 stays, all others become float32."""
    return logits if logits.dtype in (torch.float32, torch.float64) else logits.float()


def _has_fast_exp2(values: Tensor) -> bool:
    """On a CPU the exp of float32 takes three times as long as exp2, and far longer where there is -inf. In return, the error of
    exp2(x log2(e)) grows to |x| / 2 units in the last place."""
    return values.device.type == "cpu" and values.dtype != torch.float64


def exp(values: Tensor) -> Tensor:
    """exp of float32 or float64."""
    return _exp2_(values * LOG2_E) if _has_fast_exp2(values) else values.exp()


def exp_(values: Tensor) -> Tensor:
    """The same in place, which saves getting new memory from the system. That can take longer than the work."""
    return _exp2_(values.mul_(LOG2_E)) if _has_fast_exp2(values) else values.exp_()


def _exp2_(values: Tensor) -> Tensor:
    """2 to the power of each number, in place, all by the same function. The numbers must be contiguous.

    Torch uses another function, which rounds differently, for the numbers after the last whole vector of each thread's share. A row
    would then depend on where it ends. So these numbers are padded to whole vectors."""
    size = values.numel()
    step = LANES if size <= SHARED else LANES * min(torch.get_num_threads(), -(-size // SHARED))
    rest = size % step
    if not rest:
        return values.exp2_()
    flat = values.view(-1)
    _exp2_(flat[: size - rest])
    flat[size - rest :] = torch.nn.functional.pad(flat[size - rest :], (0, step - rest)).exp2_()[:rest]
    return values


def row_sums(values: Tensor) -> Tensor:
    """The sum of each row: [..., V] -> [...]. The numbers must be contiguous.

    A single long row is summed by all threads of torch, which adds in another order. Two rows are summed by one thread each, so a
    single row is summed twice."""
    size = values.numel()
    if size == values.shape[-1] >= SHARED and values.device.type == "cpu" and torch.get_num_threads() > 1:
        return values.expand(2, *values.shape).sum(dim=-1)[0]
    return values.sum(dim=-1)


def log_sum_exp(logits: Tensor, scale: Tensor | None = None, threshold: Tensor | None = None) -> Tensor:
    """log of the sum of exp(logit * scale) over tokens with logit >= threshold. NaN where there is +inf.

    logits are [..., V], scale, threshold and the result [...]."""
    factor = 1.0 if scale is None else scale[..., None]
    if _has_fast_exp2(logits):
        total = row_sums(_exp2_(scaled_logits(logits, factor * LOG2_E, threshold)))
    else:
        total = row_sums(scaled_logits(logits, factor, threshold).exp_())
    low, high = bounds(total)
    if SMALL < low <= high < LARGE:  # the usual case: whatever was lost does not count in such a sum
        return total.log_()
    sound = (total > SMALL) & (total < LARGE)  # such rows keep their sum, whatever the others are
    values = scaled_logits(logits, factor, threshold)
    peak = finite_peak(values)
    shifted = row_sums(exp_(values.sub_(peak[..., None]))).log_().add_(peak)
    return total.log_().where(sound, shifted)


def scaled_logits(logits: Tensor, scale: Tensor | float, threshold: Tensor | None) -> Tensor:
    """logit * scale where the logit is not below the threshold, and -inf elsewhere; contiguous, in memory of its own.

    logits are [..., V], scale a number or [..., 1], threshold [...]."""
    values = computed(logits)
    below = None if threshold is None else values < threshold[..., None]
    scaled = (values * scale if values is logits else values.mul_(scale)).contiguous()
    return scaled if below is None else scaled.masked_fill_(below, -torch.inf)


def finite_peak(values: Tensor) -> Tensor:
    """The largest of each row: [..., V] -> [...]. The smallest finite number instead of -inf, because -inf - -inf is NaN."""
    return values.amax(dim=-1).clamp_(min=torch.finfo(values.dtype).min)


def argmax(values: Tensor) -> Tensor:
    """The first place of the largest, or of NaN if there is one: [..., V] float32 or float64 -> [...] int64.

    On a CPU numpy computes it: for 6 rows of 49,152 it takes 21 us, and torch 400."""
    if values.device.type != "cpu":
        return values.argmax(dim=-1)
    return torch.from_numpy(np.asarray(values.detach().numpy().argmax(axis=-1)))


def finite(values: Tensor) -> Tensor:
    """As torch.isfinite, in two steps instead of four."""
    return values.abs() < torch.inf


def bounds(values: Tensor) -> tuple[float, float]:
    """The smallest and the largest of the values; NaN if one of them is NaN.

    (-inf, inf) where reading them would wait for a device: then nothing is known."""
    if values.device.type != "cpu":
        return -math.inf, math.inf
    if not values.numel():
        return math.inf, -math.inf
    low, high = values.aminmax()
    return low.item(), high.item()


def with_leading_dims(value: Tensor, dims: int) -> Tensor:
    """[V], [B, V] or [B, W, V] with dimensions of size 1 put before V until there are `dims`."""
    while value.dim() < dims:
        value = value[:, None] if value.dim() > 1 else value[None]
    return value


def resize(values: Tensor, vocab_size: int, value: float = -torch.inf) -> Tensor:
    """Cut or pad rows [..., V] to [..., vocab_size]."""
    missing = vocab_size - values.shape[-1]
    if missing > 0:
        return torch.nn.functional.pad(values, (0, missing), value=value)
    return values[..., :vocab_size] if missing else values


def take(values: Tensor, sequence: Tensor, index: Tensor) -> Tensor:
    """values[sequence[n], index[n]]: [B, W, ...] -> [N, ...]; may be a view."""
    if len(sequence) == 1 and values.device.type == "cpu":
        return values[int(sequence.item()), int(index.item())][None]
    if values.is_contiguous():  # in a third of the time
        return values.flatten(0, 1).index_select(0, sequence * values.shape[1] + index)
    return values[sequence, index]


def row_indices(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Sequence and index of each of the rows [B, W]: [B * W] each."""
    row = torch.arange(rows.numel(), device=rows.device)
    return row // rows.shape[1], row % rows.shape[1]


def chunks(size: int, *values: Tensor | None) -> Iterator[tuple[Any, ...]]:
    """Values [N, ...] cut along N into chunks; each of the N stands for `size` numbers to work on.

    A value that is None gives None in every chunk. The first value is not None."""
    first, most = values[0], max(1, CHUNK // size)
    if first is None or first.device.type != "cpu" or len(first) <= most:
        yield values
    else:
        yield from zip(*(repeat(None) if value is None else value.split(most) for value in values), strict=False)


def indices_unless_all(condition: Tensor) -> Tensor | None:
    """Where a condition [N] holds. None: everywhere, or only known by waiting for a device."""
    if condition.device.type != "cpu" or all(condition.tolist()):
        return None
    return condition.nonzero().squeeze(1)
