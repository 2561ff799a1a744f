"""Attention on a CPU: grouped queries and prefill in parts give what repeated K/V under the whole mask give."""

import gc
import sys
import weakref
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny_models import greedy, random_prompts, tiny
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import engine
from engine import attention
from engine.cache import RaggedCache, cache_argument

HEADS, SIZE = 6, 16


class Call:
    """A model call of W columns in rows that begin at these positions."""

    def __init__(self, starts: list[int], width: int, window: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
        cache = RaggedCache(num_layers=1, num_slots=len(starts), granularity=64)
        cache.capacity = 1024
        start, column = torch.tensor(starts), torch.arange(width)
        positions = start[:, None] + column
        length = max(starts) + width
        cache.plan_call(slice(0, len(starts)), positions, torch.ones_like(positions, dtype=torch.bool), start, length)
        monkeypatch.setattr(attention._calls, "caches", [weakref.ref(cache)])
        self.cache, self.plan = cache, cache.plan
        query, key = positions[:, None, :, None], torch.arange(cache.plan.kv_length)
        self.mask = (key <= query) & (key > query - (window or 10_000))

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None, **others: Any) -> Tensor:
        mask = self.mask if mask is None else mask
        return attention.attend_grouped(SimpleNamespace(), query, key, value, mask, **others)[0]  # type: ignore[arg-type]


@pytest.mark.parametrize("group", [1, 2, 6])
@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize(("starts", "width"), [([70], 1), ([3, 90], 6), ([0], 300), ([0, 200, 64], 129), ([5, 0], 512)])
def test_as_with_repeated_keys_and_the_whole_mask(
    group: int, window: int | None, starts: list[int], width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    call = Call(starts, width, window, monkeypatch)
    query = torch.randn(len(starts), HEADS, width, SIZE)
    key, value = (torch.randn(len(starts), HEADS // group, call.plan.kv_length, SIZE) for _ in range(2))
    found = call.attend(query, key, value, scaling=0.3)
    key, value = (states.repeat_interleave(group, dim=1) for states in (key, value))
    expected = scaled_dot_product_attention(query, key, value, attn_mask=call.mask, scale=0.3).transpose(1, 2)
    assert found.shape == (len(starts), width, HEADS, SIZE)
    assert torch.allclose(found, expected, atol=1e-5)


def test_a_long_prefill_reads_no_keys_beyond_each_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """NaN there would show."""
    call = Call([10], 400, None, monkeypatch)
    query, key, value = (torch.randn(1, 2, size, SIZE) for size in (400, 448, 448))
    expected = call.attend(query, key, value)
    key[:, :, 10 + attention.PART :] = torch.nan
    found = call.attend(query, key, value)
    assert torch.equal(found[:, : attention.PART], expected[:, : attention.PART])
    assert found[:, attention.PART :].isnan().all()
    assert len(next(iter(call.plan.prepared.values()))[1]) == 4


def test_masks_are_worked_out_once_for_all_layers_and_each_kind_for_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    call = Call([10], 4, None, monkeypatch)
    states = [torch.randn(1, 2, size, SIZE) for size in (4, 64, 64)]
    whole = [call.attend(*states) for _ in range(3)]
    sliding = call.attend(*states, mask=call.mask & (torch.arange(64) > 7))
    assert torch.equal(whole[0], whole[2]) and not torch.allclose(whole[0], sliding, atol=1e-2)
    assert len(call.plan.prepared) == 2


@pytest.mark.parametrize("kind", ["llama", "mistral", "gemma3_text", "gpt2"])
def test_long_prompts(kind: str) -> None:
    """Ragged ones, read together in several calls of several parts each."""
    target = tiny(kind, max_position_embeddings=1024)
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(1, 60, (length,), generator=generator).tolist() for length in (700, 129, 390)]
    outputs = engine.load(target, drafter="ngram", max_batch_size=3).generate(
        prompts, engine.SamplingParams(max_new_tokens=12)
    )
    assert [o.token_ids for o in outputs] == [greedy(target, prompt, 12) for prompt in prompts]


def test_an_interrupt_while_attention_is_switched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C may come at any line of it: the next call finds the model's own attention, and no cache is kept alive."""
    monkeypatch.setattr(attention._calls, "caches", [])
    target, params = tiny("llama", dtype=torch.float32), engine.SamplingParams(max_new_tokens=4)
    code = attention.AttentionSwitch.on.__wrapped__.__code__  # type: ignore[attr-defined]
    lines = sorted({line for _, _, line in code.co_lines() if line is not None and line > code.co_firstlineno + 1})
    interrupted = []
    for line in lines:

        def trace(frame: Any, event: str, arg: Any, line: int = line) -> Any:
            if event == "line" and frame.f_lineno == line:
                interrupted.append(line)
                raise KeyboardInterrupt
            return trace if frame.f_code is code else None

        llm = engine.load(target, "ngram", max_batch_size=2)
        before = sys.gettrace()
        sys.settrace(trace)
        with suppress(KeyboardInterrupt):
            llm.generate([[5, 6, 7], [8, 9]], params)
        sys.settrace(before)
        assert llm.generate([5, 6, 7], params).token_ids == greedy(target, [5, 6, 7], 4)
        assert target.config._attn_implementation == "sdpa"
        cache = weakref.ref(llm._target.cache)
        del llm
        gc.collect()
        assert cache() is None
    assert len(interrupted) >= 8


@pytest.mark.parametrize("batch", [1, 4])
def test_another_attention_that_is_set_later_stays_set(batch: int) -> None:
    target = tiny("mistral", dtype=torch.float32)
    prompts, params = random_prompts(4), engine.SamplingParams(max_new_tokens=8)
    expected = [greedy(target, prompt, 8) for prompt in prompts]
    llm = engine.load(target, "ngram", max_batch_size=batch)
    for implementation in ("eager", "sdpa"):
        target.set_attn_implementation(implementation)
        assert [o.token_ids for o in llm.generate(prompts, params)] == expected
        assert target.config._attn_implementation == implementation


def test_a_models_own_attention_comes_back_after_an_interrupt_in_putting_it_back() -> None:
    target = tiny("llama", dtype=torch.float32)
    llm = engine.load(target)
    vars(target.config)["_attn_implementation_internal"] = attention.GROUPED  # as an interrupt left it
    llm.generate([5, 6, 7], engine.SamplingParams(max_new_tokens=2))
    assert target.config._attn_implementation == "sdpa"


def test_a_release_that_keeps_its_attention_elsewhere(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The model's own attention under our masks gives the same text; that it is slower is said."""
    target, params = tiny("llama"), engine.SamplingParams(max_new_tokens=6)
    llm = engine.load(target)
    assert llm._target.skips_padding and not caplog.records
    monkeypatch.setattr(attention, "_implementation", lambda config: None)
    llm = engine.load(target)
    assert not llm._target.skips_padding and "attention setting in this transformers release" in caplog.text
    prompts = [[5, 6, 7], [8, 9]]
    assert [each.token_ids for each in llm.generate(prompts, params)] == [greedy(target, each, 6) for each in prompts]


@pytest.mark.parametrize("name", ["cache", "past_key_values"])
def test_what_a_model_calls_its_cache(name: str) -> None:
    """transformers has renamed it, but code that comes with a checkpoint may be older."""
    target: Any = tiny("llama")
    prompt, own = random_prompts(1)[0], type(target)
    expected = greedy(target, prompt, 12)

    def renamed(self: Any, input_ids: Tensor, cache: Any = None, **others: Any) -> Any:
        return own.forward(self, input_ids, **{cache_argument(own.forward): cache}, **others)

    def as_it_was(self: Any, input_ids: Tensor, past_key_values: Any = None, **others: Any) -> Any:
        return renamed(self, input_ids, past_key_values, **others)

    forward = renamed if name == "cache" else as_it_was
    assert cache_argument(forward) == name
    target.__class__ = type("Renamed", (own,), {"forward": forward})
    assert engine.load(target).generate(prompt, engine.SamplingParams(max_new_tokens=12)).token_ids == expected
