"""Fused decoder layers: the results of the modules they consist of, in our own calls alone."""

import copy
import logging
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import greedy, random_prompts, tiny
from torch import Tensor
from transformers.models.llama.modeling_llama import LlamaRMSNorm

import engine
from engine import fused_layers
from engine.cpu_layers import CpuLayerParts, fuse_cpu_layers, rms_norm
from engine.model import RaggedModel
from engine.packing import pack_linears

CHANGES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {},  # with a window
    "qwen2": {},  # with biases
    "qwen3": {},  # with norms of queries and keys
    "smollm3": dict(no_rope_layers=[1, 0]),
}


def fused(model: Any) -> list[Any]:
    return [module for module in model.modules() if type(module).__name__.startswith("Fused")]


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Gets the number of columns whenever a layer runs fused."""
    made: list[int] = []
    attention = CpuLayerParts.attention

    def counted(self: CpuLayerParts, normed: Tensor, *others: Any) -> Tensor:
        made.append(normed.shape[1])
        return attention(self, normed, *others)

    monkeypatch.setattr(CpuLayerParts, "attention", counted)
    return made


def loaded(folder: Path, name: str = "llama", **options: Any) -> engine.Engine:
    tiny(name, dtype=torch.float32, **CHANGES[name]).save_pretrained(folder)
    return engine.load(str(folder), device="cpu", **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(1, 1, 576), (2, 7, 32), (1, 3, 4, 8)])
@pytest.mark.parametrize("size", [1e-4, 1.0, 1e3])
def test_a_norm_is_that_of_llama(dtype: torch.dtype, shape: tuple[int, ...], size: float) -> None:
    torch.manual_seed(0)
    norm = LlamaRMSNorm(shape[-1], eps=1e-6).to(dtype)
    with torch.no_grad():
        norm.weight.copy_(torch.rand(shape[-1]) + 0.5)
        x = ((torch.randn(shape) + 0.3) * size).to(dtype)
        # A result is about 1; what the sums in float32 differ by is a part of that, however small an element is.
        torch.testing.assert_close(rms_norm(x, norm.weight, 1e-6), norm(x), rtol=2 * torch.finfo(dtype).eps, atol=1e-6)
        x[(0,) * (len(shape) - 1)] = torch.nan
        assert rms_norm(x, norm.weight, 1e-6).isnan().equal(norm(x).isnan())


@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.parametrize("drafter", [None, "ngram"])
def test_a_loaded_checkpoint_is_fused_and_says_the_same(
    name: str, drafter: str | None, tmp_path: Path, runs: list[int]
) -> None:
    llm = loaded(tmp_path, name, drafter=drafter)
    assert len(fused(llm.target_model)) == 2
    prompts = random_prompts(6)
    outputs = llm.generate(prompts, engine.SamplingParams(max_new_tokens=12))
    plain = tiny(name, dtype=torch.float32, **CHANGES[name])
    assert [o.token_ids for o in outputs] == [greedy(plain, prompt, 12) for prompt in prompts]
    assert runs


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.parametrize("width", [1, 5, 300])
def test_logits_differ_by_rounding_from_those_of_the_modules(
    name: str, dtype: torch.dtype, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny(name, dtype=dtype, max_position_embeddings=512, **CHANGES[name])
    if not pack_linears(model):
        pytest.skip(f"no packed layout for {dtype}")
    assert fuse_cpu_layers(model) == 2
    ragged = RaggedModel(model, num_slots=2)
    ragged.cache.reserve(320)
    texts = torch.randint(3, 60, (2, 10 + width), generator=torch.Generator().manual_seed(0))
    logits = []
    for touched in (False, True):  # then the modules themselves run
        monkeypatch.setattr(CpuLayerParts, "touched", lambda self, touched=touched: touched)
        ragged.prefill(texts, [(0, 10), (0, 4)], slice(0, 2))
        start, valid = torch.tensor([10, 4]), torch.tensor([width, max(width - 2, 1)])
        tokens = torch.stack([texts[0, 10 : 10 + width], texts[1, 4 : 4 + width]])
        found = ragged.decode(tokens, start, valid, slice(0, 2), 10 + width).float()
        logits.append(torch.cat([row[:count] for row, count in zip(found, valid, strict=True)]))
    difference, scale = (logits[0] - logits[1]).norm(), logits[1].norm()
    assert difference <= (1e-5 if dtype == torch.float32 else 0.03) * scale


def test_calls_of_others_run_the_modules(tmp_path: Path, runs: list[int]) -> None:
    llm = loaded(tmp_path)
    tokens = torch.tensor([random_prompts(1)[0]])
    with torch.no_grad():
        logits = llm.target_model(input_ids=tokens).logits
        assert not runs
        torch.testing.assert_close(
            logits, tiny("llama", dtype=torch.float32)(input_ids=tokens).logits, rtol=1e-4, atol=1e-4
        )
        greedily = llm.target_model.generate(tokens, max_new_tokens=8, do_sample=False)
    assert not runs
    assert (
        llm.generate(tokens[0].tolist(), engine.SamplingParams(max_new_tokens=8)).token_ids
        == greedily[0, tokens.shape[1] :].tolist()
    )
    assert runs


def test_a_layer_can_be_called_by_position(tmp_path: Path, runs: list[int]) -> None:
    fused = loaded(tmp_path).target_model.model.layers[0]
    own = tiny("llama", dtype=torch.float32).model
    hidden, places = torch.randn(1, 3, 32), torch.arange(3)[None]
    with torch.no_grad():
        given = (hidden, None, places, None, False, own.rotary_emb(hidden, places))
        torch.testing.assert_close(fused(*given), own.layers[0](*given), rtol=1e-4, atol=1e-4)
    assert not runs


@pytest.mark.parametrize(
    "inside", ["self_attn", "self_attn.q_proj", "mlp", "mlp.up_proj", "mlp.act_fn", "input_layernorm"]
)
@pytest.mark.parametrize("before", [True, False])
def test_a_hook_inside_a_layer_is_called(inside: str, before: bool, tmp_path: Path, runs: list[int]) -> None:
    llm = loaded(tmp_path)
    prompt, params = random_prompts(1)[0], engine.SamplingParams(max_new_tokens=6)
    expected = llm.generate(prompt, params).token_ids
    seen: list[Any] = []
    module = llm.target_model.model.layers[1].get_submodule(inside)
    if before:
        handle = module.register_forward_pre_hook(lambda module, args: seen.append(args))
    else:
        handle = module.register_forward_hook(lambda module, args, output: seen.append(output))
    assert llm.generate(prompt, params).token_ids == expected
    handle.remove()
    count, fused_runs = len(seen), len(runs)
    assert count
    llm.generate(prompt, params)
    assert len(seen) == count and len(runs) > fused_runs


def test_a_hook_of_all_modules_is_called(tmp_path: Path, runs: list[int]) -> None:
    llm = loaded(tmp_path)
    prompt, params = random_prompts(1)[0], engine.SamplingParams(max_new_tokens=6)
    expected = llm.generate(prompt, params).token_ids
    seen: list[str] = []
    handle = torch.nn.modules.module.register_module_forward_hook(lambda module, *_: seen.append(type(module).__name__))
    fused_runs = len(runs)
    try:
        assert llm.generate(prompt, params).token_ids == expected
    finally:
        handle.remove()
    assert "LlamaMLP" in seen and len(runs) == fused_runs
    llm.generate(prompt, params)
    assert len(runs) > fused_runs


def test_layers_are_checked_in_the_dtype_that_they_work_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def checked(*_: Any) -> None:
        assert not torch.is_autocast_enabled("cpu")

    monkeypatch.setattr(fused_layers, "_check", checked)
    with torch.autocast("cpu", torch.bfloat16):
        llm = loaded(tmp_path)
    assert type(llm.target_model.model.layers[0]).__name__ == "FusedLlamaDecoderLayer"


@pytest.mark.parametrize("inside", ["self_attn", "self_attn.v_proj", "mlp", "mlp.act_fn", "input_layernorm"])
def test_another_forward_of_a_module_is_called(inside: str, tmp_path: Path, runs: list[int]) -> None:
    def negated(own: Any) -> Any:
        def forward(*args: Any, **kwargs: Any) -> Any:
            output = own(*args, **kwargs)
            return (-output[0], None) if isinstance(output, tuple) else -output

        return forward

    llm = loaded(tmp_path)
    changed = tiny("llama", dtype=torch.float32)
    for model in (llm.target_model, changed):
        module: Any = model.model.layers[1].get_submodule(inside)
        module.forward = negated(module.forward)
    prompts, params = random_prompts(4), engine.SamplingParams(max_new_tokens=12)
    assert [o.token_ids for o in llm.generate(prompts, params)] == [greedy(changed, prompt, 12) for prompt in prompts]
    del llm.target_model.model.layers[1].get_submodule(inside).forward
    runs.clear()
    outputs = llm.generate(prompts, params)
    plain = tiny("llama", dtype=torch.float32)
    assert [o.token_ids for o in outputs] == [greedy(plain, prompt, 12) for prompt in prompts]
    assert len(runs) % 2 == 0 and runs  # both layers again


@pytest.mark.parametrize("inside", ["self_attn", "self_attn.k_proj", "mlp", "mlp.act_fn", "post_attention_layernorm"])
def test_a_module_that_has_been_replaced_is_used(inside: str, tmp_path: Path) -> None:
    class Zeros(torch.nn.Module):
        def __init__(self, own: Any) -> None:
            super().__init__()
            self.own = own

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            output = self.own(*args, **kwargs)
            return (torch.zeros_like(output[0]), None) if isinstance(output, tuple) else torch.zeros_like(output)

    llm = loaded(tmp_path)
    changed = tiny("llama", dtype=torch.float32)
    for model in (llm.target_model, changed):
        layer = model.model.layers[1]
        layer.set_submodule(inside, Zeros(layer.get_submodule(inside)))
    prompts, params = random_prompts(4), engine.SamplingParams(max_new_tokens=12)
    assert [o.token_ids for o in llm.generate(prompts, params)] == [greedy(changed, prompt, 12) for prompt in prompts]


def test_another_weight_of_a_norm_is_used(tmp_path: Path, runs: list[int]) -> None:
    llm = loaded(tmp_path)
    changed = tiny("llama", dtype=torch.float32)
    for model in (llm.target_model, changed):
        model.model.layers[0].input_layernorm.weight = torch.nn.Parameter(torch.linspace(-1, 2, 32))
    prompts, params = random_prompts(4), engine.SamplingParams(max_new_tokens=12)
    assert [o.token_ids for o in llm.generate(prompts, params)] == [greedy(changed, prompt, 12) for prompt in prompts]
    assert runs


def test_another_scale_of_attention_is_used(tmp_path: Path, runs: list[int]) -> None:
    llm, prompt = loaded(tmp_path), random_prompts(1)[0]
    before = llm.generate(prompt, engine.SamplingParams(max_new_tokens=12)).token_ids
    for layer in llm.target_model.model.layers:
        layer.self_attn.scaling = 3.0
    runs.clear()
    after = llm.generate(prompt, engine.SamplingParams(max_new_tokens=12)).token_ids
    assert runs and after == greedy(llm.target_model, prompt, 12) != before


def test_hidden_states_are_those_of_fused_layers(tmp_path: Path, runs: list[int]) -> None:
    llm = loaded(tmp_path, drafter=None)
    hidden = llm._target.keep_hidden_states([0, 1, 2])
    text = random_prompts(1)[0]
    text += llm.generate(text, engine.SamplingParams(max_new_tokens=6)).token_ids
    assert llm.target_model.model.layers[0].self_attn._forward_hooks  # of transformers, which do not stand in the way
    assert len(runs) >= 2 * 5
    with torch.no_grad():
        plain = tiny("llama", dtype=torch.float32)(input_ids=torch.tensor([text[:-1]]), output_hidden_states=True)
    expected = torch.cat(plain.hidden_states, dim=-1)[0]
    torch.testing.assert_close(hidden.states[0, : len(expected)], expected, rtol=1e-4, atol=1e-4)


def test_a_layer_that_gives_something_else_is_left_as_it_is(caplog: pytest.LogCaptureFixture) -> None:
    def model(change: Any) -> Any:
        made = tiny("llama", dtype=torch.float32)
        change(made.model.layers[0])
        pack_linears(made)
        return made

    def scaled(module: Any) -> Any:
        own = module.forward
        return lambda *args, **kwargs: 1.1 * own(*args, **kwargs)

    def change_norm(layer: Any) -> None:
        layer.post_attention_layernorm.forward = scaled(layer.post_attention_layernorm)

    def change_scaling(layer: Any) -> None:
        own = layer.self_attn.forward
        layer.self_attn.forward = lambda *args, **kwargs: (1.1 * own(*args, **kwargs)[0], None)

    def change_layer(layer: Any) -> None:
        layer.forward = scaled(layer)

    def change_signature(layer: Any) -> None:
        own = layer.mlp.forward
        layer.mlp.forward = lambda x, more: own(x)

    def change_attention(layer: Any) -> None:
        layer.self_attn.config._attn_implementation = "eager"

    for change, reason in (
        (change_norm, "fused, it gives something else"),
        (change_scaling, "fused, it gives something else"),
        (change_layer, "fused, it gives something else"),
        (change_signature, ""),
        (change_attention, "its attention is 'eager'"),
    ):
        caplog.clear()
        with caplog.at_level(logging.INFO, "engine.fused_layers"):
            assert fuse_cpu_layers(model(change)) == 0
        assert f"LlamaDecoderLayer is not fused: {reason}" in caplog.text
    assert fuse_cpu_layers(model(lambda layer: None)) == 2
    unchanged = model(lambda layer: None)
    with torch.device("meta"):  # as a program may by torch.set_default_device
        assert fuse_cpu_layers(unchanged) == 2
    assert fuse_cpu_layers(tiny("llama", dtype=torch.float32)) == 0  # not packed
    assert fuse_cpu_layers(tiny("gpt2", dtype=torch.float32)) == 0


def test_a_live_model_is_left_as_it_is() -> None:
    model = tiny("llama", dtype=torch.float32)
    engine.load(model)
    assert not fused(model)


def test_a_copy_has_parts_of_its_own() -> None:
    model = tiny("llama", dtype=torch.float32)
    pack_linears(model)
    fuse_cpu_layers(model)
    other = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    for layer in other.model.layers:
        assert layer.parts.self_attn is layer.self_attn
        assert layer.parts.before_mlp.weight is layer.post_attention_layernorm.weight
        assert not layer.parts.touched()
        assert layer.parts.attention_hooks is layer.self_attn._forward_hooks
        assert layer.parts.gates is layer.mlp.up_proj.product
    assert not fused_layers.usable_parts(other.model.layers[0], None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("way", ["copied", "pickled"])
def test_a_packed_and_fused_model_can_be_copied_and_pickled(way: str, dtype: torch.dtype) -> None:
    model = tiny("qwen2", dtype=dtype)
    if not pack_linears(model):
        pytest.skip(f"no packed layout for {dtype}")
    fuse_cpu_layers(model)
    other = copy.deepcopy(model) if way == "copied" else pickle.loads(pickle.dumps(model))
    assert type(other.model.layers[0]) is type(model.model.layers[0]) and not other.model.layers[0].parts.touched()
    expected = model.state_dict()
    for key, value in other.state_dict().items():
        assert value.equal(expected[key]), key
    prompts, params = random_prompts(3), engine.SamplingParams(max_new_tokens=6)
    texts = [[o.token_ids for o in engine.load(each).generate(prompts, params)] for each in (model, other)]
    assert texts[0] == texts[1]
