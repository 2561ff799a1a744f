"""The only way into `engine.kernels`: everything else in the engine imports the operations from here."""

from engine.kernels.attention_ops import MAX_HEAD_DIM, ragged_attention, scatter_kv
from engine.kernels.layer_ops import gated_silu, rms_norm, rotate
from engine.kernels.ops import check_kernels, row_stats, sample, sample_by_inversion, use_triton, verify
from engine.kernels.philox import DRAFT, SAMPLE
from engine.kernels.records import FATAL_STATUS, Draws, RowStats, Status, Verdict
from engine.kernels.warmup import warmup
from engine.kernels.workspace import reserve_counters

__all__ = [
    "DRAFT",
    "FATAL_STATUS",
    "MAX_HEAD_DIM",
    "SAMPLE",
    "Draws",
    "RowStats",
    "Status",
    "Verdict",
    "check_kernels",
    "gated_silu",
    "ragged_attention",
    "reserve_counters",
    "rms_norm",
    "rotate",
    "row_stats",
    "sample",
    "sample_by_inversion",
    "scatter_kv",
    "use_triton",
    "verify",
    "warmup",
]
