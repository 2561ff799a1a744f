"""The target answers the prompts: the texts that a drafter learns from."""

import json
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from tqdm import tqdm

from ..config import SamplingParams
from ..engine import Engine
from ..errors import InvalidLogitsError
from ..model_support import vocab_size
from ..output import Output
from .files import no_room

logger = logging.getLogger(__name__)
_BATCHES_PER_GROUP = 8


class Answer(NamedTuple):
    """A line of an answers file."""

    prompt_token_ids: list[int]
    token_ids: list[int]  # none where the target could not answer


def read_answers(file: Path) -> list[Answer]:
    """All whole lines; a last one that was cut off while it was written does not count.

    Raises:
        ValueError: for any other line that holds no answer.
    """
    if not file.exists():
        return []
    answers = []
    for number, line in enumerate(file.read_bytes().split(b"\n")[:-1], 1):
        try:
            answers.append(Answer(**json.loads(line)))
        except (ValueError, TypeError) as error:
            raise ValueError(f"{file}:{number} must be an answer, as a training wrote it: {error}") from error
    return answers


def answer_prompts(
    llm: Engine,
    prompts: Sequence[list[int]],
    file: Path,
    temperatures: Sequence[float],
    max_new_tokens: int,
    seed: int,
    max_length: int | None = None,
) -> list[Answer]:
    """Have all prompts answered, appending to `file`; what is in there already is kept and not done again.

    Where the target's logits are not a distribution, the answer is empty, and a warning says so.

    Prompts are answered in groups that do not depend on interruptions (rounding may depend on who shares a batch): the
    rest of a group of which not all was written is done again.

    Args:
        prompts: token ids.
        temperatures: prompt i is answered at the temperature i modulo their number.
        seed: prompt i has seed + i.
        max_length: of a prompt with its answer, in tokens; None: the engine's.

    Raises:
        ValueError: if the file holds answers to other prompts, or more of them.
        OSError: if an answer cannot be written; those before it stay.
    """
    size = _BATCHES_PER_GROUP * llm.config.max_batch_size
    done = read_answers(file)
    _check(done, prompts, vocab_size(llm.target_model), file)
    if len(done) < len(prompts):
        done = done[: len(done) // size * size]
    if file.exists():  # without what was cut off
        with no_room(file):
            os.truncate(file, _length_of(file, len(done)))
    params = [
        SamplingParams(
            temperature=temperatures[i % len(temperatures)],
            max_new_tokens=max_new_tokens if max_length is None else min(max_new_tokens, max_length - len(prompt)),
            seed=seed + i,
        )
        for i, prompt in enumerate(prompts)
    ]
    tokens = sum(len(answer.token_ids) for answer in done)
    with tqdm(total=len(prompts), initial=len(done), unit="prompt", desc="answers") as bar:
        for begin in range(len(done), len(prompts), size):
            group = range(begin, min(begin + size, len(prompts)))
            # Rows of like length together: attention reads as far as the longest of a batch.
            order = sorted(group, key=lambda i: len(prompts[i]))
            outputs: Sequence[Output | None]
            try:
                outputs = llm.generate([prompts[i] for i in order], [params[i] for i in order], progress=True)
            except InvalidLogitsError as error:  # the others are answered all the same
                outputs = error.outputs
                for index in error.errors:
                    logger.warning("prompts[%d] is left out: the target's logits are not a distribution", order[index])
            found = {
                i: Answer(prompts[i], [] if out is None else out.token_ids)
                for i, out in zip(order, outputs, strict=True)
            }
            new = [found[i] for i in group]
            with no_room(file), file.open("a", encoding="utf-8") as out:
                out.writelines(json.dumps(answer._asdict()) + "\n" for answer in new)
            done += new
            tokens += sum(len(answer.token_ids) for answer in new)
            bar.update(len(group))
            bar.set_postfix_str(f"{tokens} tokens")
    return done


def _check(answers: Sequence[Answer], prompts: Sequence[list[int]], num_tokens: int, file: Path) -> None:
    """Their settings are the same; but a target may have got another tokenizer, or the file something else in it."""
    if len(answers) > len(prompts):
        raise ValueError(f"{file} must hold one answer to each of {len(prompts)} prompts, got {len(answers)} answers")
    for index, (answer, prompt) in enumerate(zip(answers, prompts, strict=False)):
        if answer.prompt_token_ids != prompt:
            raise ValueError(f"{file}:{index + 1} must be the answer to prompts[{index}], got one to other token ids")
        ids = answer.token_ids
        if not isinstance(ids, list) or not all(type(token) is int and 0 <= token < num_tokens for token in ids):
            raise ValueError(
                f"{file}:{index + 1} must be an answer in token ids in [0, {num_tokens}), as a training wrote it, got {ids!r:.100}"
            )


def _length_of(file: Path, lines: int) -> int:
    """Bytes of the first lines."""
    with file.open("rb") as opened:
        return sum(len(opened.readline()) for _ in range(lines))
