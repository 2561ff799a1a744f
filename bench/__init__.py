"""Benchmarks, not installed: `pytest bench --benchmark-only`, and `python -m` bench.throughput, bench.acceptance,
bench.first_token and bench.gpu_report, each with --help."""
