"""`python -m engine train`: prompts in, a trained drafter out, in three phases that each resume where they were stopped.

The folder gets the drafter, a card (README.md), a plot of the training (training.png, with matplotlib) and, under work/, what
the phases leave: settings.json, answers.jsonl, training/ and validation/ with hidden-*.safetensors, checkpoint.pt, log.jsonl; and
lock, which the run that works there holds.
Once the drafter is there, work/ is no longer needed.
"""

import logging
import math
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from .. import load
from ..errors import EngineError
from ..heads import find_head
from ..hub import user_path
from ..model_support import vocab_size
from ..prompts import encode
from .answers import Answer, answer_prompts
from .card import card
from .eagle3 import Eagle3Training, check_start
from .eagle3_files import save_eagle3
from .files import SAVING, begin, check_out, checkpoint_digest, no_room, replacing, settings_of
from .hidden_files import KeptTexts
from .initial_model import head_to_start_from, layers_of_head, layers_to_keep, objective_of
from .loop import is_done, train
from .objectives import DraftModelTraining
from .options import TrainingOptions
from .plots import plot_training

logger = logging.getLogger(__name__)


@torch.random.fork_rng(devices=[])  # loading and first weights draw numbers, which is no affair of the caller's
def train_drafter(prompts: Sequence[Any], out: str | Path, options: TrainingOptions) -> Path:
    """Train a drafter and save it in `out`; a run that was stopped is taken up again by the same call.

    No global random number generator is changed.

    Args:
        prompts: as `Engine.generate` takes them, at least 2.
        out: a new or empty folder, or one in which the same training was begun.

    Returns:
        `out`.

    Raises:
        ValueError: for bad options or prompts, or if `out` holds something else or another run works in it; before any work
            is done. Later, if a file of the work that was done before is damaged.
        OSError: if there is no room for the hidden states, before they are read; or if any file cannot be written. What was
            there is still there then, and the same call resumes from it.
        EngineError: if the training diverges, or the target can answer fewer than two prompts.
    """
    if not str(out):
        raise ValueError(f"out must be a folder, got {out!r}")
    out = user_path(out)
    _check_prompts(prompts)
    settings = _settings(options, prompts)
    check_out(out, settings)
    start = None if options.start_from is None else head_to_start_from(options)
    llm = load(
        options.target, None, exact=False, max_batch_size=options.batch_size, dtype=options.dtype, device=options.device
    )
    target, tokenizer = llm.target_model, llm.tokenizer
    num_layers: int = target.config.get_text_config().num_hidden_layers
    if options.method == "eagle3":
        options = replace(options, layers=layers_of_head(options, start, num_layers))
    layers = layers_to_keep(target, options)
    if start is not None:
        check_start(start.model, options.layers, target)
    limit = min(options.max_length, llm.max_length)
    if options.chat:
        prompts = [_wrapped(prompt, tokenizer) for prompt in prompts]
    num_tokens = vocab_size(target)
    ids = _encoded(prompts, tokenizer, num_tokens, limit)
    options = replace(options, chat=any(map(_is_chat, prompts)))  # as it was, for the card
    held = min(max(1, round(options.validation_share * len(ids))), len(ids) - 1)
    _warn_of_known_prompts(ids[:-held], ids[-held:])
    with begin(out, settings) as work:
        answers = answer_prompts(
            llm, ids, work / "answers.jsonl", options.temperatures, options.max_new_tokens, options.seed, limit
        )
        del llm  # and the buffers of its batch
        answers = [answer for answer in answers if answer.token_ids]  # else hidden states may be NaN, too
        if len(answers) < 2:
            raise EngineError(f"at least 2 prompts must have an answer, one of them for validation, got {len(answers)}")
        held = min(held, len(answers) - 1)
        parts = {"training": answers[:-held], "validation": answers[-held:]}
        texts = _kept_texts(target, parts, layers, work, limit)
        if not is_done(work, options.epochs):  # if it is, they may have been deleted, for the room that they take
            room = math.inf if options.max_disk_gb is None else options.max_disk_gb * 1e9
            # The smaller part first: that the disk has room for the other is looked at before that is read.
            texts["validation"].write(room)
            texts["training"].write(room - texts["validation"].num_bytes)
        objective = objective_of(target, parts["training"], options, start)
        if isinstance(objective, Eagle3Training):  # what it came to, for the card
            options = replace(options, draft_vocab_size=len(objective.draft_ids))
        log = train(objective, texts["training"], texts["validation"], work, options)
        _save(objective, target, tokenizer, out, options)
        plot_training(log, out / "training.png")
        with replacing(out / "README.md") as partial:
            partial.write_text(card(options, parts, log, num_layers), encoding="utf-8")
    return out


def _settings(options: TrainingOptions, prompts: Sequence[Any]) -> dict[str, Any]:
    """What must be the same when a run is taken up again."""
    shared = [field.name for field in fields(options) if field.metadata.get("part_of_settings", True)]
    settings = settings_of({name: getattr(options, name) for name in shared}, prompts)
    for role, name in (("target", options.target), ("start_from", options.start_from)):
        if name is not None and (path := find_head(name) or user_path(name)).exists():
            settings[f"{role}_sha256"] = checkpoint_digest(path)
    return settings


def _check_prompts(prompts: Sequence[Any]) -> None:
    several = "prompts must be at least 2, one of them for validation, got"
    if isinstance(prompts, str) or not isinstance(
        prompts, Sequence
    ):  # a list of characters, or what has no order or length
        raise ValueError(f"{several} {'a string' if isinstance(prompts, str) else type(prompts).__name__}")
    if len(prompts) < 2:
        raise ValueError(f"{several} {len(prompts)}")
    for index, prompt in enumerate(prompts):
        if isinstance(prompt, str) and not prompt.strip():
            raise ValueError(f"prompts[{index}] must not be empty, got {prompt!r}")


def _warn_of_known_prompts(learned: Sequence[list[int]], held_back: Sequence[list[int]]) -> None:
    """Those that are held back are to tell how well the drafter does on prompts that it does not know."""
    known = set(map(tuple, learned))
    if count := sum(tuple(prompt) in known for prompt in held_back):
        logger.warning(
            "of %d prompts that are held back, %d are learned from too: the acceptance that is measured is partly of texts that "
            "the drafter knows",
            len(held_back),
            count,
        )


def _kept_texts(
    target: PreTrainedModel, parts: dict[str, list[Answer]], layers: tuple[int, ...], work: Path, limit: int
) -> dict[str, KeptTexts]:
    """The texts of each part, with a folder for their hidden states."""
    texts = {}
    for name, answers in parts.items():
        with no_room(work / name):
            (work / name).mkdir(exist_ok=True)
        texts[name] = KeptTexts(target, answers, layers, work / name, limit)
    return texts


def _wrapped(prompt: Any, tokenizer: Any) -> Any:
    """Plain text as a chat, if there is a template for it."""
    if not isinstance(prompt, str) or not getattr(tokenizer, "chat_template", None):
        return prompt
    return [{"role": "user", "content": prompt}]


def _encoded(prompts: Sequence[Any], tokenizer: Any, num_tokens: int, limit: int) -> list[list[int]]:
    """Token ids of all prompts.

    Raises:
        ValueError: with what is wrong with the first that cannot be taken, and which others there are.
    """
    ids, refused = [], {}
    for index, prompt in enumerate(prompts):
        try:
            ids.append(encode(prompt, f"prompts[{index}]", tokenizer, num_tokens, limit))
        except ValueError as error:
            refused[index] = error
    if refused:
        first, *others = refused
        listed = ", ".join(map(str, others[:10])) + (", ..." if len(others) > 10 else "")
        more = f"; refused too are {len(others)} of the {len(prompts)} prompts: {listed}" if others else ""
        raise ValueError(f"{refused[first]}{more}") from refused[first]
    return ids


def _is_chat(prompt: Any) -> bool:
    return isinstance(prompt, list | tuple) and isinstance(prompt[0], dict)


def _save(objective: Any, target: PreTrainedModel, tokenizer: Any, out: Path, options: TrainingOptions) -> None:
    if isinstance(objective, Eagle3Training):
        with no_room(out):
            save_eagle3(objective, out, options.target, type(target).__name__)
        return
    with no_room(out), tempfile.TemporaryDirectory(prefix=SAVING, dir=out) as scratch:
        objective.save(Path(scratch))
        if isinstance(objective, DraftModelTraining) and tokenizer is not None:
            tokenizer.save_pretrained(scratch)
        known_by = Path(scratch) / "config.json"
        # Templates of chats may be in a folder. Last comes what makes it known.
        files = sorted((each for each in Path(scratch).rglob("*") if each.is_file()), key=lambda file: file == known_by)
        for file in files:
            shutil.copymode(known_by, file)  # safetensors 0.8 makes files that their owner alone can read
            place = out / file.relative_to(scratch)
            place.parent.mkdir(exist_ok=True)
            file.replace(place)
