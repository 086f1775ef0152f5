"""Sequences of calls on a virtual cluster: replays of captured ones, and ranks that do not come.

For every device, as virtual_cases.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from fastkern.device.driver import Driver
from fastkern.device.virtual_cluster import VirtualCluster
from fastkern.errors import DeadlineError, FastkernError, WaitRecord
from fastkern.moe.dispatch_arguments import DispatchOptions
from fastkern.planner import Topology
from fastkern.planner.table import NO_SLOT, QUEUES
from tests.device.virtual_cases import (
    check_all_to_all,
    check_random_traffic,
    expected_rows,
    options,
    random_rows,
)
from tests.moe_checks import same_bytes
from tests.reference import KINDS, random_traffic

OPS = ("all_to_all", "dispatch", "combine")


def check_replays(cluster: VirtualCluster, rng: Any, most_rows: int, row_bytes: int) -> None:
    """A captured all-to-all replayed with other rows and tables; eager calls between, of which one
    makes the staging move. most_rows: of a pair of ranks."""
    t = cluster.topology
    num_ranks = t.num_ranks
    room = num_ranks * most_rows
    first = np.full((num_ranks, num_ranks), most_rows)
    call = cluster.prepare_all_to_all(first, row_bytes, most_rows=room, table_bytes=64 << 10)
    try:
        call.capture()
        for step in range(6):
            kind = KINDS[int(rng.integers(len(KINDS)))]
            traffic = random_traffic(t.servers, t.gpus_per_server, rng, most_rows, kind)
            traffic = traffic.clip(max=most_rows)
            call.set_splits(traffic)
            rows = traffic.sum(axis=1)
            inputs = [random_rows(int(n), (row_bytes,), torch.uint8, rng) for n in rows]
            call.write_inputs(inputs)
            call.replay()
            got = call.read_outputs((row_bytes,), torch.uint8)
            for rank, (a, b) in enumerate(zip(got, expected_rows(traffic, inputs), strict=True)):
                same_bytes(a, b, f"replay {step}, {kind}: rank {rank}")
            if step % 2:
                check_random_traffic(cluster, rng, most_rows, row_bytes)
                large = np.full((num_ranks, num_ranks), 2 * step * most_rows)
                check_all_to_all(cluster, large, (row_bytes,), torch.float32, rng)
    finally:
        call.close()


def check_missing_rank(
    driver: Driver, topology: Topology, op: str, num_blocks: int, timeout_s: float
) -> WaitRecord:
    """A good call, then one whose last rank never runs: a record, and an end to the cluster."""
    num_ranks = topology.num_ranks
    given = options(progress_timeout_s=timeout_s)
    xs = [[torch.randn(5, 3)] for _ in range(num_ranks)]
    idx = [torch.arange(5)[:, None] % num_ranks for _ in range(num_ranks)]
    splits = np.full((num_ranks, num_ranks), 3)
    experts = DispatchOptions(num_experts=num_ranks)
    with VirtualCluster(driver, topology, num_blocks, options=given) as cluster:
        got = cluster.dispatch(xs, idx, None, experts)
        outs = [recv[0] for recv in got.recv]
        cluster.launched_ranks = num_ranks - 1
        rng = np.random.default_rng(1)
        calls: dict[str, Callable[[], object]] = {
            "all_to_all": lambda: check_all_to_all(cluster, splits, (4,), torch.float32, rng),
            "dispatch": lambda: cluster.dispatch(xs, idx, None, experts),
            "combine": lambda: cluster.combine(got.handle, outs),
        }
        with pytest.raises(DeadlineError) as caught:
            calls[op]()
        got.handle.close()
        record = caught.value.record
        assert record is not None, f"{caught.value}: no record"
        assert str(record) in str(caught.value)
        assert (record.op, record.call, record.expected[0]) == (op, 2, 2), str(record)
        assert record.seen < record.expected, str(record)
        assert record.rank != num_ranks - 1, str(record)
        check_broken(cluster, record)
        return record


def check_withheld_flag(driver: Driver, num_blocks: int, timeout_s: float) -> WaitRecord:
    """2x2 ranks; rank 1 does not raise the flag that rank 0 awaits before it takes its rows."""
    rng = np.random.default_rng(2)
    given = options(policy="whole", progress_timeout_s=timeout_s)
    with VirtualCluster(driver, Topology(2, 2), num_blocks, options=given) as cluster:
        call = cluster.prepare_all_to_all(np.full((4, 4), 3), 16)
        call.write_inputs([random_rows(12, (16,), torch.uint8, rng) for _ in range(4)])
        call.run()
        tables = [call.plan.table(rank) for rank in range(4)]
        queue = tables[1].queues[QUEUES.index("push")]
        stage = tables[1].stages[int(queue["first_stage"])]
        first = int(stage["first_stream"])
        streams = tables[1].streams[first : first + int(stage["num_streams"])]
        streams["slot"][streams["peer"] == 0] = NO_SLOT
        call.launch.set_tables(tables)
        with pytest.raises(DeadlineError, match=r"waited .* for rank 1 before its take") as caught:
            call.run()
        record = caught.value.record
        assert record is not None
        assert (record.rank, record.peer, record.item, record.call) == (0, 1, "take", 2)
        check_broken(cluster, record)
        call.close()
        return record


def check_broken(cluster: VirtualCluster, record: WaitRecord) -> None:
    """All ranks' abort words name the rank of the record, and every call is refused."""
    words = cluster.abort_words()
    assert words == [record.call << 16 | record.rank + 1] * cluster.num_ranks, words
    num_ranks = cluster.num_ranks
    for attempt in (
        lambda: cluster.all_to_all([torch.zeros(0, 2)] * num_ranks, np.zeros((1, 1))),
        lambda: cluster.prepare_all_to_all(np.zeros((1, 1)), 8),
        lambda: cluster.dispatch([], None),
    ):
        with pytest.raises(FastkernError, match="of no more use") as caught:
            attempt()
        assert str(record) in str(caught.value), caught.value
