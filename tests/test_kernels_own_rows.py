"""The torch twins give a row the same bits whatever stands beside it, however many rows there are, and on any number of threads."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from kernel_cases import assert_independent, lay_out, random_filters
from torch import Tensor

from engine.kernels import ops, philox
from engine.kernels.numerics import exp, row_sums
from engine.kernels.ops import METHODS
from engine.kernels.reference_acceptance import draft_tests, entropy, residual_masses
from engine.kernels.rows import Rows

DTYPES = [torch.float32, torch.bfloat16, torch.float64]


@pytest.fixture(params=[1, 2, 3])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def logits(seed: int, *shape: int) -> Tensor:
    """[..., V] float32, of which the last tokens count most: behind the last whole vectors is where torch may compute otherwise."""
    values = 3 * torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    values[..., -40:] += 6
    return values


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("vocab_size", [1_000, 5_001, 32_000])
def test_neighbours_do_not_change_a_row(vocab_size: int, dtype: torch.dtype) -> None:
    """Hot ones, whose sum of exponentials would overflow, and those that are no distribution."""
    rows = logits(0, 16, vocab_size).to(dtype)
    temperature = torch.linspace(0.5, 1.5, 16)
    expected = ops.row_stats(rows, temperature)
    for bad in (300.0, -300.0, torch.nan, -torch.inf, torch.inf):
        beside = rows.clone()
        beside[1::4] = bad
        found = ops.row_stats(beside, temperature)
        for field, want in zip(found, expected, strict=True):
            assert torch.equal(field[::2], want[::2])
            assert torch.equal(field[3::4], want[3::4])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("vocab_size", [1_001, 32_769, 50_257, 70_001])
@pytest.mark.parametrize("filtered", [False, True], ids=["plain", "filtered"])
def test_stats_of_rows_alone_and_together(threads: int, vocab_size: int, dtype: torch.dtype, filtered: bool) -> None:
    case = dict(logits=logits(1, 8, vocab_size).to(dtype), temperature=torch.linspace(0.5, 1.5, 8))
    case |= random_filters(torch.Generator().manual_seed(2), 8, vocab_size) if filtered else {}
    for first in range(0, 8, 3):
        assert_independent(ops.row_stats, {name: value[first:] for name, value in case.items()})


@pytest.mark.parametrize("vocab_size", [1_001, 32_769, 49_152])
@pytest.mark.parametrize("method", METHODS)
def test_verdicts_alone_and_together(threads: int, vocab_size: int, method: str) -> None:
    target = logits(3, 3, 3, vocab_size)
    draft = target[:, :2] + torch.randn(3, 2, vocab_size, generator=torch.Generator().manual_seed(4))
    rows = dict(temperature=torch.tensor([0.7, 1.0, 1.3]), seed=torch.arange(3), position=torch.arange(3))
    drawn = ops.sample(draft, **rows, origin=rows["position"], stream=philox.DRAFT)
    case: dict[str, Any] = dict(target_logits=target, draft_tokens=drawn.tokens, draft_logits=draft, **rows)
    assert_independent(partial(ops.verify, method=method, return_logprobs=True), case)


@pytest.mark.parametrize("vocab_size", [32_769, 49_152])
def test_entropies_and_residuals_alone_and_together(threads: int, vocab_size: int) -> None:
    """What `typical` and `block` compare with a number, where a last bit seldom shows in a verdict."""
    target, draft = logits(5, 8, 3, vocab_size), logits(6, 8, 2, vocab_size)
    temperature = torch.linspace(0.5, 1.5, 8)

    def compute(rows: slice) -> list[Tensor]:
        p, q = (Rows.of(each[rows], temperature[rows]) for each in (target, draft))
        tests = draft_tests(p, q, torch.ones(len(p.logits), 2, dtype=torch.int64))
        return [entropy(p), residual_masses(p, q, tests, torch.ones_like(tests.p))]

    together = compute(slice(None))
    for row in range(8):
        for whole, alone in zip(together, compute(slice(row, row + 1)), strict=True):
            assert torch.equal(whole[row : row + 1], alone)


@pytest.mark.parametrize("vocab_size", [32_769, 49_152, 70_001])
def test_a_sum_does_not_depend_on_the_number_of_rows(threads: int, vocab_size: int) -> None:
    rows = logits(9, 16, vocab_size)
    assert torch.equal(row_sums(rows), torch.cat([row_sums(row) for row in rows.split(1)]))


@pytest.mark.parametrize("size", [70_001, 98_305, 32 * 4_000])
def test_an_exponential_does_not_depend_on_its_place(threads: int, size: int) -> None:
    numbers = logits(8, size)
    padded = torch.nn.functional.pad(numbers, (0, -size % 32)).view(-1, 32)
    expected = torch.stack([exp(part) for part in padded]).flatten()[:size]
    assert torch.equal(exp(numbers), expected)
    assert torch.equal(torch.cat([exp(part) for part in numbers[:1_000].split(7)]), expected[:1_000])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_layout_does_not_change_a_row(dtype: torch.dtype) -> None:
    rows = logits(7, 3, 2, 5_001).to(dtype)
    expected = ops.row_stats(rows, torch.linspace(0.5, 1.5, 3))
    for layout in ("padded", "every other", "vocabulary first"):
        found = ops.row_stats(lay_out(rows, layout), torch.linspace(0.5, 1.5, 3))
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
