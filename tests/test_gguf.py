"""GGUF files: that one is read and nothing else, and what is refused before anything is kept of it."""

import io
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import tiny_gguf
import torch

import engine
from engine import gguf as conversion

PARAMS = engine.SamplingParams(max_new_tokens=4)


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Of conversions, empty at first."""
    monkeypatch.setenv(conversion.CACHE_VARIABLE, str(tmp_path / "cache"))
    return tmp_path / "cache"


def load(path: Path) -> engine.Engine:
    return engine.load(path, drafter=None, dtype="float32", device="cpu")


def conversions(cache: Path) -> list[Path]:
    return [path for path in cache.iterdir() if path.is_dir()]


def test_a_file_of_that_name_in_the_working_directory_is_not_read(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder in ("here", "there"):
        (tmp_path / folder).mkdir()
    tiny_gguf.write(tmp_path / "here" / "model.gguf", seed=1)
    expected = tiny_gguf.write(tmp_path / "there" / "model.gguf", seed=2)
    monkeypatch.chdir(tmp_path / "here")
    found = load(tmp_path / "there" / "model.gguf").target_model.get_input_embeddings().weight
    torch.testing.assert_close(found, torch.from_numpy(expected), rtol=0, atol=0)


def test_files_beside_it_are_not_read(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither another model's tokenizer, nor code, nor is it asked whether that may run."""
    path = tmp_path / "model.gguf"
    tiny_gguf.write(path)
    own = {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["own.Own", "own.Own"]}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(own))
    (tmp_path / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Own: pass\n")
    (tmp_path / "config.json").write_text('{"model_type": "gpt2", "vocab_size": 3}')
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n"))
    llm = load(path)
    assert sys.stdin.read() == "y\n" and not (tmp_path / "ran").exists()
    tokenizer: Any = llm.tokenizer
    assert set(tokenizer.get_vocab()) >= set(tiny_gguf.TOKENS) and tokenizer.tokenize("the")[0] == "the"
    assert len(llm.generate("the end", PARAMS).token_ids) > 0


def test_the_dtype_is_bfloat16_unless_another_is_given(cache: Path, tmp_path: Path) -> None:
    """The file's is float32."""
    tiny_gguf.write(tmp_path / "model.gguf")
    for options, dtype in (({}, torch.bfloat16), ({"dtype": "float32"}, torch.float32)):
        assert engine.load(tmp_path / "model.gguf", drafter=None, **options).target_model.dtype == dtype


def test_without_a_tokenizer_prompts_are_ids(cache: Path, tmp_path: Path) -> None:
    tiny_gguf.write(tmp_path / "model.gguf", tokenizer=False)
    llm = load(tmp_path / "model.gguf")
    assert llm.tokenizer is None and len(llm.generate([5, 6, 7], PARAMS).token_ids) == 4


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(parts=3), "target must be one whole GGUF file, got .*, one of 3 parts: merge them first"),
        (dict(layers=False), "target must be a GGUF file of a language model, got .*, which names no number of layers"),
        (dict(arch="mamba"), "target of type 'mamba' has"),
        (dict(tensors=False), "target must be a whole GGUF file, got .* bytes of at least 0: truncated"),
    ],
)
def test_refused_before_it_is_converted(cache: Path, tmp_path: Path, options: dict[str, Any], message: str) -> None:
    tiny_gguf.write(tmp_path / "model.gguf", **options)
    with pytest.raises(ValueError, match=message):
        load(tmp_path / "model.gguf")
    assert conversions(cache) == []


def test_a_file_that_changes_meanwhile(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it was converted to would be found by what it was before."""
    path, other = tmp_path / "model.gguf", tmp_path / "other.gguf"
    tiny_gguf.write(path, seed=1)
    tiny_gguf.write(other, seed=2)
    convert = conversion._convert

    def convert_another(*args: Any) -> None:
        os.replace(other, path)
        convert(*args)

    def convert_and_remove(*args: Any) -> None:
        convert(*args)
        path.unlink()

    monkeypatch.setattr(conversion, "_convert", convert_another)
    with pytest.raises(ValueError, match=r"target must not change while it is converted, got .*model\.gguf"):
        load(path)
    monkeypatch.setattr(conversion, "_convert", convert_and_remove)
    with pytest.raises(ValueError, match=r"target must not change while it is converted, got .*model\.gguf"):
        load(path)
    assert conversions(cache) == []


@pytest.mark.parametrize("name", [b"m" * 240 + b".gguf", b"caf\xe9.gguf"], ids=["long", "not UTF-8"])
def test_any_name_that_a_file_can_have(cache: Path, tmp_path: Path, name: bytes) -> None:
    """A second name of the same file leads to the same conversion."""
    path, link = tmp_path / os.fsdecode(name), tmp_path / "link.gguf"
    tiny_gguf.write(path)
    link.symlink_to(path)
    assert load(path).generate([5, 6, 7], PARAMS).token_ids == load(link).generate([5, 6, 7], PARAMS).token_ids
    assert len(conversions(cache)) == 1


def test_a_file_that_cannot_be_read(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "model.gguf"
    tiny_gguf.write(path)

    def refuse(*args: Any) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(conversion, "_fingerprint", refuse)
    with pytest.raises(
        OSError, match=r"target must be a file that can be read, got .*model\.gguf: .*Permission denied"
    ):
        load(path)
