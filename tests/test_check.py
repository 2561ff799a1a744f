"""`check`: the engine's text against that of transformers, and with a drafter against plain decoding's."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import cli_fakes
import pytest
import torch
from cli_fakes import json_lines
from tiny_models import tiny

from engine import check, cli
from engine.text_difference import Difference, log_prob_gap

checkpoint, one_thread = cli_fakes.checkpoint, cli_fakes.one_thread
pytestmark = pytest.mark.usefixtures("one_thread")


def test_all_options_are_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[check.CheckOptions] = []
    monkeypatch.setattr(check, "run", asked.append)
    words = "check -t model -d suffix -k 2 --no-exact --max-length 99 --dtype float32 --device cpu --tokenizer words"
    assert cli.main([*words.split(), "--compile", "-n", "9", "--json", "a b"]) == 0
    settings = dict(
        num_draft_tokens=2, exact=False, max_length=99, dtype="float32", device="cpu", tokenizer="words", compile=True
    )
    assert asked == [check.CheckOptions("model", "suffix", settings, ["a b"], 9, True)]


@pytest.mark.parametrize("exact", ["--exact", "--no-exact"])
def test_a_good_checkpoint(exact: str, checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["check", "-t", str(checkpoint), "-n", "12", exact]) == 0
    captured = capsys.readouterr()
    *others, tokens_per_call, verdict = captured.out.splitlines()
    assert [*others, verdict] == [
        f"LlamaForCausalLM of 2 layers, float32 on cpu, {exact[2:].replace('no-', 'not ')}, for texts of up to 4,096 tokens",
        "plain: the text of transformers for 3 of 3 prompts",
        "speculative: the text of plain for 3 of 3 prompts",
        "passed",
    ]
    assert re.fullmatch(r"with the drafter, [1-9]\.\d\d tokens per target call", tokens_per_call)
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


def test_what_a_checkpoint_asks_for(checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its repetition penalty is applied by both; what the engine does not apply, the other side does not, too. No text is longer
    than the engine's may be."""
    folder = tmp_path / "asking"
    shutil.copytree(checkpoint, folder)
    asked = {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2, "num_beams": 3}
    (folder / "generation_config.json").write_text(json.dumps(asked))
    assert cli.main(["check", "-t", str(folder), "-n", "30", "--max-length", "40", "abab", "0123456789" * 2]) == 0
    assert "plain: the text of transformers for 2 of 2 prompts" in capsys.readouterr().out


def test_without_a_tokenizer(checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "bare"
    shutil.copytree(checkpoint, folder, ignore=shutil.ignore_patterns("token*", "chat*", "special*"))
    assert cli.main(["check", "-t", str(folder), "-n", "6"]) == 0
    assert "speculative: the text of plain for 3 of 3 prompts" in capsys.readouterr().out


def test_a_gap_is_that_of_penalised_logits() -> None:
    model = tiny("llama")
    text, token = [5, 6, 7], 6
    (plain,), (penalised,) = ([log_prob_gap(model, text, token, 9, penalty)] for penalty in (1.0, 1.5))
    with torch.no_grad():
        logits = model(torch.tensor([text])).logits[0, -1].double()
    changed = logits[token] / 1.5 if logits[token] > 0 else logits[token] * 1.5
    assert plain == pytest.approx(float(logits[token] - logits[9]))
    assert penalised == pytest.approx(float(changed - logits[9])) and penalised != pytest.approx(plain)


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
        (["-t", "/nowhere", "-d", "ngrm"], "drafter must be"),
        (["--max-length", "16", "-n", "4"], "prompts must be given for a target of max_length = 16"),
    ],
)
def test_bad_input(words: list[str], message: str, checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["check", "-t", str(checkpoint), *words]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("error: ") and message in captured.err
