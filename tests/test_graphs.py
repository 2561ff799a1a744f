"""Capture and replay, with a capture that records Python instead of CUDA work (replayed_graphs.py)."""

import gc
import traceback
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from random_heads import KINDS, random_head
from replayed_graphs import CountedGraphs, Replay, with_graphs
from tiny_models import CONFIGS, greedy, perturbed, random_prompts, tiny
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode

import engine
from bench.drafter_cases import ON_THE_HOST, drafters
from engine import round
from engine.adaptive_length import FEW_CHOICES, AdaptiveLength
from engine.backend import row_stats
from engine.drafters.proposals import copied
from engine.graphs import Graphs, Work, bucket, clear_all
from engine.hidden_states import HiddenStates
from engine.state import BatchState, Proposal, Verdict
from engine.target_changes import work_of


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


def test_after_a_warmup_drafts_behind_plain_rounds_are_captured_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """With "auto" any number behind one round without drafts, and one draft behind many: a draft model has tokens to make up for."""
    made_up_for = property(lambda model: model._rounds_missed and bucket(model._rounds_missed, 2))  # as on a GPU
    monkeypatch.setattr(engine.DraftModel, "_made_up_for", made_up_for)
    target = tiny("llama", max_position_embeddings=600)
    llm = engine.load(target, drafter=perturbed(target, 0.05), num_draft_tokens="auto", max_batch_size=1)
    graphs = with_graphs(llm, late=True)
    llm._server._lengths = AdaptiveLength(FEW_CHOICES)
    llm.warmup(batch_sizes=[1], text_lengths=[250])
    captured, set_up = len(graphs), graphs.set_up
    behind = [*((1, number) for number in FEW_CHOICES if number), *((count, 1) for count in (2, 3, 7, 9, 20, 31, 32))]
    rounds = iter([each for count, number in behind for each in (*count * [0], number)])
    monkeypatch.setattr(AdaptiveLength, "choose", lambda self, rows, room, *more: next(rounds, 0))
    text = llm.generate([3, 4, 5], engine.SamplingParams(max_new_tokens=240)).token_ids
    assert next(rounds, None) is None, "the text was too short for all of them"
    assert (len(graphs), graphs.set_up) == (captured, set_up) and text == greedy(target, [3, 4, 5], 240)


def test_by_default_a_warmup_is_for_short_texts_too() -> None:
    target = tiny("llama", max_position_embeddings=1100)
    llm = engine.load(target, num_draft_tokens=3, max_batch_size=1)
    graphs = with_graphs(llm, late=True)
    llm.warmup()
    captured = len(graphs)
    assert captured == 3 * 3  # for texts of up to 256, 512 and 1024 tokens
    for length in (3, 200, 490):
        prompt = ([3, 4, 5] * length)[:length]
        assert llm.generate(prompt, engine.SamplingParams(max_new_tokens=40)).token_ids == greedy(target, prompt, 40)
    assert len(graphs) == captured


def test_a_warmup_keeps_all_that_it_captures(caplog: pytest.LogCaptureFixture) -> None:
    """Also where "auto" wants more graphs for its buckets than are kept otherwise; the bound stays where it then is."""
    target = tiny("llama", max_position_embeddings=600)
    llm = engine.load(target, num_draft_tokens="auto", max_batch_size=8)
    llm._server._lengths = AdaptiveLength(FEW_CHOICES)  # as on a GPU
    graphs = with_graphs(llm, late=True, max_graphs=64)
    llm.warmup(batch_sizes=[1, 2, 4, 8], text_lengths=[200, 500])
    wanted = 4 * 2 * (2 * len(FEW_CHOICES) - 1)  # propose and verify, but nothing is proposed where K = 0
    assert len(graphs) == wanted == 120
    prompts = random_prompts(4)
    outputs = llm.generate(prompts, engine.SamplingParams(max_new_tokens=20))
    assert [o.token_ids for o in outputs] == [greedy(target, prompt, 20) for prompt in prompts]
    assert len(graphs) == wanted and graphs.replays > 5 and not caplog.records
    for _ in range(2):
        graphs.run("one more", lambda: None)
    assert len(graphs) == wanted
    assert [r.message for r in caplog.records] == [
        "more than 120 CUDA graphs are needed: the least recently used are dropped"
    ]


@pytest.mark.parametrize(
    ("wrong", "rule"),
    [({"batch_sizes": [9]}, "batch_sizes must be in"), ({"text_lengths": [1]}, "text_lengths must be")],
)
def test_a_warmup_for_what_cannot_come_is_refused(wrong: dict[str, Any], rule: str) -> None:
    with pytest.raises(ValueError, match=rule):
        engine.load(tiny("llama"), max_batch_size=4).warmup(**wrong)


@pytest.mark.parametrize("drafter", ["ngram", "model"])
def test_exact_rounds_of_few_rows_are_those_of_many(drafter: str) -> None:
    """The target's call is the same one, so that a graph for each number of rows would be one too many."""
    target = tiny("llama", dtype=torch.bfloat16, max_position_embeddings=600)
    draft = perturbed(target, 0.05) if drafter == "model" else drafter
    params = [engine.SamplingParams(max_new_tokens=10 + 5 * i) for i in range(8)]  # that end one after the other
    llm = engine.load(target, drafter=draft, num_draft_tokens=3, max_batch_size=4, exact=True)
    expected = [output.token_ids for output in llm.generate(random_prompts(8), params)]
    graphs = with_graphs(llm, late=True)
    llm.warmup(text_lengths=[200])
    captured = len(graphs)
    for count in (8, 1, 2):
        outputs = llm.generate(random_prompts(8)[:count], params[:count])
        assert [output.token_ids for output in outputs] == expected[:count]
    assert graphs.replays > 20 and len(graphs) == captured == 3


@pytest.mark.parametrize("penalty", [1.0, 1.5])
def test_sampled_tokens_too(penalty: float) -> None:
    target = tiny("llama", max_position_embeddings=600)
    shared: dict[str, Any] = dict(top_p=0.9, max_new_tokens=30, repetition_penalty=penalty)
    params = [engine.SamplingParams(temperature=0.5 * (i % 3), seed=i, logprobs=i < 3, **shared) for i in range(6)]
    draft = perturbed(target, 0.05)
    eager = engine.load(target, drafter=draft, num_draft_tokens=3, max_batch_size=4)
    graphed = engine.load(target, drafter=draft, num_draft_tokens=3, max_batch_size=4)
    graphs = with_graphs(graphed, late=False)
    expected = eager.generate(random_prompts(6), params)
    actual = graphed.generate(random_prompts(6), params)
    assert [o.token_ids for o in actual] == [o.token_ids for o in expected]
    for one, other in zip(actual[:3], expected[:3], strict=True):
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4)
    assert graphs.replays > 10


def test_no_graph_is_replayed_for_other_parameters() -> None:
    """One without filters or a penalty does not know those of the rows that come after it."""
    target, prompt = tiny("llama"), [3, 4, 5, 3, 4]
    llm, eager = engine.load(target, num_draft_tokens=2), engine.load(target, num_draft_tokens=2)
    graphs = with_graphs(llm, late=False)
    settings: list[dict[str, Any]] = [{}, dict(repetition_penalty=1.7), dict(top_k=2), dict(logprobs=True), {}]
    for setting in settings:
        params = engine.SamplingParams(temperature=1.2, seed=3, max_new_tokens=20, **setting)
        actual, expected = llm.generate(prompt, params), eager.generate(prompt, params)
        assert actual.token_ids == expected.token_ids and actual.logprobs == pytest.approx(expected.logprobs)
    assert graphs.replays > 20


@pytest.mark.parametrize("late", [False, True])
def test_a_logits_processor_is_not_captured(late: bool) -> None:
    """Rounds with one are verified eagerly, and all others as before."""
    target = tiny("llama")
    draft = perturbed(target, 0.05)
    suppress = transformers.SuppressTokensLogitsProcessor(list(range(0, 60, 2)))
    params = [
        engine.SamplingParams(max_new_tokens=20 + 20 * (i != 1), logits_processor=suppress if i == 1 else None)
        for i in range(4)
    ]
    expected = engine.load(target, drafter=draft, num_draft_tokens=3).generate(random_prompts(4), params)
    graphed = engine.load(target, drafter=draft, num_draft_tokens=3)
    graphs = with_graphs(graphed, late=late)
    for _ in range(2):
        actual = graphed.generate(random_prompts(4), params)
        assert [o.token_ids for o in actual] == [o.token_ids for o in expected]
    assert all(token % 2 or token >= 60 for token in expected[1].token_ids)
    assert graphs.replays > 10


def test_work_that_failed_is_done_eagerly_again() -> None:
    """What the first call of its kind sets up is not to be set up in a capture."""
    graphs, calls = CountedGraphs(lambda pool: Replay()), 0

    def work() -> torch.Tensor:
        nonlocal calls
        calls += 1
        if calls == 1:
            raise KeyboardInterrupt
        return torch.tensor(calls)

    with pytest.raises(KeyboardInterrupt):
        graphs.run("key", work)
    assert graphs.run("key", work) == 2 and not len(graphs)
    assert graphs.run("key", work) >= 3 and len(graphs) == 1


def test_a_failing_capture_falls_back_and_says_why_once(caplog: pytest.LogCaptureFixture) -> None:
    class Failing(Replay):
        def record(self, work: Callable[[], Any]) -> Any:
            raise RuntimeError("operation not permitted when stream is capturing")

    target = tiny("llama")
    llm = engine.load(target)
    llm._target.graphs = Graphs(lambda pool: Failing())
    output = llm.generate([[5, 6, 7]], engine.SamplingParams(max_new_tokens=20))[0]
    assert output.token_ids == greedy(target, [5, 6, 7], 20)
    assert [r.message for r in caplog.records] == [
        "CUDA graphs are off, rounds run eagerly: RuntimeError: operation not permitted when stream is capturing"
    ]


def test_the_log_names_what_could_not_be_captured(caplog: pytest.LogCaptureFixture) -> None:
    class Failing(Replay):
        def record(self, work: Callable[[], Any]) -> Any:
            try:
                raise NotImplementedError("no reading from the device")
            finally:
                raise RuntimeError("the capture cannot be ended")

    graphs = Graphs(lambda pool: Failing())
    assert [graphs.run("a", lambda: 3) for _ in range(3)] == [3] * 3 and not graphs.enabled
    assert [r.message.partition(": ")[2] for r in caplog.records] == ["NotImplementedError: no reading from the device"]


class Small(Replay):
    """There is memory for so many that live, whatever they are."""

    places, live = 5, 0

    def record(self, work: Callable[[], Any]) -> Any:
        if Small.live == Small.places:
            raise torch.OutOfMemoryError("no more")
        result = super().record(work)
        Small.live += 1
        weakref.finalize(self, self.gone)
        return result

    @staticmethod
    def gone() -> None:
        Small.live -= 1


@pytest.mark.parametrize("warm", [False, True])
def test_as_many_graphs_as_there_is_memory_for(warm: bool, caplog: pytest.LogCaptureFixture) -> None:
    target = tiny("llama", max_position_embeddings=600)
    llm = engine.load(target, num_draft_tokens=3, max_batch_size=4)
    graphs = CountedGraphs(lambda pool: Small(llm._server._state))
    llm._target.graphs = graphs
    if warm:
        llm.warmup(batch_sizes=[1, 2, 4], text_lengths=[256, 512])
    prompts = random_prompts(6)
    outputs = llm.generate(prompts, engine.SamplingParams(max_new_tokens=30))
    assert [o.token_ids for o in outputs] == [greedy(target, prompt, 30) for prompt in prompts]
    replays = graphs.replays
    assert llm.generate(prompts[1], engine.SamplingParams(max_new_tokens=30)).token_ids == outputs[1].token_ids
    assert graphs.enabled and graphs._max == len(graphs) == 2 and graphs.replays > replays + 5
    assert [r.message for r in caplog.records if "memory" in r.message] == [
        "out of memory for CUDA graphs: all are dropped, and at most 2 will be kept from now on"
    ]


def test_buffers_are_forgotten_with_the_graphs_that_use_them() -> None:
    graphs = Graphs(lambda pool: Replay(None))
    steps = [Proposal(torch.full((1, 2), i), torch.full((1, 2, 8), float(i))) for i in range(3)]
    first, second = (copied(step, graphs, "round") for step in steps[:2])
    assert first.logits is second.logits and bool((first.tokens == 1).all())
    assert copied(steps[2], graphs, "stage").logits is not first.logits and bool((first.tokens == 1).all())
    kept = weakref.ref(first.logits)
    del first, second
    assert kept() is not None
    graphs.clear()
    assert kept() is None


def test_without_memory_for_a_rounds_graphs_there_are_none(caplog: pytest.LogCaptureFixture) -> None:
    class Full(Replay):
        def record(self, work: Callable[[], Any]) -> Any:
            try:
                raise torch.OutOfMemoryError("no more")
            finally:
                raise RuntimeError("the capture cannot be ended")

    graphs = Graphs(lambda pool: Full())
    assert [graphs.run("a", lambda: 3) for _ in range(5)] == [3] * 5 and not graphs.enabled
    assert caplog.records[-1].message == "CUDA graphs are off, rounds run eagerly: OutOfMemoryError: no more"


def test_memory_that_the_driver_lacks() -> None:
    """For a graph itself, or its first replay."""

    class Full(Replay):
        def replay(self) -> None:
            raise torch.AcceleratorError("CUDA error: out of memory")

    graphs = Graphs(lambda pool: Full())
    assert [graphs.run("a", lambda: 3) for _ in range(3)] == [3] * 3
    assert graphs.enabled and graphs._max == 2 and not len(graphs)


def test_what_a_failed_capture_has_made_is_gone_before_room_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[weakref.ref[torch.Tensor]] = []
    alive: list[bool] = []

    class Full(Replay):
        def record(self, work: Callable[[], Any]) -> Any:
            work()
            raise AssertionError

    def work() -> int:
        activation = torch.empty(1000)
        made.append(weakref.ref(activation))
        if len(made) == 2:
            raise torch.OutOfMemoryError("no more")
        return 3

    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: alive.append(made[1]() is not None))
    graphs = Graphs(lambda pool: Full())
    gc.disable()
    try:
        assert [graphs.run("a", work) for _ in range(2)] == [3] * 2
    finally:
        gc.enable()
    assert alive == [False]


@pytest.mark.parametrize("exact", [False, True])
def test_calls_keep_their_shapes_where_nothing_can_be_captured_any_more(exact: bool) -> None:
    """Other ranks may share the model, and go on with their graphs."""

    class Failing(Replay):
        def record(self, work: Callable[[], Any]) -> Any:
            raise RuntimeError("operation not permitted when stream is capturing")

    target, seen = tiny("llama", max_position_embeddings=600), []
    for kind in (Replay, Failing):
        llm = engine.load(target, num_draft_tokens=3, max_batch_size=4, exact=exact)
        llm._target.graphs = CountedGraphs(lambda pool, llm=llm, kind=kind: kind(llm._server._state))
        shapes, decode = [], llm._target.decode

        def noted(tokens: torch.Tensor, *, shapes: Any = shapes, decode: Any = decode, **more: Any) -> torch.Tensor:
            shapes.append((tokens.shape, more["kv_length"]))
            return decode(tokens, **more)

        llm._target.decode = noted  # type: ignore[method-assign]
        llm.warmup()
        llm.generate(random_prompts(6), engine.SamplingParams(max_new_tokens=30))
        seen.append(shapes)
    assert not llm._target.graphs.enabled and set(seen[0]) == set(seen[1])


def test_what_is_wrong_with_a_proposal_is_no_failed_capture(caplog: pytest.LogCaptureFixture) -> None:
    target = tiny("llama", max_position_embeddings=600)
    drafter: Any = engine.NGramDrafter()
    llm = engine.load(target, drafter=drafter, num_draft_tokens=3)
    graphs, propose, calls = with_graphs(llm, late=False), drafter.propose, []

    def broken_when_captured(*args: Any) -> Any:
        calls.append(args)
        return propose(*args) if len(calls) != 2 else None

    drafter.propose = broken_when_captured
    params = engine.SamplingParams(max_new_tokens=20)
    with pytest.raises(engine.EngineError, match=r"propose must return an engine\.Proposal, got NoneType"):
        llm.generate([5, 6, 7], params)
    assert graphs.enabled and not caplog.records
    assert llm.generate([5, 6, 7], params).token_ids == greedy(target, [5, 6, 7], 20) and len(graphs)


def test_first_eager_then_captured_then_replayed() -> None:
    graphs, calls = Graphs(lambda pool: Replay()), []
    for _ in range(4):  # eagerly; recorded, which runs it here, and replayed; replayed twice
        graphs.run("a", lambda: calls.append("a"))
    assert len(graphs) == 1 and calls == ["a"] * 5
    graphs.clear()
    assert len(graphs) == 0


def test_a_hook_in_the_place_of_another_is_seen() -> None:
    """Which may have got its memory, and with it its id."""
    model, graphs = torch.nn.Linear(2, 2), Graphs(lambda pool: Replay())
    hook = model.register_forward_hook(lambda *given: given[-1])
    for _ in range(2):
        graphs.follow(work_of([model]))
        graphs.run("key", lambda: None)
    assert len(graphs) == 1
    hook.remove()
    model.register_forward_hook(lambda *given: -given[-1])
    graphs.follow(work_of([model]))
    assert len(graphs) == 0


def test_a_hook_of_all_modules_is_seen() -> None:
    """As those of a profiler."""
    model, graphs = torch.nn.Linear(2, 2), Graphs(lambda pool: Replay())

    def captured() -> int:
        graphs.follow(work_of([model]))
        found = len(graphs)
        for _ in range(2):
            graphs.run("key", lambda: None)
        return found

    assert [captured(), captured()] == [0, 1]
    for register in (register_module_forward_hook, register_module_forward_pre_hook):
        with register(lambda *_: None):
            assert [captured(), captured()] == [0, 1]
        assert [captured(), captured()] == [0, 1]


def test_a_forward_that_moves_to_another_module_is_seen() -> None:
    model, graphs = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)), Graphs(lambda pool: Replay())
    model[0].forward = forward = lambda given: -given
    for _ in range(2):
        graphs.follow(work_of([model]))
        graphs.run("key", lambda: None)
    assert len(graphs) == 1
    del model[0].forward
    model[1].forward = forward
    graphs.follow(work_of([model]))
    assert len(graphs) == 0


def test_what_has_the_id_of_something_that_is_gone_is_another() -> None:
    graphs, first, second = Graphs(lambda pool: Replay()), torch.ones(1), torch.ones(1)
    for _ in range(2):
        graphs.follow(Work([1], [first]))
        graphs.run("key", lambda: None)
    assert len(graphs) == 1
    del first
    graphs.follow(Work([1], [second]))
    assert len(graphs) == 0


def test_the_least_recently_used_graph_makes_room(caplog: pytest.LogCaptureFixture) -> None:
    graphs = Graphs(lambda pool: Replay(), max_graphs=2)
    for keys, captured in (("aabba", "ab"), ("cc", "ac"), ("b", "bc"), ("dd", "bd")):
        for key in keys:
            graphs.run(key, lambda: None)
        assert [key for key in "abcd" if key in graphs._captured] == list(captured)
    assert [r.message for r in caplog.records] == [
        "more than 2 CUDA graphs are needed: the least recently used are dropped"
    ]


@pytest.mark.parametrize("max_graphs", [1, 2, 3])
def test_a_proposal_that_is_captured_again_is_the_one_verified(max_graphs: int) -> None:
    """Its tensors lie elsewhere than those that the graph of its verification had read."""
    target = tiny("llama", max_position_embeddings=600)
    llm = engine.load(target, drafter=engine.DraftModel(target), num_draft_tokens=3, max_batch_size=2)
    llm._target.graphs = graphs = CountedGraphs(lambda pool: Replay(llm._server._state), max_graphs)
    outputs = llm.generate([[3, 4, 5], [3, 4, 5] * 84, [6, 7]], engine.SamplingParams(max_new_tokens=40))
    assert all(output.stats.acceptance_rate == 1 for output in outputs)
    assert len(graphs) == max_graphs


def test_a_proposal_that_a_warmup_captures_again_is_the_one_verified() -> None:
    """There, what had been captured of its verification is not forgotten."""
    target = tiny("llama", max_position_embeddings=600)
    llm = engine.load(target, drafter=engine.DraftModel(target), num_draft_tokens=3, max_batch_size=1)
    graphs = Graphs(lambda pool: Replay(llm._server._state))
    llm._target.graphs = graphs
    params = engine.SamplingParams(max_new_tokens=40)
    llm.generate([3, 4, 5], params)
    (key,) = (key for key in graphs._captured if key[0] == "propose")
    del graphs._captured[key]  # as if others had been used since
    llm.warmup(text_lengths=[40])
    output = llm.generate([3, 4, 6], params)
    assert output.token_ids == greedy(target, [3, 4, 6], 40) and output.stats.acceptance_rate == 1


@pytest.mark.parametrize("drafter", ["ngram", None])
def test_times_are_learned_from_rounds_that_only_replay(drafter: str | None) -> None:
    """The first of a kind is eager and the second captured: what they take says nothing about the others."""
    target = tiny("llama", max_position_embeddings=600)
    llm = engine.load(target, drafter=drafter, num_draft_tokens="auto", max_batch_size=1)
    lengths, seen = llm._server._lengths, []
    observe = lengths.observe_times

    def watched(num_rows: int, asked: int, size: int, draft: float, other: float, usual: bool = True) -> None:
        seen.append((asked, usual))
        # What takes long while it is set up pays afterwards.
        observe(num_rows, asked, size, *((asked / 20, 1.0) if usual else (1e3 * asked, 1e3)), usual)

    lengths.observe_times = watched  # type: ignore[method-assign]
    params = engine.SamplingParams(max_new_tokens=60)
    llm.generate([3, 4, 5], params)
    assert len(seen) == llm.stats.rounds and all(usual for _, usual in seen)  # without graphs
    lengths._verify.clear()
    lengths._draft.clear()
    seen.clear()
    with_graphs(llm, late=True)
    for prompt in ([3, 4, 5], [3, 4, 5] * 10, [6, 7]):
        llm.generate(prompt, params)
    assert seen[:4] == [(0, False), (0, False), (0, True), (0, True)]
    assert lengths._verify[1].at(0) == pytest.approx(1, rel=0.01)
    assert drafter is None or lengths._draft[1].at(3) == pytest.approx(0.15, rel=0.1)


class OnTheHost:
    """A drafter that knows nothing of graphs: its tensors lie somewhere else each time. What it drafts is right."""

    def __init__(self, texts: list[list[int]], with_logits: bool = False) -> None:
        self.texts, self.with_logits, self.kept = texts, with_logits, []

    def prefill(self, state: engine.BatchState) -> None: ...

    def observe(self, state: engine.BatchState, verdict: Verdict) -> None: ...

    def propose(self, state: engine.BatchState, num_draft_tokens: int) -> engine.Proposal:
        rows = []
        for text, length in zip(self.texts, (state.seq_lens + 1).tolist(), strict=False):
            rows.append((text[length : length + num_draft_tokens] + [0] * num_draft_tokens)[:num_draft_tokens])
        tokens = torch.tensor(rows)
        self.kept.append(tokens)  # so that none lies where one before did
        if not self.with_logits:
            return engine.Proposal(tokens)
        logits = torch.nn.functional.one_hot(tokens, 64).double().log()
        return engine.Proposal(tokens, logits, row_stats(logits, **state.sampling))


@pytest.mark.parametrize("with_logits", [False, True])
def test_verification_is_captured_where_drafting_is_not(with_logits: bool) -> None:
    target = tiny("llama", max_position_embeddings=600)
    prompts = [[3, 4, 5], [6, 7]]
    texts = [prompt + greedy(target, prompt, 40) for prompt in prompts]
    llm = engine.load(target, drafter=OnTheHost(texts, with_logits), num_draft_tokens=3, max_batch_size=2)
    graphs = with_graphs(llm, late=False)
    outputs = llm.generate(prompts, engine.SamplingParams(max_new_tokens=40))
    assert [prompt + output.token_ids for prompt, output in zip(prompts, outputs, strict=True)] == texts
    assert llm.stats.acceptance_rate > 0.9
    assert {key[0] for key in graphs._captured} == {"verify"} and graphs.replays > 5


@pytest.mark.parametrize("kind", KINDS)
def test_graphs_of_drafting_go_by_where_hidden_states_lie(kind: str, tmp_path: Path) -> None:
    """They move after the caches have grown, when a graph that reads them may have been captured anew."""
    drafter = random_head(kind, tmp_path)
    llm = engine.load(tiny("llama", num_hidden_layers=7), drafter)
    assert drafter.graph_key() is None
    llm.generate([3, 4, 5], engine.SamplingParams(max_new_tokens=4))
    drafter.ragged = SimpleNamespace(capturable=True, cache=llm._target.cache)  # as on a GPU
    key = drafter.graph_key()
    assert key is not None and drafter.graph_key() == key
    drafter._hidden.states = drafter._hidden.states.clone()
    assert drafter.graph_key() != key


@pytest.mark.parametrize("short_of", ["target", "drafter", "hidden states"])
def test_no_graph_outlives_buffers_that_could_not_all_grow(short_of: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory may run out when some have moved. Shorter texts go on then, and longer ones when there is memory."""
    target = tiny("llama", max_position_embeddings=600)
    drafter: Any = engine.DraftModel(perturbed(target, 0.05))
    llm = engine.load(target, drafter=drafter, num_draft_tokens=3, max_batch_size=2)
    llm._target.keep_hidden_states([0])
    graphs = with_graphs(llm, late=False)
    short, long, params = [5, 6, 7], [3, 4, 5] * 90, engine.SamplingParams(max_new_tokens=20)
    assert llm.generate(short, params).token_ids == greedy(target, short, 20) and len(graphs)

    with monkeypatch.context() as patch:
        if short_of == "hidden states":
            patch.setattr(HiddenStates, "write", raise_out_of_memory)
        else:
            last = (llm._target if short_of == "target" else drafter.ragged).cache.ragged_layers[-1]
            patch.setattr(last, "_zeros_like", raise_out_of_memory)
        with pytest.raises(torch.OutOfMemoryError):
            llm.generate(long, params)
        assert not len(graphs)
        if short_of != "hidden states":  # which are wanted by every call
            assert llm.generate(short, params).token_ids == greedy(target, short, 20) and len(graphs)
    captured = list(graphs._captured.values())
    for prompt in (long, short):
        assert llm.generate(prompt, params).token_ids == greedy(target, prompt, 20)
    assert not [graph for graph in captured if graph in graphs._captured.values()]


def raise_out_of_memory(*args: Any) -> Any:
    raise torch.OutOfMemoryError("there is no more")


def test_a_drafters_buffers_grow_when_the_targets_do() -> None:
    """Under `exact` its own steps would be shorter, and what it proposes be captured anew for each."""
    target = tiny("llama", max_position_embeddings=600)
    drafter: Any = engine.DraftModel(perturbed(target, 0.05))
    llm = engine.load(target, drafter=drafter, max_batch_size=2, exact=True)
    capacities = []
    for length in (10, 100, 300):
        llm.generate([3, 4, 5] * (length // 3), engine.SamplingParams(max_new_tokens=5))
        capacities.append((llm._target.cache.capacity, drafter.ragged.cache.capacity))
    assert capacities == [(512, 512)] * 3


def test_memory_is_taken_anew_where_no_graph_is_left() -> None:
    """torch gives up a pool with the last graph in it, and refuses to capture into it then."""
    pools: list[Any] = []

    def make(pool: Any) -> Replay:
        pools.append(pool)
        return Replay()

    graphs = Graphs(make)
    for key in "aabb":
        graphs.run(key, lambda: None)
    clear_all()
    assert len(graphs) == 0
    for key in "aabb":
        graphs.run(key, lambda: None)
    first, again = pools[0], pools[2]
    assert pools == [first, first, again, again] and first is not again


class NothingForTheHost(TorchDispatchMode):
    """Fails where tensors are made from the host's data, or read by it: neither can be captured.

    But for the kernels' twins and what `plan_call` does on a CPU alone.
    """

    forbidden = ("aten::lift_fresh", "aten::item", "aten::_local_scalar_dense", "aten::is_nonzero", "aten::nonzero")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name().partition(".")[0]
        indices = args[1] if name in ("aten::index", "aten::index_put", "aten::index_put_") else ()
        if name in self.forbidden or any(index is not None and index.dtype == torch.bool for index in indices):
            frames = traceback.extract_stack()
            assert any(f.name == "plan_call" or "kernels" in Path(f.filename).parts for f in frames), name
        return func(*args, **kwargs or {})


CAPTURED = sorted(set(drafters(tiny("llama"))) - set(ON_THE_HOST))


@pytest.mark.parametrize("name", CAPTURED)
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_proposal_needs_nothing_of_the_host(name: str, temperature: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the second time on, where values cannot be looked at, and unless the drafter says that it may not be captured."""
    monkeypatch.setattr(BatchState, "can_look", False)
    monkeypatch.setattr("engine.model.needs_no_padding", lambda model: False)
    target = tiny("llama", num_hidden_layers=4)
    drafter: Any = drafters(target)[name]()
    llm = engine.load(target, drafter=drafter, num_draft_tokens=4, max_batch_size=2)
    params = engine.SamplingParams(temperature=temperature, top_p=0.9, seed=1, max_new_tokens=12)
    before, propose, checked = llm.generate([[1, 2, 1], [4, 5, 6]], params), drafter.propose, []

    def watched(*args: Any) -> Any:
        checked.append(drafter.graph_key())
        with NothingForTheHost():
            return propose(*args)

    drafter.propose = watched
    assert [o.token_ids for o in llm.generate([[1, 2, 1], [4, 5, 6]], params)] == [o.token_ids for o in before]
    assert checked and None not in checked


DYNAMIC = {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}
HALF = [1.0] * 4  # of the 8 dimensions of a head
LONG = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": HALF, "long_factor": HALF}
LONGROPE = {"rope_parameters": {**LONG, "original_max_position_embeddings": 48}, "max_position_embeddings": 96}


@pytest.mark.parametrize(
    ("name", "changes", "captured"),
    [
        *((name, {}, name != "falcon") for name in CONFIGS),
        ("llama", DYNAMIC, False),
        ("phi3", LONGROPE, Version(transformers.__version__) >= Version("5.21")),
    ],
)
def test_a_model_that_needs_the_host_is_not_captured(
    name: str, changes: dict[str, Any], captured: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.model.needs_no_padding", lambda model: False)
    target = tiny(name, dtype=torch.float32, **changes)
    llm = engine.load(target, num_draft_tokens=4, max_batch_size=2)
    params = engine.SamplingParams(max_new_tokens=8)
    before, verify = llm.generate([[1, 2, 1], [4, 5, 6]], params), round.verify_and_commit

    def watched(*args: Any) -> Any:
        with NothingForTheHost():
            return verify(*args)

    monkeypatch.setattr(round, "verify_and_commit", watched)
    assert llm._target.capturable == captured
    if captured:
        assert [o.token_ids for o in llm.generate([[1, 2, 1], [4, 5, 6]], params)] == [o.token_ids for o in before]
    else:
        with pytest.raises(AssertionError, match="aten::"):
            llm.generate([[1, 2, 1], [4, 5, 6]], params)


def test_a_draft_model_that_needs_the_host_is_not_captured() -> None:
    target = tiny("llama")
    llm = engine.load(target, drafter=tiny("falcon"), num_draft_tokens=2)
    graphs = with_graphs(llm, late=False)
    assert llm.generate([3, 4, 5], engine.SamplingParams(max_new_tokens=20)).token_ids == greedy(target, [3, 4, 5], 20)
    assert {key[0] for key in graphs._captured} == {"verify"}


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


def test_a_draft_model_can_be_asked_once_more_in_a_round() -> None:
    """As it is where a capture fails, which has done nothing on the device: what it has to make up for is still known."""
    target = tiny("llama")
    drafter = engine.DraftModel(target)
    state = engine.load(target, drafter=drafter)._server._state
    view, one = state.select(slice(0, 1), max_text_length=20, max_limit=40), torch.zeros(1)
    for missed in range(3):  # rounds without drafts
        assert [drafter._unread(view)[2] for _ in range(2)] == [2 + min(missed, 1)] * 2  # it made up for those before
        drafter.observe(view, Verdict(torch.tensor([[3]]), one.int(), one))


def test_its_device_is_the_current_one_while_the_engine_works_and_not_between(monkeypatch: pytest.MonkeyPatch) -> None:
    entered, seen = [], []

    @contextmanager
    def on_device(device: torch.device) -> Iterator[None]:
        entered.append(device)
        yield
        entered.pop()

    monkeypatch.setattr("engine.serving.on_device", on_device)
    target = tiny("llama")
    llm = engine.load(target, drafter=perturbed(target, 0.05))
    hook = target.register_forward_hook(lambda *_: seen.append(list(entered)))
    llm.warmup()
    for _ in llm.stream([5, 6, 7], engine.SamplingParams(max_new_tokens=10)):
        assert not entered
    hook.remove()
    assert len(seen) > 2 and all(devices == [torch.device("cpu")] for devices in seen)


def test_without_graphs_the_round_is_read_late_or_not_alike() -> None:
    target = tiny("llama", max_position_embeddings=128)
    llm = engine.load(target, max_batch_size=2)
    llm._server._late = True
    prompts = random_prompts(7)
    eos = greedy(target, prompts[3], 20)[9]
    llm._server._results._eos_token_ids = frozenset([eos])
    outputs = llm.generate(prompts, engine.SamplingParams(max_new_tokens=20))
    for prompt, output in zip(prompts, outputs, strict=True):
        expected = greedy(target, prompt, 20)
        stop = expected.index(eos) + 1 if eos in expected else 20
        assert output.token_ids == expected[:stop]
        assert output.stats.new_tokens == stop


def test_no_round_is_begun_behind_one_that_all_texts_end_with() -> None:
    """Though it has not been read: each text is as long as it may be then."""
    target = tiny("llama", max_position_embeddings=128)
    llm = engine.load(target, drafter=None, max_batch_size=2)
    llm._server._late = True
    rounds, launch = [], llm._server._launch
    llm._server._launch = lambda *args, **more: rounds.append(1) or launch(*args, **more)  # type: ignore
    prompts, params = random_prompts(3), [engine.SamplingParams(max_new_tokens=n) for n in (9, 6, 5)]
    outputs = llm.generate(prompts, params)
    for prompt, param, output in zip(prompts, params, outputs, strict=True):
        assert output.token_ids == greedy(target, prompt, param.max_new_tokens)
    # The third text takes the second's slot one round late.
    assert len(rounds) == 6 + 1 + 5


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


def test_rounds_that_are_alike_have_one_state() -> None:
    """Cutting it anew took the host 25 us a round; and a state with work of the host's in it is nobody else's."""
    whole = BatchState.allocate(4, 30, torch.device("cpu"))

    def select(rows: Any = slice(0, 2), **known: Any) -> BatchState:
        return whole.select(rows, **{"max_text_length": 20, "max_limit": 30, "processors": ()} | known)

    first = select()
    assert select() is first
    for other in (dict(rows=slice(0, 3)), dict(rows=slice(1, 2)), dict(max_text_length=21), dict(all_greedy=False)):
        assert select(**other) is not first
        select()
    processors = ((0, lambda ids, scores: scores),)
    assert select(processors=processors) is not select(processors=processors)
    assert select(rows=torch.tensor([0, 1])) is not select(rows=torch.tensor([0, 1]))
    again = select()
    whole.limits[1] = 7
    assert again.limits.tolist() == [0, 7]
