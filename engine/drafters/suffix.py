"""Drafting by frequency: what followed most often where a text ended like this?

SuffixDecoding (Oliaro et al., arXiv 2411.04975): continuations are looked up in the row's own text and in earlier outputs.
The paper keeps suffix trees. Here texts lie in flat arrays, which numpy searches: a round then costs a row one pass over its
text and the pool and a few passes over matches, and texts are added and dropped without rebuilding anything.
"""

from collections import Counter, deque
from collections.abc import Sequence

import numpy as np
import torch

from ..config import check_int
from ..state import BatchState, Verdict
from .lookup import LookupDrafter, Tokens, matches

_NOTHING: Tokens = np.empty(0, dtype=np.int32)
MOST_MATCHES = 256  # that vote on what comes next, the latest
# A share of n in n is believed to be (n + 1/4) / (n + 1/2), and a match of n tokens to be right n times in n + 1.
_IMAGINED_HITS, _IMAGINED = 0.25, 0.5


class SuffixDrafter(LookupDrafter):
    """Proposes what most often followed the longest earlier matches of the text's end; of equals, what came last.

    Each further token is voted for by those matches that agree with the draft so far. Where one runs into the end of the row's
    own text, the text is periodic there, and the period goes on.

    Proposals are one-hot: a function of the row's text and of the pool, which holds outputs of earlier requests. Greedy and
    `coupled` texts therefore do not depend on the pool. Sampled ones under `rejection` and `block` do, for a given seed; their
    law does not, because a row's random numbers are independent of the pool: a row whose seed is that of a sampled output
    in the pool looks at its own text alone.

    It serves one engine, the last one that was made with it. Before it goes on to a target with another tokenizer, `forget`.

    This is work on the host: it waits for every round's tokens, which are free to read on a CPU, and is not captured in
    graphs.

    Args:
        pool_tokens: of earlier outputs that are kept, the oldest dropped first, >= 0; 0: the row's own text alone.
        min_ngram: shortest match that counts, >= 1.
        max_ngram: longest match looked for, >= min_ngram.

    Raises:
        ValueError: naming the argument, the value and the rule.
    """

    keeps_rows = True  # see `Drafter`

    def __init__(self, pool_tokens: int = 200_000, min_ngram: int = 1, max_ngram: int = 16) -> None:
        check_int("pool_tokens", pool_tokens, 0)
        check_int("min_ngram", min_ngram, 1)
        check_int("max_ngram", max_ngram, min_ngram)
        self.pool_tokens, self.min_ngram, self.max_ngram = pool_tokens, min_ngram, max_ngram
        self._rows: dict[int, _Row] = {}  # by slot
        self._pool = _Pool(pool_tokens)

    def prefill(self, state: BatchState) -> None:
        """Note the prompts; the texts that were in these slots go to the pool."""
        prompts = state.tokens[:, : max(state.prompt_lengths)].cpu().numpy()
        seeds, temperatures = state.seed.tolist(), state.temperature.tolist()
        for index, slot in enumerate(state.slots):
            self._retire(slot)
            prompt = prompts[index, : state.prompt_lengths[index]]
            seed = seeds[index] if temperatures[index] > 0 and not state.coupled else None
            self._rows[slot] = _Row(prompt, seed)

    def forget(self) -> None:
        """Drop the outputs that were kept; between calls, as the texts of a running one are dropped too."""
        self._rows.clear()
        self._pool = _Pool(self.pool_tokens)

    def remember(self, prompt: Sequence[int], output: Sequence[int], seed: int | None = None) -> None:
        """Put an output into the pool as if it had been generated here.

        Args:
            prompt, output: token ids.
            seed: of the request, if the output was sampled under `rejection` or `block`.
        """
        if len(output):
            self._pool.add(np.array([*prompt[-self.max_ngram :], *output], dtype=np.int32), seed)

    def continuation(self, slot: int, text: Tokens, most: int) -> list[tuple[int, float]]:
        """See the class and `LookupDrafter`."""
        if slot not in self._rows:
            return []
        length, seed = len(text), self._rows[slot].seed
        own = np.empty(length + most, dtype=np.int32)
        own[:length] = text
        tail = own[max(length - self.max_ngram, 0) : length]
        found, context = matches(own[: length - 1], tail)
        pool = self._pool.tokens if seed is None or seed not in self._pool.seeds else _NOTHING
        others, other_context = matches(pool, tail)
        if other_context > context:
            found, context = found[:0], other_context
        elif other_context < context:
            others = others[:0]
        if context < self.min_ngram:
            return []
        drafts: list[tuple[int, float]] = []
        found, others = found[-MOST_MATCHES:], others[-MOST_MATCHES:]
        for step in range(1, most + 1):
            # Behind the end of the row's own text are the drafts so far, behind that of a pooled one is -1.
            next_own, next_others = own[found + step], pool[others + step]
            votes = [token for token in (*next_others.tolist(), *next_own.tolist()) if token >= 0]
            if not votes:
                break
            counts = Counter(reversed(votes))  # of equals, the first is the one that came last
            token, count = counts.most_common(1)[0]
            share = (count + _IMAGINED_HITS) / (len(votes) + _IMAGINED)
            drafts.append((token, share * (1 - 1 / (context + step))))
            own[length + step - 1] = token
            found, others = found[next_own == token], others[next_others == token]
        return drafts

    def observe(self, state: BatchState, verdict: Verdict) -> None:
        """Add the new tokens to the texts; texts that have ended go to the pool."""
        limits, seq_lens = state.limits[:, None], state.seq_lens[:, None]
        rows = torch.cat([limits, seq_lens, verdict.tokens], dim=1).tolist()
        for slot, (limit, last, *tokens) in zip(state.slots, rows, strict=True):
            if not limit:
                self._retire(slot)
            elif (row := self._rows.get(slot)) is not None:
                row.append(tokens[: max(last + 1 - row.length, 0)])

    def _retire(self, slot: int) -> None:
        """Put an output into the pool, with as much of its prompt as a match may span."""
        row = self._rows.pop(slot, None)
        if row is not None and row.length > row.prompt_length:
            self._pool.add(row.text[max(row.prompt_length - self.max_ngram, 0) :], row.seed)


class _Row:
    """A text on the host, with the seed of its random numbers; None: it draws none."""

    def __init__(self, prompt: Tokens, seed: int | None) -> None:
        self.prompt_length = self.length = len(prompt)
        self.seed = seed
        self._buffer = np.empty(2 * len(prompt) + 64, dtype=np.int32)
        self._buffer[: self.length] = prompt

    @property
    def text(self) -> Tokens:
        return self._buffer[: self.length]

    def append(self, tokens: Sequence[int]) -> None:
        end = self.length + len(tokens)
        if end > len(self._buffer):
            self._buffer = np.concatenate([self._buffer, np.empty(end, dtype=np.int32)])
        self._buffer[self.length : end] = tokens
        self.length = end


class _Pool:
    """The last `size` tokens of the texts added, -1 behind each text."""

    def __init__(self, size: int) -> None:
        self._size, self._end = size, 0
        self._buffer = np.empty(0, dtype=np.int32)
        self._ends: deque[tuple[int, int | None]] = deque()  # of texts in the buffer, and their seeds
        self.seeds: Counter[int] = Counter()  # of the random numbers that the texts depend on

    @property
    def tokens(self) -> Tokens:
        return self._buffer[max(self._end - self._size, 0) : self._end]

    def add(self, text: Tokens, seed: int | None) -> None:
        """At the end; what is beyond the size is dropped at the other."""
        text = np.append(text, np.int32(-1))[-self._size :] if self._size else _NOTHING
        if not len(text):
            return
        if self._end + len(text) > len(self._buffer):
            # Move what is kept to the front: each token once per `size` added.
            kept = self.tokens.copy()
            if len(self._buffer) < 2 * self._size:
                self._buffer = np.empty(min(2 * self._size, 2 * (len(kept) + len(text))), dtype=np.int32)
            moved = self._end - len(kept)
            self._buffer[: len(kept)] = kept
            self._end = len(kept)
            self._ends = deque((end - moved, owner) for end, owner in self._ends)
        self._buffer[self._end : self._end + len(text)] = text
        self._end += len(text)
        self._ends.append((self._end, seed))
        if seed is not None:
            self.seeds[seed] += 1
        while self._ends and self._ends[0][0] <= self._end - self._size:
            _, gone = self._ends.popleft()
            if gone is not None:
                self.seeds[gone] -= 1
                if not self.seeds[gone]:
                    del self.seeds[gone]
