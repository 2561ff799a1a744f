"""`verify` over packed rows [N, V]: what it gives for the same rows padded to [B, K+1, V] with rows that are -inf throughout."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from kernel_cases import (
    DEVICE,
    DTYPES,
    METHODS_AND_DRAFTS,
    Case,
    assert_verdicts_equal,
    check_verify,
    every_other,
    pack,
    random_options,
    to_device,
    verify_case,
)

from engine.kernels import ops, reference
from engine.kernels.records import Status
from engine.kernels.rows import adjusted
from engine.kernels.verify import verify

pytestmark = pytest.mark.usefixtures("poisoned_empty")

COUNTS = (4, 1, 0, 3, 4, 2)  # rows of each sequence
BATCH, WIDTH = len(COUNTS), max(COUNTS)


def packed(case: Case) -> Case:
    return pack(case, COUNTS)


def case_of(option: str, kind: str, seed: int, dtype: torch.dtype = torch.float32, vocab_size: int = 1_100) -> Case:
    rng = torch.Generator().manual_seed(seed)
    options = random_options(option, rng, BATCH, vocab_size)
    draft_vocab = vocab_size if kind == "full" else None
    return verify_case(rng, BATCH, WIDTH - 1, vocab_size, draft_vocab, dtype, options)


@pytest.mark.parametrize("call", [verify, reference.verify], ids=["triton", "torch"])
@pytest.mark.parametrize(("method", "kind"), METHODS_AND_DRAFTS)
@pytest.mark.parametrize("option", ["plain", pytest.param("filters", marks=pytest.mark.slow), "all"])
def test_packed_rows_give_what_padded_ones_do(option: str, method: str, kind: str, call: Callable[..., Any]) -> None:
    """To the bit, with a bias [V] and a mask for each sequence; NaN beside the rows is not read."""
    case = case_of(option, kind, 1, DTYPES[len(method) % 3])
    rows = packed(case) | dict(method=method, return_logprobs=True)
    have, want = (call(**to_device_all(each)) for each in (rows, case | dict(method=method, return_logprobs=True)))
    for name, mine, theirs in zip(have._fields, have, want, strict=True):
        assert torch.equal(mine, theirs), name
    assert have.num_accepted.max() > 0


@pytest.mark.parametrize("method", ["rejection", "block", "coupled"])
@pytest.mark.parametrize("kind", ["full", "one-hot"])
def test_words_of_every_row(method: str, kind: str) -> None:
    """A bias and a mask of each row, packed like the logits, as grammars make them; the drafts' stats are worked out under them."""
    case, rng = case_of("plain", kind, 2), torch.Generator().manual_seed(3)
    shape = case["target_logits"].shape
    mask = torch.rand(shape, generator=rng) < 0.8
    case |= dict(logit_bias=torch.randn(shape, generator=rng), token_mask=mask, method=method)
    rows = packed(case)
    want = reference.verify(**case)
    assert_verdicts_equal(verify(**to_device_all(rows)), want)
    assert_verdicts_equal(reference.verify(**rows), want)


@pytest.mark.parametrize("mask_of", ["vocabulary", "sequence", "row"])
@pytest.mark.parametrize("bias_of", ["vocabulary", "sequence", "row"])
def test_a_bias_and_a_mask_of_their_own_shapes_each(bias_of: str, mask_of: str) -> None:
    """[V], [B, 1, V] and packed [N, V] beside each other: one is not read as the other is laid out. The drafts are the likeliest under
    both, so that other rows than the first count."""
    case, rng = case_of("plain", "full", 6), torch.Generator().manual_seed(7)
    shape = case["target_logits"].shape
    shapes = dict(vocabulary=shape[-1:], sequence=(BATCH, shape[-1]), row=shape)
    bias, mask = 5 * torch.randn(shapes[bias_of], generator=rng), torch.rand(shapes[mask_of], generator=rng) < 0.8
    words = [each[:, None] if each.dim() == 2 else each for each in (bias, mask)]
    case["draft_tokens"] = adjusted(case["target_logits"], *words)[:, :-1].argmax(dim=-1)
    case |= dict(logit_bias=bias, token_mask=mask, return_logprobs=True)
    have = check_verify(packed(case))
    assert_verdicts_equal(have, reference.verify(**case))
    assert have.num_accepted.max() > 1


def test_row_numbers_of_any_stride() -> None:
    case = packed(case_of("plain", "one-hot", 8, vocab_size=40))
    check_verify(case | dict(cu_num_logits=every_other(case["cu_num_logits"])))


def test_a_sequence_without_rows_emits_nothing() -> None:
    """As a batch is padded for a captured graph."""
    rows = packed(case_of("plain", "one-hot", 4))
    verdict = ops.verify(**to_device_all(rows))
    empty = torch.tensor(COUNTS) == 0
    assert (verdict.status.cpu() == empty * int(Status.EMPTY_TARGET)).all()
    assert (verdict.tokens.cpu()[empty] == -1).all() and (verdict.tokens.cpu()[~empty, 0] >= 0).all()
    none = ops.verify(**to_device_all(rows | dict(cu_num_logits=torch.zeros(BATCH + 1, dtype=torch.int32))))
    assert (none.status.cpu() == int(Status.EMPTY_TARGET)).all()


def test_more_drafts_than_rows_end_with_the_rows() -> None:
    """The last row judges the draft behind it as well; there is none to go on from."""
    rows = packed(case_of("plain", "one-hot", 5))
    rows |= dict(temperature=torch.zeros(BATCH), draft_tokens=reference.verify(**rows).tokens[:, :-1])
    rows["draft_tokens"][1, 0] = rows["target_logits"][rows["cu_num_logits"][1]].argmax()
    want = reference.verify(**rows)
    assert_verdicts_equal(verify(**to_device_all(rows)), want)
    assert want.status[1] == Status.EMPTY_TARGET and want.num_accepted[1] == 1


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (
            dict(cu_num_logits=torch.zeros(3)),
            r"^cu_num_logits must be int32 of shape \[B\+1\] = \[3\] .*got torch.float32",
        ),
        (dict(cu_num_logits=torch.zeros(2, dtype=torch.int32)), r"^cu_num_logits must be int32 .* of shape \[2\]$"),
        (dict(cu_num_logits=[0, 1, 2]), "^cu_num_logits must be a tensor"),
        (dict(target_logits=torch.zeros(2, 1, 5)), r"^target_logits must be floating .* \[N, V\]"),
        (dict(logit_bias=torch.zeros(2, 5)), r"^logit_bias must have shape \[V\], \[B, 1, V\] or that of the logits"),
        (dict(draft_tokens=torch.zeros(2, dtype=torch.int64)), r"^draft_tokens must be int64 of shape \[B, K\]"),
        (dict(seed=torch.zeros(3, dtype=torch.int64)), r"^seed must have shape \[B\] = \[2\]"),
    ],
)
def test_what_does_not_fit(more: dict[str, Any], message: str) -> None:
    fine: dict[str, Any] = dict(
        target_logits=torch.zeros(3, 5),
        draft_tokens=torch.zeros(2, 1, dtype=torch.int64),
        seed=torch.zeros(2, dtype=torch.int64),
        position=torch.zeros(2, dtype=torch.int64),
        cu_num_logits=torch.tensor([0, 2, 3], dtype=torch.int32),
    )
    assert ops.verify(**fine).tokens.shape == (2, 2)
    with pytest.raises(ValueError, match=message):
        ops.verify(**fine | more)


def to_device_all(case: Case) -> Case:
    return {name: to_device(value, DEVICE) for name, value in case.items()}
