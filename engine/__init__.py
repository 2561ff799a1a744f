"""Speculative decoding for Hugging Face causal language models, with Triton kernels.

>>> import engine
>>> llm = engine.load("path or hub id", drafter="ngram")
>>> llm.generate("text", engine.SamplingParams(max_new_tokens=64)).text

Names are imported on first use, so `import engine` alone is fast and touches no device.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .config import EngineConfig, SamplingParams
    from .drafters import (
        CascadeDrafter,
        Drafter,
        DraftModel,
        EagleDrafter,
        IntersectionDraftModel,
        LayerSkipDrafter,
        MedusaDrafter,
        MlpSpeculatorDrafter,
        NGramDrafter,
        ReencodingDraftModel,
        StagedDraftModel,
        SuffixDrafter,
    )
    from .engine import Engine
    from .errors import EngineError, InvalidLogitsError, UnsupportedModelError
    from .layer_search import LayerChoice, LayerSearch, search_layers
    from .loading import load
    from .metrics import Stats
    from .output import Output, Piece, Span
    from .state import BatchState, Proposal, Verdict

__version__ = "0.1.0"

_HOME = {
    "BatchState": "state",
    "CascadeDrafter": "drafters",
    "DraftModel": "drafters",
    "Drafter": "drafters",
    "EagleDrafter": "drafters",
    "Engine": "engine",
    "EngineConfig": "config",
    "EngineError": "errors",
    "IntersectionDraftModel": "drafters",
    "InvalidLogitsError": "errors",
    "LayerChoice": "layer_search",
    "LayerSearch": "layer_search",
    "LayerSkipDrafter": "drafters",
    "MedusaDrafter": "drafters",
    "MlpSpeculatorDrafter": "drafters",
    "NGramDrafter": "drafters",
    "Output": "output",
    "Piece": "output",
    "Proposal": "state",
    "ReencodingDraftModel": "drafters",
    "SamplingParams": "config",
    "Span": "output",
    "StagedDraftModel": "drafters",
    "Stats": "metrics",
    "SuffixDrafter": "drafters",
    "UnsupportedModelError": "errors",
    "Verdict": "state",
    "load": "loading",
    "search_layers": "layer_search",
}

__all__ = [
    "BatchState",
    "CascadeDrafter",
    "DraftModel",
    "Drafter",
    "EagleDrafter",
    "Engine",
    "EngineConfig",
    "EngineError",
    "IntersectionDraftModel",
    "InvalidLogitsError",
    "LayerChoice",
    "LayerSearch",
    "LayerSkipDrafter",
    "MedusaDrafter",
    "MlpSpeculatorDrafter",
    "NGramDrafter",
    "Output",
    "Piece",
    "Proposal",
    "ReencodingDraftModel",
    "SamplingParams",
    "Span",
    "StagedDraftModel",
    "Stats",
    "SuffixDrafter",
    "UnsupportedModelError",
    "Verdict",
    "load",
    "search_layers",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_HOME[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
