"""Hub ids and paths: telling them apart, fetching what is beside the weights, and errors that name them."""

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .heads import head_names

_BESIDE_WEIGHTS = (
    "config.json", "generation_config.json", "adapter_config.json", "tokenizer*", "special_tokens_map.json", "added_tokens.json",
    "chat_template*", "vocab*", "merges.txt", "*.model", "*.tiktoken", "tekken.json",
)  # fmt: skip
_HUB_ID = re.compile(r"([A-Za-z0-9._-]+(?:/[A-Za-z0-9._-]+)?)(?:@([A-Za-z0-9._/-]+))?")


def may_be_hub_id(source: str) -> bool:
    """Whether it is "name", "owner/name" or one of these with "@revision"; anything else was meant as a path."""
    meant_as_path = source.startswith(".") or source.lower().endswith(".gguf")
    return not meant_as_path and _HUB_ID.fullmatch(source) is not None


def split_revision(source: str) -> tuple[str, str | None]:
    """Of a hub id the repository and the revision, a branch, tag or commit, None if there is none; a path stays whole."""
    found = _HUB_ID.fullmatch(source)
    if found is None or not may_be_hub_id(source) or user_path(source).exists():
        return source, None
    return found[1], found[2]


def short_name(source: str) -> str:
    """The last part of a path, or of a hub id without its owner."""
    repository, revision = split_revision(source)
    return Path(repository).name + (f"@{revision}" if revision else "")


def user_path(source: str | Path) -> Path:
    """With the home of a user in place of `~` or `~name`; as it is where there is none, unlike `Path.expanduser`, which raises."""
    return Path(os.path.expanduser(source))


def existing_path(source: str, role: str) -> Path:
    """The path, where it is one.

    Raises:
        FileNotFoundError: if it does not exist and is not a hub id.
    """
    path = user_path(source)
    if not path.exists() and not may_be_hub_id(source):
        hint = "; a hub id is owner/name or owner/name@revision" if "://" in source or "@" in source else ""
        raise FileNotFoundError(
            f"{role} must be an existing path or a hub id, got {source!r}, which does not exist{hint}"
        )
    return path


def hub_errors() -> tuple[type[Exception], ...]:
    """What is raised where the hub cannot be reached, lacks something, or a connection breaks off."""
    from huggingface_hub.errors import HTTPError  # type: ignore[attr-defined]  # of the httpx that it uses

    return OSError, HTTPError


def files_of(source: str, role: str) -> Path:
    """The folder with all of a checkpoint but its weights: a path as it is, or what the hub has of an id, in the cache.

    Raises:
        FileNotFoundError: for a path that does not exist.
        OSError: for an inaccessible hub id.
    """
    path = existing_path(source, role)
    return path if path.exists() else fetched(source, role, _BESIDE_WEIGHTS, shown=False)


def fetched(source: str, role: str, patterns: Sequence[str], ignored: Sequence[str] = (), shown: bool = True) -> Path:
    """The folder in the cache with the files of a hub id that these patterns fit; those in its subfolders are other checkpoints'.

    Without a network it is what the cache has.

    Raises:
        OSError: if it is not accessible.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.utils import tqdm  # type: ignore[attr-defined]

    class Hidden(tqdm):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options | {"disable": True})

    repository, revision = split_revision(source)
    chosen: dict[str, Any] = {"allow_patterns": [*patterns], "ignore_patterns": ["*/*", *ignored]}
    if not shown:
        chosen["tqdm_class"] = Hidden
    try:
        folder: str = snapshot_download(repository, revision=revision, **chosen)
    except hub_errors() as error:
        names = ", ".join(("ngram", "suffix", "layer_skip:N", "staged:MODEL", *head_names(), "ngram+X", "suffix+X"))
        others = f"\n(Or one of the names {names}.)" if role == "drafter" else ""
        raise OSError(
            f"{role} must be an existing path or an accessible hub id, got {source!r}: {error}{others}"
        ) from error
    return Path(folder)
