"""The target's hidden states, kept for drafters."""

import torch
from tiny_models import random_prompts, tiny

import engine
from engine.cache import RaggedCache
from engine.drafters.cascade import CascadeDrafter
from engine.drafters.medusa_model import MedusaHeads
from engine.hidden_states import HiddenStates


def read(cache: RaggedCache, hidden: HiddenStates, start: int, states: torch.Tensor) -> None:
    """Tokens of slot 0 from `start` on, with these states [W, H] of layers 0 and 1."""
    column = torch.arange(len(states))[None]
    cache.plan_call(slice(0, 1), start + column, column >= 0, torch.tensor([len(states)]), start + len(states))
    hidden.write([states[None], 2 * states[None]])


def test_they_stay_when_there_is_more_room() -> None:
    cache = RaggedCache(1, 2, 8)
    hidden = HiddenStates((1, 0), cache)
    states = torch.randn(12, 4)
    for start, stop, length in ((0, 5, 8), (5, 7, 8), (7, 12, 32)):
        cache.reserve(length)
        read(cache, hidden, start, states[start:stop])
    found = hidden.gather(slice(0, 1), torch.arange(12)[None])[0]
    assert torch.equal(found, torch.cat([2 * states, states], dim=1)) and hidden.states.shape == (2, 33, 8)


def test_a_call_that_only_drafts_leaves_them_alone() -> None:
    target = tiny("llama")
    skipping = engine.LayerSkipDrafter(exit_layer=1)
    heads = engine.MedusaDrafter(MedusaHeads(32, None, 3, output="target"))
    llm = engine.load(target, CascadeDrafter(skipping, heads), num_draft_tokens=3)
    propose, changed = skipping.propose, []

    def watched(state: engine.BatchState, num_draft_tokens: int) -> engine.Proposal:
        (kept,) = llm._target._hidden
        before = kept.states.clone()
        proposal = propose(state, num_draft_tokens)
        changed.append(not torch.equal(before, kept.states))
        return proposal

    skipping.propose = watched  # type: ignore[method-assign]
    llm.generate(random_prompts(3), engine.SamplingParams(max_new_tokens=10))
    assert len(changed) > 5 and not any(changed)
