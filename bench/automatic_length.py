"""`"auto"` against plain decoding, for the GPU report."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import engine
from bench.drafter_cases import small_draft_model
from bench.figures import Figures
from bench.targets import PROMPT_TOKENS, TURNS, Target, greedy, load, num_graphs, random_target, timed
from bench.throughput.synthetic import SyntheticDrafter

# By device.
AUTO_BATCHES = {"cuda": (1, 2, 4, 8, 16, 32, 64), "cpu": (1, 4)}
AUTO_TOKENS = {"cuda": 256, "cpu": 8}


def automatic_length(device: str, figures: Figures) -> None:
    """`"auto"` against plain decoding where drafting costs and never helps: the lowest ratio of all batch sizes and drafters.

    One drafter is wrong by construction, and costs what verifying and launching it costs; the other is a model, which a
    target with random weights agrees with by chance only: `acceptance` says how often.
    """
    target = random_target(device)
    figures["weights"] = target.weights
    drafters: dict[str, Callable[[], engine.Drafter]] = {
        "synthetic, never right": partial(SyntheticDrafter, 0.0, target.vocab_size),
        "draft model of two layers": partial(small_draft_model, target.model),
    }
    parts = {
        f"B={batch}, {name}": partial(against_plain, target, make, batch, device)
        for batch in AUTO_BATCHES[device]
        for name, make in drafters.items()
    }
    figures.measure(parts)
    if not figures.failed:
        for key in ("first_run", "later_runs", "all_runs"):
            figures[f"lowest_{key}"] = min(figures[name][key] for name in parts)


def against_plain(target: Target, make: Callable[[], engine.Drafter], batch: int, device: str) -> dict[str, float]:
    """Tokens per second of `"auto"` over plain decoding's in turns.

    All is compiled and captured beforehand; what drafting costs and brings is learnt in the first run, which counts.
    """
    texts, params = target.prompts(batch, PROMPT_TOKENS[device]), greedy(AUTO_TOKENS[device])
    plain, llm = load(target.model, None, batch), load(target.model, make(), batch, num_draft_tokens="auto")
    warmed(plain, texts, params)
    known = [output.token_ids for output in plain.generate(texts, params)]

    def expect() -> None:
        if isinstance(llm.drafter, SyntheticDrafter):
            llm.drafter.expect(texts, known)

    def run() -> tuple[float, float]:
        expect()
        return timed(plain, texts, params)[1], timed(llm, texts, params)[1]

    expect()
    warmed(llm, texts, params)
    graphs = num_graphs(plain, llm)
    pairs = [run() for _ in range(1 + TURNS[device])]
    first, later, both = (_ratio(part) for part in (pairs[:1], pairs[1:], pairs))
    return {
        "first_run": first, "later_runs": later, "all_runs": both,
        "acceptance": llm.stats.acceptance_rate, "drafts_per_round": llm.stats.draft_tokens / llm.stats.rounds,
        "captured_while_timed": num_graphs(plain, llm) - graphs,
    }  # fmt: skip


def _ratio(pairs: list[tuple[float, float]]) -> float:
    """Of the sums of the first and of the second."""
    return sum(base for base, _ in pairs) / sum(seconds for _, seconds in pairs)


def warmed(llm: engine.Engine, texts: list[list[int]], params: engine.SamplingParams) -> None:
    """Compile and capture what these texts need, and forget the times that this took."""
    llm.generate(texts, replace(params, max_new_tokens=1))  # some drafters lay out their tensors by the prompts
    llm.warmup([len(texts)], [len(texts[0]) + params.max_new_tokens], params)
    llm._server._lengths = llm._lengths()
