"""The command line: `generate`, and what all commands share."""

import dataclasses
import io
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import cli_fakes
import pytest
import torch
from cli_fakes import FakeEngine, json_lines, pipe
from transformers.utils import logging

import engine
from engine import cli, cli_output, default_model, terminal
from engine.errors import EngineError, InvalidLogitsError
from engine.training.options import METHODS, TrainingOptions

ROOT = Path(__file__).resolve().parent.parent
checkpoint = cli_fakes.checkpoint
one_thread = cli_fakes.one_thread

engines = cli_fakes.engines


@pytest.mark.parametrize("command", ["demo", "generate", "chat"])
def test_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([command, "--help"]) == 0
    text = capsys.readouterr().out
    for option in ("--target", "--drafter", "--num-draft-tokens", "--exact", "--json", "--max-new-tokens"):
        assert option in text
    assert cli.main([]) == 0
    assert command in capsys.readouterr().out


def test_help_of_train(capsys: pytest.CaptureFixture[str]) -> None:
    """Every option of a training is one of the command."""
    assert cli.main(["train", "--help"]) == 0
    text = capsys.readouterr().out
    for field in dataclasses.fields(TrainingOptions):
        name = "METHOD" if field.name == "method" else "--" + field.name.replace("_", "-")
        assert name in text
    assert "--prompts" in text and "--out" in text
    assert all(method in text for method in METHODS)


def test_import_is_light() -> None:
    code = "import sys, engine.cli; print(sorted({'torch', 'transformers', 'triton'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_version_and_a_reader_that_has_gone(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"speculative-engine {engine.__version__}\n"
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "engine", "--version"]
    done = subprocess.run(command, cwd=ROOT, stdout=write, stderr=subprocess.PIPE, text=True, check=False)
    os.close(write)
    assert (done.returncode, done.stderr) == (1, "")


@pytest.mark.parametrize(
    "closed, words, status, out, err",
    [
        ("<&-", "generate -t missing.gguf", 2, "", "error: standard input must hold a prompt"),
        (">&-", "--version", 0, "", ""),
        ("2>&-", "generate --top-p 0 x", 2, "", ""),
        ("<&- >&- 2>&-", "--help", 0, "", ""),
    ],
)
def test_closed_streams(closed: str, words: str, status: int, out: str, err: str) -> None:
    command = ["sh", "-c", f'exec "$@" {closed}', "sh", sys.executable, "-m", "engine", *words.split()]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (status, out)
    assert done.stderr.startswith(err) and done.stderr.count("\n") == bool(err)


def test_generate_streams_one_prompt(engines: list[FakeEngine], capsys: pytest.CaptureFixture[str]) -> None:
    words = "generate -t model -d none -k 3 --exact --max-length 99 --top-k 4 --seed 5 -T 0.5 --stop . --stop !"
    words += " --ignore-eos --stop-token-ids 7 --stop-token-ids 8 --tokenizer words"
    assert cli.main([*words.split(), "a b"]) == 0
    assert capsys.readouterr().out == "A B\n"
    (llm,) = engines
    assert llm.target == "model"
    assert llm.options["drafter"] is None
    assert (llm.options["num_draft_tokens"], llm.options["exact"], llm.options["max_length"]) == (3, True, 99)
    assert llm.options["tokenizer"] == "words"
    params = llm.params
    assert params.ignore_eos and params.stop_token_ids == (7, 8)
    assert (params.temperature, params.top_k, params.seed, params.stop) == (0.5, 4, 5, (".", "!"))


def test_generate_passes_all_options_on(engines: list[FakeEngine]) -> None:
    words = "generate -t model -d suffix -k 2 --verification block --no-exact --max-batch-size 3 --max-length 99"
    words += " --dtype float32 --device cpu --tokenizer words --compile -T 0.5 --top-k 4 --top-p 0.75 --min-p 0.125"
    words += " --repetition-penalty 1.5 -n 9 --seed 5 --stop . --stop-token-ids 7 --ignore-eos"
    assert cli.main([*words.split(), "a b"]) == 0
    (llm,) = engines
    assert llm.options == dict(
        drafter="suffix", num_draft_tokens=2, verification="block", exact=False, max_batch_size=3, max_length=99,
        dtype="float32", device="cpu", tokenizer="words", compile=True,
    )  # fmt: skip
    assert llm.params == engine.SamplingParams(
        temperature=0.5, top_k=4, top_p=0.75, min_p=0.125, repetition_penalty=1.5, max_new_tokens=9, seed=5, stop=".",
        stop_token_ids=(7,), ignore_eos=True,
    )  # fmt: skip


def test_generate_several_prompts(engines: list[FakeEngine], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["generate", "-t", "model", "--chat", "a b", "c"]) == 0
    assert capsys.readouterr().out == "--- 1 ---\nA B\n--- 2 ---\nC\n"
    assert engines[0].asked == [[{"role": "user", "content": "a b"}], [{"role": "user", "content": "c"}]]


def test_several_prompts_have_a_bar_above_which_their_texts_are_written(
    engines: list[FakeEngine], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    @contextmanager
    def above() -> Iterator[None]:
        print("<")
        yield
        print(">")

    monkeypatch.setattr(cli_output.tqdm, "external_write_mode", above)
    assert cli.main(["generate", "-t", "model", "a", "b"]) == 0
    assert engines[0].progress and capsys.readouterr().out == "<\n--- 1 ---\nA\n>\n<\n--- 2 ---\nB\n>\n"
    assert cli.main(["generate", "-t", "model", "--json", "a"]) == 0
    assert not engines[1].progress


@pytest.mark.parametrize("on_a_terminal", [False, True])
def test_a_terminal_shows_the_statistics_of_a_single_prompt(
    on_a_terminal: bool,
    engines: list[FakeEngine],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: on_a_terminal)
    assert cli.main(["generate", "-t", "model", "a b"]) == 0
    captured = capsys.readouterr()
    assert captured.out == "A B\n"
    assert ("4 tokens, 4.0 tokens/s, acceptance 50%" in captured.err) == on_a_terminal


def test_escape_codes_of_several_prompts(
    engines: list[FakeEngine], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A terminal shows them, as it does for a single prompt; elsewhere a text is as it is."""
    command = ["generate", "-t", "model", "a\x1b[2J", "b"]
    assert cli.main(command) == 0
    assert capsys.readouterr().out == "--- 1 ---\nA\x1b[2J\n--- 2 ---\nB\n"
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert cli.main(command) == 0
    assert capsys.readouterr().out == "--- 1 ---\nA\N{SYMBOL FOR ESCAPE}[2J\n--- 2 ---\nB\n"


def test_generate_json(engines: list[FakeEngine], capsys: pytest.CaptureFixture[str]) -> None:
    prompts = [f"p{number}" for number in range(7)]
    assert cli.main(["generate", "-t", "model", "--json", *prompts]) == 0
    records = json_lines(capsys.readouterr().out)
    assert [record["text"] for record in records] == [prompt.upper() for prompt in prompts]
    assert [record["index"] for record in records] == list(range(7))
    assert records[0].keys() == {"index", "text", "token_ids", "finish_reason", "stats"}
    assert records[0]["stats"]["acceptance_rate"] == 0.5


@pytest.mark.parametrize(("options", "rows"), [([], 2), (["c"] * 9, 8), (["--max-batch-size", "4"], 4)])
def test_generate_takes_no_more_rows_than_prompts_unless_told(
    engines: list[FakeEngine], options: list[str], rows: int
) -> None:
    """An exact call computes all rows that there may be."""
    assert cli.main(["generate", "-t", "model", "a", "b", *options]) == 0
    assert engines[0].options["max_batch_size"] == rows


def test_logprobs(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["generate", "-t", str(checkpoint), "--max-length", "64", "-n", "5", "ab"]
    assert cli.main([*asked, "--json", "--logprobs"]) == 0 and cli.main([*asked, "--json"]) == 0
    with_them, without = json_lines(capsys.readouterr().out)
    assert len(with_them["logprobs"]) == len(with_them["token_ids"]) and max(with_them["logprobs"]) < 0
    assert "logprobs" not in without and without["token_ids"] == with_them["token_ids"]
    assert cli.main([*asked, "--logprobs"]) == 2
    assert "--logprobs must be used with --json" in capsys.readouterr().err


def test_json_knows_no_nan(capsys: pytest.CaptureFixture[str]) -> None:
    terminal.write_json({"a": float("nan"), "b": [1.5, float("inf")]})
    assert json.loads(capsys.readouterr().out) == {"a": None, "b": [1.5, None]}


@pytest.mark.parametrize(
    "name, content, prompts",
    [
        ("p.txt", "one\n\ntwo {}\n", ["one", "two {}"]),
        ("p.jsonl", '{"prompt": "one"}\n{"turns": ["two", "x"]}\n', ["one", "two"]),
        ("p.jsonl", '{"prompt": null, "turns": ["one"]}\n', ["one"]),
        ("p.jsonl", '{"prompt": "one", "turns": ["two"]}\n', ["one"]),
        ("p.jsonl", '{"prompt": "one", "tools": "[]"}\n{"prompt": "two", "tools": null}\n', ["one", "two"]),
        ("p.jsonl", '{"messages": [{"role": "user", "content": "hi"}]}\n', [[{"role": "user", "content": "hi"}]]),
        ("p.txt", '{"prompt": "one\\nmore"}\n', ["one\nmore"]),
        ("p.txt", "\ufeffa\u2028b\x0cc\x85d\r\ne", ["a\u2028b\x0cc\x85d", "e"]),  # only line feeds end lines
        ("p.jsonl", '\ufeff{"prompt": "a\u2028b"}\r\n{"prompt": "c"}', ["a\u2028b", "c"]),
    ],
)
def test_prompts_from_a_file(
    name: str, content: str, prompts: list[str], engines: list[FakeEngine], tmp_path: Path
) -> None:
    (tmp_path / name).write_bytes(content.encode())
    assert cli.main(["generate", "-t", "model", "--json", "-f", str(tmp_path / name)]) == 0
    assert engines[0].asked == prompts


def test_prompts_from_stdin(engines: list[FakeEngine], monkeypatch: pytest.MonkeyPatch) -> None:
    pipe(monkeypatch, "one\ntwo\n")
    assert cli.main(["generate", "-t", "model", "--json"]) == 0
    pipe(monkeypatch, "one\ntwo\n")
    assert cli.main(["generate", "-t", "model", "--json", "-f", "-"]) == 0
    pipe(monkeypatch, "\ufeffone\r\n")  # as other systems end lines and begin files
    assert cli.main(["generate", "-t", "model", "--json"]) == 0
    assert [llm.asked for llm in engines] == [["one\ntwo"], ["one", "two"], ["one"]]


def test_white_space_of_standard_input_is_part_of_the_prompt(
    engines: list[FakeEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of code, say; but for the last line's end, which a shell adds."""
    for text, prompt in (("  a\n    b \n", "  a\n    b "), ("\na\n\n", "\na\n"), ("a \r\n", "a ")):
        pipe(monkeypatch, text)
        assert cli.main(["generate", "-t", "model"]) == 0
        assert engines.pop().asked == [prompt]


@pytest.mark.parametrize(
    "words, status, message",
    [
        ("generate -t missing.gguf x", 2, "got 'missing.gguf'"),
        ("generate -t model -k -1 x", 2, "num_draft_tokens must be >= 0, got -1"),
        ("generate -t model --temperature -1 x", 2, "temperature must be"),
        ("generate -t model --temperature nan x", 2, "temperature must be"),
        ("generate -t model --top-p 0 x", 2, "top_p must be in (0, 1]"),
        ("generate -t model --max-new-tokens 0 x", 2, "max_new_tokens must be >= 1"),
        ("generate -t model --top-k many x", 2, "'--top-k'"),
        ("generate -t model --top-k many x", 2, "'many'"),
        ("generate -t model -f ~nobody-here/p", 2, "prompts must be in a file, got '~nobody-here/p', which does not"),
        ("generate -t model --unheard-of x", 2, "--unheard-of"),
        ("generate -t model -f missing.txt", 2, "prompts must be in a file, got 'missing.txt', which does not exist"),
        ("generate -t model -f {bad} ", 2, 'bad.jsonl:2 must be a JSON object with a string "prompt"'),
        ("generate -t model -f {silent}", 2, 'silent.jsonl:1 must be a JSON object with a string "prompt"'),
        ("generate -t model -f {tools}", 2, "tools.jsonl:1 must have no tools, which are not rendered"),
        ("generate -t model -f {empty}", 2, "must hold at least one prompt"),
        ("generate -t model -f {no_prompt}", 2, "no_prompt.jsonl:2 must hold a prompt that is not empty, got ''"),
        ("generate -t model x ''", 2, "prompts[1] must not be empty, got ''"),
        ("generate -t model -f {object}", 2, "or a JSON object per line, got one JSON object of several"),
        ("generate -t model -f {list}", 2, "must hold a prompt per line, or a JSON object per line, got one JSON list"),
        ("generate -t model -f {empty} x", 2, "not both"),
        ("generate -t model -f {latin}", 2, "latin.txt must be UTF-8 text"),
        ("generate -t model -f {deep}", 2, 'deep.jsonl:1 must be a JSON object with a string "prompt"'),
        ("generate -t model -f {folder}", 2, "prompts must be in a file, got the folder"),
        ("generate -t model --prompts-file=", 2, "prompts must be in a file, got ''"),
        ("generate -t model nan", 1, "the logits are NaN"),
        ("demo -t model --repeats 0", 2, "repeats must be >= 1, got 0"),
        ("chat -t missing.gguf", 2, "got 'missing.gguf'"),
        ("no-such-command", 2, "no-such-command"),
    ],
)
def test_bad_input_gives_one_line(
    words: str,
    status: int,
    message: str,
    engines: list[FakeEngine],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    files = {"bad": tmp_path / "bad.jsonl", "empty": tmp_path / "empty.txt", "folder": tmp_path}
    files |= {"latin": tmp_path / "latin.txt", "deep": tmp_path / "deep.jsonl", "list": tmp_path / "list.json"}
    files["list"].write_text('[\n {"prompt": "one"},\n {"prompt": "two"}\n]\n')
    files["silent"] = tmp_path / "silent.jsonl"
    files["silent"].write_text('{"messages": []}\n')
    files["tools"] = tmp_path / "tools.jsonl"
    files["tools"].write_text('{"prompt": "hi", "tools": [{"name": "clock"}]}\n')
    files["object"] = tmp_path / "object.json"
    files["object"].write_text('{\n "prompt": "one"\n}\n')
    files["latin"].write_bytes(b"caf\xe9\n")
    files["deep"].write_text("[" * 100_000 + "]" * 100_000 + "\n")
    files["bad"].write_text('{"prompt": "one"}\n{"prompt": 2}\n')
    files["empty"].write_text("\n")
    files["no_prompt"] = tmp_path / "no_prompt.jsonl"
    files["no_prompt"].write_text('{"prompt": "one"}\n{"prompt": ""}\n')
    assert cli.main(shlex.split(words.format(**files))) == status
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ")
    assert captured.err.count("\n") == 1
    assert message in captured.err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("generate -t model", "error: standard input must hold a prompt, but it is empty\n"),
        ("generate -t model -f -", "error: standard input must hold at least one prompt, but it is empty\n"),
    ],
)
def test_an_empty_standard_input_is_refused_before_anything_is_loaded(
    words: str,
    message: str,
    engines: list[FakeEngine],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    pipe(monkeypatch, "")
    assert cli.main(words.split()) == 2
    assert capsys.readouterr().err == message and not engines


def test_debug_shows_the_traceback(
    engines: list[FakeEngine], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["generate", "--debug", "-t", "missing.gguf", "x"]) == 2
    assert "Traceback" in capsys.readouterr().err
    monkeypatch.setenv("ENGINE_DEBUG", "0")
    assert cli.main(["generate", "-t", "missing.gguf", "x"]) == 2
    assert "Traceback" not in capsys.readouterr().err


def test_outputs_before_a_failure_are_shown(
    engines: list[FakeEngine], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def generate(self: FakeEngine, prompts: Any, params: Any, progress: bool, on_output: Any) -> Any:
        on_output(2, self.output("c"))
        on_output(0, self.output("a"))
        raise engine.EngineError("the drafter fails")

    monkeypatch.setattr(FakeEngine, "generate", generate)
    assert cli.main(["generate", "-t", "model", "--json", "a", "b", "c"]) == 1
    captured = capsys.readouterr()
    assert [record["index"] for record in json_lines(captured.out)] == [0, 2]
    assert captured.err == "error: the drafter fails\n"


def test_outputs_that_ctrl_c_keeps_from_being_told_are_shown(
    engines: list[FakeEngine], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Those that ended in the same round; each once."""

    def generate(self: FakeEngine, prompts: Any, params: Any, progress: bool, on_output: Any) -> Any:
        outputs = [self.output(prompt) for prompt in prompts]
        on_output(0, outputs[0])
        on_output(3, outputs[3])
        error = KeyboardInterrupt()
        error.outputs = [*outputs[:2], None, *outputs[3:]]  # type: ignore[attr-defined]
        raise error

    monkeypatch.setattr(FakeEngine, "generate", generate)
    assert cli.main(["generate", "-t", "model", "--json", *"abcde"]) == 130
    assert [record["index"] for record in json_lines(capsys.readouterr().out)] == [0, 1, 3, 4]


def test_outputs_are_shown_in_order_as_they_end_and_failures_harm_no_others(
    engines: list[FakeEngine], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[list[int]] = []

    def generate(self: FakeEngine, prompts: Any, params: Any, progress: bool, on_output: Any) -> Any:
        for index in (1, 2, 0, 4, 3):
            error = InvalidLogitsError(f"NaN for prompts[{index}]", [None])
            on_output(index, error if index in (1, 3) else self.output(prompts[index]))
            records = json_lines(capsys.readouterr().out)
            seen.append([record["index"] for record in records])
            assert all(("error" in record) == (record["index"] in (1, 3)) for record in records)
        raise InvalidLogitsError("NaN for prompts[1] (and for 1 more)", [])

    monkeypatch.setattr(FakeEngine, "generate", generate)
    with monkeypatch.context() as patch:
        errors = io.StringIO()
        patch.setattr(sys, "stderr", errors)
        assert cli.main(["generate", "-t", "model", "--json", *"abcde"]) == 1
    assert seen == [[], [], [0, 1, 2], [], [3, 4]]
    assert errors.getvalue() == "error: NaN for prompts[1]\nerror: NaN for prompts[3]\n"


def test_a_bad_prompt_is_found_before_any_is_answered(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "prompts").write_bytes(b"a\n" * 6 + b"too long\n" + b"a\n" * 3)
    words = f"generate -t {checkpoint} --json --max-batch-size 1 --max-length 4 -f {tmp_path / 'prompts'}"
    assert cli.main(words.split()) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "error: prompts[6] has 8 tokens; at most 3" in captured.err


@pytest.mark.usefixtures("one_thread")
def test_bytes_that_are_no_text(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One bad line does not end a conversation; a prompt of an argument or from standard input is refused."""

    def run(command: str, stdin: bytes, *more: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        status = cli.main([command, "-t", str(checkpoint), "--json", "-n", "2", *more])
        return status, *capsys.readouterr()

    status, out, err = run("chat", b"o\rne\nt\xffo\nthree\r\n")  # only line feeds end lines
    reasons = [record["finish_reason"] for record in json_lines(out)]
    assert status == 1 and reasons == ["length", "error", "length"]
    assert "error: message must be valid Unicode text, got '\\udcff' at index 1" in err
    refused = "error: prompts[1] must be valid Unicode text, got '\\udcff' at index 1"
    argument = os.fsdecode(b"b\xff")  # as Python hands it over
    for stdin, more in ((b"a\nb\xff\n", ["-f", "-"]), (b"", ["a", argument])):
        status, out, err = run("generate", stdin, *more)
        assert status == 2 and not out and refused in err


def test_no_prompt_on_a_terminal(
    engines: list[FakeEngine], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pipe(monkeypatch, "")
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True)
    assert cli.main(["generate", "-t", "model"]) == 2
    assert "no prompt" in capsys.readouterr().err


def test_default_target(
    engines: list[FakeEngine],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The package is found without being imported: importing this one would fail."""
    package = tmp_path / "fake_model_package"
    package.mkdir()
    (package / "__init__.py").write_text("raise ImportError")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(default_model, "MODEL_PACKAGE", package.name)
    assert cli.main(["generate", "x"]) == 2
    assert default_model.INSTALL_MODEL in capsys.readouterr().err
    (package / "model.gguf").write_text("GGUF")
    assert cli.main(["generate", "x"]) == 0
    assert engines[0].target == str(package / "model.gguf")


def test_an_empty_name_is_not_the_default(engines: list[FakeEngine]) -> None:
    """As of a shell's variable that is not set: another model than was meant would answer."""
    for command in ("generate x", "chat"):
        cli.main([*command.split(), "--target=", "--drafter="])
    assert [(llm.target, llm.options["drafter"]) for llm in engines] == [("", "")] * 2
    cli.main(["demo", "--target="])
    assert engines[2].target == ""
    assert cli.main(["demo", "--drafter="]) == 2 and len(engines) == 4


def test_ctrl_c_elsewhere_ends_the_program(engines: list[FakeEngine], monkeypatch: pytest.MonkeyPatch) -> None:
    def generate(self: FakeEngine, *args: Any, **options: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(FakeEngine, "generate", generate)
    assert cli.main(["generate", "-t", "model", "a", "b"]) == 130


def test_engine_errors_are_failures(
    engines: list[FakeEngine], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def load(*args: Any, **options: Any) -> None:
        raise EngineError("in\n  two lines")

    monkeypatch.setattr(engine, "load", load)
    assert cli.main(["generate", "-t", "model", "x"]) == 1
    assert capsys.readouterr().err == "error: in two lines\n"


def test_a_full_gpu_is_a_failure_and_a_fault_has_its_traceback(
    engines: list[FakeEngine], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(error: Exception) -> Callable[..., None]:
        def load(*args: Any, **options: Any) -> None:
            raise error

        return load

    monkeypatch.setattr(engine, "load", fails(torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate")))
    assert cli.main(["generate", "-t", "model", "x"]) == 1
    assert capsys.readouterr().err == "error: CUDA out of memory. Tried to allocate\n"
    monkeypatch.setattr(engine, "load", fails(RuntimeError("a fault")))
    with pytest.raises(RuntimeError, match="a fault"):
        cli.main(["generate", "-t", "model", "x"])


@pytest.mark.usefixtures("one_thread")
def test_real_generate(checkpoint: Path) -> None:
    """In a process of its own: what is on its standard output is JSON and nothing else."""
    command = [sys.executable, "-m", "engine", "generate", "-t", str(checkpoint), "--json", "-n", "12", "abab", "x"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    records = json_lines(done.stdout)
    assert [len(record["token_ids"]) for record in records] == [12, 12]
    assert all(record["finish_reason"] == "length" for record in records)


@pytest.fixture
def trainings(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, Path, TrainingOptions]]:
    """What was asked of `train_drafter`, which does nothing."""
    from engine.training import run

    asked: list[tuple[Any, Path, TrainingOptions]] = []
    monkeypatch.setattr(run, "train_drafter", lambda prompts, out, options: asked.append((prompts, out, options)))
    return asked


def test_train_leaves_the_answer_of_a_chat_to_the_target(
    trainings: list[tuple[Any, Path, TrainingOptions]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chat = [{"role": role, "content": "hi"} for role in ("user", "assistant", "user", "assistant")]
    (tmp_path / "chats.jsonl").write_text(json.dumps({"messages": chat}) + '\n{"prompt": "one"}\n')
    words = ["train", "mlp", "-t", "model", "--prompts", str(tmp_path / "chats.jsonl"), "--out", str(tmp_path / "out")]
    assert cli.main(words) == 0
    assert trainings.pop()[0] == [chat[:3], "one"]
    (tmp_path / "chats.jsonl").write_text('{"prompt": "one"}\n' + json.dumps({"messages": chat[1:2]}) + "\n")
    assert cli.main(words) == 2 and not trainings
    assert "prompts[1] must hold a message to answer, got nothing but an assistant's" in capsys.readouterr().err


def test_train_passes_all_options_on(
    trainings: list[tuple[Any, Path, TrainingOptions]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "out"
    prompts.write_text('{"prompt": "one"}\n{"turns": ["two", "x"]}\n')
    command = ["train", "eagle3", "--prompts", str(prompts), "--out", str(out), "-t", "model"]
    assert cli.main(command) == 0
    assert capsys.readouterr().out == (
        f"the eagle3 drafter is in {out}: use it, behind generate --chat if the target has a chat template, with --target model "
        f"--drafter {out}\n"
    )
    assert trainings.pop() == (["one", "two"], str(out), TrainingOptions("eagle3", "model"))
    other: dict[str, Any] = dict(
        temperatures=(0.5, 1.0), layers=(3, 1), chat=False, start_from="head", freeze_head=True, max_new_tokens=5, max_length=6,
        batch_size=7, validation_share=0.25, draft_vocab_size=8, num_steps=9, epochs=11, learning_rate=0.125, tokens_per_batch=12,
        learn_prompts=True, loss="lk", seed=13, max_disk_gb=1.5, dtype="float32", device="cpu",
    )  # fmt: skip
    assert {"method", "target", "num_layers", *other} == {field.name for field in dataclasses.fields(TrainingOptions)}
    for name, value in other.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            command.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            command += [f"--{flag}={item}" for item in (value if isinstance(value, tuple) else (value,))]
    assert cli.main(command) == 0
    assert trainings.pop()[2] == TrainingOptions("eagle3", "model", **other)
    command = ["train", "draft-model", "--prompts", str(prompts), "--out", str(out), "-t", "model", "--num-layers=10"]
    assert cli.main(command) == 0
    assert trainings.pop()[2] == TrainingOptions("draft-model", "model", num_layers=10)


@pytest.mark.parametrize(
    "words, message",
    [
        (
            "train eagle -t model --prompts {two} --out {out}",
            "method must be one of eagle3, medusa, mlp, draft-model, got 'eagle'",
        ),
        ("train eagle3 -t model --prompts missing.txt --out {out}", "missing.txt"),
        ("train eagle3 -t model --prompts {none} --out {out}", "must hold at least one prompt, but it is empty"),
        (
            "train eagle3 -t model --prompts {one} --out {out}",
            "prompts must be at least 2, one of them for validation, got 1",
        ),
        ("train eagle3 -t model --prompts {bad} --out {out}", "bad.jsonl:1 must be a JSON object"),
        ("train eagle3 -t model --prompts {two} --out {full}", "out must be a new or empty folder"),
        ("train eagle3 -t model --prompts {two} --out {two}", "out must be a folder, got the file"),
        (
            "train eagle3 --target= --prompts {two} --out {out}",
            "target must be a hub id, a folder or a GGUF file, got ''",
        ),
        ("train eagle3 -t ./missing --prompts {two} --out {out}", "'./missing', which does not exist"),
        ("train eagle3 -t model --prompts {two} --out {out} --epochs 0", "epochs must be >= 1, got 0"),
        (
            "train eagle3 -t model --prompts {two} --out {out} --learning-rate -1",
            "learning_rate must be a finite number > 0",
        ),
        ("train eagle3 -t model --prompts {two} --out {out} --seed many", "--seed"),
        ("train eagle3 -t model --prompts {two}", "--out"),
        ("train eagle3 -t model --out {out}", "--prompts"),
    ],
)
def test_train_refuses_bad_input_in_one_line(
    words: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ENGINE_DEBUG", "")
    contents = {"one": "a\n", "two": "a\nb\n", "none": "\n", "bad.jsonl": "no JSON\n", "full/notes": "mine"}
    for name, content in contents.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(content)
    places = {name.split(".")[0]: tmp_path / name for name in ("one", "two", "none", "bad.jsonl", "out", "full")}
    assert cli.main(words.format(**places).split()) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ") and captured.err.count("\n") == 1
    assert message in captured.err
    assert not (tmp_path / "out").exists()


def test_what_train_prints_can_be_pasted(
    trainings: list[tuple[Any, Path, TrainingOptions]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    prompts, out = tmp_path / "prompts", tmp_path / "my out"
    prompts.write_text("a\nb\n")
    assert cli.main(["train", "mlp", "-t", "my model", "--prompts", str(prompts), "--out", str(out)]) == 0
    words = shlex.split(capsys.readouterr().out)
    assert words[-4:] == ["--target", "my model", "--drafter", str(out)]
    monkeypatch.chdir(tmp_path)
    assert cli.main(["train", "mlp", "-t", "model", "--prompts", str(prompts), "--out", "suffix"]) == 0
    assert shlex.split(capsys.readouterr().out)[-1] == "./suffix"  # and no drafter that has this name


def test_a_target_that_is_downloaded_for_a_training_has_a_bar(
    trainings: list[tuple[Any, Path, TrainingOptions]], tmp_path: Path
) -> None:
    """And none that is read from a folder, whose bar would be one among those of the training."""
    (tmp_path / "prompts").write_text("a\nb\n")
    for target, shown in ((str(tmp_path), False), ("model", True)):
        logging.enable_progress_bar()
        command = ["train", "mlp", "-t", target, "--prompts", str(tmp_path / "prompts"), "--out", str(tmp_path / "out")]
        assert cli.main(command) == 0
        assert logging.is_progress_bar_enabled() == shown


def test_a_training_that_is_interrupted_says_how_to_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from engine.training import run

    def interrupted(*args: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(run, "train_drafter", interrupted)
    (tmp_path / "prompts").write_text("a\nb\n")
    command = ["train", "mlp", "-t", "model", "--prompts", str(tmp_path / "prompts"), "--out", str(tmp_path / "out")]
    assert cli.main(command) == 130
    assert capsys.readouterr().err == f"stopped; the same command goes on from what is in {tmp_path / 'out'}\n"


@pytest.mark.usefixtures("one_thread")
def test_real_train(checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A drafter that `generate` takes, on prompts as they are."""
    prompts, out = tmp_path / "prompts.txt", tmp_path / "head"
    prompts.write_text("abab\nx\nhello\nwhat?\n")
    words = f"train medusa -t {checkpoint} --prompts {prompts} --out {out} --no-chat --max-new-tokens 6 --epochs 1"
    assert cli.main(words.split()) == 0
    captured = capsys.readouterr()
    assert captured.out == f"the medusa drafter is in {out}: use it with --target {checkpoint} --drafter {out}\n"
    assert "validation loss" in captured.err
    texts = []
    for drafter in (str(out), "none"):
        assert cli.main(["generate", "-t", str(checkpoint), "-d", drafter, "-k", "3", "--json", "-n", "8", "abab"]) == 0
        texts.append(json_lines(capsys.readouterr().out)[0]["token_ids"])
    assert texts[0] == texts[1]
