"""Speculative decoding for Hugging Face causal language models, with Triton kernels.

>>> import engine
>>> llm = engine.load("path or hub id", drafter="ngram")
>>> llm.generate("text", engine.SamplingParams(max_new_tokens=64)).text

Names are imported when they are first used, so that `import engine` alone is quick and touches no device.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .config import EngineConfig, SamplingParams
    from .drafters import Drafter, DraftModel, NGramDrafter
    from .engine import Engine
    from .errors import EngineError, InvalidLogitsError, UnsupportedModelError
    from .loading import load
    from .metrics import Stats
    from .output import Output, Piece, Span
    from .state import BatchState, Proposal, Verdict

__version__ = "0.1.0"

_HOME = {
    "BatchState": "state",
    "DraftModel": "drafters",
    "Drafter": "drafters",
    "Engine": "engine",
    "EngineConfig": "config",
    "EngineError": "errors",
    "InvalidLogitsError": "errors",
    "NGramDrafter": "drafters",
    "Output": "output",
    "Piece": "output",
    "Proposal": "state",
    "SamplingParams": "config",
    "Span": "output",
    "Stats": "metrics",
    "UnsupportedModelError": "errors",
    "Verdict": "state",
    "load": "loading",
}

__all__ = [
    "BatchState",
    "DraftModel",
    "Drafter",
    "Engine",
    "EngineConfig",
    "EngineError",
    "InvalidLogitsError",
    "NGramDrafter",
    "Output",
    "Piece",
    "Proposal",
    "SamplingParams",
    "Span",
    "Stats",
    "UnsupportedModelError",
    "Verdict",
    "load",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_HOME[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
