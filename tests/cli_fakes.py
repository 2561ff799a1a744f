"""What the tests of the command line share: an engine that repeats what it was asked, and a tiny real model."""

import io
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import tiny

import engine
from engine import demo, threads
from engine.errors import InvalidLogitsError
from engine.metrics import Stats
from engine.output import Output, Piece, Span


class FakeEngine:
    """Answers with its prompt in capitals, a word each round, every other word drafted."""

    tokenizer = "tokenizer"
    exact = False

    def __init__(self, target: Any, **options: Any) -> None:
        self.target, self.options = target, options
        self.target_model = torch.nn.Linear(1, 1)  # has no device of its own; see the fixture
        self.asked: list[Any] = []
        self.params: Any = None
        self.progress = False

    def output(self, prompt: Any) -> Output:
        self.asked.append(prompt)
        text = (prompt if isinstance(prompt, str) else prompt[-1]["content"]).upper()
        if "NAN" in text:
            raise InvalidLogitsError("the logits are NaN", [])
        if not text:
            raise ValueError("prompts[0] must not be empty")
        stats = Stats(total_seconds=1.0)
        for _ in text.split():
            stats.add_round(proposed=2, accepted=1, emitted=2)
        return Output(text, [len(word) for word in text.split()], [1], "length", stats)

    def check(self, prompts: Any, params: Any = None) -> None:
        """All prompts are good here."""

    def generate(self, prompts: Any, params: Any = None, progress: bool = False, on_output: Any = None) -> Any:
        self.params, self.progress = params, progress
        if isinstance(prompts, str) or isinstance(prompts[0], dict):
            return self.output(prompts)
        outputs = [self.output(prompt) for prompt in prompts]
        if on_output is not None:
            for index in reversed(range(len(outputs))):  # the last ends first
                on_output(index, outputs[index])
        return outputs

    def stream(self, prompt: Any, params: Any = None) -> Iterator[Piece]:
        self.params = params
        output = self.output(prompt)
        words = output.text.split(" ")
        for number, word in enumerate(words):
            last = number + 1 == len(words)
            text = word if last else word + " "
            yield Piece(text, [len(word)], (Span(text, number % 2 == 1),), output if last else None)


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> list[FakeEngine]:
    """The fake engines that a test has made."""
    made: list[FakeEngine] = []

    def load(target: Any, **options: Any) -> FakeEngine:
        if target == "missing.gguf":
            raise FileNotFoundError("target must be an existing path or a hub id, got 'missing.gguf'")
        if options.get("num_draft_tokens") == -1:
            raise ValueError("num_draft_tokens must be >= 0, got -1")
        made.append(FakeEngine(target, **options))
        made[-1].target_model = type("Model", (), {"device": torch.device("cpu"), "dtype": torch.bfloat16})()
        return made[-1]

    monkeypatch.setattr(engine, "load", load)
    for module in (demo, threads):
        monkeypatch.setattr(module, "use_all_cores", lambda: None)
    monkeypatch.setenv("ENGINE_DEBUG", "")
    return made


def pipe(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(text))


def json_lines(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


@pytest.fixture
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tiny model is no work for several threads, which would only wait for each other on a busy machine."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny random llama, a byte-level tokenizer and a chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("checkpoint")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: index for index, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    fast.chat_template = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    fast.save_pretrained(folder)
    tiny("llama", dtype=torch.float32, vocab_size=256, max_position_embeddings=4096).save_pretrained(folder)
    return folder
