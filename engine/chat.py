"""An interactive conversation: history, streamed answers, a few commands."""

import sys
from contextlib import closing, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rich.markup import escape

from .errors import EngineError
from .prompts import check_unicode
from .terminal import (
    error_record,
    legend,
    output_record,
    shown,
    stats_line,
    stdout_console,
    stop_on_interrupt,
    write_json,
    write_piece,
)

if TYPE_CHECKING:
    from .config import SamplingParams
    from .engine import Engine

HELP = "/reset forgets the conversation, /quit (or Ctrl-D) leaves, Ctrl-C stops an answer"


@dataclass
class Chat:
    """A conversation with one engine.

    Attributes:
        system: a system message that opens the conversation and survives /reset.
        as_json: one JSON line per message on stdout, its answer or an "error", and nothing else there.
        history: the messages so far.
        failed: whether any message was not answered.
    """

    llm: "Engine"
    params: "SamplingParams"
    system: str | None = None
    as_json: bool = False
    history: list[dict[str, str]] = field(default_factory=list, init=False)
    failed: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self.console = stdout_console()
        self.interactive = sys.stdin.isatty()
        self._reset()

    def run(self) -> int:
        """Answer line after line until the input ends; returns the exit status.

        Raises:
            ValueError: if no message can be answered, as of a target without a chat template.
        """
        try:
            self.llm.check([[*self.history, {"role": "user", "content": "Hello"}]], self.params)
        except ValueError as error:
            after = " after this system message" if self.system else ""
            raise ValueError(f"no message can be answered{after} ({error}); generate takes text as it is") from error
        if self.interactive:
            with suppress(ImportError):
                import readline  # noqa: F401  (line editing and recall in input())
            self._say("[dim]{}[/]", HELP)
            if legend(self.console):
                self._say(legend(self.console))
        while True:
            try:
                line = self._read()
            except KeyboardInterrupt:
                if not self.interactive:
                    raise
                self._say("\n[dim]{}[/]", HELP)
                continue
            if line is None or line in ("/quit", "/exit"):
                return int(self.failed)
            if line.startswith("/"):
                self._command(line)
            elif line:
                self._answer(line)

    def _read(self) -> str | None:
        """The next line, stripped; None at the end of the input."""
        if self.interactive:
            try:
                return input("" if self.as_json else "> ").strip()
            except EOFError:
                self._say("")
                return None
        line = sys.stdin.readline()
        if not line:
            return None
        line = line.removeprefix("\ufeff").strip()
        if line and not self.as_json:
            # So that a transcript shows both sides; with no markup, which would double a backslash at the end.
            self.console.out(shown(self.console, f"> {line}"), highlight=False)
        return line

    def _command(self, line: str) -> None:
        if line == "/reset":
            self._reset()
            self._say("[dim]the conversation starts anew[/]")
        elif not self.interactive:  # nobody reads the help: a message that is passed over must not go unnoticed
            self._fail(f"{line} begins like a command but is not one: {HELP}")
        else:
            self._say("[dim]{}[/]", HELP)

    def _reset(self) -> None:
        self.history = [{"role": "system", "content": self.system}] if self.system else []

    def _answer(self, line: str) -> None:
        """Answer one message; what fails, or is stopped before its first word, is not kept in the history."""
        try:
            check_unicode(line, "message")
        except ValueError as error:
            self._fail(str(error))
            return
        self.history.append({"role": "user", "content": line})
        try:
            text = self._stream()
        except (ValueError, EngineError) as error:
            text = ""
            hint = "; /reset forgets the conversation" if len(self.history) > 1 + bool(self.system) else ""
            self._fail(f"{' '.join(str(error).split())}{hint}")
        if text:
            self.history.append({"role": "assistant", "content": text})
        else:
            self.history.pop()

    def _stream(self) -> str:
        """Show an answer as it comes, until it ends or Ctrl-C stops it; returns its text.

        Raises:
            KeyboardInterrupt: if lines are piped in: at a Ctrl-C, but with `as_json` at a second one in an answer, as the program
                that sends messages may stop an answer by the first.
        """
        text, token_ids, output = "", list[int](), None
        ignored = [KeyboardInterrupt] if self.interactive else []
        with stop_on_interrupt() as stopped, suppress(*ignored):
            pieces: Any = self.llm.stream(list(self.history), self.params)
            with closing(pieces):
                for piece in pieces:
                    text += piece.text or ""
                    token_ids += piece.token_ids
                    output = piece.output
                    if not self.as_json:
                        write_piece(self.console, piece)
                    if stopped.is_set():
                        break
        if self.as_json:
            interrupted = dict(text=text, token_ids=token_ids, finish_reason="interrupted", stats=None)
            write_json(output_record(output) if output else interrupted)
        else:
            self._say("" if text.endswith("\n") else "\n", end="")
            end = stats_line(output.stats) if output else f"stopped after {len(token_ids)} tokens"
            self._say("[dim]{}[/]", end)
            if output is None and not self.interactive:
                raise KeyboardInterrupt
        return text

    def _fail(self, message: str) -> None:
        """Say so on stderr; as JSON on stdout too, where whoever has sent a message waits for a line."""
        self.failed = True
        print(f"error: {message}", file=sys.stderr, flush=True)
        if self.as_json:
            write_json(error_record(message))

    def _say(self, markup: str, *values: object, end: str = "\n") -> None:
        if not self.as_json:
            self.console.print(markup.format(*(escape(str(value)) for value in values)), end=end)
