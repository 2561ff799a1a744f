"""Losslessness of `ops` by G-test: the first two tokens of a chain, on fixed seeds, in as many rounds as it takes.

What the exact law cannot see, because it integrates the uniforms out, is how the streams of numbers depend on each
other. At 16 tokens a shared stream shows plainly, at 4,096 it would not; those are there for draws in two levels.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from chains import Chain, Filters, g_test, law, random_chain, rows, target_law
from kernel_cases import DEVICE
from torch import Tensor

from engine.kernels import ops, philox
from engine.kernels.records import DRAW_BLOCK

VOCAB, WIDE = 16, 4 * DRAW_BLOCK
# On a CPU, what fits its caches. On a GPU, filters take 56 KiB of scratch memory for each row, and several processes may test.
BATCH = {
    "cpu": {VOCAB: 10_000, WIDE: 50},
    "cuda": {VOCAB: 8_000, WIDE: 2_000},
}
METHODS = ("rejection", "block", "coupled")
START = 20


def sampled_pairs(chain: Chain, method: str, count: int, one_hot: bool = False, drafted: bool = False) -> Tensor:
    """The first two tokens of `count` sequences that differ in their seed: [count, 2]. Those whose first round was one
    token short get it from a round of its own, with one draft or with none."""
    device = chain.target[0].device.type
    size = BATCH[device][chain.target[0].shape[-1]]

    def pairs(first_seed: int) -> Tensor:
        return _Sequences(chain, method, one_hot, first_seed, size).pairs(drafted).cpu()

    seeds = range(0, count, size)
    if device != "cpu":  # calls on one stream follow each other
        return torch.cat([pairs(seed) for seed in seeds])
    # Two threads, each with half of the batches: one is too little work for the loops to share out.
    with ThreadPoolExecutor(2, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        return torch.cat(list(pool.map(pairs, seeds)))


class _Sequences:
    """A batch of sequences that are decoded for two tokens; the rounds in which that happens are those of an engine."""

    def __init__(self, chain: Chain, method: str, one_hot: bool, first_seed: int, count: int) -> None:
        self.chain, self.method, self.one_hot = chain, method, one_hot
        self.seed = torch.arange(first_seed, first_seed + count, device=chain.target[0].device) * 7919 + 3

    def pairs(self, drafted: bool) -> Tensor:
        drafts = self.seed[:, None][:, :0]
        for i in range(self.chain.num_drafts):
            logits = self.chain.rows_of(self.chain.draft[: i + 1], drafts)[:, i]
            drafts = torch.cat([drafts, self.draft(logits, i, 0)], dim=1)
        target, draft = (self.chain.rows_of(tables, drafts) for tables in (self.chain.target, self.chain.draft))
        tokens = self.verify(target, drafts, draft, 0)[:, :2]
        short = tokens[:, 1] < 0
        self.seed = self.seed[short]
        row = self.chain.target[1][tokens[short, 0]][:, None]
        drafts, draft = self.seed[:, None][:, :0], None
        if drafted:
            draft = self.chain.draft[1][tokens[short, 0]][:, None]
            drafts, row = self.draft(draft[:, 0], 1, 1), row.expand(-1, 2, -1)
        tokens[short, 1] = self.verify(row, drafts, draft, 1)[:, 0]
        return tokens

    def draft(self, logits: Tensor, position: int, origin: int) -> Tensor:
        """One draft per sequence, [B, 1], positions counted from the first token."""
        if self.one_hot:
            return logits.argmax(dim=-1, keepdim=True)
        stream = {} if self.method == "coupled" else dict(stream=philox.DRAFT, origin=self.at(origin))
        return ops.sample(logits, **self.where(position), **stream).tokens[:, None]

    def verify(self, target: Tensor, drafts: Tensor, draft: Tensor | None, position: int) -> Tensor:
        draft = None if self.one_hot or drafts.shape[1] == 0 else draft
        return ops.verify(target, drafts, draft, **self.where(position), method=self.method).tokens

    def at(self, position: int) -> Tensor:
        return torch.full_like(self.seed, START + position)

    def where(self, position: int) -> dict[str, Tensor]:
        filters = rows(self.chain.filters, len(self.seed), torch.float32)
        on_device = {name: value.to(self.seed.device) for name, value in filters.items()}
        return dict(seed=self.seed, position=self.at(position), **on_device)


def p_value(chain: Chain, *args: Any, **more: Any) -> float:
    """Of the joint law of two tokens over VOCAB."""
    pairs = sampled_pairs(chain, *args, **more)
    joint = target_law(chain, 0)[:, None] * target_law(chain, 1)
    return g_test(pairs[:, 0] * VOCAB + pairs[:, 1], joint.flatten().cpu())


def sampled_chain(filters: Filters, device: str = "cpu") -> Chain:
    """Two drafts; q is as far from p as random logits of scale 1 are."""
    p = random_chain(11, VOCAB, 1, "any", filters)
    q = random_chain(12, VOCAB, 1, "any", filters)
    third = p.target[1].expand(VOCAB, VOCAB, VOCAB)  # the row behind both drafts, whose token is not looked at
    scaled = [
        [(logits * 0.7).float().to(device) for logits in tables]
        for tables in ([*p.target, third], [p.draft[0], q.target[1]])
    ]
    return Chain(*scaled, filters)


SAMPLED_FILTERS = [{}, dict(temperature=0.7, top_k=9), dict(temperature=0.7, top_p=0.8, top_k=12)]


@pytest.mark.parametrize("filters", SAMPLED_FILTERS, ids=["plain", "top-k", "top-k and top-p"])
@pytest.mark.parametrize("drafts", ["full", "one-hot"])
@pytest.mark.parametrize("method", METHODS)
def test_pairs_have_the_law_of_the_target(method: str, drafts: str, filters: Filters) -> None:
    assert p_value(sampled_chain(filters), method, 100_000, one_hot=drafts == "one-hot") > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_ten_million_pairs_have_the_law_of_the_target(method: str) -> None:
    assert p_value(sampled_chain({}), method, 10_000_000) > 1e-3


@pytest.mark.gpu
@pytest.mark.parametrize("filters", SAMPLED_FILTERS, ids=["plain", "top-k", "top-k and top-p"])
@pytest.mark.parametrize("drafts", ["full", "one-hot"])
@pytest.mark.parametrize("method", METHODS)
def test_ten_million_pairs_through_triton(method: str, drafts: str, filters: Filters) -> None:
    count = 10_000_000 if drafts == "full" and not filters else 1_000_000
    assert p_value(sampled_chain(filters, DEVICE), method, count, one_hot=drafts == "one-hot") > 1e-3


@pytest.mark.parametrize("method", METHODS)
def test_drafted_rounds_in_a_row_have_the_law_of_the_target(method: str) -> None:
    """The second round decides a position anew for which the first has used up drafts and uniforms."""
    assert p_value(sampled_chain({}), method, 200_000, drafted=True) > 1e-3


@pytest.fixture
def by_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mistakes are put into the twins: compiled loops do not see them."""
    monkeypatch.setenv("ENGINE_KERNELS", "torch")


@pytest.mark.usefixtures("by_torch")
def test_numbers_without_the_origin_of_their_round_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: in `block` a rejected draft has had a say in how many stand, so it must not be drawn again."""
    words = philox.philox

    def without_origin(seed: Tensor, index: Tensor, position: Tensor, origin: Any, stream: int) -> tuple[Tensor, ...]:
        return words(seed, index, position, 0, stream)

    monkeypatch.setattr(philox, "philox", without_origin)
    assert p_value(sampled_chain({}), "block", 200_000, drafted=True) < 1e-9


@pytest.mark.usefixtures("by_torch")
@pytest.mark.parametrize("method", METHODS)
def test_numbers_without_their_position_are_caught(monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    """Negative control, the only one that can hurt `coupled`."""
    words = philox.philox

    def without_position(seed: Tensor, index: Tensor, position: Tensor, *more: Any) -> tuple[Tensor, ...]:
        return words(seed, index, position * 0, *more)

    monkeypatch.setattr(philox, "philox", without_position)
    assert p_value(sampled_chain({}), method, 50_000) < 1e-9


@pytest.mark.usefixtures("by_torch")
@pytest.mark.parametrize("stream", ["ACCEPT", "RESIDUAL"])
@pytest.mark.parametrize("method", ["rejection", "block"])
def test_a_stream_shared_with_the_drafts_is_caught(monkeypatch: pytest.MonkeyPatch, method: str, stream: str) -> None:
    """Negative control: the acceptance test sees the number that token 0's noise was made of, or the replacement is
    drawn with the noise that has drawn the rejected draft."""
    monkeypatch.setattr(philox, stream, philox.DRAFT)
    assert p_value(sampled_chain({}), method, 50_000) < 1e-9


def reversed_q(verify: Callable[..., Any]) -> Callable[..., Any]:
    def wrong(target: Tensor, drafts: Tensor, draft_logits: Tensor | None = None, **rest: Any) -> Any:
        return verify(target, drafts, None if draft_logits is None else draft_logits.flip(-1), **rest)

    return wrong


@pytest.mark.parametrize("method", ["rejection", "block"])
def test_the_wrong_q_is_caught_by_sampling_too(monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    monkeypatch.setattr(ops, "verify", reversed_q(ops.verify))
    assert p_value(sampled_chain({}), method, 50_000) < 1e-9


def wide_chain(device: str = "cpu") -> Chain:
    """Two drafts over 4 blocks of tokens, which all matter in the first row, while the second lacks one of them. Both
    rows have weight on token 0, whose noise a careless draw of the block would share."""
    blocks = torch.tensor([[0.3, 0.1, 0.4, 0.2], [0.3, 0.3, 0.0, 0.4], [0.2, 0.4, 0.1, 0.3], [0.3, 0.2, 0.3, 0.2]])
    logits = torch.randn(4, WIDE, generator=torch.Generator().manual_seed(21))
    logits += blocks.log().repeat_interleave(DRAW_BLOCK, dim=1)
    logits[:2, 0] += 6
    target, later, draft, later_draft = logits.to(device)
    return Chain([target, later.expand(WIDE, -1), later.expand(WIDE, WIDE, -1)], [draft, later_draft.expand(WIDE, -1)])


def wide_p_values(method: str, count: int, device: str = "cpu") -> list[float]:
    """Of the first token, the second (in runs of 8 tokens where there are few samples) and both (in runs of 256)."""
    chain = wide_chain(device)
    first, second = law(chain.target[0], {}).cpu(), law(chain.target[1][0], {}).cpu()
    pairs = sampled_pairs(chain, method, count)
    run = 1 if count > 100_000 else 8
    singles = [g_test(pairs[:, i] // run, p.reshape(-1, run).sum(1)) for i, p in enumerate((first, second))]
    coarse = [p.reshape(-1, 256).sum(dim=1) for p in (first, second)]
    size = len(coarse[0])
    both = pairs // 256
    return [*singles, g_test(both[:, 0] * size + both[:, 1], torch.outer(*coarse).flatten())]


@pytest.mark.parametrize("count", [6_000, pytest.param(1_000_000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("method", METHODS)
def test_draws_over_several_blocks_have_the_law_of_the_target(method: str, count: int) -> None:
    assert min(wide_p_values(method, count)) > 1e-3


@pytest.mark.gpu
@pytest.mark.parametrize("method", METHODS)
def test_a_million_draws_over_several_blocks_through_triton(method: str) -> None:
    assert min(wide_p_values(method, 1_000_000, DEVICE)) > 1e-3


@pytest.mark.usefixtures("by_torch")
@pytest.mark.parametrize("wrong", ["q", "noise of the blocks"])
def test_mistakes_over_several_blocks_are_caught(monkeypatch: pytest.MonkeyPatch, wrong: str) -> None:
    """Negative controls: another q, and blocks drawn with the noise of the first tokens."""
    if wrong == "q":
        monkeypatch.setattr(ops, "verify", reversed_q(ops.verify))
    else:
        monkeypatch.setattr(philox, "BLOCK_LEVEL", 0)
    assert min(wide_p_values("rejection", 4_000)) < 1e-9
