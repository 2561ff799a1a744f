"""A pretended GPU that runs translated PTX (ptx.py) on CPU tensors, thread block by thread block, and watches its memory.

It reports what a real one answers with silent damage:

- **Bounds**: an access outside the storages that the kernel was given, or not on a multiple of its size.
- **Races within a block**: two threads touch a word, one of them writes something new, and no barrier lies between. Between threads
  of one warp, the warp's own will do.
- **Races between blocks**: a block reads or overwrites what another wrote without an acquire, behind which a barrier, of an
  atomic that the other released, with a barrier between the write and the release.
- **Divergence**: a branch that some threads of a block take and others do not.

Blocks run one after the other in an order that the caller chooses; the result may not depend on it. Races are found by
what orders two accesses, not by what happened to go wrong. Of the reads of a word the last one is remembered.
"""

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from ptx import TYPES, WARP, Array, Program
from torch import Tensor

MANY = 0xFFF  # in place of a thread: several
ATOMIC = 0xFFE  # an atomic's
OF_A_WARP = 0x800  # and the number of a warp: several threads of it


class KernelFault(Exception):
    """What a kernel must not do."""


@dataclass
class Storage:
    """Memory from `start` on, and who touched each of its words last: program << 40 | epoch << 12 | thread, or -1."""

    name: str
    start: int
    data: Array  # uint8
    word: int  # bytes
    written: Array = field(init=False)
    was_read: Array = field(init=False)

    def __post_init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        words = -(-self.data.size // self.word)
        self.written, self.was_read = np.full(words, -1, np.int64), np.full(words, -1, np.int64)

    @property
    def end(self) -> int:
        return self.start + self.data.size


@dataclass
class Counts:
    """What a launch did."""

    opcodes: Counter[str] = field(default_factory=Counter)  # instructions of warps
    loaded: Counter[str] = field(default_factory=Counter)  # bytes of each tensor, once a warp and instruction


class Machine:
    """One launch: its memory, and the block that is running."""

    def __init__(self, threads: int, blocks: int, shared: int, storages: Iterable[Storage]) -> None:
        self.thread = np.arange(threads)
        self.storages = sorted(storages, key=lambda storage: storage.start)
        self.shared_bytes = shared
        self.known = np.zeros((blocks, blocks), np.int64)  # [block, other]: what it wrote before this epoch is known
        self.clocks: dict[int, Array] = {}  # of atomics' addresses: what whoever acquires will know
        self.counts = Counts()

    def start(self, block: int) -> None:
        self.block, self.epoch = block, 0
        self.since = 0  # the epoch that the last barrier of the whole block began
        self.pending: Array | None = None
        self.shared = Storage("shared memory", 0, np.full(self.shared_bytes, 0xA5, np.uint8), 1)

    def barrier(self, of_warps: bool) -> None:
        self.epoch += 1
        if of_warps:
            return
        self.since = self.epoch
        if self.pending is not None:
            np.maximum(self.known[self.block], self.pending, out=self.known[self.block])
            self.pending = None

    def agreed(self, predicate: Array, line: int) -> bool:
        taken = bool(predicate[0])
        if not (predicate == taken).all():
            raise KernelFault(f"line {line}: threads of a block branch apart")
        return taken

    def load(
        self, shared: bool, address: Array, mask: Array | None, dtype: np.dtype[Any], count: int, line: int
    ) -> list[Array]:
        """`count` neighbouring values for each thread of the mask; 0 for the others."""
        thread, address = self._active(address, mask)
        values = np.zeros((count, self.thread.size), dtype)
        for storage, at, where in self._places(shared, address, dtype.itemsize * count, line):
            first = at // dtype.itemsize
            cells = storage.data[: storage.data.size // dtype.itemsize * dtype.itemsize].view(dtype)
            for i in range(count):
                values[i, thread[where]] = cells[first + i]
            self._note_read(storage, at, dtype.itemsize * count, thread[where], line)
            if not shared:
                asked = np.unique(thread[where] // WARP << 48 | at)
                self.counts.loaded[storage.name] += asked.size * dtype.itemsize * count
        return list(values)

    def store(self, shared: bool, address: Array, mask: Array | None, values: tuple[Array, ...], line: int) -> None:
        thread, address = self._active(address, mask)
        dtype, count = values[0].dtype, len(values)
        for storage, at, where in self._places(shared, address, dtype.itemsize * count, line):
            cells = storage.data[: storage.data.size // dtype.itemsize * dtype.itemsize].view(dtype)
            place = (at // dtype.itemsize)[:, None] + np.arange(count)
            new = np.stack([self._of_all(value)[thread[where]] for value in values], axis=1)
            changes = cells[place].view(f"u{dtype.itemsize}") != new.view(f"u{dtype.itemsize}")
            self._note_write(storage, at, dtype.itemsize * count, thread[where], changes.any(axis=1), line)
            cells[place] = new
            if (cells[place].view(f"u{dtype.itemsize}") != new.view(f"u{dtype.itemsize}")).any():
                raise KernelFault(f"line {line}: threads store different values to one place of {storage.name}")

    def atomic(self, address: Array, value: Array, mask: Array | None, how: str, order: str, line: int) -> Array:
        thread, address = self._active(address, mask)
        before = np.zeros(self.thread.size, value.dtype)
        functions: dict[str, Any] = {"add": np.add, "max": np.maximum, "min": np.minimum, "exch": lambda old, new: new}
        for storage, at, where in self._places(False, address, value.dtype.itemsize, line):
            cells = storage.data[: storage.data.size // value.dtype.itemsize * value.dtype.itemsize].view(value.dtype)
            for one, lane in zip(at, thread[where], strict=True):  # one after the other, as atomics are
                cell, word = one // value.dtype.itemsize, one // storage.word
                if storage.written[word] & 0xFFF != ATOMIC:
                    self._check_others(storage, storage.written[[word]], "store to", line)
                before[lane] = cells[cell]
                cells[cell] = functions[how](cells[cell], value[lane])
                storage.written[word] = self._stamp(ATOMIC)
                self._synchronise(storage.start + int(one), order)
        return before

    def load_matrix(self, address: Array, count: int, transposed: bool, line: int) -> list[Array]:
        """ldmatrix: of each warp `count` matrices of 8 x 8 16-bit values, whose rows' addresses its lanes have; a thread gets two
        neighbours of each."""
        parts = [
            [self.load(True, place, None, TYPES["u16"], 1, line)[0].astype(np.uint32) for place in pair]
            for pair in self._matrix_places(address, count, transposed)
        ]
        return [low | high << 16 for low, high in parts]

    def store_matrix(self, address: Array, values: tuple[Array, ...], transposed: bool, line: int) -> None:
        """stmatrix, which is the inverse."""
        for pair, value in zip(self._matrix_places(address, len(values), transposed), values, strict=True):
            for place, half in zip(pair, (value, value >> 16), strict=True):
                self.store(True, place, None, (half.astype(np.uint16),), line)

    def _matrix_places(self, address: Array, count: int, transposed: bool) -> Iterable[tuple[Array, Array]]:
        """Where the two values lie that a thread has of each matrix."""
        lane, warp = self.thread % WARP, self.thread // WARP
        for matrix in range(count):
            rows = self._of_all(address).reshape(-1, WARP)[:, 8 * matrix : 8 * matrix + 8]
            pair = []
            for i in range(2):
                row, column = lane // 4, 2 * (lane % 4) + i
                if transposed:
                    row, column = column, row
                pair.append(rows[warp, row] + (2 * column).astype(address.dtype))
            yield pair[0], pair[1]

    def _of_all(self, value: Array) -> Array:
        """For each thread, what may be the same for all."""
        return value if value.shape == self.thread.shape else np.broadcast_to(value, self.thread.shape)

    def _active(self, address: Array, mask: Array | None) -> tuple[Array, Array]:
        address = self._of_all(address).astype(np.int64)
        return (self.thread, address) if mask is None else (self.thread[mask], address[mask])

    def _places(self, shared: bool, address: Array, size: int, line: int) -> Iterable[tuple[Storage, Array, Array]]:
        """Storages that are touched: with offsets, and which of the addresses they belong to."""
        if (address % size).any():
            raise KernelFault(f"line {line}: an access of {size} bytes is not on a multiple of them")
        left = np.arange(address.size)
        for storage in [self.shared] if shared else self.storages:
            if not left.size:
                return
            here = (address[left] >= storage.start) & (address[left] + size <= storage.end)
            if here.all():
                yield storage, address[left] - storage.start, left
                return
            if here.any():
                yield storage, address[left[here]] - storage.start, left[here]
                left = left[~here]
        if left.size:
            raise KernelFault(
                f"line {line}: {left.size} threads access {size} bytes at {address[left[0]]:#x}, which is nobody's"
            )

    def _stamp(self, thread: Any) -> Any:
        return self.block << 40 | self.epoch << 12 | thread

    def _words(self, storage: Storage, at: Array, size: int) -> Array:
        """[accesses, words of each]"""
        if storage.word > size:
            return at[:, None] // storage.word
        return at[:, None] // storage.word + np.arange(size // storage.word)

    def _note_read(self, storage: Storage, at: Array, size: int, thread: Array, line: int) -> None:
        words = self._words(storage, at, size)
        self._check_written(storage, words, thread, line)
        self._check_others(storage, storage.written[words], "store to", line)
        stamp = np.broadcast_to(self._stamp(thread)[:, None], words.shape)
        before = storage.was_read[words]
        mine = self._since_barrier(before) & (before & 0xFFF != stamp & 0xFFF)
        storage.was_read[words] = np.where(mine, self._several(before, stamp), stamp)
        for apart in (False, True):  # if several threads read a word now: first any, then such of different warps
            now = storage.was_read[words]
            if (now == stamp).all():
                return
            clash = _warp_of(now) != _warp_of(stamp) if apart else now & 0xFFF != stamp & 0xFFF
            storage.was_read[words[clash]] = self._several(now, stamp)[clash]

    def _note_write(self, storage: Storage, at: Array, size: int, thread: Array, changes: Array, line: int) -> None:
        if storage.word > size:
            raise KernelFault(f"line {line}: stores of {size} bytes into {storage.name} are not watched")
        words = self._words(storage, at, size)
        news, author = words[changes], thread[changes]
        self._check_written(storage, news, author, line)
        self._check_others(storage, storage.written[words], "store to", line)
        self._check_others(storage, storage.was_read[news], "load from", line)
        if self._unordered(storage.was_read[news], author).any():
            raise KernelFault(f"line {line}: a thread overwrites what another may not have read yet, in {storage.name}")
        storage.written[words] = np.broadcast_to(self._stamp(thread)[:, None], words.shape)

    def _check_written(self, storage: Storage, words: Array, thread: Array, line: int) -> None:
        """Nothing that another thread of this block wrote since the last barrier."""
        if self._unordered(storage.written[words], thread).any():
            raise KernelFault(f"line {line}: no barrier since another thread wrote to {storage.name}")

    def _since_barrier(self, touched: Array) -> Array:
        """Whether words were touched by this block, and no barrier of the whole block lies between."""
        return (touched >= self.block << 40 | self.since << 12) & (touched < self.block + 1 << 40)

    def _unordered(self, touched: Array, thread: Array) -> Array:
        """Whether another thread of this block touched words [accesses, words of each], with no barrier between it and `thread`."""
        other = self._since_barrier(touched)
        if other.any():
            other &= touched & 0xFFF != thread[:, None]
            other &= (_warp_of(touched) != thread[:, None] // WARP) | (touched >> 12 & 0xFFFFFFF >= self.epoch)
        return other

    def _several(self, touched: Array, stamp: Array) -> Array:
        """The stamp of both who touched words before and who does now."""
        warp = _warp_of(stamp)
        return np.where(_warp_of(touched) == warp, self._stamp(OF_A_WARP + warp), self._stamp(MANY))

    def _check_others(self, storage: Storage, touched: Array, what: str, line: int) -> None:
        """Whatever another block did to the words `touched` is known to have happened before."""
        if storage is self.shared:
            return
        others = (touched >= 0) & (touched >> 40 != self.block)
        if others.any():
            block, epoch = touched[others] >> 40, touched[others] >> 12 & 0xFFFFFFF
            if (self.known[self.block, block] <= epoch).any():
                raise KernelFault(f"line {line}: nothing orders this behind another block's {what} {storage.name}")

    def _synchronise(self, address: int, order: str) -> None:
        clock = self.clocks.setdefault(address, np.zeros(self.known.shape[0], np.int64))
        if order in ("acq_rel", "acquire"):
            self.pending = clock.copy() if self.pending is None else np.maximum(self.pending, clock)
        if order in ("acq_rel", "release"):
            np.maximum(clock, self.known[self.block], out=clock)
            clock[self.block] = max(clock[self.block], self.since)


def _warp_of(stamp: Array) -> Array:
    """The warp of a thread, or of several that are of one; else -1."""
    thread = stamp & 0xFFF
    return np.where(thread < OF_A_WARP, thread // WARP, np.where(thread < OF_A_WARP + WARP, thread - OF_A_WARP, -1))


def storage_of(name: str, tensor: Tensor) -> Storage:
    """The whole storage of a CPU tensor, shared with it."""
    whole = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
    return Storage(name, whole.data_ptr(), whole.numpy(), 4)


def launch(
    program: Program,
    arguments: list[tuple[str, Any]],  # (name, CPU tensor or number), in the order of the kernel's parameters
    grid: tuple[int, ...],
    shared: int,
    arrange: Callable[[int], Iterable[int]] = range,  # the order in which so many blocks run
) -> Counts:
    """Run a kernel on CPU tensors; raises KernelFault."""
    x, y, z = (*grid, 1, 1)[:3]
    storages = {
        value.untyped_storage().data_ptr(): storage_of(name, value)
        for name, value in arguments
        if torch.is_tensor(value)
    }
    numbers = [value.data_ptr() if torch.is_tensor(value) else value for _, value in arguments]
    assert len(numbers) <= len(program.parameters), "more arguments than parameters"
    numbers += [0] * (len(program.parameters) - len(numbers))  # Triton's own scratch memory, of which none is used

    def parameter(number: int, dtype: np.dtype[Any]) -> Array:
        value = numbers[number]
        if isinstance(value, float):
            return np.full(program.threads, value, np.float32).view(dtype)
        size = 256**dtype.itemsize
        return np.full(program.threads, int(value) % size, f"u{dtype.itemsize}").view(dtype)

    machine = Machine(program.threads, x * y * z, shared, storages.values())
    special = {
        "%tid.x": np.arange(program.threads, dtype=np.uint32),
        "%laneid": np.arange(program.threads, dtype=np.uint32) % WARP,
    }
    for axis, size in zip("xyz", (x, y, z), strict=True):
        special[f"%nctaid.{axis}"] = np.full(program.threads, size, np.uint32)
    with np.errstate(all="ignore"):
        for block in arrange(x * y * z):
            for axis, index in zip("xyz", (block % x, block // x % y, block // (x * y)), strict=True):
                special[f"%ctaid.{axis}"] = np.full(program.threads, index, np.uint32)
            machine.start(block)
            for visits, opcodes in zip(program.run(machine, parameter, special), program.opcodes, strict=True):
                for opcode, count in opcodes.items():
                    machine.counts.opcodes[opcode] += visits * count * (program.threads // WARP)
    return machine.counts
