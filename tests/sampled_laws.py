"""Texts that an engine samples, held against the law that transformers' own warpers give."""

import itertools
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from scipy.stats import chi2
from tiny_models import tiny
from transformers import (
    LogitsProcessorList,
    PreTrainedModel,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

import engine

Text = tuple[int, ...]
VOCAB = 16
PROMPT = [3, 5, 7, 3, 5, 7, 3, 5]  # n-gram drafts 7
PROMPTS = (PROMPT, [11, 4, 11, 4, 11])
RULES = ("rejection", "block", "coupled")
# Whose text depends on drafts. Under "coupled" it is that of plain decoding, which other tests show of each drafter.
DRAFTS_COUNT = RULES[:2]
SETTINGS: list[dict[str, Any]] = [dict(temperature=1.0), dict(temperature=0.7, top_k=10, top_p=0.9)]
SOME = 8_000  # samples where every drafter is tried with every rule
SIDE_BY_SIDE = 128  # samples of one prompt: rows of one width attend together where they are neighbours


def every_rule(
    *long: Any, setting: int = 0, settings: Sequence[dict[str, Any]] = SETTINGS, rules: Sequence[str] = RULES
) -> list[Any]:
    """(verification, sampling, samples): every one of the rules by default, under one sampling and the next; `long` ones, of all
    rules, under -m slow."""
    return [
        *((rule, settings[(index + setting) % 2], SOME) for index, rule in enumerate(rules)),
        *(
            pytest.param(rule, sampling, count, marks=pytest.mark.slow)
            for count in long
            for rule in RULES
            for sampling in settings
        ),
    ]


def flat_target(vocab_size: int = VOCAB, num_hidden_layers: int = 1) -> PreTrainedModel:
    """Its logits are flat: where a few tokens hold all the mass, a wrong law hardly shows."""
    model = tiny("llama", seed=4, dtype=torch.float32, vocab_size=vocab_size, num_hidden_layers=num_hidden_layers)
    with torch.no_grad():
        model.lm_head.weight *= 0.4
    return model


def warpers_of(setting: dict[str, Any]) -> LogitsProcessorList:
    """What transformers makes of these parameters, in its order."""
    warpers = LogitsProcessorList([RepetitionPenaltyLogitsProcessor(setting.get("repetition_penalty", 1.0))])
    if processor := setting.get("logits_processor"):
        warpers.append(processor)
    if temperature := setting.get("temperature"):
        warpers.append(TemperatureLogitsWarper(temperature))
        if top_k := setting.get("top_k"):
            warpers.append(TopKLogitsWarper(top_k))
        warpers.append(TopPLogitsWarper(setting.get("top_p", 1.0)))
    return warpers


def law(target: PreTrainedModel, setting: dict[str, Any], prompt: list[int], length: int) -> dict[Text, float]:
    """Probability of every continuation of so many tokens."""
    warpers = warpers_of(setting)
    outcomes = list(itertools.product(range(target.config.vocab_size), repeat=length))
    texts = torch.tensor([[*prompt, *outcome] for outcome in outcomes])
    with torch.no_grad():
        logits = target(texts).logits.double()
    chances = torch.ones(len(outcomes), dtype=torch.float64)
    for at in range(len(prompt), len(prompt) + length):
        chances *= warpers(texts[:, :at], logits[:, at - 1]).softmax(-1).gather(1, texts[:, at, None])[:, 0]
    return dict(zip(outcomes, chances.tolist(), strict=True))


def g_test(counts: Counter[Text], expected: dict[Text, float]) -> float:
    """p-value of the likelihood-ratio test; rare outcomes are pooled, impossible ones must not occur."""
    total = sum(counts.values())
    assert all(expected[outcome] > 0 for outcome in counts), "a filtered-out token was sampled"
    rare = [outcome for outcome, p in expected.items() if 0 < p * total < 5]
    cells = [(counts[outcome], p) for outcome, p in expected.items() if p * total >= 5]
    if rare:
        cells.append((sum(counts[outcome] for outcome in rare), sum(expected[outcome] for outcome in rare)))
    g = 2 * sum(n * torch.tensor(n / (p * total)).log().item() for n, p in cells if n)
    return float(chi2.sf(g, len(cells) - 1))


def p_value(
    llm: engine.Engine,
    target: PreTrainedModel,
    setting: dict[str, Any],
    count: int,
    prompts: Sequence[list[int]] = PROMPTS,
    length: int = 2,
    first_seed: int = 0,
) -> float:
    """The smallest one of several prompts, which share batches.

    Args:
        count: samples of all prompts together, with one seed after another.
        length: tokens of each.
    """
    which = [seed // SIDE_BY_SIDE % len(prompts) for seed in range(count)]
    params = [
        engine.SamplingParams(**setting, seed=first_seed + seed, max_new_tokens=length, ignore_eos=True)
        for seed in range(count)
    ]
    counts: list[Counter[Text]] = [Counter() for _ in prompts]
    for prompt, output in zip(which, llm.generate([prompts[prompt] for prompt in which], params), strict=True):
        counts[prompt][tuple(output.token_ids)] += 1
    return min(
        g_test(found, law(target, setting, prompt, length)) for found, prompt in zip(counts, prompts, strict=True)
    )
