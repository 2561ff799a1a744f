"""Fixtures and helpers for tests of bench.throughput: tiny checkpoints, three prompts, and the command line over them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from head_checkpoints import medusa_shapes, random_tensors, write
from tiny_models import perturbed, tiny
from tiny_tokenizer import EOS, VOCAB, byte_tokenizer

from bench import timing
from bench.throughput import plots
from bench.throughput.__main__ import main
from bench.throughput.methods import Contest
from bench.throughput.records import read_records

CONTEXT = 192


ONE = Contest("float32", 1, 0.0, 8)


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiny models lose more by handing work over than a second core gives."""
    monkeypatch.setattr(timing, "use_all_cores", lambda: 1)


DRAWN = (
    "test_a_run", "test_without_matplotlib", "test_batches_and_sampling", "test_dollars_in_a_category_are_no_formula",
)  # fmt: skip


@pytest.fixture(autouse=True)
def few_plots(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawing takes longer than all else."""
    if request.node.name not in DRAWN:
        monkeypatch.setattr(plots, "available", lambda: False)


def save(folder: Path, architecture: str, noise: float = 0.0, tokenizer: Any = None, **changes: Any) -> str:
    """A tiny checkpoint with a tokenizer, like those of one seed and architecture, but for some noise."""
    size = {"gpt2": "n_positions"}.get(architecture, "max_position_embeddings")
    sizes = {"vocab_size": VOCAB, size: CONTEXT, **changes}
    model = tiny(architecture, dtype=torch.float32, eos_token_id=EOS, **sizes)
    (perturbed(model, noise) if noise else model).save_pretrained(folder)
    (tokenizer or byte_tokenizer()).save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save(tmp_path_factory.mktemp("models") / "big", "llama")


@pytest.fixture(scope="module")
def draft(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save(tmp_path_factory.mktemp("models") / "small", "llama", noise=0.02)


def medusa(folder: Path) -> str:
    """A checkpoint of Medusa heads for such models."""
    tensors = random_tensors(medusa_shapes(vocab=VOCAB))
    return str(write(folder / "head", {"medusa_num_heads": 3}, tensors, "model.safetensors"))


@pytest.fixture
def prompts(tmp_path: Path) -> str:
    """Three prompts of two categories; the second one has two turns."""
    lines = [
        {"question_id": 7, "category": "edit", "turns": ["one two one two one"], "reference": ["ignored"]},
        {"question_id": "b", "category": "talk", "turns": ["hello", "and then?"]},
        {"question_id": 9, "category": "edit", "turns": ["abcabcabc"]},
    ]
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines) + "\n")
    return str(path)


@pytest.fixture
def bench(tmp_path: Path, target: str, prompts: str) -> Callable[..., Path]:
    """Run the command line with few tokens; returns the folder."""

    def call(
        *arguments: str, out: str = "out", status: int = 0, baselines: str = "plain lookup", tokens: str = "6"
    ) -> Path:
        folder = tmp_path / out
        words = ["--out", str(folder), "--target", target, "--prompts", prompts, "-n", tokens, "--dtypes", "float32"]
        assert main([*words, "--baselines", *baselines.split(), *arguments]) == status
        return folder

    return call


def essence(folder: Path) -> list[tuple[Any, ...]]:
    """What of a run's records does not depend on time."""
    names = ("method", "line", "turn", "repeat", "token_ids", "rounds", "accepted_tokens", "differences", "contest")
    return [tuple(json.dumps(record.get(name)) for name in names) for record in read_records(folder)]
