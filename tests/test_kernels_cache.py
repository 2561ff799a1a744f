"""The scatter of new K/V in Triton against its torch twin."""

from typing import Any

import pytest
import torch
from attention_cases import far_apart
from kernel_cases import DEVICE, DTYPES, to_device
from torch import Tensor

from engine.kernels import attention_ops, attention_reference, cache
from engine.kernels.cache import scatter_kv

Case = dict[str, Any]  # the arguments of scatter_kv


def scatter_case(
    batch: int = 4,
    heads: int = 2,
    width: int = 3,
    head_dim: int = 32,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> Case:
    """New K/V as transformers' models hand them over, for rows of any length that fit, with any number of valid columns."""
    generator = torch.Generator().manual_seed(seed)
    capacity, num_slots = width + 20, batch + 2
    new = [torch.randn(batch, width, heads, head_dim, generator=generator).to(dtype).transpose(1, 2) for _ in range(2)]
    caches = [torch.randn(num_slots, heads, capacity, head_dim, generator=generator).to(dtype) for _ in range(2)]
    return dict(
        keys=caches[0],
        values=caches[1],
        new_keys=new[0],
        new_values=new[1],
        seq_lens=torch.randint(0, 21, (batch,), generator=generator),
        num_valid=torch.randint(0, width + 1, (batch,), generator=generator),
        slots=torch.randperm(num_slots, generator=generator)[:batch],
    )


def check_scatter(case: Case) -> tuple[Tensor, Tensor]:
    """The buffers on the CPU after the kernel wrote them, once they equal the twin's, the untouched rest included."""
    expected = case | {name: case[name].clone() for name in ("keys", "values")}
    attention_reference.scatter_kv(**expected)
    actual = {name: to_device(value, DEVICE) for name, value in case.items()}
    for name in ("keys", "values"):
        actual[name] = torch.empty_strided(
            case[name].shape, case[name].stride(), dtype=case[name].dtype, device=DEVICE
        ).copy_(case[name])
    scatter_kv(**actual)
    for name in ("keys", "values"):
        torch.testing.assert_close(actual[name].cpu(), expected[name], rtol=0, atol=0, equal_nan=True)
    return actual["keys"].cpu(), actual["values"].cpu()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("batch", "heads", "width", "head_dim"),
    [(1, 1, 1, 8), (4, 2, 6, 64), (3, 8, 8, 128), (2, 40, 2, 80), (2, 3, 65, 16), (5, 1, 32, 256)],
)
def test_hard_shapes(batch: int, heads: int, width: int, head_dim: int, dtype: torch.dtype) -> None:
    check_scatter(scatter_case(batch, heads, width, head_dim, dtype))
    check_scatter(scatter_case(batch, heads, width, head_dim, dtype) | dict(slots=None))


def test_columns_go_where_their_row_ends() -> None:
    """Spelled out, for kernel and twin alike."""
    case = scatter_case(batch=2, width=3) | dict(seq_lens=torch.tensor([4, 0]), num_valid=torch.tensor([2, 0]))
    case["slots"] = torch.tensor([3, 1])
    before = case["keys"].clone()
    keys, values = check_scatter(case)
    assert torch.equal(keys[3, :, 4:6], case["new_keys"][0, :, :2])
    assert torch.equal(values[3, :, 4:6], case["new_values"][0, :, :2])
    keys[3, :, 4:6] = before[3, :, 4:6]
    assert torch.equal(keys, before)


def test_padding_writes_nothing() -> None:
    """Not even where several rows of padding share a slot with a row that counts."""
    case = scatter_case(batch=4) | dict(slots=torch.tensor([2, 2, 2, 0]), num_valid=torch.tensor([0, 3, 0, -1]))
    case["seq_lens"] = torch.tensor([5, 5, 6, 0])
    keys, _ = check_scatter(case)
    assert torch.equal(keys[2, :, 5:8], case["new_keys"][1])


def test_nothing_is_written_outside_the_buffers() -> None:
    case = scatter_case(batch=4, width=3) | dict(num_valid=torch.tensor([3, 3, 3, 3]), slots=None)
    case["seq_lens"] = torch.tensor([-2, 21, 23, 2**40])
    keys, _ = check_scatter(case)
    assert torch.equal(keys[0, :, 0], case["new_keys"][0, :, 2]) and torch.equal(
        keys[1, :, 21:], case["new_keys"][1, :, :2]
    )


def test_any_strides() -> None:
    case = scatter_case()
    for name in ("keys", "values"):
        case[name] = case[name].transpose(1, 2).contiguous().transpose(1, 2)
    wide = torch.zeros(4, 2, 3, 50)
    case["new_keys"] = wide[..., 7:39].copy_(case["new_keys"])
    case["new_values"] = case["new_values"][:1].expand(4, -1, -1, -1)
    check_scatter(case)


def test_nan_is_copied() -> None:
    case = scatter_case()
    case["new_keys"][:, 0, 0, 5] = torch.nan
    case["num_valid"].fill_(3)
    assert check_scatter(case)[0].isnan().sum() == 4


@pytest.mark.usefixtures("overflow_checked")
@pytest.mark.parametrize("dimension", [0, 1, 2], ids=["rows", "heads", "tokens"])
def test_more_than_2_to_31_elements(dimension: int) -> None:
    """Offsets are 64-bit, of what is read and of what is written."""
    case = scatter_case(batch=3, heads=3, dtype=torch.bfloat16) | dict(slots=torch.tensor([1, 2, 0]))
    case |= dict(seq_lens=torch.tensor([0, 1, 0]), num_valid=torch.tensor([2, 2, 3]))
    case |= {name: case[name][:3, :, :3] for name in ("keys", "values")}
    keys, values = check_scatter(case)
    far = {name: far_apart(case[name], dimension, 2**30) for name in ("keys", "values", "new_keys", "new_values")}
    scatter_kv(**{name: to_device(value, DEVICE) for name, value in case.items()} | far)
    assert torch.equal(far["keys"].cpu(), keys) and torch.equal(far["values"].cpu(), values)


def test_empty_calls() -> None:
    case = scatter_case(batch=1)
    for rows in ((slice(0), slice(None)), (slice(None), slice(0))):
        new = {name: case[name][rows[0], :, rows[1]] for name in ("new_keys", "new_values")}
        small = {name: case[name][rows[0]] for name in ("seq_lens", "num_valid", "slots")}
        before = case["keys"].clone()
        keys, _ = check_scatter(case | new | small)
        assert torch.equal(keys, before)


def test_dispatch(monkeypatch: pytest.MonkeyPatch) -> None:
    called = []
    real = cache.scatter_kv
    monkeypatch.setattr(cache, "scatter_kv", lambda *a, **k: called.append("triton") or real(*a, **k))
    results = []
    for choice in ("torch", "triton"):
        monkeypatch.setenv("ENGINE_KERNELS", choice)
        case = {name: to_device(value, DEVICE) for name, value in scatter_case().items()}
        attention_ops.scatter_kv(**case)
        results.append(case["keys"])
        assert called == ["triton"] * (choice == "triton")
    assert torch.equal(*results)


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "dtype": (dict(new_values=torch.zeros(4, 2, 3, 32).half()), "new_values must .* of one dtype with keys"),
    "heads": (dict(new_keys=torch.zeros(4, 1, 3, 32)), r"new_keys must be \[B, H_kv, W, D\] with H_kv = 2, got \[4, 1"),
    "shapes": (dict(new_values=torch.zeros(4, 2, 2, 32)), r"new_values must be \[B, H_kv, W, D\]"),
    "size": (dict(new_keys=torch.zeros(4, 2, 3, 31)), "new_keys must have the keys' head size D = 32"),
    "stride": (dict(new_keys=torch.zeros(4, 2, 32, 3).mT), "new_keys must be contiguous in its last dimension"),
    "values": (dict(values=torch.zeros(6, 2, 22, 32)), "values must have the shape of keys"),
    "num_valid": (
        dict(num_valid=torch.zeros(4).int()),
        r"num_valid must be int64 of shape \[B\] = \[4\], got torch.int32",
    ),
    "seq_lens": (dict(seq_lens=torch.zeros(3).long()), "seq_lens must be int64 of shape"),
    "new_keys None": (dict(new_keys=None), "new_keys must be a tensor on cpu, got None"),
    "num_valid None": (dict(num_valid=None), "num_valid must be a tensor on cpu, got None"),
    "seq_lens list": (dict(seq_lens=[0] * 4), "seq_lens must be a tensor on cpu, got"),
    "seq_lens elsewhere": (
        dict(seq_lens=torch.zeros(4, device="meta").long()),
        "seq_lens must be a tensor on cpu, got one on",
    ),
    "slots": (dict(slots=torch.zeros(4, 1).long()), "slots must be int64 of shape"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments(name: str) -> None:
    wrong, message = WRONG[name]
    case = scatter_case() | wrong
    before = case["keys"].clone()
    with pytest.raises(ValueError, match=message):
        attention_ops.scatter_kv(**case)
    assert torch.equal(case["keys"], before)


@pytest.mark.gpu
def test_a_captured_graph_replays_on_new_lengths() -> None:
    cases = [scatter_case(8, 8, 6, 128, torch.bfloat16, seed=seed) for seed in range(3)]
    static = {name: value.cuda() for name, value in cases[0].items()}
    scatter_kv(**static)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        scatter_kv(**static)
    for case in cases:
        for name, value in case.items():
            static[name].copy_(value)
        graph.replay()
        torch.cuda.synchronize()
        attention_reference.scatter_kv(**case)
        assert torch.equal(static["keys"].cpu(), case["keys"]) and torch.equal(static["values"].cpu(), case["values"])
