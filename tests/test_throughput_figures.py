"""bench/throughput: the theory curve, rows, synthetic drafters, comparisons of texts, ratios."""

import math
from pathlib import Path
from typing import Any

import pytest
import throughput_runs
import torch
from throughput_runs import ONE
from tiny_models import greedy, random_prompts, tiny

import engine
from bench.throughput import plots
from bench.throughput.methods import OUR_PLAIN, Call, Row, together, up_to_end
from bench.throughput.summary import CallFigures, Summary, summarize
from bench.throughput.synthetic import SyntheticDrafter
from bench.throughput.table import HEADER, cells, cost_ratio
from bench.throughput.theory import expected_acceptance, fitted_acceptance
from engine.metrics import expected_speedup, expected_tokens
from engine.text_difference import Comparer, Difference, log_prob_gap

# fixtures
one_thread = throughput_runs.one_thread


# Theory.


def test_expected_tokens_are_those_of_independent_coins() -> None:
    for acceptance in (0.0, 0.3, 0.8, 1.0):
        for k in (0, 1, 2, 5):
            counts = [acceptance**n * (1 - acceptance) for n in range(k)] + [acceptance**k]  # n drafts stand
            assert sum(counts) == pytest.approx(1)
            mean = sum((n + 1) * p for n, p in enumerate(counts))
            assert expected_tokens(acceptance, k) == pytest.approx(mean)
            if acceptance < 1:
                assert mean == pytest.approx((1 - acceptance ** (k + 1)) / (1 - acceptance))
            if k:
                assert expected_acceptance(acceptance, k) == pytest.approx((mean - 1) / k)
    assert expected_speedup(0.8, 5, 0.0) == expected_tokens(0.8, 5)
    assert expected_speedup(0.8, 5, 0.1) == pytest.approx(expected_tokens(0.8, 5) / 1.5)


def test_fitted_acceptance() -> None:
    for acceptance in (0.0, 0.37, 0.999, 1.0):
        measured = {k: expected_tokens(acceptance, k) for k in (1, 3, 8)}
        assert fitted_acceptance(measured) == pytest.approx(acceptance, abs=1e-4)
    with pytest.raises(ValueError, match=r"tokens_per_round must have a K >= 1, got \[0\]"):
        fitted_acceptance({0: 1.0})
    for call, complaint in (
        (lambda: expected_tokens(1.1, 2), r"acceptance must be in \[0, 1\], got 1.1"),
        (lambda: expected_tokens(0.5, -1), "num_draft_tokens must be >= 0, got -1"),
        (lambda: expected_speedup(0.5, 1, -1), "cost_ratio must be >= 0, got -1"),
    ):
        with pytest.raises(ValueError, match=complaint):
            call()


# Rows, synthetic drafters, comparisons.


def test_rows() -> None:
    row = Row.of_rounds([1, 2, 3], [(0, 0), (3, 1), (2, 2), (1, 0)])
    assert (row.rounds, row.draft_tokens, row.accepted_tokens) == (4, 6, 3)
    assert row.acceptance_per_position == [2 / 3, 1 / 2, 0] and row.rounds_per_position == [3, 2, 1]
    assert Row.of_rounds([], []).rounds == 0
    assert up_to_end([3, 4, 9, 5], frozenset({9, 5})) == [3, 4, 9] and up_to_end([3, 4], frozenset({9})) == [3, 4]


@pytest.mark.parametrize("acceptance", [0.0, 0.6, 0.9, 1.0])
def test_synthetic_acceptance_is_what_was_asked_for(acceptance: float) -> None:
    model = tiny("llama", max_position_embeddings=240)
    prompts = random_prompts(8, seed=3)
    plain = engine.load(model, drafter=None, max_batch_size=8).generate(
        prompts, engine.SamplingParams(max_new_tokens=220)
    )
    drafter = SyntheticDrafter(acceptance, vocab_size=64, seed=5)
    drafter.expect(prompts, [output.token_ids for output in plain])
    llm = engine.load(model, drafter=drafter, num_draft_tokens=4, max_batch_size=8)
    outputs = llm.generate(prompts, engine.SamplingParams(max_new_tokens=220))
    assert [output.token_ids for output in outputs] == [output.token_ids for output in plain]
    stats = llm.stats
    for position, measured in enumerate(stats.acceptance_per_position[:4]):
        expected = acceptance ** (position + 1)  # of independent errors: the drafts before it stand too
        assert abs(measured - expected) <= 4 * math.sqrt(expected * (1 - expected) / (0.9 * stats.rounds))
    # Rounds that an answer's end cuts short: at most one of each row.
    assert stats.block_efficiency == pytest.approx(expected_tokens(acceptance, 4), rel=0.06)


def test_synthetic_drafters_refuse_nonsense() -> None:
    with pytest.raises(ValueError, match=r"acceptance must be in \[0, 1\], got 1.1"):
        SyntheticDrafter(1.1, 10)
    with pytest.raises(ValueError, match="vocab_size must be >= 2, got 1"):
        SyntheticDrafter(0.5, 1)


def test_differences_and_gaps() -> None:
    model = tiny("llama")
    prompt = [5, 9, 13]
    plain = greedy(model, prompt, 8)
    other = [*plain[:5], (plain[5] + 1) % 64, 3, 3]
    comparer = Comparer(model)
    assert comparer.difference(prompt, list(plain), plain) is None
    found = comparer.difference(prompt, other, plain)
    assert found is not None and (found.position, found.token, found.plain_token) == (5, other[5], plain[5])
    with torch.no_grad():
        logprobs = model(torch.tensor([prompt + plain[:5]])).logits[0, -1].log_softmax(dim=-1)
    assert (
        found.log_prob_gap == pytest.approx(float(logprobs[plain[5]] - logprobs[other[5]])) and found.log_prob_gap > 0
    )
    assert log_prob_gap(model, prompt, 4, 4) == 0
    short = comparer.difference(prompt, plain[:3], plain)
    assert short is not None and (short.position, short.token, short.log_prob_gap) == (3, None, None)


def test_logits_that_overflow_have_no_gap() -> None:
    """As those of a checkpoint in bfloat16 may in float16; JSON has no word for what is not finite."""
    model = tiny("llama", tie_word_embeddings=False)
    with torch.no_grad():
        model.get_output_embeddings().weight.fill_(math.inf)
    found = Comparer(model).difference([5, 9, 13], [1, 2], [1, 3])
    assert found == Difference(1, 2, 3, None)


def test_figures_of_a_method() -> None:
    """Those that table.md shows, of two calls of two rows each."""

    def call(
        seconds: float, prefill: float, draft: float, *rows: tuple[int, int, int, int, list[float], list[int]]
    ) -> CallFigures:
        names = (
            "new_tokens", "rounds", "draft_tokens", "accepted_tokens", "acceptance_per_position", "rounds_per_position",
        )  # fmt: skip
        times = {"draft_seconds": draft, "verify_seconds": 3.0, "overhead_seconds": 1.0, "contest": {"batch_size": 2}}
        of_rows: list[dict[str, Any]] = [dict(zip(names, row, strict=True)) | times for row in rows]
        return CallFigures("a", seconds, sum(row[0] for row in rows), prefill, 2, of_rows)

    calls = [
        call(10.0, 2.0, 4.0, (12, 8, 16, 4, [0.5, 0.0], [8, 8]), (10, 2, 8, 8, [1.0], [2])),
        call(5.0, 1.0, 2.0, (6, 4, 4, 3, [0.5], [2]), (4, 4, 0, 0, [], [])),
    ]
    found = Summary("ours ngram K=2", "all", False, 2, "ngram", calls)
    assert found.tokens_per_second == 32 / 15
    assert found.decode_tokens_per_second == (32 - 2 * 2) / (15 - 3)
    assert found.prefill_seconds == 1.5
    assert found.acceptance == 15 / 28
    assert found.block_efficiency == 32 / 18
    assert found.acceptance_per_position == [pytest.approx((4 + 2 + 1) / (8 + 2 + 2)), 0.0]
    assert found.parts_per_round() == {"draft": 0.5, "verify": (3 / 8 + 3 / 4) / 2, "overhead": (1 / 8 + 1 / 4) / 2}
    # 28 tokens were drafted in 18 rounds, not two in each.
    assert cost_ratio(found, {"draft": 0.0, "verify": 2.0, "overhead": 0.5}) == 0.5 / (28 / 18) / 2.5


def test_the_largest_gap_is_of_greedy_texts() -> None:
    """What is sampled parts where noise and logits together are nearly equal, whatever the logits alone are."""
    difference = {"position": 3, "token": 1, "plain_token": 2, "log_prob_gap": -4.5}
    for temperature, shown in ((0.0, "4.5"), (0.7, "")):
        row = {"contest": {"temperature": temperature}, "differences": {"ours plain": difference}}
        row |= dict.fromkeys(("new_tokens", "rounds", "draft_tokens", "accepted_tokens"), 4)
        summary = Summary("ours ngram K=2", "all", False, 2, "ngram", [CallFigures("a", 1.0, 4, None, 0, [row])])
        assert cells(summary)[-1] == shown


def test_calls_as_one() -> None:
    row = Row([1, 2])
    whole = together([Call([row], 0.5, 1), Call([row, row], 0.25, 2)])
    assert (len(whole.rows), whole.prefill_seconds, whole.prefill_tokens) == (3, 0.75, 3)
    assert together([Call([row], 0.5, 1), Call([row])]).prefill_seconds is None


def test_ratios_to_our_plain_are_call_by_call() -> None:
    """Beside those to any other method, and not where plain failed."""

    def record(method: str, group: str, seconds: float, error: str | None = None) -> dict[str, Any]:
        about = {"contest": vars(ONE), "group": group, "turn": 0, "repeat": 0, "method": method, "error": error}
        about |= {"group_category": "a", "synthetic": False, "num_draft_tokens": None, "drafter": None}
        figures = {"seconds": seconds, "call_tokens": 12, "prefill_seconds": 1.0, "prefill_tokens": 0}
        return about | ({} if error else figures)

    times = {"ours plain": (4, 6, 2), "ours ngram K=5": (2, 8, 2), "transformers plain": (8, 8, 8)}
    records = [record(name, str(i), seconds) for name, each in times.items() for i, seconds in enumerate(each)]
    records[2] = record("ours plain", "2", 0, error="out of luck")
    (found,) = summarize(records, "transformers plain").values()
    plain, ours, others = found
    assert (plain.ratios, plain.ratios_to_plain) == ([2, 8 / 6], [1, 1])
    assert (ours.ratios, ours.ratios_to_plain) == ([4, 1, 4], [2, 0.75])
    assert others.ratios_to_plain == [0.5, 0.75]
    assert ours.outside_forwards is None  # records of older runs say nothing of it
    for row in ours.rows:
        row["forward_seconds"] = 0.9
    assert ours.outside_forwards == pytest.approx(0.1)  # of 1, 7 and 1 seconds of rounds


def test_plots_of_before_do_not_stay(tmp_path: Path) -> None:
    """Those of a run that was discarded, or of an interrupted one that had fewer contests; all else is not ours."""
    for name in ("speedup.png", "drafts-2.png", "rounds.png", "batches.png", "my rounds.png", "table.md"):
        (tmp_path / name).touch()
    assert plots.draw_all({}, "transformers plain", tmp_path) == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["my rounds.png", "table.md"]


def test_each_figure_stands_in_its_column() -> None:
    """Of ratios whose median, mean and extremes differ, and of gaps of both signs."""
    gaps = [{"position": 3, "log_prob_gap": gap} for gap in (-0.5, 0.25)]
    counts = {"draft_tokens": 4, "accepted_tokens": 2, "new_tokens": 6, "rounds": 4, "contest": vars(ONE)}
    rows: list[dict[str, Any]] = [counts | {"differences": {OUR_PLAIN: each}} for each in (None, *gaps)]
    calls = [CallFigures("a", 2.0, 6, 1.0, 2, [row]) for row in rows]
    found = Summary(
        "ours ngram K=5", "a", False, 5, "ngram", calls, ratios=[1.0, 2.0, 6.0], ratios_to_plain=[4.0, 0.5, 0.75]
    )
    shown = dict(zip(HEADER, cells(found), strict=True))
    assert (shown["median"], shown["mean"], shown["worst"]) == ("2.00x", "3.00x", "1.00x")
    assert (shown["median to our plain"], shown["worst to our plain"]) == ("0.75x", "0.50x")
    assert (shown["tokens/s"], shown["after prefill"], shown["prefill, ms"]) == ("3.0", "4.0", "1000")
    assert (shown["acceptance"], shown["tokens per target call"]) == ("50%", "1.50")
    assert (shown[f"same text as {OUR_PLAIN}"], shown["largest gap"]) == ("1 of 3", "0.5")


def test_a_batch_has_as_many_rounds_as_its_longest_running_row() -> None:
    times = {"draft_seconds": 4.0, "verify_seconds": 8.0, "overhead_seconds": 2.0, "contest": {"batch_size": 2}}
    calls = [CallFigures("a", 20.0, 9, 1.0, 0, [{"rounds": 2} | times, {"rounds": 4} | times])]
    found = Summary("ours ngram K=2", "a", False, 2, "ngram", calls).parts_per_round()
    assert found == {"draft": 1.0, "verify": 2.0, "overhead": 0.5}
