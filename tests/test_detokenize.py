"""Streams of text: bytes that are no text, spaces between words, stop strings."""

import random
from collections.abc import Sequence
from typing import Any

import pytest
from tiny_tokenizer import EOS, byte_tokenizer, sentencepiece_like
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from engine.detokenize import TextStream, decode, whole_text

UNKNOWN = "\N{REPLACEMENT CHARACTER}"
FIRST_BYTE = 3  # of sentencepiece_like
END = [ord("a"), *"é日🙂".encode()]  # what follows must come right


class Counted:
    """A tokenizer that notes how many tokens it decodes at a time."""

    def __init__(self, inner: Any) -> None:
        self.inner, self.added_tokens_decoder = inner, inner.added_tokens_decoder
        self.most = 0

    def decode(self, ids: list[int], **options: Any) -> str:
        self.most = max(self.most, len(ids))
        return self.inner.decode(ids, **options)


def streamed(tokenizer: Any, ids: list[int], stop: Sequence[str] = ()) -> list[str]:
    """What a stream shows with each token."""
    stream, shown = TextStream(tokenizer, stop), []
    for token in ids:
        stopped = stream.push(token, drafted=False)
        shown.append("".join(span.text for span in stream.take(last=False)))
        if stopped:
            break
    stream.finish()
    shown.append("".join(span.text for span in stream.take(last=True)))
    assert "".join(shown) == stream.text
    return shown


@pytest.mark.parametrize(
    "part",
    [b"\x80", b"\xf0\x9f", UNKNOWN.encode(), b"\xe6\x97\xff", "é".encode() + b"\x80", b"\xf0" + "é".encode() * 9],
)
@pytest.mark.parametrize("before", [b"", b"a", b"\xe6"])
def test_bytes_that_are_no_text_are_shown_in_time_that_grows_with_their_number(before: bytes, part: bytes) -> None:
    ids = [*before, *part * (600 // len(part)), *END]
    tokenizer = Counted(byte_tokenizer())
    shown = streamed(tokenizer, ids)
    assert "".join(shown) == bytes(ids).decode(errors="replace") and tokenizer.most < 120
    late = [at for at, text in enumerate(shown) if text]
    assert max(after - at for at, after in zip([0, *late], late, strict=False)) < 50
    assert whole_text(byte_tokenizer(), ids) == "".join(shown)


@pytest.mark.parametrize("many", range(40, 70))
def test_a_character_behind_bytes_that_are_no_text_is_never_split(many: int) -> None:
    shown = streamed(byte_tokenizer(), [*b"\x80" * many, *"🙂🙂".encode()])
    assert "".join(shown) == UNKNOWN * many + "🙂🙂"


@pytest.mark.parametrize(
    "part", [b"\x80", b"\x80ab", b"\xf0\x9f", b"\x80" + "🙂".encode() * 50, b"\x80" + UNKNOWN.encode() * 50]
)
@pytest.mark.parametrize("before", [b"", UNKNOWN.encode() * 3])
def test_a_run_of_bytes_that_is_spoilt_remains_so(before: bytes, part: bytes) -> None:
    """Where the decoder reads byte tokens run by run. What is behind the run is text again."""
    inner = sentencepiece_like()
    tokenizer = Counted(inner)
    run = [*before, *part * (600 // len(part))]
    ids = [FIRST_BYTE + byte for byte in run] + inner.encode("the ", add_special_tokens=False)
    ids += [FIRST_BYTE + byte for byte in "é🙂".encode()]
    shown = streamed(tokenizer, ids)
    assert "".join(shown) == UNKNOWN * len(run) + "the é🙂" and tokenizer.most < 120
    assert len("".join(shown[:300])) > 250
    assert whole_text(inner, ids) == "".join(shown)


def test_replacement_characters_that_are_meant() -> None:
    """Byte by byte a decoder of runs shows three for one, until it is whole."""
    inner = sentencepiece_like()
    tokenizer = Counted(inner)
    said = UNKNOWN * 200 + "é" + UNKNOWN * 200 + "🙂"
    ids = [FIRST_BYTE + byte for byte in said.encode()]
    shown = streamed(tokenizer, ids)
    assert "".join(shown) == said == whole_text(inner, ids) and tokenizer.most < 120
    assert len("".join(shown[:300])) > 90


def test_special_tokens_within_a_character() -> None:
    """They stand for no text, however many they are."""
    tokenizer = Counted(byte_tokenizer())
    ids = [token for byte in "🙂".encode() for token in [byte, *[EOS] * 200]]
    assert "".join(streamed(tokenizer, ids)) == "🙂" == decode(tokenizer.inner, ids) and tokenizer.most < 10


def test_spaces_between_words_are_kept() -> None:
    """SentencePiece's own decoder drops that of the first token that it is given."""
    words = ["<unk>", "▁one", "▁two", "s"]
    inner = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, [], unk_token="<unk>"))
    inner.decoder = decoders.Metaspace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="<unk>")
    ids = [1, 2, 3, 1]
    assert "".join(streamed(tokenizer, ids)) == decode(tokenizer, ids) == "one twos one"


@pytest.mark.parametrize("stop", [["ne", "one"], ["one", "ne"]])
def test_the_first_stop_string_in_the_text_ends_it(stop: list[str]) -> None:
    """Not the first of the list, where one token completes several."""
    assert "".join(streamed(byte_tokenizer(), list(b"say one."), stop)) == "say "


def test_a_stop_string_is_cut_from_spans_too() -> None:
    stream = TextStream(byte_tokenizer(), ["bc"])
    for token in b"abc":
        stream.push(token, drafted=token == ord("b"))
    assert [(span.text, span.drafted) for span in stream.take(last=True)] == [("a", False)]


def test_nothing_behind_a_stop_string_comes_back_at_the_end() -> None:
    """Of a token with text before the stop string, and half a character behind it."""

    class Pieces:
        def decode(self, ids: list[int], **options: Any) -> str:
            return b"".join((b"ab", b"c END\xe6", b"\x97\xa5")[i] for i in ids).decode(errors="replace")

    assert streamed(Pieces(), [0, 1, 2], [" END"]) == ["ab", "c", ""]


def test_a_stop_string_of_replacement_characters() -> None:
    """It ends the text while they come."""
    stream = TextStream(byte_tokenizer(), [UNKNOWN * 5])
    pushed = [stream.push(0x80, drafted=False) for _ in range(60)]
    assert stream.stopped and stream.text == "" and pushed.index(True) < 50


def test_what_may_begin_a_stop_string_is_held_back() -> None:
    """The longest end of the text that does, and no more."""
    rng, tokenizer = random.Random(0), byte_tokenizer()
    for _ in range(300):
        stop = ["".join(rng.choices("abc", k=rng.randint(1, 9))) for _ in range(rng.randint(1, 6))]
        stream, shown = TextStream(tokenizer, stop), ""
        for token in rng.choices(b"abc", k=30):
            if stream.push(token, drafted=False):
                break
            shown += "".join(span.text for span in stream.take(last=False))
            held = {n for text in stop for n in range(len(text)) if stream.text.endswith(text[:n])}
            assert len(shown) == len(stream.text) - max(held)


def test_many_stop_strings_take_no_time() -> None:
    """Whether one begins is not asked of each of them."""
    asked: list[str] = []

    class Asked(str):
        def startswith(self, *arguments: Any) -> bool:
            asked.append(self)
            return super().startswith(*arguments)

    stream = TextStream(byte_tokenizer(), [Asked(f"{number:06} and so on") for number in range(2000)])
    for token in b"000199 and so 0":
        assert not stream.push(token, drafted=False)
        stream.take(last=False)
    assert len(asked) < 300


def test_what_was_held_back_keeps_who_drafted_it() -> None:
    stream = TextStream(byte_tokenizer(), ["bcd"])
    for token in b"ab":
        stream.push(token, drafted=token == ord("b"))
    assert [(span.text, span.drafted) for span in stream.take(last=False)] == [("a", False)]
    stream.push(ord("x"), drafted=False)
    assert [(span.text, span.drafted) for span in stream.take(last=False)] == [("b", True), ("x", False)]
