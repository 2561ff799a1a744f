"""Prompts: from JSON lines to token ids.

A line is `{"question_id": ..., "category": ..., "turns": [...]}`, which is what Spec-Bench's files hold. Fields beyond these
are left alone.
"""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.prompt_files import read_lines
from engine.prompts import check_unicode

OWN_PROMPTS = Path(__file__).resolve().parent.parent / "data" / "prompts.jsonl"
TEMPLATES = ("auto", "chat", "raw")
ALL, MIXED = "all", "mixed"  # what tables call all categories together, and a call with prompts of several


@dataclass(frozen=True)
class Prompt:
    """A line of a prompts file. Later turns continue the conversation."""

    index: int  # line in the file, from 0
    question_id: int | str
    category: str
    turns: tuple[str, ...]


def read_prompts(path: Path) -> list[Prompt]:
    """All prompts of a file.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: naming the file and the line that breaks the format, or if there is no prompt.
    """
    path = path.expanduser()
    if not path.is_file():
        raise FileNotFoundError(f"prompts must be an existing file, got {path}")
    lines = enumerate(read_lines(str(path)))
    prompts = [_prompt(line, index, f"{path}:{index + 1}") for index, line in lines if line.strip()]
    if not prompts:
        raise ValueError(f"prompts must hold at least one prompt, but {path} is empty")
    return prompts


def _prompt(line: str, index: int, where: str) -> Prompt:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where} must be a JSON object, but: {error}") from error
    if not isinstance(record, dict):
        raise ValueError(f"{where} must be a JSON object, got {type(record).__name__}")
    number, category, turns = (record.get(name) for name in ("question_id", "category", "turns"))
    if isinstance(number, bool) or not isinstance(number, int | str):
        raise ValueError(f'{where} must have a "question_id" that is a number or a string, got {number!r}')
    if not isinstance(category, str) or not category:
        raise ValueError(f'{where} must have a "category" that is a string, got {category!r}')
    if category in (ALL, MIXED) or category.splitlines() != [category]:
        raise ValueError(
            f'{where} must have a "category" of one line that is not {ALL!r} or {MIXED!r}, got {category!r}'
        )
    if not isinstance(turns, list) or not turns or not all(isinstance(turn, str) and turn for turn in turns):
        raise ValueError(f'{where} must have "turns", a list of strings, got {turns!r}')
    for name, text in (("category", category), *((f"turns[{i}]", turn) for i, turn in enumerate(turns))):
        check_unicode(text, f"{where} {name}")
    return Prompt(index, number, category, tuple(turns))


def select(
    prompts: Sequence[Prompt],
    categories: Sequence[str] = (),
    per_category: int | None = None,
    max_turns: int | None = None,
    max_prompts: int | None = None,
) -> list[Prompt]:
    """Those of some categories, the first few of each, and only their first turns; of these, the first few. Categories keep
    together.

    Raises:
        ValueError: for a category that no prompt has.
    """
    present = list(dict.fromkeys(prompt.category for prompt in prompts))
    for category in categories:
        if category not in present:
            raise ValueError(f"categories must be of {', '.join(present)}, got {category!r}")
    seen: Counter[str] = Counter()
    chosen = []
    for prompt in sorted(prompts, key=lambda p: present.index(p.category)):
        seen[prompt.category] += 1
        wanted = not categories or prompt.category in categories
        if wanted and (per_category is None or seen[prompt.category] <= per_category):
            chosen.append(Prompt(prompt.index, prompt.question_id, prompt.category, prompt.turns[:max_turns]))
    return chosen[:max_prompts]


@dataclass(frozen=True)
class Group:
    """Prompts that are answered in one call."""

    prompts: tuple[Prompt, ...]
    turn: int  # from 0

    @property
    def category(self) -> str:
        names = {prompt.category for prompt in self.prompts}
        return names.pop() if len(names) == 1 else MIXED


def groups(prompts: Sequence[Prompt], prompts_per_call: int) -> list[Group]:
    """Prompts by calls, all first turns before all second ones. The last call of a turn may have fewer."""
    made = []
    for turn in range(max(len(prompt.turns) for prompt in prompts)):
        rows = [prompt for prompt in prompts if len(prompt.turns) > turn]
        made += [Group(tuple(rows[i : i + prompts_per_call]), turn) for i in range(0, len(rows), prompts_per_call)]
    return made


def render(tokenizer: Any, turns: Sequence[str], answers: Sequence[str], template: str) -> list[int]:
    """Token ids of a conversation: turns with the answers between them, the last turn unanswered.

    Raises:
        ValueError: if a chat template is asked for and the tokenizer has none.
    """
    has_template = bool(getattr(tokenizer, "chat_template", None))
    if template == "chat" and not has_template:
        raise ValueError("template must be raw or auto: the target's tokenizer has no chat template")
    if template == "raw" or not has_template:
        parts = [turn + answer for turn, answer in zip(turns, [*answers, ""], strict=True)]
        return list(tokenizer("\n\n".join(parts))["input_ids"])
    messages = []
    for turn, answer in zip(turns, [*answers, None], strict=True):
        messages.append({"role": "user", "content": turn})
        if answer is not None:
            messages.append({"role": "assistant", "content": answer})
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def cut(token_ids: list[int], limit: int) -> list[int]:
    """At most `limit` ids: a longer text loses its middle, since what is asked stands at its begin or its end."""
    if len(token_ids) <= limit:
        return token_ids
    tail = limit // 2
    return token_ids[: limit - tail] + token_ids[-tail:]


def room_for_prompts(context_length: int, max_new_tokens: int) -> int:
    """Tokens of the target's context that are left; ValueError unless that is 2 or more."""
    room = context_length - max_new_tokens
    if room < 2:
        raise ValueError(
            f"max_new_tokens must be <= {context_length - 2} for this target's context, got {max_new_tokens}"
        )
    return room
