"""Trained heads that come with the package: a folder each, with a card (README.md) that says how it was made."""

from pathlib import Path

DEFAULT_DRAFTER = "ngram+eagle3-SmolLM2-135M-Instruct"  # of the command line, for its default target


def head_names() -> list[str]:
    return sorted(file.parent.name for file in Path(__file__).parent.glob("*/config.json"))


def find_head(name: str) -> Path | None:
    """The folder of the head of this name; None if there is none."""
    folder = Path(__file__).parent / name
    return folder if name and Path(name).name == name and (folder / "config.json").is_file() else None
