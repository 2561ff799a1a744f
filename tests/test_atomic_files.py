"""Files that are whole, or what they were before."""

import os
from pathlib import Path
from typing import Any

import pytest
from safetensors import SafetensorError

from engine.atomic_files import written_whole


def test_whoever_writes_a_file_it_has_the_mode_of_others(tmp_path: Path) -> None:
    """safetensors 0.8 makes files that their owner alone can read."""
    usual, file = tmp_path / "usual", tmp_path / "file"
    usual.touch()
    with written_whole(file) as (partial,):
        partial.unlink()
        os.close(os.open(partial, os.O_CREAT | os.O_WRONLY, 0o600))
    assert file.stat().st_mode == usual.stat().st_mode


def test_files_take_their_places_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    placed, replace = [], os.replace
    monkeypatch.setattr(os, "replace", lambda partial, file: placed.append(file.name) or replace(partial, file))
    with written_whole(tmp_path / "weights", tmp_path / "config") as partial:
        for each in partial:
            each.write_text("new")
    assert placed == ["weights", "config"] == sorted(os.listdir(tmp_path), reverse=True)


def test_none_takes_its_place_unless_all_are_complete(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    first.write_text("old")

    def write(error: BaseException | None) -> None:
        with written_whole(first, second) as (one, other):
            one.write_text("new")
            if error is not None:
                raise error
            other.unlink()  # never written

    errors: list[tuple[Any, BaseException | None]] = [
        (OSError, None),
        (KeyboardInterrupt, KeyboardInterrupt()),
        (OSError, SafetensorError("no space")),
    ]
    for kind, error in errors:
        with pytest.raises(kind):
            write(error)
        assert first.read_text() == "old" and os.listdir(tmp_path) == ["first"]
