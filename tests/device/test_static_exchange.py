"""Static exchanges of a communicator, with the CPU for a device: ranks as processes, bit by bit."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch

from tests.conftest import SharedPools
from tests.device.communicators import (
    Topology,
    device_communicator,
    num_ranks,
)
from tests.device.static_cases import (
    StaticCase,
    compare,
    experts,
    received,
    static_of,
    steps,
    sums_of,
)

PLANNERS = ("device", "host")
TOPOLOGIES: tuple[Topology, ...] = ((1, 1), (1, 3), (2, 1), (2, 2), (3, 1))
CASES = (
    StaticCase(),
    StaticCase(alignment=4, dtype=torch.bfloat16, wire=torch.float32),
    StaticCase(layout="rank"),
    StaticCase(weights=None, topk=1),
    StaticCase(dtype=torch.float64, weights=torch.float64, topk=7),
    StaticCase(num_experts=5, topk=2, most=40),
)


def run_steps(
    rank: int, ranks: int, servers: int, options: dict[str, Any], cases: list[StaticCase]
) -> None:
    del rank, ranks
    with device_communicator(servers, **options) as comm:
        for case in cases:
            with static_of(comm, case) as exchange:
                for k, given in enumerate(steps(comm, case, 5, 5)):
                    right, y = sums_of(comm, case, given)
                    got = exchange.dispatch(given.xs, given.idx, given.weights)
                    weights = got.recv_topk_weights if case.layout == "expert" else None
                    z = exchange.combine(experts(case, got.recv_x[0]), weights)
                    compare(case, received(case, got), right, f"{case} step {k}")
                    assert torch.equal(z, y), f"{case} step {k}"
                exchange.check()
        gc.collect()


@pytest.mark.parametrize("planner", PLANNERS)
@pytest.mark.parametrize("topology", TOPOLOGIES, ids=lambda t: f"{t[0]}x{t[1]}")
def test_it_does_what_the_communicator_does(
    shared_pools: SharedPools, topology: Topology, planner: str
) -> None:
    cases = [StaticCase(**{**vars(case), "planner": planner}) for case in CASES]
    given = {"num_blocks": 2, "chunk_bytes": 300 if topology == (2, 2) else 1 << 17}
    pool = shared_pools.pool(num_ranks(topology))
    pool.run(run_steps, topology[0], given, cases, timeout_s=200)
