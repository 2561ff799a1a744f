"""Memory that the kernels use between their programs: counters of arrivals, and scratch.

Both are allocated once per thread, device and stream, for the largest call so far. Calls of one thread on one stream follow each
other. But launches of two threads on one stream may alternate, and calls on two streams overlap, so these share no memory. The
kernels leave every counter at 0, so nothing is cleared between calls on a GPU.

While a CUDA graph is captured, memory must be the graph's own:

- Scratch comes from the graph's pool.
- Counters come from a pool of zeros that was allocated before and is never handed out twice. `reserve_counters` allocates it;
  `warmup` calls that, and so must whoever captures many graphs, before each. Where the pool is used up, the graph clears its
  counters itself, with one more node.
"""

import threading

import torch
from torch import Tensor

RESERVED_COUNTERS = 1 << 18  # 1 MiB per device

_mine = threading.local()
_reserved: dict[torch.device, Tensor] = {}  # what is left of the newest pool
_taking = threading.Lock()  # held while taking from the pools, which all threads share
_pools: list[Tensor] = []  # all pools, kept alive: graphs know their counters by address alone


def workspace(device: torch.device, num_counters: int, num_floats: int) -> tuple[Tensor, Tensor]:
    """(counters int32, all 0; scratch float32), with at least the given numbers of elements."""
    if _capturing(device):
        zeros = _captured_counters(device, num_counters)
        return zeros, torch.empty(num_floats, dtype=torch.float32, device=device)
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    memory = stream_memory()
    counters, scratch = memory.pop((device, stream), (None, None))
    if counters is None or counters.numel() < num_counters:
        with torch.inference_mode(False):  # else no call outside of it could clear them
            counters = torch.zeros(num_counters, dtype=torch.int32, device=device)
    elif device.type != "cuda":
        counters.zero_()  # in the interpreter Ctrl-C may have ended the last launch between two of its programs
    if scratch is None or scratch.numel() < num_floats:
        scratch = None  # free the smaller one before the larger one is allocated
        scratch = torch.empty(num_floats, dtype=torch.float32, device=device)
    memory[device, stream] = counters, scratch
    return counters, scratch


def stream_memory() -> dict[tuple[torch.device, int], tuple[Tensor, Tensor]]:
    """This thread's counters and scratch, by device and stream; they are freed when the thread ends."""
    memory: dict[tuple[torch.device, int], tuple[Tensor, Tensor]] = vars(_mine).setdefault("memory", {})
    return memory


def _capturing(device: torch.device) -> bool:
    if device.type != "cuda":
        return False
    with torch.cuda.device(device):  # torch asks about the current device's stream
        return torch.cuda.is_current_stream_capturing()


def reserve_counters(device: torch.device) -> None:
    """Allocate a pool that captured graphs take their counters from, if less than a quarter of one is left."""
    if device.type != "cuda":
        return
    with _taking:
        if device not in _reserved or _reserved[device].numel() < RESERVED_COUNTERS // 4:
            _reserved[device] = torch.zeros(RESERVED_COUNTERS, dtype=torch.int32, device=device)
            _pools.append(_reserved[device])


def _captured_counters(device: torch.device, count: int) -> Tensor:
    with _taking:
        pool = _reserved.get(device)
        if pool is not None and pool.numel() >= _aligned(count):
            _reserved[device] = pool[_aligned(count) :]
            return pool[:count]
    return torch.zeros(count, dtype=torch.int32, device=device)


def _aligned(count: int) -> int:
    """`count` rounded up to 128 bytes: graphs share no 128 bytes, and the compiler sees the same alignment for all."""
    return (count + 31) // 32 * 32
