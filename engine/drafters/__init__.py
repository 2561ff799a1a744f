"""Drafters: whatever proposes tokens."""

from .base import Drafter
from .model import DraftModel
from .ngram import NGramDrafter

__all__ = ["DraftModel", "Drafter", "NGramDrafter"]
