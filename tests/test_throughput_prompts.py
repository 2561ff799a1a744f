"""bench/throughput: prompts from files to token ids."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from tiny_tokenizer import byte_tokenizer

from bench.throughput.prompts import OWN_PROMPTS, Prompt, cut, groups, read_prompts, render, select

# Prompts.


def test_our_own_prompts() -> None:
    own = read_prompts(OWN_PROMPTS)
    assert len({prompt.question_id for prompt in own}) == len(own) >= 24
    assert len({prompt.category for prompt in own}) >= 6 and any(len(prompt.turns) > 1 for prompt in own)


@pytest.mark.parametrize(
    "line, complaint",
    [
        ('{"question_id": 1, "category": "a", "turns"', "must be a JSON object, but: "),
        ("[1]", "must be a JSON object, got list"),
        ("[" * 100_000 + "]" * 100_000, "must be a JSON object, but: "),
        ('{"category": "a", "turns": ["b"]}', 'must have a "question_id" that is a number or a string, got None'),
        ('{"question_id": 1, "category": "", "turns": ["b"]}', """must have a "category" that is a string, got ''"""),
        *(
            (
                json.dumps({"question_id": 1, "category": category, "turns": ["b"]}),
                f"""must have a "category" of one line that is not 'all' or 'mixed', got {re.escape(repr(category))}""",
            )
            for category in ("all", "mixed", "a\nb", "a\r", "\u2028")
        ),
        ('{"question_id": 1, "category": "a", "turns": []}', r'must have "turns", a list of strings, got \[\]'),
        ('{"question_id": 1, "category": "a", "turns": [""]}', r"""must have "turns", a list of strings, got \[''\]"""),
        (
            r'{"question_id": 1, "category": "a", "turns": ["b", "c\ud800"]}',
            r"turns\[1\] must be valid Unicode text, got '\\ud800' at index 1",
        ),
        (
            r'{"question_id": 1, "category": "\udfff", "turns": ["b"]}',
            r"category must be valid Unicode text, got '\\udfff' at index 0",
        ),
    ],
)
def test_bad_lines_are_named(tmp_path: Path, line: str, complaint: str) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"question_id": 1, "category": "a", "turns": ["b"]}\n\n' + line + "\n")
    with pytest.raises(ValueError, match=f"prompts.jsonl:3 {complaint}"):
        read_prompts(path)


def test_only_line_feeds_end_lines(tmp_path: Path) -> None:
    path, line = tmp_path / "prompts.jsonl", '{"question_id": 1, "category": "a", "turns": ["b\u2028c\x85"]}'
    path.write_bytes(f"\ufeff{line}\r\n{line}".encode())
    assert [prompt.turns for prompt in read_prompts(path)] == [("b\u2028c\x85",)] * 2
    path.write_bytes(b"\xff")
    with pytest.raises(ValueError, match=r"prompts\.jsonl must be UTF-8 text"):
        read_prompts(path)


def test_empty_and_missing_files(tmp_path: Path) -> None:
    (tmp_path / "empty").write_text("\n")
    with pytest.raises(ValueError, match="prompts must hold at least one prompt"):
        read_prompts(tmp_path / "empty")
    with pytest.raises(FileNotFoundError, match="prompts must be an existing file"):
        read_prompts(tmp_path / "missing")


def test_selection_and_groups() -> None:
    made = [Prompt(i, i, "ab"[i % 2], ("first", "second")[: 1 + (i == 3)]) for i in range(5)]
    chosen = select(made)
    assert [prompt.index for prompt in chosen] == [0, 2, 4, 1, 3]  # categories keep together
    batches = groups(chosen, 2)
    assert [[prompt.index for prompt in batch.prompts] for batch in batches] == [[0, 2], [4, 1], [3], [3]]
    assert [(batch.category, batch.turn) for batch in batches] == [("a", 0), ("mixed", 0), ("b", 0), ("b", 1)]
    assert [prompt.index for prompt in select(made, ["b"], per_category=1)] == [1]
    assert [prompt.index for prompt in select(made, per_category=2, max_prompts=3)] == [0, 2, 1]
    assert len(groups(select(made, max_turns=1), 8)) == 1
    with pytest.raises(ValueError, match="categories must be of a, b, got 'c'"):
        select(made, ["c"])


def test_rendering() -> None:
    tokenizer = byte_tokenizer()

    def text(*arguments: Any) -> str:
        return str(tokenizer.decode(render(tokenizer, *arguments)))

    assert text(["hi", "more"], ["yes"], "auto") == "user: hi\nassistant: yes\nuser: more\nassistant:"
    assert text(["hi", "more"], [" yes"], "raw") == "hi yes\n\nmore"
    tokenizer.chat_template = None
    assert text(["hi"], [], "auto") == "hi"
    with pytest.raises(ValueError, match="template must be raw or auto"):
        render(tokenizer, ["hi"], [], "chat")


def test_cut_takes_the_middle() -> None:
    assert cut([1, 2, 3, 4, 5, 6, 7], 4) == [1, 2, 6, 7] and cut([1, 2, 3, 4, 5, 6, 7], 5) == [1, 2, 3, 6, 7]
    assert cut([1, 2, 3], 3) == [1, 2, 3]
