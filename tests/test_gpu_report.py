"""The GPU report: its steps, in this process or in their own, what becomes of those that fail, and how it goes on."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import report_steps
import torch

from bench import end_to_end, gpu_report, report, steps, timing
from bench.figures import UNFINISHED, Figures
from bench.markdown import table
from bench.measure import Record
from bench.peers import Textbook
from bench.processes import ROOT, Ended, limited, without_paths
from bench.report import Report


def test_table() -> None:
    assert table(["a", "b"], [["1", "x|y"]]) == ["| a | b |", "| --- | --- |", "| 1 | x\\|y |"]


# Parts of a step.


def test_where_the_checkout_lies_is_not_told() -> None:
    assert without_paths(f'File "{ROOT / "bench" / "report.py"}", line 1') == 'File "bench/report.py", line 1'


def test_a_part_that_fails_leaves_its_traceback_and_stops_no_other() -> None:
    saved: list[dict[str, Any]] = []
    figures = Figures({"before": {"us": 1.0}}, save=lambda: saved.append(json.loads(json.dumps(figures))))

    def fails() -> None:
        raise RuntimeError("out of luck")

    figures.measure({"before": fails, "fails": fails, "works": lambda: {"us": 2.0}})
    assert figures["before"] == {"us": 1.0} and figures["works"] == {"us": 2.0}
    assert figures["fails"]["error"] == "RuntimeError: out of luck" and "in fails" in figures["fails"]["traceback"]
    assert str(Path(__file__).parent) not in figures["fails"]["traceback"]
    assert figures.failed == ["fails"]
    assert saved[0]["fails"] == {"error": UNFINISHED} and "works" not in saved[1] and saved[-1] == figures


def test_parts_that_were_begun_before_come_last() -> None:
    order: list[str] = []
    figures = Figures({"a": {"error": UNFINISHED}, "b": 3})
    figures.measure({name: lambda name=name: order.append(name) for name in "abc"})  # type: ignore[misc]
    assert order == ["c", "a"]


def test_a_fault_that_leaves_the_gpu_unusable_ends_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts that come after it would fail for nothing; without a note of their own they come first in the next process."""

    def fault() -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    figures = Figures()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", fault)
    with pytest.raises(RuntimeError, match="left the GPU unusable"):
        figures.measure({"fault": fault, "after": lambda: 1})
    assert figures.failed == ["fault"] and "after" not in figures


# Processes.


def test_a_process_is_ended_at_its_limit_with_all_that_it_started() -> None:
    """And says where it hangs."""
    code = (
        "import subprocess, sys, time; print(subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(100)']).pid,"
        " flush=True); time.sleep(100)"
    )
    begin = time.monotonic()
    ended = limited([sys.executable, "-X", "faulthandler", "-c", code], 1.0)
    assert ended.code is None
    assert "most recent call first" in "\n".join(ended.tail)
    status = Path(f"/proc/{ended.tail[0]}/status")
    while time.monotonic() - begin < 30 and status.exists() and "(zombie)" not in status.read_text():
        time.sleep(0.1)
    assert time.monotonic() - begin < 30


def test_how_a_process_ended() -> None:
    ended = limited([sys.executable, "-c", "import sys; print(*range(100), sep='\\n'); sys.exit('sorry')"], 60)
    assert ended.code == 1 and len(ended.tail) == 60 and set(ended.tail) >= {"sorry", "99"}


def test_what_is_not_done_in_time_can_say_what_it_has_found() -> None:
    """As pytest does, which names the tests that have failed at its end only; also in a report that runs in the background."""
    code = "import time\ntry: time.sleep(100)\nexcept KeyboardInterrupt: print('1 failed')"
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        ended = limited([sys.executable, "-I", "-S", "-c", code], 14.0, interrupt=11.0)
    finally:
        signal.signal(signal.SIGINT, before)
    assert ended.code is None and ended.tail == ["1 failed"]


# Steps in processes of their own.


def test_steps_that_raise_die_or_hang_are_noted_and_the_report_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    program = (sys.executable, "-X", "faulthandler", str(Path(report_steps.__file__)))
    monkeypatch.setattr(gpu_report, "PROGRAM", program)
    planned = report_steps.plan("cpu", False)
    begun = Report(tmp_path, report.environment("cpu"), [step.title for step in planned], False)
    gpu_report.run(begun, planned, seconds=600, apart=True)
    found = json.loads((tmp_path / "report.json").read_text())
    outcomes = {title: step["outcome"] for title, step in found["steps"].items()}
    assert outcomes == {"raises": "failed", "dies": "crashed", "hangs": "cut off", "fine": "done"}
    assert not found["complete"] and "**Not complete" in (tmp_path / "report.md").read_text()
    assert found["steps"]["raises"]["error"] == "RuntimeError: out of luck"
    assert "in raises" in found["steps"]["raises"]["traceback"]
    assert found["steps"]["dies"]["error"] == "exit status -9"
    assert found["steps"]["dies"]["output"][-1] == "these are its last words"
    assert any(line.startswith('  File "') for line in found["steps"]["hangs"]["output"])  # where it hung
    figures = found["end_to_end"]
    assert figures["dies"]["last"] == {"error": UNFINISHED}
    assert os.getpid() != figures["dies"]["first"] != figures["fine"]["pid"] != os.getpid()
    assert "dies crashed: exit status -9" in capsys.readouterr().out

    # The same command goes on: what is done stays, parts included.
    monkeypatch.setattr(report_steps, "mended", True)
    again = gpu_report.run(Report.load(tmp_path), planned, seconds=600, apart=False)
    assert again.complete and again.end_to_end["fine"] == figures["fine"]
    assert again.end_to_end["dies"] == {"first": figures["dies"]["first"], "last": os.getpid()}
    printed = capsys.readouterr().out
    assert re.findall(r"\] (.*)", printed)[1:] == ["raises", "dies", "hangs"]
    assert json.loads((tmp_path / "report.json").read_text())["complete"]


def test_what_was_never_tried_comes_before_what_failed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    order: list[str] = []

    def fails(report: Report) -> list[str]:
        order.append("fails")
        return ["a part"]

    planned = [steps.Step("fails", fails), steps.Step("works", lambda report: order.append("works") or [])]  # type: ignore[func-returns-value]
    first = Report(tmp_path, report.environment("cpu"), ["fails", "works"], False)
    gpu_report.run(first, planned[:1], seconds=60, apart=False)
    assert first.steps["fails"]["error"] == "parts failed: a part"
    gpu_report.run(Report.load(tmp_path), planned, seconds=60, apart=False)
    assert order == ["fails", "works", "fails"]
    gpu_report.run(Report.load(tmp_path), planned, seconds=-1, apart=False)
    assert "left out for lack of time: fails" in capsys.readouterr().out


def test_a_step_gets_no_more_time_than_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limits: list[float] = []

    def apart(step: steps.Step, report: Report) -> Report:
        limits.append(report.seconds)
        report.steps[step.title] = {"outcome": "cut off", "error": "late"}
        return report

    monkeypatch.setattr(gpu_report, "execute_apart", apart)
    planned = [steps.Step("short", lambda report: [], seconds=50), steps.Step("long", lambda report: [], seconds=500)]
    begun = Report(tmp_path, report.environment("cpu"), ["short", "long"], False)
    gpu_report.run(begun, planned, seconds=100, apart=True)
    assert limits[0] == 50 and 90 < limits[1] <= 100
    gpu_report.run(begun, planned, seconds=gpu_report.LEAST_SECONDS - 1, apart=True)
    assert len(limits) == 2


# The report on a CPU.


@pytest.fixture
def tiny_report(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan of four contests and an end-to-end case, on CPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(timing, "use_all_cores", lambda: 1)
    monkeypatch.setattr(steps, "CPU_VOCAB_SIZES", (500,))
    monkeypatch.setattr(end_to_end, "CASES", {"case": lambda device, figures: figures.update(tokens_per_s=3)})


def test_report_on_cpu(tiny_report: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "new" / "folder"
    assert gpu_report.main(["--out", str(folder), "--quick"]) == 0
    found = json.loads((folder / "report.json").read_text())
    assert sorted(path.name for path in folder.iterdir()) == ["report.json", "report.md"]
    assert found["complete"] and found["environment"]["device"] == "cpu"
    assert found["environment"]["versions"]["torch"] == torch.__version__
    assert {step["outcome"] for step in found["steps"].values()} == {"done"} and found["plan"] == list(found["steps"])
    assert found["end_to_end"] == {"case": {"tokens_per_s": 3}}
    assert found["tests"] == {"outcome": "not run: no GPU"}
    assert len(found["records"]) == 8 and all(r["median"] > 0 and r["error"] is None for r in found["records"])
    assert [g["measured"] is not None for g in found["goals"]] == [g["device"] == "CPU" for g in found["goals"]]
    assert len(found["ratios"]) == 4 and all(ratio["eager"] == ratio["best"] > 0 for ratio in found["ratios"])
    text = (folder / "report.md").read_text()
    assert "No GPU was found" in text and "Not complete" not in text and "- **case**: tokens_per_s: 3" in text
    assert re.search(r"\| faster than transformers, B=1 \| GPU \| >= 15 x \|  \| not measured \|", text)
    assert re.search(
        r"\| transformers' time to ours, B=1, .* \| CPU \| >= 1 x \| [\d.e-]+ x \| (met|\*\*not met\*\*) \|", text
    )
    assert "against transformers, B=8 K=4 V=500 fp32" in capsys.readouterr().out


def test_a_report_that_is_read_again_is_the_same(tiny_report: None, tmp_path: Path) -> None:
    gpu_report.main(["--out", str(tmp_path), "--quick"])
    before = [(tmp_path / name).read_text() for name in report.NAMES]
    loaded = Report.load(tmp_path)
    loaded.save()
    assert [(tmp_path / name).read_text() for name in report.NAMES] == before
    assert isinstance(loaded.records[0], Record)
    loaded.add([Record("full", "eager", loaded.records[0].shape, 1, median=1.0)])
    assert len(loaded.records) == 8 and loaded.records[0].median == 1.0


def test_tracebacks_are_in_the_json_alone(tiny_report: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise RuntimeError("out of luck")

    monkeypatch.setattr(
        end_to_end,
        "CASES",
        {"case": lambda device, figures: figures.measure({"part": fail, "other": lambda: {"us": 1.5}})},
    )
    assert gpu_report.main(["--out", str(tmp_path), "--only", "case"]) == 1
    found, text = (tmp_path / "report.json").read_text(), (tmp_path / "report.md").read_text()
    assert "in fail" in json.loads(found)["end_to_end"]["case"]["part"]["traceback"] and "Traceback" not in text
    assert "  - **part**: error: RuntimeError: out of luck\n  - **other**: us: 1.5" in text
    assert "| case | failed |" in text and "parts failed: part" in text


def test_only_some_steps(tiny_report: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu_report.main(["--out", str(tmp_path), "--quick", "--only", "case"]) == 0
    found = json.loads((tmp_path / "report.json").read_text())
    assert list(found["steps"]) == ["case"] and not found["complete"] and len(found["plan"]) == 5
    assert "| against transformers, B=1 K=4 V=500 bf16 | not run |" in (tmp_path / "report.md").read_text()
    gpu_report.main(["--out", str(tmp_path), "--quick"])
    assert json.loads((tmp_path / "report.json").read_text())["complete"]
    capsys.readouterr()
    with pytest.raises(SystemExit, match="2"):
        gpu_report.main(["--out", str(tmp_path), "--only", "caze"])
    assert "there is no step 'caze'; there are:" in (told := capsys.readouterr().err)
    assert "\n  case\n" in told and "\n  against transformers, B=1 K=4 V=500 bf16\n" in told


def test_an_interrupted_report_goes_on(tiny_report: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(device: str, figures: Figures) -> None:
        raise KeyboardInterrupt

    cases = dict(end_to_end.CASES)
    monkeypatch.setattr(end_to_end, "CASES", {"case": interrupt})
    with pytest.raises(KeyboardInterrupt):
        gpu_report.main(["--out", str(tmp_path), "--quick"])
    found = json.loads((tmp_path / "report.json").read_text())
    assert not found["complete"] and len(found["records"]) == 8 and found["steps"]["case"] == {"outcome": "begun"}
    monkeypatch.setattr(end_to_end, "CASES", cases)
    gpu_report.main(["--out", str(tmp_path), "--quick"])
    after = json.loads((tmp_path / "report.json").read_text())
    assert after["complete"] and after["records"] == found["records"]


def test_the_report_starts_without_what_only_gguf_files_need() -> None:
    """A checkout is carried to GPU machines where nothing can be installed."""
    absent = "import sys; sys.modules.update(gguf=None, platformdirs=None); import bench.gpu_report"
    root = Path(__file__).parents[1]
    done = subprocess.run([sys.executable, "-c", absent], cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


# What is refused.


@pytest.fixture
def complaint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., str]:
    monkeypatch.setattr(gpu_report, "run", lambda *_, **__: pytest.fail("work was begun"))

    def told(*arguments: str) -> str:
        capsys.readouterr()
        with pytest.raises(SystemExit, match="2"):
            gpu_report.main(list(arguments))
        return capsys.readouterr().err

    return told


def test_bad_out(tmp_path: Path, complaint: Callable[..., str]) -> None:
    assert "--out" in complaint()
    (tmp_path / "report.md").write_text("precious")
    assert "holds report.md, and" in complaint("--out", str(tmp_path))
    assert f"--out must be a folder that can be written, got {tmp_path / 'report.md'}" in complaint(
        "--out", str(tmp_path / "report.md")
    )
    (tmp_path / "report.json").write_text("[]")
    assert "choose another --out, or begin anew with --force" in complaint("--out", str(tmp_path))
    assert (tmp_path / "report.md").read_text() == "precious"


@pytest.mark.parametrize(
    "change, told",
    [
        (dict(gpu="an H200"), "gpu: an H200 there, None here"),
        (dict(code="other"), "code: other there, "),
        (dict(versions={"torch": "1.0"}), "torch: 1.0 there, "),
    ],
)
def test_a_report_of_something_else_is_not_continued(
    tmp_path: Path, complaint: Callable[..., str], change: dict[str, Any], told: str
) -> None:
    titles = [step.title for step in steps.plan("cpu", False)]
    Report(tmp_path, report.environment("cpu") | change, titles, False).save()
    assert told in complaint("--out", str(tmp_path))
    begun = gpu_report.begin(tmp_path, "cpu", titles, quick=False, force=True)
    assert "gpu" not in begun.environment and Report.load(tmp_path).environment == begun.environment
    assert gpu_report.begin(tmp_path, "cpu", titles, quick=False, force=False).environment == begun.environment
    assert "--quick: False there, True here" in complaint("--out", str(tmp_path), "--quick")


def test_the_same_code_has_the_same_digest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "x.py").write_text("1")
    monkeypatch.setattr(report, "ROOT", tmp_path)
    assert report.code_digest("a") == report.code_digest("b")
    (tmp_path / "b" / "x.py").write_text("2")
    assert report.code_digest("a") != report.code_digest("b")


# What a GPU would run.


def test_tests_come_behind_what_the_kernels_goals_need_and_before_generations() -> None:
    whole, quick = ([step.title for step in steps.plan("cuda", quick)] for quick in (False, True))
    cases = list(end_to_end.CASES)
    assert quick == ["kernels, B = 64", "kernels, B = 1", steps.TESTS, *cases]
    assert whole[: len(quick)] == quick and len(whole) == len(quick) + 4


def test_a_case_that_lost_the_gpu_is_left_out_of_the_next_contest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else it would lose it again before anybody is timed."""
    contests: list[list[str]] = []
    faults = {"full"}

    def contest(ours: dict[str, Any], peers: list[Any], **options: Any) -> list[Record]:
        contests.append([*ours, *(peer.name for peer in peers)])
        shape = options["peers_case"].shape
        if lost := faults & set(contests[-1]):
            return [Record(name, "eager", shape, 64, error="an illegal memory access") for name in lost]
        return [Record(name, "eager", shape, 64, median=1.0) for name in contests[-1]]

    monkeypatch.setattr(steps, "contest", contest)
    monkeypatch.setattr(steps, "gpu_is_lost", lambda: bool(contests[-1:] and faults & set(contests[-1])))
    under_way = Report(tmp_path, report.environment("cpu"), [], False)
    step = steps.gpu_contest("kernels", 64, ["one-hot", "full"], [Textbook()], repeats=3, seconds=1)
    assert step.run(under_way) == ["one-hot", "full"]
    assert step.run(under_way) == ["full"]
    faults.clear()
    assert step.run(under_way) == []
    assert contests == [["one-hot", "full", "torch"], ["one-hot", "torch"], ["full"], ["full"]]

    contests.clear()
    faults |= {"full", "one-hot"}
    another = Report(tmp_path, report.environment("cpu"), [], False)
    another.add([Record("full", "eager", "B=64 K=4 V=151936 bf16", 64, error="an illegal memory access")])
    assert step.run(another) == ["one-hot", "full"]
    assert contests == [["one-hot", "torch"]]  # nothing more, in a process that has lost it


def test_outcome_of_gpu_tests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def outcome(code: int | None, *tail: str) -> tuple[dict[str, Any], list[str]]:
        def done(command: list[str], seconds: float, environment: dict[str, str], interrupt: float) -> Ended:
            assert command[1:5] == ["-m", "pytest", "-m", "gpu"] and "-n" in command and seconds == 60 > interrupt > 10
            assert "TRITON_INTERPRET" not in environment
            return Ended(code, list(tail))

        monkeypatch.setattr(steps, "limited", done)
        under_way = Report(tmp_path, report.environment("cpu"), [], False)
        under_way.seconds = 60
        failed = list(steps.gpu_tests(under_way))
        return under_way.tests, failed

    passed, failed = outcome(0, "3 passed")
    assert passed["outcome"].startswith("passed, ") and not failed
    tests, failed = outcome(1, "1 failed", "2 passed")
    assert tests["outcome"].startswith("failed (exit status 1)") and tests["tail"] == ["1 failed", "2 passed"]
    assert not failed  # they were run
    tests, failed = outcome(None, ".....")
    assert tests["outcome"].startswith("not finished") and tests["tail"] == ["....."] and failed


def test_the_state_of_the_gpu_is_kept_before_and_after(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = iter(["345 MHz, 2619 MHz, 70.10 W, 700.00 W, 31", "1980 MHz, 2619 MHz, 650.00 W, 700.00 W, 60"])

    def first_line(*command: str) -> str:
        assert command[0] == "nvidia-smi"
        return next(lines)

    environment = report.environment("cpu") | {"device": "cuda", "gpu": "NVIDIA H100 80GB HBM3"}
    monkeypatch.setattr(report, "_first_line", first_line)
    begun = Report(tmp_path, environment, ["step"], False)
    gpu_report.execute(steps.Step("step", lambda report: []), begun)
    step = begun.steps["step"]
    assert step["gpu_before"]["clocks.sm"] == "345 MHz" and step["gpu_after"]["power.limit"] == "700.00 W"
    told = "345 MHz, 2619 MHz, 700.00 W | 1980 MHz, 2619 MHz, 700.00 W"
    assert told in (text := (tmp_path / "report.md").read_text())
    assert "No GPU" not in text
