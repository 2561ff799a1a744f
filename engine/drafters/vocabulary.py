"""What two tokenizers have in common, and how a text gets from one to the other.

Tokens are compared by the bytes that they stand for: byte-level vocabularies spell each byte as a character ("Ġ" is a
space), SentencePiece ones write a space as "▁" and single bytes as "<0x0A>".
"""

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..detokenize import CHARACTER_BYTES, INCOMPLETE, decode

_CONTEXT = 16  # tokens before a piece that decide where its tokens begin
_SAMPLE = 64  # shared tokens whose texts are compared
_SPACE = "▁"
_SINGLE_BYTE = re.compile("<0x[0-9A-F]{2}>")


class TokenForm(NamedTuple):
    """What makes a token the same in two vocabularies."""

    content: bytes
    special: bool  # bos, eos, pad, chat markers: never the same as a token that spells their name


class SharedVocabulary:
    """The tokens that are the same in a drafter's and in a target's vocabulary.

    None are if those that are spelled alike add other texts in one than in the other: in some vocabularies, as of WordPiece, what
    a token stands for depends on those beside it.

    Args:
        drafter, target: `transformers` tokenizers.
        drafter_size, target_size: ids that the models have logits for; ids beyond have no counterpart.

    Attributes:
        drafter_ids, target_ids: int64 [N], a pair for each shared token, by ascending target id.
        share: N as a part of the smaller vocabulary, between 0 and 1.
    """

    def __init__(self, drafter: Any, target: Any, drafter_size: int, target_size: int) -> None:
        drafter_forms, target_forms = token_forms(drafter, drafter_size), token_forms(target, target_size)
        pairs = sorted((target_forms[form], drafter_forms[form]) for form in target_forms.keys() & drafter_forms.keys())
        if not _add_the_same_text(drafter, target, pairs):
            pairs = []
        self.drafter_ids = torch.tensor([pair[1] for pair in pairs], dtype=torch.int64)
        self.target_ids = torch.tensor([pair[0] for pair in pairs], dtype=torch.int64)
        self.share = len(pairs) / max(min(len(drafter_forms), len(target_forms)), 1)

    def to_target(self, drafter_size: int) -> Tensor:
        """[drafter_size] int64: the target's id of each drafter token, -1 where it has none."""
        return torch.full((drafter_size,), -1).scatter_(0, self.drafter_ids, self.target_ids)

    def to_drafter(self, target_size: int) -> Tensor:
        """[target_size] int64: the drafter's id of each target token, -1 where it has none."""
        return torch.full((target_size,), -1).scatter_(0, self.target_ids, self.drafter_ids)


def difference(target: Any, drafter: Any) -> str:
    """What makes these tokenizers two; empty where every id that both have is the same token."""
    target_words, draft_words = ({i: word for word, i in t.get_vocab().items()} for t in (target, drafter))
    shared = target_words.keys() & draft_words.keys()
    for token in sorted(shared):
        if target_words[token] != draft_words[token]:
            return f"id {token} is {target_words[token]!r} in the target's and {draft_words[token]!r} in the drafter's"
    if len(shared) < 0.99 * max(len(target_words), len(draft_words)):
        return f"of {len(target_words)} and {len(draft_words)} ids only {len(shared)} are in both"
    return ""


def token_forms(tokenizer: Any, vocab_size: int) -> dict[TokenForm, int]:
    """The id below `vocab_size` of every form in a tokenizer's vocabulary.

    Of several ids, the lowest; that of a single byte only where no token is spelled like it, since texts are not encoded so.
    """
    vocab: dict[str, int] = tokenizer.get_vocab()
    special = special_ids(tokenizer)
    is_byte_level = _is_byte_level(vocab)
    literal = special.union(tokenizer.added_tokens_decoder if is_byte_level else ())  # these are spelled as they are
    forms: dict[TokenForm, int] = {}
    for word, token in sorted(vocab.items(), key=lambda item: (_SINGLE_BYTE.fullmatch(item[0]) is not None, item[1])):
        content = word.encode() if token in literal else _content(word, is_byte_level)
        if content and token < vocab_size:
            forms.setdefault(TokenForm(content, token in special), token)
    return forms


def special_ids(tokenizer: Any) -> frozenset[int]:
    """Ids of tokens that mark something and stand for no text."""
    added = {token for token, entry in tokenizer.added_tokens_decoder.items() if entry.special}
    return frozenset(added.union(tokenizer.all_special_ids))


def first_tokens(tokenizer: Any) -> list[int]:
    """What a text of this tokenizer begins with: [bos], or nothing."""
    bos = tokenizer.bos_token_id
    return [bos] if bos is not None and tokenizer("", verbose=False)["input_ids"][:1] == [bos] else []


def encode(tokenizer: Any, text: str) -> list[int]:
    """Token ids of a text; what spells a special token is text like any other."""
    return list(tokenizer(text, add_special_tokens=False, split_special_tokens=True, verbose=False)["input_ids"])


def decode_after(tokenizer: Any, context: Sequence[int], ids: Sequence[int]) -> str:
    """The text that `ids` add to what stands before them, without the beginning of a character at its end.

    Only the end of the context counts: some decoders treat the first token of a text apart.
    """
    context, before = _end_of(tokenizer, context)
    whole = decode(tokenizer, [*context, *ids])
    text = whole[len(before) :] if whole.startswith(before) else decode(tokenizer, list(ids))
    return text.rstrip(INCOMPLETE)


def encode_after(tokenizer: Any, context: str, text: str) -> list[int] | None:
    """Token ids of a text in its context; None where no token begins with it, since one spans the border."""
    before, whole = encode(tokenizer, context) if context else [], encode(tokenizer, context + text)
    return whole[len(before) :] if whole[: len(before)] == before else None


def last_text(tokenizer: Any, ids: Sequence[int]) -> str | None:
    """Some text from the end of these tokens, up to their last one; None in the middle of a character."""
    _, text = _end_of(tokenizer, ids)
    return None if text.endswith(INCOMPLETE) else text


def _end_of(tokenizer: Any, ids: Sequence[int]) -> tuple[list[int], str]:
    """The last tokens, and their text. They begin where a character does, as some decoders spoil all bytes behind half a one."""
    end, text = [], ""
    for count in range(_CONTEXT, _CONTEXT + CHARACTER_BYTES):
        end = list(ids[-count:])
        text = decode(tokenizer, end)
        if not text.startswith(INCOMPLETE):
            break
    return end, text


def _add_the_same_text(drafter: Any, target: Any, pairs: Sequence[tuple[int, int]]) -> bool:
    """Whether most of these pairs of target and drafter ids add the same text behind a letter."""
    letters = (pair for pair in pairs if decode(target, [pair[0]]).strip().isalpha())
    if (letter := next(letters, None)) is None:
        return True
    sample = pairs[:: -(-len(pairs) // _SAMPLE)]
    of_target = [decode_after(target, letter[:1], pair[:1]) for pair in sample]
    of_drafter = [decode_after(drafter, letter[1:], pair[1:]) for pair in sample]
    # Special tokens and parts of characters add none.
    alike = [ours == theirs for ours, theirs in zip(of_target, of_drafter, strict=True) if ours or theirs]
    return 2 * sum(alike) >= len(alike)


def _is_byte_level(vocab: dict[str, int]) -> bool:
    return sum(word.startswith("Ġ") for word in vocab) > sum(word.startswith(_SPACE) for word in vocab)


def _content(word: str, is_byte_level: bool) -> bytes:
    """The bytes that an ordinary token stands for."""
    if is_byte_level and all(character in _BYTES for character in word):
        return bytes(_BYTES[character] for character in word)
    if not is_byte_level and _SINGLE_BYTE.fullmatch(word):
        return bytes.fromhex(word[3:5])
    return word.replace(_SPACE, " ").encode()


def _byte_characters() -> dict[str, int]:
    """The alphabet of byte-level vocabularies: printable bytes are themselves, the others count up from 256."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}


_BYTES = _byte_characters()
