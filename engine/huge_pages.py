"""The process's memory in huge pages, for a CPU under Linux.

Decoding reads all weights for each token. In pages of 4 KiB the processor looks up another page for each 2,048
weights in bfloat16, on a virtual machine through the page tables of both. Pages of 2 MiB take a 512th of that. Where
/sys/kernel/mm/transparent_hugepage/enabled says "madvise", as Debian and Ubuntu have it, malloc's memory, in which
weights lie, gets such pages on request only: MADV_COLLAPSE (Linux 6.1) copies what is there.
"""

import ctypes
import logging
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path

from torch import nn

from .packing import PackedLinear

logger = logging.getLogger(__name__)

VARIABLE = "ENGINE_HUGE_PAGES"  # 0: never
FIRST_ROUND = 128  # from which on memory is copied: many a process answers one prompt and ends
LEAST_WEIGHTS = 32 << 20  # bytes; smaller models stay in the processor's caches
LEAST_RESIDENT = 0.9  # of a mapping: what has no memory yet would get it
MOST_SECONDS = 0.1  # for a page; where it takes longer, memory is short or in pieces
_LEAST_SECONDS = 0.001  # less than what a page takes that is copied
_MADV_COLLAPSE = 25
_ENABLED, _SIZE = (Path(f"/sys/kernel/mm/transparent_hugepage/{name}") for name in ("enabled", "hpage_pmd_size"))
_SMAPS = Path("/proc/self/smaps")
_MAPPING = re.compile(r"([0-9a-f]+)-([0-9a-f]+) rw.p \S+ \S+ 0 *(|\[heap\]|\[anon:.*\])")


class HugePages:
    """Has all memory of the process put into huge pages, a page in each round."""

    def __init__(self) -> None:
        self._round = 0
        self._left: Iterator[int] = iter(())  # addresses
        self._page = int(_SIZE.read_text())  # bytes
        self._madvise = ctypes.CDLL(None).madvise

    def after_round(self) -> None:
        """Have the next page copied that is not huge yet, 4 to 7 ms of work; nothing if there is none, or it is too early."""
        self._round += 1
        if self._round == FIRST_ROUND:
            self._left = _addresses(_smaps(), self._page)
        begin = time.perf_counter()
        for address in self._left:
            # The kernel refuses where that cannot be, or nothing is there any more.
            self._madvise(ctypes.c_void_p(address), ctypes.c_size_t(self._page), _MADV_COLLAPSE)
            seconds = time.perf_counter() - begin
            if seconds > MOST_SECONDS:
                logger.info("no further huge pages are asked for: one took %.1f s", seconds)
                self._left = iter(())
            if seconds > _LEAST_SECONDS:
                break


def huge_pages_for(model: nn.Module) -> HugePages | None:
    """None: for a model on another device, a small one, or where there are no such pages, or the system does not tell."""
    packed = [module for module in model.modules() if isinstance(module, PackedLinear)]  # these have no parameters
    size = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()) if tensor.device.type == "cpu")
    size += sum(module.nbytes for module in packed if module.product.device.type == "cpu")
    if size < LEAST_WEIGHTS or os.environ.get(VARIABLE) == "0":
        return None
    try:
        return None if "[never]" in _ENABLED.read_text() else HugePages()
    except OSError:  # there is no such file, or it may not be read
        return None


def _smaps() -> str:
    """The kernel's list of the process's memory; empty where it is not shown."""
    try:
        return _SMAPS.read_text(encoding="ascii", errors="replace")  # it has names of files, which may be anything
    except OSError:
        return ""


def _addresses(smaps: str, page: int) -> Iterator[int]:
    """Where huge pages may begin in memory that is the process's own, and there already."""
    mapping: re.Match[str] | None = None
    for line in smaps.splitlines():
        if found := _MAPPING.fullmatch(line):
            mapping = found
        elif mapping is not None and line.startswith("Rss:"):
            begin, end = int(mapping[1], 16), int(mapping[2], 16)
            if 1024 * int(line.split()[1]) >= LEAST_RESIDENT * (end - begin):
                yield from range(-(-begin // page) * page, end - page + 1, page)
            mapping = None
