"""`check`: the engine's text against that of transformers, and with a drafter against plain decoding's."""

from pathlib import Path
from typing import Any

import cli_fakes
import pytest
from cli_fakes import json_lines

from engine import check, cli
from engine.text_difference import Difference

checkpoint, one_thread = cli_fakes.checkpoint, cli_fakes.one_thread
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("exact", ["--exact", "--no-exact"])
def test_a_good_checkpoint(exact: str, checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["check", "-t", str(checkpoint), "-n", "12", exact]) == 0
    captured = capsys.readouterr()
    assert captured.out.splitlines() == [
        f"LlamaForCausalLM of 2 layers, float32 on cpu, {exact[2:].replace('no-', 'not ')}, for texts of up to 4,096 tokens",
        "plain: the text of transformers for 3 of 3 prompts",
        "speculative: the text of plain for 3 of 3 prompts",
        captured.out.splitlines()[3],
        "passed",
    ]
    assert "tokens per target call" in captured.out
    assert "decoding with transformers" in captured.err


def test_json_and_own_prompts(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["check", "-t", str(checkpoint), "-d", "none", "-n", "5", "--json", "ab", "cd"]) == 0
    (record,) = json_lines(capsys.readouterr().out)
    assert record["passed"] and record["block_efficiency"] == 1
    (comparison,) = record["comparisons"]
    assert comparison["held_against"] == "transformers" and comparison["differences"] == [None, None]


def test_another_text_fails(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    theirs = check._by_transformers

    def other(model: Any, prompt: list[int], *more: Any) -> list[int]:
        text = theirs(model, prompt, *more)
        return [*text[:2], (text[2] + 1) % 256, *text[3:]]

    monkeypatch.setattr(check, "_by_transformers", other)
    assert cli.main(["check", "-t", str(checkpoint), "-n", "5", "ab"]) == 1
    out = capsys.readouterr().out
    assert "plain: the text of transformers for 0 of 1 prompts" in out
    assert "prompt 1 parts at token 3, between tokens" in out and "MORE THAN ROUNDING" in out
    assert out.endswith("FAILED\n")


@pytest.mark.parametrize(
    "gap, rounding, passed, words",
    [
        (-0.2, 0.5, True, "log-probabilities are 0.2 apart: rounding decides"),
        (0.6, 0.5, False, "MORE THAN ROUNDING"),
        (None, 0.5, False, "where one of the texts ends: MORE THAN ROUNDING"),
        (0.0, 0.0, False, "EXACT TEXTS MUST BE THE SAME"),
    ],
)
def test_what_rounding_may_decide(gap: float | None, rounding: float, passed: bool, words: str) -> None:
    compared = check.Comparison("speculative", "plain", [None, Difference(6, 1, 2, gap)], rounding)
    assert compared.passed == passed
    assert compared.lines()[0] == "speculative: the text of plain for 1 of 2 prompts"
    assert "prompt 2 parts at token 7" in compared.lines()[1] and words in compared.lines()[1]


@pytest.mark.parametrize(
    "words, message",
    [
        (["-n", "0"], "max_new_tokens must be >= 1, got 0"),
        (["-d", "layer_skip:9"], "exit_layer must be in"),
        (["--max-length", "16", "-n", "4"], "prompts[0] has"),
    ],
)
def test_bad_input(words: list[str], message: str, checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["check", "-t", str(checkpoint), *words]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("error: ") and message in captured.err
