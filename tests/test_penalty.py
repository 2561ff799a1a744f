"""The repetition penalty: the logits of transformers' own processor, row by row, and its texts, with drafts and without."""

import copy
from functools import partial
from typing import Any

import pytest
import torch
from sampled_laws import RULES, SETTINGS, SOME, every_rule, flat_target, p_value
from tiny_models import greedy, perturbed, random_prompts, tiny
from tiny_tokenizer import VOCAB, byte_tokenizer
from torch.nn.functional import pad
from transformers import PreTrainedModel, RepetitionPenaltyLogitsProcessor

import engine
from engine import round as round_
from engine.drafters.draft_vocabulary import DraftVocabulary
from engine.drafters.intersection import IntersectionDraftModel
from engine.drafters.staged import StagedDraftModel
from engine.penalty import penalise_drafter, penalise_repetition
from engine.state import BatchState

PENALTIES = [1.0, 1.25, 0.5]  # as float32 has them
LENGTHS = [4, 1, 9]  # of the texts
DRAFTS = torch.tensor([[3, 3, 7], [5, -1, -1], [-1, -1, -1]])


@pytest.fixture(scope="module")
def target() -> PreTrainedModel:
    """Of a checkpoint that asks for a penalty."""
    model = copy.deepcopy(tiny("llama", vocab_size=VOCAB))
    model.generation_config.repetition_penalty = 1.3
    return model


@pytest.fixture
def state() -> BatchState:
    whole = BatchState.allocate(3, 12, torch.device("cpu"))
    whole.tokens.copy_(torch.randint(0, 20, whole.tokens.shape, generator=torch.Generator().manual_seed(0)))
    whole.seq_lens.copy_(torch.tensor(LENGTHS) - 1)
    whole.repetition_penalty.copy_(torch.tensor(PENALTIES))
    return whole.select(slice(0, 3), max_text_length=10, penalised=True)  # no text is as long


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_every_row_sees_its_own_text(state: BatchState, dtype: torch.dtype) -> None:
    logits = torch.randn(3, 4, 20, generator=torch.Generator().manual_seed(1)).to(dtype)
    logits[1, 0, :3] = torch.tensor([float("-inf"), 0.0, float("nan")])
    actual = penalise_repetition(logits.clone(), state, DRAFTS)
    assert actual.dtype == torch.promote_types(dtype, torch.float32)
    for row, (penalty, length) in enumerate(zip(PENALTIES, LENGTHS, strict=True)):
        processor = RepetitionPenaltyLogitsProcessor(penalty)
        for column in range(4):
            drafted = DRAFTS[row, :column]
            text = torch.cat([state.tokens[row, :length], drafted[drafted >= 0]])
            expected = processor(text[None], logits[row, column][None].to(actual.dtype))[0]
            assert torch.equal(actual[row, column].nan_to_num(99), expected.nan_to_num(99))


@pytest.mark.parametrize("width", [1, 2, 5])
def test_the_last_row_is_behind_all_drafts(state: BatchState, width: int) -> None:
    logits = torch.randn(3, 5, 20)
    whole = penalise_repetition(logits.clone(), state, pad(DRAFTS, (1, 0), value=2))
    assert torch.equal(
        penalise_drafter(logits[:, 5 - width :], state, [DRAFTS[:, :0], pad(DRAFTS, (1, 0), value=2)]),
        whole[:, 5 - width :],
    )


def test_no_drafts(state: BatchState) -> None:
    logits = torch.randn(3, 1, 20)
    before = logits.clone()
    actual = penalise_repetition(logits, state, DRAFTS[:, :0])
    assert torch.equal(actual[0], before[0]) and not torch.equal(actual[1:], before[1:])


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("drafter", [None, "ngram", "suffix", "model"])
def test_greedy_text_is_that_of_transformers(target: PreTrainedModel, drafter: str | None, exact: bool) -> None:
    prompts = random_prompts(5, seed=3, vocab_size=VOCAB)
    params = engine.SamplingParams(max_new_tokens=24)
    expected = [greedy(target, prompt, 24) for prompt in prompts]
    llm = engine.load(
        target, drafter=perturbed(target, 0.05) if drafter == "model" else drafter, exact=exact, max_batch_size=3
    )
    assert [output.token_ids for output in llm.generate(prompts, params)] == expected
    assert drafter != "model" or llm.stats.accepted_tokens > 0
    off = llm.generate(prompts, engine.SamplingParams(max_new_tokens=24, repetition_penalty=1))
    assert [output.token_ids for output in off] != expected


def test_tokens_that_the_host_has_not_read_yet_have_it_too() -> None:
    """Results are read a round late where the device runs apart from the host."""
    target, prompts = tiny("llama", max_position_embeddings=128), random_prompts(5)
    target.generation_config.repetition_penalty = 1.5
    llm = engine.load(target, drafter=perturbed(target, 0.02), num_draft_tokens=4, max_batch_size=2)
    llm._server._late = True
    outputs = llm.generate(prompts, engine.SamplingParams(max_new_tokens=40))
    assert [output.token_ids for output in outputs] == [greedy(target, prompt, 40) for prompt in prompts]
    assert llm.stats.accepted_tokens > 20


@pytest.mark.parametrize("filters", [{}, dict(top_k=20, top_p=0.9)])
def test_sampled_text_is_the_same_with_drafts_under_coupled(target: PreTrainedModel, filters: dict) -> None:
    prompts = random_prompts(4, seed=4, vocab_size=VOCAB)
    params = [  # neighbours without a penalty, and with another
        engine.SamplingParams(temperature=0.8, seed=i, max_new_tokens=20, repetition_penalty=penalty, **filters)
        for i, penalty in enumerate([None, 1, 1.8, None])
    ]
    plain = engine.load(target, drafter=None, verification="coupled").generate(prompts, params)
    llm = engine.load(target, drafter=perturbed(target, 0.05), verification="coupled")
    assert [o.token_ids for o in llm.generate(prompts, params)] == [o.token_ids for o in plain]
    alone = [llm.generate(prompt, param) for prompt, param in zip(prompts, params, strict=True)]
    assert [o.token_ids for o in alone] == [o.token_ids for o in plain]


@pytest.mark.parametrize("rule", [None, *RULES])  # None: greedy
@pytest.mark.parametrize("kind", ["model", "staged", "layer_skip:2", "other vocabulary", "smaller vocabulary"])
def test_drafts_have_the_penalty_too(kind: str, rule: str | None) -> None:
    """A drafter that is the target itself is always right."""
    target = tiny("llama", dtype=torch.float32, vocab_size=VOCAB, num_hidden_layers=2)
    drafter: Any = copy.deepcopy(target)
    if kind == "staged":
        drafter = StagedDraftModel(drafter)
    elif kind == "other vocabulary":
        drafter = IntersectionDraftModel(drafter, byte_tokenizer(), byte_tokenizer())
    elif kind == "smaller vocabulary":
        drafter.resize_token_embeddings(VOCAB - 1)
        drafter = engine.DraftModel(drafter, byte_tokenizer())
    elif kind == "layer_skip:2":
        drafter = kind
    llm = engine.load(target, drafter, num_draft_tokens=4, verification=rule or "rejection", tokenizer=byte_tokenizer())
    shared: dict[str, Any] = dict(max_new_tokens=24, ignore_eos=True, repetition_penalty=1.6)
    params = [engine.SamplingParams(temperature=0.9 * (rule is not None), seed=seed, **shared) for seed in range(4)]
    outputs = llm.generate([[5, 3, VOCAB - 1, 5, 3], [4], [9, 8, 7], [VOCAB - 1, 2]], params)
    if kind == "smaller vocabulary":  # it cannot read the last id
        outputs = outputs[1:3]
    least = 0.7 if kind == "smaller vocabulary" and rule else 0.99
    assert all(output.stats.acceptance_rate > least and output.stats.draft_tokens > 15 for output in outputs)


@pytest.mark.parametrize("blind", [False, True])
def test_a_draft_vocabulary_knows_its_places(state: BatchState, blind: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The penalty on draft logits is that on the logits of the target's ids."""
    monkeypatch.setattr(BatchState, "can_look", not blind)
    ids = torch.tensor([1, 4, 5, 9, 13, 18])
    vocabulary = DraftVocabulary(ids, 20, torch.randn(20, 8))
    seen = vocabulary.seen(state)
    assert seen is not None
    hidden = torch.randn(3, 1, 8)
    logits = vocabulary.widened(torch.randn(3, 1, len(ids)), hidden, seen)
    drafts = torch.tensor([[4, 11], [5, -1], [0, 18]])
    places = partial(vocabulary.places, seen=seen)
    actual = vocabulary.of_target(penalise_repetition(logits.clone(), state, drafts, places), seen)
    drafted = vocabulary.of_target(logits, seen) > -torch.inf
    expected = penalise_repetition(vocabulary.of_target(logits, seen), state, drafts)
    assert torch.equal(actual, expected) and not torch.equal(actual, vocabulary.of_target(logits, seen))
    assert 6 < drafted.sum(dim=-1).min() < 20


@pytest.mark.parametrize(("rule", "setting", "count"), every_rule(SOME))
def test_sampled_text_has_the_law_of_penalised_logits(rule: str, setting: dict, count: int) -> None:
    model = flat_target()
    llm = engine.load(model, drafter=perturbed(model, 0.3), num_draft_tokens=2, verification=rule, max_batch_size=128)
    assert p_value(llm, model, setting | {"repetition_penalty": 10.0}, count) > 1e-4


@pytest.mark.parametrize("rule", RULES)
def test_a_penalty_that_does_not_see_the_drafts_has_another_law(monkeypatch: pytest.MonkeyPatch, rule: str) -> None:
    monkeypatch.setattr(
        round_, "penalise_repetition", lambda logits, state, drafts: penalise_repetition(logits, state, 0 * drafts - 1)
    )
    model = flat_target()
    llm = engine.load(model, drafter=perturbed(model, 0.3), num_draft_tokens=2, verification=rule, max_batch_size=128)
    assert p_value(llm, model, SETTINGS[0] | {"repetition_penalty": 10.0}, SOME) < 1e-6


def test_a_penalty_of_a_checkpoint_that_is_none(target: PreTrainedModel) -> None:
    model = copy.deepcopy(target)
    model.generation_config.repetition_penalty = -1.0
    rule = r"repetition_penalty in the target's generation_config\.json must be in \[0.01, 100\], got -1\.0"
    with pytest.raises(ValueError, match=rule):
        engine.load(model)


def test_tokens_that_a_drafter_does_not_have_are_penalised_nowhere(state: BatchState) -> None:
    """In a text, the target's highest ids: the drafter's last token must not suffer for them."""
    logits = torch.randn(3, 1, 15, generator=torch.Generator().manual_seed(1))
    state.tokens[:, 1:4].masked_fill_(state.tokens[:, 1:4] == 14, 3)
    state.tokens[:, 0] = 17
    expected = penalise_repetition(pad(logits, (0, 5)), state, DRAFTS[:, :0])[..., :15]
    assert torch.equal(penalise_drafter(logits.clone(), state), expected)
