"""The demo: three prompts answered in colour, then plain against speculative decoding, timed in turns."""

import platform
import statistics
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from .default_model import usual_target
from .demo_prompts import PROMPTS, DemoPrompt
from .terminal import (
    legend,
    loading,
    output_record,
    stats_line,
    stdout_console,
    working,
    write_json,
    write_piece,
)
from .text_difference import first_difference
from .threads import use_all_cores

if TYPE_CHECKING:
    from .config import SamplingParams
    from .engine import Engine
    from .output import Output

MAX_SCATTER = 0.3  # beyond this the table warns: something else kept the machine busy
EXACT_NOTE = """\
Exact: plain decoding too runs every call at the width of a verification, so that the texts are the same."""
ROUNDING_NOTE = """\
Where texts differ, two tokens were almost equally likely, and rounding, which depends on the shape of a call,
decided between them. With --exact all calls have one shape, and the texts are the same."""


@dataclass(frozen=True)
class DemoOptions:
    """What the demo is run with; None for `target`: SmolLM2-135M-Instruct."""

    target: str | None
    drafter: str
    num_draft_tokens: int | str
    exact: bool | None
    max_new_tokens: int
    repeats: int
    dtype: str
    device: str
    as_json: bool


@dataclass
class Timing:
    """One prompt's runs: plain and speculative, as many of each, in turns."""

    prompt: DemoPrompt
    plain_seconds: list[float] = field(default_factory=list)
    speculative_seconds: list[float] = field(default_factory=list)
    plain: "Output | None" = None  # of the last run
    speculative: "Output | None" = None

    def report(self) -> dict[str, Any]:
        """All figures, for JSON and the table."""
        assert self.plain is not None and self.speculative is not None
        plain = len(self.plain.token_ids) / statistics.median(self.plain_seconds)
        speculative = len(self.speculative.token_ids) / statistics.median(self.speculative_seconds)
        first = first_difference(self.plain.token_ids, self.speculative.token_ids)
        return {
            "prompt": self.prompt.name,
            "plain_tokens_per_second": plain,
            "speculative_tokens_per_second": speculative,
            "speedup": speculative / plain,
            "slower": speculative / plain < 0.995,  # so that no 1.00x is called slower
            "scatter": max(scatter(self.plain_seconds), scatter(self.speculative_seconds)),
            "acceptance_rate": self.speculative.stats.acceptance_rate,
            "acceptance_per_position": self.speculative.stats.acceptance_per_position,
            "block_efficiency": self.speculative.stats.block_efficiency,
            "identical": first is None,
            "first_difference": first,
            "plain_seconds": self.plain_seconds,
            "speculative_seconds": self.speculative_seconds,
            "plain": output_record(self.plain),
            "speculative": output_record(self.speculative),
        }


def scatter(seconds: list[float]) -> float:
    """How far runs lie apart, as a share of their median."""
    return (max(seconds) - min(seconds)) / statistics.median(seconds)


def run(options: DemoOptions) -> None:
    """Run the demo."""
    import engine

    params = engine.SamplingParams(max_new_tokens=options.max_new_tokens)
    if options.repeats < 1:
        raise ValueError(f"repeats must be >= 1, got {options.repeats}")
    console = stdout_console()
    plain, speculative = _load(options)
    try:
        speculative.check([_messages(prompt) for prompt in PROMPTS], params)
    except ValueError as error:
        raise ValueError(f"{error} (of the demo's own prompts; `generate` takes others)") from error
    if not options.as_json:
        _stream_answers(console, speculative, params)
    timings = [_time(prompt, plain, speculative, params, options.repeats) for prompt in PROMPTS]
    reports = [timing.report() for timing in timings]
    environment = _environment(options, speculative)
    if options.as_json:
        write_json({**environment, "prompts": reports})
    else:
        _show_table(console, reports, options.repeats, speculative)
        console.print(f"[dim]{escape(describe(environment))}[/]")


def _load(options: DemoOptions) -> "tuple[Engine, Engine]":
    """A plain and a speculative engine over one loaded model."""
    import engine

    from .loading import check_drafter

    check_drafter(options.drafter)
    use_all_cores()
    target = usual_target(options.target)
    settings: dict[str, Any] = {
        "num_draft_tokens": options.num_draft_tokens,
        "exact": options.exact,
        "max_batch_size": 1,
    }
    hint = " (the first time takes about 20 s)" if target.endswith(".gguf") else ""
    with loading(target, options.drafter, hint, note=True):
        plain = engine.load(target, drafter=None, dtype=options.dtype, device=options.device, **settings)
        speculative = engine.load(plain.target_model, drafter=options.drafter, tokenizer=plain.tokenizer, **settings)
    return plain, speculative


def _stream_answers(console: Console, llm: "Engine", params: "SamplingParams") -> None:
    if colours := legend(console):
        console.print(f"{colours}\n")
    for prompt in PROMPTS:
        console.print(f"[bold]{prompt.name}: {prompt.title}[/]\n")
        for piece in llm.stream(_messages(prompt), params):
            write_piece(console, piece)
            output = piece.output
        assert output is not None
        cut = " (cut off there)" if output.finish_reason == "length" else ""
        console.print(f"\n\n[dim]{stats_line(output.stats)}{cut}[/]\n")


def _time(prompt: DemoPrompt, plain: "Engine", speculative: "Engine", params: "SamplingParams", repeats: int) -> Timing:
    """Time both engines in turns, so that whatever else the machine does falls on both."""
    import engine

    timing = Timing(prompt)
    warmup = engine.SamplingParams(max_new_tokens=min(8, params.max_new_tokens))
    with working(f"timing the {prompt.name}: {repeats} runs each, plain and speculative in turns", note=True):
        for llm in (plain, speculative):
            llm.generate(_messages(prompt), warmup)
        for _ in range(repeats):
            timing.plain, seconds = _timed(plain, prompt, params)
            timing.plain_seconds.append(seconds)
            timing.speculative, seconds = _timed(speculative, prompt, params)
            timing.speculative_seconds.append(seconds)
    return timing


def _timed(llm: "Engine", prompt: DemoPrompt, params: "SamplingParams") -> "tuple[Output, float]":
    begin = time.perf_counter()
    output = llm.generate(_messages(prompt), params)
    return output, time.perf_counter() - begin


def _messages(prompt: DemoPrompt) -> list[dict[str, str]]:
    return [{"role": "user", "content": prompt.content}]


def _show_table(console: Console, reports: list[dict[str, Any]], repeats: int, llm: "Engine") -> None:
    table = Table(box=box.SIMPLE_HEAVY, collapse_padding=True, pad_edge=False)
    table.add_column("prompt", no_wrap=True)
    rates = ("plain\ntokens/s", "speculative\ntokens/s", "speedup")
    for name in (*rates, "acceptance", "block\nefficiency", "same\ntext"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in reports:
        speedup = f"{row['speedup']:.2f}x"
        table.add_row(
            row["prompt"],
            f"{row['plain_tokens_per_second']:.1f}",
            f"{row['speculative_tokens_per_second']:.1f}",
            f"[bold red]{speedup} slower[/]" if row["slower"] else f"[green]{speedup}[/]",
            f"{row['acceptance_rate']:.0%}",
            f"{row['block_efficiency']:.2f}",
            "yes" if row["identical"] else "no",
        )
    # On a narrow terminal too: lines that it wraps can be read, columns that are cut away cannot.
    table.width = console.measure(table, options=console.options.update(width=1000)).maximum
    console.print(table)
    console.print(f"Median of runs in turns ({repeats} each) of the whole answer, reading the prompt included.")
    console.print("Block efficiency: tokens per call of the target.")
    for row in reports:
        if row["slower"]:
            console.print(f"[red]The {row['prompt']} was slower with speculation than without.[/]")
        if row["scatter"] > MAX_SCATTER:
            console.print(f"[red]The {row['prompt']}: runs lie {row['scatter']:.0%} apart; trust no speedup here.[/]")
        if not row["identical"]:
            console.print(f"The {row['prompt']}: the two texts part at token {row['first_difference'] + 1}.")
    if llm.exact:
        console.print(EXACT_NOTE)
    elif not all(row["identical"] for row in reports):
        console.print(ROUNDING_NOTE)


def _environment(options: DemoOptions, llm: "Engine") -> dict[str, Any]:
    """What the figures were measured with."""
    import torch

    model = llm.target_model
    device = platform.machine()
    if model.device.type == "cuda":
        device = torch.cuda.get_device_name(model.device)
    return {
        "target": Path(usual_target(options.target)).name,
        "drafter": options.drafter,
        "num_draft_tokens": options.num_draft_tokens,
        "exact": llm.exact,
        "dtype": str(model.dtype).removeprefix("torch."),
        "device": f"{model.device.type} ({device})",
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "repeats": options.repeats,
        "max_new_tokens": options.max_new_tokens,
    }


def describe(environment: dict[str, Any]) -> str:
    """The environment in a line."""
    return (
        "{target}, {dtype}, {drafter} drafter, K = {num_draft_tokens}, {exactness}; "
        "{device}, threads: {threads}, torch {torch}"
    ).format(exactness="exact" if environment["exact"] else "not exact", **environment)
