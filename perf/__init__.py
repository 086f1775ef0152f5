"""Benchmarks: `python -m perf` runs all, `python -m perf.NAME` one."""
