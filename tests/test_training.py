"""`engine.training`: runs from prompts to a drafter that decodes, that are stopped and taken up, and what they refuse."""

import contextlib
import dataclasses
import io
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import CONFIGS
from tiny_tokenizer import byte_tokenizer
from training_cases import PROMPTS, log_of, options, write_target
from transformers import AutoTokenizer

import engine
from engine.training import answers, hidden_files, initial_model, loop, run
from engine.training.eagle3_files import for_this_engine_alone
from engine.training.files import check_out, checkpoint_digest, settings_of
from engine.training.options import TrainingOptions
from engine.training.run import train_drafter

ROOT = Path(__file__).resolve().parent.parent
METHODS: dict[str, dict[str, Any]] = {
    "eagle3": {},
    "eagle3-frozen": {"method": "eagle3", "freeze_head": True, "loss": "lk"},
    "medusa": {"method": "medusa"},
    "mlp": {"method": "mlp"},
    "draft-model": {"method": "draft-model"},
}
DRAFTERS = {
    "eagle3": "EagleDrafter", "eagle3-frozen": "EagleDrafter", "medusa": "MedusaDrafter", "mlp": "MlpSpeculatorDrafter",
    "draft-model": "DraftModel",
}  # fmt: skip


class Stop(Exception):
    """Stands for whatever ends a run."""


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(autouse=True)
def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several groups of answers, several files of hidden states, a checkpoint after every step."""
    monkeypatch.setattr(answers, "_BATCHES_PER_GROUP", 2)
    monkeypatch.setattr(hidden_files, "TEXTS_PER_GROUP", 8)
    clock = iter(range(0, 1_000_000, 1000))
    monkeypatch.setattr(loop, "_now", lambda: next(clock))


@pytest.fixture
def no_plot(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes longer than the training."""
    monkeypatch.setattr(run, "plot_training", lambda log, file: file.write_bytes(b""))


@pytest.fixture(scope="module")
def whole(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a run leaves that nothing interrupts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(answers, "_BATCHES_PER_GROUP", 2)
        patch.setattr(hidden_files, "TEXTS_PER_GROUP", 8)
        return train_drafter(PROMPTS, tmp_path_factory.mktemp("whole") / "out", options(target))


def copy_of(whole: Path, out: Path, *without: str) -> Path:
    """A run that has come less far."""
    shutil.copytree(whole, out, ignore=shutil.ignore_patterns(*without))
    return out


def with_options(whole: Path, out: Path, without: tuple[str, ...] = (), **changes: Any) -> Path:
    """Work before the training, under other options, on which it does not depend."""
    copy_of(whole, out, *TRAINING, *without)
    settings = json.loads((whole / "work" / "settings.json").read_text())
    chosen = dataclasses.asdict(options(settings["target"], **changes))
    changed = {name: chosen.get(name, value) for name, value in settings.items()}
    (out / "work" / "settings.json").write_text(json.dumps(changed))
    return out


def files_of(out: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}


DRAFTER = ("model.safetensors", "config.json", "README.md", "training.png")
TRAINING = (*DRAFTER, "checkpoint.pt", "log.jsonl")


def assert_same(found: Path, expected: Path) -> None:
    """The same files, and nothing left over; of checkpoints and plots the names alone."""
    names = [sorted(str(path.relative_to(root)) for path in root.rglob("*")) for root in (found, expected)]
    assert names[0] == names[1]
    for file, content in files_of(expected).items():
        name = file.relative_to(expected)
        assert name.name in ("checkpoint.pt", "training.png") or (found / name).read_bytes() == content, name


def texts_of(target: Path, drafter: Path | None) -> tuple[list[list[int]], engine.Engine]:
    llm = engine.load(str(target), drafter=drafter and str(drafter), num_draft_tokens=3, max_batch_size=3)
    outputs = llm.generate(PROMPTS[:5], engine.SamplingParams(max_new_tokens=16))
    return [output.token_ids for output in outputs], llm


@pytest.mark.usefixtures("no_plot")
@pytest.mark.parametrize("name", METHODS)
def test_a_run_from_prompts_to_a_drafter(name: str, target: Path, whole: Path, tmp_path: Path) -> None:
    before = torch.get_rng_state()
    if name == "eagle3":
        out = whole
        assert (out / "training.png").read_bytes().startswith(b"\x89PNG")
    else:
        out = train_drafter(PROMPTS, tmp_path / "new" / "out", options(target, **METHODS[name]))
    assert torch.equal(torch.get_rng_state(), before)
    losses = [record["validation"]["loss"] for record in log_of(out) if "validation" in record]
    assert len(losses) == 2 and losses[0] > losses[1] > 0
    drafted, llm = texts_of(target, out)
    assert type(llm.drafter).__name__ == DRAFTERS[name]
    assert llm.stats.draft_tokens > 20
    assert drafted == texts_of(target, None)[0]
    card = (out / "README.md").read_text()
    assert f"method: {METHODS[name].get('method', 'eagle3')}" in card and "222 to learn from, 60 held back" in card
    assert "`python -m engine generate --chat --target TARGET" in card
    assert ("freeze_head" in card) == name.startswith("eagle3")
    assert ("but for this engine alone" in card) == name.startswith("eagle3")  # two layers are too few for others
    assert ("is the target's and not in the file." in card) == (name == "eagle3-frozen")
    (tmp_path / "usual").touch()
    assert {path.stat().st_mode for path in out.iterdir() if path.is_file()} == {(tmp_path / "usual").stat().st_mode}


SOON = [("gpt2", "eagle3"), ("gemma3_text", "eagle3"), ("gpt2", "draft-model")]


@pytest.mark.usefixtures("no_plot")
@pytest.mark.parametrize(
    "name, method",
    [
        *SOON,
        *(
            pytest.param(name, method, marks=pytest.mark.slow)
            for name in CONFIGS
            for method in DRAFTERS
            if name != "llama" and method != "eagle3-frozen" and (name, method) not in SOON
        ),
    ],
)
def test_architectures(name: str, method: str, tmp_path: Path) -> None:
    target = write_target(tmp_path / "target", name)
    out = train_drafter(PROMPTS[:12], tmp_path / "out", options(target, method=method, epochs=1))
    drafted, llm = texts_of(target, out)
    assert llm.stats.draft_tokens > 10
    assert drafted == texts_of(target, None)[0]


# The state dict of `Eagle3DraftModel` in speculators 0.9, and of vLLM's llama_eagle3.py with q, k, v and gate, up apart: a layer
# of a llama of hidden size 32, 4 heads and 2 of keys of size 8, an MLP of 48; three hidden states; 100 of 258 tokens. Of its
# tensors, `embed_tokens.weight` is taken from the target where it is missing, `verifier_*` always.
SPECULATORS_EAGLE3 = {
    "fc.weight": ("bfloat16", 32, 3 * 32),
    "layers.0.hidden_norm.weight": ("bfloat16", 32),
    "layers.0.input_layernorm.weight": ("bfloat16", 32),
    "layers.0.self_attn.q_proj.weight": ("bfloat16", 4 * 8, 2 * 32),
    "layers.0.self_attn.k_proj.weight": ("bfloat16", 2 * 8, 2 * 32),
    "layers.0.self_attn.v_proj.weight": ("bfloat16", 2 * 8, 2 * 32),
    "layers.0.self_attn.o_proj.weight": ("bfloat16", 32, 4 * 8),
    "layers.0.post_attention_layernorm.weight": ("bfloat16", 32),
    "layers.0.mlp.gate_proj.weight": ("bfloat16", 48, 32),
    "layers.0.mlp.up_proj.weight": ("bfloat16", 48, 32),
    "layers.0.mlp.down_proj.weight": ("bfloat16", 32, 48),
    "norm.weight": ("bfloat16", 32),
    "lm_head.weight": ("bfloat16", 100, 32),
    "d2t": ("int64", 100),
    "t2d": ("bool", 258),
}
# What its config reads, and vLLM's for it; beside "transformer_layer_config", that of a llama.
SPECULATORS_CONFIG = {
    "architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3", "draft_vocab_size": 100,
    "norm_before_residual": False, "norm_before_fc": False, "fc_norm": False, "norm_output": False,
    "target_hidden_size": 32, "eagle_aux_hidden_state_layer_ids": [2, 3, 4],
}  # fmt: skip


@pytest.mark.usefixtures("no_plot")
def test_what_other_servers_load_is_what_is_trained_by_default(tmp_path: Path) -> None:
    target = write_target(tmp_path / "target", num_hidden_layers=7)
    out = train_drafter(PROMPTS[:12], tmp_path / "out", options(target, epochs=1))
    stored = load_file(out / "model.safetensors")
    found = {name: (str(value.dtype).removeprefix("torch."), *value.shape) for name, value in stored.items()}
    assert found == SPECULATORS_EAGLE3
    ids = torch.arange(100) + stored["d2t"]
    assert torch.equal(stored["t2d"].nonzero()[:, 0], ids) and torch.equal(ids, ids.unique())
    config = json.loads((out / "config.json").read_text())
    assert {name: config[name] for name in SPECULATORS_CONFIG} == SPECULATORS_CONFIG
    assert config["transformer_layer_config"].items() >= {
        "model_type": "llama", "vocab_size": 258, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "hidden_act": "silu", "rms_norm_eps": 1e-6,
        "max_position_embeddings": 48, "attention_bias": False, "mlp_bias": False,
    }.items()  # fmt: skip
    assert config["speculators_config"]["verifier"] == {
        "name_or_path": str(target),
        "architectures": ["LlamaForCausalLM"],
    }
    assert config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 3
    assert "vLLM, should load it as it is." in (out / "README.md").read_text()
    drafted, llm = texts_of(target, out)
    assert llm.drafter.layers == (2, 3, 4)
    assert drafted == texts_of(target, None)[0]


def test_who_loads_a_head() -> None:
    assert [initial_model.layers_of_new_head(count) for count in (30, 7, 6, 3, 2, 1)] == [
        (2, 15, 27), (2, 3, 4), (3, 4, 5), (0, 1, 2), (0, 1, 2), (0, 1),
    ]  # fmt: skip
    assert for_this_engine_alone((2, 15, 27), 30, False) == []
    for layers in ((5, 2, 4), (2, 2, 4)):
        (reason,) = for_this_engine_alone(layers, 30, False)
        assert reason == f"it reads hidden states as {list(layers)}, not in ascending order and each once"
    assert for_this_engine_alone((8, 16, 24, 30), 30, True) == [
        "it reads 4 hidden states and not 3",
        "it reads what the target's head reads, behind the last norm, where others have what is before it",
        "its output matrix is the target's and not in the file",
    ]


def fail_after(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, calls: int) -> Callable[[], None]:
    """The call after so many raises `Stop`; what is returned undoes that."""
    original, count = getattr(owner, name), iter(range(1_000_000))

    def call(*args: Any, **more: Any) -> Any:
        if next(count) >= calls:
            raise Stop
        return original(*args, **more)

    monkeypatch.setattr(owner, name, call)
    return lambda: monkeypatch.setattr(owner, name, original)


@pytest.mark.usefixtures("no_plot")
@pytest.mark.parametrize(
    "owner, name, calls, without",
    [
        (engine.Engine, "generate", 2, ("answers.jsonl", "training", "validation", *TRAINING)),
        (hidden_files, "save_file", 3, ("training", "validation", *TRAINING)),
        (loop._Run, "step", 7, TRAINING),
        (loop._Run, "end_epoch", 0, TRAINING),
    ],
)
def test_a_run_that_was_stopped_goes_on(
    owner: Any,
    name: str,
    calls: int,
    without: tuple[str, ...],
    target: Path,
    whole: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    out = copy_of(whole, tmp_path / "out", *without)
    undo = fail_after(monkeypatch, owner, name, calls)
    with pytest.raises(Stop):
        train_drafter(PROMPTS, out, options(target))
    assert not (out / "model.safetensors").exists()
    undo()
    before = len((out / "work" / "answers.jsonl").read_text().splitlines())
    assert before == (16 if name == "generate" else 24)
    train_drafter(PROMPTS, out, options(target))
    assert_same(out, whole)


@pytest.mark.usefixtures("no_plot")
@pytest.mark.parametrize("method", ["medusa", "mlp", "draft-model"])
def test_other_methods_go_on_too(
    method: str, target: Path, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped before its hidden states are all there, between two steps, at the end of an epoch, and while it is saved."""
    chosen, out = options(target, method=method), tmp_path / "out"
    without = ("training", "validation")
    expected = train_drafter(PROMPTS, with_options(whole, tmp_path / "whole", without, method=method), chosen)
    with_options(whole, out, without, method=method)
    for owner, name, calls in (
        (hidden_files, "save_file", 2),
        (loop._Run, "step", 7),
        (loop._Run, "end_epoch", 0),
        (run, "_save", 0),
    ):
        undo = fail_after(monkeypatch, owner, name, calls)
        with pytest.raises(Stop):
            train_drafter(PROMPTS, out, chosen)
        undo()
        assert not list(out.glob("*.safetensors"))
    (out / ".saving-killed").mkdir()  # as a kill leaves it
    (out / ".saving-killed" / "model.safetensors").write_bytes(b"half a file")
    train_drafter(PROMPTS, out, chosen)
    assert_same(out, expected)


@pytest.mark.usefixtures("no_plot")
def test_work_between_two_checkpoints_is_done_again(
    target: Path, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "_now", time.monotonic)  # checkpoints at the ends of epochs only
    out = copy_of(whole, tmp_path / "out", *TRAINING)
    steps = sum("validation" not in record for record in log_of(whole)) // 2
    undo = fail_after(monkeypatch, loop._Run, "step", steps + 2)
    with pytest.raises(Stop):
        train_drafter(PROMPTS, out, options(target))
    assert len(log_of(out)) == steps + 1
    undo()
    train_drafter(PROMPTS, out, options(target))
    assert_same(out, whole)


@pytest.mark.usefixtures("no_plot")
def test_an_answer_that_was_cut_off(target: Path, whole: Path, tmp_path: Path) -> None:
    out = copy_of(whole, tmp_path / "out", "training", "validation", *TRAINING)
    os.truncate(out / "work" / "answers.jsonl", 1000)
    train_drafter(PROMPTS, out, options(target))
    assert_same(out, whole)


@pytest.mark.usefixtures("no_plot")
def test_a_finished_run_is_left_as_it_is(
    target: Path, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is done again, though it would come to the same."""
    for owner, name in ((engine.Engine, "generate"), (hidden_files.KeptTexts, "write"), (loop._Run, "step")):
        monkeypatch.setattr(owner, name, lambda *_, **more: pytest.fail("it was done again"))
    out = copy_of(whole, tmp_path / "out")
    train_drafter(PROMPTS, out, options(target))
    assert_same(out, whole)
    with pytest.raises(ValueError, match=r"the run in .* differs in epochs \(2 before, 4 now\)"):
        train_drafter(PROMPTS, out, options(target, epochs=4))
    with pytest.raises(ValueError, match=r"learning_rate \(0.005 before, 0.1 now\), seed"):
        train_drafter(PROMPTS, out, options(target, learning_rate=0.1, seed=1))
    with pytest.raises(ValueError, match=r"the run in .* differs in the prompts$"):
        train_drafter([*PROMPTS[:10], "another", *PROMPTS[11:]], out, options(target))
    assert_same(out, whole)
    train_drafter(PROMPTS, out, options(target, device="cpu"))  # may be another machine's


@pytest.mark.usefixtures("no_plot")
def test_several_chat_templates_lie_in_a_folder(tmp_path: Path) -> None:
    """Of which a run that is finished, and saves all once more, finds one there."""
    folder = write_target(tmp_path / "target")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = {name: tokenizer.chat_template + name for name in ("default", "tool_use")}
    tokenizer.save_pretrained(folder)
    for _ in range(2):
        train_drafter(PROMPTS[:8], tmp_path / "out", options(folder, "draft-model", epochs=1))
    found = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert found.chat_template == tokenizer.chat_template
    templates = tmp_path / "out/additional_chat_templates"
    assert templates.stat().st_mode == (tmp_path / "out").stat().st_mode and [*templates.iterdir()]


@pytest.mark.usefixtures("no_plot")
@pytest.mark.parametrize("without", [(), DRAFTER])
def test_a_trained_drafter_needs_its_hidden_states_no_more(
    without: tuple[str, ...], target: Path, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They can be deleted, of a run that saved its drafter or was stopped before that."""
    out = copy_of(whole, tmp_path / "out", "hidden-*", *without)
    fail_after(monkeypatch, hidden_files, "_read", 0)
    train_drafter(PROMPTS, out, options(target))
    assert not list(out.rglob("hidden-*"))
    assert_same(out, copy_of(whole, tmp_path / "expected", "hidden-*"))
    for name in ("checkpoint.pt", "log.jsonl"):
        (out / "work" / name).unlink()
    with pytest.raises(Stop):  # all is to be learned, from them
        train_drafter(PROMPTS, out, options(target))


@contextlib.contextmanager
def largest_file(size: int) -> Iterator[None]:
    """No file can grow beyond so many bytes: the system's own error, as from a full disk."""
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    assert signal.getsignal(signal.SIGXFSZ) == signal.SIG_IGN
    try:
        with contextlib.redirect_stderr(io.StringIO()):  # which may be a file
            resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
            yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))


@pytest.mark.usefixtures("no_plot")
@pytest.mark.parametrize(
    "room, without, file",
    [
        (1500, ("answers.jsonl", "training", "validation", *TRAINING), "answers.jsonl"),
        (10_000, ("training", "validation", *TRAINING), "hidden-00000.safetensors"),
        (10_000, TRAINING, "checkpoint.pt"),
        (10_000, DRAFTER, "model.safetensors"),
    ],
)
def test_a_full_disk(room: int, without: tuple[str, ...], file: str, target: Path, whole: Path, tmp_path: Path) -> None:
    """A clear error; nothing that was there is gone; and the run goes on when there is room again."""
    out = copy_of(whole, tmp_path / "out", *without)
    before = files_of(out)
    with (
        pytest.raises(OSError, match=rf"{file} could not be written: .*the same run resumes") as raised,
        largest_file(room),
    ):
        train_drafter(PROMPTS, out, options(target))
    assert raised.value.__cause__ is not None
    assert all(path.read_bytes() == content for path, content in before.items())
    assert not list(out.rglob("*.partial"))
    train_drafter(PROMPTS, out, options(target))
    assert_same(out, whole)


def test_a_disk_that_is_full_from_the_start(target: Path, tmp_path: Path) -> None:
    with pytest.raises(OSError, match=r"settings.json could not be written: "), largest_file(100):
        train_drafter(PROMPTS, tmp_path / "out", options(target))
    assert not [path for path in (tmp_path / "out").rglob("*") if path.is_file()]


@pytest.mark.usefixtures("no_plot")
def test_a_disk_that_is_full_when_a_later_checkpoint_is_due(
    target: Path, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = copy_of(whole, tmp_path / "out", *TRAINING)
    save, count = torch.save, iter(range(100))

    def half_a_file(state: Any, file: Path) -> None:
        save(state, file)
        if next(count) == 8:
            os.truncate(file, 1000)
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", half_a_file)
    with pytest.raises(OSError, match=r"checkpoint.pt could not be written: \[Errno 28\] No space left on device"):
        train_drafter(PROMPTS, out, options(target))
    steps = loop.json.loads((out / "work" / "log.jsonl").read_text().splitlines()[-1])
    place = torch.load(out / "work" / "checkpoint.pt", weights_only=True)["place"]
    assert place[2] == steps["tokens"] > 0
    train_drafter(PROMPTS, out, options(target))
    assert_same(out, whole)


@pytest.mark.usefixtures("no_plot")
@pytest.mark.parametrize("method", ["medusa", pytest.param("mlp", marks=pytest.mark.slow), "draft-model"])
def test_a_disk_that_is_full_when_a_drafter_is_saved(method: str, target: Path, whole: Path, tmp_path: Path) -> None:
    """The log (3 kB) finds room, the weights do not."""
    changes: dict[str, Any] = dict(method=method, epochs=1)
    if method == "draft-model":
        changes["num_layers"] = 2
    short, out = options(target, **changes), with_options(whole, tmp_path / "out", **changes)
    train_drafter(PROMPTS, out, short)
    before = files_of(out)
    with pytest.raises(OSError, match=r"out could not be written: .*the same run resumes"), largest_file(5000):
        train_drafter(PROMPTS, out, short)
    assert files_of(out) == before


@pytest.mark.usefixtures("no_plot")
def test_little_room_for_the_hidden_states(
    target: Path, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then the target reads the texts again in every epoch, and nothing else changes."""
    out = copy_of(whole, tmp_path / "out", "training", "validation", *TRAINING)
    undo = fail_after(monkeypatch, loop._Run, "end_epoch", 0)
    with pytest.raises(Stop):
        train_drafter(PROMPTS, out, options(target, max_disk_gb=0))
    undo()
    begun = copy_of(out, tmp_path / "begun")
    train_drafter(PROMPTS, out, options(target, max_disk_gb=0))
    assert not list(out.rglob("hidden-*"))
    train_drafter(PROMPTS, out, options(target))  # with room after all, which is not needed any more
    assert_same(out, copy_of(whole, tmp_path / "expected", "hidden-*"))
    train_drafter(PROMPTS, begun, options(target))  # with room after all
    assert_same(begun, whole)


@pytest.mark.usefixtures("no_plot")
def test_no_room_for_the_hidden_states(
    target: Path, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = copy_of(whole, tmp_path / "out", "training", "validation", *TRAINING)
    usage = shutil.disk_usage(out)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    with pytest.raises(
        OSError, match=r"hidden states need .* GB in .*: give a lower max_disk_gb, fewer prompts or another --out"
    ):
        train_drafter(PROMPTS, out, options(target))
    assert not list(out.rglob("hidden-*"))
    monkeypatch.undo()
    monkeypatch.setattr(hidden_files, "TEXTS_PER_GROUP", 8)
    train_drafter(PROMPTS, out, options(target))
    assert_same(out, whole)


@pytest.mark.usefixtures("no_plot")
def test_room_for_all_but_a_part_of_the_hidden_states(
    target: Path, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then those of the larger part are not read either."""
    out = copy_of(whole, tmp_path / "out", "training", "validation", *TRAINING)
    sizes = {
        part: sum(file.stat().st_size for file in (whole / "work" / part).iterdir())
        for part in ("training", "validation")
    }
    free, usage = sizes["training"] + sizes["validation"] // 2, shutil.disk_usage(out)

    def less_by_what_is_there(path: Path) -> Any:
        return usage._replace(free=free - sum(file.stat().st_size for file in out.rglob("hidden-*")))

    monkeypatch.setattr(shutil, "disk_usage", less_by_what_is_there)
    with pytest.raises(OSError, match=r"hidden states need .*training"):
        train_drafter(PROMPTS, out, options(target))
    assert {file.parent.name for file in out.rglob("hidden-*")} == {"validation"}


@pytest.mark.usefixtures("no_plot")
def test_damaged_work_is_named(target: Path, whole: Path, tmp_path: Path) -> None:
    out = copy_of(whole, tmp_path / "out")
    checkpoint = (out / "work" / "checkpoint.pt").read_bytes()
    for content in (b"no checkpoint", b"", checkpoint[:100], checkpoint[:-100]):
        (out / "work" / "checkpoint.pt").write_bytes(content)
        with pytest.raises(
            ValueError,
            match=r"checkpoint.pt must be a checkpoint of this training: .*; delete that file to restart training",
        ):
            train_drafter(PROMPTS, out, options(target))
    lines = (out / "work" / "answers.jsonl").read_text().splitlines()
    (out / "work" / "answers.jsonl").write_text("\n".join([lines[0], "{}", *lines[2:], ""]))
    with pytest.raises(ValueError, match=r"answers.jsonl:2 must be an answer"):
        train_drafter(PROMPTS, out, options(target))
    first = json.loads(lines[0])
    for ids in ([10**6], [-1], ["a"], [1.5], [True], 7):
        line = json.dumps(first | {"token_ids": ids})
        (out / "work" / "answers.jsonl").write_text("\n".join([line, *lines[1:], ""]))
        with pytest.raises(
            ValueError, match=r"answers.jsonl:1 must be an answer in token ids in \[0, \d+\), as .*, got "
        ):
            train_drafter(PROMPTS, out, options(target))
    (out / "work" / "settings.json").write_text("[]")
    with pytest.raises(ValueError, match=r"settings.json must be the JSON object"):
        train_drafter(PROMPTS, out, options(target))


@pytest.mark.usefixtures("no_plot")
def test_answers_of_other_prompts_are_named(target: Path, whole: Path, tmp_path: Path) -> None:
    """As two runs at once left them, before there was a lock, or a target whose tokenizer is another one by now."""
    out = copy_of(whole, tmp_path / "out", "training", "validation", *TRAINING)
    file = out / "work" / "answers.jsonl"
    first, second, *others = file.read_text().splitlines(keepends=True)
    for lines, message in (
        ([first, second, *others, first], "answers.jsonl must hold one answer to each of 24 prompts, got 25 answers"),
        ([first, first, second], r"answers.jsonl:2 must be the answer to prompts\[1\], got one to other token ids"),
    ):
        file.write_text("".join(lines))
        with pytest.raises(ValueError, match=message):
            train_drafter(PROMPTS, out, options(target))
        assert file.read_text() == "".join(lines)


@pytest.mark.usefixtures("no_plot")
def test_one_run_at_a_time(target: Path, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, answer = tmp_path / "out", run.answer_prompts

    def while_another_one_runs(*args: Any) -> Any:
        with pytest.raises(ValueError, match=f"out must be a folder in which no other run works, got {out}, in which"):
            train_drafter(PROMPTS, out, options(target))
        return answer(*args)

    monkeypatch.setattr(run, "answer_prompts", while_another_one_runs)
    train_drafter(PROMPTS, out, options(target))
    monkeypatch.setattr(run, "answer_prompts", answer)
    for name in ("model.safetensors", "work/answers.jsonl"):
        assert (out / name).read_bytes() == (whole / name).read_bytes()
    train_drafter(PROMPTS, out, options(target))


def test_other_work_that_is_begun_while_the_target_is_loaded(
    target: Path, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, load = tmp_path / "out", run.load

    def loaded_while_another_one_runs(*args: Any, **more: Any) -> engine.Engine:
        with_options(whole, out, seed=1)
        return load(*args, **more)

    monkeypatch.setattr(run, "load", loaded_while_another_one_runs)
    with pytest.raises(ValueError, match=r"the run in .* differs in seed \(1 before, 0 now\)$"):
        train_drafter(PROMPTS, out, options(target))


def test_a_target_with_other_weights_than_before(target: Path, whole: Path, tmp_path: Path) -> None:
    """Answers and hidden states of the one would teach what the other does not say; what is no part of the checkpoint may change."""
    out, aim = tmp_path / "out", tmp_path / "target"
    shutil.copytree(target, aim)
    copy_of(whole, out, *TRAINING)
    settings = json.loads((out / "work" / "settings.json").read_text()) | {"target": str(aim)}
    (out / "work" / "settings.json").write_text(json.dumps(settings))
    (aim / "notes.txt").write_text("of no weight")
    before = files_of(out)
    check_out(out, settings | {"target_sha256": checkpoint_digest(aim)})
    check_out(out, settings | {"target": "by another path"})
    weights = load_file(aim / "model.safetensors")
    weights["lm_head.weight"] += 1
    save_file(weights, aim / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=r"the run in .* differs in the files of target$"):
        train_drafter(PROMPTS, out, options(aim))
    assert files_of(out) == before


def test_a_packaged_head_to_start_from_that_is_another_than_before(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with another version of this package."""
    seen = []
    monkeypatch.setattr(run, "check_out", lambda out, settings: seen.append(settings["start_from_sha256"]))
    head = tmp_path / "head"
    head.mkdir()
    for content in ("{}", "[]"):
        (head / "config.json").write_text(content)
        monkeypatch.setattr(run, "find_head", {"some-head": head}.get)
        with pytest.raises(OSError, match="some-head"):
            train_drafter(PROMPTS, tmp_path / "out", options(target, start_from="some-head"))
    assert len(set(seen)) == 2


@pytest.mark.usefixtures("no_plot")
@pytest.mark.parametrize("part, size", [("training", 0), ("training", -100), ("validation", 1000)])
def test_hidden_states_that_are_cut_off(part: str, size: int, target: Path, whole: Path, tmp_path: Path) -> None:
    """Found before anything is learned; and made again when the file is gone, as the error says."""
    out = copy_of(whole, tmp_path / "out", *TRAINING)
    file = max((out / "work" / part).iterdir())
    os.truncate(file, file.stat().st_size + size if size < 0 else size)
    rule = rf"{part}/{file.name} must hold the hidden states of some texts: .*; delete that file to recreate it"
    with pytest.raises(ValueError, match=rule):
        train_drafter(PROMPTS, out, options(target))
    assert not (out / "work" / "log.jsonl").exists()
    file.unlink()
    train_drafter(PROMPTS, out, options(target))
    assert_same(out, whole)


def test_hidden_states_of_something_else(tmp_path: Path) -> None:
    file = tmp_path / "hidden-00000.safetensors"
    save_file({"tokens": torch.zeros(3)}, file)
    for read in (hidden_files.read_texts, hidden_files.check_file):
        with pytest.raises(ValueError, match=r"hidden-00000.safetensors must hold the hidden states of some texts: "):
            read(file)


@pytest.mark.usefixtures("no_plot")
def test_a_training_that_diverges(target: Path, whole: Path, tmp_path: Path) -> None:
    out = with_options(whole, tmp_path / "out", learning_rate=1e38)
    with pytest.raises(
        engine.EngineError, match=r"the loss is (nan|inf) in epoch \d, batch \d+: give a lower learning_rate"
    ):
        train_drafter(PROMPTS, out, options(target, learning_rate=1e38))


@pytest.mark.usefixtures("no_plot")
def test_a_training_that_diverges_in_its_last_step(
    target: Path, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its loss was a number before that step, and the drafter is none after it."""
    out = copy_of(whole, tmp_path / "out", *TRAINING)
    monkeypatch.setattr(loop, "evaluate", lambda module, found: {"loss": float("nan"), "acceptance": []})
    with pytest.raises(
        engine.EngineError, match="the validation loss is nan after epoch 1: give a lower learning_rate"
    ):
        train_drafter(PROMPTS, out, options(target))
    assert not (out / "config.json").exists()


def test_a_folder_that_cannot_be_made(target: Path) -> None:
    with pytest.raises(OSError, match=r"^out must be a folder that can be made and written to, got /proc/drafter: "):
        train_drafter(PROMPTS, "/proc/drafter", options(target))


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"method": "eagle"}, "method must be one of eagle3, medusa, mlp, draft-model, got 'eagle'"),
        ({"target": ""}, "target must be a hub id, a folder or a GGUF file, got ''"),
        ({"epochs": 0}, "epochs must be >= 1, got 0"),
        ({"num_steps": True}, "num_steps must be an int >= 1, got True"),
        ({"batch_size": 2.0}, "batch_size must be an int >= 1, got 2.0"),
        ({"max_length": 1}, "max_length must be >= 2, got 1"),
        ({"seed": -1}, r"seed must be in \[0, \d+\], got -1"),
        ({"layers": (0, -2)}, "layers must be >= 0, got -2"),
        ({"layers": (5, 2, 4)}, r"layers must be ascending, each once, got \[5, 2, 4\]"),
        ({"layers": (2, 2, 4)}, r"layers must be ascending, each once, got \[2, 2, 4\]"),
        ({"validation_share": 1.0}, r"validation_share must be in \(0, 1\), got 1.0"),
        ({"validation_share": float("nan")}, r"validation_share must be in \(0, 1\), got nan"),
        ({"learning_rate": 0.0}, "learning_rate must be a finite number > 0, got 0.0"),
        ({"learning_rate": float("inf")}, "learning_rate must be a finite number > 0, got inf"),
        (
            {"temperatures": ()},
            r"temperatures must be a list of at least one finite number, all >= 0 and <= 3e\+38, got \(\)",
        ),
        ({"temperatures": (0.0, -1.0)}, r"temperatures must be .* all >= 0 and <= 3e\+38, got \(0.0, -1.0\)"),
        (
            {"temperatures": 0.7},
            r"temperatures must be a list of at least one finite number, all >= 0 and <= 3e\+38, got 0.7",
        ),
        ({"layers": 3}, "layers must be a list of ints, got 3"),
        ({"chat": "no"}, "chat must be True or False, got 'no'"),
        ({"max_disk_gb": -1}, "max_disk_gb must be a finite number >= 0, or None, got -1"),
        ({"start_from": "head", "method": "mlp"}, "start_from must not be given for the method mlp, got 'head'"),
        (
            {"freeze_head": True, "method": "medusa"},
            "freeze_head must not be given for the method medusa, got True: it is an option of eagle3",
        ),
        (
            {"num_layers": 2},
            "num_layers must not be given for the method eagle3, got 2: it is an option of draft-model",
        ),
        ({"freeze_head": 1}, "freeze_head must be True or False, got 1"),
        ({"loss": "tv"}, "loss must be one of kl, lk, got 'tv'"),
    ],
)
def test_bad_options(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(TrainingOptions("eagle3", "target"), **changes)


def test_numbers_of_numpy() -> None:
    """They are kept as JSON."""
    given: dict[str, Any] = dict(
        epochs=np.int64(2), layers=[np.int32(1)], seed=np.int8(3), learning_rate=np.float32(0.5)
    )
    given |= dict(validation_share=np.float16(0.25), temperatures=(np.float32(0),))
    kept = dataclasses.asdict(TrainingOptions("eagle3", "target", **given))
    assert json.loads(json.dumps(kept))["learning_rate"] == 0.5
    assert {type(value) for value in (kept["epochs"], kept["seed"], *kept["layers"])} == {int}


@pytest.mark.parametrize(
    "prompts, changes, message",
    [
        (["one"], {}, "prompts must be at least 2, one of them for validation, got 1"),
        ("one", {}, "prompts must be at least 2, one of them for validation, got a string"),
        ({"input_ids": [[1], [2]], "attention_mask": [[1], [1]]}, {}, "at least 2, .*, got dict"),
        (iter(["one", "two"]), {}, "at least 2, .*, got list_iterator"),
        ("one", {}, "prompts must be at least 2"),
        (["one", " "], {}, r"prompts\[1\] must not be empty"),
        (["one", "x" * 60], {}, r"prompts\[1\] has \d+ tokens; at most 47 leave room for a new one in max_length = 48"),
        (["one", {1}], {}, r"prompts\[1\] must be a string, token ids or chat messages: got set"),
        (["one", [1, 999]], {}, r"prompts\[1\] must hold token ids in \[0, 258\), got 999"),
        (["one", "two"], {"layers": (0, 3)}, r"layers must be in \[0, 2\], as the target has 2 layers, got \[0, 3\]"),
        (["one", "two"], {"method": "draft-model", "num_layers": 3}, r"num_layers must be in \[1, 2\], got 3"),
        (["one", "two"], {"target": "./missing"}, "'./missing', which does not exist"),
        (["one", "two"], {"dtype": "int8"}, "dtype must be 'auto', 'bfloat16', .* or such a torch dtype"),
    ],
)
def test_bad_input_is_refused_before_any_work(
    prompts: Any, changes: dict[str, Any], message: str, target: Path, tmp_path: Path
) -> None:
    chosen = options(**{"target": target, **changes})
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        train_drafter(prompts, tmp_path / "out", chosen)
    assert not (tmp_path / "out").exists()


def test_out_that_holds_something_else(target: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="out must be a folder, got ''"):
        train_drafter(PROMPTS, "", options(target))
    for name in ("o" * 300, "nul\0"):
        with pytest.raises(ValueError, match="out must be a folder that can be made, got '"):
            train_drafter(PROMPTS, tmp_path / name, options(target))
    with pytest.raises(ValueError, match=r"out must be a folder, got the file .*file"):
        train_drafter(PROMPTS, tmp_path / "file", options(target))
    for name in ("notes.txt", "work/answers.jsonl"):
        other = tmp_path / name.split(".")[0]
        (other / name).parent.mkdir(parents=True)
        (other / name).write_text("mine")
        with pytest.raises(ValueError, match="out must be a new or empty folder, or one in which a training was begun"):
            train_drafter(PROMPTS, other, options(target))
        assert (other / name).read_text() == "mine"


@pytest.mark.usefixtures("no_plot")
def test_token_ids_as_prompts_and_two_are_enough(target: Path, tmp_path: Path) -> None:
    out = train_drafter(
        [[5], [7, 8, 9]], tmp_path / "out", options(target, max_new_tokens=2, epochs=1, validation_share=0.9)
    )
    kept = [json.loads(line) for line in (out / "work" / "answers.jsonl").read_text().splitlines()]
    assert [line["prompt_token_ids"] for line in kept] == [[5], [7, 8, 9]]
    assert texts_of(target, out)[0] == texts_of(target, None)[0]


def test_all_prompts_that_cannot_be_taken_are_named(target: Path, tmp_path: Path) -> None:
    """In one run: there may be thousands of prompts."""
    prompts = [[5, 6], [7] * 40, "fine", [1_000_000], [8] * 50]
    with pytest.raises(ValueError, match=r"^prompts\[1\] has 40 tokens; .*; refused too are 2 of the 5 prompts: 3, 4$"):
        train_drafter(prompts, tmp_path / "out", options(target, max_length=30))
    assert not (tmp_path / "out").exists()


@pytest.mark.usefixtures("no_plot")
def test_the_folder_may_be_at_home(target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A shell does not expand the ~ in --out=~/drafter."""
    monkeypatch.setenv("HOME", str(tmp_path))
    changes = dict(method="medusa", max_new_tokens=2, epochs=1)
    assert train_drafter([[5], [7, 8, 9]], "~/drafter", options(target, **changes)) == tmp_path / "drafter"
    assert engine.load(target, drafter="~/drafter", num_draft_tokens=2).generate(
        [5], engine.SamplingParams(max_new_tokens=2)
    )


@pytest.mark.usefixtures("no_plot")
def test_prompts_of_all_types_that_an_engine_takes(target: Path, tmp_path: Path) -> None:
    """Ids are the same work whatever holds them."""
    tokenizer = byte_tokenizer()
    prompts: list[Any] = [
        "a",
        [104, 105],
        np.array([104, 105]),
        [np.int64(104), np.int32(105)],
        torch.tensor([104, 105]),
    ]
    prompts += [tokenizer("hi"), tokenizer("hi", return_tensors="pt"), tokenizer("hi", return_tensors="np")]
    out = train_drafter(prompts, tmp_path / "out", options(target, method="medusa", max_new_tokens=2, epochs=1))
    kept = [json.loads(line) for line in (out / "work" / "answers.jsonl").read_text().splitlines()]
    assert [line["prompt_token_ids"] for line in kept[1:]] == [[104, 105]] * 7
    hashes = [settings_of({}, [prompt])["prompts_sha256"] for prompt in prompts]
    assert len(set(hashes[1:6])) == 1 and len(set(hashes[6:])) == 1
    # What work was begun with before is still the same.
    assert settings_of({}, ["one", "zwö"])["prompts_sha256"].startswith("434c655a33f91c17")
    assert settings_of({}, [[104, 105], torch.tensor([7, 8, 9])])["prompts_sha256"].startswith("508fdf104674991b")


@pytest.mark.usefixtures("no_plot")
def test_the_chat_template_is_used_unless_told_otherwise(target: Path, whole: Path, tmp_path: Path) -> None:
    plain = train_drafter(PROMPTS, tmp_path / "out", options(target, chat=False, method="medusa", epochs=1))
    for out, text in ((whole, f"user: {PROMPTS[0]}\nassistant:"), (plain, PROMPTS[0])):
        line = json.loads((out / "work" / "answers.jsonl").read_text().splitlines()[0])
        assert bytes(line["prompt_token_ids"]).decode() == text
        assert len(line["token_ids"]) == 12


@pytest.mark.usefixtures("no_plot")
def test_the_card_says_chat_where_prompts_were_chats(target: Path, tmp_path: Path) -> None:
    without = shutil.copytree(target, tmp_path / "without")
    (without / "chat_template.jinja").unlink()
    messages: list[Any] = [[{"role": "user", "content": prompt}] for prompt in PROMPTS[:2]]
    for aim, prompts, chat in (
        (target, PROMPTS[:2], True),
        (target, messages, True),
        (target, [[5], [7, 8, 9]], False),
        (without, PROMPTS[:2], False),
    ):
        out = tmp_path / f"{aim.name}-{len(list(tmp_path.iterdir()))}"
        train_drafter(prompts, out, options(aim, method="medusa", max_new_tokens=2, epochs=1))
        card = (out / "README.md").read_text()
        assert ("generate --chat --target" in card, f"- chat: {chat}\n" in card) == (chat, True)


@pytest.mark.usefixtures("no_plot")
@pytest.mark.parametrize("freeze_head", [False, True])
def test_a_head_to_start_from(
    freeze_head: bool, target: Path, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known: list[Any] = []
    frequent = initial_model.frequent_tokens
    monkeypatch.setattr(initial_model, "frequent_tokens", lambda *given: (known.append(given[3]), frequent(*given))[1])
    changes: dict[str, Any] = {"freeze_head": freeze_head, "epochs": 1}
    if freeze_head:
        start = train_drafter(PROMPTS, tmp_path / "start", options(target, **changes))
    else:
        start = whole
    slow = changes | {"learning_rate": 1e-9, "draft_vocab_size": 50}
    out = train_drafter(PROMPTS, tmp_path / "out", options(target, **slow, start_from=str(start)))
    found, expected = load_file(out / "model.safetensors"), load_file(start / "model.safetensors")
    assert found.keys() == expected.keys() and ("lm_head.weight" in found) != freeze_head
    # New words cost nothing where the output matrix is the target's; where there is room, the head's own stay.
    assert not freeze_head or torch.equal(known[-1], expected["d2t"] + torch.arange(len(expected["d2t"])))
    assert (found["d2t"].shape == expected["d2t"].shape) != freeze_head
    for name in found.keys() - {"d2t", "t2d"}:
        torch.testing.assert_close(found[name], expected[name], rtol=0.01, atol=1e-6, msg=name)  # bfloat16, tiny steps
    card = (out / "README.md").read_text()
    assert f"start_from: {start}" in card and "layers: (0, 1, 2)" in card
    assert f"draft_vocab_size: {len(found['d2t'])}\n" in card


@pytest.mark.usefixtures("no_plot")
def test_a_head_to_start_from_keeps_the_order_of_its_hidden_states(target: Path, whole: Path, tmp_path: Path) -> None:
    start = copy_of(whole, tmp_path / "start", "work")
    config = json.loads((start / "config.json").read_text())
    (start / "config.json").write_text(json.dumps({**config, "eagle_aux_hidden_state_layer_ids": [1, 0, 2]}))
    out = train_drafter(PROMPTS, tmp_path / "out", options(target, start_from=str(start), epochs=1))
    assert json.loads((out / "config.json").read_text())["eagle_aux_hidden_state_layer_ids"] == [1, 0, 2]
    assert "for this engine alone: it reads hidden states as [1, 0, 2], not in" in (out / "README.md").read_text()


@pytest.mark.usefixtures("no_plot")
@pytest.mark.parametrize("method", ["eagle3", "medusa", "mlp", "draft-model"])
def test_prompts_can_be_learned_too(method: str, target: Path, tmp_path: Path) -> None:
    logs = []
    for learn_prompts in (False, True):
        chosen = options(target, method=method, learn_prompts=learn_prompts, epochs=1, learning_rate=1e-9)
        logs.append(log_of(train_drafter(PROMPTS, tmp_path / str(learn_prompts), chosen)))
    (*steps, end), (*other_steps, other_end) = logs
    assert all("loss" in step for step in steps + other_steps)
    assert abs(steps[0]["loss"] - other_steps[0]["loss"]) > 1e-3
    # Held-back answers are what counts, and next to nothing was learned.
    assert end["validation"]["acceptance"] == other_end["validation"]["acceptance"]
    assert end["validation"]["loss"] == pytest.approx(other_end["validation"]["loss"], rel=1e-4)


def test_heads_that_cannot_be_started_from(target: Path, whole: Path, tmp_path: Path) -> None:
    wider = write_target(tmp_path / "wider", intermediate_size=80)
    window = tmp_path / "window"
    shutil.copytree(whole, window, ignore=shutil.ignore_patterns("work"))
    config = json.loads((window / "config.json").read_text())
    config["transformer_layer_config"] |= {"layer_types": ["sliding_attention"], "sliding_window": 4}
    (window / "config.json").write_text(json.dumps(config))
    for head, aim, changes, message in (
        (whole, target, {"layers": (0, 2)}, r"layers must be \[0, 1, 2\], those of the head .*, got \[0, 2\]"),
        (
            whole,
            target,
            {"freeze_head": True},
            "freeze_head must be False, as the head .* has an output matrix of its own",
        ),
        (whole, wider, {}, r"start_from must be .*; it differs in \['layers.0.mlp.down_proj.weight', "),
        (target, target, {}, "start_from must be an EAGLE-3 head, got "),
        ("ngram", target, {}, "start_from must be an EAGLE-3 head, got 'ngram'"),
        ("no/such", target, {}, "^start_from must be an existing path or an accessible hub id, got 'no/such'"),
        (window, target, {}, "start_from must be a head that attends to all of a text, got one with a sliding window"),
        ("./missing", target, {}, "start_from must be an existing path or a hub id, got './missing'"),
    ):
        with pytest.raises((ValueError, OSError), match=message):
            train_drafter(PROMPTS, tmp_path / "out", options(aim, start_from=str(head), **changes))
        assert not (tmp_path / "out").exists()


KILLS: dict[str, Callable[[Path], bool]] = {
    "answers": lambda work: (work / "answers.jsonl").exists() and (work / "answers.jsonl").stat().st_size > 0,
    "hidden states": lambda work: (work / "training" / "hidden-00000.safetensors").exists(),
    "first steps": lambda work: (work / "checkpoint.pt").exists(),
    "second epoch": lambda work: (work / "log.jsonl").exists() and '"validation"' in (work / "log.jsonl").read_text(),
}


@pytest.mark.usefixtures("no_plot")
@pytest.mark.parametrize("kills", [("answers", "first steps"), pytest.param(tuple(KILLS), marks=pytest.mark.slow)])
def test_a_process_that_is_killed_goes_on(kills: tuple[str, ...], target: Path, whole: Path, tmp_path: Path) -> None:
    """SIGKILL while answers are written, while hidden states are, and at two points of the training."""
    prompts, out = tmp_path / "prompts.txt", tmp_path / "out"
    prompts.write_text("".join(f"{prompt}\n" for prompt in PROMPTS))
    words = (
        f"train eagle3 --target {target} --prompts {prompts} --out {out} --batch-size 4 --max-new-tokens 12 --epochs 2"
    )
    words += " --max-length 48 --num-steps 3 --tokens-per-batch 160 --draft-vocab-size 100 --validation-share 0.2"
    command = [sys.executable, "-c", _EVERY_STEP, *words.split(), "--learning-rate", "0.005"]
    for kill in kills:
        process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        while not KILLS[kill](out / "work"):
            assert process.poll() is None, "the run ended before it could be killed"
            time.sleep(0.002)
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
        assert not (out / "config.json").exists()
    train_drafter(PROMPTS, out, options(target))
    assert_same(out, whole)


_EVERY_STEP = """
import itertools, sys
from engine.cli import main
from engine.training import answers, hidden_files, loop
answers._BATCHES_PER_GROUP, hidden_files.TEXTS_PER_GROUP = 2, 8
loop._now = itertools.count(0, 1000).__next__
sys.exit(main())
"""
