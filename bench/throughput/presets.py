"""Published small experiments, as options of a run.

Speculative decoding with two small models of one family on three short prompts, greedy and with sampled drafts, and
against decoding without a K/V cache, which is what some of the published speedups are relative to.
"""

from pathlib import Path
from typing import Any

THREE_PROMPTS = Path(__file__).resolve().parent.parent / "data" / "three_prompts.jsonl"


def _pair(
    target: str,
    drafters: tuple[str, ...],
    num_draft_tokens: tuple[int, ...],
    max_new_tokens: tuple[int, ...] = (100,),
) -> dict[str, Any]:
    return dict(
        target=target,
        drafters=drafters,
        num_draft_tokens=num_draft_tokens,
        max_new_tokens=max_new_tokens,
        drafts=("greedy", "sampled"),
        prompts=THREE_PROMPTS,
        template="raw",
        ignore_eos=True,
        baselines=("plain", "assistant", "no-cache"),
    )


# Options of a run, by the names of `Options`.
PRESETS: dict[str, dict[str, Any]] = {
    # GPT-2 124M for 774M
    "gpt2": _pair(
        "openai-community/gpt2-large",
        ("openai-community/gpt2",),
        (1, 2, 4, 8),
        (50, 100, 200, 500),
    ),
    # OPT-125M for 350M
    "opt": _pair("facebook/opt-350m", ("facebook/opt-125m",), (1, 2, 4, 8)),
    # Pythia 70M for 2.8B
    "pythia-2.8b-70m": _pair("EleutherAI/pythia-2.8b", ("EleutherAI/pythia-70m",), (3, 5, 7)),
    # Pythia 70M and 410M for 1.4B
    "pythia-1.4b": _pair(
        "EleutherAI/pythia-1.4b",
        ("EleutherAI/pythia-70m", "EleutherAI/pythia-410m"),
        (3, 5, 7),
    ),
    # Pythia 160M for 2.8B
    "pythia-2.8b-160m": _pair("EleutherAI/pythia-2.8b", ("EleutherAI/pythia-160m",), (3, 5, 7)),
    # Llama 3.2 1B for 3B
    "llama-3.2": _pair("meta-llama/Llama-3.2-3B", ("meta-llama/Llama-3.2-1B",), (3, 5, 7)),
}
