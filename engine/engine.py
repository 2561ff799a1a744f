"""`Engine`, the user-facing class: prompts in, outputs out. The serving loop is in `serving.py`."""

import sys
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, overload

from tqdm import tqdm
from transformers import PreTrainedModel

from .adaptive_length import FEW_CHOICES, AdaptiveLength
from .compiled import compile_now
from .config import EngineConfig, SamplingParams, check_bool, check_ints
from .detokenize import whole_text
from .draft_length import DraftLength, FixedLength
from .drafters.base import Drafter, model_of, stages_of
from .errors import EngineError, InvalidLogitsError
from .generation_config import eos_token_ids, repetition_penalty, warn_of_not_applied
from .metrics import RoundClock, Stats
from .model import EXACT_WIDTH, RaggedModel
from .output import Output, Piece
from .parallel import Ranks
from .requests import RequestMaker, without_processor
from .round import Round
from .scheduler import Request
from .serving import Server
from .state import BatchState
from .target_changes import make_ready, work_of

_USUAL_LENGTHS = (256, 512, 1024)  # tokens of a text, which `warmup` prepares for unless told otherwise; a bucket each
_DRAFTER_OPTIONS = ("layers", "min_ngram", "max_ngram", "pool_tokens", "num_draft_tokens", "min_reach", "greedy")
_Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]]  # text, token ids or a chat
_Params = SamplingParams | Sequence[SamplingParams] | None
_OnOutput = Callable[[int, Output | InvalidLogitsError], object] | None


class Engine:
    """Continues prompts with a target model and a drafter; made by `engine.load`.

    Attributes:
        config: as passed to `engine.load`.
        tokenizer: the target's, or None.
        drafter: None for plain decoding.
        stats: totals since the engine was made.
        max_length: limit on the tokens of a prompt plus its answer.
        exact: whether all decode calls of the target have one shape.
    """

    def __init__(self, model: PreTrainedModel, tokenizer: Any, drafter: Drafter | None, config: EngineConfig) -> None:
        self.exact = model.device.type != "cpu" if config.exact is None else config.exact
        self.config, self.tokenizer, self.drafter = config, tokenizer, drafter
        self._ranks = Ranks.of(model)
        ends = eos_token_ids(model, tokenizer)
        arguments = (config, model.dtype, sorted(ends), repetition_penalty(model), _described(drafter))
        self._ranks.require_same("the arguments of engine.load", arguments)
        self._target = RaggedModel(model, config.max_batch_size, self.exact, compile=config.compile)
        if (attach := getattr(drafter, "attach", None)) is not None:
            attach(self._target)
        parts = [drafter, *getattr(drafter, "stages", ())]
        parts += [getattr(part, "drafter", None) for part in parts]  # a staged draft model's own
        self._attached = [part for part in parts if hasattr(part, "attach") or getattr(part, "keeps_rows", False)]
        self._attachment = object()  # not the target: a drafter may outlive its engine, whose memory it is not to hold
        for part in self._attached:
            part.attached_to = self._attachment
        self.max_length = config.max_length or self._target.context_length
        self.stats = Stats()
        self._requests = RequestMaker(
            tokenizer, self._target.vocab_size, self.max_length, repetition_penalty(model), self._ranks
        )
        self._server = Server(
            Round(self._target, drafter, config.verification, RoundClock(model.device)),
            BatchState.allocate(config.max_batch_size, self.max_length, model.device),
            self._lengths(),
            config,
            ends,
            self.stats,
            late=model.device.type == "cuda",
            ranks=self._ranks,
        )
        self._served: dict[str, object] = {}  # the call that is served, if one is; see `_alone`
        warn_of_not_applied(model)
        if config.compile:  # not before the drafter has asked for hidden states, which a compiled call gives as well
            compile_now(self._target)

    @property
    def target_model(self) -> PreTrainedModel:
        """The live target.

        On a CPU its linear layers may be packed (`packing.py`). Packed layers have no parameters: `parameters()` omits them,
        `state_dict()` unpacks them, and their `weight` may be a copy. To change weights, call `load_state_dict`, or load a live
        model and change that one (peft adapters and `tie_weights` need this too). Call `resize_token_embeddings` before loading.
        Packed layers are for inference: in bfloat16 and float16 they may pass no gradients on.
        On a GPU, change weights in place: captured rounds read them where they are. New parameters, modules, hooks or adapters
        take effect at the next call, which captures its rounds again.
        """
        return self._target.model

    def __reduce__(self) -> Any:
        raise TypeError("an Engine cannot be copied or pickled: load one in each process")

    @overload  # a string is a sequence of strings too, but comes first here
    def generate(  # type: ignore[overload-overlap]
        self, prompts: str, params: _Params = ..., progress: bool = ..., on_output: _OnOutput = ...
    ) -> Output: ...
    @overload
    def generate(
        self, prompts: Sequence[_Prompt], params: _Params = ..., progress: bool = ..., on_output: _OnOutput = ...
    ) -> list[Output]: ...
    @overload
    def generate(
        self, prompts: Any, params: _Params = ..., progress: bool = ..., on_output: _OnOutput = ...
    ) -> Any: ...
    def generate(
        self, prompts: Any, params: _Params = None, progress: bool = False, on_output: _OnOutput = None
    ) -> Any:
        """Continue one prompt or many.

        Args:
            prompts: text, token ids or chat messages, or a list of these. Ids may be a list, a 1-D tensor or array, or a
                tokenizer's output; its output for a list of texts counts as a list of prompts, except for a tensor with a single
                row. A chat that ends with an assistant message is continued from there.
            params: for all prompts, or one for each; None: the defaults.
            progress: show a bar on stderr (that of rank 0, under tensor parallelism).
            on_output: called with a prompt's index and its `Output` (or InvalidLogitsError, with the outputs so far) as soon as
                that prompt ends, in order of completion. Generation pauses during the call; an exception from it ends `generate`.

        Returns:
            An `Output` for a single prompt, else a list of them in the prompts' order.

        Raises:
            ValueError: for bad prompts or parameters, before any work is done.
            InvalidLogitsError: if the target's logits for some prompt have NaN or +inf, or nothing but -inf; raised once all
                others have ended, with their outputs.
            EngineError: if a stream of this engine is still open, if its drafter has since been attached to another engine or
                returns an invalid proposal, or if the target's dtype, device or vocabulary has changed since loading, or
                others have compiled it.

            Any exception raised while prompts are served, KeyboardInterrupt included, has an attribute `outputs`: the outputs so
            far, in the prompts' order, None where unfinished. This includes a ValueError for a logits_processor that does not
            return logits [1, V], and whatever a processor raises (a StopIteration becomes a RuntimeError).
        """
        check_bool("progress", progress)
        if on_output is not None and not callable(on_output):
            raise ValueError(f"on_output must be a function of an index and an output, or None, got {on_output!r}")
        requests, single = self._requests.make(prompts, params)
        outputs: list[Output | None] = [None] * len(requests)
        hidden = not progress or self._ranks.rank > 0
        seconds = 0.1 if sys.stderr and sys.stderr.isatty() else 10  # between its lines, which a file of logs keeps
        # leave=None: unless below another bar
        with tqdm(total=len(requests), unit="prompt", disable=hidden, leave=None, mininterval=seconds) as bar:
            tokens = 0
            try:
                for request, new in self._serve(requests):
                    tokens += new
                    if request.ended:
                        if request.error is None:
                            outputs[request.index] = self._output(request)
                        bar.set_postfix_str(f"{tokens} tokens", refresh=False)
                        bar.update()
                        if on_output is not None:
                            ended = outputs[request.index]
                            on_output(request.index, _error([request], list(outputs)) if ended is None else ended)
            except BaseException as error:  # what has ended, in the last round too, is not lost with the rest
                for request in requests:
                    if request.finish_reason is not None and outputs[request.index] is None:
                        outputs[request.index] = self._output(request)
                with suppress(Exception):  # one that takes no attributes is raised all the same
                    error.outputs = outputs  # type: ignore[attr-defined]
                raise
        if any(request.error is not None for request in requests):
            raise _error(requests, outputs)
        return outputs[0] if single else outputs

    def stream(self, prompt: Any, params: SamplingParams | None = None) -> Generator[Piece, None, None]:
        """Continue one prompt, yielding one `Piece` per round; the last one holds the whole `Output`. To stop it early, close it,
        under tensor parallelism after the same piece on every rank.

        Raises:
            As `generate`, without the attribute `outputs`; bad input is reported by the call itself, before the first piece is
            requested. After an error, as when another stream is open, the generator is finished: call `stream` again.
        """
        requests, _ = self._requests.make(prompt, params, streamed=True)
        return self._pieces(requests[0])

    def check(self, prompts: Any, params: _Params = None) -> None:
        """Raise the ValueError that `generate` would raise for these arguments, without generating.

        Unlike the other methods, one rank alone may call this under tensor parallelism.
        """
        self._requests.check(prompts, params)

    def warmup(
        self,
        batch_sizes: Sequence[int] | None = None,
        text_lengths: Sequence[int] | None = None,
        params: SamplingParams | None = None,
        progress: bool = False,
    ) -> None:
        """Compile kernels and capture CUDA graphs now rather than when first needed.

        On a CPU this allocates the buffers of such texts, and compiles the sampling loops if `params` need them. Everything
        captured here is kept: per pair of a batch size and a length 3 graphs with most drafters, up to 15 with
        num_draft_tokens="auto", and up to 50 if a model drafts. A growing text passes through every bucket up to its own length.

        Args:
            batch_sizes: rows that will decode together; None: `max_batch_size`. For an `exact` engine, all are one.
            text_lengths: of prompts with their answers; one bucket for each power of two from 256 on. None: all buckets of
                texts of up to 1024 tokens, or `max_length` if that is less.
            params: as requests will have them: greedy or not, with or without filters, a penalty, log-probabilities.
            progress: show a bar on stderr.

        Raises:
            ValueError: naming the argument, the value and the rule; sizes go up to max_batch_size and max_length. On every rank,
                if one was given something else.
            EngineError: if a stream of this engine is still open, if its drafter has since been attached to another engine, or if
                the target's dtype, device or vocabulary has changed since loading, or others have compiled it.
        """
        if batch_sizes is None:
            batch_sizes = [self.config.max_batch_size]
        if text_lengths is None:
            text_lengths = list({min(length, self.max_length) for length in _USUAL_LENGTHS})
        params = SamplingParams() if params is None else params

        what = "the arguments of warmup"
        with self._ranks.told_errors(what):
            check_bool("progress", progress)
            sizes = check_ints("batch_sizes", batch_sizes, 1, self.config.max_batch_size)
            lengths = check_ints("text_lengths", text_lengths, 2, self.max_length)
            if not isinstance(params, SamplingParams):
                raise ValueError(f"params must be SamplingParams or None, got {params!r}")
        self._ranks.require_same(what, (sizes, lengths, without_processor(params)))
        with self._alone():
            self._server.warm_up_reading(max(lengths, default=0))
            # The longest first: buffers that grow would undo the others.
            kinds = [(size, length) for length in sorted(lengths, reverse=True) for size in sizes]
            for size, length in tqdm(kinds, unit="bucket", disable=not progress or self._ranks.rank > 0):
                self._server.warmup(size, length, self._requests.with_defaults(params))

    def _pieces(self, request: Request) -> Generator[Piece, None, None]:
        for _, new in self._serve([request]):
            if request.error is not None:
                raise _error([request], [None])
            spans = request.stream.take(last=request.finish_reason is not None) if request.stream else ()
            text = "".join(span.text for span in spans) if request.stream else None
            output = self._output(request) if request.finish_reason else None
            begin = len(request.token_ids) - new
            logprobs = request.logprobs[begin:] if request.params.logprobs else None
            yield Piece(text, request.token_ids[begin:], spans, output, logprobs)

    def _lengths(self) -> DraftLength:
        if isinstance(self.config.num_draft_tokens, int):
            return FixedLength(min(self.config.num_draft_tokens, self.max_length))
        if self.exact:  # calls have EXACT_WIDTH columns whatever is drafted: drafts that fit cost nothing there
            return AdaptiveLength(range(EXACT_WIDTH), column_cost=0.0)
        if self._target.device.type == "cpu":
            return AdaptiveLength(skips_padding=self._target.skips_padding)
        return AdaptiveLength(FEW_CHOICES, column_cost=0.01)

    def _serve(self, requests: list[Request]) -> Iterator[tuple[Request, int]]:
        """Run all requests to their ends; yields (request, new tokens) per row and round."""
        with self._alone():
            for served in self._server.run(requests):
                yield served
                # A stream that has given its last piece needs the drafter no more.
                if len(requests) > 1 or not requests[0].ended:
                    self._check_attached()

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Keep others out meanwhile, and undo before what they or an interrupt have done to the target.

        Raises:
            EngineError: if this engine is generating, its drafter now serves another one, or the target has been moved.
        """
        # One step, as others may come from other threads. A lock would stay taken if Ctrl-C came right after it was.
        mine = object()
        try:
            if self._served.setdefault("call", mine) is not mine:
                raise EngineError("this engine is generating already: exhaust or close its open stream first")
            self._make_ready()
            yield
        finally:
            if self._served.get("call") is mine:
                del self._served["call"]

    def _make_ready(self) -> None:
        """Undo what others or an interrupt have done to the target (training mode, left out layers), and forget the graphs of what
        a live model no longer does.

        Raises:
            EngineError: if its drafter now serves another engine, or the target has been moved or compiled.
        """
        self._check_attached()
        for part in self._attached:
            if (restore := getattr(part, "restore", None)) is not None:
                restore()
        live = [self._target, *(each for each in map(model_of, stages_of(self.drafter)) if each is not None)]
        for each in live:
            make_ready(each, "target" if each is self._target else "drafter")
        if self._target.graphs.enabled:
            self._target.graphs.follow(work_of(each.model for each in live))

    def _check_attached(self) -> None:
        """Raise EngineError if a part of the drafter serves another engine now."""
        for part in self._attached:
            if part.attached_to is not self._attachment:
                raise EngineError(
                    f"the {type(part).__name__} of this engine has since been attached to another engine and can serve only "
                    f"one: give each engine its own drafter object"
                )

    def _output(self, request: Request) -> Output:
        assert request.finish_reason is not None
        text = None
        if request.stream is not None:
            text = request.stream.text
        elif self.tokenizer is not None:  # the token that ended it is no part of the text, as in streams
            end = None if request.finish_reason == "length" else -1
            text = whole_text(self.tokenizer, request.token_ids[:end])
        logprobs = request.logprobs if request.params.logprobs else None
        return Output(text, request.token_ids, request.prompt, request.finish_reason, request.stats, logprobs)


def _described(drafter: Any) -> list[tuple[str, list[Any]]]:
    """What must be the same of a drafter on all ranks: the class of each stage, and its options."""
    described = []
    for stage in stages_of(drafter):
        values = [getattr(stage, name, None) for name in _DRAFTER_OPTIONS]
        described.append((type(stage).__name__, [v if isinstance(v, int | float | tuple) else None for v in values]))
    return described


def _error(requests: Sequence[Request], outputs: list[Output | None]) -> InvalidLogitsError:
    """Of the requests that have failed, at least one, with the outputs of all."""
    errors = {request.index: request.error for request in requests if request.error is not None}
    others = f" (and for {len(errors) - 1} more)" if len(errors) > 1 else ""
    return InvalidLogitsError(next(iter(errors.values())) + others, outputs, errors)
