"""Calls of several rows on a CPU leave out what is padding, and nothing else about them changes."""

import pytest
import torch
from tiny_models import CONFIGS, CONTEXT, EAGER_ONLY, GROUPED_EXPERTS, greedy, random_prompts, tiny, tokens_read
from transformers import PreTrainedModel

import engine
from engine.attention import PART
from engine.model import RaggedModel

KEEP_PADDING = {"falcon", *EAGER_ONLY}  # whose attention is their own
START = [20, 13, 7, 30, 25]


def ragged(model: PreTrainedModel, skips_padding: bool, num_slots: int = 5) -> RaggedModel:
    made = RaggedModel(model, num_slots)
    assert made.skips_padding
    made.skips_padding = skips_padding
    made.cache.reserve(model.config.max_position_embeddings)
    return made


@pytest.mark.parametrize("name", CONFIGS)
def test_which_models_do(name: str) -> None:
    assert RaggedModel(tiny(name), 2).skips_padding == (name not in KEEP_PADDING)
    assert not RaggedModel(tiny(name), 2, exact=True).skips_padding


@pytest.mark.parametrize("call_bytes", [0, 1 << 30], ids=["run by run", "attending together"])
@pytest.mark.parametrize("num_valid", [[1, 4, 0, 2, 3], [0, 0, 0, 0, 2], [2, 2, 1, 1, 2], [3, 0, 3, 0, 3], [1] * 5])
@pytest.mark.parametrize("name", [name for name in CONFIGS if name not in KEEP_PADDING])
def test_the_same_logits_hidden_states_and_cache(
    name: str, num_valid: list[int], call_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.attention.CALL_BYTES", call_bytes)
    model = tiny(name, dtype=torch.float32 if name in GROUPED_EXPERTS else torch.float64)
    tokens = torch.randint(0, model.config.vocab_size, (5, CONTEXT), generator=torch.Generator().manual_seed(0))
    start, count, column = torch.tensor(START), torch.tensor(num_valid), torch.arange(4)
    new = tokens.gather(1, start[:, None] + column)
    found = []
    for skips_padding in (False, True):
        made = ragged(model, skips_padding)
        hidden = made.keep_hidden_states([0, 2])
        with tokens_read(model) as read:
            made.prefill(tokens, [(0, length) for length in START], slice(0, 5))
            logits = made.decode(new, start, count, slice(0, 5), 36)
        some = torch.tensor([3, 1, 4])  # slots that do not lie side by side
        again = made.decode(new[some], start[some], count[some], some, 36)
        valid = column < count[:, None]
        kv = [
            states[slot, :, : length + valid_]
            for layer in made.cache.ragged_layers
            for states in (layer.keys, layer.values)
            for slot, (length, valid_) in enumerate(zip(START, num_valid, strict=True))
        ]
        kept = hidden.gather(slice(0, 5), start[:, None] + column)
        found.append([logits[valid], again[valid[some]], kept[valid], *kv])
        assert read == ([sum(START), sum(num_valid)] if skips_padding else [5 * max(START), 5 * 4])
    for padded, unpadded in zip(*found, strict=True):
        torch.testing.assert_close(unpadded, padded, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("longest", "calls"), [(40, 1), (250, 5)])
def test_rows_of_much_the_same_length_attend_together(
    longest: int, calls: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others read fewer keys run by run."""
    monkeypatch.setattr("engine.attention.CALL_BYTES", 16 << 10)
    model = tiny("llama", max_position_embeddings=256)
    made = ragged(model, skips_padding=True)
    start, count = torch.tensor([30, longest, 20, 30, 25]), torch.tensor([1, 4, 3, 1, 2])
    attend, called = torch.nn.functional.scaled_dot_product_attention, []

    def counted(*args: object, **kwargs: object) -> torch.Tensor:
        called.append(1)
        return attend(*args, **kwargs)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", counted)
    made.decode(torch.ones(5, 4, dtype=torch.int64), start, count, slice(0, 5), 256)
    assert len(called) == calls * model.config.num_hidden_layers


def test_long_prompts_of_different_length_are_read_together() -> None:
    """In parts, each of which attends to what it can see."""
    model = tiny("llama", max_position_embeddings=4 * PART)
    tokens = torch.randint(0, model.config.vocab_size, (3, 3 * PART), generator=torch.Generator().manual_seed(0))
    spans = [(0, 2 * PART + 5), (0, 9), (0, PART)]
    found = []
    for skips_padding in (False, True):
        made = ragged(model, skips_padding, num_slots=3)
        made.prefill(tokens, spans, slice(0, 3))
        found.append(
            [layer.keys[row, :, :end] for layer in made.cache.ragged_layers for row, (_, end) in enumerate(spans)]
        )
    for padded, unpadded in zip(*found, strict=True):
        torch.testing.assert_close(unpadded, padded)


@pytest.mark.parametrize("skips_padding", [False, True])
def test_the_last_part_of_a_prompt_is_no_wider_than_what_is_left(
    skips_padding: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.model.PREFILL_WIDTH", 16)
    model = tiny("llama")
    tokens = torch.randint(0, model.config.vocab_size, (1, 37), generator=torch.Generator().manual_seed(0))
    made, whole = ragged(model, skips_padding), ragged(model, skips_padding)
    with tokens_read(model) as read:
        made.prefill(tokens, [(0, 37)], slice(0, 1))
    assert read == [16, 16, 5]
    monkeypatch.setattr("engine.model.PREFILL_WIDTH", 64)
    whole.prefill(tokens, [(0, 37)], slice(0, 1))
    for parts, one in zip(made.cache.ragged_layers, whole.cache.ragged_layers, strict=True):
        torch.testing.assert_close(parts.keys[0, :, :37], one.keys[0, :, :37])


@pytest.mark.parametrize("num_draft_tokens", [4, "auto"])
@pytest.mark.parametrize("drafter", [None, "ngram"])
def test_every_token_is_read_once_and_no_other(drafter: str | None, num_draft_tokens: int | str) -> None:
    """Rows that have ended cost nothing, nor do those with fewer drafts than others."""
    target, prompts = tiny("llama"), random_prompts(9)
    lengths = [3, 20, 7, 12, 1, 16, 9, 2, 30]
    llm = engine.load(target, drafter=drafter, num_draft_tokens=num_draft_tokens, max_batch_size=4)
    params = [engine.SamplingParams(max_new_tokens=length) for length in lengths]
    with tokens_read(target) as read:
        outputs = llm.generate(prompts, params)
    for output, prompt, length in zip(outputs, prompts, lengths, strict=True):
        assert output.token_ids == greedy(target, prompt, length)
    to_prefill = sum(len(prompt) - 1 for prompt in prompts)
    assert sum(read) == to_prefill + llm.stats.rounds + llm.stats.draft_tokens
    assert drafter is None or llm.stats.draft_tokens > 0


def test_other_architectures_keep_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """What else than attention looks across tokens is not known of them."""
    monkeypatch.setattr("engine.model.TESTED", frozenset[str]())
    target, prompts = tiny("llama"), random_prompts(3)
    llm = engine.load(target, max_batch_size=3)
    with tokens_read(target) as read:
        outputs = llm.generate(prompts, engine.SamplingParams(max_new_tokens=8))
    assert [output.token_ids for output in outputs] == [greedy(target, prompt, 8) for prompt in prompts]
    to_prefill = sum(len(prompt) - 1 for prompt in prompts)
    assert sum(read) > to_prefill + llm.stats.rounds + llm.stats.draft_tokens


def test_padding_behind_the_context_has_a_place_in_a_position_table() -> None:
    """An exact call has 8 columns, also for the last token that there is room for."""
    model = tiny("gpt2")
    llm = engine.load(model, "ngram", 3, exact=True)
    assert llm.generate([3, 4, 5], engine.SamplingParams(max_new_tokens=CONTEXT)).token_ids == greedy(
        model, [3, 4, 5], CONTEXT
    )
