"""What drafts see under a repetition penalty: the text, and the drafts before. Else drafts fall that the target penalises."""

from pathlib import Path
from typing import Any

import pytest
import torch
from drafter_cases import Knowing, proposals_of
from eagle_checkpoints import Head, drafter_of
from head_checkpoints import mlp_config, mlp_shapes, random_tensors, write
from random_heads import KINDS, random_head
from tiny_models import VOCAB, tiny
from transformers import PreTrainedModel

import engine
from engine.drafters.mlp import MlpSpeculatorDrafter


@pytest.fixture(scope="module")
def target() -> PreTrainedModel:
    return tiny("llama", num_hidden_layers=7)


def drafts_of(target: PreTrainedModel, drafter: Any, penalty: float, prompt: list[int]) -> list[tuple[Any, list[int]]]:
    """Greedy drafts of every round, each beside the text at that time."""
    seen = proposals_of(drafter)
    params = engine.SamplingParams(repetition_penalty=penalty, max_new_tokens=8, ignore_eos=True)
    engine.load(target, drafter, 3, max_batch_size=1).generate(prompt, params)
    del drafter.propose  # the list is whole
    return [(text, found.tokens[0].tolist()) for text, found in seen]


@pytest.mark.parametrize("kind", KINDS)
def test_heads_see_the_text(target: PreTrainedModel, tmp_path: Path, kind: str) -> None:
    """Under a very large penalty, what stands there is not drafted."""
    drafter = random_head(kind, tmp_path, **({} if kind == "medusa" else {"min_reach": 0.0}))
    prompt = [token for token in range(VOCAB) if token % 7 > 3]
    for penalty in (1.0, 100.0):
        rounds = drafts_of(target, drafter, penalty, prompt)
        new = [bool(drafts) and not set(text) & set(drafts) for text, drafts in rounds]
        assert len(new) > 1 and all(new) == (penalty > 1)


def repeating_mlp(folder: Path) -> Any:
    """An MLP speculator that drafts the same token again and again."""
    tensors = random_tensors(mlp_shapes())
    for step in range(3):
        tensors[f"speculator.ln.{step}.weight"].zero_()
        tensors[f"speculator.ln.{step}.bias"].fill_(1.0)
        tensors[f"speculator.head.{step}.weight"] = tensors["speculator.head.0.weight"].clone()
    write(folder, mlp_config(), tensors, "model.safetensors")
    return MlpSpeculatorDrafter.from_pretrained(folder, min_reach=0.0)


def repeating_eagle(folder: Path, eagle: int) -> Any:
    """An EAGLE head that does, as its layer adds nothing to the feature."""
    head = Head(eagle=eagle)
    for name in ("self_attn.o_proj", "mlp.down_proj"):
        head.tensors[f"layers.0.{name}.weight"].zero_()
    if eagle == 1:  # the feature as it is
        head.tensors["fc.weight"].copy_(torch.cat([torch.zeros(32, 32), torch.eye(32)], dim=1))
    return drafter_of(head.speculators(folder) if eagle == 3 else head.repository(folder))


@pytest.mark.parametrize("kind", ["mlp", "eagle1", "eagle3"])
def test_heads_see_their_drafts(target: PreTrainedModel, tmp_path: Path, kind: str) -> None:
    """Under a very large penalty, none is drafted twice."""
    drafter = repeating_mlp(tmp_path) if kind == "mlp" else repeating_eagle(tmp_path, int(kind[-1]))
    for penalty in (1.0, 100.0):
        rounds = [drafts for _, drafts in drafts_of(target, drafter, penalty, [3, 4, 5])]
        assert len(rounds[0]) == 3
        assert all(len(set(drafts)) == (len(drafts) if penalty > 1 else min(len(drafts), 1)) for drafts in rounds)


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_a_staged_model_sees_the_guesses(temperature: float) -> None:
    """The drafter is the target, and the inner one knows what is coming: all stands, and a round takes one call."""
    target = tiny("llama", dtype=torch.float32, max_position_embeddings=96)
    params = engine.SamplingParams(temperature, seed=1, max_new_tokens=40, ignore_eos=True, repetition_penalty=1.6)
    plain = engine.load(target, None, verification="coupled").generate([3, 4, 5], params)
    text = [3, 4, 5, *plain.token_ids]
    staged = engine.StagedDraftModel(target, Knowing([text], len(text)), 5)
    output = engine.load(target, staged, 6, verification="coupled").generate([3, 4, 5], params)
    assert output.token_ids == plain.token_ids and output.stats.acceptance_rate == 1
    assert staged.num_calls == output.stats.rounds
