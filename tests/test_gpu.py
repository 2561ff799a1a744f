"""What only an accelerator can show of the engine: `pytest -m gpu`."""

import pytest
import torch
from tiny_models import perturbed, random_prompts, tiny
from transformers import PreTrainedModel

import engine
from engine.model import EXACT_KV_GRANULARITY, RaggedModel

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def target() -> PreTrainedModel:
    return tiny("llama", dtype=torch.bfloat16, max_position_embeddings=4096).to("cuda")


@pytest.mark.parametrize("drafter", ["ngram", "model"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_same_text_with_and_without_speculation(target: PreTrainedModel, drafter: str, temperature: float) -> None:
    prompts = [*random_prompts(7, seed=1), [5, 6, 7, 8] * 200]
    params = engine.SamplingParams(temperature=temperature, seed=1, max_new_tokens=48)
    draft = perturbed(target, 0.05) if drafter == "model" else drafter
    plain = engine.load(target, drafter=None)
    assert plain.exact
    llm = engine.load(target, drafter=draft)
    outputs = llm.generate(prompts, params)
    assert llm.stats.accepted_tokens > 0
    assert all(output.stats.new_tokens == 48 for output in outputs)
    if temperature == 0:  # a sampled draft that was accepted is another token than plain sampling drew
        assert [o.token_ids for o in outputs] == [o.token_ids for o in plain.generate(prompts, params)]


def test_masked_keys_do_not_change_a_bit(target: PreTrainedModel) -> None:
    """What `exact` rests on: the buffer's unused blocks, the slot and the neighbours leave no trace in the logits."""
    text = torch.randint(0, 64, (1, 300), generator=torch.Generator().manual_seed(0)).to("cuda")

    def logits(slot: int, kv_length: int) -> torch.Tensor:
        ragged = RaggedModel(target, num_slots=4, exact=True)
        ragged.cache.reserve(4096)
        start = torch.zeros(4, dtype=torch.int64, device="cuda")
        start[slot] = 290
        ragged.prefill(text, [(0, 290)], slice(slot, slot + 1))
        tokens = torch.zeros(4, 8, dtype=torch.int64, device="cuda")
        tokens[slot] = text[0, 290:298]
        valid = torch.zeros_like(start)
        valid[slot] = 8
        return ragged.decode(tokens, start, valid, slice(0, 4), kv_length)[slot]

    alone = logits(0, EXACT_KV_GRANULARITY)
    for slot, blocks in [(3, 1), (0, 2), (1, 8)]:
        assert torch.equal(alone, logits(slot, blocks * EXACT_KV_GRANULARITY)), (slot, blocks)
