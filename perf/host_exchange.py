"""Unshaped host all-to-all beside gloo's, in the same run.

python -m perf.host_exchange: equal parts between 8 ranks on this machine, the count exchange inside
the timing (ours goes through the heap). The two take turns call by call, so that noise meets both
alike; the time of a call is the slowest rank's, from a common start.
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
from perf.ranks import run_ranks
from perf.rows import append, make_row

SIZES = (1 << 10, 1 << 14, 1 << 16, 1 << 18, 1 << 20, 1 << 22)


def measure(rank: int, num_ranks: int, o: argparse.Namespace) -> dict[tuple[str, int], list[float]]:
    """(who, bytes per pair) -> microseconds of each timed call."""
    found: dict[tuple[str, int], list[float]] = {}
    with fastkern.Communicator(servers=o.servers) as comm:
        for size in SIZES:
            source = torch.randint(0, 255, (num_ranks, size), dtype=torch.uint8)
            targets = {name: torch.empty_like(source) for name in ("fastkern", "gloo")}
            for repeat in range(o.repeats + 2):
                for name, target in targets.items():
                    comm.forget_plan()  # planning is part of what is timed
                    comm.barrier()
                    begin = time.monotonic()
                    if name == "gloo":
                        dist.all_to_all_single(target, source)
                    else:
                        comm.all_to_all_single(target, source)
                    spans: list[Any] = [None] * num_ranks
                    dist.all_gather_object(spans, (begin, time.monotonic()))
                    if repeat >= 2:
                        took = max(e for _, e in spans) - min(b for b, _ in spans)
                        found.setdefault((name, size), []).append(took * 1e6)
            assert torch.equal(targets["fastkern"], targets["gloo"]), "results differ"
    return found


def main() -> None:
    """Measure and print one table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument(
        "--servers", type=int, default=1, help="servers to plan for; all are this one"
    )
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--csv", action="store_true", help="append rows to perf/results.csv")
    o = parser.parse_args()
    found = run_ranks(o.ranks, measure, o)[0]
    table = Table(
        title=f"all_to_all_single, {o.ranks} ranks on one host, microseconds (slowest rank)"
    )
    for name in (
        "bytes per pair",
        "fastkern p20/p50/p80",
        "gloo p20/p50/p80",
        "gloo / fastkern",
        "GB/s",
    ):
        table.add_column(name)
    rows = []
    for size in SIZES:
        shape = (o.servers, o.ranks // o.servers, size * o.ranks)
        pair = [
            make_row("host_exchange", f"{who} {size}", shape, found[who, size])
            for who in ("fastkern", "gloo")
        ]
        rows += pair
        shown = (f"{r.p20_us:.0f} / {r.p50_us:.0f} / {r.p80_us:.0f}" for r in pair)
        ratio = float(np.median(np.array(found["gloo", size]) / np.array(found["fastkern", size])))
        rate = size * o.ranks / pair[0].p50_us * 1e-3
        table.add_row(f"{size}", *shown, f"{ratio:.2f}", f"{rate:.2f}")
    Console().print(table)
    if o.csv:
        append(rows)


if __name__ == "__main__":
    main()
