"""The Triton sample against its torch twin."""

import random
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kernel_cases import (
    DEVICE,
    DTYPES,
    LAYOUTS,
    OPTIONS,
    TILED,
    VOCABS,
    assert_independent,
    check_sample,
    every_other,
    far_apart,
    lay_out,
    random_filters,
    random_logits,
    random_options,
    random_rows,
    temperatures,
)
from kernel_strategies import ANY_ROWS, SOME_EXAMPLES

from engine.kernels import philox, reference
from engine.kernels.sample import sample

pytestmark = pytest.mark.usefixtures("poisoned_empty")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("vocab_size", VOCABS)
def test_tokens_equal_the_twin(vocab_size: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(vocab_size)
    batch = 3 if vocab_size > 10_000 else 8
    logits = random_logits(generator, batch, vocab_size, dtype=dtype)
    check_sample(logits, temperatures(batch), **random_rows(batch, generator))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_strides(layout: str) -> None:
    generator = torch.Generator().manual_seed(1)
    logits = lay_out(random_logits(generator, 4, 2, 5_001, dtype=torch.bfloat16), layout)
    check_sample(logits, temperatures(4), **random_rows(4, generator))


def test_any_strides_of_small_tensors() -> None:
    generator = torch.Generator().manual_seed(8)
    rows = random_rows(4, generator) | dict(temperature=temperatures(4), origin=torch.arange(4) * 3)
    small = {name: every_other(value) for name, value in rows.items()}
    check_sample(random_logits(generator, 4, 2, 40), **small, stream=philox.DRAFT)


@pytest.mark.usefixtures("overflow_checked")
@pytest.mark.parametrize("dim", [0, 1, 2], ids=["sequences", "rows", "tokens"])
def test_more_than_2_to_31_logits(dim: int) -> None:
    """Offsets are 64-bit."""
    generator = torch.Generator().manual_seed(5)
    logits = random_logits(generator, 3, 3, 3 if dim == 2 else 50, dtype=torch.bfloat16)
    rows = {name: value.to(DEVICE) for name, value in random_rows(3, generator).items()}
    check_sample(far_apart(logits, dim), **rows, return_logprobs=True)


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("vocab_size", [40, 5_001, TILED])
def test_filters_bias_mask_and_logprobs(vocab_size: int, option: str) -> None:
    """In one tile and in several."""
    generator = torch.Generator().manual_seed(vocab_size + 1)
    logits = random_logits(generator, 4, 2 if vocab_size < TILED else 1, vocab_size, dtype=torch.bfloat16)
    options = random_options(option, generator, 4, vocab_size) | random_rows(4, generator)
    check_sample(logits, temperatures(4), **options, return_logprobs=True)


@pytest.mark.parametrize("filtered", [False, True], ids=["plain", "filtered"])
def test_a_draw_does_not_depend_on_its_batch(filtered: bool) -> None:
    generator = torch.Generator().manual_seed(6)
    case = dict(logits=random_logits(generator, 3, TILED), temperature=torch.tensor([0.7, 1.0, 1.3]))
    case |= random_rows(3, generator) | (random_filters(generator, 3, TILED) if filtered else {})
    assert_independent(
        partial(sample, return_logprobs=True), {name: value.to(DEVICE) for name, value in case.items()}
    )  # fmt: skip


@pytest.mark.usefixtures("overflow_checked")
@pytest.mark.parametrize("filters", [{}, dict(top_k=torch.tensor([50]), top_p=torch.tensor([0.9]))], ids=len)
def test_the_largest_vocabulary(filters: dict[str, torch.Tensor]) -> None:
    generator = torch.Generator().manual_seed(7)
    logits = random_logits(generator, 1, 262_144, dtype=torch.bfloat16)
    check_sample(logits, torch.tensor([0.8]), **filters, **random_rows(1, generator))


@SOME_EXAMPLES
@given(**ANY_ROWS, drafting=st.booleans())
def test_any_shape(
    seed: int, batch: int, width: int, vocab_size: int, dtype: torch.dtype, option: str, hot: bool, drafting: bool
) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = random_logits(generator, *([batch, width] if width else [batch]), vocab_size, dtype=dtype)
    rows: dict[str, Any] = random_options(option, generator, batch, vocab_size) | random_rows(batch, generator)
    rows |= dict(origin=rows["position"] - 3, stream=philox.DRAFT) if drafting else {}
    check_sample(logits, temperatures(batch) if hot else None, **rows, return_logprobs=True)


@pytest.mark.parametrize("stream", [philox.SAMPLE, philox.DRAFT])
def test_columns_streams_and_origins(stream: int) -> None:
    generator = torch.Generator().manual_seed(2)
    logits = random_logits(generator, 1, 1, 999).expand(3, 4, 999)
    rows = random_rows(3, generator)
    tokens = check_sample(logits, None, **rows, origin=rows["position"] - 1, stream=stream)
    assert tokens.unique().numel() > 6  # twelve draws from one row
    check_sample(logits, None, **rows, stream=stream)


def test_a_column_draws_as_a_row_at_its_position() -> None:
    generator = torch.Generator().manual_seed(3)
    logits = random_logits(generator, 2, 3, 2_000).to(DEVICE)
    rows = {name: value.to(DEVICE) for name, value in random_rows(2, generator).items()}
    together = sample(logits, **rows).tokens
    for column in range(3):
        alone = sample(logits[:, column], seed=rows["seed"], position=rows["position"] + column).tokens
        assert torch.equal(together[:, column], alone)


def test_positions_around_2_to_31_and_2_to_32() -> None:
    logits = torch.zeros(1, 100).expand(5, 100)
    position = torch.tensor([2**31 - 1, 2**31, 2**32 - 1, 2**32, 0])
    tokens = check_sample(logits, seed=torch.full((5,), 7), position=position, origin=position)
    assert tokens[3] == tokens[4]  # counters are modulo 2**32


def test_rows_without_a_distribution() -> None:
    generator = torch.Generator().manual_seed(4)
    logits = random_logits(generator, 6, 1_000)
    logits[0, 999], logits[1, 0], logits[2] = torch.nan, torch.inf, -torch.inf
    logits[3] = logits[0]
    temperature = torch.tensor([1.0, 1.0, 1.0, 0.0, 0.0, 1.0])
    tokens = check_sample(logits, temperature, **random_rows(6, generator))
    assert tokens[:4].tolist() == [-1] * 4 and (tokens[4:] >= 0).all()


def test_a_low_temperature_keeps_its_randomness() -> None:
    """At T = 0.001 logits near 40 are 40,000 when scaled, in steps of 0.004; noise is not rounded to those."""
    logits = torch.full((1, 64), 40.0).expand(64, 64)
    seed = torch.arange(64)
    cold = sample(
        logits.to(DEVICE), torch.full((64,), 1e-3, device=DEVICE), seed=seed.to(DEVICE), position=seed.to(DEVICE)
    )
    warm = reference.sample(torch.zeros(64, 64), seed=seed, position=seed)
    assert torch.equal(cold.tokens.cpu(), warm.tokens)


def test_no_global_generator_is_read_or_advanced() -> None:
    rows = dict(seed=torch.zeros(2, dtype=torch.int64), position=torch.zeros(2, dtype=torch.int64))
    logits = torch.zeros(2, 50)
    results = []
    for global_seed in (1, 2):
        torch.manual_seed(global_seed)
        random.seed(global_seed)
        np.random.seed(global_seed)
        before = torch.get_rng_state(), random.getstate(), str(np.random.get_state())
        results += [reference.sample(logits, **rows).tokens, check_sample(logits, **rows).cpu()]
        after = torch.get_rng_state(), random.getstate(), str(np.random.get_state())
        assert torch.equal(before[0], after[0]) and before[1:] == after[1:]
    assert all(torch.equal(results[0], tokens) for tokens in results)
