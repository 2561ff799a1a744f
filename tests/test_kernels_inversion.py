"""Drawing by inversion on a CPU: the token in whose share of [0, 1) the random number lies, and its law."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from chains import g_test
from kernel_cases import (
    assert_independent,
    assert_stats_agree,
    every_other,
    random_filters,
    random_logits,
    random_rows,
    temperatures,
)
from torch import Tensor

from engine.kernels import ops, philox, reference
from engine.kernels.ops import sample_by_inversion
from engine.kernels.records import Draws
from engine.kernels.rows import Rows

cpu = pytest.importorskip("engine.kernels.cpu", reason="needs Numba", exc_type=ImportError)
cpu_loops = pytest.importorskip("engine.kernels.cpu_loops", reason="needs Numba", exc_type=ImportError)
pytestmark = pytest.mark.filterwarnings("error::RuntimeWarning")
COUNT = 200_000
TARGET = torch.tensor([1.0, 0.5, -0.5, 2.0, 0.0, 1.2, -1.0, 0.3])
DRAFT = torch.tensor([0.0, 1.5, -0.5, 1.0, 0.0, 2.2, -3.0, -torch.inf])


def sampled(logits: Tensor, temperature: Tensor | None = None, **rows: Any) -> Draws:
    rows = {"origin": rows["position"] - 1, "stream": philox.DRAFT, **rows}
    return sample_by_inversion(logits, temperature, **rows)


def uniform(rows: dict[str, Tensor], width: int) -> Tensor:
    """In (0, 1): [B, width] float64, of the first two words of each position."""
    position = rows["position"][:, None] + torch.arange(width)
    words = philox.philox(rows["seed"][:, None], 0, position, rows["position"][:, None] - 1, philox.DRAFT)
    return words[..., 0].double() * 2.0**-32 + words[..., 1].double() * 2.0**-64


def check(logits: Tensor, temperature: Tensor | None, filters: dict[str, Tensor], rows: dict[str, Tensor]) -> None:
    draws = sampled(logits, temperature, **filters, **rows)
    stats = reference.row_stats(logits, temperature, **filters)
    assert_stats_agree(draws.stats, stats, logits.dtype, same_log=False)
    temperature = torch.ones(len(logits)) if temperature is None else temperature
    greedy = temperature < 1e-5
    kept = logits >= stats.threshold[..., None]
    scaled = logits.double() / temperature.double().where(~greedy, 1)[:, None, None]
    law = scaled.masked_fill(~kept & ~greedy[:, None, None], -torch.inf).softmax(dim=-1)
    end = law.cumsum(dim=-1).gather(-1, draws.tokens[..., None])[..., 0]
    share = law.gather(-1, draws.tokens[..., None])[..., 0]
    assert draws.logprobs is not None and draws.logprobs.dtype == torch.float32
    torch.testing.assert_close(draws.logprobs.double(), share.log(), rtol=1e-5, atol=2e-5)
    u = uniform(rows, logits.shape[1])
    assert ((share > 0) & (end - share - 1e-6 <= u) & (u <= end + 1e-6))[~greedy].all()
    assert torch.equal(draws.tokens[greedy], stats.argmax[greedy])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("filtered", [False, True], ids=["unfiltered", "filtered"])
@pytest.mark.parametrize("vocab_size", [1, 7, 1000, 49_152])
def test_the_token_at_the_random_number(vocab_size: int, filtered: bool, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(vocab_size)
    logits = random_logits(generator, 6, 3, vocab_size, dtype=dtype)
    filters = random_filters(generator, 6, vocab_size) if filtered else {}
    rows = random_rows(6, generator)
    check(logits, temperatures(6), filters, rows)
    check(logits, None, filters, rows)
    assert (temperatures(6) < 1e-5).any()


def test_strides_and_large_logits() -> None:
    generator = torch.Generator().manual_seed(3)
    logits = torch.cat([random_logits(generator, 2, 2, 501) * 1e3, random_logits(generator, 2, 2, 501) - 5000])
    check(every_other(logits), None, {}, random_rows(4, generator))


@pytest.mark.parametrize("filtered", [False, True], ids=["unfiltered", "filtered"])
def test_rows_do_not_depend_on_their_neighbours(filtered: bool) -> None:
    generator = torch.Generator().manual_seed(4)
    logits = random_logits(generator, 5, 2, 5_003, dtype=torch.bfloat16)
    filters = random_filters(generator, 5, 5_003) if filtered else {}
    assert_independent(
        lambda logits, **rows: sampled(logits, **rows),
        dict(logits=logits, temperature=temperatures(5), **filters, **random_rows(5, generator)),
    )


def test_rows_that_are_no_distribution(monkeypatch: pytest.MonkeyPatch) -> None:
    """No token, and a log-probability of 0, whatever was in memory before."""

    def full(shape: Any, dtype: type) -> Any:
        return np.full(shape, np.nan if np.issubdtype(dtype, np.floating) else 1, dtype)

    monkeypatch.setattr(cpu, "np", SimpleNamespace(**vars(np) | {"empty": full}))
    logits = torch.zeros(4, 1, 9)
    logits[0, 0, 3], logits[1], logits[2, 0, 5] = torch.nan, -torch.inf, torch.inf
    rows = random_rows(4, torch.Generator().manual_seed(5))
    for value in (1.0, 0.6, 0.0):
        temperature = torch.full((4,), value)
        draws, expected = sampled(logits, temperature, **rows), reference.sample(logits, temperature, **rows)
        assert (draws.tokens[:3] == -1).all() and draws.tokens[3] >= 0
        assert (draws.logprobs[:3] == 0).all() and torch.isfinite(draws.logprobs[3])
        assert torch.equal(draws.tokens < 0, expected.tokens < 0)
        torch.testing.assert_close(draws.stats.lse, expected.stats.lse, equal_nan=True)


@pytest.mark.parametrize(("wanted", "place"), [(0.0, 1), (2.0**-53, 1), (0.999, 1), (1.0, 3), (3.0, 3), (3.1, 3)])
def test_the_ends_of_the_unit_interval(wanted: float, place: int) -> None:
    """Tokens without probability are never drawn, though the first and the last of the vocabulary are such, and though by rounding
    more may be wanted than there is."""
    weights = np.array([0.0, 1.0, 0.0, 2.0, 0.0])
    found, rest = cpu_loops._place.py_func(weights, wanted)
    assert (found, rest) == (place, wanted - (place == 3))


def many(logits: Tensor, temperature: float = 1.0, **filters: Tensor) -> Tensor:
    """[COUNT] tokens of one row."""
    rows = dict(seed=torch.arange(COUNT) * 7919 + 5, position=torch.full((COUNT,), 20))
    filters = {name: value.expand(COUNT) for name, value in filters.items()}
    return sampled(logits.expand(COUNT, 1, -1), torch.full((COUNT,), temperature), **filters, **rows).tokens[:, 0]


@pytest.mark.parametrize("filters", [{}, {"top_k": torch.tensor(5), "top_p": torch.tensor(0.9)}], ids=["none", "some"])
def test_the_law(filters: dict[str, Tensor]) -> None:
    temperature = torch.tensor([0.8])
    rows = {name: value[None] for name, value in filters.items()}
    law = Rows.of(TARGET[None], temperature, stats=reference.row_stats(TARGET[None], temperature, **rows)).prob()[0]
    tokens = many(TARGET, 0.8, **filters)
    assert g_test(tokens, law) > 1e-3
    assert g_test(tokens, (TARGET / 0.82).softmax(-1)) < 1e-9  # a law that is close


def stale(logits: Tensor, **rows: Any) -> Draws:
    """What verification's own random numbers draw."""
    return sampled(logits, **{**rows, "stream": philox.ACCEPT})


@pytest.mark.parametrize("method", ["rejection", "block"])
@pytest.mark.parametrize(("draw", "right"), [(sampled, True), (stale, False)], ids=["right", "wrong"])
def test_drafts_that_are_verified_leave_the_targets_law(draw: Callable[..., Draws], right: bool, method: str) -> None:
    count, width = 100_000, 2
    rows = dict(seed=torch.arange(count) * 7919 + 5, position=torch.full((count,), 20))
    draft = DRAFT.expand(count, width, -1)
    draws = draw(draft, origin=rows["position"], **rows)
    target = TARGET.expand(count, width + 1, -1)
    verdict = ops.verify(target, draws.tokens, draft, draws.stats, method=method, **rows)
    assert (verdict.status == 0).all()
    law = TARGET.double().softmax(-1)
    second = verdict.tokens[:, 1]
    p = min(g_test(verdict.tokens[:, 0], law), g_test(second[second >= 0], law))
    assert p > 1e-3 if right else p < 1e-9
