"""Which layers of a target should draft for it? A search on a few prompts, for `LayerSkipDrafter`.

Draft & Verify (Zhang et al., arXiv 2309.08168) searches by Bayesian optimisation and times whole generations. Here layers are
taken away one by one, each time that which is missed least, and what a set is worth follows from how often it agrees with the
target: no timing, and the same result each time.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, DynamicLayer

from . import prompts as prompting
from .cache import cache_argument
from .config import SamplingParams, check_int
from .decoder_layers import DecoderLayers
from .drafters.layer_skip import LayerSkipDrafter
from .drafters.named import layer_skip_name
from .engine import Engine
from .loading import load
from .metrics import expected_speedup
from .model import attention_masks
from .model_support import TESTED, windows
from .packing import PackedLinear

_HEAD_ROWS = 256  # that go through the head at once


@dataclass(frozen=True)
class LayerChoice:
    """A set of layers, and what drafting with it promises.

    Attributes:
        layers: those that are run.
        agreement: share of the answers' tokens that a first draft gets right, greedy.
        cost: of drafting a token, as a share of a target call: the weights read, those of the head included.
        num_draft_tokens: the K that promises most.
        speedup: over plain decoding, at that K: (1 + a + ... + a^K) / (K cost + 1) (Leviathan et al., arXiv 2211.17192,
            theorem 3.8), where a is the agreement. Below 1, drafting does not pay. A target call of K + 1 columns counts as
            one of a single column, which is about right where decoding is bound by memory.
    """

    layers: tuple[int, ...]
    agreement: float
    cost: float
    num_draft_tokens: int
    speedup: float

    @property
    def name(self) -> str:
        """As `engine.load(drafter=...)` and the command line take it."""
        return layer_skip_name(self.layers)


@dataclass(frozen=True)
class LayerSearch:
    """What `search_layers` has found.

    Attributes:
        table: the best set of each size, all layers first.
        num_tokens: of the answers, over which the agreement was taken.
    """

    table: tuple[LayerChoice, ...]
    num_tokens: int

    @property
    def best(self) -> LayerChoice:
        """The set with the largest expected speedup; of equal ones that with fewest layers."""
        return max(self.table, key=lambda choice: (choice.speedup, -len(choice.layers)))

    def drafter(self, greedy: bool = False) -> LayerSkipDrafter:
        """One that runs the best set, as `best.name` does; how many tokens it should draft is `best.num_draft_tokens`."""
        return LayerSkipDrafter(layers=self.best.layers, greedy=greedy)

    def __str__(self) -> str:
        lines = [f"layers  agreement  cost   K  speedup  over {self.num_tokens} tokens"]
        for row in self.table:
            best = f"  best: {row.name}" if row is self.best else ""
            numbers = f"{row.agreement:9.1%}  {row.cost:4.2f}  {row.num_draft_tokens:2d}  {row.speedup:6.2f}x"
            lines.append(f"{len(row.layers):6d}  {numbers}{best}")
        return "\n".join(lines)


def search_layers(
    target: Engine | PreTrainedModel,
    prompts: Any,
    *,
    step: int = 1,
    min_layers: int = 1,
    max_new_tokens: int = 64,
    max_tokens: int = 2048,
    max_draft_tokens: int = 8,
    tokenizer: Any = None,
    progress: bool = False,
) -> LayerSearch:
    """Find the layers that a target should draft with.

    The target answers the prompts, greedily. Then layers are removed one by one (or `step` at a time), each time the one
    whose removal leaves the highest agreement with the target, down to `min_layers`. Each trial is one pass over all texts
    together, in which every position sees the target's own K/V of those before it, as a first draft does. Of L layers that
    makes about L^2 / (2 step) passes.

    Args:
        target: an engine, or a live model.
        prompts: as `Engine.generate` takes them; a few like those to come.
        step: layers taken away at once: those that are missed least, each by itself. Larger is quicker and worse.
        min_layers: the smallest set, in [1, the target's layers].
        max_new_tokens: of each answer.
        max_tokens: of one pass, padding included; longer texts lose tokens at their beginning. At least max_new_tokens + 1
            for each prompt.
        max_draft_tokens: the largest K to be considered.
        tokenizer: of a live model; None: prompts are token ids. An engine has its own.
        progress: show a bar on stderr.

    Raises:
        ValueError: for bad prompts, or naming the argument, the value and the rule.
        UnsupportedModelError: if layers of the target cannot be left out.
    """
    if not isinstance(target, Engine | PreTrainedModel):
        raise ValueError(f"target must be an Engine or a PreTrainedModel, got {target!r}")
    if isinstance(target, Engine) and tokenizer is not None:
        raise ValueError(f"tokenizer must be None for an Engine, which has its own, got {type(tokenizer).__name__}")
    items, _ = prompting.split(prompts)
    for name, value in (("step", step), ("max_new_tokens", max_new_tokens), ("max_draft_tokens", max_draft_tokens)):
        check_int(name, value, 1)
    check_int("max_tokens", max_tokens, 1)
    if max_tokens < (max_new_tokens + 1) * len(items):
        raise ValueError(
            f"max_tokens must be >= {(max_new_tokens + 1) * len(items)}, max_new_tokens + 1 for each of {len(items)} prompts, "
            f"got {max_tokens}"
        )
    model = target.target_model if isinstance(target, Engine) else target
    decoder = DecoderLayers(model)
    check_int("min_layers", min_layers, 1, len(decoder))
    if model.config.get_text_config().model_type not in TESTED:
        decoder.probe(range(len(decoder) // 2, len(decoder)))

    llm = target if isinstance(target, Engine) else load(target, drafter=None, tokenizer=tokenizer)
    outputs = llm.generate(items, SamplingParams(max_new_tokens=max_new_tokens), progress=progress)
    answers = [(output.prompt_token_ids, output.token_ids) for output in outputs]
    texts = AnsweredTexts(model, decoder, answers, max_tokens // len(items))
    sizes = range(len(decoder), min_layers, -step)
    with tqdm(total=sum(sizes) + (len(sizes) if step > 1 else 0), unit="pass", disable=not progress) as bar:

        def agreement(layers: Sequence[int]) -> float:
            bar.update()
            return texts.agreement(layers)

        sets = list(_shrinking(len(decoder), min_layers, step, agreement))
    costs = _costs(decoder, model.get_output_embeddings())
    table = [_choice(layers, agreed, costs, max_draft_tokens) for layers, agreed in sets]
    return LayerSearch(tuple(table), texts.num_tokens)


def _shrinking(
    num_layers: int, min_layers: int, step: int, agreement: Callable[[Sequence[int]], float]
) -> Iterator[tuple[tuple[int, ...], float]]:
    """Sets of fewer and fewer layers, and their agreement."""
    layers, agreed = tuple(range(num_layers)), 1.0
    yield layers, agreed
    while len(layers) > min_layers:
        trials = {layer: agreement([other for other in layers if other != layer]) for layer in layers}
        # Of equals the deepest: what comes late changes the hidden states least.
        order = sorted(layers, key=lambda layer: (trials[layer], layer), reverse=True)
        gone = order[: min(step, len(layers) - min_layers)]
        layers = tuple(layer for layer in layers if layer not in gone)
        agreed = trials[gone[0]] if step == 1 else agreement(layers)
        yield layers, agreed


class AnsweredTexts:
    """Texts on which sets of layers are tried.

    Args:
        decoder: the layers of `model`.
        answers: token ids of prompts and of their answers.
        length: texts are cut to this length, at their beginning.

    Attributes:
        num_tokens: of all answers.
    """

    @torch.inference_mode()
    def __init__(
        self,
        model: PreTrainedModel,
        decoder: DecoderLayers,
        answers: Sequence[tuple[list[int], list[int]]],
        length: int,
    ) -> None:
        self._model, self._decoder = model, decoder
        texts = [[*prompt, *answer][-length:] for prompt, answer in answers]
        width, device = max(map(len, texts)), model.device
        # Padding comes behind the text, where causal attention does not see it.
        self._tokens = torch.tensor([text + [0] * (width - len(text)) for text in texts], device=device)
        places = [
            (row, column)  # what follows this token is part of the answer
            for row, (text, (_, answer)) in enumerate(zip(texts, answers, strict=True))
            for column in range(len(text) - len(answer) - 1, len(text) - 1)
        ]
        self.num_tokens = len(places)
        self._rows, self._columns = torch.tensor(places, device=device).T
        self._kv = Cache(layers=[_KeptLayer() for _ in range(len(decoder))])
        self._expected = self._argmax(attention_mask=None)  # fills the cache
        self._masks = self._draft_masks(width)

    @torch.inference_mode()
    def agreement(self, layers: Sequence[int]) -> float:
        """Share of the answers' tokens at which a first draft by these layers is the target's argmax."""
        with self._decoder.only(layers):
            return (self._argmax(self._masks) == self._expected).float().mean().item()

    def _argmax(self, attention_mask: Any) -> Tensor:
        """[num_tokens] int64, where answers are. The head is not asked elsewhere."""
        positions = torch.arange(self._tokens.shape[1], device=self._tokens.device).expand_as(self._tokens)
        hidden = self._model.base_model(
            input_ids=self._tokens,
            position_ids=positions,
            attention_mask=attention_mask,
            use_cache=True,
            **{cache_argument(type(self._model.base_model).forward): self._kv},
        )[0]
        # What models do to the logits behind the head (scales, soft caps) does not change their order.
        head: Any = self._model.get_output_embeddings()
        parts = hidden[self._rows, self._columns].split(_HEAD_ROWS)
        return torch.cat([head(part).argmax(dim=-1) for part in parts])

    def _draft_masks(self, width: int) -> Any:
        """A query sees the target's K/V before its position, and its own; these stand behind each other, 2 * width keys."""
        place = torch.arange(width, device=self._tokens.device)
        query, key = place[:, None], place[None]
        masks = {}
        for kind, window in windows(self._model.config).items():
            before = key < query
            if window is not None:
                before &= key > query - window
            masks[kind] = torch.cat([before, key == query], dim=1).expand(self._tokens.shape[0], 1, -1, -1)
        return attention_masks(self._model.config.get_text_config(), self._model.dtype, masks)


class _KeptLayer(DynamicLayer):
    """K/V of the first call. Later ones see it in front of their own, which is not kept."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            kept: tuple[Tensor, Tensor] = super().update(key_states, value_states, *args, **kwargs)
            return kept
        assert self.keys is not None and self.values is not None
        return torch.cat([self.keys, key_states], dim=2), torch.cat([self.values, value_states], dim=2)


def _costs(decoder: DecoderLayers, head: Any) -> list[float]:
    """Shares of a target call: of each layer, and at the end of the head."""
    weights = [_num_weights(part) for part in (*decoder.layers, head)]
    return [count / sum(weights) for count in weights]


def _num_weights(module: nn.Module) -> int:
    packed = (part for part in module.modules() if isinstance(part, PackedLinear))  # whose weights are no parameters
    return sum(p.numel() for p in module.parameters()) + sum(p.in_features * p.out_features for p in packed)


def _choice(layers: tuple[int, ...], agreement: float, costs: list[float], max_draft_tokens: int) -> LayerChoice:
    cost = sum(costs[layer] for layer in layers) + costs[-1]
    speedups = {k: expected_speedup(agreement, k, cost) for k in range(1, max_draft_tokens + 1)}
    best = max(speedups, key=lambda k: (round(speedups[k], 9), -k))
    return LayerChoice(layers, agreement, cost, best, speedups[best])
