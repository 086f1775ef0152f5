"""Every operation with backend "triton", interpreted: ranks are processes that share memory, with
real flags and credits; results are compared bit by bit.

The interpreter runs the programs of a launch one after the other: the first of a rank must do all
of its items, and never wait for another program of its rank.
"""

from __future__ import annotations

import gc
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fastkern import Communicator, DeadlineError, PeerLostError, WaitRecord
from tests.conftest import SharedPools
from tests.device.communicator_cases import call_once, check_step
from tests.device.communicators import message
from tests.device.static_cases import (
    StaticCase,
    compare,
    experts,
    received,
    static_of,
    sums_of,
)
from tests.device.static_cases import steps as steps_of_static
from tests.reference import random_traffic
from tests.test_runtime_failures import Failure, broken, failure_of, names_of, wait_for
from tests.trace_cases import SPLITS, WIDTH, check_files, traced_calls
from tests.triton.communicators import triton_communicator

# Servers, and ranks of each.
TOPOLOGIES = ((2, 2), (1, 3), (3, 1))
POLICIES = {
    "whole": torch.int16,
    "split": torch.uint8,
    "direct": torch.float64,
    "spreadout": torch.bfloat16,
}


@pytest.fixture(params=TOPOLOGIES, ids=lambda t: f"{t[0]}x{t[1]}")
def topology(request: pytest.FixtureRequest) -> tuple[int, int]:
    return request.param  # type: ignore[no-any-return]


def all_to_alls(rank: int, ranks: int, servers: int) -> None:
    """A call of each policy: rows of odd and even widths, ranks that send or get nothing, chunks of
    a few rows; and one without any rows."""
    del rank
    rng = np.random.default_rng(3)
    for k, (policy, dtype) in enumerate(POLICIES.items()):
        with triton_communicator(servers, policy=policy, num_blocks=1, chunk_bytes=300) as comm:
            traffic = random_traffic(servers, ranks // servers, rng, 8, "")
            if k == 1:
                traffic[0] = 0
                traffic[:, ranks - 1] = 0
            call_once(comm, traffic, dtype, k, ("plain", "queued")[k % 2])
            if k == 2:
                call_once(comm, np.zeros_like(traffic), torch.int8, k, "plain")
                call_once(comm, traffic.T.copy(), dtype, k, "strided")


def test_all_to_all(interpreting_pools: SharedPools, topology: tuple[int, int]) -> None:
    servers, gpus_per_server = topology
    interpreting_pools.pool(servers * gpus_per_server).run(all_to_alls, servers, timeout_s=200)


def steps(rank: int, ranks: int, servers: int, layout: str, policy: str) -> None:
    """Forward, backward, the handle again, as on the host."""
    del rank, ranks
    options: dict[str, Any] = {"policy": policy, "num_blocks": 1, "chunk_bytes": 1024}
    with (
        Communicator(servers=servers, **options) as host,
        triton_communicator(servers, **options) as comm,
    ):
        check_step(comm, host, layout, exactly=True)


@pytest.mark.parametrize(
    ("servers", "gpus_per_server", "layout", "policy"),
    [
        (2, 2, "expert", "whole"),
        (1, 3, "rank", "direct"),
        (3, 1, "expert", "direct"),
    ],
)
def test_dispatch_and_combine(
    interpreting_pools: SharedPools, servers: int, gpus_per_server: int, layout: str, policy: str
) -> None:
    pool = interpreting_pools.pool(servers * gpus_per_server)
    pool.run(steps, servers, layout, policy, timeout_s=250)


def alone(rank: int, ranks: int) -> None:
    """One rank waits for no other: any number of programs will do."""
    del rank, ranks
    with Communicator(servers=1) as host, triton_communicator(1, num_blocks=3) as comm:
        check_step(comm, host, "expert", exactly=True)
        call_once(comm, np.array([[40]]), torch.int16, 1, "plain")


def test_several_programs_where_none_waits(interpreting_pools: SharedPools) -> None:
    interpreting_pools.pool(1).run(alone, timeout_s=100)


def static_steps(rank: int, ranks: int, planner: str) -> None:
    """Kernels in C++ prepare what those in Triton move, and are loaded only now."""
    del rank, ranks
    case = StaticCase(planner=planner, num_blocks=1)
    with triton_communicator(2, num_blocks=1, chunk_bytes=600) as comm:
        runtime: Any = comm._runtime
        loaded = runtime.kernels._functions
        assert not [key for key in loaded if "fastkern_static" in str(key)]
        with static_of(comm, case) as exchange:
            assert [key for key in loaded if "fastkern_static" in str(key)]
            for k, given in enumerate(steps_of_static(comm, case, 2, 1)):
                right, y = sums_of(comm, case, given)
                got = exchange.dispatch(given.xs, given.idx, given.weights)
                z = exchange.combine(experts(case, got.recv_x[0]), got.recv_topk_weights)
                compare(case, received(case, got), right, f"step {k}")
                assert torch.equal(z, y), f"step {k}"
            exchange.check()
        gc.collect()


@pytest.mark.parametrize("planner", ["device", "host"])
def test_static_exchanges(interpreting_pools: SharedPools, planner: str) -> None:
    interpreting_pools.pool(4).run(static_steps, planner, timeout_s=200)


def traced(rank: int, ranks: int, folder: str) -> dict[str, Any]:
    del rank, ranks
    options: dict[str, Any] = {"policy": "whole", "num_blocks": 3, "chunk_bytes": 600}
    with triton_communicator(2, **options) as comm:
        return traced_calls(comm, folder)


def test_every_item_is_traced(interpreting_pools: SharedPools, tmp_path: Path) -> None:
    """Launches have three programs: the first does whatever there is, the others find nothing."""
    ranks = interpreting_pools.pool(4).run(traced, str(tmp_path), timeout_s=200)
    crossing = sum(SPLITS[a][b] for a in range(4) for b in range(4) if a // 2 != b // 2)
    assert sum(found["put_bytes"] for found in ranks) == crossing * WIDTH * 4
    check_files(tmp_path, ranks, one_clock=True)


# -- deadlines -------------------------------------------------------------------------------------


def stalled(rank: int, ranks: int) -> Failure | None:
    """Rank 1 enters, but launches its kernel when the others' have given up."""
    source, out = torch.arange(float(ranks)), torch.empty(ranks)
    with triton_communicator(1, progress_timeout_s=1.0) as comm:
        comm.all_to_all_single(out, source)
        if rank == 1:
            launch = comm._runtime.launch

            def late(*args: Any) -> None:
                time.sleep(3.0)
                launch(*args)

            comm._runtime.launch = late  # type: ignore[method-assign]
        failure = failure_of(lambda: comm.all_to_all_single(out, source))
        broken(comm)
    return failure


def test_a_rank_that_stalls_is_one_record_on_all_ranks(interpreting_pools: SharedPools) -> None:
    """The kernel gives up: one record, and an abort that reaches every rank's kernel."""
    failures = interpreting_pools.pool(3).run(stalled, timeout_s=100)
    for failure in failures:
        assert failure is not None
        assert failure.kind is DeadlineError, failure
        record = failure.record
        assert isinstance(record, WaitRecord)
        assert record == failures[0].record, "ranks tell different stories"
        assert (record.op, record.call, record.peer) == ("all_to_all_single", 2, 1)
        assert record.rank != 1
        assert 1.0 <= record.waited_s < 3.0
        assert record.seen < record.expected


def killed(rank: int, ranks: int, folder: Path) -> Failure | None:
    """Rank 2 is killed when it has entered a call and its kernel has not begun."""
    del ranks
    given: dict[str, Any] = {"progress_timeout_s": 1.5, "entry_timeout_s": 60.0, "num_blocks": 1}
    comm = Communicator(servers=1, backend="triton", **given)
    comm.barrier()
    source, out = torch.zeros(3), torch.empty(3)
    if rank == 2:

        def end(*args: Any) -> None:
            (folder / "inside").touch()
            time.sleep(60)

        comm._runtime.launch = end  # type: ignore[method-assign]
    failure = failure_of(lambda: comm.all_to_all_single(out, source))
    begin = time.monotonic()
    comm.close()
    assert time.monotonic() - begin < 10
    return failure


def test_a_rank_that_dies(interpreting_pools: SharedPools, tmp_path: Path) -> None:
    """The kernels that wait for it end at their deadline; nothing is left behind."""
    pool = interpreting_pools.pool(3)
    pool.start(killed, tmp_path)
    wait_for(tmp_path / "inside")
    pool.send_signal(2, signal.SIGKILL)
    outcomes = pool.finish(40)
    for outcome in outcomes[:2]:
        assert outcome.error is None, outcome
        failure = outcome.value
        assert failure is not None
        assert failure.kind in (DeadlineError, PeerLostError), failure
        assert failure.record is not None
        assert (failure.record.call, failure.record.peer) == (2, 2)
    assert names_of(pool.pids) == []


def refusals(rank: int, ranks: int) -> list[str]:
    del rank, ranks
    with triton_communicator(1) as comm:
        blocks = message(lambda: comm.all_to_all_single(torch.ones(3), torch.ones(2), num_blocks=0))
    transport = message(lambda: Communicator(servers=1, backend="triton", transport="shm"))
    return [blocks, transport]


def test_bad_input(interpreting_pools: SharedPools) -> None:
    for blocks, transport in interpreting_pools.pool(1).run(refusals):
        assert blocks.startswith("ValueError: ")
        assert "num_blocks must be 1 to" in blocks
        assert transport.startswith("ValueError: ")
        assert "backend triton" in transport
