"""Inputs for the kernels, and the comparison of a kernel with its torch twin.

The twin always runs on the CPU. The kernels run in the interpreter there or, where there is a GPU, compiled on it. What is asked of
Triton's kernels is asked of the compiled loops of CPUs as well.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.kernels import philox, reference, workspace
from engine.kernels.ops import METHODS
from engine.kernels.records import RowStats, Verdict
from engine.kernels.row_stats import row_stats
from engine.kernels.sample import sample
from engine.kernels.verify import verify

if find_spec("numba"):
    from engine.kernels import cpu

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
WITH_LOOPS = find_spec("numba") is not None  # those of CPUs; GPUs need no Numba

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
EXTREME_WORDS = torch.tensor([0, 1, 2**24, 2**31 - 1, 2**31, 2**32 - 257, 2**32 - 129, 2**32 - 1])  # of 32 random bits
VOCABS = (1, 7, 1000, 49_152, 151_936)
LAYOUTS = ("contiguous", "padded", "every other", "vocabulary first")
TEMPERATURES = (1.0, 0.0, 0.7, 1.3)
OPTIONS = ("plain", "filters", "bias and mask", "all")  # of `random_options`
# Rules, and whether drafts are certain. Some pairs hardly differ for a kernel: a rule that does not ask how drafts were drawn, certain ones
# under block, which are judged as under rejection.
ALIKE = {("block", "one-hot"), ("coupled", "full"), ("typical", "full")}
METHODS_AND_DRAFTS = [
    pytest.param(*pair, marks=pytest.mark.slow if pair in ALIKE else ())
    for pair in itertools.product(METHODS, ("full", "one-hot"))
]
TILED = 20_000  # tokens: three tiles, the last of them not full, and filters that look at a sample of the row first

# Of the log-sum-exp. Both sides widen the logits to float32 without loss, so that all dtypes have the tolerance of
# float32: a few roundings of the largest term (rtol), and of a sum of up to 151,936 terms in another order (atol).
TOLERANCE = {
    torch.float32: dict(rtol=5e-7, atol=2e-6),
    torch.bfloat16: dict(rtol=5e-7, atol=2e-6),
    torch.float16: dict(rtol=5e-7, atol=2e-6),
}

Case = dict[str, Any]  # the arguments of verify


def lay_out(values: Tensor, layout: str) -> Tensor:
    """The same values [B, W, V] in another memory layout, with NaN wherever a kernel has no business."""
    batch, width, vocab_size = values.shape
    if layout == "contiguous":
        return values.contiguous()
    if layout == "padded":  # rows that begin on no particular boundary
        view = values.new_full((batch + 1, width + 2, vocab_size + 3), torch.nan)[1:, 1:-1, 1:-2]
    elif layout == "every other":
        view = values.new_full((batch, width, vocab_size * 2), torch.nan)[..., ::2]
    else:
        view = values.new_full((vocab_size, width, batch), torch.nan).permute(2, 1, 0)
    view.copy_(values)
    return view


def every_other(values: Tensor) -> Tensor:
    """The same values [...] with a zero behind each, where one that takes them for contiguous would read it."""
    return torch.stack([values, torch.zeros_like(values)], dim=-1)[..., 0]


def far_apart(values: Tensor, dim: int) -> Tensor:
    """The same values [B, W, V] on DEVICE with 2**30 elements between neighbours along `dim`, which has 3 of them: the
    stride is an int32, what it comes to at the third is not. Of 4 GB of address space only a few pages are touched."""
    assert values.shape[dim] == 3 and values.element_size() == 2
    strides, size = [0, 0, 0], 1
    for each in sorted(range(3), key=lambda each: (each == dim, -each)):
        strides[each], size = size, size * values.shape[each]
    strides[dim] = 2**30
    storage = torch.UntypedStorage(2 * (2 * 2**30 + size), device=DEVICE)
    buffer = torch.tensor([], dtype=values.dtype, device=DEVICE).set_(storage)
    return buffer.as_strided(values.shape, strides).copy_(values)


def random_logits(generator: torch.Generator, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Normal logits of scale 3, with about one token in ten masked by -inf, never a whole row."""
    logits = torch.randn(shape, generator=generator) * 3
    masked = torch.rand(shape, generator=generator) < 0.1
    masked.scatter_(-1, logits.argmax(dim=-1, keepdim=True), False)
    return logits.masked_fill(masked, -torch.inf).to(dtype)


PLACES = ["anywhere", "first", "rather first"]


def word_logits(generator: torch.Generator, vocab_size: int, places: str) -> Tensor:
    """[V] float32: with probabilities that fall off like those of words (the r-th largest logit is about 1.2 log(V / r)), and
    the common ones anywhere, first in order, or rather at the beginning, as a tokenizer numbers them."""
    logits = 1.2 * torch.empty(vocab_size).exponential_(generator=generator)
    if places == "anywhere":
        return logits
    logits = logits.sort(descending=True).values
    if places == "first":
        return logits
    disturbed = torch.arange(vocab_size) * torch.randn(vocab_size, generator=generator).mul(1.5).exp()
    return logits[disturbed.argsort().argsort()]


def random_rows(batch: int, generator: torch.Generator) -> dict[str, Tensor]:
    """seed and position for a batch: seeds of either sign and all 64 bits, positions of up to 31."""
    return dict(
        seed=torch.randint(-(2**63), 2**63 - 1, (batch,), generator=generator),
        position=torch.randint(0, 2**31 - 64, (batch,), generator=generator),
    )


def temperatures(batch: int) -> Tensor:
    return torch.tensor(TEMPERATURES).repeat(batch // len(TEMPERATURES) + 1)[:batch]


def random_filters(generator: torch.Generator, batch: int, vocab_size: int) -> dict[str, Tensor]:
    """top-k, top-p and min-p, each off in some rows, from harsh to mild in the others."""

    def draw() -> Tensor:
        return torch.rand(batch, generator=generator)

    top_k = (vocab_size ** draw()).long()
    return dict(
        top_k=top_k.masked_fill(draw() < 0.4, 0),
        top_p=(0.3 + 0.69 * draw()).masked_fill(draw() < 0.4, 1.0),
        min_p=(0.2 * draw() ** 3).masked_fill(draw() < 0.5, 0.0),
    )


def random_words(generator: torch.Generator, batch: int, vocab_size: int) -> dict[str, Tensor]:
    """A logit bias for the vocabulary, and a token mask for each sequence that never excludes everything."""
    mask = torch.rand(batch, vocab_size, generator=generator) < 0.8
    mask[:, 0] = True
    return dict(logit_bias=torch.randn(vocab_size, generator=generator), token_mask=mask)


def random_options(option: str, generator: torch.Generator, batch: int, vocab_size: int) -> dict[str, Tensor]:
    options = random_filters(generator, batch, vocab_size) if option in ("filters", "all") else {}
    return options | (random_words(generator, batch, vocab_size) if option in ("bias and mask", "all") else {})


def verify_case(
    generator: torch.Generator,
    batch: int,
    num_drafts: int,
    vocab_size: int,
    draft_vocab: int | None = None,  # None: a one-hot draft
    dtype: torch.dtype = torch.float32,
    options: dict[str, Tensor] | None = None,  # filters, logit_bias, token_mask
) -> Case:
    """Drafts as a drafter makes them: drawn from q, which is near p in some sequences, far from it in others.

    One sequence in five proposes fewer than num_drafts, one in eight has q = p where the vocabularies allow it.
    """
    target = random_logits(generator, batch, num_drafts + 1, vocab_size, dtype=dtype)
    rows = random_rows(batch, generator) | dict(temperature=temperatures(batch)) | (options or {})
    pick = torch.rand(batch, 1, 1, generator=generator)
    size = vocab_size if draft_vocab is None else draft_vocab
    draft = random_logits(generator, batch, num_drafts, size, dtype=dtype)
    if size == vocab_size:
        near = target[:, :num_drafts] + torch.randn(draft.shape, generator=generator).to(dtype) * 0.5
        draft = torch.where(pick < 0.6, near, draft)
        draft = torch.where(pick < 0.125, target[:, :num_drafts], draft)
    tokens = reference.sample(draft, **rows, origin=rows["position"], stream=philox.DRAFT).tokens
    length = torch.randint(0, num_drafts + 1, (batch, 1), generator=generator)
    shorter = torch.rand(batch, 1, generator=generator) < 0.2
    tokens = tokens.masked_fill(shorter & (torch.arange(num_drafts) >= length), -1)
    return dict(target_logits=target, draft_tokens=tokens, draft_logits=None if draft_vocab is None else draft, **rows)


def pack(case: Case, counts: Sequence[int], before: int = 2, behind: int = 3) -> Case:
    """Packed rows of `verify`, so many of each sequence, with NaN before and behind them. `case` is cut to that in place: other rows
    are -inf throughout there, and have no drafts before them."""
    numbers = torch.tensor(counts)
    missing = torch.arange(case["target_logits"].shape[1]) >= numbers[:, None]
    case["target_logits"].masked_fill_(missing[..., None], -torch.inf)
    case["draft_tokens"].masked_fill_(missing[:, 1:], -1)
    begins = torch.cat([numbers.new_zeros(1), numbers.cumsum(dim=0)]).int() + before

    def side_by_side(values: Tensor, poison: float) -> Tensor:
        room = values.new_full((before + sum(counts) + behind, values.shape[-1]), poison)
        room[before : len(room) - behind] = values[~missing]
        return room

    words: dict[str, Tensor] = {}
    for name, poison in (("logit_bias", torch.nan), ("token_mask", False)):
        value = case.get(name)
        if value is not None and value.dim() > 1:
            words[name] = side_by_side(value, poison) if value.dim() == 3 else value[:, None]
    return case | words | dict(target_logits=side_by_side(case["target_logits"], torch.nan), cu_num_logits=begins)


def random_cases(count: int) -> Iterator[Case]:
    """Batches of 40 small sequences that vary in everything else."""
    for index in range(count // 40):
        generator = torch.Generator().manual_seed(1_000 + index)
        vocab_size, other = torch.randint(2, 40, (2,), generator=generator).tolist()
        draft_vocab = (None, vocab_size, vocab_size, other)[index % 4]
        yield verify_case(generator, 40, (1, 2, 0, 3, 4)[index % 5], vocab_size, draft_vocab, DTYPES[index % 3])


def to_device(value: Any, device: str) -> Any:
    if isinstance(value, RowStats):
        return RowStats(*(field.to(device) for field in value))
    return value.to(device) if isinstance(value, Tensor) else value


def assert_stats_agree(actual: RowStats, expected: RowStats, dtype: torch.dtype, same_log: bool = True) -> None:
    """threshold and argmax equal, lse close. In a row with NaN or +inf only lse = NaN is defined.

    same_log: the thresholds of min-p, which are a logarithm, come from the same one; else they may lie two roundings apart.
    """
    ok = ~expected.lse.isnan()
    torch.testing.assert_close(actual.lse.cpu(), expected.lse, equal_nan=True, **TOLERANCE[dtype])
    apart = 0.0 if same_log else 2**-22
    torch.testing.assert_close(actual.threshold.cpu()[ok], expected.threshold[ok], rtol=apart, atol=apart)
    assert torch.equal(actual.argmax.cpu()[ok], expected.argmax[ok])
    assert actual.argmax.dtype == torch.int64 and actual.lse.dtype == torch.float32


def assert_verdicts_equal(actual: Verdict, expected: Verdict) -> None:
    for name, have, want in zip(Verdict._fields[:3], actual, expected, strict=False):
        torch.testing.assert_close(have.cpu(), want, rtol=0, atol=0, msg=lambda text, n=name: f"{n}: {text}")
    assert (actual.logprobs is None) == (expected.logprobs is None)
    if actual.logprobs is not None and expected.logprobs is not None:
        torch.testing.assert_close(actual.logprobs.cpu(), expected.logprobs, rtol=1e-5, atol=2e-5)


def assert_counters_are_clear() -> None:
    """Every launch leaves the counters of arrivals at 0; the next one on the stream, or of the graph, counts from there."""
    assert not any(counters.any() for counters, _ in workspace.stream_memory().values())


def assert_independent(call: Callable[..., Any], case: dict[str, Tensor]) -> None:
    """Bit for bit, a sequence comes to the same in another slot beside others, and alone; `case` holds tensors [B, ...]."""

    def results(case: dict[str, Tensor]) -> list[Tensor]:
        fields = [field for field in call(**case) if field is not None]
        return [part for field in fields for part in ([field] if isinstance(field, Tensor) else field)]

    together = results(case)
    turned = results({name: value.roll(1, dims=0) for name, value in case.items()})
    alone = results({name: value[1:2].clone() for name, value in case.items()})
    for whole, other, single in zip(together, turned, alone, strict=True):
        assert torch.equal(whole.roll(1, dims=0), other)
        assert torch.equal(whole[1:2], single)


def check_row_stats(
    logits: Tensor, temperature: Tensor | None = None, device: str = DEVICE, **options: Tensor
) -> RowStats:
    on_device = {name: to_device(value, device) for name, value in options.items()}
    actual = row_stats(to_device(logits, device), to_device(temperature, device), **on_device)
    assert_counters_are_clear()
    same_log = device == "cpu" or "min_p" not in options
    expected = reference.row_stats(logits, temperature, **options)
    assert_stats_agree(actual, expected, logits.dtype, same_log)
    if WITH_LOOPS:
        assert_stats_agree(cpu.row_stats(logits, temperature, **options), expected, logits.dtype, same_log=False)
    return actual


def check_sample(logits: Tensor, temperature: Tensor | None = None, device: str = DEVICE, **rows: Any) -> Tensor:
    on_device = {name: to_device(value, device) for name, value in rows.items()}
    actual = sample(to_device(logits, device), to_device(temperature, device), **on_device)
    assert_counters_are_clear()
    expected = reference.sample(logits, temperature, **rows)
    for draws in (actual, cpu.sample(logits, temperature, **rows)) if WITH_LOOPS else (actual,):
        same_log = draws is actual and (device == "cpu" or "min_p" not in rows)
        assert torch.equal(draws.tokens.cpu(), expected.tokens)
        assert_stats_agree(draws.stats, expected.stats, logits.dtype, same_log)
        assert (draws.logprobs is None) == (expected.logprobs is None)
        if expected.logprobs is not None:
            torch.testing.assert_close(draws.logprobs.cpu(), expected.logprobs, rtol=1e-5, atol=2e-5)
    return actual.tokens


def check_verify(case: Case, device: str = DEVICE, **more: Any) -> Verdict:
    """The kernel's verdict on a case, once it equals the twin's."""
    case = case | more
    actual = verify(**{name: to_device(value, device) for name, value in case.items()})
    assert_counters_are_clear()
    expected = reference.verify(**case)
    assert_verdicts_equal(actual, expected)
    if WITH_LOOPS and case.get("method") != "typical":
        assert_verdicts_equal(cpu.verify(**case), expected)
    return expected
