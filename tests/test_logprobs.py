"""Log-probabilities of the new tokens: those of the model's own logits, whatever drafted, and they change no text."""

from typing import Any

import pytest
import torch
from sampled_laws import RULES, warpers_of
from tiny_models import perturbed, random_prompts, tiny
from tiny_tokenizer import VOCAB
from transformers import PreTrainedModel

import engine

PARAMS: list[dict[str, Any]] = [
    {},
    dict(repetition_penalty=1.4),
    dict(temperature=0.7, seed=1),
    dict(temperature=1.3, seed=2, top_k=30, top_p=0.9),
    dict(temperature=0.9, seed=3, top_p=0.8, repetition_penalty=1.2),
]


@pytest.fixture(scope="module")
def target() -> PreTrainedModel:
    return tiny("llama", vocab_size=VOCAB)


def expected(model: PreTrainedModel, prompt: list[int], new: list[int], setting: dict[str, Any]) -> torch.Tensor:
    """By transformers' processors on one call over the whole text, in float64."""
    warpers, text = warpers_of(setting), torch.tensor([prompt + new])
    with torch.inference_mode():
        logits = model(text).logits[0].double()
    rows = [warpers(text[:, : i + 1], logits[None, i])[0] for i in range(len(prompt) - 1, text.shape[1] - 1)]
    return torch.stack(rows).log_softmax(dim=-1).gather(1, torch.tensor(new)[:, None])[:, 0]


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("drafter", [None, "ngram", "model"])
@pytest.mark.parametrize("rule", RULES)
def test_they_are_the_models_own(target: PreTrainedModel, rule: str, drafter: str | None, exact: bool) -> None:
    model = perturbed(target, 0.05) if drafter == "model" else drafter
    llm = engine.load(target, drafter=model, verification=rule, exact=exact, max_batch_size=3, num_draft_tokens=3)
    prompts = random_prompts(len(PARAMS), seed=5, vocab_size=VOCAB)
    without = [engine.SamplingParams(max_new_tokens=20 + i, **setting) for i, setting in enumerate(PARAMS)]
    wanted = [engine.SamplingParams(max_new_tokens=20 + i, logprobs=True, **s) for i, s in enumerate(PARAMS)]
    wanted[2] = without[2]  # one that does not ask, beside those that do
    outputs = llm.generate(prompts, wanted)
    assert [output.token_ids for output in outputs] == [o.token_ids for o in llm.generate(prompts, without)]
    for number, (prompt, output, setting) in enumerate(zip(prompts, outputs, PARAMS, strict=True)):
        if number == 2:
            assert output.logprobs is None
        else:
            known = expected(target, prompt, output.token_ids, setting)
            torch.testing.assert_close(torch.tensor(output.logprobs).double(), known, rtol=1e-4, atol=1e-4)
    if drafter == "model":
        assert llm.stats.accepted_tokens > 0


def test_float64_keeps_its_digits() -> None:
    model = tiny("llama", vocab_size=VOCAB).double()
    prompt = random_prompts(1, seed=6, vocab_size=VOCAB)[0]
    output = engine.load(model).generate(prompt, engine.SamplingParams(max_new_tokens=12, logprobs=True))
    known = expected(model, prompt, output.token_ids, {})
    torch.testing.assert_close(torch.tensor(output.logprobs, dtype=torch.float64), known, rtol=1e-10, atol=1e-10)


def test_an_end_within_a_round_cuts_them_too(target: PreTrainedModel) -> None:
    prompt = [1, 2, 3, 1, 2, 3, 1, 2]
    llm = engine.load(target, drafter=target, num_draft_tokens=5)
    whole = llm.generate(prompt, engine.SamplingParams(max_new_tokens=30, logprobs=True))
    assert len(whole.token_ids) == len(whole.logprobs) == 30 and llm.stats.block_efficiency > 5
    end = whole.token_ids[2]
    begun = llm.generate(prompt, engine.SamplingParams(max_new_tokens=30, logprobs=True, stop_token_ids=[end]))
    length = whole.token_ids.index(end) + 1
    assert begun.token_ids == whole.token_ids[:length]
    assert begun.logprobs == pytest.approx(whole.logprobs[:length], abs=1e-5)


def test_streamed(target: PreTrainedModel) -> None:
    llm = engine.load(target, drafter="ngram")
    params = engine.SamplingParams(max_new_tokens=20, logprobs=True)
    pieces = list(llm.stream([1, 2, 3, 1, 2], params))
    together = [value for piece in pieces for value in piece.logprobs]
    assert pieces[-1].output.logprobs == together and len(together) == 20
    plain = list(llm.stream([1, 2, 3, 1, 2], engine.SamplingParams(max_new_tokens=5)))
    assert all(piece.logprobs is None for piece in plain) and plain[-1].output.logprobs is None
