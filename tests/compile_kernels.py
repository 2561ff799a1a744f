"""Compile the kernels ahead of time, for a device that need not be there, and say what the machine code uses.

    python tests/compile_kernels.py cuda:80 hip:gfx942 [--dtype bfloat16 ...] [--whole | --brief | --serving]

Runs without TRITON_INTERPRET, which is why the tests start it as a process of its own. The real launchers are called, on
CPU tensors; only the launch is replaced by a compilation for a pretended device. So what is compiled is what would be
launched there, specialisations included. Prints one JSON object per kernel and variant.
"""

import argparse
import json
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from engine.kernels import ops
from engine.kernels.ops import METHODS
from engine.kernels.philox import DRAFT
from engine.kernels.row_stats import row_stats
from engine.kernels.sample import sample
from engine.kernels.verify import verify
from engine.kernels.warmup import warmup

VOCABS = {"even": 151_936, "odd": 50_257}  # rows that start on 16 bytes, and rows that do not
# Rules, with full drafts or one-hot ones. A sample of them, and the one that launches every kernel.
SAMPLE = (("rejection", False), ("block", True), ("coupled", False), ("typical", False))
BRIEF = SAMPLE[1:2]
PACKED = ("rejection", "block")  # rules of which the sample has packed rows
BATCH = 2
SERVED = ("rejection", "coupled")  # methods of the calls that vary while serving; all would take three times as long
UNALIGNED = 50_264  # sequences of some widths begin on 16 elements, those of others do not


class PretendedDevice:
    """As much of a driver as the JIT asks while it compiles."""

    def __init__(self, target: GPUTarget) -> None:
        self.target = target

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> str:
        return str(self.target)  # the JIT keeps one cache per device

    def get_current_stream(self, device: str) -> int:
        return 0


def parse_target(text: str) -> GPUTarget:
    backend, arch = text.split(":")
    return GPUTarget(backend, int(arch) if arch.isdigit() else arch, 64 if backend == "hip" else 32)


def variants(dtypes: list[str], whole: bool, brief: bool) -> Iterator[tuple[str, Callable[[], object]]]:
    """(name, call) for every kernel variant; without `whole` those of even rows, with a temperature, at K = 4 and of the rules in SAMPLE,
    and with `brief` those of them that have no filters and are not packed, of the rule in BRIEF."""
    rules = BRIEF if brief else SAMPLE
    where = dict(seed=torch.zeros(BATCH, dtype=torch.int64), position=torch.zeros(BATCH, dtype=torch.int64))
    heat = dict(temperature=torch.ones(BATCH))
    filters = dict(top_k=torch.zeros(BATCH, dtype=torch.int64), top_p=torch.ones(BATCH), min_p=torch.ones(BATCH))
    for dtype, rows, width in product(dtypes, VOCABS if whole else ["even"], (1, 5, 33) if whole else [5]):
        vocab_size = VOCABS[rows]
        target = torch.empty(BATCH, width, vocab_size, dtype=getattr(torch, dtype))
        words = dict(logit_bias=torch.empty(vocab_size), token_mask=torch.ones(vocab_size, dtype=torch.bool))
        options: dict[str, dict[str, Any]] = {"plain": heat} | ({} if brief else {"filtered": heat | filters})
        if whole:
            options |= {"no T": {}, "bias and mask": heat | words, "all": heat | filters | words}
        for option, more in options.items():
            label = f"{dtype}, {rows} rows, W={width}, {option}"
            yield label, partial(row_stats, target, **more)
            yield label, partial(sample, target, **more, **where)
            if whole:
                yield f"{label}, origin", partial(sample, target, **more, **where, origin=where["position"])
                yield f"{label}, logprobs", partial(sample, target, **more, **where, return_logprobs=True)
            drafts, draft = torch.zeros(BATCH, width - 1, dtype=torch.int64), target[:, 1:]
            for method, full in product(METHODS, (False, True)):
                if (full and method not in ("rejection", "block")) or not (whole or (method, full) in rules):
                    continue
                proposal = (drafts, draft, row_stats(draft, **more) if width > 1 else None) if full else (drafts,)
                call = partial(verify, target, *proposal, **more, **where, method=method)
                kind = f"{label}, {method}, {'full' if full else 'one-hot'}"
                yield kind, call
                if whole or (option == "plain" and not brief and method in PACKED):
                    begins = dict(cu_num_logits=width * torch.arange(BATCH + 1, dtype=torch.int32))
                    packed = target.flatten(0, 1), *proposal
                    yield f"{kind}, packed", partial(verify, *packed, **more, **where, **begins, method=method)
                if whole:
                    yield f"{kind}, logprobs", partial(call, return_logprobs=True)


def warm_up() -> None:
    """What a configuration would compile before it serves: full drafts, filters."""
    warmup(VOCABS["even"], 4, torch.bfloat16, "cpu", SERVED, VOCABS["even"], filters=True)
    warmup(UNALIGNED, 9, torch.bfloat16, "cpu", SERVED[:1], UNALIGNED)
    warmup(VOCABS["even"], 4, torch.bfloat16, "cpu", SERVED[:1], VOCABS["even"], packed=True)


def serving() -> Iterator[tuple[str, Callable[[], object]]]:
    """Calls as they vary while one model is served: batch, width, and where in a larger tensor its slots begin."""
    slots = product((1, 2, 16, 17), range(1, 11), (0, 1))
    for (batch, width, slot), vocab_size in product(slots, (VOCABS["even"], UNALIGNED)):
        if width > 5 and vocab_size == VOCABS["even"]:
            continue
        state = torch.zeros(3, 40, dtype=torch.int64)[:, slot : slot + batch]
        where = dict(seed=state[0], position=state[1])
        heat = torch.ones(40)[slot : slot + batch]
        target = torch.empty(batch, width, vocab_size, dtype=torch.bfloat16)
        proposed = torch.empty(batch, width - 1, vocab_size, dtype=torch.bfloat16)
        drafts = torch.zeros(batch, width - 1, dtype=torch.int64)
        aligned = vocab_size % 16 == 0
        for filtered in (False, True) if aligned else (False,):
            rows = dict(temperature=heat) | (dict(top_k=state[2], top_p=heat, min_p=heat) if filtered else {})
            yield "row_stats", partial(row_stats, target, **rows)
            yield "sample", partial(sample, target[:, 0], **rows, **where)
            yield "sample, drafting", partial(sample, target[:, 0], **rows, **where, origin=state[1], stream=DRAFT)
            for method, draft in product(SERVED if aligned else SERVED[:1], (None, proposed)):
                yield f"verify, {method}", partial(verify, target, drafts, draft, **rows, **where, method=method)
            if aligned and not filtered:
                begins = width * torch.arange(batch + 2, dtype=torch.int32)[slot : slot + batch + 1]
                packed = torch.empty(batch * width + 2, vocab_size, dtype=torch.bfloat16)
                for draft in (None, proposed):
                    yield (
                        "verify, packed",
                        partial(verify, packed, drafts, draft, **rows, **where, cu_num_logits=begins),
                    )


def print_what_serving_compiles() -> None:
    """How many kernels the warm-up compiles, and each that is compiled later. Triton says so before each compilation, which is then
    left out."""
    compiled: dict[tuple[str, str], str] = {}

    def note(key: str, fn: Any, **more: object) -> bool:
        compiled.setdefault((fn.name, key), variant)
        return True

    triton.knobs.runtime.jit_cache_hook = note
    variant = "warm-up"
    warm_up()
    print(json.dumps(dict(warmed_up=len(compiled))))
    for variant, call in serving():  # noqa: B007  # which `note` reads
        call()
    for (name, _), variant in compiled.items():
        if variant != "warm-up":
            print(json.dumps(dict(kernel=name, variant=variant)))


def resources(kernel: object, target: GPUTarget) -> dict[str, int]:
    """Registers, shared bytes and spills of a compiled kernel; `spills` counts registers or bytes of local memory.

    On AMD scalar registers that run out are kept in lanes of vector registers, which costs no memory: counted apart.
    """
    shared = kernel.metadata.shared
    if target.backend == "hip":
        text = kernel.asm["amdgcn"]
        number = {
            k: int(re.search(rf"\.{k}:\s+(\d+)", text)[1])
            for k in ("vgpr_count", "vgpr_spill_count", "sgpr_spill_count", "private_segment_fixed_size")
        }
        spills = number["vgpr_spill_count"] + number["private_segment_fixed_size"]
        scalars = number["sgpr_spill_count"]
        return dict(registers=number["vgpr_count"], shared=shared, spills=spills, scalars_in_lanes=scalars)
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        text = subprocess.run(
            [tool, "--dump-resource-usage", file.name], check=True, capture_output=True, text=True
        ).stdout
    number = {k: int(re.search(rf"\b{k}:(\d+)", text)[1]) for k in ("REG", "STACK", "LOCAL")}
    spills = number["STACK"] + number["LOCAL"]
    return dict(registers=number["REG"], shared=shared, spills=spills, scalars_in_lanes=0)


def widest_load(kernel: object, target: GPUTarget) -> int:
    """Bytes of the widest load from global memory."""
    if target.backend == "hip":
        words = re.findall(r"(?:global|buffer)_load_(dword(?:x\d)?|b\d+|\w*short\w*|\w*byte\w*)", kernel.asm["amdgcn"])
        size = {"dword": 4, "dwordx2": 8, "dwordx3": 12, "dwordx4": 16, "b32": 4, "b64": 8, "b128": 16}
        return max(size.get(word, 2) for word in words)
    loads = re.findall(r"ld\.global[\w.:]*?(?:\.v(\d))?\.b(\d+)", kernel.asm["ptx"])
    return max(int(count or 1) * int(bits) // 8 for count, bits in loads)


def pretending(targets: list[str]) -> Iterator[tuple[str, GPUTarget, list[tuple[str, Any]]]]:
    """Each target in turn, and a list to which the kernels that calls would launch are added, compiled for it, with their names."""
    compiled: list[tuple[str, Any]] = []

    def compile_only(self: JITFunction, grid: object) -> Callable[..., None]:
        return lambda **kwargs: compiled.append((self.__name__, self.warmup(grid=grid, **kwargs)))

    JITFunction.__getitem__ = compile_only
    for text in targets:
        target = parse_target(text)
        driver.set_active(PretendedDevice(target))
        torch.version.hip = "pretended" if target.backend == "hip" else None
        yield text, target, compiled


def command_line(serving: str) -> argparse.ArgumentParser:
    """What these programs take."""
    parser = argparse.ArgumentParser()
    parser.add_argument("targets", nargs="+")
    parser.add_argument("--dtype", nargs="+", default=["float32", "bfloat16", "float16"])
    parser.add_argument("--whole", action="store_true", help="every variant")
    parser.add_argument("--serving", action="store_true", help=serving)
    return parser


def main() -> None:
    parser = command_line("what is compiled after a warm-up, one line each")
    parser.add_argument("--brief", action="store_true", help="without filters, not packed, of one rule")
    arguments = parser.parse_args()

    ops.check_kernels = lambda device: None  # tensors of the pretended device are the CPU's
    for text, target, compiled in pretending(arguments.targets):
        if arguments.serving:
            print_what_serving_compiles()
            continue
        seen: set[str] = set()
        for variant, call in variants(arguments.dtype, arguments.whole, arguments.brief):
            compiled.clear()
            call()
            for name, kernel in compiled:
                if kernel.hash not in seen:
                    seen.add(kernel.hash)
                    line = dict(kernel=name, variant=variant, target=text, **resources(kernel, target))
                    print(json.dumps(line | dict(widest_load=widest_load(kernel, target))), flush=True)


if __name__ == "__main__":
    main()
