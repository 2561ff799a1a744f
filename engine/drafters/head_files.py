"""Checkpoints of learned drafters: a folder with a config.json and weights, whose tensors must be the expected ones."""

import json
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from ..atomic_files import written_whole

_LISTED = 24  # tensors that a message lists; a whole model has hundreds
# What trainers (transformers, accelerate) leave beside the weights.
NO_WEIGHTS = {
    f"{name}.{end}"
    for name in ("training_args", "optimizer", "scheduler", "scaler", "sampler")
    for end in ("bin", "pt")
}


@dataclass(frozen=True)
class HeadFiles:
    """What a folder holds."""

    folder: Path
    config: dict[str, Any]
    tensors: dict[str, Tensor]  # on the CPU

    @property
    def config_file(self) -> Path:
        """For messages."""
        return self.folder / "config.json"

    def number(self, name: str, default: int | None = None) -> int:
        """A positive integer of the config."""
        value = self.config.get(name)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{self.config_file} must hold a positive integer {name!r}, got {value!r}")
        return value


def read_head_config(folder: Path) -> dict[str, Any]:
    """config.json of a folder. That of an EAGLE head may be wrapped, as vLLM does it: its own keys and, inside, the layer's.

    Raises:
        ValueError: if it is no JSON object.
    """
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{folder / 'config.json'} must be a JSON object: {error}") from error
    if not isinstance(config, dict):
        raise ValueError(f"{folder / 'config.json'} must be a JSON object, got {type(config).__name__}")
    if config.get("model_type") == "eagle" and isinstance(inner := config.pop("model", None), dict):
        config = {**inner, **config, "model_type": inner.get("model_type", "llama")}
    return config


def read_head(folder: Path) -> HeadFiles:
    """Config and all tensors of a folder: *.safetensors, or else *.bin and *.pt files of plain tensors.

    Raises:
        FileNotFoundError: if there is no such folder.
        ValueError: if there are no weights, they are quantized, or a file is damaged.
    """
    if not folder.exists():
        raise FileNotFoundError(f"drafter must be an existing folder, got '{folder}', which does not exist")
    files = weight_files(folder)
    if not files:
        raise ValueError(f"drafter must be a folder with *.safetensors, *.bin or *.pt files, got {folder} without one")
    tensors: dict[str, Tensor] = {}
    for file in files:
        with reading(file):
            found = load_file(file) if file.suffix == ".safetensors" else load_pickled(file, "cpu")
        tensors |= {name: value for name, value in found.items() if isinstance(value, Tensor)}
    for name, value in tensors.items():
        if value.dtype.itemsize == 1 and value.dtype != torch.bool and not name.endswith("t2d"):
            raise ValueError(f"{folder} must hold weights that are not quantized, got {name} of {value.dtype}")
    return HeadFiles(folder, read_head_config(folder), tensors)


def weight_files(folder: Path) -> list[Path]:
    """*.safetensors, or else *.bin and *.pt files; without those that a trainer has left there, which hold no tensors by name."""
    found = sorted(folder.glob("*.safetensors")) or sorted([*folder.glob("*.bin"), *folder.glob("*.pt")])
    return [file for file in found if file.name not in NO_WEIGHTS]


@contextmanager
def reading(file: Path) -> Iterator[None]:
    """What fails within is the reading of this file of a checkpoint."""
    try:
        yield
    except (SafetensorError, RuntimeError, ValueError, EOFError, OSError) as error:
        raise ValueError(f"drafter must be an intact checkpoint; reading {file} failed: {error}") from error


def load_pickled(file: Path, device: str) -> dict[str, Any]:
    """What a file of torch's holds, tensors on this device.

    Raises:
        ValueError: if it cannot be read, or holds no dictionary.
        OSError: if it cannot be opened.
    """
    try:
        found = torch.load(file, device, weights_only=True)
    except OSError:
        raise
    except Exception as error:  # of many kinds, as pickles are little programs
        reason = (str(error) or type(error).__name__).splitlines()[0]  # torch adds advice that is none here
        raise ValueError(f"it is not a file of tensors by name ({reason})") from error
    if not isinstance(found, dict):
        raise ValueError(f"it must hold tensors by name, got {type(found).__name__}")
    return found


def write_head(folder: str | Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor], file_name: str) -> None:
    """A checkpoint that `read_head` reads. Both files are complete before either takes its place.

    Args:
        folder: made if it is not there; what it holds under these names is replaced.
        file_name: of the weights, ending in .safetensors.

    Raises:
        ValueError: if it holds other *.safetensors files, which would be read with this one.
        OSError: if there is no room; the folder then holds what it held before.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    others = sorted(path.name for path in folder.glob("*.safetensors") if path.name != file_name)
    if others:
        raise ValueError(f"folder must hold no other *.safetensors than {file_name}, got {folder} with {others}")
    whole = {name: value.detach().cpu().contiguous() for name, value in tensors.items()}
    dtype = next((str(value.dtype) for value in whole.values() if value.is_floating_point()), "")
    config = {key: dtype.removeprefix("torch.") if key in ("dtype", "torch_dtype") else config[key] for key in config}
    with written_whole(folder / file_name, folder / "config.json") as (weights, text):
        save_file(whole, weights, metadata={"format": "pt"})
        text.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def check_made_for(source: Any, sizes: Mapping[str, tuple[int | None, int]]) -> None:
    """Check that a target has the sizes that a head was made for.

    Args:
        source: where the head is from, for messages.
        sizes: by name, what the head was made for (None if nothing in it depends on that), and what the target has.

    Raises:
        ValueError: naming the size that differs.
    """
    for name, (own, theirs) in sizes.items():
        if own not in (None, theirs):
            raise ValueError(f"{source} was made for a target of {name} {own}, but the target has {theirs}")


def fill(module: nn.Module, tensors: Mapping[str, Tensor], source: Path, optional: Collection[str] = ()) -> list[str]:
    """Give every parameter and buffer of a module its tensor, by name.

    Args:
        optional: names that may be missing; their values stay.

    Returns:
        Optional names that were missing.

    Raises:
        ValueError: that lists what is missing, what is extra and what has another shape.
    """
    wanted = module.state_dict()
    missing = [name for name in wanted if name not in tensors]
    wrong = [f"missing {name} {list(wanted[name].shape)}" for name in missing if name not in optional]
    wrong += [f"extra {name} {list(value.shape)}" for name, value in tensors.items() if name not in wanted]
    wrong += [
        f"{name} must be {list(wanted[name].shape)}, got {list(value.shape)}"
        for name, value in tensors.items()
        if name in wanted and value.shape != wanted[name].shape
    ]
    if wrong:
        more = [f"and {len(wrong) - _LISTED} more"] if len(wrong) > _LISTED else []
        listed = "; ".join(wrong[:_LISTED] + more)
        raise ValueError(f"{source} must hold the tensors of a {type(module).__name__}: {listed}")
    module.load_state_dict(dict(tensors), strict=False)
    return missing
