"""The only door to `engine.kernels`: everything else in the engine imports the operations from here."""

from engine.kernels.attention_ops import ragged_attention, scatter_kv
from engine.kernels.ops import row_stats, sample, verify
from engine.kernels.philox import DRAFT, SAMPLE
from engine.kernels.records import FATAL_STATUS, Draws, RowStats, Status, Verdict

__all__ = [
    "DRAFT",
    "FATAL_STATUS",
    "SAMPLE",
    "Draws",
    "RowStats",
    "Status",
    "Verdict",
    "ragged_attention",
    "row_stats",
    "sample",
    "scatter_kv",
    "verify",
]
