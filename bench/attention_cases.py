"""Ragged attention against what transformers does: inputs, contenders, and `attention_report`.

The baseline is a masked `scaled_dot_product_attention` over K and V that were repeated for every query head, as
transformers calls it for more than one column; the mask is made beforehand, since all layers share it. Beside them, a
copy within the device of as many bytes as ours must read and write.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from bench import timing
from bench.figures import Figures
from bench.timing import Contender, Timing
from engine.kernels import attention_reference
from engine.kernels.attention_ops import ragged_attention

Inputs = dict[str, Any]  # arguments of ragged_attention, and the mask for the baseline
DTYPE = torch.bfloat16


@dataclass(frozen=True)
class AttentionCase:
    """Decoding: every row has `length` keys, of which the last `width` are new. Heads as in Llama 3 8B."""

    batch: int
    length: int
    width: int
    num_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128

    @property
    def shape(self) -> str:
        return f"B={self.batch} L={self.length} W={self.width}"

    @property
    def bytes_moved(self) -> int:
        """K and V once, the query, and the output."""
        columns = 2 * self.num_kv_heads * self.length + 2 * self.num_heads * self.width
        return self.batch * columns * self.head_dim * DTYPE.itemsize


GOAL_CASE = AttentionCase(batch=16, length=8192, width=6)  # see bench/goals.py
GPU_CASES = (
    GOAL_CASE, AttentionCase(1, 8192, 6), AttentionCase(64, 8192, 6), AttentionCase(16, 512, 6),
    AttentionCase(16, 8192, 1), AttentionCase(16, 8192, 8),
)  # fmt: skip
CPU_CASES = (AttentionCase(1, 512, 6), AttentionCase(4, 512, 6))


def make_inputs(case: AttentionCase, device: str) -> Inputs:
    generator = torch.Generator(device).manual_seed(0)
    random = partial(torch.randn, generator=generator, device=device, dtype=DTYPE)
    query = random(case.batch, case.width, case.num_heads, case.head_dim).transpose(1, 2)
    keys, values = (random(case.batch, case.num_kv_heads, case.length, case.head_dim) for _ in range(2))
    seq_lens = torch.full((case.batch,), case.length - case.width, device=device)
    position = seq_lens[:, None] + torch.arange(case.width, device=device)
    mask = torch.arange(case.length, device=device) <= position[:, None, :, None]  # [B, 1, W, L]
    return dict(query=query, keys=keys, values=values, seq_lens=seq_lens, mask=mask)


def ours(inputs: Inputs) -> Tensor:
    return ragged_attention(inputs["query"], inputs["keys"], inputs["values"], inputs["seq_lens"])


def masked_sdpa(inputs: Inputs) -> Tensor:
    """[B, W, H, D], contiguous, as a model goes on with it."""
    query = inputs["query"]
    batch, num_heads, _, head_dim = query.shape
    group = num_heads // inputs["keys"].shape[1]
    k, v = (
        cache[:, :, None].expand(-1, -1, group, -1, -1).reshape(batch, num_heads, -1, head_dim)
        for cache in (inputs["keys"], inputs["values"])
    )
    output = torch.nn.functional.scaled_dot_product_attention(query, k, v, attn_mask=inputs["mask"])
    return output.transpose(1, 2).contiguous()


CONTENDERS: dict[str, Callable[[Inputs], Tensor]] = {"ours": ours, "masked sdpa": masked_sdpa}


def check(case: AttentionCase, inputs: Inputs, output: Tensor) -> None:
    """Assert that an output is right: rounding in bfloat16 is a few thousandths of its size, any wrong key is more."""
    expected_shape = (case.batch, case.width, case.num_heads, case.head_dim)
    assert output.shape == expected_shape and output.dtype == DTYPE, (output.shape, output.dtype)
    for row in {0, case.batch - 1}:
        one = {name: inputs[name][row : row + 1].float() for name in ("query", "keys", "values")}
        expected = attention_reference.ragged_attention(**one, seq_lens=inputs["seq_lens"][row : row + 1])[0]
        error = (output[row] - expected).norm() / expected.norm()
        assert error < 0.01, f"{case.shape}: row {row} is off by {error:.2g} of its size"


def contest(case: AttentionCase, device: str, *, repeats: int, seconds: float) -> dict[str, Any]:
    """Time ours, the baseline and, on a GPU, the copy in turns within one run; a GPU replays them from CUDA graphs.

    Returns:
        Microseconds per call: medians, p20 and p80; bytes per second; share of the copy's; the baseline's time to ours.
    """
    cuda = device == "cuda"
    copies = timing.copies_for_cold_cache(case.bytes_moved) if cuda else 1
    first = make_inputs(case, device)
    several = [first, *(first | {name: first[name].clone() for name in ("keys", "values")} for _ in range(copies - 1))]
    contenders: dict[str, Contender] = {}
    for name, function in CONTENDERS.items():
        calls = [partial(function, inputs) for inputs in several]
        check(case, first, calls[0]())
        if cuda:
            contenders[name], result = timing.capture(calls)
            check(case, first, result)
        else:
            contenders[name] = Contender.in_turn(calls)
    if cuda:
        contenders["copy"], _ = timing.capture(timing.device_copies(case.bytes_moved, copies))
    times = timing.interleave(contenders, repeats=repeats, seconds=seconds, cuda=cuda)
    return dict(bytes=case.bytes_moved, copies=copies) | _figures(times, case.bytes_moved)


def _figures(times: dict[str, Timing], moved: int) -> dict[str, Any]:
    mine, theirs, copy = times["ours"], times["masked sdpa"], times.get("copy")
    figures: dict[str, Any] = {
        f"{name.replace(' ', '_')}_us": [round(1e6 * t, 2) for t in (each.median, each.p20, each.p80)]
        for name, each in times.items()
    }
    return figures | dict(
        gb_per_s=round(moved / mine.median / 1e9, 1),
        share_of_copy=None if copy is None else round(copy.median / mine.median, 3),
        sdpa_to_ours=round(theirs.median / mine.median, 2),
        repeats=mine.repeats,
    )


def attention_report(device: str, figures: Figures, cases: Sequence[AttentionCase] | None = None) -> None:
    """Figures by shape; on CPU a reduced form, of the torch twin."""
    chosen = cases or (GPU_CASES if device == "cuda" else CPU_CASES)
    figures["times"] = "us per call: median, p20, p80"
    repeats = 20 if device == "cuda" else 7
    figures.measure({case.shape: partial(contest, case, device, repeats=repeats, seconds=3.0) for case in chosen})
