"""What the tests of drafters share: rows with given texts, and drafters that propose what they are told to."""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch

from engine.drafters.base import Drafter
from engine.drafters.cascade import CascadeDrafter
from engine.drafters.lookup import LookupDrafter, Tokens
from engine.state import BatchState, Proposal, Verdict

# Rows.


def state_of(texts: list[list[int]], seeds: list[int] | None = None, temperature: float = 0.0) -> BatchState:
    """A state in which the rows have these texts."""
    state = BatchState.allocate(len(texts), 400, torch.device("cpu"))
    for row, text in enumerate(texts):
        state.tokens[row, : len(text)] = torch.tensor(text)
        state.seq_lens[row] = len(text) - 1
    state.limits.fill_(400)
    state.temperature.fill_(temperature)
    state.seed.copy_(torch.tensor(seeds or [0] * len(texts)))
    longest = max(map(len, texts))
    return replace(state, max_text_length=longest, max_limit=400, prompt_lengths=tuple(map(len, texts)))


def commit(drafter: Drafter, state: BatchState, tokens: list[list[int]]) -> None:
    """A round in which rows got these tokens."""
    width = max(map(len, tokens))
    padded = torch.tensor([row + [-1] * (width - len(row)) for row in tokens])
    verdict = Verdict(padded, torch.tensor([len(row) - 1 for row in tokens]), torch.zeros(len(tokens)))
    state.commit(verdict)
    drafter.observe(state, verdict)


# Texts in which n-grams and suffixes find the same drafts.
NOT_DISPUTED = [([5], []), ([5, 6], []), ([5, 5], [5, 5, 5, 5]), ([1, 2, 3, 1, 2, 3, 1], [2, 3, 1, 2])]


def bare_state(rows: int, temperature: float = 1.0) -> BatchState:
    state = BatchState.allocate(rows, 30, torch.device("cpu"))
    state.seq_lens.fill_(4)
    state.limits.fill_(30)
    state.temperature.fill_(temperature)
    return state.select(slice(0, rows), all_greedy=temperature == 0, max_text_length=5, max_limit=30)


# Drafters.


class Stateless:
    """A drafter that keeps nothing."""

    def prefill(self, state: BatchState) -> None:
        pass

    def observe(self, state: BatchState, verdict: Verdict) -> None:
        pass

    def graph_key(self) -> tuple[()]:
        return ()


def cascade_of(*stages: Any) -> CascadeDrafter:
    """Of stages that want no target, for one of 12 tokens."""
    both = CascadeDrafter(*stages)
    both.attach(SimpleNamespace(vocab_size=12))  # type: ignore[arg-type]
    return both


class Fixed(Stateless):
    """Proposes what it was made with, and notes what it observes: seq_lens, tokens, num_accepted."""

    def __init__(self, tokens: list[list[int]], *more: Any) -> None:
        self.proposal = Proposal(torch.tensor(tokens), *more)
        self.seen: list[tuple[list[int], list[list[int]], list[int]]] = []

    def propose(self, state: BatchState, num_draft_tokens: int) -> Proposal:
        return self.proposal

    def observe(self, state: BatchState, verdict: Verdict) -> None:
        self.seen.append((state.seq_lens.tolist(), verdict.tokens.tolist(), verdict.num_accepted.tolist()))


class Knowing(Stateless):
    """Knows the texts up to some length, and is silent from there on."""

    def __init__(self, texts: list[list[int]], length: int) -> None:
        self.texts, self.length = texts, length

    def propose(self, state: BatchState, num_draft_tokens: int) -> Proposal:
        tokens = torch.full((len(state.seq_lens), num_draft_tokens), -1)
        for row, end in enumerate((state.seq_lens + 1).tolist()):
            text = next(t for t in self.texts if t[:end] == state.tokens[row, :end].tolist())
            known = text[end : min(end + num_draft_tokens, self.length)]
            tokens[row, : len(known)] = torch.tensor(known, dtype=torch.int64)
        return Proposal(tokens)


class Chain(Fixed):
    """Its drafts can be had one by one; counts how many were."""

    steps_read = 0

    def steps(self, state: BatchState, num_draft_tokens: int) -> Iterator[Proposal]:
        for column in self.proposal.tokens.split(1, dim=1):
            self.steps_read += 1
            yield Proposal(column)


class Continuing(Stateless, LookupDrafter):
    """Knows what follows certain last tokens."""

    def __init__(self, known: dict[int, list[int]]) -> None:
        self.known = known

    def continuation(self, slot: int, text: Tokens, most: int) -> list[tuple[int, float]]:
        return [(token, 0.5) for token in self.known.get(int(text[-1]), [])[:most]]


class Sometimes:
    """Asks a drafter in some rounds only: those whose numbers, from 0 on, it is told to ask in."""

    def __init__(self, drafter: Any, asks: Callable[[int], bool]) -> None:
        self._drafter, self._asks, self._rounds = drafter, asks, itertools.count()
        self.attach, self.reserve = drafter.attach, drafter.reserve
        self.prefill, self.observe = drafter.prefill, drafter.observe

    def propose(self, state: BatchState, num_draft_tokens: int) -> Proposal:
        if self._asks(next(self._rounds)):
            return self._drafter.propose(state, num_draft_tokens)
        return Proposal(state.tokens[:, :0])


def proposals_of(drafter: Any) -> list[tuple[list[int], Proposal]]:
    """A list that fills with what it proposes from now on, each time beside the text of the first row."""
    seen, propose = [], drafter.propose

    def watched(state: BatchState, num_draft_tokens: int) -> Proposal:
        proposal = propose(state, num_draft_tokens)
        seen.append((state.tokens[0, : int(state.seq_lens[0]) + 1].tolist(), proposal))
        return proposal

    drafter.propose = watched
    return seen
