"""Stand-ins for peers that need a GPU, by module name: their documented interface over plain torch.

With them, tests run the adapters of bench/peers.py anywhere. They say nothing about the peers' speed.
"""

from dataclasses import make_dataclass
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from bench.textbook import textbook


def module(**names: Any) -> ModuleType:
    made = ModuleType("fake")
    vars(made).update(names)
    return made


def fake_flashinfer() -> dict[str, ModuleType]:
    """The documented shapes and types of flashinfer.sampling, computed by torch."""

    def softmax(logits: torch.Tensor, temperature: float) -> torch.Tensor:
        assert logits.dim() == 2
        return torch.softmax(logits.float() / temperature, dim=-1)

    def chain(q: torch.Tensor, tokens: torch.Tensor, p: torch.Tensor, *, seed: Any, offset: Any) -> tuple[Any, ...]:
        assert tokens.dtype == torch.int32 and seed.shape == offset.shape == (1,)
        return textbook(p.log(), q.log(), tokens.long(), 1.0).int(), None, None

    return {"flashinfer.sampling": module(softmax=softmax, chain_speculative_sampling=chain)}


def fake_vllm_fused() -> dict[str, ModuleType]:
    """The shapes that `rejection_sample` and `apply_temperature` document; behind the count, tokens are garbage."""

    def scale(logits: torch.Tensor, rows: torch.Tensor, temperature: torch.Tensor) -> None:
        assert logits.dtype == torch.float32
        logits /= temperature[rows.long(), None]

    def sample(target: Any, draft: Any, sampled: Any, ends: Any, position: Any, requests: Any, expanded: Any,
               columns: Any, temperature: Any, seed: Any, num_drafts: int) -> tuple[Any, Any]:  # fmt: skip
        batch, width = len(requests), num_drafts + 1
        assert ends.tolist() == [width * row for row in range(batch + 1)]
        assert expanded.view(batch, width)[:, 0].tolist() == requests.tolist() == list(range(batch))
        assert columns.view(batch, width).tolist() == [list(range(width))] * batch
        assert (position.view(batch, width) - columns.view(batch, width) == 100).all()
        tokens = textbook(target.view(batch, width, -1), draft, sampled.view(batch, width)[:, 1:], 1.0)
        return tokens.where(tokens >= 0, 123456789), (tokens >= 0).sum(dim=1)

    spec_decode = "vllm.v1.worker.gpu.spec_decode.rejection_sampler_utils"
    return {
        spec_decode: module(rejection_sample=sample),
        "vllm.v1.worker.gpu.sample.gumbel": module(apply_temperature=scale),
    }


def fake_vllm_v1() -> dict[str, ModuleType]:
    """The fields that vLLM's first sampler reads, and how it takes its rows apart."""
    fields = (
        "draft_token_ids",
        "num_draft_tokens",
        "cu_num_draft_tokens",
        "target_logits_indices",
        "bonus_logits_indices",
    )
    sampling_fields = ("temperature", "all_greedy", "all_random", "generators", "no_penalties")

    def sample(drafts: Any, draft_probs: torch.Tensor, logits: torch.Tensor, sampling: Any) -> Any:
        batch, num_drafts = len(drafts.num_draft_tokens), drafts.num_draft_tokens[0]
        assert drafts.cu_num_draft_tokens.tolist() == [num_drafts * (row + 1) for row in range(batch)]
        target = logits[drafts.target_logits_indices].view(batch, num_drafts, -1)
        target = torch.cat([target, logits[drafts.bonus_logits_indices][:, None]], dim=1)
        target = target.float() / sampling.temperature[:, None, None]
        tokens = drafts.draft_token_ids.view(batch, num_drafts).long()
        return SimpleNamespace(
            sampled_token_ids=textbook(target, draft_probs.view(batch, num_drafts, -1).log(), tokens, 1.0)
        )

    return {
        "vllm.v1.sample.rejection_sampler": module(RejectionSampler=lambda sampler: sample, Sampler=object),
        "vllm.v1.sample.metadata": module(SamplingMetadata=make_dataclass("SamplingMetadata", sampling_fields)),
        "vllm.v1.spec_decode.metadata": module(SpecDecodeMetadata=make_dataclass("SpecDecodeMetadata", fields)),
        "vllm.v1.sample.logits_processor": module(LogitsProcessors=object),
    }
