"""`demo`: colours, the table, and what it owns up to."""

import io
import os
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import cli_fakes
import pytest
import torch
from cli_fakes import FakeEngine, json_lines
from rich.console import Console
from rich.text import Text
from transformers.utils import logging

from engine import cli, demo, demo_prompts, terminal, threads
from engine.heads import DEFAULT_DRAFTER
from engine.output import Output, Piece, Span
from engine.text_difference import first_difference

checkpoint = cli_fakes.checkpoint
one_thread = cli_fakes.one_thread

engines = cli_fakes.engines


def test_colours() -> None:
    """Drafted text has a colour, the target's own has none, and a model's escape codes are shown, not obeyed."""
    piece = Piece("ab\x1b[2J\x9b2J", [1, 2], (Span("a", True), Span("b\x1b[2J\x9b2J", False)))
    console = Console(file=io.StringIO(), force_terminal=True, color_system="standard", no_color=False)
    terminal.write_piece(console, piece)
    assert console.file.getvalue() == "\x1b[32ma\x1b[0mb\N{SYMBOL FOR ESCAPE}[2J\N{REPLACEMENT CHARACTER}2J"  # type: ignore[attr-defined]
    assert "accepted" in terminal.legend(console)
    assert (
        terminal.shown(console, "a\tb\n\x0e\x07\x7f")
        == "a\tb\n\N{SYMBOL FOR SHIFT OUT}\N{SYMBOL FOR BELL}\N{SYMBOL FOR DELETE}"
    )
    plain = Console(file=io.StringIO(), force_terminal=False)
    terminal.write_piece(plain, piece)
    assert plain.file.getvalue() == piece.text  # type: ignore[attr-defined]
    assert terminal.legend(plain) == ""


def test_all_options_are_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[demo.DemoOptions] = []
    monkeypatch.setattr(demo, "run", asked.append)
    words = "demo -t model -d suffix -k 2 --no-exact --dtype float32 --device cpu -n 9 --repeats 4 --json"
    assert cli.main(words.split()) == 0
    assert asked == [
        demo.DemoOptions(
            target="model", drafter="suffix", num_draft_tokens=2, exact=False, max_new_tokens=9, repeats=4,
            dtype="float32", device="cpu", as_json=True,
        )
    ]  # fmt: skip


def test_demo_table(engines: list[FakeEngine], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["demo", "-t", "model", "--repeats", "2", "--exact"]) == 0
    out = capsys.readouterr().out
    assert "\x1b" not in out
    for text in ("Why is the sky blue", "question", "summary", "edit", "50%", "2.00", "yes", "torch", "threads"):
        assert text in out
    plain, speculative = engines
    assert plain.options["drafter"] is None
    assert speculative.options["drafter"] == "ngram"
    assert plain.options["exact"] and speculative.options["exact"]
    assert speculative.target is plain.target_model
    assert speculative.options["tokenizer"] == plain.tokenizer
    assert len(plain.asked) == 3 * (1 + 2)  # a warm-up and the timed runs
    assert len(speculative.asked) == 3 * (1 + 1 + 2)  # and the text that is shown


@pytest.mark.parametrize("columns", [40, 200])
def test_the_table_is_whole_on_any_terminal(
    columns: int, engines: list[FakeEngine], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    assert cli.main(["demo", "-t", "model", "--repeats", "1"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["prompt", "tokens/s", "tokens/s", "speedup", "acceptance", "efficiency", "text"] in lines
    rows = [words for words in lines if words[:1] in (["question"], ["summary"], ["edit"]) and "2.00" in words]
    assert len(rows) == 3


def test_brackets_in_the_name_of_a_target(engines: list[FakeEngine], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["demo", "-t", "models/long[v2]", "--repeats", "1"]) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("long[v2], bfloat16, ngram drafter")


def test_what_takes_so_long_is_no_markup(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setattr(Console, "status", lambda self, text, spinner: (said.append(text), nullcontext())[1])
    with terminal.working("loading long[v2]"):
        assert Text.from_markup(said[0]).plain == "loading long[v2]"


def test_demo_has_a_trained_head_for_its_own_target(engines: list[FakeEngine]) -> None:
    assert cli.main(["demo", "--repeats", "1"]) == 0
    assert [llm.options["drafter"] for llm in engines] == [None, DEFAULT_DRAFTER]
    assert cli.main(["demo", "--repeats", "1", "-d", "suffix"]) == 0
    assert engines[-1].options["drafter"] == "suffix"


def test_a_download_keeps_its_bars(tmp_path: Path) -> None:
    """Of the target or of the drafter; a spinner has no room beside them."""
    shown, before = [], logging.is_progress_bar_enabled()
    head, other = "ngram+eagle3-SmolLM2-135M-Instruct", "ngram+some/head"
    for sources in ([tmp_path, head], [tmp_path, other], [tmp_path], ["some/model"], [head], [other]):
        with terminal.loading(*map(str, sources)):
            shown.append(logging.is_progress_bar_enabled())
    (logging.enable_progress_bar if before else logging.disable_progress_bar)()
    assert shown == [False, True, False, True, False, True]


def test_demo_says_what_is_slower_or_differs(
    engines: list[FakeEngine], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def timed(llm: FakeEngine, prompt: Any, params: Any) -> tuple[Output, float]:
        drafting = llm.options["drafter"] is not None
        output = llm.output("a b c")
        if drafting and prompt.name == "summary":
            output.token_ids[1] = 7
        if prompt.name == "edit":  # as good as equal
            return output, 1.503 if drafting else 1.5
        return output, 2.0 if drafting and prompt.name == "question" else 1.5 - 0.5 * drafting

    monkeypatch.setattr(demo, "_timed", timed)
    assert cli.main(["demo", "-t", "model"]) == 0
    out = capsys.readouterr().out
    assert "0.75x slower" in out
    assert "1.50x" in out
    assert "The question was slower with speculation than without." in out
    assert "The summary: the two texts part at token 2." in out
    assert "--exact" in out
    assert cli.main(["demo", "-t", "model", "--json"]) == 0
    (report,) = json_lines(capsys.readouterr().out)
    assert [row["slower"] for row in report["prompts"]] == [True, False, False]
    assert [row["identical"] for row in report["prompts"]] == [True, False, True]
    assert report["prompts"][1]["first_difference"] == 1
    assert [row["speedup"] for row in report["prompts"][1:]] == pytest.approx([1.5, 1 / 1.002])
    assert report["torch"] == torch.__version__


def test_demo_warns_of_a_busy_machine(
    engines: list[FakeEngine], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seconds = iter([1.0, 0.5, 1.1, 0.5, 4.0, 0.5] + [1.0, 0.5] * 6)
    monkeypatch.setattr(demo, "_timed", lambda llm, prompt, params: (llm.output("a"), next(seconds)))
    assert cli.main(["demo", "-t", "model"]) == 0
    out = capsys.readouterr().out
    assert "The question: runs lie 273% apart" in out
    assert out.count("apart") == 1
    assert "2.20x" in out  # of the medians


@pytest.mark.parametrize("a, b, first", [([1, 2], [1, 2], None), ([1, 2], [1, 3], 1), ([1], [1, 3], 1)])
def test_first_difference(a: list[int], b: list[int], first: int | None) -> None:
    assert first_difference(a, b) == first


def test_threads(one_thread: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as there are cores for this process, unless the environment has a say."""
    threads.use_all_cores()
    assert torch.get_num_threads() == 1
    monkeypatch.delenv("OMP_NUM_THREADS")
    monkeypatch.delenv("MKL_NUM_THREADS", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 2, 5}, raising=False)
    threads.use_all_cores()
    assert torch.get_num_threads() == 3


@pytest.mark.usefixtures("one_thread")
def test_real_demo(checkpoint: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    prompts = tuple(demo_prompts.DemoPrompt(name, name, "hello" * 9) for name in ("question", "summary", "edit"))
    monkeypatch.setattr(demo, "PROMPTS", prompts)
    demonstrate = ["demo", "-t", str(checkpoint), "-n", "12", "--repeats", "1", "--dtype", "float32"]
    assert cli.main([*demonstrate, "--json", "--exact"]) == 0
    (report,) = json_lines(capsys.readouterr().out)
    assert [row["identical"] for row in report["prompts"]] == [True, True, True]
    assert cli.main(demonstrate) == 0
    assert "efficiency" in capsys.readouterr().out


def test_prompts_that_are_too_long_are_found_before_any_is_answered(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = tuple(demo_prompts.DemoPrompt(name, name, text) for name, text in (("a", "hello"), ("b", "hello" * 999)))
    monkeypatch.setattr(demo, "PROMPTS", prompts)
    assert cli.main(["demo", "-t", str(checkpoint), "--dtype", "float32"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "error: prompts[1] has" in captured.err
