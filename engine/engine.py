"""The host's side: prompts in, rounds until every row has ended, text out."""

import logging
import secrets
import time
from collections.abc import Iterator, Sequence
from typing import Any, overload

import torch
from tqdm import tqdm
from transformers import PreTrainedModel

from . import prompts as prompting
from .backend import FATAL_STATUS, Status
from .config import EngineConfig, SamplingParams
from .detokenize import TextStream, decode
from .drafters.base import Drafter
from .errors import EngineError, InvalidLogitsError
from .metrics import RoundClock, Stats
from .model import RaggedModel
from .output import Output, Piece
from .round import PACKED_EXTRA, run_round
from .scheduler import Request, Scheduler
from .state import BatchState

logger = logging.getLogger(__name__)
_FATAL, _INVALID_DRAFT = int(FATAL_STATUS), int(Status.INVALID_DRAFT)  # IntFlag is slow, and asked per row


class Engine:
    """Continues prompts with a target model and a drafter; made by `engine.load`.

    Attributes:
        tokenizer: the target's, or None.
        stats: of the engine's life.
        max_length: prompt and new tokens together never get longer.
        exact: whether every target call has one shape.
    """

    def __init__(self, model: PreTrainedModel, tokenizer: Any, drafter: Drafter | None, config: EngineConfig) -> None:
        self.exact = model.device.type != "cpu" if config.exact is None else config.exact
        self.config, self.tokenizer, self.drafter = config, tokenizer, drafter
        self._target = RaggedModel(model, config.max_batch_size, self.exact)
        context = self._target.context_length
        if config.max_length is not None and config.max_length > context:
            raise ValueError(f"max_length must be <= {context}, the target's context, got {config.max_length}")
        self.max_length = config.max_length or context
        self._state = BatchState.allocate(config.max_batch_size, self.max_length, model.device)
        self._clock = RoundClock(model.device)
        self._eos_token_ids = _eos_token_ids(model, tokenizer)
        self._generating = False
        self.stats = Stats()

    @property
    def target_model(self) -> PreTrainedModel:
        """The live target."""
        return self._target.model

    @overload
    def generate(
        self, prompts: str, params: SamplingParams | Sequence[SamplingParams] | None = ..., progress: bool = ...
    ) -> Output: ...
    @overload
    def generate(
        self, prompts: Any, params: SamplingParams | Sequence[SamplingParams] | None = ..., progress: bool = ...
    ) -> Any: ...
    def generate(
        self, prompts: Any, params: SamplingParams | Sequence[SamplingParams] | None = None, progress: bool = False
    ) -> Any:
        """Continue one prompt or many.

        Args:
            prompts: text, token ids or chat messages, or a list of these.
            params: for all prompts, or one for each; None: the defaults.
            progress: show a bar on stderr.

        Returns:
            An `Output` for a single prompt, else a list of them in the prompts' order.

        Raises:
            ValueError: for bad prompts or parameters, before any work is done.
            InvalidLogitsError: if the target returns NaN; has the outputs that were complete.
            EngineError: if a stream of this engine is still open.
        """
        items, single = prompting.split(prompts)
        requests = self._requests(items, params, with_text=False)
        outputs: list[Output | None] = [None] * len(requests)
        with tqdm(total=len(requests), unit="prompt", disable=not progress) as bar:
            tokens = 0
            for request, new, _ in self._serve(requests, outputs):
                tokens += new
                if request.finish_reason:
                    outputs[request.index] = self._output(request)
                    bar.update()
                    bar.set_postfix_str(f"{tokens} tokens")
        return outputs[0] if single else outputs

    def stream(self, prompt: Any, params: SamplingParams | None = None) -> Iterator[Piece]:
        """Continue one prompt, a `Piece` each round; the last one holds the whole `Output`.

        Raises:
            As `generate`; bad input is reported by the call itself, before the first piece is asked for.
        """
        items, single = prompting.split(prompt)
        if not single:
            raise ValueError("stream takes one prompt; use generate for several")
        request = self._requests(items, params, with_text=True)[0]
        return self._pieces(request)

    def _pieces(self, request: Request) -> Iterator[Piece]:
        for _, new, _ in self._serve([request], [None]):
            spans = request.text.take(last=request.finish_reason is not None) if request.text else ()
            text = "".join(span.text for span in spans) if request.text else None
            output = self._output(request) if request.finish_reason else None
            yield Piece(text, request.token_ids[len(request.token_ids) - new :], spans, output)

    def _requests(self, items: list[Any], params: Any, with_text: bool) -> list[Request]:
        """Check everything that the user gave."""
        if params is None or isinstance(params, SamplingParams):
            params = [params or SamplingParams()] * len(items)
        params = list(params)
        if len(params) != len(items) or not all(isinstance(p, SamplingParams) for p in params):
            raise ValueError(f"params must be SamplingParams, or a list of one for each of {len(items)} prompts")
        requests = []
        for index, (item, param) in enumerate(zip(items, params, strict=True)):
            name = f"prompts[{index}]"
            ids = prompting.encode(item, name, self.tokenizer, self._target.vocab_size, self.max_length)
            if param.stop and self.tokenizer is None:
                raise ValueError("stop needs a tokenizer: pass tokenizer= to engine.load")
            text = None
            if self.tokenizer is not None and (with_text or param.stop):
                text = TextStream(self.tokenizer, param.stop)
            seed = secrets.randbits(63) if param.seed is None else param.seed
            limit = min(len(ids) + param.max_new_tokens, self.max_length)
            requests.append(Request(index, ids, param, seed, limit, text))
        return requests

    def _serve(self, requests: list[Request], outputs: list[Output | None]) -> Iterator[tuple[Request, int, int]]:
        """Run rounds until all requests have ended; yields (request, new tokens, accepted drafts) per row and round."""
        if self._generating:
            raise EngineError("this engine is generating already: exhaust or close its open stream first")
        self._generating = True
        scheduler = Scheduler(requests, self.config.max_batch_size)
        try:
            while scheduler.busy:
                self._admit(scheduler.admit())
                begin = time.perf_counter()
                packed = self._round(scheduler).tolist()
                draft_seconds, verify_seconds = self._clock.spans()
                self._add_times(self.stats, draft_seconds, verify_seconds)
                self.stats.total_seconds += time.perf_counter() - begin
                for slot, request in sorted(scheduler.running.items()):
                    new, accepted = self._collect(request, packed[slot], outputs)
                    self._add_times(request.stats, draft_seconds, verify_seconds)
                    if request.finish_reason:
                        request.stats.total_seconds = time.perf_counter() - request.started
                        scheduler.release(request)
                        self._state.limits[slot] = 0
                    yield request, new, accepted
        finally:
            self._state.limits.zero_()
            self._generating = False

    def _admit(self, requests: list[Request]) -> None:
        """Write prompts into their slots, and the K/V of all but their last tokens into the caches."""
        begin = time.perf_counter()
        for request in requests:
            request.started = begin
        # Together, unless one shape is asked for.
        for group in [[request] for request in requests] if self.exact else [requests] if requests else []:
            state = self._fill(group)
            self._target.cache.reserve(state.max_limit)
            self._target.prefill(state.tokens, state.seq_lens, state.max_text_length - 1, state.rows)
            if self.drafter is not None:
                self.drafter.prefill(state)
        self.stats.total_seconds += time.perf_counter() - begin

    def _fill(self, group: list[Request]) -> BatchState:
        """Put requests into their slots; returns those rows of the state."""
        first, last = group[0].slot, group[-1].slot
        slots = torch.tensor([request.slot for request in group], device=self._state.tokens.device)
        longest = max(request.length for request in group)
        padded = [request.prompt + [0] * (longest - len(request.prompt)) for request in group]
        self._state.tokens[slots, :longest] = torch.tensor(padded, device=slots.device)
        columns = {
            "seq_lens": [len(request.prompt) - 1 for request in group],
            "limits": [request.limit for request in group],
            "seed": [request.seed for request in group],
            "temperature": [request.params.temperature for request in group],
            "top_k": [request.params.top_k for request in group],
            "top_p": [request.params.top_p for request in group],
            "min_p": [request.params.min_p for request in group],
        }
        for name, values in columns.items():
            column = getattr(self._state, name)
            column[slots] = torch.tensor(values, dtype=column.dtype, device=column.device)
        return self._select(slice(first, last + 1) if last - first + 1 == len(group) else slots, group)

    def _select(self, rows: slice | torch.Tensor, requests: Sequence[Request]) -> BatchState:
        params = [request.params for request in requests]
        return self._state.select(
            rows,
            max_text_length=max(request.length for request in requests),
            max_limit=max(request.limit for request in requests),
            filtered=any(p.temperature and (p.top_k or p.top_p < 1 or p.min_p) for p in params),
            all_greedy=all(p.temperature == 0 for p in params),
            coupled=self.config.verification == "coupled",
        )

    def _round(self, scheduler: Scheduler) -> torch.Tensor:
        running = list(scheduler.running.values())
        state = self._select(slice(0, 1 + max(scheduler.running)), running)
        num_drafts = min(self.config.num_draft_tokens, max(r.limit - r.length for r in running) - 1)
        with torch.no_grad():
            return run_round(self._target, state, self.drafter, num_drafts, self.config.verification, self._clock)

    def _collect(self, request: Request, packed: list[int], outputs: list[Output | None]) -> tuple[int, int]:
        """Append a round's tokens to a request, up to the one that ends it."""
        accepted, proposed, status = packed[-PACKED_EXTRA:]
        if status & _FATAL:
            self._target.cache.clear()
            raise InvalidLogitsError(
                f"the target returned logits that are no distribution ({Status(status).name}) for prompts[{request.index}] "
                f"at position {request.length + accepted}",
                outputs,
            )
        if status & _INVALID_DRAFT:
            logger.warning("the drafter returned logits that are no distribution; its drafts are ignored there")
        before = len(request.token_ids)
        for column in range(accepted + 1):
            self._append(request, packed[column], drafted=column < accepted)
            if request.finish_reason:
                if request.text:
                    request.text.finish()
                break
        new = len(request.token_ids) - before
        for stats in (request.stats, self.stats):
            stats.add_round(proposed, accepted, new)
        return new, accepted

    def _append(self, request: Request, token: int, drafted: bool) -> None:
        request.token_ids.append(token)
        if token in self._eos_token_ids and not request.params.ignore_eos:
            request.finish_reason = "eos"
        elif request.text and request.text.push(token, drafted):
            request.finish_reason = "stop"
        elif request.length >= request.limit:
            request.finish_reason = "length"

    def _output(self, request: Request) -> Output:
        assert request.finish_reason is not None
        text = None
        if request.text is not None:
            text = request.text.text
        elif self.tokenizer is not None:
            text = decode(self.tokenizer, request.token_ids)
        return Output(text, request.token_ids, request.prompt, request.finish_reason, request.stats)

    @staticmethod
    def _add_times(stats: Stats, draft_seconds: float, verify_seconds: float) -> None:
        stats.draft_seconds += draft_seconds
        stats.verify_seconds += verify_seconds


def _eos_token_ids(model: PreTrainedModel, tokenizer: Any) -> frozenset[int]:
    """From the generation config, else the model's config, else the tokenizer; some models have several."""
    for source in (getattr(model, "generation_config", None), model.config, tokenizer):
        ids = getattr(source, "eos_token_id", None)
        if ids is not None:
            return frozenset(ids if isinstance(ids, list | tuple) else [ids])
    return frozenset()
