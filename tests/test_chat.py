"""`chat`: over a pipe, on a terminal, and when Ctrl-C is pressed."""

import builtins
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cli_fakes
import pytest
from cli_fakes import FakeEngine, json_lines, pipe

from engine import SamplingParams, chat, cli
from engine.output import Piece

checkpoint = cli_fakes.checkpoint
one_thread = cli_fakes.one_thread

engines = cli_fakes.engines


def test_chat_over_a_pipe(
    engines: list[FakeEngine], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pipe(monkeypatch, "hello you\n\nagain\n/reset\n/what\nnew\n/quit\nnever\n")
    assert cli.main(["chat", "-t", "model", "--system", "be kind"]) == 1
    out, error = capsys.readouterr()
    assert error.startswith("error: /what begins like a command but is not one: /reset") and error.count("\n") == 1
    assert "\x1b" not in out
    assert "> hello you\nHELLO YOU\n4 tokens, 4.0 tokens/s, acceptance 50%, 2.00 tokens per target call\n" in out
    assert "NEVER" not in out
    system = {"role": "system", "content": "be kind"}
    assert [len(asked) for asked in engines[0].asked] == [2, 4, 2]
    assert engines[0].asked[1][:3] == [
        system,
        {"role": "user", "content": "hello you"},
        {"role": "assistant", "content": "HELLO YOU"},
    ]
    assert engines[0].asked[2] == [system, {"role": "user", "content": "new"}]


def test_chat_passes_all_options_on(engines: list[FakeEngine], monkeypatch: pytest.MonkeyPatch) -> None:
    pipe(monkeypatch, "hello\n")
    words = "chat -t model -d suffix -k 2 --verification block --no-exact --max-length 99 --dtype float32 --device cpu"
    words += " --tokenizer words --compile -T 0.5 --top-k 4 --top-p 0.75 --min-p 0.125 --repetition-penalty 1.5 -n 9"
    words += " --seed 5 --stop . --stop-token-ids 7"
    assert cli.main(words.split()) == 0
    (llm,) = engines
    assert llm.options == dict(
        drafter="suffix", num_draft_tokens=2, verification="block", exact=False, max_batch_size=1, max_length=99,
        dtype="float32", device="cpu", tokenizer="words", compile=True,
    )  # fmt: skip
    assert llm.params == SamplingParams(
        temperature=0.5, top_k=4, top_p=0.75, min_p=0.125, repetition_penalty=1.5, max_new_tokens=9, seed=5, stop=".",
        stop_token_ids=(7,),
    )  # fmt: skip


def test_lines_of_a_pipe_are_echoed_as_they_are(
    engines: list[FakeEngine], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    line = "what :heart: is [bold]foo\\"
    pipe(monkeypatch, f"{line}\n")
    assert cli.main(["chat", "-t", "model"]) == 0
    assert capsys.readouterr().out.startswith(f"> {line}\n{line.upper()}\n")


def test_chat_json_and_errors(
    engines: list[FakeEngine], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An answer that fails is reported, does not end the conversation, and shows in the exit status."""
    pipe(monkeypatch, "one\nnan\ntwo")
    assert cli.main(["chat", "-t", "model", "--json"]) == 1
    captured = capsys.readouterr()
    records = json_lines(captured.out)
    assert [record["text"] for record in records] == ["ONE", "", "TWO"] and records[0].keys() < records[1].keys()
    assert captured.err == "error: the logits are NaN; /reset forgets the conversation\n"
    assert [message["content"] for message in engines[0].asked[-1]] == ["one", "ONE", "two"]


@pytest.mark.parametrize("system", [[], ["--system", "be kind"]])
def test_a_first_message_that_fails_leaves_nothing_to_forget(
    system: list[str],
    engines: list[FakeEngine],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    pipe(monkeypatch, "nan\n")
    assert cli.main(["chat", "-t", "model", *system]) == 1
    assert capsys.readouterr().err == "error: the logits are NaN\n"


def test_a_target_that_cannot_chat_is_refused_before_the_first_message(
    engines: list[FakeEngine], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(self: FakeEngine, prompts: Any, params: Any = None) -> None:
        raise ValueError("prompts[0] holds chat messages, but the tokenizer has no chat template")

    monkeypatch.setattr(FakeEngine, "check", refuse)
    pipe(monkeypatch, "one\n")
    assert cli.main(["chat", "-t", "model"]) == 2
    captured = capsys.readouterr()
    assert "no chat template" in captured.err and "generate takes text" in captured.err and not engines[0].asked
    assert cli.main(["chat", "-t", "model", "--system", "be kind"]) == 2
    assert "error: no message can be answered after this system message (prompts[0] holds" in capsys.readouterr().err
    assert cli.main(["chat", "-t", "model", "--system", "caf\udce9"]) == 2 and len(engines) == 2
    assert capsys.readouterr().err == "error: --system must be valid Unicode text, got '\\udce9' at index 3\n"


def test_json_reports_a_line_that_is_no_command(
    engines: list[FakeEngine], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pipe(monkeypatch, "/etc/hosts, what is it?\none\n/reset\ntwo\n")
    assert cli.main(["chat", "-t", "model", "--json"]) == 1
    captured = capsys.readouterr()
    records = json_lines(captured.out)  # one for each message
    assert [record["text"] for record in records] == ["", "ONE", "TWO"]
    assert records[0]["error"].startswith("/etc/hosts, what is it? begins") and records[0]["finish_reason"] == "error"
    assert captured.err.startswith("error: /etc/hosts, what is it? begins like a command but is not one: /reset")
    assert captured.err.count("\n") == 1


def test_a_mark_at_the_beginning_and_a_line_that_is_no_text(
    engines: list[FakeEngine], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pipe(monkeypatch, "\ufeffone\nb\udcff\n")
    assert cli.main(["chat", "-t", "model"]) == 1
    assert engines[0].asked == [[{"role": "user", "content": "one"}]]
    error = capsys.readouterr().err
    assert error == "error: message must be valid Unicode text, got '\\udcff' at index 1\n"


def interrupt_answers(monkeypatch: pytest.MonkeyPatch, signalled: bool) -> None:
    """At the word "two": by a signal, or as by a second one in the midst of a round."""

    def interrupt(self: FakeEngine, prompt: Any, params: Any) -> Iterator[Piece]:
        for piece in real(self, prompt, params):
            if piece.text == "TWO " and signalled:
                os.kill(os.getpid(), signal.SIGINT)
            elif piece.text == "TWO ":
                raise KeyboardInterrupt
            yield piece

    real = FakeEngine.stream
    monkeypatch.setattr(FakeEngine, "stream", interrupt)


def on_a_terminal(monkeypatch: pytest.MonkeyPatch, *lines: str | BaseException) -> None:
    left = iter([*lines, EOFError()])

    def read(prompt: str = "") -> str:
        line = next(left)
        if isinstance(line, BaseException):
            raise line
        return line

    pipe(monkeypatch, "")
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True)
    monkeypatch.setattr(builtins, "input", read)


@pytest.mark.parametrize("signalled", [True, False])
def test_ctrl_c_stops_an_answer(
    signalled: bool,
    engines: list[FakeEngine],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A first Ctrl-C lets the running round finish; an interrupt in the midst of one loses that round."""
    interrupt_answers(monkeypatch, signalled)
    on_a_terminal(monkeypatch, "one two three", "four")
    before = signal.getsignal(signal.SIGINT)
    assert cli.main(["chat", "-t", "model"]) == 0
    assert signal.getsignal(signal.SIGINT) is before
    out = capsys.readouterr().out
    shown, count = ("ONE TWO ", 2) if signalled else ("ONE ", 1)
    assert f"{shown}\nstopped after {count} tokens\n" in out
    assert "THREE" not in out
    assert "FOUR" in out
    assert engines[0].asked[-1][1] == {"role": "assistant", "content": shown}


@pytest.mark.parametrize("signalled", [True, False])
def test_ctrl_c_ends_a_chat_over_a_pipe(
    signalled: bool, engines: list[FakeEngine], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nobody is there to type. With --json a first one stops an answer alone, as for the program that sends messages."""
    interrupt_answers(monkeypatch, signalled)
    pipe(monkeypatch, "one two three\nfour\n")
    assert cli.main(["chat", "-t", "model"]) == 130
    out = capsys.readouterr().out
    assert ("stopped after 2 tokens" in out) == signalled and "THREE" not in out and "FOUR" not in out
    pipe(monkeypatch, "one two three\nfour\n")
    assert cli.main(["chat", "-t", "model", "--json"]) == (0 if signalled else 130)
    records = [(record["finish_reason"], record["text"]) for record in json_lines(capsys.readouterr().out)]
    assert records == ([("interrupted", "ONE TWO "), ("length", "FOUR")] if signalled else [])


def test_interactive_chat(
    engines: list[FakeEngine], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ctrl-C at the prompt does not end the program, Ctrl-D does."""
    on_a_terminal(monkeypatch, KeyboardInterrupt(), " hi ", "/what")
    assert cli.main(["chat", "-t", "model"]) == 0
    out = capsys.readouterr().out
    assert "HI\n" in out
    assert out.count(chat.HELP) == 3  # at the beginning, after Ctrl-C, and for what is no command


@pytest.mark.usefixtures("one_thread")
def test_real_chat(checkpoint: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    pipe(monkeypatch, "hello\nhello\n")
    assert cli.main(["chat", "-t", str(checkpoint), "-n", "12", "--json"]) == 0
    assert len(json_lines(capsys.readouterr().out)) == 2
