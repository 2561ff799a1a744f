"""A target that torch.compile has compiled: the same text, few graphs, none of them later than at loading."""

import copy
import os
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import CONFIGS, EAGER_ONLY, GROUPED_EXPERTS, perturbed, random_prompts, tiny
from torch import nn
from torch._dynamo.utils import counters
from torch.nn.modules import module as torch_modules
from transformers import PreTrainedModel

import engine
from engine import compiled
from engine.model import RaggedModel
from engine.packing import PackedLinear, pack_linears

pytestmark = pytest.mark.skipif(
    shutil.which(os.environ.get("CXX", "g++")) is None, reason="torch.compile needs a C++ compiler on a CPU"
)
PARAMS = [engine.SamplingParams(max_new_tokens=count, ignore_eos=True) for count in (12, 3, 9, 12, 7)]
PROMPTS = random_prompts(5)
SLOW = pytest.mark.slow


@pytest.fixture(autouse=True)
def nothing_compiled_before() -> None:
    torch._dynamo.reset()
    counters.clear()


def texts(llm: engine.Engine) -> list[list[int]]:
    return [output.token_ids for output in llm.generate(PROMPTS, PARAMS)]


def number_of_graphs() -> int:
    return int(counters["stats"]["unique_graphs"])


@pytest.mark.parametrize(
    "name",
    [
        name if name in ("llama", "gemma3_text") else pytest.param(name, marks=SLOW)
        for name in CONFIGS
        if name not in ("falcon", "mixtral", *EAGER_ONLY)
    ],
)
def test_the_same_text_from_two_graphs(name: str) -> None:
    """gemma3 has two kinds of masks. float64 leaves no room for rounding to part the texts."""
    target = tiny(name)
    expected = texts(engine.load(target, drafter=None))
    llm = engine.load(target, drafter=perturbed(target, 0.02), num_draft_tokens=3, max_batch_size=3, compile=True)
    assert number_of_graphs() == 2
    llm.warmup()
    assert texts(llm) == expected
    assert llm.stats.acceptance_rate > 0.2
    assert number_of_graphs() == 2 and not counters["graph_break"]  # whatever the rows, their widths and lengths


@SLOW
def test_a_model_that_cannot_be_one_graph() -> None:
    """Mixtral picks experts by looking at values."""
    target = tiny("mixtral", dtype=torch.float32)
    assert texts(engine.load(target, drafter=None, compile=True)) == texts(engine.load(target, drafter=None))


@torch.inference_mode()  # as rounds are run
def test_packed_layers_and_hidden_states() -> None:
    """Both as they are without compiling, beside the numbered products of another model."""
    other, model = tiny(seed=1, dtype=torch.float32), tiny(dtype=torch.float32)
    if not pack_linears(model):
        pytest.skip("this processor has no layout for packed layers")
    pack_linears(other)
    tokens, start, num_valid = torch.tensor([[5, 6, 7], [8, 9, 3]]), torch.tensor([4, 2]), torch.tensor([3, 2])
    found = []
    for compile in (False, True):
        ragged = RaggedModel(model, 2, compile=compile)
        hidden = ragged.keep_hidden_states([1, 2])
        ragged.cache.reserve(8)
        if compile:
            compiled.compile_now(ragged)
        ragged.prefill(torch.arange(8).view(2, 4), [(0, 4), (0, 2)], slice(0, 2))
        logits = ragged.decode(tokens, start, num_valid, slice(0, 2), 7)
        states = hidden.gather(slice(0, 2), torch.arange(4).expand(2, 4))
        found.append((logits[0], logits[1, :2], states, ragged.cache.layers[1].keys[0, :, :7]))
    for plain, now in zip(*found, strict=True):
        torch.testing.assert_close(now, plain, rtol=1e-4, atol=1e-4)
    assert number_of_graphs() == 2


def test_models_of_a_class_do_not_use_up_each_others_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.compile makes eight of one function, and then goes on without; the products of each model have numbers of their own."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    for count in range(1, 7):
        model = tiny(dtype=torch.float32, num_hidden_layers=1)
        if not pack_linears(model):
            pytest.skip("this processor has no layout for packed layers")
        engine.load(model, drafter=None, compile=True)
        assert number_of_graphs() == 2 * count


def test_exact_text_does_not_depend_on_the_drafter() -> None:
    target = tiny(dtype=torch.bfloat16)
    drafter = perturbed(target, 0.05)
    settings: dict[str, Any] = dict(exact=True, max_batch_size=2, compile=True)
    plain, *others = [
        texts(engine.load(target, drafter=each, num_draft_tokens=k, **settings))
        for each, k in ((None, 0), ("ngram", 3), (drafter, "auto"))
    ]
    assert all(other == plain for other in others)
    assert number_of_graphs() == 1


def test_where_torch_gives_up_on_a_call() -> None:
    """As it does after so many recompilations: the model then runs as it is, with masks that are numbers."""
    target = tiny("gemma3_text")
    expected = texts(engine.load(target, drafter=None))
    llm = engine.load(target, drafter="ngram", compile=True)
    with torch.compiler.set_stance("force_eager"):
        assert texts(llm) == expected


def test_hooks_of_the_model_run() -> None:
    target, calls = tiny(), []
    llm = engine.load(target, drafter=None, compile=True)
    with target.register_forward_hook(lambda *_: calls.append(1)):
        llm.generate(PROMPTS[1], PARAMS[0])
    assert len(calls) == PARAMS[0].max_new_tokens
    assert "forward" not in vars(target)


@pytest.mark.parametrize("name", ["falcon", *EAGER_ONLY])
def test_attention_of_their_own_is_refused(name: str) -> None:
    target = tiny(name, dtype=torch.float32 if name in GROUPED_EXPERTS else torch.float64)
    if name in EAGER_ONLY:
        target.set_attn_implementation("eager")  # older transformers take sdpa for gemma2
    with pytest.raises(engine.UnsupportedModelError, match=f"compile=True needs .*got '{name}'"):
        engine.load(target, compile=True)


def test_what_another_thread_compiles_is_not_this_ones_affair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch says of the whole process that it is compiling. Attention, cache, packed and fused layers would take it to heart."""
    target = tiny("llama", dtype=torch.float32)
    target.save_pretrained(tmp_path)
    expected = texts(engine.load(target, drafter=None))
    engines = [engine.load(source, drafter="ngram") for source in (target, tmp_path)]
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert [texts(llm) for llm in engines] == [expected, expected]


@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("place", ["layer", "attention", "all modules"])
def test_hooks_that_come_later_are_run(place: str, before: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch does not look for those of modules within; a graph would go on without them, while prompts are read with them."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))  # graphs are what matters
    target = tiny(dtype=torch.float32)
    llm = engine.load(target, drafter=None, compile=True)
    unhooked, called = texts(llm), []

    def half(value: Any) -> Any:
        return value * 0.5 if isinstance(value, torch.Tensor) and value.is_floating_point() else value

    def halve(module: nn.Module, args: Any, output: Any = None) -> Any:
        called.append(1)
        return tuple(map(half, args)) if before else half(output)

    name = "register_forward_pre_hook" if before else "register_forward_hook"
    hooked = {"layer": target.model.layers[1].mlp, "attention": target.model.layers[0].self_attn.v_proj}.get(place)
    register = (
        getattr(hooked, name)
        if hooked is not None
        else getattr(torch_modules, name.replace("register_", "register_module_"))
    )
    hook = register(halve)
    try:
        found, seen = texts(llm), len(called)
        assert found == texts(engine.load(target, drafter=None)) and seen > 12
    finally:
        hook.remove()
    assert texts(llm) == unhooked


def test_torch_that_is_told_not_to_compile() -> None:
    with (
        torch._dynamo.config.patch(disable=True),
        pytest.raises(engine.EngineError, match=r"could not be compiled: torch\._dynamo\.config\.disable"),
    ):
        engine.load(tiny(), drafter=None, compile=True)


def test_a_low_limit_of_graphs_that_others_have_set() -> None:
    with torch._dynamo.config.patch(recompile_limit=1):
        engine.load(tiny(), drafter=None, compile=True)
    assert number_of_graphs() == 2


def test_without_a_compiler_where_others_suppress_errors(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with torch._dynamo.config.patch(suppress_errors=True):
        test_without_a_compiler(monkeypatch, tmp_path)


def test_without_a_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    with (
        torch._inductor.config.patch({"cpp.cxx": ("no-such-compiler",)}),
        pytest.raises(engine.EngineError, match=r"could not be compiled, which takes a C\+\+ compiler"),
    ):
        engine.load(tiny(hidden_size=48), drafter=None, compile=True)


def test_other_logits_than_before_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(self: compiled.CompiledForward, **arguments: Any) -> Any:
        output = self._model.base_model.get_input_embeddings()(arguments["input_ids"])
        return type("Output", (), {"logits": self._model.lm_head(output)})

    monkeypatch.setattr(compiled.CompiledForward, "__call__", wrong)
    model: PreTrainedModel = tiny()
    with pytest.raises(
        engine.UnsupportedModelError, match="of type 'llama': the compiled model gives different logits"
    ):
        engine.load(model, drafter=None, compile=True)


def test_a_copied_product_gets_a_number_of_its_own() -> None:
    """Or a graph would find the one that it was copied from."""
    model = tiny(dtype=torch.float32)
    if not pack_linears(model):
        pytest.skip("this processor has no layout for packed layers")
    product = next(module for module in model.modules() if isinstance(module, PackedLinear)).product
    number, copied = product._number, copy.copy(product)
    assert product._number == number != copied._number


@pytest.mark.parametrize("part", ["", "model.layers.1", "model.layers.0.self_attn"])
@pytest.mark.parametrize("way", ["forward", "compile"])
def test_a_target_that_others_have_compiled_is_refused(part: str, way: str) -> None:
    target = tiny(dtype=torch.float32)
    llm = engine.load(target)
    module: Any = target.get_submodule(part)
    if way == "forward":
        module.forward = torch.compile(module.forward, backend="eager")
    else:
        module.compile(backend="eager")
    message = f"target must not have compiled attention modules, got {part or 'LlamaForCausalLM'} compiled"
    with pytest.raises(engine.UnsupportedModelError, match=message):
        engine.load(target)
    with pytest.raises(engine.EngineError, match=message):
        llm.generate([5, 6, 7], PARAMS[0])


def test_what_others_have_kept_from_being_compiled_is_used() -> None:
    target = tiny(dtype=torch.float32)
    expected = texts(engine.load(target))
    layer = target.model.layers[1]
    layer.forward = torch.compiler.disable(layer.forward)
    assert texts(engine.load(target)) == expected


def test_what_others_have_compiled_beside_attention_is_used() -> None:
    target = tiny("gpt2", dtype=torch.float32)
    expected = texts(engine.load(target, drafter=None))
    pack_linears(target)
    other = copy.deepcopy(target).double()  # whose products must not be found in place of the target's, nor those here
    for model in (target, other):
        model.transformer.h[1].mlp.compile(backend="eager")
        assert texts(engine.load(model, drafter="ngram")) == expected
    assert number_of_graphs() >= 2


def test_a_forward_of_the_models_own_stays_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a call fails."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    for has_own in (False, True):
        target: Any = tiny(dtype=torch.float32)
        forward = target.forward

        def own(*args: Any, _forward: Any = forward, **kwargs: Any) -> Any:
            return _forward(*args, **kwargs)

        if has_own:
            target.forward = own
        expected = {"forward": own} if has_own else {}
        llm = engine.load(target, drafter=None, compile=True)
        llm.generate(PROMPTS[1], PARAMS[0])

        def kept(_target: Any = target) -> dict[str, Any]:
            return {name: value for name, value in vars(_target).items() if name == "forward"}

        assert kept() == expected

        def fail(*_: Any) -> None:
            raise ZeroDivisionError

        with target.register_forward_hook(fail), pytest.raises(ZeroDivisionError):
            llm.generate(PROMPTS[1], PARAMS[0])
        assert kept() == expected


@pytest.mark.parametrize("error", [MemoryError, torch.OutOfMemoryError])
def test_too_little_memory_is_no_model_that_cannot_be_compiled(
    monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    def fail(self: compiled.CompiledForward, **arguments: Any) -> Any:
        raise error

    monkeypatch.setattr(compiled.CompiledForward, "__call__", fail)
    with pytest.raises(error):
        engine.load(tiny(), drafter=None, compile=True)


def test_logits_of_a_compiled_model_that_are_nan_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(self: compiled.CompiledForward, **arguments: Any) -> Any:
        output = self._model(**arguments)
        output.logits = output.logits * torch.nan
        return output

    monkeypatch.setattr(compiled.CompiledForward, "__call__", wrong)
    model: PreTrainedModel = tiny()
    with pytest.raises(engine.UnsupportedModelError, match="the compiled model gives different logits"):
        engine.load(model, drafter=None, compile=True)


def test_a_model_that_is_loaded_again_is_not_compiled_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))  # graphs are what matters
    model = tiny(dtype=torch.float32, num_hidden_layers=1)
    for _ in range(3):
        engine.load(model, drafter=None, compile=True)
        assert number_of_graphs() == 2
