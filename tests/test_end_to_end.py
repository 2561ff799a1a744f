"""The end-to-end cases of the GPU report, in their form for a CPU: they run, and their figures make sense."""

import os
from types import SimpleNamespace
from typing import Any

import pytest
from graph_books import Books
from torch.autograd import DeviceType

import engine
from bench import automatic_length, end_to_end, targets
from bench.attention_cases import GOAL_CASE
from bench.drafter_cases import drafter_cost
from bench.figures import Figures
from bench.goals import GOALS, Results
from bench.host_time import LAUNCH, READ, waits_inside
from engine.graphs import Graphs


def measured(title: str) -> Figures:
    figures = Figures()
    end_to_end.CASES[title]("cpu", figures)
    assert not figures.failed, figures
    return figures


@pytest.fixture(scope="module")
def figures() -> dict[str, Any]:
    return {title: measured(title) for title in end_to_end.CASES}


def test_all_cases_run_and_say_what_the_weights_are(figures: dict[str, Any]) -> None:
    assert figures.keys() == end_to_end.CASES.keys()
    plain = figures["plain decoding"]["tiny"]
    assert plain["ratio"] == pytest.approx(plain["tokens_per_second"] / plain["transformers_tokens_per_second"])
    assert 0 < plain["share_of_copy_bandwidth"] < 2
    assert plain["weights"] == "random weights (tiny), random prompts"
    labelled = [case for title, case in figures.items() if title not in ("ragged attention", "plain decoding")]
    assert [case["weights"].split()[0] for case in labelled] == ["random"] * 4 + ["real"] + ["random"] * 3


def test_warm_up_of_a_fixed_length_and_of_auto(figures: dict[str, Any]) -> None:
    case = figures["warm-up of 4 buckets"]
    assert case["K=5"]["seconds"] > 0 and case["K=auto"]["seconds"] > 0


def test_kernels_are_compiled_before_a_warm_up_but_for_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which finds Triton's cache empty, wherever that is."""
    calls: list[tuple[Any, str | None]] = []

    def warmup_figures(target: Any, num_draft_tokens: Any) -> dict[str, Any]:
        calls.append((num_draft_tokens, folder := os.environ.get("TRITON_CACHE_DIR")))
        assert folder is None or not os.listdir(folder)
        return {"seconds": float(len(calls))}

    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
    monkeypatch.setattr(end_to_end, "warmup_figures", warmup_figures)
    assert measured("warm-up of 4 buckets")["K=auto"]["seconds"] == 4
    assert calls == [(5, None)] * 2 + [("auto", None)] * 2
    measured("warm-up of 4 buckets, nothing compiled")
    assert calls[4][0] == "auto" and calls[4][1] is not None and "TRITON_CACHE_DIR" not in os.environ


def test_every_goal_on_whole_generations_finds_its_figure(figures: dict[str, Any]) -> None:
    """With the tiny model in the place of those that a GPU runs."""
    plain = dict.fromkeys(("8B", "1B"), figures["plain decoding"]["tiny"])
    attention = {GOAL_CASE.shape: figures["ragged attention"]["B=1 L=512 W=6"] | {"share_of_copy": 0.5}}
    results = Results((), figures | {"plain decoding": plain, "ragged attention": attention})
    outcomes = [goal.outcome(results, "a GPU") for goal in GOALS]
    measured = [outcome for outcome in outcomes if outcome["measured"] is not None]
    assert len(measured) == 12 and all(outcome["met"] in (True, False) for outcome in measured)


def test_every_kind_of_drafter_has_a_row(figures: dict[str, Any]) -> None:
    rows = {name: row for name, row in figures["drafting, by drafter"].items() if isinstance(row, dict)}
    assert len(rows) == 13
    for row in rows.values():
        assert 0 < row["draft_us"] < row["round_us"] and 1 <= row["tokens_per_round"] < 5


def test_no_drafter_knows_the_text_from_the_turn_before() -> None:
    target = targets.random_target("cpu")
    for make in (engine.NGramDrafter, engine.SuffixDrafter):
        assert drafter_cost(target, make, "cpu")["tokens_per_round"] == 1


def test_the_synthetic_drafter_is_held_against_theory(figures: dict[str, Any]) -> None:
    case = figures["synthetic acceptance 0.8, K = 5"]
    assert case["texts_equal"] and case["tokens"] == end_to_end.SYNTHETIC_TOKENS["cpu"]
    assert case["theory"] == pytest.approx((1 - 0.8**6) / 0.2)
    assert case["share_of_theory"] == pytest.approx(case["speedup"] / case["theory"])
    assert 1.5 < case["block_efficiency"] < 6  # 3.7 expected, of so few tokens
    assert case["share_of_theory_at_this_efficiency"] == pytest.approx(case["speedup"] / case["block_efficiency"])
    assert "not a real" in case["drafter"]


def test_auto_is_held_against_plain_where_no_draft_stands(figures: dict[str, Any]) -> None:
    case = figures['"auto" against plain']
    rows = {name: row for name, row in case.items() if isinstance(row, dict)}
    drafters = ("synthetic, never right", "draft model of two layers")
    assert list(rows) == [f"B={batch}, {name}" for batch in (1, 4) for name in drafters]
    assert all(row["acceptance"] == 0 < row["drafts_per_round"] for row in rows.values())
    for key in ("first_run", "later_runs", "all_runs"):
        assert case[f"lowest_{key}"] == min(row[key] for row in rows.values())


def test_the_lowest_of_all_is_not_that_of_some(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(automatic_length, "AUTO_BATCHES", {"cpu": (1, 10**6)})  # so many prompts there are not
    figures = Figures()
    automatic_length.automatic_length("cpu", figures)
    assert len(figures.failed) == 2 and "is too short" in figures[figures.failed[0]]["error"]
    assert figures["B=1, synthetic, never right"]["all_runs"] > 0
    assert not any(name.startswith("lowest") for name in figures)


def test_texts_that_differ_are_figures_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the acceptance that they had: a drafter that knows another text is seldom right."""
    expect = end_to_end.SyntheticDrafter.expect

    def another(self: Any, prompts: list[list[int]], texts: list[list[int]]) -> None:
        expect(self, prompts, [[token + 1 for token in text] for text in texts])

    monkeypatch.setattr(end_to_end.SyntheticDrafter, "expect", another)
    timed = end_to_end.timed

    def other_tokens(llm: engine.Engine, *args: Any) -> Any:
        outputs, seconds = timed(llm, *args)
        outputs[0].token_ids.append(0)
        return outputs, seconds

    monkeypatch.setattr(end_to_end, "timed", other_tokens)
    case = measured("synthetic acceptance 0.8, K = 5")
    assert case["texts_equal"] is False and case["acceptance"] < 0.5 and case["speedup"] > 0


def test_beside_transformers_each_way_is_held_against_our_plain_decoding(figures: dict[str, Any]) -> None:
    case = figures["beside transformers, compiled and assisted"]
    rows = [case["static cache, compiled"], case["assistant model of two layers"]]
    assert all(row["ratio"] > 0 for row in rows) and "random" in rows[1]["drafts"]


@pytest.fixture
def books(monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts as long as on a GPU, and turns as there."""
    monkeypatch.setattr(Graphs, "for_device", lambda device: Books())
    for table in (targets.PROMPT_TOKENS, targets.SETUP_TURNS):
        monkeypatch.setitem(table, "cpu", table["cuda"])
    for table in (targets.NEW_TOKENS, end_to_end.SYNTHETIC_TOKENS, end_to_end.PROFILED_TOKENS):
        monkeypatch.setitem(table, "cpu", 24)


def captures(title: str) -> list[int]:
    case = measured(title)
    return [
        row["captured_while_timed"]
        for row in (case, *case.values())
        if "captured_while_timed" in (row if isinstance(row, dict) else ())
    ]


# Figures of each case that tell of captures.
TURNS = {"plain decoding": 1, "synthetic acceptance 0.8, K = 5": 1}
MORE_TURNS = {"host time": 2, "drafting, by drafter": 13}


@pytest.mark.parametrize(
    "title, rows", [*TURNS.items(), *(pytest.param(*each, marks=pytest.mark.slow) for each in MORE_TURNS.items())]
)
def test_all_is_captured_before_the_turns_that_count(books: None, title: str, rows: int) -> None:
    assert captures(title) == [0] * rows


@pytest.mark.parametrize("title", [*TURNS, pytest.param("host time", marks=pytest.mark.slow)])
def test_what_is_captured_in_turns_that_count_is_told(books: None, monkeypatch: pytest.MonkeyPatch, title: str) -> None:
    """A bucket that serves one round of each text is captured in the second text."""
    monkeypatch.setitem(targets.PROMPT_TOKENS, "cpu", 512)
    assert all(captures(title))


def test_the_small_real_model_or_why_it_is_left_out(figures: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    case = figures["a small real model"]
    assert case["plain decoding"]["ratio"] > 0 and case["synthetic acceptance"]["texts_equal"]
    assert case['"auto", n-gram, against plain']["all_runs"] > 0
    assert case["weights"] == case["plain decoding"]["weights"] == case["synthetic acceptance"]["weights"]

    def nowhere() -> str:
        raise FileNotFoundError("no model")

    monkeypatch.setattr(targets, "find_model", nowhere)
    assert measured("a small real model") == {"weights": case["weights"], "left_out": "no model"}


# The host's part in a round.


def test_host_time_is_that_of_profiled_rounds(figures: dict[str, Any]) -> None:
    for name in ("ngram", "draft model"):
        row = figures["host time"][name]
        assert row["round_us"] > row["host_us"] > 0 and row["profiled_rounds"] == row["rounds"] > 1
        assert row["waits_inside_rounds"] == 0 and row["waits"] == {}


def event(name: str, start: float, end: float, device: DeviceType = DeviceType.CPU) -> Any:
    return SimpleNamespace(name=name, time_range=SimpleNamespace(start=start, end=end), device_type=device)


# Two rounds, the second launched before the first is read.
ROUNDS = [
    event("cudaStreamSynchronize", 0, 5),  # reading the prompt
    event(LAUNCH, 10, 20), event(LAUNCH, 30, 40), event(READ, 40, 60), event(READ, 70, 90),
    event("cudaGraphLaunch", 12, 14), event("cudaMemcpyAsync", 15, 16), event("cudaStreamWaitEvent", 17, 18),
    event("cudaEventSynchronize", 42, 50), event("cudaEventSynchronize", 72, 80),
    event(READ, 85, 200, DeviceType.CUDA),  # the mark's copy on the device's timeline
    event("cudaDeviceSynchronize", 120, 130),  # the profiler's end
]  # fmt: skip


@pytest.mark.parametrize(
    ("more", "found"),
    [
        ([], {}),
        ([event("cudaStreamSynchronize", 16, 17)], {"cudaStreamSynchronize": 1}),
        ([event("cudaEventSynchronize", 35, 36)], {"cudaEventSynchronize": 1}),
        ([event("cudaStreamSynchronize", 55, 56), event("cudaMemcpy", 65, 66)], {"cudaStreamSynchronize": 1, "cudaMemcpy": 1}),
        ([event("hipDeviceSynchronize", 16, 17)], {"hipDeviceSynchronize": 1}),
        (
            [event("Memcpy DtoH (Device -> Pageable)", 45, 46, DeviceType.CUDA)],
            {"Memcpy DtoH (Device -> Pageable)": 1},
        ),
        ([event("Memcpy DtoH (Device -> Pinned)", 45, 46, DeviceType.CUDA)], {}),
    ],
)  # fmt: skip
def test_waits_inside_rounds_are_found_in_a_profile(more: list[Any], found: dict[str, int]) -> None:
    assert waits_inside(ROUNDS + more, on_gpu=True) == (found, 2)


def test_a_profile_that_cannot_tell_is_no_proof() -> None:
    without_runtime = [each for each in ROUNDS if not each.name.startswith("cuda")]
    assert waits_inside(without_runtime, on_gpu=False) == ({}, 2)
    with pytest.raises(AssertionError, match="no calls of the CUDA runtime"):
        waits_inside(without_runtime, on_gpu=True)
    with pytest.raises(AssertionError, match="no rounds"):
        waits_inside([], on_gpu=False)
