"""What is not finite stays where it is: a token whose K/V is NaN, in a prompt or drafted, harms no other text and no later one."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from sampled_laws import RULES
from tiny_models import VOCAB, tiny
from transformers import PreTrainedModel

import engine
from engine.backend import Verdict
from engine.drafters.eagle_model import EagleModel
from engine.drafters.medusa_model import MedusaHeads
from engine.drafters.staged import StagedDraftModel
from engine.model import RaggedModel
from engine.training.eagle3 import head_config

BAD = VOCAB - 1
GOOD = [5, 6, 7, 5, 6]


def spoiled(num_layers: int = 2) -> PreTrainedModel:
    """Of which one token's embedding is NaN. It is never drawn by greedy decoding."""
    model = tiny("llama", dtype=torch.float32, max_position_embeddings=256, num_hidden_layers=num_layers)
    with torch.no_grad():
        model.get_input_embeddings().weight[BAD] = torch.nan
        model.lm_head.weight[BAD] = 0
    return model


def eagle(target: PreTrainedModel) -> engine.EagleDrafter:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = EagleModel(head_config(target.config, 3, VOCAB))
    with torch.no_grad():
        model.lm_head.weight[BAD] = 0
    return engine.EagleDrafter(model, (0, 1, 2), min_reach=0.0)


DRAFTERS: dict[str, Callable[[PreTrainedModel], Any]] = {
    "none": lambda target: None,
    "ngram": lambda target: "ngram",
    "draft model": lambda target: spoiled(1),
    "staged": lambda target: StagedDraftModel(spoiled(1)),
    "layers": lambda target: "layer_skip:1",
    "medusa": lambda target: engine.MedusaDrafter(MedusaHeads(32, None, 3, output="target")),
    "eagle": eagle,
}


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("kind", DRAFTERS)
def test_a_slot_is_as_good_as_new_after_a_prompt_that_failed(kind: str, exact: bool) -> None:
    target = spoiled()
    engines = [engine.load(target, DRAFTERS[kind](target), 3, max_batch_size=1, exact=exact) for _ in range(2)]
    prompts, params = [GOOD, GOOD * 10, GOOD], engine.SamplingParams(max_new_tokens=30)
    with pytest.raises(engine.InvalidLogitsError, match="NAN_TARGET"):
        engines[0].generate([BAD, *GOOD * 8], params)
    after, clean = (llm.generate(prompts, params) for llm in engines)
    for one, other in zip(after, clean, strict=True):
        assert one.token_ids == other.token_ids
        assert one.stats.draft_tokens == other.stats.draft_tokens
        assert one.stats.accepted_tokens == other.stats.accepted_tokens
    assert kind == "none" or clean[2].stats.draft_tokens > 0


def test_a_draft_model_drafts_again_behind_a_prompt_that_only_it_cannot_read() -> None:
    target = spoiled()
    with torch.no_grad():
        target.get_input_embeddings().weight[BAD] = 0
    used, fresh = (engine.load(target, spoiled(), 3, max_batch_size=1) for _ in range(2))
    params = engine.SamplingParams(max_new_tokens=20)
    assert used.generate([BAD, *GOOD * 8], params).stats.draft_tokens == 0
    counts = [llm.generate(GOOD, params).stats.accepted_tokens for llm in (used, fresh)]
    assert counts[0] == counts[1] > 0


class Spoiling:
    """Drafts the target's own text, and from the 20th token of a row on sometimes one that the target cannot read."""

    def __init__(self, texts: dict[int, list[int]]) -> None:
        self.texts = texts  # by first token

    def prefill(self, state: engine.BatchState) -> None:
        pass

    def propose(self, state: engine.BatchState, num_draft_tokens: int) -> engine.Proposal:
        rows = []
        for row, position in zip(state.tokens.tolist(), state.position.tolist(), strict=True):
            drafts = self.texts[row[0]][position : position + num_draft_tokens]
            if position > 20 and len(drafts) > 1:
                drafts[1] = BAD
            rows.append(drafts + [-1] * (num_draft_tokens - len(drafts)))
        return engine.Proposal(torch.tensor(rows))

    def observe(self, state: engine.BatchState, verdict: Verdict) -> None:
        pass


def test_a_prompt_is_not_read_where_an_interrupted_one_left_nan() -> None:
    llm = engine.load(spoiled(), None, max_batch_size=1)
    params = engine.SamplingParams(max_new_tokens=8)
    expected = llm.generate(GOOD, params).token_ids

    def interrupt(*_: Any) -> None:
        hook.remove()
        raise KeyboardInterrupt

    hook = llm.target_model.lm_head.register_forward_pre_hook(interrupt)  # in the round behind the prompt
    with pytest.raises(KeyboardInterrupt):
        llm.generate([BAD, *GOOD * 8], params)
    assert llm.generate(GOOD, params).token_ids == expected


def test_a_prompt_is_not_read_where_a_half_read_one_left_nan() -> None:
    llm = engine.load(spoiled(), None, max_batch_size=1)
    params = engine.SamplingParams(max_new_tokens=8)
    expected = llm.generate(GOOD, params).token_ids
    prefill = llm._target.prefill

    def interrupted(*arguments: Any) -> None:
        prefill(*arguments)
        raise KeyboardInterrupt

    llm._target.prefill = interrupted  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        llm.generate([BAD, *GOOD * 8], params)
    llm._target.prefill = prefill  # type: ignore[method-assign]
    assert llm.generate(GOOD, params).token_ids == expected


def test_an_interrupted_clearing_is_made_up_for() -> None:
    class Interrupted:
        def __setitem__(self, *_: object) -> None:
            raise KeyboardInterrupt

    llm = engine.load(spoiled(), None, max_batch_size=1)
    llm.generate(GOOD, engine.SamplingParams(max_new_tokens=4))
    cache, layer = llm._target.cache, llm._target.cache.ragged_layers[0]
    values, layer.values = layer.values, Interrupted()  # type: ignore[assignment]
    with pytest.raises(KeyboardInterrupt):
        cache.begin_rows(slice(0, 1))
    layer.values = values
    assert values[..., :-1, :].any()  # all but the trash position
    cache.begin_rows(slice(0, 1))
    assert not values[..., :-1, :].any()


def test_what_an_earlier_call_wrote_farther_behind_is_cleared() -> None:
    """As drafts do, which the next rounds are without."""
    ragged = RaggedModel(tiny("llama"), 1)
    ragged.cache.reserve(256)
    tokens, one = torch.tensor([[5, 6, 7]]), torch.ones(1, dtype=torch.int64)
    for start in (126, 10):
        ragged.call(tokens, start * one, 3 * one, slice(0, 1), start + 3)
    keys = ragged.cache.ragged_layers[0].keys
    assert keys[:, :, 126:129].any()
    ragged.cache.begin_rows(slice(0, 1))
    assert not keys[:, :, :-1].any()


def test_the_targets_own_layers_draft_what_it_cannot_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """They write the drafts' K/V into the target's cache, and no longer where drafts do not count."""
    target = spoiled()
    params = engine.SamplingParams(max_new_tokens=30)
    plain = engine.load(target, None).generate(GOOD, params).token_ids
    drafter = engine.LayerSkipDrafter(1, greedy=True)
    llm = engine.load(target, drafter, 3)
    propose = drafter.propose

    def misled(state: engine.BatchState, num_draft_tokens: int) -> engine.Proposal:
        bad = torch.tensor(BAD)
        hook = target.lm_head.register_forward_hook(lambda module, inputs, output: output.index_fill(-1, bad, 99))
        try:
            return propose(state, num_draft_tokens)
        finally:
            hook.remove()

    monkeypatch.setattr(drafter, "propose", misled)
    output = llm.generate(GOOD, params)
    assert output.token_ids == plain and output.stats.draft_tokens > 0


@pytest.mark.parametrize("ends", [False, True])
def test_a_draft_that_another_call_reads(ends: bool) -> None:
    """More than 7 drafts take several calls when exact: the first ones do not notice what the last one reads. It is the row's next
    round that does, or the next text in its slot."""
    plain = engine.load(spoiled(), None, exact=True, max_batch_size=1)
    params, other = engine.SamplingParams(max_new_tokens=24), [4, *GOOD]
    text = GOOD + plain.generate(GOOD, params).token_ids
    drafts = text[6:15]
    drafts[2] = text[8] - 1 if text[8] else 1  # which is rejected
    llm = engine.load(spoiled(), Planned({6: [*drafts, BAD]}), 12, exact=True, max_batch_size=1)
    until = engine.SamplingParams(max_new_tokens=24, stop_token_ids=[text[8]]) if ends else params
    output = llm.generate(GOOD, until)
    assert output.stats.draft_tokens == 10 and output.token_ids == text[5 : 9 if ends else None]
    assert llm.generate(other, params).token_ids == plain.generate(other, params).token_ids


class Planned:
    """Drafts what a plan says, by the position that the first draft is for."""

    def __init__(self, plan: dict[int, list[int]]) -> None:
        self.plan = plan

    def prefill(self, state: engine.BatchState) -> None:
        pass

    def propose(self, state: engine.BatchState, num_draft_tokens: int) -> engine.Proposal:
        rows = [self.plan.get(position, []) for position in state.position.tolist()]
        return engine.Proposal(torch.tensor([(row + [-1] * num_draft_tokens)[:num_draft_tokens] for row in rows]))

    def observe(self, state: engine.BatchState, verdict: Verdict) -> None:
        pass


def read_late(llm: engine.Engine) -> engine.Engine:
    """As on a GPU: a round's result, when the next one is under way."""
    llm._server._late = True
    return llm


def test_a_round_under_way_reads_what_a_draft_left() -> None:
    """One without drafts of its own, behind one whose draft was bad."""
    params = engine.SamplingParams(max_new_tokens=24)
    plain = engine.load(spoiled(), None, max_batch_size=1).generate(GOOD, params).token_ids
    text = GOOD + plain
    plan = {at: [text[at], BAD] for at in (8, 15)} | {at: [BAD] for at in (20, 25)}
    llm = read_late(engine.load(spoiled(), Planned(plan), 3, max_batch_size=1))
    output = llm.generate(GOOD, params)
    assert output.token_ids == plain and output.stats.draft_tokens > 0


def test_a_round_under_way_leaves_a_slot_that_is_made_clean() -> None:
    """A row ends, and the next round, whose result nobody reads, has written a bad draft behind it."""
    params = engine.SamplingParams(max_new_tokens=24)
    llm = engine.load(spoiled(), None, max_batch_size=1)
    text = GOOD + llm.generate(GOOD, params).token_ids
    end = next(at for at in range(len(GOOD) + 4, len(text)) if text[at] not in text[:at])
    both = [engine.SamplingParams(max_new_tokens=24, stop_token_ids=[text[end]]), params]
    expected = [output.token_ids for output in llm.generate([GOOD, [9, 8]], both)]
    llm = read_late(engine.load(spoiled(), Planned({end + 1: [text[end + 1], BAD]}), 3, max_batch_size=1))
    assert [output.token_ids for output in llm.generate([GOOD, [9, 8]], both)] == expected


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("rule", RULES)
def test_a_draft_that_cannot_be_read_costs_drafts_and_no_text(rule: str, exact: bool) -> None:
    target = spoiled()
    prompts = [GOOD, [9, *GOOD], [4, 3]]
    params = [engine.SamplingParams(max_new_tokens=count) for count in (40, 30, 50)]
    plain = engine.load(target, None, exact=exact).generate(prompts, params)
    texts = {prompt[0]: prompt + output.token_ids for prompt, output in zip(prompts, plain, strict=True)}
    llm = engine.load(target, Spoiling(texts), 4, verification=rule, exact=exact)
    outputs = llm.generate(prompts, params)
    assert [output.token_ids for output in outputs] == [output.token_ids for output in plain]
    assert 0 < llm.stats.accepted_tokens < llm.stats.draft_tokens
    again = llm.generate(prompts, params)  # drafts count again
    assert [output.stats.draft_tokens for output in again] == [output.stats.draft_tokens for output in outputs]


def test_the_error_of_a_prompt_is_handed_over_when_it_has_failed() -> None:
    llm, taken = engine.load(spoiled(), None, max_batch_size=2), []
    with pytest.raises(engine.InvalidLogitsError) as caught:
        params = engine.SamplingParams(max_new_tokens=4)
        llm.generate([GOOD, [BAD], [BAD]], params, on_output=lambda *each: taken.append(each))
    assert [(index, type(result)) for index, result in taken] == [
        (1, engine.InvalidLogitsError),
        (2, engine.InvalidLogitsError),
        (0, engine.Output),
    ]
    assert [str(result) for _, result in taken[:2]] == list(caught.value.errors.values())
