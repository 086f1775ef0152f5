"""What perf/gpu_check.sh runs, a process for each step; see perf/README.md."""
