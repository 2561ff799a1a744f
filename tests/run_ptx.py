"""Run the kernels as Triton compiles them for an NVIDIA GPU, without one: their PTX, on a machine that watches (ptx_machine.py).

    python tests/run_ptx.py cuda:90 [--whole | --large] [--unordered | --without-barriers]

Runs without TRITON_INTERPRET, which is why the tests start it as a process of its own. The real launchers are called, on CPU
tensors; every launch is gone through twice, with its blocks in two orders, and must come to the same bits. What comes out is
compared with the torch twins. Prints one JSON object per launch, and ends with a traceback at the first fault.
"""

import argparse
import json
import re
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import torch
from compile_kernels import PretendedDevice, parse_target
from kernel_cases import (
    DTYPES,
    OPTIONS,
    TILED,
    check_row_stats,
    check_sample,
    check_verify,
    random_logits,
    random_options,
    random_rows,
    verify_case,
    word_logits,
)
from ptx import Program, translate
from ptx_machine import Counts, launch
from triton.backends.nvidia.compiler import CUDABackend
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from engine.kernels import reference
from engine.kernels.ops import METHODS

BATCH, NUM_DRAFTS = 3, 2
LARGE = 151_936
OUTPUTS = ("threshold", "lse", "argmax", "tokens", "num_accepted", "status", "logprobs")
Change = Callable[[str], str]  # of PTX, before it runs


def cases(whole: bool) -> Iterator[tuple[str, Callable[[], object]]]:
    """(name, call that compares with the twin): without `whole` a sample of them, in bf16."""
    full = ("rejection", "block")
    chosen = {("plain", "rejection", True, False), ("filters", "rejection", False, False), ("filters", "block", True, False),
              ("plain", "block", False, True), ("filters", "coupled", False, False)}  # fmt: skip
    for dtype, vocab_size in product(DTYPES, (1000, TILED)) if whole else ((torch.bfloat16, TILED),):
        generator = torch.Generator().manual_seed(vocab_size)
        for option in OPTIONS:
            label = f"{dtype}, V={vocab_size}, {option}"
            logits = random_logits(generator, BATCH, 2, vocab_size, dtype=dtype)
            rows = dict(temperature=torch.tensor([1.0, 0.0, 0.7])) | random_options(
                option, generator, BATCH, vocab_size
            )
            where = random_rows(BATCH, generator)
            if whole or option == "all":
                yield f"{label}, row_stats", partial(check_row_stats, logits, **rows)
            if whole or option == "plain":
                yield f"{label}, sample", partial(check_sample, logits[:, 0], **rows, **where, return_logprobs=True)
            for method, draft, logprobs in product(METHODS, (False, True), (False, True)):
                if (draft and method not in full) or not (whole or (option, method, draft, logprobs) in chosen):
                    continue
                options = random_options(option, generator, BATCH, vocab_size)
                case = verify_case(
                    generator, BATCH, NUM_DRAFTS, vocab_size, vocab_size if draft else None, dtype, options
                )
                name = f"{label}, {method}, {'full' if draft else 'one-hot'}{', logprobs' if logprobs else ''}"
                yield name, partial(check_verify, case, method=method, return_logprobs=logprobs)


def large_cases() -> Iterator[tuple[str, Callable[[], object]]]:
    """One sequence of a large model, with logits like those of words, for the number of instructions."""
    generator = torch.Generator().manual_seed(1)
    target, in_any_order = (
        torch.stack([word_logits(generator, LARGE, places) for _ in range(5)])[None].bfloat16()
        for places in ("rather first", "anywhere")
    )
    draft = target[:, :4] + 0.3 * torch.randn(1, 4, LARGE, generator=generator).bfloat16()
    case = dict(target_logits=target, draft_tokens=draft.argmax(dim=-1), temperature=torch.tensor([0.7]))
    case |= random_rows(1, generator)
    full = dict(draft_logits=draft, draft_stats=reference.row_stats(draft, case["temperature"]))
    top_p = dict(top_p=torch.tensor([0.9]))
    for method in METHODS:
        yield f"{method}, one-hot", partial(check_verify, case, method=method)
    for method in ("rejection", "block"):
        yield f"{method}, full", partial(check_verify, case | full, method=method)
    for method in ("rejection", "coupled"):
        yield f"{method}, one-hot, top-p", partial(check_verify, case | top_p, method=method)
    case |= dict(target_logits=in_any_order)
    for method in ("rejection", "coupled"):
        yield f"{method}, one-hot, any order", partial(check_verify, case, method=method)
        yield f"{method}, one-hot, top-p, any order", partial(check_verify, case | top_p, method=method)


def arguments_of(kernel: Any, values: dict[str, Any]) -> list[tuple[str, Any]]:
    """What a compiled kernel takes at run time, in the order of its parameters."""

    def flat(name: str, kind: Any, value: Any) -> Iterator[tuple[str, Any]]:
        if isinstance(kind, tuple):
            for inner, part in zip(kind, value, strict=True):
                yield from flat(name, inner, part)
        elif kind != "constexpr":
            yield name, value

    return [pair for name, kind in kernel.src.signature.items() for pair in flat(name, kind, values.get(name))]


def launch_in_two_orders(
    program: Program, arguments: list[tuple[str, Any]], grid: tuple[int, ...], shared: int
) -> Counts:
    """From the same memory, with the blocks from the last to the first and shuffled: the outputs must be the same bits."""
    storages = {
        value.untyped_storage().data_ptr(): value.untyped_storage() for _, value in arguments if torch.is_tensor(value)
    }
    before = [storage.clone() for storage in storages.values()]
    results = []
    for arrange in (lambda count: range(count)[::-1], np.random.default_rng(0).permutation):
        for storage, content in zip(storages.values(), before, strict=True):
            storage.copy_(content)
        counts = launch(program, arguments, grid, shared, arrange)
        results.append({name: value.clone() for name, value in arguments if name in OUTPUTS})
    for name, value in results[0].items():
        assert value.numpy().tobytes() == results[1][name].numpy().tobytes(), (
            f"{name} depends on the order of the blocks"
        )
    return counts


def without_barriers(ptx: str) -> str:
    return re.sub(r"\bbar\.sync\s+0;", "", ptx)


def unordered(ptx: str) -> str:
    return ptx.replace(".acq_rel.", ".relaxed.")


def pretend(target: str, change: Change, report: Callable[[str, Counts], object]) -> None:
    """From here on, launches on CPU tensors are compiled for `target` and run here."""
    programs: dict[str, Program] = {}

    def start(self: JITFunction, grid: Any) -> Callable[..., None]:
        def run(**values: Any) -> None:
            kernel = self.warmup(grid=grid, **values)
            if kernel.hash not in programs:
                programs[kernel.hash] = translate(change(kernel.asm["ptx"]))
            shape = grid(values) if callable(grid) else grid
            arguments = arguments_of(kernel, values)
            report(self.__name__, launch_in_two_orders(programs[kernel.hash], arguments, shape, kernel.metadata.shared))

        return run

    JITFunction.__getitem__ = start
    CUDABackend.make_cubin = lambda self, source, *rest: b""  # nobody asks for machine code
    driver.set_active(PretendedDevice(parse_target(target)))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("target")
    parser.add_argument("--whole", action="store_true", help="every variant")
    parser.add_argument("--large", action="store_true", help="one sequence, K = 4, V = 151,936")
    parser.add_argument("--without-barriers", action="store_true", help="a control: must fail")
    parser.add_argument("--unordered", action="store_true", help="a control: the atomics order nothing; must fail")
    options = parser.parse_args()
    change = without_barriers if options.without_barriers else unordered if options.unordered else str

    def report(kernel: str, counts: Counts) -> None:
        line = dict(kernel=kernel, variant=label, target=options.target)
        line |= dict(instructions=counts.opcodes.total(), loaded=counts.loaded)
        print(json.dumps(line), flush=True)

    pretend(options.target, change, report)
    for label, call in large_cases() if options.large else cases(options.whole):  # noqa: B007 (report reads it)
        call()


if __name__ == "__main__":
    main()
