"""Prompts from the command line, a file or standard input."""

import json
import sys
from collections.abc import Sequence
from typing import Any

from .hub import user_path

Prompt = str | list[dict[str, Any]]  # text, or the messages of a chat


def read_prompts(arguments: list[str], file: str | None) -> Sequence[Prompt]:
    """Prompts from the command line, else a file, else standard input as a whole.

    A line of a file is a prompt, or a JSON object: with "prompt", text; with "turns", a list of texts, of which the first is
    taken; or with "messages", those of a chat.

    Raises:
        ValueError: if there are none, or a line of a file holds none.
    """
    if arguments and file is not None:
        raise ValueError(
            f"give prompts as arguments or with --prompts-file, not both, got {len(arguments)} and {file!r}"
        )
    if arguments:
        if "" in arguments:
            raise ValueError(f"prompts[{arguments.index('')}] must not be empty, got ''")
        return arguments
    if file is None:
        if sys.stdin.isatty():
            raise ValueError("no prompt: give one as an argument, with --prompts-file, or on standard input")
        text = sys.stdin.read().removeprefix("\ufeff").removesuffix("\n").removesuffix("\r")
        if not text:
            raise ValueError("standard input must hold a prompt, but it is empty")
        return [text]
    name = "standard input" if file == "-" else file
    lines = [(number, line) for number, line in enumerate(read_lines(file), 1) if line.strip()]
    if not lines:
        raise ValueError(f"{name} must hold at least one prompt, but it is empty")
    if file.endswith(".jsonl") or isinstance(_parse(lines[0][1]), dict):
        return [_prompt_of(line, f"{name}:{number}") for number, line in lines]
    whole = _parse("\n".join(line for _, line in lines))
    if isinstance(whole, list | dict):
        got = "list" if isinstance(whole, list) else "object of several lines"
        raise ValueError(f"{name} must hold a prompt per line, or a JSON object per line, got one JSON {got}")
    return [line for _, line in lines]


def read_lines(file: str) -> list[str]:
    """Of a file, or of standard input for "-". Only a line feed, with a carriage return before it or not, ends a line.

    Raises:
        ValueError: if it is a folder, or no UTF-8.
        OSError: if it cannot be read.
    """
    if file == "-":
        text = sys.stdin.read().removeprefix("\ufeff")
    elif not file or user_path(file).is_dir():
        raise ValueError(f"prompts must be in a file, got {f'the folder {file}' if file else repr(file)}")
    else:
        try:
            text = user_path(file).read_bytes().decode("utf-8-sig")
        except FileNotFoundError:
            raise FileNotFoundError(f"prompts must be in a file, got {file!r}, which does not exist") from None
        except UnicodeDecodeError as error:
            raise ValueError(f"{file} must be UTF-8 text: {error}") from error
    return [line.removesuffix("\r") for line in text.split("\n")]


def _prompt_of(line: str, where: str) -> Prompt:
    """The prompt of a JSON line."""
    record = _parse(line)
    if isinstance(record, dict):
        if record.get("tools") not in (None, "", "[]", []):
            raise ValueError(f"{where} must have no tools, which are not rendered: render the chat, and give its text")
        turns = record.get("turns")
        prompt = record.get("prompt")
        if prompt is None and isinstance(turns, list) and turns:
            prompt = turns[0]
        if prompt == "":
            raise ValueError(f"{where} must hold a prompt that is not empty, got ''")
        if isinstance(prompt, str):
            return prompt
        messages = record.get("messages")
        if isinstance(messages, list) and messages and all(isinstance(message, dict) for message in messages):
            return messages
    raise ValueError(
        f'{where} must be a JSON object with a string "prompt", a list of strings "turns" or a chat\'s "messages"'
    )


def _parse(line: str) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None
