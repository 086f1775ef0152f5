"""Time of one rank's plan and stage table, from Python.

python -m perf.plan_time: medians over matrices (uniform and Zipf 0.8, 5 seeds each) of the time
from a [R, R] NumPy array to this rank's table, policy auto. Beside it the time that the FAST paper
(arXiv 2505.09764) reports for its scheduler on a server CPU of its own.
"""

from __future__ import annotations

import argparse
import time

from rich.console import Console
from rich.table import Table

from fastkern.planner import Topology, plan
from perf.rows import append, make_row, uniform_traffic, zipf_traffic

# servers, ranks per server, our limit, the paper's figure (microseconds)
CASES = ((4, 8, 25, 25), (8, 8, 60, 221), (12, 8, 150, 805), (40, 8, 5000, 77000))
ROW_BYTES = 14336  # hidden 7168 in bf16
ROWS_PER_RANK = 8192 * 8  # 8192 tokens, top-8


def times_us(servers: int, per_server: int, kind: str, seed: int, repeats: int) -> list[float]:
    """Microseconds of each repeat: plan and table of one rank."""
    topology = Topology(servers, per_server)
    if kind == "uniform":
        traffic = uniform_traffic(servers, per_server, ROWS_PER_RANK, seed)
    else:
        traffic = zipf_traffic(servers, per_server, ROWS_PER_RANK, 0.8, seed)
    rank = (seed * 7) % topology.num_ranks
    found = []
    for _ in range(repeats):
        begin = time.perf_counter()
        plan(traffic, topology, ROW_BYTES).table(rank)
        found.append((time.perf_counter() - begin) * 1e6)
    return found


def main() -> None:
    """Measure and print one table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--csv", action="store_true", help="append rows to perf/results.csv")
    o = parser.parse_args()
    table = Table(title="one rank's plan and table from Python, policy auto, microseconds")
    for name in (
        "ranks",
        "traffic",
        "p20",
        "p50",
        "p80",
        "limit",
        "paper",
        "worst completion/bound",
    ):
        table.add_column(name)
    rows = []
    for servers, per_server, limit, paper in CASES:
        for kind in ("uniform", "zipf 0.8"):
            times: list[float] = []
            worst = 0.0
            for seed in range(5):
                times += times_us(servers, per_server, kind, seed, 8 if servers >= 40 else 60)
                make = uniform_traffic if kind == "uniform" else None
                traffic = (
                    make(servers, per_server, ROWS_PER_RANK, seed)
                    if make
                    else zipf_traffic(servers, per_server, ROWS_PER_RANK, 0.8, seed)
                )
                made = plan(traffic, Topology(servers, per_server), ROW_BYTES)
                worst = max(worst, made.completion_rows / made.bound_rows)
            row = make_row(
                "plan_time", kind, (servers, per_server, ROW_BYTES * ROWS_PER_RANK), times
            )
            rows.append(row)
            shown = (f"{t:.1f}" for t in (row.p20_us, row.p50_us, row.p80_us))
            ranks = f"{servers} x {per_server}"
            table.add_row(ranks, kind, *shown, str(limit), str(paper), f"{worst:.3f}")
    Console().print(table)
    if o.csv:
        append(rows)


if __name__ == "__main__":
    main()
