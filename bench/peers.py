"""What other projects verify with, one small adapter each, all for `rejection` with the draft's full distribution.

Every peer starts from the target's raw logits and ends with token ids on the device; what its callers do in between is
timed with it (conversion to float32, temperature). What drafting has computed anyway is not timed where it can be handed
over: the draft's probabilities to "flashinfer, q given" and to "vllm v1", the draft's stats to ours in the case "full". All
others get the draft's logits only and compute the rest in time, as ours does in the case "full, no draft stats". Filters are
not compared: most peers leave them to others.

A peer that cannot be imported is skipped, with its reason; nothing is installed for it.
"""

import dataclasses
import importlib
import inspect
import itertools
import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from torch import Tensor

from bench.cases import Case, Inputs
from bench.textbook import textbook

Emitted = list[list[int]]  # per row: accepted drafts, then the next token


class Peer(ABC):
    """One way to verify, by somebody else."""

    name: str
    module: str  # where it is imported from
    needs_gpu = False
    captures = False  # can be captured in a CUDA graph
    per_row = False  # serves one sequence at a time

    def available(self) -> str | None:
        """Why it cannot run here; None: it can."""
        if self.needs_gpu and not torch.cuda.is_available():
            return "needs a GPU"
        try:
            importlib.import_module(self.module)
        except Exception as error:  # a half-installed package fails in its own ways
            return f"cannot import {self.module}: {type(error).__name__}: {error}".splitlines()[0]
        return None

    def version(self) -> str | None:
        try:
            return version(self.module.split(".")[0].replace("flashinfer", "flashinfer-python"))
        except PackageNotFoundError:
            return None

    @abstractmethod
    def prepare(self, case: Case, inputs: Inputs) -> Callable[[], Any]:
        """A call without arguments that verifies once; its result is for `emitted`."""

    def emitted(self, result: Any) -> Emitted:
        """The tokens of a result. Here: of a tensor [B, K+1], padded with -1."""
        return [list(itertools.takewhile(lambda token: token >= 0, row)) for row in result.tolist()]


class Transformers(Peer):
    """`_speculative_sampling` of transformers' assisted generation: batch 1, so called once per row.

    generate() hands it float32 logits behind the logits processors. The target's are converted and scaled here, in
    time; the draft's come out of the assistant's own generate() that way.
    """

    name = "transformers"
    module = "transformers.generation.utils"
    per_row = True

    def available(self) -> str | None:
        reason = super().available()
        if reason is None and not hasattr(importlib.import_module(self.module), "_speculative_sampling"):
            return f"{self.module} has no _speculative_sampling"
        return reason

    def prepare(self, case: Case, inputs: Inputs) -> Callable[[], Any]:
        function = importlib.import_module(self.module)._speculative_sampling
        more = {"is_done_candidate": False} if "is_done_candidate" in inspect.signature(function).parameters else {}
        target, temperature = inputs["target_logits"], case.temperature
        draft = inputs["draft_logits"].float() / temperature
        tokens = inputs["draft_tokens"]

        def run() -> list[Tensor]:
            results = []
            for row in range(case.batch):
                logits = target[row : row + 1].to(torch.float32)
                if temperature != 1:
                    logits = logits / temperature
                one = slice(row, row + 1)
                results.append(function(tokens[one], draft[one], case.num_drafts, logits, **more)[0])
            return results

        return run

    def emitted(self, result: Any) -> Emitted:
        return [tokens[0].tolist() for tokens in result]


class Textbook(Peer):
    """The formula of the papers in plain torch, over a batch."""

    name = "torch"
    module = "torch"
    captures = True

    def prepare(self, case: Case, inputs: Inputs) -> Callable[[], Any]:
        function = self.function(case)
        return lambda: function(
            inputs["target_logits"], inputs["draft_logits"], inputs["draft_tokens"], case.temperature
        )

    def function(self, case: Case) -> Callable[..., Tensor]:
        return textbook


@cache
def compiled_textbook(case: Case) -> Callable[..., Tensor]:
    """One compilation per case; those of earlier cases are dropped, they count towards a limit beyond which none is made."""
    torch.compiler.reset()
    return torch.compile(textbook, dynamic=False)


class Compiled(Textbook):
    """The same through torch.compile, for one shape."""

    name = "torch.compile"

    def available(self) -> str | None:
        if not torch.cuda.is_available() and not (shutil.which("c++") or shutil.which("g++")):
            return "torch.compile needs a C++ compiler"
        return None

    def function(self, case: Case) -> Callable[..., Tensor]:
        return compiled_textbook(case)


class FlashInfer(Peer):
    """FlashInfer's softmax of target and draft, and its chain_speculative_sampling, which takes probabilities."""

    name = "flashinfer"
    module = "flashinfer.sampling"
    needs_gpu = True
    captures = True
    draft_is_given = False  # as probabilities

    def prepare(self, case: Case, inputs: Inputs) -> Callable[[], Any]:
        library = importlib.import_module(self.module)
        tokens = inputs["draft_tokens"].int()
        # Seeds as tensors: without them the global generator is read on the host, which a graph cannot hold.
        seed, offset = (torch.zeros(1, dtype=torch.int64, device=tokens.device) for _ in range(2))

        def probabilities(name: str) -> Tensor:
            rows: Tensor = library.softmax(inputs[name].flatten(0, 1), case.temperature)
            return rows.view(case.batch, -1, case.vocab_size)

        given = probabilities("draft_logits") if self.draft_is_given else None

        def run() -> Tensor:
            q = probabilities("draft_logits") if given is None else given
            p = probabilities("target_logits")
            result: Tensor = library.chain_speculative_sampling(q, tokens, p, seed=seed, offset=offset)[0]
            return result

        return run


class FlashInferGivenDraft(FlashInfer):
    """The same where drafting has left probabilities: the softmax of the target alone is timed."""

    name = "flashinfer, q given"
    draft_is_given = True


def _known(cls: Any, **fields: Any) -> Any:
    """A dataclass of a peer, from those fields that its version has."""
    names = {field.name for field in dataclasses.fields(cls)}
    return cls(**{name: value for name, value in fields.items() if name in names})


class VllmV1(Peer):
    """vLLM's `RejectionSampler` of vllm/v1/sample, with its `Sampler` for the bonus token."""

    name = "vllm v1"
    module = "vllm.v1.sample.rejection_sampler"
    needs_gpu = True

    def prepare(self, case: Case, inputs: Inputs) -> Callable[[], Any]:
        sampler = importlib.import_module(self.module)
        metadata = importlib.import_module("vllm.v1.sample.metadata").SamplingMetadata
        spec = importlib.import_module("vllm.v1.spec_decode.metadata").SpecDecodeMetadata
        processors = importlib.import_module("vllm.v1.sample.logits_processor").LogitsProcessors
        target, none = inputs["target_logits"].flatten(0, 1), torch.empty(0, device=inputs["seed"].device)
        draft_probs = (inputs["draft_logits"].float() / case.temperature).softmax(dim=-1).flatten(0, 1)
        batch, num_drafts = case.batch, case.num_drafts
        width = num_drafts + 1
        rows = torch.arange(batch * width, device=target.device, dtype=torch.int32).view(batch, width)
        ends = torch.arange(1, batch + 1, device=target.device, dtype=torch.int32)
        drafts = _known(
            spec,
            draft_token_ids=inputs["draft_tokens"].flatten().int(),
            num_draft_tokens=[num_drafts] * batch,
            cu_num_draft_tokens=ends * num_drafts,
            cu_num_sampled_tokens=ends * width,
            target_logits_indices=rows[:, :-1].flatten(),
            bonus_logits_indices=rows[:, -1].contiguous(),
            logits_indices=rows.flatten(),
        )
        sampling = _known(
            metadata, temperature=inputs["temperature"], all_greedy=False, all_random=True, top_p=None, top_k=None,
            generators={}, max_num_logprobs=None, no_penalties=True, prompt_token_ids=None, frequency_penalties=none,
            presence_penalties=none, repetition_penalties=none, output_token_ids=[[] for _ in range(batch)],
            spec_token_ids=[[] for _ in range(batch)], allowed_token_ids_mask=None, bad_words_token_ids={},
            logitsprocs=processors(), min_p=None,
        )  # fmt: skip
        module = sampler.RejectionSampler(sampler.Sampler())
        return lambda: module(drafts, draft_probs, target, sampling).sampled_token_ids


class VllmFused(Peer):
    """vLLM's newer `rejection_sample` (vllm/v1/worker/gpu/spec_decode).

    Its caller makes a float32 copy of the target's logits and divides it by the temperature in place, which is timed.
    Releases differ in whether the draft's logits are scaled on load; they are handed over raw, which costs the same.
    """

    name = "vllm fused"
    module = "vllm.v1.worker.gpu.spec_decode.rejection_sampler_utils"
    needs_gpu = True
    captures = True

    def prepare(self, case: Case, inputs: Inputs) -> Callable[[], Any]:
        rejection_sample = importlib.import_module(self.module).rejection_sample
        scale = importlib.import_module("vllm.v1.worker.gpu.sample.gumbel").apply_temperature
        width, device = case.num_drafts + 1, inputs["seed"].device
        requests = torch.arange(case.batch, device=device, dtype=torch.int32)
        expanded = requests.repeat_interleave(width)
        columns = torch.arange(width, device=device, dtype=torch.int32).repeat(case.batch)
        last = torch.zeros(case.batch, 1, device=device, dtype=torch.int64)  # the pending token comes before its drafts
        sampled = torch.cat([last, inputs["draft_tokens"]], dim=1).flatten()
        cumulative = torch.arange(case.batch + 1, device=device, dtype=torch.int32) * width
        position = inputs["position"].repeat_interleave(width) + columns
        target, temperature = inputs["target_logits"].flatten(0, 1), inputs["temperature"]

        def run() -> Any:
            logits = target.to(torch.float32, copy=True)
            scale(logits, expanded, temperature)
            return rejection_sample(
                logits, inputs["draft_logits"], sampled, cumulative, position, requests, expanded, columns,
                temperature, inputs["seed"], case.num_drafts,
            )  # fmt: skip

        return run

    def emitted(self, result: Any) -> Emitted:
        tokens, counts = result[:2]  # behind the count the tokens are not written
        return [row[:count].tolist() for row, count in zip(tokens, counts.tolist(), strict=True)]


# Those whose capture is surest first: torch makes no promises about captures after one that failed.
PEERS: tuple[Peer, ...] = (
    Transformers(), FlashInfer(), FlashInferGivenDraft(), VllmV1(), VllmFused(), Textbook(), Compiled(),
)  # fmt: skip
