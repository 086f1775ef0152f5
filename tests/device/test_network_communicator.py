"""Whole communicators over a network between servers, each a host of its own, with the CPU for a
device: ranks as processes, results compared bit by bit."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from fastkern import Communicator
from fastkern.device.memory import release_leftovers
from tests.conftest import SharedPools
from tests.device.communicator_cases import call_once, check_step
from tests.device.communicators import host_device
from tests.device.shared_network import hosts_of, network_communicator, on_network
from tests.device.test_communicator_failures import exchange
from tests.device.virtual_cases import DTYPES, POLICIES
from tests.processes import Pool
from tests.reference import random_traffic

TOPOLOGIES = ((2, 1), (2, 2), (3, 1), (4, 1))


def many_calls(rank: int, ranks: int, servers: int) -> None:
    del rank
    rng = np.random.default_rng(7)
    ways = ("plain", "strided", "queued")
    for k, policy in enumerate(POLICIES[::2]):
        cross_rail = policy in ("direct", "spreadout")
        options = {"policy": policy, "num_blocks": 1 + k % 3, "cross_rail": cross_rail}
        with network_communicator(servers, **options) as comm:
            assert comm.topology.cross_rail == cross_rail
            runtime: Any = comm._runtime
            reached = [r for r in range(ranks) if runtime._heap.data_address(r)]
            assert len(reached) == ranks // servers, "mapped across servers"
            for n, dtype in enumerate(DTYPES[k % 2 :: 2]):
                rows = 4000 if n == 3 else 20  # the heap grows once
                traffic = random_traffic(servers, ranks // servers, rng, rows, "")
                if n == 1:
                    traffic[0] = 0
                    traffic[:, ranks - 1] = 0
                call_once(comm, traffic, dtype, 100 * k + n, ways[n % 3])
            call_once(comm, np.zeros((ranks, ranks), dtype=np.int64), torch.int8, 1, "plain")
            comm.barrier()


@pytest.mark.parametrize("topology", TOPOLOGIES, ids=lambda t: f"{t[0]}x{t[1]}")
def test_random_calls(shared_pools: SharedPools, topology: tuple[int, int]) -> None:
    """Dtypes, policies, blocks, strides, the queue, empty ranks and growth."""
    pool = shared_pools.pool(topology[0] * topology[1])
    pool.run(many_calls, topology[0], timeout_s=120)


def steps(rank: int, ranks: int, servers: int) -> None:
    del rank, ranks
    with (
        Communicator(servers=servers, transport="shm", buffer_bytes=0) as host,
        network_communicator(servers) as comm,
    ):
        for layout in ("expert", "rank"):
            check_step(comm, host, layout, exactly=True)


@pytest.mark.parametrize("topology", TOPOLOGIES[:2], ids=lambda t: f"{t[0]}x{t[1]}")
def test_dispatch_and_combine(shared_pools: SharedPools, topology: tuple[int, int]) -> None:
    """Forward, backward and cached handles are what they are on the host."""
    pool = shared_pools.pool(topology[0] * topology[1])
    pool.run(steps, topology[0], timeout_s=120)


def in_rounds(rank: int, ranks: int) -> None:
    with network_communicator(2, max_buffer_bytes=3000, chunk_bytes=100) as comm:
        source = torch.arange(400.0).view(400, 1) + 1000 * rank
        out = torch.empty_like(source)
        comm.all_to_all_single(out, source)
        parts = [(torch.arange(400.0) + 1000 * s)[100 * rank :][:100] for s in range(ranks)]
        assert torch.equal(out.view(-1), torch.cat(parts))
        assert comm._runtime.epoch > 1


def test_a_call_in_rounds(four: Pool) -> None:
    four.run(in_rounds)


def closed_one_by_one(rank: int, ranks: int) -> None:
    """What another host may still write to stays until it has closed too."""
    with host_device() as driver, hosts_of(rank, ranks // 2):
        comm = Communicator(**on_network(driver, 2, {}))
        exchange(comm)
        if rank == 0:
            comm.close()
            time.sleep(0.2)
            assert release_leftovers() == 1
        dist.barrier()
        comm.close()
        dist.barrier()
        assert release_leftovers() == 0


def test_closed_one_by_one(shared_pools: SharedPools) -> None:
    shared_pools.pool(2).run(closed_one_by_one)
