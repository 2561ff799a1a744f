"""Other engines for transformers models, where they are installed: flashspec and economize.

Called as their own documentation does (flashspec 0.3.1, economize 0.3.2), over a copy of the target that shares its
weights. Nothing is installed for them.
"""

import logging
from typing import Any

import torch

from bench.throughput.methods import Call, Contest, FirstLogits, Method, Row, together
from bench.throughput.options import drafter_label
from bench.throughput.shared_models import SharedModels


class FlashSpec(Method):
    """flashspec's engine, with prompt lookup or a draft model, K tokens in each round.

    Its default with a draft model chooses between both (up to 6 looked-up tokens, else 2 drafted ones): K = None.
    """

    module = "flashspec"
    one_at_a_time = True
    full_warmup = True  # on a GPU it compiles

    def __init__(self, num_draft_tokens: int | None, drafter: str | None = None) -> None:
        self.num_draft_tokens, self.drafter = num_draft_tokens, drafter or "lookup"
        self._draft_name = drafter
        rule = "default" if num_draft_tokens is None else f"K={num_draft_tokens}"
        self.name = f"flashspec {drafter_label(self.drafter)} {rule}"

    def prepare(self, models: SharedModels, contest: Contest) -> None:
        import flashspec

        logging.getLogger("flashspec").setLevel(logging.ERROR)  # a line of JSON for each engine otherwise
        from flashspec.engine import HuggingFaceDrafter, NgramDrafter, TargetModel

        device, dtype = models.device, models.target.dtype
        self._eos = sorted(models.eos_token_ids)
        drafter: Any = NgramDrafter()
        if self._draft_name is not None:
            model = models.stock_copy(self._draft_name)
            drafter = HuggingFaceDrafter(self._draft_name, device, dtype, model=model)
            drafter.set_temperature(contest.temperature)
        arms: dict[str, Any] = {}
        if self.num_draft_tokens is not None:
            arms = dict(drafter_strategy="bandit", bandit=flashspec.BanditConfig(n_arms=1))
        sampling: dict[str, Any] = dict(temperature=contest.temperature, top_p=contest.top_p)
        if self.num_draft_tokens is not None:
            sampling["gamma"] = self.num_draft_tokens
        config = flashspec.FlashSpecConfig(device=str(device), sampling=flashspec.SamplingConfig(**sampling), **arms)
        target = TargetModel("target", device, dtype, model=models.stock_copy())
        self._engine: Any = flashspec.SpeculativeEngine(config, [drafter], target)
        self._device = device

    def generate(self, prompts: list[list[int]], seeds: list[int], max_new_tokens: int) -> Call:
        ids = torch.tensor(prompts, device=self._device)
        torch.manual_seed(seeds[0])  # a seed of its own would be the same for all prompts
        with torch.no_grad():
            result = self._engine.generate(ids, max_new_tokens=max_new_tokens, eos_token_ids=self._eos)
        tokens = result.output_ids[0, : result.n_tokens_generated].tolist()
        first = result.arm_steps[0]  # reads the prompt
        row = Row.of_rounds(tokens, [(step.proposed, step.accepted) for step in result.arm_steps])
        return Call([row], first.seconds, first.emitted)

    def close(self) -> None:
        self._engine = None


class Economize(Method):
    """economize's decoding loop, with prompt lookup or a draft model."""

    module = "economize"
    full_warmup = True  # on a GPU it records CUDA graphs

    def __init__(self, num_draft_tokens: int, drafter: str | None = None) -> None:
        self.num_draft_tokens, self.drafter = num_draft_tokens, drafter or "lookup"
        self._draft_name = drafter
        self.name = f"economize {drafter_label(self.drafter)} K={num_draft_tokens}"

    def prepare(self, models: SharedModels, contest: Contest) -> None:
        import economize
        from economize.techniques.draft_model import DraftModelConfig
        from economize.techniques.lookup import LookupConfig

        assert isinstance(self.num_draft_tokens, int)
        technique: Any = LookupConfig()
        if self._draft_name is not None:
            technique = DraftModelConfig(model=models.source(self._draft_name))
        self._decoding = economize.DecodeConfig(
            cycle_length=self.num_draft_tokens + 1,  # its cycle counts the target's own token
            verifier="rejection" if contest.temperature else None,
            cuda_graphs=models.device.type == "cuda",
        )
        self._base = models.stock_copy()
        self._model: Any = economize.apply(self._base, technique, decoding=self._decoding)
        self._sampler, self._contest = economize.TopPSampler, contest
        self._eos, self._device, self._batch_size = set(models.eos_token_ids), models.device, contest.batch_size

    def generate(self, prompts: list[list[int]], seeds: list[int], max_new_tokens: int) -> Call:
        """Batch after batch: it decodes all that it is given together."""
        size = self._batch_size
        batches = range(0, len(prompts), size)
        return together(self._batch(prompts[i : i + size], seeds[i], max_new_tokens) for i in batches)

    def _batch(self, prompts: list[list[int]], seed: int, max_new_tokens: int) -> Call:
        tensors = [torch.tensor(ids, device=self._device) for ids in prompts]
        more = {}
        if self._contest.temperature:
            more["selector"] = self._sampler(self._contest.temperature, self._contest.top_p, seed)
        first = FirstLogits(self._base)
        results = self._model.decode_batch(tensors, max_new_tokens, stop=self._eos or None, **more)
        if self._draft_name is not None:  # whose model reads the prompts only behind the target's first logits
            return Call([_row(result) for result in results])
        return Call([_row(result) for result in results], first.seconds, len(results))

    def close(self) -> None:
        self._model = self._base = None  # type: ignore[assignment]


def _row(result: Any) -> Row:
    """Its acceptance counts only target calls that had drafts to verify; its cost log has all of them."""
    without_drafts = result.cost.count("exact") - len(result.acceptance)
    return Row.of_rounds(result.tokens.tolist(), [(0, 0)] * without_drafts + result.acceptance)
