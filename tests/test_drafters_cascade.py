"""CascadeDrafter: rows of one batch take drafts from different stages; the text, its law, and the stages stay right."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from drafter_cases import Fixed, Knowing, Stateless, bare_state, cascade_of
from replayed_graphs import with_graphs
from sampled_laws import DRAFTS_COUNT, SOME, every_rule, flat_target, p_value
from tiny_models import greedy, perturbed, random_prompts, tiny
from transformers import PreTrainedModel

import engine
from engine.backend import RowStats, row_stats, verify
from engine.drafters import proposals
from engine.drafters.cascade import CascadeDrafter
from engine.drafters.suffix import SuffixDrafter
from engine.state import BatchState, Proposal, Verdict


@pytest.fixture(scope="module")
def target() -> PreTrainedModel:
    return tiny("llama", max_position_embeddings=128)


@pytest.fixture(params=[False, True], ids=["", "blind"])
def blind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether values may not be looked at, as on a GPU."""
    if request.param:
        monkeypatch.setattr(BatchState, "can_look", False)
    return bool(request.param)


class Watched(engine.DraftModel):
    """Notes what it proposes to active rows: (text, drafts)."""

    def __init__(self, model: PreTrainedModel, **options: Any) -> None:
        super().__init__(model, **options)
        self.proposed: list[tuple[list[int], list[int]]] = []
        self.catches = 0

    def propose(self, state: BatchState, num_draft_tokens: int) -> Proposal:
        proposal = super().propose(state, num_draft_tokens)
        for row in state.active.nonzero()[:, 0].tolist():
            text = state.tokens[row, : int(state.seq_lens[row]) + 1].tolist()
            self.proposed.append((text, proposal.tokens[row].tolist()))
        return proposal

    def _catch_up(self, state: BatchState) -> None:
        self.catches += 1
        super()._catch_up(state)

    def check(self, outputs: list[engine.Output]) -> None:
        """Whether it always proposed what came, as a model that is the target and knows the text."""
        texts = [o.prompt_token_ids + o.token_ids for o in outputs]
        for text, drafts in self.proposed:
            whole = next(t for t in texts if t[: len(text)] == text)
            rest = whole[len(text) : len(text) + len(drafts)]
            assert drafts[: len(rest)] == rest


class Stepping(engine.DraftModel):
    """A draft model whose drafts can be had one by one."""

    def steps(self, state: BatchState, num_draft_tokens: int) -> Iterator[Proposal]:
        tokens, logits, stats, confidence = self.propose(state, num_draft_tokens)
        for column in range(num_draft_tokens):
            at = slice(column, column + 1)
            yield Proposal(
                tokens[:, at],
                None if logits is None else logits[:, at],
                None if stats is None else RowStats(*(field[:, at] for field in stats)),
                None if confidence is None else confidence[:, at],
            )


class Wrong(Stateless):
    """Has drafts for some texts, by what they are; they are hardly ever right."""

    def propose(self, state: BatchState, num_draft_tokens: int) -> Proposal:
        tokens = engine.NGramDrafter().propose(state, num_draft_tokens).tokens.clamp(min=0) + 1
        silent = state.gather(state.seq_lens[:, None]) % 3 == 0
        return Proposal((tokens % 64).masked_fill(silent, -1))


def ngram_and(draft: PreTrainedModel, stage: type[engine.DraftModel] = engine.DraftModel) -> CascadeDrafter:
    return CascadeDrafter(engine.NGramDrafter(min_ngram=2), stage(draft))


@pytest.fixture(scope="module")
def expected(target: PreTrainedModel) -> list[list[int]]:
    return [greedy(target, prompt, 30) for prompt in random_prompts(9)]


@pytest.mark.parametrize(
    ("num_draft_tokens", "exact"),
    [(1, False), (2, False), (3, False), (5, False), ("auto", False), (4, True), ("auto", True)],
)
@pytest.mark.parametrize("stage", [engine.DraftModel, Stepping])
@pytest.mark.parametrize("blind", [False, pytest.param(True, marks=pytest.mark.slow)], indirect=True)
def test_greedy_text_is_plain_text(
    target: PreTrainedModel, expected: list[list[int]], num_draft_tokens: Any, exact: bool, blind: bool, stage: Any
) -> None:
    drafter = ngram_and(perturbed(target, 0.05), stage)
    llm = engine.load(target, drafter=drafter, num_draft_tokens=num_draft_tokens, max_batch_size=3, exact=exact)
    outputs = llm.generate(random_prompts(9), engine.SamplingParams(max_new_tokens=30))
    assert [o.token_ids for o in outputs] == expected
    assert 0.1 < llm.stats.acceptance_rate < 1


@pytest.mark.parametrize("stage", [engine.DraftModel, Stepping])
@pytest.mark.parametrize("num_draft_tokens", [3, "auto"])
def test_coupled_text_is_plain_text(target: PreTrainedModel, num_draft_tokens: Any, blind: bool, stage: Any) -> None:
    prompts = random_prompts(9)
    params = [engine.SamplingParams(temperature=i % 3 / 2, seed=i, max_new_tokens=30, top_k=9) for i in range(9)]
    options: dict[str, Any] = dict(verification="coupled", max_batch_size=3)
    plain = engine.load(target, drafter=None, **options).generate(prompts, params)
    drafter = ngram_and(perturbed(target, 0.05), stage)
    llm = engine.load(target, drafter=drafter, num_draft_tokens=num_draft_tokens, **options)
    assert [o.token_ids for o in llm.generate(prompts, params)] == [o.token_ids for o in plain]
    assert llm.stats.accepted_tokens > 0


@pytest.mark.parametrize("blind", [False, pytest.param(True, marks=pytest.mark.slow)], indirect=True)
@pytest.mark.parametrize("stage", [engine.DraftModel, Stepping])
@pytest.mark.parametrize("verification", ["rejection", "block"])
def test_a_seed_gives_the_same_text_in_any_company(
    target: PreTrainedModel, verification: str, blind: bool, stage: Any
) -> None:
    """Also if the others in the batch need logits, and the row alone does not."""
    prompts = random_prompts(7, seed=2)
    params = [engine.SamplingParams(temperature=i % 3 / 2, seed=i, top_p=0.9, max_new_tokens=20) for i in range(7)]
    drafter = ngram_and(perturbed(target, 0.1), stage)
    llm = engine.load(target, drafter=drafter, num_draft_tokens=3, max_batch_size=4, verification=verification)
    together = llm.generate(prompts, params)
    alone = [llm.generate([prompt], param)[0] for prompt, param in zip(prompts, params, strict=True)]
    assert [o.token_ids for o in together] == [o.token_ids for o in alone]


@pytest.mark.parametrize(
    "first", [lambda: engine.NGramDrafter(2), lambda: SuffixDrafter(0), Wrong], ids=["ngram", "suffix", "wrong"]
)
@pytest.mark.parametrize("num_draft_tokens", [pytest.param(1, marks=pytest.mark.slow), 4, "auto"])
def test_a_stage_that_keeps_kv_stays_in_step(
    target: PreTrainedModel, expected: list[list[int]], first: Any, num_draft_tokens: Any, blind: bool
) -> None:
    """The target itself drafts last: whatever others proposed before, it must know the text and go on as the target."""
    last = Watched(target)
    drafter = CascadeDrafter(first(), last)
    llm = engine.load(target, drafter=drafter, num_draft_tokens=num_draft_tokens, max_batch_size=3)
    if num_draft_tokens == "auto":
        # It goes by times: here those of a drafter that pays, which the target itself does not.
        lengths: Any = llm._server._lengths
        observe = lengths.observe_times
        lengths.observe_times = lambda rows, asked, size, *_: observe(
            rows, asked, size, asked / 20, 1 + size / rows / 30
        )
    outputs = llm.generate(random_prompts(9), engine.SamplingParams(max_new_tokens=30))
    assert [o.token_ids for o in outputs] == expected
    assert len(last.proposed) > 20 and llm.stats.accepted_tokens > 0
    last.check(outputs)


def test_after_a_long_silence_it_reads_what_it_missed(target: PreTrainedModel) -> None:
    prompts = random_prompts(4)
    params = [engine.SamplingParams(max_new_tokens=100 - len(prompt)) for prompt in prompts]
    texts = [prompt + greedy(target, prompt, 100 - len(prompt)) for prompt in prompts]
    last = Watched(target)
    llm = engine.load(target, drafter=CascadeDrafter(Knowing(texts, 80), last), num_draft_tokens=4)
    outputs = llm.generate(prompts, params)
    assert [o.prompt_token_ids + o.token_ids for o in outputs] == texts
    assert llm.stats.acceptance_rate == 1 and last.catches == 1
    last.check(outputs)


@pytest.mark.parametrize("alone", [True, False])
def test_drafts_that_are_not_worth_verifying_do_not_add_up(target: PreTrainedModel, alone: bool) -> None:
    """A round in which it drafted, and of which nothing was verified, is not missed as one in which it was not asked."""
    last, silent = Watched(target, greedy=True), engine.NGramDrafter(40, 40)
    llm = engine.load(target, drafter=last if alone else CascadeDrafter(silent, last), num_draft_tokens=3)
    llm._server._lengths.trim = lambda proposal, *_: Proposal(proposal.tokens[:, :0])  # type: ignore[method-assign]
    last.check([llm.generate([[5, 6, 7]], engine.SamplingParams(max_new_tokens=30))[0]])
    assert len(last.proposed) > 25 and last._rounds_missed <= 2


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_replayed_rounds_give_the_same_tokens(
    target: PreTrainedModel, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(BatchState, "can_look", False)
    draft, prompts = perturbed(target, 0.05), random_prompts(8)
    params = [engine.SamplingParams(temperature=temperature, seed=i, max_new_tokens=50) for i in range(8)]
    texts = []
    for graphed in (False, True):
        llm = engine.load(target, drafter=ngram_and(draft), num_draft_tokens=3, max_batch_size=4)
        graphs = with_graphs(llm, late=False) if graphed else None
        texts.append([o.token_ids for o in llm.generate(prompts, params)])
        assert graphs is None or graphs.replays > 10
    assert texts[0] == texts[1]


@pytest.mark.parametrize("asked", [0, 3])
def test_later_stages_are_asked_where_a_row_needs_them(target: PreTrainedModel, asked: int) -> None:
    """On a CPU; nobody needs them for rows that have ended."""
    known = [[3] * 60, [5] * 60]
    last = Watched(target)
    drafter = CascadeDrafter(Knowing(known, 60), last)
    llm = engine.load(target, drafter=drafter, max_batch_size=2)
    state = llm._server._state
    for row, text in enumerate(known):
        state.tokens[row, :60] = torch.tensor(text)
    state.seq_lens.fill_(9)
    state.limits[0] = 50
    view = state.select(slice(0, 2), max_text_length=60, max_limit=60, prompt_lengths=(10, 10))
    drafter.prefill(view)
    if asked:
        drafter.stages[0].length = 10  # type: ignore[attr-defined]
    with torch.inference_mode():
        proposal = drafter.propose(view, 3)
    assert len(last.proposed) == (1 if asked else 0)
    assert asked or proposal.tokens[0].tolist() == [3, 3, 3]


VOCAB = 6
PROMPTS = [[1, 2, 3, 1, 2, 3, 1, 2], [4, 1, 5, 2]]  # n-grams of 2 tokens: matched, not matched
SETTINGS = [dict(temperature=1.0), dict(temperature=0.7, top_k=5, top_p=0.95)]


@pytest.fixture(scope="module")
def small_target() -> PreTrainedModel:
    return flat_target(VOCAB)


@pytest.mark.parametrize(
    ("verification", "setting", "count"), every_rule(SOME, 200_000, settings=SETTINGS, rules=DRAFTS_COUNT)
)
@pytest.mark.parametrize("blind", [False, pytest.param(True, marks=pytest.mark.slow)], indirect=True)
@pytest.mark.parametrize("stage", [engine.DraftModel, Stepping])
def test_the_law_of_samples(
    small_target: PreTrainedModel, setting: dict[str, Any], verification: str, count: int, blind: bool, stage: Any
) -> None:
    drafter = ngram_and(perturbed(small_target, 0.3), stage)
    llm = engine.load(small_target, drafter=drafter, num_draft_tokens=3, max_batch_size=512, verification=verification)
    assert p_value(llm, small_target, setting, count, PROMPTS, length=3, first_seed=100_000) > 1e-3
    assert 0.1 < llm.stats.acceptance_rate < 0.95


@pytest.mark.parametrize("stage", [engine.DraftModel, Stepping])
@pytest.mark.parametrize("verification", ["rejection", "block"])
def test_a_wrong_law_is_caught(
    small_target: PreTrainedModel, verification: str, stage: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same test, where one-hot drafts are passed off as draws from the other stage's logits."""
    monkeypatch.setattr(proposals, "made_certain", lambda tokens, certain, logits, stats: (logits, stats))
    drafter = ngram_and(perturbed(small_target, 0.3), stage)
    llm = engine.load(small_target, drafter=drafter, num_draft_tokens=3, max_batch_size=512, verification=verification)
    assert p_value(llm, small_target, SETTINGS[0], 8_000, PROMPTS, length=3) < 1e-6


@pytest.mark.parametrize("method", ["rejection", "block"])
@pytest.mark.parametrize("filters", [{}, dict(top_k=3, top_p=0.8, min_p=0.05)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kernels", ["torch", pytest.param("triton", marks=pytest.mark.slow)])
def test_drafts_made_certain_are_one_hot_drafts(
    method: str, filters: dict[str, float], dtype: torch.dtype, kernels: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ENGINE_KERNELS", kernels)
    torch.manual_seed(1)
    rows, drafts, vocab = 64 if kernels == "torch" else 8, 3, 40
    tokens = torch.randint(-1, vocab, (rows, drafts)).where(torch.rand(rows, drafts) < 0.9, -1)
    target = torch.randn(rows, drafts + 1, vocab).to(dtype)
    target[:, :-1].scatter_add_(2, tokens.clamp(min=0)[..., None], torch.full((rows, drafts, 1), 3.0, dtype=dtype))
    temperature = torch.tensor([0.0, 0.6, 1.0, 1.7]).repeat(rows // 4)
    spread = {name: torch.full((rows,), value) for name, value in filters.items()}
    given: dict[str, Any] = dict(
        temperature=temperature, **spread, seed=torch.arange(rows), position=torch.full((rows,), 9), method=method
    )
    other = torch.randn(rows, drafts, vocab).to(dtype)
    stats = row_stats(other, temperature, **spread)
    logits, stats = proposals.made_certain(tokens, torch.ones_like(tokens, dtype=torch.bool), other, stats)
    expected = verify(target, tokens, **given)
    assert 0 < expected.num_accepted.sum() < tokens.numel()
    for own_stats in (stats, None):
        found = verify(target, tokens, logits, own_stats, **given)
        assert torch.equal(found.num_accepted, expected.num_accepted)
        assert torch.equal(found.status, expected.status)
        assert torch.equal(found.tokens, expected.tokens)


def test_which_stage_a_row_takes(blind: bool) -> None:
    first = Fixed([[7, -1, -1], [-1, -1, -1], [-1, 9, 9], [8, 8, 8]])
    second = Fixed([[1, 1], [2, -1], [-1, -1], [3, 3]])
    third = Fixed([[4, 4, 4], [4, 4, 4], [5, -1, -1], [4, 4, 4]])
    proposal = cascade_of(first, second, third).propose(bare_state(4), 3)
    assert proposal.tokens.tolist() == [[7, -1, -1], [2, -1, -1], [5, -1, -1], [8, 8, 8]]
    assert proposal.logits is None and proposal.confidence is None


def test_rows_of_logits_come_from_the_stage_that_was_taken(blind: bool) -> None:
    torch.manual_seed(0)
    one, two = torch.randn(4, 3, 10), torch.randn(4, 2, 8, dtype=torch.float64)
    silent = Fixed([[-1] * 3, [6] * 3, [-1] * 3, [-1] * 3])
    state = bare_state(4, 0.5)
    drawn = Fixed([[1, 2, 3], [-1] * 3, [-1] * 3, [4, 5, 6]], one, row_stats(one, state.temperature))
    last = Fixed([[0, 0], [0, 0], [7, 6], [0, 0]], two)
    cascades = cascade_of(silent, drawn, last)
    tokens, logits, stats, _ = cascades.propose(state, 3)
    assert tokens.tolist() == [[1, 2, 3], [6, 6, 6], [7, 6, -1], [4, 5, 6]]
    assert logits is not None and stats is not None and logits.shape == (4, 3, 12)
    assert torch.equal(logits[[0, 3], :, :10], one[[0, 3]].double())
    assert torch.equal(logits[2, :2, :8], two[2]) and (logits[[0, 2, 3], :2, 10:] == -torch.inf).all()
    assert logits[1, 0].tolist() == [0.0 if token == 6 else -torch.inf for token in range(12)]
    expected = row_stats(logits, state.temperature)
    assert torch.allclose(stats.lse[tokens >= 0].double(), expected.lse[tokens >= 0], atol=1e-5)


def test_each_stage_sees_the_round_that_it_would_have_had_alone() -> None:
    first = Fixed([[7, 7, 7], [-1, -1, -1], [-1, -1, -1]])
    second = Fixed([[7, 5], [4, 4], [6, 9]])
    third = Fixed([[0], [0], [0]])
    both = cascade_of(first, second, third)
    state = bare_state(3)
    both.propose(state, 3)
    tokens = torch.tensor([[7, 7, 7, 8], [3, -1, -1, -1], [6, 2, -1, -1]])
    verdict = Verdict(tokens, torch.tensor([3, 0, 1], dtype=torch.int32), torch.zeros(3))
    state.commit(verdict)
    both.observe(state, verdict)
    end = [8, 5, 6]
    assert first.seen[0] == ([8, 5, 5], [[7, 7, 7, 8], [3, -1, -1, -1], [6, -1, -1, -1]], [3, 0, 0])
    assert first.seen[1:] == [(end, [[-1], [-1], [2]], [0, 0, 0])]
    assert second.seen[0] == ([6, 5, 6], [[7, 7, -1, -1], [3, -1, -1, -1], [6, 2, -1, -1]], [1, 0, 1])
    assert second.seen[1:] == [([7, 5, 6], [[7], [-1], [-1]], [0] * 3), (end, [[8], [-1], [-1]], [0] * 3)]
    assert third.seen == [  # it was not asked
        ([5, 5, 5], [[7], [3], [6]], [0] * 3),
        ([6, 5, 6], [[7], [-1], [2]], [0] * 3),
        ([7, 5, 6], [[7], [-1], [-1]], [0] * 3),
        (end, [[8], [-1], [-1]], [0] * 3),
    ]


def test_a_round_without_drafts_is_one_for_every_stage(blind: bool) -> None:
    stages = [Fixed([[7]]), Fixed([[7]])]
    both, state = cascade_of(*stages), bare_state(1)
    verdict = Verdict(torch.tensor([[3]]), torch.tensor([0], dtype=torch.int32), torch.zeros(1))
    state.commit(verdict)
    both.observe(state, verdict)
    assert [stage.seen for stage in stages] == [[([5], [[3]], [0])]] * 2


class Wide:
    """Proposes more than it is asked for."""

    def prefill(self, state: BatchState) -> None:
        pass

    def propose(self, state: BatchState, num_draft_tokens: int) -> Proposal:
        shape = len(state.tokens), num_draft_tokens + 3
        return Proposal(torch.full(shape, 3), confidence=torch.full(shape, 0.5))

    def observe(self, state: BatchState, verdict: Verdict) -> None:
        pass


def test_a_stage_that_proposes_too_much_is_cut(target: PreTrainedModel) -> None:
    llm = engine.load(target, CascadeDrafter(engine.NGramDrafter(), Wide()), num_draft_tokens=2)
    prompts = random_prompts(3)
    outputs = llm.generate(prompts, engine.SamplingParams(max_new_tokens=9))
    assert [output.token_ids for output in outputs] == [greedy(target, prompt, 9) for prompt in prompts]
    assert len(llm.stats.acceptance_per_position) == 2


def test_a_round_that_was_interrupted_is_forgotten(target: PreTrainedModel) -> None:
    """Before its stages observed it: the next round need not have drafts, nor as many rows."""
    stages = engine.NGramDrafter(min_ngram=3), SuffixDrafter(), engine.DraftModel(perturbed(target, 0.02))
    llm = engine.load(target, CascadeDrafter(*stages), num_draft_tokens=3)
    prompts = random_prompts(4)

    def stop(*arguments: Any) -> None:
        raise KeyboardInterrupt

    hook = target.register_forward_hook(stop)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(prompts, engine.SamplingParams(max_new_tokens=24))
    hook.remove()
    for count, new in ((3, 1), (4, 12)):
        outputs = llm.generate(prompts[:count], engine.SamplingParams(max_new_tokens=new))
        assert [output.token_ids for output in outputs] == [greedy(target, prompt, new) for prompt in prompts[:count]]


@pytest.mark.parametrize("asked", [0, 3])
def test_stages_that_look_at_widths_alone_see_those(asked: int, blind: bool) -> None:
    """Everything else that they would see takes some operations, on a GPU launches."""
    silent, some = [-1, -1, -1], [7, 7, -1]
    for emitted in ([[7, 3, -1], [2, -1, -1]], [[4], [5]], [[7, 7, 7, 3], [7, 7, 5, -1]], [[9, -1], [7, 6]]):
        for drafts in ([some, [7, 7, 7]], [[7, -1, -1], silent], [silent, some]):
            seen = []
            for narrow in (False, True):
                stages = Fixed(drafts), Fixed([some, some])
                for stage in stages:
                    stage.observes_width_only = narrow  # type: ignore[attr-defined]
                both, state = cascade_of(*stages), bare_state(2)
                if asked:
                    both.propose(state, asked)
                verdict = Verdict(torch.tensor(emitted), torch.tensor([1, 0], dtype=torch.int32), torch.zeros(2))
                state.commit(verdict)
                both.observe(state, verdict)
                seen.append([[len(tokens[0]) for _, tokens, _ in stage.seen] for stage in stages])
            assert seen[0] == seen[1] and all(seen[0])


@pytest.mark.parametrize("temperature", [0.0, 0.5])
def test_confidence_is_that_of_the_stage_taken(temperature: float, blind: bool) -> None:
    sure = Fixed([[7, 7], [-1, -1]], None, None, torch.full((2, 2), 0.25))
    silent = Fixed([[-1, -1], [1, 2]])
    state = bare_state(2, temperature)
    both = cascade_of(sure, silent).propose(state, 2)
    assert both.confidence is None
    alone = cascade_of(sure, Fixed([[-1, -1], [-1, -1]])).propose(state, 2).confidence
    assert blind == (alone is None) and (alone is None or alone.tolist() == [[0.25, 0.25], [0.0, 0.0]])
    logits = torch.randn(2, 2, 10)
    drawn = Fixed([[1, 1], [1, 2]], logits, row_stats(logits, state.temperature))
    coupled = state.select(slice(0, 2), coupled=True)
    proposal = cascade_of(sure, drawn).propose(coupled, 2)
    assert proposal.logits is None and proposal.confidence is not None
    chances = (logits[1] / (temperature or 1)).softmax(-1)
    assert torch.allclose(proposal.confidence[1], torch.stack([chances[0, 1], chances[1, 2]]), atol=1e-5)
    assert proposal.confidence[0].tolist() == [0.25, 0.25]


def test_what_stages_have_beside_the_protocol_is_used(target: PreTrainedModel) -> None:
    draft = engine.DraftModel(perturbed(target, 0.1))
    inner = CascadeDrafter(engine.NGramDrafter(2), draft)
    outer = CascadeDrafter(engine.NGramDrafter(4), inner)
    assert outer.stages == (outer.stages[0], *inner.stages)
    engine.load(target, drafter=outer, max_batch_size=3)
    outer.reserve(100)
    assert draft.ragged.cache.num_slots == 3 and draft.ragged.cache.capacity == 128
    assert outer.graph_key() == ((), (), draft.graph_key())
    assert CascadeDrafter(outer, SuffixDrafter()).graph_key() is None
    assert CascadeDrafter(draft).graph_key() == (draft.graph_key(),)


@pytest.mark.parametrize(
    ("stages", "rule"),
    [
        ((), "stages must be at least one drafter, got none"),
        ((engine.NGramDrafter(), "ngram"), r"stages\[1\] must have prefill, propose and observe, got 'ngram'"),
        ((engine.NGramDrafter,), r"stages\[0\] must have prefill, propose and observe"),
    ],
)
def test_stages_that_are_none(stages: tuple[Any, ...], rule: str) -> None:
    with pytest.raises(ValueError, match=rule):
        CascadeDrafter(*stages)
