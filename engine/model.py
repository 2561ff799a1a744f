"""A stock `transformers` causal language model, called over a ragged batch."""

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from .attention import AttentionSwitch
from .backend import MAX_HEAD_DIM, use_triton
from .cache import RaggedCache, cache_argument
from .compiled import CompiledForward
from .decoder_layers import DecoderLayers, outputs_of
from .errors import UnsupportedModelError
from .gpu_layers import fuse_gpu_layers
from .graphs import Graphs
from .hidden_states import HiddenStates
from .model_support import (
    OWN_MASK,
    TESTED,
    WINDOW_IN_MASK_ALONE,
    beyond_rounding,
    check_supported,
    context_length,
    head_sizes,
    narrow_windows,
    vocab_size,
    why_eager,
    windows,
)
from .transfers import to_device

logger = logging.getLogger(__name__)

# Lengths of K/V that attention reads are multiples of this, in tokens. In exact calls, keys that are masked out must not change
# a bit: on a CPU, scaled_dot_product_attention works through the keys in blocks of 512, of which whole masked blocks are
# neutral, while a shorter last block is not.
EXACT_KV_GRANULARITY = 512
KV_GRANULARITY = 64
EXACT_WIDTH = 8  # columns of every exact decode call; more drafts take several calls
PREFILL_WIDTH = 512  # at most, of a call that reads prompts


def uses_ragged_kernel(model: PreTrainedModel) -> bool:
    """Whether our kernels write K/V and attend to it, in place of indexing and a mask: on a GPU, where they pay."""
    if model.device.type != "cuda" or model.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return False
    name = model.config.get_text_config().model_type
    if name in OWN_MASK or (name in WINDOW_IN_MASK_ALONE and any(windows(model.config).values())):
        return False
    sizes = head_sizes(model.config)
    return len(sizes) == 1 and max(sizes) <= MAX_HEAD_DIM


def needs_no_padding(model: PreTrainedModel) -> bool:
    """Whether the valid tokens of several rows may be put side by side into one row, which leaves out the padding.

    That pays on a CPU, where arithmetic takes the time, and takes an architecture in which nothing but attention looks across
    tokens. A GPU hardly feels the padding, and captures calls of few shapes.
    """
    return model.device.type == "cpu" and _is_tested(model)


def _is_tested(model: PreTrainedModel) -> bool:
    """Not if a tested architecture is the text side of another one, whose forward comes first."""
    return {model.config.model_type, model.config.get_text_config().model_type} <= TESTED


class RaggedModel:
    """Logits of a model for rows of different length.

    Args:
        model: in eval mode from here on.
        num_slots: rows of the cache.
        exact: every decode call has the shape [num_slots, EXACT_WIDTH], and attention sees whole blocks of keys. Logits then do
            not depend, bit for bit, on how many tokens were decoded at a time. Whoever calls `prefill` has to give it one
            prompt at a time, cut in the same way each time.
        role: "target" or "drafter", for messages.
        compile: `decode` runs compiled; compiled.py says what that is.

    Attributes:
        windows: of attention by layer type, see `model_support.windows`.
        vocab_size: ids that there are logits for.
        known_ids: if set, ids from here on, which the model does not have, are read as token 0.
        context_length: positions that the model was made for.
        cache: K/V of the slots.
        capturable: calls can be captured in CUDA graphs, as far as is known.
        graphs: of a target: the captured work of its rounds, drafting included.
        skips_padding: calls of several rows cost by their tokens, not by their longest row.
        compiled: how to call the model compiled, or None.

    Raises:
        UnsupportedModelError: if the architecture cannot be decoded this way.
    """

    def __init__(
        self, model: PreTrainedModel, num_slots: int, exact: bool = False, role: str = "target", compile: bool = False
    ) -> None:
        check_supported(model, role)
        self.windows = windows(model.config)
        self.model: PreTrainedModel = model.eval()
        self.num_slots, self.exact = num_slots, exact
        self.device, self.dtype = model.device, model.dtype
        self.config = model.config.get_text_config()
        reason = why_eager(model)
        if reason is None and self.device.type == "cuda" and not use_triton(next(model.parameters())):
            reason = f"torch's operations, used here instead of our kernels ({self.dtype}), wait for the device"
        self.capturable = reason is None
        if reason is not None and self.device.type == "cuda":
            logger.warning("the %s runs without CUDA graphs: %s", role, reason)
        self.graphs = Graphs.for_device(self.device) if self.capturable else Graphs(None)
        self.vocab_size = vocab_size(model)
        self.known_ids: int | None = None
        self.context_length = context_length(self.config)
        granularity = EXACT_KV_GRANULARITY if exact else KV_GRANULARITY
        self.cache = RaggedCache(self.config.num_hidden_layers, num_slots, granularity)
        # Compiled for sm_75, the kernel spills a thousand bytes a thread.
        too_old = self.device.type == "cuda" and torch.cuda.get_device_capability(self.device)[0] < 8
        self._attention = AttentionSwitch(model, self.cache, ragged=uses_ragged_kernel(model) and not too_old)
        self.cache.whole_buffers = self._attention.ragged
        if self.cache.whole_buffers:
            fuse_gpu_layers(model)
        unpadded = self._attention.unpadded and needs_no_padding(model)
        self.skips_padding = not exact and unpadded
        self._hidden: list[HiddenStates] = []
        self._last_layer: nn.Module | None = None  # if hidden states before the last norm are kept
        if compile and not unpadded:
            raise UnsupportedModelError(
                f"compile=True needs a CPU and one of the tested architectures, whose attention is 'sdpa' through transformers' "
                f"AttentionInterface; got {model.config.model_type!r} on {self.device.type!r} with "
                f"{self.config._attn_implementation!r}"
            )
        self.compiled = CompiledForward(model, one_shape=exact) if compile else None
        if not _is_tested(model):
            self._probe(role)

    def keep_hidden_states(self, layers: Sequence[int]) -> HiddenStates:
        """From now on, keep the hidden states of these layers for every token that is read.

        Args:
            layers: in the counting of `HiddenStates`, 0 to L + 1.

        Raises:
            ValueError: if the model has no such layers.
            UnsupportedModelError: for L + 1, if the model is compiled, or its layers are not found.
        """
        count = self.config.num_hidden_layers
        if not layers or min(layers) < 0 or max(layers) > count + 1:
            raise ValueError(
                f"layers must be in [0, {count + 1}], as the target has {count} layers, got {list(layers)}"
            )
        if count + 1 in layers:
            if self.compiled is not None:
                raise UnsupportedModelError(
                    "compile must be False where a drafter reads the target before its last norm"
                )
            self._last_layer = DecoderLayers(self.model).layers[-1]
        self._hidden.append(HiddenStates(layers, self.cache))
        return self._hidden[-1]

    def decode(
        self,
        tokens: Tensor,  # [n, W] int64, any id in padding columns
        start: Tensor,  # [n] int64, position of column 0
        num_valid: Tensor,  # [n] int64, columns of each row that are no padding
        rows: slice | Tensor,  # their slots; the first ones, where calls are exact
        kv_length: int,  # no key at or beyond this position is needed
    ) -> Tensor:
        """Logits [n, W, V], without meaning in padding columns. K/V of the valid columns is written at start, start + 1, ..."""
        width = tokens.shape[1]
        if not self.exact:
            return self.call(tokens, start, num_valid, rows, kv_length, compiled=self.compiled)
        missing = self.num_slots - tokens.shape[0]
        if missing:
            tokens = torch.nn.functional.pad(tokens, (0, 0, 0, missing))
            start, num_valid = (torch.nn.functional.pad(value, (0, missing)) for value in (start, num_valid))
        tokens = torch.nn.functional.pad(tokens, (0, -width % EXACT_WIDTH))
        chunks = [
            self.call(
                tokens[:, column : column + EXACT_WIDTH],
                start + column,
                num_valid - column,
                slice(0, self.num_slots),
                kv_length,
                compiled=self.compiled,
            )
            for column in range(0, width, EXACT_WIDTH)
        ]
        logits = chunks[0] if len(chunks) == 1 else torch.cat(chunks, dim=1)
        return logits[: self.num_slots - missing, :width]

    def prefill(
        self,
        tokens: Tensor,
        spans: Sequence[tuple[int, int]],
        rows: slice | Tensor,
        inputs: Callable[[Tensor], dict[str, Any]] = lambda positions: {},
    ) -> None:
        """Write K/V of a part of each row, in calls of at most PREFILL_WIDTH columns.

        Args:
            tokens: [n, T] int64, the rows' texts from their beginning on, T being at least the largest end.
            spans: for each row, the first token to read and the one to stop before. Those before have been read.
            rows: the n slots.
            inputs: gives further arguments of the model's `forward` for tokens at these positions, [n, W] int64.
        """
        longest = max(end - begin for begin, end in spans)
        width = max(min(PREFILL_WIDTH, longest), 1)
        first, last = (to_device(column, self.device) for column in zip(*spans, strict=True))
        place = torch.arange(width, device=self.device)
        for done in range(0, longest, width):
            start = first + done
            index = (start[:, None] + place[: longest - done]).clamp(max=tokens.shape[1] - 1)
            stop = max(min(begin + done + width, end) for begin, end in spans)
            chunk = tokens.gather(1, index)
            self.call(chunk, start, last - start, rows, kv_length=stop, with_head=False, **inputs(index))

    def call(
        self,
        tokens: Tensor,
        start: Tensor,
        num_valid: Tensor,
        rows: slice | Tensor,
        kv_length: int,
        with_head: bool = True,
        keep_hidden: bool = True,
        compiled: CompiledForward | None = None,
        **inputs: Tensor,
    ) -> Tensor:
        """One call of the model, with as many rows and columns as are given; for the other arguments see `decode`.

        Args:
            with_head: False: return what the head would read.
            keep_hidden: False: write no hidden states, in a call that only drafts.
            compiled: what is run in place of the model. The tokens of all rows are then always put into one row, as there are
                two graphs, for one token and for several.
            inputs: further arguments of the model's `forward`, [n, W, ...] each.

        Returns:
            Logits [n, W, V], or [n, W, H] without the head.
        """
        column = torch.arange(tokens.shape[1], device=self.device)
        positions = start[:, None] + column
        valid = column < num_valid[:, None]
        num_valid = num_valid.clamp(0, tokens.shape[1])
        taken = None
        if self.skips_padding and len(tokens) > 1 and 0 < int(num_valid.sum()) < valid.numel() + (compiled is not None):
            taken = valid.flatten().nonzero()[:, 0]
        self.cache.plan_call(rows, positions, valid, num_valid, kv_length, taken)
        read = valid if self.known_ids is None else valid & (tokens < self.known_ids)
        # Padding must stay inside a learned position table, and must see at least one key.
        position_ids = positions.clamp(max=self.context_length - 1)
        arguments: dict[str, Any] = dict(input_ids=tokens.where(read, 0), position_ids=position_ids, use_cache=True)
        arguments |= inputs
        if taken is not None:
            for name in ("input_ids", "position_ids", *inputs):
                arguments[name] = arguments[name].flatten(0, 1)[taken][None]
        kept = self._hidden if keep_hidden else []
        if kept:
            arguments["output_hidden_states"] = True
        with torch.inference_mode(), self._attention.on(), outputs_of(self._last_layer if kept else None) as last:
            # Here, as it is made for the attention that is on.
            arguments["attention_mask"] = (
                None if self._attention.ragged else self._masks(position_ids, compiled is not None)
            )
            model = self.model if with_head else self.model.base_model
            arguments[cache_argument(type(model).forward)] = self.cache
            output = (compiled or model)(**arguments)
            for hidden in kept:
                hidden.write((*output.hidden_states, *last))
            result: Tensor = output.logits if with_head else output[0]
            if taken is not None:
                columns = result.new_zeros(valid.numel(), result.shape[-1])
                columns[taken] = result[0]
                result = columns.view(*valid.shape, -1)
            return result

    def _probe(self, role: str) -> None:
        """Hold a prefill and a decode call of an unknown architecture against one plain call.

        Sliding windows are narrow for the time, so that a model which has one and does not heed it is found.

        Raises:
            UnsupportedModelError: if they differ by more than rounding.
        """
        kind = f"{role} of type {self.model.config.model_type!r}"
        one = torch.ones(1, dtype=torch.int64, device=self.device)
        tokens = torch.tensor([_usual_tokens(self.config, self.vocab_size, 6)], device=self.device)
        self.cache.reserve(tokens.shape[1])
        own_windows, call = self.windows, "cannot be called with text alone"
        try:
            with narrow_windows(self.model, 2):
                with torch.no_grad():
                    plain = self.model(input_ids=tokens, use_cache=False).logits[0, 3:].float()
                call = "cannot be called over a ragged cache"
                self.windows = windows(self.model.config)
                self.prefill(tokens, [(0, 3)], slice(0, 1))
                ragged = self.decode(tokens[:, 3:], 3 * one, 3 * one, slice(0, 1), 6)[0].float()
        except (MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            raise UnsupportedModelError(f"{kind} {call}: {error}") from error
        finally:
            self.windows = own_windows
        if (difference := beyond_rounding(ragged, plain)) is not None:
            raise UnsupportedModelError(
                f"{kind} gives other logits over a ragged cache than in a plain call ({difference})"
            )

    def _masks(self, position_ids: Tensor, by_number: bool) -> Tensor | dict[str, Tensor]:
        """What the model takes as masks: the query at position i sees key j if j <= i and, with a window, i - j < window.

        Args:
            position_ids: [n, W] int64.
            by_number: for a compiled model: leave the masks with the cache's plan, and return their numbers there.
        """
        key = torch.arange(self.cache.plan.kv_length, device=self.device)
        query = position_ids[:, None, :, None]
        masks = {}
        for kind, window in self.windows.items():
            mask = key <= query
            if window is not None:
                mask &= key > query - window
            masks[kind] = mask
        if by_number:
            self.cache.plan.masks = list(masks.values())
            masks = {kind: torch.full((1, 1, 1, 1), number, device=self.device) for number, kind in enumerate(masks)}
        return attention_masks(self.config, self.dtype, masks)


def _usual_tokens(config: PretrainedConfig, vocab_size: int, count: int) -> list[int]:
    """Ids of which none is for padding, to which some models give no position; any if there are not as many others."""
    usual = [token for token in range(min(vocab_size, count + 1)) if token != getattr(config, "pad_token_id", None)]
    return [usual[i % len(usual)] for i in range(count)] if usual else [0] * count


def last_valid(values: Tensor, num_valid: Tensor) -> Tensor:
    """Each row's last column that is no padding, the first where there is none.

    Args:
        values: [B, W, D].
        num_valid: [B] int64, columns of each row that are no padding.

    Returns:
        [B, 1, D].
    """
    last = (num_valid - 1).clamp(min=0)
    return values.gather(1, last[:, None, None].expand(-1, -1, values.shape[-1]))


def attention_masks(
    config: PretrainedConfig, dtype: torch.dtype, masks: Mapping[str, Tensor]
) -> Tensor | dict[str, Tensor]:
    """What a model takes for these masks by layer type, True where a key is visible; the types are those of `windows`.

    Args:
        config: of the model's text side.
        dtype: of the model.
    """
    found = dict(masks)
    if config._attn_implementation == "eager":  # adds the mask instead of selecting by it
        least = torch.finfo(dtype).min
        found = {k: torch.zeros_like(mask, dtype=dtype).masked_fill(~mask, least) for k, mask in masks.items()}
    return found if len(found) > 1 or "sliding_attention" in found else found["all"]
