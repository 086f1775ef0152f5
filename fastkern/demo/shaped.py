"""The layer's exchanges once more, on links slowed down to the rates of a two-tier fabric."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

import fastkern
from fastkern.planner import Policy, plan

from .check import same_rows
from .layer import Spread
from .results import ShapedRun, Spans

POLICIES: tuple[Policy, ...] = ("auto", "spreadout", "direct")
_LONGEST_S = 1.5  # the most that a rank's links may be busy in one call; more rows are left out

Matrix = npt.NDArray[np.int64]


def run_shaped(
    rank: int, servers: int, spread: Spread, repeats: int, step: Callable[[], None]
) -> list[ShapedRun]:
    """Dispatch and combine under each policy; every call's rows are checked. Collective."""
    sends: list[list[int]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(sends, spread.send)
    full: Matrix = np.array(sends, dtype=np.int64)
    row_bytes = spread.outgoing.rows.shape[1] * spread.outgoing.rows.element_size()
    transport = fastkern.shaped()
    busy_s = _busiest_s(full * row_bytes, servers, transport)
    kept = np.floor(full * min(1.0, _LONGEST_S / busy_s)).astype(np.int64) if busy_s else full
    # A direction's rows to send and to receive, each cut to the first rows of every pair.
    there = _cut(spread.outgoing.rows, full[rank], kept[rank])
    here = _cut(spread.received, full[:, rank], kept[:, rank])
    home = _cut(spread.returned, full[rank], kept[rank])
    away = _cut(spread.computed, full[:, rank], kept[:, rank])
    calls = (("dispatch", kept, there, here), ("combine", kept.T.copy(), away, home))
    found = []
    for policy in POLICIES:
        with fastkern.Communicator(servers=servers, transport=transport, policy=policy) as comm:
            for direction, traffic, rows, expected in calls:
                what = f"rank {rank}, {direction} on shaped links, policy {policy}"
                spans: Spans = []
                for _ in range(repeats + 1):
                    target = torch.empty_like(expected)
                    comm.barrier()
                    begin = time.monotonic()
                    comm.all_to_all_single(
                        target, rows, traffic[:, rank].tolist(), traffic[rank].tolist()
                    )
                    spans.append((begin, time.monotonic()))
                    made = comm.stats.plan
                    same_rows(what, target, expected)
                best = plan(traffic, comm.topology, row_bytes)
                found.append(
                    ShapedRun(
                        policy,
                        direction,
                        made.policy if made else "",
                        int(traffic.sum()),
                        best.bound_us,
                        spans[1:],  # the first call maps memory
                    )
                )
                step()
            dist.barrier()
    return found


def _busiest_s(traffic_bytes: Matrix, servers: int, transport: fastkern.Transport) -> float:
    """How long the busiest rank's links would carry rows that go straight to their ranks."""
    num_ranks = len(traffic_bytes)
    server = np.arange(num_ranks) // (num_ranks // servers)
    same = server[:, None] == server[None, :]
    rate = np.where(same, transport.scale_up_GBps, transport.scale_out_GBps) * 1e9
    np.fill_diagonal(rate, np.inf)
    seconds = traffic_bytes / rate
    return float(max(seconds.sum(0).max(), seconds.sum(1).max()))


def _cut(rows: torch.Tensor, full: Matrix, kept: Matrix) -> torch.Tensor:
    """The first kept[k] rows of each part of full[k] rows."""
    parts = torch.split(rows, full.tolist())
    return torch.cat([part[:n] for part, n in zip(parts, kept.tolist(), strict=True)])
