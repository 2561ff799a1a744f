"""What `python -m engine generate` shows of its outputs."""

import sys
from collections.abc import Sequence
from typing import Any

from tqdm import tqdm

from .config import SamplingParams
from .engine import Engine
from .errors import InvalidLogitsError
from .output import Output
from .terminal import error_record, output_record, shown, stats_line, stdout_console, write_json, write_piece


def stream_one(llm: Engine, item: Any, params: SamplingParams) -> None:
    """Show the only prompt's text as it comes; on a terminal, the statistics too."""
    console = stdout_console()
    text, output = "", None
    for piece in llm.stream(item, params):
        text += piece.text or ""
        output = piece.output
        write_piece(console, piece)
    print("" if text.endswith("\n") else "\n", end="", flush=True)
    if output and sys.stderr.isatty():
        print(stats_line(output.stats), file=sys.stderr)


def serve(llm: Engine, items: list[Any], params: SamplingParams, as_json: bool) -> int:
    """Show the prompts' outputs in order. If anything but a prompt fails, or at Ctrl-C, those that have ended are shown.

    Returns:
        The exit status: 1 if the target returned no distribution for some prompts, which harms no others.
    """
    shown_in_order = _InOrder(as_json)
    try:
        llm.generate(items, params, progress=len(items) > 1, on_output=shown_in_order.add)
    except InvalidLogitsError:
        return 1  # of each prompt, this has been shown
    except BaseException as error:
        shown_in_order.add_others(getattr(error, "outputs", []))
        raise
    finally:
        shown_in_order.show_rest()
    return 0


class _InOrder:
    """Shows each prompt's output, or its error, as soon as it and all before it have ended."""

    def __init__(self, as_json: bool) -> None:
        self._as_json, self._next = as_json, 0
        self._added: set[int] = set()
        self._waiting: dict[int, Output | InvalidLogitsError] = {}

    def add(self, index: int, result: Output | InvalidLogitsError) -> None:
        self._added.add(index)
        self._waiting[index] = result
        while self._next in self._waiting:
            self._next += 1
            self._show(self._next - 1)

    def add_others(self, outputs: Sequence[Output | None]) -> None:
        """Those that ended and were not added yet; None stands for the others."""
        for index, output in enumerate(outputs):
            if output is not None and index not in self._added:
                self.add(index, output)

    def show_rest(self) -> None:
        for index in sorted(self._waiting):
            self._show(index)

    def _show(self, index: int) -> None:
        result = self._waiting.pop(index)
        with tqdm.external_write_mode():
            if isinstance(result, InvalidLogitsError):
                print(f"error: {result}", file=sys.stderr)
                if self._as_json:
                    write_json({"index": index, **error_record(str(result))})
            elif self._as_json:
                write_json({"index": index, **output_record(result)})
            else:
                print(f"--- {index + 1} ---\n{shown(stdout_console(), result.text or '')}", flush=True)
