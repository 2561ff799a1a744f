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
PROMPT = [3, 5, 7, 3, 5, 7, 3, 5]  # n-gram drafts 7
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


def law(target: PreTrainedModel, setting: dict[str, Any]) -> dict[tuple[int, int], float]:
    """Probability of every two-token continuation, by transformers' own warpers."""
    warpers = LogitsProcessorList([TemperatureLogitsWarper(setting["temperature"])])
    if "top_k" in setting:
        warpers += [TopKLogitsWarper(setting["top_k"]), TopPLogitsWarper(setting["top_p"])]
    with torch.no_grad():
        texts = torch.tensor([[*PROMPT, token] for token in range(VOCAB)])
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


def sample(llm: engine.Engine, setting: dict[str, Any], count: int) -> Counter[tuple[int, int]]:
    params = [engine.SamplingParams(**setting, seed=seed, max_new_tokens=2, ignore_eos=True) for seed in range(count)]
    return Counter((first, second) for first, second in (o.token_ids for o in llm.generate([PROMPT] * count, params)))


@pytest.mark.parametrize("setting", SETTINGS, ids=["t1.0", "t0.7-k10-p0.9"])
@pytest.mark.parametrize(
    ("drafter", "verification"),
    [
        ("ngram", "rejection"),
        ("model", "rejection"),
        pytest.param("model", "block", marks=pytest.mark.slow),
        pytest.param("model", "coupled", marks=pytest.mark.slow),
    ],
)
def test_two_token_continuations(
    target: PreTrainedModel, drafter: str, verification: str, setting: dict[str, Any]
) -> None:
    draft = perturbed(target, 0.3) if drafter == "model" else drafter
    llm = engine.load(target, drafter=draft, num_draft_tokens=3, max_batch_size=4096, verification=verification)
    p_value = g_test(sample(llm, setting, SAMPLES), law(target, setting))
    assert 0.1 < llm.stats.acceptance_rate < 0.95, "neither acceptance nor rejection is tested"
    assert p_value > 1e-3


def test_a_wrong_law_is_caught(target: PreTrainedModel) -> None:
    """The same test, for a drafter that lies about what it drew from."""

    class Lying(engine.DraftModel):
        def propose(self, state: engine.BatchState, num_draft_tokens: int) -> engine.Proposal:
            proposal = super().propose(state, num_draft_tokens)
            assert proposal.logits is not None
            return proposal._replace(logits=proposal.logits * 0.9, stats=None)

    draft = Lying(perturbed(target, 0.3))
    llm = engine.load(target, drafter=draft, num_draft_tokens=3, max_batch_size=4096)
    assert g_test(sample(llm, SETTINGS[0], SAMPLES // 4), law(target, SETTINGS[0])) < 1e-6
