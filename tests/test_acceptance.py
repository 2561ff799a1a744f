"""The benchmark of acceptance: its figures for drafters that are always and never right, its file, its bad input."""

import json
import shutil
from pathlib import Path
from typing import Any

import cli_fakes
import pytest
import torch
from tiny_models import random_prompts, tiny

import engine
from bench import acceptance

checkpoint = cli_fakes.checkpoint  # a fixture


def test_a_drafter_that_is_always_right() -> None:
    target = tiny("llama")
    drafter: Any = engine.DraftModel(target)
    drafter.min_reach = 1.0  # which would end drafts early
    llm = engine.load(target, drafter, num_draft_tokens=3)
    found = acceptance.measure(llm, random_prompts(3), ["one", "two", "one"], 21)
    assert found["categories"] == {"one": 42 / 12, "two": 21 / 6}
    assert found["acceptance"] == [1.0] * 3 and found["new_tokens"] == 63
    assert found["rounds"] == 18 and found["block_efficiency"] == 63 / 18
    assert drafter.min_reach == 0.0


def test_a_position_counts_where_those_before_it_stand() -> None:
    """The second draft is always wrong: it is met in every round, the third in none."""
    target = tiny("llama")

    class SecondWrong(engine.DraftModel):
        def propose(self, state: engine.BatchState, num_draft_tokens: int) -> engine.Proposal:
            tokens = super().propose(state, num_draft_tokens).tokens
            tokens[:, 1:2] = (tokens[:, 1:2] + 1) % 64
            return engine.Proposal(tokens)

    llm = engine.load(target, SecondWrong(target), num_draft_tokens=3)
    assert acceptance.measure(llm, random_prompts(3), ["any"] * 3, 21)["acceptance"] == [1.0, 0.0, None]


def test_rounds_with_fewer_drafts_have_no_say_in_later_positions() -> None:
    """Every other draft stands alone and is wrong; those that are right have a right one behind them."""
    target = tiny("llama")

    class Uneven(engine.DraftModel):
        def propose(self, state: engine.BatchState, num_draft_tokens: int) -> engine.Proposal:
            tokens = super().propose(state, num_draft_tokens).tokens
            odd = state.position % 2 == 1
            tokens[odd, 0] = (tokens[odd, 0] + 1) % 64
            tokens[odd, 1:] = -1
            return engine.Proposal(tokens)

    llm = engine.load(target, Uneven(target), num_draft_tokens=2)
    first, second = acceptance.measure(llm, random_prompts(3), ["any"] * 3, 20)["acceptance"]
    assert 0 < first < 1 and first == llm.stats.acceptance_per_position[0]
    assert second == 1.0


def test_a_prompt_with_nan_costs_no_other_prompts_answer() -> None:
    target = tiny("llama", dtype=torch.float32)
    with torch.no_grad():
        target.get_input_embeddings().weight[3] = torch.nan
        target.lm_head.weight[3] = 0  # nobody draws it
    llm = engine.load(target, "ngram", num_draft_tokens=2)
    found = acceptance.measure(llm, [[5, 6, 5], [5, 3], [6, 5]], ["one", "two", "one"], 6)
    assert list(found["categories"]) == ["one"] and (found["new_tokens"], found["failed"]) == (12, 1)
    assert found["block_efficiency"] == found["categories"]["one"] >= 1
    with pytest.raises(engine.InvalidLogitsError, match="NAN_TARGET"):
        acceptance.measure(llm, [[5, 3]], ["one"], 6)


def test_the_file(checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "found.json"
    lines = [{"question_id": i, "category": "any", "turns": [f"Prompt number {i}"]} for i in range(3)]
    prompts.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    words = f"-t {checkpoint} -d {checkpoint} -k 2 -n 6 --dtype float32 --prompts {prompts} --out {out}"
    acceptance.main(words.split())
    found = json.loads(out.read_text(encoding="utf-8"))
    assert found["num_prompts"] == 3 and found["acceptance"][0] == 1.0
    assert found["options"]["target"] == found["options"]["drafter"] == checkpoint.name
    assert str(tmp_path) not in out.read_text(encoding="utf-8")
    assert "block efficiency" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "rule"),
    [
        ("--out {tmp}/none/found.json", "--out must be in a folder that exists"),
        ("--out {tmp}", "--out must be a file that can be written, got {tmp}: Is a directory"),
        ("--prompts {tmp}/none.jsonl", "prompts must be an existing file"),
        ("-k -1", "num_draft_tokens must be >= 0"),
        ("-n 0", "max_new_tokens must be >= 1, got 0"),
        ("--max-prompt-tokens 1", "max_prompt_tokens must be >= 2, got 1"),
        ("-d ngram -n 4095", "max_new_tokens must be <= 4094 for this target's context, got 4095"),
        ("-d ngram -t {tmp}/bare", "target must have a tokenizer, got {tmp}/bare without one"),
    ],
)
def test_bad_input(checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], words: str, rule: str) -> None:
    line = {"question_id": 1, "category": "any", "turns": ["x" * 5000]}
    (tmp_path / "long.jsonl").write_text(json.dumps(line), encoding="utf-8")
    shutil.copytree(checkpoint, tmp_path / "bare", ignore=shutil.ignore_patterns("tokenizer*", "chat_template*"))
    with pytest.raises(SystemExit):
        acceptance.main(["-t", str(checkpoint), *words.format(tmp=tmp_path).split()])
    assert rule.format(tmp=tmp_path) in capsys.readouterr().err


def test_prompts_are_cut_to_the_context(checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompts = tmp_path / "long.jsonl"
    prompts.write_text(json.dumps({"question_id": 1, "category": "any", "turns": ["x" * 5000]}), encoding="utf-8")
    words = f"-t {checkpoint} -d {checkpoint} -k 4 -n 2 --dtype float32 --max-prompt-tokens 9000 --prompts {prompts}"
    acceptance.main(words.split())
    assert "position: 1 1.000\n" in capsys.readouterr().out


def test_a_hub_id_that_cannot_be_had(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def cannot(*arguments: object, **options: object) -> None:
        raise OSError("target must be ... an accessible hub id, got 'no/such':\nwe could not connect")

    monkeypatch.setattr(engine, "load", cannot)
    with pytest.raises(SystemExit):
        acceptance.main(["-t", "no/such"])
    assert capsys.readouterr().err.endswith(
        "error: target must be ... an accessible hub id, got 'no/such': we could not connect\n"
    )
