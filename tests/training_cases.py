"""What the tests of training share: a tiny target with a tokenizer, prompts, and options of a run that takes a second."""

import json
from pathlib import Path
from typing import Any

import torch
from tiny_models import tiny
from tiny_tokenizer import VOCAB as BYTES
from tiny_tokenizer import byte_tokenizer

from engine.training.options import ONLY_FOR, TrainingOptions

PROMPTS = [f"{word} {number}" for number in range(6) for word in ("one", "and two", "three?", "the four")]
SMALL = dict(
    max_new_tokens=12, max_length=48, batch_size=4, validation_share=0.2, draft_vocab_size=100, num_steps=3, num_layers=1,
    epochs=2, learning_rate=5e-3, tokens_per_batch=160,
)  # fmt: skip


def write_target(folder: Path, name: str = "llama", **changes: Any) -> Path:
    """A checkpoint with a byte-level tokenizer that has a chat template."""
    tiny(name, dtype=torch.float32, vocab_size=BYTES, **changes).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


def options(target: Path | str, method: str = "eagle3", **changes: Any) -> TrainingOptions:
    """The small ones that the method has, with changes."""
    own: dict[str, Any] = {name: value for name, value in SMALL.items() if method in ONLY_FOR.get(name, (method,))}
    return TrainingOptions(method, str(target), **{**own, **changes})


def log_of(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "work" / "log.jsonl").read_text().splitlines()]
