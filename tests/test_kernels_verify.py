"""The Triton verify against its torch twin."""

import itertools
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from chains import rows
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kernel_cases import (
    DEVICE,
    DTYPES,
    LAYOUTS,
    METHODS_AND_DRAFTS,
    OPTIONS,
    TILED,
    VOCABS,
    Case,
    assert_independent,
    check_row_stats,
    check_sample,
    check_verify,
    every_other,
    far_apart,
    lay_out,
    random_cases,
    random_filters,
    random_options,
    random_rows,
    to_device,
    verify_case,
)

from engine.kernels import ops, philox, reference
from engine.kernels.ops import METHODS
from engine.kernels.records import FATAL_STATUS, RowStats, Status
from engine.kernels.sample import sample
from engine.kernels.verify import verify

pytestmark = pytest.mark.usefixtures("poisoned_empty")


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def shapes() -> Iterator[Any]:
    """The whole matrix; by default the small vocabularies in full, and of the large ones every dtype and both kinds."""
    sample_of_large = {
        (49_152, torch.float32, "full"),
        (49_152, torch.float16, "one-hot"),
        (151_936, torch.bfloat16, "full"),
        (151_936, torch.float32, "one-hot"),
    }
    for shape in itertools.product(VOCABS, DTYPES, ("full", "one-hot")):
        by_default = shape[0] <= 1_000 or shape in sample_of_large
        yield pytest.param(*shape, marks=() if by_default else pytest.mark.slow)


@pytest.mark.parametrize(("vocab_size", "dtype", "kind"), list(shapes()), ids=str)
def test_verdicts_equal_the_twin(vocab_size: int, dtype: torch.dtype, kind: str) -> None:
    batch, num_drafts = (3, 1) if vocab_size > 100_000 else (4, 2) if vocab_size > 10_000 else (8, 4)
    draft_vocab = vocab_size if kind == "full" else None
    check_verify(verify_case(generator(vocab_size), batch, num_drafts, vocab_size, draft_vocab, dtype))


@pytest.mark.parametrize(
    "option", ["plain", *(pytest.param(name, marks=pytest.mark.slow) for name in ("filters", "bias and mask")), "all"]
)
@pytest.mark.parametrize(("method", "kind"), METHODS_AND_DRAFTS)
def test_every_method_equals_the_twin(method: str, kind: str, option: str) -> None:
    """Also over several draw blocks, with vocabularies that differ, and with log-probabilities."""
    for seed, (vocab_size, draft_vocab) in enumerate([(40, 40), (2_500, 2_500), (30, 50), (50, 30)]):
        batch, rng = 8 if vocab_size < 1_000 else 5, generator(100 + seed)
        options = random_options(option, rng, batch, vocab_size)
        case = verify_case(rng, batch, 3, vocab_size, draft_vocab if kind == "full" else None, DTYPES[seed % 3])
        check_verify(case, **options, method=method, return_logprobs=True)


@pytest.mark.parametrize("filtered", [False, True], ids=["plain", "filtered"])
@pytest.mark.parametrize(("method", "kind"), METHODS_AND_DRAFTS)
def test_several_tiles(method: str, kind: str, filtered: bool) -> None:
    """What is put together from tiles: the twin's verdict, in any slot and whoever is beside it. Under filters a sample
    stands for the row, its bracket is swept and its contenders are halved."""
    case = verify_case(generator(200), 2, 2, TILED, TILED if kind == "full" else None, torch.bfloat16)
    case["temperature"] = torch.tensor([0.8, 1.3])
    if filtered:
        case |= dict(
            top_k=torch.tensor([3_000, 0]), top_p=torch.tensor([0.9, 0.8]), min_p=torch.tensor([0.0, 1e-4])
        )  # fmt: skip
    check_verify(case, method=method, return_logprobs=True)
    on_device = {name: value for name, value in to_device_case(case).items() if value is not None}
    assert_independent(partial(verify, method=method, return_logprobs=True), on_device)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("num_drafts", [0, 1, 32])
def test_every_method_with_any_number_of_drafts(method: str, num_drafts: int) -> None:
    for draft_vocab in (None, 60):
        check_verify(verify_case(generator(num_drafts), 4, num_drafts, 60, draft_vocab), method=method)


@pytest.mark.parametrize("method", METHODS)
def test_rows_without_a_distribution_under_every_method(method: str) -> None:
    """NaN or nothing in target or draft rows, with and without filters: what the twin says, never an id out of range."""
    for seed, (bad, option) in enumerate(itertools.product((torch.nan, torch.inf, -torch.inf), ("plain", "filters"))):
        rng = generator(300 + seed)
        case = verify_case(rng, 9, 2, 200, 200)
        where = slice(None) if bad == -torch.inf else 11
        for row in range(3):
            case["target_logits"][row:6:3, row, where] = bad
        case["draft_logits"][6:, 1, where] = bad
        options = random_filters(rng, 9, 200) if option == "filters" else {}
        verdict = check_verify(case, **options, method=method, return_logprobs=True)
        assert ((verdict.tokens >= -1) & (verdict.tokens < 200)).all()
        assert verdict.status.any()


@pytest.mark.parametrize("num_drafts", [0, 1, 2, 3, 7, 8])
def test_any_number_of_drafts(num_drafts: int) -> None:
    for draft_vocab in (None, 200):
        check_verify(verify_case(generator(num_drafts), 8, num_drafts, 200, draft_vocab))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_strides(layout: str) -> None:
    case = verify_case(generator(1), 6, 3, 5_001, 5_003, torch.bfloat16)
    for name in ("target_logits", "draft_logits"):
        case[name] = lay_out(case[name], layout)
    case["draft_tokens"] = case["draft_tokens"].t().contiguous().t()
    check_verify(case)


def test_any_strides_of_small_tensors() -> None:
    """Of what is told of each sequence, and of the drafts' stats."""
    rows = dict(temperature=torch.tensor([1.0, 0.7, 0.0, 1.3]), top_k=torch.tensor([0, 5, 9, 3]),
                top_p=torch.tensor([0.9, 1.0, 0.7, 0.8]), min_p=torch.tensor([0.0, 0.1, 0.0, 0.2]))  # fmt: skip
    case = verify_case(generator(32), 4, 2, 40, 40) | rows
    stats = reference.row_stats(case["draft_logits"], **rows)
    small = {name: every_other(case[name]) for name in (*rows, "seed", "position")}
    verdict = check_verify(case | small, draft_stats=RowStats(*map(every_other, stats)))
    assert torch.equal(verdict.tokens, check_verify(case, draft_stats=stats).tokens)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("method", ["rejection", "block"])
def test_draft_stats_in_half_precision(method: str, dtype: torch.dtype) -> None:
    """Products with them in their own precision would make the residual another one than the test of the draft goes by."""
    case = verify_case(generator(51), 48, 1, 8) | dict(temperature=torch.ones(48))
    case["target_logits"] = case["target_logits"] + 100
    case["draft_logits"] = case["target_logits"][:, :1] + torch.randn(48, 1, 8, generator=generator(52))
    case["draft_tokens"] = (case["draft_logits"] - case["target_logits"][:, :1]).argmax(dim=-1)
    stats = reference.row_stats(case["draft_logits"])
    half = RowStats(stats.threshold.to(dtype), stats.lse.to(dtype), stats.argmax)
    assert (check_verify(case, draft_stats=half, method=method).num_accepted == 0).sum() > 9


@pytest.mark.parametrize("method", ["rejection", "block"])
@pytest.mark.parametrize("word", ["token_mask", "logit_bias"])
def test_a_bias_and_a_mask_of_every_row(word: str, method: str) -> None:
    """Each row's own in the drafts' stats too, of which there is one row fewer: a single token is left in each, 100 below or above that
    of the next row. The drafter knows a few tokens more, all of them unlikely."""
    only = torch.tensor([[5, 3, 7], [3, 5, 7]])
    left = torch.zeros(2, 3, 40, dtype=torch.bool).scatter_(-1, only[..., None], True)
    logits = torch.zeros(2, 3, 40)
    logits[..., 5], logits[..., 3] = 50.0, -50.0
    case = random_rows(2, generator(42)) | dict(
        target_logits=logits,
        draft_tokens=only[:, :2],
        draft_logits=torch.nn.functional.pad(logits[:, :2], (0, 4), value=-200.0),
    )
    words = {word: left if word == "token_mask" else torch.zeros(left.shape).masked_fill(~left, -torch.inf)}
    verdict = check_verify(case, **words, method=method, return_logprobs=True)
    assert torch.equal(verdict.tokens, only) and (verdict.status == 0).all()


@pytest.mark.parametrize("method", ["rejection", "block"])
def test_a_bias_and_a_mask_say_nothing_of_further_draft_tokens(method: str) -> None:
    """Which have a share of q as they are, whatever a mask leaves of the others."""
    options = random_options("bias and mask", generator(43), 40, 40)
    check_verify(verify_case(generator(44), 40, 3, 40, 60, options=options), method=method)


@pytest.mark.parametrize("sizes", [(1000, 1024), (1024, 1000), (5, 4097), (4097, 5)], ids=str)
def test_vocabularies_of_different_size(sizes: tuple[int, int]) -> None:
    """A token that one vocabulary lacks has probability 0 in it, wherever the blocks end."""
    case = verify_case(generator(2), 12, 3, *sizes)
    if sizes[0] < sizes[1]:
        case["draft_tokens"][0, 0] = sizes[1] - 1
        case["draft_logits"][0, 0, -1] = 3.0
    check_verify(case)
    case["draft_tokens"] = torch.randint(-1, max(sizes) + 2, (12, 3), generator=generator(3))
    check_verify(case)
    check_verify(case, draft_logits=None)


def test_draft_ids_beyond_32_bits() -> None:
    """An id that no vocabulary has is rejected like any other, and takes no token out of the residual."""
    case = verify_case(generator(19), 12, 2, 4)
    case["draft_tokens"] = torch.full((12, 2), 2**32 + 1)
    for method in METHODS:
        check_verify(case, method=method)


def test_stats_of_the_drafts_given_or_not() -> None:
    """A drafter that samples with `sample` hands its stats over, and nothing changes."""
    case = to_device_case(verify_case(generator(4), 8, 3, 500, 500))
    rows = {name: case[name] for name in ("temperature", "seed", "position")}
    draws = sample(case["draft_logits"], **rows, origin=rows["position"], stream=philox.DRAFT)
    case["draft_tokens"] = draws.tokens
    given, derived = verify(**case, draft_stats=draws.stats), verify(**case)
    assert all(torch.equal(a, b) for a, b in zip(given[:3], derived[:3], strict=True))
    assert given.num_accepted.sum() > 0 and given.status.sum() == 0


def test_stats_of_filtered_drafts() -> None:
    """Thresholds in draft_stats count: the drafter may have filtered although the target is not."""
    case = verify_case(generator(5), 16, 2, 50, 50)
    stats = reference.row_stats(case["draft_logits"], case["temperature"], top_k=torch.full((16,), 3))
    check_verify(case, draft_stats=stats)


def test_full_and_zero_acceptance() -> None:
    case = verify_case(generator(6), 8, 5, 64, 64)
    same = case["target_logits"][:, :5].clone()
    rows = {name: case[name] for name in ("temperature", "seed", "position")}
    tokens = reference.sample(same, **rows, origin=rows["position"], stream=philox.DRAFT).tokens
    verdict = check_verify(case, draft_logits=same, draft_tokens=tokens)  # p = q
    assert verdict.num_accepted.tolist() == [5] * 8 and (verdict.tokens[:, 5] >= 0).all()

    apart = same.clone().fill_(-torch.inf)  # disjoint supports
    apart[..., 0] = 1.0
    case["target_logits"][..., 0] = -torch.inf
    verdict = check_verify(case, draft_logits=apart, draft_tokens=torch.zeros(8, 5, dtype=torch.int64))
    assert verdict.num_accepted.tolist() == [0] * 8 and verdict.status.tolist() == [0] * 8
    assert (verdict.tokens[:, 0] > 0).all() and (verdict.tokens[:, 1:] == -1).all()


def test_greedy_rows_among_sampled_ones() -> None:
    """They accept while the draft is the argmax, whatever q says, NaN included."""
    case = verify_case(generator(7), 8, 3, 300, 300)
    greedy = case["temperature"] == 0
    case["draft_tokens"][greedy] = case["target_logits"].argmax(dim=-1)[greedy][:, :3]
    case["draft_tokens"][greedy, 2] += 1  # the last one is wrong
    case["draft_logits"][greedy] = torch.nan
    verdict = check_verify(case)
    assert verdict.num_accepted[greedy].tolist() == [2, 2] and (verdict.status[greedy] == 0).all()
    check_verify(case, draft_logits=None)


def test_tiny_temperatures_are_greedy() -> None:
    """logit / T would overflow, and nothing would be emitted."""
    case = verify_case(generator(18), 4, 2, 300)
    case["temperature"] = torch.tensor([1e-36, 9e-6, 0.0, 1.1e-5])
    case["target_logits"] *= 1_000
    for method in METHODS:
        verdict = check_verify(case, method=method)
        assert (verdict.tokens[:, 0] >= 0).all() and (verdict.status == 0).all()


ENDLESS = torch.tensor([torch.inf, 3e38, 1e38, torch.inf, 3e38, 0.7, torch.nan, 0.0])


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize(("method", "kind"), METHODS_AND_DRAFTS)
def test_endless_temperatures(method: str, kind: str, option: str) -> None:
    """Of rows with -inf in them, the block's padding at least: every token that stays is as likely."""
    rng = generator(12)
    case = verify_case(rng, 8, 1, 300, 300 if kind == "full" else None) | dict(temperature=ENDLESS)
    case["target_logits"][:, 1, ::3] = -torch.inf
    verdict = check_verify(case, method=method, return_logprobs=True, **random_options(option, rng, 8, 300))
    fatal = torch.tensor([0] * 6 + [Status.NAN_TARGET, 0])
    assert torch.equal(verdict.status & FATAL_STATUS, fatal)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_endless_temperatures_make_all_tokens_as_likely(dtype: torch.dtype) -> None:
    logits = torch.randn(2, 300, generator=generator(13), dtype=dtype)
    logits[1, 100:] = -torch.inf
    temperature = torch.full((2,), torch.inf, dtype=dtype)
    for min_p in (0.0, 1.0):  # 1.0: log(min_p) / (1 / T) must not be 0 / 0
        stats = reference.row_stats(logits, temperature, min_p=torch.full((2,), min_p, dtype=dtype))
        torch.testing.assert_close(stats.lse.exp(), torch.tensor([300, 100] if min_p == 0 else [1, 1], dtype=dtype))
    check_sample(
        logits.float(), temperature.float(), seed=torch.arange(2), position=torch.arange(2), return_logprobs=True
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_temperature_from_which_on_rows_are_sampled(dtype: torch.dtype) -> None:
    """float32's 1e-5 is the lowest, in a batch and alone, for the kernel and the twin; float64 counts as the float32 next to it."""
    case = verify_case(generator(24), 4, 2, 40)
    case["target_logits"] = torch.zeros(4, 3, 40)  # a sampled row takes any token of them, a greedy one the first
    below = torch.nextafter(torch.tensor(1e-5), torch.tensor(0.0)).item()
    case["temperature"] = torch.tensor([1e-5, below, 1e-5 * (1 - 1e-8), 1.0], dtype=dtype)
    case["draft_tokens"] = torch.zeros(4, 2, dtype=torch.int64)
    for method in ("rejection", "coupled"):
        together = check_verify(case, method=method)
        assert (together.num_accepted == 2).tolist() == [False, True, False, False]
        for row in range(4):
            alone = check_verify(
                {name: value[row : row + 1] for name, value in case.items() if value is not None}, method=method
            )
            assert torch.equal(alone.tokens, together.tokens[row : row + 1])


def test_target_rows_without_a_distribution() -> None:
    """NaN, +inf and all -inf in the row that decides, in one before it and in one never reached."""
    for bad, flag in (
        (torch.nan, Status.NAN_TARGET), (torch.inf, Status.NAN_TARGET), (-torch.inf, Status.EMPTY_TARGET)
    ):  # fmt: skip
        case = verify_case(generator(8), 12, 2, 1_000, 1_000)
        for row in range(3):
            case["target_logits"][row::3, row, slice(None) if flag == Status.EMPTY_TARGET else -1] = bad
        verdict = check_verify(case)
        assert (verdict.status[::3] == flag).all() and (verdict.tokens[::3] == -1).all()
        assert {0, int(flag)} == set(verdict.status.tolist())
        check_verify(case, draft_logits=None)


@pytest.mark.parametrize("filters", [{}, dict(top_p=torch.tensor([0.9] * 4))], ids=["plain", "filtered"])
@pytest.mark.parametrize("method", METHODS)
def test_logits_too_large_for_their_temperature(method: str, filters: dict[str, torch.Tensor]) -> None:
    """A logit / T beyond float32 is like one that is +inf: a verdict without a next token always says why."""
    case = verify_case(generator(20), 4, 1, 1_030)
    case |= filters | dict(temperature=torch.tensor([0.5, 1.0, 0.5, 0.0]))
    case["target_logits"][:2, :, 1_029] = 3e38
    verdict = check_verify(case, method=method)
    assert verdict.status.tolist() == [Status.NAN_TARGET, 0, 0, 0]
    assert (verdict.tokens == -1).all(dim=1).tolist() == [True, False, False, False]
    stats = check_row_stats(case["target_logits"], case["temperature"], **filters)
    assert stats.lse.isnan().tolist() == [[True] * 2, [False] * 2, [False] * 2, [False] * 2]
    tokens = check_sample(
        case["target_logits"], seed=case["seed"], position=case["position"], temperature=case["temperature"]
    )
    assert (tokens == -1).tolist() == stats.lse.isnan().tolist()
    case["target_logits"][0, :, 1_029] = 0.0
    case["draft_logits"] = case["target_logits"][:, :1].clone()
    case["draft_logits"][0, :, 1_029] = 3e38
    if method in ("rejection", "block"):
        case["draft_tokens"][0] = 0
        assert check_verify(case, method=method).status[0] == Status.INVALID_DRAFT


def test_draft_rows_without_a_distribution() -> None:
    """The draft ends before them, and the next token is the target's own."""
    for bad in (torch.nan, torch.inf, -torch.inf):
        case = verify_case(generator(9), 12, 2, 1_000, 1_000)
        case["draft_tokens"].clamp_(min=0)
        case["draft_logits"][::2, 0, slice(None) if bad == -torch.inf else 5] = bad
        verdict = check_verify(case)
        sampled = case["temperature"][::2] > 0
        assert (verdict.status[::2][sampled] == Status.INVALID_DRAFT).all()
        assert (verdict.num_accepted[::2][sampled] == 0).all() and (verdict.tokens[:, 0] >= 0).all()


@pytest.mark.parametrize("method", ["rejection", "block"])
def test_drafts_behind_one_that_ends_the_draft(method: str) -> None:
    """They do not stand and leave no flag, although p = q there: behind q(token) = 0, and behind a row of q that is NaN."""
    case = verify_case(generator(34), 8, 3, 40, 40)
    case["temperature"].fill_(1.0)
    case["draft_logits"] = case["target_logits"][:, :3].clone()
    case["draft_tokens"] = case["draft_logits"].argmax(dim=-1)
    case["draft_logits"][:4, 1].scatter_(1, case["draft_tokens"][:4, 1:2], -torch.inf)
    case["draft_logits"][4:, 1] = torch.nan
    verdict = check_verify(case, method=method)
    assert verdict.num_accepted.tolist() == [1] * 8
    assert verdict.status.tolist() == [Status.ZERO_DRAFT_PROB] * 4 + [Status.INVALID_DRAFT] * 4


def test_a_draft_that_its_distribution_cannot_have_drawn() -> None:
    """q(token) = 0: masked by -inf, or outside the draft's vocabulary."""
    case = verify_case(generator(10), 8, 2, 100, 90)
    case["temperature"].fill_(1.0)
    case["draft_tokens"][:, 0] = torch.arange(8) + 86
    case["draft_logits"][:, 0, 80:] = -torch.inf
    verdict = check_verify(case)
    assert (verdict.status == Status.ZERO_DRAFT_PROB).all() and (verdict.num_accepted == 0).all()


@pytest.mark.parametrize("filters", [dict(top_k=5), dict(top_p=0.8)], ids=str)
@pytest.mark.parametrize("method", ["rejection", "block"])
def test_a_draft_that_the_filters_exclude(method: str, filters: dict[str, float]) -> None:
    """q(token) = 0 outside top-k and top-p too, where the logit is like any other."""
    case = verify_case(generator(11), 2, 2, 300, 300)
    case["temperature"].fill_(0.9)
    case["draft_logits"] = case["target_logits"][:, :2].clone()  # p = q: what is inside stands
    inside, outside = case["draft_logits"].argsort(dim=-1, descending=True)[..., [0, 200]].unbind(dim=-1)
    assert (case["draft_logits"].gather(-1, outside[..., None]) > -torch.inf).all()
    case["draft_tokens"] = torch.stack([outside[0], torch.stack([inside[1, 0], outside[1, 1]])])
    verdict = check_verify(case, **rows(filters, 2, torch.float32), method=method)
    assert verdict.num_accepted.tolist() == [0, 1]
    assert (verdict.status == Status.ZERO_DRAFT_PROB).all()


@pytest.mark.parametrize("vocab_size", [7, 5_000])
def test_an_empty_residual_falls_back_to_the_target(vocab_size: int) -> None:
    """p <= q everywhere. It takes a q that sums to more than 1, here twice p: half of the drafts are rejected."""
    case = verify_case(generator(17), 16, 1, vocab_size, vocab_size)
    case["temperature"].fill_(1.0)
    case["draft_logits"] = case["target_logits"][:, :1].clone()
    stats = reference.row_stats(case["draft_logits"])
    case["draft_tokens"] = stats.argmax
    verdict = check_verify(case, draft_stats=RowStats(stats.threshold, stats.lse - 0.6931, stats.argmax))
    rejected = verdict.num_accepted == 0
    assert 2 < rejected.sum() < 14
    assert (verdict.status[rejected] == Status.EMPTY_RESIDUAL).all()
    drawn = case["target_logits"][rejected, 0].gather(1, verdict.tokens[rejected, :1])
    assert (drawn > -torch.inf).all()  # not whichever id comes last


def test_an_empty_residual_of_a_block() -> None:
    """In rows of several blocks of tokens; q is twice p again. With nothing left behind the first draft, either both stand or none."""
    case = verify_case(generator(17), 8, 2, 3_000, 3_000)
    case["temperature"].fill_(1.0)
    case["draft_logits"] = case["target_logits"][:, :2].clone()
    stats = reference.row_stats(case["draft_logits"])
    case["draft_tokens"] = stats.argmax
    verdict = check_verify(
        case, draft_stats=RowStats(stats.threshold, stats.lse - 0.6931, stats.argmax), method="block"
    )
    empty = verdict.status == Status.EMPTY_RESIDUAL
    assert empty.sum() > 2 and set(verdict.num_accepted[empty].tolist()) == {0}
    assert (verdict.tokens[:, 0] >= 0).all()


@pytest.mark.parametrize("method", ["rejection", "block"])
@pytest.mark.parametrize(("q", "next_tokens"), [([0.6, 0.35, 0.05], {2}), ([0.8, 0.12, 0.08], {1, 2})], ids=str)
def test_the_last_kept_token_in_a_residual(q: list[float], next_tokens: set[int], method: str) -> None:
    """What ties with the threshold is kept, of p and of q: token 1 is the last that top-k leaves in both."""
    p = torch.tensor([0.1, 0.3, 0.6])
    case = random_rows(12, generator(50)) | dict(
        target_logits=p.log().expand(12, 2, 3),
        draft_logits=torch.tensor(q).log().expand(12, 1, 3),
        draft_tokens=torch.zeros(12, 1, dtype=torch.int64),
        top_k=torch.full((12,), 2),
    )
    verdict = check_verify(case, method=method)
    assert (verdict.num_accepted == 0).all() and set(verdict.tokens[:, 0].tolist()) == next_tokens


def test_a_one_hot_residual_excludes_the_draft() -> None:
    case = verify_case(generator(12), 40, 1, 3)
    case["temperature"].fill_(1.0)
    case["target_logits"] = torch.zeros(40, 2, 3)
    case["draft_tokens"].fill_(2)
    verdict = check_verify(case)
    rejected = verdict.num_accepted == 0
    assert 15 < rejected.sum() < 38 and (verdict.tokens[rejected, 0] < 2).all()


@pytest.mark.parametrize("filtered", [False, True], ids=["plain", "filtered"])
@pytest.mark.parametrize("method", ["rejection", "block"])
def test_a_rejected_one_hot_draft_leaves_its_block_no_mass(method: str, filtered: bool) -> None:
    """Of three blocks of tokens, the one of the draft, the likeliest, has nothing else that counts."""
    logits = torch.full((16, 2, 2_500), -torch.inf)
    logits[..., [5, 1_200, 2_400]] = torch.tensor([2.0, 1.0, 0.0])
    logits[..., 7] = -20.0
    case = random_rows(16, generator(41)) | dict(target_logits=logits, draft_tokens=torch.full((16, 1), 5))
    filters = dict(top_k=torch.full((16,), 3)) if filtered else {}
    verdict = check_verify(case, method=method, **filters)
    rejected = verdict.num_accepted == 0
    assert 2 < rejected.sum() < 14 and set(verdict.tokens[rejected, 0].tolist()) == {1_200, 2_400}


@pytest.mark.parametrize("method", ["rejection", "block"])
def test_a_rejected_one_hot_draft_in_any_tile(method: str) -> None:
    """It is the likeliest, in the second tile of three: what comes next is one of the two others that are likely."""
    logits = torch.full((20, 2, TILED), -20.0)
    logits[..., [5, 10_000, TILED - 1]] = torch.tensor([1.0, 2.0, 0.0])
    case = random_rows(20, generator(41)) | dict(target_logits=logits, draft_tokens=torch.full((20, 1), 10_000))
    verdict = check_verify(case, method=method, return_logprobs=True)
    rejected = verdict.num_accepted == 0
    assert 2 < rejected.sum() < 18 and set(verdict.tokens[rejected, 0].tolist()) == {5, TILED - 1}


@pytest.mark.parametrize(("method", "vocab_size"), [("rejection", 300), ("block", 1_024), ("coupled", 3_000)])
def test_plain_decoding_is_verify_without_drafts(method: str, vocab_size: int) -> None:
    """K = 0 draws what `sample` draws; `rejection` and `block` only within one block, beyond it they draw in two levels."""
    case = to_device_case(verify_case(generator(13), 20, 0, vocab_size))
    rows = {name: case[name] for name in ("temperature", "seed", "position")}
    assert torch.equal(verify(**case, method=method).tokens, sample(case["target_logits"], **rows).tokens)


@pytest.mark.usefixtures("overflow_checked")
@pytest.mark.parametrize("filtered", [False, True], ids=["plain", "filtered"])
@pytest.mark.parametrize("method", METHODS)
def test_the_largest_vocabulary(method: str, filtered: bool) -> None:
    kind = None if filtered else 262_144
    case = verify_case(generator(21), 1, 1, 262_144, kind, torch.bfloat16)
    filters = dict(top_k=torch.tensor([50]), top_p=torch.tensor([0.9])) if filtered else {}
    check_verify(case, **filters, method=method)


@pytest.mark.parametrize("batch", [130, pytest.param(1_024, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", ["full", "one-hot"])
def test_many_sequences(kind: str, batch: int) -> None:
    check_verify(verify_case(generator(22), batch, 1, 5, 5 if kind == "full" else None))


@pytest.mark.usefixtures("overflow_checked")
@pytest.mark.parametrize("dim", [0, 1], ids=["sequences", "rows"])
@pytest.mark.parametrize("name", ["target_logits", "draft_logits"])
def test_more_than_2_to_31_logits(name: str, dim: int) -> None:
    """Offsets are 64-bit, of target and draft."""
    case = verify_case(generator(23), 3, 2 if name == "target_logits" else 3, 2_000, 2_000, torch.bfloat16)
    case[name] = far_apart(case[name], dim)
    for method in METHODS:
        check_verify(case, method=method)


def test_dispatch(monkeypatch: pytest.MonkeyPatch) -> None:
    """`ops` serves from Triton when told to; float64 always from torch."""
    case = to_device_case(verify_case(generator(15), 4, 2, 30, 30))
    monkeypatch.setenv("ENGINE_KERNELS", "triton")
    called = []
    monkeypatch.setattr("engine.kernels.verify.verify", lambda *a, **k: called.append("triton"))
    ops.verify(**case)
    ops.verify(**case | dict(target_logits=case["target_logits"].double()))
    monkeypatch.setenv("ENGINE_KERNELS", "torch")
    ops.verify(**case)
    assert called == ["triton"]


@pytest.mark.parametrize("count", [400, pytest.param(10_000, marks=pytest.mark.slow)])
def test_equal_seeds_give_equal_tokens(count: int) -> None:
    outcomes = set()
    for case in random_cases(count):
        verdict = check_verify(case)
        outcomes |= set(verdict.num_accepted.tolist())
    assert outcomes == {0, 1, 2, 3, 4}


@pytest.mark.parametrize("count", [400, pytest.param(10_000, marks=pytest.mark.slow)])
def test_equal_seeds_give_equal_samples(count: int) -> None:
    for index in range(count // 40):
        rng = generator(2_000 + index)
        logits = torch.randn(40, 2 + index % 97, generator=rng) * 3
        rows = to_device_case(dict(logits=logits) | random_rows(40, rng))
        want = reference.sample(logits, **{name: rows[name].cpu() for name in ("seed", "position")})
        assert torch.equal(sample(**rows).tokens.cpu(), want.tokens)


@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    seed=st.integers(0, 2**31),
    batch=st.integers(1, 4),
    num_drafts=st.integers(0, 4),
    vocab_size=st.one_of(st.integers(1, 40), st.integers(1_000, 1_050), st.integers(2_000, 9_000)),
    other_vocab=st.one_of(st.none(), st.integers(-3, 3)),  # larger or smaller by so much; None: one-hot drafts
    dtype=st.sampled_from(DTYPES),
    method=st.sampled_from(METHODS),
    option=st.sampled_from(OPTIONS),
)
def test_any_shape(
    seed: int,
    batch: int,
    num_drafts: int,
    vocab_size: int,
    other_vocab: int | None,
    dtype: torch.dtype,
    method: str,
    option: str,
) -> None:
    rng = generator(seed)
    draft_vocab = None if other_vocab is None else max(1, vocab_size + other_vocab)
    case = verify_case(rng, batch, num_drafts, vocab_size, draft_vocab, dtype)
    check_verify(case, **random_options(option, rng, batch, vocab_size), method=method, return_logprobs=True)


def to_device_case(case: Case) -> Case:
    return {name: to_device(value, DEVICE) for name, value in case.items()}
