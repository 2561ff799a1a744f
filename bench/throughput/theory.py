"""What theory expects of speculative decoding (Leviathan et al., arXiv 2211.17192).

Its assumption: every drafted token is accepted with one probability, the acceptance, whatever was accepted before.
"""

from collections.abc import Mapping

from engine.metrics import expected_tokens


def expected_acceptance(acceptance: float, num_draft_tokens: int) -> float:
    """Accepted / proposed tokens of rounds that all propose K >= 1: drafts behind a rejected one are lost."""
    return (expected_tokens(acceptance, num_draft_tokens) - 1) / num_draft_tokens


def fitted_acceptance(tokens_per_round: Mapping[int, float]) -> float:
    """The acceptance with which the expected tokens come closest, in squares, to those measured at several K.

    Args:
        tokens_per_round: by K; at least one K >= 1.

    Raises:
        ValueError: without such a K.
    """
    measured = {k: tokens for k, tokens in tokens_per_round.items() if k >= 1}
    if not measured:
        raise ValueError(f"tokens_per_round must have a K >= 1, got {sorted(tokens_per_round)}")

    def error(acceptance: float) -> float:
        return sum((expected_tokens(acceptance, k) - tokens) ** 2 for k, tokens in measured.items())

    # Each term is smooth and grows with the acceptance: a coarse grid and a fine one around its best point will do.
    coarse = min((i / 100 for i in range(101)), key=error)
    return min((min(1.0, max(0.0, coarse + i / 10_000)) for i in range(-100, 101)), key=error)
