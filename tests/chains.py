"""Chains of distributions that depend on the prefix, the law of a target chain, and that of what `verify` emits.

The second is worked out from the real `reference.verify`, for a batch of draft sequences:
- the chance that a draft passes its test is searched for with the uniforms that `verify` is made to see;
- how many drafts stand is asked for each of the 2**K cases of passing and failing;
- the law of the next token is read off the weights that `verify` hands to `draw`.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import product

import pytest
import torch
from scipy import stats as scipy_stats
from torch import Tensor
from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from engine.kernels import reference

Filters = dict[str, float]  # temperature, top_k, top_p, min_p

FILTERS: dict[str, Filters] = {
    "plain": {},
    "temperature": dict(temperature=0.6),
    "top-k": dict(temperature=1.4, top_k=2),
    "top-p": dict(temperature=0.8, top_p=0.7),
    "all": dict(temperature=0.9, top_k=4, top_p=0.9, min_p=0.15),
}


def law(logits: Tensor, filters: Filters) -> Tensor:
    """The distribution that transformers samples from: logits [..., V] -> probabilities [..., V]."""
    scores = logits.reshape(-1, logits.shape[-1])
    warpers = [
        (TemperatureLogitsWarper, "temperature"), (TopKLogitsWarper, "top_k"),
        (TopPLogitsWarper, "top_p"), (MinPLogitsWarper, "min_p"),
    ]  # fmt: skip
    for warper, name in warpers:
        if name in filters:
            scores = warper(filters[name])(None, scores)
    return scores.softmax(dim=-1).reshape(logits.shape)


def rows(filters: Filters, batch: int, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    """Filters as `verify` takes them."""
    return {
        name: torch.full((batch,), value, dtype=torch.int64 if name == "top_k" else dtype)
        for name, value in filters.items()
    }


@dataclass
class Chain:
    """Conditional logits of target and drafter: entry i of each has shape [M] * i + [V], by prefix."""

    target: list[Tensor]  # K + 1 tables, V = V_target
    draft: list[Tensor]  # K tables, V = V_draft
    filters: Filters = field(default_factory=dict)

    @property
    def num_drafts(self) -> int:
        return len(self.draft)

    def drafts(self) -> Tensor:
        """Every draft sequence: [V_draft ** K, K]."""
        return torch.tensor(list(product(range(self.draft[0].shape[-1]), repeat=self.num_drafts)))

    def rows_of(self, tables: list[Tensor], drafts: Tensor) -> Tensor:
        """The rows for each draft sequence: [B, len(tables), V]."""
        batch = drafts.shape[0]
        at = [table[tuple(drafts[:, :i].T)].expand(batch, -1) for i, table in enumerate(tables)]
        return torch.stack(at, dim=1) if at else torch.empty(batch, 0, 1, dtype=torch.float64)


def random_chain(
    seed: int, vocab_size: int, num_drafts: int, kind: str, filters: Filters, draft_vocab: int | None = None
) -> Chain:
    """Tables of random logits, in float64, with the zeros that `kind` asks for."""
    generator = torch.Generator().manual_seed(seed)
    draft_vocab = draft_vocab or vocab_size
    widest = max(vocab_size, draft_vocab)

    def table(depth: int, size: int) -> Tensor:
        shape = [widest] * depth + [size]
        logits = torch.randn(shape, generator=generator, dtype=torch.float64) * 1.5
        if kind == "zeros":
            hidden = torch.rand(shape, generator=generator) < 0.3
            logits = logits.masked_fill(hidden.scatter(-1, logits.argmax(-1, keepdim=True), False), -torch.inf)
        return logits

    target = [table(depth, vocab_size) for depth in range(num_drafts + 1)]
    draft = [table(depth, draft_vocab) for depth in range(num_drafts)]
    if kind == "equal":
        draft = [logits.clone() for logits in target[:-1]]
    if kind == "disjoint":
        half = torch.arange(vocab_size) < vocab_size // 2
        target = [logits.masked_fill(half, -torch.inf) for logits in target]
        draft = [logits.masked_fill(~half, -torch.inf) for logits in draft]
    return Chain(target, draft, filters)


def target_law(chain: Chain, depth: int) -> Tensor:
    """p(. | prefix) for prefixes of the target's own tokens: [V] * (depth + 1)."""
    table = chain.target[depth]
    own = table[tuple([slice(table.shape[-1])] * depth)]
    return law(own, chain.filters)


def target_joint(chain: Chain) -> Tensor:
    joint = target_law(chain, 0)
    for depth in range(1, chain.num_drafts + 1):
        joint = joint[..., None] * target_law(chain, depth)
    return joint


def uniforms(passes: Tensor) -> Tensor:
    """Numbers that pass every test that can be passed, and numbers that pass none: float64, shaped as `passes`."""
    return torch.full(passes.shape, 1e300, dtype=torch.float64).masked_fill(passes, 1e-300)


class Probe:
    """`reference.verify` with its uniforms chosen and its draws captured."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, method: str) -> None:
        self.method = method
        self.uniform = torch.empty(0)
        self.weights = torch.empty(0)
        monkeypatch.setattr(reference.philox, "uniform", lambda *args: self.uniform)
        monkeypatch.setattr(reference, "draw", self.capture)

    def capture(self, weights: Tensor, seed: Tensor, *args: object) -> Tensor:
        self.weights = weights
        return torch.zeros_like(seed)

    def verify(self, uniform: Tensor, *args: Tensor | None, **filters: Tensor) -> Tensor:
        """num_accepted [B] with uniforms [B, K]."""
        self.uniform = uniform
        where = torch.zeros(uniform.shape[0], dtype=torch.int64)
        return reference.verify(*args, seed=where, position=where, method=self.method, **filters).num_accepted


def acceptance(probe: Probe, num_drafts: int, *args: Tensor | None, **filters: Tensor) -> Tensor:
    """P(draft i passes its test): [B, K] to 2**-53, by narrowing it 13 times to a sixteenth.

    Drafts before the one in question pass, or `rejection` would stop there; those behind it fail, or `block` would not
    show it.
    """
    batch, parts = args[0].shape[0], 16
    low = torch.zeros(batch, num_drafts, dtype=torch.float64)
    if num_drafts == 0:
        return low
    # One row of a large batch for each sequence, position and uniform that is tried.
    copies = num_drafts * (parts - 1)
    args = [None if value is None else value.repeat_interleave(copies, dim=0) for value in args]
    filters = {name: value.repeat_interleave(copies) for name, value in filters.items()}
    position = torch.arange(num_drafts)[:, None]
    others = uniforms(position > torch.arange(num_drafts))[:, None]  # [K, 1, K]
    this = torch.eye(num_drafts, dtype=torch.bool)[:, None]  # [K, 1, K]
    for step in range(13):
        width = float(parts) ** -step
        tried = low[..., None] + width * torch.arange(1, parts) / parts  # [B, K, 15]
        uniform = torch.where(this, tried[..., None], others).flatten(0, 2)
        passed = probe.verify(uniform, *args, **filters).reshape(tried.shape) > position
        assert (passed.int().diff(dim=-1) <= 0).all()  # what passes at one uniform passes at all below it
        low = low + width / parts * passed.sum(dim=-1)
    return (low + 2.0**-53).where(low > 0, 0).where(low < 1 - 2.0**-51, 1)


Passes = Callable[[Tensor], Tensor]  # which tests are passed [K] bool -> those that `verify` is to see as passed


def emitted_law(
    probe: Probe,
    chain: Chain,
    drafts: Tensor,
    draft_logits: Tensor | None,
    weight: Tensor,
    seen: Passes = lambda passes: passes,
) -> list[Tensor]:
    """P(a round emits exactly these tokens): entry n has shape [V] * (n + 1). weight [B] is the law of the drafts."""
    batch, num_drafts = drafts.shape
    vocab_size = chain.target[0].shape[-1]
    filters = rows(chain.filters, batch)
    args = (chain.rows_of(chain.target, drafts), drafts, draft_logits)
    accept = acceptance(probe, num_drafts, *args, **filters)
    out = [torch.zeros(vocab_size**n, vocab_size, dtype=torch.float64) for n in range(num_drafts + 1)]
    for case in product((True, False), repeat=num_drafts):
        passes = torch.tensor(case, dtype=torch.bool)
        chance = weight * torch.where(passes, accept, 1 - accept).prod(dim=1)
        uniform = torch.where(seen(passes), accept / 2, (1 + accept) / 2)
        num_accepted = probe.verify(uniform, *args, **filters)
        next_law = probe.weights / probe.weights.sum(dim=-1, keepdim=True)  # [B, V]
        for n, emitted in enumerate(out):
            kept = (num_accepted == n) & (chance > 0)
            prefix = (drafts[kept, :n] * vocab_size ** torch.arange(n).flip(0)).sum(dim=1)
            emitted.index_add_(0, prefix, chance[kept, None] * next_law[kept])
    return [emitted.reshape([vocab_size] * (n + 1)) for n, emitted in enumerate(out)]


def drawn_law(
    probe: Probe,
    chain: Chain,
    tamper: Callable[[Tensor], Tensor | None] = lambda draft_logits: draft_logits,
    seen: Passes = lambda passes: passes,
) -> list[Tensor]:
    """`emitted_law` with drafts drawn from the draft chain, of whose logits `verify` sees what `tamper` returns."""
    drafts = chain.drafts()
    draft_logits = chain.rows_of(chain.draft, drafts)
    q = law(draft_logits, chain.filters).gather(-1, drafts[..., None]).squeeze(-1)
    drawn = q.prod(dim=1) > 0
    drafts, draft_logits, weight = drafts[drawn], draft_logits[drawn], q.prod(dim=1)[drawn]
    return emitted_law(probe, chain, drafts, tamper(draft_logits), weight, seen)


def error(emitted: list[Tensor], chain: Chain) -> float:
    """Largest error of the joint law of K+1 tokens, where those that a round did not emit follow the target's
    conditional law."""
    joint = emitted[0]
    for n in range(1, chain.num_drafts + 1):
        joint = joint[..., None] * target_law(chain, n) + emitted[n]
    return (joint - target_joint(chain)).abs().max().item()


def g_test(tokens: Tensor, expected_law: Tensor) -> float:
    """The p-value of ids [N] against their law [V], with Williams' correction; 0 where one is impossible."""
    observed = torch.bincount(tokens, minlength=expected_law.numel()).double()
    expected = expected_law.double() * len(tokens)
    possible = expected > 0
    if observed[~possible].any():
        return 0.0
    rare = possible & (expected < 5)  # pooled, as the chi-square law of G asks for
    cells = possible & ~rare
    observed = torch.cat([observed[cells], observed[rare].sum()[None]])
    expected = torch.cat([expected[cells], expected[rare].sum()[None]])
    observed, expected = observed[expected > 0], expected[expected > 0]
    freedom = len(expected) - 1
    g = 2 * torch.xlogy(observed, observed / expected).sum().item()
    correction = 1 + ((1 / expected).sum().item() - 1 / len(tokens)) / (6 * freedom)
    return float(scipy_stats.chi2.sf(g / correction, freedom))
