"""Stand-ins for flashspec and economize: their documented interface, over plain greedy or sampled decoding.

With them, tests run the adapters of bench/throughput/other_engines.py anywhere. They say nothing about the engines themselves.
"""

from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

import torch


def _continue(model: Any, ids: list[int], max_new_tokens: int, stop: set[int]) -> list[int]:
    """Greedy: what the real ones must give at temperature 0."""
    tokens: list[int] = []
    while len(tokens) < max_new_tokens and not (tokens and tokens[-1] in stop):
        tokens.append(int(model(torch.tensor([ids + tokens])).logits[0, -1].argmax()))
    return tokens


@dataclass
class _Sampling:
    gamma: int = 4
    temperature: float = 1.0
    top_p: float = 1.0
    seed: int | None = None


@dataclass
class _Config:
    device: str
    sampling: _Sampling
    drafter_strategy: str = "auto"
    bandit: Any = None


class _TargetModel:
    def __init__(self, name: str, device: torch.device, dtype: torch.dtype, model: Any) -> None:
        assert isinstance(name, str) and next(model.parameters()).dtype == dtype
        self.model = model


class _Drafter(_TargetModel):
    temperature = 1.0

    def set_temperature(self, temperature: float) -> None:
        self.temperature = temperature


class _NGram:
    temperature = None


class _FlashEngine:
    def __init__(self, config: _Config, drafters: list[Any], target: _TargetModel) -> None:
        (drafter,) = drafters
        assert drafter.temperature in (None, config.sampling.temperature)
        if config.drafter_strategy == "auto":
            assert not isinstance(drafter, _NGram) and config.bandit is None
        else:
            assert config.drafter_strategy == "bandit" and config.bandit.n_arms == 1
        self.gamma, self.target = config.sampling.gamma, target
        self.seed = config.sampling.seed
        self.seeds: list[int] = []  # of each call

    def generate(self, input_ids: torch.Tensor, max_new_tokens: int, eos_token_ids: list[int]) -> Any:
        self.seeds.append(torch.initial_seed() if self.seed is None else self.seed)
        assert input_ids.shape[0] == 1 and input_ids.dtype == torch.int64
        tokens = _continue(self.target.model, input_ids[0].tolist(), max_new_tokens, set(eos_token_ids))
        padded = torch.full((1, max_new_tokens), -1)
        padded[0, : len(tokens)] = torch.tensor(tokens)
        steps = [SimpleNamespace(proposed=self.gamma, accepted=0, emitted=1, seconds=1e-3) for _ in tokens]
        return SimpleNamespace(output_ids=padded, n_tokens_generated=len(tokens), arm_steps=tuple(steps))


@dataclass
class _Decode:
    cycle_length: int
    verifier: str | None
    cuda_graphs: bool


@dataclass
class _Cost:
    exact: int

    def count(self, kind: str) -> int:
        assert kind == "exact"
        return self.exact


@dataclass
class _Model:
    base: Any
    technique: Any
    decoding: _Decode

    def decode_batch(
        self, prompts: list[torch.Tensor], max_new_tokens: int, *, stop: Any = None, selector: Any = None
    ) -> Any:
        assert (selector is not None) == (self.decoding.verifier == "rejection")
        results = []
        for prompt in prompts:
            assert prompt.dim() == 1
            tokens = _continue(self.base, prompt.tolist(), max_new_tokens, stop or set())
            acceptance = [(self.decoding.cycle_length - 1, 0)] * (len(tokens) - 1)
            results.append(SimpleNamespace(tokens=torch.tensor(tokens), acceptance=acceptance, cost=_Cost(len(tokens))))
        return results


@dataclass
class _Technique:
    model: str = field(default="")


def _module(**names: Any) -> ModuleType:
    made = ModuleType("fake")
    made.__path__ = []  # a package
    vars(made).update(names)
    return made


def modules() -> dict[str, ModuleType]:
    """By name, to be put into `sys.modules`."""
    flashspec = _module(
        FlashSpecConfig=_Config,
        SamplingConfig=_Sampling,
        BanditConfig=lambda n_arms: SimpleNamespace(n_arms=n_arms),
        SpeculativeEngine=_FlashEngine,
    )
    parts = _module(TargetModel=_TargetModel, HuggingFaceDrafter=_Drafter, NgramDrafter=_NGram)
    economize = _module(
        DecodeConfig=_Decode,
        TopPSampler=lambda temperature, top_p, seed: SimpleNamespace(temperature=temperature, top_p=top_p, seed=seed),
        apply=lambda base, technique, decoding: _Model(base, technique, decoding),
    )
    return {
        "flashspec": flashspec,
        "flashspec.engine": parts,
        "economize": economize,
        "economize.techniques": _module(),
        "economize.techniques.draft_model": _module(DraftModelConfig=_Technique),
        "economize.techniques.lookup": _module(LookupConfig=_Technique),
    }
