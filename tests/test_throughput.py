"""bench/throughput: prompts, options, records, figures, and whole runs on tiny random models."""

import json
import math
import re
import shlex
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.generation.candidate_generator import PromptLookupCandidateGenerator

sys.path.append(str(Path(__file__).resolve().parent.parent))  # bench/ is not installed

import throughput_fakes
from head_checkpoints import medusa_shapes, random_tensors, write
from tiny_models import greedy, perturbed, random_prompts, tiny
from tiny_tokenizer import EOS, VOCAB, byte_tokenizer

import engine
from bench import timing
from bench.throughput import command_line, match, plots, run
from bench.throughput.__main__ import main
from bench.throughput.bed import load_bed
from bench.throughput.command_line import command, parse
from bench.throughput.compare import Comparer, log_prob_gap
from bench.throughput.hf import Transformers, TransformersAssisted
from bench.throughput.methods import Call, Contest, Method, Row, up_to_end
from bench.throughput.options import Options
from bench.throughput.others import Economize, FlashSpec
from bench.throughput.ours import Ours, SampledStagedDrafts
from bench.throughput.presets import PRESETS
from bench.throughput.prompts import OWN_PROMPTS, Prompt, cut, groups, read_prompts, render, select
from bench.throughput.records import Records, read_records
from bench.throughput.summary import summarize
from bench.throughput.synthetic import SyntheticDrafter
from bench.throughput.theory import expected_acceptance, expected_speedup, expected_tokens, fitted_acceptance

CONTEXT = 192
ONE = Contest("float32", 1, 0.0, 8)


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiny models lose more by handing work over than a second core gives."""
    monkeypatch.setattr(timing, "use_all_cores", lambda: 1)


DRAWN = ("test_a_run", "test_without_matplotlib", "test_batches_and_sampling")


@pytest.fixture(autouse=True)
def few_plots(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawing takes longer than all else."""
    if request.node.name not in DRAWN:
        monkeypatch.setattr(plots, "available", lambda: False)


def save(folder: Path, architecture: str, noise: float = 0.0, tokenizer: Any = None, **changes: Any) -> str:
    """A tiny checkpoint with a tokenizer, like those of one seed and architecture, but for some noise."""
    size = {"gpt2": "n_positions"}.get(architecture, "max_position_embeddings")
    model = tiny(architecture, dtype=torch.float32, vocab_size=VOCAB, eos_token_id=EOS, **{size: CONTEXT}, **changes)
    (perturbed(model, noise) if noise else model).save_pretrained(folder)
    (tokenizer or byte_tokenizer()).save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save(tmp_path_factory.mktemp("models") / "big", "llama")


@pytest.fixture(scope="module")
def draft(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save(tmp_path_factory.mktemp("models") / "small", "llama", noise=0.02)


def medusa(folder: Path) -> str:
    """A checkpoint of Medusa heads for such models."""
    tensors = random_tensors(medusa_shapes(vocab=VOCAB))
    return str(write(folder / "head", {"medusa_num_heads": 3}, tensors, "model.safetensors"))


@pytest.fixture
def prompts(tmp_path: Path) -> str:
    """Three prompts of two categories; the second one has two turns."""
    lines = [
        {"question_id": 7, "category": "edit", "turns": ["one two one two one"], "reference": ["ignored"]},
        {"question_id": "b", "category": "talk", "turns": ["hello", "and then?"]},
        {"question_id": 9, "category": "edit", "turns": ["abcabcabc"]},
    ]
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines) + "\n")
    return str(path)


@pytest.fixture
def bench(tmp_path: Path, target: str, prompts: str) -> Callable[..., Path]:
    """Run the command line with few tokens; returns the folder."""

    def call(
        *arguments: str, out: str = "out", status: int = 0, baselines: str = "plain lookup", tokens: str = "6"
    ) -> Path:
        folder = tmp_path / out
        words = ["--out", str(folder), "--target", target, "--prompts", prompts, "-n", tokens, "--dtypes", "float32"]
        assert main([*words, "--baselines", *baselines.split(), *arguments]) == status
        return folder

    return call


def essence(folder: Path) -> list[tuple[Any, ...]]:
    """What of a run's records does not depend on time."""
    names = ("method", "line", "turn", "repeat", "token_ids", "rounds", "accepted_tokens", "differences", "contest")
    return [tuple(json.dumps(record.get(name)) for name in names) for record in read_records(folder)]


# Prompts.


def test_our_own_prompts() -> None:
    own = read_prompts(OWN_PROMPTS)
    assert len({prompt.question_id for prompt in own}) == len(own) >= 24
    assert len({prompt.category for prompt in own}) >= 6 and any(len(prompt.turns) > 1 for prompt in own)


@pytest.mark.parametrize(
    "line, complaint",
    [
        ('{"question_id": 1, "category": "a", "turns"', "must be a JSON object, but: "),
        ("[1]", "must be a JSON object, got list"),
        ("[" * 100_000 + "]" * 100_000, "must be a JSON object, but: "),
        ('{"category": "a", "turns": ["b"]}', 'must have a "question_id" that is a number or a string, got None'),
        ('{"question_id": 1, "category": "", "turns": ["b"]}', """must have a "category" that is a string, got ''"""),
        ('{"question_id": 1, "category": "a", "turns": []}', r'must have "turns", a list of strings, got \[\]'),
        ('{"question_id": 1, "category": "a", "turns": [""]}', r"""must have "turns", a list of strings, got \[''\]"""),
    ],
)
def test_bad_lines_are_named(tmp_path: Path, line: str, complaint: str) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"question_id": 1, "category": "a", "turns": ["b"]}\n\n' + line + "\n")
    with pytest.raises(ValueError, match=f"prompts.jsonl:3 {complaint}"):
        read_prompts(path)


def test_only_line_feeds_end_lines(tmp_path: Path) -> None:
    path, line = tmp_path / "prompts.jsonl", '{"question_id": 1, "category": "a", "turns": ["b\u2028c\x85"]}'
    path.write_bytes(f"\ufeff{line}\r\n{line}".encode())
    assert [prompt.turns for prompt in read_prompts(path)] == [("b\u2028c\x85",)] * 2
    path.write_bytes(b"\xff")
    with pytest.raises(ValueError, match=r"prompts\.jsonl must be UTF-8 text"):
        read_prompts(path)


def test_empty_and_missing_files(tmp_path: Path) -> None:
    (tmp_path / "empty").write_text("\n")
    with pytest.raises(ValueError, match="prompts must hold at least one prompt"):
        read_prompts(tmp_path / "empty")
    with pytest.raises(FileNotFoundError, match="prompts must be an existing file"):
        read_prompts(tmp_path / "missing")


def test_selection_and_groups() -> None:
    made = [Prompt(i, i, "ab"[i % 2], ("first", "second")[: 1 + (i == 3)]) for i in range(5)]
    chosen = select(made)
    assert [prompt.index for prompt in chosen] == [0, 2, 4, 1, 3]  # categories keep together
    batches = groups(chosen, 2)
    assert [[prompt.index for prompt in batch.prompts] for batch in batches] == [[0, 2], [4, 1], [3], [3]]
    assert [(batch.category, batch.turn) for batch in batches] == [("a", 0), ("mixed", 0), ("b", 0), ("b", 1)]
    assert [prompt.index for prompt in select(made, ["b"], per_category=1)] == [1]
    assert len(groups(select(made, max_turns=1), 8)) == 1
    with pytest.raises(ValueError, match="categories must be of a, b, got 'c'"):
        select(made, ["c"])


def test_rendering() -> None:
    tokenizer = byte_tokenizer()

    def text(*arguments: Any) -> str:
        return str(tokenizer.decode(render(tokenizer, *arguments)))

    assert text(["hi", "more"], ["yes"], "auto") == "user: hi\nassistant: yes\nuser: more\nassistant:"
    assert text(["hi", "more"], [" yes"], "raw") == "hi yes\n\nmore"
    tokenizer.chat_template = None
    assert text(["hi"], [], "auto") == "hi"
    with pytest.raises(ValueError, match="template must be raw or auto"):
        render(tokenizer, ["hi"], [], "chat")


def test_cut_takes_the_middle() -> None:
    assert cut([1, 2, 3, 4, 5, 6, 7], 4) == [1, 2, 6, 7] and cut([1, 2, 3, 4, 5, 6, 7], 5) == [1, 2, 3, 6, 7]
    assert cut([1, 2, 3], 3) == [1, 2, 3]


# Options.


@pytest.mark.parametrize(
    "arguments, complaint",
    [
        (["-k", "-1"], 'num_draft_tokens must be >= 0 or "auto", got -1'),
        (["-b", "0"], "batch_sizes must be >= 1, got 0"),
        (["-n", "4", "0"], "max_new_tokens must be >= 1, got 0"),
        (["-T", "-0.5"], "temperatures must be finite numbers >= 0, got -0.5"),
        (["-T", "nan"], "temperatures must be finite numbers >= 0, got nan"),
        (["--repeats", "0"], "repeats must be >= 1, got 0"),
        (["--seed", "-1"], "seed must be in [0, 2**32), got -1"),
        (["--max-prompt-tokens", "1"], "max_prompt_tokens must be >= 2, got 1"),
        (["--verification", "typical"], "verification must be of rejection, block, coupled, got 'typical'"),
        (["--baselines", "vllm"], "baselines must be of plain, lookup"),
        (["--drafts", "hot"], "drafts must be of own, greedy, sampled, got 'hot'"),
        (["--template", "alpaca"], "template must be one of auto, chat, raw, got 'alpaca'"),
        (["-d", "synthetic:1.5"], "acceptance A in [0, 1], got '1.5'"),
        (["-d", "./no/such/model"], "drafter must be an existing path or a hub id, got './no/such/model'"),
        (["-d", "ngram+staged:./no/model"], "drafter must be an existing path or a hub id, got './no/model'"),
        (["-d", "ngram+layer_skip:3-1"], "drafter layer_skip:... must have a number of layers >= 1"),
        (["--target", "/no/such/model"], "target must be an existing path or a hub id"),
        (["--dtypes", "int8"], "dtypes must be 'auto' or floating torch dtypes such as 'bfloat16', got 'int8'"),
        (["--device", "toaster"], "device must be 'auto', 'cpu' or a GPU that is there, got 'toaster'"),
        (["-d", "a/same", "b/same"], "drafters must have different names"),
        (["-k", "2", "2"], "num_draft_tokens must not name anything twice"),
        (["--load-option", "dtype=float32"], "load-option must not be dtype"),
        (["--load-option", "no_such=1"], "load-option must be an argument of engine.load"),
        (["--load-option", "max_length"], "must be name=value"),
        (["--preset", "gpt5"], "invalid choice: 'gpt5'"),
    ],
)  # fmt: skip
def test_bad_options(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    complaint: str,
) -> None:
    monkeypatch.setattr(run, "load_bed", lambda *_: pytest.fail("a model was loaded"))
    with pytest.raises(SystemExit, match="2"):
        main(["--out", str(tmp_path / "out"), *arguments])
    assert complaint in " ".join(capsys.readouterr().err.split()) and not (tmp_path / "out").exists()


def test_bad_options_that_are_found_in_files(
    bench: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(run, "load_bed", lambda *_: pytest.fail("a model was loaded"))
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
        (["--out", str(tmp_path / "file")], "out must be a folder that can be written"),
        (["--report-only", "--out", str(tmp_path / "none")], "out must hold a run for --report-only"),
    ):
        bench(*arguments, status=2)
        assert complaint in capsys.readouterr().err


def test_options_that_the_model_refuses(bench: Callable[..., Path], capsys: pytest.CaptureFixture[str]) -> None:
    bench(tokens="500", status=2)
    assert f"max_new_tokens must be <= {CONTEXT - 2} for this target's context, got 500" in capsys.readouterr().err


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
    assert row.acceptance_per_position == [2 / 3, 1 / 2, 0]
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
            assert len(record["acceptance_per_position"]) <= (k or 0)
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


def test_cascades_are_no_models_for_others(bench: Callable[..., Path], draft: str) -> None:
    drafters = ("suffix", f"ngram+{draft}", "layer_skip:1-1", f"staged:{draft}", f"ngram+staged:{draft}")
    folder = bench("-d", *drafters, "-k", "2", baselines="plain assistant")
    records = read_records(folder)
    methods = list(dict.fromkeys(record["method"] for record in records))
    names = ("suffix", "ngram+small", "layer_skip:1-1", "staged:small", "ngram+staged:small")
    ours = [f"ours {name} K=2" for name in names]
    assert methods == ["ours plain", *ours, "transformers plain"]
    texts = [[r["token_ids"] for r in records if r["method"] == name] for name in methods]
    assert all(text == texts[0] for text in texts)
    for name in ("ngram+small", "staged:small", "ngram+staged:small"):
        assert sum(r["accepted_tokens"] for r in records if r["method"] == f"ours {name} K=2") > 0


def test_a_staged_model_is_loaded_once(target: str, draft: str, tmp_path: Path) -> None:
    """For all methods, staged or not; a folder goes by its name, and where it lies is looked at for changes."""
    elsewhere = Options(tmp_path, target=target, drafters=("staged:owner/name", f"ngram+staged:{draft}"))
    assert elsewhere.draft_checkpoints == ("owner/name", draft)
    assert elsewhere.as_dict()["drafters"] == ["staged:owner/name", "ngram+staged:small"]
    options = Options(tmp_path, target=target, drafters=(draft, f"staged:{draft}"), dtypes=("float32",))
    assert options.draft_models == (draft,)
    for each in (elsewhere, options):
        assert set(run.describe(each, [])["models"]) == {"target", "drafter small"}
    bed = load_bed(options, "float32")
    assert list(bed.ours) == ["", draft]
    for drafts, kind in (("own", engine.StagedDraftModel), ("sampled", SampledStagedDrafts)):
        ours = Ours(f"staged:{draft}", 2, drafts=drafts)
        ours.prepare(bed, ONE)
        assert type(ours._drafter) is kind and ours._drafter.model is bed.ours[draft][0]


def test_draft_models_of_other_vocabularies(bench: Callable[..., Path], tmp_path: Path) -> None:
    """Their tokens are looked up or read anew, as `engine.load` would have it."""
    everywhere = {chr(letter): f"<{letter}>" for letter in range(ord("!"), ord("~"))}
    few = save(tmp_path / "few", "llama", tokenizer=byte_tokenizer({"a": "<a>", "b": "<b>"}))
    all_ = save(tmp_path / "all", "llama", tokenizer=byte_tokenizer(everywhere))
    records = read_records(bench("-d", few, all_, "-k", "2", baselines="plain"))
    methods = list(dict.fromkeys(record["method"] for record in records))
    assert methods == ["ours plain", "ours few K=2", "ours all K=2", "transformers plain"]
    texts = [[r["token_ids"] for r in records if r["method"] == name] for name in methods]
    assert all(text == texts[0] for text in texts)
    assert sum(r["accepted_tokens"] for r in records if r["method"] == methods[1]) > 0


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

    monkeypatch.setattr(run, "load_bed", lambda *_: pytest.fail("a model was loaded"))
    bench(*arguments, baselines="plain")
    assert "complete: nothing is measured again" in capsys.readouterr().err
    assert len(read_records(folder)) == 24


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
    bench("-k", "7", baselines="plain", status=2)
    assert "holds records.jsonl without run.json" in capsys.readouterr().err


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


def test_a_method_that_fails_is_a_result(
    bench: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    generate, prepare = Transformers.generate, Ours.prepare

    def fails_once(self: Any, prompts: Any, seeds: Any, max_new_tokens: int) -> Call:
        if len(prompts[0]) == min(lengths) and self.name == "transformers lookup K=5":
            raise RuntimeError("out of luck")
        return generate(self, prompts, seeds, max_new_tokens)

    def cannot(self: Ours, bed: Any, contest: Contest) -> None:
        if self.num_draft_tokens == 5:
            raise ValueError("not on Sundays")
        prepare(self, bed, contest)

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
    coupled = [r for r in records if "coupled" in r["method"]]
    assert {r["method"] for r in coupled} == {
        "ours small K=3 coupled",
        "ours synthetic 0.8 K=3 coupled (not a real drafter)",
    }
    # The seed gives the text: of the drafter it is independent, of the repeat not.
    assert all(r["differences"] == {"ours plain": None} for r in coupled)
    assert all(r["differences"] == {} for r in records if r not in coupled)
    texts = {(r["line"], r["repeat"]): r["token_ids"] for r in records if r["method"] == "ours plain"}
    assert any(texts[line, 0] != texts[line, 1] for line in (1, 2, 3))
    assert (folder / "batches.png").stat().st_size > 5000
    shown = capsys.readouterr().out
    assert "left out: transformers lookup K=3: serves one prompt at a time, no batches" in shown
    assert "left out: ours synthetic 0.8 K=3 (not a real drafter): a drafter of given acceptance needs" in shown


def test_ways_to_draft(bench: Callable[..., Path], draft: str) -> None:
    folder = bench(
        "-T",
        "0",
        "1",
        "-d",
        draft,
        "--drafts",
        "greedy",
        "sampled",
        "-k",
        "3",
        "--categories",
        "edit",
        baselines="plain",
        tokens="16",
    )
    found = summarize(read_records(folder), "transformers plain")
    cold, warm = ({s.method: s for s in summaries} for summaries in found.values())
    assert list(cold) == ["ours plain", "ours small K=3", "ours small K=3, sampled drafts", "transformers plain"]
    assert list(warm) == ["ours plain", "ours small K=3, greedy drafts", "ours small K=3", "transformers plain"]
    for summary in list(cold.values())[1:]:
        assert set(summary.compared_with("ours plain")) == {None}
    greedily, sampled = cold["ours small K=3"].acceptance, cold["ours small K=3, sampled drafts"].acceptance
    assert greedily is not None and sampled is not None and greedily > sampled > 0


def test_ways_to_draft_of_others(bench: Callable[..., Path], draft: str, tmp_path: Path) -> None:
    """Staged drafts can be sampled for a greedy target too; lookups have one way."""
    head = medusa(tmp_path)
    drafters = ("ngram", "layer_skip:1-1", head, f"staged:{draft}", f"ngram+staged:{draft}")
    words = ("-d", *drafters, "--drafts", "greedy", "sampled", "-T", "0", "1", "-k", "2", "--categories", "edit")
    found = summarize(read_records(bench(*words, baselines="plain", tokens="12")), "transformers plain")
    cold, warm = (
        [s.method.removeprefix("ours ").replace(" K=2", "") for s in summaries] for summaries in found.values()
    )
    staged, first, last = "staged:small", ["plain", "ngram"], ["transformers plain"]
    assert cold == [*first, "layer_skip:1-1", "head", staged, f"{staged}, sampled drafts", f"ngram+{staged}", *last]
    ours = ("layer_skip:1-1", "head", staged, f"ngram+{staged}")
    assert warm == [*first, *(way for name in ours for way in (f"{name}, greedy drafts", name)), *last]
    for summary in next(iter(found.values()))[1:]:
        assert set(summary.compared_with("ours plain")) == {None}


def test_greedy_drafts_are_asked_of_every_stage(target: str, draft: str, tmp_path: Path) -> None:
    head = medusa(tmp_path)
    drafters = (draft, f"staged:{draft}", f"suffix+staged:{draft}", "layer_skip:1", head, f"ngram+{head}")
    bed = load_bed(Options(tmp_path, target=target, drafters=drafters, dtypes=("float32",)), "float32")
    for drafter in drafters:
        for drafts in ("own", "greedy"):
            ours = Ours(drafter, 2, drafts=drafts)
            ours.prepare(bed, Contest("float32", 1, 0.8, 8))
            made = ours._llm.drafter
            stage = getattr(made, "stages", (made,))[-1]
            assert stage.greedy is (drafts == "greedy"), drafter


def test_auto_is_for_the_engine_to_choose(bench: Callable[..., Path]) -> None:
    """Others need a number, and are not asked."""
    folder = bench("-k", "auto", "--categories", "edit", "--load-option", "max_length=100", baselines="plain lookup")
    records = read_records(folder)
    assert {r["method"] for r in records} == {"ours plain", "ours ngram K=auto", "transformers plain"}
    assert {r["error"] for r in records} == {None}


def test_a_static_cache_gives_the_same_text(target: str, tmp_path: Path) -> None:
    """Not compiled here: that is for a GPU."""
    bed = load_bed(Options(out=tmp_path, target=target, dtypes=("float32",)), "float32")
    texts = []
    for method in (Transformers(), Transformers(compiled=True)):
        method.prepare(bed, ONE)
        call = method.generate([[5, 6, 7, 5, 6]], [0], 8)
        assert call.prefill_tokens == 1 and call.prefill_seconds is not None and call.prefill_seconds > 0
        texts.append(call.rows[0].token_ids)
        method.close()
    assert texts[0] == texts[1]


def test_prompt_lookup_is_counted_call_by_call(target: str, tmp_path: Path) -> None:
    """Beside what transformers' own candidate generator says that it proposed."""
    bed = load_bed(Options(out=tmp_path, target=target, dtypes=("float32",)), "float32")
    proposed: list[int] = []
    get_candidates = PromptLookupCandidateGenerator.get_candidates

    def noted(self: Any, input_ids: torch.Tensor, **more: Any) -> Any:
        candidates, logits = get_candidates(self, input_ids, **more)
        proposed.append(candidates.shape[1] - input_ids.shape[1])
        return candidates, logits

    method = TransformersAssisted(3)
    method.prepare(bed, ONE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PromptLookupCandidateGenerator, "get_candidates", noted)
        row = method.generate([[97, 98, 99, 97, 98, 99, 97, 98]], [0], 30).rows[0]
    assert row.rounds == len(proposed) and row.draft_tokens == sum(proposed) > proposed[0] > 0
    plain = Transformers()
    plain.prepare(bed, ONE)
    assert row.token_ids == plain.generate([[97, 98, 99, 97, 98, 99, 97, 98]], [0], 30).rows[0].token_ids


# Other engines.


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name, module in throughput_fakes.modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    yield


def test_missing_engines_say_why(monkeypatch: pytest.MonkeyPatch) -> None:
    for method in (FlashSpec(4), Economize(4)):
        monkeypatch.setattr(type(method), "module", "no_such_engine")
        assert method.unavailable(ONE, "cpu") == (
            "cannot import no_such_engine: ModuleNotFoundError: No module named 'no_such_engine'"
        )


def test_adapters_against_stand_ins(fakes: None, bench: Callable[..., Path], draft: str) -> None:
    """What they hand over has the shapes and meaning that the two engines document."""
    folder = bench(
        "-d", "ngram", draft, "-k", "3", "-T", "0", "0.5", "--categories", "edit", baselines="plain flashspec economize"
    )
    records = read_records(folder)
    names = {r["method"] for r in records if not r["method"].startswith(("ours", "transformers"))}
    expected = {f"{library} {drafter} K=3" for library in ("flashspec", "economize") for drafter in ("lookup", "small")}
    assert names == expected | {"flashspec small default"}
    for record in records:
        if record["method"] in names:
            assert record["error"] is None and record["prefill_seconds"] > 0
            assert record["rounds"] >= 2 and record["draft_tokens"] > 0
            if record["contest"]["temperature"] == 0:
                assert record["differences"] == {"ours plain": None, "transformers plain": None}


# Presets.

# What stands in for a family; of OPT-350M also what sets it apart: norms behind, and embeddings narrower than the rest.
FAMILIES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "gpt2": ("gpt2", {}, {}),
    "opt": ("opt", dict(do_layer_norm_before=False, word_embed_proj_dim=16), {}),
    "pythia": ("gpt_neox", dict(use_parallel_residual=True), dict(use_parallel_residual=True)),
    "llama": ("llama", dict(tie_word_embeddings=True), dict(tie_word_embeddings=True)),
}


@pytest.mark.parametrize(
    "name",
    # The two that are left out differ from another one of their family in the names and numbers alone.
    [pytest.param(name, marks=pytest.mark.slow if name.startswith("pythia-2.8b") else ()) for name in PRESETS],
)
def test_presets_on_stand_ins(name: str, tmp_path: Path) -> None:
    preset = PRESETS[name]
    family = next(key for key in FAMILIES if name.startswith(key))
    architecture, big, small = FAMILIES[family]
    target = save(tmp_path / "big", architecture, **big)
    count = len(preset.options["drafters"])
    drafters = [save(tmp_path / f"small{i}", architecture, **small, num_hidden_layers=1) for i in range(count)]
    out = tmp_path / "out"
    words = ["--preset", name, "--out", str(out), "--target", target, "--drafters", *drafters, "-n", "5"]
    assert main([*words, "--dtypes", "float32"]) == 0
    about = json.loads((out / "run.json").read_text())
    options = about["options"]
    assert about["complete"] and about["skipped"] == []
    assert options["max_new_tokens"] == [5] and options["num_draft_tokens"] == list(preset.options["num_draft_tokens"])
    records = read_records(out)
    ks = preset.options["num_draft_tokens"]
    for drafter in range(count):
        for k in ks:
            for method in (f"ours small{drafter} K={k}", f"ours small{drafter} K={k}, sampled drafts"):
                mine = [r for r in records if r["method"] == method]
                assert [r["category"] for r in mine] == [
                    "The future of AI",
                    "Robot learning emotions",
                    "Happy Birthday lyrics",
                ]
                assert all(r["new_tokens"] == 5 and set(r["differences"].values()) == {None} for r in mine)
    assert len(records) == 3 * (1 + 2 * count * len(ks) + 2 + count * len(ks))


def test_presets_name_what_they_are() -> None:
    assert PRESETS["gpt2"].options["max_new_tokens"] == (50, 100, 200, 500)
    assert PRESETS["gpt2"].options["num_draft_tokens"] == (1, 2, 4, 8)
    for preset in PRESETS.values():
        options = Options(out=Path("/nowhere"), **preset.options)
        assert [p.turns[0] for p in read_prompts(options.prompts)] == [
            "The future of AI",
            "Robot learning emotions",
            "Happy Birthday lyrics",
        ]
        assert "no-cache" in options.baselines and options.drafts == ("greedy", "sampled")


def test_methods_go_in_turn(bench: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Another one goes first for each prompt; synthetic drafters come last, since they need plain's text."""
    order: list[str] = []
    timed = match.timed

    def noted(call: Any, device: Any) -> Any:
        order.append(call.func.__self__.name)
        return timed(call, device)

    monkeypatch.setattr(match, "timed", noted)
    bench("-d", "ngram", "synthetic:0.5", "-k", "2", "--max-turns", "1", baselines="plain")
    names = ["ours plain", "ours ngram K=2", "ours synthetic 0.5 K=2 (not a real drafter)", "transformers plain"]
    a, b, s, t = names
    assert order == [a, b, t, s, b, t, a, s, t, a, b, s]


def test_every_method_is_one() -> None:
    for method in (Ours(None), Ours("ngram", 3), Transformers(), FlashSpec(None, "x/y"), Economize(2)):
        assert isinstance(method, Method) and method.name
