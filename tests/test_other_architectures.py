"""Architectures that are known by their probe alone, and configs whose keys their models do not know."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny_models import WINDOW, greedy, random_prompts, tiny
from transformers import AutoConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

import engine
from engine.model import RaggedModel, uses_ragged_kernel
from engine.model_support import context_length, head_sizes

NEW = 12
LONG = list(range(3, 30))  # a prompt that is longer than a window
GROUPED: dict[str, Any] = dict(num_key_value_heads=2, head_dim=8)
MIXED = ["sliding_attention", "full_attention"] * 2
EXPERTS: dict[str, Any] = dict(num_experts=4, num_local_experts=4, num_experts_per_tok=2, moe_intermediate_size=16)
ROUTED: dict[str, Any] = dict(
    n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, n_group=1, topk_group=1
)
LATENT: dict[str, Any] = dict(  # multi-head latent attention, whose values are of another size than its keys
    num_key_value_heads=4, kv_lora_rank=16, q_lora_rank=24, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=6
)
CONFIGS: dict[str, dict[str, Any]] = {
    "afmoe": dict(**GROUPED, **EXPERTS, num_dense_layers=1, num_hidden_layers=4, sliding_window=WINDOW),
    "apertus": GROUPED,
    "cohere": GROUPED,
    "cohere2": dict(**GROUPED, sliding_window=WINDOW, num_hidden_layers=4),
    "deepseek_v3": dict(**LATENT, **ROUTED, first_k_dense_replace=1),
    "ernie4_5": GROUPED,
    "exaone4": dict(**GROUPED, sliding_window=WINDOW, num_hidden_layers=4, layer_types=MIXED),
    "gemma": GROUPED,
    "gemma4_text": dict(
        **GROUPED, sliding_window=WINDOW, num_hidden_layers=4, layer_types=MIXED, hidden_size_per_layer_input=8,
        vocab_size_per_layer_input=64, num_kv_shared_layers=2, enable_moe_block=False,
    ),
    "glm4": GROUPED,
    "glm4_moe": dict(**GROUPED, **ROUTED, n_shared_experts=1, first_k_dense_replace=1),
    "glm4_moe_lite": dict(**LATENT, **ROUTED, n_shared_experts=1, first_k_dense_replace=1),
    "granite": GROUPED,
    "granitemoehybrid": dict(  # without recurrent layers
        **GROUPED, num_local_experts=0, shared_intermediate_size=48, layer_types=["attention"] * 2,
        position_embedding_type="rope", mamba_n_heads=4, mamba_d_head=16,
    ),
    "hunyuan_v1_dense": GROUPED,
    "nemotron": GROUPED,
    "olmo3": dict(**GROUPED, sliding_window=WINDOW, num_hidden_layers=4, layer_types=MIXED),
    "phimoe": dict(**GROUPED, **EXPERTS, sliding_window=WINDOW),
    "qwen2_moe": dict(
        **GROUPED, **EXPERTS, shared_expert_intermediate_size=16, use_sliding_window=True, sliding_window=WINDOW,
        max_window_layers=1,
    ),
    "qwen3_moe": dict(**GROUPED, **EXPERTS),
    "seed_oss": GROUPED,
    "stablelm": GROUPED,
}  # fmt: skip


def model_of(name: str, **changes: Any) -> PreTrainedModel:
    if name not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        pytest.skip(f"this version of transformers has no {name}")
    model = tiny(name, **{**CONFIGS.get(name, {}), **changes})
    if getattr(model, "_can_set_experts_implementation", lambda: False)():
        model.set_experts_implementation("eager")  # grouped products know no float64
    return model


def texts(model: PreTrainedModel, **options: Any) -> list[list[int]]:
    """Of prompts of several lengths, the last longer than a window."""
    prompts = [*random_prompts(3, seed=2), LONG]
    outputs = engine.load(model, num_draft_tokens=3, **options).generate(
        prompts, engine.SamplingParams(max_new_tokens=NEW)
    )
    assert [output.token_ids for output in outputs] == [greedy(model, prompt, NEW) for prompt in prompts]
    return [output.token_ids for output in outputs]


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("name", CONFIGS)
def test_greedy_equals_transformers(name: str, exact: bool) -> None:
    found = texts(model_of(name), drafter="ngram", exact=exact)
    assert len({tuple(text) for text in found}) > 1


SEVERAL_HEAD_SIZES = ("deepseek_v3", "gemma4_text", "glm4_moe_lite")  # not for the ragged kernel


@pytest.mark.parametrize("name", SEVERAL_HEAD_SIZES)
def test_heads_of_several_sizes_are_found(name: str) -> None:
    assert len(head_sizes(model_of(name).config)) > 1


@pytest.mark.parametrize("name", [n for n in CONFIGS if n not in (*SEVERAL_HEAD_SIZES, "phimoe", "qwen2_moe")])
def test_with_the_attention_of_a_gpu(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ragged kernel's twin."""
    model = model_of(name)
    assert len(head_sizes(model.config)) == 1
    monkeypatch.setattr("engine.model.uses_ragged_kernel", lambda model: True)
    texts(model, drafter="ngram")


@pytest.mark.parametrize(
    ("name", "changes"), [("phimoe", {"sliding_window": None}), ("qwen2_moe", {"use_sliding_window": False})]
)
def test_a_window_that_only_the_mask_knows_keeps_the_mask(name: str, changes: dict[str, Any]) -> None:
    for more, fits in (({}, False), (changes, True)):
        model: Any = SimpleNamespace(
            config=model_of(name, **more).config, device=torch.device("cuda"), dtype=torch.bfloat16
        )
        assert uses_ragged_kernel(model) == fits


def test_a_mask_that_a_model_makes_itself_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """doge weighs keys by their values; the ragged kernel reads no mask, so that it must not serve such a model."""
    model: Any = model_of("doge", num_key_value_heads=2, keep_window_size=8)
    for layer in model.model.layers:
        layer.self_attn.A.data.fill_(0.3)
    texts(model, drafter="ngram")
    on_gpu: Any = SimpleNamespace(config=model.config, device=torch.device("cuda"), dtype=torch.bfloat16)
    assert not uses_ragged_kernel(on_gpu)
    monkeypatch.setattr("engine.model.uses_ragged_kernel", lambda model: True)
    with pytest.raises(engine.UnsupportedModelError, match="the model's attention builds its own mask"):
        engine.load(model)


@pytest.mark.parametrize("name", ["gemma4", "gemma4_text"])
def test_heads_of_several_sizes(name: str) -> None:
    if name not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        pytest.skip(f"this version of transformers has no {name}")
    model: Any = SimpleNamespace(config=AutoConfig.for_model(name), device=torch.device("cuda"), dtype=torch.bfloat16)
    assert len(head_sizes(model.config)) == 2 and not uses_ragged_kernel(model)


@pytest.mark.parametrize(
    ("name", "stray"),
    [
        ("llama", dict(sliding_window=WINDOW)),
        ("llama", dict(sliding_window=WINDOW, layer_types=MIXED[:2])),
        ("mistral", dict(use_sliding_window=False)),
        ("mistral", dict(layer_types=["sliding_attention"] * 2)),
        ("glm4", dict(sliding_window=WINDOW)),
    ],
)
def test_keys_that_an_architecture_does_not_know_count_for_nothing(name: str, stray: dict[str, Any]) -> None:
    """A config keeps whatever its file has; what counts is the model's forward."""
    model, prompt = model_of(name, **stray), LONG
    expected = list(prompt)
    with torch.no_grad():
        for _ in range(NEW):
            expected.append(int(model(torch.tensor([expected]), use_cache=False).logits[0, -1].argmax()))
    output = engine.load(model).generate(prompt, engine.SamplingParams(max_new_tokens=NEW))
    assert output.token_ids == expected[len(prompt) :]


def test_a_rotary_embedding_that_changes_with_length_in_layers_of_one_type() -> None:
    length = 24
    longrope = dict(
        rope_type="longrope", rope_theta=1e4, short_factor=[1.0] * 4, long_factor=[8.0] * 4,
        factor=2.0, original_max_position_embeddings=length,
    )  # fmt: skip
    plain = dict(rope_type="default", rope_theta=1e4)
    model = tiny("gemma3_text", rope_parameters={"full_attention": longrope, "sliding_attention": plain})
    llm = engine.load(model)
    assert llm.max_length == length
    prompts = [[5] * 3, LONG[: length - 4], LONG[:9]]
    outputs = llm.generate(prompts, engine.SamplingParams(max_new_tokens=8))
    for prompt, output in zip(prompts, outputs, strict=True):
        assert output.token_ids == greedy(model, prompt, min(8, length - len(prompt)))


def test_attention_to_later_tokens_is_refused() -> None:
    with pytest.raises(engine.UnsupportedModelError, match="use_bidirectional_attention"):
        engine.load(tiny("gemma3_text", use_bidirectional_attention=True))


def test_a_window_that_is_counted_from_the_last_key_is_refused() -> None:
    """By its config: gpt_neo's window of 256 is wider than the probe's keys, so that the probe does not see it."""
    sizes = dict(num_layers=2, num_heads=4, attention_types=[[["global", "local"], 1]], max_position_embeddings=512)
    with pytest.raises(engine.UnsupportedModelError, match="target of type 'gpt_neo' has local attention"):
        engine.load(tiny("gpt_neo", **sizes))


@pytest.mark.parametrize(
    "original", [12, 48]
)  # as in the cards of Qwen3 (less than max_position_embeddings) and Qwen2.5
def test_yarn_stretches_the_context(original: int) -> None:
    rope = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=original, rope_theta=1e4)
    llm = engine.load(tiny("qwen3", max_position_embeddings=min(original + 4, 48), rope_parameters=rope), drafter=None)
    assert llm.max_length == 4 * original


def test_linear_scaling_stretches_the_context() -> None:
    """Vicuna's 16k and others keep the length of before in their config; gemma3 scales the positions of some layers only."""
    rope = dict(rope_type="linear", factor=4.0, rope_theta=1e4)
    assert engine.load(tiny("llama", rope_parameters=rope, max_position_embeddings=48), drafter=None).max_length == 192
    usual = dict(rope_type="default", rope_theta=1e4)
    both = dict(full_attention=rope | {"factor": 8.0}, sliding_attention=usual)
    config = tiny("gemma3_text", rope_parameters=both, max_position_embeddings=48).config
    assert context_length(config) == 48


def test_a_window_that_a_model_has_and_does_not_heed_is_found() -> None:
    """However wide it is."""
    with pytest.raises(engine.UnsupportedModelError, match="'moshi' gives other logits over a ragged cache"):
        engine.load(model_of("moshi", sliding_window=40))


def test_a_window_that_only_the_mask_knows_is_found_where_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.model.uses_ragged_kernel", lambda model: True)
    with pytest.raises(engine.UnsupportedModelError, match="'phimoe' gives other logits over a ragged cache"):
        engine.load(model_of("phimoe"))


def test_windows_are_as_before_after_the_probe() -> None:
    model = model_of("exaone4")
    target = RaggedModel(model, num_slots=1)
    assert target.windows == {"full_attention": None, "sliding_attention": WINDOW}
    assert [each.sliding_window for each in (model.config, *(layer.self_attn for layer in model.model.layers))] == [
        WINDOW
    ] * 5


@pytest.mark.parametrize("pad", [0, 1])
def test_positions_that_leave_out_padding_are_found(pad: int) -> None:
    """As roberta counts them, whatever token is the padding."""
    with pytest.raises(engine.UnsupportedModelError, match="'roberta' gives other logits over a ragged cache"):
        engine.load(model_of("roberta", is_decoder=True, pad_token_id=pad))


def test_a_model_that_wants_more_than_text_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of("glm4")
    monkeypatch.setattr(model.model, "norm", torch.nn.Identity())
    model.model.norm.register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(engine.UnsupportedModelError, match="'glm4' cannot be called with text alone: division by zero"):
        engine.load(model)


def test_a_probe_that_gives_nan_is_refused() -> None:
    model = model_of("glm4")

    def spoil(module: torch.nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        if kwargs["use_cache"]:
            output.logits.mul_(torch.nan)

    model.register_forward_hook(spoil, with_kwargs=True)
    with pytest.raises(engine.UnsupportedModelError, match="gives other logits"):
        engine.load(model)
