"""What a user means by the place of a checkpoint."""

from pathlib import Path


def may_be_hub_id(source: str) -> bool:
    """Whether it is "name" or "owner/name"; anything else was meant as a path."""
    path = Path(source)
    meant_as_path = path.is_absolute() or source.startswith((".", "~")) or source.count("/") > 1
    return bool(source) and not meant_as_path and path.suffix.lower() != ".gguf"
