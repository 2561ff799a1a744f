"""`check`: whether a target's greedy text is that of transformers, and the same with a drafter."""

import gc
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from transformers import GenerationConfig

from .checkpoints import locate, read_config
from .config import SamplingParams
from .demo_prompts import PROMPTS
from .engine import Engine
from .generation_config import eos_token_ids, repetition_penalty
from .loading import check_drafter, load
from .pretrained import whole_model
from .terminal import loading, working, write_json
from .text_difference import Comparer, Difference
from .threads import use_all_cores

# The most, in nats, by which rounding is taken to make one token likelier than another: logits in bfloat16 lie 0.125 apart
# between 16 and 32, and of 2,146 texts of SmolLM2-135M that parted, four did so at 1.0 and all others at 0.5 at most.
ROUNDING = {torch.bfloat16: 1.5, torch.float16: 0.2, torch.float32: 1e-3, torch.float64: 1e-6}


@dataclass(frozen=True)
class CheckOptions:
    """What is checked: `settings` are those of `engine.load` that are neither the target nor the drafter."""

    target: str
    drafter: str | None
    settings: dict[str, Any]
    prompts: Sequence[Any]  # none: those of the demo
    max_new_tokens: int
    as_json: bool


@dataclass(frozen=True)
class Comparison:
    """Texts, held against those of other decoding."""

    texts: str
    held_against: str
    differences: list[Difference | None]  # of each prompt; None: the same text
    rounding: float  # nats, at most; 0: the texts must be the same

    @property
    def passed(self) -> bool:
        """Whether all texts are the same, or part where rounding decides."""
        return all(each is None or self._by_rounding(each) for each in self.differences)

    def _by_rounding(self, difference: Difference) -> bool:
        return difference.log_prob_gap is not None and abs(difference.log_prob_gap) < self.rounding

    def lines(self) -> list[str]:
        """The result in words, with a line for each text that differs."""
        same, count = self.differences.count(None), len(self.differences)
        lines = [f"{self.texts}: the text of {self.held_against} for {same} of {count} prompts"]
        for number, each in enumerate(self.differences, 1):
            if each is not None:
                gap = "where one of the texts ends"
                if each.log_prob_gap is not None:
                    gap = f"between tokens whose log-probabilities are {abs(each.log_prob_gap):.2g} apart"
                verdict = "rounding decides" if self._by_rounding(each) else "MORE THAN ROUNDING"
                if not self.rounding:
                    verdict = "EXACT TEXTS MUST BE THE SAME"
                lines.append(f"  prompt {number} parts at token {each.position + 1}, {gap}: {verdict}")
        return lines


@dataclass(frozen=True)
class OurTexts:
    """What the engine made of the prompts, and what transformers has to know to do the same."""

    prompts: list[list[int]]
    limits: list[int]  # of each, new tokens at most
    plain: list[list[int]]
    speculative: list[list[int]] | None
    block_efficiency: float  # of the speculative ones
    exact: bool
    dtype: torch.dtype
    device: torch.device
    ends: GenerationConfig


def run(options: CheckOptions) -> int:
    """Check a target, and a drafter for it.

    Returns:
        The exit status: 1 if a text differs by more than rounding, or at all where `exact` promises that it does not.
    """
    use_all_cores()
    ours = _by_engine(options)
    gc.collect()  # room for the same weights once more
    with working("decoding with transformers", note=True):
        location: Any = locate(options.target, "target", ours.dtype)
        config = read_config(location, "target")
        stock: Any = whole_model(location, config, dtype=ours.dtype).to(ours.device).eval()  # type: ignore[arg-type]
        stock.generation_config = ours.ends  # of the checkpoint's own, generate would take what is not set here
        theirs = [_by_transformers(stock, prompt, ours.limits[i]) for i, prompt in enumerate(ours.prompts)]
        comparer = Comparer(stock, ours.ends.repetition_penalty)
        comparisons = [_compare("plain", ours.plain, "transformers", theirs, ours, comparer)]
        if ours.speculative is not None:
            comparisons.append(_compare("speculative", ours.speculative, "plain", ours.plain, ours, comparer))
    passed = all(comparison.passed for comparison in comparisons)
    if options.as_json:
        found = [asdict(comparison) for comparison in comparisons]
        write_json({"passed": passed, "comparisons": found, "block_efficiency": ours.block_efficiency})
    else:
        print("\n".join(line for comparison in comparisons for line in comparison.lines()))
        if ours.speculative is not None:
            print(f"with the drafter, {ours.block_efficiency:.2f} tokens per target call")
        print("passed" if passed else "FAILED")
    return 0 if passed else 1


def _by_engine(options: CheckOptions) -> OurTexts:
    check_drafter(options.drafter)
    with loading(options.target):
        plain = load(options.target, drafter=None, **options.settings)
    model, params = plain.target_model, SamplingParams(max_new_tokens=options.max_new_tokens)
    prompts = list(options.prompts) or _usual_prompts(plain)
    if not prompts:
        raise ValueError(
            f"prompts must be given for a target of max_length = {plain.max_length}, which the usual ones exceed"
        )
    plain.check(prompts, params)
    speculative = None
    if options.drafter is not None:
        settings = options.settings | {"dtype": "auto", "device": "auto", "tokenizer": plain.tokenizer}
        with loading(options.drafter):
            speculative = load(model, drafter=options.drafter, **settings)
    if not options.as_json:
        print(_describe(plain), flush=True)
    with working("decoding, plain", note=True):
        outputs = plain.generate(prompts, params)
    drafted, block_efficiency = None, 1.0
    if speculative is not None:
        with working("decoding, speculative", note=True):
            drafted = [output.token_ids for output in speculative.generate(prompts, params)]
        block_efficiency = speculative.stats.block_efficiency
    eos: Any = sorted(eos_token_ids(model, plain.tokenizer)) or None
    ids = [output.prompt_token_ids for output in outputs]
    return OurTexts(
        prompts=ids,
        limits=[min(options.max_new_tokens, plain.max_length - len(prompt)) for prompt in ids],
        plain=[output.token_ids for output in outputs],
        speculative=drafted,
        block_efficiency=block_efficiency,
        exact=plain.exact,
        dtype=model.dtype,
        device=model.device,
        ends=GenerationConfig(eos_token_id=eos, pad_token_id=0, repetition_penalty=repetition_penalty(model)),
    )


def _usual_prompts(llm: Engine) -> list[Any]:
    """Those of the demo's that the target has room for; without a tokenizer, token ids."""
    if llm.tokenizer is None:
        prompts: list[Any] = [list(range(1, 1 + length)) for length in (5, 40, 150)]
    else:
        prompts = [prompt.content for prompt in PROMPTS]
        if getattr(llm.tokenizer, "chat_template", None):
            prompts = [[{"role": "user", "content": text}] for text in prompts]

    def fits(prompt: Any) -> bool:
        try:
            llm.check([prompt])
        except ValueError:
            return False
        return True

    return list(filter(fits, prompts))


def _describe(llm: Engine) -> str:
    model = llm.target_model
    text = model.config.get_text_config()
    dtype = str(model.dtype).removeprefix("torch.")
    return (
        f"{type(model).__name__} of {text.num_hidden_layers} layers, {dtype} on {model.device}, "
        f"{'exact' if llm.exact else 'not exact'}, for texts of up to {llm.max_length:,} tokens"
    )


def _by_transformers(model: Any, prompt: list[int], max_new_tokens: int) -> list[int]:
    tokens = torch.tensor([prompt], device=model.device)
    with torch.no_grad():
        text = model.generate(
            input_ids=tokens,
            attention_mask=torch.ones_like(tokens),
            max_new_tokens=max_new_tokens,
            do_sample=False,
        )
    found: list[int] = text[0, len(prompt) :].tolist()
    return found


def _compare(
    texts: str, mine: list[list[int]], held_against: str, other: list[list[int]], ours: OurTexts, comparer: Comparer
) -> Comparison:
    differences = [comparer.difference(*each) for each in zip(ours.prompts, mine, other, strict=True)]
    must_be_same = ours.exact and held_against == "plain"
    return Comparison(texts, held_against, differences, 0.0 if must_be_same else ROUNDING[ours.dtype])
