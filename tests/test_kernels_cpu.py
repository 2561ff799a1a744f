"""What the compiled loops of CPUs promise beside what their twins compute (kernel_cases.py compares them wherever it looks at Triton)."""

import errno
import os
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from kernel_cases import (
    EXTREME_WORDS,
    LAYOUTS,
    assert_independent,
    assert_stats_agree,
    assert_verdicts_equal,
    lay_out,
    pack,
    random_filters,
    random_logits,
    random_rows,
    verify_case,
)
from tiny_models import tiny
from torch import Tensor

import engine
from engine.kernels import ops, philox, reference
from engine.kernels.records import Status
from engine.kernels.warmup import warmup

cpu = pytest.importorskip("engine.kernels.cpu", reason="needs Numba", exc_type=ImportError)
cpu_loops = pytest.importorskip("engine.kernels.cpu_loops", reason="needs Numba", exc_type=ImportError)
IndexDataCacheFile = pytest.importorskip("numba.core.caching").IndexDataCacheFile
METHODS = ("rejection", "block", "coupled")
VOCAB = 5_003  # several blocks, the last of which is not whole


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("draft_vocab", [None, VOCAB, 3_000], ids=["one-hot", "full", "smaller"])
@pytest.mark.parametrize("method", METHODS)
def test_ordinary_calls_stay_in_the_loops(
    monkeypatch: pytest.MonkeyPatch, method: str, draft_vocab: int | None, dtype: torch.dtype
) -> None:
    """Sequences that are greedy or have no draft or few among them."""
    case, rows = verify_case(generator(1), 8, 3, VOCAB, draft_vocab, dtype), random_rows(8, generator(2))
    for name in ("row_stats", "sample", "verify"):
        monkeypatch.delattr(reference, name)
    verdict = ops.verify(**case, method=method, return_logprobs=True)
    assert (verdict.num_accepted >= 0).all()
    ops.row_stats(case["target_logits"], case["temperature"])
    ops.sample(case["target_logits"], case["temperature"], **rows)
    ops.sample_by_inversion(case["target_logits"], **rows, origin=rows["position"], stream=philox.DRAFT)


@pytest.mark.parametrize("filtered", [False, True], ids=["plain", "filtered"])
@pytest.mark.parametrize("draft_vocab", [None, VOCAB], ids=["one-hot", "full"])
@pytest.mark.parametrize("method", METHODS)
def test_sequences_do_not_depend_on_their_neighbours(method: str, draft_vocab: int | None, filtered: bool) -> None:
    """Bit for bit, not even where one of them goes to the reference."""
    case = verify_case(generator(3), 6, 3, VOCAB, draft_vocab, torch.bfloat16)
    case |= random_filters(generator(4), 6, VOCAB) if filtered else {}
    case["target_logits"][2, 0, 7] = torch.nan
    case = {name: value for name, value in case.items() if value is not None}
    assert_independent(partial(ops.verify, method=method, return_logprobs=True), case)


@pytest.mark.parametrize("threads", [2, 3, 16])
def test_threads_change_nothing(monkeypatch: pytest.MonkeyPatch, threads: int) -> None:
    """Bit for bit, and where there are more of them than sequences."""
    case = verify_case(generator(11), 7, 3, VOCAB, VOCAB, torch.bfloat16)
    started = []

    class Pool(ThreadPoolExecutor):
        def __init__(self, size: int) -> None:
            started.append(size)
            super().__init__(size)

    def results() -> list[Tensor]:
        draws = ops.sample(case["target_logits"], **random_rows(7, generator(12)), return_logprobs=True)
        return [*ops.verify(**case, method="block", return_logprobs=True), *draws.stats, draws.tokens, draws.logprobs]

    alone = results()
    monkeypatch.setattr(cpu, "SHARED", 1)
    monkeypatch.setattr(cpu, "ThreadPoolExecutor", Pool)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    assert all(torch.equal(one, other) for one, other in zip(alone, results(), strict=True))
    assert set(started) == {min(threads, 7)}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_any_layout(dtype: torch.dtype, layout: str) -> None:
    case = verify_case(generator(5), 5, 2, 1_300, 1_300, dtype)
    expected = reference.verify(**case, return_logprobs=True)
    laid_out = case | {name: lay_out(case[name], layout) for name in ("target_logits", "draft_logits")}
    laid_out["draft_tokens"] = case["draft_tokens"].t().contiguous().t()
    assert_verdicts_equal(ops.verify(**laid_out, return_logprobs=True), expected)


def test_one_row_for_many() -> None:
    """A stride of 0, as `expand` makes it, and numbers that need gradients."""
    logits = random_logits(generator(6), 1, 1, 700).requires_grad_()
    rows = random_rows(50, generator(7))
    with torch.no_grad():
        expected = reference.sample(logits.expand(50, 2, 700), **rows)
    assert torch.equal(ops.sample(logits.expand(50, 2, 700), **rows).tokens, expected.tokens)
    assert_stats_agree(ops.row_stats(logits[0]), reference.row_stats(logits[0].detach()), torch.float32)


@pytest.mark.parametrize("method", METHODS)
def test_packed_rows_that_are_missing(method: str) -> None:
    """Sequences whose last row is missing, though its drafts reach it or not."""
    case = verify_case(generator(8), 6, 3, 900, 900, torch.bfloat16)
    packed = pack(case, (4, 1, 2, 4, 3, 2))
    assert_verdicts_equal(ops.verify(**packed, method=method), reference.verify(**packed, method=method))
    packed["draft_tokens"] = torch.full_like(packed["draft_tokens"], 5)
    assert_verdicts_equal(ops.verify(**packed, method=method), reference.verify(**packed, method=method))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("beyond", [1, 2, -3])
def test_packed_rows_beyond_all(beyond: int, method: str) -> None:
    """Loops would read what lies behind or before them in memory, and an index from the end of them."""
    packed = pack(verify_case(generator(13), 4, 3, 900, 900), (4, 4, 4, 4), before=0, behind=0)
    packed["cu_num_logits"] = packed["cu_num_logits"] + beyond
    assert not cpu._inside(packed["cu_num_logits"], len(packed["target_logits"]))
    verdict = reference.verify(**packed, method=method)
    assert_verdicts_equal(ops.verify(**packed, method=method), verdict)
    assert beyond > 0 or verdict.status[0] & Status.EMPTY_TARGET


def test_no_sequences_and_no_rows() -> None:
    none = verify_case(generator(9), 0, 2, 50, 50)
    assert ops.verify(**none).tokens.shape == (0, 3)
    assert ops.row_stats(torch.empty(3, 0, 50)).lse.shape == (3, 0)


def test_weights_are_those_of_a_power_of_two() -> None:
    """Within 3 units in the last place over all normal numbers; nothing below them."""
    x = np.linspace(-125.9, 0, 200_001).astype(np.float32)
    ours = np.array([cpu_loops._exp2.py_func(each) for each in x[::40]])
    assert np.abs(ours / np.exp2(x[::40].astype(np.float64)) - 1).max() < 3 * 2.0**-23
    assert cpu_loops._exp2.py_func(np.float32(-127)) == 0


def test_torch_serves_where_it_is_asked_to(monkeypatch: pytest.MonkeyPatch) -> None:
    logits, double = torch.zeros(2, 9), torch.zeros(2, 9, dtype=torch.float64)
    assert ops.use_loops(logits) and not ops.use_loops(double) and not ops.use_loops(logits, double)
    assert not ops.use_loops(logits.to("meta"))
    monkeypatch.setenv("ENGINE_KERNELS", "torch")
    assert not ops.use_loops(logits)
    monkeypatch.delenv("ENGINE_KERNELS")
    monkeypatch.setattr(ops, "_has_numba", lambda: False)
    assert not ops.use_loops(logits)
    rows = random_rows(2, generator(10)) | dict(origin=torch.zeros(2, dtype=torch.int64), stream=philox.DRAFT)
    assert torch.equal(ops.sample_by_inversion(logits, **rows).tokens, reference.sample(logits, **rows).tokens)


def test_a_warmup_compiles_the_loops(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of the kernels, and one of an engine for requests that sample or want log-probabilities."""
    called: list[str] = []
    for loop in (cpu_loops.sample_rows, cpu_loops.verify_sequences):

        def noted(*arguments: Any, loop: Any = loop) -> None:
            called.append(loop.__name__)
            loop(*arguments)

        noted.signatures = [()]  # type: ignore[attr-defined]
        monkeypatch.setattr(cpu_loops, loop.__name__, noted)
    both = ["sample_rows", "verify_sequences"]
    warmup(100, 3, torch.bfloat16, "cpu")
    assert called == both
    llm = engine.load(tiny("llama", dtype=torch.float32), max_batch_size=2)
    for params, more in ((None, []), (dict(temperature=0.5), both), (dict(logprobs=True), both)):
        called.clear()
        llm.warmup(params=params and engine.SamplingParams(**params))
        assert called == more


CALLS = """
import sys, torch
from engine.kernels import ops
rows = dict(seed=torch.tensor([1]), position=torch.tensor([2]))
def verify(temperature):
    return ops.verify(torch.zeros(1, 2, 9), torch.zeros(1, 1, dtype=torch.int64), temperature=torch.tensor([temperature]), **rows)
verify(0.0)
print("numba" in sys.modules, verify(1.0).num_accepted.item() >= 0, "numba" in sys.modules)
"""


def run(**environment: str) -> tuple[str, str]:
    """What the calls print, and what they say beside."""
    done = subprocess.run(
        [sys.executable, "-c", CALLS], env=os.environ | environment, capture_output=True, text=True, check=True
    )
    return done.stdout.strip(), done.stderr


def test_a_machine_without_a_place_to_keep_compiled_loops(monkeypatch: pytest.MonkeyPatch) -> None:
    compile_ = cpu_loops.njit

    def njit(**options: Any) -> Any:
        if options.get("cache"):
            raise RuntimeError("cannot cache function: no locator available")
        return compile_(**options)

    monkeypatch.setattr(cpu_loops, "njit", njit)
    assert cpu_loops._called_from_python(lambda x: x + 1)(2) == 3


def test_a_full_disk_keeps_no_compiled_loops_but_has_them_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def save(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    def loop(begin: int, end: int, values: Any) -> None:
        values[begin:end] = 3

    monkeypatch.setattr(IndexDataCacheFile, "save", save)
    values, compiled = np.zeros(4), cpu_loops._called_from_python(loop)
    cpu._in_threads(compiled, 4, 0, values)
    assert values.tolist() == [3] * 4 and len(compiled.signatures) == 1


def test_compiling_is_told_once_on_a_machine(tmp_path: Path) -> None:
    """Here with a folder of its own for what Numba keeps. Greedy verification does without Numba, whose import takes half a second."""
    (first, told), (second, told_again) = (run(NUMBA_CACHE_DIR=str(tmp_path)) for _ in range(2))
    assert "compiling verify_sequences" in told and "compiling" not in told_again
    assert first == second == "False True True"


def test_what_an_older_version_left_is_no_compiled_loop(tmp_path: Path) -> None:
    stats = SimpleNamespace(cache_path=str(tmp_path))
    loop = SimpleNamespace(__name__="some_loop", signatures=[], stats=stats, py_func=test_any_layout)
    line = test_any_layout.__code__.co_firstlineno
    for name, kept in (("other_loop", False), (f"some_loop-{line - 1}", False), (f"some_loop-{line}", True)):
        (tmp_path / f"cpu_loops.{name}.py311.nbi").touch()
        assert cpu_loops.kept(loop) == kept


def quickest(call: Callable[[], Any]) -> float:
    """Seconds, of five calls."""

    def seconds() -> float:
        began = time.perf_counter()
        call()
        return time.perf_counter() - began

    return min(seconds() for _ in range(5))


LARGE = 100_000
COUNTED = torch.arange(LARGE, dtype=torch.float32)
HARD_ROWS = {
    "few tokens left": torch.full((LARGE,), -torch.inf).index_fill(0, torch.arange(8), 1.0),
    "all but a few far below": torch.full((LARGE,), -3e38).index_fill(0, torch.arange(8), 1.0),
    "lower towards the middle": (COUNTED - LARGE // 2).abs() / LARGE,
    "higher towards the middle": -(COUNTED - LARGE // 2).abs() / LARGE,
    "a wave": (COUNTED / LARGE * 2 * torch.pi).cos(),
    "NaN": torch.zeros(LARGE).index_fill(0, torch.tensor([7]), torch.nan),
}


@pytest.mark.parametrize("filters", [dict(top_k=torch.tensor([50])), dict(top_p=torch.tensor([0.9]))], ids=str)
@pytest.mark.parametrize("name", HARD_ROWS)
def test_rows_that_are_hard_to_filter(name: str, filters: dict[str, Tensor]) -> None:
    """Thresholds are the twin's, and found in a time like that of other rows: not by hundreds of passes over the row, nor by partitions
    that leave out one logit at a time."""
    row, usual = HARD_ROWS[name][None], random_logits(generator(11), 1, 1, LARGE)[0]
    if name != "NaN":
        assert_stats_agree(cpu.row_stats(row, **filters), reference.row_stats(row, **filters), torch.float32)
    assert quickest(lambda: cpu.row_stats(row, **filters)) < 30 * quickest(lambda: cpu.row_stats(usual, **filters))


def test_logits_too_far_apart_for_float32() -> None:
    row = torch.tensor([[3e38, -3e38, -3.2e38, -torch.inf]])
    assert cpu.row_stats(row, top_k=torch.tensor([2])).threshold.tolist() == row[:, 1].tolist()


def test_drafts_by_inversion_heed_the_choice_of_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ENGINE_KERNELS", "triton")
    monkeypatch.setattr(cpu, "sample", lambda *_, **__: pytest.fail("the loops were called"))
    rows = random_rows(2, generator(12)) | dict(origin=torch.zeros(2, dtype=torch.int64), stream=philox.DRAFT)
    assert ops.sample_by_inversion(torch.zeros(2, 1, 9), **rows).tokens.shape == (2, 1)


def test_uniforms_of_the_extreme_words() -> None:
    """The last of them rounds to 1 in float32 unless it is held back; such a token would never arrive."""
    found = [cpu_loops._uniform.py_func(np.uint64(word)) for word in EXTREME_WORDS.tolist()]
    assert found == philox.uniform_from_bits(EXTREME_WORDS).tolist()
    assert max(found) < 1


def test_only_much_work_is_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread takes longer to start than few logits take."""
    started = []

    class Pool(ThreadPoolExecutor):
        def __init__(self, size: int) -> None:
            started.append(size)
            super().__init__(size)

    monkeypatch.setattr(cpu, "SHARED", 1_000)
    monkeypatch.setattr(cpu, "ThreadPoolExecutor", Pool)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    for rows in (1, 2, 3, 5):
        ops.row_stats(torch.zeros(rows, 999))
    assert started == [2, 4]
