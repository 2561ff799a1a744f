"""Capture and replay, with a capture that records Python instead of CUDA work: what it replays must still be right."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from tiny_models import greedy, perturbed, random_prompts, tiny

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
        self.replays += key in self
        return super().run(key, work)


def with_graphs(llm: engine.Engine, *, late: bool) -> CountedGraphs:
    graphs = CountedGraphs(lambda: Replay(llm._server._state))
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


def test_after_a_warmup_nothing_new_is_captured() -> None:
    target = tiny("llama", max_position_embeddings=600)
    llm = engine.load(target, drafter=perturbed(target, 0.05), num_draft_tokens=3, max_batch_size=4)
    graphs = with_graphs(llm, late=True)
    llm.warmup(batch_sizes=[1, 2, 4], text_lengths=[200, 500])
    captured = len(graphs)
    assert captured == 3 * 2 * 3  # propose and verify with 3 drafts, verify with none
    prompts = random_prompts(6)
    outputs = llm.generate([*prompts, [3, 4, 5] * 90], engine.SamplingParams(max_new_tokens=40))
    assert [o.token_ids for o in outputs[:6]] == [greedy(target, prompt, 40) for prompt in prompts]
    assert len(graphs) == captured and graphs.replays > 20


@pytest.mark.parametrize(
    ("wrong", "rule"),
    [({"batch_sizes": [9]}, "batch_sizes must be in"), ({"text_lengths": [1]}, "text_lengths must be")],
)
def test_a_warmup_for_what_cannot_come_is_refused(wrong: dict[str, Any], rule: str) -> None:
    with pytest.raises(ValueError, match=rule):
        engine.load(tiny("llama"), max_batch_size=4).warmup(**wrong)


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
    for _ in range(4):  # eagerly; recorded, which runs it here, and replayed; replayed twice
        graphs.run("a", lambda: calls.append("a"))
    assert len(graphs) == 1 and calls == ["a"] * 5
    for _ in range(4):
        graphs.run("b", lambda: calls.append("b"))
    assert len(graphs) == 1 and calls[5:] == ["b"] * 4
    graphs.clear()
    assert len(graphs) == 0


def test_what_a_drafter_does_in_python_is_not_needed_again() -> None:
    """A replay runs no Python: `propose` must leave nothing behind but tensors."""
    target = tiny("llama")
    for drafter in (engine.DraftModel(target), engine.NGramDrafter()):
        llm = engine.load(target, drafter=drafter, num_draft_tokens=2)
        llm.generate([[5, 6, 7]], engine.SamplingParams(max_new_tokens=8))
        propose, changes = drafter.propose, []

        def watched(*args: Any, propose: Any = propose, drafter: Any = drafter, changes: list = changes) -> Any:
            before = {key: value for key, value in vars(drafter).items() if key != "propose"}
            result = propose(*args)
            changes.append({key: value for key, value in vars(drafter).items() if key != "propose"} != before)
            return result

        drafter.propose = watched  # type: ignore[method-assign]
        llm.generate([[5, 6, 7]], engine.SamplingParams(max_new_tokens=8))
        assert changes and not any(changes)


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
