"""What stands in the folder of a trained drafter, for those who load it elsewhere."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import VOCAB, tiny
from training_cases import PROMPTS, options, write_target
from transformers import AutoTokenizer

from engine.drafters.eagle_model import EagleModel
from engine.training import run
from engine.training.eagle3 import Eagle3Training, head_config
from engine.training.eagle3_files import config
from engine.training.run import train_drafter


def test_a_draft_model_has_the_targets_tokenizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without one, nobody can check that it suits a target."""
    monkeypatch.setattr(run, "plot_training", lambda log, file: file.write_bytes(b""))
    target = write_target(tmp_path / "target")
    out = train_drafter(PROMPTS[:6], tmp_path / "out", options(target, "draft-model", epochs=1))
    ours, theirs = (AutoTokenizer.from_pretrained(folder) for folder in (out, target))
    assert ours.get_vocab() == theirs.get_vocab() and ours.eos_token == theirs.eos_token


@pytest.mark.parametrize("flag", ["norm_before_residual", "norm_output"])
def test_a_head_that_was_started_from_another_says_how_it_computes(flag: str) -> None:
    """As that one does; read as a head of the usual kind, it drafts nonsense."""
    target: Any = tiny("llama", dtype=torch.float32)
    own = head_config(target.config, 3, VOCAB)
    setattr(own, flag, True)
    training = Eagle3Training(target, (0, 1, 2), torch.arange(VOCAB), start=EagleModel(own))
    assert config(training, "target", "LlamaForCausalLM")[flag] is True
