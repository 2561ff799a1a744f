"""The torch twin: filters against transformers' own, and the hard cases one by one."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import (
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from engine.kernels import philox, reference
from engine.kernels.draw import draw, draw_by_token
from engine.kernels.records import RowStats, Status, Verdict
from engine.kernels.rows import Rows

ROWS = dict(seed=torch.tensor([5]), position=torch.tensor([11]))


def warped(logits: Tensor, temperature: float, top_k: int, top_p: float, min_p: float) -> Tensor:
    """What transformers samples from: logits [V] through its warpers, in its order."""
    warpers = [TemperatureLogitsWarper(temperature)] if temperature != 1 else []
    warpers += [TopKLogitsWarper(top_k)] if top_k > 0 else []
    warpers += [TopPLogitsWarper(top_p)] if top_p < 1 else []
    warpers += [MinPLogitsWarper(min_p)] if min_p > 0 else []
    scores = logits[None]
    for warper in warpers:
        scores = warper(None, scores)
    return scores[0]


def reference_probs(logits: Tensor, temperature: float, top_k: int, top_p: float, min_p: float) -> Tensor:
    rows = [torch.tensor([value], dtype=torch.float64) for value in (temperature, top_k, top_p, min_p)]
    stats = reference.row_stats(logits[None], *rows)
    return Rows.of(logits[None], rows[0], stats=stats).prob()[0]


@settings(max_examples=300, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 2**31),
    vocab_size=st.sampled_from([1, 2, 5, 64, 1000]),
    temperature=st.sampled_from([1.0, 0.5, 0.7, 2.0]),
    top_k=st.sampled_from([0, 1, 2, 7, 50, 5000]),
    top_p=st.one_of(st.just(1.0), st.floats(0.01, 0.999)),
    min_p=st.one_of(st.just(0.0), st.floats(0.001, 1.0)),
)
def test_filters_are_those_of_transformers(
    seed: int, vocab_size: int, temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    """The same kept set and probabilities, in float64, where no two logits tie."""
    logits = torch.randn(vocab_size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 2
    scores = warped(logits, temperature, top_k, top_p, min_p)
    ours = reference_probs(logits, temperature, top_k, top_p, min_p)
    assert torch.equal(ours > 0, scores > -torch.inf)
    torch.testing.assert_close(ours, scores.softmax(dim=-1), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("filters", [(2, 1.0, 0.0), (0, 0.5, 0.0), (0, 1.0, 0.9)], ids=["top-k", "top-p", "min-p"])
def test_ties_at_the_threshold_stay(filters: tuple[int, float, float]) -> None:
    """transformers keeps all ties under top-k and min-p, and those its sort puts last under top-p."""
    logits = torch.tensor([1.0, 3.0, 3.0, 3.0, 0.0], dtype=torch.float64)
    assert (reference_probs(logits, 1.0, *filters) > 0).tolist() == [False, True, True, True, False]


def test_filters_per_row_and_switched_off() -> None:
    logits = torch.randn(4, 3, 50, generator=torch.Generator().manual_seed(1))
    plain = reference.row_stats(logits)
    off = reference.row_stats(logits, torch.ones(4), torch.tensor([0, -1, 50, 99]), torch.ones(4), torch.zeros(4))
    torch.testing.assert_close(off.lse, plain.lse)
    assert ((logits >= off.threshold[..., None]).sum(dim=-1) == 50).all()
    mixed = reference.row_stats(logits, torch.ones(4), torch.tensor([0, 1, 2, 3]))
    assert (logits >= mixed.threshold[..., None]).sum(dim=-1).tolist() == [[50] * 3, [1] * 3, [2] * 3, [3] * 3]


def test_top_k_comes_before_top_p() -> None:
    """top-p is of what top-k left: 0.5 of {0.4, 0.3}, not of all."""
    logits = torch.tensor([0.4, 0.3, 0.2, 0.1], dtype=torch.float64).log()
    assert (reference_probs(logits, 1.0, 2, 0.5, 0.0) > 0).sum() == 1
    assert (reference_probs(logits, 1.0, 0, 0.5, 0.0) > 0).sum() == 2


def test_top_p_that_is_met_exactly() -> None:
    """As in transformers: what reaches it is enough, by one token or by two."""
    logits = torch.tensor([[0.5, 0.25, 0.25], [0.25, 0.125, 0.625], [0.5, 0.1875, 0.3125]], dtype=torch.float64).log()
    stats = reference.row_stats(logits, top_p=torch.tensor([0.5, 0.625, 0.8125], dtype=torch.float64))
    kept = [[True, False, False], [False, False, True], [True, False, True]]
    assert (logits >= stats.threshold[:, None]).tolist() == kept


def test_row_stats_of_greedy_and_invalid_rows() -> None:
    logits = torch.zeros(5, 4)
    logits[0, 2] = 1.5
    logits[1, 1], logits[2, 1], logits[3] = torch.nan, torch.inf, -torch.inf
    temperature = torch.tensor([0.0, 1.0, 1.0, 1.0, 0.0])
    stats = reference.row_stats(logits, temperature)
    assert stats.threshold[0] == 1.5 and stats.argmax[0] == 2
    assert torch.equal(stats.lse[0], logits[0].logsumexp(dim=-1))  # at temperature 1, of all tokens
    assert stats.lse.isnan().tolist() == [False, True, True, False, False]
    assert stats.lse[3] == -torch.inf
    assert stats.argmax[4] == 0 and stats.lse[4] == pytest.approx(math.log(4))
    assert stats.argmax.dtype == torch.int64 and stats.lse.dtype == torch.float32
    assert reference.row_stats(logits.double()).lse.dtype == torch.float64
    assert reference.row_stats(logits.bfloat16()).lse.dtype == torch.float32


def verify_one(
    p: list[float], token: int, q: list[float] | None = None, bonus: list[float] | None = None, **more: object
) -> Verdict:
    """A verdict on one sequence with one draft, from probabilities."""
    rows = torch.tensor([[p, bonus or p]], dtype=torch.float64).log()
    draft = None if q is None else torch.tensor([[q]], dtype=torch.float64).log()
    return reference.verify(rows, torch.tensor([[token]]), draft, **ROWS | more)


def uniform_is(monkeypatch: pytest.MonkeyPatch, value: float) -> None:
    def constant(seed: Tensor, position: Tensor, origin: Tensor, stream: int) -> Tensor:
        return torch.full(position.shape, value)

    monkeypatch.setattr(reference.philox, "uniform", constant)


def test_equal_distributions_accept_at_the_largest_uniform(monkeypatch: pytest.MonkeyPatch) -> None:
    uniform_is(monkeypatch, philox.UNIFORM_MAX)
    verdict = verify_one([0.2, 0.3, 0.5], 1, [0.2, 0.3, 0.5])
    assert verdict.num_accepted.item() == 1 and verdict.tokens[0, 0] == 1 and verdict.tokens[0, 1] >= 0
    assert verify_one([0.0, 1.0], 1).num_accepted.item() == 1  # and a one-hot draft that the target is sure of


def test_an_impossible_draft_is_never_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    """p = 0 falls even at the smallest uniform, and at 0, which `u <= p / q` would let pass."""
    for smallest in (2.0**-33, 0.0):
        uniform_is(monkeypatch, smallest)
        for q in (None, [0.5, 0.5]):
            verdict = verify_one([1.0, 0.0], 1, q)
            assert verdict.num_accepted.item() == 0 and verdict.tokens.tolist() == [[0, -1]]
            assert verdict.status.item() == 0


def test_an_empty_residual_draws_from_the_target(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not token V-1, and not nothing: with q twice p (by its stats) there is no residual."""
    uniform_is(monkeypatch, 0.9)
    p = [0.6, 0.4, 0.0]
    logits = torch.tensor([[p]], dtype=torch.float64).log()
    stats = reference.row_stats(logits)
    doubled = RowStats(stats.threshold, stats.lse - math.log(2), stats.argmax)
    verdict = verify_one(p, 0, p, draft_stats=doubled)
    assert verdict.status.item() == Status.EMPTY_RESIDUAL and verdict.num_accepted.item() == 0
    assert verdict.tokens[0, 0] in (0, 1) and verdict.tokens[0, 1] == -1


def test_a_draft_outside_its_own_distribution_ends_the_draft() -> None:
    for token, q in ((1, [1.0, 0.0]), (1, [1.0])):  # masked; beyond the drafter's vocabulary
        verdict = verify_one([0.0, 1.0], token, q)
        assert verdict.status.item() == Status.ZERO_DRAFT_PROB
        assert verdict.num_accepted.item() == 0 and verdict.tokens.tolist() == [[1, -1]]


def test_a_draft_beyond_the_target_vocabulary_is_rejected() -> None:
    verdict = verify_one([0.5, 0.5], 2, [0.1, 0.1, 0.8])
    assert verdict.num_accepted.item() == 0 and verdict.status.item() == 0 and verdict.tokens[0, 0] in (0, 1)
    assert verify_one([0.5, 0.5], 7).num_accepted.item() == 0


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_only_what_was_reached_is_reported(bad: float) -> None:
    """A broken row behind the deciding one leaves no trace; the deciding one ends the verdict without a token."""
    rows = torch.zeros(3, 3, 4)
    rows[:, 0, 1] = 50.0
    rows[0, 0, 3] = rows[1, 1, 3] = rows[2, 2, 3] = bad
    tokens = torch.tensor([[1, 2], [1, 2], [0, 2]])
    verdict = reference.verify(rows, tokens, seed=torch.arange(3), position=torch.zeros(3, dtype=torch.int64))
    assert verdict.status.tolist() == [Status.NAN_TARGET, Status.NAN_TARGET, 0]
    assert verdict.num_accepted.tolist() == [0, 1, 0]
    assert verdict.tokens.tolist() == [[-1, -1, -1], [1, -1, -1], [1, -1, -1]]


def test_empty_rows_and_broken_drafts_are_reported() -> None:
    rows = torch.zeros(3, 2, 4)
    rows[0] = -torch.inf
    draft = torch.zeros(3, 1, 4)
    draft[1, 0, 0], draft[2] = torch.nan, -torch.inf
    verdict = reference.verify(
        rows, torch.ones(3, 1, dtype=torch.int64), draft, seed=torch.arange(3), position=torch.arange(3)
    )
    assert verdict.status.tolist() == [Status.EMPTY_TARGET, Status.INVALID_DRAFT, Status.INVALID_DRAFT]
    assert verdict.tokens[0].tolist() == [-1, -1] and (verdict.tokens[1:, 0] >= 0).all()


def test_no_drafts_and_missing_drafts() -> None:
    """K = 0 samples; -1 ends a draft, and the next token is the bonus of the position it ends at."""
    rows = torch.randn(6, 3, 9, generator=torch.Generator().manual_seed(2))
    where = dict(seed=torch.arange(6), position=torch.arange(6) * 100)
    plain = reference.verify(rows[:, :1], torch.empty(6, 0, dtype=torch.int64), **where)
    assert torch.equal(plain.tokens, reference.sample(rows[:, :1], **where).tokens)
    none = reference.verify(rows, torch.full((6, 2), -1), **where)
    assert torch.equal(none.tokens[:, :1], plain.tokens) and (none.tokens[:, 1:] == -1).all()
    assert (none.num_accepted == 0).all()
    full = reference.verify(rows, torch.full((6, 2), -1), torch.zeros(6, 2, 9), **where)
    assert torch.equal(full.tokens, none.tokens) and (full.status == 0).all()


def test_greedy_follows_the_argmax() -> None:
    """Ties go to the lowest id; neither seed nor q matters."""
    rows = torch.tensor([[[0.0, 2.0, 2.0], [3.0, 1.0, 0.0], [0.0, 0.0, 5.0]]]).expand(3, 3, 3)
    tokens = torch.tensor([[1, 0], [2, 0], [1, 1]])
    where = dict(seed=torch.tensor([1, 2, 3]), position=torch.zeros(3, dtype=torch.int64))
    for draft in (None, torch.full((3, 2, 3), torch.nan)):
        verdict = reference.verify(rows, tokens, draft, temperature=torch.zeros(3), **where)
        assert verdict.tokens.tolist() == [[1, 0, 2], [1, -1, -1], [1, 0, -1]]
        assert verdict.num_accepted.tolist() == [2, 0, 1] and verdict.status.tolist() == [0, 0, 0]


def test_drafts_of_another_temperature() -> None:
    """Their logits times T_row / T_draft are at T_row what they were drawn by, as kernels/README.md has it: p = q, so all stand."""
    rows = torch.randn(40, 2, 300, generator=torch.Generator().manual_seed(4)) * 3
    where = dict(seed=torch.arange(40), position=torch.arange(40))
    drawn = reference.sample(
        rows[:, :1],
        torch.full((40,), 2.0),
        **where,
        origin=where["position"],
        stream=philox.DRAFT,
        return_logprobs=True,
    )
    scaled = rows * (0.5 / 2.0)
    verdict = reference.verify(
        scaled, drawn.tokens, scaled[:, :1], temperature=torch.full((40,), 0.5), **where, return_logprobs=True
    )
    assert (verdict.num_accepted == 1).all() and (verdict.status == 0).all()
    torch.testing.assert_close(verdict.logprobs[:, :1], drawn.logprobs)


def test_residuals_of_tiny_probabilities() -> None:
    """All that is left of p is 1e-30, where q has half of that; the draft is what p has not at all."""
    target, draft = torch.tensor([[[0.0, -69.0, -torch.inf], [0.0, 0.0, 0.0]]]), torch.tensor([[[0.0, -69.7, -70.0]]])
    verdict = reference.verify(target, torch.tensor([[2]]), draft, seed=torch.tensor([1]), position=torch.tensor([5]))
    assert verdict.tokens.tolist() == [[1, -1]] and verdict.status.tolist() == [0]


@pytest.mark.parametrize(("apart", "most"), [(1.0, 1e-6), (1e-2, 1e-4), (1e-3, 1e-3)])
def test_residuals_of_close_distributions(monkeypatch: pytest.MonkeyPatch, apart: float, most: float) -> None:
    """What float32 draws from, against float64: as far off as its logarithms are rounded, in proportion to what is left."""
    generator = torch.Generator().manual_seed(0)
    target = torch.randn(64, 2, 5000, generator=generator)
    draft = target[:, :1] + apart * torch.randn(64, 1, 5000, generator=generator)
    monkeypatch.setattr(reference.philox, "uniform", lambda seed, *_: torch.ones(64, 1))
    token = (draft - target[:, :1]).argmax(dim=-1)  # which q prefers most, so that u = 1 rejects it
    drawn_by: list[Tensor] = []
    draw = reference.draw

    def capture(weights: Tensor, *numbers: Tensor) -> Tensor:
        drawn_by.append(weights.double() / weights.double().sum(dim=-1, keepdim=True))
        return draw(weights, *numbers)

    monkeypatch.setattr(reference, "draw", capture)
    for rows in ((target, draft), (target.double(), draft.double())):
        verdict = reference.verify(rows[0], token, rows[1], seed=torch.arange(64), position=torch.arange(64))
        assert (verdict.num_accepted == 0).all()
    exact = (target[:, 0].double().softmax(dim=-1) - draft[:, 0].double().softmax(dim=-1)).clamp(min=0)
    exact /= exact.sum(dim=-1, keepdim=True)
    single, double = ((weights - exact).abs().sum(dim=-1).mean().item() / 2 for weights in drawn_by)
    assert double < 1e-9 and single < most


def test_strides_do_not_matter() -> None:
    generator = torch.Generator().manual_seed(3)
    rows, draft = torch.randn(4, 3, 8, generator=generator), torch.randn(4, 2, 8, generator=generator)
    tokens = torch.randint(0, 8, (4, 2), generator=generator)
    where = dict(seed=torch.arange(4), position=torch.arange(4))
    plain = reference.verify(rows, tokens, draft, **where)
    turned = reference.verify(rows.permute(2, 1, 0).contiguous().permute(2, 1, 0), tokens, draft, **where)
    assert all(torch.equal(a, b) for a, b in zip(plain[:3], turned[:3], strict=True))


@pytest.mark.parametrize("vocab_size", [1_000, 5_000])
def test_a_token_of_weight_0_is_not_drawn_where_there_are_others_however_small(vocab_size: int) -> None:
    """As in what a draft of nearly all mass leaves."""
    smallest = torch.finfo(torch.float32).smallest_normal * torch.finfo(torch.float32).eps
    weights = torch.zeros(vocab_size).index_fill(0, torch.tensor([17, vocab_size - 1]), smallest).expand(2_000, -1)
    assert weights.sum(dim=-1).min() > 0
    numbers = torch.arange(2_000)
    counts = draw(weights, numbers, 3 * numbers, 0, philox.SAMPLE).bincount(minlength=vocab_size)
    assert counts[17] + counts[-1] == 2_000 and abs(counts[17] - 1_000) < 5 * 500**0.5


def test_rows_without_a_distribution_can_be_raced() -> None:
    """They draw an id that is thrown away, but one of the vocabulary."""
    rows = torch.zeros(3, 5_000)
    rows[0], rows[1, 7], rows[2, 7] = -torch.inf, torch.nan, torch.inf
    numbers = torch.arange(3)
    drawn = draw_by_token(rows, numbers, numbers, numbers, philox.SAMPLE)
    assert (drawn >= 0).all() and (drawn < 5_000).all()


@pytest.mark.parametrize("name, value", [("top_k", 3), ("top_p", 0.8), ("min_p", 0.1)])
def test_the_stats_of_float64_drafts_are_those_that_verification_finds(name: str, value: float) -> None:
    """Both round behind the bias: else the least likely token that is kept may lie below its own threshold."""
    generator = torch.Generator().manual_seed(0)
    draft = torch.randn(2000, 1, 16, generator=generator, dtype=torch.float64)
    target, bias = torch.randn(2000, 2, 16, generator=generator), torch.randn(16, generator=generator)
    rows: dict[str, Any] = dict(
        seed=torch.arange(2000), position=torch.full((2000,), 5), logit_bias=bias, **{name: torch.full((2000,), value)}
    )
    draws = reference.sample(draft, origin=rows["position"], stream=philox.DRAFT, **rows)
    given, found = (reference.verify(target, draws.tokens, draft, stats, **rows) for stats in (draws.stats, None))
    assert not given.status.any()
    assert torch.equal(given.tokens, found.tokens) and torch.equal(given.num_accepted, found.num_accepted)


def test_no_log_probability_is_above_0() -> None:
    logits = 45 * (2 * torch.rand(4000, 16, generator=torch.Generator().manual_seed(0)) - 1)
    seed, position = torch.arange(4000), torch.zeros(4000, dtype=torch.int64)
    logprobs = reference.sample(logits, seed=seed, position=position, return_logprobs=True).logprobs
    assert logprobs is not None and float(logprobs.max()) == 0
    none = torch.zeros(4000, 0, dtype=torch.int64)
    verdict = reference.verify(logits[:, None], none, seed=seed, position=position, return_logprobs=True)
    assert verdict.logprobs is not None and float(verdict.logprobs.max()) == 0


def test_tensors_on_the_cpu_beside_another_default_device() -> None:
    logits, top_p = torch.randn(2, 3000), torch.full((2,), 0.9)
    logits[1, 5] = torch.nan
    expected = reference.row_stats(logits, top_p=top_p)
    with torch.device("meta"):
        stats = reference.row_stats(logits, top_p=top_p)
    assert all(a.equal(b) or a[:1].equal(b[:1]) for a, b in zip(stats, expected, strict=True)) and stats.lse[1].isnan()
