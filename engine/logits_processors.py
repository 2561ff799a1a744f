"""What users do to the target's logits: a processor of `transformers`, or any function like one, for each request."""

import torch
from torch import Tensor

from .state import BatchState


def process_logits(logits: Tensor, state: BatchState, drafts: Tensor) -> Tensor:
    """Every row that a round may decide by, given to its request's processor with the text before it.

    On the host, row by row; where the state is on a GPU, this waits for it. A processor never sees a text with a token that it has
    ruled out itself, by -inf.

    Args:
        logits: [B, K+1, V] floating; in float32 and float64 they are changed in place.
        drafts: [B, K] int64, -1 = none.

    Returns:
        [B, K+1, V] float32 or float64.

    Raises:
        ValueError: if a processor returns anything but a tensor [1, V].
    """
    if logits.dtype != torch.float64:
        logits = logits.float()
    lengths, active, drafted = (state.seq_lens + 1).tolist(), state.active.tolist(), drafts.tolist()
    for row, processor in state.processors:
        if not active[row]:  # ended, which had not been read when this round began
            continue
        count = next((i for i, token in enumerate(drafted[row]) if token < 0), len(drafted[row]))
        text = torch.cat([state.tokens[row, : lengths[row]], drafts[row, :count]])[None]
        for column in range(count + 1):
            # The processor's own copies: what it changes in place must not be the text.
            scores = processor(text[:, : lengths[row] + column].clone(), logits[row, column][None].clone())
            if not isinstance(scores, Tensor) or scores.shape != (1, logits.shape[2]):
                got = f"shape {list(scores.shape)}" if isinstance(scores, Tensor) else type(scores).__name__
                raise ValueError(
                    f"logits_processor must return a tensor of shape [1, V] = [1, {logits.shape[2]}], got {got}"
                )
            logits[row, column] = scores[0]
            if column < count and scores[0, drafted[row][column]] == -torch.inf:
                break  # no rule lets this draft stand, and a processor need not know what to do behind it
    return logits
