"""The cases that are timed: their inputs, the bytes that they must move, and what makes a result valid."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from engine.kernels.ops import row_stats, sample, verify
from engine.kernels.philox import DRAFT
from engine.kernels.records import Draws, RowStats, Verdict

Inputs = dict[str, Any]  # keyword arguments of `verify`, without the method
OPS = ("verify", "sample", "row_stats")
VARIANTS: dict[str, dict[str, Any]] = {
    "one-hot": dict(method="rejection", full_draft=False),
    "full": dict(method="rejection", full_draft=True),
    "full, no draft stats": dict(method="rejection", full_draft=True, draft_stats=False),
    "block": dict(method="block", full_draft=True),
    "one-hot block": dict(method="block", full_draft=False),
    "coupled": dict(method="coupled", full_draft=False),
    "typical": dict(method="typical", full_draft=False),
    "greedy": dict(method="rejection", full_draft=False, temperature=0.0),
}
FILTERS: dict[str, dict[str, Any]] = {
    "top-k 50": dict(top_k=50),
    "top-p 0.9": dict(top_p=0.9),
    "min-p 0.05": dict(min_p=0.05),
}


@dataclass(frozen=True)
class Case:
    """One shape and one way of sampling; the same for every contender."""

    batch: int
    num_drafts: int
    vocab_size: int
    op: str = "verify"
    method: str = "rejection"
    full_draft: bool = True  # False: one-hot drafts
    draft_stats: bool = True  # of a full draft: those of the sampler are handed over; False: they are computed here
    temperature: float = 0.7
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    dtype: torch.dtype = torch.bfloat16

    def __post_init__(self) -> None:
        if self.op not in OPS:
            raise ValueError(f"op must be one of {', '.join(OPS)}, got {self.op!r}")

    @property
    def shape(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.").replace("bfloat16", "bf16").replace("float32", "fp32")
        return f"B={self.batch} K={self.num_drafts} V={self.vocab_size} {dtype}"

    @property
    def bytes_moved(self) -> int:
        """What a kernel may move at most, in bytes; filters add reads that stay in cache and are not counted.

        With rows of V logits, per sequence: verify reads the target's K+1 rows; with a full draft, `rejection` reads
        one draft row and one target row again, and `block` K rows of both; K draft rows more without the draft's stats.
        `row_stats` reads K+1 rows, `sample` one.
        """
        again = {"rejection": 1, "block": self.num_drafts}.get(self.method, 0) if self._reads_drafts else 0
        stats = self.num_drafts if self._reads_drafts and not self.draft_stats else 0
        return self._row_bytes * (self._target_rows + 2 * again + stats)

    @property
    def distinct_bytes(self) -> int:
        """Of them, those that are read for the first time: the logits that pass through the cache."""
        drafts = 1 if self.method == "rejection" and self.draft_stats else self.num_drafts
        return self._row_bytes * (self._target_rows + (drafts if self._reads_drafts else 0))

    @property
    def _target_rows(self) -> int:
        return 1 if self.op == "sample" else self.num_drafts + 1

    @property
    def _reads_drafts(self) -> bool:
        return self.op == "verify" and self.full_draft and self.temperature > 0

    @property
    def _row_bytes(self) -> int:
        """Of one row of each sequence."""
        return self.batch * self.vocab_size * self.dtype.itemsize


def all_cases(batch: int, num_drafts: int, vocab_size: int) -> dict[str, Case]:
    """By name: every variant of `verify`, `sample` and `row_stats`, each unfiltered and with each filter."""
    base = Case(batch, num_drafts, vocab_size)
    unfiltered = {name: replace(base, **variant) for name, variant in VARIANTS.items()}
    unfiltered |= {op: replace(base, op=op) for op in OPS[1:]}
    filtered = {
        f"{name}, {key}": replace(case, **values)
        for name, case in unfiltered.items()
        for key, values in FILTERS.items()
        if case.temperature > 0 and case.draft_stats  # no filter moves the argmax
    }
    return unfiltered | filtered


def make_inputs(case: Case, device: str) -> Inputs:
    """Arguments of `verify`: drafts drawn from a disturbed target.

    Logits are exponentially distributed, so that the r-th largest is about 1.2 log(V / r): probabilities fall off like
    those of words (Zipf). top-p then keeps a head of the vocabulary, as with a language model, and not most of it.
    """
    generator = torch.Generator(device).manual_seed(0)
    batch, num_drafts, vocab_size = case.batch, case.num_drafts, case.vocab_size
    target = torch.empty(batch, num_drafts + 1, vocab_size, device=device).exponential_(generator=generator).mul_(1.2)
    noise = torch.randn(batch, num_drafts, vocab_size, device=device, generator=generator)
    draft = noise.mul_(0.5).add_(target[:, :-1]).to(case.dtype)
    rows: Inputs = dict(
        temperature=torch.full((batch,), case.temperature, device=device),
        seed=torch.arange(batch, device=device),
        position=torch.full((batch,), 100, device=device),
    )
    if case.top_k > 0:
        rows["top_k"] = torch.full((batch,), case.top_k, device=device)
    if case.top_p < 1:
        rows["top_p"] = torch.full((batch,), case.top_p, device=device)
    if case.min_p > 0:
        rows["min_p"] = torch.full((batch,), case.min_p, device=device)
    draws = sample(draft, **rows, origin=rows["position"], stream=DRAFT)
    inputs = dict(rows, target_logits=target.to(case.dtype), draft_tokens=draws.tokens)
    if case.full_draft:
        inputs |= dict(draft_logits=draft)
        inputs |= dict(draft_stats=draws.stats) if case.draft_stats else {}
    return inputs


def rotated(inputs: Inputs, copies: int) -> list[Inputs]:
    """The inputs and copies of their logits elsewhere in memory: what is read next is then not what is in the cache."""
    large = [name for name in ("target_logits", "draft_logits") if name in inputs]
    others = [inputs | {name: inputs[name].clone() for name in large} for _ in range(copies - 1)]
    return [inputs, *others]


def our_call(case: Case, inputs: Inputs) -> Callable[[], Verdict | Draws | RowStats]:
    """The call of ours that a case stands for, with everything but the work itself done beforehand."""
    if case.op == "verify":
        return partial(verify, **inputs, method=case.method)
    rows = {name: inputs[name] for name in ("temperature", "top_k", "top_p", "min_p") if name in inputs}
    if case.op == "row_stats":
        return partial(row_stats, inputs["target_logits"], **rows)
    return partial(sample, inputs["target_logits"][:, 0], **rows, seed=inputs["seed"], position=inputs["position"])


def check_ours(case: Case, inputs: Inputs, result: Verdict | Draws | RowStats) -> None:
    """Assert that a result of ours is valid; before anything is timed."""
    if isinstance(result, Verdict):
        assert not result.status.any(), f"status {result.status.tolist()}"
        counts = result.num_accepted.tolist()
        emitted = [tokens[: n + 1].tolist() for tokens, n in zip(result.tokens, counts, strict=True)]
        assert ((result.tokens >= 0).sum(dim=1) == result.num_accepted + 1).all(), "tokens behind the next token"
        check_emitted(inputs["draft_tokens"], emitted, case.vocab_size)
        return
    stats = result.stats if isinstance(result, Draws) else result
    tokens = result.tokens if isinstance(result, Draws) else result.argmax
    logits = inputs["target_logits"][:, 0] if isinstance(result, Draws) else inputs["target_logits"]
    assert tokens.shape == logits.shape[:-1], tuple(tokens.shape)
    assert ((tokens >= 0) & (tokens < case.vocab_size)).all(), "a token outside the vocabulary"
    assert stats.lse.isfinite().all(), "a row without a distribution"
    assert (logits.gather(-1, tokens[..., None]).squeeze(-1) >= stats.threshold).all(), "a token that was filtered out"


def check_emitted(
    draft_tokens: Tensor,  # [B, K] int64
    emitted: Sequence[Sequence[int]],  # per row: accepted drafts, then the next token
    vocab_size: int,
) -> None:
    """Assert what holds of every verification rule, whoever wrote it: accepted drafts first, then one token more."""
    assert len(emitted) == len(draft_tokens), f"{len(emitted)} rows for a batch of {len(draft_tokens)}"
    for row, (drafts, tokens) in enumerate(zip(draft_tokens.tolist(), emitted, strict=True)):
        assert 1 <= len(tokens) <= len(drafts) + 1, f"row {row}: {len(tokens)} tokens for {len(drafts)} drafts"
        assert list(tokens[:-1]) == drafts[: len(tokens) - 1], f"row {row}: {tokens} for the drafts {drafts}"
        assert 0 <= tokens[-1] < vocab_size, f"row {row}: {tokens[-1]} is outside the vocabulary"
