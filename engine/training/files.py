"""Files that are whole, or what they were before, and the work folder of a run."""

import hashlib
import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import torch
from safetensors import SafetensorError
from transformers import BatchEncoding

from ..atomic_files import written_whole
from ..file_digest import file_digest

WORK = "work"
LOCK = "lock"
SETTINGS = "settings.json"
SAVING = ".saving-"  # how folders begin in which a drafter is put together
_HASHES = {  # among the settings, and what differs where they do
    "prompts_sha256": "the prompts",
    "target_sha256": "the files of target",
    "start_from_sha256": "the files of start_from",
}
_OF_CHECKPOINTS = (".json", ".safetensors", ".bin", ".gguf", ".model", ".jinja")


@contextmanager
def replacing(file: Path) -> Iterator[Path]:
    """A name to write a file under, which takes `file`'s place when it is complete.

    Raises:
        OSError: if it cannot be written; what was at `file` is still there. safetensors and torch have errors of their own
            for a full disk; they become OSErrors here.
    """
    with no_room(file), written_whole(file) as (partial,):
        yield partial


@contextmanager
def no_room(file: Path) -> Iterator[None]:
    """What fails within is the writing of a file: say which, and that nothing is lost."""
    try:
        yield
    except torch.OutOfMemoryError:  # is a RuntimeError, too
        raise
    except (OSError, SafetensorError, RuntimeError) as error:
        raise OSError(
            f"{file} could not be written: {error}; what was written before is still there, and the same run resumes from it"
        ) from error


def settings_of(options: Mapping[str, Any], prompts: Sequence[Any]) -> dict[str, Any]:
    """What the work of a run depends on, as JSON has it: options, number of prompts and a hash over all of them.

    Raises:
        ValueError: for a prompt that `Engine.generate` does not take.
    """
    digest = hashlib.sha256()
    for index, prompt in enumerate(prompts):
        try:
            digest.update(json.dumps(prompt, default=_plain).encode() + b"\n")
        except TypeError as error:
            raise ValueError(f"prompts[{index}] must be a string, token ids or chat messages: {error}") from error
    found: dict[str, Any] = json.loads(json.dumps(dict(options)))
    return found | {"num_prompts": len(prompts), "prompts_sha256": digest.hexdigest()}


def checkpoint_digest(path: Path) -> str:
    """A hash that tells whether a GGUF file, or the checkpoint in a folder, is still what it was: over the names of its files and
    `file_digest` each."""
    files = [file for file in path.iterdir() if file.is_file()] if path.is_dir() else [path]
    digest = hashlib.sha256()
    for file in sorted(files):
        if file.suffix not in _OF_CHECKPOINTS:
            continue
        digest.update(f"{file.name}\n".encode() + file_digest(file))
    return digest.hexdigest()


def _plain(ids: Any) -> Any:
    """Token ids, or one of them, that are of no type of Python's own: of torch, of numpy or what a tokenizer returns."""
    if isinstance(ids, BatchEncoding):
        return ids.get("input_ids")
    if not hasattr(ids, "tolist"):
        raise TypeError(f"got {type(ids).__name__}")
    return ids.tolist()


def check_out(out: Path, settings: Mapping[str, Any]) -> None:
    """Look whether a run may use the folder, and change nothing.

    Raises:
        ValueError: if it holds anything but the work of a run with the same settings.
    """
    try:
        out.stat()
        exists = True
    except FileNotFoundError:
        exists = False
    except (OSError, ValueError) as error:  # too long a name, or one with a NUL
        raise ValueError(f"out must be a folder that can be made, got {str(out)!r}: {error}") from error
    if exists and not out.is_dir():
        raise ValueError(f"out must be a folder, got the file {out}")
    file = out / WORK / SETTINGS
    if not file.exists():
        others = [path.name for path in (out.iterdir() if exists else ()) if path.name != WORK]
        if others or any(path.name != LOCK and path.suffix != ".partial" for path in (out / WORK).glob("*")):
            raise ValueError(f"out must be a new or empty folder, or one in which a training was begun, got {out}")
        return
    try:
        before = json.loads(file.read_text(encoding="utf-8"))
    except ValueError:
        before = None
    if not isinstance(before, dict):
        raise ValueError(f"{file} must be the JSON object that a training wrote, and is not")
    other = [
        _HASHES.get(name) or f"{name} ({before.get(name)!r} before, {value!r} now)"
        for name, value in settings.items()
        if before.get(name) != value and not _same_files(name, before, settings)
    ]
    if other:
        raise ValueError(
            f"out must be new or hold work with the same options and prompts; the run in {out} differs in {', '.join(other)}"
        )


def _same_files(name: str, before: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    """Whether an option names a checkpoint of the same files, if by another path."""
    digest = now.get(f"{name}_sha256")
    return digest is not None and digest == before.get(f"{name}_sha256")


@contextmanager
def begin(out: Path, settings: Mapping[str, Any]) -> Iterator[Path]:
    """The work folder, which no other run uses meanwhile; made, with its settings, if it is not there yet, and without what a
    kill left of a drafter's saving.

    Raises:
        ValueError: if another run works there, or has begun other work since `check_out`.
        OSError: if it cannot be made or written to.
    """
    work = out / WORK
    try:
        work.mkdir(parents=True, exist_ok=True)
        file = (work / LOCK).open("a")  # a file, as NFS locks no folders
    except OSError as error:
        raise OSError(f"out must be a folder that can be made and written to, got {out}: {error}") from error
    with file:
        if not lock(file):
            raise ValueError(f"out must be a folder in which no other run works, got {out}, in which one does")
        check_out(out, settings)
        for folder in out.glob(f"{SAVING}*"):
            shutil.rmtree(folder, ignore_errors=True)
        if not (work / SETTINGS).exists():
            try:
                with replacing(work / SETTINGS) as partial:
                    partial.write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
            except OSError:
                (work / LOCK).unlink()  # nothing was begun
                raise
        yield work


def lock(file: IO[str]) -> bool:
    """Hold a file until it is closed or the process ends; False: someone else does. Where nobody can, it is not held."""
    try:
        import fcntl
    except ImportError:  # Windows
        return True
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks, as some of networks are
        pass
    return True
