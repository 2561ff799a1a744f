"""The rows of a draft model that reads the text in tokens of its own."""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from ..graphs import SHORTEST_TEXT, Graphs, bucket
from ..model import RaggedModel, last_valid
from ..state import BatchState
from ..transfers import to_device
from .vocabulary import decode_after, encode, encode_after, first_tokens, last_text, special_ids

_WIDEST = 16  # more missing tokens than this are read without the head, before a round's first call
_NARROWEST = 8  # columns of a captured call, and their multiples by powers of two: most rounds lack fewer tokens
_DRAFTS = 64  # room for so many behind a text
_Result = TypeVar("_Result")


class Translation:
    """A text in the target's tokens, and in the drafter's.

    Tokens with a counterpart are replaced by it. A run of others is decoded, and its text encoded by the drafter's tokenizer
    as it goes on from the text before. Special tokens without a counterpart are left out. All of it depends on the text
    alone, not on the pieces in which it came.

    Args:
        tokenizer, target_tokenizer: `transformers` tokenizers.
        counterparts: the drafter's id of each target token, -1 where it has none.
        vocab_size: of the drafter.

    Attributes:
        ids: the text in the drafter's tokens, beginning with its bos token if it uses one.
        target_ids: the target's tokens since the last special one.
        num_read: target tokens so far.
    """

    def __init__(self, tokenizer: Any, target_tokenizer: Any, counterparts: Sequence[int], vocab_size: int) -> None:
        self._tokenizer, self._target_tokenizer = tokenizer, target_tokenizer
        self._counterparts, self._vocab_size = counterparts, vocab_size
        self._special = special_ids(target_tokenizer)
        self._closed = first_tokens(tokenizer)  # translated for good
        self._run = 0  # of the last target ids, those without counterpart
        self.ids: list[int] = list(self._closed)
        self.target_ids: list[int] = []
        self.num_read = 0

    def extend(self, tokens: Sequence[int]) -> None:
        """The target's text goes on with these tokens."""
        for token in tokens:
            counterpart = self._counterparts[token]
            if counterpart >= 0:
                self._closed += self._translated_run()
                self._run = 0
                if self.num_read or self._closed[:1] != [counterpart]:  # else a bos that is there already
                    self._closed.append(counterpart)
            if token in self._special:
                self._closed += self._translated_run()
                self._run, self.target_ids = 0, []
            else:
                self._run += counterpart < 0
                self.target_ids.append(token)
            self.num_read += 1
        self.ids = self._closed + self._translated_run()

    @property
    def last_text(self) -> str | None:
        """Some text before the next token; None in the middle of a character."""
        return last_text(self._target_tokenizer, self.target_ids)

    def _translated_run(self) -> list[int]:
        if not self._run:
            return []
        context, run = self.target_ids[: -self._run], self.target_ids[-self._run :]
        text = decode_after(self._target_tokenizer, context, run)
        ids = encode_after(self._tokenizer, last_text(self._target_tokenizer, context) or "", text)
        if ids is None:  # the drafter would not have a token begin here
            ids = encode(self._tokenizer, text)
        return [token for token in ids if token < self._vocab_size]


class OwnTexts:
    """A draft model's cache over rows of its own tokens, whose lengths are not the target's.

    The host keeps the translation of each row's text and the tokens whose K/V the cache holds; what a text has in common
    with these is not read again. Reading the state waits for the device. What the device then does in a round, between `begin`
    and `end`, is captured in CUDA graphs by `run`, as all that the host has found out lies in one tensor.

    Args:
        ragged: the draft model.
        target: its graphs are those of the rounds.
        begin_text: makes the translation of an empty text.
    """

    def __init__(self, ragged: RaggedModel, target: RaggedModel, begin_text: Callable[[], Translation]) -> None:
        self._ragged, self._target, self._begin_text = ragged, target, begin_text
        self._texts: dict[int, Translation] = {}  # by slot
        self._cached: dict[int, list[int]] = {}
        # The round under way: its slots (None: not drafting), and what the device is told of them, int64 [B, 2 + W]: how many
        # tokens of the text are in the cache, its length, and the tokens that are not.
        self._slots: list[int | None] = []
        self._rows: slice | Tensor = slice(0, 0)
        self._told = torch.empty(0, 0)
        self._fed: Tensor | list[list[int]] = []
        self._longest = 0  # no text is longer; in a captured round no text with its drafts
        self._captured = False
        self._places: dict[torch.Size, Tensor] = {}  # where graphs find what they are told, by its shape

    def reserve(self, length: int) -> None:
        """Make room for rows of this length, and for drafts behind them."""
        self._ragged.cache.reserve(length + _DRAFTS)

    def prefill(self, state: BatchState) -> None:
        """New rows: read their prompts, but for the last token of each."""
        self._settle()
        self._ragged.cache.begin_rows(state.rows)
        prompts = []
        tokens = state.tokens[:, : max(state.prompt_lengths)].tolist()
        for row, slot, length in zip(tokens, state.slots, state.prompt_lengths, strict=True):
            self._texts[slot], self._cached[slot] = self._begin_text(), []
            self._texts[slot].extend(row[:length])
            prompts.append(self._texts[slot].ids)
        self._reserve(max(map(len, prompts)))
        self._read(state.slots, prompts, state.rows)

    @property
    def graphs(self) -> Graphs:
        return self._target.graphs

    def captures(self, state: BatchState) -> bool:
        """Whether `run` captures the work of a round of these rows."""
        return self.graphs.enabled and self._ragged.capturable and isinstance(state.rows, slice)

    def follow(self, state: BatchState) -> list[Translation | None]:
        """The text of each row by now; None for rows that are not active."""
        lengths = ((state.seq_lens + 1) * state.active).tolist()  # 0: not active
        texts = [self._texts[slot] if length else None for slot, length in zip(state.slots, lengths, strict=True)]
        begin = min((text.num_read for text in texts if text is not None), default=0)
        new = state.tokens[:, begin : max(lengths)].tolist()  # of all rows at once: each transfer waits for the device
        for text, row, length in zip(texts, new, lengths, strict=True):
            if text is not None and text.num_read < length:
                text.extend(row[text.num_read - begin : length - begin])
        return texts

    def begin(self, state: BatchState, texts: Sequence[Translation | None], num_steps: int) -> None:
        """Begin a round in which `after_text` is called, and then `after_drafts` at most `num_steps` - 1 times."""
        self._settle()
        slots, ids = state.slots, [text.ids if text is not None else [] for text in texts]
        self._rows, self._longest = state.rows, max(map(len, ids))
        self._reserve(self._longest + num_steps)
        self._read(slots, ids, state.rows, at_most=_WIDEST)
        starts = [min(self._num_cached(slot, row), max(len(row) - 1, 0)) for slot, row in zip(slots, ids, strict=True)]
        missing = [row[start:] for row, start in zip(ids, starts, strict=True)]
        width = max(1, *map(len, missing))
        self._captured = self.captures(state)
        if self._captured:  # few different numbers, for few graphs
            longest = max(bucket(self._longest + num_steps, SHORTEST_TEXT), state.max_text_length)
            self._longest = min(longest, self._ragged.cache.capacity)
            width = bucket(width, _NARROWEST)
        told = zip(starts, map(len, ids), missing, strict=True)
        self._told = self._padded([[start, length, *row] for start, length, row in told], 2 + width)
        if self._captured:
            self._told = self._places.setdefault(self._told.shape, self._told).copy_(self._told)
        self._slots = [slot if row else None for slot, row in zip(slots, ids, strict=True)]
        for slot, row in zip(slots, ids, strict=True):
            if row:
                self._cached[slot] = list(row)

    def run(self, state: BatchState, num_steps: int, work: Callable[[], _Result]) -> _Result:
        """Have the device do its work of the round that has begun: a function of tensors, by `after_text` and `after_drafts`.

        Returns:
            What `work` returns. With CUDA graphs, the next one that is replayed may overwrite its tensors, whichever that is.
        """
        if not self._captured:
            return work()
        capacity = self._ragged.cache.capacity
        key = ("own texts", id(self), state.key, self._told.shape, num_steps, self._longest, capacity)
        result: _Result = self.graphs.run(key, work)
        return result

    def after_text(self) -> Tensor:
        """Logits [B, 1, V] after each row's text; without meaning for rows that have none."""
        start, length = self._told[:, 0], self._told[:, 1]
        logits = self._ragged.decode(self._told[:, 2:], start, length - start, self._rows, max(self._longest, 1))
        return last_valid(logits, length - start)

    def after_drafts(self, tokens: Tensor, count: int) -> Tensor:
        """Logits [B, 1, V] after one more token of each row, [B, 1] int64, of which there are `count` with this one."""
        length = self._told[:, 1]
        return self._ragged.decode(tokens, length + count - 1, (length > 0).long(), self._rows, self._longest + count)

    def end(self, fed: Tensor | list[list[int]]) -> None:
        """The round is over, and fed these tokens behind the texts, [B, N] int64. A tensor is not read before the next round."""
        self._fed = fed

    def _settle(self) -> None:
        """Take down what the last round has fed."""
        fed, self._fed = self._fed, []
        if len(fed):
            rows = fed.tolist() if isinstance(fed, Tensor) else fed
            for slot, row in zip(self._slots, rows, strict=True):
                if slot is not None:
                    self._cached[slot] += row

    def _read(
        self, slots: Sequence[int], texts: Sequence[list[int]], rows: slice | Tensor, at_most: int | None = None
    ) -> None:
        """Write the K/V that is missing of these texts, but for their last tokens; not if no more than `at_most` are missing."""
        ends = [max(len(text) - 1, 0) for text in texts]
        spans = [
            (min(self._num_cached(slot, text), end), end) for slot, text, end in zip(slots, texts, ends, strict=True)
        ]
        if max(end - begin for begin, end in spans) <= (at_most or 0):
            return
        self._ragged.prefill(self._padded(texts, max(map(len, texts))), spans, rows)
        for slot, text in zip(slots, texts, strict=True):
            if text:
                self._cached[slot] = text[:-1]

    def _num_cached(self, slot: int, text: list[int]) -> int:
        return common_prefix(self._cached.get(slot, []), text)

    def _reserve(self, length: int) -> None:
        if length > self._ragged.cache.capacity:
            self.graphs.clear()  # before buffers move, as some may when memory runs out
            self._ragged.cache.reserve(length + length // 4)  # growing copies, so not each time

    def _padded(self, rows: Sequence[list[int]], width: int) -> Tensor:
        """[B, width] int64."""
        padded = [row + [0] * (width - len(row)) for row in rows]
        return to_device(padded, self._ragged.device, torch.int64)


def common_prefix(a: list[int], b: list[int]) -> int:
    """How many first elements are the same."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
