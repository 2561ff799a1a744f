"""SuffixDrafter: the longest and most frequent continuation, its pool, and that it changes no text and no law."""

import random
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from drafter_cases import NOT_DISPUTED, commit, state_of
from sampled_laws import DRAFTS_COUNT, PROMPT, SETTINGS, every_rule, flat_target, g_test, law, p_value
from tiny_models import greedy, random_prompts, tiny
from transformers import PreTrainedModel

import engine
from engine.drafters import suffix
from engine.drafters.suffix import SuffixDrafter, _Pool
from engine.state import BatchState


@pytest.fixture(scope="module")
def target() -> PreTrainedModel:
    return flat_target()


def expected_drafts(text: list[int], pool: list[list[int]], most: int, longest: int) -> list[int]:
    """The rule, spelled out: all suffixes, all places."""
    sources = [*pool, text]
    for length in range(min(longest, len(text)), 0, -1):
        end = text[-length:]
        places = [
            (source, at + length)
            for source in sources
            for at in range(len(source) - length + (source is not text))
            if source[at : at + length] == end
        ]
        if not places:
            continue
        drafts: list[int] = []
        for step in range(most):
            found = []
            for source, at in places:
                whole = text + drafts if source is text else source
                if at + step < len(whole):
                    found.append((source, at, whole[at + step]))
            if not found:
                break
            counts = Counter(token for _, _, token in found)
            last = {token: order for order, (_, _, token) in enumerate(found)}
            drafts.append(max(counts, key=lambda token: (counts[token], last[token])))
            places = [(source, at) for source, at, token in found if token == drafts[-1]]
        return drafts
    return []


def proposed(drafter: SuffixDrafter, state: BatchState, most: int) -> list[list[int]]:
    tokens = drafter.propose(state, most).tokens
    assert tokens.shape == (state.seq_lens.shape[0], most)
    return [[token for token in row if token >= 0] for row in tokens.tolist()]


@pytest.mark.parametrize("seed", range(30))
def test_the_longest_and_most_frequent_continuation(seed: int) -> None:
    """Against the rule spelled out, over rows that grow and outputs that were pooled."""
    rng = random.Random(seed)
    vocab, longest = rng.choice([2, 3, 6, 20]), rng.choice([1, 2, 4, 16])
    drafter = SuffixDrafter(max_ngram=longest)

    def some(low: int, high: int) -> list[int]:
        return [rng.randrange(vocab) for _ in range(rng.randint(low, high))]

    pool: list[list[int]] = []
    for _ in range(3):  # generations of requests in the same slots
        texts = [some(1, 30) for _ in range(3)]
        state = state_of(texts)
        drafter.prefill(state)
        starts = [max(len(text) - longest, 0) for text in texts]
        for _ in range(4):
            assert proposed(drafter, state, 5) == [expected_drafts(text, pool, 5, longest) for text in texts]
            new = [some(1, 6) for _ in texts]
            commit(drafter, state, new)
            texts = [text + more for text, more in zip(texts, new, strict=True)]
        pool += [text[start:] for text, start in zip(texts, starts, strict=True)]


def test_what_was_kept_can_be_forgotten() -> None:
    """The outputs in the pool, and those that still lie in their slots."""
    drafter, text = SuffixDrafter(), [1, 2, 3]
    for forgets in (False, True):
        for output in ([4, 5, 6], [7, 8, 9]):
            state = state_of([text])
            drafter.prefill(state)
            commit(drafter, state, [output])
        if forgets:
            drafter.forget()
        for end in ([3], [4, 5]):
            state = state_of([end])
            drafter.prefill(state)
            assert bool(proposed(drafter, state, 3)[0]) is not forgets


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        *NOT_DISPUTED,
        ([1, 9, 4, 1, 9, 4, 1, 9, 7, 1, 9], [4, 1, 9, 7]),  # 4 twice, 7 once; of the two, the later one decides
        ([1, 9, 4, 1, 9, 7, 1, 9], [7, 1, 9, 7]),  # once each: the later
    ],
)
def test_by_hand(text: list[int], expected: list[int]) -> None:
    drafter = SuffixDrafter()
    state = state_of([text])
    drafter.prefill(state)
    assert proposed(drafter, state, 4) == [expected]


def test_shorter_matches_than_asked_for_do_not_count() -> None:
    state = state_of([[1, 2, 3, 9, 2, 3], [1, 2, 3, 9, 8, 3]])
    drafter = SuffixDrafter(min_ngram=2)
    drafter.prefill(state)
    assert proposed(drafter, state, 2) == [[9, 2], []]


def test_confidence_grows_with_agreement_and_with_the_match() -> None:
    texts = [
        [1, 2, 7, 1, 2, 7, 1, 2, 7, 1, 2],  # always 7
        [1, 2, 7, 1, 2, 8, 1, 2, 9, 1, 2],  # never the same
        [5, 2, 7, 4, 2],  # a short match, once
        [4, 3],
    ]
    drafter = SuffixDrafter(max_ngram=2)
    state = state_of(texts)
    drafter.prefill(state)
    proposal = drafter.propose(state, 3)
    sure = proposal.confidence
    assert sure is not None and proposal.logits is None and sure.dtype == torch.float32
    assert sure[0, 0] > sure[2, 0] > 0 and sure[0, 0] > sure[1, 0] > 0
    assert sure[1, 1] > sure[1, 0]  # of those that agreed so far, all agree
    assert (sure >= 0).all() and (sure < 1).all()
    assert (sure[proposal.tokens < 0] == 0).all() and (proposal.tokens[3] == -1).all()


def test_slots_that_are_not_its_own_yet_get_nothing() -> None:
    drafter = SuffixDrafter()
    state = state_of([[1, 1, 1], [1, 1, 1]])
    first = state.select(slice(0, 1), prompt_lengths=(3,))
    drafter.prefill(first)
    assert proposed(drafter, state, 2) == [[1, 1], []]
    scattered = state.select(torch.tensor([1]), prompt_lengths=(3,))
    drafter.prefill(scattered)
    assert proposed(drafter, state, 2) == [[1, 1], [1, 1]]


def test_outputs_go_to_the_pool_when_they_end_and_when_their_slot_is_taken() -> None:
    drafter = SuffixDrafter(max_ngram=2)
    state = state_of([[1, 2], [3, 4]])
    drafter.prefill(state)
    commit(drafter, state, [[10, 11], [20, 21]])
    assert drafter._pool.tokens.tolist() == []
    state.limits[1] = 0
    commit(drafter, state, [[12], [22]])
    assert drafter._pool.tokens.tolist() == [3, 4, 20, 21, -1]
    again = state_of([[7, 3, 4]])
    drafter.prefill(again)
    assert drafter._pool.tokens.tolist() == [3, 4, 20, 21, -1, 1, 2, 10, 11, 12, -1]
    assert proposed(drafter, again, 4) == [[20, 21]]  # and not into the next text


@pytest.mark.parametrize("size", [0, 1, 7, 40])
def test_the_pool_keeps_the_last_tokens(size: int) -> None:
    pool, everything, rng = _Pool(size), [], random.Random(1)
    for number in range(300):
        text = [rng.randrange(9) for _ in range(rng.randint(1, 15))]
        pool.add(np.array(text, dtype=np.int32), number if number % 3 else None)
        everything += [(token, number) for token in (*text, -1)]
        kept = everything[max(len(everything) - size, 0) :]
        assert pool.tokens.tolist() == [token for token, _ in kept]
        assert set(pool.seeds) == {number for _, number in kept if number % 3}
        assert len(pool._buffer) <= 2 * size


def test_a_row_with_the_seed_of_a_pooled_output_looks_at_its_own_text_alone() -> None:
    """The output depends on the very numbers that would judge drafts taken from it."""
    for temperature, seeds, looks in ((1.0, [5], False), (1.0, [6], True), (0.0, [5], True)):
        drafter = SuffixDrafter()
        state = state_of([[1, 2]], seeds=[5], temperature=temperature)
        drafter.prefill(state)
        commit(drafter, state, [[10, 11, 12]])
        state = state_of([[1, 2]], seeds=seeds, temperature=temperature)
        drafter.prefill(state)
        assert proposed(drafter, state, 2) == ([[10, 11]] if looks else [[]])


@pytest.mark.parametrize("num_draft_tokens", [1, 2, 3, 5, "auto"])
def test_greedy_text_is_plain_text(num_draft_tokens: Any) -> None:
    model = tiny("llama", max_position_embeddings=128)
    prompts = random_prompts(9)
    llm = engine.load(model, drafter=SuffixDrafter(), num_draft_tokens=num_draft_tokens, max_batch_size=3)
    params = engine.SamplingParams(max_new_tokens=40)
    expected = [greedy(model, prompt, 40) for prompt in prompts]
    for _ in range(2):
        assert [o.token_ids for o in llm.generate(prompts, params)] == expected
    assert llm.stats.accepted_tokens > 0


def test_a_prompt_that_comes_again_is_answered_from_the_pool() -> None:
    model = tiny("llama", max_position_embeddings=128)
    prompts, params = random_prompts(6, seed=3), engine.SamplingParams(max_new_tokens=40)
    rates = []
    for pool_tokens in (0, 200_000):
        llm = engine.load(model, drafter=SuffixDrafter(pool_tokens), num_draft_tokens=4, max_batch_size=6)
        first = llm.generate(prompts, params)
        second = llm.generate(prompts, params)
        assert [o.token_ids for o in first] == [o.token_ids for o in second]
        rates.append(sum(o.stats.new_tokens for o in second) / sum(o.stats.rounds for o in second))
    assert rates[1] > 4 and rates[1] > 2 * rates[0]


@pytest.mark.parametrize("late", [False, True])
def test_when_results_are_read_late(late: bool) -> None:
    model = tiny("llama", max_position_embeddings=128)
    llm = engine.load(model, drafter=SuffixDrafter(), num_draft_tokens=3, max_batch_size=2)
    llm._server._late = late
    prompts = random_prompts(7)
    eos = greedy(model, prompts[3], 20)[9]
    llm._server._results._eos_token_ids = frozenset([eos])
    for prompt, output in zip(prompts, llm.generate(prompts, engine.SamplingParams(max_new_tokens=20)), strict=True):
        whole = greedy(model, prompt, 20)
        assert output.token_ids == whole[: whole.index(eos) + 1 if eos in whole else 20]


def test_coupled_text_does_not_depend_on_the_pool() -> None:
    model = tiny("llama", max_position_embeddings=128)
    prompts = random_prompts(6)
    params = [engine.SamplingParams(temperature=0.8, seed=i, max_new_tokens=30) for i in range(6)]
    plain = engine.load(model, drafter=None, verification="coupled", max_batch_size=2).generate(prompts, params)
    llm = engine.load(model, drafter=SuffixDrafter(), verification="coupled", max_batch_size=2)
    rounds = []
    for _ in range(2):
        outputs = llm.generate(prompts, params)
        assert [o.token_ids for o in outputs] == [o.token_ids for o in plain]
        rounds.append(sum(o.stats.rounds for o in outputs))
    assert rounds[1] < 0.8 * rounds[0]  # most of it is known by then


def test_after_a_call_that_was_left_early(target: PreTrainedModel) -> None:
    llm = engine.load(target, drafter=SuffixDrafter(), max_batch_size=2)
    params = engine.SamplingParams(max_new_tokens=12)
    expected = llm.generate([[5, 6, 7]], params)[0].token_ids
    stream = llm.stream([5, 6, 7], params)
    next(stream)
    stream.close()  # type: ignore[attr-defined]
    assert llm.generate([[5, 6, 7]] * 5, params)[4].token_ids == expected


@pytest.mark.parametrize(("verification", "setting", "count"), every_rule(200_000, rules=DRAFTS_COUNT))
def test_the_law_of_samples(
    target: PreTrainedModel,
    verification: str,
    setting: dict[str, Any],
    count: int,
) -> None:
    llm = engine.load(
        target, drafter=SuffixDrafter(5000), num_draft_tokens=3, max_batch_size=512, verification=verification
    )
    assert p_value(llm, target, setting, count) > 1e-3
    assert 0.05 < llm.stats.acceptance_rate < 0.95


@pytest.mark.parametrize("mindful", [True, False])
def test_the_law_of_seeds_that_come_again(target: PreTrainedModel, mindful: bool) -> None:
    """A text that was made by the same numbers must not be drafted from: the second case is the control."""
    drafter = SuffixDrafter()
    llm = engine.load(target, drafter=drafter, num_draft_tokens=3, max_batch_size=1)
    counts: Counter[tuple[int, ...]] = Counter()
    for seed in range(250):
        drafter._rows, drafter._pool = {}, _Pool(1000)
        if not mindful:
            drafter._pool.seeds = Forgetful()
        params = engine.SamplingParams(temperature=1.0, seed=seed, max_new_tokens=2, ignore_eos=True)
        for _ in range(2):
            output = llm.generate([PROMPT], params)[0]
        counts[output.token_ids[0], 0] += 1
    first: Counter[tuple[int, ...]] = Counter()
    for (token, _), probability in law(target, SETTINGS[0], PROMPT, 2).items():
        first[token, 0] += probability  # type: ignore[assignment]
    p_value = g_test(counts, first)  # type: ignore[arg-type]
    assert p_value > 1e-3 if mindful else p_value < 1e-6


class Forgetful(Counter[int]):
    def __contains__(self, seed: object) -> bool:
        return False


@pytest.mark.parametrize(
    ("options", "rule"),
    [
        ({"pool_tokens": -1}, "pool_tokens must be >= 0, got -1"),
        ({"pool_tokens": 1.5}, "pool_tokens must be an int >= 0, got 1.5"),
        ({"min_ngram": 0}, "min_ngram must be >= 1, got 0"),
        ({"min_ngram": 5, "max_ngram": 4}, "max_ngram must be >= 5, got 4"),
        ({"max_ngram": True}, "max_ngram must be an int >= 1, got True"),
    ],
)
def test_options_out_of_range(options: dict[str, Any], rule: str) -> None:
    with pytest.raises(ValueError, match=rule):
        SuffixDrafter(**options)


def test_the_latest_matches_vote(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there are too many: what a long text or a full pool said long ago is of less use than what it says now."""
    monkeypatch.setattr(suffix, "MOST_MATCHES", 3)
    # Five times 8, 1, then three times 8, 2; nothing longer comes again.
    said = [token for i in range(8) for token in (100 + i, 8, 1 if i < 5 else 2)]
    drafter = SuffixDrafter()
    state = state_of([[*said, 200, 8]])
    drafter.prefill(state)
    assert proposed(drafter, state, 1) == [[2]]
    drafter = SuffixDrafter()
    state = state_of([[4]])
    drafter.prefill(state)
    commit(drafter, state, [said])  # goes to the pool with the next prefill
    state = state_of([[8]])
    drafter.prefill(state)
    assert proposed(drafter, state, 1) == [[2]]


def test_dozens_of_long_outputs_are_kept_by_default() -> None:
    drafter = SuffixDrafter()
    for number in range(40):
        state = state_of([[1, 2]])
        drafter.prefill(state)
        commit(drafter, state, [[100 + number, *range(1000, 1300)]])
    state = state_of([[100]])  # in the first of them
    drafter.prefill(state)
    assert proposed(drafter, state, 2) == [[1000, 1001]]


def test_a_drafter_serves_the_engine_that_was_made_with_it_last(target: PreTrainedModel) -> None:
    """Rows of two engines would have the same slots."""
    drafter, params = SuffixDrafter(), engine.SamplingParams(max_new_tokens=4)
    first, second = engine.load(target, drafter=drafter), engine.load(target, drafter=drafter)
    with pytest.raises(engine.EngineError, match=r"SuffixDrafter .* has since been attached to another engine"):
        first.generate([3, 4, 5], params)
    assert len(second.generate([3, 4, 5], params).token_ids) == 4
