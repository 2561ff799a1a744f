"""The tests' own changes to Triton's interpreter."""

import pytest
import torch
import triton
import triton.language as tl

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled here")


@triton.jit
def double(values, results):
    value = tl.load(values)
    tl.store(results, value + value)


def doubled(value: int, dtype: torch.dtype) -> int:
    values, results = torch.tensor([value], dtype=dtype), torch.zeros(1, dtype=dtype)
    double[(1,)](values, results)
    return int(results.item())


def test_a_sum_that_does_not_fit_is_caught(overflow_checked: None) -> None:
    assert doubled(2**30, torch.int64) == 2**31
    with pytest.raises(Exception, match="int32 overflow"):
        doubled(2**30, torch.int32)


def test_unless_that_is_off() -> None:
    assert doubled(2**30, torch.int32) == -(2**31)
    assert doubled(3, torch.int16) == 6 and doubled(200, torch.uint8) == 144
