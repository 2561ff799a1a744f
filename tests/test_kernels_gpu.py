"""The kernels compiled and on a GPU, against the torch twin on the CPU: `pytest -m gpu`."""

import pytest
import torch
from kernel_cases import (
    DTYPES,
    LAYOUTS,
    VOCABS,
    assert_verdicts_equal,
    check_row_stats,
    check_sample,
    check_verify,
    lay_out,
    random_cases,
    random_logits,
    random_rows,
    temperatures,
    to_device,
    verify_case,
)
from torch import Tensor

from engine.kernels import ops, reference

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poisoned_empty")]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("vocab_size", VOCABS)
def test_rows_and_samples_equal_the_twin(vocab_size: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(vocab_size)
    logits = random_logits(generator, 8, 3, vocab_size, dtype=dtype)
    for layout in LAYOUTS:
        check_row_stats(lay_out(logits, layout), temperatures(8), device="cuda")
    check_sample(logits, temperatures(8), device="cuda", **random_rows(8, generator))


@pytest.mark.parametrize("kind", ["full", "one-hot"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("vocab_size", VOCABS)
def test_verdicts_equal_the_twin(vocab_size: int, dtype: torch.dtype, kind: str) -> None:
    generator = torch.Generator().manual_seed(vocab_size)
    case = verify_case(generator, 16, 4, vocab_size, vocab_size if kind == "full" else None, dtype)
    check_verify(case, device="cuda")


def test_equal_seeds_give_equal_tokens() -> None:
    for case in random_cases(10_000):
        check_verify(case, device="cuda")


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_rows_without_a_distribution(bad: float) -> None:
    case = verify_case(torch.Generator().manual_seed(1), 12, 2, 1_000, 1_000)
    where = slice(None) if bad == -torch.inf else 7
    for row in range(3):
        case["target_logits"][row:6:3, row, where] = bad
    case["draft_logits"][6:, 1, where] = bad
    check_verify(case, device="cuda")


def test_dispatch_uses_triton_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    called = []
    monkeypatch.setattr("engine.kernels.row_stats.row_stats", lambda *args: called.append("triton"))
    ops.row_stats(torch.zeros(2, 5, device="cuda"))
    assert called == ["triton"]


@pytest.mark.parametrize("num_drafts", [0, 4])
def test_a_captured_graph_replays_on_new_inputs(num_drafts: int) -> None:
    """No synchronisation and no allocation that depends on data: one graph serves every later round."""
    cases = [
        verify_case(torch.Generator().manual_seed(seed), 8, num_drafts, 32_000, 32_000, torch.bfloat16)
        for seed in range(3)
    ]
    static: dict[str, Tensor] = {name: value.cuda() for name, value in cases[0].items()}
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        ops.verify(**static)  # compiles
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        verdict = ops.verify(**static)
    for case in cases[1:]:
        for name, value in case.items():
            static[name].copy_(value)
        graph.replay()
        torch.cuda.synchronize()
        assert_verdicts_equal(verdict, reference.verify(**case))


def test_neighbours_do_not_matter() -> None:
    case = verify_case(torch.Generator().manual_seed(2), 64, 4, 50_257, 50_257, torch.bfloat16)
    on_device = {name: to_device(value, "cuda") for name, value in case.items()}
    together = ops.verify(**on_device)
    alone = ops.verify(**{name: value[40:41] for name, value in on_device.items()})
    assert all(torch.equal(a[40:41], b) for a, b in zip(together[:3], alone[:3], strict=True))
