"""Drafters by name, in `engine.load` and in the benchmark's tables."""

import itertools
import re
from pathlib import Path

import pytest
import torch
from head_checkpoints import medusa_shapes, random_tensors, write
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
        ("suffix+layer_skip:1-1", [engine.SuffixDrafter, engine.LayerSkipDrafter]),
        ("DRAFT", [engine.DraftModel]),
        ("suffix+DRAFT", [engine.SuffixDrafter, engine.DraftModel]),
        ("staged:DRAFT", [engine.StagedDraftModel]),
        ("ngram+staged:DRAFT", [engine.NGramDrafter, engine.StagedDraftModel]),
    ],
)
def test_a_name_makes_its_drafters(target: PreTrainedModel, draft: Path, name: str, kinds: list[type]) -> None:
    llm = engine.load(target, drafter=name.replace("DRAFT", str(draft)), num_draft_tokens=3)
    made = llm.drafter
    assert [type(stage) for stage in getattr(made, "stages", (made,))] == kinds
    prompts = random_prompts(3, seed=1)
    outputs = llm.generate(prompts, engine.SamplingParams(max_new_tokens=12))
    assert [output.token_ids for output in outputs] == [greedy(target, prompt, 12) for prompt in prompts]


@pytest.mark.parametrize("name", ["ngram", "suffix"])
def test_lookup_in_a_cascade_wants_three_tokens(target: PreTrainedModel, name: str) -> None:
    """Shorter matches are wrong more often than what stands behind the lookup."""
    alone = engine.load(target, drafter=name).drafter
    first = engine.load(target, drafter=f"{name}+layer_skip:1").drafter.stages[0]
    assert isinstance(alone, engine.NGramDrafter | engine.SuffixDrafter) and type(first) is type(alone)
    assert (alone.min_ngram, first.min_ngram) == (1, 3)
    lookups = engine.load(target, drafter=f"{name}+ngram").drafter.stages
    assert [stage.min_ngram for stage in lookups] == [3, 1]


@pytest.mark.parametrize(
    ("name", "error", "message"),
    [
        ("layer_skip:99", ValueError, r"drafter 'layer_skip:99': exit_layer must be in \[1, 2\], got 99"),
        ("layer_skip:0-2", ValueError, r"layers must be below 2, the target's number, got \[0, 1, 2\]"),
        (
            "ngram+/nowhere/draft",
            FileNotFoundError,
            "drafter must be an existing path or a hub id, got '/nowhere/draft'",
        ),
        (
            "staged:/nowhere/draft",
            FileNotFoundError,
            "drafter must be an existing path or a hub id, got '/nowhere/draft'",
        ),
    ],
)
def test_bad_names(target: PreTrainedModel, name: str, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        engine.load(target, drafter=name)


@pytest.mark.parametrize("name", ["layer_skip", "layer-skip", "staged", "ngram+staged"])
def test_half_a_name(target: PreTrainedModel, name: str) -> None:
    rule = r"^drafter '(layer_skip|staged)' must have an argument, such as layer_skip:8 or staged:MODEL, got"
    with pytest.raises(ValueError, match=rule):
        engine.load(target, drafter=name)


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("NGRAM", "ngram"),
        ("n-gram", "ngram"),
        ("ngram:3", "ngram"),
        ("Ngram+layer_skip:1", "ngram"),
        ("ngram+sufix", "suffix"),
        ("layer-skip:1", "layer_skip"),
        ("layerskip:1", "layer_skip"),
        ("stage:gpt2", "staged"),
        ("eagle3-SmolLM2-135M", "eagle3-SmolLM2-135M-Instruct"),
    ],
)
def test_misspelt_names(target: PreTrainedModel, name: str, meant: str) -> None:
    """They are no hub ids, which would be looked for there."""
    part = re.escape(name.removeprefix("ngram+"))
    with pytest.raises(
        ValueError, match=rf"^drafter must be a known name, .*, got '{part}': did you mean '{meant}'\?$"
    ):
        engine.load(target, drafter=name)


def test_a_folder_may_have_any_name(
    target: PreTrainedModel, draft: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "n-gram").symlink_to(draft)
    monkeypatch.chdir(tmp_path)
    assert isinstance(engine.load(target, drafter="n-gram").drafter, engine.DraftModel)


@pytest.mark.parametrize(
    "text", ["", "x", "0", "-1", "1-", "3,", ",3", "3,,4", "2-1", "1,1", "3,1", "0-4,2", "10000", "²"]
)
def test_bad_layers(text: str) -> None:
    rule = r"drafter layer_skip:\.\.\. must have a number of layers >= 1, such as 8, or ascending layers, such as 0-7,28,29"
    with pytest.raises(ValueError, match=f"{rule} .*, got '{text}'$"):
        named.named(f"layer_skip:{text}")


@pytest.mark.parametrize(
    ("text", "layers"),
    [
        ("3", [0, 1, 2]),
        ("3-3", [3]),
        ("0,1", [0, 1]),
        ("0-7,28,29", [*range(8), 28, 29]),
        ("1,3-4,6", [1, 3, 4, 6]),
    ],
)
def test_layers_by_name(text: str, layers: list[int]) -> None:
    made = named.named(f"layer_skip:{text}")
    assert isinstance(made, engine.LayerSkipDrafter) and made.layers == tuple(layers)


def test_every_set_of_layers_has_a_name() -> None:
    assert named.layer_skip_name([*range(8), 28, 29]) == "layer_skip:0-7,28-29"
    for size in range(1, 7):
        for layers in itertools.combinations(range(6), size):
            made = named.named(named.layer_skip_name(layers))
            assert isinstance(made, engine.LayerSkipDrafter) and made.layers == layers


def test_staged_by_name_drafts_what_the_model_drafts(target: PreTrainedModel, draft: Path) -> None:
    """With n-gram lookup inside."""
    params = engine.SamplingParams(temperature=0.8, seed=3, max_new_tokens=16)
    texts = []
    for name in (f"staged:{draft}", str(draft)):
        llm = engine.load(target, drafter=name, num_draft_tokens=4)
        texts.append([output.token_ids for output in llm.generate(random_prompts(3), params)])
        if isinstance(llm.drafter, engine.StagedDraftModel):
            assert isinstance(llm.drafter.drafter, engine.NGramDrafter) and not llm.drafter.greedy
    assert texts[0] == texts[1] and llm.stats.accepted_tokens > 0


@pytest.mark.parametrize("name", ["", "ngram", "layer_skip:2", "staged:x", "ngram+x", heads.DEFAULT_DRAFTER[6:]])
def test_what_cannot_be_staged(name: str) -> None:
    rule = "drafter staged:MODEL must have the hub id, folder or GGUF file of a draft model"
    with pytest.raises(ValueError, match=f"{rule}, got {name!r}".replace("+", r"\+")):
        named.named(f"staged:{name}")


def test_a_head_cannot_be_staged(target: PreTrainedModel, tmp_path: Path) -> None:
    write(tmp_path, {"medusa_num_heads": 3}, random_tensors(medusa_shapes()), "model.safetensors")
    for name in (f"staged:{tmp_path}", f"ngram+staged:{tmp_path}"):
        with pytest.raises(ValueError, match=rf"of a draft model, got {tmp_path}, which holds a learned head \(Medusa"):
            engine.load(target, drafter=name)


def test_names_in_tables() -> None:
    assert named.label("ngram") == "ngram"
    assert named.label("/a/b/small") == "small"
    assert named.label("ngram+owner/small") == "ngram+small"
    assert named.label("ngram+owner/small@refs/pr/1") == "ngram+small@refs/pr/1"
    assert named.label("layer_skip:4") == "layer_skip:4"
    assert named.label("layer_skip:0-3,5") == "layer_skip:0-3,5"
    assert named.label("ngram+staged:/a/b/small") == "ngram+staged:small"
    assert named.label("staged:owner/small") == "staged:small"
    assert named.label(heads.DEFAULT_DRAFTER) == heads.DEFAULT_DRAFTER


def test_packaged_heads_go_by_their_name() -> None:
    name = heads.DEFAULT_DRAFTER.removeprefix("ngram+")
    folder = heads.find_head(name)
    assert folder is not None and (folder / "model.safetensors").stat().st_size < 12e6
    assert (folder / "README.md").read_text().startswith("# ")
    assert named.location(name) is None
    assert isinstance(named.named(name), engine.EagleDrafter)
    for other in ("", ".", "..", "nothing", f"../heads/{name}"):
        assert heads.find_head(other) is None
