"""Several drafters in one: each row takes the proposal of the first that has one.

A cheap drafter that is silent where it knows nothing goes before one that always drafts. (A cascade in the sense of Chen et
al., arXiv 2312.11462, whose choice is made for a whole round.)
"""

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import replace
from itertools import takewhile, zip_longest
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from ..model import RaggedModel
from ..state import BatchState, Proposal, Verdict
from ..transfers import to_device
from .base import Drafter
from .lookup import LookupDrafter, Tokens, texts
from .proposal_rules import proposed
from .proposals import fitted, merged, nothing, side_by_side


class CascadeDrafter:
    """Drafters in stages: a row takes the first stage's proposal if that has a first token for it, else the next one's.

    Whether a stage has a proposal for a row must depend on the committed text, and not on numbers drawn for the draft. That
    is so for lookup in the text, and for stages that always draft.

    On a CPU, where looking at drafts is free,
    - a stage is not asked if no row needs it;
    - lookups that come first are asked again behind the drafts of other stages: after every single draft of a stage that has
      `steps`, which then stops where a lookup goes on, and behind the last draft of any other. That keeps the law, as it
      depends only on the text and the drafts before it which stage the next draft comes from.

    If some drafts come with logits that verification needs, those that have none get logits by which they are certain.

    Every stage observes rounds as if it had drafted alone. Tokens that it did not propose itself come to it one by one, each in
    a round without drafts, so that a stage that keeps K/V knows what it lacks.

    Args:
        stages: at least one drafter. The stages of a cascade among them become stages of this one.

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
        self._num_lookups = sum(1 for _ in takewhile(lambda stage: isinstance(stage, LookupDrafter), self.stages))
        self._drafts: list[Tensor] = []  # of the stages that were asked in this round, [B, K] each; on a CPU only
        self._longest = 0  # most drafts of a round so far; on a GPU only

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
        self._drafts = []  # of a round that was interrupted before it was observed
        for stage in self.stages:
            stage.prefill(state)

    def propose(self, state: BatchState, num_draft_tokens: int) -> Proposal:
        """See the class."""
        proposals: list[Proposal] = []  # [B, K] each; several of a stage that lookups go on behind
        takes: list[Tensor] = []  # [B, K] bool, for each of these: which of its drafts are taken
        drafts: list[Tensor] = []  # [B, K], for each stage that was asked
        open_rows = torch.ones_like(state.active)[:, None]  # [B, 1]: no stage has had a proposal for the row yet
        for index, stage in enumerate(self.stages):
            if proposals and state.can_look and not bool((open_rows & state.active[:, None]).any()):
                break
            if state.can_look and 0 < self._num_lookups <= index:
                own, parts = self._followed_up(stage, state, num_draft_tokens, open_rows)
            else:
                own = fitted(proposed(stage, state, num_draft_tokens, self._vocab_size), num_draft_tokens)
                parts = [own]
            has_drafts = own.tokens[:, :1] >= 0
            proposals += parts
            takes += [open_rows & has_drafts & (part.tokens >= 0) for part in parts]
            drafts.append(own.tokens)
            open_rows = open_rows & ~has_drafts
        if state.can_look:
            self._drafts = drafts
        return merged(proposals, takes, state, self._vocab_size)

    def _followed_up(
        self, stage: Drafter, state: BatchState, num_draft_tokens: int, open_rows: Tensor
    ) -> tuple[Proposal, list[Proposal]]:
        """Ask a stage, and the lookups behind its drafts.

        Returns:
            All drafts of the stage [B, K]; and what is taken of them, then the lookups' drafts in their places behind, [B, K]
            each. Where no lookup had one, the stage's drafts alone.
        """
        lookups: Any = self.stages[: self._num_lookups]
        behind = _Behind(lookups, state, num_draft_tokens, open_rows)
        if (steps := getattr(stage, "steps", None)) is not None:
            columns = []
            for column in steps(state, num_draft_tokens):
                columns.append(column)
                if not behind.look(column.tokens):
                    break
            own = side_by_side(columns) if columns else nothing(state)
        else:
            own = fitted(proposed(stage, state, num_draft_tokens, self._vocab_size), num_draft_tokens)
            behind.look(own.tokens)
        own = fitted(own, num_draft_tokens)
        if not behind.found:
            return own, [own]
        before = (behind.proposal.tokens >= 0).cumsum(dim=1) == 0
        return own, [own._replace(tokens=own.tokens.where(before, -1)), behind.proposal]

    def observe(self, state: BatchState, verdict: Verdict) -> None:
        """Tell each stage what it would have seen alone."""
        if len(self.stages) == 1:
            self.stages[0].observe(state, verdict)
            return
        drafts, self._drafts = self._drafts, []
        rounds = None
        if not state.can_look:
            # If there are drafts, all stages were asked. What they proposed is not known, as a graph may have been replayed.
            # It is always safe to say that nothing of it stood. Always as many rounds as there ever were drafts, as stages
            # have a graph for each number.
            most = verdict.tokens.shape[1] - 1
            self._longest = max(self._longest, most)
            rounds = self._longest if most else 1
            drafts = [torch.full_like(verdict.tokens[:, 1:], -1)] * len(self.stages) if most else []
        for stage, own in zip_longest(self.stages, drafts):
            if getattr(stage, "observes_width_only", False):  # on a GPU, each tensor would be a launch
                widths = [] if own is None else [own.shape[1] + 1]
                for width in widths + [1] * (_rounds_behind(own, verdict) if rounds is None else rounds):
                    stage.observe(state, verdict._replace(tokens=verdict.tokens[:, :1].expand(-1, width)))
                continue
            for seen in _as_seen_by(own, state, verdict, rounds):
                stage.observe(*seen)

    def graph_key(self) -> Hashable | None:
        """The keys of all stages; None if one of them is None."""
        keys = [getattr(stage, "graph_key", lambda: None)() for stage in self.stages]
        return None if None in keys else tuple(keys)

    def ends_early(self, state: BatchState) -> bool:
        """Whether all stages do."""
        return all(getattr(stage, "ends_early", lambda state: False)(state) for stage in self.stages)


class _Behind:
    """Collects what lookups say behind the drafts of another stage, on the host.

    Args:
        num_draft_tokens: of a row, the other stage's drafts included.
        open_rows: [B, 1] bool: the rows that take the other stage's drafts.

    Attributes:
        proposal: the lookups' drafts [B, K] and their confidence, each behind those of the stage; -1 elsewhere.
        found: whether there is any.
    """

    def __init__(
        self, lookups: Sequence[LookupDrafter], state: BatchState, num_draft_tokens: int, open_rows: Tensor
    ) -> None:
        self._lookups, self._slots = lookups, state.slots
        rows = (open_rows[:, 0] & state.active).nonzero()[:, 0].tolist()
        whole = texts(state)
        # With the drafts so far; of rows for which lookups are still asked.
        self._texts = {row: whole[row] for row in rows}
        self._room = dict.fromkeys(rows, num_draft_tokens)  # drafts that there is still room for
        self.found = False
        tokens = torch.full((len(whole), num_draft_tokens), -1, device=state.tokens.device)
        self.proposal = Proposal(tokens, confidence=torch.zeros_like(tokens, dtype=torch.float32))

    def look(self, tokens: Tensor) -> bool:
        """Ask the lookups behind the stage's next drafts [B, n]; returns whether it should draft on, for any row."""
        assert self.proposal.confidence is not None
        for row in list(self._texts):
            drafts = list(takewhile(lambda token: token >= 0, tokens[row].tolist()))
            text = self._texts[row] = np.concatenate([self._texts[row], np.array(drafts, dtype=np.int64)])
            self._room[row] -= len(drafts)
            found = self._continuation(row, text) if drafts else []
            if found:
                self.found = True
                begin = self.proposal.tokens.shape[1] - self._room[row]
                new, device = slice(begin, begin + len(found)), tokens.device
                self.proposal.tokens[row, new] = to_device([token for token, _ in found], device)
                self.proposal.confidence[row, new] = to_device([sure for _, sure in found], device)
            if found or len(drafts) < tokens.shape[1]:
                del self._texts[row]
        return bool(self._texts)

    def _continuation(self, row: int, text: Tokens) -> list[tuple[int, float]]:
        """Of the first lookup that has one; empty if none has, or there is no room."""
        for lookup in self._lookups if self._room[row] > 0 else ():
            if found := lookup.continuation(self._slots[row], text, self._room[row]):
                return found
        return []


def _rounds_behind(drafts: Tensor | None, verdict: Verdict) -> int:
    """How many rounds without drafts `_as_seen_by` makes for these drafts, if it is not told; looks at the tokens."""
    rounds = 0
    own = [[]] * len(verdict.tokens) if drafts is None else drafts.tolist()
    for row, drafted in zip(verdict.tokens.tolist(), own, strict=True):
        emitted = [token for token in row if token >= 0]
        stood = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(emitted[:-1], drafted, strict=False)))
        rounds = max(rounds, len(emitted) - stood - (drafts is not None))
    return rounds


def _as_seen_by(
    drafts: Tensor | None, state: BatchState, verdict: Verdict, rounds: int | None
) -> Iterator[tuple[BatchState, Verdict]]:
    """A round as rounds of a stage that drafted alone, which come to the same tokens.

    First one round with the stage's drafts, of which those stand that were emitted; then a round without drafts for each token
    that is left.

    Args:
        drafts: [B, K] of the stage; None: it was not asked, so there are rounds without drafts only.
        state: behind the round.
        verdict: of the round.
        rounds: how many rounds without drafts; None: as many as are needed, which takes a look at the tokens.

    Yields:
        State and verdict of each round, as `Drafter.observe` takes them.
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
