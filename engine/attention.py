"""Attention over the ragged cache, as transformers' models call it (`transformers.AttentionInterface`).

On a GPU it is the ragged kernel, which reads the static buffers in place, up to each row's own length. It needs no mask,
and no K and V that are repeated for every query head or gathered from their slots. Elsewhere (on a CPU, and on a GPU that goes
without this kernel) it is `scaled_dot_product_attention` over the part of the buffers that is in use.
"""

import logging
import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from .backend import ragged_attention
from .cache import CallPlan, RaggedCache

logger = logging.getLogger(__name__)

PART = 128  # columns of a prefill that attend together, to the keys up to the last of them
# Measured on an EPYC with AVX2. One more call of attention takes as long as reading so many bytes of keys, and as many of values.
CALL_BYTES = 128 << 10
QUERIES = 48  # So many queries of a key take as long as reading it.
GROUPED, RAGGED = "speculative_engine_grouped", "speculative_engine_ragged"
_IMPLEMENTATION = "_attn_implementation_internal"  # of a config, where the name of the attention function is


class _Calls(threading.local):
    """The caches of the calls that are under way in this thread, the innermost last.

    A model gives its attention function no argument that says which cache is meant. One that an interrupt kept from being taken
    out again is not kept alive.
    """

    def __init__(self) -> None:
        self.caches: list[weakref.ref[RaggedCache]] = []


_calls = _Calls()


def is_own_call(cache: Any) -> bool:
    """Whether a call with this cache is under way in this thread, in which models attend our way."""
    caches = _calls.caches
    return bool(caches) and caches[-1]() is cache


def _innermost_cache() -> RaggedCache:
    """Of the call that is under way."""
    cache = _calls.caches[-1]()
    assert cache is not None  # whoever calls holds it
    return cache


def attend_grouped(
    module: torch.nn.Module,
    query: Tensor,  # [B, heads, W, D]; of a call without padding [1, heads, N, D]
    key: Tensor,  # [B, K/V heads, L, D]
    value: Tensor,  # [B, K/V heads, L, D]
    attention_mask: Tensor | None,  # [B, 1, W, L] bool; of a compiled call [1, 1, 1, 1] int64, which of the plan's
    scaling: float | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """`scaled_dot_product_attention` in which the heads of a group are further queries of their K/V head.

    transformers repeats K and V for every query head instead, where W > 1, which copies the whole cache in every layer. The
    columns of a long prefill are cut in parts, each of which attends to the keys up to its own end only. In a call without
    padding, neighbouring rows of one width attend together, as their K and V lie side by side and need no copy; or all rows do,
    padded, where they are of much the same length.

    Returns:
        [B, W, heads, D], without padding [1, N, heads, D], and no weights.
    """
    if torch.compiler.is_dynamo_compiling():
        layer = module.layer_idx
        return torch.ops.speculative_engine.attend(query, key, value, attention_mask, layer, scaling), None
    if attention_mask is not None and attention_mask.dtype == torch.int64:  # torch.compile has given up on this call
        attention_mask = _innermost_cache().plan.masks[int(attention_mask)]
    if attention_mask is None or attention_mask.shape[1] != 1 or attention_mask.dtype != torch.bool:
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **others)
    plan, group = _innermost_cache().plan, query.shape[1] // key.shape[1]
    if plan.runs is None:
        parts = _parts(plan, slice(None), query.shape[2], attention_mask, group, query.dtype)
        return _attend(query, key, value, parts, scaling), None
    if (padded := _padded(plan, attention_mask, key, group)) is not None:
        parts = _parts(plan, slice(None), padded.tokens.shape[1], attention_mask, group, query.dtype)
        attended = _attend(query[0, :, padded.tokens].transpose(0, 1), key, value, parts, scaling)
        return attended.flatten(0, 1)[padded.columns][None], None
    outputs = []
    for run in plan.runs:
        columns = query[0, :, run.tokens].unflatten(1, (-1, run.width)).transpose(0, 1)
        parts = _parts(plan, run.rows, run.width, attention_mask, group, query.dtype)
        outputs.append(_attend(columns, key[run.rows], value[run.rows], parts, scaling).flatten(0, 1))
    return torch.cat(outputs)[None], None


_NO_MODULE = torch.nn.Module()  # for `attend_grouped`, which with a mask of bools does not look at it


def _scatter_and_attend(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, layer: int, scaling: float | None
) -> Tensor:
    """`RaggedLayer.update` and `attend_grouped` in a compiled graph: one operator, told of lengths and slots when it runs."""
    cache = _innermost_cache()
    keys, values = cache.ragged_layers[layer].update(key, value)
    output, _ = attend_grouped(_NO_MODULE, query, keys, values, cache.plan.masks[int(mask)], scaling)
    return output.contiguous()


def _shape_of_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, layer: int, scaling: float | None
) -> Tensor:
    batch, heads, width, _ = query.shape
    return query.new_empty(batch, width, heads, value.shape[-1])


_ATTEND = "speculative_engine::attend"
torch.library.define(
    _ATTEND, "(Tensor query, Tensor key, Tensor value, Tensor mask, int layer, float? scaling) -> Tensor"
)
torch.library.impl(_ATTEND, "cpu", _scatter_and_attend)
torch.library.register_fake(_ATTEND, _shape_of_attention)


@dataclass(frozen=True)
class _Part:
    """Some columns of a call, which attend together."""

    columns: slice
    num_keys: int  # the first so many keys hold all that these columns can see
    mask: Tensor  # [B, 1, group * columns, num_keys], 0 or -inf: what `scaled_dot_product_attention` makes of bools each time


def _attend(query: Tensor, key: Tensor, value: Tensor, parts: Sequence[_Part], scaling: float | None) -> Tensor:
    """Attend part by part: [B, W, heads, D] for query [B, heads, W, D], and key and value [B, K/V heads, L, D]."""
    batch, heads, _, head_dim = query.shape
    outputs = []
    for part in parts:
        output = torch.nn.functional.scaled_dot_product_attention(
            query[:, :, part.columns].reshape(batch, key.shape[1], -1, head_dim),
            key[:, :, : part.num_keys],
            value[:, :, : part.num_keys],
            attn_mask=part.mask,
            scale=scaling,
        )
        outputs.append(output.reshape(batch, heads, -1, value.shape[-1]))
    return (outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=2)).transpose(1, 2).contiguous()


def _parts(plan: CallPlan, rows: slice, width: int, mask: Tensor, group: int, dtype: torch.dtype) -> list[_Part]:
    """How the first `width` columns of some rows attend; worked out in the first layer of a call, and kept for the others.

    Args:
        rows: of the call, not slots.
        mask: [n, 1, W, L] bool, of all rows of the call.
        group: query heads for each K/V head.
        dtype: of the query.
    """
    key = id(mask), rows.start, group, dtype
    if key not in plan.prepared:
        num_keys = mask.shape[-1]
        parts = []
        for begin in range(0, width, PART):
            end = min(begin + PART, width)
            last = plan.runs is None and end == width
            seen = num_keys if last else min(int(plan.start[rows].max()) + end, num_keys)
            visible = mask[rows, :, begin:end, :seen]
            added = torch.zeros_like(visible, dtype=dtype).masked_fill_(~visible, -torch.inf)
            added = added.expand(-1, group, -1, -1).reshape(len(visible), 1, -1, seen)
            parts.append(_Part(slice(begin, end), seen, added))
        plan.prepared[key] = mask, parts  # with the mask, so that its id stays its own
    found: list[_Part] = plan.prepared[key][1]
    return found


@dataclass(frozen=True)
class _Padded:
    """How rows of a call without padding attend with padding, all at once."""

    tokens: Tensor  # [n, W] int64, which of the N tokens a column is; any of them where it is padding
    columns: Tensor  # [N] int64, which of the n * W columns a token is


def _padded(plan: CallPlan, mask: Tensor, key: Tensor, group: int) -> _Padded | None:
    """None where rows had better attend run by run; worked out in the first layer of a call, and kept for the others."""
    if "padded" not in plan.prepared:

        def keys(start: Tensor, width: int) -> float:
            """How many could be read in the time that rows take which attend together."""
            return len(start) * (int(start.max()) + width) * (1 + group * width / QUERIES)

        runs, width, padded = plan.runs or (), mask.shape[2], None
        more = keys(plan.start, width) - sum(keys(plan.start[run.rows], run.width) for run in runs)
        if len(runs) > 1 and more * key[0, :, 0].nbytes < CALL_BYTES * (len(runs) - 1):
            valid = torch.arange(width, device=plan.num_valid.device) < plan.num_valid[:, None]
            tokens = (valid.flatten().cumsum(0) - 1).clamp(min=0).view_as(valid)
            padded = _Padded(tokens, valid.flatten().nonzero()[:, 0])
        plan.prepared["padded"] = padded
    found: _Padded | None = plan.prepared["padded"]
    return found


def attend_ragged(
    module: torch.nn.Module,
    query: Tensor,  # [B, heads, W, D]
    key: Tensor,  # [slots, K/V heads, capacity, D], the whole buffers
    value: Tensor,  # likewise
    attention_mask: None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,  # [heads], attention sinks
    **others: Any,
) -> tuple[Tensor, None]:
    """The ragged kernel.

    Returns:
        [B, W, heads, D], and no weights.

    Raises:
        ValueError: for a mask, which the model must have made itself, as it is given none.
    """
    if attention_mask is not None:
        raise ValueError("the model's attention builds its own mask, which the ragged kernel does not support")
    plan = _innermost_cache().plan
    output = ragged_attention(
        query, key, value, plan.start, scale=scaling, window=sliding_window, softcap=softcap, sinks=s_aux,
        slots=plan.slots_or_none, kv_length=plan.kv_length, num_valid=plan.num_valid,
    )  # fmt: skip
    return output, None


AttentionInterface.register(GROUPED, attend_grouped)
AttentionInterface.register(RAGGED, attend_ragged)


class AttentionSwitch:
    """Has a model use our attention during our calls, and its own, or what others set since, in everybody else's.

    Models that do not look their attention function up (`_supports_attention_backend`), and those that use another than
    "sdpa" or "eager", keep their own.

    Args:
        cache: that the model is called with.
        ragged: use the ragged kernel, if the model can be made to.

    Attributes:
        ragged: the ragged kernel is used: calls need no mask, and `RaggedLayer.update` has to return whole buffers.
        unpadded: calls may leave out a batch's padding, and put the N valid tokens of all rows into one row [1, N].
    """

    def __init__(self, model: PreTrainedModel, cache: RaggedCache, ragged: bool) -> None:
        replaced = ("sdpa", "eager") if ragged else ("sdpa",)
        modules = model.get_decoder().modules()  # an encoder of images attends by itself
        configs = {id(config): config for config in (getattr(m, "config", None) for m in modules) if config}
        self._own = [(config, own) for config in configs.values() if (own := _implementation(config)) in replaced]
        if not getattr(model, "_supports_attention_backend", False):
            self._own = []
        _warn_if_names_have_changed(model)
        self.ragged, self.unpadded = ragged and bool(self._own), not ragged and bool(self._own)
        self._cache, self._name = cache, RAGGED if ragged else GROUPED

    @contextmanager
    def on(self) -> Iterator[None]:
        """While this is entered, the model attends our way."""
        caches, depth = _calls.caches, len(_calls.caches)
        now = [(config, own, _implementation(config)) for config, own in self._own]  # others may have set another one
        # Ours is there if an interrupt kept the model's own from being put back.
        self._own = [(config, own if set_now in (GROUPED, RAGGED) else set_now) for config, own, set_now in now]
        try:  # Ctrl-C may come anywhere, and most likely in a method of Python: a config's own for setting an attribute is one
            caches.append(weakref.ref(self._cache))
            for config, _ in self._own:
                vars(config)[_IMPLEMENTATION] = self._name
            yield
        finally:
            for config, own in self._own:
                vars(config)[_IMPLEMENTATION] = own
            del caches[depth:]


def _warn_if_names_have_changed(model: PreTrainedModel) -> None:
    """What tells which models look their attention up, and which one they use, has no public name: without it calls stay right."""
    if hasattr(PreTrainedModel, "_supports_attention_backend") and _implementation(model.config) is not None:
        return
    logger.warning("cannot find a model's attention setting in this transformers release: calls will be slower")


def _implementation(config: Any) -> str | None:
    found: str | None = vars(config).get(_IMPLEMENTATION)
    return found
