"""Programs that read several tiles of a row, as those of large batches do, give bit for bit what programs of one tile give."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from kernel_cases import (
    DEVICE,
    METHODS_AND_DRAFTS,
    Case,
    assert_counters_are_clear,
    random_filters,
    to_device,
    verify_case,
)
from torch import Tensor

from engine.kernels import launch
from engine.kernels.row_stats import row_stats
from engine.kernels.sample import sample
from engine.kernels.verify import verify

BATCH, NUM_DRAFTS, VOCAB_SIZE = 2, 2, 40_000  # five tiles a row, the last not full


def case_of(filtered: bool, draft_vocab: int | None = None) -> Case:
    generator = torch.Generator().manual_seed(3)
    filters = random_filters(generator, BATCH, VOCAB_SIZE) | dict(top_p=torch.tensor([0.9, 0.5])) if filtered else None
    return verify_case(generator, BATCH, NUM_DRAFTS, VOCAB_SIZE, draft_vocab, torch.bfloat16, filters)


def flat(result: Any) -> list[Tensor]:
    """All tensors of a result."""
    if isinstance(result, Tensor):
        return [result]
    return [tensor for part in result if part is not None for tensor in flat(part)]


def assert_the_same_in_large_batches(
    monkeypatch: pytest.MonkeyPatch, call: Callable[..., Any], case: dict[str, Any]
) -> None:
    """With 1, 2, 3 and 4 tiles a program, among them numbers that leave a program's last tiles beyond the row."""
    on_device = {name: to_device(value, DEVICE) for name, value in case.items()}
    tiles = []
    original = launch.shape_arguments

    def noted(*args: Any, **kwargs: Any) -> dict[str, Any]:
        shape = original(*args, **kwargs)
        tiles.append(shape["tiles"])
        return shape

    monkeypatch.setitem(call.__globals__, "shape_arguments", noted)
    expected = flat(call(**on_device))
    for enough in (15, 10, 1):  # of 30 tiles
        monkeypatch.setattr(launch, "ENOUGH_PROGRAMS", enough)
        for actual, want in zip(flat(call(**on_device)), expected, strict=True):
            assert torch.equal(actual, want)
        assert_counters_are_clear()
    assert tiles == [1, 2, 3, 4]


@pytest.mark.parametrize(("method", "kind"), METHODS_AND_DRAFTS)
def test_verify_with_filters(monkeypatch: pytest.MonkeyPatch, method: str, kind: str) -> None:
    case = case_of(True, VOCAB_SIZE if kind == "full" else None)
    if kind == "full":
        rows = {name: case[name] for name in ("temperature", "top_k", "top_p", "min_p")}
        case["draft_stats"] = row_stats(case["draft_logits"], **rows)
    assert_the_same_in_large_batches(monkeypatch, verify, case | dict(method=method, return_logprobs=True))


def test_coupled_without_filters(monkeypatch: pytest.MonkeyPatch) -> None:
    assert_the_same_in_large_batches(monkeypatch, verify, case_of(False) | dict(method="coupled"))


@pytest.mark.parametrize("filtered", [False, True], ids=["plain", "filtered"])
def test_sample_and_row_stats(monkeypatch: pytest.MonkeyPatch, filtered: bool) -> None:
    case = case_of(filtered)
    rows = {name: case[name] for name in ("temperature", *(("top_k", "top_p", "min_p") if filtered else ()))}
    logits = dict(logits=case["target_logits"])
    where = dict(seed=case["seed"], position=case["position"])
    assert_the_same_in_large_batches(monkeypatch, sample, logits | rows | where)
    if filtered:  # else no row has work of its own
        monkeypatch.undo()
        assert_the_same_in_large_batches(monkeypatch, row_stats, logits | rows)


@pytest.mark.parametrize("vocab_size", [1000, 2049, 4096, 5000, 8192, 20_000])
def test_rows_of_few_tiles(monkeypatch: pytest.MonkeyPatch, vocab_size: int) -> None:
    """A program has no more tiles than a row, and writes nothing behind the row's own memory, nor behind all memory."""
    generator = torch.Generator().manual_seed(vocab_size)
    filters = dict(top_p=torch.tensor([0.9, 0.5]))
    case = verify_case(generator, BATCH, NUM_DRAFTS, vocab_size, None, torch.float32, filters)
    on_device = {name: to_device(value, DEVICE) for name, value in case.items()}
    kept = {name: on_device[name] for name in ("temperature", "top_p", "seed", "position")}
    behind = []
    original = launch.workspace

    def guarded(device: torch.device, counters: int, floats: int) -> tuple[Tensor, Tensor]:
        behind.append((memory := torch.full((floats + 16_384,), 7.5, device=device))[floats:])
        return original(device, counters, 1)[0], memory

    monkeypatch.setattr(launch, "workspace", guarded)
    results = []
    for enough in (1 << 20, 1):
        monkeypatch.setattr(launch, "ENOUGH_PROGRAMS", enough)
        verdict = verify(**on_device, method="rejection")
        results.append(flat((verdict, sample(on_device["target_logits"], **kept))))
    assert all(torch.equal(actual, want) for actual, want in zip(*results, strict=True))
    assert len(behind) == 4 and all((floats == 7.5).all() for floats in behind)


def test_more_rows_than_there_can_be_places_for() -> None:
    logits = torch.zeros(1, dtype=torch.bfloat16, device=DEVICE).expand(60_000, 60, 151_936)
    with pytest.raises(ValueError, match=r"^B \* W must be <= 2,855,696 with V = 151,936, got 3,600,000$"):
        row_stats(logits)


@pytest.mark.skipif(DEVICE == "cuda", reason="looks into the interpreter")
@pytest.mark.parametrize("filtered", [False, True])
@pytest.mark.parametrize("method", ["rejection", "block", "coupled", "typical"])
def test_offsets_ascend_where_the_compiler_is_told_so(
    monkeypatch: pytest.MonkeyPatch, method: str, filtered: bool
) -> None:
    """It may then read those of several tokens by the address of the first: of the last axis, as it reads along that alone."""
    from triton.runtime.interpreter import TensorHandle

    told = []

    def set_attribute(self: TensorHandle, key: str, values: list[int]) -> None:
        if key == "tt.contiguity":
            rows = self.data.reshape(-1, values[-1])
            told.append(bool((np.diff(rows, axis=1) == 1).all()))

    monkeypatch.setattr(TensorHandle, "set_attr", set_attribute)
    case = case_of(filtered, VOCAB_SIZE if method in ("rejection", "block") else None)
    verify(**case, method=method)
    kept = ("temperature", "top_k", "top_p", "min_p", "seed", "position")
    sample(case["target_logits"], **{name: value for name, value in case.items() if name in kept})
    assert len(told) > 10 and all(told)
