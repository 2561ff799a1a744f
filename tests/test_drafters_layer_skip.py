"""The target drafts for itself: its text stays its own, and the drafts are what a shortened model would say."""

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
import sampled_laws
import torch
from replayed_graphs import with_graphs
from sampled_laws import RULES, SETTINGS, p_value
from tiny_models import CONFIGS, CONTEXT, EAGER_ONLY, GROUPED_EXPERTS, WINDOW, greedy, random_prompts, tiny
from transformers import PreTrainedModel

import engine
from engine import layer_search
from engine.decoder_layers import DecoderLayers
from engine.drafters.layer_skip import LayerSkipDrafter
from engine.layer_search import AnsweredTexts, LayerSearch, search_layers
from engine.metrics import expected_speedup
from engine.model import RaggedModel

NAMES = ["llama", "gpt2", "opt", "gpt_neox", "gemma3_text", "falcon", "mixtral"]
LAYERS = 4
NEW = 12


def sampled(cases: Iterable[Any], kept: Callable[[Any], bool]) -> list[Any]:
    """Cases of a test; those that are not kept run under -m slow only."""
    return [case if kept(case) else pytest.param(*case, marks=pytest.mark.slow) for case in cases]


def four_layers(name: str, dtype: torch.dtype = torch.float64, **changes: Any) -> PreTrainedModel:
    """Four layers; where some slide, neighbours differ, and the full one is in the middle."""
    sizes: dict[str, Any] = dict(num_hidden_layers=LAYERS) | (dict(n_layer=LAYERS) if name == "gpt2" else {})
    if name == "gemma3_text":
        sizes["layer_types"] = ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"]
    return tiny(name, dtype=torch.float32 if name in GROUPED_EXPERTS else dtype, **{**sizes, **changes})


@functools.cache
def model(name: str) -> PreTrainedModel:
    return four_layers(name)


@functools.cache
def prompts() -> list[list[int]]:
    return random_prompts(7)


@functools.cache
def expected(name: str) -> list[list[int]]:
    return [greedy(model(name), prompt, NEW) for prompt in prompts()]


def run(name: str, drafter: Any, **options: Any) -> engine.Engine:
    """An engine that has answered all prompts as plain decoding does."""
    llm = engine.load(model(name), drafter=drafter, max_batch_size=3, **options)
    outputs = llm.generate(prompts(), engine.SamplingParams(max_new_tokens=NEW))
    assert [output.token_ids for output in outputs] == expected(name)
    return llm


@contextmanager
def skipping(target: PreTrainedModel, layers: Sequence[int], start: int) -> Iterator[None]:
    """From position `start` on, the other layers hand on what they were given; before it the model is whole."""

    def hand_on(module: Any, args: Any, kwargs: Any, output: Any) -> Any:
        given = args[0] if args else kwargs["hidden_states"]
        hidden = output[0] if isinstance(output, tuple) else output
        hidden = torch.cat([hidden[:, :start], given[:, start:]], dim=1)
        return (hidden, *output[1:]) if isinstance(output, tuple) else hidden

    with ExitStack() as hooks:
        for index, layer in enumerate(DecoderLayers(target).layers):
            if index not in layers:
                hooks.enter_context(layer.register_forward_hook(hand_on, with_kwargs=True))
        yield


def prefilled(target: PreTrainedModel, texts: Sequence[Sequence[int]], **options: Any) -> RaggedModel:
    """All tokens of each text but the last have been read."""
    ragged = RaggedModel(target, len(texts), **options)
    ragged.cache.reserve(CONTEXT)
    for slot, text in enumerate(texts):
        if len(text) > 1:
            ragged.prefill(torch.tensor([text]), [(0, len(text) - 1)], slice(slot, slot + 1))
    return ragged


def state_of(texts: Sequence[Sequence[int]], temperature: float = 0.0, limit: int = CONTEXT) -> engine.BatchState:
    state = engine.BatchState.allocate(len(texts), CONTEXT, torch.device("cpu"))
    for slot, text in enumerate(texts):
        state.tokens[slot, : len(text)] = torch.tensor(text)
        state.seq_lens[slot] = len(text) - 1
    state.limits.fill_(limit)
    state.temperature.fill_(temperature)
    longest = max(map(len, texts))
    return state.select(slice(0, len(texts)), max_text_length=longest, all_greedy=temperature == 0)


@pytest.mark.parametrize(
    ("name", "num_draft_tokens"),
    sampled(
        itertools.product(NAMES, [1, 2, 3, 4, 5, "auto"]), lambda case: case[0] == "llama" or case[1] in (4, "auto")
    ),
)
def test_greedy_text_is_plain_text(name: str, num_draft_tokens: Any) -> None:
    for drafter in (LayerSkipDrafter(exit_layer=2), LayerSkipDrafter(layers=(0, 2, 3), greedy=True)):
        llm = run(name, drafter, num_draft_tokens=num_draft_tokens)
        assert llm.stats.draft_tokens > 0


@pytest.mark.parametrize("name", CONFIGS)
def test_drafts_are_a_shortened_models(name: str) -> None:
    """Their logits, against one plain call in which the layers are left out from the pending token on."""
    target, texts, drafts = four_layers(name), prompts()[:3], 4
    for layers in ((0, 1), (1, 3), (2,)):
        drafter = LayerSkipDrafter(layers=layers)
        drafter.attach(prefilled(target, texts))
        with torch.inference_mode():
            proposal = drafter.propose(state_of(texts, temperature=1.0), drafts)
        assert proposal.logits is not None
        for row, text in enumerate(texts):
            whole = torch.tensor([[*text, *proposal.tokens[row, :-1]]])
            with torch.no_grad(), skipping(target, layers, start=len(text) - 1):
                logits = target(whole, use_cache=False).logits[0, len(text) - 1 :]
            close = dict(rtol=1e-4, atol=1e-4) if name in GROUPED_EXPERTS else dict(rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(proposal.logits[row], logits, **close)


@pytest.mark.parametrize("greedy_drafts", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_with_all_layers_every_draft_stands(name: str, greedy_drafts: bool) -> None:
    stats = run(name, LayerSkipDrafter(exit_layer=LAYERS, greedy=greedy_drafts), num_draft_tokens=5).stats
    assert stats.acceptance_rate == 1.0
    assert stats.block_efficiency > 3


@pytest.mark.parametrize("name", NAMES)
def test_with_ragged_attention(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What runs on a GPU, with the kernels' torch twins."""
    monkeypatch.setattr("engine.model.uses_ragged_kernel", lambda model: True)
    llm = run(name, LayerSkipDrafter(layers=(0, 2, 3)), num_draft_tokens=3)
    assert llm._target.cache.whole_buffers == (name != "falcon")
    assert run(name, LayerSkipDrafter(exit_layer=LAYERS), num_draft_tokens=4).stats.acceptance_rate == 1.0


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("verified", [1, 3, 6])
def test_drafting_leaves_no_trace_in_the_target(exact: bool, verified: int) -> None:
    """Logits and hidden states afterwards, bit for bit, also where fewer tokens are verified than were drafted."""
    target = four_layers("gemma3_text", dtype=torch.bfloat16, max_position_embeddings=600)
    texts = [(prompt * 2)[:32] for prompt in prompts()[1:4]]
    results = []
    for num_draft_tokens in (0, 5):
        ragged = prefilled(target, texts, exact=exact)
        hidden = ragged.keep_hidden_states([2])
        drafter = LayerSkipDrafter(layers=(0, 3))
        drafter.attach(ragged)
        state = state_of(texts)
        if num_draft_tokens:
            with torch.inference_mode():
                drafter.propose(state, num_draft_tokens)
            assert hidden.states.numel() == 0
        tokens = torch.arange(2, 2 + verified).repeat(3, 1)
        logits = [
            ragged.decode(tokens, start, torch.full((3,), verified), slice(0, 3), state.max_text_length + 2 * verified)
            for start in (
                state.seq_lens,
                state.seq_lens + verified,
            )  # the second time what the first has written is read
        ]
        positions = state.seq_lens[:, None] + torch.arange(2 * verified)
        results.append(torch.cat([*logits[0].flatten(1), *logits[1].flatten(1)]).float())
        results.append(hidden.gather(slice(0, 3), positions).flatten(1).float())
    assert torch.equal(results[0], results[2])
    assert torch.equal(results[1], results[3])


@pytest.mark.parametrize(
    ("name", "num_draft_tokens", "greedy_drafts"),
    sampled(
        (
            (name, *k)
            for name in ("llama", "gemma3_text", "gpt2", "phi")
            for k in ((2, False), (11, True), ("auto", True))
        ),
        lambda case: case[0] == "gemma3_text" or case[1] == 11,
    ),
)
def test_exact_text_in_bf16(name: str, num_draft_tokens: Any, greedy_drafts: bool) -> None:
    """11 drafts take two calls of the one width. With nearly even logits, every rounding shows."""
    target = four_layers(name, dtype=torch.bfloat16, max_position_embeddings=600)
    texts = [*random_prompts(4, seed=9), [5, 6, 7, 8] * 70]
    params = engine.SamplingParams(max_new_tokens=24)
    options = dict(exact=True, max_batch_size=2)
    plain = engine.load(target, drafter=None, **options).generate(texts, params)
    drafter = LayerSkipDrafter(layers=(0, 2, 3), greedy=greedy_drafts)
    llm = engine.load(target, drafter=drafter, num_draft_tokens=num_draft_tokens, **options)
    assert [o.token_ids for o in llm.generate(texts, params)] == [o.token_ids for o in plain]
    assert llm.stats.draft_tokens > 0


def test_coupled_text_is_plain_text() -> None:
    target = four_layers("llama")
    params = [engine.SamplingParams(temperature=0.8, top_k=9, max_new_tokens=NEW, seed=seed) for seed in range(7)]

    def texts(drafter: Any) -> list[list[int]]:
        llm = engine.load(target, drafter=drafter, num_draft_tokens=3, max_batch_size=3, verification="coupled")
        outputs = llm.generate(prompts(), params)
        assert drafter is None or llm.stats.accepted_tokens > 0
        return [output.token_ids for output in outputs]

    plain = texts(None)
    assert texts(LayerSkipDrafter(exit_layer=2)) == plain
    assert texts(LayerSkipDrafter(exit_layer=3, greedy=True)) == plain


@functools.cache
def flat_target() -> PreTrainedModel:
    """Three layers, of which the last two change little, and logits flat enough for a wrong law to show."""
    target = sampled_laws.flat_target(num_hidden_layers=3)
    with torch.no_grad():
        for layer in DecoderLayers(target).layers[1:]:
            layer.self_attn.o_proj.weight *= 0.2
            layer.mlp.down_proj.weight *= 0.2
    return target


COUNT = 10_000
EXIT, SET = dict(exit_layer=1), dict(layers=(1, 2))
GREEDY = (
    EXIT | dict(greedy=True),
    dict(layers=(0, 2), greedy=True),
)  # without the first layer, what is likeliest is never accepted
WHOLE = [
    (rule, which, setting, 200_000)
    for rule in RULES
    for which in (EXIT, SET, *GREEDY)
    for setting in range(len(SETTINGS))
]


@pytest.mark.parametrize(
    ("verification", "which", "setting", "count"),
    [
        ("rejection", EXIT, 0, COUNT),
        ("block", EXIT, 1, COUNT),
        ("rejection", GREEDY[0], 1, COUNT),
        ("rejection", SET, 1, COUNT),
        ("block", SET, 0, COUNT),
        *sampled(WHOLE, lambda case: False),
    ],
)
def test_law_of_samples(verification: str, which: dict[str, Any], setting: int, count: int) -> None:
    drafter = LayerSkipDrafter(**which)
    options: dict[str, Any] = dict(num_draft_tokens=2, max_batch_size=4096, verification=verification)
    llm = engine.load(flat_target(), drafter=drafter, **options)
    assert p_value(llm, flat_target(), SETTINGS[setting], count) > 1e-3
    assert 0.05 < llm.stats.acceptance_rate < 0.95, "neither acceptance nor rejection is tested"


def test_a_wrong_law_is_caught() -> None:
    class Lying(LayerSkipDrafter):
        def propose(self, state: engine.BatchState, num_draft_tokens: int) -> engine.Proposal:
            proposal = super().propose(state, num_draft_tokens)
            assert proposal.logits is not None
            return proposal._replace(logits=proposal.logits * 0.5, stats=None)

    llm = engine.load(flat_target(), drafter=Lying(exit_layer=1), num_draft_tokens=2, max_batch_size=4096)
    assert p_value(llm, flat_target(), SETTINGS[0], COUNT) < 1e-6


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_greedy_proposals(temperature: float) -> None:
    texts = prompts()[:3]
    ragged = prefilled(model("llama"), texts)
    for greedy_drafts in (True, False):
        drafter = LayerSkipDrafter(layers=(1, 2), greedy=greedy_drafts)
        drafter.attach(ragged)
        with torch.inference_mode():
            proposal = drafter.propose(state_of(texts, temperature), 3)
        assert (proposal.confidence is not None) == (greedy_drafts or temperature == 0)
        assert (proposal.logits is not None) == (proposal.stats is not None) == (not greedy_drafts and temperature > 0)
        if proposal.confidence is None:
            continue
        for row, text in enumerate(texts):
            whole = torch.tensor([[*text, *proposal.tokens[row, :-1]]])
            with torch.no_grad(), skipping(model("llama"), (1, 2), start=len(text) - 1):
                chances, likeliest = model("llama")(whole).logits[0, len(text) - 1 :].softmax(-1).max(-1)
            assert torch.equal(proposal.tokens[row], likeliest)
            torch.testing.assert_close(proposal.confidence[row], chances.float())


def test_a_certain_draft_has_a_confidence_below_one() -> None:
    target = four_layers("llama")
    with torch.no_grad():
        target.lm_head.weight *= 1e4
    drafter = LayerSkipDrafter(exit_layer=1, greedy=True)
    drafter.attach(prefilled(target, [[3, 4, 5]]))
    with torch.inference_mode():
        confidence = drafter.propose(state_of([[3, 4, 5]]), 2).confidence
    assert confidence is not None and confidence.dtype == torch.float32
    assert 0.99 < confidence.min() <= confidence.max() < 1


def test_rows_at_their_limit_write_nothing() -> None:
    """A row that is full or near it: what lies in its cache at and beyond the limit stays as it was."""
    texts = [[3, 4, 5], [6, 7, 8, 9]]
    ragged = prefilled(model("llama"), texts)
    drafter = LayerSkipDrafter(layers=(0, 1))
    drafter.attach(ragged)
    state = state_of(texts, limit=4)  # the first row has room for one token, the second for none
    before = [layer.keys.clone() for layer in ragged.cache.ragged_layers]
    with torch.inference_mode():
        drafter.propose(state, 3)
    for layer, old in zip(ragged.cache.ragged_layers, before, strict=True):
        changed = (layer.keys[:, :, :-1] != old[:, :, :-1]).any(dim=3).any(dim=1)
        allowed = torch.zeros_like(changed)
        allowed[0, 2] = True  # the first row's pending token
        assert not (changed & ~allowed).any()
    assert (ragged.cache.ragged_layers[0].keys != before[0])[0, :, 2].any()


@pytest.mark.parametrize("late", [False, True])
def test_replayed_rounds_give_the_same_tokens(late: bool) -> None:
    target = four_layers("llama", max_position_embeddings=600)
    llm = engine.load(target, drafter=LayerSkipDrafter(layers=(0, 2, 3)), num_draft_tokens=3, max_batch_size=4)
    graphs = with_graphs(llm, late=late)
    texts = [*prompts(), [3, 4, 5] * 90]
    outputs = llm.generate(texts, engine.SamplingParams(max_new_tokens=20))
    for text, output in zip(texts, outputs, strict=True):
        assert output.token_ids == greedy(target, text, 20)
    assert graphs.replays > 10


@pytest.mark.parametrize("name", ["gemma3_text", "gpt2"])
def test_the_model_is_left_as_it_was(name: str) -> None:
    target = four_layers(name)
    decoder, config = DecoderLayers(target), target.config.to_dict()
    with pytest.raises(ZeroDivisionError), decoder.only((1, 2)):
        assert (len(getattr(decoder.parent, decoder._name)), target.config.num_hidden_layers) == (2, 2)
        raise ZeroDivisionError
    assert target.config.to_dict() == config
    assert DecoderLayers(target).layers is decoder.layers
    assert len(decoder) == LAYERS


@pytest.mark.parametrize("in_cascade", [False, True])
def test_an_interrupt_while_the_model_is_made_whole(in_cascade: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C between two of its steps: the next generation begins with them."""
    target = four_layers("gemma3_text")
    drafter = LayerSkipDrafter(layers=(0, 2))
    llm = engine.load(target, drafter=engine.CascadeDrafter(engine.NGramDrafter(), drafter) if in_cascade else drafter)
    restore = DecoderLayers.restore
    calls = itertools.count()

    def interrupted(decoder: DecoderLayers) -> None:
        if next(calls) == 1:  # the first is that before the generation
            raise KeyboardInterrupt
        restore(decoder)

    monkeypatch.setattr(DecoderLayers, "restore", interrupted)
    prompt, params = prompts()[2], engine.SamplingParams(max_new_tokens=NEW)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(prompt, params)
    assert target.config.num_hidden_layers == 2
    assert llm.generate(prompt, params).token_ids == expected("gemma3_text")[2]
    assert target.config.num_hidden_layers == LAYERS


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "exactly one of exit_layer and layers must be given, got None and None"),
        (dict(exit_layer=2, layers=(0, 1)), r"exactly one of exit_layer and layers must be given, got 2 and \(0, 1\)"),
        (dict(exit_layer=0), "exit_layer must be >= 1, got 0"),
        (dict(exit_layer=1.5), "exit_layer must be an int >= 1, got 1.5"),
        (dict(layers=()), r"layers must be ascending, each once, and at least one, got \[\]"),
        (dict(layers=(2, 1)), r"layers must be ascending, each once, and at least one, got \[2, 1\]"),
        (dict(layers=(1, 1)), r"layers must be ascending"),
        (dict(layers=(-1, 1)), "layers must be >= 0, got -1"),
        (dict(layers=("a",)), "layers must be an int >= 0, got 'a'"),
        (dict(layers=3), "layers must be ints, got 3"),
        (dict(exit_layer=1, greedy=1), "greedy must be True or False, got 1"),
    ],
)
def test_bad_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LayerSkipDrafter(**options)


def test_layers_that_the_target_lacks() -> None:
    with pytest.raises(ValueError, match=r"exit_layer must be in \[1, 4\], got 5"):
        engine.load(model("llama"), drafter=LayerSkipDrafter(exit_layer=5))
    with pytest.raises(ValueError, match=r"layers must be below 4, the target's number, got \[0, 4\]"):
        engine.load(model("llama"), drafter=LayerSkipDrafter(layers=(0, 4)))


def test_models_whose_layers_cannot_be_left_out() -> None:
    """Layers of gemma3n read embeddings by their place; a model without a list of layers has none to choose from."""
    changes = dict(vocab_size_per_layer_input=64, hidden_size_per_layer_input=8, head_dim=8, num_key_value_heads=2)
    target = tiny("gemma3n_text", dtype=torch.float32, num_hidden_layers=5, num_kv_shared_layers=0, **changes)
    assert engine.load(target, drafter=LayerSkipDrafter(exit_layer=5))
    with pytest.raises(engine.UnsupportedModelError, match="layers of type 'gemma3n_text' cannot be left out"):
        engine.load(target, drafter=LayerSkipDrafter(layers=(1, 3)))
    target = four_layers("llama")
    target.model.layers[2].self_attn.layer_idx = 0
    with pytest.raises(engine.UnsupportedModelError, match="'llama' has no list of 4 decoder layers that know their"):
        engine.load(target, drafter=LayerSkipDrafter(exit_layer=2))


def test_layers_that_depend_on_more_than_hidden_states(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.drafters.layer_skip.TESTED", frozenset())
    target, seen = four_layers("llama"), []

    def rolled(module: Any, args: Any, output: torch.Tensor) -> torch.Tensor:
        seen.append(module)
        return output.roll(len(seen), dims=-1)

    target.model.register_forward_pre_hook(lambda module, args: seen.clear())
    for layer in target.model.layers:
        layer.register_forward_hook(rolled)
    with pytest.raises(engine.UnsupportedModelError, match="those after them depend on more than the hidden states"):
        engine.load(target, drafter=LayerSkipDrafter(layers=(0, 3)))
    with pytest.raises(engine.UnsupportedModelError, match="those after them depend on more than the hidden states"):
        monkeypatch.setattr("engine.layer_search.TESTED", frozenset())
        search_layers(target, prompts())


@pytest.mark.parametrize("name", ["cohere2", "gptj"])
def test_a_model_that_was_not_tested_is_probed(name: str) -> None:
    sizes: dict[str, Any] = dict(num_key_value_heads=2, sliding_window=WINDOW)
    if name == "gptj":
        sizes = dict(n_layer=LAYERS, n_embd=32, n_head=4, n_positions=CONTEXT, rotary_dim=4)
    target = four_layers(name, **sizes)
    llm = engine.load(target, drafter=LayerSkipDrafter(layers=(0, 2, 3)), num_draft_tokens=3)
    outputs = llm.generate(prompts(), engine.SamplingParams(max_new_tokens=NEW))
    assert [o.token_ids for o in outputs] == [greedy(target, prompt, NEW) for prompt in prompts()]
    assert llm.stats.draft_tokens > 0


# The search.


def with_identities(name: str, layers: Sequence[int]) -> PreTrainedModel:
    """Six layers, of which these add nothing to what they read."""
    target = four_layers(name, num_hidden_layers=6, **(dict(n_layer=6) if name == "gpt2" else {}))
    with torch.no_grad():
        for index in layers:
            for part, parameter in DecoderLayers(target).layers[index].named_parameters():
                if any(output in part for output in ("o_proj", "down_proj", "c_proj")):
                    parameter.zero_()
    return target


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_identities_go_first(name: str) -> None:
    found = search_layers(with_identities(name, (1, 4)), prompts(), max_new_tokens=NEW)
    assert [len(row.layers) for row in found.table] == [6, 5, 4, 3, 2, 1]
    assert [row.layers for row in found.table[:3]] == [tuple(range(6)), (0, 1, 2, 3, 5), (0, 2, 3, 5)]
    assert [row.agreement for row in found.table[:3]] == [1.0, 1.0, 1.0]
    assert all(row.agreement < 1 for row in found.table[3:])
    assert found.best is found.table[2]
    assert (found.best.num_draft_tokens, found.num_tokens) == (8, 7 * NEW)
    assert found.drafter(greedy=True).layers == (0, 2, 3, 5)
    assert found.best.name == "layer_skip:0,2-3,5" and "best: layer_skip:0,2-3,5\n" in str(found)
    llm = engine.load(with_identities(name, (1, 4)), drafter=found.best.name)
    assert isinstance(llm.drafter, LayerSkipDrafter) and llm.drafter.layers == found.best.layers


def test_several_layers_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    passes: list[tuple[int, ...]] = []
    measure = AnsweredTexts.agreement

    def counted(self: AnsweredTexts, layers: Sequence[int]) -> float:
        passes.append(tuple(layers))
        return measure(self, layers)

    monkeypatch.setattr(AnsweredTexts, "agreement", counted)
    target = with_identities("llama", (1, 4))
    found = search_layers(target, prompts(), max_new_tokens=NEW, step=2, min_layers=1)
    assert [len(row.layers) for row in found.table] == [6, 4, 2, 1]
    assert found.best.layers == (0, 2, 3, 5)
    assert len(passes) == (6 + 1) + (4 + 1) + (2 + 1)
    passes.clear()
    assert len(search_layers(target, prompts(), max_new_tokens=NEW, min_layers=3).table) == 4
    assert len(passes) == 6 + 5 + 4


@pytest.mark.parametrize(
    ("name", "implementation"),
    sampled(
        [
            case
            for case in itertools.product(CONFIGS, ("sdpa", "eager"))
            if case[1] == "eager" or case[0] not in EAGER_ONLY
        ],
        lambda case: (
            case[1] == ("eager" if case[0] in ("gemma2", "qwen3") else "sdpa")
            and case[0] in (*NAMES, "gemma2", "qwen3")
        ),
    ),
)
def test_agreement_is_that_of_first_drafts(name: str, implementation: str) -> None:
    """Against a call for each token of the answers, in which the layers are left out at the last position only."""
    target = four_layers(name, attn_implementation=implementation)
    answers = [(prompt, greedy(target, prompt, 5)) for prompt in prompts()[:4]]
    texts = AnsweredTexts(target, DecoderLayers(target), answers, length=CONTEXT)
    assert texts.agreement(range(LAYERS)) == 1.0
    for layers in ((0, 1, 3), (1, 2)):
        right = 0
        for prompt, answer in answers:
            for done, token in enumerate(answer):
                text = [*prompt, *answer[:done]]
                with torch.no_grad(), skipping(target, layers, start=len(text) - 1):
                    right += int(target(torch.tensor([text]), use_cache=False).logits[0, -1].argmax()) == token
        assert texts.agreement(layers) == pytest.approx(right / 20)


def test_search_with_an_engine_and_long_texts() -> None:
    """Whatever the engine drafts with; texts lose their beginning where max_tokens is short. Nothing is left changed."""
    target = with_identities("llama", (2,))
    texts = [*prompts()[:3], [5, 6, 7] * 10]
    llm = engine.load(target, drafter="ngram", max_batch_size=2)
    options: dict[str, Any] = dict(max_new_tokens=6, min_layers=4)
    by_engine = search_layers(llm, texts, **options)
    assert by_engine == search_layers(target, texts, **options)
    cut = search_layers(llm, texts, max_tokens=4 * 7, **options)
    assert cut.table[1].layers == by_engine.table[1].layers == (0, 1, 3, 4, 5)
    assert cut.num_tokens == by_engine.num_tokens == 4 * 6
    outputs = llm.generate(texts, engine.SamplingParams(max_new_tokens=NEW))
    assert [o.token_ids for o in outputs] == [greedy(target, text, NEW) for text in texts]


def test_one_prompt_of_one_token() -> None:
    found = search_layers(four_layers("llama"), [5], max_new_tokens=3)
    assert found.num_tokens == 3
    assert found.table[0] == layer_search.LayerChoice((0, 1, 2, 3), 1.0, pytest.approx(1.0), 1, pytest.approx(1.0))


def test_expected_speedup() -> None:
    """Leviathan et al., theorem 3.8, by its closed form; and costs by the weights that are read."""
    for a, c, k in ((0.8, 0.05, 4), (0.5, 0.5, 2), (0.0, 0.2, 1)):
        assert expected_speedup(a, k, c) == pytest.approx((1 - a ** (k + 1)) / ((1 - a) * (k * c + 1)))
    assert expected_speedup(1.0, 4, 0.25) == pytest.approx(2.5)
    target = four_layers("llama", num_key_value_heads=4)
    found = search_layers(target, prompts()[:2], max_new_tokens=4)
    layer, head = 4 * 32 * 32 + 3 * 32 * 48 + 2 * 32, 32 * 64
    assert [row.cost for row in found.table] == [
        pytest.approx((n * layer + head) / (4 * layer + head)) for n in (4, 3, 2, 1)
    ]
    for row in found.table:
        speedups = {k: expected_speedup(row.agreement, k, row.cost) for k in range(1, 9)}
        assert row.speedup == max(speedups.values()) == speedups[row.num_draft_tokens]


def test_costs_count_packed_weights() -> None:
    from engine.packing import pack_linears

    target = four_layers("llama", dtype=torch.float32)
    plain = layer_search._costs(DecoderLayers(target), target.get_output_embeddings())
    assert pack_linears(target)
    assert layer_search._costs(DecoderLayers(target), target.get_output_embeddings()) == plain


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(step=0), "step must be >= 1, got 0"),
        (dict(min_layers=5), r"min_layers must be in \[1, 4\], got 5"),
        (dict(max_new_tokens=0), "max_new_tokens must be >= 1, got 0"),
        (dict(max_draft_tokens=0), "max_draft_tokens must be >= 1, got 0"),
        (dict(max_tokens=100), "max_tokens must be >= 130, max_new_tokens \\+ 1 for each of 2 prompts, got 100"),
        (dict(max_tokens="many"), "max_tokens must be an int >= 1, got 'many'"),
        (dict(prompts=[]), "prompts must not be empty"),
        (dict(prompts=["text"]), r"prompts\[0\] is text, which needs a tokenizer"),
    ],
)
def test_bad_search_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        search_layers(model("llama"), **{"prompts": prompts()[:2], **options})


def test_a_search_takes_an_engine_or_a_model() -> None:
    with pytest.raises(ValueError, match="target must be an Engine or a PreTrainedModel, got 'id'"):
        search_layers("id", prompts()[:2])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="tokenizer must be None for an Engine, which has its own, got object"):
        search_layers(engine.load(model("llama")), prompts()[:2], tokenizer=object())


def test_no_set_pays() -> None:
    """Where nothing may be missed, the whole model is best, which gains nothing."""
    row = layer_search.LayerChoice
    found = LayerSearch((row((0, 1), 1.0, 1.0, 1, 1.0), row((0,), 0.1, 0.6, 1, 0.7)), 10)
    assert found.best.layers == (0, 1)
