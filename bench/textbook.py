"""Rejection verification in plain torch, as anybody would write it down first: a baseline."""

import torch
from torch import Tensor


def textbook(
    target_logits: Tensor,  # [B, K+1, V]
    draft_logits: Tensor,  # [B, K, V]
    draft_tokens: Tensor,  # [B, K] int64
    temperature: float,
) -> Tensor:
    """Two softmaxes, the ratio test, the residual, one draw per row: tokens [B, K+1], -1 behind the next token."""
    num_drafts = draft_tokens.shape[1]
    p = torch.softmax(target_logits.float() / temperature, dim=-1)
    q = torch.softmax(draft_logits.float() / temperature, dim=-1)
    p_x = p[:, :-1].gather(-1, draft_tokens[..., None]).squeeze(-1)
    q_x = q.gather(-1, draft_tokens[..., None]).squeeze(-1)
    accepted = (torch.rand_like(p_x) * q_x < p_x).long().cumprod(dim=1).sum(dim=1)
    rows = torch.arange(len(accepted), device=accepted.device)
    q_row = q[rows, accepted.clamp(max=num_drafts - 1)] * (accepted < num_drafts)[:, None]
    next_token = torch.multinomial((p[rows, accepted] - q_row).clamp(min=0), num_samples=1)
    column = torch.arange(num_drafts + 1, device=accepted.device)
    tokens = torch.cat([draft_tokens, next_token], dim=1).masked_fill(column >= accepted[:, None], -1)
    return tokens.scatter(1, accepted[:, None], next_token)
