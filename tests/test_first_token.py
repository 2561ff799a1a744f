"""The benchmark of the first token: who takes part, its turns and ratios, and (`-m slow`) its processes on a tiny checkpoint."""

import json
from pathlib import Path
from typing import Any

import cli_fakes
import pytest

from bench import first_token
from bench.first_token import OURS, OURS_PLAIN, PARTS, THEIRS, THEIRS_GGUF
from bench.out_file import check_out
from engine.heads import DEFAULT_DRAFTER

checkpoint = cli_fakes.checkpoint  # a fixture

SECONDS = {OURS: 2.0, OURS_PLAIN: 1.0, THEIRS: 4.0, THEIRS_GGUF: 40.0}


class FakeRuns:
    """Stands in for `first_token.measure`: runs of a contender get longer and longer."""

    def __init__(self, specs: dict[str, Any]) -> None:
        self.specs = specs
        self.order: list[str] = []
        self.token = 7

    def __call__(self, spec: Any) -> dict[str, Any]:
        name = next(name for name, each in self.specs.items() if each is spec)
        self.order.append(name)
        seconds = SECONDS[name] + self.order.count(name) - 3  # the median of runs 1 to 3, after one more
        return dict.fromkeys(("seconds", *PARTS, "cpu"), seconds) | {"tokens": [self.token]}


@pytest.fixture
def gguf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file that looks like one, and what it was converted to."""
    monkeypatch.setattr("engine.gguf.converted", lambda path, dtype, role: tmp_path / f"converted-{dtype}")
    path = tmp_path / "model.gguf"
    path.touch()
    return path


def test_a_gguf_file_is_compared_with_a_plain_folder_too(gguf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.default_model.find_model", lambda: str(gguf))
    specs = first_token.contenders(None, None)
    own, plain, theirs, their_gguf = (specs[name] for name in (OURS, OURS_PLAIN, THEIRS, THEIRS_GGUF))
    assert (own["drafter"], plain["drafter"]) == (DEFAULT_DRAFTER, None)
    assert own["target"] == plain["target"] == str(gguf)
    assert theirs["target"] == str(gguf.parent / "converted-torch.bfloat16") and "gguf_file" not in theirs
    assert (their_gguf["target"], their_gguf["gguf_file"]) == (str(gguf.parent), "model.gguf")
    assert {spec["dtype"] for spec in specs.values()} == {"bfloat16"}
    assert first_token.contenders(str(gguf), None)[OURS]["drafter"] == "ngram"


def test_turns_medians_and_ratios(gguf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    specs = first_token.contenders(str(gguf), "suffix")
    fake = FakeRuns(specs)
    monkeypatch.setattr(first_token, "measure", fake)
    result = first_token.summary(first_token.run(specs, runs=3))
    first, *_ = names = list(specs)
    assert fake.order[:4] == names and fake.order[4:8] == [*names[1:], first]
    assert {name: medians["seconds"] for name, medians in result["medians"].items()} == SECONDS
    assert result["ratio"] == result["ratios"][f"{OURS} / {THEIRS}"] == 0.5 and result["met"]
    assert result["ratios"][f"{OURS} / {THEIRS_GGUF}"] == 2 / 40


def test_another_first_token_ends_the_run(gguf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    specs = first_token.contenders(str(gguf), None)

    class Differing(FakeRuns):
        def __call__(self, spec: Any) -> dict[str, Any]:
            self.token += spec["library"] == "transformers"
            return super().__call__(spec)

    monkeypatch.setattr(first_token, "measure", Differing(specs))
    with pytest.raises(ValueError, match=r"^transformers begins with \[8\], but ours with \[7\]"):
        first_token.run(specs, runs=1)


def test_a_process_that_fails_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(first_token, "ROOT", tmp_path)  # without the benchmarks
    monkeypatch.delenv("PYTHONPATH", raising=False)
    with pytest.raises(RuntimeError, match="failed: ModuleNotFoundError: No module named 'bench'"):
        first_token.measure(dict(library="ours", target="nowhere"))
    monkeypatch.undo()
    with pytest.raises(RuntimeError, match=r"failed: KeyError: 'target'$"):  # in one line, the last
        first_token.measure(dict(library="ours"))


def test_a_target_that_is_not_there_gives_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        first_token.main(["--target", "/nope", "--runs", "1"])
    *_, last = capsys.readouterr().err.splitlines()
    assert "error: " in last and "target must be an existing path or a hub id, got '/nope'" in last


def test_an_out_that_cannot_be_written_is_refused_before_any_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(first_token, "contenders", lambda *_: pytest.fail("work was begun"))
    for out, rule in (
        (tmp_path, f"--out must be a file that can be written, got {tmp_path}: Is a directory"),
        (tmp_path / "none" / "found.json", "--out must be in a folder that exists"),
    ):
        with pytest.raises(SystemExit, match="2"):
            first_token.main(["--out", str(out)])
        assert rule in capsys.readouterr().err


def test_looking_at_an_out_changes_nothing(tmp_path: Path) -> None:
    before, new = tmp_path / "before.json", tmp_path / "new.json"
    before.write_text("{}")
    check_out(before)
    check_out(new)
    assert before.read_text() == "{}" and not new.exists()


@pytest.mark.slow
def test_on_a_tiny_checkpoint(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Which is its own drafter, by a path relative to the user's folder."""
    out = tmp_path / "first_token.json"
    monkeypatch.chdir(checkpoint.parent)
    names = ["--target", checkpoint.name, "--drafter", f"ngram+./{checkpoint.name}"]
    first_token.main([*names, "--runs", "1", "--out", str(out)])
    found = json.loads(out.read_text())
    own = found["contenders"][OURS]
    assert (own["target"], own["drafter"]) == (checkpoint.name, f"ngram+{checkpoint.name}")
    assert set(found["medians"]) == {OURS, OURS_PLAIN, THEIRS}
    for name, (run,) in found["runs"].items():
        assert 0 < run["first token"] < run["seconds"] == pytest.approx(sum(run[part] for part in PARTS)), name
        assert len(run["tokens"]) == 1
    assert {"torch", "transformers", "python"} <= set(found["environment"]["versions"])
    assert found["ratio"] == pytest.approx(found["medians"][OURS]["seconds"] / found["medians"][THEIRS]["seconds"])
    assert "run 1 of 1" in capsys.readouterr().out
