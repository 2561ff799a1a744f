"""bench/throughput: options, and whole runs on tiny random models."""

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import throughput_runs
from throughput_runs import CONTEXT, essence, medusa, save
from tiny_models import greedy
from tiny_tokenizer import EOS, byte_tokenizer

import engine
from bench.throughput import command_line, plots, run
from bench.throughput.__main__ import main
from bench.throughput.command_line import command, parse
from bench.throughput.methods import Call, Contest
from bench.throughput.options import Options
from bench.throughput.ours import Ours
from bench.throughput.prompts import render
from bench.throughput.records import Records, read_records
from bench.throughput.report import write_report
from bench.throughput.transformers_methods import Transformers, TransformersAssisted

# fixtures
bench = throughput_runs.bench
draft = throughput_runs.draft
few_plots = throughput_runs.few_plots
one_thread = throughput_runs.one_thread
prompts = throughput_runs.prompts
target = throughput_runs.target

ROOT = Path(__file__).resolve().parent.parent
LOOKUP = "transformers lookup K=5"


# Options.


@pytest.mark.parametrize(
    "arguments, complaint",
    [
        (["-k", "-1"], 'num_draft_tokens must be >= 0 or "auto", got -1'),
        (["-b", "0"], "batch_sizes must be >= 1, got 0"),
        (["--batches-per-call", "0"], "batches_per_call must be >= 1, got 0"),
        (["-n", "4", "0"], "max_new_tokens must be >= 1, got 0"),
        (["-k", "1.5"], 'must be an int >= 0 or "auto", got \'1.5\''),
        (["-T", "-0.5"], "temperatures must be finite numbers >= 0 and <= 3e+38, got -0.5"),
        (["-T", "nan"], "temperatures must be finite numbers >= 0 and <= 3e+38, got nan"),
        (["-T", "1e39"], "temperatures must be finite numbers >= 0 and <= 3e+38, got 1e+39"),
        (["--top-p", "0"], "top_p must be in (0, 1], got 0.0"),
        (["--repeats", "0"], "repeats must be >= 1, got 0"),
        (["--seed", "-1"], "seed must be in [0, 2**32), got -1"),
        (["--max-prompt-tokens", "1"], "max_prompt_tokens must be >= 2, got 1"),
        (["--verification", "typical"], "verification must be of rejection, block, coupled, got 'typical'"),
        (["--baselines", "vllm"], "baselines must be of plain, lookup"),
        (["--drafts", "hot"], "drafts must be of own, greedy, sampled, got 'hot'"),
        (["--template", "alpaca"], "template must be one of auto, chat, raw, got 'alpaca'"),
        (["-d", "synthetic:1.5"], "acceptance A in [0, 1], got '1.5'"),
        (["-d", "synthetic"], "drafter synthetic:A must have an acceptance A in [0, 1], got 'synthetic'"),
        (["-d", "./no/such/model"], "drafter must be an existing path or a hub id, got './no/such/model'"),
        (["-d", "ngram+staged:./no/model"], "drafter must be an existing path or a hub id, got './no/model'"),
        (["-d", "ngram+layer_skip:3-1"], "drafter layer_skip:... must have a number of layers >= 1"),
        (["--target", "/no/such/model"], "target must be an existing path or a hub id"),
        (["--dtypes", "int8"], "dtypes must be of auto, bfloat16, float16, float32, float64, got 'int8'"),
        (["--dtypes", "float32", "float8_e4m3fn"], "float64, got 'float8_e4m3fn'"),  # which engine.load refuses
        (["--device", "toaster"], "device must be 'auto', 'cpu' or a GPU that is there, got 'toaster'"),
        (["-d", "a/same", "b/same"], "drafters must have different names"),
        (["-k", "2", "2"], "num_draft_tokens must not name anything twice"),
        (["--load-option", "dtype=float32"], "load-option must not be dtype"),
        (["--load-option", "no_such=1"], "load-option must be an argument of engine.load"),
        (["--load-option", "max_length"], "must be name=value"),
        (["--load-option", "max_length=foo"], "max_length must be an int >= 2, got 'foo'"),
        (["--load-option", "compile=maybe"], "compile must be True or False, got 'maybe'"),
        (["--load-option", "tensor_parallel=2"], "tensor_parallel must be True or False, got 2"),
        (["-b", "70000"], "max_batch_size must be <= 65535, got 70000"),
        (["--preset", "gpt5"], "invalid choice: 'gpt5'"),
        (
            ["--report-only", "--restart", "--max-turns", "1"],
            "--report-only must have no other option than --out: the run there has its own, got --max-turns, --restart",
        ),
    ],
)  # fmt: skip
def test_bad_options(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    complaint: str,
) -> None:
    monkeypatch.setattr(run, "load_models", lambda *_: pytest.fail("a model was loaded"))
    with pytest.raises(SystemExit, match="2"):
        main(["--out", str(tmp_path / "out"), *arguments])
    assert complaint in " ".join(capsys.readouterr().err.split()) and not (tmp_path / "out").exists()


def test_bad_options_that_are_found_in_files(
    bench: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(run, "load_models", lambda *_: pytest.fail("a model was loaded"))
    (tmp_path / "bad.jsonl").write_text("{\n")
    (tmp_path / "file").touch()
    head = medusa(tmp_path)
    for arguments, complaint in (
        (["--prompts", str(tmp_path / "missing.jsonl")], "prompts must be an existing file"),
        (["--prompts", str(tmp_path / "bad.jsonl")], "bad.jsonl:1 must be a JSON object"),
        (["--categories", "edit", "sports"], "categories must be of edit, talk, got 'sports'"),
        (["-d", "staged:ngram"], "drafter staged:MODEL must have the hub id, folder or GGUF file of a draft model"),
        (["-d", f"staged:{head}"], "which holds a learned head (MedusaDrafter)"),
        (["--relative-to", "nobody"], "relative_to must be one of the methods (ours plain, ours ngram K=5"),
        (  # which is in the first contest alone
            ["-T", "0.7", "0", "--verification", "block", "--relative-to", "ours ngram K=5 block"],
            "relative_to must be one of the methods (ours plain, ours ngram K=5, transformers plain",
        ),
        (["--out", str(tmp_path / "file")], "--out must be a folder that can be written"),
    ):
        bench(*arguments, status=2)
        assert complaint in capsys.readouterr().err
    monkeypatch.setenv("ENGINE_DEBUG", "0")
    assert main(["--report-only", "--out", str(tmp_path / "none")]) == 2
    assert "out must hold a run for --report-only" in capsys.readouterr().err


def test_options_that_the_model_refuses(bench: Callable[..., Path], capsys: pytest.CaptureFixture[str]) -> None:
    folder = bench("-n", "6", "500", status=2)
    assert f"max_new_tokens must be <= {CONTEXT - 2} for this target's context, got 500" in capsys.readouterr().err
    assert read_records(folder) == []  # told before the other contest
    folder = bench("--load-option", f"max_length={CONTEXT + 1}", out="other", status=2)
    rule = f"max_length must be <= {CONTEXT}, the target's context, got {CONTEXT + 1}\n"
    assert capsys.readouterr().err.endswith(f"error: {rule}")
    assert not json.loads((folder / "run.json").read_text())["complete"] and read_records(folder) == []
    bench("--categories", "talk", "--max-turns", "1", out="other", baselines="plain")  # nothing is there to go on from
    assert len(read_records(folder)) == 3


# Whole runs.


def test_a_run(bench: Callable[..., Path], draft: str, capsys: pytest.CaptureFixture[str]) -> None:
    folder = bench(
        *("-d", "ngram", draft, "synthetic:0.7", "-k", "2", "4"), baselines="plain lookup assistant no-cache compiled"
    )
    shown = capsys.readouterr()
    records = read_records(folder)
    methods = list(dict.fromkeys(record["method"] for record in records))
    assert methods == [
        "ours plain",
        *(f"ours {name} K={k}" for name in ("ngram", "small") for k in (2, 4)),
        *(f"ours synthetic 0.7 K={k} (not a real drafter)" for k in (2, 4)),
        *("transformers plain", "transformers no cache"),
        *(f"transformers {name} K={k}" for name in ("lookup", "small") for k in (2, 4)),
    ]
    assert len(records) == 4 * len(methods)  # three first turns and a second one
    by_method = {name: [r for r in records if r["method"] == name] for name in methods}
    plain = [r["token_ids"] for r in by_method["ours plain"]]
    for name, mine in by_method.items():
        assert [r["token_ids"] for r in mine] == plain
        for record in mine:
            k = record["num_draft_tokens"]
            assert record["error"] is None and record["new_tokens"] == len(record["token_ids"]) == record["call_tokens"]
            assert record["seconds"] > record["prefill_seconds"] > 0
            assert record["accepted_tokens"] <= record["draft_tokens"] <= (k or 0) * record["rounds"]
            assert record["new_tokens"] == record["accepted_tokens"] + record["rounds"]
            assert len(record["acceptance_per_position"]) == len(record["rounds_per_position"]) <= (k or 0)
            assert sum(record["rounds_per_position"]) == record["draft_tokens"]
            assert set(record["differences"]) == {"ours plain", "transformers plain"} - {name}
            assert set(record["differences"].values()) == {None}
            assert (record["forward_seconds"] is not None) == name.startswith("ours")
            if name.startswith("ours"):
                assert 0 < record["forward_seconds"] < record["draft_seconds"] + record["verify_seconds"]
                parts = [record[f"{part}_seconds"] for part in ("prefill", "draft", "verify", "overhead")]
                assert sum(parts) == pytest.approx(record["seconds"])
            else:
                assert record["prefill_tokens"] >= 1
    for name in ("ours small K=4", "transformers small K=4"):
        assert sum(record["accepted_tokens"] for record in by_method[name]) > 0
    for name in ("ours plain", "transformers plain", "transformers no cache"):
        assert all(r["rounds"] == r["new_tokens"] and r["draft_tokens"] == 0 for r in by_method[name])
    text = (folder / "table.md").read_text()
    ratios = r"\| [\d.]+x " * 5
    assert re.search(rf"\| edit \| ours ngram K=2 \| 2 {ratios}\| [\d.]+ \|", text)
    assert re.search(r"\| all \| ours plain \| 4 (\| [\d.]+x ){3}\| 1.00x \| 1.00x \|", text)
    assert re.search(r"\| ours ngram K=2 (\| [\d.]+ ){3}\| [\d.]+% \|", text)
    assert re.search(r"\| all \| transformers plain \| 4 \| 1.00x \| 1.00x \| 1.00x \| .* 4 of 4 \|", text)
    assert "it knows plain's text and corrupts it" in text and "transformers compiled: needs a GPU" in text
    assert "not complete" not in text and "![speedup.png](speedup.png)" in text
    assert (
        "\npython -m bench.throughput --out out --prompts prompts.jsonl --target big --drafters ngram small syn" in text
    )
    assert str(Path(draft).parent) not in text + (folder / "run.json").read_text()
    assert all((folder / name).stat().st_size > 5000 for name in ("speedup.png", "drafts.png", "rounds.png"))
    assert "left out: transformers compiled: needs a GPU" in shown.out and "left out: transformers" in shown.err
    assert "| ours synthetic 0.7 K=2 (not a real drafter) | 4 |" in shown.out


def test_synthetic_drafters_run_exactly(bench: Callable[..., Path]) -> None:
    """In bfloat16 rounding would part the verified text from plain's, behind which no draft is right."""
    folder = bench(
        *("-d", "synthetic:1", "-k", "3", "--dtypes", "bfloat16", "--max-turns", "1"), baselines="plain", tokens="40"
    )
    records = [r for r in read_records(folder) if r["synthetic"]]
    assert {json.dumps(r["differences"]["ours plain"]) for r in records} == {"null"}
    assert all(r["accepted_tokens"] == r["draft_tokens"] > 0 for r in records)
    text = (folder / "table.md").read_text()
    assert "exact: True" in text and "all of ours is `exact`" in text
    text = (bench("-d", "synthetic:1", "--no-exact", "--categories", "edit", out="other") / "table.md").read_text()
    assert "exact: False" in text and "This run was not `exact`" in text


@pytest.mark.parametrize(
    "words",
    [
        "-b 2 -T 0.5 -d MODEL ngram+MODEL layer_skip:1 synthetic:0.5 -k 3 auto --categories edit --ignore-eos",
        "-d staged:MODEL ngram+staged:MODEL staged:owner/name layer_skip:0-1,3",
        "--drafters -n 4 --baselines --relative-to 'ours plain' --no-exact --load-option max_length=100",
        "--preset gpt2 --drafts own --load-option \"no='a b'\"",
        "",
    ],
)
def test_the_command_says_how_it_was_made(
    words: str, target: str, draft: str, prompts: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Typed where the files are, it gives the same options again."""
    monkeypatch.setattr(Options, "_check_load_options", lambda self: None)
    typed = ["--out", "a/run", *shlex.split(words.replace("MODEL", draft))]
    options, _, _ = parse(typed if "preset" in words or not words else [*typed, "-t", target, "--prompts", prompts])
    monkeypatch.setattr(command_line, "find_model", lambda: "/home/me/found.gguf")
    made = command(options.as_dict() | {"target": options.as_dict()["target"] or "found.gguf"}, "run")
    assert str(Path(target).parent.parent) not in made and (words or made == "python -m bench.throughput --out run")
    for folder in (target, draft, prompts):  # where each is by its name
        monkeypatch.chdir(Path(folder).parent)
        made = made.replace(Path(folder).name, folder)
    again, _, _ = parse(shlex.split(made)[3:])
    assert again.as_dict() == options.as_dict() and again.draft_checkpoints == options.draft_checkpoints


def test_second_turns_hold_the_first_answer(bench: Callable[..., Path], target: str) -> None:
    folder = bench(baselines="plain")
    records = [r for r in read_records(folder) if r["category"] == "talk" and r["method"] == "transformers plain"]
    first, second = records
    tokenizer = byte_tokenizer()
    answers = [r["text"] for r in read_records(folder) if r["category"] == "talk" and r["method"] == "ours plain"]
    ids = render(tokenizer, ["hello", "and then?"], answers[:1], "auto")
    assert (first["turn"], second["turn"]) == (0, 1) and second["prompt_tokens"] == len(ids)
    model = engine.load(target, drafter=None, dtype="float32").target_model
    assert second["token_ids"] == greedy(model, ids, 6, eos_token_id=EOS)


def test_an_interrupted_run_goes_on(
    bench: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ("-T", "0", "0.8", "-d", "ngram")
    whole = bench(*arguments, out="whole", baselines="plain")
    add, calls = Records.add, []

    def interrupted(self: Records, records: Any) -> None:
        if len(calls) == 6:  # in the second contest
            raise KeyboardInterrupt
        calls.append(records)
        add(self, records)

    monkeypatch.setattr(Records, "add", interrupted)
    folder = bench(*arguments, baselines="plain", status=130)
    assert "interrupted; the same command goes on" in capsys.readouterr().err
    assert "This run is not complete" in (folder / "table.md").read_text()
    # Killed in the middle of a line: of the sixth unit, one method of three is whole.
    path = folder / "records.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    assert len(lines) == 18
    path.write_text("".join(lines[:16]) + lines[16][:40])
    calls.clear()
    monkeypatch.setattr(Records, "add", lambda self, records: (calls.append(records), add(self, records)))
    bench(*arguments, baselines="plain")
    assert len(calls) == 3  # of eight units
    assert essence(folder) == essence(whole)
    assert "not complete" not in (folder / "table.md").read_text()

    monkeypatch.setattr(run, "load_models", lambda *_: pytest.fail("a model was loaded"))
    bench(*arguments, baselines="plain")
    assert "complete: nothing is measured again" in capsys.readouterr().err
    assert len(read_records(folder)) == 24


def test_what_a_finished_run_has_lost_is_measured_again(
    bench: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of the contests that lack something, the units that do."""
    words = ("-T", "0", "0.8", "-d", "ngram")
    folder = bench(*words, baselines="plain")
    whole = essence(folder)
    path, add, added = folder / "records.jsonl", Records.add, []
    monkeypatch.setattr(Records, "add", lambda self, records: (added.append(records), add(self, records)))
    *lines, last = path.read_text().splitlines(keepends=True)
    for kept, methods in (
        ([*lines, last[:40]], ["ours plain", "ours ngram K=5", "transformers plain"]),
        ([*lines[:1], *lines[2:], last], ["ours plain", "ours ngram K=5", "transformers plain"]),
    ):
        path.write_text("".join(kept))
        added.clear()
        bench(*words, baselines="plain")
        assert [[record["method"] for record in records] for records in added] == [methods]
        assert sorted(essence(folder)) == sorted(whole)
        assert "not complete" not in (folder / "table.md").read_text()
    added.clear()
    capsys.readouterr()
    bench(*words, baselines="plain")
    assert added == [] and "complete: nothing is measured again" in capsys.readouterr().err
    path.unlink()
    bench(*words, baselines="plain")
    assert len(added) == 8 and essence(folder) == whole


def test_another_run_is_refused(
    bench: Callable[..., Path], tmp_path: Path, prompts: str, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = bench(baselines="plain")
    before = (folder / "records.jsonl").read_bytes()
    bench("-k", "7", baselines="plain", status=2)
    assert "num_draft_tokens: [5] there, [7] now" in capsys.readouterr().err
    Path(prompts).write_text(Path(prompts).read_text().replace("hello", "hallo"))
    bench(baselines="plain", status=2)
    assert "measured otherwise (prompts: 3 prompts, " in capsys.readouterr().err
    assert (folder / "records.jsonl").read_bytes() == before
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.json").write_text("{}")
    bench("-k", "7", "--restart", "--target", str(tmp_path / "broken"), baselines="plain", status=2)
    assert (folder / "records.jsonl").read_bytes() == before  # which nothing would have replaced
    bench("-k", "7", "--restart", baselines="plain")
    assert {r["num_draft_tokens"] for r in read_records(folder)} == {0, 7, None}

    path = folder / "records.jsonl"
    path.write_text("{}\n" + path.read_text())
    assert main(["--out", str(folder), "--report-only"]) == 2
    assert "records.jsonl:1 is damaged" in capsys.readouterr().err
    (folder / "run.json").write_text("{")
    assert main(["--out", str(folder), "--report-only"]) == 2
    assert "run.json is damaged" in capsys.readouterr().err
    (folder / "run.json").unlink()
    for name in ("records.jsonl", "rounds.png", "table.md"):
        (folder / name).touch()
        bench("-k", "7", baselines="plain", status=2)
        assert f"holds {name} without run.json" in capsys.readouterr().err
        (folder / name).unlink()


def test_a_dtype_and_what_auto_comes_to_are_one_contest(
    bench: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = bench("--dtypes", "float32", "auto", baselines="plain")
    assert len(read_records(folder)) == 4 * 3
    assert len(json.loads((folder / "run.json").read_text())["finished"]) == 2
    assert "not complete" not in (folder / "table.md").read_text() + capsys.readouterr().out


def test_where_a_checkpoint_lies_changes_nothing_but_what_the_shell_has_set_does(
    bench: Callable[..., Path], target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    bench(baselines="plain")
    (tmp_path / "elsewhere").symlink_to(Path(target).parent)
    bench("--target", str(tmp_path / "elsewhere" / Path(target).name), baselines="plain")
    monkeypatch.setenv("ENGINE_HUGE_PAGES", "0")
    bench(baselines="plain", status=2)
    assert re.search(r"variables: \{[^}]*\} there, \{'ENGINE_HUGE_PAGES': '0'", capsys.readouterr().err)


def test_a_second_run_in_the_folder_is_refused(
    bench: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words, add, refused = ("--categories", "edit"), Records.add, []

    def started_twice(self: Records, records: Any) -> None:
        bench(*words, "--restart", baselines="plain", status=2)
        refused.append(capsys.readouterr().err)
        add(self, records)

    monkeypatch.setattr(Records, "add", started_twice)
    folder = bench(*words, baselines="plain")
    assert len(refused) == 2 and all("out must be a folder in which no other run works, got" in err for err in refused)
    assert len(read_records(folder)) == 6
    monkeypatch.setattr(Records, "add", add)
    (folder / "lock").touch()  # which a killed run leaves
    bench(*words, baselines="plain")
    assert "complete: nothing is measured again" in capsys.readouterr().err


def test_without_matplotlib(
    bench: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    available = plots.available
    monkeypatch.setattr(plots, "available", lambda: False)
    folder = bench("--categories", "edit", baselines="plain")
    note = "plots were left out: matplotlib cannot be imported"
    assert note in capsys.readouterr().out and note in (folder / "table.md").read_text()
    assert sorted(path.name for path in folder.iterdir()) == ["records.jsonl", "run.json", "table.md"]
    monkeypatch.setattr(plots, "available", available)
    assert main(["--out", str(folder), "--report-only"]) == 0
    assert (folder / "speedup.png").exists() and note not in (folder / "table.md").read_text()


def test_dollars_in_a_category_are_no_formula(bench: Callable[..., Path], tmp_path: Path) -> None:
    lines = [{"question_id": i, "category": name, "turns": ["abc"]} for i, name in enumerate(("US$ #1 and CA$", "b"))]
    path = tmp_path / "dollars.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    folder = bench("--prompts", str(path), "-d", baselines="plain")
    assert "| US$ #1 and CA$ | ours plain | 1 |" in (folder / "table.md").read_text()
    assert (folder / "speedup.png").exists()


def test_a_reader_of_the_report_that_has_gone(tmp_path: Path) -> None:
    code = (
        "import sys, bench.throughput.report as report; report.write_report = lambda folder: 'table'; "
        "from bench.throughput.__main__ import main; sys.exit(main(sys.argv[1:]))"
    )
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-c", code, "--report-only", "--out", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, stdout=write, stderr=subprocess.PIPE, text=True, check=False)
    os.close(write)
    assert (done.returncode, done.stderr) == (1, "")


def test_a_method_that_fails_is_a_result(
    bench: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    generate, prepare = Transformers.generate, Ours.prepare

    def fails_once(self: Any, prompts: Any, seeds: Any, max_new_tokens: int) -> Call:
        if len(prompts[0]) == min(lengths) and self.name == "transformers lookup K=5":
            raise RuntimeError("out of luck")
        return generate(self, prompts, seeds, max_new_tokens)

    def cannot(self: Ours, models: Any, contest: Contest) -> None:
        if self.num_draft_tokens == 5:
            raise ValueError("not on Sundays")
        prepare(self, models, contest)

    tokenizer = byte_tokenizer()
    lengths = [len(render(tokenizer, [text], [], "auto")) for text in ("one two one two one", "abcabcabc")]
    monkeypatch.setattr(Transformers, "generate", fails_once)
    monkeypatch.setattr(Ours, "prepare", cannot)
    folder = bench("--categories", "edit")
    errors = [(r["method"], r["line"], r["error"]) for r in read_records(folder) if r["error"] is not None]
    assert errors == [("transformers lookup K=5", 3, "RuntimeError: out of luck")]
    text = (folder / "table.md").read_text()
    assert "| transformers lookup K=5 | 1 (1 failed) |" in text
    assert "- ours ngram K=5: ValueError: not on Sundays" in text
    assert "transformers lookup K=5 failed: RuntimeError: out of luck" in capsys.readouterr().err


def test_what_was_left_out_is_not_where_it_ran_in_the_end(
    bench: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*arguments: Any) -> None:
        raise RuntimeError("out of memory")

    def interrupted(self: Records, records: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(TransformersAssisted, "prepare", fails)
        patch.setattr(Records, "add", interrupted)
        folder = bench("--categories", "edit", status=130)
    assert [entry["method"] for entry in json.loads((folder / "run.json").read_text())["skipped"]] == [LOOKUP]
    bench("--categories", "edit")
    assert json.loads((folder / "run.json").read_text())["skipped"] == []
    assert "Left out" not in (folder / "table.md").read_text()
    assert sum(record["method"] == LOOKUP for record in read_records(folder)) == 2


def test_a_second_turn_whose_first_one_failed(bench: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """It goes without the answer."""
    generate = Ours.generate

    def fails_at_first(self: Ours, prompts: Any, seeds: Any, max_new_tokens: int) -> Call:
        if prompts == [first] and max_new_tokens == 24:  # else it is warmed up
            raise RuntimeError("out of luck")
        return generate(self, prompts, seeds, max_new_tokens)

    tokenizer = byte_tokenizer()
    first = render(tokenizer, ["hello"], [], "auto")
    monkeypatch.setattr(Ours, "generate", fails_at_first)
    records = read_records(bench("--categories", "talk", baselines="plain", tokens="24"))
    assert [r["error"] is None for r in records if r["method"] == "ours plain"] == [False, True]
    length = len(render(tokenizer, ["hello", "and then?"], [""], "auto"))
    assert {r["prompt_tokens"] for r in records if r["turn"] == 1} == {length}


def test_batches_and_sampling(bench: Callable[..., Path], draft: str, capsys: pytest.CaptureFixture[str]) -> None:
    folder = bench(
        *(
            "-b",
            "1",
            "2",
            "-T",
            "0.9",
            "-d",
            draft,
            "synthetic:0.8",
            "--verification",
            "rejection",
            "coupled",
            "-k",
            "3",
        ),
        *("--repeats", "2", "--max-turns", "1", "--ignore-eos"),
    )
    records = read_records(folder)
    assert {r["new_tokens"] for r in records} == {6}
    pairs = [r for r in records if r["contest"]["batch_size"] == 2]
    assert {r["call_tokens"] for r in pairs} == {6, 12}  # three prompts: a pair and a single one
    assert {r["group_category"] for r in pairs} == {"edit", "talk"}
    assert {r["repeat"] for r in records} == {0, 1}
    coupled = [r for r in records if "K=3 coupled" in r["method"]]
    assert {r["method"] for r in coupled} == {
        "ours small K=3 coupled",
        "ours synthetic 0.8 K=3 coupled (not a real drafter)",
    }
    # The seed gives the text: of the drafter it is independent, of the repeat not.
    assert all(r["differences"] == {"ours plain": None} for r in coupled)
    assert all(r["differences"] == {} for r in records if r not in coupled)
    texts = {(r["line"], r["repeat"]): r["token_ids"] for r in records if r["method"] == "ours plain"}
    assert any(texts[line, 0] != texts[line, 1] for line in (1, 2, 3))
    assert "ours plain coupled" in {r["method"] for r in records}
    assert (folder / "batches.png").stat().st_size > 5000
    shown = capsys.readouterr().out
    assert "left out: transformers lookup K=3: serves one prompt at a time, no batches" in shown
    assert "left out: ours synthetic 0.8 K=3 (not a real drafter): a drafter of given acceptance needs" in shown


def test_coupled_texts_are_held_against_plain_decoding_by_that_rule(bench: Callable[..., Path], tmp_path: Path) -> None:
    """With more than 1,024 tokens, other rules draw plain decoding's tokens in two levels, from other numbers."""
    folder = bench(
        *("--target", save(tmp_path / "large", "llama", vocab_size=3000), "--drafters", "ngram", "synthetic:0.9"),
        *("-k", "3", "-T", "0.9", "--verification", "coupled", "--ignore-eos", "--exact"),
        *("--relative-to", "ours plain"), baselines="", tokens="12",
    )  # fmt: skip
    records = read_records(folder)
    drafting = [r for r in records if r["drafter"]]
    assert len(drafting) == 2 * 4 and all(r["differences"] == {"ours plain": None} for r in drafting)
    texts = {
        method: [r["token_ids"] for r in records if r["method"] == method]
        for method in ("ours plain", "ours plain coupled")
    }
    assert texts["ours plain"] != texts["ours plain coupled"]
    synthetic = [r for r in drafting if r["synthetic"]]
    assert sum(r["accepted_tokens"] for r in synthetic) > 0.5 * sum(r["draft_tokens"] for r in synthetic)


def test_a_group_that_lost_some_of_its_records_is_measured_again(bench: Callable[..., Path]) -> None:
    """As a kill leaves it while they are written."""
    words = ("-b", "3", "-k", "2", "--relative-to", "ours plain", "--max-turns", "1")
    folder = bench(*words, baselines="")
    records = folder / "records.jsonl"
    whole = read_records(folder)
    records.write_text("".join(records.read_text().splitlines(keepends=True)[:-1]))
    assert "This run is not complete" in write_report(folder)
    (folder / "run.json").write_text((folder / "run.json").read_text().replace('"complete": true', '"complete": false'))
    assert bench(*words, baselines="") == folder and len(read_records(folder)) == len(whole)
    assert "This run is not complete" not in write_report(folder)
