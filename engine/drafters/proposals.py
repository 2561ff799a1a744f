"""What proposals are made of: the likeliest tokens and how sure they are, steps side by side, one proposal out of several."""

from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..backend import DRAFT, SAMPLE, Draws, RowStats, row_stats, sample, sample_by_inversion
from ..config import is_number
from ..graphs import Graphs
from ..state import BatchState, Proposal

BELOW_ONE = 1 - 2**-24  # the largest float32 below 1


def noise(state: BatchState, step: int | Tensor) -> dict[str, Any]:
    """Keywords for `sample` to draw a draft: each row's temperature, filters and random numbers.

    Under `coupled` these are the target's own, else numbers that nothing else reads.

    Args:
        step: which draft of the round it is, from 0; an int or [B] int64.
    """
    origin, stream = (None, SAMPLE) if state.coupled else (state.position, DRAFT)
    position = state.position + step
    return {**state.sampling, "seed": state.seed, "position": position, "origin": origin, "stream": stream}


def check_min_reach(value: Any) -> None:
    """A ValueError unless it is a number in [0, 1]."""
    if not is_number(value) or not 0 <= value <= 1:
        raise ValueError(f"min_reach must be in [0, 1], got {value!r}")


def any_reaches(reach: Tensor, state: BatchState, min_reach: float) -> bool:
    """Whether some active row has a reach [B, 1], the chance that all its drafts stand, of at least this; waits for the device."""
    return bool((reach[state.active] >= min_reach).any())


def nothing(state: BatchState) -> Proposal:
    """The empty proposal."""
    return Proposal(state.tokens[:, :0])


def copied(proposal: Proposal, graphs: Graphs, place: object) -> Proposal:
    """A copy, which the next one of its layout overwrites: a graph that reads proposals finds all of a layout in the same place,
    and those that write them keep no memory for them. The first, eager call of work that is captured later makes the copy.

    Args:
        place: proposals of different places do not overwrite each other.
    """
    key = place, layout(proposal)
    if key not in graphs.buffers:
        tokens, logits, stats, sure = proposal
        graphs.buffers[key] = Proposal(
            tokens.clone(),
            None if logits is None else logits.clone(),
            None if stats is None else RowStats(*map(torch.clone, stats)),
            None if sure is None else sure.clone(),
        )
    copy: Proposal = graphs.buffers[key]
    for mine, new in zip(tensors_of(copy).values(), tensors_of(proposal).values(), strict=True):
        mine.copy_(new)
    return copy


def layout(proposal: Proposal) -> Hashable:
    """Names, shapes and dtypes of its tensors: proposals that are alike in them are the same work to verify."""
    return tuple((name, tensor.shape, tensor.dtype) for name, tensor in tensors_of(proposal).items())


def tensors_of(proposal: Proposal) -> dict[str, Tensor]:
    """Those of a proposal and of its stats, by name."""
    fields = proposal._asdict() | (proposal.stats._asdict() if proposal.stats is not None else {})
    return {name: field for name, field in fields.items() if isinstance(field, Tensor)}


def side_by_side(steps: Sequence[Proposal]) -> Proposal:
    """One proposal [B, K] of one-column ones, which all have the same fields."""
    tokens, logits, stats, sure = zip(*steps, strict=True)
    return Proposal(
        torch.cat(tokens, dim=1),
        None if logits[0] is None else torch.cat(logits, dim=1),
        None if stats[0] is None else RowStats(*(torch.cat(field, dim=1) for field in zip(*stats, strict=True))),
        None if sure[0] is None else torch.cat(sure, dim=1),
    )


def confidence(log_probability: Tensor) -> Tensor:
    """Log-probabilities as the confidence of a `Proposal`: float32 in [0, 1), 0 for NaN."""
    return _as_confidence(log_probability.exp())


def _as_confidence(probabilities: Tensor) -> Tensor:
    return probabilities.float().nan_to_num(0.0).clamp(max=BELOW_ONE)


def probability(tokens: Tensor, logits: Tensor, stats: RowStats, temperature: Tensor | float = 1.0) -> Tensor:
    """The confidence [B, W] of tokens by their rows [B, W, V], whose stats are of this temperature; 0 for the token -1."""
    logit = logits.gather(-1, tokens.clamp(min=0)[..., None])[..., 0]
    return confidence(logit / temperature - stats.lse).where(tokens >= 0, 0.0)


def likeliest(logits: Tensor) -> Proposal:
    """The argmax of rows [B, W, V], -1 where they are no distribution, and its probability at temperature 1."""
    if logits.device.type == "cpu":  # softmax is one step there, where stats take twenty
        sure, tokens = logits.softmax(dim=-1, dtype=torch.promote_types(logits.dtype, torch.float32)).max(dim=-1)
        return Proposal(tokens.where(sure.isfinite(), -1), confidence=_as_confidence(sure))
    stats = row_stats(logits)
    tokens = stats.argmax.where(stats.lse.isfinite(), -1)
    return Proposal(tokens, confidence=probability(tokens, logits, stats))


def drafts_of(state: BatchState, logits: Tensor, step: int | Tensor, greedy: bool) -> Proposal:
    """Drafts by rows [B, W, V], of which the first is for draft number `step`, an int or [B] int64: the likeliest ones of a
    drafter that is `greedy`, else drawn. What rows that are greedy all would draw is the likeliest; on a CPU it comes with how
    sure the drafter is of it, which takes a kernel more elsewhere."""
    if greedy or (state.all_greedy and state.can_look):
        return likeliest(logits)
    draws = draws_of(state, logits, step)
    if state.all_greedy or state.coupled:  # what the target draws or its argmax decides, and not q
        return Proposal(draws.tokens)
    return Proposal(draws.tokens, logits, draws.stats)


def draws_of(state: BatchState, logits: Tensor, step: int | Tensor, return_logprobs: bool = False) -> Draws:
    """The draws of rows [B, W, V], of which the first is for draft number `step`."""
    if state.can_look and not state.coupled:  # which takes less time, where there are compiled loops
        return sample_by_inversion(logits, **noise(state, step))
    return sample(logits, **noise(state, step), return_logprobs=return_logprobs)


def fitted(proposal: Proposal, num_draft_tokens: int) -> Proposal:
    """Proposals of fewer columns with empty ones behind, and of more without these: all fields [B, K, ...]."""
    missing = num_draft_tokens - proposal.tokens.shape[1]
    if not missing:
        return proposal
    tokens, logits, stats, sure = proposal  # pad cuts where it is given a negative width
    return Proposal(
        pad(tokens, (0, missing), value=-1),
        None if logits is None else pad(logits, (0, 0, 0, missing)),
        None if stats is None else RowStats(*(pad(field, (0, missing)) for field in stats)),
        None if sure is None else pad(sure, (0, missing)),
    )


def merged(proposals: Sequence[Proposal], takes: Sequence[Tensor], state: BatchState, vocab_size: int) -> Proposal:
    """The drafts that are taken, [B, K]; with logits if some of them were drawn, and these count.

    Args:
        proposals: [B, K] each.
        takes: [B, K] bool, of each proposal: its drafts that are taken, every place from one proposal at most.
        vocab_size: the target's, to which logits are widened.
    """
    tokens = torch.full_like(proposals[0].tokens, -1)
    drawn = torch.zeros_like(tokens, dtype=torch.bool)  # by logits
    for proposal, taken in zip(proposals, takes, strict=True):
        tokens = proposal.tokens.where(taken, tokens)
        drawn = drawn | (taken & (proposal.logits is not None))
    unseen = state.all_greedy or state.coupled or all(proposal.logits is None for proposal in proposals)
    if unseen or (state.can_look and not bool((drawn & state.active[:, None]).any())):
        return Proposal(tokens, confidence=_joint_confidence(proposals, takes, state))
    logits, stats = _rows(proposals, takes, state, vocab_size)
    if state.can_look and bool(drawn.all()):
        return Proposal(tokens, logits, stats)
    return Proposal(tokens, *made_certain(tokens, ~drawn, logits, stats))


def _joint_confidence(proposals: Sequence[Proposal], takes: Sequence[Tensor], state: BatchState) -> Tensor | None:
    """[B, K] from the stage that each row took; None if one of those does not say."""
    sure = torch.zeros_like(proposals[0].tokens, dtype=torch.float32)
    for proposal, taken in zip(proposals, takes, strict=True):
        own = proposal.confidence if proposal.confidence is not None else _of_drafts(proposal, state)
        if own is not None:
            sure = torch.where(taken, own, sure)
        elif not state.can_look or bool((taken & state.active[:, None]).any()):
            return None
    return sure


def _of_drafts(proposal: Proposal, state: BatchState) -> Tensor | None:
    """[B, K] q of the drafts, of greedy rows at temperature 1; None without logits and stats."""
    if proposal.logits is None or proposal.stats is None:
        return None
    temperature = state.temperature.masked_fill(state.temperature == 0, 1)[:, None]
    return probability(proposal.tokens, proposal.logits, proposal.stats, temperature)


def _rows(
    proposals: Sequence[Proposal], takes: Sequence[Tensor], state: BatchState, vocab_size: int
) -> tuple[Tensor, RowStats]:
    """The logits [B, K, V] of the stages that rows took, and their stats [B, K]; any where a stage has none."""
    found = [(p.logits, p.stats, taken) for p, taken in zip(proposals, takes, strict=True) if p.logits is not None]
    size = max(vocab_size, *(logits.shape[-1] for logits, _, _ in found))
    chosen: tuple[Tensor, RowStats] | None = None
    for logits, given, taken in found:
        stats = given or row_stats(logits, **state.sampling)
        if (missing := size - logits.shape[-1]) > 0:
            logits = pad(logits, (0, missing), value=-torch.inf)
        if chosen is not None:
            logits = torch.where(taken[..., None], logits, chosen[0])
            stats = RowStats(*(torch.where(taken, *pair) for pair in zip(stats, chosen[1], strict=True)))
        chosen = logits, stats
    assert chosen is not None
    return chosen


def made_certain(tokens: Tensor, certain: Tensor, logits: Tensor, stats: RowStats) -> tuple[Tensor, RowStats]:
    """The same rows, but where `certain` [B, K] those whose token has logit 0 and all others -inf: lse = 0, q = 1 exactly."""
    ids = tokens.clamp(min=0)
    rows = logits.masked_fill(certain[..., None], -torch.inf)  # a copy
    rows.scatter_(-1, ids[..., None], rows.gather(-1, ids[..., None]).masked_fill(certain[..., None], 0))
    return rows, RowStats(
        threshold=stats.threshold.masked_fill(certain, 0),
        lse=stats.lse.masked_fill(certain, 0),
        argmax=torch.where(certain, ids, stats.argmax),
    )
