"""The target answers the prompts: the texts that a drafter learns from."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tqdm import tqdm

from ..config import SamplingParams
from ..engine import Engine


class Answer(NamedTuple):
    """A line of an answers file."""

    prompt_token_ids: list[int]
    token_ids: list[int]


def read_answers(file: Path) -> list[Answer]:
    """All whole lines; a last one that was cut off while it was written does not count."""
    if not file.exists():
        return []
    lines = file.read_text(encoding="utf-8").split("\n")
    return [Answer(**json.loads(line)) for line in lines[:-1]]


def answer_prompts(
    llm: Engine, prompts: Sequence[Any], file: Path, temperatures: Sequence[float], max_new_tokens: int, seed: int
) -> list[Answer]:
    """Have all prompts answered, appending to `file`; what is in there already is kept and not done again.

    Args:
        prompts: as `Engine.generate` takes them.
        temperatures: prompt i is answered at the temperature i modulo their number.
        seed: prompt i has seed + i, so that the file does not depend on interruptions.
    """
    done = read_answers(file)
    if file.exists():  # without what was cut off
        _write(file, done, mode="w")
    params = [
        SamplingParams(temperature=temperatures[i % len(temperatures)], max_new_tokens=max_new_tokens, seed=seed + i)
        for i in range(len(prompts))
    ]
    tokens = sum(len(answer.token_ids) for answer in done)
    with tqdm(total=len(prompts), initial=len(done), unit="prompt", desc="answers") as bar:
        for begin in range(len(done), len(prompts), 8 * llm.config.max_batch_size):
            group = range(begin, min(begin + 8 * llm.config.max_batch_size, len(prompts)))
            # Rows of like length together: attention reads as far as the longest of a batch.
            order = sorted(group, key=lambda i: len(str(prompts[i])))
            outputs = llm.generate([prompts[i] for i in order], [params[i] for i in order])
            found = {i: Answer(out.prompt_token_ids, out.token_ids) for i, out in zip(order, outputs, strict=True)}
            new = [found[i] for i in group]
            _write(file, new, mode="a")
            done += new
            tokens += sum(len(answer.token_ids) for answer in new)
            bar.update(len(group))
            bar.set_postfix_str(f"{tokens} tokens")
    return done


def _write(file: Path, answers: Sequence[Answer], mode: str) -> None:
    with file.open(mode, encoding="utf-8") as out:
        out.writelines(json.dumps(answer._asdict()) + "\n" for answer in answers)
