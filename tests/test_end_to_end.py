"""The end-to-end cases of the GPU report, in their form for a CPU: they run, and their figures make sense."""

from typing import Any

import pytest

from bench import end_to_end


@pytest.fixture(scope="module")
def figures() -> dict[str, Any]:
    return {title: case("cpu") for title, case in end_to_end.CASES.items()}


def test_all_cases_run(figures: dict[str, Any]) -> None:
    assert figures.keys() == end_to_end.CASES.keys()
    plain = figures["plain decoding"]["tiny"]
    assert plain["ratio"] == pytest.approx(plain["tokens_per_second"] / plain["transformers_tokens_per_second"])
    assert 0 < plain["share_of_copy_bandwidth"] < 2
    assert figures["host time"]["round_us"] > figures["host time"]["host_us"] > 0
    assert set(figures['"auto" against plain']) == {"weights", "B=1", "B=4"}
    assert figures["warm-up of 4 buckets"]["seconds"] > 0


def test_every_kind_of_drafter_has_a_row(figures: dict[str, Any]) -> None:
    rows = {name: row for name, row in figures["drafting, by drafter"].items() if isinstance(row, dict)}
    assert len(rows) == 8
    for row in rows.values():
        assert 0 < row["draft_us"] < row["round_us"] and 1 <= row["tokens_per_round"] < 5


def test_the_synthetic_drafter_is_held_against_theory(figures: dict[str, Any]) -> None:
    case = figures["synthetic acceptance 0.8, K = 5"]
    assert case["theory"] == pytest.approx((1 - 0.8**6) / 0.2)
    assert case["share_of_theory"] == pytest.approx(case["speedup"] / case["theory"])
    assert 2 < case["block_efficiency"] < 5  # 3.7 expected, of 60 tokens whose last rounds are cut short
    assert "not a real" in case["drafter"]
