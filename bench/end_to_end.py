"""Whole generations: what the engine costs, apart from any drafter's luck.

Each case takes the device and returns figures for the GPU report, each set labelled with what its weights are. Random
weights have the shapes of known models, and say nothing of how fast a real model answers; the small real model's text is real. On
a CPU the random models are tiny, which shows that the cases run and nothing else.
"""

import time
from collections.abc import Callable
from dataclasses import replace
from statistics import median
from typing import Any

import torch

import engine
from bench.attention_cases import attention_report
from bench.drafter_cases import NUM_DRAFT_TOKENS, draft_model, drafter_costs
from bench.host_time import host_figures
from bench.targets import (
    NEW_TOKENS,
    PROMPT_TOKENS,
    REAL,
    SETUP_TURNS,
    TURNS,
    Target,
    bandwidth,
    counted,
    generate_seconds,
    greedy,
    load,
    random_target,
    real_target,
    timed,
    wait,
)
from bench.throughput.synthetic import SyntheticDrafter
from bench.throughput.theory import expected_tokens

ACCEPTANCE, K = 0.8, 5  # of the synthetic drafter
# By device. The synthetic drafter's luck: in 3 x 1024 tokens, 1.8% of the block efficiency (one standard deviation).
SYNTHETIC_TOKENS = {"cuda": 1024, "cpu": 12}
AUTO_BATCHES = {"cuda": (1, 2, 4, 8, 16, 32, 64), "cpu": (1, 4)}
AUTO_TOKENS = {"cuda": 256, "cpu": 8}
PROFILED_TOKENS = {"cuda": 128, "cpu": 6}  # at least 128 / (K + 1) = 21 rounds
Drafters = dict[str, Callable[[], engine.Drafter]]


def plain_decoding(device: str) -> dict[str, Any]:
    """Our plain decoding at B = 1 and 512 tokens of context: against memory bandwidth, and at 1B against eager `generate`."""
    copied = bandwidth(device)
    sizes = ("8B", "1B") if device == "cuda" else ("tiny",)
    return {size: plain_figures(random_target(device, size), copied, device, size != "8B") for size in sizes}


def plain_figures(target: Target, copied: float, device: str, with_generate: bool) -> dict[str, Any]:
    """In turns with `generate`, if that is wanted."""
    texts, new_tokens = target.prompts(1, PROMPT_TOKENS[device]), NEW_TOKENS[device]
    llm = load(target.model, None)
    ours, theirs = [], []
    for _ in range(SETUP_TURNS[device] + TURNS[device]):
        ours.append(timed(llm, texts, greedy(new_tokens))[1])
        if with_generate:
            theirs.append(generate_seconds(target.model, texts[0], new_tokens))
    rate = new_tokens / median(counted(ours, device))
    share = rate * target.bytes_read / copied
    figures = {"weights": target.weights, "tokens_per_second": rate, "share_of_copy_bandwidth": share}
    if theirs:
        their_rate = (new_tokens - 1) / median(counted(theirs, device))
        figures |= {"transformers_tokens_per_second": their_rate, "ratio": rate / their_rate}
    return figures


def synthetic_acceptance(device: str) -> dict[str, Any]:
    return synthetic_figures(random_target(device), device)


def synthetic_figures(target: Target, device: str) -> dict[str, Any]:
    """A drafter that is right with a given probability, B = 1: the speedup that is left of what theory allows.

    With `exact` on both sides: in bf16 a verified text parts sooner or later from one that was decoded at width 1, and from
    there on the drafter, which knows plain decoding's text, would be wrong. The speedup over width 1 is reported as well.
    """
    texts, params = target.prompts(1, PROMPT_TOKENS[device]), greedy(SYNTHETIC_TOKENS[device])
    plain, narrow = load(target.model, None, exact=True), load(target.model, None)
    drafter = SyntheticDrafter(ACCEPTANCE, target.vocab_size)
    llm = load(target.model, drafter, exact=True, num_draft_tokens=K)
    known = plain.generate(texts, params)[0].token_ids
    seconds: dict[str, list[float]] = {"plain": [], "narrow": [], "drafted": []}
    rounds: list[float] = []
    for _ in range(SETUP_TURNS[device] + TURNS[device]):
        drafter.expect(texts, [known])
        outputs, elapsed = timed(llm, texts, params)
        assert outputs[0].token_ids == known, "the verified text is not plain decoding's"
        rounds.append(outputs[0].stats.rounds)
        seconds["drafted"].append(elapsed)
        for name, other in (("plain", plain), ("narrow", narrow)):
            seconds[name].append(timed(other, texts, params)[1])
    # Sums, and not medians: how many rounds a text takes is luck, too.
    total = {name: sum(counted(each, device)) for name, each in seconds.items()}
    tokens = TURNS[device] * params.max_new_tokens
    speedup, theory = total["plain"] / total["drafted"], expected_tokens(ACCEPTANCE, K)
    efficiency = tokens / sum(counted(rounds, device))
    return {
        "weights": target.weights, "drafter": "synthetic, not a real one", "tokens": tokens, "texts_equal": True,
        "speedup": speedup, "theory": theory, "share_of_theory": speedup / theory,
        # A drafter that costs nothing is as many times as fast as plain decoding as it emits tokens per target call.
        "block_efficiency": efficiency, "share_of_theory_at_this_efficiency": speedup / efficiency,
        "speedup_over_plain_of_width_1": total["narrow"] / total["drafted"],
    }  # fmt: skip


def host_time(device: str) -> dict[str, Any]:
    """The host's part in a round, with a drafter that is a lookup and with one that is a model."""
    target = random_target(device)
    text = target.prompts(1, PROMPT_TOKENS[device])[0]
    figures: dict[str, Any] = {"weights": target.weights, "K": K}
    drafters: Drafters = {"ngram": engine.NGramDrafter, "draft model": lambda: small_draft_model(target)}
    for name, make in drafters.items():
        llm = load(target.model, make(), num_draft_tokens=K)
        figures[name] = host_figures(llm, text, greedy(PROFILED_TOKENS[device]))
    return figures


def small_draft_model(target: Target) -> engine.DraftModel:
    """Of two layers with random weights, always the same."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return engine.DraftModel(draft_model(target.model))


def warmup(device: str) -> dict[str, Any]:
    """Seconds to capture the rounds of four buckets, which are more with "auto". Kernels may have been compiled before."""
    target = random_target(device)
    figures: dict[str, Any] = {"weights": target.weights, "buckets": 4}
    choices: tuple[int | str, ...] = (K, "auto")
    for num_draft_tokens in choices:
        llm = load(target.model, "ngram", batch=4, num_draft_tokens=num_draft_tokens)
        begin = time.perf_counter()
        llm.warmup([1, 4], [256, 768])
        wait(target.model.device)
        seconds = time.perf_counter() - begin
        figures[f"K={num_draft_tokens}"] = {"seconds": seconds, "graphs": len(llm._server._round.graphs)}
    return figures


def automatic_length(device: str) -> dict[str, Any]:
    """`"auto"` against plain decoding where drafting costs and never helps: the lowest ratio of all batch sizes and drafters.

    One drafter is wrong by construction, and costs what verifying and launching it costs; the other is a model, which a
    target with random weights agrees with by chance only. That no more than a few drafts stand is asserted.
    """
    target = random_target(device)
    drafters: Drafters = {
        "synthetic, never right": lambda: SyntheticDrafter(0.0, target.vocab_size),
        "draft model of two layers": lambda: small_draft_model(target),
    }
    figures: dict[str, Any] = {"weights": target.weights}
    rows = []
    for batch in AUTO_BATCHES[device]:
        figures[f"B={batch}"] = found = against_plain(target, drafters, batch, device)
        for name, row in found.items():
            assert row["acceptance"] < 0.05, f"B={batch}: {row['acceptance']:.0%} of the drafts stood: {name}"
            rows.append(row)
    return figures | {f"lowest_{key}": min(row[key] for row in rows) for key in ("first_run", "later_runs", "all_runs")}


def against_plain(target: Target, drafters: Drafters, batch: int, device: str) -> dict[str, dict[str, float]]:
    """Tokens per second of `"auto"` over plain decoding's in turns, by drafter.

    All is compiled and captured beforehand; what drafting costs and brings is learnt in the first run, which counts.
    """
    # One more token of context than a power of two, so that no bucket serves the first round alone.
    texts, params = target.prompts(batch, PROMPT_TOKENS[device] + 1), greedy(AUTO_TOKENS[device])
    plain = load(target.model, None, batch)
    warmed(plain, texts, params)
    known = [output.token_ids for output in plain.generate(texts, params)]
    llms = {name: load(target.model, make(), batch, num_draft_tokens="auto") for name, make in drafters.items()}

    def expecting(llm: engine.Engine) -> engine.Engine:
        if isinstance(llm.drafter, SyntheticDrafter):
            llm.drafter.expect(texts, known)
        return llm

    def run(llm: engine.Engine) -> float:
        return timed(expecting(llm), texts, params)[1]

    for llm in llms.values():
        warmed(expecting(llm), texts, params)
    turns = [(run(plain), {name: run(llm) for name, llm in llms.items()}) for _ in range(1 + TURNS[device])]
    figures = {}
    for name, llm in llms.items():
        pairs = [(base, seconds[name]) for base, seconds in turns]
        first, later, both = (_ratio(part) for part in (pairs[:1], pairs[1:], pairs))
        figures[name] = {
            "first_run": first, "later_runs": later, "all_runs": both,
            "acceptance": llm.stats.acceptance_rate, "drafts_per_round": llm.stats.draft_tokens / llm.stats.rounds,
        }  # fmt: skip
    return figures


def _ratio(pairs: list[tuple[float, float]]) -> float:
    """Of the sums of the first and of the second."""
    return sum(base for base, _ in pairs) / sum(seconds for _, seconds in pairs)


def warmed(llm: engine.Engine, texts: list[list[int]], params: engine.SamplingParams) -> None:
    """Compile and capture what these texts need, and forget the times that this took."""
    llm.generate(texts, replace(params, max_new_tokens=1))  # some drafters lay out their tensors by the prompts
    llm.warmup([len(texts)], [len(texts[0]) + params.max_new_tokens], params)
    llm._server._lengths = llm._lengths()


def small_real_model(device: str) -> dict[str, Any]:
    """The demo's model, where it is installed: plain decoding, the synthetic drafter, and n-grams at `"auto"`, at B = 1."""
    try:
        target = real_target(device)
    except FileNotFoundError as error:
        return {"weights": REAL, "left_out": str(error)}
    return {
        "weights": target.weights,
        "plain decoding": plain_figures(target, bandwidth(device), device, with_generate=True),
        "synthetic acceptance": synthetic_figures(target, device),
        '"auto", n-gram, against plain': against_plain(target, {"ngram": engine.NGramDrafter}, 1, device)["ngram"],
    }


def drafting(device: str) -> dict[str, Any]:
    """A row for each kind of drafter."""
    target = random_target(device)
    texts, params = target.prompts(1, PROMPT_TOKENS[device]), greedy(NEW_TOKENS[device])
    figures = drafter_costs(target.model, load, texts, params)
    return {"weights": target.weights, "K": NUM_DRAFT_TOKENS} | figures


# Goals name them, see bench/goals.py; the most wanted first.
CASES: dict[str, Callable[[str], Any]] = {
    "ragged attention": attention_report,
    "plain decoding": plain_decoding,
    "synthetic acceptance 0.8, K = 5": synthetic_acceptance,
    "host time": host_time,
    "warm-up of 4 buckets": warmup,
    '"auto" against plain': automatic_length,
    "a small real model": small_real_model,
    "drafting, by drafter": drafting,
}
