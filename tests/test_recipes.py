"""The prompts that the packaged head is trained on."""

import json
import random
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT))  # recipes/ is not installed

from recipes.smollm2_135m_instruct import prompts, templates, words  # noqa: E402


def test_prompts_are_the_same_each_time_distinct_and_not_empty() -> None:
    made = prompts.make(1000, seed=0)
    assert made == prompts.make(1000, seed=0)
    assert made != prompts.make(1000, seed=1)
    assert len(set(made)) == len(made) > 900
    assert all(prompt == prompt.strip() and len(prompt) > 10 for prompt in made)
    assert not any("{" + name + "}" in prompt for prompt in made for name in words.LISTS)


def test_kinds_of_prompts_come_by_their_shares() -> None:
    assert sum(prompts.SHARES.values()) == pytest.approx(1.0)
    assert prompts.SHARES.keys() == prompts.KINDS.keys()
    counts: Counter[str] = Counter()

    def counted(kind: str) -> None:
        make = prompts.KINDS[kind]
        patch.setitem(prompts.KINDS, kind, lambda rng: counts.update([kind]) or make(rng))

    with pytest.MonkeyPatch.context() as patch:
        for kind in prompts.SHARES:
            counted(kind)
        prompts.make(400, seed=0)
    assert all(counts[kind] >= round(share * 400) for kind, share in prompts.SHARES.items())


def test_every_word_of_the_templates_has_a_list() -> None:
    lists = [value for value in vars(templates).values() if isinstance(value, list)]
    assert len(lists) >= 7
    for template in (template for found in lists for template in found):
        assert prompts.fill(template, random.Random(0))
    assert all(word and len(set(found)) > 1 for found in words.LISTS.values() for word in found)


def test_the_command_writes_a_prompt_a_line(tmp_path: Path) -> None:
    out = tmp_path / "prompts.jsonl"
    command = [sys.executable, "-m", "recipes.smollm2_135m_instruct.prompts", "--out", str(out), "--count", "50"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    lines = [json.loads(line)["turns"] for line in out.read_text(encoding="utf-8").splitlines()]
    assert [turns[0] for turns in lines] == prompts.make(50, seed=0)
    assert done.stdout == f"{len(lines)} prompts in {out}\n"
