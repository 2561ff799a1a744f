"""Microbenchmarks of verification: `pytest bench --benchmark-only`.

Each result is asserted to be valid before it is timed. On CPU the torch backend is timed.
"""

from typing import Any

import pytest
import torch

from engine.kernels.ops import sample, verify
from engine.kernels.philox import DRAFT

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NUM_DRAFTS = 4


def case(batch: int, vocab_size: int) -> dict[str, Any]:
    """Arguments of `verify`, with drafts drawn from a disturbed target."""
    generator = torch.Generator(DEVICE).manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=DEVICE)

    target = 2 * normal(batch, NUM_DRAFTS + 1, vocab_size)
    draft = (target[:, :-1] + normal(batch, NUM_DRAFTS, vocab_size)).bfloat16()
    rows = dict(
        temperature=torch.full((batch,), 0.7, device=DEVICE),
        seed=torch.arange(batch, device=DEVICE),
        position=torch.full((batch,), 100, device=DEVICE),
    )
    draws = sample(draft, **rows, origin=rows["position"], stream=DRAFT)
    return dict(
        target_logits=target.bfloat16(), draft_tokens=draws.tokens, draft_logits=draft, draft_stats=draws.stats, **rows
    )


@pytest.mark.parametrize("vocab_size", [49152, 151936])
@pytest.mark.parametrize("batch", [1, 8])
@pytest.mark.parametrize("draft", ["one-hot", "full", "greedy"])
def test_verify(benchmark: Any, draft: str, batch: int, vocab_size: int) -> None:
    arguments = case(batch, vocab_size)
    if draft != "full":
        arguments |= dict(draft_logits=None, draft_stats=None)
    if draft == "greedy":
        arguments["temperature"] = torch.zeros_like(arguments["temperature"])

    def run() -> Any:
        verdict = verify(**arguments)
        if DEVICE == "cuda":
            torch.cuda.synchronize()
        return verdict

    verdict = run()
    last = verdict.num_accepted.long()[:, None]
    assert not verdict.status.any()
    assert ((verdict.tokens.gather(1, last) >= 0) & (verdict.tokens.gather(1, last) < vocab_size)).all()
    assert ((verdict.tokens >= 0).sum(1, keepdim=True) == last + 1).all()
    benchmark.extra_info.update(device=DEVICE, torch=torch.__version__, num_draft_tokens=NUM_DRAFTS)
    benchmark(run)
