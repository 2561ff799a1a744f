"""What the commands share: coloured text, statistics in a line, JSON, a spinner, a milder Ctrl-C."""

import json
import math
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape

from .heads import find_head
from .hub import may_be_hub_id, user_path

if TYPE_CHECKING:
    from .metrics import Stats
    from .output import Output, Piece

DRAFTED_STYLE = "green"
# Control characters: those of ASCII have symbols (ESC begins escape codes, SO changes the character set, ...), and those from
# U+0080 on stand for ESC and another one.
_SHOWN = {code: chr(0x2400 + code) for code in range(0x20) if chr(code) not in "\t\n\r"}
_SHOWN |= {0x7F: "\N{SYMBOL FOR DELETE}", **dict.fromkeys(range(0x80, 0xA0), "\N{REPLACEMENT CHARACTER}")}


def stdout_console() -> Console:
    """A console that leaves the wrapping of text to the terminal, and reads no names of emoji in it."""
    return Console(highlight=False, soft_wrap=True, emoji=False)


def has_colours(console: Console) -> bool:
    """Whether drafted text can be told from the target's own."""
    return console.is_terminal and console.color_system is not None and not console.no_color


def legend(console: Console) -> str:
    """What the colours mean, as rich markup; empty where there are none."""
    if not has_colours(console):
        return ""
    return f"[{DRAFTED_STYLE}]drafted and accepted[/]  the target's own"


def shown(console: Console, text: str) -> str:
    """A model may emit escape codes, which are no business of the reader's terminal: there, they are shown and not obeyed."""
    return text.translate(_SHOWN) if console.is_terminal else text


def write_piece(console: Console, piece: "Piece") -> None:
    """Show what a round added to an answer. Not on a terminal, the text is written as it is."""
    if not console.is_terminal:
        console.file.write(piece.text or "")
        console.file.flush()
        return
    for span in piece.spans:
        console.out(shown(console, span.text), style=DRAFTED_STYLE if span.drafted else None, highlight=False, end="")


def stats_line(stats: "Stats") -> str:
    """The statistics of one answer in a line."""
    parts = [f"{stats.new_tokens} tokens", f"{stats.tokens_per_second:.1f} tokens/s"]
    if stats.draft_tokens:
        parts.append(f"acceptance {stats.acceptance_rate:.0%}")
        parts.append(f"{stats.block_efficiency:.2f} tokens per target call")
    return ", ".join(parts)


def output_record(output: "Output") -> dict[str, Any]:
    """An output as `--json` shows it: the prompt is the user's own."""
    return {name: value for name, value in output.as_dict().items() if name != "prompt_token_ids"}


def error_record(message: str) -> dict[str, Any]:
    """In place of an output, what kept a prompt from one."""
    return dict(text="", token_ids=[], finish_reason="error", stats=None, error=message)


def write_json(record: dict[str, Any]) -> None:
    """One line on stdout, at once."""
    print(json.dumps(_finite(record), allow_nan=False), flush=True)


def _finite(value: Any) -> Any:
    """The same with null where a number is infinite or none: JSON knows neither."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


@contextmanager
def working(message: str, note: bool = False) -> Iterator[None]:
    """Say on stderr what takes so long. Not on a terminal: nothing, or one line if `note`."""
    console = Console(stderr=True, highlight=False, emoji=False)
    if not console.is_terminal:
        if note:
            print(message, file=sys.stderr, flush=True)
        yield
        return
    with console.status(escape(message), spinner="dots"):
        yield


@contextmanager
def loading(name: str, drafter: str = "none", hint: str = "", note: bool = False) -> Iterator[None]:
    """Show that a model is being loaded, and its drafter, and quieten what transformers says meanwhile.

    A download keeps its own progress bars, beside which there is no room for a spinner.

    Args:
        name: a target, or a drafter that is loaded alone.
        drafter: loaded with the target.
        hint: shown after the name.
        note: not on a terminal, write one line.
    """
    from transformers.utils import logging

    logging.set_verbosity_error()
    parts = [*name.split("+"), *drafter.split("+")]
    if any(map(_is_of_the_hub, parts)):
        logging.enable_progress_bar()
        yield
        return
    logging.disable_progress_bar()
    with working(f"loading {Path(name).name}{hint}", note):
        yield


def _is_of_the_hub(part: str) -> bool:
    """As drafters/named.py finds it, which takes seconds to import."""
    name = part.removeprefix("staged:")
    known = name in ("none", "ngram", "suffix") or find_head(name) is not None
    return not known and not user_path(name).exists() and may_be_hub_id(name)


@contextmanager
def stop_on_interrupt() -> Iterator[threading.Event]:
    """Within, the first Ctrl-C only sets the event; a second one interrupts as ever."""
    stopped = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield stopped  # signals are for the main thread
        return
    previous = signal.getsignal(signal.SIGINT) or signal.default_int_handler  # None: of a program that embeds Python

    def stop(signum: int, frame: Any) -> None:
        stopped.set()
        signal.signal(signal.SIGINT, previous)

    signal.signal(signal.SIGINT, stop)
    try:
        yield stopped
    finally:
        signal.signal(signal.SIGINT, previous)
