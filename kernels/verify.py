"""How many drafts are accepted and what comes next, from logits; see `reference.verify` for the rules.

With p the target's and q the drafter's distribution, each from logits, temperature and stats:

    rejection  accept x_i while u_i q(x_i) < p(x_i);  after a rejection draw from max(p - q, 0)
    block      s_i = min(s_{i-1} p(x_i) / q(x_i), 1);  accept the longest prefix with u_i < h_i (residual.py)
    coupled    accept x_i while it is argmax of logit / T + Gumbel noise; that argmax is also the next token
    typical    accept x_i while p(x_i) > min(epsilon, delta exp(-entropy of p))

Launch 1 (verify_kernel) has one program per tile of a target row, or for several (jit_tiles.py).

- Each program leaves the stats of its tile's blocks (jit_rows.py).
- The last program of a row searches for its threshold, if there are filters, and under `coupled` draws from the row.
- The last program of a sequence tests the drafts and draws the next token, in two levels, reading one block of logits again (with
  filters, all blocks that hold a kept logit: jit_decide.py).

One-hot drafts need no more: their residual max(p - one-hot, 0) is p without the draft's token, so the row is read without it.
Where q is a distribution, launch 2 (residual.py) reads the target's row of the first rejection and the draft's row, or under
`block` all rows that have a draft. Nothing as wide as the vocabulary is written.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .jit_decide import decide
from .jit_groups import SEARCH_ROOM
from .jit_rows import (
    BLOCK_MOMENT,
    arrive,
    block_moment,
    blocks_at,
    leave_stats,
    load_temperature,
    read_raw,
    tile_ids,
)
from .jit_tiles import leave_tiles
from .jit_verify import leave_row
from .launch import (
    cdiv,
    is_filtered,
    is_simple,
    lanes,
    registers,
    row_arguments,
    shape_arguments,
    view,
    vocabulary_view,
)
from .records import RowStats, Verdict
from .residual import residual_kernel
from .row_stats import row_stats
from .rows import head


# Which arguments are specialised: see row_stats_kernel.
@triton.jit(
    do_not_specialize=["num_rows", "width", "num_programs", "tiles", "typical_epsilon", "typical_delta"],
    do_not_specialize_on_alignment=[
        "cu_num_logits", "draft_tokens", "draft_threshold", "draft_lse", "temperature", "top_k", "top_p", "min_p", "seed",
        "position", "tokens", "num_accepted", "status", "logprobs",
    ],
)  # fmt: skip
def verify_kernel(
    target, bias, mask,  # views [B, K+1, V_target]; bias and mask or None
    cu_num_logits,  # [B+1] int32 if these are packed, or None
    draft_tokens,  # [B, K] int64, -1 = none
    draft,  # view [B, K, V_draft], or None: one-hot
    draft_threshold, draft_lse,  # [B, K] float32, or None
    temperature, top_k, top_p, min_p,  # [B] or None
    seed, position,  # [B] int64
    tokens, num_accepted, status,  # [B, K+1] int64, [B] int32, [B] int32; written
    logprobs,  # [B, K+1] float32, written, or None
    scratch, counters,
    typical_epsilon, typical_delta,
    num_rows, width, num_programs, tiles, num_blocks,  # programs of a row, and tiles of a program
    METHOD: tl.constexpr, FILTERED: tl.constexpr, SHIFT: tl.constexpr, SAMPLE_SHIFT: tl.constexpr,
    WIDTH: tl.constexpr,  # lanes for the K+1 rows
    AT_ONCE: tl.constexpr,  # blocks of all rows of a sequence that are held in registers
    NUM_BLOCKS: tl.constexpr, NUM_GROUPS: tl.constexpr, BLOCKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    BY_ROW: tl.constexpr = FILTERED or METHOD == "coupled"  # each row has work of its own before that of its sequence
    MASSES: tl.constexpr = METHOD != "coupled" or FILTERED or logprobs is not None
    LEAVE_OUT: tl.constexpr = draft is None and not FILTERED and (METHOD == "rejection" or METHOD == "block")
    rows = (target, bias, mask, cu_num_logits, cu_num_logits)
    memory = (scratch, num_rows, num_blocks, SEARCH_ROOM if FILTERED else 0)
    first, column, batch = tl.program_id(0) * tiles, tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    row = batch * width + column

    # This program's tiles. The logits are loaded first, so that everything else overlaps with the loads.
    if BY_ROW:
        inverse_temperature, greedy = leave_tiles(
            rows, batch, column, row, memory, temperature, first, tiles, False,
            FILTERED, MASSES, SAMPLE_SHIFT, BLOCKS, BLOCK,
        )  # fmt: skip
    else:
        ids = tile_ids(first, BLOCKS, BLOCK)
        x = read_raw(rows, batch, column, ids)
        inverse_temperature, greedy = load_temperature(temperature, batch)
        if LEAVE_OUT:
            left_out = tl.load(draft_tokens + row - batch, mask=(column < width - 1) & (not greedy), other=-1)
            if left_out // (BLOCKS * BLOCK) == first:
                here = (left_out % (BLOCKS * BLOCK)).to(tl.int32)
                x = tl.where(tile_ids(0, BLOCKS, BLOCK) == here, float("-inf"), x)
        peaks = leave_stats(x, None, ids, first, row, memory, inverse_temperature, greedy, MASSES, BLOCKS)
        if METHOD == "typical":
            block = first * BLOCKS + tl.arange(0, BLOCKS)
            moment = block_moment(x, peaks, inverse_temperature)
            tl.store(blocks_at(memory, BLOCK_MOMENT, row) + block, moment, mask=block < num_blocks)

    # Then its row, if this program is the last of it, and its sequence, if this row is the last of it.
    drafts = (draft, bias, mask, None, cu_num_logits)
    sequence = (draft_tokens, drafts, draft_threshold, draft_lse, seed, position, inverse_temperature, greedy)
    outputs = (tokens, num_accepted, status, logprobs)
    if BY_ROW:
        if arrive(counters + row, num_programs):
            leave_row(
                rows, batch, column, row, memory, inverse_temperature, greedy, (top_k, top_p, min_p), seed, position,
                METHOD, FILTERED, MASSES, SHIFT, SAMPLE_SHIFT, NUM_BLOCKS, NUM_GROUPS, BLOCKS,
            )  # fmt: skip
            if arrive(counters + num_rows + batch, width):
                decide(
                    rows, batch, width, memory, sequence, outputs, typical_epsilon, typical_delta,
                    METHOD, FILTERED, BY_ROW, LEAVE_OUT, WIDTH, AT_ONCE, NUM_BLOCKS, NUM_GROUPS, BLOCKS, BLOCK,
                )  # fmt: skip
    else:
        if arrive(counters + num_rows + batch, width * num_programs):
            decide(
                rows, batch, width, memory, sequence, outputs, typical_epsilon, typical_delta,
                METHOD, FILTERED, BY_ROW, LEAVE_OUT, WIDTH, AT_ONCE, NUM_BLOCKS, NUM_GROUPS, BLOCKS, BLOCK,
            )  # fmt: skip


def verify(
    target_logits: Tensor,  # [B, K+1, V_target], or packed [N, V_target], float32, bfloat16 or float16, any strides
    draft_tokens: Tensor,  # [B, K] int64, -1 = none
    draft_logits: Tensor | None = None,  # [B, K, V_draft] likewise; None: one-hot
    draft_stats: RowStats | None = None,  # of draft_logits, fields [B, K]
    *,
    temperature: Tensor | None = None,  # [B] float, below 1e-5 = greedy; None: 1
    top_k: Tensor | None = None,  # [B] int; None: off
    top_p: Tensor | None = None,  # [B] float; None: off
    min_p: Tensor | None = None,  # [B] float; None: off
    seed: Tensor,  # [B] int64
    position: Tensor,  # [B] int64, absolute position of the first drafted token
    method: str = "rejection",
    logit_bias: Tensor | None = None,  # [V], [B, V] or [B, K+1, V], packed [V], [B, 1, V] or [N, V], float
    token_mask: Tensor | None = None,  # likewise, bool
    cu_num_logits: Tensor | None = None,  # [B+1] int32 if they are packed
    return_logprobs: bool = False,
    typical_epsilon: float = 0.09,
    typical_delta: float = 0.3,
) -> Verdict:
    """How many drafts are accepted, and the next token; see `reference.verify`.

    One launch; two where draft_logits are used (`rejection` and `block`), and one more if they come without stats.
    """
    batch, width = draft_tokens.shape[0], draft_tokens.shape[1] + 1
    device = target_logits.device
    cu_num_logits = None if cu_num_logits is None else cu_num_logits.contiguous()
    rows = row_arguments(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    if method in ("coupled", "typical") or width == 1:
        draft_logits = draft_stats = None
    if draft_logits is not None and draft_stats is None:
        adjust = dict(logit_bias=logit_bias, token_mask=token_mask)
        if cu_num_logits is None:
            adjust = {name: head(value, width - 1) for name, value in adjust.items()}
        draft_stats = row_stats(draft_logits, **rows, **adjust, cu_adjust=cu_num_logits)
    filtered = is_filtered(top_k, top_p, min_p)
    verdict = Verdict(
        tokens=torch.empty((batch, width), dtype=torch.int64, device=device),
        num_accepted=torch.empty(batch, dtype=torch.int32, device=device),
        status=torch.empty(batch, dtype=torch.int32, device=device),
        logprobs=torch.empty((batch, width), dtype=torch.float32, device=device) if return_logprobs else None,
    )
    if batch == 0:
        return verdict
    shape = shape_arguments(
        target_logits, (batch, width), filtered, method == "coupled", logit_bias, token_mask, batched=True
    )
    both = dict(
        target=view(target_logits),
        bias=vocabulary_view(logit_bias, target_logits, cu_num_logits),
        mask=vocabulary_view(token_mask, target_logits, cu_num_logits),
        cu_num_logits=cu_num_logits,
        draft_tokens=draft_tokens.contiguous(),
        draft=None if draft_logits is None else view(draft_logits),
        **row_arguments(
            draft_threshold=None if draft_stats is None else draft_stats.threshold,
            draft_lse=None if draft_stats is None else draft_stats.lse,
            seed=seed,
            position=position,
        ),
        temperature=rows["temperature"],
        **verdict._asdict(),
        WIDTH=lanes(width),
        AT_ONCE=max(32, min(shape["NUM_BLOCKS"], 2048 // lanes(width))),
        METHOD=method,
    )
    with torch.cuda.device_of(target_logits):
        grid = (shape["num_programs"], width, batch)
        filters = {name: rows[name] for name in ("top_k", "top_p", "min_p")}
        thresholds = dict(typical_epsilon=typical_epsilon, typical_delta=typical_delta)
        simple = is_simple(target_logits, logit_bias, token_mask)
        shape |= _registers(method, width, filtered, draft_logits is None, return_logprobs, simple, target_logits.dtype)
        verify_kernel[grid](**both, **shape, **filters, **thresholds)
        if draft_logits is not None:
            slots = 1 if method == "rejection" else width - 1
            del shape["SHIFT"], shape["SAMPLE_SHIFT"], shape["tiles"]
            shape["num_programs"] = cdiv(shape["num_blocks"], shape["BLOCKS"])
            residual_kernel[(shape["num_programs"], slots, batch)](**both, **shape)
    return verdict


def _registers(
    method: str, width: int, filtered: bool, one_hot: bool, return_logprobs: bool, simple: bool, dtype: torch.dtype
) -> dict[str, int]:
    """A limit that lets as many programs run on a processor as possible without spills; {}: that of `shape_arguments` holds."""
    block, by_row = method == "block", filtered or method == "coupled"
    if (
        (width > 16 and (block or not by_row or return_logprobs))
        or (block and (filtered or (return_logprobs and not simple)))
        or (method == "typical" and filtered)
    ):
        return registers(255)
    if not simple or by_row:
        return {}
    return registers(64 if method == "rejection" and one_hot and dtype.itemsize == 2 else 80)
