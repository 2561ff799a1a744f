"""What the calls say to arguments that do not fit: a ValueError that begins with the argument's name, before any work."""

import os
import subprocess
import sys
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import triton
from kernel_cases import assert_counters_are_clear, verify_case

from engine.kernels import ops, reference, warmup
from engine.kernels import verify as triton_verify
from engine.kernels.checks import MAX_GRID, MAX_WIDTH
from engine.kernels.launch import shape_arguments
from engine.kernels.ops import METHODS
from engine.kernels.records import RowStats

META = torch.device("meta")
LOGITS, DRAFTS = torch.zeros(2, 3, 5), torch.zeros(2, 2, 5)
WHOLE, REAL = torch.zeros(2, dtype=torch.int64), torch.ones(2)
STATS = RowStats(torch.zeros(2, 2), torch.zeros(2, 2), torch.zeros(2, 2, dtype=torch.int64))
PLAIN: dict[str, dict[str, Any]] = {
    "row_stats": dict(logits=LOGITS),
    "sample": dict(logits=LOGITS, seed=WHOLE, position=WHOLE),
    "verify": dict(
        target_logits=LOGITS,
        draft_tokens=torch.zeros(2, 2, dtype=torch.int64),
        draft_logits=DRAFTS,
        seed=WHOLE,
        position=WHOLE,
    ),
}
TENSORS: dict[str, torch.Tensor] = dict(
    temperature=REAL, top_k=WHOLE, top_p=REAL, min_p=REAL, logit_bias=torch.zeros(5), token_mask=torch.ones(5) > 0
)
NEEDED = ["logits", "target_logits", "draft_tokens", "seed", "position"]


def cases_of_tensors() -> list[Any]:
    """Each tensor of each call as something else, and on another device; None where it may not be left out."""
    cases = []
    for call, plain in PLAIN.items():
        options = TENSORS | (dict(origin=WHOLE) if call == "sample" else {})
        for name, value in (plain | options).items():
            wrong = [value.tolist(), value.numpy(), "1", 1.0, *([None] if name in NEEDED else [])]
            # It is the logits that say where the others are to be.
            wrong += [] if name in ("logits", "target_logits") else [value.to(META)]
            for each in wrong:
                kind = "meta" if isinstance(each, torch.Tensor) else type(each).__name__
                cases.append(pytest.param(call, name, each, id=f"{call}-{name}-{kind}"))
    return cases


@pytest.mark.parametrize(("call", "name", "value"), cases_of_tensors())
def test_what_is_no_tensor_on_the_device(call: str, name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"^{name} must be a tensor"):
        getattr(ops, call)(**PLAIN[call] | {name: value})


F8 = torch.float8_e4m3fn
WRONG: list[tuple[str, dict[str, Any], str]] = [
    *((call, {name: REAL.to(dtype)}, f"{name} must be float, got {dtype}")
      for call in PLAIN for name in ("temperature", "top_p", "min_p") for dtype in (torch.complex64, torch.bool, F8)),
    *((call, {"top_k": REAL.to(dtype)}, f"top_k must be int, got {dtype}")
      for call in PLAIN for dtype in (torch.complex64, torch.bool, torch.float32)),
    *((call, {"logit_bias": torch.zeros(5).to(F8)}, "logit_bias must be floating") for call in PLAIN),
    ("row_stats", dict(logits=LOGITS.to(F8)), "logits must be floating"),
    ("sample", dict(logits=LOGITS.to(F8)), "logits must be floating"),
    ("verify", dict(target_logits=LOGITS.to(F8)), "target_logits must be floating"),
    ("verify", dict(draft_logits=DRAFTS.to(F8)), "draft_logits must be floating"),
    ("row_stats", dict(logits=LOGITS.to_sparse()), "logits must be a plain tensor, got a torch.sparse_coo tensor"),
    ("sample", dict(logits=torch.complex(LOGITS, LOGITS).conj().imag), "logits must be a plain tensor, got a negated view"),
    ("verify", dict(draft_logits=torch.nested.nested_tensor([DRAFTS[0]])), "draft_logits must be a plain tensor, got a "),
    *((call, {name: torch.complex(torch.zeros(2), -torch.ones(2)).conj().imag}, f"{name} must be a plain tensor, got a negated")
      for call in PLAIN for name in ("temperature", "top_p", "min_p")),
    ("sample", dict(logit_bias=LOGITS[0, 0].to_sparse()), "logit_bias must be a plain tensor, got a torch.sparse_coo tensor"),
    ("verify", dict(method=np.array(["block"])), r"method must be one of rejection, .*, got array\(\['block'\]"),
    ("sample", dict(stream=torch.tensor(1)), "stream must be one of 0, 1, 2, 3"),
    ("sample", dict(stream=torch.tensor([1, 2])), "stream must be one of 0, 1, 2, 3"),
    ("sample", dict(stream=True), "stream must be one of 0, 1, 2, 3"),
    ("sample", dict(stream=None), "stream must be one of 0, 1, 2, 3"),
    ("verify", dict(draft_stats=tuple(STATS)), "draft_stats must be RowStats"),
    ("verify", dict(draft_logits=None, draft_stats=STATS), "draft_stats must be None where draft_logits is None"),
    *(("verify", dict(draft_stats=STATS._replace(**{name: None})), f"draft_stats.{name} must be a tensor on cpu, got None")
      for name in RowStats._fields),
    ("verify", dict(draft_stats=STATS._replace(lse=STATS.lse.to(META))), "draft_stats.lse must be a tensor on cpu, got one on meta"),
    ("verify", dict(draft_stats=STATS._replace(lse=STATS.argmax)), "draft_stats.lse must be floating, got torch.int64"),
    ("verify", dict(draft_stats=STATS._replace(lse=REAL)), "draft_stats.lse must have shape"),
    *(("verify", {name: value}, f"{name} must be a number >= 0, got ") for name in ("typical_epsilon", "typical_delta")
      for value in (None, "0.1", torch.tensor(0.1), -0.1, float("nan"), True, 10**400, 1j)),
    ("verify", dict(method=None), "method must be one of"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "wrong", "message"), WRONG)
def test_wrong_arguments(call: str, wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        getattr(ops, call)(**PLAIN[call] | wrong)


def test_numbers_of_any_kind_are_taken() -> None:
    """Whole temperatures and half-precision ones."""
    for temperature in (WHOLE, REAL.half(), REAL.double(), REAL.int()):
        verdict = ops.verify(**PLAIN["verify"], temperature=temperature)
        expected = ops.verify(**PLAIN["verify"], temperature=temperature.float())
        assert verdict.tokens.equal(expected.tokens) and verdict.num_accepted.equal(expected.num_accepted)


@pytest.mark.parametrize(
    "value", [np.float32(0.25), np.float64(0.25), np.int64(0), np.uint8(1), Fraction(1, 4), 1, 1e39], ids=repr
)
@pytest.mark.parametrize("kernels", ["triton", "torch"])
def test_thresholds_of_any_kind_are_taken(monkeypatch: pytest.MonkeyPatch, kernels: str, value: Any) -> None:
    """Numbers of Python and NumPy as what they are in float, and to the kernel that, of which it has one variant."""
    monkeypatch.setenv("ENGINE_KERNELS", kernels)
    given: list[Any] = []
    if kernels == "triton":
        real = triton_verify.verify
        monkeypatch.setattr(triton_verify, "verify", lambda *a, **k: given.append(k) or real(*a, **k))
    case = verify_case(torch.Generator().manual_seed(1), 16, 3, 300, None, torch.float32) | dict(method="typical")
    found = ops.verify(**case, typical_epsilon=value, typical_delta=value)
    expected = reference.verify(**case, typical_epsilon=float(value), typical_delta=float(value))
    assert torch.equal(found.tokens, expected.tokens)
    assert bool(given) == (kernels == "triton")
    assert all(type(k[name]) is float for k in given for name in ("typical_epsilon", "typical_delta"))


@pytest.mark.parametrize("call", ["sample", "verify"])
@pytest.mark.parametrize("value", [torch.tensor(True), "no", 1, None, np.True_], ids=repr)
def test_return_logprobs_that_is_no_bool(call: str, value: Any) -> None:
    """A tensor would have to be read."""
    with pytest.raises(ValueError, match=r"^return_logprobs must be True or False, got "):
        getattr(ops, call)(**PLAIN[call], return_logprobs=value)


@pytest.mark.parametrize("kernels", ["triton", "torch"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("method", METHODS)
def test_drafts_in_float64_beside_a_target_that_is_not(
    monkeypatch: pytest.MonkeyPatch, method: str, dtype: torch.dtype, kernels: str
) -> None:
    """They count as float32, with and without their stats, whichever of the two is float64, for accepted and rejected drafts."""
    monkeypatch.setenv("ENGINE_KERNELS", kernels)
    case = verify_case(torch.Generator().manual_seed(1), 16, 3, 300, 300, dtype)
    case["draft_logits"] = case["draft_logits"].float()
    stats = reference.row_stats(case["draft_logits"], case["temperature"])
    wide = RowStats(stats.threshold.double(), stats.lse.double(), stats.argmax)
    expected = reference.verify(**case, draft_stats=stats, method=method, return_logprobs=True)
    assert 0 < expected.num_accepted.sum() < 48
    double = case["draft_logits"].double()
    for more in (dict(draft_logits=double), dict(draft_logits=double, draft_stats=wide), dict(draft_stats=wide),
                 dict(draft_logits=double, draft_stats=stats)):  # fmt: skip
        found = ops.verify(**case | more, method=method, return_logprobs=True)
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert_counters_are_clear()


@pytest.mark.parametrize("call", ["row_stats", "sample", "verify"])
def test_nothing_is_recorded_for_gradients(call: str) -> None:
    arguments = {
        name: value.clone().requires_grad_() if "logits" in name else value for name, value in PLAIN[call].items()
    }
    results = getattr(ops, call)(**arguments)
    if call == "sample":
        results = (results.tokens, *results.stats)
    assert not any(field.requires_grad for field in results if field is not None)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("vocab_size", [5, 3_000])
def test_no_sequences(monkeypatch: pytest.MonkeyPatch, vocab_size: int, method: str) -> None:
    """B = 0, as a server calls that has nothing to do."""
    none, target = torch.zeros(0, dtype=torch.int64), torch.zeros(0, 3, vocab_size)
    drafts = torch.zeros(0, 2, dtype=torch.int64)
    where = dict(top_p=torch.zeros(0), seed=none, position=none)
    for kernels in ("torch", "triton"):
        monkeypatch.setenv("ENGINE_KERNELS", kernels)
        assert ops.sample(target, **where).tokens.shape == (0, 3)
        for draft in (None, target[:, 1:]):
            verdict = ops.verify(target, drafts, draft, **where, method=method, return_logprobs=True)
            shapes = [None if field is None else field.shape for field in verdict]
            assert shapes == [(0, 3), (0,), (0,), (0, 3)]


def test_warmup_does_nothing_where_the_twins_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("a call was made")

    for name in ("row_stats", "sample", "verify", "reserve_counters"):
        monkeypatch.setattr(warmup, name, fail)
    monkeypatch.delenv("ENGINE_KERNELS", raising=False)
    warmup.warmup(100, 2, torch.float32, "cpu", METHODS, 100, filters=True)
    monkeypatch.setenv("ENGINE_KERNELS", "triton")
    warmup.warmup(100, 2, torch.float64, "cpu")
    with pytest.raises(AssertionError, match="a call was made"):
        warmup.warmup(100, 2, torch.float32, "cpu")


def test_warmup_does_not_depend_on_the_default_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which others set to the dtype of a model while they load it. Temperatures of another dtype are another variant."""
    dtypes: list[set[torch.dtype]] = []

    def record(*args: Any, **kwargs: Any) -> None:
        dtypes[-1] |= {value.dtype for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)}

    for name in ("row_stats", "sample", "verify"):
        monkeypatch.setattr(warmup, name, record)
    monkeypatch.setenv("ENGINE_KERNELS", "triton")
    for default in (torch.float32, torch.float16):
        dtypes.append(set())
        torch.set_default_dtype(default)
        try:
            warmup.warmup(100, 2, torch.bfloat16, "cpu", METHODS, 100, filters=True, logit_bias=True, token_mask=True)
        finally:
            torch.set_default_dtype(torch.float32)
    assert dtypes[0] == dtypes[1] == {torch.bfloat16, torch.float32, torch.int64, torch.bool}


def test_warmup_does_nothing_where_there_is_no_triton() -> None:
    code = """
import sys
sys.modules["triton"] = None
import torch
from engine.kernels.warmup import warmup
warmup(100, 2, torch.float32, "cpu", ("block",), 100, filters=True)
"""
    env = {name: value for name, value in os.environ.items() if not name.startswith(("ENGINE_KERNELS", "TRITON"))}
    root = Path(__file__).resolve().parent.parent
    done = subprocess.run([sys.executable, "-c", code], cwd=root, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_kernels_that_cannot_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ENGINE_KERNELS", "triton")
    monkeypatch.setattr(triton.knobs.runtime, "interpret", False)
    with pytest.raises(ValueError, match=r"^ENGINE_KERNELS must be 'torch' or unset for tensors on cpu"):
        ops.row_stats(LOGITS)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (dict(draft_vocab_size=-3), "draft_vocab_size must be >= 1 or None, got -3"),
        (dict(draft_vocab_size=0), "draft_vocab_size must be >= 1 or None, got 0"),
        (dict(draft_vocab_size="5"), "draft_vocab_size must be an int, got '5'"),
        (dict(vocab_size=64.0), "vocab_size must be an int, got 64.0"),
        (dict(num_draft_tokens=1.0), "num_draft_tokens must be an int, got 1.0"),
        (dict(num_draft_tokens=True), "num_draft_tokens must be an int, got True"),
        (dict(methods=["greedy"]), r"methods must be a list of some of rejection, .*, got \['greedy'\]"),
        (dict(methods="block"), "methods must be a list of some of .*, got 'block'"),
        (dict(methods=None), "methods must be a list of some of .*, got None"),
        (dict(device="foo"), "device must be one that torch can make tensors on, got 'foo'"),
        (dict(dtype=F8), "dtype must be floating"),
    ],
    ids=str,
)
def test_warmup_refuses(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        warmup.warmup(**dict(vocab_size=100, num_draft_tokens=2, dtype=torch.float32, device="cpu") | wrong)


@pytest.mark.parametrize(("name", "shape"), [("B", (MAX_GRID + 1, 1)), ("W", (1, MAX_GRID + 1))])
def test_more_rows_than_a_grid_has(name: str, shape: tuple[int, int]) -> None:
    rows = torch.zeros(1, 1, 3)
    with pytest.raises(ValueError, match=f"{name} must be <= 65,535, got 65,536 with logits of shape"):
        shape_arguments(rows.expand(*shape, 3), shape, False, False, None, None, batched=False)
    most = [min(size, MAX_GRID) for size in shape]
    assert shape_arguments(rows.expand(*most, 3), most, False, False, None, None, batched=False)["num_rows"] == MAX_GRID


def test_more_drafts_than_a_program_holds() -> None:
    rows = torch.zeros(1, 1, 3).expand(1, MAX_WIDTH + 1, 3)
    with pytest.raises(ValueError, match="W must be <= 32,768, got 32,769 with logits of shape"):
        shape_arguments(rows, rows.shape[:2], False, False, None, None, batched=True)
    assert shape_arguments(rows[:, 1:], (1, MAX_WIDTH), False, False, None, None, batched=True)["num_rows"] == MAX_WIDTH


def test_more_tokens_than_a_search_has_room_for() -> None:
    for size, filtered in ((3_670_016, True), (3_670_017, False)):
        rows = torch.zeros(1, 1, 1).expand(1, 1, size)
        assert shape_arguments(rows, (1, 1), filtered, False, None, None, batched=False)["num_rows"] == 1
    with pytest.raises(ValueError, match=r"^V must be <= 3,670,016 with filters, got 3,670,017$"):
        shape_arguments(rows, (1, 1), True, False, None, None, batched=False)
