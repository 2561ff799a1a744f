"""num_draft_tokens="auto": the K with most expected tokens per second, also when the world changes."""

import random

import pytest
import torch
from tiny_models import greedy, perturbed, random_prompts, tiny

import engine
from engine.adaptive_length import AdaptiveLength
from engine.estimates import Acceptance, Costs, Experience, Payoff, nearest
from engine.state import Proposal


class World:
    """Rounds with given costs and acceptance, without a model."""

    def __init__(self, lengths: AdaptiveLength, column: float, draft: float, seed: int = 0) -> None:
        self.lengths, self.column, self.draft = lengths, column, draft
        self.random = random.Random(seed)
        self.lengths.begin(0)

    def round(self, acceptance: float) -> tuple[int, int, float]:
        """Returns drafts, new tokens and seconds."""
        asked = self.lengths.choose([0], room=100)
        accepted = next((i for i in range(asked) if self.random.random() >= acceptance), asked)
        noise = 1 + 0.05 * self.random.random()
        draft, other = self.draft * asked * noise, (1 + self.column * asked) * noise
        self.lengths.observe(0, [7] * (accepted + 1), accepted, asked, asked)
        self.lengths.observe_times(1, asked, asked, draft, other)
        return asked, accepted + 1, draft + other

    def rate(self, acceptance: float, rounds: int) -> float:
        """Tokens per second, where 1 is plain decoding."""
        done = [self.round(acceptance) for _ in range(rounds)]
        return sum(tokens for _, tokens, _ in done) / sum(seconds for _, _, seconds in done)


def best_rate(acceptance: float, column: float, draft: float) -> float:
    """What the best fixed K reaches."""
    expected = [sum(acceptance**i for i in range(k + 1)) for k in range(16)]
    return max(tokens / (1 + (column + draft) * k) for k, tokens in enumerate(expected)) / 1.025  # mean of the noise


@pytest.mark.parametrize("acceptance", [0.02, 0.3, 0.6, 0.8, 0.95])
@pytest.mark.parametrize(("column", "draft"), [(0.02, 0.0), (0.02, 0.1), (0.1, 0.3), (0.5, 0.5)])
def test_close_to_the_best_fixed_number(acceptance: float, column: float, draft: float) -> None:
    world = World(AdaptiveLength(), column, draft)
    world.rate(acceptance, 30)
    assert world.rate(acceptance, 1000) > 0.9 * best_rate(acceptance, column, draft)


def test_never_much_slower_than_plain_and_back_when_acceptance_is() -> None:
    world = World(AdaptiveLength(), column=0.2, draft=0.4)
    assert world.rate(0.0, 300) > 0.95 * best_rate(0.0, 0.2, 0.4)
    before = world.rate(0.95, 60)  # the way back included
    after = world.rate(0.95, 100)
    assert before > 1.05 and after > 0.9 * best_rate(0.95, 0.2, 0.4)


def begun(lengths: AdaptiveLength, num_rows: int, rounds: int = 3) -> list[int]:
    """Rows of new texts, for which it is known what plain decoding costs, after so many rounds."""
    rows = list(range(num_rows))
    for row in rows:
        lengths.begin(row)
    for _ in range(rounds):
        lengths.observe_times(num_rows, 0, 0, 0.0, 1.0)
    return rows


def round_of_good_drafts(lengths: AdaptiveLength, rows: list[int]) -> int:
    """They all stand, and cost next to nothing; how many of each row."""
    asked = lengths.choose(rows, room=100)
    for row in rows:
        lengths.observe(row, [7] * (asked + 1), asked, asked, asked)
    lengths.observe_times(len(rows), asked, asked, 0.01 * asked, 1 + 0.01 * asked)
    return asked


@pytest.mark.parametrize(("num_rows", "plain"), [(1, 1), (4, 3)])
def test_first_rounds_are_plain(num_rows: int, plain: int) -> None:
    """What drafting is measured by has to be known, and well where it gains less."""
    lengths = AdaptiveLength()
    rows = begun(lengths, num_rows, rounds=0)
    asked = [round_of_good_drafts(lengths, rows) for _ in range(5)]
    assert not any(asked[:plain]) and all(asked[plain:])


@pytest.mark.parametrize(("num_rows", "plain"), [(1, 0), (4, 3)])
def test_rounds_of_several_rows_are_plain_again_now_and_then(num_rows: int, plain: int) -> None:
    lengths = AdaptiveLength()
    rows = begun(lengths, num_rows)
    assert [round_of_good_drafts(lengths, rows) for _ in range(100)].count(0) == plain


@pytest.mark.parametrize(("draft", "column", "expected"), [(0.01, 0.01, 1), (1.2, 0.01, 0), (0.01, 1.2, 0)])
def test_what_drafting_costs_is_expected_of_other_numbers_of_rows(draft: float, column: float, expected: int) -> None:
    """Rows end one by one: every number of them is new, and nothing would be learned about it before it is over."""
    lengths = AdaptiveLength()
    rows = begun(lengths, 8)
    for row in rows:
        for _ in range(40):
            lengths.observe(row, [7, 8], 1, 2, 2)  # of two drafts, the first stands
    for k in (0, 2, 4) * 20:
        lengths.observe_times(8, k, k, draft * k, 1 + column * k)
    for _ in range(3):
        lengths.observe_times(7, 0, 0, 0.0, 1.0)
    assert lengths.choose(rows[:7], room=100) == expected


def test_what_stands_at_a_position_is_expected_to_stand_at_the_next() -> None:
    lengths = AdaptiveLength()
    rows = begun(lengths, 1)
    for _ in range(60):
        lengths.observe(0, [7, 7], 1, 1, 1)
        lengths.observe_times(1, 1, 1, 0.01, 1.05)
    assert lengths.choose(rows, room=100) == 15


def test_rounds_that_set_something_up_say_nothing() -> None:
    """Neither about costs nor about what drafting brings, nor do their tokens count as those of the next round."""
    lengths = AdaptiveLength()
    for row in range(4):
        lengths.begin(row)
    lengths.observe_times(4, 0, 0, 0.0, 1.0)
    for _ in range(40):
        for row in range(4):
            lengths.observe(row, [7], 0, 3, 3)
        lengths.observe_times(4, 3, 3, 100.0, 100.0, usual=False)
    assert lengths._verify[4].at(0) == 1 and not lengths._draft and not lengths._payoff.rests()
    lengths.observe(0, [7, 7], 1, 3, 3)
    lengths.observe_times(4, 3, 3, 0.1, 1.0)
    assert lengths._payoff._gained == pytest.approx(2, rel=0.05)


def test_one_slow_call_is_not_believed() -> None:
    costs = Costs(0.03)
    costs.add(0, 100.0)  # the first call of all
    costs.add(0, 1.0)
    assert costs.at(0) == 1.0
    costs.add(0, 50.0)
    assert costs.at(0) < 1.4


def test_sizes_that_were_not_seen() -> None:
    costs = Costs(0.5)
    assert (costs.at(0), costs.at(4)) == (1.0, 3.0)
    costs.add(2, 8.0)
    assert (costs.at(0), costs.at(2), costs.at(4)) == (4.0, 8.0, 12.0)
    for _ in range(300):
        costs.add(2, 8.0)
        costs.add(6, 10.0)
    assert [costs.at(size) for size in (0, 4, 8)] == pytest.approx([7.0, 9.0, 11.0], abs=0.2)


def test_scatter_of_single_calls_is_not_taken_for_a_difference() -> None:
    """A further column costs 1%, calls of one width lie up to 30% off: no width looks 4% off."""
    rng, costs = random.Random(0), Costs(0.03)
    for _ in range(1000):
        size = rng.choice([0, 1, 2, 3, 4, 5, 7, 15])
        costs.add(size, (1 + 0.01 * size) * rng.uniform(0.7, 1.3))
    assert [costs.at(size) for size in range(16)] == pytest.approx([1 + 0.01 * size for size in range(16)], rel=0.04)


def test_a_size_that_lies_off_the_line_is_learned() -> None:
    costs = Costs(0.03)
    for _ in range(100):
        for size in range(8):
            costs.add(size, 1.0 if size < 4 else 1.5)
    assert [costs.at(3), costs.at(4)] == pytest.approx([1.0, 1.5], rel=0.1)


def test_acceptance_forgets() -> None:
    acceptance = Acceptance(halves_after=5)
    assert acceptance.estimate(3, prior=0.25, weight=2) == 0.25
    for _ in range(100):
        acceptance.add(3, True)
    for _ in range(10):
        acceptance.add(3, False)
    assert acceptance.estimate(3, prior=0.25, weight=0.001) == pytest.approx(0.25, abs=0.01)


def test_drafts_are_cut_where_confidence_proved_worthless() -> None:
    """Tokens of high confidence stand, others do not: only the first are verified, the others still watched."""
    lengths = AdaptiveLength(column_cost=0.1)
    lengths.begin(0)
    drafts = torch.tensor([[5, 6, 7, 8]])
    good, bad = torch.full((1, 4), 0.9), torch.full((1, 4), 0.3)

    def round(confidence: torch.Tensor, emitted: list[int]) -> int:
        asked = lengths.choose([0], room=100)
        trimmed = lengths.trim(Proposal(drafts[:, :asked], confidence=confidence[:, :asked]), [0])
        width = trimmed.tokens.shape[1]
        accepted = next((i for i in range(width) if emitted[i] != drafts[0, i]), width)
        lengths.observe(0, emitted[: accepted + 1], accepted, width, asked)
        lengths.observe_times(1, asked, width, 1e-5, 1 + 0.1 * width)
        return width

    for _ in range(20):
        round(good, [5, 6, 7, 8, 9])
        round(bad, [1, 2, 3, 4, 5])
    assert round(good, [5, 6, 7, 8, 9]) == 4
    assert round(bad, [1, 2, 3, 4, 5]) == 0
    for _ in range(12):
        round(bad, [5, 6, 7, 8, 9])  # not verified, but right every time
    assert round(bad, [5, 6, 7, 8, 9]) == 4


@pytest.mark.parametrize(("confidence", "most"), [(0.95, 15), (0.6, 5)])
def test_sure_drafts_that_stand_are_followed_by_more(confidence: float, most: int) -> None:
    """Drafting costs something and mostly fails behind the second token; then comes a passage that the drafter knows."""
    lengths = AdaptiveLength()
    lengths.begin(0)

    def round(confidence: float, right: int) -> int:
        asked = lengths.choose([0], room=100)
        drafts = torch.full((1, asked), 7)
        width = lengths.trim(Proposal(drafts, confidence=torch.full((1, asked), confidence)), [0]).tokens.shape[1]
        accepted = min(width, right)
        lengths.observe(0, [7] * accepted + [8 if right < width else 7], accepted, width, asked)
        lengths.observe_times(1, asked, width, 0.1 * asked, 1 + 0.03 * width)
        return asked

    for turn in range(100):
        round(0.95 if turn % 2 else 0.6, turn % 3)
    before = round(0.95, 0)
    asked = [round(confidence, 15) for _ in range(5)]
    assert before <= 3
    assert (max(asked) >= most) if most == 15 else (max(asked) <= most)
    # What was true of a text is not of the next one in its slot.
    lengths.begin(0)
    assert round(0.95, 0) <= 5


def test_a_drafter_that_ends_early_is_asked_for_all_it_may_give_while_drafting_pays() -> None:
    lengths = AdaptiveLength()
    lengths.begin(0)

    def round(stands: bool) -> int:
        asked = lengths.choose([0], room=100, ends_early=True)
        drafts = torch.full((1, min(asked, 3)), 7)  # it stops at three
        confidence = torch.full(drafts.shape, 0.7)
        width = lengths.trim(Proposal(drafts, confidence=confidence), [0]).tokens.shape[1] if asked else 0
        accepted = width if stands else 0
        lengths.observe(0, [7] * accepted + [7 if stands else 8], accepted, width, asked)
        lengths.observe_times(1, asked, width, 0.3 if asked else 0.0, 1 + 0.03 * width)
        return asked

    assert [round(True) for _ in range(10)][-5:] == [15] * 5
    asked = [round(False) for _ in range(200)]
    # One now and then, to see whether that has changed.
    assert sum(map(bool, asked[-100:])) < 10 and max(asked[-100:]) == 1
    asked = [round(True) for _ in range(100)]
    assert asked[-5:] == [15] * 5
    assert lengths.choose([0], room=4, ends_early=True) == 4
    assert lengths.choose([0], room=100) < 15  # of a drafter that does not


def test_where_nobody_waits_the_row_that_ends_last_decides() -> None:
    """Five rows of six are always right. If slots are taken again, their tokens count as much as those of the sixth."""
    lengths, rows = AdaptiveLength(), list(range(6))

    def choose(remaining: list[int] | None) -> int:
        return lengths.choose(rows, room=100, remaining=remaining)

    for row in rows:
        lengths.begin(row)
    for i in range(60):
        asked = (0, 3)[i % 2]
        for row in rows:
            accepted = asked if row else 0
            lengths.observe(row, [7] * (accepted + 1), accepted, asked, asked)
        lengths.observe_times(6, asked, asked, 0.05 * asked, 1 + 0.3 * asked)
    assert choose(None) >= 3
    assert choose([90] * 6) == 0
    assert choose([10] + [90] * 5) >= 3  # it will not be the last


def test_without_padding_the_row_that_ends_last_gets_more() -> None:
    """Of rows whose drafts stand equally often."""
    lengths = AdaptiveLength(skips_padding=True)
    rows = begun(lengths, 2)
    for asked in (0, 3) * 20:
        for row in rows:
            accepted = min(asked, 2)
            lengths.observe(row, [7] * (accepted + 1), accepted, asked, asked)
        lengths.observe_times(2, asked, 2 * asked, 0.01 * asked, 1 + 0.1 * asked)

    def counts(remaining: list[int] | None) -> list[int]:
        proposal = Proposal(torch.full((2, lengths.choose(rows, room=100, remaining=remaining)), 7))
        return (lengths.trim(proposal, rows).tokens >= 0).sum(dim=1).tolist()

    assert counts(None)[0] == counts(None)[1] > 0
    assert counts([9, 90])[0] < counts([9, 90])[1]


def test_what_remains_is_told_once_nobody_waits() -> None:
    """Neither for a slot nor for the rest of a prompt to be read."""
    llm = engine.load(tiny("llama", max_position_embeddings=2**13), num_draft_tokens=2, max_batch_size=2)
    told: list[tuple[int, list[int] | None]] = []

    def choose(rows: list[int], room: int, ends_early: bool, remaining: list[int] | None) -> int:
        told.append((len(rows), remaining))
        return min(2, room)

    llm._server._lengths.choose = choose  # type: ignore[method-assign,assignment]
    params = [engine.SamplingParams(max_new_tokens=count) for count in (60, 2, 9)]
    llm.generate([[5, 6], [7, 8], [9] * 6000], params)
    first = next(i for i, (_, remaining) in enumerate(told) if remaining is not None)
    assert told[0] == (2, None) and (1, None) in told[:first]  # the third one waits, then it is being read
    num_rows, remaining = told[first]
    assert num_rows == 2 and remaining is not None and 0 < remaining[0] < 60 and remaining[1] == 9
    assert all(remaining is not None for _, remaining in told[first:])


def rows_of_two_kinds(lengths: AdaptiveLength, confidence: bool) -> Proposal:
    """Drafts of rows 0 and 2 always stand and those of rows 1 and 3 never do; what is left of the last ones, [4, 4]."""
    rows = [0, 1, 2, 3]
    for row in rows:
        lengths.begin(row)
    for _ in range(60):
        asked = lengths.choose(rows, room=4)
        logits = None if confidence else torch.zeros(4, asked, 9)
        proposal = Proposal(torch.full((4, asked), 7), logits, confidence=torch.full((4, asked), 0.6))
        proposal = lengths.trim(proposal, rows)
        counts = (proposal.tokens >= 0).sum(dim=1).tolist()
        for row, count in enumerate(counts):
            accepted = 0 if row % 2 else count
            lengths.observe(row, [7] * accepted + [8], accepted, count, asked)
        lengths.observe_times(4, asked, sum(counts), 1e-5, 1 + 0.1 * sum(counts))
        if asked:
            last = proposal
    return last


@pytest.mark.parametrize("confidence", [True, False])
def test_without_padding_each_row_has_a_number_of_its_own(confidence: bool) -> None:
    """By what came of its drafts; tokens that were drawn are not looked at."""
    tokens = rows_of_two_kinds(AdaptiveLength(skips_padding=True), confidence).tokens
    assert (tokens[::2] >= 0).all() and tokens.shape[1] >= 3
    assert (tokens[1::2] < 0).all()


def test_a_row_that_was_given_fewer_than_asked_has_not_failed_behind_them() -> None:
    lengths = AdaptiveLength(skips_padding=True)
    rows = begun(lengths, 2)

    def round() -> float:
        """What is then expected of the first row's second draft."""
        lengths._most = {0: 1, 1: 3}  # as `choose` may have decided
        for row in rows:
            stood = lengths._most[row]
            lengths.observe(row, [7] * stood + [8], stood, stood, 3)
        return lengths._by_position.chances(0, [1], prior=0.6)[0]

    assert 0.6 < round() <= round()


def test_a_new_text_in_a_slot_has_no_experience_of_its_own() -> None:
    """All rows' counts until it has, and looking for drafts is given up as briefly as at first."""
    lengths = AdaptiveLength(skips_padding=True)
    rows, drafts = begun(lengths, 2), Proposal(torch.full((2, 3), 7), confidence=torch.full((2, 3), 0.5))
    for _ in range(60):
        lengths.trim(drafts, rows)
        lengths.observe(0, [8], 0, 3, 3)
        lengths.observe(1, [7, 7, 7, 7], 3, 3, 3)
    while lengths._payoff._length < 64:
        lengths._payoff.add(plain_seconds=0.5, seconds=1.0)
    assert lengths._by_confidence.chances(0, [8])[0] < 0.2
    lengths.begin(0)
    assert lengths._by_confidence.chances(0, [8])[0] > 0.4
    assert 1 <= sum(lengths._payoff.rests() for _ in range(1000)) <= 16


def test_a_new_text_begins_with_all_rows_experience() -> None:
    found = Experience()
    found.begin(0)
    for _ in range(200):
        found.add(0, [5], [True])
    found.begin(1)
    assert found.chances(1, [5], prior=0.3)[0] > 0.9


def test_plain_calls_of_a_bad_moment_do_not_make_drafts_look_free() -> None:
    costs = Costs(0.03)
    for _ in range(3):
        costs.add(0, 31.0)
    for _ in range(20):
        costs.add(2, 28.0)
    assert costs.at(0) <= costs.at(1) < 29


def test_several_rows_rest_where_drafting_did_not_pay() -> None:
    payoff = Payoff()
    rests = []
    for _ in range(4):
        while not payoff.rests():
            payoff.add(plain_seconds=0.99, seconds=1.0)
        rests.append(1 + sum(payoff.rests() for _ in range(1000)))
    assert rests == [16, 32, 64, 64]
    for _ in range(100):
        payoff.add(plain_seconds=1.01, seconds=1.0)
        assert not payoff.rests()
    for _ in range(100):
        payoff.add(plain_seconds=0.5, seconds=1.0)
    payoff.begin()  # a new text
    assert 1 <= sum(payoff.rests() for _ in range(1000)) <= 16


@pytest.mark.parametrize(("num_rows", "rests"), [(1, False), (4, True)])
def test_looking_in_vain_is_given_up_for_a_while(num_rows: int, rests: bool) -> None:
    """Drafts that cost next to nothing, and never stand."""
    lengths, rows = AdaptiveLength(skips_padding=True), list(range(num_rows))
    for row in rows:
        lengths.begin(row)
    looked = []
    for _ in range(400):
        asked = lengths.choose(rows, room=100)
        shape = num_rows, asked
        proposal = lengths.trim(Proposal(torch.full(shape, 7), confidence=torch.full(shape, 0.5)), rows)
        counts = (proposal.tokens >= 0).sum(dim=1).tolist()
        for row, count in zip(rows, counts, strict=True):
            lengths.observe(row, [8], 0, count, asked)
        lengths.observe_times(num_rows, asked, sum(counts), 0.04 if asked else 0.0, 1 + 0.03 * sum(counts))
        looked.append(asked > 0)
    assert (sum(looked[-200:]) < 50) == rests


def test_tokens_that_were_drawn_are_not_cut_by_what_they_are() -> None:
    lengths = AdaptiveLength()
    lengths.begin(0)
    proposal = Proposal(torch.tensor([[5, 6]]), logits=torch.zeros(1, 2, 9), confidence=torch.zeros(1, 2))
    assert lengths.trim(proposal, [0]) is proposal


@pytest.mark.parametrize("drafter", ["ngram", "good", "bad", None])
@pytest.mark.parametrize("exact", [False, True])
def test_greedy_text_is_plain_text(drafter: str | None, exact: bool) -> None:
    target = tiny("llama", max_position_embeddings=128)
    draft = {"good": perturbed(target, 0.03), "bad": perturbed(target, 2.0)}.get(str(drafter), drafter)
    prompts = random_prompts(7)
    llm = engine.load(target, drafter=draft, num_draft_tokens="auto", max_batch_size=3, exact=exact)
    outputs = llm.generate(prompts, engine.SamplingParams(max_new_tokens=60))
    assert [o.token_ids for o in outputs] == [greedy(target, prompt, 60) for prompt in prompts]
    if drafter == "good":
        assert llm.stats.accepted_tokens > 0


def test_rounds_without_drafts_leave_no_gap_in_a_draft_models_cache() -> None:
    """Its cache misses what was decoded meanwhile; made up for, its drafts are all right again."""
    target = tiny("llama", max_position_embeddings=128)
    llm = engine.load(target, drafter=target, num_draft_tokens="auto")
    chosen = iter([3, 0, 0, 0, 4, 0, 2] * 20)
    llm._server._lengths.choose = lambda rows, room, *told: min(next(chosen), room)  # type: ignore[method-assign]
    outputs = llm.generate(random_prompts(4), engine.SamplingParams(max_new_tokens=60))
    assert llm.stats.acceptance_rate == 1.0
    assert [o.token_ids for o in outputs] == [greedy(target, prompt, 60) for prompt in random_prompts(4)]


@pytest.mark.parametrize("value", ["fast", "", -1, 1.5, True, None])
def test_other_values_are_refused(value: object) -> None:
    with pytest.raises(ValueError, match="num_draft_tokens must be"):
        engine.load(tiny("llama"), num_draft_tokens=value)  # type: ignore[arg-type]


def test_work_that_takes_no_time_at_all() -> None:
    """As a clock of few ticks sees it."""
    costs = Costs(0.3)
    for size in (0, 2, 4) * 5:
        costs.add(size, 0.0)
    others = Costs(costs.slope)  # of another number of rows
    for _ in range(3):
        others.add(1, 0.0)
    assert costs.slope == 0 and 0 < others.at(1) < 1e-6


def test_numbers_of_rows_do_not_outlive_their_round() -> None:
    """Two rows of three have ended, and the third one's drafts no longer stand: a draft is tried now and then, and verified."""
    lengths = AdaptiveLength(skips_padding=True)
    rows = begun(lengths, 3)
    while not lengths._most:
        round_of_good_drafts(lengths, rows)
    for _ in range(100):
        asked = lengths.choose([2], room=100)
        proposal = Proposal(torch.full((1, asked), 7), torch.zeros(1, asked, 9))
        assert (lengths.trim(proposal, [2], first=2).tokens == 7).all()
        lengths.observe(2, [8], 0, asked, asked)
        lengths.observe_times(1, asked, asked, 0.3 * asked, 1 + 0.3 * asked)


def test_a_round_without_drafts_says_nothing_of_those_of_the_one_before() -> None:
    lengths = AdaptiveLength()
    begun(lengths, 1)
    lengths.trim(Proposal(torch.tensor([[7]]), confidence=torch.tensor([[0.5]])), [0])
    lengths.observe(0, [7, 7], 1, 1, 1)
    before = lengths._by_confidence.chances(0, [8]), lengths._by_position.chances(0, [0], prior=0.6)
    lengths.trim(Proposal(torch.empty(1, 0, dtype=torch.int64)), [0])
    lengths.observe(0, [8], 0, 0, 0)
    assert (lengths._by_confidence.chances(0, [8]), lengths._by_position.chances(0, [0], prior=0.6)) == before


def test_a_position_that_no_draft_has_reached_is_like_the_one_before_it() -> None:
    found = Experience()
    found.begin(0)
    for _ in range(200):
        found.add(0, [0, 1], [True, False])
    first, second, third = found.chances(0, [0, 1, 2], prior=0.6, carry=True)
    assert first > 0.9 and second < 0.1 and third < 0.1


def test_costs_are_those_of_the_nearest_number_of_rows() -> None:
    costs = {2: Costs(0.1), 8: Costs(0.2)}
    assert [nearest(costs, rows) for rows in (1, 4, 6, 20)] == [costs[2], costs[2], costs[8], costs[8]]
    assert nearest({}, 3) is None


@pytest.mark.parametrize("acceptance", [0.0, 0.6, 0.8])
def test_only_numbers_among_the_choices_are_drafted(acceptance: float) -> None:
    """Each is a graph of its own, a draft that is tried now and then too."""
    world = World(AdaptiveLength((0, 3, 7)), column=0.1, draft=0.02)
    asked = {world.round(acceptance)[0] for _ in range(200)}
    assert {0, 3} <= asked <= {0, 3, 7}


def test_drafts_that_promise_next_to_nothing_are_not_verified() -> None:
    """Even where a target call takes as long with them: 1 / 2^6 is worth it, 1 / 2^7 is not."""
    lengths = AdaptiveLength()
    rows = begun(lengths, 1)
    for asked in (0, 5, 10, 15) * 50:
        lengths.observe_times(1, asked, asked, 0.0, 1.0)
    assert lengths._verify[1].slope < 1e-3
    assert lengths._best(rows, [[0.5] * 15], with_drafting=False) == [6]


def test_a_drafter_that_ends_early_takes_the_time_of_all_that_it_is_asked_for() -> None:
    """One draft of two stands, which pays where one is drafted and not where fifteen are."""
    lengths = AdaptiveLength()
    rows = begun(lengths, 1)
    for _ in range(60):
        lengths.observe(0, [7, 8], 1, 2, 2)
    for asked in (0, 5, 15) * 20:
        lengths.observe_times(1, asked, asked, 0.1 * asked, 1 + 0.01 * asked)
    assert lengths.choose(rows, room=100) == 1
    assert lengths.choose(rows, room=100, ends_early=True) == 0


def test_drafting_is_free_where_all_that_may_be_asked_for_is() -> None:
    """One draft takes 2% of a call, fifteen a third: confidence alone does not decide then."""
    lengths = AdaptiveLength()
    rows = begun(lengths, 1)
    for _ in range(60):
        lengths.trim(Proposal(torch.tensor([[7, 7]]), confidence=torch.tensor([[0.9, 0.9]])), rows)
        lengths.observe(0, [7, 8], 1, 2, 2)
    for asked in (0, 5, 15) * 20:
        lengths.observe_times(1, asked, asked, 0.02 * asked, 1 + 0.01 * asked)
    assert lengths.choose(rows, room=100) == 1


def test_several_rows_are_not_asked_for_all_that_an_early_end_allows() -> None:
    lengths = AdaptiveLength()
    rows = begun(lengths, 2)
    for _ in range(60):
        for row in rows:
            lengths.observe(row, [7, 8], 1, 2, 2)
    for asked in (0, 5, 15) * 20:
        lengths.observe_times(2, asked, asked, 0.01 * asked, 1 + 0.01 * asked)
    assert lengths.choose(rows, room=100, ends_early=True) == 1


@pytest.mark.parametrize("both", [False, True])
def test_sure_drafts_are_followed_by_more_where_those_of_all_rows_stood(both: bool) -> None:
    lengths = AdaptiveLength()
    rows = begun(lengths, 2)
    for asked in (0, 5, 15) * 20:
        lengths.observe_times(2, asked, asked, 0.1 * asked, 1 + 0.01 * asked)
    for _ in range(60):
        for row in rows:
            lengths.observe(row, [8], 0, 3, 3)
    lengths.trim(Proposal(torch.full((2, 3), 7), confidence=torch.full((2, 3), 0.95)), rows)
    lengths.observe(0, [7, 7, 7, 7], 3, 3, 3)
    lengths.observe(1, *(([7, 7, 7, 7], 3) if both else ([8], 0)), 3, 3)
    assert lengths.choose(rows, room=100) == (7 if both else 0)


def test_tokens_of_a_row_that_ends_early_hardly_count_as_gained() -> None:
    lengths = AdaptiveLength()
    rows = begun(lengths, 2)
    lengths.choose(rows, room=100, remaining=[10, 100])
    lengths.observe(0, [7, 7, 7, 7], 3, 3, 3)
    lengths.observe(1, [8], 0, 3, 3)
    lengths.observe_times(2, 3, 3, 0.1, 1.0)
    assert lengths._payoff._gained == pytest.approx(1, rel=0.05)


def test_with_padding_drafts_that_are_there_anyway_are_verified() -> None:
    """A column that pays for one row costs nothing for another, whose drafts hardly ever stand."""
    lengths = AdaptiveLength()
    rows, drafts = begun(lengths, 2), torch.full((2, 3), 7)
    for _ in range(200):
        trimmed = lengths.trim(Proposal(drafts, confidence=torch.tensor([[0.95] * 3, [0.05] * 3])), rows)
        lengths.observe(0, [7, 7, 7, 7], 3, 3, 3)
        lengths.observe(1, [8], 0, 3, 3)
    assert trimmed.tokens.tolist() == [[7] * 3] * 2


def test_a_rest_is_as_short_as_at_first_once_drafting_has_paid() -> None:
    payoff = Payoff()
    for seconds, expected in ((1.0, 16), (1.0, 32), (0.1, 16)):
        for _ in range(100 * (seconds < 0.5)):
            payoff.add(plain_seconds=0.5, seconds=seconds)
        while not payoff.rests():
            payoff.add(plain_seconds=0.5, seconds=1.0)
        assert 1 + sum(payoff.rests() for _ in range(1000)) == expected


def test_no_single_round_behind_a_rest_decides_on_the_next() -> None:
    payoff, counts = Payoff(), [0, 0]
    for index in range(2):
        while not payoff.rests():
            payoff.add(plain_seconds=0.5, seconds=1.0)
            counts[index] += 1
        while payoff.rests():
            pass
    assert counts[0] == counts[1] > 5


def test_costs_forget() -> None:
    """A machine that has become slower for good."""
    costs = Costs(0.03)
    for count, seconds in ((300, 1.0), (600, 1.3)):
        for _ in range(count):
            costs.add(0, seconds)
    assert costs.at(0) > 1.25
