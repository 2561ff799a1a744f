"""What a user gets back."""

from dataclasses import dataclass
from typing import Any, NamedTuple

from .metrics import Stats


@dataclass(frozen=True)
class Output:
    """The continuation of one prompt.

    Attributes:
        text: the new text, without the stop string or token that ended it and without special tokens; None without a tokenizer. It
            is decoded from the new tokens alone: some tokenizers, such as Llama 2's, then drop a leading space that decoding
            prompt_token_ids + token_ids together would keep.
        token_ids: the new tokens, including the one that ended the text (an end-of-sequence or stop token, or the one that
            completed a stop string).
        prompt_token_ids: the prompt as the target read it.
        finish_reason: "eos", "stop" or "length".
        stats: of this request.
        logprobs: if requested, the log-probability (natural log) of each of token_ids under the target, given the text before it,
            after penalty, logits processor, temperature and filters (the distribution it was drawn from); for greedy text at
            temperature 1, without filters.
    """

    text: str | None
    token_ids: list[int]
    prompt_token_ids: list[int]
    finish_reason: str
    stats: Stats
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
    """A part of a streamed text.

    Attributes:
        drafted: whether it comes from accepted drafts, and not from the target's own tokens.
    """

    text: str
    drafted: bool


@dataclass(frozen=True)
class Piece:
    """What one round adds to a stream.

    Attributes:
        text: the text that is safe to show; an incomplete character, or a possible start of a stop string, is held back for a
            later piece. None without a tokenizer.
        token_ids: all tokens of the round.
        spans: the text again, split by where it came from.
        output: with the last piece: the whole.
        logprobs: of the tokens, if asked for.
    """

    text: str | None
    token_ids: list[int]
    spans: tuple[Span, ...] = ()
    output: Output | None = None
    logprobs: list[float] | None = None
