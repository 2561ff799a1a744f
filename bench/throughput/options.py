"""What a run is asked to do, and the checks that need no model."""

import functools
import inspect
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import torch

from bench.throughput.prompts import OWN_PROMPTS, TEMPLATES, Prompt, select
from engine.config import MAX_TEMPERATURE, VERIFICATION_METHODS, EngineConfig, check_bool, is_temperature
from engine.drafters.named import LAYER_SKIP, label, location, named, split_stages
from engine.hub import may_be_hub_id
from engine.loading import DTYPES

BASELINES = ("plain", "lookup", "assistant", "compiled", "no-cache", "flashspec", "economize")
DEFAULT_BASELINES = ("plain", "lookup", "assistant", "compiled", "flashspec", "economize")
DEFAULT_K = 5  # of those baselines that draft, and know no "auto", where no number is given
DRAFTS = ("own", "greedy", "sampled")
# What the script itself passes to engine.load.
_OWN_LOAD_OPTIONS = {
    "target",
    "drafter",
    "num_draft_tokens",
    "verification",
    "exact",
    "max_batch_size",
    "dtype",
    "device",
    "tokenizer",
}


@dataclass(frozen=True)
class Options:
    """Every option of a run; see the help texts in `command_line`.

    Raises:
        ValueError: naming the option, the value and the rule.
        FileNotFoundError: for a path that does not exist.
    """

    out: Path
    prompts: Path = OWN_PROMPTS
    preset: str | None = None
    target: str | None = None
    drafters: tuple[str, ...] = ("ngram",)
    drafts: tuple[str, ...] = ("own",)
    num_draft_tokens: tuple[int | str, ...] = (5,)
    verification: tuple[str, ...] = ("rejection",)
    batch_sizes: tuple[int, ...] = (1,)
    batches_per_call: int = 1
    temperatures: tuple[float, ...] = (0.0,)
    top_p: float = 1.0
    max_new_tokens: tuple[int, ...] = (128,)
    dtypes: tuple[str, ...] = ("auto",)
    device: str = "auto"
    exact: bool | None = None
    load_options: dict[str, Any] = field(default_factory=dict)
    baselines: tuple[str, ...] = DEFAULT_BASELINES
    relative_to: str = "transformers plain"
    categories: tuple[str, ...] = ()
    per_category: int | None = None
    max_turns: int | None = None
    max_prompts: int | None = None
    max_prompt_tokens: int = 700
    template: str = "auto"
    ignore_eos: bool = False
    repeats: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        for k in self.num_draft_tokens:
            if k != "auto" and (isinstance(k, str) or k < 0):
                raise ValueError(f'num_draft_tokens must be >= 0 or "auto", got {k}')
        for name in ("batch_sizes", "max_new_tokens"):
            for value in getattr(self, name):
                _at_least_one(name, value)
        for name in ("per_category", "max_turns", "max_prompts"):
            if getattr(self, name) is not None:
                _at_least_one(name, getattr(self, name))
        _at_least_one("batches_per_call", self.batches_per_call)
        _at_least_one("repeats", self.repeats)
        if self.max_prompt_tokens < 2:
            raise ValueError(f"max_prompt_tokens must be >= 2, got {self.max_prompt_tokens}")
        if not 0 <= self.seed < 2**32:
            raise ValueError(f"seed must be in [0, 2**32), got {self.seed}")
        for temperature in self.temperatures:
            if not is_temperature(temperature):
                raise ValueError(
                    f"temperatures must be finite numbers >= 0 and <= {MAX_TEMPERATURE:g}, got {temperature}"
                )
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be in (0, 1], got {self.top_p}")
        for name, allowed in (("verification", VERIFICATION_METHODS), ("drafts", DRAFTS), ("baselines", BASELINES)):
            for value in getattr(self, name):
                if value not in allowed:
                    raise ValueError(f"{name} must be of {', '.join(allowed)}, got {value!r}")
        if self.template not in TEMPLATES:
            raise ValueError(f"template must be one of {', '.join(TEMPLATES)}, got {self.template!r}")
        self._check_lists()
        self._check_models()
        self._check_load_options()

    def _check_lists(self) -> None:
        lists = {name: value for name, value in vars(self).items() if isinstance(value, tuple)}
        for name, values in lists.items():
            if not values and name not in ("categories", "baselines", "drafters"):
                raise ValueError(f"{name} must not be empty")
            if len(set(values)) < len(values):
                raise ValueError(f"{name} must not name anything twice, got {' '.join(map(str, values))}")

    def _check_models(self) -> None:
        for dtype in self.dtypes:
            if dtype != "auto" and getattr(torch, dtype, None) not in DTYPES:
                names = ", ".join(str(each).removeprefix("torch.") for each in DTYPES)
                raise ValueError(f"dtypes must be of auto, {names}, got {dtype!r}")
        kind = self.device.split(":")[0]
        if kind not in ("auto", "cpu", "cuda") or (kind == "cuda" and not torch.cuda.is_available()):
            raise ValueError(f"device must be 'auto', 'cpu' or a GPU that is there, got {self.device!r}")
        if self.target is not None:
            check_source("target", self.target)
        labels: dict[str, str] = {}
        for drafter in self.drafters:
            if drafter.split(":")[0] == "synthetic":
                synthetic_acceptance(drafter)
            for place in checkpoints(drafter):
                check_source("drafter", place)
            for part in split_stages(drafter):
                if part.startswith(LAYER_SKIP):
                    named(part)  # which checks the layers
            known_as = drafter_label(drafter)
            if known_as in labels:
                raise ValueError(
                    f"drafters must have different names, got {labels[known_as]} and {drafter}, "
                    f"both {known_as!r} in the tables"
                )
            labels[known_as] = drafter

    def _check_load_options(self) -> None:
        import engine

        known = set(inspect.signature(engine.load).parameters)
        for name in self.load_options:
            if name in _OWN_LOAD_OPTIONS:
                raise ValueError(
                    f"load-option must not be {name}, which has an option of its own or is set by this script"
                )
            if name not in known:
                others = ", ".join(sorted(known - _OWN_LOAD_OPTIONS))
                raise ValueError(f"load-option must be an argument of engine.load ({others}), got {name}")
        known = {each.name for each in fields(EngineConfig)}
        of_config = {name: value for name, value in self.load_options.items() if name in known}
        for batch_size in self.batch_sizes:
            EngineConfig(max_batch_size=batch_size, **of_config)  # which checks them
        check_bool("tensor_parallel", self.load_options.get("tensor_parallel", False))

    @property
    def draft_models(self) -> tuple[str, ...]:
        """The drafters that are models of their own, which other engines can use too."""
        return tuple(drafter for drafter in self.drafters if is_draft_model(drafter) and location(drafter) == drafter)

    @property
    def shared_models(self) -> tuple[str, ...]:
        """Where the draft models are that are loaded once for all methods: those that draft by themselves, staged or not."""
        return tuple(dict.fromkeys(checkpoints(drafter)[0] for drafter in self.drafters if is_draft_model(drafter)))

    @property
    def draft_checkpoints(self) -> tuple[str, ...]:
        """Where all that is loaded for the drafters is, heads included."""
        return tuple(place for drafter in self.drafters for place in checkpoints(drafter))

    def select(self, prompts: Sequence[Prompt]) -> list[Prompt]:
        """Those of a file that are measured.

        Raises:
            ValueError: for a category that none has.
        """
        return select(prompts, self.categories, self.per_category, self.max_turns, self.max_prompts)

    def as_dict(self) -> dict[str, Any]:
        """All that changes what is measured, ready for JSON; files by their names, and not where it is written."""
        found = {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(self).items()}
        del found["out"]
        ours = self.prompts.resolve().parent == OWN_PROMPTS.parent  # which others have at the same place
        found["prompts"] = f"bench/data/{self.prompts.name}" if ours else self.prompts.name
        found["drafters"] = [by_name(drafter) for drafter in self.drafters]
        return found | {"target": None if self.target is None else by_name(self.target)}


def _at_least_one(name: str, value: int) -> None:
    if value < 1:
        raise ValueError(f"{name} must be >= 1, got {value}")


def check_source(role: str, source: str) -> None:
    """Raise FileNotFoundError for what was meant as a path and does not exist."""
    if not may_be_hub_id(source) and not (source and Path(source).expanduser().exists()):
        raise FileNotFoundError(f"{role} must be an existing path or a hub id, got {source!r}")


def synthetic_acceptance(drafter: str) -> float:
    """The acceptance that "synthetic:0.8" asks for."""
    text = drafter.removeprefix("synthetic:")
    try:
        acceptance = float(text)
    except ValueError:
        acceptance = float("nan")
    if not 0 <= acceptance <= 1:
        raise ValueError(f"drafter synthetic:A must have an acceptance A in [0, 1], got {text!r}")
    return acceptance


def checkpoints(drafter: str) -> list[str]:
    """The locations in a drafter's name."""
    synthetic = drafter.startswith("synthetic:")
    return [] if synthetic else [place for part in split_stages(drafter) if (place := location(part)) is not None]


def by_name(source: str) -> str:
    """A target's or drafter's name with files and folders by their last parts: where they lie is no one else's concern."""
    if source.startswith("synthetic:"):
        return source
    return "+".join(_by_name(part) for part in split_stages(source))


def _by_name(part: str) -> str:
    place = location(part)
    is_path = place is not None and (not may_be_hub_id(place) or Path(place).exists())
    return label(part) if is_path else part


@functools.cache
def is_draft_model(drafter: str) -> bool:
    """Whether it is a draft model, staged or not, and no cascade."""
    return checkpoints(drafter) == [location(drafter)] and isinstance(named(drafter), str)


def draws(drafter: str) -> bool:
    """Whether it has distributions to draw from, or takes the likeliest tokens of: all but lookups and synthetic drafters."""
    return not drafter.startswith("synthetic:") and split_stages(drafter)[-1] not in ("ngram", "suffix")


def drafter_label(drafter: str) -> str:
    """What the tables call a drafter."""
    if drafter.startswith("synthetic:"):
        return f"synthetic {synthetic_acceptance(drafter):g}"
    return label(drafter)
