"""RaggedCache: static K/V buffers in which every row has its own length.

A row's K/V is valid below its `seq_lens` (held by `BatchState`, not here); what lies beyond is stale, masked, and
overwritten in time. Rolling back is therefore lowering `seq_lens` and touches no memory. Each slot has one more position
than rows can use, the trash position, where the K/V of padding goes.
"""

import functools
import inspect
import weakref
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from .backend import scatter_kv


@dataclass
class CallPlan:
    """Where one model call reads and writes; shared by all layers, set anew before each call."""

    rows: slice | Tensor  # the slots of this call; scattered ones ([n] int64) are read through a copy
    slots: Tensor  # [n, 1] int64, the same slots as an index
    start: Tensor  # [n] int64, position of column 0
    num_valid: Tensor  # [n] int64, columns of each row that are no padding
    write_at: Tensor  # [n, W] int64 positions; the trash position where a column is padding
    # In a call without padding, the model gets the N valid columns of all rows side by side, as one row [1, N]. This says
    # which belong to which row; `slots` and `write_at` are [N, 1] then. None in any other call.
    runs: "list[Run] | None"
    span: slice | None  # of a single row on a CPU, whose K/V a plain copy writes: the positions of its valid columns
    kv_length: int  # keys and values [0, kv_length) are handed to attention
    masks: list[Tensor] = field(default_factory=list)  # of a compiled call, by number: [n, 1, W, kv_length] bool each
    prepared: dict[Hashable, Any] = field(default_factory=dict)  # what attention works out in the first layer, for all

    @property
    def slots_or_none(self) -> Tensor | None:
        """[n] int64; None for slots 0, 1, ..."""
        return None if isinstance(self.rows, slice) and self.rows.start == 0 else self.slots[:, 0]

    def write(self, buffer: Tensor, new: Tensor) -> None:
        """Put the columns of a call into a buffer [slots, ..., capacity + 1, D].

        Args:
            new: [n, ..., W, D]; of a call without padding [1, ..., N, D].
        """
        if self.runs is not None:
            new = new.transpose(0, -2)  # N rows of one column
        if self.span is not None:
            buffer[self.rows, ..., self.span, :] = new[..., : self.span.stop - self.span.start, :]
        elif new.dim() == 3:
            buffer[self.slots, self.write_at] = new
        else:
            buffer[self.slots, :, self.write_at] = new.transpose(1, 2)


@dataclass(frozen=True)
class Run:
    """Neighbouring rows that have equally many columns, in a call without padding (see `CallPlan.runs`)."""

    rows: slice  # of the call
    tokens: slice  # of the N
    width: int


def _runs(num_valid: list[int]) -> list[Run]:
    """The runs of a call whose rows have so many valid columns each; rows without any are in none."""
    runs, row, token = [], 0, 0
    for width, equal in groupby(num_valid):
        rows = slice(row, row + len(list(equal)))
        row = rows.stop
        if width:
            tokens = slice(token, token + width * (rows.stop - rows.start))
            token = tokens.stop
            runs.append(Run(rows, tokens, width))
    return runs


class RaggedLayer(CacheLayerMixin):
    """One layer's buffers: keys and values [slots, heads, >= capacity + 1, head_dim]."""

    keys: Tensor
    values: Tensor
    is_sliding = False  # sliding layers keep all K/V too, the mask holds their window

    def __init__(self, owner: "RaggedCache") -> None:
        super().__init__()
        # A proxy, as the owner holds this: in a cycle, gigabytes would stay until the garbage collector looks for them.
        self._owner: RaggedCache = weakref.proxy(owner)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        capacity = self._owner.capacity
        self.keys, self.values = self._zeros_like(key_states, capacity), self._zeros_like(value_states, capacity)
        self.is_initialized = True

    def _zeros_like(self, states: Tensor, capacity: int) -> Tensor:
        _, heads, _, head_dim = states.shape
        # Zeros, not garbage: masked values are multiplied by probability 0, and 0 * NaN is NaN.
        return states.new_zeros(self._owner.num_slots, heads, capacity + 1, head_dim)

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write new K/V [n, heads, W, head_dim], and return those that attention reads, [n, heads, kv_length, head_dim].

        Where attention reads the buffers itself (`whole_buffers`), these are returned. While a model is being compiled
        nothing is written, and the new K/V is returned: attention calls this again when the graph runs.
        """
        if torch.compiler.is_dynamo_compiling():
            return key_states, value_states
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        plan = self._owner.plan
        if self._owner.whole_buffers:
            new = key_states, value_states
            scatter_kv(self.keys, self.values, *new, plan.start, plan.num_valid, slots=plan.slots_or_none)
            return self.keys, self.values
        plan.write(self.keys, key_states)
        plan.write(self.values, value_states)
        return self.keys[:, :, : plan.kv_length][plan.rows], self.values[:, :, : plan.kv_length][plan.rows]

    def grow(self, capacity: int) -> None:
        """Move to longer buffers, keeping what is there. Without memory for both, all stays as it is, and that is raised."""
        if not self.is_initialized or (old := self.keys.shape[2] - 1) >= capacity:
            return
        keys, values = self._zeros_like(self.keys, capacity), self._zeros_like(self.values, capacity)
        keys[:, :, :old] = self.keys[:, :, :old]
        values[:, :, :old] = self.values[:, :, :old]
        self.keys, self.values = keys, values

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._owner.plan.kv_length, 0

    def get_seq_length(self) -> int:
        return 0  # there is no single length; positions are always passed explicitly

    def get_max_length(self) -> int:
        return self._owner.capacity


class RaggedCache(Cache):
    """A `transformers` cache for `num_slots` rows of individual length.

    Args:
        num_layers: layers of the model.
        num_slots: rows.
        granularity: the capacity and the lengths that attention reads are multiples of this, in tokens.

    Attributes:
        capacity: tokens that a row has room for.
        plan: of the call that is under way.
        whole_buffers: attention reads the buffers itself, up to each row's own length.
        ragged_layers: the buffers, made when the first K/V comes.
    """

    def __init__(self, num_layers: int, num_slots: int, granularity: int) -> None:
        self.num_slots, self.granularity, self.capacity = num_slots, granularity, 0
        self.plan: CallPlan  # set by plan_call
        self.whole_buffers = False
        self._reached = np.zeros(num_slots, dtype=np.int64)  # by slot: largest kv_length of a call since it was taken
        self.ragged_layers = [RaggedLayer(self) for _ in range(num_layers)]
        super().__init__(layers=list(self.ragged_layers))

    @torch.inference_mode()  # buffers are made and filled under it, so only under it can they be written
    def reserve(self, length: int) -> None:
        """Make room for rows of `length` tokens.

        Layer by layer, so that there are two buffers of one layer at a time and not of all. If memory runs out on the way, some
        layers have longer buffers than they need, the capacity is what it was, and the rest can be made up for later.
        """
        if length > self.capacity:
            capacity = self.round_up(length)
            for layer in self.ragged_layers:
                layer.grow(capacity)
            self.capacity = capacity

    def round_up(self, length: int) -> int:
        """A length of K/V that calls may read: a multiple of the granularity."""
        return -(-length // self.granularity) * self.granularity

    def plan_call(
        self,
        rows: slice | Tensor,
        positions: Tensor,  # [n, W] int64
        valid: Tensor,  # [n, W] bool, False: padding
        num_valid: Tensor,  # [n] int64
        kv_length: int,
        taken: Tensor | None = None,  # [N] int64, where `valid` [n * W] is True, if the model is called without padding
    ) -> None:
        """Prepare a model call: from now until the next one, layers read and write as this `plan` says."""
        kv_length = min(self.round_up(kv_length), self.capacity)
        if (index := _on_host(rows, valid.device)) is not None:
            self._reached[index] = np.maximum(self._reached[index], kv_length)
        start = positions[:, 0].contiguous()  # the kernels need it so, and would copy it in every layer
        slots, write_at = slot_numbers(rows, valid.device), positions.where(valid, self.capacity)
        span = runs = None
        if len(slots) == 1 and slots.device.type == "cpu":
            begin = int(start)
            span = slice(begin, begin + int(num_valid))
        elif taken is not None:
            runs = _runs(num_valid.tolist())
            slots, write_at = slots[taken // valid.shape[1]], write_at.flatten()[taken, None]
        self.plan = CallPlan(rows, slots[:, None], start, num_valid, write_at, runs, span, kv_length)

    @torch.inference_mode()
    def clear(self, slot: int, begin: Tensor) -> None:
        """Set a slot's K/V to 0 from a position [] int64 on. Needed only after NaN, which survives a mask: 0 * NaN is NaN."""
        for layer in self.ragged_layers:
            if layer.is_initialized:
                stale = (torch.arange(layer.keys.shape[2], device=begin.device) >= begin)[:, None]
                layer.keys[slot].masked_fill_(stale, 0)
                layer.values[slot].masked_fill_(stale, 0)

    @torch.inference_mode()
    def begin_rows(self, rows: slice | Tensor) -> None:
        """Set the K/V of slots to 0 that new rows take: the last ones may have left NaN, see `clear`.

        Not where attention reads each row's own length alone (`whole_buffers`).
        """
        layers = [layer for layer in self.ragged_layers if layer.is_initialized and not self.whole_buffers]
        if not layers:
            return
        index = _on_host(rows, layers[0].keys.device)
        end = None if index is None else int(self._reached[index].max(initial=0))
        for layer in layers:
            layer.keys[rows, :, :end] = 0
            layer.values[rows, :, :end] = 0
        if index is not None:  # not before: an interrupted clearing is made up for by the next one
            self._reached[index] = 0


@functools.cache
def cache_argument(forward: Callable[..., Any]) -> str:
    """What `forward` of a class of transformers calls its cache: `cache` from release 5.24 on, `past_key_values` before."""
    return "cache" if "cache" in inspect.signature(forward).parameters else "past_key_values"


def slot_numbers(rows: slice | Tensor, device: torch.device) -> Tensor:
    """Slots as an index [n] int64."""
    return torch.arange(rows.start, rows.stop, device=device) if isinstance(rows, slice) else rows


def _on_host(rows: slice | Tensor, device: torch.device) -> slice | npt.NDArray[np.int64] | None:
    """Slots as an index for numpy; None on an accelerator, where replayed calls would go unnoticed by `_reached`."""
    if device.type != "cpu":
        return None
    return rows if isinstance(rows, slice) else rows.numpy()
