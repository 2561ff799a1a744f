"""Errors of the engine that are not a plain ValueError or FileNotFoundError."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .output import Output


class EngineError(RuntimeError):
    """Loading, generating or training failed."""


class InvalidLogitsError(EngineError):
    """The target returned logits with NaN or +inf, or nothing but -inf: there is no distribution to draw from.

    Raised once all other prompts have finished; a failing prompt does not affect them.

    Attributes:
        outputs: one entry per prompt, in order: its `Output`, or None where it failed (in the error that `on_output` gets, also
            where it has not finished).
        errors: what happened, by index of the prompt.
    """

    def __init__(self, message: str, outputs: list[Output | None], errors: dict[int, str] | None = None) -> None:
        super().__init__(message)
        self.outputs, self.errors = outputs, errors or {}

    def __reduce__(self) -> tuple[Any, ...]:
        """For copies and pickles, which would otherwise rebuild an exception from its message alone."""
        return type(self), (str(self), self.outputs, self.errors)


class UnsupportedModelError(ValueError):
    """The architecture cannot be decoded over a ragged cache; the message says which and why."""
