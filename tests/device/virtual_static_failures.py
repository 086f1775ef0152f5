"""Calls of static exchanges that fail: what is refused moves nothing; a rank that does not come, or
a flag that is not raised, ends in a record and ends the cluster.

For every device, as virtual_cases.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fastkern.device.driver import Driver
from fastkern.device.static_tables import DirectPlan
from fastkern.device.virtual_cluster import VirtualCluster
from fastkern.device.virtual_static import VirtualStatic
from fastkern.errors import DeadlineError, FastkernError, WaitRecord
from fastkern.planner import Topology
from fastkern.planner.table import NO_SLOT, QUEUES
from tests.device.virtual_cases import FILL, options
from tests.device.virtual_static_cases import StaticCase, Step, check_result, draw, write
from tests.moe_reference import as_bytes


def check_moved_nothing(case: StaticCase, exchange: VirtualStatic) -> None:
    """Outputs hold what they held, or what every call clears them to."""
    got = exchange.read()
    left = [(recv, 0 if case.zero_padding else FILL) for rank in got.recv for recv in rank]
    left += [(weights, 0) for weights in got.weights or []]
    left += [(idx, 0xFF) for idx in got.idx or []]
    left += [(sums, FILL) for sums in got.sums or []]
    for tensor, value in left:
        assert (as_bytes(tensor) == value).all()


def check_refused(
    cluster: VirtualCluster,
    case: StaticCase,
    bad: Step,
    text: str,
    replayed: bool,
) -> None:
    """A good call, the bad one, and the same good one again. text: a pattern for all of it."""
    rng = np.random.default_rng(4)
    tokens = [len(idx) for idx in bad.idx]
    good = draw(case, tokens, "distinct", rng, bad.idx[0].dtype)
    exchange = cluster.static_exchange(case.shape(cluster.num_ranks))
    try:
        write(exchange, good)
        if replayed:
            exchange.capture()
        call = exchange.replay if replayed else exchange.run
        for step in (good, bad, good, bad, bad, good):
            write(exchange, step)
            if step is bad:
                with pytest.raises(ValueError, match=f"^{text}$"):
                    call()
                check_moved_nothing(case, exchange)
            else:
                call()
                check_result(cluster, exchange, case, step)
    finally:
        exchange.close()


def check_missing_static_rank(
    driver: Driver, topology: Topology, planner: str, num_blocks: int, timeout_s: float
) -> WaitRecord:
    """A good call, then one of another exchange, whose last rank never runs."""
    num_ranks = topology.num_ranks
    case, rng = StaticCase(planner=planner), np.random.default_rng(9)
    given = options(progress_timeout_s=20 * timeout_s)
    with VirtualCluster(driver, topology, num_blocks, options=given) as cluster:
        patient = cluster.static_exchange(case.shape(num_ranks))
        exchange = cluster.static_exchange(case.shape(num_ranks), entry_timeout_s=timeout_s)
        step = draw(case, [case.most] * num_ranks, "distinct", rng, torch.int64)
        write(patient, step)
        patient.run()
        check_result(cluster, patient, case, step)
        write(exchange, step)
        cluster.launched_ranks = num_ranks - 1
        with pytest.raises(DeadlineError) as caught:
            exchange.run()
        record = _record_of(caught.value)
        assert (record.item, record.peer) == ("entry", num_ranks - 1), str(record)
        assert record.rank != num_ranks - 1, str(record)
        assert (record.call, record.expected, record.seen) == (1, (1, 1), (0, 0)), str(record)
        _check_over(cluster, exchange, record)
        exchange.close()
        patient.close()
        return record


def check_withheld_static_flag(driver: Driver, num_blocks: int, timeout_s: float) -> WaitRecord:
    """2x2 ranks; rank 1 does not raise the flag that rank 0 awaits before it takes its rows."""
    case, rng, topology = StaticCase(), np.random.default_rng(10), Topology(2, 2)
    given = options(progress_timeout_s=timeout_s)
    with VirtualCluster(driver, topology, num_blocks, options=given) as cluster:
        exchange = cluster.static_exchange(case.shape(4))
        step = draw(case, [case.most] * 4, "distinct", rng, torch.int64)
        write(exchange, step)
        exchange.run()
        _withhold(cluster, exchange, rank=1, peer=0)
        with pytest.raises(DeadlineError, match=r"waited .* for rank 1 before its take") as caught:
            exchange.run()
        record = _record_of(caught.value)
        assert (record.rank, record.peer, record.item) == (0, 1, "take"), str(record)
        assert record.call == 3, str(record)  # the second dispatch: a combine counts too
        _check_over(cluster, exchange, record)
        exchange.close()
        return record


def _record_of(error: DeadlineError) -> WaitRecord:
    record = error.record
    assert record is not None, f"{error}: no record"
    assert str(record) in str(error)
    assert record.op == "static exchange"
    return record


def _withhold(cluster: VirtualCluster, exchange: VirtualStatic, rank: int, peer: int) -> None:
    """Edit a rank's dispatch table on the device: its push to `peer` raises no flag."""
    chunk_bytes = cluster.options.chunk_bytes
    table = DirectPlan(exchange.shape, cluster.topology, chunk_bytes).tables(rank).dispatch
    queue = table.queues[QUEUES.index("push")]
    stage, streams = table.stages[int(queue["first_stage"])], table.streams
    first, end = int(stage["first_stream"]), int(stage["first_stream"] + stage["num_streams"])
    (k,) = (j for j in range(first, end) if int(streams[j]["peer"]) == peer)
    begin = streams.__array_interface__["data"][0] - table.bytes.__array_interface__["data"][0]
    at = begin + k * streams.dtype.itemsize + streams.dtype.fields["slot"][1]
    word = np.array([NO_SLOT], dtype=streams.dtype["slot"]).view(np.uint8)
    cluster.copier.write(exchange.memory.rank[rank]["tables"] + at, word)


def _check_over(cluster: VirtualCluster, exchange: VirtualStatic, record: WaitRecord) -> None:
    """All ranks have been told, and every call is refused, of the exchange and of the cluster."""
    word = record.call << 16 | record.rank + 1
    for rank in range(cluster.num_ranks):
        control = cluster.copier.read(exchange.heap.control_address(rank), 8).view(np.uint64)
        assert int(control[0]) == word, rank
    for attempt in (
        exchange.run,
        exchange.capture,
        lambda: cluster.static_exchange(exchange.shape),
        lambda: cluster.dispatch([], None),
    ):
        with pytest.raises(FastkernError, match="of no more use") as caught:
            attempt()
        assert str(record) in str(caught.value), caught.value
