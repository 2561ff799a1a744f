"""Two processes that share a target, on CPU with gloo, against one process that has it alone."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from eagle_checkpoints import Head
from parallel_worker import GREEDY, HEADS_OF, OPTIONS, PROMPTS, SEEDED, texts
from tiny_models import CONFIGS, greedy, perturbed, tiny
from transformers import AutoConfig, GPTNeoXConfig, PreTrainedModel

import engine
from engine import parallel
from engine.packing import PackedLinear
from engine.parallel import Ranks

HERE = Path(__file__).resolve().parent
LAUNCHED = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("parallel")
    target = tiny("llama")
    target.save_pretrained(path / "target")
    perturbed(target, 0.2).save_pretrained(path / "draft")
    tiny("gpt_neox", tie_word_embeddings=True).save_pretrained(path / "tied")
    tiny("llama", tie_word_embeddings=True).save_pretrained(path / "tied_llama")
    borrowed = ("embed_tokens.weight", "lm_head.weight")
    head = Head(layers=(0, 1, 2), left_out=borrowed, draft_ids=list(range(0, 64, 3)))
    head.speculators(path / "head")
    return path


@contextmanager
def launch(function: str, folder: Path) -> Iterator[subprocess.Popen[str]]:
    """Two ranks under torchrun, which work while this process does."""
    environment = {k: v for k, v in os.environ.items() if k not in LAUNCHED}
    path = os.pathsep.join([str(HERE.parent), str(HERE), *filter(None, [environment.get("PYTHONPATH")])])
    environment |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": path}
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    process = subprocess.Popen(
        [*launcher, str(HERE / "parallel_worker.py"), function, str(folder)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.terminate()  # torchrun ends its processes
            process.wait(timeout=60)


def results(process: subprocess.Popen[str], folder: Path) -> list[dict[str, Any]]:
    """What each rank saw."""
    log, _ = process.communicate(timeout=180)
    assert process.returncode == 0, log
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(2)]


@pytest.fixture(scope="module")
def launched(folder: Path) -> Iterator[subprocess.Popen[str]]:
    with launch("observations", folder) as process:
        yield process


@pytest.fixture(scope="module")
def alone(folder: Path, launched: object) -> dict[str, Any]:
    """What one process says."""
    plain = engine.load(folder / "target", **OPTIONS)
    seen = {"ngram": texts(plain, GREEDY), "stream": plain.generate(PROMPTS[1], SEEDED[1]).token_ids}
    for method in ("rejection", "coupled"):
        llm = engine.load(folder / "target", drafter=folder / "draft", verification=method, **OPTIONS)
        seen[method] = texts(llm, SEEDED)
    for name in HEADS_OF:
        headed = engine.load(folder / name, drafter=folder / "head", **OPTIONS)
        seen[f"head of {name}"] = [texts(headed, SEEDED), headed.stats.accepted_tokens]
    return seen


@pytest.fixture(scope="module")
def ranks(folder: Path, launched: subprocess.Popen[str], alone: object) -> list[dict[str, Any]]:
    return results(launched, folder)


@pytest.mark.parametrize("case", ["ngram", "rejection", "coupled", *(f"head of {name}" for name in HEADS_OF)])
def test_tokens_of_one_process(case: str, alone: dict[str, Any], ranks: list[dict[str, Any]]) -> None:
    """Greedy with an n-gram drafter, sampled with a draft model, and with heads whose output matrix is the target's, of which each
    rank has a slice. Ragged prompts, more of them than rows."""
    assert all(alone[case])  # of heads: some drafts stand
    for seen in ranks:
        assert seen[case] == alone[case]


def test_pieces_of_a_stream(alone: dict[str, Any], ranks: list[dict[str, Any]]) -> None:
    assert ranks[0]["stream"] == ranks[1]["stream"]
    assert list(chain.from_iterable(ranks[0]["stream"])) == alone["stream"]


def test_each_rank_has_half_of_the_heads(ranks: list[dict[str, Any]]) -> None:
    """4 heads and 2 K/V heads of 8."""
    for seen in ranks:
        assert seen["slices"] == [[16, 32], [8, 32]]
        assert seen["cached_heads"] == 1


def test_fresh_seeds_are_the_same_on_all_ranks(ranks: list[dict[str, Any]]) -> None:
    first, second = ranks[0]["unseeded"]
    assert ranks[1]["unseeded"] == [first, second]
    assert first != second


def test_exact_text_does_not_depend_on_drafts(ranks: list[dict[str, Any]]) -> None:
    """In bfloat16, sampled with coupled verification."""
    for seen in ranks:
        plain, speculative = seen["exact"]
        assert plain == speculative


def test_ranks_that_were_given_different_things_are_told(ranks: list[dict[str, Any]]) -> None:
    for seen in ranks:
        for case in ("other_prompts", "other_params", "one_bad_prompt", "one_empty_list", "one_bad_stream"):
            assert seen[case] == (
                "ValueError: prompts and params must be the same on every rank, but ranks [1] of 2 differ from rank 0"
            )
        for case in ("other_warmup", "one_bad_warmup"):
            assert seen[case].startswith("ValueError: the arguments of warmup must be the same on every rank")
        assert seen["all_bad_warmup"] == "ValueError: batch_sizes must be in [1, 3], got 0"
        assert seen["all_bad_prompts"] == "ValueError: prompts[1] must hold token ids in [0, 64), got -1"
        for case in ("other_load", "other_options", "other_layers", "other_stage"):
            assert seen[case].startswith("ValueError: the arguments of engine.load must be the same on every rank")
        assert seen["other_target"].startswith(
            "ValueError: target must be the same checkpoint on every rank, but that of ranks [1] of 2 differs from rank 0's; here"
        )
        assert seen["after_errors"] == seen["ngram"]


def test_ranks_that_decide_differently_are_told(ranks: list[dict[str, Any]]) -> None:
    """A drafter whose drafts stand on rank 0 and fall on rank 1; the same one without the lie is fine."""
    for seen in ranks:
        assert seen["honest"] == "no error"
        assert seen["liar"] == (
            "EngineError: all ranks must come to the same tokens in a round, but ranks [1] of 2 differ from rank 0"
        )


def test_measured_times_are_those_of_rank_0(alone: dict[str, Any], ranks: list[dict[str, Any]]) -> None:
    """Where they decide how much is drafted, ranks that went by their own would make calls of different shapes."""
    for seen in ranks:
        assert seen["seconds"] == [1.5, 0.25]
        assert seen["auto"] == alone["ngram"]


def test_rank_0_alone_shows_progress(ranks: list[dict[str, Any]]) -> None:
    assert [seen["shows_a_bar"] for seen in ranks] == [True, False]


def test_a_head_that_cannot_be_sliced_is_refused(folder: Path, ranks: list[dict[str, Any]]) -> None:
    """gpt_neox's plan leaves the embeddings whole, and a tied head with them: logits would be gathered twice. From transformers 5.24
    on it slices both."""
    sliced = "embed_in" in GPTNeoXConfig.base_model_tp_plan
    expected = texts(engine.load(folder / "tied", **OPTIONS), GREEDY) if sliced else None
    for seen in ranks:
        if sliced:
            assert seen["tied"] == expected
        else:
            assert seen["tied"].startswith("target of type 'gpt_neox' has a head tied to embeddings")


@pytest.mark.slow
def test_every_architecture_with_a_plan(tmp_path: Path) -> None:
    """In float32: torch groups the experts' products in no wider type."""
    without = ("gpt2", "opt", "falcon", "gpt_oss")
    models = {name: tiny(name, dtype=torch.float32) for name in CONFIGS if name not in without}
    for name, model in models.items():
        model.save_pretrained(tmp_path / name)
    with launch("architectures", tmp_path) as process:
        expected = {
            name: [greedy(model, prompt, GREEDY.max_new_tokens) for prompt in PROMPTS] for name, model in models.items()
        }
        assert results(process, tmp_path) == [expected, expected]


def test_one_process_needs_no_group() -> None:
    alone = Ranks.of(tiny("llama"))
    assert (alone.size, alone.rank) == (1, 0)
    assert alone.end_round([[1, 2]], [0.5]) == [0.5]
    assert alone.agree_on([3, 4]) == [3, 4]
    alone.require_same("anything", object())


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """As torchrun would set it for four processes."""
    for name, value in LAUNCHED.items():
        monkeypatch.setenv(name, value)
    return monkeypatch


def test_one_process_reads_the_target_as_without_tensor_parallelism(
    folder: Path, environment: pytest.MonkeyPatch
) -> None:
    """Its layers are whole, and packed."""
    environment.setenv("WORLD_SIZE", "1")
    environment.setattr(engine.parallel, "join", lambda: torch.device("cpu"))
    llm = engine.load(folder / "target", dtype="float32", tensor_parallel=True)
    assert any(isinstance(module, PackedLinear) for module in llm.target_model.modules())


def test_outside_of_torchrun(folder: Path, environment: pytest.MonkeyPatch) -> None:
    environment.delenv("RANK")
    environment.delenv("MASTER_PORT")
    with pytest.raises(ValueError, match=r"torchrun --nproc-per-node .* but the environment has no RANK, MASTER_PORT"):
        engine.load(folder / "target", tensor_parallel=True)


@pytest.mark.parametrize(
    ("target", "options", "text"),
    [
        (tiny("llama"), {}, "target must be a hub id or a folder .* got a live LlamaForCausalLM"),
        ("model.gguf", {}, "target must be a hub id or a folder .* got a GGUF file"),
        ("folder", {"device": "cpu"}, "device must be 'auto' for tensor_parallel"),
        ("folder", {"compile": True}, "compile must be False with tensor_parallel"),
        ("folder", {"tensor_parallel": 2}, "tensor_parallel must be True or False, got 2"),
    ],
)
def test_arguments_that_do_not_go_together(
    target: str | PreTrainedModel, options: dict[str, Any], text: str, environment: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match=text):
        engine.load(target, **{"tensor_parallel": True, **options})


@pytest.mark.parametrize(
    ("model_type", "changes", "error", "text"),
    [
        ("gpt2", {}, engine.UnsupportedModelError, "'gpt2' has no tensor parallel plan"),
        (
            "llama",
            {"num_attention_heads": 6, "hidden_size": 48},
            ValueError,
            "num_attention_heads divisible by the 4 processes, got 6",
        ),
        ("qwen2", {"num_key_value_heads": 2}, ValueError, "num_key_value_heads divisible by the 4 processes, got 2"),
        ("mixtral", {"intermediate_size": 50}, ValueError, "intermediate_size divisible by the 4 processes, got 50"),
    ],
)
def test_models_that_cannot_be_shared_out_are_refused_before_weights_are_read(
    model_type: str,
    changes: dict[str, Any],
    error: type[Exception],
    text: str,
    tmp_path: Path,
    environment: pytest.MonkeyPatch,
) -> None:
    """There are no weights here, nor anyone to join."""
    AutoConfig.for_model(model_type, **changes).save_pretrained(tmp_path)
    with pytest.raises(error, match=text):
        engine.load(tmp_path, tensor_parallel=True)


def test_whole_heads_need_not_be_divisible(
    tmp_path: Path, environment: pytest.MonkeyPatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """phi3's plan gathers queries, keys and values: every rank attends with all heads."""

    def joined() -> None:
        raise InterruptedError

    monkeypatch.setattr(engine.parallel, "join", joined)
    AutoConfig.for_model("phi3", num_attention_heads=6, num_key_value_heads=3).save_pretrained(tmp_path)
    with pytest.raises(InterruptedError):  # it gets as far as that
        engine.load(tmp_path, tensor_parallel=True)


def test_ranks_talk_over_the_hosts_wherever_torch_makes_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    def from_rank_0(message: torch.Tensor, **_: Any) -> None:
        message[1] = message[0]  # what rank 1 says, which is the same

    monkeypatch.setattr(torch.distributed, "all_reduce", from_rank_0)
    monkeypatch.setattr(torch.distributed, "broadcast", lambda message, **_: None)
    with torch.device("meta"):
        assert Ranks(size=2).end_round(["a row"], [0.5, 2.0]) == [0.5, 2.0]
        assert Ranks(size=2).agree_on([7, 2**62]) == [7, 2**62]


@pytest.mark.parametrize("changed", ["config.json", "generation_config.json", "model.safetensors", None])
def test_a_checkpoint_that_is_another_on_one_rank(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, changed: str | None
) -> None:
    """Whatever the folders are called, and what else is in them."""
    heard: list[Any] = []

    def gather(found: list[Any], own: Any) -> None:
        heard.append(own)
        found[:] = heard * 2 if len(heard) == 1 else heard

    monkeypatch.setattr(parallel.dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(parallel.dist, "all_gather_object", gather)
    for name in ("here", "there"):
        tiny().save_pretrained(tmp_path / name)
        (tmp_path / name / "README.md").write_text(name)
    parallel.require_same_checkpoint(tmp_path / "here", None, "target")
    if changed is None:
        parallel.require_same_checkpoint(tmp_path / "there", None, "target")
        return
    content = bytearray((tmp_path / "there" / changed).read_bytes())
    content[-2] ^= 1
    (tmp_path / "there" / changed).write_bytes(content)
    with pytest.raises(
        ValueError, match=r"target must be the same checkpoint .* ranks \[1\] of 2 .* here it is .*there"
    ):
        parallel.require_same_checkpoint(tmp_path / "there", None, "target")


def test_a_hub_id_of_another_commit_on_one_rank(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(parallel.dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(
        parallel.dist, "all_gather_object", lambda found, own: found.__setitem__(slice(None), ["a", own])
    )
    parallel.require_same_checkpoint(tmp_path, "a", "target")
    with pytest.raises(ValueError, match="target must be the same checkpoint on every rank"):
        parallel.require_same_checkpoint(tmp_path, "b", "target")
