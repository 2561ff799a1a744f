"""Errors of the engine that are no plain ValueError or FileNotFoundError."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .output import Output


class EngineError(RuntimeError):
    """Something went wrong while generating or training."""


class InvalidLogitsError(EngineError):
    """The target returned logits with NaN or +inf, or nothing but -inf: there is no distribution to draw from.

    Raised after all other prompts have ended: one that fails does not affect the others.

    Attributes:
        outputs: one entry per prompt, in order: its `Output`, or None where it failed.
        errors: what happened, by index of the prompt.
    """

    def __init__(self, message: str, outputs: list[Output | None], errors: dict[int, str] | None = None) -> None:
        super().__init__(message)
        self.outputs, self.errors = outputs, errors or {}

    def __reduce__(self) -> tuple[Any, ...]:
        """For copies and pickles: an exception is made anew from its message alone otherwise."""
        return type(self), (str(self), self.outputs, self.errors)


class UnsupportedModelError(ValueError):
    """The architecture cannot be decoded over a ragged cache; the message says which and why."""
