"""Random numbers: known answers, and the Triton helpers against the torch twin, bit for bit."""

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from kernel_cases import DEVICE, EXTREME_WORDS
from scipy import stats as scipy_stats
from torch import Tensor

from engine.kernels import philox
from engine.kernels.jit_random import (
    exponential,
    first_arrivals,
    gumbel,
    log1m,
    philox_words,
    race_bound,
    uniform_from_bits,
    uniforms,
)

# Random123 1.14, tests/kat_vectors, philox4x32 with 10 rounds: counter, key, result
KNOWN_ANSWERS = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


@triton.jit
def words_kernel(out, seed, start, position, origin, stream, BLOCK: tl.constexpr):
    noise = (tl.load(seed), tl.load(position), tl.load(origin), tl.load(stream))
    words = philox_words(start // 4 + tl.arange(0, BLOCK // 4), noise)
    tl.store(out + tl.arange(0, BLOCK), words.to(tl.int64))


@triton.jit
def gumbel_kernel(out, seed, start, position, origin, stream, BLOCK: tl.constexpr):
    noise = (tl.load(seed), tl.load(position), tl.load(origin), tl.load(stream))
    tl.store(out + tl.arange(0, BLOCK), gumbel(philox_words(start // 4 + tl.arange(0, BLOCK // 4), noise)))


@triton.jit
def uniforms_kernel(out, seed, position, origin, BLOCK: tl.constexpr):
    lane = tl.arange(0, BLOCK)
    tl.store(out + lane, uniforms(tl.load(seed), tl.load(position) + lane, tl.load(origin), 2))


@triton.jit
def first_kernel(times, places, seed, position, origin, stream, BLOCK: tl.constexpr):
    group = tl.arange(0, BLOCK)
    time, place = first_arrivals(group, (tl.load(seed), tl.load(position), tl.load(origin), tl.load(stream)))
    tl.store(times + group, time)
    tl.store(places + group, place.to(tl.int64))


@triton.jit
def race_kernel(noise, bound, words, time, BLOCK: tl.constexpr):
    lane = tl.arange(0, BLOCK)
    word, time = tl.load(words + lane), time + tl.zeros([BLOCK], tl.float32)
    tl.store(noise + lane, -tl.log(time + exponential(word)))
    tl.store(bound + lane, race_bound(time, word))


@triton.jit
def elementwise_kernel(out, value, FUNCTION: tl.constexpr, BLOCK: tl.constexpr):
    lane = tl.arange(0, BLOCK)
    tl.store(out + lane, FUNCTION(tl.load(value + lane)))


def scalars(*values: int) -> list[Tensor]:
    return [torch.tensor([value], device=DEVICE) for value in values]


def signed(word: int, bits: int) -> int:
    return word - 2**bits if word >= 2 ** (bits - 1) else word


@pytest.mark.parametrize(("counter", "key", "answer"), KNOWN_ANSWERS)
def test_known_answers(counter: str, key: str, answer: str) -> None:
    index, position, origin, stream = (int(word, 16) for word in counter.split())
    low, high = (int(word, 16) for word in key.split())
    seed = signed(high << 32 | low, 64)
    want = [int(word, 16) for word in answer.split()]

    words = philox.philox(torch.tensor(seed), torch.tensor(index), torch.tensor(position), torch.tensor(origin), stream)
    assert [int(word) for word in words] == want

    out = torch.empty(16, dtype=torch.int64, device=DEVICE)
    seed_, position_, origin_, stream_ = scalars(seed, position, origin, stream)
    words_kernel[(1,)](
        out=out, seed=seed_, start=index * 4, position=position_, origin=origin_, stream=stream_, BLOCK=16
    )
    assert out[:4].tolist() == want


@pytest.mark.parametrize("start", [0, 4096, 49_152])
@pytest.mark.parametrize(
    ("seed", "position", "origin"), [(0, 0, 0), (-1, 7, 5), (2**63 - 1, 2**31, 2**32 - 1), (-(2**63), 2**32 + 3, 1)]
)
def test_blocks_equal_the_twin(seed: int, position: int, origin: int, start: int) -> None:
    """Token v takes output v % 4 of index v // 4: bits equal, noise within a few roundings."""
    for stream in (philox.SAMPLE, philox.RESIDUAL):
        index = torch.arange(start // 4, start // 4 + 64)
        words = philox.philox(torch.tensor(seed), index, torch.tensor(position), origin, stream)
        want = words.flatten()
        rows = dict(zip(("seed", "position", "origin", "stream"), scalars(seed, position, origin, stream), strict=True))
        bits, noise = torch.empty(256, dtype=torch.int64, device=DEVICE), torch.empty(256, device=DEVICE)
        words_kernel[(1,)](out=bits, start=start, **rows, BLOCK=256)
        gumbel_kernel[(1,)](out=noise, start=start, **rows, BLOCK=256)
        assert torch.equal(bits.cpu(), want)
        twin = philox.times(torch.tensor(seed), torch.tensor(position), origin, stream, 256, start)
        torch.testing.assert_close(noise.cpu(), -twin.log(), rtol=1e-6, atol=1e-6)


def test_uniforms_equal_the_twin() -> None:
    for seed, position in ((3, 0), (-(2**40), 2**32 - 3)):
        out = torch.empty(8, device=DEVICE)
        seed_, position_ = scalars(seed, position)
        uniforms_kernel[(1,)](out=out, seed=seed_, position=position_, origin=position_, BLOCK=8)
        want = philox.uniform(torch.tensor(seed), position + torch.arange(8), position, philox.ACCEPT)
        assert torch.equal(out.cpu(), want)


def test_uniforms_lie_strictly_inside_0_1() -> None:
    """Also for the extreme words, of which 2**32 - 1 rounds to 1 in float32 unless it is held back."""
    twin = philox.uniform_from_bits(EXTREME_WORDS)
    assert (twin > 0).all() and (twin < 1).all() and twin.dtype == torch.float32
    out = torch.empty(8, device=DEVICE)
    words = EXTREME_WORDS.to(torch.uint32).to(DEVICE)
    elementwise_kernel[(1,)](out=out, value=words, FUNCTION=uniform_from_bits, BLOCK=8)
    assert torch.equal(out.cpu(), twin)
    assert torch.isfinite(-torch.log(-torch.log1p(-twin))).all()


def test_log1m_is_accurate_everywhere() -> None:
    """Four units in the last place of float32, from the smallest uniform to the largest."""
    uniform = torch.rand(2**14, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    tails = torch.cat([uniform[: 2**12] * 2.0**-33, 1 - uniform[: 2**12] * 2.0**-12, uniform[: 2**12] ** 8])
    value = torch.cat([uniform[: 2**12], tails]).clamp(2.0**-33, philox.UNIFORM_MAX).float()
    value[:4] = torch.tensor([2.0**-33, philox.UNIFORM_MAX, 0.5, 0.5 - 2.0**-26])
    out = torch.empty_like(value, device=DEVICE)
    elementwise_kernel[(1,)](out=out, value=value.to(DEVICE), FUNCTION=log1m, BLOCK=2**14)
    torch.testing.assert_close(out.cpu().double(), torch.log1p(-value.double()), rtol=4 * 2.0**-24, atol=0)
    zero = torch.zeros(16, device=DEVICE)
    elementwise_kernel[(1,)](out=out, value=zero, FUNCTION=log1m, BLOCK=16)
    assert (out[:16] == 0).all()


@pytest.mark.parametrize(("seed", "position", "origin"), [(0, 0, 0), (-1, 2**31, 2**32 - 1), (-(2**63), 2**32 + 3, 1)])
def test_races_equal_the_twin(seed: int, position: int, origin: int) -> None:
    """The first of each group: the same token, its time within a few roundings; and the twin's noise of it and of the others."""
    times, places = torch.empty(16, device=DEVICE), torch.empty(16, dtype=torch.int64, device=DEVICE)
    numbers = scalars(seed, position, origin, philox.SAMPLE)
    first_kernel[(1,)](times, places, *numbers, BLOCK=16)
    key = torch.tensor(seed), torch.tensor(position), origin, philox.SAMPLE
    twin_times, twin_places = philox.first_arrivals(*key, 16)
    assert torch.equal(places.cpu(), twin_places)
    torch.testing.assert_close(times.cpu(), twin_times, rtol=1e-6, atol=0)

    noise = philox.race(*key, 4000)
    groups = torch.nn.functional.pad(noise, (0, 96), value=-torch.inf).view(16, 256)
    first = torch.arange(256) == twin_places[:, None]
    assert torch.equal(groups.argmax(dim=-1)[:15], twin_places[:15])  # 160 tokens of the last
    torch.testing.assert_close(groups.amax(dim=-1)[:15], -twin_times.log()[:15])
    alone = philox.times(*key, 4096).view(16, 256)
    later = torch.exp(-groups) - twin_times[:, None]
    torch.testing.assert_close(later[:15][~first[:15]], alone[:15][~first[:15]], rtol=1e-4, atol=1e-5)


def test_the_bound_of_noise_in_a_race_is_above_it_and_close_where_tokens_win() -> None:
    """Whoever is above the bound of all others has won, so one that is too low would change a draw."""
    words = torch.randint(2**32, (2**14,), generator=torch.Generator().manual_seed(0))
    words[: 2**12] >>= torch.arange(2**12) % 33  # large noise
    words[2**12 : 2**13] = 2**32 - 1 - words[: 2**12]  # small noise
    words[:8] = EXTREME_WORDS
    words = words.to(torch.uint32).to(DEVICE)
    for time in (2.0**-41, 1e-4, 0.004, 0.06):
        noise, bound = torch.empty(2**14, device=DEVICE), torch.empty(2**14, device=DEVICE)
        race_kernel[(1,)](noise, bound, words, time, BLOCK=2**14)
        gap = bound - noise
        assert gap.min() > 0.0005
        # Of smaller words, the half that is added to each counts.
        assert gap[(noise > 2) & (words.to(torch.int64) > 100)].max() < 0.07


def largest_of_groups(noise: Tensor) -> Tensor:
    """Of each group of 256, moved to where a Gumbel-distributed number is."""
    return noise.unflatten(-1, (-1, 256)).amax(dim=-1).flatten() - np.log(256)


def test_noise_of_a_race_is_independent_and_gumbel() -> None:
    """By its moments and its distribution, for the first of a group and any other; no two places of a group are correlated, and each
    is first as often as another."""
    count = 20_000
    noise = philox.race(torch.arange(count), torch.arange(count) % 7, 3, philox.DRAFT, 512).double()
    assert noise.isfinite().all()
    for values in (noise[:, 0], noise[:, 300], noise.flatten()[::509]):
        assert scipy_stats.kstest(values.numpy(), "gumbel_r").pvalue > 1e-3
    assert abs(noise.mean() - np.euler_gamma) < 4 * (np.pi**2 / 6 / noise.numel()) ** 0.5
    assert scipy_stats.kstest(largest_of_groups(noise).numpy(), "gumbel_r").pvalue > 1e-3
    uniform = torch.exp(-torch.exp(-noise[:, :256]))
    correlation = torch.corrcoef(uniform.T)[~torch.eye(256, dtype=torch.bool)]
    assert correlation.abs().max() < 6 / count**0.5 and abs(correlation.std() * count**0.5 - 1) < 0.05
    counts = noise[:, :256].argmax(dim=-1).bincount(minlength=256)
    assert scipy_stats.chisquare(counts.numpy()).pvalue > 1e-3


def test_a_race_that_is_not_one_is_caught() -> None:
    """Negative control: noise whose first arrival is drawn on its own but whose others do not wait for it."""
    count, groups = 20_000, 2
    key = torch.arange(count), torch.arange(count) % 7, 3, philox.DRAFT
    times, places = philox.first_arrivals(*key, groups)
    noise = -philox.times(*key, 512).log().unflatten(-1, (groups, 256))
    noise = torch.where(torch.arange(256) == places[..., None], -times.log()[..., None], noise).flatten(-2)
    assert scipy_stats.kstest(largest_of_groups(noise.double()).numpy(), "gumbel_r").pvalue < 1e-6


def test_gumbel_moments() -> None:
    times = philox.times(torch.arange(40), torch.arange(40), 3, philox.DRAFT, 25_000).double().flatten()
    assert times.min() > 0
    noise = -times.log()
    count = noise.numel()
    assert noise.isfinite().all()
    assert abs(noise.mean() - np.euler_gamma) < 4 * (np.pi**2 / 6 / count) ** 0.5
    assert abs(noise.var() - np.pi**2 / 6) < 4 * (np.pi**2 / 6) * (4.4 / count) ** 0.5
    assert scipy_stats.kstest(noise[:100_000].numpy(), "gumbel_r").pvalue > 1e-3


def test_a_number_is_used_once() -> None:
    """Streams, origins, positions and seeds that differ share no block of words, one of which is four tokens wide."""
    index = torch.arange(50)
    blocks = []
    for seed in (0, 1, 2**32):
        for position in (0, 1, 2):
            for origin in (0, 1):
                for stream in (philox.SAMPLE, philox.DRAFT, philox.ACCEPT, philox.RESIDUAL):
                    words = philox.philox(torch.tensor(seed), index, torch.tensor(position), origin, stream)
                    blocks.append(words)
    everything = torch.cat(blocks)
    assert everything.unique(dim=0).shape[0] == everything.shape[0] == 50 * 3 * 3 * 2 * 4
