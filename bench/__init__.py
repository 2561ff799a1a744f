"""Benchmarks: `pytest bench --benchmark-only` and `python -m bench.gpu_report --out DIR`. Not installed."""
