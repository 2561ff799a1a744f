"""EAGLE heads: their checkpoints, the drafts against the papers' formulas, and that no law is bent."""

import itertools
import json
import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import smollm2
import torch
from drafter_cases import Sometimes
from eagle_checkpoints import DRAFT_IDS, REDUCED, Head, check_drafts, drafter_of, good_eagle1, good_eagle3
from head_checkpoints import LAW_VOCAB, check_law, lying, random_tensors
from replayed_graphs import CountedGraphs, Replay, with_graphs
from safetensors.torch import load_file
from sampled_laws import flat_target
from tiny_models import CONTEXT, VOCAB, greedy, random_prompts, tiny
from transformers import PreTrainedModel

import engine
import engine.heads
from engine.backend import row_stats
from engine.drafters.cascade import CascadeDrafter
from engine.drafters.eagle import EagleDrafter
from engine.drafters.recognise import recognise
from engine.model_support import windows
from engine.state import BatchState
from engine.training.eagle3 import Eagle3Training
from engine.training.eagle3_files import save_eagle3

Change = Callable[[dict[str, torch.Tensor]], Any]


@pytest.fixture(scope="module")
def target() -> PreTrainedModel:
    return tiny("llama", num_hidden_layers=7)  # the usual layers of EAGLE-3 are 2, 3 and 4


@pytest.fixture
def blind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Values may not be looked at, as on a GPU."""
    monkeypatch.setattr(BatchState, "can_look", False)


# Checkpoints and the forward pass.

LAYOUTS: dict[str, tuple[str, dict[str, Any]]] = {
    "speculators": ("speculators", dict(**REDUCED)),
    "speculators, embeddings": ("speculators", dict(**REDUCED, left_out=())),
    "speculators, whole vocabulary": ("speculators", dict(layers=(1, 3, 6))),
    "speculators, whole vocabulary, d2t": ("speculators", dict(draft_ids=list(range(VOCAB)))),
    "speculators, no head": ("speculators", dict(**REDUCED, left_out=("embed_tokens.weight", "lm_head.weight"))),
    "speculators, no head, whole": ("speculators", dict(left_out=("embed_tokens.weight", "lm_head.weight"))),
    "speculators, qwen3": ("speculators", dict(**REDUCED, kind="qwen3")),
    "speculators, other size": ("speculators", dict(**REDUCED, hidden=40, left_out=())),
    "speculators, two layers": ("speculators", dict(**REDUCED, num_layers=2, layers=(0, 7))),
    "speculators, norm_before_residual": ("speculators", dict(**REDUCED, flags=("norm_before_residual",))),
    "speculators, three norms": (
        "speculators",
        dict(**REDUCED, flags=("norm_before_residual", "norm_before_fc", "norm_output")),
    ),
    "speculators, fc_norm": ("speculators", dict(**REDUCED, flags=("fc_norm", "norm_output"))),
    "speculators, window": ("speculators", dict(**REDUCED, window=5)),
    "speculators, qwen3, window": ("speculators", dict(**REDUCED, kind="qwen3", window=5, num_layers=2)),
    "speculators, short texts": ("speculators", dict(**REDUCED, max_positions=8)),
    "speculators, eagle-1, bias": ("speculators", dict(eagle=1, fc_bias=True)),
    "eagle-3": ("repository", dict(**REDUCED)),
    "eagle-3, layers, embeddings": ("repository", dict(**REDUCED, layers=(3, 4, 5), left_out=())),
    "eagle-3, outputs of layers": ("repository", dict(**REDUCED, layers=(2, 3, 5))),
    "eagle-3, before the last norm": ("repository", dict(**REDUCED, layers=(0, 3, 7), last_state_normed=False)),
    "eagle-1": ("repository", dict(eagle=1)),
    "eagle-1, bias, embeddings": ("repository", dict(eagle=1, fc_bias=True, left_out=())),
    "eagle-1, two layers": ("repository", dict(eagle=1, num_layers=2)),
    "eagle-1, qwen3": ("repository", dict(eagle=1, kind="qwen3")),
}


SLOW_LAYOUTS = (
    "speculators, whole vocabulary", "speculators, no head, whole", "speculators, norm_before_residual",
    "speculators, fc_norm", "speculators, window", "eagle-3, layers, embeddings", "eagle-1", "eagle-1, qwen3",
)  # fmt: skip


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name in SLOW_LAYOUTS else ()) for name in LAYOUTS]
)
def test_drafts_of_every_layout(target: PreTrainedModel, tmp_path: Path, name: str) -> None:
    layout, options = LAYOUTS[name]
    head = Head(**options)
    # A config of one layer is known for a head's by its tensors, one of two layers by the architecture alone.
    more = {"architectures": ["EagleLlamaForCausalLM"]} if name == "eagle-1, two layers" else {}
    drafter = recognise(getattr(head, layout)(tmp_path, **more))
    assert type(drafter) is EagleDrafter
    drafter.min_reach = 0.0
    check_drafts(target, drafter, head)


@pytest.mark.parametrize("name", ["qwen3", "two layers", "norm_before_residual", "fc_norm"])
def test_drafts_of_fused_layers(tmp_path: Path, name: str) -> None:
    target = tiny("llama", num_hidden_layers=7, dtype=torch.float32)  # float64 has no packed layout
    layout, options = LAYOUTS[f"speculators, {name}"]
    head = Head(**options)
    drafter = drafter_of(getattr(head, layout)(tmp_path))
    drafter.min_reach = 0.0
    check_drafts(target, drafter, head)
    layers = drafter.model.layers
    assert [type(layer).__name__.startswith("Fused") for layer in layers] == [True] * len(layers)


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_a_heads_window_is_that_of_its_layers(tmp_path: Path, kind: str) -> None:
    head = drafter_of(Head(kind=kind, window=5).speculators(tmp_path / "window"))
    assert windows(head.model.config) == {"sliding_attention": 5}
    folder = Head(kind=kind).repository(tmp_path / "none", sliding_window=5)  # that of a target whose config was copied
    assert windows(drafter_of(folder).model.config) == {"all": None}


def test_nvidias_config(target: PreTrainedModel, tmp_path: Path) -> None:
    """Options one level down; no t2d; layers named by an empty list, which means the usual ones."""
    head = Head(**REDUCED, flags=("norm_before_fc",))
    del head.tensors["t2d"]
    inner = {"eagle_aux_hidden_state_layer_ids": [], "use_aux_hidden_state": True, "norm_before_fc": True}
    folder = head.repository(tmp_path, "model.safetensors", eagle_config=inner, tie_word_embeddings=True)
    check_drafts(target, drafter_of(folder), head)


def with_biases(head: Head) -> Head:
    """Of queries, keys and values, as qwen2's attention has them."""
    sizes = {name: head.tensors[f"layers.0.self_attn.{name}_proj.weight"].shape[:1] for name in "qkv"}
    head.tensors |= random_tensors(
        {f"layers.0.self_attn.{name}_proj.bias": tuple(size) for name, size in sizes.items()}
    )
    return head


ONE_STATE = dict(**REDUCED, layers=(7,), left_out=("embed_tokens.weight", "fc.weight"))
# Heads as they are published: what is said of them, their config, and a change of what is in the file.
PUBLISHED: dict[str, tuple[Head, dict[str, Any], Change]] = {
    "eagle-1 for qwen2": (with_biases(Head(eagle=1)), dict(model_type="qwen2"), lambda tensors: None),
    "eagle-1 for mixtral, with more than is needed": (
        Head(eagle=1),
        dict(model_type="mixtral", sliding_window=None),
        lambda t: t.update({"lm_head.weight": torch.ones(VOCAB, 32), "layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}),
    ),
    "eagle-3 for phi3": (Head(**REDUCED), dict(model_type="phi3"), lambda tensors: None),
    "prefixed": (
        Head(**REDUCED),
        {},
        lambda t: [t.update({f"model.{name}": t.pop(name)}) for name in list(t)],
    ),
    "no draft vocabulary": (Head(), dict(draft_vocab_size=None), lambda tensors: None),
    "a draft vocabulary that the config does not tell": (Head(**REDUCED), dict(draft_vocab_size=None), lambda tensors: None),
    "the target's config": (  # NeMo AutoModel's
        Head(**REDUCED),
        dict(num_hidden_layers=42, sliding_window=4, layer_types=["sliding_attention", "full_attention"] * 21),
        lambda t: [t.update({f"model.{name.replace('midlayer', 'layers.0')}": t.pop(name)}) for name in list(t)],
    ),
    "llama 4": (  # of which a layer without experts has another size
        Head(**REDUCED), dict(model_type="llama4_text", intermediate_size=20, intermediate_size_mlp=48), lambda tensors: None
    ),
    "the target's number of layers": (Head(**REDUCED), dict(num_hidden_layers=36), lambda tensors: None),
    "layers by their outputs": (  # AngelSlim's
        Head(**REDUCED, layers=(2, 5, 6)), dict(eagle_config=None, aux_hidden_states_layer_ids=[1, 4, 5]), lambda tensors: None
    ),
    "mrope": (
        Head(**REDUCED),
        dict(rope_scaling={"type": "mrope", "mrope_section": [1, 1, 2]}, rope_theta=10000.0, rope_parameters=None),
        lambda tensors: None,
    ),
    "mrope, by its other name": (
        Head(**REDUCED),
        dict(rope_scaling={"rope_type": "mrope", "mrope_section": [1, 1, 2]}, rope_theta=10000.0, rope_parameters=None),
        lambda tensors: None,
    ),
    "one state as it is": (
        Head(**ONE_STATE), dict(eagle_config={"use_aux_hidden_state": False}), lambda tensors: None
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_heads_as_they_are_published(target: PreTrainedModel, tmp_path: Path, name: str) -> None:
    head, config, change = PUBLISHED[name]
    folder = head.repository(tmp_path, **config)
    tensors = torch.load(tmp_path / "pytorch_model.bin", weights_only=True)
    change(tensors)
    torch.save(tensors, tmp_path / "pytorch_model.bin")
    drafter = recognise(folder)
    assert type(drafter) is EagleDrafter
    drafter.min_reach = 0.0
    check_drafts(target, drafter, head)


def test_layers_that_no_config_names_are_logged(
    target: PreTrainedModel, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    named = Head(**REDUCED, layers=(2, 3, 4)).speculators(tmp_path / "named")
    with caplog.at_level(logging.INFO, "engine"):
        for folder in (named, Head(**REDUCED).speculators(tmp_path / "unnamed")):
            engine.load(target, folder)
    (message,) = (record.message for record in caplog.records if "hidden states" in record.message)
    assert (
        message.startswith(f"{tmp_path / 'unnamed'} does not say which") and "those of most heads, [2, 3, 4]" in message
    )


def test_a_convention_that_no_config_names_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "engine"):
        recognise(Head(**REDUCED).speculators(tmp_path / "named"))
        assert not caplog.records
        folder = Head(**REDUCED).speculators(tmp_path / "unnamed")
        config = json.loads((folder / "config.json").read_text())
        del config["norm_before_residual"]
        (folder / "config.json").write_text(json.dumps(config))
        assert not drafter_of(folder).model.config.norm_before_residual
    (message,) = (record.message for record in caplog.records)
    assert message.startswith(f"{folder} does not say norm_before_residual: taken for false")


def test_a_config_that_describes_the_targets_layers(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Of which `midlayer` is one."""
    folder = Head(**REDUCED).repository(tmp_path, num_hidden_layers=32, layer_types=["full_attention"] * 32)
    with caplog.at_level(logging.INFO, "engine"):
        model = drafter_of(folder).model
    assert f"{folder} tells of 32 layers and holds 1, which are used" in caplog.text
    assert len(model.layers) == 1 and windows(model.config) == {"all": None}


def test_a_wrapped_config(target: PreTrainedModel, tmp_path: Path) -> None:
    head = Head(eagle=1)
    inner = json.loads((head.repository(tmp_path) / "config.json").read_text())
    outer = {"model_type": "eagle", "architectures": ["EAGLEModel"], "truncated_vocab_size": VOCAB, "model": inner}
    (tmp_path / "config.json").write_text(json.dumps(outer))
    check_drafts(target, drafter_of(tmp_path), head)
    assert type(recognise(tmp_path)) is EagleDrafter


def test_a_wrapped_config_of_two_layers(tmp_path: Path) -> None:
    """The outer architecture tells that it is a head's: the layers, by themselves, are a llama."""
    inner = json.loads((Head(eagle=1, num_layers=2).repository(tmp_path) / "config.json").read_text())
    outer = {"model_type": "eagle", "architectures": ["EAGLEModel"], "model": inner}
    (tmp_path / "config.json").write_text(json.dumps(outer))
    assert type(recognise(tmp_path)) is EagleDrafter


def test_each_layer_of_a_head_has_its_own_window(tmp_path: Path) -> None:
    head = Head(window=5, num_layers=2)
    types = ["sliding_attention", "full_attention"]
    folder = head.speculators(tmp_path, transformer_layer_config=head.layer_config() | {"layer_types": types})
    model = drafter_of(folder).model
    masks = {kind: torch.zeros(1) for kind in types}
    for index, kind in enumerate(types):
        assert model._attention(index, masks)["attention_mask"] is masks[kind]


def test_compiled_targets_and_states_before_the_last_norm(target: PreTrainedModel, tmp_path: Path) -> None:
    folder = Head(**REDUCED, layers=(0, 3, 7), last_state_normed=False).speculators(tmp_path)
    with pytest.raises(
        engine.UnsupportedModelError, match="compile must be False where a drafter reads the target before"
    ):
        engine.load(target, folder, compile=True)


@pytest.mark.parametrize("freeze_head", [pytest.param(False, marks=pytest.mark.slow), True])
def test_what_training_saves(target: PreTrainedModel, tmp_path: Path, freeze_head: bool) -> None:
    torch.manual_seed(3)
    training = Eagle3Training(target, (1, 4, 6), torch.tensor(DRAFT_IDS), freeze_head=freeze_head)
    with torch.no_grad():
        for name, parameter in training.head.named_parameters():
            if not (freeze_head and name == "lm_head.weight"):
                parameter += 0.3 * torch.randn(parameter.shape)
    save_eagle3(training, tmp_path, "some/target", "LlamaForCausalLM")
    drafter = recognise(tmp_path)
    assert type(drafter) is EagleDrafter
    stored = load_file(tmp_path / "model.safetensors")
    assert ("lm_head.weight" in stored) is not freeze_head
    left_out = ("embed_tokens.weight", "lm_head.weight") if freeze_head else ("embed_tokens.weight",)
    head = Head(**REDUCED, layers=(1, 4, 6), left_out=left_out, tensors=stored, eps=target.config.rms_norm_eps)
    assert {name: tuple(value.shape) for name, value in stored.items() if name[0] not in "dt"} == head.shapes()
    drafter.min_reach = 0.0
    check_drafts(target, drafter, head)


def test_bfloat16(tmp_path: Path) -> None:
    """Rotary frequencies stay as they are: rounded to 8 bits, they would turn distant positions anyhow."""
    target = tiny("llama", dtype=torch.bfloat16)
    drafter = drafter_of(Head(**REDUCED, layers=(0, 1, 2)).speculators(tmp_path))
    before = drafter.model.rotary_emb.inv_freq.clone()
    assert before.dtype == torch.float32 and not torch.equal(before, before.bfloat16().float())
    llm = engine.load(target, drafter, 3, exact=True)
    plain = engine.load(target, None, exact=True)
    assert torch.equal(drafter.model.rotary_emb.inv_freq, before)
    assert drafter.model.norm.weight.dtype == torch.bfloat16
    params = engine.SamplingParams(max_new_tokens=20)
    expected = [output.token_ids for output in plain.generate(random_prompts(6), params)]
    assert [output.token_ids for output in llm.generate(random_prompts(6), params)] == expected


class Packaged(Head):
    """The sizes of the head for SmolLM2."""

    heads, kv_heads, intermediate, rope_theta = 9, 3, 1536, 100_000.0


def test_the_packaged_head() -> None:
    """Its drafts for a short text, in float32, are those of the paper's formula over its file."""
    folder = Path(engine.heads.__file__).parent / "eagle3-SmolLM2-135M-Instruct"
    stored = load_file(folder / "model.safetensors")
    ids = (stored["d2t"] + torch.arange(len(stored["d2t"]))).tolist()
    head = Packaged(
        hidden=576, target_hidden=576, vocab=49152, draft_ids=ids, layers=(8, 16, 24, 30), eps=1e-5, tensors=stored,
        left_out=("embed_tokens.weight", "lm_head.weight"),
    )  # fmt: skip
    assert {name: tuple(value.shape) for name, value in stored.items() if name not in ("d2t", "t2d")} == head.shapes()
    drafter, seen = drafter_of(folder), []
    llm = engine.load(smollm2.gguf(), drafter, 3, dtype="float32", max_batch_size=1)
    propose = drafter.propose

    def watched(state: engine.BatchState, num_draft_tokens: int) -> engine.Proposal:
        proposal = propose(state, num_draft_tokens)
        text = state.tokens[0, : int(state.seq_lens[0]) + 1].tolist()
        seen.append((text, proposal.tokens[0].tolist()))
        return proposal

    drafter.propose = watched  # type: ignore[method-assign]
    llm.generate([[{"role": "user", "content": "Name three rivers."}]], engine.SamplingParams(max_new_tokens=14))
    whole = head.of(llm.target_model)
    assert len(seen) > 4 and llm.stats.accepted_tokens > 0
    for text, drafts in seen:
        assert drafts == whole.drafts(llm.target_model, text, len(drafts))


def test_an_output_matrix_is_borrowed_from_the_last_target(tmp_path: Path) -> None:
    """In bfloat16, where that of the first target has been packed."""
    head = Head(**REDUCED, layers=(0, 1, 2), left_out=("embed_tokens.weight", "lm_head.weight"))
    drafter = drafter_of(head.speculators(tmp_path))
    for sign in (1, -1):
        target = tiny("llama", dtype=torch.bfloat16)
        with torch.no_grad():
            target.get_output_embeddings().weight *= sign
        engine.load(target, drafter)
        assert torch.equal(drafter.model.lm_head.weight, target.get_output_embeddings().weight[DRAFT_IDS])


# The text.


@pytest.fixture(scope="module")
def small() -> PreTrainedModel:
    return tiny("llama")


@pytest.fixture(scope="module")
def texts(small: PreTrainedModel) -> list[list[int]]:
    """Greedy, to the end of the context."""
    return [prompt + greedy(small, prompt, CONTEXT) for prompt in random_prompts(8)]


@pytest.fixture(scope="module")
def good(
    small: PreTrainedModel, texts: list[list[int]], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, tuple[Head, Path]]:
    """Heads that know something of these texts."""
    common = sorted(token for token, _ in Counter(itertools.chain(*texts)).most_common(40))
    eagle3, eagle1 = good_eagle3(small, texts, common), good_eagle1(small, texts)
    frozen = Head(draft_ids=common[:9], layers=(0, 1, 2), left_out=("embed_tokens.weight", "lm_head.weight"))
    return {
        "eagle3": (eagle3, eagle3.speculators(tmp_path_factory.mktemp("eagle3"))),
        "eagle1": (eagle1, eagle1.repository(tmp_path_factory.mktemp("eagle1"))),
        "frozen": (frozen, frozen.speculators(tmp_path_factory.mktemp("frozen"))),
    }


GREEDY = [
    ("eagle3", "rejection", 1, False), ("eagle1", "block", 2, True), ("eagle3", "coupled", 3, False),
    ("eagle1", "rejection", 4, False), ("eagle3", "block", 5, True), ("eagle3", "rejection", "auto", False),
    ("eagle1", "coupled", "auto", True),
]  # fmt: skip
ALL = itertools.product(("eagle3", "eagle1"), ("rejection", "block", "coupled"), (1, 2, 3, 4, 5, "auto"), (False, True))


@pytest.mark.parametrize(
    ("name", "verification", "num_draft_tokens", "exact"),
    [*GREEDY, *(pytest.param(*case, marks=pytest.mark.slow) for case in ALL if case not in GREEDY)],
)
def test_greedy_text(
    small: PreTrainedModel, texts: list[list[int]], good: Any, name: str, verification: str, num_draft_tokens: Any,
    exact: bool,
) -> None:  # fmt: skip
    """More prompts than slots, the first of a single token, all of them to the end of the context."""
    llm = engine.load(small, good[name][1], num_draft_tokens, verification, exact, max_batch_size=3)
    outputs = llm.generate(random_prompts(8), engine.SamplingParams(max_new_tokens=CONTEXT))
    assert [output.prompt_token_ids + output.token_ids for output in outputs] == texts
    if num_draft_tokens != "auto":
        assert (0.2 if name == "eagle3" else 0.05) < llm.stats.acceptance_rate < 1


@pytest.mark.parametrize("name", ["eagle3", pytest.param("eagle1", marks=pytest.mark.slow)])
@pytest.mark.parametrize("mode", ["looking", "blind", "blind, silent rounds"])
def test_rows_that_lack_many_positions(small: PreTrainedModel, good: Any, name: str, mode: str, request: Any) -> None:
    """Rounds that accept much, and rounds without drafts, before drafting goes on: everything is caught up with."""
    if "blind" in mode:
        request.getfixturevalue("blind")
    head, folder = good[name]
    drafter = drafter_of(folder)
    if "silent" in mode:
        check_drafts(small, Sometimes(drafter, lambda number: number % 8 == 0), head, drafter, seed=0, least=8)
    else:
        check_drafts(small, drafter, head, drafter, seed=0, least=40)


def test_a_row_at_the_end_beside_one_that_lacks_more(small: PreTrainedModel, good: Any, blind: None) -> None:
    """As many positions are looked at in both; some of them lie beyond the longest text."""
    prompts = [random_prompts(2)[1] * CONTEXT, [3, 4, 5]]
    prompts[0] = prompts[0][: CONTEXT - 5]
    llm = engine.load(small, good["eagle3"][1], 5)
    outputs = llm.generate(prompts, engine.SamplingParams(max_new_tokens=20))
    assert [output.token_ids for output in outputs] == [greedy(small, prompt, 20) for prompt in prompts]


@pytest.mark.parametrize("blindly", [False, True])
@pytest.mark.parametrize("kind", ["eagle3", "eagle1"])
def test_texts_of_a_single_token(small: PreTrainedModel, good: Any, kind: str, blindly: bool, request: Any) -> None:
    """There are no hidden states at first, of no row."""
    if blindly:
        request.getfixturevalue("blind")
    drafter = drafter_of(good[kind][1])
    llm = engine.load(small, drafter, 3, max_batch_size=3)
    assert drafter.graph_key() is None  # a round that drafts nothing sets nothing up for a capture
    prompts = [[token] for token in (5, 9, 3, 60)]
    for count in (1, 4):
        outputs = llm.generate(prompts[:count], engine.SamplingParams(max_new_tokens=9))
        assert [output.token_ids for output in outputs] == [greedy(small, prompt, 9) for prompt in prompts[:count]]
    assert llm.stats.draft_tokens > 30 and drafter.graph_key() is not None


def test_logits_of_the_head_that_are_no_distribution(small: PreTrainedModel, good: Any) -> None:
    """Nothing is drafted then, and the text is the target's."""
    params = [engine.SamplingParams(temperature=0.7 * (i % 2), seed=i, max_new_tokens=5) for i in range(4)]
    expected = [
        o.token_ids for o in engine.load(small, None, verification="coupled").generate(random_prompts(4), params)
    ]
    for verification in ("rejection", "block", "coupled"):
        drafter = drafter_of(good["eagle3"][1])
        torch.nn.init.constant_(drafter.model.norm.weight, torch.nan)
        llm = engine.load(small, drafter, 3, verification)
        found = [o.token_ids for o in llm.generate(random_prompts(4), params)]
        assert found[::2] == expected[::2] and (verification != "coupled" or found == expected)
        greedily = llm.generate(random_prompts(4)[::2], engine.SamplingParams(max_new_tokens=5))
        assert [o.token_ids for o in greedily] == expected[::2]
        assert llm.stats.draft_tokens == 0


# What comes with the tokens.


def first_proposal(small: PreTrainedModel, drafter: EagleDrafter, text: list[int], **params: Any) -> Any:
    """Of a run, with its state's parameters."""
    seen, propose = [], drafter.propose

    def watched(state: engine.BatchState, num_draft_tokens: int) -> engine.Proposal:
        seen.append((propose(state, num_draft_tokens), state.sampling))
        return seen[-1][0]

    drafter.propose = watched  # type: ignore[method-assign]
    others = [engine.SamplingParams(max_new_tokens=6)] if params else []
    engine.load(small, drafter, 3).generate(
        [text, *([text] * len(others))], [engine.SamplingParams(**params, max_new_tokens=6), *others]
    )
    return seen[0]


def test_confidence_is_the_probability(small: PreTrainedModel, good: Any) -> None:
    head, folder = good["eagle3"]
    text = [3, 4, 5, 6]
    proposal, _ = first_proposal(small, drafter_of(folder), text)
    whole = head.of(small)
    for step, draft in enumerate(whole.drafts(small, text, 3)):
        features = whole.reads(small, text[:-1])
        for _ in range(step):
            outputs, _ = whole.network(
                features, torch.tensor([*text, *proposal.tokens[0].tolist()][1 : len(features) + 1])
            )
            features = torch.cat([features, outputs[-1:]])
        tokens = torch.tensor([*text, *proposal.tokens[0].tolist()][1 : len(features) + 1])
        law = (whole.tensors["lm_head.weight"] @ whole.network(features, tokens)[1][-1]).softmax(-1)
        assert proposal.tokens[0, step] == draft == head.draft_ids[int(law.argmax())]
        torch.testing.assert_close(proposal.confidence[0, step].double(), law.max(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["eagle3", "eagle1", "frozen"])
def test_logits_are_of_the_targets_ids(small: PreTrainedModel, good: Any, name: str) -> None:
    """And so are their stats; one row is greedy, one is not."""
    head, folder = good[name]
    proposal, sampling = first_proposal(
        small, drafter_of(folder), [3, 4, 5], temperature=0.7, top_k=9, top_p=0.9, seed=2
    )
    assert proposal.logits.shape == (2, 3, VOCAB) and proposal.confidence is None
    finite = proposal.logits.isfinite()
    ids, _ = head.of(small).vocabulary([3, 4, 5])
    assert bool(finite[..., ids].all()) and int(finite.sum()) == 2 * 3 * len(ids)
    expected = row_stats(proposal.logits, **sampling)
    for field in ("threshold", "lse", "argmax"):
        torch.testing.assert_close(getattr(proposal.stats, field), getattr(expected, field))
    assert torch.equal(proposal.tokens[1], expected.argmax[1])
    assert proposal.tokens[1].tolist() == head.of(small).drafts(small, [3, 4, 5], 3)


def test_drafting_ends_where_nothing_is_likely(small: PreTrainedModel, good: Any) -> None:
    widths = {}
    for min_reach in (0.0, 1.0):
        llm = engine.load(small, EagleDrafter.from_pretrained(good["eagle3"][1], min_reach=min_reach), 3)
        llm.generate([[3, 4, 5, 6]], engine.SamplingParams(max_new_tokens=12))
        widths[min_reach] = len(llm.stats.acceptance_per_position)
    assert widths == {0.0: 3, 1.0: 1}


@pytest.mark.parametrize(("num_draft_tokens", "num_prompts", "most"), [(3, 1, 3), ("auto", 2, 15), ("auto", 1, 1)])
def test_drawn_drafts_end_early_where_nobody_can_tell(
    small: PreTrainedModel, good: Any, num_draft_tokens: Any, num_prompts: int, most: int
) -> None:
    """Not where a seed's text would depend on it: with a number of drafts that is given, or of rows."""
    drafter = EagleDrafter.from_pretrained(good["eagle3"][1], min_reach=1.0)
    llm = engine.load(small, drafter, num_draft_tokens, max_batch_size=2)
    asked = 3 if num_draft_tokens == 3 else 15
    llm._server._lengths.choose = lambda rows, room, *told: min(asked, room)  # type: ignore[method-assign]
    prompts = [[3, 4, 5, 6]] * num_prompts
    llm.generate(prompts, engine.SamplingParams(temperature=0.9, seed=1, max_new_tokens=24, ignore_eos=True))
    assert len(llm.stats.acceptance_per_position) == most


# The law.


def law_drafter(folder: Path, eagle_version: int, frozen: bool = False, **options: Any) -> EagleDrafter:
    """A random head; that of EAGLE-3 knows but five of the six tokens, or two where its output matrix is the target's, and those of
    the text."""
    if eagle_version == 3 and frozen:
        head = Head(
            vocab=LAW_VOCAB, draft_ids=[1, 4], layers=(0, 1), seed=4, left_out=("embed_tokens.weight", "lm_head.weight")
        )
        return drafter_of(head.speculators(folder), **options)
    if eagle_version == 3:
        seed = 6 if options.get("greedy") else 4  # of which the likeliest tokens stand often enough
        head = Head(vocab=LAW_VOCAB, draft_ids=[0, 1, 3, 4, 5], layers=(0, 1), seed=seed)
        head.tensors["lm_head.weight"] *= 0.5
        return drafter_of(head.speculators(folder), **options)
    head = Head(eagle=1, vocab=LAW_VOCAB, seed=4)
    for name, value in head.tensors.items():
        value *= 1.0 if "norm" in name else 0.5
    return drafter_of(head.repository(folder), **options)


PLAIN, FILTERED = dict(temperature=1.0), dict(temperature=0.7, top_k=5, top_p=0.9)
# Under "coupled" texts are those of plain decoding: see test_coupled_text_is_the_seeds_alone.
LAWS: list[tuple[int, str, dict[str, Any], dict[str, Any]]] = [
    (3, "rejection", PLAIN, {}), (3, "block", FILTERED, {}), (3, "rejection", PLAIN, {"greedy": True}),
    (3, "rejection", FILTERED, {"frozen": True}), (3, "block", PLAIN, {"frozen": True}),
    (1, "rejection", FILTERED, {}), (1, "block", PLAIN, {}),
]  # fmt: skip
EVERY_LAW = [
    case
    for case in itertools.product(
        (3, 1), ("rejection", "block", "coupled"), (PLAIN, FILTERED), ({}, {"greedy": True}, {"frozen": True})
    )
    if case[0] == 3 or "frozen" not in case[3]
]


@pytest.mark.parametrize(
    ("eagle_version", "verification", "setting", "options", "count"),
    [
        *((*case, 8_000) for case in LAWS),
        *(pytest.param(*case, 200_000, marks=pytest.mark.slow) for case in EVERY_LAW),
    ],
)
def test_sampling_law(
    tmp_path: Path, eagle_version: int, verification: str, setting: dict[str, Any], options: dict[str, Any], count: int
) -> None:
    target = flat_target(LAW_VOCAB)
    drafter = law_drafter(tmp_path, eagle_version, **options)
    assert check_law(target, drafter, verification, setting, count) > 1e-3


@pytest.mark.parametrize(
    ("eagle_version", "verification"),
    [
        (3, "rejection"),
        (1, "block"),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in ((3, "block"), (1, "rejection"))),
    ],
)
def test_a_wrong_law_is_caught(tmp_path: Path, eagle_version: int, verification: str) -> None:
    """The same test, for a drafter that lies about its second draft's distribution."""
    target = flat_target(LAW_VOCAB)
    assert check_law(target, lying(law_drafter(tmp_path, eagle_version)), verification, PLAIN, 16_000) < 1e-4


def test_coupled_text_is_the_seeds_alone(small: PreTrainedModel, good: Any) -> None:
    params = [engine.SamplingParams(temperature=0.8, top_p=0.95, seed=i, max_new_tokens=24) for i in range(6)]
    expected = [o.token_ids for o in engine.load(small, None).generate(random_prompts(6), params)]
    for name, num_draft_tokens in (("eagle3", 4), ("eagle1", 2)):
        llm = engine.load(small, good[name][1], num_draft_tokens, "coupled", max_batch_size=4)
        assert [o.token_ids for o in llm.generate(random_prompts(6), params)] == expected
        assert llm.stats.acceptance_rate > 0.02


# Graphs.


class Remembering(Replay):
    """One that leaves a drafter's tensors as they were, too."""

    def __init__(self, state: engine.BatchState, drafter: EagleDrafter) -> None:
        super().__init__(state)
        self._drafter = drafter

    def record(self, work: Callable[[], Any]) -> Any:
        before = self._drafter._filled.clone()
        result = super().record(work)
        self._drafter._filled.copy_(before)
        return result


def graphs_of(llm: engine.Engine, late: bool) -> CountedGraphs:
    graphs, drafter = with_graphs(llm, late=late), llm.drafter
    assert isinstance(drafter, EagleDrafter)
    graphs._make = lambda pool: Remembering(llm._server._state, drafter)
    return graphs


@pytest.mark.parametrize(
    ("name", "num_draft_tokens", "late"),
    [
        ("eagle3", 3, True),
        ("eagle1", "auto", False),
        ("frozen", 3, True),
        pytest.param("eagle1", 2, False, marks=pytest.mark.slow),
        pytest.param("eagle3", "auto", True, marks=pytest.mark.slow),
    ],
)
def test_replayed_rounds(
    small: PreTrainedModel, texts: list[list[int]], good: Any, blind: None, name: str, num_draft_tokens: Any, late: bool
) -> None:
    llm = engine.load(small, good[name][1], num_draft_tokens, max_batch_size=4)
    graphs = graphs_of(llm, late)
    single = [[token] for token in (5, 9, 3, 60)]
    for prompts in (single, random_prompts(8)):
        outputs = llm.generate(prompts, engine.SamplingParams(max_new_tokens=CONTEXT))
        expected = [prompt + greedy(small, prompt, CONTEXT) for prompt in prompts] if prompts is single else texts
        assert [output.prompt_token_ids + output.token_ids for output in outputs] == expected
    assert graphs.replays > 10
    propose_keys = [key for key in graphs._captured if key[0] == "propose"]
    assert 0 < len(propose_keys) < 12


@pytest.mark.parametrize(
    ("name", "verification"),
    [("eagle3", "rejection"), ("frozen", "block"), pytest.param("eagle3", "block", marks=pytest.mark.slow)],
)
def test_replayed_rounds_sample_the_same(
    small: PreTrainedModel, good: Any, blind: None, name: str, verification: str
) -> None:
    params = [engine.SamplingParams(temperature=0.5 * (i % 3), top_p=0.9, seed=i, max_new_tokens=24) for i in range(6)]
    outputs = []
    for graphed in (False, True):
        llm = engine.load(small, good[name][1], 3, verification, max_batch_size=4)
        graphs = graphs_of(llm, late=False) if graphed else None
        outputs.append([output.token_ids for output in llm.generate(random_prompts(6), params)])
    assert graphs is not None and graphs.replays > 10
    assert outputs[0] == outputs[1]


def test_what_it_does_in_python_is_not_needed_again(small: PreTrainedModel, good: Any, blind: None) -> None:
    drafter = drafter_of(good["eagle3"][1])
    llm = engine.load(small, drafter, 2)
    llm.generate([[5, 6, 7]], engine.SamplingParams(max_new_tokens=8))
    propose, changes = drafter.propose, []

    def watched(*args: Any) -> engine.Proposal:
        before = {key: value for key, value in vars(drafter).items() if key != "propose"}
        result = propose(*args)
        changes.append({key: value for key, value in vars(drafter).items() if key != "propose"} != before)
        return result

    drafter.propose = watched  # type: ignore[method-assign]
    llm.generate([[5, 6, 7]], engine.SamplingParams(max_new_tokens=8))
    assert changes and not any(changes)


# In a cascade.


@pytest.mark.parametrize(
    ("name", "blindly"),
    [
        ("eagle3", True),
        ("eagle1", False),
        pytest.param("eagle3", False, marks=pytest.mark.slow),
        pytest.param("eagle1", True, marks=pytest.mark.slow),
    ],
)
def test_as_a_stage(small: PreTrainedModel, good: Any, name: str, blindly: bool, request: Any) -> None:
    """Its drafts are right after rounds in which others drafted, too."""
    if blindly:
        request.getfixturevalue("blind")
    head, folder = good[name]
    drafter = drafter_of(folder)
    whole = CascadeDrafter(engine.NGramDrafter(min_ngram=2), drafter)
    llm = check_drafts(small, whole, head, stage=drafter, seed=0)
    assert llm.stats.accepted_tokens > 5


@pytest.mark.parametrize(("name", "num_draft_tokens"), [("eagle3", 3), ("eagle1", "auto")])
def test_a_cascade_by_name(
    small: PreTrainedModel, texts: list[list[int]], good: Any, name: str, num_draft_tokens: Any
) -> None:
    llm = engine.load(small, f"ngram+{good[name][1]}", num_draft_tokens, max_batch_size=3)
    assert [type(stage) for stage in llm.drafter.stages] == [engine.NGramDrafter, EagleDrafter]
    outputs = llm.generate(random_prompts(8), engine.SamplingParams(max_new_tokens=CONTEXT))
    assert [output.prompt_token_ids + output.token_ids for output in outputs] == texts


@pytest.mark.parametrize(
    ("verification", "setting", "count"),
    [
        ("rejection", PLAIN, 8_000),
        ("block", PLAIN, 8_000),
        *(pytest.param(v, PLAIN, 200_000, marks=pytest.mark.slow) for v in ("rejection", "block", "coupled")),
    ],
)
def test_law_of_a_cascade(tmp_path: Path, verification: str, setting: dict[str, Any], count: int) -> None:
    """Of n-grams and EAGLE-3, as the demo drafts: one prompt has an n-gram for the first draft, the other often for the second."""
    target = flat_target(LAW_VOCAB)
    whole = CascadeDrafter(engine.NGramDrafter(min_ngram=1), law_drafter(tmp_path, 3))
    assert check_law(target, whole, verification, setting, count) > 1e-3


# Checkpoints that are wrong.


@pytest.mark.parametrize(
    ("layout", "change", "message"),
    [
        ("speculators", lambda t: t.pop("fc.weight"), r"missing fc\.weight \[32, 96\]$"),
        ("speculators", lambda t: t.pop("d2t"), r"missing d2t \[24\]$"),
        (
            "speculators",
            lambda t: t.pop("layers.0.hidden_norm.weight"),
            r"missing layers\.0\.hidden_norm\.weight \[32\]$",
        ),
        ("speculators", lambda t: t.update({"fc.2.weight": torch.zeros(3)}), r"extra fc\.2\.weight \[3\]$"),
        ("speculators", lambda t: t.update(d2t=torch.zeros(23)), r"d2t must be \[24\], got \[23\]$"),
        (
            "speculators",
            lambda t: t.update({"norm.weight": torch.ones(40)}),
            r"EagleModel: norm\.weight must be \[32\], got \[40\]$",
        ),
        (
            "speculators",
            lambda t: t.update({"embed_tokens.weight": torch.ones(64, 40)}),
            r"embed_tokens\.weight must be \[64, 32\], got \[64, 40\]$",
        ),
        ("speculators", lambda t: t["d2t"].add_(50), r"i \+ d2t\[i\] must be distinct ids in \[0, 64\), got \[5"),
        ("speculators", lambda t: t["d2t"].copy_(-torch.arange(24)), r"distinct ids in \[0, 64\), got \[0, 0, 0"),
        (
            "repository",
            lambda t: t.pop("layers.0.hidden_norm.weight"),
            r"missing layers\.0\.hidden_norm\.weight \[32\]$",
        ),
        (
            "eagle-1",
            lambda t: t.pop("layers.0.self_attn.k_proj.weight"),
            r"missing layers\.0\.self_attn\.k_proj\.weight \[16, 32\]$",
        ),
        (
            "eagle-1",
            lambda t: t.update({"layers.0.input_layernorm.weight": torch.ones(32)}),
            r"extra layers\.0\.input_layernorm\.weight \[32\]$",
        ),
        ("speculators", lambda t: t.update(t2d=torch.tensor(True)), r"t2d must be \[1\], got \[\]$"),
        (
            "eagle-1",
            lambda t: t.update({"norm.weight": torch.ones(32)}),
            r"must hold no norm\.weight: an EAGLE-1 head with norms is not known$",
        ),
        (
            "speculators",
            lambda t: t.update({"fc.weight": t["fc.weight"].to(torch.float8_e4m3fn)}),
            r"must hold weights that are not quantized, got fc\.weight of torch\.float8_e4m3fn$",
        ),
    ],
)
def test_tensors_that_are_wrong(tmp_path: Path, layout: str, change: Change, message: str) -> None:
    head = Head(eagle=1) if layout == "eagle-1" else Head(**REDUCED)
    change(head.tensors)
    folder = getattr(head, "speculators" if layout == "speculators" else "repository")(tmp_path)
    with pytest.raises(ValueError, match=message) as caught:
        recognise(folder)
    assert str(folder) in str(caught.value)


def test_heads_of_another_target(target: PreTrainedModel, tmp_path: Path) -> None:
    for layout, head in (("speculators", Head(**REDUCED)), ("repository", Head(eagle=1))):
        folder = getattr(head, layout)(tmp_path / layout)
        with pytest.raises(ValueError, match="target of hidden size 32, but the target has 40"):
            engine.load(tiny("llama", hidden_size=40, num_hidden_layers=7), folder)
        with pytest.raises(ValueError, match="target of vocabulary 64, but the target has 70"):
            engine.load(tiny("llama", vocab_size=70, num_hidden_layers=7), folder)
    with pytest.raises(ValueError, match=r"reads hidden states \[2, 1, -1\], but the target has 2 layers"):
        engine.load(tiny("llama"), tmp_path / "speculators")
    beyond = Head(**REDUCED, layers=(1, 2, 8)).speculators(tmp_path / "beyond")
    with pytest.raises(ValueError, match=r"reads hidden states \[1, 2, 8\], but the target has 7 layers"):
        engine.load(target, beyond)
    for name in ("embed_tokens.weight", "lm_head.weight"):
        folder = Head(**REDUCED, hidden=40, left_out=(name,)).speculators(tmp_path / name)
        with pytest.raises(ValueError, match=rf"must hold {name}, as the target's is of size 32 and not 40"):
            engine.load(target, folder)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(draft_vocab_size=-3), "positive integer 'draft_vocab_size', got -3"),
        (dict(target_hidden_size="big"), "positive integer 'target_hidden_size', got 'big'"),
        (dict(eagle_aux_hidden_state_layer_ids=[1, "2", 3]), r"list of layers 'eagle_aux.*', got \[1, '2', 3\]"),
        (dict(transformer_layer_config=[1]), r"an object 'transformer_layer_config', got \[1\]"),
        (dict(transformer_layer_config={"hidden_size": "many"}), r"config\.json must describe layers of llama"),
    ],
)
def test_configs_that_are_wrong(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        recognise(Head(**REDUCED).speculators(tmp_path, **changes))


def test_norms_in_an_eagle_1_head(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"config\.json must have layernorms off"):
        recognise(Head(eagle=1).speculators(tmp_path, layernorms=True))


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        (dict(hidden_act="none"), "none"),
        (dict(rope_parameters=dict(rope_type="other", rope_theta=10000.0)), "other"),
        (dict(rope_scaling=dict(rope_type="other", factor=2.0)), "other"),
    ],
)
def test_configs_of_layers_that_cannot_be_made(tmp_path: Path, changes: dict[str, Any], name: str) -> None:
    folder = Head(**REDUCED).speculators(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    config["transformer_layer_config"] |= changes
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=rf"config\.json must describe layers of llama that can be made: .*'{name}'"):
        recognise(folder)


def test_rotary_embeddings_of_a_part_of_each_head(tmp_path: Path) -> None:
    """Which a llama's attention does not know."""
    rope = dict(rope_type="linear", factor=2.0, rope_theta=10000.0, partial_rotary_factor=0.5)
    folder = Head(**REDUCED).repository(tmp_path, rope_parameters=rope)
    with pytest.raises(
        ValueError, match=r"config\.json must describe rotary embeddings of whole heads of 8, got .*linear"
    ):
        recognise(folder)


@pytest.mark.parametrize("layout", ["speculators", "repository"])
def test_damaged_files(target: PreTrainedModel, tmp_path: Path, layout: str) -> None:
    folder = getattr(Head(**REDUCED), layout)(tmp_path)
    weights = next(path for path in folder.iterdir() if path.name != "config.json")
    whole = weights.read_bytes()
    for content in (whole[:40], whole[: len(whole) // 2], whole[:-8], b""):
        weights.write_bytes(content)
        with pytest.raises(ValueError, match=rf"drafter must be an intact checkpoint; reading .*{weights.name} failed"):
            engine.load(target, folder)
    weights.write_bytes(whole)
    assert isinstance(recognise(folder), EagleDrafter)
    (folder / "config.json").write_text(json.dumps([1]))
    with pytest.raises(ValueError, match=r"config\.json must be a JSON object, got list"):
        engine.load(target, folder)


def test_options(tmp_path: Path) -> None:
    folder = Head(**REDUCED).speculators(tmp_path)
    for options, message in (
        (dict(greedy="yes"), "greedy must be True or False, got 'yes'"),
        (dict(min_reach=1.5), r"min_reach must be in \[0, 1\], got 1.5"),
        (dict(min_reach="a"), r"min_reach must be in \[0, 1\], got 'a'"),
        (dict(layers=(1, 2)), r"layers must be 3 hidden states, .* got \(1, 2\)"),
    ):
        with pytest.raises(ValueError, match=message):
            EagleDrafter.from_pretrained(folder, **options)  # type: ignore[arg-type]


def test_layers_as_an_option(target: PreTrainedModel, tmp_path: Path) -> None:
    head = Head(**REDUCED)
    drafter = drafter_of(head.speculators(tmp_path), layers=(0, 5, 7))
    check_drafts(target, drafter, replace(head, layers=(0, 5, 7)))


def test_positions_that_a_head_may_read(small: PreTrainedModel, tmp_path: Path) -> None:
    """All of the target's, but for rotary embeddings whose frequencies change beyond the length that they were made for."""
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    for name, options, length in (("fixed", {}, CONTEXT), ("dynamic", {"rope_parameters": rope}, 8)):
        head = Head(**REDUCED, layers=(0, 1, 2), max_positions=8)
        drafter = drafter_of(head.repository(tmp_path / name, **options))
        engine.load(small, drafter, 3)
        assert drafter.ragged.context_length == length
