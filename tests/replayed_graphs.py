"""Graphs for a CPU, with a capture that records Python instead of CUDA work: what they replay must still be right."""

from collections.abc import Callable, Iterator
from typing import Any

import torch

import engine
from engine.graphs import Graphs


class Replay:
    """Like a graph: `record` changes nothing but leaves tensors, and `replay` does the work and fills those."""

    def __init__(self, state: engine.BatchState | None = None) -> None:
        self.state = state

    def record(self, work: Callable[[], Any]) -> Any:
        self.work = work
        kept = [] if self.state is None else [(t, t.clone()) for t in (self.state.tokens, self.state.seq_lens)]
        self.result = work()
        for tensor, before in kept:
            tensor.copy_(before)
        for tensor in tensors(self.result):
            tensor.fill_(-7)  # nothing has been computed yet
        return self.result

    def replay(self) -> None:
        for place, value in zip(tensors(self.result), tensors(self.work()), strict=True):
            place.copy_(value)


def tensors(result: Any) -> Iterator[torch.Tensor]:
    if isinstance(result, torch.Tensor):
        yield result
    elif isinstance(result, tuple):
        for part in result:
            yield from tensors(part)


class CountedGraphs(Graphs):
    replays = 0

    def run(self, key: Any, work: Callable[[], Any]) -> Any:
        self.replays += key in self._captured
        return super().run(key, work)


def with_graphs(llm: engine.Engine, *, late: bool, max_graphs: int = 128) -> CountedGraphs:
    graphs = CountedGraphs(lambda pool: Replay(llm._server._state), max_graphs)
    llm._target.graphs, llm._server._late = graphs, late
    return graphs
