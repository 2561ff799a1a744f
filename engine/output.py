"""What a user gets back."""

from dataclasses import dataclass
from typing import Any, NamedTuple

from .metrics import Stats


@dataclass(frozen=True)
class Output:
    """The continuation of one prompt."""

    text: str | None  # without what ended it and special tokens; None without a tokenizer
    token_ids: list[int]  # new ones, with that which ended the text: the end of sequence, or what completed a stop
    prompt_token_ids: list[int]
    finish_reason: str  # "eos", "stop" or "length"
    stats: Stats
    # Of each of token_ids, if asked for: the natural log of the target's probability for it, given the text before it, under the
    # request's temperature, filters and penalty (what it was drawn from); of greedy texts the model's own, at temperature 1.
    logprobs: list[float] | None = None

    def as_dict(self) -> dict[str, Any]:
        """All of it, for JSON; `logprobs` if they were asked for."""
        found = {
            "text": self.text,
            "token_ids": self.token_ids,
            "prompt_token_ids": self.prompt_token_ids,
            "finish_reason": self.finish_reason,
            "stats": self.stats.as_dict(),
        }
        return found if self.logprobs is None else found | {"logprobs": self.logprobs}


class Span(NamedTuple):
    """A part of a streamed text."""

    text: str
    drafted: bool  # from drafted and accepted tokens; else from the target's own


@dataclass(frozen=True)
class Piece:
    """What one round adds to a stream."""

    text: str | None  # may be held back, and comes with a later piece; None without a tokenizer
    token_ids: list[int]  # all tokens of the round
    spans: tuple[Span, ...] = ()  # the text again, split by where it came from
    output: Output | None = None  # with the last piece: the whole
    logprobs: list[float] | None = None  # of the tokens, if asked for
