"""Ragged attention in Triton against its torch twin, and the twin against plain formulas."""

import math
import re
from collections.abc import Iterator
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from attention_cases import TOLERANCE, Case, attention_case, check_attention, far_apart, on_device, rows_of
from kernel_cases import DEVICE, DTYPES
from torch import Tensor

from engine.kernels import attention, attention_ops, attention_reference
from engine.kernels.attention import blocks_for, ragged_attention, split_size_for
from engine.kernels.workspace import workspace

pytestmark = pytest.mark.usefixtures("poisoned_empty")

WIDTHS, GROUPS, HEAD_DIMS = (1, 2, 6, 8, 32, 65), (1, 2, 4, 7, 8), (8, 16, 32, 64, 80, 96, 128, 192, 256)
LENGTHS = (0, 1, 15, 17, 511, 512)  # and W columns more: on both sides of blocks and splits
SHAPES = {  # a sample of them: (W, G, D, dtype)
    (1, 1, 8, torch.float32), (1, 8, 64, torch.bfloat16), (2, 7, 16, torch.float16), (2, 4, 96, torch.float32),
    (6, 4, 128, torch.bfloat16), (6, 2, 80, torch.float16), (8, 8, 32, torch.bfloat16), (8, 1, 256, torch.float32),
    (1, 4, 192, torch.float32), (6, 2, 192, torch.bfloat16), (65, 1, 192, torch.float16),
    (32, 4, 64, torch.bfloat16), (65, 2, 32, torch.bfloat16), (65, 7, 16, torch.float32),
}  # fmt: skip
OPTIONS: dict[str, dict[str, Any]] = {
    "window of 1": dict(window=1),
    "small window": dict(window=40),
    "window over splits": dict(window=600),
    "large window": dict(window=10_000),
    "softcap": dict(softcap=5.0),
    "scale": dict(scale=0.7),
    "sinks": dict(sinks=torch.tensor([-3.0, 0.0, 2.0, 30.0])),
}
OPTIONS["all"] = OPTIONS["window over splits"] | OPTIONS["softcap"] | OPTIONS["sinks"] | OPTIONS["scale"]


def attend(case: Case) -> Tensor:
    """The kernel's result, on the CPU."""
    return ragged_attention(**on_device(case)).cpu()


@pytest.mark.parametrize(("width", "group", "head_dim", "dtype"), sorted(SHAPES, key=str))
def test_hard_shapes(width: int, group: int, head_dim: int, dtype: torch.dtype) -> None:
    check_attention(attention_case(LENGTHS[::2] if width > 6 else LENGTHS, width, group, 1, head_dim, dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_as_many_key_heads_as_query_heads(dtype: torch.dtype) -> None:
    check_attention(attention_case((0, 30, 511), group=1, kv_heads=3, dtype=dtype))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("width", WIDTHS)
def test_every_shape(width: int, group: int, dtype: torch.dtype) -> None:
    for head_dim in HEAD_DIMS:
        check_attention(attention_case((*LENGTHS, 63, 64, 1025), width, group, 2, head_dim, dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", OPTIONS)
def test_options(name: str, dtype: torch.dtype) -> None:
    case = attention_case((0, 30, 509, 1030), width=5, dtype=dtype)
    check_attention(case, **OPTIONS[name])


@pytest.mark.slow
@pytest.mark.parametrize("width", [1, 65, 300])
@pytest.mark.parametrize("name", OPTIONS)
def test_options_at_other_widths(name: str, width: int) -> None:
    check_attention(attention_case((0, 511, 1030, 4000), width=width, dtype=torch.float16), **OPTIONS[name])


def test_sinks_of_any_dtype() -> None:
    case = attention_case((3, 600))
    sinks = torch.tensor([0.5, 1.0, -2.0, 4.0])
    assert torch.equal(check_attention(case, sinks=sinks.bfloat16()), check_attention(case, sinks=sinks))


def test_logits_of_any_size() -> None:
    """exp neither overflows nor loses the largest weight, and tanh ends at 1."""
    case = attention_case((20, 600))
    check_attention(case, scale=1e4)
    check_attention(case, scale=1e4, softcap=3.0)
    check_attention(case, scale=0.0)
    check_attention(case, scale=1e-30, softcap=1e4)


@pytest.mark.parametrize("softcap", [1e3, 1e4, 1e6])
def test_a_softcap_far_above_the_logits(softcap: float) -> None:
    """It changes next to nothing: tanh(x) is x at x = 1e-6 too, and not x in steps of 6e-8."""
    case = attention_case((20, 600))
    capped = check_attention(case, softcap=softcap)
    torch.testing.assert_close(capped, check_attention(case), **TOLERANCE[torch.float32])


@pytest.mark.parametrize("kv_length", [None, 2])
def test_sinks_of_queries_that_see_nothing(kv_length: int | None) -> None:
    """They give 0, also where the exponential of the sink is a number whose inverse is none: near exp(-90)."""
    case = attention_case((2, 3), width=3, num_valid=(1, 0), capacity=600)
    for sink in (-80.0, -89.0, -90.0, -95.0, -100.0, -200.0, -torch.inf, 200.0):
        result = check_attention(case, window=1, kv_length=kv_length, sinks=torch.full((4,), sink))
        assert (result[1] == 0).all() and (result[0, 1:] == 0).all()


def test_logits_far_below_zero() -> None:
    """-1000 and less, behind keys that are not seen: their peak of -inf weighs nothing against that."""
    case = attention_case((20, 600), dtype=torch.bfloat16)
    case["query"], case["keys"] = -case["query"].abs(), case["keys"].abs()
    check_attention(case, scale=64.0, window=30)


def test_long_rows_combine_many_splits() -> None:
    """More splits than are combined at once, and a window that begins in the middle of such a group."""
    length = 20 * split_size_for(1)
    case = attention_case((length, 7), width=1, group=1, kv_heads=1, head_dim=16, dtype=torch.bfloat16)
    check_attention(case)
    check_attention(case, window=9 * split_size_for(1) + 77)


def test_prefill_of_several_tiles() -> None:
    """Query rows over several programs, whose splits are longer, from the start and behind a prefix."""
    case = attention_case((0, 700), width=100, group=4, kv_heads=1, head_dim=16)
    assert case["query"].shape[1] * 100 > 4 * blocks_for(400, 16, torch.float32)["BLOCK_M"]
    check_attention(case)
    check_attention(case, window=50)


@pytest.mark.parametrize("layout", ["contiguous query", "heads inside keys", "wide storage"])
def test_any_strides(layout: str) -> None:
    case = attention_case((5, 520), dtype=torch.bfloat16)
    expected = check_attention(case)
    if layout == "contiguous query":
        case["query"] = case["query"].contiguous()
    for name in ("keys", "values", "query"):
        if layout == "heads inside keys":  # [slots, capacity, H_kv, D] behind the view
            case[name] = case[name].transpose(1, 2).contiguous().transpose(1, 2)
        elif layout == "wide storage":
            wide = torch.full((*case[name].shape[:3], 40), torch.nan, dtype=torch.bfloat16)
            case[name] = wide[..., 5:37].copy_(case[name])
    assert torch.equal(check_attention(case), expected)


def test_slots() -> None:
    lengths = (9, 513, 0, 40)
    check_attention(attention_case(lengths, slots=(5, 0, 2, 3), dtype=torch.float16), window=300)


def test_padding() -> None:
    """Padding columns do not see what is not there; a row without any key gives 0."""
    case = attention_case((9, 513, 0, 40), num_valid=(3, 1, 0, 2), dtype=torch.bfloat16)
    output = check_attention(case)
    assert output.isfinite().all() and not output[2].any()
    assert torch.equal(check_attention(case, sinks=torch.ones(4))[2], output[2])
    # Nor does the query of a padding column matter to the others.
    case["query"][1, :, 1:] = torch.nan
    assert torch.equal(attend(case)[1, 0], output[1, 0])


def test_padding_beyond_the_window_of_many_splits() -> None:
    """Such columns see no key, and no program leaves anything for them: what the scratch memory holds is of an earlier call."""
    width, device = 128, torch.empty(0, device=DEVICE).device  # with its index, by which the memory is kept
    case = attention_case((8292,), width=width, group=4, kv_heads=1, head_dim=16, capacity=8292 + width, num_valid=(1,))
    _, scratch = workspace(device, 0, 4_000_000)
    scratch.fill_(torch.nan)
    check_attention(case, window=1)


def test_nan_in_sight_is_reported() -> None:
    """Of K and of V, in the rows and heads that see it and in no other."""
    for name in ("keys", "values"):
        case = attention_case((700, 20), width=2)
        case[name][0, 1, 300] = torch.nan
        bad = attend(case).isnan()
        assert bad[0, :, 2:].all() and not bad[0, :, :2].any() and not bad[1].any()


def variations(case: Case, row: int) -> Iterator[tuple[str, Case, int]]:
    """(what is changed, case, where the row is now)"""
    batch, capacity = len(case["seq_lens"]), case["keys"].shape[2]
    yield "alone", rows_of(case, [row]), 0
    yield "other rows first", rows_of(case, [*range(row + 1, batch), row]), batch - row - 1
    yield "four of it", rows_of(case, [row] * 4), 3
    needed = int(case["seq_lens"].max()) + case["query"].shape[2]
    for kv_length in {needed, -(-needed // 512) * 512, capacity}:
        yield f"kv_length {kv_length}", case | dict(kv_length=kv_length), row
    shifted = {name: torch.cat([case[name][-1:], case[name]]) for name in ("keys", "values")}
    yield "another slot", case | shifted | dict(slots=torch.arange(1, batch + 1)), row
    longer = {name: torch.nn.functional.pad(case[name], (0, 0, 0, 700), value=torch.nan) for name in ("keys", "values")}
    yield "larger capacity", case | longer, row


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("lengths", [(3, 400, 100), (30, 1100, 600)], ids=["one split", "several"])
def test_a_row_is_its_own(lengths: tuple[int, ...], dtype: torch.dtype) -> None:
    """Bit for bit, whatever the batch, the neighbours, the slot, the bound and the capacity."""
    case = attention_case(lengths, width=2, dtype=dtype, kv_heads=1, capacity=1536)
    options = dict(window=700, sinks=torch.linspace(-1, 1, 2))
    expected = check_attention(case, **options)
    for what, other, place in variations(case, row=1):
        assert torch.equal(attend(other | options)[place], expected[1]), what


@pytest.fixture
def rows_summed_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a GPU's matrix units do. In numpy's BLAS the order goes by the row's place on some processors (seen on one with AVX2)."""
    if DEVICE != "cpu":
        return
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    def create_dot(self: Any, a: Any, b: Any, d: Any, *precision: Any) -> Any:
        product = np.einsum("mk,kn->mn", a.data, b.data, dtype=d.data.dtype)
        return TensorHandle(product + d.data, d.dtype.scalar)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", create_dot)


@pytest.mark.usefixtures("rows_summed_alike")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("options", [{}, dict(window=200), dict(softcap=20.0)], ids=str)
def test_a_query_does_not_depend_on_its_column(options: dict[str, Any], dtype: torch.dtype) -> None:
    """Bit for bit: what a position gives is the same as first column of a call and as any later one."""
    width, end = 6, 515  # the columns cross the end of a split
    case = attention_case((end,), width=width, group=4, head_dim=64, dtype=dtype, capacity=1024)
    case["query"][:, :, 1:] = case["query"][:, :, :1]
    at_once = [attend(case | dict(seq_lens=torch.tensor([end - 5 - i])) | options)[0, i + 1] for i in range(5)]
    first = attend(case | dict(seq_lens=torch.tensor([end - 4])) | options)[0, 0]
    assert all(torch.equal(first, other) for other in at_once)


@pytest.mark.usefixtures("overflow_checked")
@pytest.mark.parametrize("dimension", [0, 1, 2], ids=["rows", "heads", "tokens"])
def test_more_than_2_to_31_elements(dimension: int) -> None:
    """Offsets are 64-bit, those between the keys of a block too."""
    case = attention_case((0, 0, 0), width=3, kv_heads=3, group=1, dtype=torch.bfloat16)
    expected = check_attention(case)
    far = {name: far_apart(case[name], dimension, 2**30) for name in ("query", "keys", "values")}
    assert torch.equal(ragged_attention(**far, seq_lens=case["seq_lens"].to(DEVICE)).cpu(), expected)


def test_blocks_that_are_far_apart() -> None:
    case = attention_case((300,), width=1, group=1, kv_heads=1, head_dim=8, dtype=torch.bfloat16)
    expected = check_attention(case)
    far = {name: far_apart(case[name], 2, 2**23) for name in ("keys", "values")}
    others = {name: case[name].to(DEVICE) for name in ("query", "seq_lens")}
    assert torch.equal(ragged_attention(**far, **others).cpu(), expected)


def test_empty_calls() -> None:
    case = attention_case((4, 5))
    assert attend(rows_of(case, [])).shape == (0, 3, 4, 32)
    assert attend(case | dict(query=case["query"][:, :, :0])).shape == (2, 0, 4, 32)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_against_scaled_dot_product_attention(dtype: torch.dtype) -> None:
    """With a boolean mask, and K and V repeated for every query head, as transformers calls it."""
    case = attention_case((0, 300, 513), width=4, group=3, head_dim=64, dtype=dtype, capacity=600)
    clean = {name: case[name].nan_to_num() for name in ("keys", "values")}
    k, v = (cache.repeat_interleave(3, dim=1) for cache in clean.values())
    position = case["seq_lens"][:, None] + torch.arange(4)
    mask = (torch.arange(600) <= position[..., None])[:, None]
    expected = torch.nn.functional.scaled_dot_product_attention(case["query"], k, v, attn_mask=mask).transpose(1, 2)
    torch.testing.assert_close(attend(case), expected, **TOLERANCE[dtype])


def test_the_twin_against_the_formula() -> None:
    """Query by query, in float64, from the keys that it sees and nothing else."""
    case = attention_case((0, 3, 9), num_valid=(3, 2, 3), slots=(2, 0, 1), seed=5)
    case = {name: value.double() if value.is_floating_point() else value for name, value in case.items()}
    sinks = torch.randn(4, dtype=torch.float64, generator=torch.Generator().manual_seed(6))
    actual = attention_reference.ragged_attention(**case, window=5, softcap=2.0, sinks=sinks, scale=0.4)
    assert actual.dtype == torch.float64
    for row, (length, valid, slot) in enumerate(zip((0, 3, 9), (3, 2, 3), (2, 0, 1), strict=True)):
        for column in range(valid):
            seen = slice(max(0, length + column - 4), length + column + 1)
            for head in range(4):
                logits = case["keys"][slot, head // 2, seen] @ case["query"][row, head, column] * 0.4
                weights = torch.cat([2 * torch.tanh(logits / 2), sinks[head : head + 1]]).softmax(dim=0)[:-1]
                expected = weights @ case["values"][slot, head // 2, seen]
                torch.testing.assert_close(actual[row, column, head], expected, rtol=1e-12, atol=1e-12)


def test_one_split_is_one_launch_without_scratch_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    launched: list[str] = []
    workspace = attention.workspace
    monkeypatch.setattr(attention, "workspace", lambda *a: asked.append(a[2]) or workspace(*a))
    combine = attention.combine_kernel
    monkeypatch.setattr(attention, "combine_kernel", Counted(combine, launched))
    case = on_device(attention_case((5, 600), width=2, capacity=2048))
    ragged_attention(**case, kv_length=512)
    assert asked == [1] and not launched
    ragged_attention(**case, kv_length=513)
    assert asked[1] == 2 * 2 * 4 * 2 * (32 + 2) and len(launched) == 1
    ragged_attention(**case)
    assert asked[2] == 2 * asked[1] and len(launched) == 2


class Counted:
    """A kernel whose launches are counted."""

    def __init__(self, kernel: Any, launched: list[str]) -> None:
        self.kernel, self.launched = kernel, launched

    def __getitem__(self, grid: Any) -> Any:
        self.launched.append("launch")
        return self.kernel[grid]


def test_splits_depend_on_query_rows_alone() -> None:
    """Several tiles of query rows share longer splits: as many programs, and as much scratch memory, as for one tile."""
    assert [split_size_for(tiles) for tiles in (1, 2, 3, 32)] == [512, 1024, 2048, 16384]
    for rows, head_dim, dtype in ((1, 8, torch.float32), (6, 64, torch.bfloat16), (500, 256, torch.float16)):
        assert split_size_for(1) % blocks_for(rows, head_dim, dtype)["BLOCK_N"] == 0


def test_dispatch(monkeypatch: pytest.MonkeyPatch) -> None:
    case = on_device(attention_case((5, 600), num_valid=(1, 3)))
    expected = attention_reference.ragged_attention(**case)
    called = []
    real = attention.ragged_attention
    monkeypatch.setattr(attention, "ragged_attention", lambda *a, **k: called.append("triton") or real(*a, **k))
    for choice, times in (("torch", 0), ("triton", 1)):
        monkeypatch.setenv("ENGINE_KERNELS", choice)
        torch.testing.assert_close(attention_ops.ragged_attention(**case), expected, **TOLERANCE[torch.float32])
        assert len(called) == times
    double = {name: value.double() if value.is_floating_point() else value for name, value in case.items()}
    assert attention_ops.ragged_attention(**double).dtype == torch.float64 and len(called) == 1


@pytest.mark.parametrize("kernels", ["triton", "torch"])
@pytest.mark.parametrize(
    "numbers",
    [
        dict(window=np.int64(40), kv_length=np.int32(600), softcap=np.float32(5.0), scale=np.float32(0.5)),
        dict(window=np.uint8(40), kv_length=np.int64(600), softcap=5, scale=Fraction(1, 2)),
    ],
    ids=["NumPy", "others"],
)
def test_numbers_of_any_kind(monkeypatch: pytest.MonkeyPatch, numbers: dict[str, Any], kernels: str) -> None:
    monkeypatch.setenv("ENGINE_KERNELS", kernels)
    case = on_device(attention_case((5, 600)))
    plain = dict(window=40, kv_length=600, softcap=5.0, scale=0.5)
    assert torch.equal(
        attention_ops.ragged_attention(**case, **numbers), attention_ops.ragged_attention(**case, **plain)
    )


@pytest.mark.parametrize("kernels", ["triton", "torch"])
def test_autocast_changes_nothing(monkeypatch: pytest.MonkeyPatch, kernels: str) -> None:
    """Sums are float32, and so is what is multiplied."""
    monkeypatch.setenv("ENGINE_KERNELS", kernels)
    case = on_device(attention_case((0, 30)))  # float32
    expected = attention_ops.ragged_attention(**case)
    with torch.autocast(expected.device.type, dtype=torch.bfloat16):
        assert torch.equal(attention_ops.ragged_attention(**case), expected)


@pytest.mark.parametrize("kernels", ["triton", "torch"])
def test_nothing_is_recorded_for_gradients(monkeypatch: pytest.MonkeyPatch, kernels: str) -> None:
    """Sinks are a parameter of a model, K and V come from others."""
    monkeypatch.setenv("ENGINE_KERNELS", kernels)
    case = on_device(attention_case((5, 30)))
    sinks = torch.zeros(4, device=DEVICE, requires_grad=True)
    assert not attention_ops.ragged_attention(**case, sinks=sinks).requires_grad
    caches = {name: case[name].nan_to_num() for name in ("keys", "values")}
    new = torch.ones(2, 2, 3, 32, device=DEVICE, requires_grad=True)
    where = dict(seq_lens=case["seq_lens"], num_valid=torch.full_like(case["seq_lens"], 3))
    attention_ops.scatter_kv(**caches, new_keys=new, new_values=new, **where)
    for cache in caches.values():
        assert not cache.requires_grad and (cache[0, :, 5:8] == 1).all()


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "query dim": (dict(query=torch.zeros(2, 4, 32)), "query must be a floating tensor of 4 dimensions"),
    "query dtype": (dict(query=torch.zeros(2, 4, 3, 32).half()), "query must .* of one dtype with keys"),
    "query size": (dict(query=torch.zeros(2, 4, 3, 16)), "query must have the keys' head size D = 32"),
    "query heads": (dict(query=torch.zeros(2, 3, 3, 32)), "query must have a multiple of the keys' 2 heads, got 3"),
    "query stride": (dict(query=torch.zeros(2, 4, 32, 3).transpose(2, 3)), "query must be contiguous .* got stride 3"),
    "keys dtype": (dict(keys=torch.zeros(2, 2, 603, 32).long()), "keys must be a floating tensor"),
    "capacity": (
        dict(keys=torch.zeros(2, 2, 0, 32), values=torch.zeros(2, 2, 0, 32)),
        r"keys must have a capacity of at least 1, got shape \[2, 2, 0, 32\]",
    ),
    "values": (dict(values=torch.zeros(2, 2, 600, 32)), "values must have the shape of keys"),
    "seq_lens": (dict(seq_lens=torch.zeros(3).long()), r"seq_lens must be int64 of shape \[B\] = \[2\]"),
    "seq_lens dtype": (dict(seq_lens=torch.zeros(2).int()), "seq_lens must be int64 .* got torch.int32"),
    "num_valid": (dict(num_valid=torch.zeros(2, 1).long()), "num_valid must be int64 of shape"),
    "slots": (dict(slots=torch.zeros(2)), "slots must be int64"),
    "no slots": (
        dict(query=torch.zeros(3, 4, 3, 32), seq_lens=torch.zeros(3).long()),
        "slots must be given where a batch has more rows than the cache, got 3 and 2",
    ),
    "sinks": (dict(sinks=torch.zeros(2)), r"sinks must be floating of shape \[H\] = \[4\]"),
    "window": (dict(window=0), "window must be >= 1 or None, got 0"),
    **{
        f"window {value!r}": (dict(window=value), f"window must be an int, got {re.escape(repr(value))}")
        for value in (3.5, "3", True, np.True_, torch.tensor(3))
    },
    **{
        f"kv_length {value!r}": (dict(kv_length=value), f"kv_length must be an int, got {re.escape(repr(value))}")
        for value in (5.0, False, [600], torch.tensor(600))
    },
    **{
        f"{name} {value!r:.50}": ({name: value}, f"{name} must be a number, got {re.escape(repr(value)[:50])}")
        for name in ("scale", "softcap")
        for value in ("1", True, torch.tensor(0.5), 1j, float("nan"), 10**400)
    },
    "softcap": (dict(softcap=0.0), "softcap must be > 0 or None, got 0.0"),
    **{
        f"{name} {value}": (
            {name: value},
            rf"{name} must be None or at most 1e\+30 in size, got {re.escape(repr(value))}",
        )
        for name, value in (("scale", math.inf), ("scale", -1e300), ("softcap", math.inf), ("softcap", 1e300))
    },
    "query array": (dict(query=[1.0]), r"query must be a tensor on cpu, got \[1.0\]"),
    "query None": (dict(query=None), "query must be a tensor on cpu, got None"),
    "keys None": (dict(keys=None), "keys must be a tensor, got None"),
    "values array": (dict(values=torch.zeros(2, 2, 603, 32).numpy()), "values must be a tensor on cpu, got a ndarray$"),
    "values elsewhere": (
        dict(values=torch.zeros(2, 2, 603, 32, device="meta")),
        "values must be a tensor on cpu, got one on meta",
    ),
    "keys of 8 bits": (dict(keys=torch.zeros(2, 2, 603, 32).to(torch.float8_e4m3fn)), "keys must be a floating tensor"),
    "seq_lens list": (dict(seq_lens=[5, 600]), r"seq_lens must be a tensor on cpu, got \[5, 600\]"),
    "seq_lens None": (dict(seq_lens=None), "seq_lens must be a tensor on cpu, got None"),
    "num_valid int": (dict(num_valid=3), "num_valid must be a tensor on cpu, got 3"),
    "slots elsewhere": (
        dict(slots=torch.zeros(2, device="meta").long()),
        "slots must be a tensor on cpu, got one on meta",
    ),
    "sinks list": (dict(sinks=[0.0] * 4), "sinks must be a tensor on cpu, got"),
    "kv_length": (dict(kv_length=604), "kv_length must be between 1 and the capacity 603, got 604"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments(name: str) -> None:
    wrong, message = WRONG[name]
    with pytest.raises(ValueError, match=message):
        attention_ops.ragged_attention(**(attention_case((5, 600)) | wrong))


def test_head_sizes_beyond_256_are_refused() -> None:
    with pytest.raises(ValueError, match="keys must have the keys' head size D = 257, between 1 and 256"):
        attention_ops.ragged_attention(**attention_case((1,), head_dim=257))


def random_case(index: int) -> tuple[Case, dict[str, Any]]:
    generator = torch.Generator().manual_seed(1_000 + index)

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=generator))

    batch, width, group, kv_heads = draw(1, 4), draw(1, 12), draw(1, 5), draw(1, 2)
    case = attention_case(
        [draw(0, (20, 600, 1100)[index % 3]) for _ in range(batch)], width, group, kv_heads, draw(1, 70), DTYPES[draw(0, 2)],
        num_valid=[draw(0, width) for _ in range(batch)] if draw(0, 1) else None,
        slots=torch.randperm(batch + 2, generator=generator)[:batch].tolist() if draw(0, 1) else None, seed=index,
    )  # fmt: skip
    options: dict[str, Any] = dict(window=draw(1, 700)) if draw(0, 1) else {}
    options |= dict(softcap=float(draw(1, 40))) if draw(0, 1) else {}
    options |= dict(sinks=torch.randn(kv_heads * group, generator=generator)) if draw(0, 1) else {}
    return case, options


@pytest.mark.parametrize("count", [10, pytest.param(500, marks=pytest.mark.slow)])
def test_random_cases(count: int) -> None:
    for index in range(count):
        case, options = random_case(index)
        check_attention(case, **options)


@pytest.mark.gpu
@pytest.mark.parametrize("width", [1, 6, 64])
@pytest.mark.parametrize("kv_length", [512, 4096])
def test_a_captured_graph_replays_on_new_lengths(width: int, kv_length: int) -> None:
    """One graph serves whatever lengths, slots, queries and K/V come, up to its kv_length."""
    shape: dict[str, Any] = dict(width=width, group=4, kv_heads=8, head_dim=128, dtype=torch.bfloat16, capacity=4096)
    top = kv_length - width
    lengths = [(0, 5, top, top // 2), (top, 300, 0, 17), (64, 63, 65, 1)]
    cases = [attention_case(each, slots=slots, seed=i, **shape) for i, (each, slots) in enumerate(zip(lengths, [(0, 1, 2, 3), (3, 1, 2, 0), (2, 3, 0, 1)], strict=True))]  # fmt: skip
    static = on_device(cases[0], "cuda")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        ragged_attention(**static, kv_length=kv_length)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = [ragged_attention(**static, kv_length=kv_length) for _ in range(2)]
    for case in cases:
        for name, value in case.items():
            static[name].copy_(value)
        graph.replay()
        torch.cuda.synchronize()
        expected = attention_reference.ragged_attention(**case)
        for output in outputs:
            torch.testing.assert_close(output.cpu(), expected, **TOLERANCE[torch.bfloat16])
        assert torch.equal(outputs[0], ragged_attention(**static)), "a graph and a call give other bits"


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("width", [1, 6, 8, 64])
def test_long_batches_on_a_gpu(width: int, head_dim: int, dtype: torch.dtype) -> None:
    """Many programs at once, splits in number, and each row with the bits that it has alone."""
    case = attention_case((8000, 1, 4095, 0, 6001, 777), width, 4, 8, head_dim, dtype)
    together = check_attention(case)
    for row in range(6):
        assert torch.equal(attend(rows_of(case, [row]))[0], together[row])
