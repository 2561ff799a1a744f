"""Microbenchmarks of ragged attention and of the masked attention that it replaces: `pytest bench --benchmark-only`.

Results are checked before they are timed. On CPU it is the torch twin that is timed, on a few small cases. On a GPU `--full`
runs three times as many, and the JSON that `--benchmark-json` writes has, under extra_info, the same call replayed from a CUDA
graph beside the baseline and a copy of as many bytes (bench/attention_cases.py).
"""

import itertools
from collections.abc import Callable
from functools import partial

import pytest
from torch import Tensor

from bench.attention_cases import CONTENDERS, CPU_CASES, GPU_CASES, AttentionCase, Inputs, check, contest, make_inputs
from bench.conftest import DEVICE

BATCHES, LENGTHS, WIDTHS = (1, 16, 64), (512, 8192), (1, 6, 8)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """By device and option."""
    cases: tuple[AttentionCase, ...] = GPU_CASES if DEVICE == "cuda" else CPU_CASES
    if DEVICE == "cuda" and metafunc.config.getoption("--full", default=False):
        cases = tuple(AttentionCase(*shape) for shape in itertools.product(BATCHES, LENGTHS, WIDTHS))
    metafunc.parametrize("case", cases, ids=lambda case: case.shape.replace(" ", "-"))


@pytest.mark.benchmark(max_time=0.5, min_rounds=5)
@pytest.mark.parametrize("name", CONTENDERS)
def test_attention(timed: Callable[..., None], name: str, case: AttentionCase) -> None:
    function: Callable[[Inputs], Tensor] = CONTENDERS[name]
    inputs = make_inputs(case, DEVICE)
    check(case, inputs, function(inputs))
    turns = [contest(case, DEVICE, repeats=20, seconds=2)] if DEVICE == "cuda" and name == "ours" else []
    timed(partial(function, inputs), bytes_moved=case.bytes_moved, contest=turns)
