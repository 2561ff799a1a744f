"""exact=True: the same tokens, bit for bit, with and without speculation, in bf16."""

import copy
import os
from functools import cache
from typing import Any

import pytest
import smollm2
import torch
from tiny_models import perturbed, random_prompts, tiny, tokens_read
from transformers import PreTrainedModel

import engine
from engine.drafters.eagle_model import EagleModel, eagle_config
from engine.drafters.intersection import IntersectionDraftModel
from engine.drafters.medusa_model import MedusaHeads
from engine.drafters.mlp import MlpSpeculator
from engine.drafters.reencoding import ReencodingDraftModel
from engine.drafters.staged import StagedDraftModel
from engine.heads import DEFAULT_DRAFTER
from engine.model import EXACT_WIDTH, RaggedModel

QUESTIONS = [
    "Why is the sky blue?",
    "Name three rivers in Europe.",
    "Repeat after me, three times: she sells sea shells by the sea shore.",
    "Write a Python function that adds two numbers, then write it again with type hints.",
    "What is 12 * 7?",
    "Translate 'good morning, my friend' into French and Spanish.",
    "Summarize: The cat sat on the mat. The dog sat on the cat. The mat was flat. The cat was flat. All were flat.",
    "List the days of the week, then list the days of the week backwards.",
]
CHATS = [[{"role": "user", "content": question}] for question in QUESTIONS]
Size = tuple[int, int]  # questions and new tokens of each
SHORT, LONG = (4, 16), (len(QUESTIONS), 48)


def first_layers(model: PreTrainedModel, count: int) -> PreTrainedModel:
    """A draft model: the target's own first layers."""
    config = copy.deepcopy(model.config)
    config.num_hidden_layers = count
    draft = type(model)(config).to(model.dtype)
    draft.load_state_dict(model.state_dict(), strict=False)
    return draft


def texts(batch: int, size: Size, **options: Any) -> list[list[int]]:
    questions, new = size
    plain = smollm2.loaded()
    llm = engine.load(plain.target_model, tokenizer=plain.tokenizer, exact=True, max_batch_size=batch, **options)
    return [output.token_ids for output in llm.generate(CHATS[:questions], engine.SamplingParams(max_new_tokens=new))]


@pytest.fixture(scope="module")
def two_threads() -> Any:
    """Unless other tests run beside these: threads that wait for each other on a busy core wait long."""
    before = torch.get_num_threads()
    torch.set_num_threads(2 if int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")) == 1 else 1)
    yield
    torch.set_num_threads(before)


@cache
def plain_texts(batch: int, size: Size) -> list[list[int]]:
    """When they are first asked for: another worker may need those of the other batch size alone."""
    return texts(batch, size, drafter=None)


# (batch, K, drafter): each value of each by default, in shorter texts; the whole product under -m slow.
SAMPLE = [(1, 5, "ngram"), (4, 1, "model"), (4, 3, DEFAULT_DRAFTER)]
DRAFTERS = ("ngram", "model", "suffix", "layer_skip:20", DEFAULT_DRAFTER.removeprefix("ngram+"), DEFAULT_DRAFTER)
WHOLE = [(batch, k, drafter) for batch in (1, 4) for k in (1, 3, 5) for drafter in DRAFTERS]


@pytest.mark.parametrize(
    ("batch", "num_draft_tokens", "drafter", "size"),
    [*((*case, SHORT) for case in SAMPLE), *(pytest.param(*case, LONG, marks=pytest.mark.slow) for case in WHOLE)],
)
def test_smollm2_in_bf16(two_threads: None, batch: int, num_draft_tokens: int, drafter: str, size: Size) -> None:
    draft = first_layers(smollm2.loaded().target_model, 6) if drafter == "model" else drafter
    assert texts(batch, size, drafter=draft, num_draft_tokens=num_draft_tokens) == plain_texts(batch, size)


def random_head(target: PreTrainedModel, kind: str) -> engine.Drafter:
    """Untrained heads, in the shapes in use: the text does not depend on how good drafts are."""
    hidden, vocab = target.config.hidden_size, target.config.vocab_size
    with torch.random.fork_rng():
        torch.manual_seed(0)
        if kind == "medusa":
            return engine.MedusaDrafter(MedusaHeads(hidden, None, 4, output="target"))
        if kind == "mlp":
            return engine.MlpSpeculatorDrafter(MlpSpeculator(hidden, vocab, 4, tie_weights=True), min_reach=0.0)
        config = eagle_config(target.config, eagle=1)
        config.num_hidden_layers = 1
        return engine.EagleDrafter(EagleModel(config), min_reach=0.0)


def drafter_of(kind: str) -> engine.Drafter:
    """A drafter for SmolLM2; those that are models have its first layers, those that learned are untrained."""
    plain = smollm2.loaded()
    if kind in ("medusa", "mlp", "eagle1"):
        return random_head(plain.target_model, kind)
    model, tokenizer = first_layers(plain.target_model, 2), plain.tokenizer
    if kind == "staged":
        return StagedDraftModel(model)
    if kind == "greedy model":
        return engine.DraftModel(model, greedy=True)
    return (IntersectionDraftModel if kind == "intersection" else ReencodingDraftModel)(model, tokenizer, tokenizer)


# One (batch, K) each; fewer questions and tokens, as hardly any draft stands. Some under -m slow only.
OTHERS = [(4, 3, "medusa"), (1, 5, "staged"), (1, 1, "intersection")]
MORE_OTHERS = [(1, 4, "mlp"), (1, 3, "eagle1"), (1, 3, "greedy model"), (4, 3, "re-encoding")]


@pytest.mark.parametrize(
    ("batch", "num_draft_tokens", "kind"),
    [*OTHERS, *(pytest.param(*case, marks=pytest.mark.slow) for case in MORE_OTHERS)],
)
def test_other_drafters_for_smollm2_in_bf16(two_threads: None, batch: int, num_draft_tokens: int, kind: str) -> None:
    plain = smollm2.loaded()
    llm = engine.load(
        plain.target_model,
        drafter_of(kind),
        num_draft_tokens,
        tokenizer=plain.tokenizer,
        exact=True,
        max_batch_size=batch,
    )
    outputs = llm.generate(CHATS[:batch], engine.SamplingParams(max_new_tokens=12))
    assert [output.token_ids for output in outputs] == [ids[:12] for ids in plain_texts(batch, SHORT)[:batch]]
    assert llm.stats.draft_tokens > 0


@pytest.mark.parametrize(
    ("drafter", "size"),
    [("ngram", SHORT), *(pytest.param(d, LONG, marks=pytest.mark.slow) for d in ("ngram", DEFAULT_DRAFTER))],
)
def test_a_number_of_drafts_that_changes_in_bf16(two_threads: None, drafter: str, size: Size) -> None:
    assert texts(4, size, drafter=drafter, num_draft_tokens="auto") == plain_texts(4, size)


def test_coupled_samples_in_bf16() -> None:
    """Sampled text depends on the seed alone: not on the drafter, on K or on the batch."""
    target = tiny("llama", dtype=torch.bfloat16, max_position_embeddings=1200)
    prompts = random_prompts(5, seed=9)
    params = [
        engine.SamplingParams(temperature=0.8, top_p=p, max_new_tokens=30, seed=seed)
        for seed, p in enumerate((1.0, 0.9, 1.0, 0.7, 1.0))
    ]

    def texts(drafter: Any, num_draft_tokens: int, batch: int) -> list[list[int]]:
        llm = engine.load(
            target, drafter=drafter, num_draft_tokens=num_draft_tokens, max_batch_size=batch, exact=True,
            verification="coupled",
        )  # fmt: skip
        outputs = llm.generate(prompts, params)
        assert drafter in (None, "ngram") or llm.stats.accepted_tokens > 0
        return [output.token_ids for output in outputs]

    expected = texts(None, 0, 1)
    assert texts(None, 0, 4) == expected
    for num_draft_tokens, batch in ((1, 1), (5, 4), (9, 2)):
        assert texts(perturbed(target, 0.05), num_draft_tokens, batch) == expected
    assert texts("ngram", 3, 4) == expected


@pytest.mark.parametrize(
    ("name", "num_draft_tokens"),
    [
        *(("llama", 11), ("gemma3_text", 11), ("gpt2", 2), ("phi", 2)),
        *(pytest.param(name, 11, marks=pytest.mark.slow) for name in ("gpt2", "phi")),
        *(pytest.param(name, 2, marks=pytest.mark.slow) for name in ("llama", "gemma3_text")),
    ],
)
def test_tiny_models_in_bf16(name: str, num_draft_tokens: int) -> None:
    """11 drafts take two calls of the one width. With nearly even logits, every rounding shows."""
    target = tiny(name, dtype=torch.bfloat16, max_position_embeddings=1200)
    prompts = [*random_prompts(4, seed=9), [5, 6, 7, 8] * 140]
    params = engine.SamplingParams(max_new_tokens=40)
    expected = engine.load(target, drafter=None, exact=True, max_batch_size=2).generate(prompts, params)
    for drafter in ("ngram", perturbed(target, 0.05)):
        llm = engine.load(target, drafter=drafter, exact=True, max_batch_size=2, num_draft_tokens=num_draft_tokens)
        outputs = llm.generate(prompts, params)
        assert [o.token_ids for o in outputs] == [o.token_ids for o in expected]
        assert llm.stats.accepted_tokens > 0


def test_a_prompts_own_length_alone_decides_how_it_is_read() -> None:
    """In parts of 512 tokens and one of the rest, without padding: beside others, and while others run."""
    target = tiny("llama", dtype=torch.bfloat16, max_position_embeddings=1200)
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(2, 64, (length,), generator=generator).tolist() for length in (700, 30, 1100, 513)]
    params = [engine.SamplingParams(max_new_tokens=new) for new in (9, 40, 20, 30)]
    parts, found = [[512, 187], [29], [512, 512, 75], [512]], []
    for batch, order in ((1, [0, 1, 2, 3]), (4, [0, 1, 2, 3]), (2, [1, 3, 2, 0])):
        llm = engine.load(target, exact=True, max_batch_size=batch, num_draft_tokens=3)
        with tokens_read(target) as read:
            outputs = llm.generate([prompts[i] for i in order], [params[i] for i in order])
        found.append({i: output.token_ids for i, output in zip(order, outputs, strict=True)})
        assert [count for count in read if count != batch * EXACT_WIDTH] == [part for i in order for part in parts[i]]
    assert found[0] == found[1] == found[2]


def test_rows_do_not_depend_on_slot_or_neighbours() -> None:
    """One row's logits, bit for bit: alone, in another slot, beside longer rows, in other chunks."""
    target = tiny("llama", dtype=torch.bfloat16, max_position_embeddings=1200)
    text = torch.randint(0, 64, (1, 300), generator=torch.Generator().manual_seed(0))
    neighbour = torch.randint(0, 64, (1, 1000), generator=torch.Generator().manual_seed(1))

    def logits(slot: int, with_neighbour: bool, cuts: list[int]) -> torch.Tensor:
        ragged = RaggedModel(target, num_slots=3, exact=True)
        ragged.cache.reserve(1200)
        start = torch.zeros(3, dtype=torch.int64)
        if with_neighbour:
            other = (slot + 1) % 3
            start[other] = 990
            ragged.prefill(neighbour, [(0, 990)], slice(other, other + 1))
        start[slot] = 280
        ragged.prefill(text, [(0, 280)], slice(slot, slot + 1))
        parts = []
        for width in cuts:
            tokens = torch.zeros(3, width, dtype=torch.int64)
            begin = int(start[slot])
            tokens[slot] = text[0, begin : begin + width]
            valid = torch.zeros(3, dtype=torch.int64)
            valid[slot] = width
            parts.append(ragged.decode(tokens, start, valid, slice(0, 3), int(start.max()) + width)[slot])
            start[slot] += width
        return torch.cat(parts)

    alone = logits(0, False, [1] * 16)
    assert torch.equal(alone, logits(2, False, [EXACT_WIDTH] * 2))
    assert torch.equal(alone, logits(1, True, [3, 1, 5, 7]))
    assert torch.equal(alone, logits(0, True, [13, 3]))  # more than one call's width
