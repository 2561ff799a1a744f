"""The end-to-end cases of the GPU report, in their form for a CPU: they run, and their figures make sense."""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch.autograd import DeviceType

sys.path.append(str(Path(__file__).resolve().parent.parent))  # bench/ is not installed

from bench import end_to_end, targets
from bench.attention_cases import GOAL_CASE
from bench.goals import GOALS, Results
from bench.host_time import LAUNCH, READ, waits_inside


@pytest.fixture(scope="module")
def figures() -> dict[str, Any]:
    return {title: case("cpu") for title, case in end_to_end.CASES.items()}


def test_all_cases_run_and_say_what_the_weights_are(figures: dict[str, Any]) -> None:
    assert figures.keys() == end_to_end.CASES.keys()
    plain = figures["plain decoding"]["tiny"]
    assert plain["ratio"] == pytest.approx(plain["tokens_per_second"] / plain["transformers_tokens_per_second"])
    assert 0 < plain["share_of_copy_bandwidth"] < 2
    assert plain["weights"] == "random weights (tiny), random prompts"
    labelled = [case for title, case in figures.items() if title not in ("ragged attention", "plain decoding")]
    assert [case["weights"].split()[0] for case in labelled] == ["random"] * 4 + ["real", "random"]


def test_warm_up_of_a_fixed_length_and_of_auto(figures: dict[str, Any]) -> None:
    case = figures["warm-up of 4 buckets"]
    assert case["K=5"]["seconds"] > 0 and case["K=auto"]["seconds"] > 0


def test_every_goal_on_whole_generations_finds_its_figure(figures: dict[str, Any]) -> None:
    """With the tiny model in the place of those that a GPU runs."""
    plain = dict.fromkeys(("8B", "1B"), figures["plain decoding"]["tiny"])
    attention = {"cases": [figures["ragged attention"]["cases"][0] | {"shape": GOAL_CASE.shape, "share_of_copy": 0.5}]}
    results = Results((), figures | {"plain decoding": plain, "ragged attention": attention})
    outcomes = [goal.outcome(results, on_gpu=True) for goal in GOALS]
    measured = [outcome for outcome in outcomes if outcome["measured"] is not None]
    assert len(measured) == 12 and all(outcome["met"] in (True, False) for outcome in measured)


def test_every_kind_of_drafter_has_a_row(figures: dict[str, Any]) -> None:
    rows = {name: row for name, row in figures["drafting, by drafter"].items() if isinstance(row, dict)}
    assert len(rows) == 13
    for row in rows.values():
        assert 0 < row["draft_us"] < row["round_us"] and 1 <= row["tokens_per_round"] < 5


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
    rows = [case[f"B={batch}"] for batch in (1, 4)]
    for row in rows:
        assert row.keys() == {"synthetic, never right", "draft model of two layers"}
        assert all(each["acceptance"] == 0 < each["drafts_per_round"] for each in row.values())
    for key in ("first_run", "later_runs", "all_runs"):
        assert case[f"lowest_{key}"] == min(each[key] for row in rows for each in row.values())


def test_the_small_real_model_or_why_it_is_left_out(figures: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    case = figures["a small real model"]
    assert case["plain decoding"]["ratio"] > 0 and case["synthetic acceptance"]["texts_equal"]
    assert case['"auto", n-gram, against plain']["all_runs"] > 0
    assert case["weights"] == case["plain decoding"]["weights"] == case["synthetic acceptance"]["weights"]

    def nowhere() -> str:
        raise FileNotFoundError("no model")

    monkeypatch.setattr(targets, "find_model", nowhere)
    assert end_to_end.small_real_model("cpu") == {"weights": case["weights"], "left_out": "no model"}


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
