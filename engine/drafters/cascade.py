"""Several drafters in one: each row takes the proposal of the first that has one.

A cheap drafter that is silent where it knows nothing goes before one that always drafts. (A cascade in the sense of Chen et
al., arXiv 2312.11462, whose choice is made for a whole round.)
"""

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import replace
from itertools import zip_longest

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..backend import RowStats, row_stats
from ..config import GREEDY_BELOW
from ..model import RaggedModel
from ..state import BatchState, Proposal, Verdict
from .base import Drafter

_BELOW_ONE = 1 - 2**-24  # the largest float32


class CascadeDrafter:
    """Drafters in stages: a row takes the first stage's proposal if that has a first token for it, else the next one's.

    Whether a stage has a proposal for a row must depend on the committed text, and not on numbers drawn for the draft. That
    is so for lookup in the text, and for stages that always draft. On a CPU, where looking is free, a stage is not asked
    if no row needs it.

    Where logits count, rows that took drafts without get logits by which these drafts are certain. Every stage observes
    rounds as if it had drafted alone: tokens that others proposed come to it in rounds without drafts, one each, so that a
    stage that keeps K/V knows what it lacks.

    Args:
        stages: at least one drafter. A cascade among them counts as its stages.

    Raises:
        ValueError: if there is none, or one is no drafter.
    """

    def __init__(self, *stages: Drafter) -> None:
        if not stages:
            raise ValueError("stages must be at least one drafter, got none")
        for index, stage in enumerate(stages):
            if not isinstance(stage, Drafter) or isinstance(stage, type):
                raise ValueError(f"stages[{index}] must have prefill, propose and observe, got {stage!r}")
        parts = [stage.stages if isinstance(stage, CascadeDrafter) else (stage,) for stage in stages]
        self.stages: tuple[Drafter, ...] = tuple(stage for part in parts for stage in part)
        self._vocab_size = 0  # the target's
        self._drafts: list[Tensor] = []  # [B, K] of the stages that were asked in this round; on a CPU only
        self._longest = 0  # most drafts of a round so far

    def attach(self, target: RaggedModel) -> None:
        """Hand the target to the stages that want it."""
        self._vocab_size = target.vocab_size
        for stage in self.stages:
            if (attach := getattr(stage, "attach", None)) is not None:
                attach(target)

    def reserve(self, length: int) -> None:
        """Make room for rows of this length in every stage."""
        for stage in self.stages:
            if (reserve := getattr(stage, "reserve", None)) is not None:
                reserve(length)

    def prefill(self, state: BatchState) -> None:
        """Every stage reads the prompts."""
        for stage in self.stages:
            stage.prefill(state)

    def propose(self, state: BatchState, num_draft_tokens: int) -> Proposal:
        """See the class."""
        proposals: list[Proposal] = []
        waiting = state.active[:, None]
        for stage in self.stages:
            if proposals and _can_look(state) and not bool(waiting.any()):
                break
            proposals.append(_padded(stage.propose(state, num_draft_tokens), num_draft_tokens))
            waiting = waiting & ~_has_any(proposals[-1])
        if _can_look(state):
            self._drafts = [proposal.tokens for proposal in proposals]
        return _merged(proposals, state, self._vocab_size)

    def observe(self, state: BatchState, verdict: Verdict) -> None:
        """Tell each stage what it would have seen alone."""
        if len(self.stages) == 1:
            return self.stages[0].observe(state, verdict)
        drafts, self._drafts = self._drafts, []
        rounds = None
        if not _can_look(state):
            # All stages were asked, if one was. What they proposed is not known, as a graph may have been replayed: that
            # nothing of it stood is always safe. A number of rounds that varies would give stages another graph each time.
            most = verdict.tokens.shape[1] - 1
            self._longest = max(self._longest, most)
            rounds = self._longest if most else 1
            drafts = [torch.full_like(verdict.tokens[:, 1:], -1)] * len(self.stages) if most else []
        for stage, own in zip_longest(self.stages, drafts):
            for seen in _as_seen_by(own, state, verdict, rounds):
                stage.observe(*seen)
        return None

    def graph_key(self) -> Hashable | None:
        """The stages' own keys; None if one has none."""
        keys = [getattr(stage, "graph_key", lambda: None)() for stage in self.stages]
        return None if None in keys else tuple(keys)


def _can_look(state: BatchState) -> bool:
    """Whether values on the device can be read without waiting for it."""
    return state.tokens.device.type == "cpu"


def _has_any(proposal: Proposal) -> Tensor:
    """[B, 1] bool: rows that it has drafts for."""
    return proposal.tokens[:, :1] >= 0


def _padded(proposal: Proposal, num_draft_tokens: int) -> Proposal:
    """Proposals of fewer columns with empty ones behind: all fields [B, K, ...]."""
    missing = num_draft_tokens - proposal.tokens.shape[1]
    if missing <= 0:
        return proposal
    tokens, logits, stats, confidence = proposal
    return Proposal(
        pad(tokens, (0, missing), value=-1),
        None if logits is None else pad(logits, (0, 0, 0, missing)),
        None if stats is None else RowStats(*(pad(field, (0, missing)) for field in stats)),
        None if confidence is None else pad(confidence, (0, missing)),
    )


def _merged(proposals: Sequence[Proposal], state: BatchState, vocab_size: int) -> Proposal:
    """Each row from the first proposal that has drafts for it."""
    open_rows, takers = torch.ones_like(state.active)[:, None], []
    for proposal in proposals:
        takers.append(open_rows & _has_any(proposal))
        open_rows = open_rows & ~takers[-1]
    tokens = torch.full_like(proposals[0].tokens, -1)
    drawn = torch.zeros_like(tokens, dtype=torch.bool)  # by logits
    for proposal, takes in zip(proposals, takers, strict=True):
        tokens = proposal.tokens.where(takes, tokens)
        drawn = drawn | (takes & (proposal.tokens >= 0) & (proposal.logits is not None))
    unseen = state.all_greedy or state.coupled or all(proposal.logits is None for proposal in proposals)
    if unseen or (_can_look(state) and not bool((drawn & state.active[:, None]).any())):
        return Proposal(tokens, confidence=_confidence(proposals, takers, state))
    logits, stats = _rows(proposals, takers, state, vocab_size)
    if _can_look(state) and bool(drawn.all()):
        return Proposal(tokens, logits, stats)
    return Proposal(tokens, *_made_certain(tokens, ~drawn, logits, stats))


def _confidence(proposals: Sequence[Proposal], takers: Sequence[Tensor], state: BatchState) -> Tensor | None:
    """[B, K] from the stage that each row took; None if one of those does not say."""
    confidence = torch.zeros_like(proposals[0].tokens, dtype=torch.float32)
    for proposal, takes in zip(proposals, takers, strict=True):
        own = proposal.confidence if proposal.confidence is not None else _probability(proposal, state)
        if own is not None:
            confidence = torch.where(takes, own, confidence)
        elif not _can_look(state) or bool((takes & state.active[:, None]).any()):
            return None
    return confidence


def _probability(proposal: Proposal, state: BatchState) -> Tensor | None:
    """[B, K] q of the drafts, of greedy rows at temperature 1; None without logits and stats."""
    if proposal.logits is None or proposal.stats is None:
        return None
    logits = proposal.logits.gather(-1, proposal.tokens.clamp(min=0)[..., None])[..., 0].float()
    temperature = state.temperature.masked_fill(state.temperature < GREEDY_BELOW, 1)[:, None]
    return (logits / temperature - proposal.stats.lse).exp().float().nan_to_num(0.0).clamp(max=_BELOW_ONE)


def _rows(
    proposals: Sequence[Proposal], takers: Sequence[Tensor], state: BatchState, vocab_size: int
) -> tuple[Tensor, RowStats]:
    """The logits [B, K, V] of the stages that rows took, and their stats [B, K]; any where a stage has none."""
    found = [(p.logits, p.stats, takes) for p, takes in zip(proposals, takers, strict=True) if p.logits is not None]
    size = max(vocab_size, *(logits.shape[-1] for logits, _, _ in found))
    chosen: tuple[Tensor, RowStats] | None = None
    for logits, given, takes in found:
        stats = given or row_stats(logits, **state.sampling)
        if (missing := size - logits.shape[-1]) > 0:
            logits = pad(logits, (0, missing), value=-torch.inf)
        if chosen is not None:
            logits = torch.where(takes[..., None], logits, chosen[0])
            stats = RowStats(*(torch.where(takes, *pair) for pair in zip(stats, chosen[1], strict=True)))
        chosen = logits, stats
    assert chosen is not None
    return chosen


def _made_certain(tokens: Tensor, certain: Tensor, logits: Tensor, stats: RowStats) -> tuple[Tensor, RowStats]:
    """The same rows, but where `certain` [B, K] those whose token has logit 0 and all others -inf: lse = 0, q = 1 exactly."""
    ids = tokens.clamp(min=0)
    rows = logits.masked_fill(certain[..., None], -torch.inf)  # a copy
    rows.scatter_(-1, ids[..., None], rows.gather(-1, ids[..., None]).masked_fill(certain[..., None], 0))
    return rows, RowStats(
        threshold=stats.threshold.masked_fill(certain, 0),
        lse=stats.lse.masked_fill(certain, 0),
        argmax=torch.where(certain, ids, stats.argmax),
    )


def _as_seen_by(
    drafts: Tensor | None, state: BatchState, verdict: Verdict, rounds: int | None
) -> Iterator[tuple[BatchState, Verdict]]:
    """A round as it would have been with these drafts alone, which have led to the same tokens, and what came after it.

    That is one round that accepts those of the drafts which were emitted, and rounds without drafts for the other tokens.

    Args:
        drafts: [B, K] of the stage; None: it was not asked, so there are rounds without drafts only.
        rounds: how many of these; None: as many as are needed, which is looked at.
    """
    count = (verdict.tokens >= 0).sum(dim=1)  # new tokens of each row
    begin, told = state.seq_lens - count, torch.zeros_like(count)
    width = verdict.tokens.shape[1]
    if drafts is not None:
        shared = min(drafts.shape[1], width - 1)
        same = (drafts[:, :shared] == verdict.tokens[:, :shared]) & (drafts[:, :shared] >= 0)
        accepted = torch.minimum(same.long().cumprod(dim=1).sum(dim=1), (count - 1).clamp(min=0))
        told = torch.minimum(accepted + 1, count)
        tokens = verdict.tokens.where(torch.arange(width, device=told.device) < told[:, None], -1)
        tokens = pad(tokens, (0, drafts.shape[1] + 1 - width), value=-1)
        seen = verdict._replace(tokens=tokens, num_accepted=accepted.to(torch.int32))
        yield replace(state, seq_lens=begin + told), seen
    for step in range(int((count - told).max()) if rounds is None else rounds):
        at = told + step
        tokens = verdict.tokens.gather(1, at.clamp(max=width - 1)[:, None]).where((at < count)[:, None], -1)
        seen = verdict._replace(tokens=tokens, num_accepted=torch.zeros_like(verdict.num_accepted))
        yield replace(state, seq_lens=begin + torch.minimum(at + 1, count)), seen
