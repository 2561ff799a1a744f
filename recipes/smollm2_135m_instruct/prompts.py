"""Writes the prompts that the head for SmolLM2-135M-Instruct is trained on, one JSON object {"turns": [text]} a line.

    python -m recipes.smollm2_135m_instruct.prompts --out prompts.jsonl

All of them are put together from the templates, topics and numbers in this folder by a generator with a fixed seed.
"""

import argparse
import json
import random
from collections.abc import Callable
from pathlib import Path

from . import passages, words
from .templates import CODE, EXPLAIN, MATH, QUESTIONS, REASONING, ROLES, WRITING

SHARES = {  # of all prompts
    "writing": 0.12, "roleplay": 0.06, "explain": 0.18, "questions": 0.14, "math": 0.14, "reasoning": 0.05,
    "coding": 0.09, "extraction": 0.05, "translation": 0.06, "summarization": 0.06, "passage": 0.05,
}  # fmt: skip


def fill(template: str, rng: random.Random, lists: dict[str, list[str]] = words.LISTS) -> str:
    """Replace each {word} by a random word of that list, and {a-b} by a number from a to b."""
    out, rest = "", template
    while "{" in rest:
        before, rest = rest.split("{", 1)
        name, rest = rest.split("}", 1)
        if "-" in name:
            low, high = name.split("-")
            value = str(rng.randint(int(low), int(high)))
        else:
            value = rng.choice(lists[name])
        out += before + value
    return out + rest


def from_templates(templates: list[str]) -> Callable[[random.Random], str]:
    return lambda rng: fill(rng.choice(templates), rng)


def roleplay(rng: random.Random) -> str:
    return fill(rng.choice(ROLES), rng) + " " + fill(rng.choice(EXPLAIN + QUESTIONS), rng)


def extraction(rng: random.Random) -> str:
    lines = [passages.record(rng) for _ in range(rng.randint(3, 7))]
    rng.shuffle(lines)
    return rng.choice(passages.EXTRACTION_TASKS) + "\n\n" + "\n".join(lines)


def translation(rng: random.Random) -> str:
    sentences = " ".join(passages.german(rng) for _ in range(rng.randint(1, 3)))
    return rng.choice(passages.TRANSLATION_TASKS) + " " + sentences


def summarization(rng: random.Random) -> str:
    return rng.choice(passages.SUMMARY_TASKS) + " " + passages.report(rng, rng.randint(8, 20))


def passage(rng: random.Random) -> str:
    text, question = passages.with_question(rng)
    return rng.choice(["{text}\n{question}", "{text}\n\nQuestion: {question}", "{question}\n\n{text}"]).format(
        text=text, question=question
    )


KINDS: dict[str, Callable[[random.Random], str]] = {
    "writing": from_templates(WRITING),
    "roleplay": roleplay,
    "explain": from_templates(EXPLAIN),
    "questions": from_templates(QUESTIONS),
    "math": from_templates(MATH),
    "reasoning": from_templates(REASONING),
    "coding": from_templates(CODE),
    "extraction": extraction,
    "translation": translation,
    "summarization": summarization,
    "passage": passage,
}


def make(count: int, seed: int, only: str | None = None) -> list[str]:
    """`count` different prompts, of one kind or of all, mixed."""
    rng = random.Random(seed)
    shares = SHARES if only is None else {only: 1.0}
    kinds = [kind for kind, share in shares.items() for _ in range(round(share * count))]
    rng.shuffle(kinds)
    prompts: dict[str, None] = {}
    for kind in kinds:
        for _ in range(20):  # where templates have few fillings, another is tried
            prompt = KINDS[kind](rng)
            if prompt not in prompts:
                prompts[prompt] = None
                break
    return list(prompts)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--count", type=int, default=6000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", choices=KINDS, help="of this kind alone")
    options = parser.parse_args()
    prompts = make(options.count, options.seed, options.only)
    with options.out.open("w", encoding="utf-8") as file:
        for prompt in prompts:
            file.write(json.dumps({"turns": [prompt]}, ensure_ascii=False) + "\n")
    print(f"{len(prompts)} prompts in {options.out}")


if __name__ == "__main__":
    main()
