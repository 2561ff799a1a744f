"""From hub ids, folders, GGUF files and live models to an engine; checkpoints that are damaged."""

import base64
import hashlib
import json
import os
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
import smollm2
import torch
from huggingface_hub.utils import filter_repo_objects
from random_heads import random_head
from safetensors import SafetensorError
from tiny_models import CONTEXT, greedy, perturbed, tiny
from tiny_tokenizer import EOS, VOCAB, byte_tokenizer
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoConfig, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerFast

import engine
from bench.throughput.shared_models import SharedModels
from engine import checkpoints
from engine import gguf as conversion
from engine.generation_config import eos_token_ids, warn_of_not_applied
from engine.model_support import check_supported

PARAMS = engine.SamplingParams(max_new_tokens=6)


@pytest.fixture(scope="module")
def target() -> PreTrainedModel:
    return tiny("llama", dtype=torch.float32, vocab_size=VOCAB)


@pytest.fixture
def folder(target: PreTrainedModel, tmp_path: Path) -> Path:
    path = tmp_path / "checkpoint"
    target.save_pretrained(path)
    byte_tokenizer().save_pretrained(path)
    return path


def test_folder(target: PreTrainedModel, folder: Path) -> None:
    for source in (folder, str(folder)):
        llm = engine.load(source, drafter=str(folder))
        output = llm.generate("abc", PARAMS)
        assert output.token_ids == greedy(target, [97, 98, 99], 6)
        assert output.text is not None
        assert llm.target_model.dtype == torch.float32
    for dtype in ("bfloat16", "torch.bfloat16", torch.bfloat16):
        assert engine.load(folder, dtype=dtype).target_model.dtype == torch.bfloat16
    assert engine.load(folder, max_length=CONTEXT).max_length == CONTEXT


def test_folder_without_a_tokenizer_takes_ids(target: PreTrainedModel, tmp_path: Path) -> None:
    target.save_pretrained(tmp_path)
    llm = engine.load(tmp_path)
    assert llm.generate([97, 98, 99], PARAMS).token_ids == greedy(target, [97, 98, 99], 6)
    with pytest.raises(ValueError, match=r"prompts\[0\] is text, which needs a tokenizer"):
        llm.generate("abc")


def test_live_model_keeps_its_dtype_and_device(target: PreTrainedModel) -> None:
    assert engine.load(target).target_model is target
    with pytest.raises(ValueError, match="device must be 'auto' for a live target"):
        engine.load(target, device="cuda")
    assert engine.load(target, dtype="float32").target_model is target
    with pytest.raises(
        ValueError, match=r"dtype must be 'auto' for a live target, which is in torch\.float32, got 'float16'"
    ):
        engine.load(target, dtype="float16")


@pytest.mark.parametrize(
    ("source", "error", "message"),
    [
        ("/nowhere/model.gguf", FileNotFoundError, "does not exist"),
        ("missing.gguf", FileNotFoundError, "does not exist"),
        ("./nowhere", FileNotFoundError, "does not exist"),
        ("~nobody-here/model", FileNotFoundError, "does not exist"),
        ("me/model@", FileNotFoundError, "does not exist; a hub id is owner/name or owner/name@revision$"),
        ("https://hub/me/model", FileNotFoundError, "does not exist; a hub id is owner/name or owner/name@revision$"),
        ("", ValueError, "hub id, a path"),
        (17, ValueError, "hub id, a path"),
    ],
)
def test_sources_that_are_none(source: object, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        engine.load(source)


def test_folder_without_config(folder: Path) -> None:
    (folder / "config.json").unlink()
    with pytest.raises(ValueError, match=r"target must be a folder with a config\.json"):
        engine.load(folder)


def test_folder_of_an_adapter(folder: Path) -> None:
    (folder / "config.json").rename(folder / "adapter_config.json")
    with pytest.raises(ValueError, match=f"target must be a whole model, got the adapter {folder}: .*merge"):
        engine.load(folder)


def test_config_that_is_no_json(folder: Path) -> None:
    (folder / "config.json").write_text("{")
    with pytest.raises(
        ValueError, match=r"^target must be a checkpoint that transformers knows, .* is not a valid JSON file"
    ):
        engine.load(folder)


def test_config_with_a_value_of_another_type(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": None}))
    with pytest.raises(
        ValueError, match=r"target must be a checkpoint that transformers knows, got .*position_embeddings"
    ):
        engine.load(folder)


def test_a_config_that_cannot_be_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which says nothing of what is in it."""

    def refuse(*_: Any, **more: Any) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(AutoConfig, "from_pretrained", refuse)
    with pytest.raises(PermissionError):
        engine.load(folder)


def test_code_of_a_checkpoint_is_neither_run_nor_asked_about(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("builtins.input", lambda question: pytest.fail(question))
    config = json.loads((folder / "config.json").read_text())
    own = {"auto_map": {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"}}
    (folder / "config.json").write_text(json.dumps(config | own))
    engine.load(folder)  # transformers has this architecture as well
    (folder / "config.json").write_text(json.dumps(config | own | {"model_type": "own"}))
    for role in ("target", "drafter"):
        with pytest.raises(
            engine.UnsupportedModelError, match=f"^{role} must use an architecture .* ships its own code"
        ):
            engine.load(**{"target": tiny("llama"), role: folder})
    (folder / "tokenizer_config.json").write_text('{"auto_map": {"AutoTokenizer": ["own.Tokenizer", null]}}')
    with pytest.raises(ValueError, match=r"^tokenizer must have .* ships its own code, .* pass it as tokenizer="):
        engine.load(tiny("llama"), tokenizer=folder)


def test_truncated_safetensors(folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    with pytest.raises(ValueError, match="target must be an intact checkpoint"):
        engine.load(folder)


def test_quantized_weights_without_the_package_that_reads_them(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transformers.quantizers.quantizer_bnb_4bit.is_bitsandbytes_available", lambda: False)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ImportError, match=r"target needs a package.*bitsandbytes"):
        engine.load(folder)


def test_missing_safetensors(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    rule = "target must be a checkpoint that can be read; loading"
    with pytest.raises(OSError, match=rf"^{rule} {folder} failed: .*model\.safetensors"):
        engine.load(folder)


@pytest.mark.parametrize(
    ("model_type", "options", "message"),
    [
        ("bert", {}, "'bert', which is not one"),
        ("t5", {}, "encoder-decoder"),
        ("instructblip", {"text_config": {"model_type": "t5"}}, "encoder-decoder"),
        ("bloom", {}, "ALiBi"),
        ("mpt", {}, "ALiBi"),
        ("falcon", {"alibi": True}, "ALiBi"),
        ("mamba", {}, "rolled back"),
        ("rwkv", {}, "rolled back"),
        ("recurrent_gemma", {}, "rolled back"),
        ("jamba", {}, "rolled back"),
        ("qwen3_next", {}, "rolled back"),
    ],
)
def test_architectures_that_cannot_work_are_refused_before_weights_are_read(
    model_type: str, options: dict, message: str, tmp_path: Path
) -> None:
    AutoConfig.for_model(model_type, **options).save_pretrained(tmp_path)
    with pytest.raises(engine.UnsupportedModelError, match=message) as caught:
        engine.load(tmp_path)
    assert model_type in str(caught.value)


def test_live_models_that_cannot_work_are_refused() -> None:
    with pytest.raises(engine.UnsupportedModelError, match="ALiBi"):
        engine.load(tiny("bloom", n_layer=1, n_head=4))
    headless = tiny("llama").model
    with pytest.raises(engine.UnsupportedModelError, match="without a head"):
        engine.load(headless)
    other = tiny("llama")
    other.config._attn_implementation = "flash_attention_2"
    with pytest.raises(engine.UnsupportedModelError, match="'sdpa' or 'eager'"):
        engine.load(other)
    spread = tiny("llama")
    spread.model.layers[1].to("meta")  # type: ignore[union-attr, operator]
    rule = r"must have all parameters on one device, and none on 'meta', got \['cpu', 'meta'\]"
    with pytest.raises(engine.UnsupportedModelError, match=f"target {rule}"):
        engine.load(spread)
    with pytest.raises(engine.UnsupportedModelError, match=f"drafter {rule}"):
        engine.load(tiny("llama"), drafter=engine.DraftModel(spread))
    with pytest.raises(engine.UnsupportedModelError, match=r"^drafter must .*, and none on 'meta', got \['meta'\]"):
        check_supported(tiny("llama").to("meta"), "drafter")
    stateful = tiny("llama")
    stateful._is_stateful = True
    with pytest.raises(engine.UnsupportedModelError, match="target of type 'llama' has recurrent state"):
        engine.load(stateful)
    unplaced = tiny("llama")
    unplaced.model.forward = lambda input_ids, past_key_values: None  # type: ignore[union-attr]
    with pytest.raises(engine.UnsupportedModelError, match="target of type 'llama' takes no position_ids"):
        engine.load(unplaced)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_layers_that_scale_all_tokens_of_a_call_alike_are_refused() -> None:
    quantized = torch.ao.quantization.quantize_dynamic(tiny("llama", dtype=torch.float32), {torch.nn.Linear})
    rule = r"must not be quantized dynamically by torch, got model.layers.0.self_attn.q_proj:"
    with pytest.raises(engine.UnsupportedModelError, match=f"^target {rule}"):
        engine.load(quantized)


def test_an_unknown_architecture_is_probed(monkeypatch: pytest.MonkeyPatch) -> None:
    granite = tiny("granite", num_key_value_heads=2)
    prompt = [5, 6, 7, 5, 6]
    assert engine.load(granite).generate([prompt], PARAMS)[0].token_ids == greedy(granite, prompt, 6)
    # One whose positions are not what it is told: same type, wrong logits.
    forward = granite.model.forward
    monkeypatch.setattr(
        granite.model, "forward", lambda position_ids=None, **options: forward(position_ids=None, **options)
    )
    with pytest.raises(engine.UnsupportedModelError, match="granite"):
        engine.load(granite)


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("no more"), MemoryError()])
def test_a_probe_without_memory_says_nothing_of_the_architecture(
    error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **more: object) -> None:
        raise error

    granite = tiny("granite", num_key_value_heads=2)
    monkeypatch.setattr(granite, "forward", full)
    with pytest.raises(type(error)):
        engine.load(granite)


def test_draft_model_of_another_tokenizer(target: PreTrainedModel) -> None:
    other = engine.DraftModel(perturbed(target, 0.1), byte_tokenizer(renamed={"a": "_a"}))
    with pytest.raises(ValueError, match="drafter must have the target's tokenizer, but id 97 is 'a'"):
        engine.load(target, drafter=other, tokenizer=byte_tokenizer())


def test_staged_draft_model_of_another_tokenizer(target: PreTrainedModel, folder: Path) -> None:
    """By itself, the same model drafts in the tokens that both have."""
    byte_tokenizer(renamed={"a": "_a"}).save_pretrained(folder)
    for name in (f"staged:{folder}", f"ngram+staged:{folder}"):
        with pytest.raises(ValueError, match="drafter must have the target's tokenizer, but id 97 is 'a'"):
            engine.load(target, drafter=name, tokenizer=byte_tokenizer())
    llm = engine.load(target, drafter=str(folder), tokenizer=byte_tokenizer())
    assert isinstance(llm.drafter, engine.IntersectionDraftModel)


def test_padded_vocabularies(target: PreTrainedModel) -> None:
    """A wider and a narrower draft model: accepted when the token strings agree, and still lossless."""
    tokenizer = byte_tokenizer()
    for size in (VOCAB + 30, VOCAB - 1):
        draft = tiny("llama", seed=1, dtype=torch.float32, vocab_size=size)
        llm = engine.load(target, drafter=engine.DraftModel(draft, tokenizer), tokenizer=tokenizer)
        assert llm.generate("abc", PARAMS).token_ids == greedy(target, [97, 98, 99], 6)
        with pytest.raises(ValueError, match="drafter must have the target's vocabulary"):
            engine.load(target, drafter=draft, tokenizer=tokenizer)


def test_a_plus_in_a_path_object_is_part_of_its_name(
    target: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    perturbed(target, 0.1).save_pretrained(tmp_path / "ngram+x")
    monkeypatch.chdir(tmp_path)
    assert isinstance(engine.load(target, drafter=Path("ngram+x")).drafter, engine.DraftModel)


def test_what_a_drafter_object_refuses_is_told_as_it_is(target: PreTrainedModel) -> None:
    with pytest.raises(ValueError, match=r"^exit_layer must be in \[1, 2\], got 99"):
        engine.load(target, drafter=engine.LayerSkipDrafter(99))


@pytest.mark.parametrize("prefix", ["", "staged:"])
def test_a_drafter_is_read_in_the_targets_dtype(target: PreTrainedModel, tmp_path: Path, prefix: str) -> None:
    tiny("llama", dtype=torch.bfloat16, vocab_size=VOCAB).save_pretrained(tmp_path)
    drafter: Any = engine.load(target, drafter=f"{prefix}{tmp_path}").drafter
    assert drafter.model.dtype == target.dtype == torch.float32


def test_the_cache_of_conversions_may_be_in_a_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(conversion.CACHE_VARIABLE, "~/models")
    assert conversion._cache_root() == Path.home() / "models"


@pytest.fixture
def source(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A file that passes for a GGUF file, and an empty cache for what it is converted to."""
    monkeypatch.setattr(conversion, "_check_file", lambda path, role: None)
    monkeypatch.setenv(conversion.CACHE_VARIABLE, str(tmp_path / "cache"))
    source = tmp_path / "model.gguf"
    source.write_bytes(b"GGUF" + bytes(range(256)) * 1000)
    return source


def stand_in(folder: Path) -> None:
    """What takes the place of a conversion, which takes 20 s."""
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(b"weights" * 1000)
    (folder / "model.safetensors").chmod(0o600)  # as safetensors 0.8 does
    (folder / "config.json").write_text("{}")


def test_a_conversion_that_another_process_finished_first_is_kept(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That process reads its files by now: they must not be deleted under it."""
    files: list[int] = []  # that the other process has made

    def convert_alone(path: Path, dtype: torch.dtype, folder: Path, role: str) -> None:
        stand_in(folder)

    def convert(path: Path, dtype: torch.dtype, folder: Path, role: str) -> None:
        monkeypatch.setattr(conversion, "_convert", convert_alone)
        files.append((conversion.converted(path, dtype, role) / "model.safetensors").stat().st_ino)
        stand_in(folder)

    monkeypatch.setattr(conversion, "_convert", convert)
    folder = conversion.converted(source, torch.bfloat16, "target")
    assert files == [(folder / "model.safetensors").stat().st_ino]
    assert [path for path in folder.parent.iterdir() if path.is_dir()] == [folder]


def test_a_gguf_file_edited_in_place_is_converted_anew(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another end of text, say, is a few bytes among the metadata in front, and changes no size."""
    monkeypatch.setattr(conversion, "_convert", lambda path, dtype, folder, role: stand_in(folder))
    before = conversion.converted(source, torch.bfloat16, "target")
    told = source.stat()
    with source.open("r+b") as file:
        file.seek(123_457)
        file.write(b"?")
    os.utime(source, ns=(told.st_atime_ns, told.st_mtime_ns))  # as some tools do
    assert conversion.converted(source, torch.bfloat16, "target") != before


def test_another_version_that_converts_otherwise_converts_anew(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conversion, "_convert", lambda path, dtype, folder, role: stand_in(folder))
    before = conversion.converted(source, torch.bfloat16, "target")
    monkeypatch.setattr(conversion, "_FORMAT", conversion._FORMAT + 1)
    assert conversion.converted(source, torch.bfloat16, "target") != before


def test_a_large_file_is_read_once(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To find its conversion; and a copy of it has the same."""
    monkeypatch.setattr(conversion, "_convert", lambda path, dtype, folder, role: stand_in(folder))
    before = conversion.converted(source, torch.bfloat16, "target")
    copy = tmp_path / "model copy.gguf"
    shutil.copy(source, copy)
    assert conversion._fingerprint(copy, tmp_path / "cache") == conversion._fingerprint(source, tmp_path / "cache")
    monkeypatch.setattr(hashlib, "file_digest", lambda *_: pytest.fail("it was read again"))
    assert conversion.converted(source, torch.bfloat16, "target") == before


def test_what_a_killed_conversion_has_left_is_removed(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a day, as another one may be under way."""
    monkeypatch.setattr(conversion, "_convert", lambda path, dtype, folder, role: stand_in(folder))
    old, new = (tmp_path / "cache" / f".converting-{name}" for name in ("old", "new"))
    for each in (old, new):
        each.mkdir(parents=True)
        (each / "model.safetensors").touch()
    os.utime(old, (0, 0))
    conversion.converted(source, torch.bfloat16, "target")
    assert new.exists() and not old.exists()


def test_gguf_is_converted_once_and_mended(source: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    made = []

    def convert(path: Path, dtype: torch.dtype, folder: Path, role: str) -> None:
        made.append(dtype)
        stand_in(folder)

    monkeypatch.setattr(conversion, "_convert", convert)
    folder = conversion.converted(source, torch.bfloat16, "target")
    assert {path.stat().st_mode for path in folder.iterdir()} == {source.stat().st_mode}  # for whoever shares the cache
    assert conversion.converted(source, torch.bfloat16, "target") == folder
    assert made == [torch.bfloat16]
    assert conversion.converted(source, torch.float32, "target") != folder

    def damage(name: str, content: bytes | None) -> None:
        made.clear()
        (folder / name).unlink() if content is None else (folder / name).write_bytes(content)
        assert conversion.converted(source, torch.bfloat16, "target") == folder
        assert made == [torch.bfloat16]
        assert (folder / "model.safetensors").read_bytes() == b"weights" * 1000

    damage("model.safetensors", b"weights" * 999)
    damage("model.safetensors", b"Weights" * 1000)
    damage("config.json", None)
    damage("manifest.json", b"{")
    damage("manifest.json", b"{}")
    damage("manifest.json", None)
    made.clear()
    for path in folder.iterdir():  # as of a cache folder that was copied
        os.utime(path, (0, 0))
    assert conversion.converted(source, torch.bfloat16, "target") == folder and not made


def test_a_converted_file_is_not_read_to_look_whether_it_is_intact(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conversion, "_convert", lambda path, dtype, folder, role: stand_in(folder))
    folder = conversion.converted(source, torch.bfloat16, "target")
    monkeypatch.setattr(conversion, "_checksum", lambda _: pytest.fail("it was read again"))
    assert conversion.converted(source, torch.bfloat16, "target") == folder


def test_a_conversion_without_room_leaves_nothing(
    source: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(conversion, "_convert", lambda path, dtype, folder, role: stand_in(folder))
    conversion.converted(source, torch.bfloat16, "target")

    def fail(path: Path, dtype: torch.dtype, folder: Path, role: str) -> None:
        folder.mkdir()
        (folder / "config.json").write_text("{}")
        raise OSError("No space left on device")

    monkeypatch.setattr(conversion, "_convert", fail)
    with pytest.raises(OSError, match="No space"):
        conversion.converted(source, torch.float16, "target")
    left = [path.name for path in (tmp_path / "cache").iterdir() if path.is_dir()]
    assert len(left) == 1 and not any("float16" in name.replace("bfloat16", "") for name in left)


@pytest.mark.parametrize("full", [True, False], ids=["full", "no folder"])
def test_a_cache_that_cannot_be_written_is_named(
    source: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, full: bool
) -> None:
    def convert(path: Path, dtype: torch.dtype, folder: Path, role: str) -> None:
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(conversion, "_convert", convert)
    if not full:
        (tmp_path / "cache").write_text("a file")
    message = f"cache, where.*{conversion.CACHE_VARIABLE}.*{'No space' if full else 'exists'}"
    with pytest.raises(OSError, match=message) as caught:
        conversion.converted(source, torch.float16, "target")
    assert type(caught.value) is OSError  # and no FileNotFoundError, which is for what a user named


def test_a_conversion_that_cannot_be_put_in_its_place(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(conversion, "_convert", lambda path, dtype, folder, role: stand_in(folder))
    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(OSError, match=f"cache, where.*{conversion.CACHE_VARIABLE}.*Permission denied"):
        conversion.converted(source, torch.bfloat16, "target")


def test_smollm2_is_not_converted_a_second_time(monkeypatch: pytest.MonkeyPatch) -> None:
    first = smollm2.loaded()
    monkeypatch.delattr(conversion, "_convert")  # which takes 20 s
    second = engine.load(smollm2.gguf(), dtype="bfloat16")
    assert second.target_model.dtype == torch.bfloat16
    for (name, a), b in zip(first.target_model.named_parameters(), second.target_model.parameters(), strict=True):
        assert torch.equal(a, b), name
    answer = second.generate([{"role": "user", "content": "What is the capital of France?"}]).text
    assert "Paris" in answer


@pytest.mark.parametrize("damage", ["truncated", "not gguf", "header only"])
def test_damaged_gguf(damage: str, tmp_path: Path) -> None:
    content = smollm2.gguf().read_bytes()
    content = {"truncated": content[: len(content) // 2], "not gguf": b"PK" + content[2:], "header only": content[:64]}[
        damage
    ]
    path = tmp_path / "damaged.gguf"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"target must be a (whole )?GGUF file, got .*damaged\.gguf"):
        engine.load(path)


def test_a_gguf_file_without_the_package_that_reads_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF" + bytes(60))
    monkeypatch.setenv(conversion.CACHE_VARIABLE, str(tmp_path / "cache"))
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(
        ImportError, match=r"^target is a GGUF file, which needs the package gguf \(pip install gguf\): "
    ):
        engine.load(path)


def test_a_drafter_that_is_no_gguf_file(target: PreTrainedModel, tmp_path: Path) -> None:
    path = tmp_path / "draft.gguf"
    path.write_bytes(b"PK")
    with pytest.raises(ValueError, match=r"^drafter must be a GGUF file, got .*draft\.gguf"):
        engine.load(target, drafter=str(path))


@pytest.mark.parametrize("text", ['{"eos_token_id": [2, 3', "[2, 3]"])
def test_a_damaged_generation_config(folder: Path, text: str) -> None:
    """In its place transformers would make one up, and the ends of text that it names would be lost."""
    (folder / "generation_config.json").write_text(text)
    with pytest.raises(
        ValueError, match=r"^target must be an intact checkpoint; .*generation_config.json is not a JSON ob"
    ):
        engine.load(folder)


def test_weights_of_another_shape_than_the_config_says(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["intermediate_size"] += 8
    (folder / "config.json").write_text(json.dumps(config))
    rule = r"mlp\.down_proj\.weight must be \[\d+, \d+\], got \[\d+, \d+\]; .*; \.\.\.$"
    with pytest.raises(ValueError, match=rf"(?s)^target must be an intact checkpoint; .*{rule}"):
        engine.load(folder)


def test_eos_tokens_come_from_the_generation_config(folder: Path) -> None:
    config = folder / "generation_config.json"
    content = json.loads(config.read_text()) if config.exists() else {}
    target = tiny("llama", dtype=torch.float32, vocab_size=VOCAB)
    said = greedy(target, [97, 98, 99], 6)
    config.write_text(json.dumps({**content, "eos_token_id": [250, said[2], 3]}))
    output = engine.load(folder).generate("abc", PARAMS)
    assert output.finish_reason == "eos"
    assert output.token_ids == said[: said.index(said[2]) + 1]


@pytest.mark.parametrize(
    ("own", "configs", "expected"),
    [
        (None, 3, set()),  # as the user said
        (4, 3, {4}),
        ([4, 5], None, {4, 5}),
        ({4, 5}, None, {4, 5}),
        (torch.tensor([4, 5]), None, {4, 5}),
        (torch.tensor(4), None, {4}),
        (None, None, {EOS}),  # the tokenizer's
    ],
)
def test_where_texts_end(own: object, configs: object, expected: set[int]) -> None:
    model = tiny("llama")
    model.config.eos_token_id = configs
    model.generation_config.eos_token_id = own
    assert eos_token_ids(model, byte_tokenizer()) == expected
    model.generation_config = None
    assert eos_token_ids(model, byte_tokenizer()) == ({EOS} if configs is None else {configs})


@pytest.mark.parametrize("value", [["a"], "a", [2, None], 2.5])
def test_an_end_of_sequence_that_is_no_token(value: object) -> None:
    model = tiny("llama")
    model.generation_config.eos_token_id = value
    rule = r"eos_token_id in the target's generation_config\.json must be an int or a list of ints, got "
    with pytest.raises(ValueError, match=rule):
        engine.load(model)


def test_settings_that_are_not_applied_are_named(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    off = dict(no_repeat_ngram_size=0, min_new_tokens=0, suppress_tokens=[], num_beams=1)
    sampling = dict(
        do_sample=True, temperature=0.7, top_p=0.8, top_k=20, repetition_penalty=1.1, max_new_tokens=7, eos_token_id=3
    )
    config = folder / "generation_config.json"
    config.write_text(json.dumps(off | sampling))
    engine.load(folder)
    assert not caplog.text
    config.write_text(json.dumps(off | sampling | dict(num_beams=4, bad_words_ids=[[5]] * 30)))
    engine.load(folder, drafter=str(folder))
    (record,) = caplog.records
    message = record.getMessage()
    assert "the target's generation_config.json" in message
    assert message.endswith(": num_beams=4, bad_words_ids=[[5], [5], [5], [5], [5], [5], ...]")


OFF = dict(typical_p=1.0, epsilon_cutoff=0.0, eta_cutoff=0.0, guidance_scale=1.0, encoder_repetition_penalty=1.0)
OFF |= dict(min_length=0, encoder_no_repeat_ngram_size=0, bad_words_ids=None, token_healing=False)


@pytest.mark.parametrize("name", OFF)
def test_a_setting_is_named_unless_it_is_off(name: str, caplog: pytest.LogCaptureFixture) -> None:
    """By the word of checkpoints that were saved with the defaults of older releases of transformers."""
    model: Any = SimpleNamespace(generation_config=SimpleNamespace(**OFF))
    warn_of_not_applied(model)
    assert not caplog.text
    setattr(model.generation_config, name, 0.5)
    warn_of_not_applied(model)
    assert caplog.records[-1].getMessage().endswith(f": {name}=0.5")


def test_damaged_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").write_text('{"version": "1.0"')
    with pytest.raises(ValueError, match=f"^target must have an intact tokenizer; reading that of {folder} failed"):
        engine.load(folder)
    with pytest.raises(ValueError, match=f"^tokenizer must have an intact tokenizer; reading that of {folder} failed"):
        engine.load(tiny("llama"), tokenizer=folder)


def test_a_vocabulary_of_sentencepiece_without_the_package_that_reads_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers takes it for one of tiktoken, and says that this is missing."""
    for name in ("sentencepiece", "google.protobuf"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setattr("engine.checkpoints.is_sentencepiece_available", lambda: False)
    tiny("llama", dtype=torch.float32).save_pretrained(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "LlamaTokenizer"}')
    (tmp_path / "tokenizer.model").write_bytes(b"\n\x0e\n\x05<unk>\x15\0\0\0\0\x18\x02")
    with pytest.raises(ImportError, match=r"^target needs the packages sentencepiece and protobuf \(pip install "):
        engine.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"version": "1.0"')  # which needs neither
    with pytest.raises(ValueError, match=f"^target must have an intact tokenizer; reading that of {tmp_path} failed"):
        engine.load(tmp_path)


@pytest.mark.parametrize("name", ["llama", "qwen2"])
def test_a_tokenizer_without_its_vocabulary(name: str, tmp_path: Path) -> None:
    """transformers makes one of qwen2's kind even so, which drops all text of a prompt but special tokens."""
    tiny(name, dtype=torch.float32).save_pretrained(tmp_path)
    content = {"tokenizer_class": "Qwen2Tokenizer", "eos_token": "<|im_end|>"} if name == "qwen2" else {}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match=f"^target must have an intact tokenizer; .*{tmp_path}"):
        engine.load(tmp_path)


def test_a_tokenizer_whose_tokens_have_all_been_added(tmp_path: Path) -> None:
    """As of an alphabet, which trainers take as special tokens: it drops nothing."""
    words = ["[UNK]", "[EOS]", "A", "C", "G", "T"]
    alphabet = Tokenizer(WordLevel({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    alphabet.add_special_tokens(words)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=alphabet, unk_token="[UNK]", eos_token="[EOS]")
    assert len(tokenizer) == len(tokenizer.added_tokens_decoder)
    tokenizer.save_pretrained(tmp_path)
    tiny("llama", dtype=torch.float32).save_pretrained(tmp_path)
    assert engine.load(tmp_path).generate("GATTACA", PARAMS).prompt_token_ids == [4, 2, 5, 5, 2, 3, 2]


def test_a_vocabulary_of_mistral(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In tekken.json, and in no other file. Where mistral-common is installed it is not asked, as it has no chat template."""
    read, asked = AutoTokenizer.from_pretrained, []
    monkeypatch.setattr(
        AutoTokenizer, "from_pretrained", lambda *args, **more: asked.append(more) or read(*args, **more)
    )
    special = [dict(rank=rank, token_str=token, is_control=True) for rank, token in enumerate(("<unk>", "<s>", "</s>"))]
    vocab = [dict(rank=i, token_bytes=base64.b64encode(bytes([i])).decode(), token_str=None) for i in range(256)]
    sizes = dict(num_vocab_tokens=256, default_vocab_size=259, default_num_special_tokens=3)
    content = dict(config=dict(pattern=r"\p{L}+|.", version="v7", **sizes), vocab=vocab, special_tokens=special)
    (tmp_path / "tekken.json").write_text(json.dumps(content))
    tiny("mistral", dtype=torch.float32, vocab_size=259).save_pretrained(tmp_path)
    output = engine.load(tmp_path).generate("ab", PARAMS)
    assert output.prompt_token_ids[-2:] == [97 + 3, 98 + 3] and output.text is not None
    assert [more["mistral_format"] for more in asked] == [False]


def test_a_tokenizer_of_mistral_common() -> None:
    """It has methods where others have attributes."""

    class MistralCommonBackend:
        def __call__(self, text: str) -> None: ...
        def decode(self, ids: list[int]) -> None: ...
        def added_tokens_decoder(self) -> None: ...

    with pytest.raises(
        ValueError, match=r"^tokenizer must be one with special tokens .*MistralCommonBackend: AutoTokenizer"
    ):
        engine.load(tiny("mistral"), tokenizer=MistralCommonBackend())


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Of me/tiny: what the cache has of it, nothing so far."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    found = tmp_path / "models--me--tiny"
    (found / "snapshots" / "abc").mkdir(parents=True)
    (found / "refs").mkdir()
    (found / "refs" / "main").write_text("abc")
    return found / "snapshots" / "abc"


@pytest.fixture
def online(repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the engine fetches of me/tiny is what it asks for; without a network it is all that the cache has."""
    fetched = tmp_path / "fetched"
    fetched.mkdir()

    def snapshot(repo: str, allow_patterns: list[str], ignore_patterns: list[str], **_: Any) -> str:
        patterns = dict(allow_patterns=allow_patterns, ignore_patterns=ignore_patterns)
        for name in filter_repo_objects([path.name for path in repository.iterdir()], **patterns):
            shutil.copy(repository / name, fetched)
        return str(fetched)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)


@pytest.mark.parametrize("name", ["llama", "qwen2"])
def test_hub_repository_without_a_tokenizer_takes_ids(name: str, repository: Path) -> None:
    model = tiny(name, dtype=torch.float32)
    model.save_pretrained(repository)
    llm = engine.load("me/tiny", drafter="me/tiny")
    assert llm.tokenizer is None
    assert llm.generate([5, 6, 7], PARAMS).token_ids == greedy(model, [5, 6, 7], 6)
    with pytest.raises(ValueError, match="tokenizer must have an intact tokenizer"):
        engine.load("me/tiny", tokenizer="me/tiny")


@pytest.mark.usefixtures("online")
def test_the_tokenizer_of_a_hub_repository_is_fetched_with_its_chat_template(repository: Path) -> None:
    model, tokenizer = tiny("llama", dtype=torch.float32, vocab_size=VOCAB), byte_tokenizer()
    model.save_pretrained(repository)
    tokenizer.save_pretrained(repository)
    assert (repository / "chat_template.jinja").exists()
    ids = engine.load("me/tiny").generate([{"role": "user", "content": "hi"}], PARAMS).prompt_token_ids
    assert tokenizer.decode(ids) == "user: hi\nassistant:"


def test_revisions_of_a_hub_repository(repository: Path) -> None:
    """Of target, drafter and tokenizer: config, weights, generation config and tokenizer are all of the one that was named."""
    main, older = (tiny("llama", seed=seed, dtype=torch.float32, vocab_size=VOCAB) for seed in (1, 2))
    main.save_pretrained(repository)
    older.generation_config.eos_token_id = 9
    older.save_pretrained(repository.parent / "def")
    byte_tokenizer().save_pretrained(repository.parent / "def")
    (repository.parents[1] / "refs" / "pr").mkdir()
    for revision in ("v1", "pr/3"):
        (repository.parents[1] / "refs" / revision).write_text("def")
    ids = [5, 6, 7]
    for revision in ("v1", "pr/3"):
        llm = engine.load(f"me/tiny@{revision}", drafter="ngram+me/tiny@main")
        assert llm.tokenizer is not None and 9 in llm.target_model.generation_config.to_dict().values()
        assert torch.equal(llm.target_model.lm_head.weight, older.lm_head.weight)
        assert torch.equal(llm.drafter.stages[1].ragged.model.lm_head.weight, main.lm_head.weight)
        ours = {"": (llm.target_model, llm.tokenizer)}
        shared = SharedModels(ours, 48, frozenset(), ignore_eos=False, target_name=f"me/tiny@{revision}")
        assert torch.equal(shared.stock_copy().get_output_embeddings().weight, older.lm_head.weight)
        assert llm.generate(ids, PARAMS).token_ids == greedy(older, ids, 6)
    assert engine.load("me/tiny@main").generate(ids, PARAMS).token_ids == greedy(main, ids, 6)
    assert engine.load("me/tiny", tokenizer="me/tiny@v1").tokenizer is not None
    with pytest.raises(OSError, match=r"^target must be an existing path or an accessible hub id, got 'me/tiny@v2'"):
        engine.load("me/tiny@v2")


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (dict(drafter="/nope"), FileNotFoundError, "drafter must be an existing path or a hub id, got '/nope'"),
        (dict(drafter="ngram+/nope"), FileNotFoundError, "drafter must be an existing path or a hub id, got '/nope'"),
        (dict(drafter="+"), FileNotFoundError, r"drafter must be an existing path or a hub id, got '\+'"),
        (
            dict(drafter="./bert"),
            engine.UnsupportedModelError,
            "drafter must be a causal language model, got 'bert'",
        ),
        (dict(drafter="layer_skip:99"), ValueError, r"exit_layer must be in \[1, 2\], got 99"),
        (dict(drafter="ngram+layer_skip:0,2"), ValueError, r"layers must be below 2, .* got \[0, 2\]"),
        (
            dict(drafter="ngram+eagle3-SmolLM2-135M-Instruct"),
            ValueError,
            "drafter 'ngram.*SmolLM2-135M-Instruct reads hidden states .*, but the target has 2 layers",
        ),
        (dict(drafter="./medusa"), ValueError, "medusa was made for a target of vocabulary 64, but the target has"),
        (dict(max_length=49), ValueError, "max_length must be <= 48, the target's context, got 49"),
        (dict(tokenizer="/nope"), FileNotFoundError, "tokenizer must be an existing path or a hub id, got '/nope'"),
        (dict(tokenizer=__file__), ValueError, "tokenizer must be a folder or a hub id that has a tokenizer, got the "),
    ],
)
def test_what_configs_tell_is_judged_before_weights_are_read(
    folder: Path, options: dict[str, Any], error: type[Exception], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "model.safetensors").unlink()
    AutoConfig.for_model("bert").save_pretrained(folder / "bert")
    random_head("medusa", folder / "medusa")
    monkeypatch.chdir(folder)
    with pytest.raises(error, match=message):
        engine.load(folder, **options)


@pytest.mark.parametrize("network", ["offline", "online"])
@pytest.mark.parametrize(
    ("files", "error", "message"),
    [
        ({"adapter_config.json": "{}"}, ImportError, "^target has an adapter beside its weights, which needs .*: me/tiny$"),
        ({"generation_config.json": "{oops"}, ValueError, "generation_config.json is not a JSON object"),
        ({"config.json": "{oops"}, ValueError, "^target must be a checkpoint that transformers knows, got me/tiny: "),
        ({"config.json": None, "adapter_config.json": "{}"}, ValueError, "must be a whole model, got the adapter me/tiny:"),
        ({"config.json": None, "m.gguf": ""}, ValueError, "^target must be a hub repository with a config.json, .*GGUF file"),
        ({"tokenizer.json": "{oops"}, ValueError, "^target must have an intact tokenizer; reading that of me/tiny failed"),
    ],
)  # fmt: skip
def test_hub_repositories_are_judged_as_folders_are(
    files: dict[str, str | None],
    error: type[Exception],
    message: str,
    network: str,
    repository: Path,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Before their weights are fetched."""
    if network == "online":
        request.getfixturevalue("online")
    monkeypatch.setattr(checkpoints, "is_peft_available", lambda: False)
    tiny("llama").save_pretrained(repository)
    (repository / "model.safetensors").unlink()
    for name, content in files.items():
        (repository / name).unlink() if content is None else (repository / name).write_text(content)
    with pytest.raises(error, match=message):
        engine.load("me/tiny")


def test_weights_of_the_hub_are_converted_nowhere(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread of transformers' would ask for it, and keep the process from ending."""
    monkeypatch.delenv("DISABLE_SAFETENSORS_CONVERSION", raising=False)
    model = tiny("llama", dtype=torch.float32)
    model.save_pretrained(repository)
    torch.save(model.state_dict(), repository / "pytorch_model.bin")
    (repository / "model.safetensors").unlink()
    assert engine.load("me/tiny").generate([5, 6], PARAMS).token_ids == greedy(model, [5, 6], 6)
    assert os.environ["DISABLE_SAFETENSORS_CONVERSION"] == "1"


def test_hub_ids_that_cannot_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(location: str, **options: Any) -> None:
        raise OSError("We couldn't connect")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", missing)
    rule = "must be an existing path or an accessible hub id, got 'no/such': We couldn't connect"
    with pytest.raises(OSError, match=f"^target {rule}"):
        engine.load("no/such")
    with pytest.raises(OSError, match=f"^tokenizer {rule}"):
        engine.load("no/such", tokenizer="no/such")


@pytest.mark.parametrize(
    "device",
    [
        pytest.param("cuda", marks=pytest.mark.skipif(torch.cuda.is_available(), reason="it is there")),
        f"cuda:{torch.cuda.device_count()}",
        "cuda:99",
        "mps",
        "meta",
    ],
)
def test_devices_that_are_not_there_are_refused_before_weights_are_read(folder: Path, device: str) -> None:
    (folder / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=rf"device must be 'cpu' or one of the \d+ CUDA devices .* got '{device}'"):
        engine.load(folder, device=device)
    if device == "meta":
        with pytest.raises(ValueError, match="target must be on a CPU or a CUDA device, got one on meta"):
            engine.load(tiny("llama").to("meta"))


def test_an_adapter_beside_the_weights_is_not_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As transformers does, silently, where peft is not installed."""
    monkeypatch.setattr("engine.checkpoints.is_peft_available", lambda: False)
    tiny().save_pretrained(tmp_path)
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(ImportError, match="target has an adapter beside its weights, which needs the package peft"):
        engine.load(tmp_path)
    with_adapter = tiny()
    monkeypatch.setattr("engine.checkpoints.is_peft_available", lambda: True)
    monkeypatch.setattr("engine.checkpoints.whole_model", lambda *_, **more: with_adapter)
    assert engine.load(tmp_path).target_model is with_adapter
