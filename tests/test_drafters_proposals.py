"""What proposals are made of."""

import pytest
import torch
from torch import Tensor

from engine.backend import row_stats
from engine.drafters.proposals import BELOW_ONE, likeliest, probability


def by_stats(logits: Tensor) -> tuple[Tensor, Tensor]:
    """What `likeliest` does on a GPU."""
    stats = row_stats(logits)
    tokens = stats.argmax.where(stats.lse.isfinite(), -1)
    return tokens, probability(tokens, logits, stats)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_the_likeliest_by_softmax_and_by_stats(dtype: torch.dtype) -> None:
    logits = (3 * torch.randn(4, 3, 500, generator=torch.Generator().manual_seed(0))).to(dtype)
    logits[0, 0, 7:] = -torch.inf  # masked
    logits[0, 1] = logits[0, 1].clamp(max=0.5)  # a tie: the first
    logits[1, 0, 3], logits[1, 1], logits[1, 2, 9] = torch.nan, -torch.inf, torch.inf
    logits[2, 0] = torch.where(torch.arange(500) == 4, 0, -torch.inf)
    found, (tokens, sure) = likeliest(logits), by_stats(logits)
    assert found.confidence is not None and found.confidence.dtype == torch.float32
    assert torch.equal(found.tokens, tokens) and found.tokens[1].tolist() == [-1, -1, -1]
    assert found.tokens[0, 1] == int(logits[0, 1].argmax()) and found.tokens[2, 0] == 4
    torch.testing.assert_close(found.confidence, sure.float(), rtol=1e-5, atol=1e-6)
    assert found.confidence[1].tolist() == [0, 0, 0] and float(found.confidence[2, 0]) == pytest.approx(BELOW_ONE)
    assert bool((found.confidence < 1).all())
