"""Logits processors of requests: the texts and the law of transformers' own with the same ones."""

import copy
from typing import Any

import pytest
import torch
from sampled_laws import RULES, SOME, flat_target, p_value
from tiny_models import perturbed, random_prompts, tiny
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    PreTrainedModel,
    SequenceBiasLogitsProcessor,
    SuppressTokensLogitsProcessor,
)

import engine
from engine import round as round_

VOCAB, EOS, NEW = 64, 5, 24


@pytest.fixture(scope="module")
def target() -> PreTrainedModel:
    model = copy.deepcopy(tiny("llama", vocab_size=VOCAB))
    model.generation_config.eos_token_id = EOS
    return model


def processors(prompt: list[int], target: PreTrainedModel) -> LogitsProcessorList:
    """Such as depend on the text before, on its length, and on neither; what would come first is forbidden."""
    first = int(target(torch.tensor([prompt])).logits[0, -1].argmax())
    return LogitsProcessorList(
        [
            NoRepeatNGramLogitsProcessor(2),
            SequenceBiasLogitsProcessor([[[7, 9], 5.0], [[3], -2.0]]),
            MinNewTokensLengthLogitsProcessor(len(prompt), 8, EOS),
            SuppressTokensLogitsProcessor([first]),
        ]
    )


def of_transformers(target: PreTrainedModel, prompt: list[int], given: LogitsProcessorList) -> list[int]:
    ids = torch.tensor([prompt])
    text = target.generate(
        ids, attention_mask=torch.ones_like(ids), logits_processor=given, do_sample=False, max_new_tokens=NEW
    )
    return text[0, len(prompt) :].tolist()


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("drafter", [None, "ngram", "model"])
def test_greedy_text_is_that_of_transformers(target: PreTrainedModel, drafter: str | None, exact: bool) -> None:
    """In slots that others had, beside rows without a processor."""
    prompts = random_prompts(6, seed=3, vocab_size=VOCAB)
    given = [processors(prompt, target) if index % 3 else LogitsProcessorList() for index, prompt in enumerate(prompts)]
    expected = [of_transformers(target, *each) for each in zip(prompts, given, strict=True)]
    params = [engine.SamplingParams(max_new_tokens=NEW, logits_processor=each or None) for each in given]
    own = perturbed(target, 0.05) if drafter == "model" else drafter
    llm = engine.load(target, own, exact=exact, max_batch_size=3)
    assert [output.token_ids for output in llm.generate(prompts, params)] == expected
    assert drafter != "model" or llm.stats.accepted_tokens > 0
    off = llm.generate(prompts, engine.SamplingParams(max_new_tokens=NEW))
    assert [output.token_ids for output in off[1:3]] != expected[1:3] and off[0].token_ids == expected[0]


def test_sampled_text_is_the_same_with_drafts_under_coupled(target: PreTrainedModel) -> None:
    prompts = random_prompts(4, seed=4, vocab_size=VOCAB)
    params = [
        engine.SamplingParams(
            temperature=0.8,
            top_p=0.9,
            seed=i,
            max_new_tokens=20,
            logits_processor=processors(prompt, target) if i else None,
        )
        for i, prompt in enumerate(prompts)
    ]
    plain = engine.load(target, drafter=None, verification="coupled").generate(prompts, params)
    drafted = engine.load(target, perturbed(target, 0.05), verification="coupled").generate(prompts, params)
    assert [o.token_ids for o in drafted] == [o.token_ids for o in plain]


def no_token_twice(input_ids: Tensor, scores: Tensor) -> Tensor:
    """Not the last token again, and rather token 4."""
    scores[:, 4] += 1.5
    return scores.scatter(1, input_ids[:, -1:], -torch.inf)


SETTING: dict[str, Any] = dict(temperature=0.9, top_p=0.95, repetition_penalty=1.2, logits_processor=no_token_twice)


@pytest.mark.parametrize("rule", RULES)
def test_the_law_is_that_of_the_processed_logits(rule: str) -> None:
    target = flat_target()
    llm = engine.load(target, perturbed(target, 0.3), num_draft_tokens=2, verification=rule, max_batch_size=128)
    assert p_value(llm, target, SETTING, SOME) > 1e-3
    assert llm.stats.accepted_tokens > SOME / 8


def test_without_them_it_is_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(round_, "process_logits", lambda logits, *_: logits)
    target = flat_target()
    with pytest.raises(AssertionError, match="a filtered-out token was sampled"):
        p_value(engine.load(target, drafter=None, max_batch_size=128), target, SETTING, 500)


def test_log_probabilities_are_those_of_the_processed_logits(target: PreTrainedModel) -> None:
    prompt = random_prompts(1, seed=5, vocab_size=VOCAB)[0]
    params = engine.SamplingParams(max_new_tokens=6, logprobs=True, logits_processor=no_token_twice)
    output = engine.load(target, "ngram").generate(prompt, params)
    text = torch.tensor([[*prompt, *output.token_ids]])
    with torch.no_grad():
        logits = target(text).logits.double()
    for at, logprob in enumerate(output.logprobs, start=len(prompt)):
        expected = no_token_twice(text[:, :at], logits[:, at - 1]).log_softmax(-1)[0, text[0, at]]
        assert logprob == pytest.approx(expected.item(), abs=1e-5)


class Grammar:
    """Only odd tokens after even ones, and the other way round. It knows no other texts."""

    def __init__(self, prompt: list[int]) -> None:
        self.length = len(prompt)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        new = input_ids[0, self.length :]
        assert ((new[1:] + new[:-1]) % 2 == 1).all()
        if len(new):
            scores[:, torch.arange(VOCAB) % 2 == new[-1] % 2] = -torch.inf
        return scores


@pytest.mark.parametrize("rule", [None, *RULES])  # None: greedy
def test_a_text_that_it_rules_out_is_not_shown_to_it(target: PreTrainedModel, rule: str | None) -> None:
    prompts = random_prompts(4, seed=8, vocab_size=VOCAB)
    params = [
        engine.SamplingParams(
            temperature=0.9 * (rule is not None), max_new_tokens=NEW, ignore_eos=True, logits_processor=Grammar(prompt)
        )
        for prompt in prompts
    ]
    llm = engine.load(target, perturbed(target, 0.05), num_draft_tokens=4, verification=rule or "rejection")
    outputs = llm.generate(prompts, params)
    assert all(len(output.token_ids) == NEW for output in outputs) and llm.stats.accepted_tokens > 5
    if rule is None:
        plain = engine.load(target, None).generate(prompts, params)
        assert [output.token_ids for output in outputs] == [output.token_ids for output in plain]


def test_what_it_does_to_its_arguments_is_its_own_affair(target: PreTrainedModel) -> None:
    def spoils(input_ids: Tensor, scores: Tensor) -> Tensor:
        result = scores.clone()
        input_ids.zero_(), scores.fill_(torch.nan)
        return result

    prompts = random_prompts(2, seed=6, vocab_size=VOCAB)
    llm = engine.load(target, "ngram")
    plain = llm.generate(prompts, engine.SamplingParams(max_new_tokens=NEW))
    spoilt = llm.generate(prompts, engine.SamplingParams(max_new_tokens=NEW, logits_processor=spoils))
    assert [o.token_ids for o in spoilt] == [o.token_ids for o in plain]


@pytest.mark.parametrize(("returned", "got"), [(None, "NoneType"), (torch.zeros(VOCAB), r"shape \[64\]")])
def test_what_it_must_return(target: PreTrainedModel, returned: Any, got: str) -> None:
    llm = engine.load(target, "ngram")
    params = engine.SamplingParams(logits_processor=lambda input_ids, scores: returned)
    with pytest.raises(
        ValueError, match=rf"^logits_processor must return a tensor of shape \[1, V\] = \[1, 64\], got {got}$"
    ):
        llm.generate([1, 2, 3], params)
    assert llm.generate([1, 2, 3], engine.SamplingParams(max_new_tokens=2)).token_ids  # the engine goes on


def test_logits_that_are_no_distribution_may_be_its_fault(target: PreTrainedModel) -> None:
    llm = engine.load(target, "ngram")
    params = engine.SamplingParams(logits_processor=lambda input_ids, scores: torch.full_like(scores, -torch.inf))
    with pytest.raises(engine.InvalidLogitsError, match=r"^the target or its logits_processor returned logits that"):
        llm.generate([1, 2, 3], params)


def test_what_it_must_be() -> None:
    with pytest.raises(
        ValueError, match=r"^logits_processor must be callable .* or None, got 3; several go into one Log"
    ):
        engine.SamplingParams(logits_processor=3)


def test_what_it_does_to_a_text_is_not_shown_to_it_behind_the_next_draft(target: PreTrainedModel) -> None:
    def first_again(input_ids: Tensor, scores: Tensor) -> Tensor:
        result = scores.scatter(1, input_ids[:, :1], 100.0)
        input_ids.zero_()
        return result

    params = engine.SamplingParams(max_new_tokens=NEW, logits_processor=first_again)
    llm = engine.load(target, "ngram", num_draft_tokens=3)
    assert llm.generate([9, 4, 9], params).token_ids == [9] * NEW and llm.stats.accepted_tokens > 0


def test_it_is_given_float32_as_by_transformers(target: PreTrainedModel) -> None:
    given = set()

    def note(input_ids: Tensor, scores: Tensor) -> Tensor:
        given.add(scores.dtype)
        return scores

    llm = engine.load(copy.deepcopy(target).bfloat16(), None)
    llm.generate([1, 2, 3], engine.SamplingParams(max_new_tokens=2, logits_processor=note))
    assert given == {torch.float32}


def test_a_text_that_has_ended_is_not_shown_to_it(target: PreTrainedModel) -> None:
    """While the round that ends it has not been read, and others go on."""
    shown: list[int] = []

    def note(input_ids: Tensor, scores: Tensor) -> Tensor:
        shown.append(input_ids.shape[1])
        return scores

    llm = engine.load(target, None)
    llm._server._late = True
    short = engine.SamplingParams(max_new_tokens=3, ignore_eos=True, logits_processor=note)
    long = engine.SamplingParams(max_new_tokens=8, ignore_eos=True)
    llm.generate([[1, 2, 3], [4, 5]], [short, long])
    assert shown == [3, 4, 5]
