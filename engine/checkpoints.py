"""Models and tokenizers from a hub id, a folder or a GGUF file."""

import json
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoTokenizer, PretrainedConfig, PreTrainedModel
from transformers.utils.import_utils import is_peft_available, is_protobuf_available, is_sentencepiece_available

from . import parallel
from .cpu_layers import fuse_cpu_layers
from .errors import UnsupportedModelError
from .gguf import converted
from .hub import existing_path, files_of, hub_errors
from .model_support import check_config
from .packing import pack_linears
from .pretrained import whole_model

_SENTENCEPIECE = ("tokenizer.model", "spiece.model")
_VOCABULARIES = ("tokenizer.json", *_SENTENCEPIECE, "vocab.json", "vocab.txt", "tekken.json")
_TOKENIZER_FILES = ("tokenizer_config.json", *_VOCABULARIES)


@dataclass(frozen=True)
class Checkpoint:
    """A loaded model and its tokenizer, if it has one."""

    model: PreTrainedModel
    tokenizer: Any


def read_checkpoint(
    source: Any, role: str, dtype: Any, device: torch.device, tokenizer: Any, num_ranks: int | None = None
) -> Checkpoint:
    """Load a model to the device; a live one is left as it is.

    Args:
        role: the argument that named it, for messages.
        dtype: "auto" or a torch dtype.
        tokenizer: in place of the checkpoint's.
        num_ranks: load this rank's slices of it, to this rank's device.

    Raises:
        ValueError: for a damaged checkpoint, or one of an architecture that transformers does not know.
        FileNotFoundError: for a path that does not exist.
        UnsupportedModelError: for an architecture that cannot be decoded over a ragged cache (a ValueError).
        OSError: for an inaccessible hub id.
        ImportError: without a package that is needed, for a GGUF file, quantized weights or a tokenizer.model.
    """
    location = locate(source, role, dtype)
    if isinstance(location, PreTrainedModel):
        return Checkpoint(location, tokenizer)
    config, folder = read_config(location, role), files_of(location, role)
    # Without peft transformers would leave the adapter out.
    if not is_peft_available() and (folder / "adapter_config.json").exists():
        raise ImportError(
            f"{role} has an adapter beside its weights, which needs the package peft (pip install peft): {source}"
        )
    _check_generation_config(folder, role)
    if tokenizer is None and _has(folder, _TOKENIZER_FILES):  # without one, prompts are token ids
        tokenizer = read_tokenizer(location, role)
    options: dict[str, Any] = {}
    if num_ranks is not None:
        parallel.check_divisible(config, num_ranks, role)
        device = parallel.join()
        if num_ranks > 1:
            from transformers.distributed.configuration_utils import DistributedConfig

            parallel.require_same_checkpoint(folder, None if Path(location).exists() else folder.name, role)
            options["distributed_config"] = DistributedConfig(tp_plan="auto", tp_size=num_ranks)
    try:
        model = whole_model(location, config, dtype=dtype, **options)
    except MemoryError:
        raise
    except hub_errors() as error:
        raise OSError(f"{role} must be a checkpoint that can be read; loading {source} failed: {error}") from error
    except ImportError as error:
        raise ImportError(f"{role} needs a package that is not there; loading {source} failed: {error}") from error
    except Exception as error:  # safetensors and transformers have many kinds for damaged weights
        raise ValueError(f"{role} must be an intact checkpoint; loading {source} failed: {error}") from error
    if not options:  # slices are where they belong
        model.to(device)  # type: ignore[arg-type]  # a wrapper hides the signature
        pack_linears(model)
        fuse_cpu_layers(model)
    return Checkpoint(model, tokenizer)


def _check_generation_config(folder: Path, role: str) -> None:
    """Raise ValueError for a damaged generation_config.json: transformers would make one up, and ends of text be lost."""
    file = folder / "generation_config.json"
    if not file.is_file():
        return
    try:
        intact = isinstance(json.loads(file.read_text(encoding="utf-8")), dict)
    except ValueError:
        intact = False
    if not intact:
        raise ValueError(f"{role} must be an intact checkpoint; {file} is not a JSON object")


def locate(source: Any, role: str, dtype: Any) -> str | PreTrainedModel:
    """A live model, a hub id, or a folder with safetensors, to which a GGUF file is converted in this dtype.

    Raises:
        ValueError: for what is none of these, or a damaged GGUF file.
        FileNotFoundError: for a path that does not exist.
    """
    if isinstance(source, PreTrainedModel):
        return source
    path = _check_source(source, role)
    if path.is_file():
        return str(converted(path, torch.bfloat16 if dtype == "auto" else dtype, role))
    return str(path) if path.is_dir() else str(source)


def check_checkpoint(source: str, role: str) -> None:
    """Raise what `read_checkpoint` would, as far as that can be told before any weights are read or converted."""
    path = _check_source(source, role)
    if not path.is_file():
        read_config(str(path) if path.is_dir() else source, role)


def _check_source(source: Any, role: str) -> Path:
    """A folder or a GGUF file, or nothing that exists: a hub id then."""
    if not isinstance(source, str | Path) or not str(source):
        got = repr(source) if isinstance(source, str | int | float | None) else f"a {type(source).__name__}"
        if hasattr(source, "merge_and_unload"):
            got += ": pass its base_model.model or the result of its merge_and_unload()"
        raise ValueError(f"{role} must be a hub id, a path or a PreTrainedModel, got {got}")
    path = existing_path(str(source), role)
    if path.is_file() and path.suffix.lower() != ".gguf":
        raise ValueError(f"{role} must be a GGUF file, a folder or a hub id, got the file {path}")
    if path.is_dir():
        _check_has_config(path, str(path), role)
    return path


def _check_has_config(folder: Path, location: str, role: str) -> None:
    if (folder / "config.json").is_file():
        return
    if (folder / "adapter_config.json").is_file():
        raise ValueError(
            f"{role} must be a whole model, got the adapter {location}: load it and its base model with transformers, and pass "
            f"the live model, or merge the two with merge_and_unload() of peft"
        )
    kind = "folder" if Path(location).is_dir() else "hub repository"
    hint = "" if kind == "folder" else " (of a GGUF file, pass the path to which it was downloaded)"
    raise ValueError(f"{role} must be a {kind} with a config.json, got {location} without one{hint}")


def read_config(location: str, role: str) -> PretrainedConfig:
    """Of a folder or a hub id.

    Raises:
        ValueError: for a damaged one, or one of an architecture that transformers does not know.
        UnsupportedModelError: for an architecture that cannot be decoded over a ragged cache (a ValueError).
        OSError: for an inaccessible hub id.
    """
    folder = files_of(location, role)
    _check_has_config(folder, location, role)
    try:
        # Unless told, transformers asks on standard input whether to run a checkpoint's own code, which is of no use here.
        config: PretrainedConfig = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except (ImportError, MemoryError):
        raise
    except Exception as error:  # of many kinds, for values of another type than a field has
        no_json = isinstance(error.__context__, ValueError)  # transformers raises an OSError for such a file
        if isinstance(error, OSError) and not no_json:
            raise
        if _wants_own_code(error):
            raise UnsupportedModelError(
                f"{role} must use an architecture built into transformers; {location} ships its own code, which is not run"
            ) from error
        raise ValueError(f"{role} must be a checkpoint that transformers knows, got {location}: {error}") from error
    check_config(config, role)
    return config


def _has(folder: Path, names: Collection[str]) -> bool:
    """Whether there is one of these files."""
    return any((folder / name).exists() for name in names)


def read_tokenizer(location: str, role: str) -> Any:
    """A folder's or a hub id's.

    Raises:
        ValueError: for a damaged one.
        FileNotFoundError: for a path that does not exist.
        OSError: for an inaccessible hub id.
        ImportError: without a package that is needed to read it.
    """
    folder = files_of(location, role)
    if folder.is_file():
        raise ValueError(f"{role} must be a folder or a hub id that has a tokenizer, got the file {folder}")
    try:
        # Where mistral-common is installed transformers would take its tokenizer, which has no added tokens and no template.
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False, mistral_format=False)
    except (OSError, ImportError, MemoryError):
        raise
    except Exception as error:  # of many kinds, one of them Rust's
        if _wants_own_code(error):
            raise ValueError(
                f"{role} must have a tokenizer built into transformers; that of {location} ships its own code, which is not run: "
                f"load it with transformers, and pass it as tokenizer= to engine.load"
            ) from error
        # transformers then takes a vocabulary of SentencePiece for one of tiktoken.
        if not _has(folder, ["tokenizer.json"]) and _has(folder, _SENTENCEPIECE) and not _reads_sentencepiece():
            raise ImportError(
                f"{role} needs the packages sentencepiece and protobuf (pip install sentencepiece protobuf), as the tokenizer of "
                f"{location} has no tokenizer.json; reading it failed: {error}"
            ) from error
        raise ValueError(f"{role} must have an intact tokenizer; reading that of {location} failed: {error}") from error
    # As transformers makes one where the vocabulary is missing; it drops all text.
    added = getattr(tokenizer, "added_tokens_decoder", {})
    if added and len(tokenizer) <= len(added) and not _has(folder, _VOCABULARIES):
        raise ValueError(
            f"{role} must have an intact tokenizer; that of {location} has {len(added)} added tokens but no vocabulary: "
            f"tokenizer.json or an equivalent file is missing"
        )
    return tokenizer


def _reads_sentencepiece() -> bool:
    return bool(is_sentencepiece_available() and is_protobuf_available())


def _wants_own_code(error: Exception) -> bool:
    """Whether transformers would go on if it were allowed to run code of the checkpoint."""
    return "trust_remote_code" in str(error)
