"""Models that take images, too, of which the text side is served."""

from pathlib import Path
from typing import Any

import pytest
import tiny_tokenizer
import torch
from pretend_cuda import pretended
from random_heads import random_head
from tiny_models import CONTEXT, VOCAB, WINDOW, greedy, perturbed, random_prompts, tiny
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

import engine
from engine.decoder_layers import DecoderLayers
from engine.pretrained import auto_class
from engine.training.eagle3 import Eagle3Training
from engine.training.objectives import DraftModelTraining

NEW = 10
PROMPTS = [*random_prompts(3, seed=2), list(range(3, 30))]  # the last is longer than a window
TEXT: dict[str, Any] = dict(
    vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
    intermediate_size=48, max_position_embeddings=CONTEXT, bos_token_id=1, eos_token_id=None, pad_token_id=0,
)  # fmt: skip
VISION: dict[str, Any] = dict(  # by the names of all of them
    hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, image_size=28, patch_size=14,
    depth=2, num_heads=4, embed_dim=32, out_hidden_size=32,
)  # fmt: skip
MIXED = dict(num_hidden_layers=4, layer_types=["sliding_attention", "full_attention"] * 2, sliding_window=WINDOW)
# Rotary embeddings of three dimensions, in all of which a text has the same positions.
IN_THREE = dict(rope_parameters=dict(rope_type="default", rope_theta=1e4, mrope_section=[1, 1, 2]))
CONFIGS: dict[str, dict[str, Any]] = {
    "gemma3": MIXED,
    "internvl": {},
    "llava": {},
    "mistral3": {},
    "qwen2_5_vl": IN_THREE,
    "qwen3_vl": IN_THREE,
    "smolvlm": {},
}


def model_of(name: str, **changes: Any) -> PreTrainedModel:
    usual = AutoConfig.for_model(name)
    text = {"model_type": usual.get_text_config().model_type, **TEXT, **CONFIGS.get(name, {}), **changes}
    vision = {"model_type": usual.vision_config.model_type, **VISION}
    config = AutoConfig.for_model(name, text_config=text, vision_config=vision)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model: PreTrainedModel = auto_class(config).from_config(config).double().eval()
        for parameter in model.parameters():
            if parameter.dim() > 1:
                torch.nn.init.normal_(parameter, std=0.35)
    return model


def texts(target: Any, **options: Any) -> list[list[int]]:
    llm = engine.load(target, num_draft_tokens=3, **options)
    outputs = llm.generate(PROMPTS, engine.SamplingParams(max_new_tokens=NEW))
    assert llm.stats.draft_tokens > 0
    return [output.token_ids for output in outputs]


def transformers_texts(model: PreTrainedModel) -> list[list[int]]:
    found = [greedy(model, prompt, NEW) for prompt in PROMPTS]
    assert len({tuple(text) for text in found}) > 1
    return found


@pytest.mark.parametrize("name", CONFIGS)
def test_greedy_equals_transformers(name: str, tmp_path: Path) -> None:
    model = model_of(name)
    expected = transformers_texts(model)
    assert texts(model, drafter="ngram") == texts(model, drafter="ngram", exact=True) == expected
    model.save_pretrained(tmp_path)
    folder = str(tmp_path)
    assert texts(folder, drafter="ngram", dtype="float64") == expected
    by_lookup, by_itself = (texts(folder, drafter=d, exact=True, dtype="bfloat16") for d in ("ngram", folder))
    assert by_lookup == by_itself  # with packed weights


@pytest.mark.parametrize("name", ["gemma3", "mistral3", "qwen3_vl"])
def test_with_the_attention_of_a_gpu(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ragged kernel's twin."""
    model = model_of(name)
    monkeypatch.setattr("engine.model.uses_ragged_kernel", lambda model: True)
    assert texts(model, drafter="ngram") == transformers_texts(model)


@pytest.mark.parametrize("name", ["internvl", "qwen3_vl"])
def test_drafters_find_the_layers_of_the_text_side(name: str) -> None:
    """Their images' side has as many."""
    model = model_of(name)
    expected = transformers_texts(model)
    assert texts(model, drafter="layer_skip:1") == expected
    draft = tiny("llama")
    assert texts(model, drafter=draft) == texts(model, drafter=perturbed(model, 0.1)) == expected


@pytest.mark.parametrize("kind", ["medusa", "eagle3"])
def test_heads_read_the_hidden_states_of_the_text_side(kind: str, tmp_path: Path) -> None:
    model = model_of("mistral3", num_hidden_layers=8)
    assert texts(model, drafter=random_head(kind, tmp_path)) == transformers_texts(model)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a real one")
@pytest.mark.parametrize("name", ["gemma3", "llava", "qwen2_5_vl"])
def test_on_a_simulated_gpu(name: str) -> None:
    model = model_of(name).float()
    expected = texts(model, drafter="ngram")
    with pretended() as device:
        llm = engine.load(model.to("cuda"), drafter="ngram", num_draft_tokens=3, exact=False)
        outputs = llm.generate(PROMPTS, engine.SamplingParams(max_new_tokens=NEW))
        assert [output.token_ids for output in outputs] == expected
        assert llm._target.cache.whole_buffers and len(llm._target.graphs) > 0 and device.launches > 0


@pytest.mark.parametrize(("images", "text"), [("eager", "sdpa"), ("sdpa", "eager")])
def test_the_attention_that_counts_is_that_of_the_text_side(images: str, text: str) -> None:
    model = model_of("llava")
    model.set_attn_implementation({"": images, "vision_config": images, "text_config": text})
    assert model.config._attn_implementation == images
    assert model.config.get_text_config()._attn_implementation == text
    assert texts(model, drafter="ngram") == transformers_texts(model)


def test_they_are_probed_though_their_text_side_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of("llava")
    assert model.config.get_text_config().model_type == "llama"
    language: Any = model.get_decoder()
    forward = language.forward

    def with_another_position(*args: Any, position_ids: Any = None, **more: Any) -> Any:
        return forward(*args, position_ids=None if position_ids is None else 3 * position_ids, **more)

    monkeypatch.setattr(language, "forward", with_another_position)
    with pytest.raises(engine.UnsupportedModelError, match="'llava' gives other logits over a ragged cache"):
        engine.load(model)


def test_prompts_are_text() -> None:
    question = {"type": "text", "text": "What?"}
    llm = engine.load(model_of("llava", vocab_size=tiny_tokenizer.VOCAB), tokenizer=tiny_tokenizer.byte_tokenizer())
    params = engine.SamplingParams(max_new_tokens=4)
    plain, in_parts = llm.generate([[{"role": "user", "content": text}] for text in ("What?", [question])], params)
    assert in_parts.token_ids == plain.token_ids
    with_image = [{"role": "user", "content": [{"type": "image", "url": "cat.png"}, question]}]
    with pytest.raises(ValueError, match=r"prompts\[0\] must hold chat messages .* both strings, got .*'image'"):
        llm.generate(with_image, params)


def test_those_that_see_later_tokens_are_refused() -> None:
    with pytest.raises(engine.UnsupportedModelError, match="'paligemma' attends to later tokens too"):
        engine.load(model_of("paligemma"))


def test_encoder_decoders_are_refused(tmp_path: Path) -> None:
    AutoConfig.for_model("florence2").save_pretrained(tmp_path)
    with pytest.raises(engine.UnsupportedModelError, match="'florence2', an encoder-decoder"):
        engine.load(str(tmp_path))


def test_the_class_that_loads_them() -> None:
    assert auto_class(AutoConfig.for_model("llama")) is AutoModelForCausalLM
    assert auto_class(AutoConfig.for_model("gemma3")) is AutoModelForCausalLM
    assert auto_class(AutoConfig.for_model("mistral3")) is not AutoModelForCausalLM


@pytest.mark.parametrize("name", ["llava", "mistral3", "smolvlm", "gemma3"])
def test_heads_and_draft_models_of_targets_that_take_images(name: str) -> None:
    """Their encoders have layers of their own, which stay as they are."""
    target = model_of(name, num_hidden_layers=4).float()
    layers = DecoderLayers(target)
    head: Any = Eagle3Training(target, (0, 1, 2), torch.arange(VOCAB)).head
    like_llama = name != "gemma3"
    assert torch.equal(head.norm.weight, layers.parent.norm.weight) == like_llama
    small = DraftModelTraining(target, 2).head
    for mine, theirs in zip(DecoderLayers(small).layers, (layers.layers[0], layers.layers[3]), strict=True):
        assert torch.equal(mine.mlp.up_proj.weight, theirs.mlp.up_proj.weight)
    own, theirs = small.state_dict(), target.state_dict()
    encoder = [key for key in own if "vision" in key]
    assert encoder and all(torch.equal(own[key], theirs[key]) for key in encoder)
