"""The engine's samples follow the target's own law, for every drafter."""

import itertools
from collections import Counter
from typing import Any

import pytest
import torch
from scipy.stats import chi2
from tiny_models import perturbed, tiny
from transformers import (
    LogitsProcessorList,
    PreTrainedModel,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

import engine

VOCAB = 16
SAMPLES = 200_000
SOME = 8_000  # where every drafter is tried with every rule
RULES = ("rejection", "block", "coupled")
PROMPT = [3, 5, 7, 3, 5, 7, 3, 5]  # n-gram drafts 7
PROMPTS = (PROMPT, [11, 4, 11, 4, 11])  # side by side in every batch
SETTINGS = [
    dict(temperature=1.0),
    dict(temperature=0.7, top_k=10, top_p=0.9),
]


@pytest.fixture(scope="module")
def target() -> PreTrainedModel:
    model = tiny("llama", seed=4, dtype=torch.float32, vocab_size=VOCAB, num_hidden_layers=1)
    # Flatter logits: with a few tokens holding all the mass, a wrong law would hardly show.
    with torch.no_grad():
        model.lm_head.weight *= 0.4
    return model


def law(target: PreTrainedModel, setting: dict[str, Any], prompt: list[int] = PROMPT) -> dict[tuple[int, int], float]:
    """Probability of every two-token continuation, by transformers' own warpers."""
    warpers = LogitsProcessorList([TemperatureLogitsWarper(setting["temperature"])])
    if "top_k" in setting:
        warpers += [TopKLogitsWarper(setting["top_k"]), TopPLogitsWarper(setting["top_p"])]
    with torch.no_grad():
        texts = torch.tensor([[*prompt, token] for token in range(VOCAB)])
        logits = target(texts).logits.double()
    first = warpers(texts, logits[:1, -2]).softmax(-1)[0]
    second = warpers(texts, logits[:, -1]).softmax(-1)
    return {(a, b): (first[a] * second[a, b]).item() for a, b in itertools.product(range(VOCAB), repeat=2)}


def g_test(counts: Counter[tuple[int, int]], expected: dict[tuple[int, int], float]) -> float:
    """p-value of the likelihood-ratio test; rare outcomes are pooled, impossible ones must not occur."""
    total = sum(counts.values())
    assert all(expected[outcome] > 0 for outcome in counts), "a filtered-out token was sampled"
    rare = [outcome for outcome, p in expected.items() if 0 < p * total < 5]
    cells = [(counts[outcome], p) for outcome, p in expected.items() if p * total >= 5]
    if rare:
        cells.append((sum(counts[outcome] for outcome in rare), sum(expected[outcome] for outcome in rare)))
    g = 2 * sum(n * torch.tensor(n / (p * total)).log().item() for n, p in cells if n)
    return float(chi2.sf(g, len(cells) - 1))


def p_value(llm: engine.Engine, target: PreTrainedModel, setting: dict[str, Any], count: int) -> float:
    """The smaller one of the two prompts, which share batches; `count` samples in all."""
    params = [engine.SamplingParams(**setting, seed=seed, max_new_tokens=2, ignore_eos=True) for seed in range(count)]
    outputs = llm.generate([PROMPTS[seed % 2] for seed in range(count)], params)
    counts: list[Counter[tuple[int, int]]] = [Counter(), Counter()]
    for index, output in enumerate(outputs):
        first, second = output.token_ids
        counts[index % 2][first, second] += 1
    return min(g_test(found, law(target, setting, prompt)) for found, prompt in zip(counts, PROMPTS, strict=True))


def every_rule(*long: Any, setting: int = 0) -> list[Any]:
    """(verification, sampling, samples): every rule by default, under one sampling and the next; `long` ones under -m slow."""
    return [
        *((rule, SETTINGS[(index + setting) % 2], SOME) for index, rule in enumerate(RULES)),
        *(
            pytest.param(rule, sampling, count, marks=pytest.mark.slow)
            for count in long
            for rule in RULES
            for sampling in SETTINGS
        ),
    ]


@pytest.mark.parametrize(("verification", "setting", "count"), every_rule(SAMPLES))
@pytest.mark.parametrize("drafter", ["ngram", "model"])
def test_two_token_continuations(
    target: PreTrainedModel, drafter: str, verification: str, setting: dict[str, Any], count: int
) -> None:
    check(target, drafter, verification, setting, count)


@pytest.mark.parametrize(("drafter", "setting"), [("ngram", 1), ("model", 0)])
def test_many_continuations(target: PreTrainedModel, drafter: str, setting: int) -> None:
    check(target, drafter, "rejection", SETTINGS[setting], SAMPLES // 2)


def check(target: PreTrainedModel, drafter: str, verification: str, setting: dict[str, Any], count: int) -> None:
    draft = perturbed(target, 0.3) if drafter == "model" else drafter
    llm = engine.load(target, drafter=draft, num_draft_tokens=3, max_batch_size=4096, verification=verification)
    assert p_value(llm, target, setting, count) > 1e-3
    assert 0.1 < llm.stats.acceptance_rate < 0.95, "neither acceptance nor rejection is tested"


@pytest.mark.parametrize("verification", ["rejection", "block"])
def test_a_number_of_drafts_that_changes(target: PreTrainedModel, verification: str) -> None:
    """num_draft_tokens="auto", with the times of a drafter that pays."""
    llm = engine.load(
        target, drafter=perturbed(target, 0.3), num_draft_tokens="auto", max_batch_size=256, verification=verification
    )
    lengths: Any = llm._server._lengths
    observe = lengths.observe_times
    lengths.observe_times = lambda rows, asked, size, *_: observe(rows, asked, size, asked / 20, 1 + size / rows / 30)
    assert p_value(llm, target, SETTINGS[0], SOME) > 1e-3
    assert SOME / 10 < llm.stats.draft_tokens < SOME, "rounds with drafts, and without"


def test_a_wrong_law_is_caught(target: PreTrainedModel) -> None:
    """The same test, for a drafter that lies about what it drew from."""

    class Lying(engine.DraftModel):
        def propose(self, state: engine.BatchState, num_draft_tokens: int) -> engine.Proposal:
            proposal = super().propose(state, num_draft_tokens)
            assert proposal.logits is not None
            return proposal._replace(logits=proposal.logits * 0.9, stats=None)

    draft = Lying(perturbed(target, 0.3))
    llm = engine.load(target, drafter=draft, num_draft_tokens=3, max_batch_size=4096)
    assert p_value(llm, target, SETTINGS[0], SAMPLES // 3) < 1e-6


@pytest.mark.parametrize("verification", ["rejection", "block"])
def test_lookups_passed_off_as_draws_are_caught(target: PreTrainedModel, verification: str) -> None:
    """The same test, for drafts that are certain and are said to be drawn from even logits."""

    class Lying(engine.NGramDrafter):
        def propose(self, state: engine.BatchState, num_draft_tokens: int) -> engine.Proposal:
            proposal = super().propose(state, num_draft_tokens)
            return proposal._replace(logits=torch.zeros(*proposal.tokens.shape, VOCAB))

    llm = engine.load(target, drafter=Lying(), num_draft_tokens=3, max_batch_size=4096, verification=verification)
    assert p_value(llm, target, SETTINGS[0], SOME) < 1e-6
