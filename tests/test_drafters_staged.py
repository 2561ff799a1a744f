"""A draft model that is decoded speculatively drafts what it drafts alone; and draft models that draft greedily."""

from collections import Counter
from typing import Any

import pytest
import torch
from drafter_cases import Knowing as KnowingTexts
from sampled_laws import DRAFTS_COUNT, SETTINGS, SOME, every_rule, flat_target, p_value
from tiny_models import VOCAB, greedy, perturbed, random_prompts, tiny
from transformers import PreTrainedModel

import engine
from engine.drafters.staged import StagedDraftModel

SAMPLED = [
    dict(temperature=0.0),
    dict(temperature=0.8),
    dict(temperature=1.3, top_k=9, top_p=0.9),
    dict(temperature=0.5, min_p=0.05),
]


@pytest.fixture(scope="module")
def target() -> PreTrainedModel:
    return tiny("llama", seed=1, max_position_embeddings=96)


@pytest.fixture(scope="module")
def draft(target: PreTrainedModel) -> PreTrainedModel:
    return perturbed(target, 0.05)


class Random:
    """An inner drafter that says anything, and sometimes nothing."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(0)

    def prefill(self, state: engine.BatchState) -> None: ...

    def propose(self, state: engine.BatchState, num_draft_tokens: int) -> engine.Proposal:
        shape = len(state.seq_lens), num_draft_tokens
        return engine.Proposal(torch.randint(-1, VOCAB, shape, generator=self.generator))

    def observe(self, state: engine.BatchState, verdict: engine.Verdict) -> None: ...


class Knowing(Random):
    """Knows what will be drafted, up to a place that differs by row."""

    known = torch.empty(0)

    def propose(self, state: engine.BatchState, num_draft_tokens: int) -> engine.Proposal:
        index = state.position[:, None] + torch.arange(num_draft_tokens)
        guesses = self.known.gather(1, index.clamp(max=self.known.shape[1] - 1))
        wrong = (index + torch.arange(len(index))[:, None]) % 4 == 0
        return engine.Proposal(guesses.where(~wrong, (guesses + 1) % VOCAB))


class Compared(engine.DraftModel):
    """Drafts alone, after having held what the staged one proposes for the same state against it."""

    def __init__(self, model: PreTrainedModel, staged: StagedDraftModel, greedy: bool = False) -> None:
        super().__init__(model, greedy=greedy)
        self.staged, self.seen = staged, Counter()

    def attach(self, target: Any) -> None:
        super().attach(target)
        self.staged.attach(target)

    def prefill(self, state: engine.BatchState) -> None:
        super().prefill(state)
        self.staged.prefill(state)

    def propose(self, state: engine.BatchState, num_draft_tokens: int) -> engine.Proposal:
        proposal = super().propose(state, num_draft_tokens)
        if isinstance(self.staged.drafter, Knowing):
            known = torch.nn.functional.pad(state.tokens, (0, num_draft_tokens + 1))
            self.staged.drafter.known = known.scatter(
                1, state.position[:, None] + torch.arange(num_draft_tokens), proposal.tokens
            )
        before = self.staged.num_calls
        staged = self.staged.propose(state, num_draft_tokens)
        room = (state.limits - state.seq_lens - 2).clamp(0, num_draft_tokens) * state.active
        useful = torch.arange(num_draft_tokens) < room[:, None]
        assert torch.equal(staged.tokens, proposal.tokens.where(useful, -1))
        assert (staged.logits is None) == (proposal.logits is None) or not useful.any()
        if staged.logits is not None:
            torch.testing.assert_close(staged.logits[useful], proposal.logits[useful])
            for mine, alone in zip(staged.stats, proposal.stats, strict=True):
                torch.testing.assert_close(mine[useful], alone[useful])
        if staged.confidence is not None:
            torch.testing.assert_close(staged.confidence[useful], proposal.confidence[useful])
        self.seen.update(calls=self.staged.num_calls - before, alone=int(room.max()), compared=int(useful.sum()))
        self.seen["rounds"] += 1
        self.seen["with logits"] += staged.logits is not None
        return proposal

    def observe(self, state: engine.BatchState, verdict: engine.Verdict) -> None:
        super().observe(state, verdict)
        self.staged.observe(state, verdict)

    def graph_key(self) -> None:
        return None


_CASES = [
    (inner, k, guesses, verification, greedy_drafts)
    for inner in ("ngram", "random", "knowing")
    for k, guesses in ((1, 3), (5, 1), (5, 3), (4, 9), ("auto", 3))
    for verification in ("rejection", "coupled")
    for greedy_drafts in (False, True)
]
_BY_DEFAULT = [
    case for case in _CASES if case[1:3] == (5, 3) or (case[0] == "knowing" and case[3:] == ("rejection", False))
]


@pytest.mark.parametrize(
    ("inner", "num_draft_tokens", "num_guesses", "verification", "greedy_drafts"),
    [case if case in _BY_DEFAULT else pytest.param(*case, marks=pytest.mark.slow) for case in _CASES],
)
def test_drafts_and_logits_are_those_of_the_model_alone(
    target: PreTrainedModel,
    draft: PreTrainedModel,
    inner: str,
    num_draft_tokens: int | str,
    num_guesses: int,
    verification: str,
    greedy_drafts: bool,
) -> None:
    """On every state of a ragged run in which prompts take turns in few slots."""
    guesser = {"ngram": engine.NGramDrafter(), "random": Random(), "knowing": Knowing()}[inner]
    staged = StagedDraftModel(draft, guesser, num_guesses, greedy=greedy_drafts)
    compared = Compared(draft, staged, greedy=greedy_drafts)
    llm = engine.load(
        target, drafter=compared, num_draft_tokens=num_draft_tokens, verification=verification, max_batch_size=3
    )
    prompts = random_prompts(6)
    params = [engine.SamplingParams(**SAMPLED[i % 4], seed=i, max_new_tokens=11 + i, ignore_eos=True) for i in range(6)]
    llm.generate(prompts, params)
    assert compared.seen["compared"] > (0 if num_draft_tokens == "auto" else 30)
    assert (compared.seen["with logits"] > 0) == (verification == "rejection" and not greedy_drafts)
    # Rounds without drafts are made up for.
    assert num_draft_tokens != "auto" or llm.stats.rounds > compared.seen["rounds"]
    assert compared.seen["calls"] <= compared.seen["alone"]
    if inner == "knowing" and num_draft_tokens == 5 and num_guesses == 3:
        assert compared.seen["calls"] < 0.75 * compared.seen["alone"]


DRAFTERS = {
    "staged": lambda model: StagedDraftModel(model),
    "staged-greedy": lambda model: StagedDraftModel(model, greedy=True),
    "greedy": lambda model: engine.DraftModel(model, greedy=True),
}


@pytest.mark.parametrize("num_draft_tokens", [1, 3, 5, "auto"])
@pytest.mark.parametrize("kind", DRAFTERS)
def test_greedy_text_is_the_targets(
    target: PreTrainedModel, draft: PreTrainedModel, kind: str, num_draft_tokens: int | str
) -> None:
    llm = engine.load(target, drafter=DRAFTERS[kind](draft), num_draft_tokens=num_draft_tokens, max_batch_size=3)
    prompts = random_prompts(7)
    outputs = llm.generate(prompts, engine.SamplingParams(max_new_tokens=20))
    assert [output.token_ids for output in outputs] == [greedy(target, prompt, 20) for prompt in prompts]
    assert llm.stats.draft_tokens > 0 or num_draft_tokens == "auto"


@pytest.mark.parametrize("kind", DRAFTERS)
def test_coupled_samples_do_not_depend_on_the_drafter(
    target: PreTrainedModel, draft: PreTrainedModel, kind: str
) -> None:
    prompts = random_prompts(6)
    params = [engine.SamplingParams(**SAMPLED[i % 4], seed=i, max_new_tokens=15) for i in range(6)]
    texts = []
    for drafter in (None, DRAFTERS[kind](draft)):
        llm = engine.load(target, drafter=drafter, verification="coupled", max_batch_size=4)
        texts.append([output.token_ids for output in llm.generate(prompts, params)])
    assert texts[0] == texts[1]
    assert llm.stats.acceptance_rate > 0.1


def test_greedy_drafts_are_the_likeliest_with_their_probability(draft: PreTrainedModel) -> None:
    """At any temperature, and under coupled verification too."""
    seen = []

    class Watched(engine.DraftModel):
        def propose(self, state: engine.BatchState, num_draft_tokens: int) -> engine.Proposal:
            seen.append((state.tokens[0, : int(state.seq_lens[0]) + 1].tolist(), super().propose(state, 2)))
            return seen[-1][1]

    for verification in ("rejection", "coupled"):
        llm = engine.load(draft, drafter=Watched(draft, greedy=True), num_draft_tokens=2, verification=verification)
        llm.generate([[5, 6, 7]], engine.SamplingParams(temperature=2.0, top_k=3, seed=1, max_new_tokens=12))
    assert len(seen) > 8
    for text, proposal in seen:
        assert proposal.logits is None and proposal.confidence.dtype == torch.float32
        for token, confidence in zip(proposal.tokens[0].tolist(), proposal.confidence[0], strict=True):
            with torch.no_grad():
                law = draft(torch.tensor([text])).logits[0, -1].softmax(-1)
            assert token == law.argmax()
            torch.testing.assert_close(confidence, law[token].float())
            text = [*text, token]


@pytest.fixture(scope="module")
def law_target() -> PreTrainedModel:
    return flat_target()


def check_law(target: PreTrainedModel, kind: str, verification: str, setting: dict[str, Any], count: int) -> None:
    drafter = DRAFTERS[kind](perturbed(target, 0.3))
    llm = engine.load(target, drafter=drafter, num_draft_tokens=3, max_batch_size=4096, verification=verification)
    assert p_value(llm, target, setting, count) > 1e-3
    assert 0.02 < llm.stats.acceptance_rate < 0.95, "neither acceptance nor rejection is tested"


@pytest.mark.parametrize(("verification", "setting", "count"), every_rule(200_000, setting=1, rules=DRAFTS_COUNT))
@pytest.mark.parametrize("kind", ["staged", "greedy", pytest.param("staged-greedy", marks=pytest.mark.slow)])
def test_sampling_law(
    law_target: PreTrainedModel, kind: str, verification: str, setting: dict[str, Any], count: int
) -> None:
    check_law(law_target, kind, verification, setting, count)


@pytest.mark.parametrize("verification", ["rejection", "block"])
def test_a_wrong_law_is_caught(law_target: PreTrainedModel, verification: str) -> None:
    """The same test, for a drafter that lies about what it drew from."""

    class Lying(StagedDraftModel):
        def propose(self, state: engine.BatchState, num_draft_tokens: int) -> engine.Proposal:
            proposal = super().propose(state, num_draft_tokens)
            return proposal if proposal.logits is None else proposal._replace(logits=proposal.logits * 0.5, stats=None)

    drafter = Lying(perturbed(law_target, 0.3))
    llm = engine.load(law_target, drafter, num_draft_tokens=3, max_batch_size=4096, verification=verification)
    assert p_value(llm, law_target, SETTINGS[0], 2 * SOME) < 1e-6


def test_bad_input(draft: PreTrainedModel) -> None:
    with pytest.raises(ValueError, match="num_draft_tokens must be >= 1, got 0"):
        StagedDraftModel(draft, num_draft_tokens=0)
    for drafter in ("ngram", engine.DraftModel(draft)):
        with pytest.raises(ValueError, match=r"drafter must have prefill, .*got (str|DraftModel)"):
            StagedDraftModel(draft, drafter)
    with pytest.raises(ValueError, match=r"greedy must be True or False, got 1\.5"):
        engine.DraftModel(draft, greedy=1.5)


@pytest.fixture(scope="module")
def text(target: PreTrainedModel) -> list[int]:
    """A prompt of three tokens, and what the target says."""
    return [3, 4, 5, *greedy(target, [3, 4, 5], 30)]


@pytest.mark.parametrize(("num_guesses", "calls_per_round"), [(1, 3), (3, 2), (9, 1)])
def test_as_many_guesses_as_it_was_told(
    target: PreTrainedModel, text: list[int], num_guesses: int, calls_per_round: int
) -> None:
    """But no more than drafts are missing: six drafts take as many calls of the model as the guesses leave over."""
    asked: list[int] = []

    class Asked(KnowingTexts):
        def propose(self, state: engine.BatchState, num_draft_tokens: int) -> engine.Proposal:
            asked.append(num_draft_tokens)
            return super().propose(state, num_draft_tokens)

    staged = StagedDraftModel(target, Asked([text], len(text)), num_guesses)
    llm = engine.load(target, staged, 6)
    llm.generate([3, 4, 5], engine.SamplingParams(max_new_tokens=21))
    assert llm.stats.rounds == 3 and staged.num_calls == 3 * calls_per_round
    assert max(asked) == min(num_guesses, 5)


def test_the_inner_drafter_sees_prompts_and_rounds(target: PreTrainedModel, text: list[int]) -> None:
    """One that keeps texts, as suffixes do, has nothing to look up otherwise."""
    prompts, tokens = [], []

    class Told(engine.SuffixDrafter):
        def prefill(self, state: engine.BatchState) -> None:
            prompts.append(state.prompt_lengths)
            super().prefill(state)

        def observe(self, state: engine.BatchState, verdict: engine.Verdict) -> None:
            tokens.extend(verdict.tokens[verdict.tokens >= 0].tolist())
            super().observe(state, verdict)

    llm = engine.load(target, StagedDraftModel(target, Told(), 3), 3)
    llm.generate([3, 4, 5], engine.SamplingParams(max_new_tokens=12))
    assert prompts == [(3,)] and tokens == text[3:15]


def test_an_inner_drafter_that_keeps_rows_serves_one_engine(target: PreTrainedModel) -> None:
    inner = engine.SuffixDrafter()
    first, _ = (engine.load(target, drafter=StagedDraftModel(perturbed(target, 0.05), drafter=inner)) for _ in range(2))
    with pytest.raises(engine.EngineError, match=r"SuffixDrafter .* has since been attached to another engine"):
        first.generate([3, 4, 5], engine.SamplingParams(max_new_tokens=4))
