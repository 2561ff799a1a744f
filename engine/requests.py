"""Prompts and parameters, checked and made into requests."""

import secrets
from dataclasses import replace
from typing import Any

from . import prompts as prompting
from .config import SamplingParams, check_ints
from .detokenize import TextStream, special_tokens
from .parallel import Ranks
from .scheduler import Request


class RequestMaker:
    """Makes requests of what a user gives.

    Args:
        tokenizer: the target's, or None.
        vocab_size: ids that the target has logits for.
        max_length: prompt and new tokens together never get longer.
        repetition_penalty: of requests that do not name one.
        ranks: those that share the target.
    """

    def __init__(
        self, tokenizer: Any, vocab_size: int, max_length: int, repetition_penalty: float, ranks: Ranks
    ) -> None:
        self._tokenizer, self._vocab_size, self._max_length = tokenizer, vocab_size, max_length
        self._repetition_penalty, self._ranks = repetition_penalty, ranks

    def make(self, prompts: Any, params: Any, streamed: bool = False) -> tuple[list[Request], bool]:
        """Requests, which all ranks have the same of, and whether there was one prompt and no list of them.

        Raises:
            ValueError: naming the argument, the value and the rule; on every rank, if one was given something else.
        """
        what = "prompts and params"
        with self._ranks.told_errors(what):
            requests, single = self.check(prompts, params, streamed)
        told = [(request.prompt, without_processor(request.params)) for request in requests]
        self._ranks.require_same(what, told)
        for request, seed in zip(requests, self._ranks.agree_on([r.seed for r in requests]), strict=True):
            request.seed = seed
        return requests, single

    def check(self, prompts: Any, params: Any, streamed: bool = False) -> tuple[list[Request], bool]:
        """The same on this rank alone, whose fresh seeds are its own."""
        items, single = prompting.split(prompts)
        if streamed and not single:
            raise ValueError(f"prompt must be one prompt, got a list of {len(items)}: use generate for several")
        if params is None or isinstance(params, SamplingParams):
            params = [params or SamplingParams()] * len(items)
        fits = isinstance(params, list | tuple) and len(params) == len(items)
        if not fits or not all(isinstance(p, SamplingParams) for p in params):
            got = f"{len(params)} of them" if isinstance(params, list | tuple) and not fits else f"{params!r:.200}"
            raise ValueError(
                f"params must be SamplingParams, or a list of one for each of {len(items)} prompts, got {got}"
            )
        special = special_tokens(self._tokenizer) if any(param.stop for param in params) else {}
        requests = []
        for index, (item, param) in enumerate(zip(items, params, strict=True)):
            name = "prompt" if streamed else f"prompts[{index}]"
            ids = prompting.encode(item, name, self._tokenizer, self._vocab_size, self._max_length)
            stop, stop_token_ids = self._stops(param, special)
            text = None
            if self._tokenizer is not None and (streamed or stop):
                text = TextStream(self._tokenizer, stop)
            seed = secrets.randbits(63) if param.seed is None else param.seed
            limit = min(len(ids) + param.max_new_tokens, self._max_length)
            requests.append(Request(index, ids, self.with_defaults(param), seed, limit, text, stop_token_ids))
        return requests, single

    def with_defaults(self, params: SamplingParams) -> SamplingParams:
        """With the target's own settings where a request leaves them to it."""
        if params.repetition_penalty is None:
            return replace(params, repetition_penalty=self._repetition_penalty)
        return params

    def _stops(self, params: SamplingParams, special: dict[str, int]) -> tuple[list[str], frozenset[int]]:
        """Strings that end a text, and tokens: those given as such, and special ones given as strings."""
        if params.stop and self._tokenizer is None:
            raise ValueError(f"stop needs a tokenizer, got {params.stop!r} without one: pass tokenizer= to engine.load")
        check_ints("stop_token_ids", params.stop_token_ids, 0, self._vocab_size - 1)
        strings = [text for text in params.stop if text not in special]
        return strings, frozenset([*params.stop_token_ids, *(special[text] for text in params.stop if text in special)])


def without_processor(params: SamplingParams) -> SamplingParams:
    """For a comparison of ranks: what processors do, the tokens of every round tell."""
    return params if params.logits_processor is None else replace(params, logits_processor=None)
