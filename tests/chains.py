"""Chains of distributions that depend on the prefix, and the law of the tokens that a target chain emits."""

from dataclasses import dataclass, field
from itertools import product

import torch
from torch import Tensor
from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

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
