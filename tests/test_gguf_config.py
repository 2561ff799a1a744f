"""What transformers leaves out of GGUF files: that the config has it, or that the file is refused."""

import copy
import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tiny_gguf
import torch
from gguf import GGUFWriter, RopeScalingType
from tiny_models import tiny
from transformers import LlamaForCausalLM

import engine
from engine import gguf as conversion
from engine.gguf_config import complete

TEXT = torch.arange(3, 43)[None]
HEAD = tiny_gguf.SIZE // tiny_gguf.HEADS


def llama3_divisors(factor: float, theta: float = 10_000.0, size: int = HEAD) -> np.ndarray:
    """Of the frequencies of a head, by wavelength, as Llama 3.1's authors have it."""
    divisors = []
    for index in range(0, size, 2):
        wavelength = 2 * math.pi * theta ** (index / size)
        smooth = min(max((8192 / wavelength - 1) / (4 - 1), 0.0), 1.0)
        divisors.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(divisors, dtype=np.float32)


def scaled(kind: RopeScalingType, factor: float, *more: tuple[str, float]) -> Callable[[GGUFWriter], None]:
    def add(writer: GGUFWriter) -> None:
        writer.add_rope_scaling_type(kind)
        writer.add_rope_scaling_factor(factor)
        writer.add_rope_scaling_orig_ctx_len(16)
        for name, value in more:
            writer.add_float32(f"llama.rope.scaling.{name}", value)

    return add


def divided(divisors: np.ndarray, theta: float = 10_000.0) -> Callable[[GGUFWriter], None]:
    def add(writer: GGUFWriter) -> None:
        writer.add_rope_freq_base(theta)
        writer.add_tensor("rope_freqs.weight", divisors)

    return add


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., engine.Engine]:
    monkeypatch.setenv(conversion.CACHE_VARIABLE, str(tmp_path / "cache"))

    def loaded(more: Callable[[GGUFWriter], None] = lambda writer: None) -> engine.Engine:
        tiny_gguf.write(tmp_path / "model.gguf", more=more)
        return engine.load(tmp_path / "model.gguf", drafter=None, dtype="float32", device="cpu")

    return loaded


SLOW_THETA = 1e6  # with which frequencies are low enough to be divided
LLAMA3 = dict(rope_type="llama3", low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192)
FILES = {
    "linear": (scaled(RopeScalingType.LINEAR, 4.0), dict(rope_type="linear", factor=4.0)),
    "linear, of an older file": (
        lambda writer: writer.add_float32("llama.rope.scale_linear", 2.0),
        dict(rope_type="linear", factor=2.0),
    ),
    "yarn": (
        scaled(RopeScalingType.YARN, 4.0, ("yarn_beta_fast", 16.0), ("yarn_log_multiplier", 0.0)),
        dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=16, beta_fast=16.0),
    ),
    "llama3": (divided(llama3_divisors(8.0, SLOW_THETA), SLOW_THETA), dict(LLAMA3, factor=8.0, rope_theta=SLOW_THETA)),
    "nothing, of factor 1": (scaled(RopeScalingType.LINEAR, 1.0), {}),
    "nothing, of factor 0": (scaled(RopeScalingType.LINEAR, 0.0), {}),
    "nothing, of divisors 1": (divided(np.ones(HEAD // 2, dtype=np.float32)), {}),
    "none": (scaled(RopeScalingType.NONE, 4.0), {}),
}


@pytest.mark.parametrize("name", FILES)
def test_positions_are_scaled_as_the_file_says(load: Callable[..., engine.Engine], name: str) -> None:
    more, expected = FILES[name]
    plain, model = load().target_model, load(more).target_model
    rope = {"rope_type": "default", "rope_theta": 10_000.0, **expected}
    assert model.config.rope_parameters == rope
    config = copy.deepcopy(plain.config)
    config.rope_parameters = rope
    other = LlamaForCausalLM(config).eval()
    other.load_state_dict(plain.state_dict())
    with torch.inference_mode():
        torch.testing.assert_close(model(TEXT).logits, other(TEXT).logits)


def biased(writer: GGUFWriter) -> None:
    writer.add_tensor("blk.0.attn_q.bias", np.ones(tiny_gguf.SIZE, dtype=np.float32))


REFUSED = {
    "biases that no part of the model takes": (biased, r"it has \d+ weights, and a LlamaForCausalLM takes \d+ of them"),
    "other divisors": (
        divided(np.array([1, 2, 8, 8], dtype=np.float32)),
        "its rotary frequencies are divided by other",
    ),
    "divisors of other heads": (
        divided(llama3_divisors(8.0, SLOW_THETA, 2 * HEAD), SLOW_THETA),
        "its rotary frequencies are divided by other",
    ),
    "no divisor": (
        divided(np.full(HEAD // 2, np.nan, dtype=np.float32)),
        "its rotary frequencies are divided by other",
    ),
    "two scalings": (
        lambda writer: (scaled(RopeScalingType.LINEAR, 2.0)(writer), divided(llama3_divisors(8.0, 1e6), 1e6)(writer)),
        "its rotary frequencies are divided by other",
    ),
    "longrope": (scaled(RopeScalingType.LONGROPE, 1.0), "it scales positions by 'longrope', which is not read"),
    "yarn with more": (
        scaled(RopeScalingType.YARN, 4.0, ("yarn_log_multiplier", 0.5)),
        "it scales positions by 'yarn' with yarn_log_multiplier 0.5, which is not read",
    ),
    "frequencies by length": (
        lambda writer: writer.add_tensor("rope_factors_long.weight", np.ones(HEAD // 2, dtype=np.float32)),
        "it has rotary frequencies for short and for long texts",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_no_config_says_is_refused(load: Callable[..., engine.Engine], name: str, tmp_path: Path) -> None:
    more, message = REFUSED[name]
    with pytest.raises(ValueError, match=f"target must be a GGUF file .*model.gguf failed: {message}"):
        load(more)
    assert not [path for path in (tmp_path / "cache").iterdir() if path.is_dir()]


def completed(name: str, architecture: str, /, **fields: Any) -> Any:
    """The config of a tiny model, with the fields of a file."""
    model = tiny(name, dtype=torch.float32)
    named = {f"{architecture}.{key}": value for key, value in fields.items()} | {"general.architecture": architecture}
    values = {key: SimpleNamespace(contents=lambda value=value: value) for key, value in named.items()}
    complete(model, SimpleNamespace(fields=values, tensors=[]))
    return model.config


def test_other_architectures() -> None:
    """Fields that transformers reads for some of them only, or for none."""
    config = completed("starcoder2", "starcoder2", **{"rope.freq_base": 1e6, "attention.layer_norm_epsilon": 1e-3})
    assert config.rope_parameters["rope_theta"] == 1e6 and config.norm_epsilon == 1e-3
    config = completed("phi3", "phi3", **{"rope.dimension_count": 6, "attention.sliding_window": 5})
    assert config.rope_parameters["partial_rotary_factor"] == 0.75 and config.sliding_window == 5
    scaling = {"rope.scaling.type": "linear", "rope.scaling.factor": 8.0, "final_logit_softcapping": 20.0}
    before = tiny("gemma3_text").config.rope_parameters["sliding_attention"]
    config = completed("gemma3_text", "gemma3", **scaling)
    assert config.rope_parameters["full_attention"]["factor"] == 8.0 and config.final_logit_softcapping == 20.0
    assert config.rope_parameters["sliding_attention"] == before
    own = tiny("gpt_oss").config.rope_parameters
    assert completed("gpt_oss", "gpt-oss", **scaling).rope_parameters == own
    assert completed("gpt2", "gpt2", **{"attention.layer_norm_epsilon": 1e-3}).layer_norm_epsilon == 1e-3
