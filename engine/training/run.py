"""`python -m engine train`: prompts in, a trained drafter out, in three phases that each go on where they were stopped.

The folder gets the drafter, a card (README.md) and, under work/, what the phases leave: settings.json, answers.jsonl,
hidden-*.safetensors, checkpoint.pt, log.jsonl.
"""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from .. import load
from ..config import check_int
from ..engine import Engine
from .answers import Answer, answer_prompts
from .eagle3 import Eagle3Training
from .eagle3_files import save_eagle3
from .heads import DraftModelTraining, MedusaTraining, MlpTraining
from .hidden import keep_hidden_states
from .loop import Schedule, train
from .plots import plot_training

METHODS = ("eagle3", "medusa", "mlp", "draft-model")


@dataclass(frozen=True)
class TrainingOptions:
    """What to train, on what, and how.

    Attributes:
        method: one of METHODS.
        target: hub id, folder or GGUF file.
        temperatures: the prompts are answered at these in turn.
        max_new_tokens: of each answer.
        max_length: texts are cut to so many tokens.
        validation_share: of the prompts, the last ones; nothing is learned from them.
        draft_vocab_size: eagle3: the most frequent tokens of the answers.
        layers: eagle3: the hidden states it reads (see `HiddenStates`); empty: a quarter, half and three quarters of the way
            and what the target's head reads.
        freeze_head: eagle3: the output matrix stays that of the target, and is not saved.
        num_steps: drafts in a chain while training.
        num_layers: draft-model: of the target's.

    Raises:
        ValueError: naming the option, the value and the rule.
    """

    method: str
    target: str
    temperatures: tuple[float, ...] = (0.0, 0.7)
    max_new_tokens: int = 160
    max_length: int = 768
    batch_size: int = 64
    validation_share: float = 0.05
    draft_vocab_size: int = 8192
    layers: tuple[int, ...] = ()
    freeze_head: bool = False
    num_steps: int = 4
    num_layers: int = 4
    epochs: int = 4
    learning_rate: float = 1e-3
    tokens_per_batch: int = 4096
    seed: int = 0

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise ValueError(f"method must be one of {', '.join(METHODS)}, got {self.method!r}")
        for name in ("max_new_tokens", "max_length", "batch_size", "draft_vocab_size", "num_steps", "num_layers",
                     "epochs", "tokens_per_batch"):  # fmt: skip
            check_int(name, getattr(self, name), 1)
        if not 0 < self.validation_share < 1:
            raise ValueError(f"validation_share must be in (0, 1), got {self.validation_share}")
        if not self.learning_rate > 0:
            raise ValueError(f"learning_rate must be > 0, got {self.learning_rate}")
        if not self.temperatures or min(self.temperatures) < 0:
            raise ValueError(f"temperatures must be at least one number >= 0, got {list(self.temperatures)}")


def train_drafter(prompts: Sequence[Any], out: Path, options: TrainingOptions) -> Path:
    """Train a drafter and save it in `out`; a run that was stopped is taken up again.

    Args:
        prompts: as `Engine.generate` takes them, at least 2.

    Returns:
        `out`.

    Raises:
        ValueError: for bad options or prompts, or if `out` holds the work of other ones; before any work is done.
        OSError: if there is no room for the hidden states; before they are read.
    """
    if len(prompts) < 2:
        raise ValueError(f"prompts must be at least 2, one of them for validation, got {len(prompts)}")
    work = _claim(out, prompts, options)
    llm = load(options.target, drafter=None, max_batch_size=options.batch_size, exact=False)
    layers = _layers(llm, options)
    answers = answer_prompts(
        llm, prompts, work / "answers.jsonl", options.temperatures, options.max_new_tokens, options.seed
    )
    held = max(1, round(options.validation_share * len(answers)))
    parts = {"training": answers[:-held], "validation": answers[-held:]}
    files = {}
    for name, part in parts.items():
        (work / name).mkdir(exist_ok=True)
        files[name] = keep_hidden_states(llm.target_model, part, layers, work / name, options.max_length)
    torch.manual_seed(options.seed)  # of the first weights
    objective = _objective(llm, parts["training"], layers, options)
    schedule = Schedule(
        epochs=options.epochs,
        learning_rate=options.learning_rate,
        tokens_per_batch=options.tokens_per_batch,
        seed=options.seed,
    )
    log = train(objective, files["training"], files["validation"], work, schedule)
    _save(objective, llm, out, options)
    plot_training(log, out / "training.png")
    (out / "README.md").write_text(card(options, parts, log), encoding="utf-8")
    return out


def _claim(out: Path, prompts: Sequence[Any], options: TrainingOptions) -> Path:
    """The work folder, if it is new or holds work of the same prompts and options."""
    work = out / "work"
    settings = {**json.loads(json.dumps(asdict(options))), "prompts": len(prompts), "first_prompt": str(prompts[0])}
    file = work / "settings.json"
    if file.exists():
        before = json.loads(file.read_text(encoding="utf-8"))
        other = [name for name in settings if before.get(name) != settings[name]]
        if other:
            raise ValueError(
                f"out must be new or hold work with the same options, but {', '.join(other)} differ in {work}"
            )
        return work
    if out.exists() and any(out.iterdir()):
        raise ValueError(f"out must be a new or empty folder, or one in which a training was begun, got {out}")
    work.mkdir(parents=True, exist_ok=True)
    partial = file.with_suffix(".partial")
    partial.write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    os.replace(partial, file)
    return work


def _layers(llm: Engine, options: TrainingOptions) -> tuple[int, ...]:
    """Hidden states that are kept; the last are what the head reads."""
    count = llm.target_model.config.get_text_config().num_hidden_layers
    if options.method != "eagle3":
        return (count,)
    layers = options.layers or tuple(dict.fromkeys(round(count * part / 4) for part in (1, 2, 3, 4)))
    if min(layers) < 0 or max(layers) > count:
        raise ValueError(f"layers must be in [0, {count}], as the target has {count} layers, got {list(layers)}")
    return layers if layers[-1] == count else (*layers, count)


def _objective(llm: Engine, answers: Sequence[Answer], layers: tuple[int, ...], options: TrainingOptions) -> Any:
    target = llm.target_model
    if options.method == "medusa":
        return MedusaTraining(target, options.num_steps)
    if options.method == "mlp":
        return MlpTraining(target, options.num_steps)
    if options.method == "draft-model":
        return DraftModelTraining(target, options.num_layers)
    read = options.layers or layers
    return Eagle3Training(
        target, read, frequent_tokens(answers, target.config.get_text_config().vocab_size, options.draft_vocab_size),
        options.num_steps, freeze_head=options.freeze_head,
    )  # fmt: skip


def frequent_tokens(answers: Sequence[Answer], vocab_size: int, count: int) -> torch.Tensor:
    """The `count` most frequent ids of the answers, ascending; a prompt's token counts a tenth. [count] int64."""
    counts = torch.zeros(vocab_size)
    for answer in answers:
        for ids, weight in ((answer.token_ids, 1.0), (answer.prompt_token_ids, 0.1)):
            counts.index_add_(0, torch.tensor(ids), torch.full((len(ids),), weight))
    return counts.topk(min(count, vocab_size)).indices.sort().values


def _save(objective: Any, llm: Engine, out: Path, options: TrainingOptions) -> None:
    if isinstance(objective, Eagle3Training):
        save_eagle3(objective, out, options.target, type(llm.target_model).__name__)
        return
    objective.save(out)
    if isinstance(objective, DraftModelTraining) and llm.tokenizer is not None:
        llm.tokenizer.save_pretrained(out)


def card(options: TrainingOptions, parts: Mapping[str, Sequence[Answer]], log: Sequence[dict[str, Any]]) -> str:
    """A Markdown text that says what the drafter is and how it was made."""
    tokens = {name: sum(len(answer.token_ids) for answer in part) for name, part in parts.items()}
    validation = [record["validation"] for record in log if "validation" in record]
    acceptance: list[float] = validation[-1]["acceptance"] if validation else []
    lines = [f"- {name}: {value}" for name, value in asdict(options).items()]
    return "\n".join([
        f"# {options.method} drafter for {Path(options.target).name}",
        "",
        "Trained by `python -m engine train` on the target's own answers, with its distributions as labels.",
        "",
        f"Answer tokens: {tokens['training']:,} to learn from, {tokens['validation']:,} held back ({len(parts['validation'])} prompts).",
        "Acceptance of greedy drafts on the prompts held back, by position, given that those before stood: "
        + ", ".join(f"{value:.2f}" for value in acceptance) + ".",
        "",
        "Options:",
        *lines,
        "",
    ])  # fmt: skip
