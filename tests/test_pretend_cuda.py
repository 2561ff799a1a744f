"""What only runs on a GPU, on a pretended one: attention by the kernel, captured rounds, results that are read late."""

import copy
import gc
import logging
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from pretend_cuda import pretended
from pretend_tensors import Device, OnCuda
from tiny_models import CONFIGS, GROUPED_EXPERTS, greedy, perturbed, tiny

import engine
from bench import attention_cases, end_to_end, targets, timing
from bench.drafter_cases import ON_THE_HOST, drafters, tokenizer
from bench.figures import Figures
from engine.backend import sample
from engine.cuda_capture import _not_ended as not_ended
from engine.draft_length import FixedLength
from engine.drafters import proposals
from engine.gpu_layers import GpuLayerParts
from engine.graphs import Graphs
from engine.kernels import attention
from engine.model import RaggedModel
from engine.serving import Server
from engine.transfers import HostCopies

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a real one")
PROMPTS = [[5, 6, 7, 5, 6], [9, 8]]
# Kernels are interpreted program by program, so heads are few; those of the other architectures are more.
LLAMA = {"max_position_embeddings": 256, "num_hidden_layers": 3, "num_attention_heads": 2, "num_key_value_heads": 1}
LIKE_LLAMA = ("llama", "mistral", "qwen2", "qwen3", "smollm3")  # whose layers are fused


@pytest.fixture
def device() -> Iterator[Device]:
    with pretended() as device:
        yield device


def target(name: str = "llama", dtype: torch.dtype = torch.float32) -> Any:
    more = LLAMA if name == "llama" else {}
    return tiny(name, dtype=dtype, pad_token_id=None, **more)  # GPT-2 looks for it in what it reads


@pytest.fixture
def drafts_as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawn by noise for every token on the CPU too, where inversion, which is quicker there, draws others."""
    monkeypatch.setattr(proposals, "sample_by_inversion", partial(sample, return_logprobs=True))


def check_text(
    device: Device,
    monkeypatch: pytest.MonkeyPatch,
    drafter: Any,
    temperature: float = 0.0,
    name: str = "llama",
    waits: bool = False,
) -> None:
    """That of the torch twin on the CPU, from rounds that are captured and inside which nobody waits, or from such that wait."""
    params = engine.SamplingParams(max_new_tokens=12, temperature=temperature, seed=1)
    options: dict[str, Any] = dict(num_draft_tokens=3, max_batch_size=2, exact=False)
    texts, waited, launch = [], [], Server._launch

    def watched(self: Server, *args: Any, **kwargs: Any) -> Any:
        before = device.waits
        result = launch(self, *args, **kwargs)
        waited.append(device.waits - before)
        return result

    for where in ("cpu", "cuda"):
        model = target(name).to(where)
        with torch.random.fork_rng():
            torch.manual_seed(0)
            llm = engine.load(model, drafter=drafter(model), **options)
        if where == "cuda":
            assert llm._target.graphs.enabled and llm._server._late and llm._target.cache.whole_buffers
            fused = [module for module in model.modules() if type(module).__name__.startswith("Fused")]
            assert len(fused) == (model.config.num_hidden_layers if name in LIKE_LLAMA else 0)
            assert all(layer.parts.on_gpu for layer in fused)
            monkeypatch.setattr(Server, "_launch", watched)
        texts.append([output.token_ids for output in llm.generate(PROMPTS, params)])
    assert texts[0] == texts[1]
    assert device.launches > 0 and waited and any(waited) == waits
    assert len(llm._target.graphs) > 0


@pytest.mark.usefixtures("drafts_as_on_a_gpu")
@pytest.mark.parametrize("temperature", [pytest.param(0.0, marks=pytest.mark.slow), 0.8])
def test_a_good_draft_model(device: Device, monkeypatch: pytest.MonkeyPatch, temperature: float) -> None:
    check_text(device, monkeypatch, lambda model: engine.DraftModel(perturbed(model, 0.05)), temperature)


@pytest.mark.parametrize("name", ["none", "ngram", "draft model of two layers", "eagle"])
def test_prompts_that_take_slots_wait_for_nobody(device: Device, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """The round before is under way then."""
    waits, steps = [], {step: getattr(Server, step) for step in ("_begin", "_prefill")}

    def counted(step: str) -> Any:
        def run(self: Server, *args: Any) -> Any:
            before = device.waits
            result = steps[step](self, *args)
            waits.append(device.waits - before)
            return result

        return run

    model = target().to("cuda")
    drafter: Any = None if name == "none" else drafters(model)[name]()
    llm = engine.load(model, drafter=drafter, num_draft_tokens=2, max_batch_size=2, exact=False)
    params = engine.SamplingParams(max_new_tokens=3)
    llm.generate(PROMPTS, params)  # makes buffers
    for step in steps:
        monkeypatch.setattr(Server, step, counted(step))
    llm.generate(PROMPTS, params)
    assert len(waits) > len(PROMPTS) and not any(waits)


def test_reading_a_prompt_takes_what_the_device_takes(device: Device) -> None:
    """And not what the host takes to say so: the device has other work before. Each event here is 0.01 ms after the one before."""
    llm = engine.load(target().to("cuda"), drafter=None, exact=False)
    stats = llm.generate(PROMPTS[0], engine.SamplingParams(max_new_tokens=3)).stats
    assert stats.prefill_seconds == llm.stats.prefill_seconds == pytest.approx(1e-5)


def test_rounds_use_events_and_pinned_memory_again(device: Device) -> None:
    """Of two rounds, as one is read when the next is under way; and not before they have been read."""
    llm = engine.load(target().to("cuda"), drafter="ngram", num_draft_tokens=2, exact=False)
    llm.generate(PROMPTS[0], engine.SamplingParams(max_new_tokens=9))
    assert len(llm._server._round.clock._read) == 2 * 3
    assert [len(copies) for copies in llm._server._copies._read.values()] == [2]
    copies = HostCopies()
    first, second = (copies.make(OnCuda(torch.tensor([[value]]))) for value in (1, 2))
    assert first.item() == 1 and second.item() == 2
    copies.give_back(first)
    third, fourth = (copies.make(OnCuda(torch.tensor([[value]]))) for value in (3, 4))
    assert third is first and [each.item() for each in (second, third, fourth)] == [2, 3, 4]


def test_tensors_that_torch_is_told_to_make_on_the_device(device: Device) -> None:
    """Of which none can be pinned."""
    llm = engine.load(target().to("cuda"), max_batch_size=2, exact=False)
    params = engine.SamplingParams(max_new_tokens=3)
    texts = [output.token_ids for output in llm.generate(PROMPTS, params)]
    with torch.device("cuda"):
        assert [output.token_ids for output in llm.generate(PROMPTS, params)] == texts
    assert llm._target.graphs.enabled


@pytest.mark.parametrize("drafter", ["model", *(pytest.param(d, marks=pytest.mark.slow) for d in ("ngram", "eagle"))])
def test_after_a_warm_up_prompts_find_their_kernels_compiled(
    device: Device, drafter: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of attention there is one for each size of a head and of a block of queries, with and without slots."""
    kinds: set[tuple[int, int, bool]] = set()
    launch = attention.ragged_attention

    def noted(query: Any, keys: Any, *args: Any, slots: Any = None, **more: Any) -> Any:
        rows = query.shape[1] // keys.shape[1] * query.shape[2]
        kinds.add((query.shape[3], attention.blocks_for(rows, query.shape[3], query.dtype)["BLOCK_M"], slots is None))
        return launch(query, keys, *args, slots=slots, **more)

    monkeypatch.setattr(attention, "ragged_attention", noted)
    model, own = target().to("cuda"), {"head_dim": 32, "num_hidden_layers": 1}
    small = tiny("llama", dtype=torch.float32, max_position_embeddings=256, **own).to("cuda")
    made = {"ngram": "ngram", "model": small, "eagle": drafters(small)["eagle"]()}[drafter]
    llm = engine.load(model, drafter=made, max_batch_size=2, num_draft_tokens=2)
    llm.warmup(text_lengths=[64])
    compiled = frozenset(kinds)
    params = engine.SamplingParams(max_new_tokens=2)
    llm.generate([[5] * 40, [6] * 20, [7], [8] * 10, [9] * 3], params)
    assert kinds == compiled and len(kinds) > 3


def test_a_graph_that_is_timed_keeps_what_it_reads_and_writes(device: Device) -> None:
    """Else its memory is another's by the time it is replayed."""
    copies = timing.device_copies(64, 3)
    known = [weakref.ref(call) for call in copies]
    contender, _ = timing.capture(copies)
    del copies
    gc.collect()
    assert all(call() is not None for call in known)
    contender.run()


@pytest.mark.parametrize("name", LIKE_LLAMA)
def test_layers_are_fused_while_nobody_watches_their_modules(
    device: Device, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, params = target(name).to("cuda"), engine.SamplingParams(max_new_tokens=3)
    calls: list[Any] = []
    layer = GpuLayerParts.layer

    def counted(self: GpuLayerParts, *given: Any) -> Any:
        calls.append(self)
        return layer(self, *given)

    monkeypatch.setattr(GpuLayerParts, "layer", counted)
    tokens = engine.load(model, drafter=None, exact=False).generate(PROMPTS[0], params).token_ids
    layers = model.model.layers
    assert {id(each.parts) for each in layers} == set(map(id, calls))
    calls.clear()
    layers[0].mlp.up_proj.register_forward_hook(lambda *_: None)
    assert engine.load(model, drafter=None, exact=False).generate(PROMPTS[0], params).token_ids == tokens
    assert {id(each.parts) for each in layers[1:]} == set(map(id, calls))


class Switched(torch.nn.Module):
    """A layer with an adapter, as peft has them."""

    def __init__(self, base: torch.nn.Module) -> None:
        super().__init__()
        self.base, self._disable_adapters = base, False

    def forward(self, hidden: torch.Tensor) -> Any:
        return self.base(hidden) if self._disable_adapters else -self.base(hidden)


@pytest.mark.parametrize("change", ["hook", "parameter", "adapter"])
def test_captured_rounds_follow_a_live_model(device: Device, change: str) -> None:
    params, texts = engine.SamplingParams(max_new_tokens=6), []
    for where in ("cpu", "cuda"):
        model = target()
        switched = model.model.layers[1].mlp.down_proj = Switched(model.model.layers[1].mlp.down_proj)
        llm = engine.load(model.to(where), drafter="ngram", num_draft_tokens=3, exact=False)
        set_up = []
        for _ in range(3):
            before = llm.generate(PROMPTS[0], params).token_ids
            set_up.append(llm._target.graphs.set_up)
        assert set_up[1] == set_up[2] and (where == "cpu") == (len(llm._target.graphs) == 0)
        if change == "hook":
            model.lm_head.register_forward_hook(lambda *given: -given[-1])
        elif change == "parameter":
            model.lm_head.weight = torch.nn.Parameter(-model.lm_head.weight.detach())
        else:
            switched._disable_adapters = True
        texts.append((before, llm.generate(PROMPTS[0], params).token_ids))
    assert texts[0] == texts[1] and texts[0][0] != texts[0][1]


class Pauses(FixedLength):
    """Two drafts, after more and more rounds without."""

    def __init__(self) -> None:
        super().__init__(2)
        self.asked = iter([k for pause in range(6) for k in [0] * pause + [2]])

    def choose(self, *args: Any, **kwargs: Any) -> int:
        return next(self.asked, 2)


@pytest.mark.parametrize("name", ["model", pytest.param("eagle", marks=pytest.mark.slow)])
def test_what_makes_up_for_a_pause_is_a_few_graphs(device: Device, name: str) -> None:
    """And not one for each length of a pause: what a drafter reads beyond what it lacks changes nothing."""
    texts, drafts, params = [], [], engine.SamplingParams(max_new_tokens=36)
    for where in ("cpu", "cuda"):
        model = target().to(where)
        with torch.random.fork_rng():
            torch.manual_seed(0)
            drafter: Any = engine.DraftModel(perturbed(model, 0.05)) if name == "model" else drafters(model)[name]()
            llm = engine.load(model, drafter=drafter, num_draft_tokens=2, max_batch_size=1, exact=False)
        llm._server._lengths = Pauses()
        proposed, verify = [], llm._server._round._verify

        def noted(state: Any, proposal: Any, proposed: list = proposed, verify: Any = verify) -> Any:
            if proposal.tokens.shape[1]:
                proposed.append(proposal.tokens.tolist())
            return verify(state, proposal)

        llm._server._round._verify = noted  # type: ignore[method-assign]
        texts.append(llm.generate(PROMPTS[0], params).token_ids)
        drafts.append(proposed)
    assert texts[0] == texts[1] and len(drafts[0]) > 6
    assert drafts[0][:6] == drafts[1][:6]
    assert 0 < len({key for key in llm._target.graphs._seen if key[0] == "propose"}) <= 4


ON_THE_HOST_WITH_A_MODEL: dict[str, Any] = {
    "staged": lambda model, other: engine.StagedDraftModel(model, num_draft_tokens=2),
    "staged, suffixes inside": lambda model, other: engine.StagedDraftModel(model, engine.SuffixDrafter()),
    "shared tokens": lambda model, other: engine.IntersectionDraftModel(other, *tokenizers()),
    "text read anew": lambda model, other: engine.ReencodingDraftModel(other, *tokenizers()),
}


def tokenizers() -> tuple[Any, Any]:
    """A drafter's and the target's: words at other ids, and some of the target's that the drafter lacks."""
    return tokenizer(60, first=4), tokenizer(64)


def moved_ids(model: Any, by: int) -> Any:
    """A model that says at id i what this one says at i + by."""
    other = copy.deepcopy(model)
    with torch.no_grad():
        for part in (other.model.embed_tokens, other.lm_head):
            part.weight.copy_(part.weight.roll(-by, dims=0))
    return other


@pytest.mark.usefixtures("drafts_as_on_a_gpu")
@pytest.mark.parametrize(
    ("name", "temperature"),
    [
        ("staged", 0.8),
        ("text read anew", 0.0),
        pytest.param("shared tokens", 0.8, marks=pytest.mark.slow),
        pytest.param("staged, suffixes inside", 0.8, marks=pytest.mark.slow),
        pytest.param("staged", 0.0, marks=pytest.mark.slow),
        pytest.param("shared tokens", 0.0, marks=pytest.mark.slow),
    ],
)
def test_a_model_is_captured_between_the_hosts_looks(device: Device, name: str, temperature: float) -> None:
    """The drafts are those of the CPU, and after a warm-up all calls of the draft model are replayed."""
    params = engine.SamplingParams(max_new_tokens=12, temperature=temperature, seed=1)
    texts, drafts = [], []
    for where in ("cpu", "cuda"):
        model = tiny("llama", dtype=torch.float32, max_position_embeddings=64).to(where)
        draft = perturbed(model, 0.05)
        drafter = ON_THE_HOST_WITH_A_MODEL[name](draft, moved_ids(draft, 4))
        llm = engine.load(model, drafter=drafter, num_draft_tokens=4, max_batch_size=1, exact=False)
        llm.warmup(text_lengths=[20], params=params)
        propose, decode, proposed, called = drafter.propose, drafter.ragged.decode, [], []

        def noted(state: Any, count: int, propose: Any = propose, proposed: Any = proposed) -> Any:
            proposal = propose(state, count)
            proposed.append(proposal.tokens.tolist())
            return proposal

        def counted(*given: Any, decode: Any = decode, called: Any = called) -> Any:
            called.append(given)
            return decode(*given)

        drafter.propose, drafter.ragged.decode = noted, counted
        texts.append(llm.generate(PROMPTS[0], params).token_ids)
        drafts.append(proposed[:3])  # before a text's end, where fewer drafts are asked for
        assert llm.stats.accepted_tokens > 2 and bool(called) == (where == "cpu")
    assert texts[0] == texts[1] and drafts[0] == drafts[1]


def test_a_model_that_cannot_be_captured_runs_eagerly_behind_a_warm_up(device: Device) -> None:
    params, texts = engine.SamplingParams(max_new_tokens=6), []
    for where in ("cpu", "cuda"):
        model = tiny("llama", dtype=torch.float32, max_position_embeddings=64).to(where)
        drafter = engine.StagedDraftModel(model)
        llm = engine.load(model, drafter=drafter, num_draft_tokens=3, max_batch_size=1, exact=False)
        drafter.ragged.capturable = False
        llm.warmup(text_lengths=[20])
        assert not [key for key in llm._target.graphs._seen if key[0] == "staged"]
        texts.append(llm.generate(PROMPTS[0], params).token_ids)
    assert texts[0] == texts[1]


def test_a_staged_model_drafts_captured_again_behind_a_pause(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """The round that makes up for a long one runs eagerly; what graphs work on is still theirs behind it."""
    monkeypatch.setattr("engine.drafters.model.WIDEST_CATCH_UP", 3)
    asked, texts, drafts = [2] * 4 + [0] * 6 + [2] * 4, [], []
    for where in ("cpu", "cuda"):
        model = tiny("llama", dtype=torch.float32, max_position_embeddings=64).to(where)
        drafter = engine.StagedDraftModel(perturbed(model, 0.05))
        llm = engine.load(model, drafter=drafter, num_draft_tokens=2, max_batch_size=1, exact=False)
        llm.warmup(text_lengths=[40])
        propose, proposed, numbers = drafter.propose, [], iter(asked)

        def noted(state: Any, count: int, propose: Any = propose, proposed: Any = proposed) -> Any:
            proposal = propose(state, count)
            proposed.append(proposal.tokens.tolist())
            return proposal

        drafter.propose = noted
        monkeypatch.setattr(FixedLength, "choose", lambda *_, numbers=numbers, **__: next(numbers, 0))
        texts.append(llm.generate(PROMPTS[0], engine.SamplingParams(max_new_tokens=34)).token_ids)
        drafts.append(proposed[:8])
    assert texts[0] == texts[1] and drafts[0] == drafts[1] and len(drafts[0]) == 8


QUICK = ("ngram", "medusa")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow, id=name) for name in drafters(tiny())]
)
def test_every_drafter(device: Device, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    check_text(device, monkeypatch, lambda model: drafters(model)[name](), waits=name in ON_THE_HOST)


@pytest.mark.slow
# But those that wait in every call: falcon, which copies from the host, and experts in float32.
@pytest.mark.parametrize("name", sorted(set(CONFIGS) - {"falcon", *GROUPED_EXPERTS}))
def test_every_architecture(device: Device, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    check_text(device, monkeypatch, lambda model: "ngram", name=name)


@pytest.mark.parametrize(
    ("name", "dtype", "capability", "way", "reason"),
    [
        ("mixtral", torch.bfloat16, (9, 0), "grouped_mm", None),
        ("gpt_oss", torch.bfloat16, (10, 0), "grouped_mm", None),
        ("mixtral", torch.bfloat16, (12, 0), "grouped_mm", "grouped products wait for the device in torch.bfloat16"),
        ("mixtral", torch.float16, (9, 0), "grouped_mm", "grouped products wait for the device in torch.float16"),
        ("gpt_oss", torch.float32, (9, 0), "grouped_mm", "grouped products wait for the device in torch.float32"),
        ("mixtral", torch.bfloat16, (8, 0), "grouped_mm", "grouped products wait for the device in torch.bfloat16"),
        ("mixtral", torch.float16, (9, 0), "batched_mm", None),
        ("mixtral", torch.bfloat16, (9, 0), "eager", "experts are called one by one"),
        ("llama", torch.float16, (8, 0), "grouped_mm", None),
    ],
)
def test_experts_that_wait_are_known_beforehand(
    device: Device,
    name: str,
    dtype: torch.dtype,
    capability: tuple[int, int],
    way: str,
    reason: str | None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
    model = target(name, dtype).to("cuda")
    if name != "llama":
        model.set_experts_implementation(way)
    assert RaggedModel(model, 2).capturable == (reason is None)
    assert (reason or "") in caplog.text and bool(caplog.text) == bool(reason)


@pytest.mark.parametrize("dtype, kernels", [(torch.float64, ""), (torch.float32, "torch")])
def test_without_kernels_nothing_is_captured(
    device: Device, dtype: torch.dtype, kernels: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("ENGINE_KERNELS", kernels)
    assert not engine.load(target(dtype=dtype).to("cuda"))._target.graphs.enabled
    assert "torch's operations, used here instead of our kernels" in caplog.text


def test_a_device_that_the_attention_kernel_does_not_suit(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (7, 5))
    llm = engine.load(target().to("cuda"), num_draft_tokens=2, max_batch_size=1, exact=False)
    assert llm._target.graphs.enabled and not llm._target.cache.whole_buffers
    params = engine.SamplingParams(max_new_tokens=9)
    assert llm.generate([5, 6, 7], params).token_ids == greedy(target(), [5, 6, 7], 9)


@pytest.mark.parametrize("what", ["parameters", "buffers"])
def test_weights_that_lie_elsewhere_are_read_there(device: Device, what: str) -> None:
    """As when a model has been on the host meanwhile: its parameters are the same objects."""
    model = target().to("cuda")
    llm, params = engine.load(model, drafter=None, exact=False), engine.SamplingParams(max_new_tokens=9)
    for _ in range(2):
        before = llm.generate([5, 6, 7], params).token_ids
    assert len(llm._target.graphs)
    for tensor in getattr(model, what)():
        tensor.value = tensor.value.flip(0).contiguous()  # type: ignore[attr-defined]
    after = llm.generate([5, 6, 7], params).token_ids
    llm._target.graphs.clear()
    assert after == llm.generate([5, 6, 7], params).token_ids != before


def test_the_device_of_a_live_model_may_be_named_without_its_number(device: Device) -> None:
    model = target().to("cuda")
    for name in ("cuda", "cuda:0"):
        assert engine.load(model, device=name).target_model is model
    with pytest.raises(ValueError, match="device must be 'auto' for a live target, which is on cuda:0, got 'cuda:1'"):
        engine.load(model, device="cuda:1")


def test_exact_text_with_and_without_drafts(device: Device) -> None:
    """In bf16, where every rounding counts."""
    model = target(dtype=torch.bfloat16).to("cuda")
    params, texts = engine.SamplingParams(max_new_tokens=8), []
    for drafter in (None, engine.DraftModel(perturbed(model, 0.05))):
        llm = engine.load(model, drafter=drafter, num_draft_tokens=4, max_batch_size=2)
        assert llm.exact
        texts.append([output.token_ids for output in llm.generate(PROMPTS, params)])
    assert texts[0] == texts[1] and llm.stats.accepted_tokens > 0


def test_the_reports_cases(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two of those that take seconds: what they do on a GPU and not on a CPU is seen to run."""
    case = attention_cases.AttentionCase(2, 40, 6, num_heads=4, num_kv_heads=2, head_dim=16)
    monkeypatch.setattr(attention_cases, "GPU_CASES", (case,))
    for size in ("8B", "1B"):
        monkeypatch.setitem(targets.SHAPES, size, targets.SHAPES["tiny"])
    for name, value in (("PROMPT_TOKENS", 10), ("NEW_TOKENS", 6), ("TURNS", 1)):
        monkeypatch.setitem(getattr(targets, name), "cuda", value)
    monkeypatch.setattr(end_to_end, "bandwidth", lambda device: 1e9)
    attention, plain = Figures(), Figures()
    attention_cases.attention_report("cuda", attention)
    end_to_end.plain_decoding("cuda", plain)
    assert not attention.failed and not plain.failed
    assert attention[case.shape]["share_of_copy"]
    assert plain["8B"]["tokens_per_second"] > 0 and plain["1B"]["ratio"] > 0
    assert plain["1B"]["captured_while_timed"] == 0


# The pretended device must refuse what a real one refuses, or the tests above show nothing.


def test_tensors_of_two_devices_do_not_mix(device: Device) -> None:
    ours = torch.ones(3, device="cuda")
    assert (ours + torch.tensor(1.0)).tolist() == [2.0] * 3  # a number may lie anywhere
    with pytest.raises(RuntimeError, match="same device"):
        ours + torch.ones(3)
    with pytest.raises(TypeError, match="numpy"):
        ours.numpy()


@pytest.mark.parametrize("reads", ["item", "nonzero", "copies"])
def test_what_waits_cannot_be_captured(device: Device, reads: str, caplog: pytest.LogCaptureFixture) -> None:
    ours = torch.ones(3, device="cuda")
    work = {
        "item": lambda: ours.sum().item(),
        "nonzero": lambda: ours.nonzero(),
        "copies": lambda: ours + torch.tensor([1.0, 2.0, 3.0]).to("cuda"),
    }[reads]
    graphs, waited = Graphs.for_device(ours.device), device.waits
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            graphs.run("key", work)
    assert not graphs.enabled and "capturing" in caplog.text and device.waits == waited + 2


@pytest.mark.parametrize(
    "failure, kept", [(torch.OutOfMemoryError("no more"), 0), (RuntimeError("not permitted when capturing"), 1)]
)
def test_of_captures_that_failed_only_those_without_an_end_are_kept(
    device: Device, failure: Exception, kept: int
) -> None:
    """The others give back their part of the pool."""

    def work() -> None:
        if device.capturing is not None:
            raise failure

    graphs = Graphs.for_device(torch.device("cuda", 0))
    for _ in range(2):
        graphs.run("key", work)
    assert len(not_ended) == kept


def test_an_interrupt_when_a_capture_has_just_ended_leaves_no_stream(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    current: list[Any] = []
    monkeypatch.setattr(torch.cuda, "set_stream", current.append)
    capture = torch.cuda.graph

    @contextmanager
    def interrupted(graph: Any, **more: Any) -> Iterator[None]:
        with capture(graph, **more):
            yield
        raise KeyboardInterrupt

    monkeypatch.setattr(torch.cuda, "graph", interrupted)
    graphs = Graphs.for_device(torch.device("cuda", 0))
    graphs.run("key", lambda: None)
    with pytest.raises(KeyboardInterrupt):
        graphs.run("key", lambda: None)
    assert len(current) == 1 and not not_ended


def test_there_are_counters_for_every_capture(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """What one graph's kernels have taken, no other gets."""
    reserved: list[bool] = []
    monkeypatch.setattr("engine.graphs.reserve_counters", lambda _: reserved.append(device.capturing is not None))
    graphs = Graphs.for_device(torch.device("cuda", 0))
    for key in "aabbab":
        graphs.run(key, lambda: None)
    assert len(graphs) == 2 and reserved == [False] * 2


def test_no_garbage_is_collected_during_a_capture(device: Device) -> None:
    """In it may be the graph of an engine that is gone, which cannot be destroyed then."""
    during_capture: list[bool] = []

    class Gone:
        def __init__(self) -> None:
            self.cycle = self

        def __del__(self) -> None:
            during_capture.append(device.capturing is not None)

    def work() -> None:
        Gone()
        _ = [[each] for each in range(100_000)]  # so many objects that the collector runs

    graphs = Graphs.for_device(torch.device("cuda", 0))
    for _ in range(2):
        graphs.run("key", work)
    gc.collect()
    assert during_capture == [False] * 2 and gc.isenabled()


def test_a_graph_does_nothing_until_it_is_replayed(device: Device) -> None:
    total, step = torch.zeros(2, device="cuda"), torch.ones(2, device="cuda")

    def work() -> torch.Tensor:
        total.add_(step)
        return total * 2

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = work()
    assert total.tolist() == [0, 0] and result.tolist() != [2, 2]
    step[1] = 5
    for _ in range(2):
        graph.replay()
    assert total.tolist() == [2, 10] and result.tolist() == [4, 20]


def test_a_result_is_gone_when_an_earlier_graph_is_replayed(device: Device) -> None:
    """It may lie where that one works."""
    ours, graphs = torch.ones(3, device="cuda"), Graphs.for_device(torch.device("cuda", 0))
    for _ in range(2):
        first = graphs.run("first", lambda: ours + 1)
    for _ in range(2):
        second = graphs.run("second", lambda: ours + 2)
    assert first.tolist() == [2, 2, 2] and second.tolist() == [3, 3, 3]
    assert graphs.run("first", lambda: None).tolist() == [2, 2, 2] and second.tolist() != [3, 3, 3]


def test_nothing_is_left_of_it() -> None:
    """Other tests count the tensors that live."""
    with pretended():
        llm = engine.load(target().to("cuda"), drafter="ngram")
        llm.generate([5, 6, 7], engine.SamplingParams(max_new_tokens=4))
        del llm
    gc.collect()
    assert not [each for each in gc.get_objects() if issubclass(type(each), OnCuda)]
