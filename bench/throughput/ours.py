"""This project's engine as a contender."""

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch

import engine
from bench.throughput.forwards import ForwardClock
from bench.throughput.methods import OUR_PLAIN, OUR_PLAIN_COUPLED, Call, Contest, Method, Row
from bench.throughput.options import checkpoints, drafter_label, is_draft_model, synthetic_acceptance
from bench.throughput.shared_models import SharedModels
from bench.throughput.synthetic import SyntheticDrafter
from engine.checkpoints import Checkpoint
from engine.drafters.base import stages_of
from engine.drafters.by_tokenizer import draft_model
from engine.drafters.named import STAGED
from engine.graphs import SHORTEST_TEXT

NOT_REAL = "not a real drafter"


class SampledDrafts(engine.DraftModel):
    """Draws drafts at temperature 1 for a greedy target, for which any draft is as good as its token."""

    def propose(self, state: engine.BatchState, num_draft_tokens: int) -> engine.Proposal:
        warm = replace(state, temperature=torch.ones_like(state.temperature), all_greedy=False)
        return engine.Proposal(super().propose(warm, num_draft_tokens).tokens)


class SampledStagedDrafts(SampledDrafts, engine.StagedDraftModel):
    """Of a draft model that is decoded speculatively."""


class Ours(Method):
    """An engine of its own over the shared target.

    Args:
        drafter: "synthetic:A", a name as engine.load takes it, or None for plain decoding.
        num_draft_tokens: K, or "auto".
        verification: the rule.
        drafts: "own" (as the target draws), "greedy", or of a draft model "sampled".
        exact, load_options: for engine.load.
        max_length: prompt and new tokens together, cut to the target's context; None: the context.
        seed: of a synthetic drafter's errors.
    """

    def __init__(
        self,
        drafter: str | None,
        num_draft_tokens: int | str = 0,
        verification: str = "rejection",
        drafts: str = "own",
        exact: bool | None = None,
        load_options: dict[str, Any] | None = None,
        max_length: int | None = None,
        seed: int = 0,
    ) -> None:
        self.drafter, self.num_draft_tokens = drafter, num_draft_tokens
        self.verification, self.drafts = verification, drafts
        self.synthetic = drafter is not None and drafter.startswith("synthetic:")
        self._settings: dict[str, Any] = {"exact": exact, **(load_options or {})}
        self._max_length, self._seed = max_length, seed
        # Plain decoding that draws as this does.
        self.plain = OUR_PLAIN_COUPLED if verification == "coupled" else OUR_PLAIN
        self.name = self.plain if drafter is None else f"ours {drafter_label(drafter)} K={num_draft_tokens}"
        if drafter is not None:
            self.name += "" if verification == "rejection" else f" {verification}"
            self.name += "" if drafts == "own" else f", {drafts} drafts"
            self.name += f" ({NOT_REAL})" if self.synthetic else ""
        self.plain_texts: list[list[int]] = []  # for a synthetic drafter: what plain decoding gave for these prompts

    def unavailable(self, contest: Contest, device: str) -> str | None:
        if self.synthetic and contest.temperature > 0 and self.verification != "coupled":
            return "a drafter of given acceptance needs a text that is sure: temperature 0, or the rule coupled"
        return super().unavailable(contest, device)

    def prepare(self, models: SharedModels, contest: Contest) -> None:
        self._contest, self._models = contest, models
        self._drafter = self._make_drafter(models)
        if self._max_length is not None:
            self._settings.setdefault("max_length", min(self._max_length, models.context_length))
        self._llm = engine.load(
            models.target,
            drafter=self._drafter,
            num_draft_tokens=self.num_draft_tokens or 0,
            verification=self.verification,
            max_batch_size=contest.batch_size,
            tokenizer=models.tokenizer,
            **self._settings,
        )
        if self.drafts == "greedy":
            for stage in stages_of(self._llm.drafter):
                if hasattr(stage, "greedy"):  # lookups have no other way, nor have re-encoded drafts
                    stage.greedy = True
        if self._llm._target.graphs.enabled and not self.synthetic:  # its tensors lie elsewhere for each text
            self._capture(contest)

    def _capture(self, contest: Contest) -> None:
        """All CUDA graphs that texts of a contest may need, so that none is captured while it is timed."""
        rows, lengths = [contest.batch_size], [self._llm.max_length]
        rows += [1 << i for i in range(contest.batch_size.bit_length()) if 1 << i < contest.batch_size]
        lengths += [each for i in range(lengths[0].bit_length()) if (each := SHORTEST_TEXT << i) < lengths[0]]
        self._llm.warmup(rows, lengths, self._params())

    def _params(self, **more: Any) -> engine.SamplingParams:
        """Without the repetition penalty that a checkpoint may ask for; so does everybody else, see `SharedModels.stock_copy`."""
        return engine.SamplingParams(
            self._contest.temperature, top_p=self._contest.top_p, repetition_penalty=1.0, **more
        )

    def _make_drafter(self, models: SharedModels) -> Any:
        if self.drafter is not None and self.synthetic:
            return SyntheticDrafter(synthetic_acceptance(self.drafter), models.vocab_size, self._seed)
        if self.drafter is None or not is_draft_model(self.drafter):
            return self.drafter
        model, tokenizer = models.ours[checkpoints(self.drafter)[0]]
        staged = self.drafter.startswith(STAGED)
        if self.drafts == "sampled":
            return (SampledStagedDrafts if staged else SampledDrafts)(model, tokenizer=tokenizer)
        return draft_model(Checkpoint(models.target, models.tokenizer), Checkpoint(model, tokenizer), staged)

    def generate(self, prompts: list[list[int]], seeds: list[int], max_new_tokens: int) -> Call:
        more = dict(max_new_tokens=max_new_tokens, ignore_eos=self._models.ignore_eos)
        params = [self._params(seed=seed, **more) for seed in seeds]
        if isinstance(self._drafter, SyntheticDrafter):
            self._drafter.expect(prompts, self.plain_texts)
        before, clock = _seconds(self._llm.stats), ForwardClock(self._llm)
        on_cpu = self._models.device.type == "cpu"  # a GPU works apart from the host's clock, and graphs call no hooks
        with clock if on_cpu else nullcontext():
            outputs = self._llm.generate(prompts, params)
        prefill, draft, verify = (b - a for a, b in zip(before, _seconds(self._llm.stats), strict=True))
        rows = []
        for output in outputs:
            stats = output.stats
            accepted, per_position = stats.accepted_tokens, stats.acceptance_per_position
            proposing = [stats.rounds_with(n, 0) for n in range(1, len(per_position) + 1)]
            rows.append(Row(output.token_ids, stats.rounds, stats.draft_tokens, accepted, per_position, proposing))
        return Call(rows, prefill, 0, draft, verify, clock.seconds if on_cpu else None)

    def forget(self) -> None:
        """A suffix drafter would draft its own answer to the same prompt."""
        for stage in self._suffix_drafters():
            stage.forget()

    def recall(self, prompts: list[list[int]], seeds: list[int], answers: list[list[int]]) -> None:
        """A suffix drafter drafts from earlier answers."""
        drawn = self._contest.temperature > 0 and self.verification != "coupled"
        for stage in self._suffix_drafters():
            for prompt, seed, answer in zip(prompts, seeds, answers, strict=True):
                stage.remember(prompt, answer, seed if drawn else None)

    def _suffix_drafters(self) -> list[engine.SuffixDrafter]:
        return [stage for stage in stages_of(self._llm.drafter) if isinstance(stage, engine.SuffixDrafter)]

    def close(self) -> None:
        self._llm = self._drafter = None  # type: ignore[assignment]


def _seconds(stats: engine.Stats) -> tuple[float, float, float]:
    return stats.prefill_seconds, stats.draft_seconds, stats.verify_seconds
