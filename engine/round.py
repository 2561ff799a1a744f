"""One round, on the device only: propose, verify, commit. The host reads its packed result, and nothing else."""

import torch
from torch import Tensor

from .backend import verify
from .drafters.base import Drafter
from .metrics import RoundClock
from .model import RaggedModel
from .state import BatchState, Proposal

PACKED_EXTRA = 3  # columns after the tokens: number accepted, number proposed, status


def run_round(
    target: RaggedModel,
    state: BatchState,
    drafter: Drafter | None,
    num_draft_tokens: int,
    verification: str,
    clock: RoundClock,
) -> Tensor:
    """Advance every active row by 1 to K+1 tokens.

    Returns:
        [B, K+1 + PACKED_EXTRA] int64: the new tokens (then -1), how many of them were drafted, how many drafts were
        proposed, and the `Status` bits. Rows that are not active hold nothing of meaning.
    """
    clock.mark()
    proposal = Proposal(state.tokens[:, :0])
    if drafter is not None and num_draft_tokens:
        proposal = _within_limits(drafter.propose(state, num_draft_tokens), state)
    clock.mark()
    drafts = proposal.tokens
    num_proposed = (drafts >= 0).long().cumprod(dim=1).sum(dim=1)
    logits = target.decode(
        tokens=torch.cat([state.gather(state.seq_lens[:, None]), drafts.clamp(min=0)], dim=1),
        start=state.seq_lens,
        num_valid=(num_proposed + 1) * state.active,
        rows=state.rows,
        kv_length=state.max_text_length + drafts.shape[1],
    )
    verdict = verify(
        target_logits=logits,
        draft_tokens=drafts,
        draft_logits=proposal.logits,
        draft_stats=proposal.stats,
        **state.sampling,
        seed=state.seed,
        position=state.position,
        method=verification,
    )
    state.commit(verdict)
    if drafter is not None:
        drafter.observe(state, verdict)
    clock.mark()
    extra = torch.stack([verdict.num_accepted.long(), num_proposed, verdict.status.long()], dim=1)
    return torch.cat([verdict.tokens, extra], dim=1)


def _within_limits(proposal: Proposal, state: BatchState) -> Proposal:
    """Drop drafts that would leave no room for the next token of the round."""
    room = (state.limits - state.seq_lens - 2)[:, None]
    step = torch.arange(proposal.tokens.shape[1], device=room.device)
    tokens = proposal.tokens.where(step < room, -1)
    if tokens.device.type == "cpu" and proposal.logits is None:
        # Looking is free here, and columns are not: a call costs about 2% more for each.
        tokens = tokens[:, : int((tokens >= 0).sum(dim=1).max())]
    return proposal._replace(tokens=tokens)
