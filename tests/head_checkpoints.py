"""Small checkpoints of learned drafters, name by name and shape by shape, and drafts that are computed without a cache."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from sampled_laws import p_value
from tiny_models import VOCAB, greedy, random_prompts
from transformers import (
    PreTrainedModel,
)

import engine

HIDDEN = 32
LAW_VOCAB = 6
LAW_PROMPTS = ([3, 5, 1, 3, 4], [4, 1, 4])


def random_tensors(shapes: dict[str, tuple[int, ...]], seed: int = 0) -> dict[str, torch.Tensor]:
    """Float32 tensors, spread wide enough for sharp distributions."""
    generator = torch.Generator().manual_seed(seed)
    return {name: 0.35 * torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def write(folder: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor], file_name: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if file_name.endswith(".safetensors"):
        save_file(tensors, folder / file_name)
    else:
        torch.save(tensors, folder / file_name)
    return folder


def medusa_shapes(num_heads: int = 3, num_blocks: int = 1, vocab: int = VOCAB) -> dict[str, tuple[int, ...]]:
    """The Medusa repository's layout."""
    shapes: dict[str, tuple[int, ...]] = {}
    for head in range(num_heads):
        for block in range(num_blocks):
            shapes[f"{head}.{block}.linear.weight"] = (HIDDEN, HIDDEN)
            shapes[f"{head}.{block}.linear.bias"] = (HIDDEN,)
        shapes[f"{head}.{num_blocks}.weight"] = (vocab, HIDDEN)
    return shapes


def mlp_shapes(num_steps: int = 3, inner: int = 24, tied: bool = False) -> dict[str, tuple[int, ...]]:
    """The layout of MLPSpeculatorPreTrainedModel."""
    shapes: dict[str, tuple[int, ...]] = {}
    for step in range(num_steps):
        if step < 2 or not tied:
            shapes[f"speculator.proj.{step}.weight"] = (inner, inner if step else HIDDEN)
        if step < 1 or not tied:
            shapes[f"speculator.emb.{step}.weight"] = (VOCAB, inner)
            shapes[f"speculator.head.{step}.weight"] = (VOCAB, inner)
            shapes[f"speculator.ln.{step}.weight"] = shapes[f"speculator.ln.{step}.bias"] = (inner,)
    return shapes


def mlp_config(num_steps: int = 3, inner: int = 24, **more: Any) -> dict[str, Any]:
    return dict(
        model_type="mlp_speculator", architectures=["MLPSpeculatorPreTrainedModel"], emb_dim=HIDDEN, inner_dim=inner,
        n_predict=num_steps, vocab_size=VOCAB, top_k_tokens_per_head=[5, 4, 3][:num_steps], n_candidates=5,
    ) | more  # fmt: skip


def last_hidden(target: PreTrainedModel, text: list[int]) -> torch.Tensor:
    """[H], what the head reads at the position before the text's last."""
    with torch.no_grad():
        return target.base_model(input_ids=torch.tensor([text[:-1]])).last_hidden_state[0, -1]


def greedy_texts(target: PreTrainedModel, prompts: list[list[int]]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Greedy continuations: token ids [n], and at each position what the head reads [n, H]."""
    texts = [torch.tensor([prompt + greedy(target, prompt, 20)]) for prompt in prompts]
    with torch.no_grad():
        return [(text[0], target.base_model(input_ids=text).last_hidden_state[0]) for text in texts]


def fitted(features: torch.Tensor, tokens: torch.Tensor, vocab_size: int = VOCAB) -> torch.Tensor:
    """[V, F], an output matrix that mostly says tokens [n] for features [n, F]."""
    wanted = torch.nn.functional.one_hot(tokens, vocab_size).to(features)
    gram = features.T @ features + 1e-3 * torch.eye(features.shape[1]).to(features)
    return 10 * torch.linalg.solve(gram, features.T @ wanted).T.contiguous()


def check_greedy_drafts(
    target: PreTrainedModel, drafter: engine.Drafter, expected: Callable[[list[int]], list[int]], most: int
) -> None:
    """In a run over ragged rows, every draft is the one expected for the row's text."""
    seen = 0
    propose = drafter.propose

    def watched(state: engine.BatchState, num_draft_tokens: int) -> engine.Proposal:
        nonlocal seen
        proposal = propose(state, num_draft_tokens)
        assert proposal.logits is None
        assert proposal.tokens.shape[1] in (0, min(num_draft_tokens, most))
        for row in state.active.nonzero()[:, 0].tolist():
            text = state.tokens[row, : int(state.seq_lens[row]) + 1].tolist()
            drafts = proposal.tokens[row].tolist()
            if len(text) == 1:
                assert set(drafts) <= {-1}
            else:
                assert drafts == expected(text)[: len(drafts)]
                seen += len(drafts)
        return proposal

    drafter.propose = watched  # type: ignore[method-assign]
    llm = engine.load(target, drafter=drafter, num_draft_tokens=4, max_batch_size=3)
    params = [engine.SamplingParams(max_new_tokens=4 + i % 5) for i in range(7)]
    outputs = llm.generate(random_prompts(7, seed=3), params)
    assert [len(output.token_ids) for output in outputs] == [p.max_new_tokens for p in params]
    assert seen > 30


def check_coupled_text(target: PreTrainedModel, drafter: engine.Drafter) -> None:
    """Sampled with the same seeds, it is that of plain decoding, though some drafts stand and some do not."""
    prompts = random_prompts(6)
    params = [engine.SamplingParams(temperature=0.4 * i, top_p=0.95, seed=i, max_new_tokens=18) for i in range(6)]
    texts = []
    for which in (None, drafter):
        llm = engine.load(target, which, 3, verification="coupled", max_batch_size=4)
        texts.append([output.token_ids for output in llm.generate(prompts, params)])
    assert texts[0] == texts[1]
    assert 0 < llm.stats.accepted_tokens < llm.stats.draft_tokens


# (verification, sampling, options of the drafter, samples): each rule whose text depends on drafts, the whole product under -m slow.
LAW_CASES: list[Any] = [
    ("rejection", dict(temperature=1.0), {}, 8_000),
    ("block", dict(temperature=0.7, top_k=5, top_p=0.9), {}, 8_000),
    ("rejection", dict(temperature=1.0), {"greedy": True}, 8_000),
    ("rejection", dict(temperature=1.0, repetition_penalty=1.5), {}, 8_000),
    *(
        pytest.param(verification, setting, options, 200_000, marks=pytest.mark.slow)
        for verification in ("rejection", "block", "coupled")
        for setting in (dict(temperature=1.0), dict(temperature=0.7, top_k=5, top_p=0.9))
        for options in ({}, {"greedy": True})
    ),
]


def lying(drafter: engine.Drafter) -> engine.Drafter:
    """The drafter, which from now on says of its second draft's distribution what is not so."""
    propose = drafter.propose

    def lie(state: engine.BatchState, num_draft_tokens: int) -> engine.Proposal:
        proposal = propose(state, num_draft_tokens)
        assert proposal.logits is not None
        logits = proposal.logits.clone()
        logits[:, 1:] *= 0.3
        return proposal._replace(logits=logits, stats=None)

    drafter.propose = lie  # type: ignore[method-assign]
    return drafter


def check_law(
    target: PreTrainedModel, drafter: engine.Drafter, verification: str, setting: dict[str, Any], count: int
) -> float:
    """Smaller p-value of two prompts' sampled continuations of three tokens, for which a first round drafts two."""
    llm = engine.load(target, drafter, num_draft_tokens=2, max_batch_size=4096, verification=verification)
    found = p_value(llm, target, setting, count, LAW_PROMPTS, length=3)
    first, second = llm.stats.acceptance_per_position
    assert 0.05 < first < 0.97 and 0.02 < second < 0.97, "neither acceptance nor rejection is tested"
    return found
