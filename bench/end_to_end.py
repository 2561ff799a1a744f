"""Whole generations: what the engine costs, apart from any drafter's luck.

Each case takes the device, and figures of the GPU report that it adds to, part by part, labelled with what the weights are. Random
weights have the shapes of known models, and say nothing of how fast a real model answers; the small real model's text is real. On
a CPU the random models are tiny, which shows that the cases run and nothing else.

Nothing is thrown away for what it shows: whether texts are equal, how many drafts were accepted and whether CUDA graphs were
captured in turns that count (`captured_while_timed`, which should be 0) is reported beside the times.
"""

import os
import time
from collections.abc import Callable, Mapping
from functools import partial
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

import engine
from bench.attention_cases import attention_report
from bench.automatic_length import against_plain, automatic_length
from bench.drafter_cases import NUM_DRAFT_TOKENS, drafter_cost, drafters, small_draft_model
from bench.figures import Figures
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
    num_graphs,
    random_target,
    real_target,
    timed,
    wait,
)
from bench.throughput.synthetic import SyntheticDrafter
from engine.metrics import expected_tokens

ACCEPTANCE, K = 0.8, 5  # of the synthetic drafter
# By device. The synthetic drafter's luck: in 3 x 1024 tokens, 1.8% of the block efficiency (one standard deviation).
SYNTHETIC_TOKENS = {"cuda": 1024, "cpu": 12}
PROFILED_TOKENS = {"cuda": 128, "cpu": 6}  # at least 128 / (K + 1) = 21 rounds


def plain_decoding(device: str, figures: Figures) -> None:
    """Our plain decoding at B = 1 and 512 tokens of context: against memory bandwidth, and at 1B against eager `generate`."""
    sizes: dict[str, dict[str, Any] | None] = {"8B": None, "1B": {}} if device == "cuda" else {"tiny": {}}

    def of(size: str, generate: dict[str, Any] | None) -> dict[str, Any]:
        return plain_figures(random_target(device, size), device, generate)

    figures.measure({size: partial(of, size, generate) for size, generate in sizes.items()})


def plain_figures(target: Target, device: str, generate: Mapping[str, Any] | None) -> dict[str, Any]:
    """In turns with transformers' `generate`, if there are options for that."""
    texts, new_tokens = target.prompts(1, PROMPT_TOKENS[device]), NEW_TOKENS[device]
    llm, graphs = load(target.model, None), 0
    ours, theirs = [], []
    for turn in range(SETUP_TURNS[device] + TURNS[device]):
        if turn == SETUP_TURNS[device]:
            graphs = num_graphs(llm)
        ours.append(timed(llm, texts, greedy(new_tokens))[1])
        if generate is not None:
            theirs.append(generate_seconds(target.model, texts[0], new_tokens, **generate))
    rate = new_tokens / median(counted(ours, device))
    share = rate * target.bytes_read / bandwidth(device)
    figures = {"weights": target.weights, "tokens_per_second": rate, "share_of_copy_bandwidth": share}
    if theirs:
        their_rate = (new_tokens - 1) / median(counted(theirs, device))
        figures |= {"transformers_tokens_per_second": their_rate, "ratio": rate / their_rate}
    return figures | {"captured_while_timed": num_graphs(llm) - graphs}


def beside_transformers(device: str, figures: Figures) -> None:
    """Our plain decoding, and two faster ways of transformers. Drafts of an assistant with random weights do not stand."""
    target = random_target(device)
    figures["weights"] = target.weights

    def assisted() -> dict[str, Any]:
        assistant = small_draft_model(target.model).model
        assistant.generation_config.num_assistant_tokens = K
        found = plain_figures(target, device, {"assistant_model": assistant})
        return found | {"K": K, "drafts": "of random weights: as good as none stands"}

    figures.measure({
        "static cache, compiled": partial(plain_figures, target, device, {"cache_implementation": "static"}),
        "assistant model of two layers": assisted,
    })  # fmt: skip


def synthetic_acceptance(device: str, figures: Figures) -> None:
    figures.update(synthetic_figures(random_target(device), device))


def synthetic_figures(target: Target, device: str) -> dict[str, Any]:
    """A drafter that is right with a given probability, B = 1: the speedup that is left of what theory allows.

    With `exact` on both sides: in bf16 a verified text parts sooner or later from one that was decoded at width 1, and from
    there on the drafter, which knows plain decoding's text, is wrong. The speedup over width 1 is reported as well.
    """
    texts, params = target.prompts(1, PROMPT_TOKENS[device]), greedy(SYNTHETIC_TOKENS[device])
    plain, narrow = load(target.model, None, exact=True), load(target.model, None)
    drafter = SyntheticDrafter(ACCEPTANCE, target.vocab_size)
    llm = load(target.model, drafter, exact=True, num_draft_tokens=K)
    known = plain.generate(texts, params)[0].token_ids
    texts_equal, graphs = [], 0
    seconds: dict[str, list[float]] = {"plain": [], "narrow": [], "drafted": []}
    rounds: list[float] = []
    for turn in range(SETUP_TURNS[device] + TURNS[device]):
        if turn == SETUP_TURNS[device]:
            graphs = num_graphs(plain, narrow, llm)
        drafter.expect(texts, [known])
        outputs, elapsed = timed(llm, texts, params)
        texts_equal.append(outputs[0].token_ids == known)
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
        "weights": target.weights, "drafter": "synthetic, not a real one", "tokens": tokens,
        "texts_equal": all(texts_equal), "acceptance": llm.stats.acceptance_rate,
        "speedup": speedup, "theory": theory, "share_of_theory": speedup / theory,
        # A drafter that costs nothing is as many times as fast as plain decoding as it emits tokens per target call.
        "block_efficiency": efficiency, "share_of_theory_at_this_efficiency": speedup / efficiency,
        "speedup_over_plain_of_width_1": total["narrow"] / total["drafted"],
        "captured_while_timed": num_graphs(plain, narrow, llm) - graphs,
    }  # fmt: skip


def host_time(device: str, figures: Figures) -> None:
    """The host's part in a round, with a drafter that is a lookup and with one that is a model."""
    target = random_target(device)
    text = target.prompts(1, PROMPT_TOKENS[device])[0]
    figures.update(weights=target.weights, K=K)

    def of(make: Callable[[], engine.Drafter]) -> dict[str, Any]:
        llm = load(target.model, make(), num_draft_tokens=K)
        return host_figures(llm, text, greedy(PROFILED_TOKENS[device]))

    figures.measure({
        "ngram": partial(of, engine.NGramDrafter),
        "draft model": partial(of, partial(small_draft_model, target.model)),
    })  # fmt: skip


def warmup(device: str, figures: Figures) -> None:
    """Seconds to capture the rounds of four buckets, which are more with "auto"; an engine before has had the kernels compiled."""
    target = random_target(device)
    figures.update(weights=target.weights, buckets=4)

    def after_another(num_draft_tokens: int | str) -> dict[str, Any]:
        warmup_figures(target, num_draft_tokens)
        return warmup_figures(target, num_draft_tokens)

    choices: tuple[int | str, ...] = (K, "auto")
    figures.measure({f"K={choice}": partial(after_another, choice) for choice in choices})


def cold_warmup(device: str, figures: Figures) -> None:
    """The same with nothing compiled: Triton's cache on the disk is empty, and the process is new where there is a GPU."""
    target = random_target(device)
    figures.update(weights=target.weights, buckets=4)
    with TemporaryDirectory() as empty, mock.patch.dict(os.environ, TRITON_CACHE_DIR=empty):
        figures.measure({"K=auto": partial(warmup_figures, target, "auto")})


def warmup_figures(target: Target, num_draft_tokens: int | str) -> dict[str, Any]:
    llm = load(target.model, "ngram", batch=4, num_draft_tokens=num_draft_tokens)
    begin = time.perf_counter()
    llm.warmup([1, 4], [256, 768])
    wait(target.model.device)
    return {"seconds": time.perf_counter() - begin, "graphs": num_graphs(llm)}


def small_real_model(device: str, figures: Figures) -> None:
    """The demo's model, where it is installed: plain decoding, the synthetic drafter, and n-grams at `"auto"`, at B = 1."""
    figures["weights"] = REAL
    try:
        target = real_target(device)
    except FileNotFoundError as error:
        figures["left_out"] = str(error)
        return
    figures.measure({
        "plain decoding": partial(plain_figures, target, device, {}),
        "synthetic acceptance": partial(synthetic_figures, target, device),
        '"auto", n-gram, against plain': partial(against_plain, target, engine.NGramDrafter, 1, device),
    })  # fmt: skip


def drafting(device: str, figures: Figures) -> None:
    """A row for each kind of drafter."""
    target = random_target(device)
    figures.update(weights=target.weights, K=NUM_DRAFT_TOKENS)
    kinds = drafters(target.model)
    figures.measure({name: partial(drafter_cost, target, make, device) for name, make in kinds.items()})


# Goals name them, see bench/goals.py; the most wanted first.
CASES: dict[str, Callable[[str, Figures], None]] = {
    "ragged attention": attention_report,
    "plain decoding": plain_decoding,
    "synthetic acceptance 0.8, K = 5": synthetic_acceptance,
    "host time": host_time,
    "warm-up of 4 buckets": warmup,
    '"auto" against plain': automatic_length,
    "a small real model": small_real_model,
    "drafting, by drafter": drafting,
    "warm-up of 4 buckets, nothing compiled": cold_warmup,
    "beside transformers, compiled and assisted": beside_transformers,
}
