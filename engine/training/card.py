"""The text that lies beside a trained drafter."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from ..hub import short_name
from .answers import Answer
from .eagle3_files import for_this_engine_alone
from .options import METHODS, ONLY_FOR, TrainingOptions


def card(
    options: TrainingOptions,
    parts: Mapping[str, Sequence[Answer]],
    log: Sequence[dict[str, Any]],
    num_target_layers: int,
) -> str:
    """A Markdown text that says what the drafter is, how it was made and how good it got.

    Args:
        options: with `chat` and `draft_vocab_size` as they came out: False where no prompt was wrapped in a chat template, and
            the number of tokens that can be drafted.
        parts: the answers for "training" and "validation".
        log: of the training loop.
        num_target_layers: of the target.
    """
    tokens = {name: sum(len(answer.token_ids) for answer in part) for name, part in parts.items()}
    validation = [record["validation"] for record in log if "validation" in record]
    acceptance = ", ".join(f"{value:.2f}" for value in validation[-1]["acceptance"]) if validation else "not measured"
    chat = " --chat" if options.chat else ""
    used = {name: value for name, value in asdict(options).items() if options.method in ONLY_FOR.get(name, METHODS)}
    return "\n".join([
        f"# {options.method} drafter for {short_name(options.target)}",
        "",
        "Trained by `python -m engine train` on the target's own answers, with its distributions as labels. To use it, from",
        f"this folder: `python -m engine generate{chat} --target TARGET --drafter .`, or `engine.load(TARGET, drafter=FOLDER)`.",
        "",
        *(_who_loads_it(options, num_target_layers) if options.method == "eagle3" else ()),
        f"Answer tokens: {tokens['training']:,} to learn from, {tokens['validation']:,} held back, of "
        f"{len(parts['training']):,} and {len(parts['validation']):,} prompts.",
        f"Acceptance of greedy drafts on the prompts held back, by position, given that those before stood: {acceptance}.",
        "",
        "Options:",
        *(f"- {name}: {value}" for name, value in used.items()),
        "",
    ])  # fmt: skip


def _who_loads_it(options: TrainingOptions, num_target_layers: int) -> tuple[str, str]:
    reasons = for_this_engine_alone(options.layers, num_target_layers, options.freeze_head)
    if not reasons:
        return "It is in the speculators format; others that read it, such as vLLM, should load it as it is.", ""
    return f"It is in the speculators format, but for this engine alone: {'; '.join(reasons)}.", ""
