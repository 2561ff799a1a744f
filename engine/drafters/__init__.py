"""Drafters: whatever proposes tokens."""

from .base import Drafter
from .cascade import CascadeDrafter
from .eagle import EagleDrafter
from .intersection import IntersectionDraftModel
from .layer_skip import LayerSkipDrafter
from .medusa import MedusaDrafter
from .mlp import MlpSpeculatorDrafter
from .model import DraftModel
from .ngram import NGramDrafter
from .reencoding import ReencodingDraftModel
from .staged import StagedDraftModel
from .suffix import SuffixDrafter

__all__ = [
    "CascadeDrafter",
    "DraftModel",
    "Drafter",
    "EagleDrafter",
    "IntersectionDraftModel",
    "LayerSkipDrafter",
    "MedusaDrafter",
    "MlpSpeculatorDrafter",
    "NGramDrafter",
    "ReencodingDraftModel",
    "StagedDraftModel",
    "SuffixDrafter",
]
