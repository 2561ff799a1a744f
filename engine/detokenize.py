"""Token ids to text, token by token."""

from bisect import bisect_left
from collections.abc import Sequence
from functools import cached_property
from typing import Any

from .output import Span

INCOMPLETE = "\N{REPLACEMENT CHARACTER}"  # how a decoder shows a character whose bytes have not all come
CHARACTER_BYTES = 4  # of UTF-8, at most

# So many tokens may wait for a character to be whole; of more, these many of the first and of the last ones are kept.
_LONGEST, _FIRST, _LAST = 48, 16, 16


class TextStream:
    """Grows a text from tokens, never handing out half a character or the beginning of a stop string.

    Args:
        tokenizer: a `transformers` tokenizer.
        stop: the text ends before the first of these.
    """

    def __init__(self, tokenizer: Any, stop: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self._stop = sorted(stop)  # for bisect: there may be thousands
        # Tokens are decoded in a window that begins with the last finished ones: some decoders treat a first token apart.
        self._ids: list[int] = []
        self._read = 0  # of its tokens, those that are finished
        self._grown, self._known = "", 0  # its text, and the length of what is finished of it
        self._spans: list[Span] = []  # not yet handed out
        self.text = ""
        self.stopped = False

    def push(self, token_id: int, drafted: bool) -> bool:
        """Append a token; True if the text has now reached a stop string, before which it is cut."""
        self._ids.append(token_id)
        before, self._grown = self._grown, self._decode(self._ids)
        new, waiting = self._grown[self._known :], len(self._ids) - self._read
        # A text that gets shorter had the bytes of a character one by one until it was whole: here a U+FFFD that is meant.
        meant = len(self._grown) < len(before) and waiting > _FIRST - CHARACTER_BYTES
        if self._grown == before and token_id in self._special:  # kept, it would be decoded again and again
            self._ids.pop()
        elif new and (meant or not new.endswith(INCOMPLETE)):
            del self._ids[: self._read]
            self._read, self._grown = len(self._ids), self._decode(self._ids)
            self._known = len(self._grown)
            self._append(new, drafted)
        elif self._find_stop(finished := new.rstrip(INCOMPLETE)) is not None:
            self._append(finished, drafted)
        elif waiting > _LONGEST:
            self._shorten(drafted)
        return self.stopped

    def _shorten(self, drafted: bool) -> None:
        """Finish what can be no character any more, and forget the tokens in the middle of those that wait.

        The first ones stay: where they are no text, some decoders spoil all that follows in the same run of bytes. So do the last,
        by which a decoder finds the next character.
        """
        new = self._grown[self._known :]
        del self._ids[self._read + _FIRST : -_LAST]
        self._grown = self._decode(self._ids)
        self._known = len(self._grown) - len(new[1 - CHARACTER_BYTES :])
        self._append(new[: 1 - CHARACTER_BYTES], drafted)

    @cached_property
    def _special(self) -> frozenset[int]:
        """Tokens that stand for no text."""
        return frozenset(special_tokens(self._tokenizer).values())

    def finish(self) -> None:
        """No token follows: what was held back as incomplete belongs to the text."""
        if not self.stopped and self._read < len(self._ids):
            self._append(self._grown[self._known :], drafted=False)
            self._read, self._known = len(self._ids), len(self._grown)

    def take(self, last: bool) -> tuple[Span, ...]:
        """The spans that may be shown by now; all of them if no token follows."""
        held = 0 if last or self.stopped else self._stop_beginning()
        taken, kept = [], []
        for span in reversed(self._spans):
            cut = len(span.text) - min(held, len(span.text))
            held -= len(span.text) - cut
            kept.append(Span(span.text[cut:], span.drafted))
            taken.append(Span(span.text[:cut], span.drafted))
        self._spans = [span for span in reversed(kept) if span.text]
        return tuple(span for span in reversed(taken) if span.text)

    def _append(self, text: str, drafted: bool) -> None:
        end = self._find_stop(text)
        self.text += text
        self._spans.append(Span(text, drafted))
        if end is not None:
            self.stopped = True
            surplus = len(self.text) - end
            self.text = self.text[:end]
            while surplus:
                span = self._spans.pop()
                keep = max(0, len(span.text) - surplus)
                surplus -= len(span.text) - keep
                if keep:
                    self._spans.append(Span(span.text[:keep], span.drafted))

    def _find_stop(self, text: str) -> int | None:
        """Where the first stop string begins, once this is appended; None without one."""
        searched_from = max(0, len(self.text) - max(map(len, self._stop), default=0))
        searched = self.text[searched_from:] + text
        found = [at for at in map(searched.find, self._stop) if at >= 0]
        return searched_from + min(found) if found else None

    def _stop_beginning(self) -> int:
        """Length of the longest end of the text that a stop string begins with."""
        longest = min(len(self.text), max(map(len, self._stop), default=1) - 1)
        for length in range(longest, 0, -1):
            end = self.text[-length:]
            at = bisect_left(self._stop, end)
            if at < len(self._stop) and self._stop[at].startswith(end):
                return length
        return 0

    def _decode(self, ids: list[int]) -> str:
        return decode(self._tokenizer, ids)


def special_tokens(tokenizer: Any) -> dict[str, int]:
    """The tokens that `decode` skips."""
    added = getattr(tokenizer, "added_tokens_decoder", {})
    return {str(token): token_id for token_id, token in added.items() if token.special}


def whole_text(tokenizer: Any, ids: Sequence[int]) -> str:
    """The text of these tokens as a stream of them gives it.

    Only bytes that are no text make a difference: around those, decoders of byte tokens also spoil the characters beside them.
    """
    text = decode(tokenizer, list(ids))
    if INCOMPLETE in text:
        stream = TextStream(tokenizer, ())
        for token in ids:
            stream.push(token, drafted=False)
        stream.finish()
        text = stream.text
    return text


def decode(tokenizer: Any, ids: list[int]) -> str:
    """Text of token ids without special tokens, exactly as the tokens spell it."""
    text: str = tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    return text
