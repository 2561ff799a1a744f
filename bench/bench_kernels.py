"""Microbenchmarks of the kernels and of peers: `pytest bench --benchmark-only`.

A part of the matrix runs, which takes a few minutes; `--full` runs all, for hours, of which `-k` chooses. On a CPU the loops that
Numba compiles are timed (torch's where they do not serve). Every result is checked before it is timed. Before pytest-benchmark's
table there is one of medians with p20 and p80 (bench/conftest.py). What neither can hold is in the JSON that `--benchmark-json`
writes, under extra_info: device and versions, and, measured in turns within one run, eager calls, CUDA graph replays, a plain copy
of as many bytes (see bench/timing.py), or ours beside a peer.
"""

import itertools
from collections.abc import Callable
from dataclasses import asdict

import pytest

from bench.cases import Case, all_cases, check_ours, make_inputs, our_call
from bench.conftest import DEVICE
from bench.measure import contest, ratio_to
from bench.peers import PEERS, Peer

BATCHES, DRAFTS, VOCAB_SIZES = (1, 8, 64, 256), (1, 4, 8), (32000, 49152, 128256, 151936)
REDUCED = {"cpu": ((1, 8), (4,), (49152, 151936)), "cuda": ((1, 64), (4,), (49152, 151936))}
REDUCED_NAMES = (
    "one-hot", "full", "block", "one-hot block", "coupled", "typical", "greedy", "sample", "row_stats",
    "full, top-k 50", "full, top-p 0.9", "full, min-p 0.05", "sample, top-p 0.9",
)  # fmt: skip


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """The matrix, by device and option; peers meet ours on "full"."""
    whole = metafunc.config.getoption("--full", default=False)
    shapes = list(itertools.product(*((BATCHES, DRAFTS, VOCAB_SIZES) if whole else REDUCED[DEVICE])))
    of_shape = {f"B{b}-K{k}-V{v}": all_cases(b, k, v) for b, k, v in shapes}
    if "peer" in metafunc.fixturenames:
        full = [pytest.param(cases["full"], id=shape) for shape, cases in of_shape.items()]
        metafunc.parametrize("case", full)
        metafunc.parametrize("peer", PEERS, ids=lambda peer: peer.name.replace(" ", "-"))
    else:
        names = {name: None for cases in of_shape.values() for name in cases if whole or name in REDUCED_NAMES}
        chosen = [(name, shape) for name in names for shape in of_shape]
        named = [pytest.param(n, of_shape[s][n], id=f"{n.replace(', ', '-').replace(' ', '')}-{s}") for n, s in chosen]
        metafunc.parametrize("name, case", named)


@pytest.mark.benchmark(max_time=0.5, min_rounds=5)
def test_ours(timed: Callable[..., None], name: str, case: Case) -> None:
    inputs = make_inputs(case, DEVICE)
    call = our_call(case, inputs)
    check_ours(case, inputs, call())
    records = contest({name: case}, device="cuda", repeats=30, seconds=2) if DEVICE == "cuda" else []
    assert not [record.error for record in records if record.error]
    timed(call, contract_bytes=case.bytes_moved, contest=[asdict(record) for record in records])


@pytest.mark.benchmark(max_time=0.5, min_rounds=5)
def test_peer(timed: Callable[..., None], peer: Peer, case: Case) -> None:
    if reason := peer.available():
        pytest.skip(f"{peer.name}: {reason}")
    records = contest({"full": case}, [peer], device=DEVICE, repeats=15, seconds=2)
    assert not [record.error for record in records if record.error]
    ratio = ratio_to(peer.name, records)
    call = peer.prepare(case, make_inputs(case, DEVICE))
    call()
    timed(call, time_to_ours=ratio, contest=[asdict(record) for record in records])
