"""The command line of `python -m bench.throughput`."""

import argparse
import ast
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from bench.throughput.options import BASELINES, DEFAULT_K, Options
from bench.throughput.presets import PRESETS
from engine.config import VERIFICATION_METHODS
from engine.default_model import find_model


def _number_or_auto(text: str) -> int | str:
    try:
        return text if text == "auto" else int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f'must be an int >= 0 or "auto", got {text!r}') from None


def _assignment(text: str) -> tuple[str, Any]:
    name, sign, value = text.partition("=")
    if not sign or not name:
        raise argparse.ArgumentTypeError(f"must be name=value, got {text!r}")
    try:
        return name, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return name, {"true": True, "false": False, "none": None}.get(value.lower(), value)


def parser() -> argparse.ArgumentParser:
    """The command line. Options that are lists take several values: `-k 1 2 4 8`."""
    made = argparse.ArgumentParser(
        prog="python -m bench.throughput",
        description="Whole generations: this engine against transformers and others, interleaved prompt by prompt.",
        argument_default=argparse.SUPPRESS,
    )
    add = made.add_argument
    add(
        "--out",
        type=Path,
        required=True,
        metavar="DIR",
        help="for records.jsonl, table.md and plots; a run there goes on",
    )
    add("--restart", action="store_true", help="discard the run that is in --out")
    add(
        "--report-only",
        action="store_true",
        help="write table and plots anew from the records in --out, and measure nothing",
    )
    add("--preset", choices=sorted(PRESETS), help="a published small experiment; other options override its own")
    models = made.add_argument_group("models")
    models.add_argument(
        "--target", "-t", metavar="MODEL", help="hub id, folder or GGUF file; default: SmolLM2-135M-Instruct"
    )
    models.add_argument(
        "--drafters", "-d", nargs="*", metavar="DRAFTER",
        help="what engine.load takes: ngram, suffix, layer_skip:N, layer_skip:0-7,28,29, models, staged:MODEL, heads, "
        "ngram+MODEL; or synthetic:A (not a real drafter: right with probability A, to see the engine's own costs)",
    )  # fmt: skip
    models.add_argument(
        "--drafts",
        nargs="+",
        metavar="HOW",
        help="how drafters draw: own (as the target), greedy, sampled (for a greedy target: draft models only)",
    )
    models.add_argument(
        "--num-draft-tokens",
        "-k",
        nargs="+",
        type=_number_or_auto,
        metavar="K",
        help=f"tokens drafted in a round, or auto; baselines know no auto, and draft {DEFAULT_K} if no number is given",
    )
    models.add_argument("--verification", nargs="+", metavar="RULE", help=", ".join(VERIFICATION_METHODS))
    models.add_argument(
        "--dtypes", nargs="+", metavar="DTYPE", help="auto (the checkpoint's own), bfloat16, float32, ..."
    )
    models.add_argument("--device", help="auto, cpu, cuda:0, ...")
    models.add_argument(
        "--exact",
        action=argparse.BooleanOptionalAction,
        help="default: on an accelerator, and with a synthetic drafter",
    )
    models.add_argument(
        "--load-option", dest="load_options", action="append", type=_assignment, metavar="NAME=VALUE",
        help="one more argument of engine.load; may be given several times",
    )  # fmt: skip
    work = made.add_argument_group("work")
    work.add_argument("--prompts", type=Path, metavar="FILE", help="JSON lines with question_id, category and turns")
    work.add_argument("--categories", nargs="+", metavar="NAME", help="only these")
    work.add_argument("--per-category", type=int, metavar="N", help="only the first N prompts of each category")
    work.add_argument("--max-turns", type=int, metavar="N", help="only the first N turns of a conversation")
    work.add_argument("--max-prompts", type=int, metavar="N", help="only the first N of all these prompts")
    work.add_argument(
        "--max-prompt-tokens", type=int, metavar="N", help="longer prompts lose their middle; default: 700"
    )
    work.add_argument("--template", help="chat, raw, or auto: chat where the tokenizer has a template")
    work.add_argument("--batch-sizes", "-b", nargs="+", type=int, metavar="B")
    work.add_argument(
        "--batches-per-call", type=int, metavar="N",
        help="prompts for so many batches in each call: ours fills free slots, others take batch after batch",
    )  # fmt: skip
    work.add_argument("--temperatures", "-T", nargs="+", type=float, metavar="T", help="0 is greedy")
    work.add_argument(
        "--top-p", type=float, metavar="P", help="of sampled answers, drafts included; default: 1, which is off"
    )
    work.add_argument("--max-new-tokens", "-n", nargs="+", type=int, metavar="N")
    work.add_argument("--ignore-eos", action="store_true", help="all answers get --max-new-tokens tokens")
    work.add_argument("--repeats", type=int, metavar="N", help="so many times each prompt")
    work.add_argument("--seed", type=int)
    work.add_argument(
        "--baselines", nargs="*", metavar="NAME", help=f"of {', '.join(BASELINES)}; default: all but no-cache"
    )
    work.add_argument("--relative-to", metavar="METHOD", help='what ratios refer to; default: "transformers plain"')
    return made


def parse(arguments: Sequence[str] | None = None) -> tuple[Options, bool, bool]:
    """The options of a command line, whether to restart, whether to report only. Exits with status 2 on bad ones."""
    made = parser()
    given = vars(made.parse_args(arguments))
    restart, report_only = given.pop("restart", False), given.pop("report_only", False)
    others = [f"--{name.replace('_', '-')}" for name in given if name != "out"] + ["--restart"] * restart
    if report_only and others:
        rule = "--report-only must have no other option than --out: the run there has its own"
        made.error(f"{rule}, got {', '.join(others)}")
    settings = dict(PRESETS[given["preset"]]) if "preset" in given else {}
    settings |= {name: tuple(value) if isinstance(value, list) else value for name, value in given.items()}
    if any(drafter.startswith("synthetic:") for drafter in settings.get("drafters", ())):
        # Else plain decoding and verification, of another width, part through rounding, and behind that no draft is right.
        settings.setdefault("exact", True)
    settings["load_options"] = dict(settings.get("load_options", ()))
    settings["out"] = settings["out"].expanduser().resolve()
    try:
        return Options(**settings), restart, report_only
    except (ValueError, FileNotFoundError) as error:
        made.error(str(error))


def command(options: Mapping[str, Any], out: str) -> str:
    """The command line that gives these options, which are as `Options.as_dict` makes them; without those at their defaults."""
    usual = _defaults(options["preset"])
    given = {name: value for name, value in options.items() if value is not None and value != usual.get(name)}
    words = [word for name, value in given.items() for word in _words(name, value)]
    return shlex.join(["python", "-m", "bench.throughput", "--out", out, *words])


def _defaults(preset: str | None) -> dict[str, Any]:
    """What options are that nobody gave."""
    usual = Options(out=Path(), **(PRESETS[preset] if preset else {})).as_dict() | {"preset": None}
    if usual["target"] is None:
        with suppress(FileNotFoundError):  # not installed here
            usual["target"] = Path(find_model()).name
    return usual


def _words(name: str, value: Any) -> Iterator[str]:
    """One option as it is typed."""
    flag = f"--{name.replace('_', '-')}"
    if name == "load_options":
        for each, setting in value.items():
            yield from ("--load-option", f"{each}={setting!r}")
    elif isinstance(value, bool):
        yield flag if value else f"--no-{name}"
    else:
        yield from (flag, *map(str, value if isinstance(value, list) else [value]))
