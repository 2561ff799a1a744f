"""Draft models of another vocabulary: shared tokens, re-encoded text, and what `engine.load` makes of two tokenizers."""

import copy
import logging
import string
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from drafter_cases import Sometimes
from sampled_laws import DRAFTS_COUNT, SETTINGS, SOME, every_rule, flat_target, p_value
from sampled_laws import VOCAB as LAW_VOCAB
from tiny_models import greedy, perturbed, random_prompts, tiny
from tiny_tokenizer import EOS, VOCAB, byte_tokenizer, sentencepiece_like
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedModel, PreTrainedTokenizerFast

import engine
from engine.checkpoints import Checkpoint
from engine.drafters.by_tokenizer import draft_model
from engine.drafters.intersection import IntersectionDraftModel
from engine.drafters.own_texts import OwnTexts, Translation, common_prefix
from engine.drafters.reencoding import ReencodingDraftModel
from engine.drafters.vocabulary import (
    SharedVocabulary,
    TokenForm,
    decode_after,
    difference,
    encode,
    encode_after,
    last_text,
    token_forms,
)
from engine.model import RaggedModel

WORDS = "the hand and then a tan hen sat"


def spelling(characters: str) -> PreTrainedTokenizerFast:
    """A token for each of these characters."""
    tokenizer = Tokenizer(models.BPE({character: i for i, character in enumerate(characters)}, []))
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def with_ids_of(target: PreTrainedModel, shared: SharedVocabulary, size: int, amount: float) -> PreTrainedModel:
    """A model like the target, whose ids for the shared tokens are the drafter's; it hardly knows its other ones."""
    other = copy.deepcopy(target)
    other.resize_token_embeddings(size)
    with torch.no_grad():
        for new, old in (
            (other.get_input_embeddings(), target.get_input_embeddings()),
            (other.lm_head, target.lm_head),
        ):
            new.weight.normal_(std=1e-3, generator=torch.Generator().manual_seed(0))
            new.weight[shared.drafter_ids] = old.weight[shared.target_ids]
    return perturbed(other, amount) if amount else other


def test_tokens_are_compared_by_their_bytes() -> None:
    """Byte-level against sentencepiece-like; special tokens only with special ones of the same name; padding with nothing."""
    ours, theirs = sentencepiece_like(), byte_tokenizer(extra=1)
    ours.add_tokens(["<pad>", "<extra0>"])  # not special here: <pad> is a text of five characters
    shared = SharedVocabulary(ours, theirs, len(ours) + 9, VOCAB + 7)
    pairs = dict(zip(shared.target_ids.tolist(), shared.drafter_ids.tolist(), strict=True))
    words = ours.convert_ids_to_tokens
    assert [words(pairs[ord(c)]) for c in " a"] == ["▁", "a"] and words(pairs[ord("\n")]) == "<0x0A>"
    assert words(pairs[0xE2]) == "<0xE2>"
    assert pairs[EOS] == ours.eos_token_id and words(pairs[VOCAB]) == "<extra0>"
    assert theirs.pad_token_id not in pairs
    assert len(set(pairs.values())) == len(pairs) == 256 + 2
    assert shared.share == pytest.approx(258 / min(len(token_forms(ours, 10**6)), 259))
    assert shared.to_target(len(ours))[shared.drafter_ids].tolist() == shared.target_ids.tolist()
    assert int((shared.to_drafter(VOCAB + 7) >= 0).sum()) == len(pairs)


def test_added_tokens_are_spelled_as_they_are() -> None:
    """Not in the alphabet of byte-level vocabularies, in which these would be two bytes and no text."""
    theirs = byte_tokenizer()
    theirs.add_tokens(["éé"])
    forms = token_forms(theirs, 10**6)
    assert forms[TokenForm("éé".encode(), False)] == VOCAB and TokenForm(b"\xe9\xe9", False) not in forms


def test_added_tokens_of_sentencepiece_are_spaces() -> None:
    """As Gemma has them, in its vocabulary and among the added tokens."""
    ours = sentencepiece_like()
    ours.add_tokens(["▁▁"])
    forms = token_forms(ours, 10**6)
    assert forms[TokenForm(b"  ", False)] == len(ours) - 1 and ours.decode([len(ours) - 1]) == "  "


def placed(words: list[str], model: Any, decoder: Any) -> PreTrainedTokenizerFast:
    """A tokenizer of these words, in which what a token stands for depends on its place."""
    tokenizer = Tokenizer(model({word: i for i, word in enumerate(words)}))
    tokenizer.decoder = decoder
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def test_tokens_whose_text_depends_on_their_place_are_not_shared() -> None:
    """Those of WordPiece stand for a word, with the space before it; but two such vocabularies share what is spelled alike."""
    letters = list("abcdefgh")
    pieces = placed([*letters, "##a", "##b"], models.WordPiece, decoders.WordPiece())
    plain, others = spelling("".join(letters)), placed(["##b", *letters[::-1]], models.WordPiece, decoders.WordPiece())
    assert SharedVocabulary(pieces, plain, 100, 100).share == SharedVocabulary(plain, pieces, 100, 100).share == 0
    assert SharedVocabulary(pieces, others, 100, 100).share == 1


def test_ids_beyond_the_models_are_not_shared() -> None:
    ours, theirs = sentencepiece_like(), byte_tokenizer()
    shared = SharedVocabulary(ours, theirs, 100, 60)
    assert len(shared.target_ids) and int(shared.target_ids.max()) < 60 and int(shared.drafter_ids.max()) < 100


def test_pieces_of_text_in_context() -> None:
    ours = sentencepiece_like()
    assert ours.convert_ids_to_tokens(encode_after(ours, "a", " the")) == ["▁the"]
    assert (
        encode_after(ours, "t", "he") is not None and encode_after(ours, " t", "he") is None
    )  # "▁the" spans the border
    assert encode(ours, "<eos>") != [ours.eos_token_id]  # text, not a mark
    theirs = byte_tokenizer()
    euro = list("a€".encode())
    assert [decode_after(theirs, [97], euro[1:end]) for end in (2, 3, 4)] == ["", "", "€"]


@pytest.mark.parametrize("whole", [False, True], ids=["intersection", "re-encoding"])
def test_a_translation_does_not_depend_on_the_pieces_it_came_in(whole: bool) -> None:
    ours, theirs = sentencepiece_like(byte_fallback=False), byte_tokenizer()
    counterparts = SharedVocabulary(ours, theirs, 10**4, VOCAB).to_drafter(VOCAB).tolist()
    if whole:
        counterparts = [own if i == EOS else -1 for i, own in enumerate(counterparts)]
    text = [*b"the hen\nsat", EOS, *b" then THE\xe2\x82", *b"\xac and", theirs.pad_token_id, *b" then"]
    once = Translation(ours, theirs, counterparts, len(ours))
    once.extend(text)
    for step in (1, 2, 5):
        pieces = Translation(ours, theirs, counterparts, len(ours))
        for begin in range(0, len(text), step):
            pieces.extend(text[begin : begin + step])
        assert pieces.ids == once.ids and pieces.num_read == len(text)
    assert once.ids[0] == ours.bos_token_id and once.ids.count(ours.eos_token_id) == 1
    assert ours.convert_ids_to_tokens(once.ids[-2:]) == (["▁the", "n"] if whole else ["e", "n"])


def test_a_bos_that_both_have_is_not_doubled() -> None:
    ours, theirs = sentencepiece_like(), sentencepiece_like(letters="zyxabc", merges=[])
    counterparts = SharedVocabulary(ours, theirs, 10**4, 10**4).to_drafter(10**4).tolist()
    text = Translation(ours, theirs, counterparts, len(ours))
    text.extend(theirs("abc")["input_ids"])
    assert text.ids == ours("abc", add_special_tokens=True)["input_ids"]


def test_common_prefix() -> None:
    long = list(range(1000))
    assert [common_prefix(long, [*long[:n], -1, *long[n:]]) for n in (0, 1, 511, 999)] == [0, 1, 511, 999]
    assert common_prefix(long, long[:7]) == 7 and common_prefix([], long) == 0


def test_the_cache_of_own_texts_gives_the_logits_of_a_plain_call() -> None:
    """Texts that go on, that change at their end, that are replaced; more missing than one call takes; rows left out."""
    ours, theirs = sentencepiece_like(), byte_tokenizer()
    model = tiny("llama", vocab_size=len(ours), max_position_embeddings=256)
    ragged = RaggedModel(model, 3)
    own = OwnTexts(ragged, ragged, lambda: Translation(ours, theirs, [-1] * VOCAB, len(ours)))
    whole = engine.BatchState.allocate(3, 200, torch.device("cpu"))
    state = whole.select(slice(0, 3))

    class Fixed(Translation):
        def __init__(self, text: str) -> None:
            super().__init__(ours, theirs, [-1] * VOCAB, len(ours))
            self.ids = ours(text)["input_ids"]

    rounds = [
        ["a", "the hen sat", None],
        ["an", "the hen sat and then", "x" * 60],
        ["and", None, "x" * 61],
        ["ban", "the hand", "x" * 20 + " the"],
    ]
    for texts in rounds:
        rows = [None if text is None else Fixed(text) for text in texts]
        drafts = [[] for _ in rows]
        own.begin(state, rows, 3)
        logits = own.after_text()
        for step in range(3):
            for row, text in enumerate(rows):
                if text is not None:
                    with torch.no_grad():
                        plain = model(torch.tensor([text.ids + drafts[row]])).logits[0, -1]
                    torch.testing.assert_close(logits[row, 0], plain)
            tokens = logits.argmax(-1)
            for row in range(3):
                drafts[row].append(int(tokens[row]))
            if step < 2:
                logits = own.after_drafts(tokens, step + 1)
        own.end(torch.tensor(drafts)[:, :2])


@pytest.fixture(scope="module")
def target() -> PreTrainedModel:
    return tiny("llama", vocab_size=VOCAB, max_position_embeddings=80)


def drafters(target: PreTrainedModel, amount: float, **tokenizer: Any) -> dict[str, engine.Drafter]:
    ours, theirs = sentencepiece_like(**tokenizer), byte_tokenizer()
    model = with_ids_of(target, SharedVocabulary(ours, theirs, len(ours), VOCAB), len(ours) + 5, amount)
    return {
        "intersection": IntersectionDraftModel(model, ours, theirs),
        "greedy": IntersectionDraftModel(model, ours, theirs, greedy=True),
        "re-encoding": ReencodingDraftModel(model, ours, theirs),
    }


KINDS = ["intersection", "greedy", "re-encoding"]


@pytest.fixture(scope="module")
def expected(target: PreTrainedModel) -> list[tuple[list[int], list[int]]]:
    """Prompts and the target's own greedy text."""
    prompts = [*random_prompts(7, vocab_size=VOCAB), list(WORDS.encode()), [EOS], [VOCAB - 1, EOS, 97]]
    return [(prompt, greedy(target, prompt, 14)) for prompt in prompts]


_WHOLE_MATRIX = [(kind, k, fallback) for kind in KINDS for k in (1, 2, 5, "auto") for fallback in (True, False)]
_BY_DEFAULT = [(kind, k, k == 5) for kind in KINDS for k in (1, 5, "auto")]


@pytest.mark.parametrize(
    ("kind", "num_draft_tokens", "byte_fallback"),
    [case if case in _BY_DEFAULT else pytest.param(*case, marks=pytest.mark.slow) for case in _WHOLE_MATRIX],
)
def test_greedy_text_is_the_targets(
    target: PreTrainedModel, expected: list, kind: str, num_draft_tokens: int | str, byte_fallback: bool
) -> None:
    """With the fallback to bytes, all but special tokens are shared; else few are."""
    drafter = drafters(target, 0.02, byte_fallback=byte_fallback)[kind]
    llm = engine.load(target, drafter=drafter, num_draft_tokens=num_draft_tokens, max_batch_size=3)
    outputs = llm.generate([prompt for prompt, _ in expected], engine.SamplingParams(max_new_tokens=14))
    assert [output.token_ids for output in outputs] == [text for _, text in expected]
    assert num_draft_tokens == "auto" or llm.stats.draft_tokens > 0


def test_what_is_shared_is_accepted(target: PreTrainedModel) -> None:
    """The drafter is the target itself, ids apart, and reads the same tokens: nothing is rejected."""
    ours, theirs = sentencepiece_like(merges=[], bos=False), byte_tokenizer()
    target = copy.deepcopy(target)
    with torch.no_grad():
        target.lm_head.weight[VOCAB - 1] = 0  # <pad>, which is not shared
    model = with_ids_of(target, SharedVocabulary(ours, theirs, len(ours), VOCAB), len(ours), 0.0)
    prompts = [list(b"the hen"), list(b"a"), list(b"\xe2\x82 x")]
    for greedy_drafts in (False, True):
        llm = engine.load(target, drafter=IntersectionDraftModel(model, ours, theirs, greedy=greedy_drafts))
        outputs = llm.generate(prompts, engine.SamplingParams(max_new_tokens=40))
        assert [o.token_ids for o in outputs] == [greedy(target, prompt, 40) for prompt in prompts]
        assert llm.stats.acceptance_rate == 1.0


def spelled(kind: Any) -> tuple[PreTrainedModel, Any]:
    """A target, and a drafter that is the target itself with its ids in the opposite order."""
    characters = string.ascii_letters + string.digits
    ours, theirs = spelling(characters[::-1]), spelling(characters)
    target = tiny("llama", vocab_size=len(characters), max_position_embeddings=80)
    model = with_ids_of(target, SharedVocabulary(ours, theirs, 62, 62), 62, 0.0)
    return target, kind(model, ours, theirs)


def test_what_is_spelled_alike_is_accepted() -> None:
    """As above, through text."""
    target, drafter = spelled(ReencodingDraftModel)
    llm = engine.load(target, drafter=drafter, num_draft_tokens=4)
    prompts = random_prompts(5, vocab_size=62)
    outputs = llm.generate(prompts, engine.SamplingParams(max_new_tokens=40))
    assert [o.token_ids for o in outputs] == [greedy(target, prompt, 40) for prompt in prompts]
    assert llm.stats.acceptance_rate == 1.0 and llm.stats.block_efficiency > 4


@pytest.mark.parametrize("kind", [IntersectionDraftModel, ReencodingDraftModel])
def test_a_slot_that_is_taken_again_is_read_anew(kind: Any) -> None:
    """Also where the next prompt begins like the last text: drafts from what is left of that would be rejected."""
    target, drafter = spelled(kind)
    llm = engine.load(target, drafter=drafter, num_draft_tokens=4, max_batch_size=1)
    prompt = random_prompts(5, vocab_size=62)[4]
    for text in (prompt, [*prompt, 5], [*prompt, 6, 7]):
        output = llm.generate(text, engine.SamplingParams(max_new_tokens=20))
        assert output.token_ids == greedy(target, text, 20) and output.stats.acceptance_rate == 1.0


@pytest.mark.parametrize("kind", [IntersectionDraftModel, ReencodingDraftModel])
def test_rounds_without_drafts_before_the_first_with_some(kind: Any) -> None:
    """What they have added is read as well, and the end of the prompt: all drafts stand."""
    target, drafter = spelled(kind)
    silent = Sometimes(drafter, lambda number: number % 4 == 3)
    llm = engine.load(target, drafter=silent, num_draft_tokens=4, max_batch_size=1)
    prompt = random_prompts(5, vocab_size=62)[4]
    output = llm.generate(prompt, engine.SamplingParams(max_new_tokens=30))
    assert output.token_ids == greedy(target, prompt, 30)
    assert output.stats.draft_tokens > 8 and output.stats.acceptance_rate == 1.0


def test_drafts_that_stood_are_not_read_again() -> None:
    """In every round the draft model reads what is new, and not all that it drafted before."""
    target, drafter = spelled(ReencodingDraftModel)
    llm = engine.load(target, drafter=drafter, num_draft_tokens=4, max_batch_size=1)
    widths, decode = [], drafter.ragged.decode
    drafter.ragged.decode = lambda tokens, *rest: widths.append(tokens.shape[1]) or decode(tokens, *rest)
    llm.generate([1, 2, 3], engine.SamplingParams(max_new_tokens=30))
    assert llm.stats.acceptance_rate == 1.0 and max(widths) <= 2


def test_drafts_through_text_are_whole_target_tokens() -> None:
    """Bytes to sentencepiece-like tokens: merged where they should be, none across the border, marks as marks."""
    ours, theirs = byte_tokenizer(), sentencepiece_like()
    drafter = ReencodingDraftModel(tiny("llama", vocab_size=VOCAB), ours, theirs)
    drafter.attach(RaggedModel(tiny("llama", vocab_size=len(theirs)), 1))

    def drafts(text: str, continuation: list[int]) -> list[str]:
        translation = Translation(ours, theirs, [-1] * len(theirs), VOCAB)
        translation.extend(encode(theirs, text))
        return theirs.convert_ids_to_tokens(drafter._in_target_ids(translation, continuation))

    assert drafts("a hen", list(b" the hand")) == ["▁the", "▁", "h", "and"]
    assert drafts(" t", list(b"he")) == []
    assert drafts(" t", list(b" he")) == ["▁", "he"]
    assert drafts("a", [*b"n", EOS, *b"x"]) == []  # "an" is one token
    assert drafts("b", [*b"n", EOS, *b"x"]) == ["n", "<eos>"]
    assert drafts("b", [*b"n", VOCAB - 1, *b"x"]) == ["n"]  # the target has no <pad>
    assert drafts("b", list("n€".encode())[:3]) == ["n"]  # half a character


def test_as_many_steps_as_the_targets_tokens_are_long() -> None:
    """Five drafts through a model of bytes take twenty of its steps where the target's tokens have four bytes each."""
    ours, theirs = byte_tokenizer(), sentencepiece_like()
    drafter = ReencodingDraftModel(tiny("llama", vocab_size=VOCAB), ours, theirs)
    drafter.attach(RaggedModel(tiny("llama", vocab_size=len(theirs)), 1))
    text = Translation(ours, theirs, [-1] * len(theirs), VOCAB)
    text.extend(encode(theirs, " the the the"))
    said = iter(list(b" the" * 9))

    class Own:
        def follow(self, state: Any) -> list[Translation]:
            return [text]

        graphs = SimpleNamespace(warming_up=False)

        def captures(self, state: Any) -> bool:
            return False

        def begin(self, *_: Any) -> None: ...

        def end(self, fed: Any) -> None: ...

        def run(self, state: Any, num_steps: int, work: Any) -> Any:
            return work()

        def after_text(self) -> torch.Tensor:
            return self.after_drafts(None, 0)

        def after_drafts(self, tokens: Any, count: int) -> torch.Tensor:
            return torch.nn.functional.one_hot(torch.tensor([[next(said)]]), VOCAB).float()

    drafter._own = Own()  # type: ignore[assignment]
    state = engine.BatchState.allocate(1, 8, torch.device("cpu"))
    drafts = drafter.propose(state.select(slice(0, 1)), 5).tokens[0].tolist()
    assert theirs.convert_ids_to_tokens(drafts) == ["▁the"] * 5


def test_a_text_is_read_as_the_drafters_own_tokenizer_would() -> None:
    """Marks alone stand for themselves; bytes that both have are part of words, and the model knows words."""
    ours, theirs = sentencepiece_like(bos=False), byte_tokenizer()
    drafter = ReencodingDraftModel(tiny("llama", vocab_size=len(ours)), ours, theirs)
    drafter.attach(RaggedModel(tiny("llama", vocab_size=VOCAB), 1))
    text = drafter._own._begin_text()
    text.extend([*b" the hand", EOS, *b"and"])
    assert ours.convert_ids_to_tokens(text.ids) == ["▁the", "▁", "h", "and", "<eos>", "and"]
    text.extend([EOS])
    assert text.last_text == "" and text.target_ids == []


def test_ids_beyond_a_model_are_neither_read_nor_drafted() -> None:
    """A tokenizer may have more tokens than the model has rows: an error from inside torch, otherwise."""
    ours, theirs = sentencepiece_like(bos=False), byte_tokenizer()
    size = ours.convert_tokens_to_ids("▁the")
    text = Translation(ours, theirs, [-1] * VOCAB, size)
    text.extend(list(b"a the"))
    assert text.ids and max(text.ids) < size
    drafter = ReencodingDraftModel(tiny("llama", vocab_size=VOCAB), byte_tokenizer(), sentencepiece_like())
    drafter.attach(RaggedModel(tiny("llama", vocab_size=size), 1))
    text = Translation(byte_tokenizer(), sentencepiece_like(), [-1] * len(ours), VOCAB)
    text.extend(encode(ours, "a"))
    assert all(token < size for token in drafter._in_target_ids(text, list(b"b the the")))


def test_the_end_of_a_text_is_seen_through_characters_of_several_tokens() -> None:
    tokenizer, euro = byte_tokenizer(), list("a€".encode())
    assert last_text(tokenizer, euro) == "a€"
    assert last_text(tokenizer, euro[:-1]) is None  # half a character


@pytest.mark.parametrize("text", ["தமிழ்மொழி" * 2, "a€" * 20, "😀é" * 10], ids=["of 3 bytes", "mixed", "of 4 and 2"])
def test_the_end_of_a_text_is_seen_through_a_long_run_of_bytes(text: str) -> None:
    """A decoder shows none of a run that begins within a character."""
    tokenizer = sentencepiece_like()
    for end in range(1, len(text)):
        ids, more = encode(tokenizer, text[:end]), encode(tokenizer, text[: end + 1])
        assert (last_text(tokenizer, ids) or "").endswith(text[max(end - 4, 0) : end])
        assert decode_after(tokenizer, ids, more[len(ids) :]) == text[end]


def test_a_tokenizer_of_which_the_other_is_the_beginning_is_another_one() -> None:
    """Unless it lacks next to nothing: a plain draft model would never say what it lacks, and could not read it."""
    assert "only 258 are in both" in difference(byte_tokenizer(extra=40), byte_tokenizer())
    assert not difference(byte_tokenizer(extra=2), byte_tokenizer())


@pytest.mark.parametrize("kind", KINDS)
def test_coupled_samples_do_not_depend_on_the_drafter(target: PreTrainedModel, kind: str) -> None:
    prompts = random_prompts(6, vocab_size=VOCAB)
    params = [
        engine.SamplingParams(temperature=0.3 * i, top_p=0.95, seed=i, max_new_tokens=20) for i in range(len(prompts))
    ]
    texts = []
    for drafter in (None, drafters(target, 0.0)[kind]):
        llm = engine.load(target, drafter=drafter, verification="coupled", max_batch_size=4)
        texts.append([output.token_ids for output in llm.generate(prompts, params)])
    assert texts[0] == texts[1]
    assert llm.stats.draft_tokens > 0
    if kind == "intersection":  # drawn with the target's noise for the target's ids
        assert llm.stats.acceptance_rate > 0.1


@pytest.fixture(scope="module")
def law_target() -> PreTrainedModel:
    return flat_target()


def law_engine(target: PreTrainedModel, kind: str, verification: str) -> engine.Engine:
    """The vocabularies share 13 of 16 characters; "f", which is in one prompt, is not among them."""
    ours, theirs = spelling("pxocnymblzkajidhg"), spelling("abcdefghijklmnop")
    model = with_ids_of(target, SharedVocabulary(ours, theirs, 17, LAW_VOCAB), 17, 0.3)
    drafter = (
        ReencodingDraftModel(model, ours, theirs)
        if kind == "re-encoding"
        else IntersectionDraftModel(model, ours, theirs, greedy=kind == "greedy")
    )
    return engine.load(target, drafter=drafter, num_draft_tokens=3, max_batch_size=2048, verification=verification)


@pytest.mark.parametrize(("verification", "setting", "count"), every_rule(100_000, setting=1, rules=DRAFTS_COUNT))
@pytest.mark.parametrize("kind", ["intersection", "re-encoding", pytest.param("greedy", marks=pytest.mark.slow)])
def test_sampling_law(
    law_target: PreTrainedModel, kind: str, verification: str, setting: dict[str, Any], count: int
) -> None:
    llm = law_engine(law_target, kind, verification)
    assert p_value(llm, law_target, setting, count) > 1e-3
    assert 0.02 < llm.stats.acceptance_rate < 0.95, "neither acceptance nor rejection is tested"


@pytest.mark.parametrize("verification", ["rejection", "block"])
def test_a_wrong_law_is_caught(law_target: PreTrainedModel, verification: str) -> None:
    """The same test, for a drafter that lies about what it drew from."""
    llm = law_engine(law_target, "intersection", verification)
    propose = llm.drafter.propose

    def lie(state: engine.BatchState, num_draft_tokens: int) -> engine.Proposal:
        proposal = propose(state, num_draft_tokens)
        return proposal._replace(logits=proposal.logits * 0.3, stats=None)

    llm.drafter.propose = lie
    assert p_value(llm, law_target, SETTINGS[0], SOME) < 1e-6


@pytest.mark.parametrize(
    ("share_letters", "expected"), [(True, "IntersectionDraftModel"), (False, "ReencodingDraftModel")]
)
def test_load_chooses_by_what_is_shared(
    target: PreTrainedModel, share_letters: bool, expected: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ours = sentencepiece_like() if share_letters else sentencepiece_like("αβγδε", [], byte_fallback=False)
    tiny("llama", vocab_size=len(ours), max_position_embeddings=80).save_pretrained(tmp_path)
    ours.save_pretrained(tmp_path)
    with caplog.at_level(logging.INFO, logger="engine"):
        llm = engine.load(target, drafter=tmp_path, tokenizer=byte_tokenizer())
    assert type(llm.drafter).__name__ == expected
    assert [expected in record.message for record in caplog.records if "tokenizer" in record.message] == [True]
    output = llm.generate("the hen", engine.SamplingParams(max_new_tokens=12))
    assert output.token_ids == greedy(target, list(b"the hen"), 12)


@pytest.mark.parametrize("flipped", [False, True])
def test_what_is_shared_counts_up_to_the_size_of_either_model(flipped: bool) -> None:
    """Of one with few tokens, all of which the other one has, at ids that the first has not."""
    few, many = string.ascii_letters[-10:], string.ascii_letters
    draft, main = (
        Checkpoint(tiny("llama", vocab_size=len(characters)), spelling(characters))
        for characters in ((many, few) if flipped else (few, many))
    )
    assert type(draft_model(main, draft)) is IntersectionDraftModel


def test_bad_input(target: PreTrainedModel) -> None:
    ours, theirs = sentencepiece_like(), byte_tokenizer()
    model = tiny("llama", vocab_size=len(ours))
    for kind in (IntersectionDraftModel, ReencodingDraftModel):
        with pytest.raises(ValueError, match="target_tokenizer must be a tokenizer, got None"):
            kind(model, ours, None)
        with pytest.raises(ValueError, match="tokenizer must be a tokenizer, got None"):
            kind(model, None, theirs)
    with pytest.raises(ValueError, match="greedy must be True or False, got 'yes'"):
        IntersectionDraftModel(model, ours, theirs, greedy="yes")
    with pytest.raises(ValueError, match="target_tokenizer must have tokens in common"):
        engine.load(target, drafter=IntersectionDraftModel(model, spelling("αβγ"), theirs))
    with pytest.raises(ValueError, match="drafter must have the target's tokenizer, but id 0 is"):
        engine.load(target, drafter=engine.DraftModel(model, ours), tokenizer=theirs)
