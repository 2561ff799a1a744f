"""The kernels compiled and on a GPU, against the torch twin on the CPU: `pytest -m gpu`."""

from functools import partial
from itertools import product

import pytest
import torch
from kernel_cases import (
    DTYPES,
    LAYOUTS,
    VOCABS,
    assert_independent,
    assert_verdicts_equal,
    check_row_stats,
    check_sample,
    check_verify,
    lay_out,
    pack,
    random_cases,
    random_filters,
    random_logits,
    random_rows,
    random_words,
    temperatures,
    to_device,
    verify_case,
)
from torch import Tensor
from triton import knobs

from engine.kernels import ops, reference, workspace
from engine.kernels.warmup import warmup

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


@pytest.mark.parametrize("filtered", [False, True], ids=["plain", "filtered"])
@pytest.mark.parametrize("vocab_size", [40, 5_000, 151_936])
@pytest.mark.parametrize("kind", ["full", "one-hot"])
@pytest.mark.parametrize("method", ops.METHODS)
def test_every_method_equals_the_twin(method: str, kind: str, vocab_size: int, filtered: bool) -> None:
    generator = torch.Generator().manual_seed(vocab_size)
    case = verify_case(generator, 8, 4, vocab_size, vocab_size if kind == "full" else None, torch.bfloat16)
    options = random_filters(generator, 8, vocab_size) | random_words(generator, 8, vocab_size) if filtered else {}
    check_verify(case, device="cuda", **options, method=method, return_logprobs=True)


@pytest.mark.parametrize("filtered", [False, True], ids=["plain", "filtered"])
@pytest.mark.parametrize("kind", ["full", "one-hot"])
@pytest.mark.parametrize("method", ops.METHODS)
def test_packed_rows_give_what_padded_ones_do(method: str, kind: str, filtered: bool) -> None:
    generator, vocab_size = torch.Generator().manual_seed(7), 50_264
    options = random_filters(generator, 6, vocab_size) | random_words(generator, 6, vocab_size) if filtered else {}
    draft_vocab = vocab_size if kind == "full" else None
    case = verify_case(generator, 6, 3, vocab_size, draft_vocab, torch.bfloat16, options) | dict(method=method)
    rows = pack(case, (4, 1, 0, 3, 4, 2))
    padded, packed = (ops.verify(**{k: to_device(v, "cuda") for k, v in each.items()}) for each in (case, rows))
    assert_verdicts_equal(packed, reference.verify(**case))
    assert all(torch.equal(one, other) for one, other in zip(packed[:3], padded[:3], strict=True))


@pytest.mark.parametrize("vocab_size", [32_000, 151_936])
@pytest.mark.parametrize("scale", [0.3, 3.0], ids=["flat", "peaked"])
def test_filtered_rows_equal_the_twin(vocab_size: int, scale: float) -> None:
    generator = torch.Generator().manual_seed(vocab_size)
    logits = (random_logits(generator, 16, 4, vocab_size) * scale).bfloat16()
    filters = random_filters(generator, 16, vocab_size)
    check_row_stats(logits, temperatures(16), device="cuda", **filters)
    check_sample(logits, temperatures(16), device="cuda", **filters, **random_rows(16, generator))


@pytest.mark.parametrize("vocab_size", [32_000, 50_264])
def test_nothing_compiles_after_a_warm_up(vocab_size: int) -> None:
    """Whatever batch and number of drafts come, with filters and without; also where rows begin on no multiple of 16."""
    warmup(vocab_size, 4, torch.bfloat16, "cuda", ops.METHODS, vocab_size, filters=True)
    compiled: list[object] = []
    hook, knobs.runtime.jit_post_compile_hook = knobs.runtime.jit_post_compile_hook, lambda **kwargs: compiled.append(1)
    try:
        for batch, num_drafts, method in product((1, 3, 16), (0, 1, 2, 3, 4), ops.METHODS):
            generator = torch.Generator().manual_seed(batch)
            case = verify_case(generator, batch, num_drafts, vocab_size, vocab_size, torch.bfloat16)
            for options in ({}, random_filters(generator, batch, vocab_size)):
                case_on_gpu = {name: to_device(value, "cuda") for name, value in (case | options).items()}
                ops.verify(**case_on_gpu, method=method)
    finally:
        knobs.runtime.jit_post_compile_hook = hook
    assert not compiled


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
    monkeypatch.setattr("engine.kernels.row_stats.row_stats", lambda *args, **kwargs: called.append("triton"))
    ops.row_stats(torch.zeros(2, 5, device="cuda"))
    assert called == ["triton"]


@pytest.mark.parametrize("filtered", [False, True], ids=["plain", "filtered"])
@pytest.mark.parametrize("method", ops.METHODS)
@pytest.mark.parametrize("num_drafts", [0, 4])
def test_a_captured_graph_replays_on_new_inputs(num_drafts: int, method: str, filtered: bool) -> None:
    """No synchronisation and no allocation that depends on data: one graph serves every later round, of NaN too."""
    warmup(32_000, num_drafts, torch.bfloat16, "cuda", (method,), 32_000, filters=filtered)
    reserved = workspace._reserved[torch.device("cuda", torch.cuda.current_device())]
    cases = []
    for seed in range(4):
        generator = torch.Generator().manual_seed(seed)
        case = verify_case(generator, 8, num_drafts, 32_000, 32_000, torch.bfloat16)
        cases.append(case | (random_filters(generator, 8, 32_000) if filtered else {}))
    cases[2]["target_logits"][::2, 0, 7] = torch.nan
    static: dict[str, Tensor] = {name: value.cuda() for name, value in cases[0].items()}
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        ops.verify(**static, method=method)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        verdict = ops.verify(**static, method=method)
    for case in cases[1:]:
        for name, value in case.items():
            static[name].copy_(value)
        graph.replay()
        torch.cuda.synchronize()
        assert_verdicts_equal(verdict, reference.verify(**case, method=method))
        assert not reserved.any()  # the graph's counters are 0 again


@pytest.mark.parametrize("filtered", [False, True], ids=["plain", "filtered"])
@pytest.mark.parametrize("kind", ["full", "one-hot"])
@pytest.mark.parametrize("method", ops.METHODS)
def test_neighbours_do_not_matter(method: str, kind: str, filtered: bool) -> None:
    generator = torch.Generator().manual_seed(2)
    case = verify_case(generator, 64, 4, 50_257, 50_257 if kind == "full" else None, torch.bfloat16)
    case |= random_filters(generator, 64, 50_257) if filtered else {}
    on_device = {name: to_device(value, "cuda") for name, value in case.items() if value is not None}
    assert_independent(partial(ops.verify, method=method, return_logprobs=True), on_device)


@pytest.mark.parametrize("kind", ["full", "one-hot"])
def test_a_thousand_sequences(kind: str) -> None:
    check_verify(verify_case(torch.Generator().manual_seed(3), 1_024, 4, 500, 500 if kind == "full" else None), "cuda")
