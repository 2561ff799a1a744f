"""One round, on the device only: propose, verify, commit. Of all that, the host reads nothing but one packed result (and what
logits processors, a request's own, read there)."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .backend import Verdict, verify
from .drafters.base import Drafter
from .drafters.proposal_rules import proposed
from .drafters.proposals import copied, fitted, layout
from .graphs import Graphs
from .logits_processors import process_logits
from .metrics import RoundClock
from .model import RaggedModel
from .penalty import penalise_repetition
from .state import BatchState, Proposal


@dataclass
class Round:
    """Runs the rounds of an engine.

    With CUDA graphs, which are the target's, the two halves of a round, drafting and verification, are graphs of their own:
    between them the clock takes the time. A drafter that works on the host has parts of its work captured itself.

    Args:
        target: verifies; its cache holds the rows' K/V.
        drafter: proposes; None for plain decoding.
        verification: the rule, of `VERIFICATION_METHODS`.
        clock: takes the time of both halves.
    """

    target: RaggedModel
    drafter: Drafter | None
    verification: str
    clock: RoundClock
    _place: object = field(default_factory=object, init=False)  # see `_placed`

    @property
    def graphs(self) -> Graphs:
        return self.target.graphs

    def run(self, state: BatchState, num_draft_tokens: int, trim: Callable[[Proposal], Proposal]) -> Tensor:
        """Advance every active row by 1 to K+1 tokens. The clock is left with two marks: whoever calls this marks the end.

        Args:
            num_draft_tokens: drafts to ask the drafter for; 0: it is not asked.
            trim: cuts what is not worth verifying from a proposal.

        Returns:
            The packed result of `verify_and_commit`, on the device: for `round_results.unpack`, when it has come to the host. What
            it says of inactive rows means nothing.

        Raises:
            EngineError: if the drafter returns something that is no proposal for this state.
        """
        self.clock.mark()
        proposal = trim(self._propose(state, num_draft_tokens))
        self.clock.mark()
        verdict, packed = self._verify(state, proposal)
        if self.drafter is not None:
            self.drafter.observe(state, verdict)
        return packed

    def _propose(self, state: BatchState, num_draft_tokens: int) -> Proposal:
        if self.drafter is None or not num_draft_tokens:
            return Proposal(state.tokens[:, :0])
        drafter = self.drafter

        def work() -> Proposal:
            proposal = proposed(drafter, state, num_draft_tokens, self.target.vocab_size)
            if proposal.tokens.shape[1] > num_draft_tokens:  # by so many, at most, the host takes a text to have grown
                proposal = fitted(proposal, num_draft_tokens)
            return self._placed(_within_limits(proposal, state))

        graph_key = getattr(drafter, "graph_key", None)
        own = graph_key() if graph_key is not None and self.graphs.enabled else None
        if own is None:
            return work()
        proposal: Proposal = self.graphs.run(("propose", own, state.key, num_draft_tokens), work)
        return proposal

    def _placed(self, proposal: Proposal) -> Proposal:
        """With CUDA graphs, a copy of the proposal, without its confidence, where the graph of the verification reads it.

        So that needs no twin for each place where a drafter leaves its proposals, which differs from graph to graph of the
        drafter, and from one eager call to the next.
        """
        if not self.graphs.enabled:
            return proposal
        return copied(proposal._replace(confidence=None), self.graphs, self._place)

    def _verify(self, state: BatchState, proposal: Proposal) -> tuple[Verdict, Tensor]:
        def work() -> tuple[Verdict, Tensor]:
            return verify_and_commit(self.target, state, proposal, self.verification)

        if state.processors or not self.graphs.enabled:  # on the host, or nothing to capture with
            return work()
        result: tuple[Verdict, Tensor] = self.graphs.run(("verify", state.key, layout(proposal)), work)
        return result


def verify_and_commit(
    target: RaggedModel, state: BatchState, proposal: Proposal, verification: str
) -> tuple[Verdict, Tensor]:
    """Call the target on the pending tokens and the drafts, judge the drafts, and append what stands to the texts.

    Returns:
        The verdict, and what the host is to know of it, packed for one copy: [B, 3 + K+1] int64, the columns num_accepted,
        num_proposed, status and the tokens. If a row wants log-probabilities, K+1 columns more: the bits of float64.
    """
    drafts = proposal.tokens
    num_proposed = (drafts >= 0).long().cumprod(dim=1).sum(dim=1)
    logits = target.decode(
        tokens=torch.cat([state.pending[:, None], drafts], dim=1),
        start=state.seq_lens,
        num_valid=(num_proposed + 1) * state.active,
        rows=state.rows,
        kv_length=state.max_text_length + drafts.shape[1],
    )
    if state.penalised:
        logits = penalise_repetition(logits, state, drafts)
    if state.processors:
        logits = process_logits(logits, state, drafts)
    verdict = verify(
        target_logits=logits,
        draft_tokens=drafts,
        draft_logits=proposal.logits,
        draft_stats=proposal.stats,
        **state.sampling,
        seed=state.seed,
        position=state.position,
        method=verification,
        return_logprobs=state.logprobs,
    )
    state.commit(verdict)
    columns = [column[:, None] for column in (verdict.num_accepted, num_proposed, verdict.status)] + [verdict.tokens]
    if verdict.logprobs is not None:
        columns.append(verdict.logprobs.double().view(torch.int64))
    return verdict, torch.cat(columns, dim=1)


def _within_limits(proposal: Proposal, state: BatchState) -> Proposal:
    """Drop drafts behind which the round's next token would have no room, and all of rows that are to have none."""
    room = (state.limits - state.seq_lens - 2).masked_fill(state.without_drafts, 0)[:, None]
    step = torch.arange(proposal.tokens.shape[1], device=room.device)
    return proposal._replace(tokens=proposal.tokens.where(step < room, -1))
