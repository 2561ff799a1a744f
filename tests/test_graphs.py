"""Capture and replay, with a capture that records Python instead of CUDA work: what it replays must still be right."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiny_models import greedy, perturbed, random_prompts, tiny

import engine
from engine.graphs import Graphs


class Replay:
    """Does the work again with the arguments that it was captured with, and leaves results where the first ones lay."""

    def record(self, work: Callable[[], Any]) -> Any:
        self.work = work
        # A capture does not do the work; its results are memory that waits to be filled. Shapes come from doing it on
        # copies, which here is what a graph's own memory is.
        self.result = None
        return self

    def replay(self) -> None:
        self.result = self.work()


class PythonGraphs(Graphs):
    """`Graphs` whose results live on the `Replay`: Python cannot make a tensor before it is computed."""

    def __init__(self) -> None:
        super().__init__(Replay)
        self.replays = 0

    def run(self, key: Any, work: Callable[[], Any]) -> Any:
        result = super().run(key, work)
        if isinstance(result, Replay):
            self.replays += 1
            return result.result
        return result


def with_graphs(llm: engine.Engine, *, late: bool) -> PythonGraphs:
    graphs = PythonGraphs()
    llm._server._round.graphs, llm._server._late = graphs, late
    return graphs


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("drafter", ["ngram", "model", None])
@pytest.mark.parametrize("num_draft_tokens", [3, "auto"])
def test_replayed_rounds_give_the_same_tokens(late: bool, drafter: str | None, num_draft_tokens: Any) -> None:
    target = tiny("llama", max_position_embeddings=600)
    draft = perturbed(target, 0.05) if drafter == "model" else drafter
    llm = engine.load(target, drafter=draft, num_draft_tokens=num_draft_tokens, max_batch_size=4)
    graphs = with_graphs(llm, late=late)
    prompts = [*random_prompts(9), [3, 4, 5] * 90]
    params = [engine.SamplingParams(max_new_tokens=10 + 5 * i) for i in range(10)]
    outputs = llm.generate(prompts, params)
    for prompt, param, output in zip(prompts, params, outputs, strict=True):
        assert output.token_ids == greedy(target, prompt, param.max_new_tokens)
    assert graphs.replays > 10


def test_sampled_tokens_too() -> None:
    target = tiny("llama", max_position_embeddings=600)
    params = [engine.SamplingParams(temperature=0.5 * (i % 3), top_p=0.9, seed=i, max_new_tokens=30) for i in range(6)]
    draft = perturbed(target, 0.05)
    eager = engine.load(target, drafter=draft, num_draft_tokens=3, max_batch_size=4)
    graphed = engine.load(target, drafter=draft, num_draft_tokens=3, max_batch_size=4)
    graphs = with_graphs(graphed, late=False)
    expected = eager.generate(random_prompts(6), params)
    assert [o.token_ids for o in graphed.generate(random_prompts(6), params)] == [o.token_ids for o in expected]
    assert graphs.replays > 10


def test_a_failing_capture_falls_back_and_says_why_once(caplog: pytest.LogCaptureFixture) -> None:
    class Failing(Replay):
        def record(self, work: Callable[[], Any]) -> Any:
            raise RuntimeError("operation not permitted when stream is capturing")

    target = tiny("llama")
    llm = engine.load(target)
    llm._server._round.graphs = Graphs(Failing)
    output = llm.generate([[5, 6, 7]], engine.SamplingParams(max_new_tokens=20))[0]
    assert output.token_ids == greedy(target, [5, 6, 7], 20)
    assert [r.message for r in caplog.records] == [
        "CUDA graphs are off, rounds run eagerly: RuntimeError: operation not permitted when stream is capturing"
    ]


def test_first_eager_then_captured_then_replayed_and_no_more_than_allowed() -> None:
    graphs, calls = Graphs(Replay, max_graphs=1), []
    for _ in range(4):
        graphs.run("a", lambda: calls.append("a"))
    assert len(graphs) == 1 and calls == ["a"] * 4
    for _ in range(4):
        graphs.run("b", lambda: calls.append("b"))
    assert len(graphs) == 1 and calls[4:] == ["b"] * 4
    graphs.clear()
    assert len(graphs) == 0


def test_without_graphs_the_round_is_read_late_or_not_alike() -> None:
    target = tiny("llama", max_position_embeddings=128)
    llm = engine.load(target, max_batch_size=2)
    llm._server._late = True
    prompts = random_prompts(7)
    eos = greedy(target, prompts[3], 20)[9]
    llm._server._eos_token_ids = frozenset([eos])
    outputs = llm.generate(prompts, engine.SamplingParams(max_new_tokens=20))
    for prompt, output in zip(prompts, outputs, strict=True):
        expected = greedy(target, prompt, 20)
        stop = expected.index(eos) + 1 if eos in expected else 20
        assert output.token_ids == expected[:stop]
        assert output.stats.new_tokens == stop


def test_tensors_keep_their_places_between_rounds() -> None:
    """What a graph reads must not move: the state, and the caches unless they grow."""
    target = tiny("llama", max_position_embeddings=600)
    llm = engine.load(target, max_batch_size=2)
    places = []

    def note(*args: Any, **kwargs: Any) -> None:
        layer = llm._target.cache.ragged_layers[0]
        places.append((llm._server._state.tokens.data_ptr(), layer.keys.data_ptr()))

    llm.generate([[1, 2, 3]], engine.SamplingParams(max_new_tokens=40))
    hook = target.register_forward_hook(note)
    llm.generate(random_prompts(5), engine.SamplingParams(max_new_tokens=20))
    hook.remove()
    assert len(places) > 10 and len(set(places)) == 1
    assert isinstance(llm._target.cache.ragged_layers[0].keys, torch.Tensor)
