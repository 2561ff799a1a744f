"""The Triton row_stats against its torch twin."""

import math

import pytest
import torch
from kernel_cases import DEVICE, DTYPES, LAYOUTS, VOCABS, check_row_stats, lay_out, random_logits, temperatures

from engine.kernels.row_stats import row_stats

pytestmark = [
    pytest.mark.usefixtures("poisoned_empty"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter"),
]


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


@pytest.mark.parametrize("scale", [1e-3, 1e3, 3e38])
def test_logits_of_any_size(scale: float) -> None:
    """exp never overflows, and finfo.min, by which models mask, is a logit like any other."""
    logits = torch.tensor([[1.0, -1.0, 0.5, -0.25], [-1.0, -1.0, -1.0, -1.0]]) * scale
    logits[0, 1] = torch.finfo(torch.float32).min
    check_row_stats(logits, torch.tensor([1.0, 2.0]))


def test_more_than_2_to_31_logits() -> None:
    """Row offsets are 64-bit. Of the 4 GB of address space only the pages of four rows are ever touched."""
    vocab_size, stride = 16, 2**31
    storage = torch.UntypedStorage(2 * (stride + 2 * vocab_size), device=DEVICE)
    buffer = torch.tensor([], dtype=torch.float16, device=DEVICE).set_(storage)
    logits = buffer.as_strided((2, 2, vocab_size), (stride, vocab_size, 1))
    logits.copy_(torch.arange(4 * vocab_size).reshape(2, 2, vocab_size) % 23)
    stats = row_stats(logits)
    assert stats.argmax.tolist() == logits.argmax(dim=-1).tolist()
    torch.testing.assert_close(stats.lse, logits.float().logsumexp(dim=-1))
