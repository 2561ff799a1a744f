"""Drafters by name, in `engine.load` and in the benchmark's tables."""

from pathlib import Path

import pytest
import torch
from tiny_models import greedy, perturbed, random_prompts, tiny
from transformers import PreTrainedModel

import engine
from engine import heads
from engine.drafters import named


@pytest.fixture(scope="module")
def target() -> PreTrainedModel:
    return tiny("llama", dtype=torch.float32)


@pytest.fixture(scope="module")
def draft(target: PreTrainedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("drafters") / "small"
    perturbed(target, 0.05).save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("name", "kinds"),
    [
        ("ngram", [engine.NGramDrafter]),
        ("suffix", [engine.SuffixDrafter]),
        ("layer_skip:1", [engine.LayerSkipDrafter]),
        ("ngram+layer_skip:1", [engine.NGramDrafter, engine.LayerSkipDrafter]),
        ("DRAFT", [engine.DraftModel]),
        ("suffix+DRAFT", [engine.SuffixDrafter, engine.DraftModel]),
    ],
)
def test_a_name_makes_its_drafters(target: PreTrainedModel, draft: Path, name: str, kinds: list[type]) -> None:
    llm = engine.load(target, drafter=name.replace("DRAFT", str(draft)), num_draft_tokens=3)
    made = llm.drafter
    assert [type(stage) for stage in getattr(made, "stages", (made,))] == kinds
    prompts = random_prompts(3, seed=1)
    outputs = llm.generate(prompts, engine.SamplingParams(max_new_tokens=12))
    assert [output.token_ids for output in outputs] == [greedy(target, prompt, 12) for prompt in prompts]


def test_lookup_in_a_cascade_wants_two_tokens() -> None:
    alone, first = (named.named("ngram", in_cascade) for in_cascade in (False, True))
    assert isinstance(alone, engine.NGramDrafter) and isinstance(first, engine.NGramDrafter)
    assert (alone.min_ngram, first.min_ngram) == (1, 2)


@pytest.mark.parametrize(
    ("name", "error", "message"),
    [
        ("layer_skip:x", ValueError, "layer_skip:N must have a number of layers N, got 'x'"),
        ("layer_skip:99", ValueError, "99"),
        ("ngram+/nowhere/draft", FileNotFoundError, "drafter must be an existing path or a hub id"),
    ],
)
def test_bad_names(target: PreTrainedModel, name: str, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        engine.load(target, drafter=name)


def test_names_in_tables() -> None:
    assert named.label("ngram") == "ngram"
    assert named.label("/a/b/small") == "small"
    assert named.label("ngram+owner/small") == "ngram+small"
    assert named.label("layer_skip:4") == "layer_skip:4"
    assert named.label(heads.DEFAULT_DRAFTER) == heads.DEFAULT_DRAFTER


def test_packaged_heads_go_by_their_name() -> None:
    name = heads.DEFAULT_DRAFTER.removeprefix("ngram+")
    folder = heads.find_head(name)
    assert folder is not None and (folder / "model.safetensors").stat().st_size < 12e6
    assert (folder / "README.md").read_text().startswith("# ")
    assert not named.is_location(name)
    assert isinstance(named.named(name), engine.EagleDrafter)
    for other in ("", ".", "..", "nothing", f"../heads/{name}"):
        assert heads.find_head(other) is None
