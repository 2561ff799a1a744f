"""The benchmarks' own parts, and the CPU backend against transformers (`-m slow`)."""

import json
import re
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

sys.path.append(str(Path(__file__).resolve().parent.parent))  # bench/ is not installed

from stand_ins import fake_flashinfer, fake_vllm_fused, fake_vllm_v1, module

from bench import end_to_end, gpu_report, timing
from bench.cases import Case, all_cases, check_emitted, check_ours, make_inputs, our_call
from bench.conftest import quantile_lines
from bench.goals import GOALS, Results
from bench.measure import Contest, Record, contest, ratio_to
from bench.peers import PEERS, FlashInfer, Peer, Textbook, Transformers, VllmFused, VllmV1
from bench.report import table
from bench.timing import Contender, Timing, interleave
from engine.kernels.ops import METHODS

SMALL = Case(batch=3, num_drafts=4, vocab_size=1000)


@pytest.fixture
def all_cores() -> int:
    return timing.use_all_cores()


# Timing.


def test_interleave_takes_turns_and_divides_by_calls() -> None:
    order: list[str] = []

    def step(name: str, seconds: float) -> None:
        order.append(name)
        time.sleep(seconds)

    contenders = {
        "a": Contender(partial(step, "a", 0.001)),
        "b": Contender.in_turn([partial(step, "b", 0.002), partial(step, "c", 0.002)], at_least=3),
    }
    result = interleave(contenders, repeats=4, warmup=1)
    bcb = ["b", "c", "b"]
    assert order == ["a", *bcb, "a", *bcb, *bcb, "a", "a", *bcb, *bcb, "a"]
    assert all(0.001 <= each.p20 <= each.median <= each.p80 and each.repeats == 4 for each in result.values())
    assert result["b"].p20 >= 0.002  # per call, not per repetition of three
    assert result["b"].median < 0.006


def test_interleave_stops_in_time_and_refuses_one_repeat() -> None:
    result = interleave({"a": Contender(partial(time.sleep, 0.001))}, repeats=1000, seconds=0.001)
    assert result["a"].repeats == 5
    assert interleave({}, repeats=2) == {}
    with pytest.raises(ValueError, match="repeats must be >= 2, got 1"):
        interleave({}, repeats=1)


def test_quantiles() -> None:
    assert Timing.of([5.0, 1.0, 2.0, 4.0, 3.0, 6.0]) == Timing(3.5, 2.0, 5.0, 6)
    with pytest.raises(ValueError, match="at least 2 samples, got 1"):
        Timing.of([1.0])


def test_copies_are_twice_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "l2_bytes", lambda: 50_000_000)
    assert [timing.copies_for_cold_cache(size) for size in (200_000_000, 99_999_999, 1_519_360, 1)] == [1, 2, 66, 1024]


# Cases.


@pytest.mark.parametrize(
    "change, rows",
    [
        (dict(full_draft=False), 5),
        (dict(method="coupled", full_draft=False), 5),
        (dict(method="block", full_draft=False), 5),
        (dict(method="typical", full_draft=False), 5),
        (dict(), 7),
        (dict(method="block"), 13),
        (dict(temperature=0.0), 5),
        (dict(op="sample"), 1),
        (dict(op="row_stats"), 5),
    ],
)
def test_bytes_of_the_contract(change: dict[str, Any], rows: int) -> None:
    case = Case(batch=64, num_drafts=4, vocab_size=151936)
    assert replace(case, **change).bytes_moved == 64 * rows * 151936 * 2
    assert replace(case, dtype=torch.float32, **change).bytes_moved == 64 * rows * 151936 * 4


@pytest.mark.parametrize("name, case", all_cases(3, 4, 1000).items())
def test_every_case_gives_a_valid_result(name: str, case: Case) -> None:
    inputs = make_inputs(case, "cpu")
    check_ours(case, inputs, our_call(case, inputs)())


def test_every_method_and_filter_has_a_case() -> None:
    cases = all_cases(3, 4, 1000).values()
    ways = {(case.method, case.full_draft) for case in cases if case.op == "verify" and case.temperature > 0}
    with_drafts = {("rejection", True), ("block", True)}
    assert ways == with_drafts | {(method, False) for method in METHODS}
    for name, off in dict(top_k=0, top_p=1.0, min_p=0.0).items():
        filtered = [case for case in cases if getattr(case, name) != off]
        assert {case.op for case in filtered} == {"verify", "sample", "row_stats"}
        assert all(name in make_inputs(case, "cpu") for case in filtered)


def test_quantiles_are_printed() -> None:
    def benchmark(name: str, **extra: float) -> SimpleNamespace:
        return SimpleNamespace(name=name, extra_info=extra, stats=SimpleNamespace(median=2e-3))

    shown = list(quantile_lines([benchmark("one", p20_us=1000.0, p80_us=3000.5), benchmark("without"), None]))
    assert [line.split() for line in shown[1:]] == [
        ["us", "per", "call", "p20", "median", "p80"],
        ["one", "1,000.0", "2,000.0", "3,000.5"],
    ]
    assert list(quantile_lines([])) == []


@pytest.mark.parametrize(
    "emitted, complaint",
    [
        ([[7, 8]], "1 rows for a batch of 2"),
        ([[7, 8], []], "row 1: 0 tokens for 2 drafts"),
        ([[7, 8, 9, 9], [5]], "row 0: 4 tokens for 2 drafts"),
        ([[7, 9, 1], [5]], "row 0: .* for the drafts"),
        ([[7, 8, 10], [5]], "row 0: 10 is outside the vocabulary"),
        ([[7], [-1]], "row 1: -1 is outside the vocabulary"),
    ],
)
def test_invalid_results_are_caught(emitted: list[list[int]], complaint: str) -> None:
    drafts = torch.tensor([[7, 8], [5, 6]])
    check_emitted(drafts, [[7, 8, 9], [0]], vocab_size=10)
    with pytest.raises(AssertionError, match=complaint):
        check_emitted(drafts, emitted, vocab_size=10)


# Peers.


def test_availability_says_why() -> None:
    reasons = {peer.name: peer.available() for peer in PEERS}
    assert reasons["transformers"] is None and reasons["torch"] is None
    if not torch.cuda.is_available():
        assert {reasons[name] for name in ("flashinfer", "vllm v1", "vllm fused")} == {"needs a GPU"}
    missing = Textbook()
    missing.module = "no_such_module.at_all"
    assert (
        missing.available()
        == "cannot import no_such_module.at_all: ModuleNotFoundError: No module named 'no_such_module'"
    )


@pytest.mark.parametrize("peer", [Transformers(), Textbook()], ids=lambda peer: peer.name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_drafts", [1, 4])
def test_peers_give_valid_results(peer: Peer, dtype: torch.dtype, num_drafts: int) -> None:
    case = replace(SMALL, num_drafts=num_drafts, dtype=dtype)
    inputs = make_inputs(case, "cpu")
    check_emitted(inputs["draft_tokens"], peer.emitted(peer.prepare(case, inputs)()), case.vocab_size)


@pytest.mark.parametrize(
    "peer, fakes", [(FlashInfer(), fake_flashinfer), (VllmFused(), fake_vllm_fused), (VllmV1(), fake_vllm_v1)]
)
def test_adapters_against_stand_ins(
    peer: Peer, fakes: Callable[[], dict[str, ModuleType]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What they hand over has the shapes and meaning that the peers document; the peers themselves need a GPU."""
    for name, stand_in in fakes().items():
        for parent in (name.rsplit(".", n)[0] for n in range(name.count("."), 0, -1)):
            monkeypatch.setitem(sys.modules, parent, sys.modules.get(parent, module(__path__=[])))
        monkeypatch.setitem(sys.modules, name, stand_in)
    inputs = make_inputs(SMALL, "cpu")
    before = inputs["target_logits"].clone()
    check_emitted(inputs["draft_tokens"], peer.emitted(peer.prepare(SMALL, inputs)()), SMALL.vocab_size)
    assert torch.equal(inputs["target_logits"], before)


# Contests and goals.


class Broken(Peer):
    name = "broken"
    module = "torch"

    def prepare(self, case: Case, inputs: dict[str, Any]) -> Callable[[], Any]:
        return lambda: -torch.ones(case.batch, case.num_drafts + 1, dtype=torch.int64)


def test_a_contest_keeps_what_fails_and_times_the_rest() -> None:
    unavailable = Textbook()
    unavailable.module = "no_such_module"
    records = contest({"full": SMALL}, [Textbook(), Broken(), unavailable], device="cpu", repeats=3)
    ours, peer, broken, missing = records
    assert ours.error is peer.error is None
    assert ours.median is not None and peer.median is not None and ours.repeats == 3
    assert ours.gb_per_s == pytest.approx(SMALL.bytes_moved / ours.median / 1e3)
    assert "row 0: 0 tokens for 4 drafts" in str(broken.error) and broken.median is None
    assert "cannot import no_such_module" in str(missing.error)
    assert ratio_to("torch", records) == pytest.approx(peer.median / ours.median)
    assert ratio_to("broken", records) is None


def test_a_copy_that_cannot_be_captured_loses_no_contest(monkeypatch: pytest.MonkeyPatch) -> None:
    def capture(calls: Any) -> None:
        raise RuntimeError("out of luck")

    monkeypatch.setattr(timing, "capture", capture)
    monkeypatch.setattr(timing, "device_copies", lambda size, copies: [])
    run = Contest("cuda")
    run._add_copy(SMALL, 3)
    assert not run.copies
    assert [(r.name, r.error) for r in run.failed] == [(f"copy {SMALL.bytes_moved}", "RuntimeError: out of luck")]


def test_goals() -> None:
    def record(name: str, batch: int, median: float, mode: str = "graph", **more: Any) -> Record:
        return Record(name, mode, f"B={batch} K=4 V=151936 bf16", batch, median=median, **more)

    records = [
        record("one-hot", 64, 27.0, gb_per_s=3000.0, copy_gb_per_s=4000.0),
        record("full", 64, 35.0),
        record("full", 64, 70.0, mode="eager"),
        record("block", 64, 70.0),
        record("flashinfer", 64, 350.0, mode="eager"),
        record("full", 1, 9.0),
        record("transformers", 1, 100.0, mode="eager"),
        Record("vllm fused", "eager", "B=64 K=4 V=151936 bf16", 64, error="cannot import vllm"),
    ]
    attention = [dict(shape="B=1 L=8192 W=6", share_of_copy=0.1), dict(shape="B=16 L=8192 W=6", share_of_copy=0.85)]
    host = {
        "ngram": {"host_us": 90.0, "waits_inside_rounds": 0},
        "draft model": {"host_us": 90.0, "waits_inside_rounds": 2},
    }
    end_to_end = {
        "ragged attention": {"cases": attention}, "host time": host,
        "plain decoding": {"8B": {"share_of_copy_bandwidth": 0.7}}, '"auto" against plain': {"lowest_all_runs": 0.99},
    }  # fmt: skip
    results = Results(records, end_to_end)
    met = {goal["name"]: (goal["measured"], goal["met"]) for goal in (g.outcome(results, on_gpu=True) for g in GOALS)}
    assert met["one-hot, B=64"] == (27.0, True)
    assert met["one-hot, B=64, of copy bandwidth"] == (0.75, False)
    assert met["rejection with full q, B=64"] == (35.0, False)
    assert met["block against rejection, B=64"] == (2.0, True)
    assert met["faster than FlashInfer softmax + chain, B=64"] == (10.0, True)
    assert met["faster than transformers, B=1"] == (pytest.approx(100 / 9), False)
    assert met["faster than vLLM's fused sampler, T=0.7, B=64"] == (None, None)
    assert met["ragged attention, B=16 L=8192 W=6, of copy bandwidth"] == (0.85, True)
    assert met["ragged attention, B=16 L=8192 W=6, masked SDPA's time to ours"] == (None, None)  # it failed
    assert met["plain decoding, 8B, B=1, 512 of context, of copy bandwidth"] == (0.7, False)
    assert met["plain decoding, 1B, B=1, to eager `generate`"] == (None, None)
    assert met["waits inside rounds, n-gram"] == (0, True) and met["waits inside rounds, draft model"] == (2, False)
    assert [outcome for name, outcome in met.items() if name.startswith('"auto"')] == [(0.99, True)]
    assert all(goal.outcome(results, on_gpu=False)["met"] is None for goal in GOALS if goal.needs_gpu)


# The report.


def test_table() -> None:
    assert table(["a", "b"], [["1", "x|y"]]) == ["| a | b |", "| --- | --- |", "| 1 | x\\|y |"]


@pytest.fixture
def tiny_report(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan of two contests and an end-to-end case, on CPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(timing, "use_all_cores", lambda: 1)
    monkeypatch.setattr(gpu_report, "CPU_VOCAB_SIZES", (500,))
    monkeypatch.setattr(end_to_end, "CASES", {"case": lambda device: {"tokens_per_s": 3}})


def test_report_on_cpu(tiny_report: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "new" / "folder"
    gpu_report.main(["--out", str(folder), "--quick"])
    report = json.loads((folder / "report.json").read_text())
    assert sorted(path.name for path in folder.iterdir()) == ["report.json", "report.md"]
    assert report["complete"] and report["environment"]["device"] == "cpu" and not report["notes"]
    assert report["environment"]["versions"]["torch"] == torch.__version__
    assert report["end_to_end"] == {"case": {"tokens_per_s": 3}}
    assert report["tests"] == {"outcome": "not run: no GPU"}
    assert len(report["records"]) == 8 and all(r["median"] > 0 and r["error"] is None for r in report["records"])
    assert [g["measured"] is not None for g in report["goals"]] == [g["device"] == "CPU" for g in report["goals"]]
    text = (folder / "report.md").read_text()
    assert "No GPU was found" in text and "not complete" not in text
    assert re.search(r"\| faster than transformers, B=1 \| GPU \| >= 15 x \|  \| not measured \|", text)
    assert re.search(
        r"\| transformers' time to ours, B=1, .* \| CPU \| >= 1 x \| [\d.e-]+ x \| (met|\*\*not met\*\*) \|", text
    )
    assert "against transformers, B=8 K=4 V=500 fp32" in capsys.readouterr().out


def test_the_report_starts_without_what_only_gguf_files_need() -> None:
    """A checkout is carried to GPU machines where nothing can be installed."""
    absent = "import sys; sys.modules.update(gguf=None, platformdirs=None); import bench.gpu_report"
    root = Path(__file__).parents[1]
    done = subprocess.run([sys.executable, "-c", absent], cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_report_survives_failures_and_interruption(
    tiny_report: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(device: str) -> None:
        raise RuntimeError("out of luck")

    def interrupt(device: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(end_to_end, "CASES", {"fails": fail, "interrupted": interrupt})
    with pytest.raises(KeyboardInterrupt):
        gpu_report.main(["--out", str(tmp_path), "--quick"])
    report = json.loads((tmp_path / "report.json").read_text())
    assert not report["complete"] and len(report["records"]) == 8
    assert report["notes"] == ["fails failed: RuntimeError: out of luck"]
    assert "This run is not complete" in (tmp_path / "report.md").read_text()

    monkeypatch.setattr(gpu_report, "SECONDS", -1.0)
    gpu_report.main(["--out", str(tmp_path), "--quick", "--force"])
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["complete"] and not report["records"] and len(report["notes"]) == 6
    assert report["notes"][-1] == "left out for lack of time: interrupted"


def test_tests_come_last_and_only_if_wanted() -> None:
    """They take the longest, and a report is for its figures."""
    with_tests, without = ([title for title, _ in gpu_report.plan("cuda", True, tests)] for tests in (True, False))
    assert with_tests[-1] == "tests on the GPU" and with_tests[:-1] == without
    assert without[-len(end_to_end.CASES) :] == list(end_to_end.CASES)


def test_bad_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(gpu_report, "run", lambda *_, **__: pytest.fail("work was begun"))

    def complaint(*arguments: str) -> str:
        with pytest.raises(SystemExit, match="2"):
            gpu_report.main(list(arguments))
        return capsys.readouterr().err

    assert "--out" in complaint()
    (tmp_path / "report.md").write_text("precious")
    assert "holds report.md already: choose another --out, or add --force" in complaint("--out", str(tmp_path))
    assert f"--out {tmp_path / 'report.md'} cannot be written" in complaint("--out", str(tmp_path / "report.md"))
    assert (tmp_path / "report.md").read_text() == "precious"


def test_outcome_of_gpu_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    def outcome(result: Any) -> dict[str, Any]:
        def done(command: list[str], **_: Any) -> Any:
            assert command[1:5] == ["-m", "pytest", "-m", "gpu"]
            if isinstance(result, Exception):
                raise result
            return result

        monkeypatch.setattr(subprocess, "run", done)
        report: Any = SimpleNamespace(deadline=time.monotonic() + 60)
        gpu_report.gpu_tests(report)
        return report.tests

    process = partial(subprocess.CompletedProcess, ["pytest"], stderr="")
    assert outcome(process(0, stdout="3 passed"))["outcome"].startswith("passed, ")
    failed = outcome(process(1, stdout="1 failed\n2 passed"))
    assert failed["outcome"].startswith("failed (exit status 1)") and failed["tail"] == ["1 failed", "2 passed"]
    late = outcome(subprocess.TimeoutExpired(["pytest"], 60, output=b"....."))
    assert "not finished after" in late["outcome"] and late["tail"] == ["....."]


# The CPU backend.


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab_size", gpu_report.CPU_VOCAB_SIZES)
@pytest.mark.parametrize("batch, goal", [(1, 1.0), (8, 3.0)])
def test_cpu_against_transformers(batch: int, goal: float, vocab_size: int, dtype: torch.dtype, all_cores: int) -> None:
    """No slower at batch 1, and at batch 8 much faster than calling `_speculative_sampling` once per row."""
    case = Case(batch, 4, vocab_size, temperature=1.0, dtype=dtype)
    run = Contest("cpu")
    run.add_ours("full", case)
    run.add_peer(Transformers(), case)
    ratio = ratio_to("transformers", run.run(repeats=25, seconds=5))
    assert ratio is not None and ratio >= goal, f"{ratio:.2f}"
