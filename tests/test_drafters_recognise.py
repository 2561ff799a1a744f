"""What a folder or a hub repository holds: which learned drafter, or a draft model."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from eagle_checkpoints import Head
from head_checkpoints import HIDDEN, medusa_shapes, mlp_config, mlp_shapes, random_tensors, write
from safetensors.torch import load_file, save_file
from tiny_models import VOCAB, greedy, tiny
from transformers import PreTrainedModel

import engine
from engine.drafters.eagle import EagleDrafter
from engine.drafters.medusa import MedusaDrafter
from engine.drafters.mlp import MlpSpeculatorDrafter
from engine.drafters.recognise import recognise

LAYER = dict(
    vocab_size=VOCAB, hidden_size=HIDDEN, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2,
    intermediate_size=48, max_position_embeddings=48, hidden_act="silu",
)  # fmt: skip


@pytest.fixture(scope="module")
def target() -> PreTrainedModel:
    return tiny("llama", num_hidden_layers=4)


def eagle_shapes(eagle3: bool) -> dict[str, tuple[int, ...]]:
    layer, inputs = ("midlayer", 2 * HIDDEN) if eagle3 else ("layers.0", HIDDEN)
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (HIDDEN, (3 if eagle3 else 2) * HIDDEN),
        f"{layer}.self_attn.q_proj.weight": (HIDDEN, inputs),
        f"{layer}.self_attn.k_proj.weight": (16, inputs),
        f"{layer}.self_attn.v_proj.weight": (16, inputs),
        f"{layer}.self_attn.o_proj.weight": (HIDDEN, HIDDEN),
        f"{layer}.mlp.gate_proj.weight": (48, HIDDEN),
        f"{layer}.mlp.up_proj.weight": (48, HIDDEN),
        f"{layer}.mlp.down_proj.weight": (HIDDEN, 48),
        f"{layer}.post_attention_layernorm.weight": (HIDDEN,),
    }
    if eagle3:
        shapes |= {f"{layer}.{norm}.weight": (HIDDEN,) for norm in ("hidden_norm", "input_layernorm")}
        shapes |= {"norm.weight": (HIDDEN,), "lm_head.weight": (VOCAB, HIDDEN)}
    return shapes


def eagle(path: Path, config: dict[str, Any], file_name: str = "model.safetensors", eagle3: bool = False) -> Path:
    return write(path, config, random_tensors(eagle_shapes(eagle3)), file_name)


MAKE: dict[str, tuple[Any, Callable[[Path], Path]]] = {
    "eagle-1": (
        EagleDrafter,
        lambda p: eagle(p, {**LAYER, "model_type": "llama", "architectures": ["LlamaForCausalLM"]}),
    ),
    "eagle-1 bin": (EagleDrafter, lambda p: eagle(p, {**LAYER, "model_type": "llama"}, "pytorch_model.bin")),
    "eagle architecture": (
        EagleDrafter,
        lambda p: eagle(p, {**LAYER, "model_type": "llama", "architectures": ["EagleLlamaForCausalLM"]}),
    ),
    "eagle-3": (
        EagleDrafter,
        lambda p: eagle(
            p,
            {**LAYER, "model_type": "llama", "architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": VOCAB},
            eagle3=True,
        ),
    ),
    "speculators": (
        EagleDrafter,
        lambda p: eagle(
            p,
            {
                "speculators_model_type": "eagle3",
                "draft_vocab_size": VOCAB,
                "transformer_layer_config": {**LAYER, "model_type": "llama"},
            },
            eagle3=True,
        ),
    ),
    "medusa": (
        MedusaDrafter,
        lambda p: write(
            p,
            {"medusa_num_heads": 3, "medusa_num_layers": 1},
            random_tensors(medusa_shapes()),
            "medusa_lm_head.safetensors",
        ),
    ),
    "medusa pt": (
        MedusaDrafter,
        lambda p: write(p, {"medusa_num_heads": 3}, random_tensors(medusa_shapes()), "medusa_lm_head.pt"),
    ),
    "medusa by its tensors": (
        MedusaDrafter,
        lambda p: write(p, {"torch_dtype": "float32"}, random_tensors(medusa_shapes()), "medusa_lm_head.safetensors"),
    ),
    "mlp": (
        MlpSpeculatorDrafter,
        lambda p: write(p, mlp_config(), random_tensors(mlp_shapes()), "model.safetensors"),
    ),
    "mlp without a type": (
        MlpSpeculatorDrafter,
        lambda p: write(p, mlp_config(model_type=None), random_tensors(mlp_shapes()), "model.safetensors"),
    ),
}


@pytest.mark.parametrize("name", MAKE)
def test_folders(target: PreTrainedModel, tmp_path: Path, name: str) -> None:
    kind, make = MAKE[name]
    folder = make(tmp_path)
    assert type(recognise(str(folder))) is kind
    llm = engine.load(target, drafter=folder, num_draft_tokens=2)
    assert type(llm.drafter) is kind
    prompt = [3, 4, 5, 6]
    assert llm.generate([prompt], engine.SamplingParams(max_new_tokens=8))[0].token_ids == greedy(target, prompt, 8)
    assert llm.stats.draft_tokens > 0


@pytest.mark.parametrize(
    "known",
    [
        {"architectures": ["LlamaForCausalLMEagle3"]},
        {"architectures": "EagleModel"},
        {"eagle_config": {"draft_vocab_size": VOCAB}},
    ],
)
def test_eagle_heads_whose_config_has_the_targets_layers(tmp_path: Path, known: dict[str, Any]) -> None:
    """Of several layers, a config might be a draft model's; such a head is published, and is one by its other entries."""
    folder = eagle(tmp_path, {**LAYER, "num_hidden_layers": 4, "model_type": "llama", **known}, eagle3=True)
    assert type(recognise(folder)) is EagleDrafter


def test_draft_models_are_none_of_them(target: PreTrainedModel, tmp_path: Path) -> None:
    for layers in (1, 2):
        draft = tiny("llama", seed=3, num_hidden_layers=layers)
        draft.save_pretrained(tmp_path / str(layers))
        assert recognise(tmp_path / str(layers)) is None
        llm = engine.load(target, drafter=tmp_path / str(layers))
        assert isinstance(llm.drafter, engine.DraftModel)
    for location in ("", "/nowhere", "./nowhere", "model.gguf", "a/b/c"):
        assert recognise(location) is None
    (tmp_path / "empty").mkdir()
    assert recognise(tmp_path / "empty") is None
    with pytest.raises(ValueError, match=r"drafter must be a folder with a config\.json"):
        engine.load(target, drafter=tmp_path / "empty")
    file = tmp_path / "file.gguf"
    file.write_bytes(b"GGUF")
    assert recognise(file) is None


def test_nothing_but_the_config_is_fetched_of_a_draft_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folders = {
        "some/head": MAKE["medusa"][1](tmp_path / "head"),
        "some/eagle": MAKE["eagle-1 bin"][1](tmp_path / "eagle"),
    }
    tiny("llama").save_pretrained(tmp_path / "model")
    folders["some/model"] = tmp_path / "model"
    fetched = []

    def snapshot(repository: str, allow_patterns: list[str], ignore_patterns: list[str], **bars: Any) -> str:
        assert "*/*" in ignore_patterns
        if weights := {"*.safetensors", "*.bin"} & set(allow_patterns):
            fetched.append((repository, "*.bin" in weights))
        assert ("tqdm_class" in bars) == (not weights)  # what is soon there has no bar
        assert ("*.bin" in allow_patterns) == ("optimizer.pt" in ignore_patterns)
        return str(folders[repository])

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    assert type(recognise("some/head")) is MedusaDrafter
    assert recognise("some/model") is None
    assert type(recognise("some/eagle")) is EagleDrafter
    assert fetched == [("some/head", False), ("some/eagle", False), ("some/eagle", True)]


def test_a_hub_id_that_cannot_be_had(monkeypatch: pytest.MonkeyPatch, target: PreTrainedModel) -> None:
    def missing(repository: str, **options: Any) -> str:
        raise OSError(f"{repository} is not there")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", missing)
    rule = "drafter must be an existing path or an accessible hub id, got 'no/such': no/such is not there"
    with pytest.raises(
        OSError,
        match=rf"(?s)^{rule}.*Or one of the names ngram, suffix, layer_skip:N, staged:MODEL, eagle3-SmolLM2-135M-Instruct, ngram\+X",
    ):
        engine.load(target, drafter="no/such")


def test_a_connection_that_breaks_off(monkeypatch: pytest.MonkeyPatch, target: PreTrainedModel, tmp_path: Path) -> None:
    """While a head's weights are fetched: httpx's errors are no OSErrors."""
    folder = MAKE["medusa"][1](tmp_path)

    def snapshot(repository: str, allow_patterns: list[str], **options: Any) -> str:
        if "*.safetensors" in allow_patterns:
            raise huggingface_hub.errors.HTTPError("peer closed connection")  # type: ignore[attr-defined]
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    with pytest.raises(
        OSError, match=r"^drafter must be an .* accessible hub id, got 'some/head': peer closed connection"
    ):
        engine.load(target, drafter="some/head")


def test_a_hub_repository_without_a_config(
    monkeypatch: pytest.MonkeyPatch, target: PreTrainedModel, tmp_path: Path
) -> None:
    """The working directory's is not read in its place."""
    MAKE["medusa"][1](tmp_path / "cwd")
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text("{}")
    monkeypatch.chdir(tmp_path / "cwd")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *args, **options: str(tmp_path / "adapter"))
    with pytest.raises(ValueError, match=r"^drafter must be a whole model, got the adapter some/adapter: load it"):
        engine.load(target, drafter="some/adapter")


def test_kinds_that_are_not_supported(target: PreTrainedModel, tmp_path: Path) -> None:
    config = {"speculators_model_type": "dflash", "architectures": ["DFlashDraftModel"], "model_type": "llama"}
    folder = write(tmp_path, config, {"fc.weight": torch.zeros(2, 2)}, "model.safetensors")
    calls: list[int] = []
    hook = target.register_forward_hook(lambda *args: calls.append(1))
    with pytest.raises(ValueError, match=r"speculators_model_type of \['eagle3', 'eagle'\], got 'dflash'"):
        engine.load(target, drafter=folder)
    hook.remove()
    assert not calls
    for more, name in (
        ({"architectures": ["DFlashDraftModel"]}, "DFlashDraftModel"),
        ({"architectures": ["PEagleDraftModel"]}, "PEagleDraftModel"),
        ({"dflash_config": {}}, "DFlash"),
        ({"architectures": ["LlamaForCausalLMEagle3Deep"]}, "LlamaForCausalLMEagle3Deep"),
        ({"architectures": ["LlamaForCausalLMEagle3"], "parallel_drafting": True}, "P-EAGLE"),
        ({"architectures": ["LlamaForCausalLMEagle3"], "ptd_token_id": 0}, "P-EAGLE"),
    ):
        folder = write(
            tmp_path / "named", {**LAYER, "model_type": "qwen3", **more}, {"fc.weight": torch.zeros(2, 2)}, "a.bin"
        )
        with pytest.raises(ValueError, match=f"of a kind that is supported .*, got the architecture {name}$"):
            engine.load(target, drafter=folder)


def test_a_head_in_two_kinds_of_files(tmp_path: Path) -> None:
    """All of them are read where the kind of drafter is told by the names of tensors, too."""
    folder = MAKE["eagle-1"][1](tmp_path)
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    torch.save({"fc.weight": tensors.pop("fc.weight")}, folder / "last.pt")
    torch.save(tensors, folder / "first.bin")
    assert type(recognise(folder)) is EagleDrafter


def test_a_draft_model_without_all_of_its_weights(target: PreTrainedModel, tmp_path: Path) -> None:
    tiny("llama", seed=3).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.1.mlp.down_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    for argument in ({"target": tmp_path}, {"target": target, "drafter": tmp_path}):
        role = list(argument)[-1]
        with pytest.raises(
            ValueError, match=rf"{role} must be an intact checkpoint; .*1 tensors of .* are missing: .*down_proj"
        ):
            engine.load(**argument)


def test_damaged_checkpoints(target: PreTrainedModel, tmp_path: Path) -> None:
    folder = MAKE["eagle-1"][1](tmp_path)
    weights = folder / "model.safetensors"
    whole = weights.read_bytes()
    for content in (whole[:40], whole[:-8], b""):
        weights.write_bytes(content)
        with pytest.raises(
            ValueError, match=r"drafter must be an intact checkpoint; reading .*model\.safetensors failed"
        ):
            engine.load(target, drafter=folder)
    weights.write_bytes(whole)
    tensors = load_file(weights)
    save_file({name: value for name, value in tensors.items() if "q_proj" not in name}, weights)
    with pytest.raises(ValueError, match=r"missing layers\.0\.self_attn\.q_proj\.weight \[32, 32\]"):
        engine.load(target, drafter=folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config\.json must be a JSON object: "):
        engine.load(target, drafter=folder)
    weights.unlink()
    (folder / "config.json").write_text(json.dumps({"medusa_num_heads": 2}))
    with pytest.raises(ValueError, match=r"folder with \*\.safetensors, \*\.bin or \*\.pt files"):
        engine.load(target, drafter=folder)


@pytest.mark.parametrize(
    "content, reason",
    [
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n", "it is not a file of tensors by name"),
        (b"hello", "it is not a file of tensors by name"),
        ([torch.ones(2)], "it must hold tensors by name, got list"),
        (torch.ones(2), "it must hold tensors by name, got Tensor"),
    ],
)
@pytest.mark.parametrize("eagle", [1, 3])
def test_files_of_torch_that_are_something_else(
    target: PreTrainedModel, tmp_path: Path, content: Any, reason: str, eagle: int
) -> None:
    """Such as the pointer that git leaves where no large files were fetched."""
    folder = Head(eagle=eagle).repository(tmp_path)
    weights = folder / "pytorch_model.bin"
    if isinstance(content, bytes):
        weights.write_bytes(content)
    else:
        torch.save(content, weights)
    with pytest.raises(
        ValueError, match=rf"drafter must be an intact checkpoint; reading .*pytorch_model\.bin failed: {reason}"
    ):
        engine.load(target, drafter=folder)


@pytest.mark.parametrize("eagle", [1, 3])
def test_what_a_trainer_leaves_beside_the_weights(target: PreTrainedModel, tmp_path: Path, eagle: int) -> None:
    """Its arguments are a pickle of no tensors; and the optimizer's state would be taken for tensors of the head."""
    folder = Head(eagle=eagle).repository(tmp_path)
    torch.save(target.config, folder / "training_args.bin")
    for name in ("optimizer.pt", "optimizer.bin", "scheduler.pt", "scheduler.bin", "scaler.pt"):
        torch.save({"state": torch.zeros(1)}, folder / name)
    llm = engine.load(target, drafter=folder, num_draft_tokens=2)
    llm.generate([5, 6, 7], engine.SamplingParams(max_new_tokens=4))
    assert llm.stats.draft_tokens
