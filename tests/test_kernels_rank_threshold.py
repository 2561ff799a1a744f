"""The threshold of top-k and top-p: what numpy finds among the largest logits is what sorting all of them gives."""

from itertools import product

import pytest
import torch

from engine.kernels import rank_threshold as module
from engine.kernels.rank_threshold import _FEW, rank_threshold

ROWS = 6


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("spread", [0.0, 0.01, 1.0, 8.0])
@pytest.mark.parametrize("vocab_size", [1, 2, 40, _FEW, _FEW + 1, 20_000])
def test_the_largest_are_enough(vocab_size: int, spread: float, dtype: torch.dtype) -> None:
    """Flat rows and peaked ones, ties, -inf, and rows that are no distribution."""
    generator = torch.Generator().manual_seed(vocab_size)
    logits = (torch.randn(ROWS, vocab_size, generator=generator) * spread).bfloat16().to(dtype)
    logits[1, 1::2] = -torch.inf
    logits[2, -1], logits[3], logits[4, 0] = torch.nan, -torch.inf, torch.inf
    scales = (None, torch.rand(ROWS, generator=generator).add(0.1).to(dtype))
    some = torch.randint(-1, vocab_size + 2, (ROWS,), generator=generator)
    counts = (None, some, torch.full((ROWS,), 50), torch.full((ROWS,), _FEW))
    shares = (
        None,
        torch.rand(ROWS, generator=generator).clamp(min=1e-3),
        *(torch.full((ROWS,), p) for p in (0.9, 1 - 2**-24, 1.0)),
    )
    for scale, top_k, top_p in product(scales, counts, shares):
        found = rank_threshold(logits, scale, top_k, top_p)
        expected = module._by_sorting(logits, scale, top_k, top_p)
        torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.filterwarnings("error")
def test_logits_that_mask_may_overflow() -> None:
    logits = torch.randn(2, 2 * _FEW, generator=torch.Generator().manual_seed(0))
    logits[:, 10:] = torch.finfo(torch.float32).min
    scale, top_p = torch.tensor([2.0, 50.0]), torch.tensor([0.9, 0.5])
    expected = module._by_sorting(logits, scale, None, top_p)
    torch.testing.assert_close(rank_threshold(logits, scale, None, top_p), expected, rtol=0, atol=0)


def test_all_are_sorted_where_few_do_not_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a flat row top-p keeps more than the few; of ties behind the last of top-k, all."""
    logits = torch.zeros(3, 5 * _FEW)
    logits[0] = torch.linspace(0, 1, 5 * _FEW)
    logits[1, :10] = 1.0
    monkeypatch.setattr(module, "_by_sorting", None)
    found = rank_threshold(logits, None, torch.tensor([0, 20, 5]), torch.tensor([0.9, 0.5, 0.9]))
    assert found[1:].tolist() == [0.0, 0.0]
    assert 0 < found[0] < 0.2
