"""Completion over the bound on the shaped transport, for this plan, SpreadOut and direct.

python -m perf.shaped_exchange: 4 x 4 ranks, 25 MB/s per rank of scale-out and 9 times that of
scale-up, 8 MB per rank, Zipf 0.8, 5 seeds, the median of 3 calls after a warm-up for each. The
count exchange and the planning are inside the timing; the time of a call is the slowest rank's,
from a common start. The bound is Plan.bound_us of the same matrix.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

import fastkern
from fastkern.planner import plan
from perf.ranks import run_ranks
from perf.rows import append, make_row, zipf_traffic

POLICIES: tuple[str, ...] = ("auto", "spreadout", "direct")


def measure(
    rank: int, num_ranks: int, o: argparse.Namespace
) -> list[tuple[str, int, float, float, str]]:
    """(policy, seed, seconds, bound in seconds, planned policy) of each run on this rank."""
    transport = fastkern.shaped(
        scale_up_GBps=o.scale_up * 1e-3, scale_out_GBps=o.scale_out * 1e-3, alpha_us=o.alpha_us
    )
    found = []
    for policy in POLICIES:
        with fastkern.Communicator(servers=o.servers, transport=transport, policy=policy) as comm:
            warm = torch.zeros(num_ranks * 64, dtype=torch.uint8)
            comm.all_to_all_single(torch.empty_like(warm), warm)
            for seed in range(o.seeds):
                traffic = zipf_traffic(
                    o.servers, o.per_server, int(o.megabytes * 1e6) // o.row_bytes, o.zipf, seed
                )
                bound = plan(traffic, comm.topology, o.row_bytes).bound_us * 1e-6
                source = torch.full(
                    (int(traffic[rank].sum()), o.row_bytes), rank, dtype=torch.uint8
                )
                target = torch.empty(int(traffic[:, rank].sum()), o.row_bytes, dtype=torch.uint8)
                rows_in, rows_out = traffic[rank].tolist(), traffic[:, rank].tolist()
                need = comm.buffer_bytes_for(traffic, o.row_bytes)
                comm.reserve(need)
                times = []
                for repeat in range(o.repeats + 1):
                    comm.forget_plan()
                    comm.barrier()
                    begin = time.monotonic()
                    comm.all_to_all_single(target, source, rows_out, rows_in)
                    end = time.monotonic()
                    spans: list[Any] = [None] * num_ranks
                    dist.all_gather_object(spans, (begin, end))
                    if repeat:  # the first call touches its pages
                        times.append(max(e for _, e in spans) - min(b for b, _ in spans))
                seconds = float(np.median(times))
                expected = np.repeat(np.arange(num_ranks), rows_out)
                assert (target[:, 0].numpy() == expected).all(), "wrong rows"
                made = comm.stats.plan
                found.append((policy, seed, seconds, bound, made.policy if made else ""))
    return found


def main() -> None:
    """Measure and print one table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--servers", type=int, default=4)
    parser.add_argument("--per-server", type=int, default=4)
    parser.add_argument("--scale-out", type=float, default=25.0, help="MB/s per rank")
    parser.add_argument("--scale-up", type=float, default=225.0, help="MB/s per rank")
    parser.add_argument("--alpha-us", type=float, default=100.0)
    parser.add_argument("--megabytes", type=float, default=8.0, help="per rank")
    parser.add_argument("--row-bytes", type=int, default=4096)
    parser.add_argument("--zipf", type=float, default=0.8)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument(
        "--repeats", type=int, default=3, help="timed calls per seed, after one more"
    )
    parser.add_argument("--csv", action="store_true", help="append rows to perf/results.csv")
    o = parser.parse_args()
    results = run_ranks(o.servers * o.per_server, measure, o)[0]
    table = Table(title=f"completion / bound, {o.servers} x {o.per_server} ranks, Zipf {o.zipf}")
    for name in ("policy", "planned as", "mean", "best", "worst", "mean ms", "bound ms"):
        table.add_column(name)
    rows = []
    shape = (o.servers, o.per_server, int(o.megabytes * 1e6))
    for policy in POLICIES:
        mine = [r for r in results if r[0] == policy]
        ratios = [seconds / bound for _, _, seconds, bound, _ in mine]
        times = [seconds * 1e6 for _, _, seconds, _, _ in mine]
        bound_us = float(np.mean([bound for _, _, _, bound, _ in mine])) * 1e6
        table.add_row(
            policy,
            "/".join(sorted({r[4] for r in mine})),
            *(f"{x:.3f}" for x in (np.mean(ratios), min(ratios), max(ratios))),
            f"{np.mean(times) * 1e-3:.0f}",
            f"{bound_us * 1e-3:.0f}",
        )
        rows.append(make_row("shaped_exchange", policy, shape, times, bound_us))
    Console().print(table)
    if o.csv:
        append(rows)


if __name__ == "__main__":
    main()
