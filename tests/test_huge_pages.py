"""Memory in huge pages: what is asked of the kernel and when, and on a kernel that does it, that it is done."""

import itertools
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tiny_models import random_prompts, tiny
from torch import nn

import engine
from engine import huge_pages
from engine.huge_pages import FIRST_ROUND, HugePages, huge_pages_for
from engine.packing import PackedLinear

PAGE = 2 << 20
SMAPS = """\
555500000000-555501000000 r-xp 00000000 fe:00 260386                     /usr/bin/python3
Size:              16384 kB
Rss:               16384 kB
5555000ff000-555500900000 rw-p 00000000 00:00 0                          [heap]
Size:               8196 kB
Rss:                8000 kB
7f0000000000-7f0000400000 rw-p 00000000 00:00 0
Size:               4096 kB
Rss:                2048 kB
7f0001000000-7f0001200000 rw-p 00000000 00:00 0
Size:               2048 kB
Rss:                2048 kB
7f0002000000-7f0002400000 rw-p 00000000 fe:00 260387                     /home/weights
Size:               4096 kB
Rss:                4096 kB
7f0003000000-7f0003400000 rw-s 00000000 00:01 5                          /dev/shm/x
Size:               4096 kB
Rss:                4096 kB
7f0004000000-7f0004400000 rw-s 00000000 00:00 0
Size:               4096 kB
Rss:                4096 kB
7f0005000000-7f0005200000 rw-p 00000000 00:00 0                          [anon: glibc: malloc arena]
Size:               2048 kB
Rss:                2048 kB
7ffc00000000-7ffc00400000 rw-p 00000000 00:00 0                          [stack]
Size:               4096 kB
Rss:                4096 kB
"""


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Those of a kernel that gives huge pages on request."""
    for name, text in (("enabled", "always [madvise] never\n"), ("hpage_pmd_size", f"{PAGE}\n")):
        (tmp_path / name).write_text(text)
        monkeypatch.setattr(huge_pages, {"enabled": "_ENABLED", "hpage_pmd_size": "_SIZE"}[name], tmp_path / name)
    monkeypatch.delenv(huge_pages.VARIABLE, raising=False)
    return tmp_path


def test_whole_pages_of_memory_that_is_there() -> None:
    """Not what is a file's, shared or a stack, no mapping half of which has no memory, and none beyond the end of one."""
    heap = [0x555500200000, 0x555500400000, 0x555500600000]
    assert list(huge_pages._addresses(SMAPS, PAGE)) == [*heap, 0x7F0001000000, 0x7F0005000000]


def refuse(*args: Any, **options: Any) -> Any:
    raise PermissionError("Permission denied")


def weights(size: int) -> nn.Module:
    return nn.Linear(size >> 12, 1 << 10, bias=False)


def test_for_which_models(settings: Path) -> None:
    large = weights(huge_pages.LEAST_WEIGHTS)
    assert isinstance(huge_pages_for(large), HugePages)
    assert huge_pages_for(weights(huge_pages.LEAST_WEIGHTS >> 1)) is None
    packed = nn.Sequential(weights(huge_pages.LEAST_WEIGHTS), nn.ReLU())
    packed[0] = PackedLinear(packed[0])
    assert isinstance(huge_pages_for(packed), HugePages)
    assert huge_pages_for(large.to("meta")) is None


@pytest.mark.parametrize("reason", ["switched off", "not there", "never", "not told", "hidden"])
def test_where_there_are_none(reason: str, settings: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if reason == "switched off":
        monkeypatch.setenv(huge_pages.VARIABLE, "0")
    if reason == "not there":
        (settings / "hpage_pmd_size").unlink()
    if reason == "not told":
        (settings / "enabled").unlink()
    if reason == "hidden":  # a folder that may not be entered; a privileged user would enter it
        monkeypatch.setattr(Path, "read_text", refuse)
    if reason == "never":
        (settings / "enabled").write_text("always madvise [never]\n")
    assert huge_pages_for(weights(huge_pages.LEAST_WEIGHTS)) is None


def rounds(monkeypatch: pytest.MonkeyPatch, count: int, seconds: float) -> list[int]:
    """The pages that are asked for in `count` rounds, if each of five takes so long."""
    asked: list[int] = []
    now = 0.0

    def madvise(address: Any, length: Any, advice: int) -> int:
        nonlocal now
        asked.append(address.value)
        now += seconds
        return 0

    pages = HugePages()
    pages._madvise = madvise  # type: ignore[assignment]
    monkeypatch.setattr(huge_pages, "_addresses", lambda smaps, page: iter([page * n for n in range(1, 6)]))
    monkeypatch.setattr(huge_pages.time, "perf_counter", lambda: now)
    for _ in range(count):
        pages.after_round()
    return [address // PAGE for address in asked]


@pytest.mark.parametrize(
    ("count", "seconds", "expected"),
    [
        (FIRST_ROUND - 1, 0.005, []),
        (FIRST_ROUND, 0.005, [1]),
        (FIRST_ROUND + 2, 0.005, [1, 2, 3]),
        (FIRST_ROUND + 9, 0.005, [1, 2, 3, 4, 5]),
        (FIRST_ROUND, 0.0, [1, 2, 3, 4, 5]),  # which are huge already
        (FIRST_ROUND + 9, 0.2, [1]),  # memory is short
    ],
)
def test_a_page_in_each_round(
    count: int, seconds: float, expected: list[int], settings: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert rounds(monkeypatch, count, seconds) == expected


def test_where_the_kernel_does_not_show_memory(settings: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huge_pages, "_SMAPS", settings / "smaps")
    pages = HugePages()
    for _ in range(FIRST_ROUND + 1):
        pages.after_round()


def test_names_of_files_in_the_kernels_list_may_be_anything(settings: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huge_pages, "_SMAPS", settings / "smaps")
    mapped = b"7f0000000000-7f0000001000 r--s 00000000 08:01 7                          /home/caf\xe9.bin\n"
    (settings / "smaps").write_bytes(mapped + SMAPS.encode())
    assert list(huge_pages._addresses(huge_pages._smaps(), PAGE)) == list(huge_pages._addresses(SMAPS, PAGE)) != []


def test_an_engine_asks_after_each_of_its_rounds(settings: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = itertools.count()
    monkeypatch.setattr(HugePages, "after_round", lambda self: next(calls))
    monkeypatch.setattr(huge_pages, "LEAST_WEIGHTS", 0)
    llm = engine.load(tiny(), drafter=None)
    llm.generate(random_prompts(2), engine.SamplingParams(max_new_tokens=6))
    assert next(calls) == 6


PROGRAM = """
import torch
from engine import huge_pages
huge_pages.FIRST_ROUND = 1
huge_pages.MOST_SECONDS = 60  # other tests may take the processor away

def huge():
    return sum(int(line.split()[1]) for line in open("/proc/self/smaps_rollup") if line.startswith("AnonHugePages"))

weights, before = torch.ones(32 << 20, dtype=torch.uint8), huge()
pages = huge_pages.HugePages()
for _ in range(500):
    pages.after_round()
print(huge() - before, int(weights.sum()))
"""


def test_the_kernel_does_it() -> None:
    release = Path("/proc/sys/kernel/osrelease")
    version = tuple(int(part) for part in release.read_text().split("-")[0].split(".")[:2]) if release.exists() else ()
    if version < (6, 1) or not huge_pages._SIZE.exists():
        pytest.skip("needs Linux 6.1 with transparent huge pages")
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    kilobytes, total = (int(word) for word in done.stdout.split())
    assert kilobytes > 16 << 10 and total == 32 << 20
