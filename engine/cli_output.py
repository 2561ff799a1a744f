"""What `python -m engine generate` shows of its outputs."""

import re
import sys
from collections.abc import Sequence
from typing import Any

from tqdm import tqdm

from .config import SamplingParams
from .engine import Engine
from .errors import InvalidLogitsError
from .output import Output
from .terminal import output_record, shown, stats_line, stdout_console, write_json, write_piece

# Prompts are served in groups of so many batches, so that finished ones can be shown; larger groups leave
# fewer places of a batch empty while a group ends.
BATCHES_PER_GROUP = 4


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


def serve(llm: Engine, items: list[Any], params: SamplingParams, max_batch_size: int, as_json: bool) -> int:
    """Show the prompts' outputs in order, group by group. If anything but a prompt fails, those are shown that have ended.

    Returns:
        The exit status: 1 if the target returned no distribution for some prompts, which harms no others.
    """
    status, group = 0, BATCHES_PER_GROUP * max_batch_size
    with tqdm(total=len(items), unit="prompt", desc="all", disable=len(items) <= group) as bar:
        for start in range(0, len(items), group):
            outputs: Sequence[Output | None]
            failure: BaseException | None = None
            try:
                outputs = llm.generate(items[start : start + group], params, progress=len(items) > 1)
            except InvalidLogitsError as error:
                outputs, status = error.outputs, 1
                for message in error.errors.values():
                    bar.write(f"error: {_renumbered(message, start)}", file=sys.stderr)
            except BaseException as error:  # Ctrl-C, too
                outputs, failure = getattr(error, "outputs", ()), error
            with bar.external_write_mode():
                for index, output in enumerate(outputs, start):
                    if output is not None:
                        _show(index, output, as_json)
            if failure is not None:
                raise failure
            bar.update(len(outputs))
    return status


def _renumbered(message: str, start: int) -> str:
    """That of a group of prompts, the first of which is number `start` of all."""
    return re.sub(r"prompts\[(\d+)\]", lambda found: f"prompts[{start + int(found[1])}]", message)


def _show(index: int, output: Output, as_json: bool) -> None:
    if as_json:
        write_json({"index": index, **output_record(output)})
    else:
        print(f"--- {index + 1} ---\n{shown(stdout_console(), output.text or '')}", flush=True)
