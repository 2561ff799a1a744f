"""Verification on a CPU where all rows are greedy: the same as where everything is worked out."""

from typing import Any

import pytest
import torch
from kernel_cases import LAYOUTS, assert_verdicts_equal, lay_out
from torch import Tensor

from engine.kernels import cpu_greedy, ops, reference

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


def greedy_case(target: Tensor, **more: Any) -> dict[str, Any]:
    """Drafts of which many are the argmax, some another token, and some none or none of the vocabulary."""
    batch, vocab_size = len(target), target.shape[-1]
    tokens = target[:, :-1].nan_to_num().argmax(dim=-1)
    others = torch.randint(-1, vocab_size + 3, tokens.shape)
    tokens = torch.where(torch.rand(tokens.shape) < 0.3, others, tokens)
    rows = dict(temperature=torch.zeros(batch), seed=torch.arange(batch), position=torch.full((batch,), 5))
    return dict(target_logits=target, draft_tokens=tokens, **rows, **more)


@pytest.mark.parametrize("method", ops.METHODS)
@pytest.mark.parametrize("drafted", [False, True], ids=["one-hot", "q"])
@pytest.mark.parametrize("worst", [0.0, torch.nan, -torch.nan, -torch.inf, torch.inf])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_verdict_of_the_twin(method: str, drafted: bool, worst: float, dtype: torch.dtype) -> None:
    """With ties; also where a row is no distribution."""
    torch.manual_seed(0)
    target = torch.randn(40, 4, 11).to(dtype).round()
    if worst == -torch.inf:
        target[::2, 1] = worst
    elif worst:
        target[::2, 1, 4] = worst
    draft = torch.randn(40, 3, 11).to(dtype) if drafted else None
    words = dict(logit_bias=torch.randn(11).round(), token_mask=torch.arange(11) != 2)
    for more in ({}, words):
        case = greedy_case(target, draft_logits=draft, method=method, **more)
        found, expected = ops.verify(**case), reference.verify(**case)
        assert 0 < expected.num_accepted.sum() < 120
        assert bool(expected.status.any()) == bool(worst)
        assert_verdicts_equal(found, expected)
        assert [field.dtype for field in found[:3]] == [field.dtype for field in expected[:3]]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shift", [0.0, -40.0, 40.0], ids=["both signs", "below 0", "above 0"])
def test_bits_of_bfloat16_are_compared_as_numbers(shift: float, layout: str) -> None:
    torch.manual_seed(1)
    target = (3 * torch.randn(5, 4, 3_000) + shift).bfloat16()
    target[0, 0] = -torch.inf
    target[0, 0, 17] = -3.0
    target[1, 0] = -1.0
    target[1, 0, 20:22] = torch.tensor([-0.0, 0.0])  # which tie
    case = greedy_case(lay_out(target, layout))
    found = cpu_greedy.verify(case["target_logits"], case["draft_tokens"])
    assert found is not None and found.tokens[:2, 0].tolist() == [17, 20]
    assert_verdicts_equal(found, reference.verify(**case))


@pytest.mark.parametrize("bits", [0x7F80, 0x7F81, 0x7FFF, -0x7F, -0x40, -0x1])
@pytest.mark.parametrize("others", [-3.0, 3.0])
def test_every_nan_and_infinity_is_seen(bits: int, others: float) -> None:
    target = torch.full((1, 1, 50), others, dtype=torch.bfloat16)
    assert cpu_greedy.verify(target, torch.empty(1, 0, dtype=torch.int64)) is not None
    target.view(torch.int16)[0, 0, 30] = bits
    assert cpu_greedy.verify(target, torch.empty(1, 0, dtype=torch.int64)) is None


def test_no_sequences() -> None:
    found = cpu_greedy.verify(torch.empty(0, 3, 7), torch.empty(0, 2, dtype=torch.int64))
    assert found is not None and found.tokens.shape == (0, 3) and found.num_accepted.shape == (0,)


def test_the_least_temperature_at_which_rows_are_sampled() -> None:
    """1e-5 is no longer greedy, nor is a batch of nothing else."""
    rows = dict(seed=torch.arange(20), position=torch.zeros(20, dtype=torch.int64))
    tokens = torch.empty(20, 0, dtype=torch.int64)
    for temperature, greedy in ((1e-5, False), (0.99e-5, True)):
        verdict = ops.verify(torch.zeros(20, 1, 50), tokens, temperature=torch.full((20,), temperature), **rows)
        assert (verdict.tokens == 0).all() == greedy


def test_packed_rows_are_verified_as_others() -> None:
    rows = dict(seed=torch.arange(3), position=torch.zeros(3, dtype=torch.int64), temperature=torch.zeros(3))
    tokens = torch.tensor([[7, 7], [3, 3], [-1, -1]])
    packed = torch.randn(6, 50)
    begins = torch.tensor([0, 3, 5, 6], dtype=torch.int32)
    case = dict(target_logits=packed, draft_tokens=tokens, cu_num_logits=begins, **rows)
    assert_verdicts_equal(ops.verify(**case), reference.verify(**case))
