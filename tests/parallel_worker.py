"""What one rank of tests/test_parallel.py does: `torchrun --nproc-per-node 2 parallel_worker.py FUNCTION FOLDER`.

The folder has checkpoints; each rank writes what the function returns to `rank<N>.json` beside them.
"""

import contextlib
import io
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tiny_models import VOCAB, random_prompts

import engine

PROMPTS = random_prompts(6)
GREEDY = engine.SamplingParams(max_new_tokens=12)
SEEDED = [engine.SamplingParams(temperature=0.9, top_p=0.95, max_new_tokens=12, seed=seed) for seed in range(6)]
UNSEEDED = engine.SamplingParams(temperature=1.0, max_new_tokens=12)
HEADS_OF = (
    "target",
    "tied_llama",
)  # targets of the head: with an output matrix of its own, and with its embeddings as such
OPTIONS = dict(num_draft_tokens=4, max_batch_size=3)  # fewer rows than prompts: some wait


class Oracle:
    """Drafts a known continuation, each token shifted by `lie`."""

    def __init__(self, text: list[int], lie: int) -> None:
        self.text = torch.tensor([(token + lie) % VOCAB for token in text])

    def prefill(self, state: engine.BatchState) -> None:
        pass

    def propose(self, state: engine.BatchState, num_draft_tokens: int) -> engine.Proposal:
        """Of one row."""
        begin = int(state.position[0])
        return engine.Proposal(self.text[None, begin : begin + num_draft_tokens])

    def observe(self, state: engine.BatchState, verdict: engine.Verdict) -> None:
        pass


class Uneven(engine.NGramDrafter):
    """Slow on rank 1 alone, where measured times would speak against drafting."""

    def propose(self, state: engine.BatchState, num_draft_tokens: int) -> engine.Proposal:
        time.sleep(0.02 * dist.get_rank())
        return super().propose(state, num_draft_tokens)


def texts(llm: engine.Engine, params: Any) -> list[list[int]]:
    """The new tokens of all prompts."""
    return [output.token_ids for output in llm.generate(PROMPTS, params)]


def message(call: Callable[[], Any]) -> str:
    """Kind and text of the error that the call ends with."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def observations(folder: Path) -> dict[str, Any]:
    """One architecture, everything else."""
    seen: dict[str, Any] = {}
    llm = engine.load(folder / "target", **OPTIONS, tensor_parallel=True)
    rank = dist.get_rank()
    seen["ngram"] = texts(llm, GREEDY)
    attention = llm.target_model.model.layers[0].self_attn
    seen["slices"] = [list(p.weight.to_local().shape) for p in (attention.q_proj, attention.k_proj)]
    seen["cached_heads"] = llm._target.cache.ragged_layers[0].keys.shape[1]
    seen["stream"] = [piece.token_ids for piece in llm.stream(PROMPTS[1], SEEDED[1])]
    seen["unseeded"] = [texts(llm, UNSEEDED) for _ in range(2)]
    with contextlib.redirect_stderr(io.StringIO()) as stderr:
        llm.generate(PROMPTS[:1], GREEDY, progress=True)
    seen["shows_a_bar"] = "prompt" in stderr.getvalue()
    seen["other_prompts"] = message(lambda: llm.generate([[5 + rank]], GREEDY))
    seen["other_params"] = message(lambda: llm.generate([[5]], engine.SamplingParams(seed=rank)))
    seen["one_bad_prompt"] = message(lambda: llm.generate([[5], [-rank]], GREEDY))
    seen["one_empty_list"] = message(lambda: llm.generate([[5]] * (1 - rank), GREEDY))
    seen["one_bad_stream"] = message(lambda: llm.stream([[5]] * rank + [5], GREEDY))
    seen["all_bad_prompts"] = message(lambda: llm.generate([[5], [-1]], GREEDY))
    seen["other_warmup"] = message(lambda: llm.warmup([1], [8 + rank]))
    seen["one_bad_warmup"] = message(lambda: llm.warmup([1 - rank], [8]))
    seen["all_bad_warmup"] = message(lambda: llm.warmup([0]))
    if rank == 1:
        llm.check([[5]], GREEDY)  # waits for nobody
    seen["after_errors"] = texts(llm, GREEDY)

    for method in ("rejection", "coupled"):
        drafted = engine.load(
            folder / "target", drafter=folder / "draft", verification=method, **OPTIONS, tensor_parallel=True
        )
        seen[method] = texts(drafted, SEEDED)

    for name in HEADS_OF:
        headed = engine.load(folder / name, drafter=folder / "head", **OPTIONS, tensor_parallel=True)
        seen[f"head of {name}"] = [texts(headed, SEEDED), headed.stats.accepted_tokens]

    uneven: dict[str, Any] = {**OPTIONS, "num_draft_tokens": "auto", "drafter": Uneven(), "tensor_parallel": True}
    seen["auto"] = texts(engine.load(folder / "target", **uneven), GREEDY)

    exact: dict[str, Any] = dict(dtype="bfloat16", exact=True, verification="coupled", **OPTIONS, tensor_parallel=True)
    seen["exact"] = [texts(engine.load(folder / "target", drafter=d, **exact), SEEDED) for d in (None, "ngram")]

    text = PROMPTS[1] + seen["ngram"][1]
    for name, lie in (("honest", 0), ("liar", rank)):
        llm = engine.load(folder / "target", drafter=Oracle(text, lie), num_draft_tokens=3, tensor_parallel=True)
        seen[name] = message(lambda llm=llm: llm.generate(PROMPTS[1], GREEDY))  # type: ignore[misc]
    seen["other_load"] = message(lambda: engine.load(folder / "target", num_draft_tokens=rank, tensor_parallel=True))
    other = folder / ("draft" if rank else "target")
    seen["other_target"] = message(lambda: engine.load(other, tensor_parallel=True))
    seen["other_options"] = message(
        lambda: engine.load(folder / "target", drafter=engine.NGramDrafter(1 + rank), tensor_parallel=True)
    )
    layers = f"layer_skip:{1 + rank}"
    seen["other_layers"] = message(lambda: engine.load(folder / "target", drafter=layers, tensor_parallel=True))
    cascade = f"ngram+layer_skip:{rank}-1"
    seen["other_stage"] = message(lambda: engine.load(folder / "target", drafter=cascade, tensor_parallel=True))
    try:
        seen["tied"] = texts(engine.load(folder / "tied", **OPTIONS, tensor_parallel=True), GREEDY)
    except engine.UnsupportedModelError as error:
        seen["tied"] = str(error)
    seen["seconds"] = llm._ranks.end_round([[7]], [1.5 + rank, 0.25])
    return seen


def architectures(folder: Path) -> dict[str, Any]:
    """Greedy text of every checkpoint in the folder."""
    checkpoints = sorted(path for path in folder.iterdir() if path.is_dir())
    return {path.name: texts(engine.load(path, **OPTIONS, tensor_parallel=True), GREEDY) for path in checkpoints}


if __name__ == "__main__":
    torch.set_num_threads(1)
    here = Path(sys.argv[2])
    result = {"observations": observations, "architectures": architectures}[sys.argv[1]](here)
    (here / f"rank{dist.get_rank()}.json").write_text(json.dumps(result))
