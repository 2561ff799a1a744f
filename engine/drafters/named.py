"""Drafters by name: "ngram", "suffix", "layer_skip:LAYERS", a packaged head, a checkpoint's location, "staged:LOCATION" for a
draft model that is itself decoded speculatively, or a cascade, "ngram+FOLDER".

LAYERS are a number, this many of the target's first layers, or a set, which has a comma or a dash: "0-7,28,29" are layers 0 to 7,
28 and 29, counted from 0, and "3-3" is layer 3 alone.
"""

import re
from collections.abc import Sequence
from difflib import get_close_matches

from ..heads import find_head, head_names
from ..hub import short_name, user_path
from .base import Drafter
from .layer_skip import LayerSkipDrafter
from .ngram import NGramDrafter
from .recognise import recognise
from .suffix import SuffixDrafter

# Shorter matches are right too seldom to take the place of a trained head: with matches of 2 a target call gave 2.30 tokens, with
# 3 or 4 it gave 2.33 (K = 4, the packaged head, greedy answers to 251 prompts of its recipe that it was not trained on).
CASCADE_MIN_NGRAM = 3
LAYER_SKIP, STAGED = "layer_skip:", "staged:"
_FIRST_STAGE = re.compile(r"(ngram|suffix)\+(.*)", re.DOTALL)
_KNOWN = ("ngram", "suffix", "layer_skip", "staged")
_LAYERS = re.compile(r"[0-9]{1,4}(-[0-9]{1,4})?(,[0-9]{1,4}(-[0-9]{1,4})?)*")


def split_stages(name: str) -> list[str]:
    """ "ngram+FOLDER" to its two parts, and so on; only lookup in the text can come first."""
    found = _FIRST_STAGE.fullmatch(name)
    return [found[1], *split_stages(found[2])] if found else [name]


def named(name: str, before_another: bool = False, role: str = "drafter") -> Drafter | str:
    """The drafter of one part of a name; that of a draft model, MODEL or "staged:MODEL", is returned as it is.

    Args:
        before_another: in a cascade, another part follows.
        role: the argument that has the name, for messages about a hub id.

    Raises:
        ValueError: for a layer_skip without layers, a staged drafter without a draft model, a name that is misspelt, or a
            damaged checkpoint.
        OSError: for an inaccessible hub id.
    """
    if name == "ngram":
        return NGramDrafter(min_ngram=CASCADE_MIN_NGRAM) if before_another else NGramDrafter()
    if name == "suffix":
        return SuffixDrafter(min_ngram=CASCADE_MIN_NGRAM) if before_another else SuffixDrafter()
    if name.startswith(LAYER_SKIP):
        return _layer_skip(name.removeprefix(LAYER_SKIP))
    if name.startswith(STAGED):
        _check_draft_model(name.removeprefix(STAGED))
        return name
    head = find_head(name)
    if head is None:
        _check_spelling(name)
    return recognise(head or name, role) or name


def _check_spelling(name: str) -> None:
    """What is no path, has no owner, and is near to a known name, was meant as that: no such hub id is known."""
    if re.search(r"\+(ngram|suffix)$", name) and not user_path(name).exists():
        raise ValueError(f"drafter must have lookups before other parts, such as 'ngram+MODEL', got {name!r}")
    word = re.split("[:+]", name)[0].lower().replace("-", "_")
    near = get_close_matches(word, _KNOWN, n=1, cutoff=0.75) or get_close_matches(name, head_names(), n=1, cutoff=0.75)
    if near and "/" not in word and not user_path(name).exists():
        if f"{near[0]}:" in (LAYER_SKIP, STAGED) and ":" not in name:
            raise ValueError(
                f"drafter {near[0]!r} must have an argument, such as layer_skip:8 or staged:MODEL, got {name!r}"
            )
        raise ValueError(f"drafter must be a known name, a hub id or a path, got {name!r}: did you mean {near[0]!r}?")


def _layer_skip(text: str) -> LayerSkipDrafter:
    if _LAYERS.fullmatch(text):
        if text.isdigit() and int(text) > 0:
            return LayerSkipDrafter(exit_layer=int(text))
        parts = [part.partition("-") for part in text.split(",")]
        spans = [(int(first), int(last or first)) for first, _, last in parts]
        layers = [layer for first, last in spans for layer in range(first, last + 1)]
        if not text.isdigit() and all(a <= b for a, b in spans) and layers == sorted(set(layers)):
            return LayerSkipDrafter(layers=layers)
    raise ValueError(
        f"drafter {LAYER_SKIP}... must have a number of layers >= 1, such as 8, or ascending layers, such as 0-7,28,29 "
        f"(counted from 0; below 10000), got {text!r}"
    )


def layer_skip_name(layers: Sequence[int]) -> str:
    """The name by which `named` knows this set of layers, which are ascending."""
    spans: list[list[int]] = []
    for layer in layers:
        if spans and layer == spans[-1][1] + 1:
            spans[-1][1] = layer
        else:
            spans.append([layer, layer])
    alone = len(layers) == 1  # without a dash it would be a number of layers
    return LAYER_SKIP + ",".join(f"{a}-{b}" if a < b or alone else str(a) for a, b in spans)


def _check_draft_model(name: str) -> None:
    """Of a staged drafter: only a model can be decoded speculatively."""
    rule = f"drafter {STAGED}MODEL must have the hub id, folder or GGUF file of a draft model"
    if not name or len(split_stages(name)) > 1 or location(name) != name:
        raise ValueError(f"{rule}, got {name!r}")
    if (head := recognise(name)) is not None:
        raise ValueError(f"{rule}, got {name}, which holds a learned head ({type(head).__name__})")


def location(part: str) -> str | None:
    """Where the checkpoint is that a part of a name asks for; None if there is none, or the package has it."""
    if part in ("ngram", "suffix") or part.startswith(LAYER_SKIP) or find_head(part) is not None:
        return None
    return part.removeprefix(STAGED)


def label(name: str) -> str:
    """A name for tables: the last part of a location."""
    return "+".join(map(_label, split_stages(name)))


def _label(part: str) -> str:
    place = location(part)
    return part if place is None else part.removesuffix(place) + short_name(place)
