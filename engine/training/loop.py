"""The training loop: AdamW over batches of texts, with checkpoints from which a run that was killed resumes.

What a step does depends on the seed, the epoch and the batch's place in it alone, so an interrupted run ends where an
uninterrupted one does.
"""

import json
import math
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from ..errors import EngineError
from .batches import Batch, TextGroups, batches
from .files import replacing
from .hidden_files import KeptTexts
from .options import TrainingOptions

WARMUP = 0.03  # share of the run in which the learning rate rises
FINAL_RATE = 0.05  # of the highest learning rate, at the end
CLIP = 1.0  # largest norm of a gradient
WEIGHT_DECAY = 0.01
SECONDS_BETWEEN_CHECKPOINTS = 60.0  # at least
CHECKPOINT = "checkpoint.pt"


def train(
    module: nn.Module, texts: KeptTexts, validation: TextGroups, folder: Path, options: TrainingOptions
) -> list[dict[str, Any]]:
    """Train to the end, going on from `folder`'s checkpoint if there is one.

    Args:
        module: maps a batch, on its own device, to a loss and to its drafts' outcomes: one [2] int64 tensor for each position of a
            draft, chains in which all drafts before it were right, and those of them in which it was right too. Its parameters
            that require gradients are trained.
        texts, validation: what is learned from, and what is only looked at.
        folder: gets checkpoint.pt, and log.jsonl with a line for each step and each epoch.

    Returns:
        The lines of the log.

    Raises:
        ValueError: if the checkpoint is damaged, or of another module; or a file of hidden states is damaged.
        EngineError: if the loss is no finite number any more.
        OSError: if a checkpoint cannot be written; the one before it stays.
    """
    run = _Run(module, folder, options, total_tokens=options.epochs * texts.num_tokens)
    run.resume()
    with tqdm(total=run.total_tokens, initial=run.tokens, unit="token", unit_scale=True, desc="training") as bar:
        while run.epoch < options.epochs:
            found = batches(texts, options.tokens_per_batch, options.seed, run.epoch, options.learn_prompts)
            for index, batch in enumerate(found):
                if index < run.batch:  # done before the interruption
                    continue
                tokens = int(batch.lengths.sum())
                record = run.step(batch, tokens)
                bar.update(tokens)
                bar.set_postfix_str(f"loss {record['loss']:.3f}")
                run.checkpoint(final=False)
            run.end_epoch(evaluate(module, batches(validation, options.tokens_per_batch, 0, 0)))
    run.write_log()  # should the run have been killed between its last checkpoint and that
    return run.log


def is_done(folder: Path, epochs: int) -> bool:
    """Whether the folder's checkpoint is that of so many epochs, after which no text is read any more.

    Raises:
        ValueError: if it is damaged.
    """
    file = folder / CHECKPOINT
    if not file.exists():
        return False
    with _reading(file):
        place = torch.load(file, "cpu", weights_only=True, mmap=True)["place"]  # its tensors stay on the disk
        return bool(place[0] >= epochs)


@contextmanager
def _reading(checkpoint: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, RuntimeError, ValueError, KeyError, EOFError, UnpicklingError) as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]  # torch adds advice that is none here
        raise ValueError(
            f"{checkpoint} must be a checkpoint of this training: {reason}; delete that file to restart training"
        ) from error


def evaluate(module: nn.Module, found: Iterator[Batch]) -> dict[str, Any]:
    """Loss per chain, and acceptance per position of greedy drafts against the target's greedy choice."""
    module.eval()
    device = _device_of(module)
    losses, counts = 0.0, 0
    sums = torch.zeros(0, 2, dtype=torch.int64)
    with torch.no_grad():
        for batch in found:
            with _autocast(device):
                loss, outcomes = module(batch.to(device))
            if not outcomes:
                continue
            table = torch.stack(outcomes).cpu()
            losses, counts = losses + loss.item() * int(table[0, 0]), counts + int(table[0, 0])
            longest = max(len(sums), len(table))  # a batch of short texts has fewer positions
            sums = _padded(sums, longest) + _padded(table, longest)
    module.train()
    return {"loss": losses / max(counts, 1), "acceptance": acceptance(sums)}


def acceptance(outcomes: Tensor | list[Tensor]) -> list[float]:
    """Of drafts whose predecessors stood, the share that stands, by position; outcomes [K, 2]."""
    if not len(outcomes):
        return []
    table = torch.stack(outcomes) if isinstance(outcomes, list) else outcomes
    return [round(right / max(seen, 1), 4) for seen, right in table.tolist()]


class _Run:
    """A run's state: what its checkpoint holds."""

    def __init__(self, module: nn.Module, folder: Path, options: TrainingOptions, total_tokens: int) -> None:
        self.module, self.folder, self.options, self.total_tokens = module, folder, options, total_tokens
        self.parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
        self.optimizer = torch.optim.AdamW(
            self.parameters, lr=options.learning_rate, betas=(0.9, 0.95), weight_decay=WEIGHT_DECAY
        )
        self.epoch = self.batch = self.tokens = 0
        self.log: list[dict[str, Any]] = []
        self._device = _device_of(module)
        self._saved = _now()

    def step(self, batch: Batch, tokens: int) -> dict[str, Any]:
        """One update."""
        rate = self.options.learning_rate * learning_rate(self.tokens / self.total_tokens)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        with _autocast(self._device):
            loss, outcomes = self.module(batch.to(self._device))
        value = loss.item()
        self._require_finite(value, "loss", f"in epoch {self.epoch + 1}, batch {self.batch + 1}")
        self.optimizer.zero_grad()
        if loss.requires_grad:
            loss.backward()
            nn.utils.clip_grad_norm_(self.parameters, CLIP)
            self.optimizer.step()
        self.batch += 1
        self.tokens += tokens
        record = dict(epoch=self.epoch, batch=self.batch, tokens=self.tokens, rate=rate, loss=value)
        self.log.append(record | dict(acceptance=acceptance(outcomes)))
        return self.log[-1]

    @staticmethod
    def _require_finite(value: float, name: str, where: str) -> None:
        if not math.isfinite(value):
            raise EngineError(
                f"the {name} is {value} {where}: give a lower learning_rate, and another folder to start again"
            )

    def end_epoch(self, found: dict[str, Any]) -> None:
        """Note the validation, and begin the next epoch."""
        self._require_finite(found["loss"], "validation loss", f"after epoch {self.epoch + 1}")
        self.log.append(dict(epoch=self.epoch, tokens=self.tokens, validation=found))
        line = f"epoch {self.epoch + 1}: validation loss {found['loss']:.3f}, acceptance {found['acceptance']}"
        tqdm.write(line, file=sys.stderr)
        self.epoch, self.batch = self.epoch + 1, 0
        self.checkpoint(final=True)

    def checkpoint(self, final: bool) -> None:
        """Write checkpoint and log, if it is time to."""
        if not final and _now() - self._saved < SECONDS_BETWEEN_CHECKPOINTS:
            return
        state = dict(
            module=[parameter.data for parameter in self.parameters],
            optimizer=self.optimizer.state_dict(),
            place=(self.epoch, self.batch, self.tokens),
            log=self.log,
        )
        with replacing(self.folder / CHECKPOINT) as partial:
            torch.save(state, partial)
        self.write_log()
        self._saved = _now()

    def write_log(self) -> None:
        """The log as lines of JSON."""
        with replacing(self.folder / "log.jsonl") as partial:
            partial.write_text("".join(json.dumps(record) + "\n" for record in self.log), encoding="utf-8")

    def resume(self) -> None:
        """Go on from the checkpoint, if there is one."""
        file = self.folder / CHECKPOINT
        if not file.exists():
            return
        with _reading(file):
            state = torch.load(file, "cpu", weights_only=True)
            shapes = [value.shape for value in state["module"]]
            if shapes != [parameter.shape for parameter in self.parameters]:
                raise ValueError("its tensors have other shapes")
        for parameter, value in zip(self.parameters, state["module"], strict=True):
            parameter.data.copy_(value)
        self.optimizer.load_state_dict(state["optimizer"])
        self.epoch, self.batch, self.tokens = state["place"]
        self.log = state["log"]


def learning_rate(progress: float) -> float:
    """Share of the highest rate after this share of the run: a linear rise, then half a cosine."""
    if progress < WARMUP:
        return (progress + 0.001) / (WARMUP + 0.001)
    along = (progress - WARMUP) / (1 - WARMUP)
    return FINAL_RATE + (1 - FINAL_RATE) * (1 + math.cos(math.pi * along)) / 2


def _padded(table: Tensor, length: int) -> Tensor:
    return nn.functional.pad(table, (0, 0, 0, length - len(table)))


def _device_of(module: nn.Module) -> torch.device:
    return next(module.parameters()).device


def _autocast(device: torch.device) -> Any:
    return torch.autocast(device.type, torch.bfloat16)


def _now() -> float:
    return time.monotonic()
