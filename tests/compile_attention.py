"""Compile the attention kernels ahead of time, as compile_kernels.py does the others, and say what the machine code uses.

    python tests/compile_attention.py cuda:80 hip:gfx942 [--dtype bfloat16 ...] [--whole | --serving]

Prints one JSON object per kernel and variant.
"""

import json
import re
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from typing import Any

import torch
from compile_kernels import command_line, pretending, resources, widest_load
from triton.backends.compiler import GPUTarget

from engine.kernels.attention import ragged_attention
from engine.kernels.cache import scatter_kv

BATCH, KV_HEADS, GROUP, CAPACITY = 2, 8, 4, 4096
WIDTHS = (1, 6, 16, 64)  # 4, 24, 64 and 256 query rows: programs of 16, 32 and 64, and four of 64
HEAD_DIMS = (16, 32, 64, 80, 96, 128, 192, 256)
Variant = tuple[str, Callable[[], object]]


def arguments(
    batch: int, width: int, head_dim: int, dtype: torch.dtype, capacity: int = CAPACITY, group: int = GROUP
) -> dict[str, Any]:
    """Of a call of ragged_attention, laid out as models and caches do; no memory is touched."""
    query = torch.empty(batch, width, KV_HEADS * group, head_dim, dtype=dtype).transpose(1, 2)
    keys = torch.empty(batch, KV_HEADS, capacity, head_dim, dtype=dtype)
    seq_lens = torch.empty(batch, dtype=torch.int64)
    return dict(query=query, keys=keys, values=torch.empty_like(keys), seq_lens=seq_lens)


def options(batch: int) -> dict[str, dict[str, Any]]:
    rows = torch.empty(batch, dtype=torch.int64)
    one = dict(
        window=dict(window=1024), softcap=dict(softcap=50.0), sinks=dict(sinks=torch.empty(KV_HEADS * GROUP)),
        slots=dict(slots=rows, num_valid=rows),
    )  # fmt: skip
    return {"plain": {}} | one | {"all": {key: value for each in one.values() for key, value in each.items()}}


def scatter(batch: int, width: int, head_dim: int, dtype: torch.dtype, **more: Any) -> Callable[[], object]:
    new = torch.empty(batch, width, KV_HEADS, head_dim, dtype=dtype).transpose(1, 2)
    cache = arguments(batch, width, head_dim, dtype)
    where = dict(keys=cache["keys"], values=cache["values"], seq_lens=cache["seq_lens"], num_valid=cache["seq_lens"])
    return partial(scatter_kv, **where, new_keys=new, new_values=new, **more)


def variants(dtypes: list[str], target: str, whole: bool) -> Iterator[Variant]:
    """(name, call). Without `whole` a sample, of which most is for cuda:90."""
    for dtype in dtypes:
        shapes = [(128, 6)]
        if whole:
            shapes = list(product(HEAD_DIMS, WIDTHS))
        elif (target, dtype) == ("cuda:90", "bfloat16"):
            shapes += [(128, 1), (128, 16), (128, 64), (64, 6), (256, 6)]
        for head_dim, width in shapes:
            label, call = f"{dtype}, D={head_dim}, W={width}", arguments(BATCH, width, head_dim, getattr(torch, dtype))
            usual = (head_dim, width) == (128, 6)
            for name, more in options(BATCH).items():
                alone = dtype != "float16" and (usual or (whole and (name == "plain" or head_dim == 128)))
                if name == "all" or (alone and (whole or (name == "plain" and target == "cuda:90"))):
                    yield f"{label}, {name}", partial(ragged_attention, **call, **more)
            if usual:
                yield f"{label}, G=7", partial(ragged_attention, **arguments(2, 6, 128, call["keys"].dtype, group=7))
            yield f"{label}, new", scatter(BATCH, width, head_dim, getattr(torch, dtype))


def serving() -> Iterator[Variant]:
    """Calls as they vary while one model is served with W up to 8: the first two warm up, the others add nothing."""
    dtype, head_dim = torch.bfloat16, 128
    for width in (1, 8):
        call = arguments(1, width, head_dim, dtype)
        yield "first", partial(ragged_attention, **call, num_valid=call["seq_lens"], slots=call["seq_lens"])
        yield "first", scatter(1, width, head_dim, dtype, slots=call["seq_lens"])
    for batch, width, capacity, kv_length in product((1, 2, 16, 17), (1, 2, 5, 8), (2048, 4096), (None, 1, 300, 2048)):
        call = arguments(batch, width, head_dim, dtype, capacity)
        rows = torch.empty(batch + 3, dtype=torch.int64)[1 : batch + 1]  # begins on 8 bytes, not on 16
        call |= dict(seq_lens=rows, num_valid=rows, slots=rows, kv_length=kv_length)
        yield f"B={batch} W={width} kv_length={kv_length}", partial(ragged_attention, **call)
        yield f"B={batch} W={width}", scatter(batch, width, head_dim, dtype, slots=rows)


def spills(kernel: Any, target: GPUTarget, known: dict[str, int]) -> int:
    """Registers or bytes that are kept in memory. AMD's compiler may reserve some and never use it, which is no spill."""
    if target.backend != "hip":
        return known["spills"]
    text = kernel.asm["amdgcn"]
    counted = re.search(r"\.vgpr_spill_count:\s+(\d+)", text)
    assert counted
    return int(counted[1]) + len(re.findall(r"^\s*scratch_(?:load|store)", text, re.MULTILINE))


def narrowest_copy(kernel: Any) -> int | None:
    """Bytes of the narrowest copy from global to shared memory that passes the registers by; None: there is none."""
    sizes = re.findall(
        r"cp\.async\.c[ag]\.shared\.global[\w.:]* \[[^\]]*\], \[[^\]]*\], (0x\w+|\d+)", kernel.asm.get("ptx", "")
    )
    return min((int(size, 0) for size in sizes), default=None)


def main() -> None:
    given = command_line("what is compiled while serving, one line each").parse_args()

    for text, target, compiled in pretending(given.targets):
        seen: set[str] = set()
        for variant, call in serving() if given.serving else variants(given.dtype, text, given.whole):
            compiled.clear()
            call()
            for name, kernel in compiled:
                if kernel.hash not in seen:
                    seen.add(kernel.hash)
                    used = resources(kernel, target)
                    used |= dict(spills=spills(kernel, target, used), widest_load=widest_load(kernel, target))
                    line = dict(
                        kernel=name, variant=variant, target=text, **used, narrowest_copy=narrowest_copy(kernel)
                    )
                    print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
