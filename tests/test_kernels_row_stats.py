"""The Triton row_stats against its torch twin."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from kernel_cases import (
    DEVICE,
    DTYPES,
    LAYOUTS,
    OPTIONS,
    PLACES,
    TILED,
    TOLERANCE,
    VOCABS,
    assert_independent,
    check_row_stats,
    check_sample,
    every_other,
    far_apart,
    lay_out,
    random_filters,
    random_logits,
    random_options,
    random_rows,
    temperatures,
    word_logits,
)
from kernel_strategies import ANY_ROWS, SOME_EXAMPLES

from engine.kernels import ops
from engine.kernels.row_stats import row_stats

pytestmark = pytest.mark.usefixtures("poisoned_empty")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("vocab_size", VOCABS)
def test_rows_agree_with_the_twin(vocab_size: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(vocab_size)
    logits = random_logits(generator, 4, 2 if vocab_size < 10_000 else 1, vocab_size, dtype=dtype)
    check_row_stats(logits, temperatures(4))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_any_strides(layout: str, dtype: torch.dtype) -> None:
    logits = random_logits(torch.Generator().manual_seed(1), 4, 2, 5001, dtype=dtype)
    check_row_stats(lay_out(logits, layout), temperatures(4))
    check_row_stats(lay_out(logits, layout)[:, 1], temperatures(4))


def test_any_strides_of_small_tensors() -> None:
    """Temperature and filters are views, as of a table with a row for each sequence."""
    logits = random_logits(torch.Generator().manual_seed(15), 4, 2, 40)
    rows = dict(top_k=torch.tensor([0, 5, 9, 3]), top_p=torch.tensor([0.9, 1.0, 0.7, 0.8]),
                min_p=torch.tensor([0.0, 0.1, 0.0, 0.2]), temperature=temperatures(4))  # fmt: skip
    check_row_stats(logits, **{name: every_other(value) for name, value in rows.items()})


def test_expanded_rows_and_no_temperature() -> None:
    logits = random_logits(torch.Generator().manual_seed(2), 1, 1, 300).expand(3, 2, 300)
    stats = check_row_stats(logits)
    assert stats.lse.unique().numel() == 1


def test_no_rows() -> None:
    assert row_stats(torch.zeros(2, 0, 7, device=DEVICE)).lse.shape == (2, 0)
    assert row_stats(torch.zeros(0, 7, device=DEVICE)).argmax.shape == (0,)


def test_ties_go_to_the_lowest_id_across_blocks() -> None:
    logits = torch.zeros(2, 10_000)
    logits[0, [777, 4_096 + 3, 9_999]] = 5.0  # in three blocks, the lowest id in the highest lane
    stats = check_row_stats(logits, torch.tensor([1.0, 0.0]))
    assert stats.argmax.tolist() == [777, 0]
    assert stats.lse[1].item() == pytest.approx(math.log(10_000))  # greedy: all tie with the maximum


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("where", [0, 998, 5_000])
def test_rows_without_a_distribution(bad: float, where: int) -> None:
    logits = random_logits(torch.Generator().manual_seed(3), 4, 5_001)
    logits[0, where] = bad
    logits[1] = -torch.inf
    logits[2] = bad
    logits[3, 1:] = -torch.inf  # one token left
    for temperature in (1.0, 0.0):
        stats = check_row_stats(logits, torch.full((4,), temperature))
        assert stats.lse.isnan().tolist() == [True, False, True, False]
        assert stats.lse[1].item() == -torch.inf
        assert ((stats.argmax >= 0) & (stats.argmax < 5_001)).all()


@pytest.mark.parametrize("kernels", ["triton", "torch"])
def test_a_temperature_of_nan(kernels: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its rows are no distributions, and no id that leads out of the row is told."""
    monkeypatch.setenv("ENGINE_KERNELS", kernels)
    logits = random_logits(torch.Generator().manual_seed(4), 2, 5_001).to(DEVICE)
    temperature = torch.tensor([torch.nan, 1.0], device=DEVICE)
    seeded = dict(seed=torch.arange(2, device=DEVICE), position=torch.arange(2, device=DEVICE))
    tokens, drawn, _ = ops.sample(logits, temperature, **seeded)
    assert tokens[0] == -1 and tokens[1] >= 0
    for stats in (ops.row_stats(logits, temperature), drawn):
        assert stats.lse.isnan().tolist() == [True, False]
        assert ((stats.argmax >= 0) & (stats.argmax < 5_001)).all()


@pytest.mark.parametrize("scale", [1e-3, 1e3, 3e38])
def test_logits_of_any_size(scale: float) -> None:
    """exp never overflows, and finfo.min, by which models mask, is a logit like any other."""
    logits = torch.tensor([[1.0, -1.0, 0.5, -0.25], [-1.0, -1.0, -1.0, -1.0]]) * scale
    logits[0, 1] = torch.finfo(torch.float32).min
    check_row_stats(logits, torch.tensor([1.0, 2.0]))


@pytest.mark.usefixtures("overflow_checked")
@pytest.mark.parametrize("dim", [0, 1, 2], ids=["sequences", "rows", "tokens"])
def test_more_than_2_to_31_logits(dim: int) -> None:
    """Offsets are 64-bit."""
    logits = torch.arange(3 * 3 * (3 if dim == 2 else 16)).reshape(3, 3, -1) % 23 / 4
    check_row_stats(far_apart(logits.half(), dim))


@pytest.mark.parametrize("option", OPTIONS[1:])
@pytest.mark.parametrize("vocab_size", [40, 5_001, TILED])
def test_filters_bias_and_mask(vocab_size: int, option: str) -> None:
    """In one tile and in several."""
    generator = torch.Generator().manual_seed(vocab_size)
    logits = random_logits(generator, 4, 2 if vocab_size < TILED else 1, vocab_size, dtype=torch.bfloat16)
    check_row_stats(logits, temperatures(4), **random_options(option, generator, 4, vocab_size))


FILTERS = {"top_k": [1, 7, 40, 41, 300, 0, 0, 0, 50, 5000], "top_p": [1, 1, 1, 1, 1, 0.3, 0.9, 0.999, 0.9, 0.5],
           "min_p": [0, 0.2, 0, 0, 1e-4, 0, 0.01, 0, 0, 1e-6]}  # fmt: skip


@pytest.mark.parametrize(
    ("places", "temperature"),
    [
        *((places, 1.0) for places in PLACES),
        *((PLACES[0], 0.5), (PLACES[-1], 1.5)),
        *(pytest.param(places, 0.5, marks=pytest.mark.slow) for places in PLACES[1:]),
        *(pytest.param(places, 1.5, marks=pytest.mark.slow) for places in PLACES[:-1]),
    ],
)
def test_filters_of_words(places: str, temperature: float) -> None:
    """Where the threshold is among few groups of tokens, where among many, and where it is not worth a look at them."""
    # Not of seed 7: there the tokens that stay in one row have the mass that top-p wants to within two roundings.
    logits = word_logits(torch.Generator().manual_seed(8), TILED, places).expand(10, TILED)
    filters = {name: torch.tensor(values) for name, values in FILTERS.items()}
    check_row_stats(logits.bfloat16(), torch.full((10,), temperature), **filters)
    where = dict(seed=torch.arange(10), position=torch.arange(10))
    check_sample(logits.bfloat16(), torch.full((10,), temperature), **where, **filters)


@pytest.mark.parametrize(("dtype", "vocab_size"), [(torch.int8, 128), (torch.int8, 300), (torch.uint8, 256),
                                                   (torch.int16, 40_000), (torch.int32, 300)], ids=str)  # fmt: skip
def test_top_k_of_any_dtype(dtype: torch.dtype, vocab_size: int) -> None:
    """Of one that does not hold V too."""
    logits = torch.randn(5, vocab_size, generator=torch.Generator().manual_seed(9))
    top_k = torch.tensor([1, 5, 50, 127, 0])
    stats = check_row_stats(logits, top_k=top_k.to(dtype))
    kept = (logits >= stats.threshold.cpu()[:, None]).sum(dim=1)
    assert kept.tolist() == [1, 5, 50, 127, vocab_size]


@pytest.mark.parametrize("vocab_size", [300, 5_001])
def test_top_k_that_is_off(vocab_size: int) -> None:
    """Below 0, and of the whole vocabulary or more: of numbers too that are something else in 32 bits."""
    top_k = torch.tensor([-1, vocab_size, vocab_size + 3, 2**32 + 5, 5 - 2**32, -(2**63), 5 - 2**63])
    logits = torch.randn(len(top_k), vocab_size, generator=torch.Generator().manual_seed(10))
    stats = check_row_stats(logits, top_k=top_k)
    assert (stats.threshold == -torch.inf).all()
    check_row_stats(logits, top_k=top_k, top_p=torch.full((len(top_k),), 0.9))


def test_min_p_of_1() -> None:
    """The largest logit alone stays, whatever the other filters have left and summed up before."""
    logits = torch.randn(3, TILED, generator=torch.Generator().manual_seed(11)).bfloat16()
    filters = dict(top_k=torch.tensor([50, 0, 7_000]), top_p=torch.tensor([0.9, 0.5, 1.0]))
    for more in ({}, dict(top_k=filters["top_k"]), dict(top_p=filters["top_p"])):
        stats = check_row_stats(logits, torch.tensor([1.0, 0.7, 1.3]), min_p=torch.ones(3), **more)
        assert torch.equal(stats.threshold.cpu(), logits.amax(dim=1).float())


@pytest.mark.parametrize("name", ["top_k", "top_p", "min_p"])
def test_one_filter_beside_greedy_rows(name: str) -> None:
    """Which no filter concerns: their lse is of all logits."""
    logits = random_logits(torch.Generator().manual_seed(12), 4, 300)
    value = torch.tensor([5, 9, 3, 2]) if name == "top_k" else torch.tensor([0.5, 0.3, 0.7, 0.2])
    stats = check_row_stats(logits, torch.tensor([0.0, 1.0, 0.7, 0.0]), **{name: value})
    torch.testing.assert_close(stats.lse.cpu()[::3], logits.logsumexp(dim=-1)[::3])


def test_top_p_behind_a_top_k_of_thousands() -> None:
    """top-k leaves more than there is room for: top-p reads the row again."""
    logits = torch.randn(2, 32_000, generator=torch.Generator().manual_seed(13)).bfloat16()
    check_row_stats(
        logits, torch.tensor([1.0, 0.8]), top_k=torch.tensor([9_000, 15_000]), top_p=torch.tensor([0.9, 0.6])
    )


@pytest.fixture
def no_log_of_a_negative_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the interpreter it fails. It is NaN, which a GPU writes as 0x7fffffff, the highest of keys, where a search that begins there
    never ends; x86 gives it a sign, so that as a key it is the lowest and does no harm."""
    if DEVICE != "cpu":
        return
    from triton.runtime.interpreter import InterpreterBuilder

    def log(builder: Any, argument: Any) -> Any:
        assert not (argument.data < 0).any(), f"log({argument.data})"
        return builder.unary_op(argument, np.log)

    monkeypatch.setattr(InterpreterBuilder, "create_log", log)


@pytest.mark.usefixtures("no_log_of_a_negative_number")
def test_top_p_of_almost_1_behind_a_top_k_that_cuts_nothing() -> None:
    """By rounding, that share of what top-k left may be more than the search finds. Which of the tokens that weigh about a rounding stay
    depends on it too, so the twin's threshold may be another one; what all that stay weigh is known."""
    # Of seed 6's first eight rows it is more in these two.
    logits = 4 * torch.randn(8, TILED, generator=torch.Generator().manual_seed(6))[[2, 2, 4, 4]]
    logits[:, -40:] = -80.0
    filters = dict(top_k=torch.full((4,), TILED - 30), top_p=torch.tensor([0.9999999, 0.99999994] * 2))
    stats = row_stats(logits.to(DEVICE), **{name: value.to(DEVICE) for name, value in filters.items()})
    torch.testing.assert_close(stats.lse.cpu(), logits.logsumexp(dim=-1), **TOLERANCE[torch.float32])
    kept = logits.double().softmax(dim=-1).where(logits >= stats.threshold.cpu()[:, None], 0).sum(dim=-1)
    assert (kept > 1 - 1e-6).all()


@pytest.mark.parametrize("shift", [4.0, -4.0], ids=["higher", "lower"])
@pytest.mark.parametrize("spread", [True, False], ids=["spread", "alike"])
def test_a_sample_that_misleads(spread: bool, shift: float) -> None:
    """Every eighth token, of which the search takes its sample, is likelier or less likely than all others."""
    logits = torch.randn(6, TILED, generator=torch.Generator().manual_seed(16))
    logits[:, ::8] = logits[:, ::8] + shift if spread else 3 * shift
    top_k = torch.tensor([30, 3_000, 9_000, 15_000, 0, 0])
    check_row_stats(logits, top_k=top_k, top_p=torch.tensor([1.0, 1.0, 1.0, 1.0, 0.5, 0.95]))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_a_bias_of_another_dtype(dtype: torch.dtype) -> None:
    """Than the logits': it is added in float32, and read as what it is."""
    generator = torch.Generator().manual_seed(17)
    logits, bias = random_logits(generator, 3, 300), torch.randn(300, generator=generator).to(dtype)
    check_row_stats(logits, logit_bias=bias, top_k=torch.tensor([5, 0, 40]))
    check_sample(logits, logit_bias=bias, **random_rows(3, generator), return_logprobs=True)


@pytest.mark.parametrize("levels", [1, 2, 5])
def test_filters_of_rows_that_tie(levels: int) -> None:
    """Few different logits, of which as many tokens as there are contenders and more may tie with the last that is kept."""
    generator = torch.Generator().manual_seed(levels)
    logits = torch.randint(levels, (10, TILED), generator=generator).float() * 3
    logits[5:] = logits[5:].sort(descending=True).values
    filters = {name: torch.tensor(values) for name, values in FILTERS.items()}
    check_row_stats(logits, torch.ones(10), **filters)


@pytest.mark.parametrize("filtered", [False, True], ids=["plain", "filtered"])
def test_a_row_does_not_depend_on_its_batch(filtered: bool) -> None:
    generator = torch.Generator().manual_seed(5)
    case = dict(logits=random_logits(generator, 3, TILED), temperature=torch.tensor([0.7, 0.0, 1.3]))
    case |= random_filters(generator, 3, TILED) if filtered else {}
    assert_independent(row_stats, {name: value.to(DEVICE) for name, value in case.items()})


@pytest.mark.usefixtures("overflow_checked")
@pytest.mark.parametrize("filters", [{}, dict(top_k=torch.tensor([50]), top_p=torch.tensor([0.9]))], ids=len)
def test_the_largest_vocabulary(filters: dict[str, torch.Tensor]) -> None:
    logits = random_logits(torch.Generator().manual_seed(6), 1, 262_144, dtype=torch.bfloat16)
    check_row_stats(logits, torch.tensor([0.8]), **filters)


@SOME_EXAMPLES
@given(**ANY_ROWS)
def test_any_shape(
    seed: int, batch: int, width: int, vocab_size: int, dtype: torch.dtype, option: str, hot: bool
) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = random_logits(generator, *([batch, width] if width else [batch]), vocab_size, dtype=dtype)
    options = random_options(option, generator, batch, vocab_size)
    if width and "token_mask" in options and seed % 2:  # of each row its own
        options["token_mask"] = options["token_mask"][:, None] | (torch.rand(logits.shape, generator=generator) < 0.3)
        options["logit_bias"] = torch.randn(logits.shape, generator=generator)
    check_row_stats(logits, temperatures(batch) if hot else None, **options)
