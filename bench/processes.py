"""Commands with a time limit, in processes of their own."""

import os
import signal
import subprocess
import sysconfig
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TAIL = 60  # lines
LAST_WORDS = 5  # seconds that a process has to say where it hangs


@dataclass(frozen=True)
class Ended:
    """How a command ended."""

    code: int | None  # negative: the signal; None: it was stopped at its limit
    tail: list[str]  # of what it wrote, errors included


def without_paths(text: str) -> str:
    """Text without where the checkout and Python's packages lie, which is this machine's affair."""
    for folder in sorted({str(ROOT), *sysconfig.get_paths().values()}, key=len, reverse=True):
        text = text.replace(f"{folder}{os.sep}", "")
    return text


def limited(
    command: Sequence[str], seconds: float, environment: Mapping[str, str] | None = None, *, interrupt: float = 0.0
) -> Ended:
    """Run a command in the repository's root. At the limit it and all that it has started are killed.

    It gets an abort signal first, upon which Python's faulthandler, if it is on, writes where it hangs.

    Args:
        interrupt: so many seconds before the limit it is interrupted as by Ctrl-C, so that it can say what it has found.
    """
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
            process_group=0, preexec_fn=_heed_interrupts if interrupt else None,
        )  # fmt: skip
        code = None
        try:
            with suppress(subprocess.TimeoutExpired):
                code = process.wait(seconds - interrupt)
            if code is None and interrupt:
                process.send_signal(signal.SIGINT)
                with suppress(subprocess.TimeoutExpired):
                    process.wait(interrupt)
            if code is None:
                process.send_signal(signal.SIGABRT)
        finally:
            with suppress(subprocess.TimeoutExpired):
                process.wait(LAST_WORDS)
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            with suppress(subprocess.TimeoutExpired):  # one that a driver holds does not end at once
                process.wait(LAST_WORDS)
        output.seek(0)
        written = output.read().decode(errors="replace")
    return Ended(code, without_paths(written).splitlines()[-TAIL:])


def _heed_interrupts() -> None:
    """What a shell starts in the background ignores them, and so does what that starts."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
