"""What only an accelerator can show of the engine: `pytest -m gpu`."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import perturbed, random_prompts, tiny
from training_cases import PROMPTS, log_of, options, write_target
from transformers import PreTrainedModel

import engine
from bench.drafter_cases import drafters
from engine.graphs import Graphs, clear_all
from engine.model import EXACT_KV_GRANULARITY, RaggedModel
from engine.training.options import METHODS
from engine.training.run import train_drafter

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def target() -> PreTrainedModel:
    return tiny("llama", dtype=torch.bfloat16, max_position_embeddings=4096).to("cuda")


@pytest.mark.parametrize("drafter", ["ngram", "model"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_same_text_with_and_without_speculation(target: PreTrainedModel, drafter: str, temperature: float) -> None:
    prompts = [*random_prompts(7, seed=1), [5, 6, 7, 8] * 200]
    params = engine.SamplingParams(temperature=temperature, seed=1, max_new_tokens=48)
    draft = perturbed(target, 0.05) if drafter == "model" else drafter
    plain = engine.load(target, drafter=None)
    assert plain.exact
    llm = engine.load(target, drafter=draft)
    outputs = llm.generate(prompts, params)
    assert llm.stats.accepted_tokens > 0
    assert all(output.stats.new_tokens == 48 for output in outputs)
    if temperature == 0:  # a sampled draft that was accepted is another token than plain sampling drew
        assert [o.token_ids for o in outputs] == [o.token_ids for o in plain.generate(prompts, params)]


def test_masked_keys_do_not_change_a_bit(target: PreTrainedModel) -> None:
    """What `exact` rests on: the buffer's unused blocks, the slot and the neighbours leave no trace in the logits."""
    text = torch.randint(0, 64, (1, 300), generator=torch.Generator().manual_seed(0)).to("cuda")

    def logits(slot: int, kv_length: int) -> torch.Tensor:
        ragged = RaggedModel(target, num_slots=4, exact=True)
        ragged.cache.reserve(4096)
        start = torch.zeros(4, dtype=torch.int64, device="cuda")
        start[slot] = 290
        ragged.prefill(text, [(0, 290)], slice(slot, slot + 1))
        tokens = torch.zeros(4, 8, dtype=torch.int64, device="cuda")
        tokens[slot] = text[0, 290:298]
        valid = torch.zeros_like(start)
        valid[slot] = 8
        return ragged.decode(tokens, start, valid, slice(0, 4), kv_length)[slot]

    alone = logits(0, EXACT_KV_GRANULARITY)
    for slot, blocks in [(3, 1), (0, 2), (1, 8)]:
        assert torch.equal(alone, logits(slot, blocks * EXACT_KV_GRANULARITY)), (slot, blocks)


def check_captured(target: PreTrainedModel, drafter: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Greedy text of captured rounds against that of eager ones: short texts, and then one that needs larger buffers."""
    prompts, params = random_prompts(5, seed=1), engine.SamplingParams(max_new_tokens=40)
    long, more = [5, 6, 7, 8] * 150, engine.SamplingParams(max_new_tokens=120)
    texts = []
    for graphed in (True, False):
        llm = engine.load(target, drafter=drafter(), num_draft_tokens=4, max_batch_size=4)
        if not graphed:
            llm._target.graphs = Graphs(None)
        outputs = llm.generate(prompts, params)
        before = len(llm._target.graphs)
        outputs.append(llm.generate(long, more))
        texts.append([output.token_ids for output in outputs])
        assert llm._target.graphs.enabled == graphed
        assert (before > 0) == (len(llm._target.graphs) > 0) == graphed
    assert texts[0] == texts[1]
    assert not [r.message for r in caplog.records if "CUDA graphs" in r.message]


@pytest.mark.parametrize("name", sorted(drafters(tiny("llama"))))
def test_captured_rounds_give_the_eager_text(
    target: PreTrainedModel, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        check_captured(target, drafters(target)[name], caplog)


def test_plain_rounds_and_good_drafts_too(target: PreTrainedModel, caplog: pytest.LogCaptureFixture) -> None:
    check_captured(target, lambda: None, caplog)
    check_captured(target, lambda: engine.DraftModel(perturbed(target, 0.05)), caplog)
    check_captured(target, lambda: engine.StagedDraftModel(perturbed(target, 0.05)), caplog)


def test_float16(caplog: pytest.LogCaptureFixture) -> None:
    check_captured(tiny("llama", dtype=torch.float16, max_position_embeddings=1024).to("cuda"), lambda: "ngram", caplog)


def test_heads_too_large_for_the_ragged_kernel(caplog: pytest.LogCaptureFixture) -> None:
    """Masks, then; which are captured as well."""
    target = tiny("llama", dtype=torch.bfloat16, head_dim=320, max_position_embeddings=1024).to("cuda")
    assert not engine.load(target)._target.cache.whole_buffers
    check_captured(target, lambda: "ngram", caplog)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_device_that_is_not_the_current_one(caplog: pytest.LogCaptureFixture) -> None:
    target = tiny("llama", dtype=torch.bfloat16, max_position_embeddings=1024).to("cuda:1")
    check_captured(target, lambda: engine.DraftModel(perturbed(target, 0.05)), caplog)
    assert torch.cuda.current_device() == 0


def test_graphs_are_made_anew(target: PreTrainedModel) -> None:
    """By a second engine, and where all have been forgotten."""
    params = engine.SamplingParams(max_new_tokens=30)
    texts = []
    for _ in range(2):
        llm = engine.load(target)
        for _ in range(2):
            texts.append(llm.generate([5, 6, 7], params).token_ids)
            assert len(llm._target.graphs) > 0
            clear_all()
            assert len(llm._target.graphs) == 0
    assert texts == [texts[0]] * 4


def test_a_model_that_needs_the_host_runs_eagerly(caplog: pytest.LogCaptureFixture) -> None:
    llm = engine.load(tiny("falcon", dtype=torch.bfloat16).to("cuda"))
    assert len(llm.generate([5, 6, 7], engine.SamplingParams(max_new_tokens=20)).token_ids) == 20
    assert not llm._target.graphs.enabled
    assert [r.message for r in caplog.records if "CUDA graphs" in r.message] == [
        "the target runs without CUDA graphs: layers of type 'falcon' copy from the host"
    ]


def test_a_model_that_has_been_on_the_host_is_captured_anew() -> None:
    """Its parameters are the same objects, and lie elsewhere."""
    model = tiny("llama", dtype=torch.bfloat16, max_position_embeddings=1024).to("cuda")
    llm, params = engine.load(model), engine.SamplingParams(max_new_tokens=30)
    expected = [llm.generate([5, 6, 7], params).token_ids for _ in range(2)][1]
    model.cpu()
    held = [torch.zeros_like(parameter, device="cuda") for parameter in model.parameters()]  # where they were before
    model.cuda()
    assert llm.generate([5, 6, 7], params).token_ids == expected and len(held)


FULL = """
import torch
from engine.graphs import Graphs

def work():
    activations = torch.empty(1 << 28, dtype=torch.uint8, device="cuda")
    if torch.cuda.is_current_stream_capturing() and short:
        raise torch.OutOfMemoryError("no more")
    return activations[:1].fill_(3)

short, graphs = False, Graphs.for_device(torch.zeros(1, device="cuda").device)
for key in "ab":
    for _ in range(3):
        result = graphs.run(key, work)
assert len(graphs) == 2 and result.item() == 3
short = True
for _ in range(3):
    result = graphs.run("c", work)
assert graphs.enabled and not len(graphs) and result.item() == 3
del result
torch.cuda.empty_cache()
assert torch.cuda.memory_reserved() < 1 << 27, torch.cuda.memory_reserved()
short = False
for _ in range(3):
    result = graphs.run("c", work)
assert len(graphs) == 1 and result.item() == 3
"""


def test_a_capture_that_lacked_memory_gives_it_back() -> None:
    root = Path(__file__).resolve().parent.parent
    done = subprocess.run([sys.executable, "-c", FULL], cwd=root, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


FAILING = """
import torch
from engine.graphs import Graphs

ones, before = torch.ones(3, device="cuda"), torch.cuda.current_stream()
graphs = Graphs.for_device(ones.device)
assert [graphs.run("key", lambda: ones.sum().item()) for _ in range(3)] == [3.0] * 3
assert not graphs.enabled
assert torch.cuda.current_stream() == before
torch.cuda.empty_cache()
assert (ones + ones).tolist() == [2.0] * 3
assert torch.rand(2, device="cuda").max() < 1
"""


def test_a_failing_capture_leaves_the_stream_as_it_was() -> None:
    """In a process of its own: torch makes no promises after that."""
    root = Path(__file__).resolve().parent.parent
    done = subprocess.run([sys.executable, "-c", FAILING], cwd=root, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "CUDA graphs are off" in done.stderr


@pytest.mark.parametrize("method", METHODS)
def test_drafters_are_trained(method: str, tmp_path: Path) -> None:
    """On the device they learn what they learn on a CPU, up to rounding."""
    target = write_target(tmp_path / "target")
    losses = {}
    for device in ("cpu", "cuda"):
        out = train_drafter(PROMPTS, tmp_path / device, options(target, method, device=device, temperatures=(0.0,)))
        losses[device] = [record["validation"]["loss"] for record in log_of(out) if "validation" in record]
    assert losses["cuda"] == pytest.approx(losses["cpu"], rel=0.05)
    llm = engine.load(str(target), drafter=str(tmp_path / "cuda"), device="cuda")
    assert llm.generate(PROMPTS[:2], engine.SamplingParams(max_new_tokens=8))[0].stats.new_tokens == 8
