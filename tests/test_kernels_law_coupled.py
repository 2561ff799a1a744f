"""`coupled` emits what the row would have sampled by itself, whatever was drafted, so its law is that of `sample`.

The drafts only decide how much of that text one round emits. What `sample` adds its noise to has exactly the law of the
target; that the noise is what it should be is in test_kernels_law_sampled.py and test_kernels_philox.py.
"""

import math
from typing import Any

import pytest
import torch
from chains import FILTERS, Chain, law, random_chain, rows
from torch import Tensor

from engine.kernels import philox, reference

SEEDS = torch.tensor([3, 11, -(2**63), 2**63 - 1, 2**40 + 1, 12345])
START = 40  # position of the first drafted token


def plain_text(chain: Chain, seed: int, filters: dict[str, Tensor]) -> list[int]:
    """The chain decoded one token at a time with `sample`."""
    text: list[int] = []
    for i, table in enumerate(chain.target):
        where = dict(seed=torch.tensor([seed]), position=torch.tensor([START + i]))
        text.append(reference.sample(table[tuple(text)][None], **filters, **where).tokens.item())
    return text


def assert_emits(text: list[int], drafts: Tensor, tokens: Tensor, num_accepted: Tensor) -> None:
    """Every round emits the longest prefix of the text that its drafts agree with, and one token more."""
    agree = (drafts == torch.tensor(text[:-1], dtype=torch.int64)).int().cumprod(dim=1).sum(dim=1)
    expected = torch.tensor(text).expand(len(drafts), -1).masked_fill(torch.arange(len(text)) > agree[:, None], -1)
    assert torch.equal(num_accepted.long(), agree) and torch.equal(tokens, expected)


class Drawing:
    """`reference` with the log weights captured to which it would add noise for each token."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.log_weights: list[Tensor] = []
        monkeypatch.setattr(reference, "draw_by_token", self.capture)

    def capture(self, log_weights: Tensor, seed: Tensor, *args: object) -> Tensor:
        self.log_weights.append(log_weights.flatten(0, -2))
        return torch.zeros(log_weights.shape[:-1], dtype=torch.int64)

    def law(self) -> Tensor:
        """Of all rows drawn so far: [rows, V]."""
        drawn, self.log_weights = torch.cat(self.log_weights), []
        return drawn.softmax(dim=-1)


@pytest.mark.parametrize("filters", FILTERS)
@pytest.mark.parametrize("kind", ["any", "zeros"])
@pytest.mark.parametrize("vocab_size", [3, 4, 5])
def test_what_is_drawn_from_has_the_law_of_the_target(
    monkeypatch: pytest.MonkeyPatch, vocab_size: int, kind: str, filters: str
) -> None:
    """The argmax of log p + Gumbel noise has the law p (Gumbel 1954): p is exact, in `sample` and in each row of `verify`."""
    chain = random_chain(6, vocab_size, 2, kind, FILTERS[filters])
    drafts = chain.drafts()
    logits = chain.rows_of(chain.target, drafts)
    where = dict(seed=drafts[:, 0], position=drafts[:, 1], **rows(chain.filters, len(drafts)))
    expected = law(logits, chain.filters).flatten(0, 1)
    drawing = Drawing(monkeypatch)
    reference.sample(logits, **where)
    assert (drawing.law() - expected).abs().max() < 1e-12
    for column in range(3):
        reference.sample(logits[:, column], **where)
        assert (drawing.law() - expected.unflatten(0, (-1, 3))[:, column]).abs().max() < 1e-12
    reference.verify(logits, drafts, **where, method="coupled")
    assert (drawing.law() - expected).abs().max() < 1e-12


@pytest.mark.parametrize("wrong", [dict(temperature=0.61), dict(temperature=0.6, top_k=4)], ids=str)
def test_another_law_is_caught(monkeypatch: pytest.MonkeyPatch, wrong: dict[str, float]) -> None:
    """Negative control."""
    chain = random_chain(6, 5, 0, "any", FILTERS["temperature"])
    drawing = Drawing(monkeypatch)
    where = dict(seed=torch.zeros(1, dtype=torch.int64), position=torch.zeros(1, dtype=torch.int64))
    reference.sample(chain.target[0][None], **rows(wrong, 1), **where)
    assert (drawing.law() - law(chain.target[0], chain.filters)).abs().max() > 1e-3


@pytest.mark.parametrize("filters", [*FILTERS, "greedy"])
@pytest.mark.parametrize("kind", ["any", "zeros"])
@pytest.mark.parametrize("vocab_size", [3, 4, 5])
def test_every_draft_emits_the_text_of_plain_decoding(vocab_size: int, kind: str, filters: str) -> None:
    """All sequences of 3 drafts, of 2 with an end, of 1, and none; with logits of the drafter that are not looked at."""
    given = {"temperature": 0.0} if filters == "greedy" else FILTERS[filters]
    chain = random_chain(5, vocab_size, 3, kind, given, draft_vocab=vocab_size + 1)
    tails = torch.tensor([[0, 0, 0], [0, 0, 1], [0, 1, 1], [1, 1, 1]], dtype=torch.bool)
    drafts = torch.cat([chain.drafts().masked_fill(tail, -1) for tail in tails]).unique(dim=0)
    batch = len(drafts)
    target = chain.rows_of(chain.target, drafts)
    nothing = torch.full((batch, 3, vocab_size + 1), torch.nan, dtype=torch.float64)
    for seed in SEEDS.tolist():
        where = dict(seed=torch.full((batch,), seed), position=torch.full((batch,), START))
        more = dict(where, **rows(chain.filters, batch), method="coupled")
        text = plain_text(chain, seed, rows(chain.filters, 1))
        for draft_logits in (None, nothing):
            verdict = reference.verify(target, drafts, draft_logits, **more)
            assert_emits(text, drafts, verdict.tokens, verdict.num_accepted)
            assert (verdict.status == 0).all()


def mixed_batch(generator: torch.Generator, vocab_size: int, dtype: torch.dtype) -> dict[str, Any]:
    """Rows that differ in everything: greedy ones, filters, seeds, positions, bias and mask; [24, 4, V], with ties."""
    batch = 24

    def pick(*values: float) -> Tensor:
        return torch.tensor(values)[torch.arange(batch) % len(values)]

    mask = torch.rand(batch, 4, vocab_size, generator=generator) < 0.7
    mask[..., 0] = True  # no row is left empty
    return dict(
        logits=(torch.randn(batch, 4, vocab_size, generator=generator) * 2).round().to(dtype),
        temperature=pick(1.0, 0.0, 0.7, 1.5, 0.9),
        top_k=pick(0, 5, 40).long(),
        top_p=pick(1.0, 0.9, 1.0, 0.6),
        min_p=pick(0.0, 0.0, 0.0, 0.05, 0.0, 0.3, 0.0),
        seed=torch.randint(-(2**63), 2**63 - 1, (batch,), generator=generator),
        position=torch.randint(0, 10_000, (batch,), generator=generator),
        logit_bias=torch.randint(-2, 3, (batch, 4, vocab_size), generator=generator).float(),
        token_mask=mask,
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("vocab_size", [7, 3000])
def test_rows_of_every_kind_in_one_batch(vocab_size: int, dtype: torch.dtype) -> None:
    """What is emitted, at each draft length, is what one call of `sample` draws from the rows, and all else is -1."""
    case = mixed_batch(torch.Generator().manual_seed(vocab_size), vocab_size, dtype)
    logits = case.pop("logits")
    own = reference.sample(logits, **case).tokens
    assert (own >= 0).all() and case["token_mask"].gather(-1, own[..., None]).all()
    largest = (logits.float() + case["logit_bias"]).masked_fill(~case["token_mask"], -torch.inf).argmax(dim=-1)
    assert torch.equal(own[case["temperature"] == 0], largest[case["temperature"] == 0])
    wrong = (own[:, :3] + 1) % vocab_size
    for right in range(4):  # so many drafts that agree, then one that does not, then one that does
        drafts = torch.where(torch.arange(3) == right, wrong, own[:, :3])
        verdict = reference.verify(logits, drafts, **case, method="coupled")
        assert (verdict.num_accepted == right).all()
        assert torch.equal(verdict.tokens, own.masked_fill(torch.arange(4) > right, -1))
        ended = reference.verify(logits, drafts.masked_fill(torch.arange(3) >= right, -1), **case, method="coupled")
        assert torch.equal(ended.tokens, verdict.tokens)


def test_the_text_does_not_depend_on_the_length_of_the_rounds() -> None:
    """200 tokens of a Markov chain in rounds of 0, 1, 3 and 5 drafts by a drafter with the same noise: one text."""
    generator = torch.Generator().manual_seed(1)
    table = torch.randn(50, 50, generator=generator) * 2
    drafter = table + torch.randn(50, 50, generator=generator)
    seed = torch.tensor([77])

    def text(num_drafts: int) -> list[int]:
        tokens = [0]
        while len(tokens) < 200:
            drafts = tokens[-1:]
            for i in range(num_drafts):
                where = dict(seed=seed, position=torch.tensor([len(tokens) + i]))
                drafts.append(reference.sample(drafter[drafts[-1:]], **where).tokens.item())
            where = dict(seed=seed, position=torch.tensor([len(tokens)]))
            proposed = torch.tensor([drafts[1:]], dtype=torch.int64)
            verdict = reference.verify(table[drafts][None], proposed, **where, method="coupled")
            tokens += verdict.tokens[0, : verdict.num_accepted.item() + 1].tolist()
        return tokens[:200]

    plain = text(0)
    assert len(set(plain)) > 20
    assert all(text(num_drafts) == plain for num_drafts in (1, 3, 5))


def pairs() -> dict[str, tuple[Tensor, Tensor]]:
    """Logits of p and q, near and far."""
    generator = torch.Generator().manual_seed(4)
    p, noise = torch.randn(2, 12, generator=generator)
    half = torch.arange(12) < 6
    return {
        "equal": (p, p + 3),
        "near": (p, p + 0.3 * noise),
        "far": (p, p + 2 * noise),
        "sharp": (4 * p, 4 * p + noise),
        "one-hot q": (p, 50 * p),
        "disjoint": (p.masked_fill(half, -torch.inf), p.masked_fill(~half, -torch.inf)),
    }


@pytest.mark.parametrize("name", pairs())
def test_shared_noise_is_accepted_within_its_bounds(name: str) -> None:
    """Between (1 - TV) / (1 + TV) (Daliri et al.) and 1 - TV (any rule), give or take 4 standard deviations."""
    p, q = pairs()[name]
    count = 100_000
    distance = (p.softmax(dim=0) - q.softmax(dim=0)).abs().sum().item() / 2
    where = dict(seed=torch.arange(count) * 6151 + 5, position=torch.full((count,), 9))
    drafts = reference.sample(q.expand(count, -1), **where, stream=philox.SAMPLE).tokens
    target = p.expand(count, 2, -1)
    accepted = reference.verify(target, drafts[:, None], **where, method="coupled").num_accepted.double().mean().item()
    low, high = (1 - distance) / (1 + distance), 1 - distance
    slack = 4 * math.sqrt(0.25 / count) if 1e-6 < distance < 1 - 1e-6 else 1e-6
    assert low - slack < accepted < high + slack


@pytest.mark.parametrize("stream", [philox.DRAFT, philox.RESIDUAL])
def test_other_noise_falls_below_the_bounds(stream: int) -> None:
    """Negative control: a drafter with noise of its own agrees only by chance, with probability sum of p q."""
    p, q = pairs()["near"]
    count = 100_000
    where = dict(seed=torch.arange(count) * 6151 + 5, position=torch.full((count,), 9))
    drafts = reference.sample(q.expand(count, -1), **where, stream=stream).tokens
    verdict = reference.verify(p.expand(count, 2, -1), drafts[:, None], **where, method="coupled")
    by_chance = (p.softmax(dim=0) * q.softmax(dim=0)).sum().item()
    assert by_chance < 0.3
    assert verdict.num_accepted.double().mean().item() == pytest.approx(by_chance, abs=4 * math.sqrt(0.25 / count))
