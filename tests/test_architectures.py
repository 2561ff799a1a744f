"""Greedy text equals transformers' own, token for token, on every supported architecture."""

import functools
import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from kernel_cases import DEVICE
from tiny_models import CONFIGS, CONTEXT, EAGER_ONLY, GROUPED_EXPERTS, WINDOW, greedy, perturbed, random_prompts, tiny
from transformers import AutoConfig, PreTrainedModel

import engine
from engine.kernels import attention
from engine.model import uses_ragged_kernel

NEW = 12
DRAFTERS = ("ngram", "model")
BATCHES = (1, 3, 8)
DRAFT_LENGTHS = (0, 1, 4, 7)
WHOLE = set(itertools.product(BATCHES, DRAFT_LENGTHS, DRAFTERS))
SAMPLE = {(1, 0, "ngram"), (1, 7, "model"), (3, 1, "ngram"), (3, 4, "model"), (8, 4, "ngram"), (8, 1, "model")}


@functools.cache
def models(name: str) -> tuple[PreTrainedModel, PreTrainedModel]:
    target = tiny(name, dtype=torch.float32 if name in GROUPED_EXPERTS else torch.float64)
    return target, perturbed(target, 0.05)


@functools.cache
def expected(name: str, index: int) -> list[int]:
    return greedy(models(name)[0], prompts()[index], NEW)


@functools.cache
def prompts() -> list[list[int]]:
    """Nine prompts; the last fills the context but for three tokens."""
    return [*random_prompts(8), random_prompts(2, seed=3, longest=9)[1] * CONTEXT]


def load(name: str, drafter: str, **options: Any) -> engine.Engine:
    target, draft = models(name)
    return engine.load(target, drafter=draft if drafter == "model" else drafter, **options)


@pytest.mark.parametrize(
    ("batch", "num_draft_tokens", "drafter"),
    [*sorted(SAMPLE), *(pytest.param(*case, marks=pytest.mark.slow) for case in sorted(WHOLE - SAMPLE))],
)
@pytest.mark.parametrize("name", CONFIGS)
def test_greedy_equals_transformers(name: str, batch: int, num_draft_tokens: int, drafter: str) -> None:
    llm = load(name, drafter, num_draft_tokens=num_draft_tokens, max_batch_size=batch)
    outputs = llm.generate(prompts()[:8], engine.SamplingParams(max_new_tokens=NEW))
    assert [output.token_ids for output in outputs] == [expected(name, index) for index in range(8)]
    assert all(output.finish_reason == "length" for output in outputs)
    assert (llm.stats.draft_tokens > 0) == (num_draft_tokens > 0)


@pytest.mark.parametrize(
    ("name", "implementation"),
    [
        (name, own)
        for name in CONFIGS
        if name != "falcon"
        for own in ("sdpa", "eager")
        if own == "eager" or name not in EAGER_ONLY
    ],
)
def test_with_ragged_attention(name: str, implementation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What runs on a GPU, with the kernels' torch twins: no masks, whole buffers, K/V scattered by the kernel."""
    monkeypatch.setattr("engine.model.uses_ragged_kernel", lambda model: True)
    target = models(name)[0]
    monkeypatch.setattr(target.config, "_attn_implementation_internal", implementation)
    for drafter, num_draft_tokens in (("ngram", 4), ("model", 3)):
        llm = load(name, drafter, num_draft_tokens=num_draft_tokens, max_batch_size=3)
        assert llm._target.cache.whole_buffers
        outputs = llm.generate(prompts()[:8], engine.SamplingParams(max_new_tokens=NEW))
        assert [output.token_ids for output in outputs] == [expected(name, index) for index in range(8)]
        assert target.config._attn_implementation_internal == implementation


@pytest.mark.parametrize("name", ["mistral", "gemma2", "gpt_oss"])  # a window; a soft cap too; sinks
def test_with_the_triton_kernels(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels themselves inside a model: compiled on a GPU, else in Triton's interpreter."""
    monkeypatch.setenv("ENGINE_KERNELS", "triton")
    monkeypatch.setattr("engine.model.uses_ragged_kernel", lambda model: True)
    told: list[dict[str, Any]] = []
    real = attention.ragged_attention
    monkeypatch.setattr(attention, "ragged_attention", lambda *a, **more: told.append(more) or real(*a, **more))
    target = tiny(name, dtype=torch.float32)
    some = [prompts()[index] for index in (0, 2, 5)]
    texts = [greedy(target, prompt, 6) for prompt in some]
    assert max(map(len, some)) > WINDOW
    llm = engine.load(target.to(DEVICE), num_draft_tokens=3, max_batch_size=2, exact=False)
    outputs = llm.generate(some, engine.SamplingParams(max_new_tokens=6))
    assert [output.token_ids for output in outputs] == texts
    assert {more["window"] for more in told} == ({WINDOW} if name == "mistral" else {WINDOW, None})
    assert all((more["softcap"] is not None) == (name == "gemma2") for more in told)
    assert all((more["sinks"] is not None) == (name == "gpt_oss") for more in told)


def test_falcon_keeps_its_own_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """It does not look its attention function up."""
    monkeypatch.setattr("engine.model.uses_ragged_kernel", lambda model: True)
    llm = load("falcon", "ngram")
    assert not llm._target.cache.whole_buffers
    output = llm.generate(prompts()[3], engine.SamplingParams(max_new_tokens=NEW))
    assert output.token_ids == expected("falcon", 3)


@pytest.mark.parametrize(
    ("name", "changes", "fits"),
    [
        *((name, {}, True) for name in CONFIGS),
        ("llama", {"head_dim": 256}, True),
        ("llama", {"head_dim": 320}, False),
        ("gemma2", {"head_dim": 512}, False),
        ("deepseek_v3", {}, False),  # values are smaller than keys
    ],
)
def test_whose_heads_the_ragged_kernel_takes(name: str, changes: dict[str, Any], fits: bool) -> None:
    config = AutoConfig.for_model(name, **{**CONFIGS.get(name, {}), **changes})
    model: Any = SimpleNamespace(config=config, device=torch.device("cuda"), dtype=torch.bfloat16)
    assert uses_ragged_kernel(model) == fits


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("name", CONFIGS)
def test_context_runs_full(name: str, drafter: str) -> None:
    prompt = prompts()[8][: CONTEXT - 3]
    llm = load(name, drafter, num_draft_tokens=7)
    long, short = llm.generate([prompt, prompts()[0]], engine.SamplingParams(max_new_tokens=NEW))
    assert long.token_ids == greedy(models(name)[0], prompt, NEW)
    assert len(long.token_ids) == 3
    assert long.finish_reason == "length"
    assert short.token_ids == expected(name, 0)


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma3_text"])
def test_eos_inside_an_accepted_draft(name: str, drafter: str, monkeypatch: pytest.MonkeyPatch) -> None:
    target = models(name)[0]
    seen = 0
    for index in range(1, 8):
        eos = expected(name, index)[5]
        end = expected(name, index).index(eos) + 1
        monkeypatch.setattr(target.generation_config, "eos_token_id", eos)
        # A perfect drafter, so that the end comes in the middle of what is accepted.
        llm = engine.load(target, drafter=target if drafter == "model" else drafter, num_draft_tokens=7)
        output = llm.generate([prompts()[index]], engine.SamplingParams(max_new_tokens=NEW))[0]
        assert output.token_ids == expected(name, index)[:end] == greedy(target, prompts()[index], NEW, eos)
        assert output.finish_reason == "eos"
        seen += output.stats.accepted_tokens >= end
        ignored = llm.generate([prompts()[index]], engine.SamplingParams(max_new_tokens=NEW, ignore_eos=True))[0]
        assert ignored.token_ids == expected(name, index)
    assert seen or drafter == "ngram"


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_eager_attention(name: str) -> None:
    target = tiny(name, attn_implementation="eager")
    outputs = engine.load(target).generate(prompts()[:8], engine.SamplingParams(max_new_tokens=NEW))
    assert [output.token_ids for output in outputs] == [greedy(target, prompt, NEW) for prompt in prompts()[:8]]


@pytest.mark.parametrize("name", CONFIGS)
def test_float32_logits_are_close_to_one_plain_call(name: str) -> None:
    """Prefill and ragged decoding, against one uncached call per row."""
    from engine.model import RaggedModel

    target = tiny(name, dtype=torch.float32)
    ragged = RaggedModel(target, num_slots=3)
    texts = [(prompt * 16)[:16] for prompt in prompts()[1:4]]
    lengths = torch.tensor([12, 1, 7])
    tokens = torch.tensor(texts)
    ragged.cache.reserve(CONTEXT)
    ragged.prefill(tokens, [(0, n) for n in lengths.tolist()], slice(0, 3))
    width = 4
    window = tokens.gather(1, lengths[:, None] + torch.arange(width))
    logits = ragged.decode(window, lengths, torch.tensor([4, 2, 4]), slice(0, 3), 16)
    with torch.no_grad():
        plain = target(tokens).logits
    for row, (length, valid) in enumerate(zip(lengths.tolist(), (4, 2, 4), strict=True)):
        torch.testing.assert_close(logits[row, :valid], plain[row, length : length + valid], rtol=1e-4, atol=1e-4)
