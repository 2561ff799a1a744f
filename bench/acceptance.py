"""How many of a drafter's greedy drafts are accepted, position by position, where it always drafts as many as requested.

    python -m bench.acceptance --prompts spec_bench.jsonl --out acceptance.json

Drafters that end their drafts early do not do so here: after an unlikely draft, others are unlikely too, and all count.
"""

import argparse
import json
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import engine
from bench.out_file import check_out, write_whole
from bench.report import environment
from bench.throughput.options import by_name
from bench.throughput.prompts import OWN_PROMPTS, cut, read_prompts, render, room_for_prompts
from engine.default_model import find_model
from engine.drafters.base import stages_of
from engine.heads import DEFAULT_DRAFTER

HEAD = DEFAULT_DRAFTER.rpartition("+")[2]  # the packaged one


def measure(
    llm: engine.Engine, prompts: Sequence[list[int]], categories: Sequence[str], max_new_tokens: int
) -> dict[str, Any]:
    """Answer prompts greedily with an engine that has drafted nothing yet.

    Args:
        categories: of each prompt.

    Returns:
        `acceptance`: for each position, the share of its drafts that are accepted, of those before which all are (None: there were
        none); `block_efficiency`, `rounds` and `new_tokens` as `Stats` has them; `categories`: the block efficiency in each;
        `failed`: prompts for which the target returned NaN, of which nothing but the drafts before counts, in `acceptance`.

    Raises:
        InvalidLogitsError: if it did for all.
    """
    for stage in stages_of(llm.drafter):
        if hasattr(stage, "min_reach"):
            stage.min_reach = 0.0
    outputs: Sequence[engine.Output | None]
    failed: dict[int, str] = {}
    try:
        outputs = llm.generate(prompts, engine.SamplingParams(max_new_tokens=max_new_tokens), progress=True)
    except engine.InvalidLogitsError as error:
        if not any(error.outputs):
            raise
        outputs, failed = error.outputs, error.errors
    by_category: dict[str, engine.Stats] = defaultdict(engine.Stats)
    answered = engine.Stats()
    for output, category in zip(outputs, categories, strict=True):
        if output is None:
            continue
        for counts in (by_category[category], answered):
            counts.rounds += output.stats.rounds
            counts.new_tokens += output.stats.new_tokens
    stats = llm.stats
    positions = range(1, len(stats.acceptance_per_position) + 1)
    # A round that proposes fewer tokens has no say in later positions.
    met = [(stats.rounds_with(n, n), stats.rounds_with(n, n - 1)) for n in positions]
    return {
        "acceptance": [stand / drafted if drafted else None for stand, drafted in met],
        "block_efficiency": answered.block_efficiency,
        "rounds": answered.rounds,
        "new_tokens": answered.new_tokens,
        "categories": {category: counts.block_efficiency for category, counts in by_category.items()},
        "failed": len(failed),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.acceptance", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--target", "-t", metavar="MODEL", help="hub id, folder or GGUF file (SmolLM2-135M-Instruct)")
    parser.add_argument("--drafter", "-d", default=HEAD, help="as engine.load takes it (default: %(default)s)")
    parser.add_argument("--num-draft-tokens", "-k", type=int, default=4, metavar="K", help="default: %(default)s")
    parser.add_argument("--dtype", default="bfloat16", help="default: %(default)s")
    parser.add_argument("--batch-size", "-b", type=int, default=8, metavar="B", help="default: %(default)s")
    parser.add_argument(
        "--prompts", type=Path, default=OWN_PROMPTS, metavar="FILE", help="JSON lines; first turns count"
    )
    parser.add_argument("--max-prompt-tokens", type=int, default=700, metavar="N", help="default: %(default)s")
    parser.add_argument("--max-new-tokens", "-n", type=int, default=96, metavar="N", help="default: %(default)s")
    parser.add_argument("--out", type=Path, metavar="FILE", help="JSON, with versions and the machine")
    options = parser.parse_args(arguments)
    try:
        if options.out is not None:
            check_out(options.out)
        if options.max_prompt_tokens < 2:
            raise ValueError(f"max_prompt_tokens must be >= 2, got {options.max_prompt_tokens}")
        params = engine.SamplingParams(max_new_tokens=options.max_new_tokens)
        prompts = read_prompts(options.prompts)
        target = options.target or find_model()
        llm = engine.load(
            target, options.drafter, options.num_draft_tokens, max_batch_size=options.batch_size, dtype=options.dtype
        )
        if llm.tokenizer is None:
            raise ValueError(f"target must have a tokenizer, got {target} without one")
        limit = min(options.max_prompt_tokens, room_for_prompts(llm.max_length, options.max_new_tokens))
        ids = [cut(render(llm.tokenizer, prompt.turns[:1], [], "auto"), limit) for prompt in prompts]
        llm.check(ids, params)
        found = measure(llm, ids, [prompt.category for prompt in prompts], options.max_new_tokens)
    except (ValueError, OSError, ImportError, engine.EngineError) as error:
        parser.error(" ".join(str(error).split()))
    shares = ["-" if share is None else f"{share:.3f}" for share in found["acceptance"]]
    print("position: " + ", ".join(f"{i} {share}" for i, share in enumerate(shares, 1)))
    print(f"block efficiency {found['block_efficiency']:.2f}, {found['rounds']} rounds of {len(ids)} prompts")
    print("by category: " + ", ".join(f"{name} {value:.2f}" for name, value in found["categories"].items()))
    if found["failed"]:
        print(f"without {found['failed']} prompts for which the target returned NaN")
    if options.out is not None:
        told = {name: value for name, value in vars(options).items() if name != "out"}
        told |= {"target": by_name(str(target)), "drafter": by_name(options.drafter), "prompts": options.prompts.name}
        result = {
            "options": told,
            "num_prompts": len(ids),
            **found,
            "environment": environment(llm.target_model.device.type),
        }
        write_whole(options.out, json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
