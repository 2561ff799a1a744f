"""What a run keeps, so that an interrupted one resumes: `run.json` says what is measured, `records.jsonl` what was."""

import json
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from bench.out_file import write_whole
from engine.training.files import lock

RUN, RECORDS, TABLE, LOCK = "run.json", "records.jsonl", "table.md", "lock"
PLOTS = re.compile(r"((speedup|drafts|rounds)(-\d+)?|batches)\.png")
_IGNORED = ("date", "load_average", "commit")  # parts of the environment that change and mean nothing; "code" does


@contextmanager
def no_other_run(folder: Path) -> Iterator[None]:
    """Nobody else measures into the folder meanwhile; it is created.

    Raises:
        ValueError: if somebody does.
        OSError: if the folder cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / LOCK
    with path.open("a") as file:
        # Who opens the file before its holder removes it gets one that later runs do not see.
        if not lock(file) or not (path.exists() and os.path.samestat(path.stat(), os.fstat(file.fileno()))):
            raise ValueError(f"out must be a folder in which no other run works, got {folder}, in which one does")
        try:
            yield
        finally:
            with suppress(OSError):  # Windows removes no open files
                path.unlink()


class Records:
    """The records in a folder, one JSON line for each prompt and method.

    Args:
        folder: is created.
        run: "options", "prompts" and "models" (digests) and "environment": whatever changes a record.
        restart: discard a run that is there.

    Raises:
        ValueError: if there is a run with other options, or a damaged one, or what a run would overwrite.
        OSError: if the folder cannot be written.
    """

    def __init__(self, folder: Path, run: dict[str, Any], restart: bool = False) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        if restart:
            for name in (RUN, RECORDS):
                (folder / name).unlink(missing_ok=True)
        elif (folder / RUN).exists():
            before = _read_run(folder)
            if read_records(folder):  # else nothing would be lost
                _refuse_others(folder, before, run)
                run = before
        elif others := sorted(
            p.name for p in folder.iterdir() if p.name in (RECORDS, TABLE) or PLOTS.fullmatch(p.name)
        ):
            raise ValueError(f"{folder} holds {others[0]} without {RUN}: choose another --out, or add --restart")
        self.run: dict[str, Any] = {"complete": False, "finished": {}, "skipped": [], **run}
        self.records = read_records(folder)
        whole = {
            label: kept
            for label, kept in self.run["finished"].items()
            if self._count(kept["contest"]) == kept["records"]
        }
        if whole != self.run["finished"]:
            self.run |= {"complete": False, "finished": whole}
        self._rewrite()
        self.save_run()

    def save_run(self, **changes: Any) -> None:
        """Write `run.json`, whole or not at all."""
        self.run |= changes
        write_whole(self.folder / RUN, json.dumps(self.run, indent=1) + "\n")

    def finish(self, label: str, contest: dict[str, Any]) -> None:
        """A contest is measured, as long as all the records are there that it has now; under a label that needs no model."""
        kept = {"contest": contest, "records": self._count(contest)}
        self.save_run(finished=self.run["finished"] | {label: kept})

    def skip(self, contest: str, method: str, reason: str) -> bool:
        """Keep why a method takes no part; returns whether that is news."""
        entry = {"contest": contest, "method": method, "reason": reason}
        known = [(other["method"], other["reason"]) for other in self.run["skipped"]]
        if entry not in self.run["skipped"]:
            self.save_run(skipped=[*self.run["skipped"], entry])
        return (method, reason) not in known

    def take_part(self, contest: str, methods: Sequence[str]) -> None:
        """Forget why methods were left out of a contest, where a run that went on has them."""
        skipped = self.run["skipped"]
        kept = [entry for entry in skipped if entry["contest"] != contest or entry["method"] not in methods]
        if len(kept) < len(skipped):
            self.save_run(skipped=kept)

    def has(self, unit: dict[str, Any], methods: Iterable[str], num_prompts: int) -> bool:
        """Whether all these methods have the records of a unit (see `unit_of`), one for each of its prompts."""
        found = Counter(record["method"] for record in self.records if unit_of(record) == unit)
        return all(found[method] == num_prompts for method in methods)

    def drop(self, unit: dict[str, Any]) -> None:
        """Forget a unit that is not complete; it is measured again as a whole, all methods in turn."""
        kept = [record for record in self.records if unit_of(record) != unit]
        if len(kept) < len(self.records):
            self.records = kept
            self._rewrite()

    def add(self, records: Sequence[dict[str, Any]]) -> None:
        """Append the records of a unit, in one piece, and onto the disk."""
        self.records += records
        with (self.folder / RECORDS).open("a", encoding="utf-8") as file:
            file.write(_lines(records))
            file.flush()
            os.fsync(file.fileno())

    def _count(self, contest: dict[str, Any]) -> int:
        return sum(record["contest"] == contest for record in self.records)

    def _rewrite(self) -> None:
        write_whole(self.folder / RECORDS, _lines(self.records))


def unit_of(record: dict[str, Any]) -> dict[str, Any]:
    """What all methods do in turn: a group of prompts, in a contest."""
    return {name: record[name] for name in ("contest", "group", "turn", "repeat")}


def read_records(folder: Path) -> list[dict[str, Any]]:
    """All whole records; what a killed run left of its last line is dropped.

    Raises:
        ValueError: for a line in the middle that is no record.
    """
    path = folder / RECORDS
    if not path.exists():
        return []
    *lines, rest = path.read_text(encoding="utf-8", errors="replace").split("\n")
    records = []
    for number, line in enumerate([*lines, rest], 1):
        try:
            record = json.loads(line)
            unit_of(record), record["method"], record["line"], record["category"], record["group_category"]
        except (ValueError, KeyError, TypeError) as error:
            if number > len(lines):  # without a newline behind it
                break
            raise ValueError(f"{path}:{number} is damaged: add --restart, or repair it") from error
        if number <= len(lines):
            records.append(record)
    return records


def read_run(folder: Path) -> dict[str, Any]:
    """A run's description.

    Raises:
        ValueError: if there is none.
    """
    if not (folder / RUN).exists():
        raise ValueError(f"out must hold a run for --report-only, but {folder} has no {RUN}")
    return _read_run(folder)


def _read_run(folder: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads((folder / RUN).read_text(encoding="utf-8"))
        found["options"]["relative_to"], found["environment"]["versions"], found["prompts"], found["models"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{folder / RUN} is damaged: add --restart, or choose another --out") from error
    return found


def _refuse_others(folder: Path, before: dict[str, Any], now: dict[str, Any]) -> None:
    now = json.loads(json.dumps(now))  # tuples are lists there
    differences = []
    for part in ("options", "prompts", "models", "environment"):
        old, new = before[part], now[part]
        if not isinstance(old, dict):
            old, new = {part: old}, {part: new}
        for name in sorted(old.keys() | new.keys()):
            if name not in _IGNORED and old.get(name) != new.get(name):
                differences.append(f"{name}: {old.get(name)} there, {new.get(name)} now")
    if differences:
        raise ValueError(
            f"{folder} holds a run that was measured otherwise ({'; '.join(differences)}): choose another --out, or add "
            f"--restart to discard it"
        )


def _lines(records: Iterable[dict[str, Any]]) -> str:
    return "".join(json.dumps(record, allow_nan=False) + "\n" for record in records)
