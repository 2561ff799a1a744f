"""The loop: ragged batches, ends, streaming, seeds, statistics."""

import copy
import dataclasses
import gc
import itertools
import json
import pickle
import threading
import time
import tracemalloc
import weakref
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_models import greedy, perturbed, random_prompts, tiny
from tiny_tokenizer import EOS, VOCAB, byte_tokenizer, sentencepiece_like
from tokenizers import Tokenizer, decoders, models
from torch._subclasses.fake_tensor import FakeTensor
from transformers import BatchEncoding, PreTrainedModel, PreTrainedTokenizerFast

import engine
from bench.drafter_cases import drafters
from engine.backend import row_stats
from engine.detokenize import TextStream, decode, whole_text
from engine.metrics import Stats
from engine.scheduler import PREFILL_TOKENS, Request, prefill_chunk
from engine.state import BatchState, Verdict

TOKENIZER = byte_tokenizer()
SPACE_AND_MORE = 257  # in some tests a space and the first of three bytes of a character


@pytest.fixture(scope="module")
def target() -> PreTrainedModel:
    return tiny("llama", seed=1, vocab_size=VOCAB, max_position_embeddings=256)


class Scripted:
    """Makes the target say a text: a drafter cannot, so the model itself is replaced by one that follows a script."""

    def __init__(self, target: PreTrainedModel, script: Sequence[int]) -> None:
        self.target, self.script = target, list(script)

    def __enter__(self) -> None:
        def follow(module: torch.nn.Module, args: object, kwargs: dict, output: object) -> object:
            position = kwargs["position_ids"] + 1 - self.start
            wanted = torch.tensor([*self.script, EOS])[position.clamp(0, len(self.script))]
            output.logits = torch.nn.functional.one_hot(wanted, VOCAB).to(output.logits) * 50
            return output

        self.start = 1  # prompts of one token
        self.hook = self.target.register_forward_hook(follow, with_kwargs=True)

    def __exit__(self, *error: object) -> None:
        self.hook.remove()


@pytest.mark.parametrize(
    "kind",
    ["ngram", "model", "layer_skip:1", "medusa", "eagle", "staged", "cascade", "shared tokens", "text read anew"],
)
@pytest.mark.parametrize("exact", [False, True])
def test_what_is_discarded_leaves_no_keys_and_values(target: PreTrainedModel, kind: str, exact: bool) -> None:
    """At once, and not when Python next looks for cycles: they may be most of a GPU's memory."""
    draft, tokenizers = perturbed(target, 0.05), (byte_tokenizer(), byte_tokenizer())
    made = drafters(target) | {
        "model": lambda: engine.DraftModel(draft),
        "staged": lambda: engine.StagedDraftModel(draft),
        "cascade": lambda: engine.CascadeDrafter(engine.NGramDrafter(), engine.DraftModel(draft)),
        "shared tokens": lambda: engine.IntersectionDraftModel(draft, *tokenizers),
        "text read anew": lambda: engine.ReencodingDraftModel(draft, *tokenizers),
    }
    drafter: Any = kind if kind in ("ngram", "layer_skip:1") else made[kind]()
    llm = engine.load(target, drafter=drafter, num_draft_tokens=2, max_batch_size=2, exact=exact)
    gc.collect()
    gc.disable()
    try:
        llm.generate([[5, 6, 7], [8]], engine.SamplingParams(max_new_tokens=8))
        caches = [llm._target.cache]
        if (ragged := getattr(llm.drafter, "ragged", None)) is not None:
            caches.append(ragged.cache)
        kept = [weakref.ref(t) for cache in caches for layer in cache.ragged_layers for t in (layer.keys, layer.values)]
        if hidden := llm._target._hidden:
            kept.append(weakref.ref(hidden[0].states))
        assert len(kept) > 3 and all(tensor() is not None for tensor in kept)
        del llm, drafter, caches, ragged, hidden
        assert [tensor() for tensor in kept] == [None] * len(kept)
    finally:
        gc.enable()


def test_more_prompts_than_slots_come_back_in_order(target: PreTrainedModel) -> None:
    prompts = random_prompts(13, seed=5, vocab_size=VOCAB)
    params = [engine.SamplingParams(max_new_tokens=1 + 5 * (i % 4)) for i in range(13)]
    outputs = engine.load(target, max_batch_size=3).generate(prompts, params)
    for prompt, param, output in zip(prompts, params, outputs, strict=True):
        assert output.prompt_token_ids == prompt
        assert output.token_ids == greedy(target, prompt, param.max_new_tokens)


@pytest.mark.parametrize("num_draft_tokens", [3, "auto"])
@pytest.mark.parametrize("drafter", ["ngram", "model"])
def test_rows_that_have_ended_cost_nothing(target: PreTrainedModel, drafter: str, num_draft_tokens: Any) -> None:
    """Those in lower slots: one that is left in a high slot is all that a round is about."""
    prompts = random_prompts(5, seed=6, vocab_size=VOCAB)
    lengths = [3, 2, 40, 4, 60]
    own = perturbed(target, 0.05) if drafter == "model" else drafter
    llm = engine.load(target, own, num_draft_tokens=num_draft_tokens, max_batch_size=5)
    rows: list[int] = []
    run = llm._server._round.run
    llm._server._round.run = lambda state, *more: rows.append(len(state.seq_lens)) or run(state, *more)  # type: ignore
    outputs = llm.generate(prompts, [engine.SamplingParams(max_new_tokens=length) for length in lengths])
    assert [o.token_ids for o in outputs] == [greedy(target, *each) for each in zip(prompts, lengths, strict=True)]
    assert rows[0] == 5 and set(rows[5:]) == {3, 1} and rows[-1] == 1


def test_buffers_grow_in_proportion(target: PreTrainedModel) -> None:
    """Growing copies what is there: not for every request that is a little longer than any before."""
    llm = engine.load(target, None, max_batch_size=1)
    lengths = range(60, 250, 10)
    capacities = []
    for length in lengths:
        llm.generate([5] * length, engine.SamplingParams(max_new_tokens=1))
        capacities.append(llm._target.cache.capacity)
    assert all(capacity >= length for capacity, length in zip(capacities, lengths, strict=True))
    assert capacities[-1] <= 256 and len(set(capacities)) <= 4


def test_a_new_row_is_cleared_as_far_as_the_last_one_reached(target: PreTrainedModel) -> None:
    llm = engine.load(target, perturbed(target, 0.05), max_batch_size=2, max_length=200)
    llm.generate([5] * 150, engine.SamplingParams(max_new_tokens=40))
    keys = llm.drafter.ragged.cache.ragged_layers[0].keys  # type: ignore[union-attr]
    llm.generate([[5, 6, 7]] * 2, engine.SamplingParams(max_new_tokens=2))
    with torch.inference_mode():
        keys[:, :, 150:200] = 7
    llm.generate([[5, 6, 7]] * 2, engine.SamplingParams(max_new_tokens=2))
    assert (keys[:, :, 150:200] == 7).all() and (keys[:, :, 64:150] == 0).all()


@pytest.mark.parametrize("drafter", ["ngram", "model"])
@pytest.mark.parametrize("filters", [{}, {"top_k": 20, "top_p": 0.8, "min_p": 0.02}])
def test_a_seed_gives_the_same_text_in_any_company(target: PreTrainedModel, drafter: str, filters: dict) -> None:
    prompts = random_prompts(7, seed=2, vocab_size=VOCAB)
    params = [
        engine.SamplingParams(temperature=(i % 3) / 2, seed=40 + i, max_new_tokens=6 + i, **filters) for i in range(7)
    ]
    draft = perturbed(target, 0.1) if drafter == "model" else drafter
    llm = engine.load(target, drafter=draft, max_batch_size=4)
    together = llm.generate(prompts, params)
    alone = [llm.generate([prompt], param)[0] for prompt, param in zip(prompts, params, strict=True)]
    reverse = llm.generate(prompts[::-1], params[::-1])[::-1]
    assert [o.token_ids for o in together] == [o.token_ids for o in alone] == [o.token_ids for o in reverse]


def test_without_a_seed_requests_differ_and_no_global_generator_moves(target: PreTrainedModel) -> None:
    llm = engine.load(target)
    before = torch.get_rng_state()
    params = engine.SamplingParams(temperature=1.5, max_new_tokens=16)
    texts = {tuple(output.token_ids) for output in llm.generate([[5, 6]] * 6, params)}
    assert len(texts) > 1
    assert torch.equal(before, torch.get_rng_state())


def test_seed_0_is_a_seed(target: PreTrainedModel) -> None:
    params = engine.SamplingParams(temperature=1.5, seed=0, max_new_tokens=16)
    one, other = engine.load(target).generate([[5, 6]] * 2, params)
    assert one.token_ids == other.token_ids


@pytest.mark.parametrize("alone", [{"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}])
def test_each_filter_by_itself(target: PreTrainedModel, alone: dict[str, Any]) -> None:
    """At its harshest it leaves the likeliest token alone."""
    params = engine.SamplingParams(temperature=1.5, seed=1, max_new_tokens=12, **alone)
    assert engine.load(target).generate([3, 4, 5], params).token_ids == greedy(target, [3, 4, 5], 12)


def test_single_prompts_and_lists(target: PreTrainedModel) -> None:
    llm = engine.load(target, tokenizer=TOKENIZER)
    params = engine.SamplingParams(max_new_tokens=4)
    one = llm.generate("abc", params)
    assert one.prompt_token_ids == [97, 98, 99]
    assert one.text == TOKENIZER.decode(one.token_ids, skip_special_tokens=True)
    assert llm.generate(["abc"], params)[0].token_ids == one.token_ids
    assert llm.generate([97, 98, 99], params).token_ids == one.token_ids
    encoded = [TOKENIZER("abc", return_tensors=kind) for kind in (None, "pt", "np")]
    listed = [TOKENIZER(["abc"])]
    for side in ("left", "right"):
        for kind, found in (("pt", encoded), (None, listed)):
            found.append(TOKENIZER(["abc"], padding="max_length", max_length=9, padding_side=side, return_tensors=kind))
    arrays = [torch.tensor([97, 98, 99]), np.array([97, 98, 99]), torch.tensor([[97, 98, 99]])]
    for prompt in (*arrays, *encoded):
        assert llm.generate(prompt, params).token_ids == one.token_ids
    for prompt in listed:
        assert [output.token_ids for output in llm.generate(prompt, params)] == [one.token_ids]
    found = llm.generate([*arrays, *encoded, *listed], params)
    assert [output.token_ids for output in found] == [one.token_ids] * 11
    chat = llm.generate([{"role": "user", "content": "hi"}], params)
    assert bytes(chat.prompt_token_ids) == b"user: hi\nassistant:"
    parts = [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]
    assert llm.generate([{"role": "user", "content": parts}], params).prompt_token_ids == chat.prompt_token_ids
    assert engine.load(target).generate([97, 98, 99], params).text is None


TEMPLATES = {  # of contents that are strings, lists of parts, and either
    "strings": "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}",
    "concatenated": "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\n' }}{% endfor %}",
    "json": "{% for m in messages %}{{ m['role'] }}: {{ m['content'] | tojson }}\n{% endfor %}",
    "parts": "{% for m in messages %}{{ m['role'] }}:{% for p in m['content'] %} <{{ p['text'] }}>{% endfor %}\n{% endfor %}",
    "either": "{% for m in messages %}{{ m['role'] }}: {% if m['content'] is string %}{{ m['content'] }}{% else %}"
    "{% for p in m['content'] %}{{ p['text'] | trim }}{% endfor %}{% endif %}\n{% endfor %}",
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_parts_of_a_message_go_to_templates_that_know_them(target: PreTrainedModel, name: str) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = TEMPLATES[name]
    llm = engine.load(target, tokenizer=tokenizer)
    parts = [{"type": "text", "text": "Read this:\n"}, {"type": "text", "text": "it"}]
    expected = {
        "parts": "user: <Read this:\n> <it>",
        "either": "user: Read this:it",
        "json": 'user: "Read this:\\nit"\n',
    }
    found = llm.generate([{"role": "user", "content": parts}], engine.SamplingParams(max_new_tokens=1)).prompt_token_ids
    assert bytes(found).decode() == expected.get(name, "user: Read this:\nit\n")


@pytest.mark.parametrize("name", TEMPLATES)
def test_strings_go_to_templates_that_know_parts_alone(target: PreTrainedModel, name: str) -> None:
    """Which show nothing of a string, as those of some models that take images."""
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = TEMPLATES[name]
    llm, params = engine.load(target, tokenizer=tokenizer), engine.SamplingParams(max_new_tokens=1)
    chat = [{"role": "user", "content": "Go on"}, {"role": "assistant", "content": "A story"}]
    expected = {
        "parts": ("user: <Go on>", "assistant: <A story"),
        "either": ("user: Go on", "assistant: A story"),
        "json": ('user: "Go on"\n', 'assistant: "A story'),
    }
    first, last = expected.get(name, ("user: Go on\n", "assistant: A story"))
    for messages, text in ((chat[:1], first), (chat, first + last)):
        found = bytes(llm.generate(messages, params).prompt_token_ids).decode()
        assert found.rstrip() == text.rstrip()
    assert chat[0] == {"role": "user", "content": "Go on"}


def test_calls_of_tools_need_no_content(target: PreTrainedModel) -> None:
    """As in chats of other servers."""
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m['role'] }}: {% for c in m['tool_calls'] or [] %}<{{ c['function']['name'] }}>{% endfor %}"
        "{{ m['content'] or '' }}\n{% endfor %}"
    )
    llm, params = engine.load(target, tokenizer=tokenizer), engine.SamplingParams(max_new_tokens=1)
    call = {"role": "assistant", "tool_calls": [{"type": "function", "function": {"name": "add", "arguments": "{}"}}]}
    for called in (call, {**call, "content": None}):
        chat = [{"role": "user", "content": "1+1?"}, called, {"role": "tool", "content": "2"}]
        found = bytes(llm.generate(chat, params).prompt_token_ids).decode()
        assert found == "user: 1+1?\nassistant: <add>\ntool: 2\n"


@pytest.mark.parametrize("tensors", [None, "pt"])
def test_what_a_tokenizer_returns_for_several_texts(target: PreTrainedModel, tensors: str | None) -> None:
    llm, params = engine.load(target, tokenizer=TOKENIZER), engine.SamplingParams(max_new_tokens=3)
    words = ["a longer text", "short"]
    batch = TOKENIZER(words, return_tensors=tensors, padding=tensors is not None)
    found = llm.generate(batch, params)
    assert [bytes(output.prompt_token_ids).decode() for output in found] == words
    assert [output.token_ids for output in found] == [output.token_ids for output in llm.generate(words, params)]
    short = TOKENIZER(["a", "b"], return_tensors=tensors)
    assert [output.prompt_token_ids for output in llm.generate(short, params)] == [[97], [98]]


def test_what_a_tokenizer_returns_for_a_list_of_one_text(target: PreTrainedModel) -> None:
    """As the last batch of many may be. A tensor of one row may be one text by itself as well."""
    llm, params = engine.load(target, tokenizer=TOKENIZER), engine.SamplingParams(max_new_tokens=3)
    assert [output.prompt_token_ids for output in llm.generate(TOKENIZER(["ab"]), params)] == [[97, 98]]
    for one in (TOKENIZER("ab"), TOKENIZER("ab", return_tensors="pt"), TOKENIZER(["ab"], return_tensors="pt")):
        assert llm.generate(one, params).prompt_token_ids == [97, 98]


def test_an_engine_is_not_copied(target: PreTrainedModel) -> None:
    """A copy's cache would belong to the original."""
    llm = engine.load(target)
    for make in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="an Engine cannot be copied or pickled: load one in each process"):
            make(llm)


def test_a_begun_answer_is_continued(target: PreTrainedModel) -> None:
    """As `transformers`' pipeline does."""
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}</>{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
    llm = engine.load(target, tokenizer=tokenizer)
    chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Sure, "}]
    for messages, prompt in ((chat, b"<user>hi</><assistant>Sure, "), (chat[:1], b"<user>hi</><assistant>")):
        assert bytes(llm.generate(messages, engine.SamplingParams(max_new_tokens=1)).prompt_token_ids) == prompt


def test_a_chat_has_no_bos_but_that_of_its_template(target: PreTrainedModel) -> None:
    """Of text, the tokenizer puts one in front; a second one would change what Llama's and Gemma's kinds say."""
    tokenizer = sentencepiece_like(byte_fallback=False)
    tokenizer.chat_template = "{{ bos_token }}{% for m in messages %}{{ m['content'] }}{% endfor %}"
    llm, params = engine.load(target, tokenizer=tokenizer), engine.SamplingParams(max_new_tokens=1)
    text, chat = llm.generate("the", params), llm.generate([{"role": "user", "content": "the"}], params)
    assert text.prompt_token_ids == chat.prompt_token_ids
    assert chat.prompt_token_ids.count(tokenizer.bos_token_id) == 1


def test_stop_string_across_tokens_and_rounds(target: PreTrainedModel) -> None:
    said = b"one two three. END of it. "
    llm = engine.load(target, tokenizer=TOKENIZER, num_draft_tokens=3)
    params = engine.SamplingParams(stop=["END", "never"], max_new_tokens=200)
    with Scripted(target, said):
        output = llm.generate([[65]], params)[0]
        assert output.text == "one two three. "
        assert output.finish_reason == "stop"
        assert bytes(output.token_ids) == b"one two three. END"
        pieces = list(llm.stream([65], params))
        assert "".join(piece.text for piece in pieces) == "one two three. "
        assert all("E" not in piece.text for piece in pieces)
        free = llm.generate([[65]], engine.SamplingParams(max_new_tokens=200))[0]
        assert free.finish_reason == "eos"
        assert bytes(free.token_ids[:-1]) == said
        assert free.token_ids[-1] == EOS


@pytest.mark.parametrize("stop", ["<pad>", ["never", "<pad>"]])
def test_a_stop_string_that_is_a_special_token(target: PreTrainedModel, stop: str | list[str]) -> None:
    """The text never shows it."""
    said = [*b"one", TOKENIZER.pad_token_id, *b" two"]
    llm = engine.load(target, tokenizer=TOKENIZER, num_draft_tokens=3)
    params = engine.SamplingParams(stop=stop, max_new_tokens=200)
    with Scripted(target, said):
        outputs = [llm.generate([65], params), list(llm.stream([65], params))[-1].output]
        free = llm.generate([65], engine.SamplingParams(max_new_tokens=200))
    for output in outputs:
        assert (output.text, output.finish_reason, output.token_ids) == ("one", "stop", said[:4])
    assert (free.text, free.finish_reason) == ("one two", "eos")


def test_stop_token_ids(target: PreTrainedModel) -> None:
    said = list(b"one. two. three")
    llm = engine.load(target, tokenizer=TOKENIZER, num_draft_tokens=3)
    params = engine.SamplingParams(stop_token_ids=[ord("!"), ord(".")], ignore_eos=True, max_new_tokens=200)
    with Scripted(target, said):
        pieces = list(llm.stream([65], params))
        outputs = [llm.generate([65], params), pieces[-1].output]
        without = engine.load(target).generate([65], params)
    for output in outputs:
        assert (output.text, output.finish_reason, output.token_ids) == ("one", "stop", said[:4])
    assert "".join(piece.text for piece in pieces) == "one"
    assert (without.text, without.token_ids) == (None, said[:4])


def test_the_text_never_shows_the_end_of_sequence(target: PreTrainedModel) -> None:
    """Nor where it is an ordinary token, streamed or not."""
    other = copy.deepcopy(target)
    other.generation_config.eos_token_id = ord(".")
    llm = engine.load(other, tokenizer=TOKENIZER)
    with Scripted(other, b"one. two"):
        outputs = [llm.generate([65]), list(llm.stream([65]))[-1].output]
    assert [(output.text, output.finish_reason) for output in outputs] == [("one", "eos")] * 2


UNKNOWN = "\N{REPLACEMENT CHARACTER}"


@pytest.mark.parametrize(
    ("said", "stop", "text"),
    [
        ([*b"one", SPACE_AND_MORE, 0x97, 0xA5], " ", "one"),
        ([*b"one ", 0xE6], " ", "one"),
        ([*b"one", SPACE_AND_MORE, 0x97], UNKNOWN, "one "),
    ],
)
def test_a_stop_string_before_an_unfinished_character(
    target: PreTrainedModel, said: list[int], stop: str, text: str
) -> None:
    """Of which no more may come."""
    tokenizer = byte_tokenizer()

    def decode(ids: list[int], **options: object) -> str:
        return b"".join(b" \xe6" if token == SPACE_AND_MORE else bytes([token]) for token in ids).decode(
            errors="replace"
        )

    tokenizer.decode = decode
    llm = engine.load(target, tokenizer=tokenizer, drafter=None)
    with Scripted(target, said):
        output = llm.generate([65], engine.SamplingParams(stop=stop, max_new_tokens=len(said)))
    assert (output.text, output.finish_reason) == (text, "stop")
    assert len(output.token_ids) == (4 if stop == " " else len(said))


def test_stream_equals_generate_and_never_splits_a_character(target: PreTrainedModel) -> None:
    said = "naïve 日本語 🙂🙂 naïve 日本語 🙂🙂 naïve 日本語".encode()
    llm = engine.load(target, tokenizer=TOKENIZER, num_draft_tokens=5)
    params = engine.SamplingParams(max_new_tokens=200)
    with Scripted(target, said):
        output = llm.generate([65], params)
        pieces = list(llm.stream([65], params))
    assert output.text == said.decode()
    assert "".join(piece.text for piece in pieces) == output.text
    assert all("�" not in piece.text for piece in pieces)
    assert [token for piece in pieces for token in piece.token_ids] == output.token_ids
    assert all("".join(span.text for span in piece.spans) == piece.text for piece in pieces)
    assert any(span.drafted for piece in pieces for span in piece.spans)
    assert any(not span.drafted for piece in pieces for span in piece.spans)
    assert pieces[-1].output.token_ids == output.token_ids
    assert all(piece.output is None for piece in pieces[:-1])


def test_bytes_that_never_become_a_character_still_come_out() -> None:
    stream = TextStream(TOKENIZER, ())
    for token in b"a\xe6\x97":
        stream.push(token, drafted=False)
    assert [span.text for span in stream.take(last=False)] == ["a"]
    stream.finish()
    assert "".join(span.text for span in stream.take(last=True)) == TOKENIZER.decode(list(b"\xe6\x97"))


def test_tokens_that_stand_for_no_text_are_decoded_once() -> None:
    """Else a run of them takes quadratic time."""
    decoded: list[int] = []

    class Counted:
        added_tokens_decoder = TOKENIZER.added_tokens_decoder

        def decode(self, ids: list[int], **options: Any) -> str:
            decoded.append(len(ids))
            return TOKENIZER.decode(ids, **options)

    stream = TextStream(Counted(), ())
    for token in [*b"ab", *[EOS] * 50, *b"cd"]:
        stream.push(token, drafted=False)
    assert stream.text == "abcd" and max(decoded) <= 4


def test_bytes_that_are_no_text_are_the_same_streamed_and_not() -> None:
    """A decoder of byte tokens spoils the characters beside them, if it is given all at once."""
    words = ["<unk>", "<eos>", *(f"<0x{byte:02X}>" for byte in range(256)), "a", "b"]
    inner = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, [], unk_token="<unk>", byte_fallback=True))
    inner.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<eos>", unk_token="<unk>")
    ids = [258, *(2 + byte for byte in b"\xc3\xa9\xc3"), 259]  # a, é and half of another, b
    assert whole_text(tokenizer, ids) != decode(tokenizer, ids)
    stream = TextStream(tokenizer, ())
    for token in ids:
        stream.push(token, drafted=False)
    assert whole_text(tokenizer, ids) == stream.text
    assert stream.text.startswith("aé") and stream.text.endswith("b")
    assert whole_text(tokenizer, ids[:3]) == "aé"


def test_the_time_of_a_streams_reader_is_not_the_engines(target: PreTrainedModel) -> None:
    llm, reading = engine.load(target, drafter=None), 0.0
    pieces = []
    for piece in llm.stream([7, 8, 9], engine.SamplingParams(max_new_tokens=6, ignore_eos=True)):
        pieces.append(piece)
        time.sleep(0.3)
        reading += 0.3
    assert 0 < pieces[-1].output.stats.total_seconds <= llm.stats.total_seconds + 1e-9 < reading


@pytest.mark.parametrize("error", [RuntimeError("no memory"), KeyboardInterrupt()])
def test_what_has_ended_is_not_lost_with_the_rest(target: PreTrainedModel, error: BaseException) -> None:
    llm = engine.load(target, drafter=None, max_batch_size=2)
    calls = []

    def fail(*arguments: object) -> None:
        calls.append(1)
        if len(calls) > 8:
            raise error

    hook = target.register_forward_hook(fail)
    with pytest.raises(type(error)) as caught:
        llm.generate([[3, 4], [5, 6], [7, 8]], [_params(2), _params(40), _params(40)])
    hook.remove()
    outputs: Any = caught.value.outputs  # type: ignore[attr-defined]
    assert outputs[0].token_ids == greedy(target, [3, 4], 2) and outputs[1:] == [None, None]


@pytest.mark.parametrize("error", [RuntimeError("no room"), KeyboardInterrupt()])
def test_what_has_ended_in_one_round_is_not_lost_where_one_of_it_fails(
    target: PreTrainedModel, error: BaseException
) -> None:
    def fail(index: int, output: Any) -> None:
        raise error

    llm = engine.load(target, drafter=None, max_batch_size=3)
    with pytest.raises(type(error)) as caught:
        llm.generate([[3, 4], [5, 6], [7, 8]], [_params(2), _params(2), _params(9)], on_output=fail)
    outputs: Any = caught.value.outputs  # type: ignore[attr-defined]
    assert [output and len(output.token_ids) for output in outputs] == [2, 2, None]


def test_a_file_of_logs_gets_few_lines_of_progress(target: PreTrainedModel, capsys: pytest.CaptureFixture[str]) -> None:
    engine.load(target).generate([[3, 4]] * 40, _params(2), progress=True)
    assert 1 < capsys.readouterr().err.count("\r") < 6


def test_loaded_in_inference_mode(target: PreTrainedModel) -> None:
    with torch.inference_mode():
        llm = engine.load(target)
    assert llm.generate([3, 4, 5], _params(8)).token_ids == greedy(target, [3, 4, 5], 8)


def test_statistics_add_up(target: PreTrainedModel) -> None:
    llm = engine.load(target, drafter=perturbed(target, 0.05), num_draft_tokens=4, max_batch_size=2)
    outputs = llm.generate(random_prompts(5, vocab_size=VOCAB), engine.SamplingParams(max_new_tokens=15))
    for output in outputs:
        stats = output.stats
        assert stats.new_tokens == len(output.token_ids) == 15
        assert stats.new_tokens == stats.rounds + stats.accepted_tokens
        assert stats.as_dict()["accepted_tokens"] == stats.accepted_tokens
        assert 1 <= stats.block_efficiency <= 5
        assert stats.acceptance_rate == stats.accepted_tokens / stats.draft_tokens
        assert len(stats.acceptance_per_position) <= 4
        assert stats.total_seconds >= stats.draft_seconds + stats.verify_seconds > 0
        assert stats.tokens_per_second == pytest.approx(15 / stats.total_seconds)
    assert llm.stats.new_tokens == 75
    assert llm.stats.rounds == sum(output.stats.rounds for output in outputs)
    assert llm.stats.acceptance_per_position[0] >= llm.stats.acceptance_rate > 0


def test_rounds_are_counted_by_what_they_proposed_and_accepted() -> None:
    stats = Stats()
    for proposed, accepted in [(3, 1), (0, 0), (3, 3), (1, 0), (3, 1), (5, 2)]:
        stats.add_round(proposed, accepted, accepted + 1)
    assert [stats.rounds_with(n, 0) for n in range(8)] == [6, 5, 4, 4, 1, 1, 0, 0]
    assert [stats.rounds_with(n, n) for n in range(8)] == [6, 4, 2, 1, 0, 0, 0, 0]
    assert stats.acceptance_per_position == [4 / 5, 2 / 4, 1 / 4, 0.0, 0.0]
    assert Stats().acceptance_per_position == []


def test_outputs_and_statistics_can_be_copied_and_written_as_json(target: PreTrainedModel) -> None:
    llm = engine.load(target, drafter=perturbed(target, 0.05), num_draft_tokens=3)
    params = [engine.SamplingParams(max_new_tokens=12, logprobs=logprobs) for logprobs in (True, False)]
    for output in llm.generate([[3, 4, 5]] * 2, params):
        stats = output.stats
        spread = dataclasses.asdict(output)
        again = engine.Output(**spread | {"stats": Stats(**spread["stats"])})
        assert again == output and again.stats.as_dict() == stats.as_dict() and json.loads(json.dumps(spread)) == spread
        for other in (copy.copy(stats), copy.deepcopy(stats), pickle.loads(pickle.dumps(stats))):
            assert other == stats and other.as_dict() == stats.as_dict()
            other.add_round(3, 3, 4)
            assert other.acceptance_per_position != stats.acceptance_per_position == again.stats.acceptance_per_position
        shown = output.as_dict()
        assert json.loads(json.dumps(shown)) == shown
        parts = {"text", "token_ids", "prompt_token_ids", "finish_reason", "stats"}
        assert shown.keys() == (parts | {"logprobs"} if output.logprobs else parts)
        assert shown.pop("stats") == stats.as_dict() and all(shown[name] == getattr(output, name) for name in shown)


@pytest.mark.parametrize("kind", ["ngram", "ngram+model"])
def test_tensors_that_torch_is_told_to_make_elsewhere(target: PreTrainedModel, kind: str) -> None:
    """As a program does by `torch.set_default_device("cuda")` whose engine is on the CPU."""
    prompts = [[3, 4, 5, 3, 4], [7, 8, 7], [9]]
    with torch.device("meta"):
        drafter: Any = engine.NGramDrafter()
        if kind == "ngram+model":
            drafter = engine.CascadeDrafter(drafter, engine.DraftModel(target, greedy=True))
        llm = engine.load(target, drafter=drafter, num_draft_tokens="auto")
        outputs = llm.generate(prompts, _params(40))
    assert [output.token_ids for output in outputs] == [greedy(target, prompt, 40) for prompt in prompts]


def test_plain_decoding_is_the_same_loop(target: PreTrainedModel) -> None:
    llm = engine.load(target, drafter=None)
    output = llm.generate([[7, 8, 9]], engine.SamplingParams(max_new_tokens=9))[0]
    assert output.token_ids == greedy(target, [7, 8, 9], 9)
    assert (output.stats.rounds, output.stats.draft_tokens, output.stats.block_efficiency) == (9, 0, 1.0)


class Perfect:
    """A drafter of our own: knows the text, and proposes nothing for every other row."""

    def __init__(self, text: list[int]) -> None:
        self.text, self.seen = torch.tensor(text), []

    def prefill(self, state: engine.BatchState) -> None:
        self.seen.append("prefill")

    def propose(self, state: engine.BatchState, num_draft_tokens: int) -> engine.Proposal:
        index = state.position[:, None] + torch.arange(num_draft_tokens)
        known = index < len(self.text)
        return engine.Proposal(self.text[index.clamp(max=len(self.text) - 1)].where(known, -1))

    def observe(self, state: engine.BatchState, verdict: engine.Verdict) -> None:
        self.seen.append(int(verdict.num_accepted[0]))


def test_a_drafter_of_ones_own(target: PreTrainedModel) -> None:
    prompt = [3, 1, 4]
    text = greedy(target, prompt, 11)
    drafter = Perfect([*prompt, *text])
    output = engine.load(target, drafter=drafter, num_draft_tokens=5).generate([prompt], _params(11))[0]
    assert output.token_ids == text
    assert drafter.seen == ["prefill", 5, 4]  # 6 tokens, then 4 drafts that leave room for the last one


def test_full_acceptance_by_a_draft_model_leaves_no_gap(target: PreTrainedModel) -> None:
    """The target drafts for itself: everything is accepted, round after round, so its cache misses nothing."""
    llm = engine.load(target, drafter=target, num_draft_tokens=4)
    output = llm.generate([[9, 8, 7]], _params(60))[0]
    assert output.token_ids == greedy(target, [9, 8, 7], 60)
    assert output.stats.acceptance_rate == 1.0
    assert output.stats.rounds == 12


def test_a_sampling_draft_model_of_the_same_law_is_always_accepted(target: PreTrainedModel) -> None:
    llm = engine.load(target, drafter=target, num_draft_tokens=4)
    params = engine.SamplingParams(temperature=0.8, top_p=0.9, seed=3, max_new_tokens=50)
    stats = llm.generate([[9, 8, 7]], params)[0].stats
    assert stats.acceptance_rate > 0.99  # p = q up to rounding


def test_an_open_stream_keeps_others_out_and_closing_it_lets_them_in(target: PreTrainedModel) -> None:
    llm = engine.load(target)
    stream = llm.stream([5, 6], _params(20))
    next(stream)
    with pytest.raises(engine.EngineError, match="open stream"):
        llm.generate([[5, 6]])
    stream.close()
    assert llm.generate([[5, 6]], _params(4))[0].token_ids == greedy(target, [5, 6], 4)


@pytest.mark.parametrize("call", ["generate", "warmup"])
def test_a_call_that_has_only_begun_keeps_others_out(target: PreTrainedModel, call: str) -> None:
    """Two threads that call at the same moment would spoil each other's texts."""
    model = copy.deepcopy(target)
    llm = engine.load(model)
    errors = []

    def evaluate() -> PreTrainedModel:
        type(model).eval(model)
        with ThreadPoolExecutor(1) as pool:
            errors.append(pool.submit(llm.generate, [5, 6], _params(2)).exception(timeout=60))
        return model

    model.eval = evaluate  # type: ignore[method-assign]
    model.train()
    llm.generate([5, 6], _params(2)) if call == "generate" else llm.warmup([1], [2])
    assert [type(error) for error in errors] == [engine.EngineError]
    assert llm.generate([5, 6], _params(4)).token_ids == greedy(target, [5, 6], 4)


def test_engines_in_two_threads(target: PreTrainedModel) -> None:
    """Each of their first calls is under way when the other one begins."""
    prompts = [[[3, 4]], [[5, 6, 7], [8, 9]]]
    engines = [engine.load(copy.deepcopy(target), drafter=None) for _ in prompts]
    both = threading.Barrier(2)

    def meet(layer: torch.nn.Module, inputs: object) -> None:
        hooks[layer].remove()
        both.wait(timeout=60)

    first_layers = [llm.target_model.model.layers[0] for llm in engines]
    hooks = {layer: layer.register_forward_pre_hook(meet) for layer in first_layers}
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(lambda llm, each: llm.generate(each, _params(8)), engines, prompts))
    for each, outputs in zip(prompts, found, strict=True):
        assert [output.token_ids for output in outputs] == [greedy(target, prompt, 8) for prompt in each]


def test_nan_logits_are_reported_not_sampled_from(target: PreTrainedModel) -> None:
    llm = engine.load(target, drafter="ngram", max_batch_size=1)
    calls = []

    def spoil(module: torch.nn.Module, args: object, output: object) -> object:
        calls.append(1)
        if len(calls) > 6:
            output.logits[:, 0, 5] = torch.nan
        return output

    hook = target.register_forward_hook(spoil)
    try:
        with pytest.raises(engine.InvalidLogitsError, match=r"NAN_TARGET.* prompts\[1\] at position") as caught:
            llm.generate([[4, 5], [6, 7]], [_params(2), _params(30)])
    finally:
        hook.remove()
    assert caught.value.outputs[0].token_ids == greedy(target, [4, 5], 2)
    assert caught.value.outputs[1] is None
    assert llm.generate([[6, 7]], _params(8))[0].token_ids == greedy(target, [6, 7], 8)


def test_a_prompt_that_fails_harms_no_other(target: PreTrainedModel) -> None:
    """The logits of one text are NaN, in the middle of a batch; so is its K/V, in a slot that others take over."""
    prompts = random_prompts(9, seed=5, vocab_size=VOCAB)
    poison = 3

    def spoil(module: torch.nn.Module, args: object, kwargs: dict, output: object) -> object:
        ids = kwargs["input_ids"]
        if ids.shape[0] == 3:  # all slots decode
            output.logits[(ids == poison).any(dim=1)] = torch.nan
        return output

    bad = 4
    prompts = [[token if token != poison else 5 for token in prompt] for prompt in prompts]
    expected = [greedy(target, prompt, 10) for prompt in prompts]
    prompts[bad] = [*prompts[bad], poison]
    good = [i for i in range(9) if poison not in expected[i] and i != bad]
    assert len(good) >= 6
    told: list[list[bool]] = []  # with the error: which outputs there were

    def take(index: int, output: object) -> None:
        if isinstance(output, engine.InvalidLogitsError):
            told.append([each is None for each in output.outputs])
            errors.append(output)

    errors: list[engine.InvalidLogitsError] = []
    hook = target.register_forward_hook(spoil, with_kwargs=True)
    try:
        llm = engine.load(target, drafter=None, max_batch_size=3, exact=True)  # exact: always all slots
        with pytest.raises(engine.InvalidLogitsError, match="NAN_TARGET") as caught:
            llm.generate(prompts, _params(10), on_output=take)
    finally:
        hook.remove()
    assert errors and told == [[each is None for each in error.outputs] for error in errors] and all(told[0][5:])
    assert bad in caught.value.errors and f"prompts[{bad}]" in caught.value.errors[bad]
    for index in range(9):
        output = caught.value.outputs[index]
        assert (output is None) == (index in caught.value.errors)
        assert index not in good or output.token_ids == expected[index]


def test_long_prompts_are_read_in_parts_between_the_rounds_of_others(target: PreTrainedModel) -> None:
    """A row that is running gets its tokens while a long prompt is being read."""
    plain = tiny("llama", seed=1, vocab_size=VOCAB, max_position_embeddings=9000)
    llm = engine.load(plain, drafter=None, max_batch_size=2)
    calls = []
    hook = plain.model.register_forward_hook(
        lambda module, args, kwargs, output: calls.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )
    long = [7 + i % 50 for i in range(8000)]
    outputs = llm.generate([[5, 6], [7, 8], long], [_params(40), _params(3), _params(4)])
    hook.remove()
    widths = [shape[1] for shape in calls]
    first, last = widths.index(512), len(widths) - 1 - widths[::-1].index(512)
    assert max(widths) == 512 and widths[first : last + 1].count(1) >= 3
    assert sum(width for width in widths if width > 1) >= 7999
    assert outputs[0].token_ids == greedy(plain, [5, 6], 40)
    assert outputs[2].token_ids == greedy(plain, long, 4)


@pytest.mark.parametrize(
    ("missing", "expected"),
    [([7], 7), ([0, 9], 0), ([100, 100, 100], 100), ([400, 500, 600], 512), ([10, 10, 10, 1000], 10), ([5000], 512)],
)
def test_prefill_calls_are_wide_and_little_padded(missing: list[int], expected: int) -> None:
    group, width = prefill_chunk(_to_read(missing), skips_padding=False)
    assert width == expected
    assert sum(min(n, width) for n in missing) >= 0.75 * width * len(group)


@pytest.mark.parametrize(
    ("missing", "expected"),
    [
        *(([7], 7), ([0, 9], 0), ([400, 500, 600], 512), ([10, 10, 10, 1000], 512), ([5000], 512)),
        *(
            ([9] * 16, 9),
            ([400] * 16, 128),
            ([300] + [20] * 15, 300),
            ([3] * 64 + [600], 64),
            ([3] * 15 + [600], 512),
            ([10] + [400] * 15, 128),
        ),
    ],
)
def test_prefill_calls_without_padding_are_wider(missing: list[int], expected: int) -> None:
    _, width = prefill_chunk(_to_read(missing), skips_padding=True)
    assert width == expected
    assert sum(min(n, width) for n in missing) <= PREFILL_TOKENS


def _to_read(missing: list[int]) -> list[Request]:
    return [Request(i, [0] * (n + 1), _params(1), 0, 10**6, None) for i, n in enumerate(missing)]


def live_tensors() -> int:
    """Bytes of all tensors that there are, but for those without a storage that another test may have left: packed weights, and
    what torch.compile traced with."""
    tensors = [each for each in gc.get_objects() if issubclass(type(each), torch.Tensor)]
    storages = [
        each.untyped_storage() for each in tensors if each.layout == torch.strided and not isinstance(each, FakeTensor)
    ]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def python_bytes(llm: engine.Engine, prompts: list[list[int]]) -> tuple[int, int]:
    """What a run takes in Python: at most; and once its outputs have gone, of what the engine's own files allocated."""
    gc.collect()
    tracemalloc.start()
    try:
        llm.generate(prompts, _params(3))
        _, most = tracemalloc.get_traced_memory()
        gc.collect()
        ours = tracemalloc.Filter(True, f"{Path(engine.__file__).parent}/*")
        return most, sum(trace.size for trace in tracemalloc.take_snapshot().filter_traces([ours]).traces)
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("pool_tokens", [None, 500, 10**6], ids=["ngram", "bounded pool", "pool of everything"])
def test_many_prompts_in_bounded_memory(target: PreTrainedModel, pool_tokens: int | None) -> None:
    """For each further prompt no tensors, and in Python its request and its output; nothing when these have gone.

    That it would show is seen from a pool that holds all outputs.
    """
    drafter = "ngram" if pool_tokens is None else engine.SuffixDrafter(pool_tokens)
    llm = engine.load(target, drafter=drafter, max_batch_size=16, num_draft_tokens="auto")
    prompts = random_prompts(500, seed=3, vocab_size=VOCAB)
    llm.generate(prompts[:50], _params(3))
    (most_of_few, kept_of_few), (most, kept) = python_bytes(llm, prompts[:100]), python_bytes(llm, prompts)
    assert (most - most_of_few) / 400 < 4096  # K/V of a row would be 32 KiB
    assert ((kept - kept_of_few) / 400 > 160) == (pool_tokens == 10**6)  # about 300, else 40

    found, calls = [], itertools.count(1)

    def look(*call: object) -> None:
        if next(calls) % 25 == 0:
            found.append(live_tensors())

    hook = target.register_forward_hook(look)
    try:
        llm.generate(prompts, _params(3))
    finally:
        hook.remove()
    assert len(found) >= 3 and max(found) - min(found) < 2**14
    assert llm._target.cache.ragged_layers[0].keys.shape[0] == 16 and llm._target.cache.capacity <= 64


def test_a_thousand_prompts_in_order(target: PreTrainedModel, capsys: pytest.CaptureFixture) -> None:
    prompts = random_prompts(1000, seed=3, vocab_size=VOCAB)
    outputs = engine.load(target, max_batch_size=16).generate(prompts, _params(3), progress=True)
    assert [output.prompt_token_ids for output in outputs] == prompts
    assert outputs[777].token_ids == greedy(target, prompts[777], 3)
    assert "1000/1000" in capsys.readouterr().err


def test_each_output_is_handed_over_when_it_has_ended(target: PreTrainedModel) -> None:
    llm, taken, seen = engine.load(target, drafter=None, max_batch_size=2), [], []
    params = [_params(count) for count in (9, 2, 3, 1)]

    def take(index: int, output: object) -> None:
        taken.append((index, output))
        seen.append(llm.stats.new_tokens)

    outputs = llm.generate([[5], [6], [7], [8]], params, on_output=take)
    assert [index for index, _ in taken] == [1, 2, 3, 0] and seen[0] < seen[-1] == 15
    assert all(output is outputs[index] for index, output in taken)

    def fail(index: int, output: object) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError) as caught:
        llm.generate([[5], [6]], params[:2], on_output=fail)
    assert [output is None for output in caught.value.outputs] == [True, False]  # type: ignore[attr-defined]
    assert llm.generate([5], params[0]).token_ids == outputs[0].token_ids

    @dataclasses.dataclass(frozen=True)
    class Unchangeable(Exception):  # takes no attributes
        pass

    def refuse(index: int, output: object) -> None:
        raise Unchangeable

    with pytest.raises(Unchangeable):
        llm.generate([5], on_output=refuse)
    with pytest.raises(ValueError, match="on_output must be a function of an index and an output, or None, got 'yes'"):
        llm.generate([5], on_output="yes")  # type: ignore[call-overload]


def test_a_drafter_with_nan_logits_costs_speed_and_nothing_else(
    target: PreTrainedModel, caplog: pytest.LogCaptureFixture
) -> None:
    class Broken(engine.DraftModel):
        def propose(self, state: engine.BatchState, num_draft_tokens: int) -> engine.Proposal:
            proposal = super().propose(state, num_draft_tokens)
            return proposal._replace(logits=proposal.logits * torch.nan, stats=None)

    llm = engine.load(target, drafter=Broken(perturbed(target, 0.1)), num_draft_tokens=2)
    params = engine.SamplingParams(temperature=1.0, seed=1, max_new_tokens=6)
    assert llm.generate([[4, 5]], params)[0].stats.new_tokens == 6
    assert caplog.text.count("drafter returned logits") == 1


class Proposing(Perfect):
    """Proposes what it is given."""

    def __init__(self, proposal: object) -> None:
        self.proposal = proposal

    def propose(self, state: engine.BatchState, num_draft_tokens: int) -> engine.Proposal:
        return self.proposal

    def observe(self, state: engine.BatchState, verdict: engine.Verdict) -> None:
        pass

    def prefill(self, state: engine.BatchState) -> None:
        pass


_DRAFTS = torch.ones(1, 2, dtype=torch.int64)


@pytest.mark.parametrize(
    ("proposal", "rule"),
    [
        ([1, 2], "an engine.Proposal, got list"),
        (engine.Proposal([1, 2]), "tokens .* int64 on cpu, got list"),
        (engine.Proposal(_DRAFTS.float()), r"tokens .* int64 on cpu, got torch.float32 of shape \[1, 2\]"),
        (engine.Proposal(_DRAFTS[0]), r"tokens \[B, K\] int64 .*shape \[2\]"),
        (engine.Proposal(_DRAFTS.expand(2, 2)), r"tokens \[B, K\] with B = 1, got \[2, 2\]"),
        (engine.Proposal(_DRAFTS * VOCAB), f"tokens below {VOCAB}, the size of .* got {VOCAB}"),
        (engine.Proposal(_DRAFTS, logits=torch.zeros(1, 1, VOCAB)), r"logits \[B, K, V\] .* \[1, 2\]"),
        (engine.Proposal(_DRAFTS, logits=torch.zeros(1, 2, 0)), r"logits \[B, K, V\] .*, got .* shape \[1, 2, 0\]"),
        (engine.Proposal(_DRAFTS, confidence=torch.zeros(2)), r"confidence \[B, K\] of floats"),
        *(
            (engine.Proposal(_DRAFTS, confidence=torch.tensor([[0.5, sure]])), r"confidence in \[0, 1\)")
            for sure in (1.0, -0.1, torch.nan)
        ),
        (engine.Proposal(_DRAFTS, stats=(1, 2)), "stats that are RowStats"),
        (
            engine.Proposal(_DRAFTS, torch.zeros(1, 2, VOCAB), row_stats(torch.zeros(1, 1, VOCAB))),
            r"stats\.threshold \[B, K\] = \[1, 2\], got torch.float32 of shape \[1, 1\]",
        ),
    ],
)
def test_a_proposal_that_is_none(target: PreTrainedModel, proposal: object, rule: str) -> None:
    drafter = Proposing(proposal)
    llm = engine.load(target, drafter=drafter)
    with pytest.raises(engine.EngineError, match=rf"^Proposing\.propose must return {rule}"):
        llm.generate([3, 4, 5], _params(4))
    drafter.proposal = engine.Proposal(_DRAFTS)
    assert llm.generate([3, 4, 5], _params(4)).token_ids == greedy(target, [3, 4, 5], 4)


@pytest.mark.parametrize(
    ("proposal", "rule"),
    [(None, "an engine.Proposal, got NoneType"), (engine.Proposal(_DRAFTS * VOCAB), "tokens below")],
)
@pytest.mark.parametrize("place", ["first", "behind a lookup", "in a staged model"])
def test_a_proposal_of_a_part_that_is_none(target: PreTrainedModel, proposal: object, rule: str, place: str) -> None:
    """It is the part that is named."""
    part = Proposing(proposal)
    whole = {
        "first": lambda: engine.CascadeDrafter(part, engine.NGramDrafter()),
        "behind a lookup": lambda: engine.CascadeDrafter(engine.NGramDrafter(min_ngram=3), part),
        "in a staged model": lambda: engine.StagedDraftModel(tiny("llama", seed=2, vocab_size=VOCAB), part),
    }[place]()
    with pytest.raises(engine.EngineError, match=rf"^Proposing\.propose must return {rule}"):
        engine.load(target, whole).generate([3, 4, 5], _params(4))


def test_a_hole_in_a_proposal_ends_it(target: PreTrainedModel) -> None:
    """Drafts behind it have no tokens before them that they could follow."""
    prompt, text = [3, 4, 5], greedy(target, [3, 4, 5], 9)
    drafts = torch.tensor([[text[0], -1, *text[2:4]]])
    llm = engine.load(target, drafter=Proposing(engine.Proposal(drafts)), num_draft_tokens=4)
    output = llm.generate(prompt, _params(9))
    assert output.token_ids == text
    assert output.stats.rounds_with(1, 0) > 0 == output.stats.rounds_with(2, 0)


@pytest.mark.parametrize("late", [False, True])
def test_more_drafts_than_were_asked_for_are_dropped(target: PreTrainedModel, late: bool) -> None:
    """Where a round is read late, as on a GPU, the next one rests on how long a text can be by then."""

    class Eager(Perfect):
        def propose(self, state: engine.BatchState, num_draft_tokens: int) -> engine.Proposal:
            return super().propose(state, num_draft_tokens + 70)

    text = greedy(target, [3, 1, 4], 90)
    llm = engine.load(target, drafter=Eager([3, 1, 4, *text]), num_draft_tokens=2)
    llm._server._late = late
    output = llm.generate([3, 1, 4], _params(90))
    assert output.token_ids == text
    assert (output.stats.rounds, output.stats.draft_tokens) == (30, 60)


@pytest.mark.parametrize("error", [RuntimeError("once"), KeyboardInterrupt()])
def test_a_round_that_fails_harms_no_later_one(target: PreTrainedModel, error: BaseException) -> None:
    drafter = Proposing(engine.Proposal(_DRAFTS))
    llm = engine.load(target, drafter=drafter)

    def fail(*args: object) -> None:
        raise error

    hook = target.register_forward_hook(fail)
    with pytest.raises(type(error)):
        llm.generate([3, 4, 5], _params(4))
    hook.remove()
    assert not llm._server._state.active.any()
    assert llm.generate([3, 4, 5], _params(4)).token_ids == greedy(target, [3, 4, 5], 4)


def test_a_stream_whose_drafter_goes_to_another_engine(target: PreTrainedModel) -> None:
    """What it keeps for this text is gone, and on a GPU the memory that graphs read."""
    drafter = engine.DraftModel(perturbed(target, 0.05))
    llm = engine.load(target, drafter)
    stream = llm.stream([3, 4, 5], _params(20))
    next(stream)
    other = engine.load(target, drafter)
    with pytest.raises(engine.EngineError, match=r"DraftModel .* has since been attached to another engine"):
        next(stream)
    for piece in other.stream([3, 4, 5], _params(4)):
        if piece.output is not None:  # its end, after which the drafter may go
            engine.load(target, drafter)
    assert piece.output is not None and piece.output.token_ids == greedy(target, [3, 4, 5], 4)


@pytest.mark.parametrize("in_cascade", [False, True])
def test_a_drafter_serves_the_engine_that_it_was_attached_to_last(target: PreTrainedModel, in_cascade: bool) -> None:
    drafter = engine.DraftModel(perturbed(target, 0.1))
    first = engine.load(target, drafter=drafter)
    expected = first.generate([3, 4, 5], _params(4)).token_ids
    other = engine.CascadeDrafter(engine.NGramDrafter(), drafter) if in_cascade else drafter
    second = engine.load(target, drafter=other)
    assert second.generate([3, 4, 5], _params(4)).token_ids == expected
    for call in (first.generate, lambda *args: list(first.stream(*args)), lambda *args: first.warmup()):
        with pytest.raises(engine.EngineError, match=r"DraftModel .* has since been attached to another engine"):
            call([3, 4, 5], _params(4))
    assert second.generate([3, 4, 5], _params(4)).token_ids == expected


def test_a_drafter_does_not_hold_the_memory_of_an_engine_that_is_gone() -> None:
    drafter = engine.SuffixDrafter()
    llm = engine.load(tiny("llama"), drafter=drafter)
    llm.generate([3, 4, 5], _params(4))
    model, cache = weakref.ref(llm.target_model), weakref.ref(llm._target.cache)
    del llm
    gc.collect()
    assert model() is None and cache() is None
    assert engine.load(tiny("gpt2"), drafter=drafter).generate([3, 4, 5], _params(4)).token_ids


def test_the_cache_grows_no_further_where_a_drafter_finds_no_memory(
    target: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = engine.load(target, drafter="ngram")

    def reserve(length: int) -> None:
        raise MemoryError

    monkeypatch.setattr(llm.drafter, "reserve", reserve, raising=False)
    capacities = set()
    for _ in range(3):
        with pytest.raises(MemoryError):
            llm.generate([3, 4, 5], _params(4))
        capacities.add(llm._target.cache.capacity)
    assert len(capacities) == 1
    monkeypatch.undo()
    assert llm.generate([3, 4, 5], _params(4)).token_ids == greedy(target, [3, 4, 5], 4)


def test_no_token_is_committed_beyond_a_limit() -> None:
    state = BatchState.allocate(2, 20, torch.device("cpu"))
    state.seq_lens.fill_(3)
    state.limits.copy_(torch.tensor([5, 20]))
    state.active.fill_(True)
    state.commit(Verdict(torch.tensor([[7, 8, 9], [7, 8, -1]]), torch.tensor([2, 1]), torch.zeros(2)))
    assert state.seq_lens.tolist() == [4, 5]
    assert state.tokens[:, 4:7].tolist() == [[7, 0, 0], [7, 8, 0]]


def test_a_target_in_training_mode_is_set_right() -> None:
    target = tiny("gpt2", resid_pdrop=0.5, embd_pdrop=0.5)
    expected = greedy(target, [3, 4, 5], 8)
    llm = engine.load(target)
    target.train()
    assert llm.generate([3, 4, 5], _params(8)).token_ids == expected
    assert not target.training


def test_a_part_of_a_target_in_training_mode_is_set_right() -> None:
    target = tiny("gpt2", resid_pdrop=0.5)
    expected = greedy(target, [3, 4, 5], 8)
    llm = engine.load(target)
    target.transformer.h[1].mlp.dropout = torch.nn.Dropout(0.5)  # modules are made in training mode
    assert llm.generate([3, 4, 5], _params(8)).token_ids == expected


@pytest.mark.parametrize("used", [True, False])
def test_a_target_that_is_converted_after_loading_is_to_be_loaded_again(used: bool) -> None:
    target = tiny(dtype=torch.float32)
    llm = engine.load(target)
    if used:
        llm.generate([3, 4, 5], _params(4))
    target.double()
    for call in (llm.generate, lambda *args: list(llm.stream(*args)), lambda *args: llm.warmup()):
        with pytest.raises(
            engine.EngineError, match=r"must stay in torch.float32 on cpu.* is now in torch.float64 on cpu"
        ):
            call([3, 4, 5], _params(4))
    target.float()
    assert llm.generate([3, 4, 5], _params(8)).token_ids == greedy(target, [3, 4, 5], 8)


def test_a_draft_model_that_is_converted_after_loading_is_to_be_loaded_again() -> None:
    target = tiny(dtype=torch.float32)
    draft = perturbed(target, 0.05)
    llm = engine.load(target, drafter=draft)
    draft.half()
    with pytest.raises(engine.EngineError, match=r"the drafter must stay in torch.float32 on cpu"):
        llm.generate([3, 4, 5], _params(4))
    assert draft.float().train().training
    assert llm.generate([3, 4, 5], _params(8)).token_ids == greedy(target, [3, 4, 5], 8) and not draft.training


@pytest.mark.parametrize("size", [VOCAB + 32, VOCAB - 24])
def test_a_target_with_another_vocabulary_is_to_be_loaded_again(size: int) -> None:
    target = tiny(dtype=torch.float32, vocab_size=VOCAB)
    llm = engine.load(target)
    target.resize_token_embeddings(size)
    with pytest.raises(engine.EngineError, match=f"must keep its vocabulary of {VOCAB}, .* now has one of {size}:"):
        llm.generate([3, 4, 5], _params(4))


@pytest.mark.parametrize("drafter", ["ngram", "model"])
def test_autocast_around_it_changes_nothing(drafter: str) -> None:
    target = tiny(dtype=torch.float32)
    llm = engine.load(target, perturbed(target, 0.05) if drafter == "model" else drafter)
    prompts, texts = random_prompts(4), []
    for enabled in (True, False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            texts.append([output.token_ids for output in llm.generate(prompts, _params(8))])
            for _ in llm.stream(prompts[1], _params(8)):
                assert torch.is_autocast_enabled("cpu") == enabled
    assert texts == [[greedy(target, prompt, 8) for prompt in prompts]] * 3


def test_errors_can_be_copied_and_pickled() -> None:
    error = engine.InvalidLogitsError("prompts[1]", [None, None], {1: "prompts[1]"})
    for other in (copy.copy(error), pickle.loads(pickle.dumps(error))):
        assert (str(other), other.outputs, other.errors) == (str(error), error.outputs, error.errors)


def test_penalties_below_1_reward_repetition(target: PreTrainedModel) -> None:
    llm, prompt = engine.load(target, None), [1, 2, 3, 4]
    off = llm.generate(prompt, engine.SamplingParams(max_new_tokens=8, ignore_eos=True)).token_ids
    on = llm.generate(
        prompt, engine.SamplingParams(max_new_tokens=8, ignore_eos=True, repetition_penalty=0.01)
    ).token_ids
    assert on != off and len({*prompt, *on}) < len({*prompt, *off})


def test_a_row_that_a_stop_token_has_ended_is_not_read_on(target: PreTrainedModel) -> None:
    """Between two that go on, in whose rounds it is."""
    llm, prompts = engine.load(target, None, max_batch_size=3), [[1, 2, 3], [4, 5, 6], [7, 8, 9]]
    goes_on = engine.SamplingParams(max_new_tokens=9, ignore_eos=True)
    stops = engine.SamplingParams(max_new_tokens=9, stop_token_ids=greedy(target, prompts[1], 1))
    decode, read = llm._target.decode, []

    def counted(**arguments: Any) -> torch.Tensor:
        read.append(int(arguments["num_valid"].sum()))
        return decode(**arguments)

    llm._target.decode = counted
    llm.generate(prompts, [goes_on, stops, goes_on])
    assert read == [3, *[2] * 8]


@pytest.mark.parametrize("num_rows", [1, 2])
def test_only_for_a_row_alone_drawn_drafts_may_end_early(target: PreTrainedModel, num_rows: int) -> None:
    class Notes(engine.NGramDrafter):
        def propose(self, state: BatchState, num_draft_tokens: int) -> engine.Proposal:
            seen.append((int(state.active.sum()), state.may_end_early))
            return super().propose(state, num_draft_tokens)

    seen: list[tuple[int, bool]] = []
    llm = engine.load(target, Notes(), num_draft_tokens="auto", max_batch_size=2)
    llm.generate([[1, 2, 1, 2, 1]] * num_rows, engine.SamplingParams(max_new_tokens=30, ignore_eos=True))
    assert seen and all(early == (rows == 1) for rows, early in seen)


def test_a_round_is_as_large_as_the_drafts_that_were_read(target: PreTrainedModel) -> None:
    llm = engine.load(target, "ngram", num_draft_tokens="auto", max_batch_size=3)
    observe, sizes = llm._server._lengths.observe_times, []

    def noted(num_rows: int, asked: int, size: int, *rest: Any) -> None:
        sizes.append(size)
        observe(num_rows, asked, size, *rest)

    llm._server._lengths.observe_times = noted
    llm.generate([[1, 2, 1, 2, 1], [3, 4, 5], [6, 6, 6]], engine.SamplingParams(max_new_tokens=40, ignore_eos=True))
    assert llm._target.skips_padding and sum(sizes) == llm.stats.draft_tokens > 0


def _params(max_new_tokens: int) -> engine.SamplingParams:
    return engine.SamplingParams(max_new_tokens=max_new_tokens)


def test_several_texts_without_a_mask(target: PreTrainedModel) -> None:
    """As a tokenizer returns them that is asked for ids alone."""
    llm, params = engine.load(target), engine.SamplingParams(max_new_tokens=1)
    for more in ({}, {"attention_mask": None}):
        found = llm.generate(BatchEncoding({"input_ids": [[97, 98], [99]], **more}), params)
        assert [output.prompt_token_ids for output in found] == [[97, 98], [99]]


def test_a_text_of_which_a_tokenizer_makes_nothing(target: PreTrainedModel) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{% endfor %}"
    llm = engine.load(target, tokenizer=tokenizer)
    with pytest.raises(ValueError, match=r"prompts\[0\] must hold at least one token, got none"):
        llm.generate([{"role": "user", "content": "hi"}])


def test_a_chat_of_strings_and_parts(target: PreTrainedModel) -> None:
    """For a template that knows parts alone."""
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = TEMPLATES["parts"]
    llm, parts = engine.load(target, tokenizer=tokenizer), [{"type": "text", "text": "Go on"}]
    chat = [{"role": "system", "content": "Be brief"}, {"role": "user", "content": parts}]
    found = llm.generate(chat, engine.SamplingParams(max_new_tokens=1)).prompt_token_ids
    assert bytes(found).decode() == "system: <Be brief>user: <Go on>"


def test_templates_that_refuse_what_they_are_tried_with(target: PreTrainedModel) -> None:
    """Contents go to them as they are."""
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = (
        "{% if messages[0]['role'] != 'system' %}{{ raise_exception('no system') }}{% endif %}" + TEMPLATES["strings"]
    )
    chat = [{"role": "system", "content": "Be brief"}, {"role": "user", "content": "Go on"}]
    found = engine.load(target, tokenizer=tokenizer).generate(chat, engine.SamplingParams(max_new_tokens=1))
    assert bytes(found.prompt_token_ids).decode() == "system: Be brief\nuser: Go on\n"


def test_the_time_of_a_request_is_not_that_of_those_before_it(target: PreTrainedModel) -> None:
    llm, params = engine.load(target, max_batch_size=1), engine.SamplingParams(max_new_tokens=8, ignore_eos=True)
    seconds = [output.stats.total_seconds for output in llm.generate([[5, 6], [7, 8], [9, 10]], params)]
    seconds.append(llm.generate([5, 6], params).stats.total_seconds)
    assert min(seconds) > 0 and sum(seconds) <= llm.stats.total_seconds
