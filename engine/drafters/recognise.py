"""Which learned drafter a folder or a hub repository holds, if it holds one and no draft model."""

from collections.abc import Collection
from pathlib import Path
from typing import Any

from safetensors import safe_open

from ..hub import fetched, files_of, may_be_hub_id, user_path
from .base import Drafter
from .eagle import EagleDrafter
from .head_files import NO_WEIGHTS, load_pickled, read_head, read_head_config, reading, weight_files
from .medusa import MedusaDrafter
from .mlp import MlpSpeculatorDrafter

SPECULATORS = ("eagle3", "eagle")  # values of speculators_model_type
# Parts of names of architectures that draft in other ways than those known here, lower case; transformers would take some of
# these checkpoints for a draft model without most of its weights.
UNSUPPORTED = ("dflash", "dspark", "peagle", "mtp", "eagle3deep")
# Keys of configs whose architecture is named like that of a head known here, or of the target; and what they are of.
_UNSUPPORTED_KEYS = {"dflash_config": "DFlash", "parallel_drafting": "P-EAGLE", "ptd_token_id": "P-EAGLE"}
_WEIGHTS = ("*.safetensors", "*.bin", "*.pt")


def recognise(location: str | Path, role: str = "drafter") -> Drafter | None:
    """The learned drafter in a folder or a hub repository; None if it is none of those known here (a draft model, then).

    The config decides; for the first EAGLE heads, which have that of their target with one layer, the names of the tensors.
    Of a hub repository whose config is not a drafter's, nothing but the config is fetched.

    Raises:
        ValueError: for a `speculators_model_type` or an architecture that is not supported; for a damaged checkpoint.
        OSError: for an inaccessible hub id.
    """
    folder = user_path(location)
    if folder.is_dir():
        if not str(location) or not (folder / "config.json").is_file():
            return None
        return _from_folder(folder, read_head_config(folder))
    if folder.exists() or not may_be_hub_id(str(location)):
        return None
    folder = files_of(str(location), role)
    if not (folder / "config.json").is_file():
        return None
    config = read_head_config(folder)
    if _kind(config) is None and not _may_be_eagle(config):
        return None
    return _from_folder(_fetch(str(location), role), config)


def _from_folder(folder: Path, config: dict[str, Any]) -> Drafter | None:
    kind = _kind(config) or _kind(config, _names(folder, config))
    return None if kind is None else kind.from_files(read_head(folder))


def _kind(config: dict[str, Any], names: Collection[str] = ()) -> Any:
    """The class of the drafter with this config, and tensors of these names."""
    speculator = config.get("speculators_model_type")
    if speculator is not None and speculator not in SPECULATORS:
        raise ValueError(f"drafter must have a speculators_model_type of {list(SPECULATORS)}, got {speculator!r}")
    if speculator is None and MedusaDrafter.matches(config, names):
        return MedusaDrafter
    if speculator is None and MlpSpeculatorDrafter.matches(config):
        return MlpSpeculatorDrafter
    architectures = config.get("architectures") or []
    architectures = [architectures] if isinstance(architectures, str) else architectures
    others = [str(name) for name in architectures if any(part in str(name).lower() for part in UNSUPPORTED)]
    others += [
        kind for key, kind in _UNSUPPORTED_KEYS.items() if (value := config.get(key)) is not None and value is not False
    ]
    if others:
        raise ValueError(
            f"drafter must be of a kind that is supported (see engine.load), got the architecture {others[0]}"
        )
    if (
        speculator is not None
        or "draft_vocab_size" in config
        or "eagle_config" in config
        or any("eagle" in str(name).lower() for name in architectures)
        or (_may_be_eagle(config) and not {"fc.weight", "model.fc.weight"}.isdisjoint(names))
    ):
        return EagleDrafter
    return None


def _may_be_eagle(config: dict[str, Any]) -> bool:
    return config.get("num_hidden_layers") == 1


def _names(folder: Path, config: dict[str, Any]) -> list[str]:
    """Of the tensors, where they can tell more than the config does; the tensors themselves are not read."""
    if "model_type" in config and not _may_be_eagle(config):
        return []
    names: list[str] = []
    for file in weight_files(folder):
        with reading(file):
            names += _names_in(file)
    return names


def _names_in(file: Path) -> list[str]:
    if file.suffix == ".safetensors":
        with safe_open(file, "pt") as opened:
            return list(opened.keys())
    return list(load_pickled(file, "meta"))


def _fetch(repository: str, role: str) -> Path:
    """The repository's config and weights: *.safetensors, or what there is instead."""
    folder = fetched(repository, role, ["config.json", "*.safetensors"])
    if not any(folder.glob("*.safetensors")):
        folder = fetched(repository, role, ["config.json", *_WEIGHTS], ignored=sorted(NO_WEIGHTS))
    return folder
