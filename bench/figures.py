"""What a case of the report has measured, part by part: one that fails leaves its traceback and stops no other."""

import gc
import traceback
from collections.abc import Callable, Mapping
from typing import Any

import torch

from .processes import without_paths

UNFINISHED = "begun, and not ended"


def failure(error: Exception) -> dict[str, Any]:
    """What stands in the place of figures."""
    line = f"{type(error).__name__}: {error}".splitlines()[0][:300]
    return {"error": line, "traceback": without_paths("".join(traceback.format_exception(error)))}


def is_failure(figures: Any) -> bool:
    return isinstance(figures, Mapping) and "error" in figures


class Figures(dict[str, Any]):
    """By the names of the parts.

    Args:
        known: what was measured before.
        save: is called when a part begins and when it has ended, so that a process that dies leaves the others.
    """

    def __init__(self, known: Mapping[str, Any] | None = None, save: Callable[[], None] = lambda: None) -> None:
        super().__init__(known or {})
        self._save = save

    @property
    def failed(self) -> list[str]:
        """The parts without figures."""
        return [name for name, part in self.items() if is_failure(part)]

    def measure(self, parts: Mapping[str, Callable[[], Any]]) -> None:
        """The parts that have no figures yet: first those that are new, then those that failed before.

        Raises:
            RuntimeError: if the GPU is lost; parts that have not begun are for another process.
        """
        for name in sorted(parts, key=self.__contains__):
            if name in self and not is_failure(self[name]):
                continue
            self[name] = {"error": UNFINISHED}
            self._save()
            try:
                self[name] = parts[name]()
            except Exception as error:
                self[name] = failure(error)
            self._save()
            if gpu_is_lost():
                raise RuntimeError("a fault has left the GPU unusable for this process")
            tidy()


def gpu_is_lost() -> bool:
    """Whether a fault, such as an access to memory that is not there, makes all later work of this process fail."""
    try:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False


def tidy() -> None:
    """Give back the memory of what is no longer held."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
