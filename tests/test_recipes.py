"""The prompts that the packaged head is trained on."""

import json
import os
import random
import re
import shlex
import struct
import subprocess
import sys
from collections import Counter
from itertools import chain
from pathlib import Path

import pytest
import typer
from training_cases import write_target

import engine
from engine import cli

ROOT = Path(__file__).resolve().parent.parent
RECIPE = ROOT / "recipes" / "smollm2_135m_instruct"
sys.path.append(str(ROOT))  # recipes/ is not installed

from recipes.smollm2_135m_instruct import invented, more_texts, prompts, real_texts, templates, words  # noqa: E402


def test_prompts_are_the_same_each_time_distinct_and_not_empty() -> None:
    made = prompts.make(1000, seed=0)
    assert made == prompts.make(1000, seed=0)
    assert made != prompts.make(1000, seed=1)
    assert len(prompts.make(60, seed=0, only="coding")) > 50
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


def test_the_script_gives_the_commands_options_that_they_have(tmp_path: Path) -> None:
    fake = tmp_path / "bin" / "python"
    fake.parent.mkdir()
    text = 100 * "x"  # so much of it that no pipe holds all
    fake.write_text(
        f"""#!/bin/bash
printf "%s\\n" "$*" >> "$COMMANDS"
name=${{4##*/}} name=${{name/ninth_14/lk}} name=${{name/eleventh_18/ninth_16}}  # one seed gives the prompts of another one again
case $4 in *.jsonl) seq -f "%.0f $name {text}" 4000 > "$4" ;; esac
"""
    )
    fake.chmod(0o755)
    commands, out = tmp_path / "commands", tmp_path / "out"
    (out / "texts").mkdir(parents=True)  # nothing is fetched
    subprocess.run(
        ["bash", RECIPE / "make_head.sh", out],
        check=True,
        env={**os.environ, "PATH": f"{fake.parent}:{os.environ['PATH']}", "COMMANDS": str(commands)},
    )
    made, trainings = [], []
    for line in commands.read_text().splitlines():
        (trainings if " train " in line else made).append(shlex.split(line))
    prompts_made, invented_made, real_made, more_made, other_made, code_made, *last_made = made
    assert prompts_made == ["-m", "recipes.smollm2_135m_instruct.prompts", "--out", f"{out}/templates.jsonl"]
    expected = ["-m", "recipes.smollm2_135m_instruct.invented", "--out", f"{out}/invented.jsonl", "--more-long", "400"]
    assert invented_made == expected
    expected = ["--out", f"{out}/real.jsonl", "--texts", f"{out}/texts"]
    assert real_made == ["-m", "recipes.smollm2_135m_instruct.real_texts", *expected]
    expected = [
        "-m",
        "recipes.smollm2_135m_instruct.more_texts",
        "--out",
        f"{out}/more.jsonl",
        "--texts",
        f"{out}/texts",
    ]
    assert more_made == [*expected, "--count", "2600"]
    expected[3] = f"{out}/other.jsonl"
    assert other_made == [*expected, "--count", "1920", "--seed", "6", "--templates", "640"]
    expected = ["-m", "recipes.smollm2_135m_instruct.prompts", "--out", f"{out}/code.jsonl"]
    assert code_made == [*expected, "--count", "512", "--seed", "7", "--only", "coding"]
    assert [words[-4:] for words in last_made] == [
        ["--seed", "8", "--templates", "700"],
        ["--count", "800", "--seed", "8"],
        ["--seed", "9", "--only", "coding"],
        ["--seed", "11", "--templates", "400"],
        ["--count", "1000", "--seed", "11"],
        ["--seed", "12", "--only", "coding"],
        ["--seed", "14", "--templates", "800"],
        ["--count", "2200", "--seed", "14"],
        ["--seed", "15", "--only", "coding"],
        ["--seed", "16", "--templates", "800"],
        ["--count", "2200", "--seed", "16"],
        ["--seed", "17", "--only", "coding"],
        ["--seed", "18", "--templates", "800"],
        ["--count", "2200", "--seed", "18"],
        ["--seed", "19", "--only", "coding"],
        ["--seed", "20", "--templates", "800"],
        ["--count", "2200", "--seed", "20"],
        ["--seed", "21", "--only", "coding"],
    ]
    train = typer.main.get_command(cli.app).commands["train"]
    runs = first, second, third, fourth, fifth, sixth, seventh, eighth, ninth, tenth, eleventh = tuple(
        train.make_context("train", words[3:]).params for words in trainings
    )
    for options in runs:
        assert options["method"] == "eagle3" and options["freeze_head"] and options["num_steps"] == 3
    assert second["start_from"] == str(first["out"]) == f"{out}/first"
    assert third["start_from"] == str(second["out"]) == f"{out}/second"
    assert fourth["start_from"] == str(third["out"]) == f"{out}/third"
    assert fifth["start_from"] == str(fourth["out"]) == f"{out}/fourth"
    assert sixth["start_from"] == str(fifth["out"]) == f"{out}/fifth"
    assert seventh["start_from"] == str(sixth["out"]) == f"{out}/sixth"
    assert eighth["start_from"] == str(seventh["out"]) == f"{out}/seventh"
    assert ninth["start_from"] == str(eighth["out"]) == f"{out}/eighth"
    assert tenth["start_from"] == str(ninth["out"]) == f"{out}/ninth"
    assert eleventh["start_from"] == str(tenth["out"]) == f"{out}/tenth" and str(eleventh["out"]) == f"{out}/head"
    assert [options["learn_prompts"] for options in runs] == [False, False] + [True] * 6 + [False] * 3
    assert [options["loss"] for options in runs] == ["kl"] * 7 + ["lk"] * 4
    read = [Path(options["prompts"]).read_text().splitlines() for options in runs]
    assert [len(lines) for lines in read] == [
        3072,
        5120,
        7072,
        8000,
        689 + 335 + 4000 + 4000,
        1536 + 4000,
        12000,
        12000,
        4608,
        6144,
        4608,
    ]
    for index in (-3, -2, -1):
        assert not set(read[index]) & set(chain.from_iterable(read[:index]))
    invented_ones = [f"{number} invented.jsonl {text}" for number in range(1, 4001)]
    assert sorted(read[2]) == sorted([*read[0], *invented_ones])
    assert sorted(read[3]) == sorted([*(out / "real.jsonl").read_text().splitlines(), *invented_ones])
    held = [round(o["validation_share"] * len(lines)) for o, lines in zip((second, third), read[1:], strict=False)]
    assert held[0] == 256 and read[1][-256:] == read[2][-256:] == read[3][-256:]


def write_texts(folder: Path) -> Path:
    """A folder as fetch_texts.sh makes it, with a few texts."""
    speech = " ".join(
        f"In year {number} we built {number} new bridges for the people of this land." for number in range(80)
    )
    files = {
        "sotu/package/data/1829_old_d.txt": "Too old to be read. " * 100,
        "sotu/package/data/1961_new_d.txt": speech,
        "factbook/package/world/none.json": json.dumps({"Government": {}}),
        "handbook/usr/html/de-DE/a.html": "".join(
            f'<div class="para">\n Das ist der <em>Satz</em> Nummer {number} &uuml;ber Netze und Platten. Noch einer folgt.</div>'
            f'<div class="para">This is the sentence that nobody has translated so far. One more.</div>'
            for number in range(40)
        ),
        "handbook/usr/html/en-US/a.html": '<div class="para">Not German, so nothing of it is asked for. Or so.</div>',
    }
    for number in range(6):
        name = {"Country name": {"conventional short form": {"text": f"Land{number}"}}}
        history = {
            "Background": {
                "text": f"Land{number} was founded long ago. ++ " + f"It fought war {number} and won it. " * 20
            }
        }
        files[f"factbook/package/world/{number}.json"] = json.dumps({"Government": name, "Introduction": history})
    for path, text in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text, encoding="utf-8")
    return folder


def test_prompts_over_real_texts_hold_them_and_come_in_their_shares(tmp_path: Path) -> None:
    made = real_texts.make_prompts(write_texts(tmp_path), 40, seed=0)
    assert made == real_texts.make_prompts(tmp_path, 40, seed=0) != real_texts.make_prompts(tmp_path, 40, seed=1)
    assert len(set(made)) == len(made) == 40
    about = [prompt for prompt in made if "Land" in prompt]
    over = [prompt for prompt in about if "It fought war" in prompt]
    bridges = [prompt for prompt in made if "new bridges" in prompt]
    german = [prompt for prompt in made if "über Netze und Platten." in prompt]
    assert (
        len(german) == 8
        and len([p for p in about if p not in over]) == 8
        and len(over) + len(bridges) == 24
        and bridges
    )
    assert all(150 <= len(prompt.split()) <= 370 for prompt in bridges)
    assert not any("<" in prompt or "Too old" in prompt or "nobody" in prompt for prompt in made)


def test_too_few_real_texts_are_an_error(tmp_path: Path) -> None:
    write_texts(tmp_path)
    with pytest.raises(ValueError, match=r"the texts give .* prompts of a kind, 2000 are asked for"):
        real_texts.make_prompts(tmp_path, 10_000, seed=0)
    with pytest.raises(ValueError, match=r"no texts in .*sotu"):
        real_texts.make_prompts(tmp_path / "nowhere", 10, seed=0)
    with pytest.raises(ValueError, match=r"no texts in .*wordnet"):  # fetched before it was asked for
        more_texts.make_prompts(tmp_path, 10, seed=0)


def write_more_texts(folder: Path) -> Path:
    """The rest of what fetch_texts.sh brings, with a few texts."""
    write_texts(folder)
    nouns = [
        f"0004{number}001 {kind} n 01 {name}{letter} 0 001 {'@i' if name[0].isupper() else '@'} 00039000 n 0000 | what it is  "
        for number, (kind, name) in enumerate([
            ("18", "Ada_"), ("15", "Lake_"), ("11", "War_of_"), ("05", "cat_"), ("20", "rose_"), ("06", "cup_"), ("13", "soup_"),
            ("09", "law_"), ("18", "baker_"), ("03", "entity_"),
        ])
        for letter in "abcdefgh"
    ]  # fmt: skip
    story = "The sea was calm and nobody on board had slept for many nights now. " * 40
    page = "The installer asks for a name and a password before it writes anything. " * 30
    files = {
        "wordnet/package/dict/data.noun": "\n".join(["  1 This is the licence 18 n", *nouns]),
        "moby/package/data/chapter_1.txt": f"CHAPTER 1. Loomings.\n\n{story}",
        "guide/usr/en/a.html": f"<p>\n{page} &amp; so <em>on</em>.</p><div>not this</div>",
        "guide/usr/de/a.html": "<p>" + "Nicht auf Deutsch gefragt. " * 60 + "</p>",
        "handbook/usr/html/en-US/b.html": "<p>too short a page</p>",
    }
    for path, text in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text, encoding="utf-8")
    catalog = folder / "wesnoth/usr/de/LC_MESSAGES/wesnoth.mo"
    catalog.parent.mkdir(parents=True)
    said = {f"Go {number}!": f"Wir gehen heute noch bis zum Fluss Nummer {number} und warten." for number in range(9)}
    said |= {"Short.": "Zu kurz.", "<b>Mark</b>": "Wir gehen heute noch bis zum <b>Fluss</b> und warten dort auf dich."}
    catalog.write_bytes(compiled(said))
    return folder


def compiled(messages: dict[str, str]) -> bytes:
    """A .mo file: a header of seven numbers, lengths and places of originals and translations, and their texts."""
    sources, translations = zip(
        *sorted({"": "Content-Type: text/plain; charset=UTF-8\n"}.items() | messages.items()), strict=True
    )
    texts = [text.encode() for text in (*sources, *translations)]
    table, place = b"", 28 + 8 * len(texts)
    for text in texts:
        table += struct.pack("<2I", len(text), place)
        place += len(text) + 1
    header = struct.pack("<7I", 0x950412DE, 0, len(sources), 28, 28 + 8 * len(sources), 0, 0)
    return header + table + b"".join(text + b"\0" for text in texts)


def test_more_prompts_are_over_other_texts_and_come_in_their_shares(tmp_path: Path) -> None:
    made = more_texts.make_prompts(write_more_texts(tmp_path), 50, seed=0)
    assert made == more_texts.make_prompts(tmp_path, 50, seed=0) != more_texts.make_prompts(tmp_path, 50, seed=1)
    assert len(set(made)) == len(made) == 50
    german = [prompt for prompt in made if "bis zum Fluss Nummer" in prompt]
    long = [prompt for prompt in made if len(prompt.split()) > 60]
    short = [prompt for prompt in made if prompt not in german and prompt not in long]
    assert (len(german), len(long), len(short)) == (7, 23, 20)
    assert any("The sea was calm" in prompt for prompt in long) and any(
        "The installer asks" in prompt for prompt in long
    )
    things = re.compile("Ada|Lake|War of|cat|rose|cup|soup|law")
    assert all(things.search(prompt) for prompt in short)
    more = more_texts.make_prompts(tmp_path, 50, seed=0, num_templates=30)
    assert more[:50] == made and len(set(more)) == 80
    assert any(things.search(prompt) for prompt in more[50:]) and not any("{" in prompt for prompt in more)
    unwanted = ("baker", "entity", "licence", "Zu kurz", "<", "auf Deutsch", "not this", "too short", "CHAPTER")
    assert not [prompt for prompt in made if any(text in prompt for text in unwanted)]


SENTENCE = "The harbour of the old town has been closed since the storm, and nobody knows when it will open again. "
TURNS = [
    invented.Turn("", "What is a fjord?", True),
    invented.Turn("", "What is a fjord?", True),
    invented.Turn("Write a", " poem about rain.", True),
    invented.Turn("Summarize:", " " + SENTENCE * 3, True),
    invented.Turn("Summarize:", " " + SENTENCE * 5 + "But on the", False),
    invented.Turn("Explain", " how a", False),
]


def test_invented_prompts_are_turns_that_ended_and_long_ones() -> None:
    made = invented.prompts_of(TURNS * 5, seed=0)
    assert made == invented.prompts_of(TURNS * 5, seed=0)
    short = {
        "What is a fjord?",
        "Write a poem about rain.",
        "Summarize: " + SENTENCE.strip() + (" " + SENTENCE.strip()) * 2,
    }
    assert short < set(made) and "Explain how a" not in made
    long = set(made) - short
    assert long and all(SENTENCE.strip() in prompt and "But on the" not in prompt for prompt in long)


def test_more_long_prompts_are_other_ones_of_the_length_asked_for() -> None:
    made = invented.prompts_of(TURNS * 5, seed=0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(invented, "MIN_LONG_TOKENS", 100)
        patch.setattr(invented, "MAX_TOKENS", 250)
        more = invented.more_long_prompts(TURNS * 5, made, 4, 1, lambda text: len(text.split()))
    assert len(more) == len(set(more)) == 4 and not set(more) & set(made)
    assert all(100 <= len(prompt.split()) <= 250 for prompt in more)
    assert not invented.more_long_prompts(TURNS[:1], made, 4, 1, len)


def test_long_prompts_hold_no_more_words_than_they_may() -> None:
    texts = [f"{number} " + "word " * 150 for number in range(6)]
    made = invented.long_prompts(texts, ["why?"], 50, seed=0)
    counts = [prompt.count("word word ") and prompt.count("word") // 150 for prompt in made]
    assert set(counts) == {1, 2}
    assert any("Question: why?" in prompt for prompt in made)


def test_the_target_invents_turns_and_goes_on_where_it_was_stopped(tmp_path: Path) -> None:
    target = write_target(tmp_path / "target", max_position_embeddings=256)
    llm = engine.load(str(target), drafter=None, max_batch_size=4)
    work = tmp_path / "work.jsonl"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(invented, "MAX_NEW_TOKENS", 8)
        turns = invented.invent(llm, 6, work, seed=3)
        before = work.read_bytes()
        assert invented.invent(llm, 6, work, seed=3) == turns and work.read_bytes() == before
    assert [turn.opening for turn in turns] == invented.openings(6, 3)[: len(turns)]
    lines = [json.loads(line) for line in before.splitlines()]
    assert len(lines) == 6
    for line, opening in zip(lines, invented.openings(6, 3), strict=True):
        assert bytes(line["prompt_token_ids"]).decode() == f"user: {opening}"
