"""What the kernels read, launch and allocate, counted in Triton's interpreter, against the bounds of kernels/README.md.

With s bytes to a logit, per sequence: one-hot drafts and `coupled` (K+1) V s; `rejection` with full drafts two rows more;
`block` two rows more per draft.
"""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from kernel_cases import PLACES, Case, random_filters, verify_case, word_logits
from torch import Tensor

from engine.kernels import reference
from engine.kernels.row_stats import row_stats
from engine.kernels.sample import sample
from engine.kernels.verify import verify

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="counts loads in the interpreter")

NUM_DRAFTS = 4


class Meter:
    """Bytes loaded from some tensors, and launches."""

    def __init__(self) -> None:
        self.launches = 0
        self._ranges: list[tuple[int, int]] = []
        self._addresses: list[Tensor] = []
        self._loaded = 0

    def watch(self, *tensors: Tensor | None) -> None:
        for tensor in tensors:
            if tensor is not None:
                self._ranges.append((tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes))

    def load(self, addresses: Any, mask: Any, element_bytes: int) -> None:
        for low, high in self._ranges:
            self._loaded += int((mask & (addresses >= low) & (addresses < high)).sum()) * element_bytes

    @property
    def bytes(self) -> int:
        return self._loaded


@pytest.fixture
def meter(monkeypatch: pytest.MonkeyPatch) -> Iterator[Meter]:
    from triton.runtime import interpreter

    meter = Meter()
    load, launch = interpreter.InterpreterBuilder.create_masked_load, interpreter.GridExecutor.__call__

    def counted_load(self: Any, pointers: Any, mask: Any, *more: Any) -> Any:
        element = pointers.dtype.scalar.element_ty
        meter.load(pointers.data, mask.data, element.primitive_bitwidth // 8)
        return load(self, pointers, mask, *more)

    def counted_launch(self: Any, *args: Any, **kwargs: Any) -> Any:
        meter.launches += 1
        return launch(self, *args, **kwargs)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_masked_load", counted_load)
    monkeypatch.setattr(interpreter.GridExecutor, "__call__", counted_launch)
    yield meter


def measured(meter: Meter, case: Case, **more: Any) -> float:
    """Launch `verify`; bytes of logits read, in rows of the target per sequence."""
    case = case | more
    meter.watch(case["target_logits"], case["draft_logits"])
    batch, _, vocab_size = case["target_logits"].shape
    verify(**case)
    return meter.bytes / (batch * vocab_size * case["target_logits"].element_size())


def full_case(vocab_size: int, batch: int = 2) -> Case:
    """Drafts with stats, none of which stand: every sequence has a residual to draw from."""
    case = verify_case(torch.Generator().manual_seed(1), batch, NUM_DRAFTS, vocab_size, vocab_size, torch.bfloat16)
    case["temperature"].fill_(1.0)
    case["draft_logits"][..., 0] = 60.0
    case["draft_tokens"].zero_()
    case["target_logits"][..., 0] = -20.0
    return case | dict(draft_stats=reference.row_stats(case["draft_logits"], case["temperature"]))


@pytest.mark.parametrize("vocab_size", [32_000, 151_936])
@pytest.mark.parametrize("method", ["rejection", "block", "coupled", "typical"])
def test_one_hot_drafts_read_every_row_once(meter: Meter, method: str, vocab_size: int) -> None:
    case = full_case(vocab_size) | dict(draft_logits=None, draft_stats=None, method=method)
    assert NUM_DRAFTS + 1 <= measured(meter, case) <= 1.05 * (NUM_DRAFTS + 1)
    assert meter.launches == 1


@pytest.mark.parametrize("vocab_size", [32_000, 151_936])
@pytest.mark.parametrize(("method", "more"), [("rejection", 2), ("block", 2 * NUM_DRAFTS)])
def test_full_drafts_read_a_residual_beside(meter: Meter, method: str, more: int, vocab_size: int) -> None:
    bound = NUM_DRAFTS + 1 + more
    assert bound <= measured(meter, full_case(vocab_size), method=method) <= 1.05 * bound
    assert meter.launches == 2


def test_packed_rows_are_read_and_no_others(meter: Meter) -> None:
    case = full_case(32_000) | dict(draft_logits=None, draft_stats=None)
    case["draft_tokens"][1, 1:] = -1
    begins = [0, NUM_DRAFTS + 1, NUM_DRAFTS + 3]
    rows = case["target_logits"].flatten(0, 1)[: begins[-1]]  # behind the last there is nothing to read
    meter.watch(case["target_logits"])
    verify(**case | dict(target_logits=rows, cu_num_logits=torch.tensor(begins, dtype=torch.int32)))
    assert rows.nbytes <= meter.bytes <= 1.05 * rows.nbytes and meter.launches == 1


def test_plain_decoding_reads_one_row(meter: Meter) -> None:
    case = verify_case(torch.Generator().manual_seed(1), 2, 0, 32_000, None, torch.bfloat16)
    assert 1 <= measured(meter, case) <= 1.05
    assert meter.launches == 1


def test_accepted_drafts_have_no_second_reading(meter: Meter) -> None:
    case = full_case(32_000)
    case["draft_logits"].copy_(case["target_logits"][:, :NUM_DRAFTS])
    case["draft_stats"] = reference.row_stats(case["draft_logits"], case["temperature"])
    assert NUM_DRAFTS + 1 <= measured(meter, case) <= 1.05 * (NUM_DRAFTS + 1)


@pytest.mark.parametrize("operation", [row_stats, sample])
def test_row_operations_read_once(meter: Meter, operation: Callable[..., object]) -> None:
    logits = torch.randn(2, 3, 32_000, generator=torch.Generator().manual_seed(2)).bfloat16()
    where = dict(seed=torch.arange(2), position=torch.arange(2)) if operation is sample else {}
    meter.watch(logits)
    operation(logits, torch.ones(2), **where)
    assert logits.nbytes <= meter.bytes <= 1.05 * logits.nbytes and meter.launches == 1


FILTERS: dict[str, dict[str, Any]] = {
    "top-k": dict(top_k=50),
    "large top-k": dict(top_k=9_000),
    "top-p": dict(top_p=0.9),
    "min-p": dict(min_p=0.1),
    "top-k and top-p": dict(top_k=50, top_p=0.9),
    "large top-k and top-p": dict(top_k=3_000, top_p=0.9),
    "top-p and min-p": dict(top_p=0.95, min_p=0.1),
    "all": dict(top_k=50, top_p=0.9, min_p=0.02),
}


def filtered_reads(meter: Meter, vocab_size: int, scale: float, filters: dict[str, Any], method: str) -> float:
    """Readings of a row of the target, on average over the rows."""
    logits = torch.randn(1, 3, vocab_size, generator=torch.Generator().manual_seed(3)) * scale
    tensors = {key: torch.tensor([value]) for key, value in filters.items()} | dict(temperature=torch.ones(1))
    where = dict(seed=torch.tensor([1]), position=torch.tensor([5]))
    if method in ("row_stats", "sample"):
        meter.watch(target := logits.bfloat16())
        row_stats(target, **tensors) if method == "row_stats" else sample(target, **tensors, **where)
        return meter.bytes / target.nbytes
    case = dict(target_logits=logits.bfloat16(), draft_tokens=torch.tensor([[7, 8]]), draft_logits=None)
    return measured(meter, case | tensors | where, method=method) / 3


@pytest.mark.parametrize("name", FILTERS)
@pytest.mark.parametrize("scale", [1.0, 4.0], ids=["flat", "peaked"])
@pytest.mark.parametrize(
    ("method", "most"), [("row_stats", 2), ("sample", 3), ("rejection", 2 + 1 / 3), ("coupled", 3)]
)
def test_filtered_rows_are_read_at_most_three_times(
    meter: Meter, method: str, most: float, scale: float, name: str
) -> None:
    """A first time, a sweep for the threshold, and a sweep of the rows that are drawn from; few tokens besides."""
    assert 1 <= filtered_reads(meter, 32_000, scale, FILTERS[name], method) <= 1.01 * most
    assert meter.launches == 1


@pytest.mark.parametrize("name", ["top-p", "large top-k and top-p", "all"])
def test_filtered_rows_of_a_large_vocabulary(meter: Meter, name: str) -> None:
    """Flat, so that as many tokens as can be lie between the two logits that the sample gives."""
    assert 1 <= filtered_reads(meter, 151_936, 1.0, FILTERS[name], "sample") <= 3 * 1.001


@pytest.mark.parametrize("name", ["top-k", "top-p", "min-p", "all"])
@pytest.mark.parametrize("places", PLACES)
def test_of_peaked_rows_little_is_read_again(meter: Meter, places: str, name: str) -> None:
    logits = word_logits(torch.Generator().manual_seed(3), 151_936, places).bfloat16()[None]
    meter.watch(logits)
    where = dict(seed=torch.tensor([1]), position=torch.tensor([5]), temperature=torch.tensor([0.7]))
    sample(logits, **where, **{key: torch.tensor([value]) for key, value in FILTERS[name].items()})
    assert logits.nbytes <= meter.bytes <= 1.2 * logits.nbytes


def test_top_p_behind_a_top_k_of_thousands_sweeps_once_more(meter: Meter) -> None:
    assert 1 <= filtered_reads(meter, 32_000, 1.0, dict(top_k=9_000, top_p=0.9), "sample") <= 4 * 1.001


def test_scratch_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """At most 64 KiB per row at V = 151,936, and nothing as wide as the vocabulary."""
    allocated: list[int] = []
    empty = torch.empty

    def counted(*args: Any, **kwargs: Any) -> Tensor:
        tensor = empty(*args, **kwargs)
        allocated.append(tensor.nbytes)
        return tensor

    memory: dict[Any, Any] = {}
    monkeypatch.setattr("engine.kernels.workspace.stream_memory", lambda: memory)
    monkeypatch.setattr(torch, "empty", counted)
    batch, vocab_size = 1, 151_936
    case = verify_case(torch.Generator().manual_seed(1), batch, 1, vocab_size, None, torch.bfloat16)
    allocated.clear()
    verify(**case, **random_filters(torch.Generator().manual_seed(1), batch, vocab_size))
    assert 1024 < sum(allocated) <= 2 * 64 * 1024  # two rows
    allocated.clear()
    verify(**case)
    assert sum(allocated) < 1024  # the scratch memory is kept; only the verdict is new
