"""Hub ids and paths: telling them apart, and errors that name them."""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_HUB_ID = re.compile(r"[A-Za-z0-9._-]+(/[A-Za-z0-9._-]+)?")


def may_be_hub_id(source: str) -> bool:
    """Whether it is "name" or "owner/name"; anything else was meant as a path."""
    meant_as_path = source.startswith(".") or source.lower().endswith(".gguf")
    return not meant_as_path and _HUB_ID.fullmatch(source) is not None


def user_path(source: str | Path) -> Path:
    """With the home of a user in place of `~` or `~name`; as it is where there is none, unlike `Path.expanduser`, which raises."""
    return Path(os.path.expanduser(source))


def existing_path(source: str, role: str) -> Path:
    """The path, where it is one.

    Raises:
        FileNotFoundError: if it does not exist and is no hub id.
    """
    path = user_path(source)
    if not path.exists() and not may_be_hub_id(source):
        raise FileNotFoundError(f"{role} must be an existing path or a hub id, got {source!r}, which does not exist")
    return path


@contextmanager
def naming_errors(source: str, role: str) -> Iterator[None]:
    """The OSErrors of a hub id that cannot be had name it, and the argument."""
    try:
        yield
    except OSError as error:
        if user_path(source).exists():
            raise
        names = "\n(Or one of the names ngram, suffix, layer_skip:N, staged:MODEL.)" if role == "drafter" else ""
        raise OSError(
            f"{role} must be an existing path or a hub id that can be had, got {source!r}: {error}{names}"
        ) from error
