"""transformers' own `generate` as contenders: plain, prompt lookup, an assistant model, compiled, without a K/V cache."""

import itertools
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, StoppingCriteria

from bench.throughput.methods import Call, Contest, Method, Row, synchronize, together, up_to_end
from bench.throughput.options import drafter_label
from bench.throughput.shared_models import SharedModels


class Steps(StoppingCriteria):
    """Stops nothing; notes when the first tokens were there and how long the text was after each step."""

    def __init__(self, num_rows: int, device: torch.device) -> None:
        self._never = torch.zeros(num_rows, dtype=torch.bool, device=device)
        self._begin = time.perf_counter()
        self.first_seconds = 0.0
        self.lengths: list[int] = []

    def __call__(self, input_ids: Tensor, scores: Any, **more: Any) -> Tensor:
        if not self.lengths:
            synchronize(self._never.device)
            self.first_seconds = time.perf_counter() - self._begin
        self.lengths.append(input_ids.shape[1])
        return self._never


class AssistedSteps(Steps):
    """transformers before 5.18 also asks about the drafts, before the target has seen them: that is no step.

    Args:
        calls: grows by one with each target call.
    """

    def __init__(self, num_rows: int, device: torch.device, calls: Sequence[int]) -> None:
        super().__init__(num_rows, device)
        self._calls, self._known = calls, 0

    def __call__(self, input_ids: Tensor, scores: Any, **more: Any) -> Tensor:
        if len(self._calls) == self._known:
            return self._never
        self._known = len(self._calls)
        return super().__call__(input_ids, scores, **more)


class Transformers(Method):
    """Plain `generate`; a batch is padded on the left.

    Args:
        compiled: with a static cache, which makes transformers compile the decoding step on a GPU.
        use_cache: without it every step reads the whole text again.
    """

    def __init__(self, compiled: bool = False, use_cache: bool = True) -> None:
        self.name = "transformers compiled" if compiled else f"transformers {'plain' if use_cache else 'no cache'}"
        self.needs_gpu = self.full_warmup = compiled
        self._settings: dict[str, Any] = {"use_cache": use_cache}
        if compiled:
            self._settings["cache_implementation"] = "static"

    def prepare(self, models: SharedModels, contest: Contest) -> None:
        self._model: PreTrainedModel | None = models.stock_copy()
        self._models, self._contest, self._batch_size = models, contest, contest.batch_size

    def _sampling(self) -> dict[str, Any]:
        if self._contest.temperature == 0:
            return {"do_sample": False}
        return {"do_sample": True, "temperature": self._contest.temperature, "top_k": 0, "top_p": self._contest.top_p}

    def generate(self, prompts: list[list[int]], seeds: list[int], max_new_tokens: int) -> Call:
        """Batch after batch."""
        size = self._batch_size
        batches = range(0, len(prompts), size)
        return together(self._batch(prompts[i : i + size], seeds[i : i + size], max_new_tokens) for i in batches)

    def _batch(self, prompts: list[list[int]], seeds: list[int], max_new_tokens: int) -> Call:
        assert self._model is not None
        longest, device = max(map(len, prompts)), self._models.device
        pad = self._models.pad_token_id
        padded = torch.tensor([[pad] * (longest - len(ids)) + ids for ids in prompts], device=device)
        mask = torch.tensor([[0] * (longest - len(ids)) + [1] * len(ids) for ids in prompts], device=device)
        torch.manual_seed(seeds[0])
        steps = self._steps(len(prompts))
        generate: Any = self._model.generate
        with torch.no_grad():
            texts = generate(
                input_ids=padded, attention_mask=mask, max_new_tokens=max_new_tokens, stopping_criteria=[steps],
                **self._sampling(), **self._settings,
            )  # fmt: skip
        rows = [up_to_end(row[longest:], self._models.eos_token_ids) for row in texts.tolist()]
        first = (steps.lengths[0] - longest) * len(rows)
        return Call([self._row(ids, longest, steps) for ids in rows], steps.first_seconds, first)

    def _steps(self, num_rows: int) -> Steps:
        return Steps(num_rows, self._models.device)

    def _row(self, token_ids: list[int], prompt_length: int, steps: Steps) -> Row:
        return Row.plain(token_ids)

    def close(self) -> None:
        self._model = None


class TransformersAssisted(Transformers):
    """`generate` with `prompt_lookup_num_tokens`, or with an `assistant_model`.

    An assistant drafts at most K tokens and, which is transformers' default, stops where it is not sure.

    Args:
        num_draft_tokens: K, >= 1.
        drafter: a draft model; None: prompt lookup.
    """

    one_at_a_time = True

    def __init__(self, num_draft_tokens: int, drafter: str | None = None) -> None:
        super().__init__()
        self.num_draft_tokens, self.drafter = num_draft_tokens, drafter or "lookup"
        self._assistant = drafter
        self.name = f"transformers {drafter_label(self.drafter)} K={num_draft_tokens}"

    def prepare(self, models: SharedModels, contest: Contest) -> None:
        super().prepare(models, contest)
        assert self._model is not None
        self._widths: list[int] = []  # of the input of each target call
        self._model.register_forward_pre_hook(self._note_width, with_kwargs=True)
        if self._assistant is None:
            self._settings["prompt_lookup_num_tokens"] = self.num_draft_tokens
        else:
            assistant = models.stock_copy(self._assistant)
            assistant.generation_config.num_assistant_tokens = self.num_draft_tokens
            self._settings["assistant_model"] = assistant

    def _note_width(self, model: torch.nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        self._widths.append(kwargs["input_ids"].shape[1])

    def generate(self, prompts: list[list[int]], seeds: list[int], max_new_tokens: int) -> Call:
        self._widths.clear()
        return super().generate(prompts, seeds, max_new_tokens)

    def _steps(self, num_rows: int) -> Steps:
        return AssistedSteps(num_rows, self._models.device, self._widths)

    def _row(self, token_ids: list[int], prompt_length: int, steps: Steps) -> Row:
        """The first call reads the prompt and drafts behind it, each later one the last token and drafts behind it."""
        proposed = [self._widths[0] - prompt_length, *(width - 1 for width in self._widths[1:])]
        lengths = [prompt_length, *steps.lengths]
        accepted = [after - before - 1 for before, after in itertools.pairwise(lengths)]
        return Row.of_rounds(token_ids, list(zip(proposed, accepted, strict=True)))

    def close(self) -> None:
        super().close()
        self._settings.pop("assistant_model", None)
