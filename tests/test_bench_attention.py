"""The benchmark of ragged attention: what it counts, checks and reports."""

import json

import pytest

from bench.attention_cases import CONTENDERS, GOAL_CASE, AttentionCase, attention_report, check, make_inputs
from bench.figures import Figures

SMALL = AttentionCase(batch=2, length=40, width=3, num_heads=4, num_kv_heads=2, head_dim=16)


def test_bytes_are_those_of_the_tensors() -> None:
    inputs = make_inputs(SMALL, "cpu")
    assert SMALL.bytes_moved == sum(inputs[name].nbytes for name in ("query", "query", "keys", "values"))
    assert GOAL_CASE.bytes_moved == 2**29 + 2 * 16 * 6 * 32 * 128 * 2


@pytest.mark.parametrize("name", CONTENDERS)
def test_contenders_give_the_same_and_wrong_results_are_rejected(name: str) -> None:
    inputs = make_inputs(SMALL, "cpu")
    output = CONTENDERS[name](inputs)
    check(SMALL, inputs, output)
    one_key_less = inputs | dict(seq_lens=inputs["seq_lens"] - 1, mask=inputs["mask"].roll(-1, dims=-1))
    with pytest.raises(AssertionError, match="B=2 L=40 W=3: row 0 is off by"):
        check(SMALL, inputs, CONTENDERS[name](one_key_less))
    with pytest.raises(AssertionError):
        check(SMALL, inputs, output[:, :2])


def test_report_on_a_cpu() -> None:
    """Figures of ours and of the baseline; nothing is claimed about a GPU."""
    figures = Figures()
    attention_report("cpu", figures, [SMALL, AttentionCase(1, 24, 1, 2, 1, 8)])
    report = json.loads(json.dumps(figures))
    assert report.keys() == {"times", "B=2 L=40 W=3", "B=1 L=24 W=1"}
    first = report["B=2 L=40 W=3"]
    median, p20, p80 = first["ours_us"]
    assert 0 < p20 <= median <= p80 and first["repeats"] == 7
    assert first["sdpa_to_ours"] == pytest.approx(first["masked_sdpa_us"][0] / median, abs=0.006)  # of two digits
    assert first["gb_per_s"] == pytest.approx(SMALL.bytes_moved / median / 1e3, abs=0.06)
    assert first["share_of_copy"] is None


def test_a_case_that_fails_is_a_result_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CONTENDERS, "ours", lambda inputs: inputs["query"].transpose(1, 2).contiguous())
    figures = Figures()
    attention_report("cpu", figures, [SMALL])
    assert figures[SMALL.shape]["error"].startswith("AssertionError: B=2 L=40 W=3: row 0 is off by")
