"""A GGUF file, converted once to safetensors in the user's cache folder.

transformers reads GGUF, but takes about 20 s for 135M parameters each time (dequantising, rebuilding the tokenizer); the
converted folder loads in one or two. The folder is made beside its final place and renamed, so it is whole or absent; its
manifest holds sizes, times and checksums, so that a damaged one is noticed and converted again.
"""

import hashlib
import json
import logging
import os
import shutil
import tempfile
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError
from transformers import AutoConfig, AutoTokenizer

from .atomic_files import written_whole
from .gguf_config import complete
from .hub import user_path
from .model_support import check_config
from .pretrained import whole_model

logger = logging.getLogger(__name__)

CACHE_VARIABLE = "SPECULATIVE_ENGINE_CACHE"
_MANIFEST = "manifest.json"
_FORMAT = 3  # of the converted folder; part of its name
_SCRATCH = ".converting-"
_A_DAY = 86_400  # seconds; no conversion takes as long


def converted(path: Path, dtype: torch.dtype, role: str) -> Path:
    """The folder that a GGUF file was converted to in this dtype, made now if need be.

    Args:
        role: what the file is, for messages.

    Raises:
        ValueError: if the file is no GGUF file, is truncated, is one part of several, or changes meanwhile.
        UnsupportedModelError: for an architecture that cannot be decoded over a ragged cache (a ValueError).
        ImportError: without the package gguf, or others that transformers reads such files through.
        OSError: if the file cannot be read, or the cache folder not written (the environment variable
            SPECULATIVE_ENGINE_CACHE moves it).
    """
    path, root = path.resolve(), _cache_root()
    try:
        state = _state(path)
        folder = root / f"{_fingerprint(path, root)}-{str(dtype).removeprefix('torch.')}"
    except OSError as error:
        raise OSError(f"{role} must be a file that can be read, got {path}: {error}") from error
    if _is_intact(folder):
        return folder
    _check_file(path, role)
    with _written(root), tempfile.TemporaryDirectory(dir=root, prefix=_SCRATCH) as scratch:
        if folder.exists():
            logger.warning("the converted checkpoint %s is damaged: converting it again from %s", folder, path)
        made = Path(scratch) / "checkpoint"
        _convert(path, dtype, made, role)
        if not path.exists() or _state(path) != state:
            raise ValueError(f"{role} must not change while it is converted, got {path}, which did")
        _write_manifest(made)
        for file in made.iterdir():  # safetensors 0.8 makes files that their owner alone can read
            shutil.copymode(made / _MANIFEST, file)
        if not _is_intact(folder):  # what another process has made meanwhile is in use by now
            shutil.rmtree(folder, ignore_errors=True)
        try:
            os.replace(made, folder)
        except OSError:
            if not _is_intact(folder):
                raise
    return folder


def _cache_root() -> Path:
    if given := os.environ.get(CACHE_VARIABLE):
        return user_path(given)
    import platformdirs  # not before it is needed: all else works without it

    return Path(platformdirs.user_cache_dir("speculative-engine"))


@contextmanager
def _written(root: Path) -> Iterator[None]:
    """The cache folder, made if need be; what fails within says which it is, and how to have another one."""
    try:
        root.mkdir(parents=True, exist_ok=True)
        for left in root.glob(f"{_SCRATCH}*"):  # by a process that was killed
            with suppress(FileNotFoundError):
                if time.time() - left.stat().st_mtime > _A_DAY:
                    shutil.rmtree(left, ignore_errors=True)
        yield
    except (OSError, SafetensorError) as error:  # the latter for a full disk
        raise OSError(
            f"{root}, where converted GGUF files are kept, must be a folder that can be written and has room; the environment "
            f"variable {CACHE_VARIABLE} names another one: {error}"
        ) from error


def _convert(path: Path, dtype: torch.dtype, folder: Path, role: str) -> None:
    from gguf import GGUFReader

    logger.info("converting %s", path)
    reader = GGUFReader(path)
    # Nothing but the file is to be read: not what lies beside it, nor a file of its name in the working directory. So the location
    # that transformers is told is an empty folder, and the name is the whole path.
    nowhere = folder.with_name("empty")
    nowhere.mkdir()
    options: dict[str, Any] = {"gguf_file": str(path), "trust_remote_code": False}
    with _as_errors_of(path, role):
        config = AutoConfig.from_pretrained(nowhere, **options)
    check_config(config, role)
    weights: dict[str, Any] = {"gguf_file": str(path), "dtype": dtype}
    if hasattr(transformers, "GgufConfig"):  # newer releases keep the blocks packed unless told otherwise
        weights["quantization_config"] = transformers.GgufConfig(dequantize=True)
    with _as_errors_of(path, role):
        model = whole_model(nowhere, **weights)
        complete(model, reader)
        has_tokenizer = "tokenizer.ggml.tokens" in reader.fields
        tokenizer = AutoTokenizer.from_pretrained(nowhere, **options) if has_tokenizer else None
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config  # the weights are plain now
    model.save_pretrained(folder)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)


@contextmanager
def _as_errors_of(path: Path, role: str) -> Iterator[None]:
    """What transformers raises while it reads a file as an error that names the file."""
    try:
        yield
    except (ImportError, MemoryError):
        raise
    except Exception as error:
        raise ValueError(f"{role} must be a GGUF file of a supported architecture; {path} failed: {error}") from error


def _check_file(path: Path, role: str) -> None:
    """Magic, header and, through it, the length that the file must have; and that it is the whole model."""
    with path.open("rb") as file:
        if file.read(4) != b"GGUF":
            raise ValueError(f"{role} must be a GGUF file, got {path}, which does not begin with 'GGUF'")
    try:
        from gguf import GGUFReader
    except ImportError as error:
        raise ImportError(f"{role} is a GGUF file, which needs the package gguf (pip install gguf): {error}") from error
    try:
        reader = GGUFReader(path)
        tensors, parts = reader.tensors, reader.fields.get("split.count")
        num_parts = 1 if parts is None else int(parts.parts[-1][0])
        knows_layers = any(name.endswith(".block_count") for name in reader.fields)
        end = max((int(tensor.data_offset + tensor.n_bytes) for tensor in tensors), default=0)
    except Exception as error:  # the reader fails in many ways on a file that ends too early
        raise ValueError(
            f"{role} must be a whole GGUF file, got {path}, which is truncated or damaged: {error}"
        ) from error
    if num_parts > 1:
        raise ValueError(
            f"{role} must be one whole GGUF file, got {path}, one of {num_parts} parts: merge them first "
            f"(llama-gguf-split --merge)"
        )
    if not tensors or end > path.stat().st_size:
        raise ValueError(
            f"{role} must be a whole GGUF file, got {path} with {path.stat().st_size} bytes of at least {end}: truncated"
        )
    if not knows_layers:  # transformers would make them up, of 7B parameters
        raise ValueError(
            f"{role} must be a GGUF file of a language model, got {path}, which names no number of layers (block_count)"
        )


def _fingerprint(path: Path, root: Path) -> str:
    """Name of a file's content, and of how it is converted. The cache folder keeps it for as long as the file is not written to,
    as to read gigabytes takes seconds."""
    state = [_FORMAT, *_state(path)]
    place = hashlib.sha256(os.fsencode(path)).hexdigest()[:16]
    note = root / f"{place}.json"
    with suppress(OSError, ValueError, TypeError, KeyError):
        kept = json.loads(note.read_text())
        if kept["state"] == state:
            return str(kept["fingerprint"])
    with path.open("rb") as file:
        content = hashlib.file_digest(file, "sha256").digest()
    fingerprint = hashlib.sha256(f"{_FORMAT} ".encode() + content).hexdigest()[:16]
    with suppress(OSError):  # a cache folder that cannot be written may hold what is looked for even so
        root.mkdir(parents=True, exist_ok=True)
        with written_whole(note) as (partial,):
            partial.write_text(json.dumps({"state": state, "fingerprint": fingerprint}))
    return fingerprint


def _state(path: Path) -> list[int]:
    """What changes when a file is written to, or another one takes its place."""
    stat = path.stat()
    return [stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino]


def _checksum(path: Path) -> int:
    checksum = 0
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            checksum = zlib.crc32(block, checksum)
    return checksum


def _write_manifest(folder: Path) -> None:
    files = {
        path.name: [path.stat().st_size, _checksum(path), path.stat().st_mtime_ns] for path in sorted(folder.iterdir())
    }
    (folder / _MANIFEST).write_text(json.dumps(files, indent=1))


def _is_intact(folder: Path) -> bool:
    try:
        files = json.loads((folder / _MANIFEST).read_text())
        return bool(files) and all(_is_as_written(folder / name, *entry) for name, entry in files.items())
    except (OSError, ValueError, TypeError, AttributeError):
        return False


def _is_as_written(file: Path, size: int, checksum: int, modified: int | None = None) -> bool:
    """By size and time of modification, or else, as for a copied folder, by content, which takes seconds for gigabytes.

    Manifests of earlier versions have no times.
    """
    stat = file.stat()
    return stat.st_size == size and (stat.st_mtime_ns == modified or _checksum(file) == checksum)
