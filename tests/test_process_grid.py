"""Eight ranks as processes: every way to cut them into servers, every policy, two transports.

The same grid as test_kernel.py runs on threads, through the whole runtime: entry, planning, growth,
the kernel, and back-to-back calls with a slow rank.
"""

from __future__ import annotations

import time

import numpy as np
import pytest
import torch

import fastkern
from fastkern import Communicator
from tests.conftest import SharedPools
from tests.processes import Pool
from tests.reference import KINDS, random_inputs, random_traffic, reference_all_to_all

POLICIES = ("auto", "whole", "split", "direct", "spreadout")
GUARD = 0xC5


@pytest.fixture
def eight(shared_pools: SharedPools) -> Pool:
    """Eight ranks, shared with other tests."""
    return shared_pools.pool(8)


def grid(rank: int, num_ranks: int, servers: int, policy: str, transport: str, seed: int) -> int:
    """Calls of every kind of traffic, back to back; rows and guard rows are compared."""
    rng = np.random.default_rng(seed)  # the same on all ranks
    chosen = fastkern.shaped(50.0, 5.0) if transport == "shaped" else fastkern.shm(450.0, 50.0)
    compared = 0
    with Communicator(
        servers=servers,
        transport=chosen,
        policy=policy,  # type: ignore[arg-type]
        num_blocks=1 + seed % 3,
        chunk_bytes=1000,
        buffer_bytes=0,
    ) as comm:
        for call, kind in enumerate(KINDS):
            row_bytes = int(rng.integers(1, 300))
            traffic = random_traffic(servers, num_ranks // servers, rng, max_rows=9, kind=kind)
            inputs = random_inputs(traffic, row_bytes, rng)
            expected = reference_all_to_all(traffic, inputs)[rank]
            buffer = torch.full((len(expected) + 2, row_bytes), GUARD, dtype=torch.uint8)
            if rank == call % num_ranks:
                time.sleep(0.005)
            comm.all_to_all_single(
                buffer[1:-1],
                torch.from_numpy(inputs[rank]),
                traffic[:, rank].tolist(),
                traffic[rank].tolist(),
            )
            assert np.array_equal(buffer[1:-1].numpy(), expected), (kind, row_bytes)
            assert (buffer[0] == GUARD).all(), "the row before the output was overwritten"
            assert (buffer[-1] == GUARD).all(), "the row after the output was overwritten"
            compared += len(expected)
    return compared


@pytest.mark.parametrize("transport", ["shm", "shaped"])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("servers", [1, 2, 4, 8])
def test_eight_processes(eight: Pool, servers: int, policy: str, transport: str) -> None:
    seed = POLICIES.index(policy) + 10 * servers
    compared = eight.run(grid, servers, policy, transport, seed)
    assert all(rows > 0 for rows in compared)
