"""Drafters by name: "ngram", "suffix", "layer_skip:N", a packaged head, a checkpoint's location, or a cascade, "ngram+FOLDER"."""

import re
from pathlib import Path

from ..heads import find_head
from .base import Drafter
from .layer_skip import LayerSkipDrafter
from .ngram import NGramDrafter
from .recognise import recognise
from .suffix import SuffixDrafter

CASCADE_MIN_NGRAM = 2  # a match of one token is right too seldom to take another drafter's place
_FIRST_STAGE = re.compile(r"(ngram|suffix)\+(.*)", re.DOTALL)


def split_stages(name: str) -> list[str]:
    """ "ngram+FOLDER" to its two parts, and so on; only lookup in the text can come first."""
    found = _FIRST_STAGE.fullmatch(name)
    return [found[1], *split_stages(found[2])] if found else [name]


def named(name: str, in_cascade: bool = False) -> Drafter | str:
    """The drafter of one part of a name; a location that holds no learned drafter is returned as it is: a draft model.

    Raises:
        ValueError: for a layer_skip without a number, or a damaged checkpoint.
        OSError: for a hub id that cannot be had.
    """
    if name == "ngram":
        return NGramDrafter(min_ngram=CASCADE_MIN_NGRAM) if in_cascade else NGramDrafter()
    if name == "suffix":
        return SuffixDrafter(min_ngram=CASCADE_MIN_NGRAM) if in_cascade else SuffixDrafter()
    if name.startswith("layer_skip:"):
        exit_layer = name.removeprefix("layer_skip:")
        if not exit_layer.isdigit():
            raise ValueError(f"drafter layer_skip:N must have a number of layers N, got {exit_layer!r}")
        return LayerSkipDrafter(exit_layer=int(exit_layer))
    return recognise(find_head(name) or name) or name


def is_location(name: str) -> bool:
    """Whether a part of a name says where a checkpoint is."""
    return name not in ("ngram", "suffix") and not name.startswith("layer_skip:") and find_head(name) is None


def label(name: str) -> str:
    """A name for tables: the last part of a location."""
    return "+".join(Path(part).name if is_location(part) else part for part in split_stages(name))
