"""Static exchanges of a communicator, with the CPU for a device: ranks as processes, bit by bit."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import Tensor

from fastkern import Communicator
from tests.conftest import SharedPools
from tests.device.communicators import (
    Topology,
    device_communicator,
    message,
    num_ranks,
)
from tests.device.static_cases import (
    Inputs,
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
    StaticCase(num_experts=5, topk=2, most=40, num_blocks=1),
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


# -- gradients -------------------------------------------------------------------------------------


def step_of(comm: Communicator, case: StaticCase, exchange: Any, given: Inputs) -> list[Tensor]:
    """A layer's step, forward and backward: by the exchange, or by the communicator without one."""
    x, weights = given.xs[0].clone().requires_grad_(), given.weights
    weights = None if weights is None else weights.clone().requires_grad_()
    bias = torch.linspace(-1, 1, 5, dtype=case.dtype).requires_grad_()
    if exchange is None:
        recv, recv_weights, _, handle = comm.dispatch(
            [x, given.xs[1]], given.idx, weights, **case.options()
        )
    else:
        got = exchange.dispatch([x, given.xs[1]], given.idx, weights)
        recv, recv_weights = got.recv_x, got.recv_topk_weights
    row_weights = recv_weights
    if recv_weights is not None and case.layout == "rank":
        row_weights = recv_weights.sum(1)
    y = experts(case, recv[0])
    if exchange is None:
        y = comm.combine(y, handle, weights=row_weights, bias=bias, wire_dtype=case.wire)
    else:
        y = exchange.combine(y, row_weights, bias)
    y.square().sum().backward()
    grads = [t.grad for t in (x, weights, bias) if t is not None]
    assert all(g is not None for g in grads)
    return [y.detach(), *(g for g in grads if g is not None)]


def gradients(rank: int, ranks: int, servers: int, cases: list[StaticCase]) -> None:
    del rank, ranks
    with device_communicator(servers, num_blocks=2) as comm:
        for case in cases:
            with static_of(comm, case) as exchange:
                for k, given in enumerate(steps(comm, case, 11, 4)):
                    right = step_of(comm, case, None, given)
                    for name, a, b in zip(
                        ("y", "x", "weights or bias", "bias"),
                        step_of(comm, case, exchange, given),
                        right,
                        strict=False,
                    ):
                        assert torch.equal(a, b), f"{case} step {k} {name}:\n{a}\n{b}"
        gc.collect()


@pytest.mark.parametrize("planner", PLANNERS)
@pytest.mark.parametrize("topology", [(1, 3), (2, 2)], ids=lambda t: f"{t[0]}x{t[1]}")
def test_gradients_are_the_communicators(
    shared_pools: SharedPools, topology: Topology, planner: str
) -> None:
    """Bit by bit: a token's sums do not depend on plans."""
    changes: tuple[dict[str, Any], ...] = (
        {},
        {"layout": "rank"},
        {"alignment": 4, "dtype": torch.float64, "weights": torch.float64},
        {"weights": None, "topk": 2},
        {"dtype": torch.bfloat16, "wire": torch.float32},
    )
    cases = [StaticCase(planner=planner, gradients=True, **change) for change in changes]
    shared_pools.pool(num_ranks(topology)).run(gradients, topology[0], cases, timeout_s=120)


def late_backward(rank: int, ranks: int) -> str:
    del ranks
    with device_communicator(1) as comm:
        case = StaticCase(gradients=True)
        with static_of(comm, case) as exchange:
            given = next(steps(comm, case, rank, 1))
            x = given.xs[0].requires_grad_()
            got = exchange.dispatch([x, given.xs[1]], given.idx, given.weights)
            y = exchange.combine(experts(case, got.recv_x[0]), got.recv_topk_weights)
            with torch.no_grad():
                exchange.dispatch(given.xs, given.idx, given.weights)
            return message(lambda: y.sum().backward())


def test_a_backward_after_the_next_dispatch_is_refused(shared_pools: SharedPools) -> None:
    for text in shared_pools.pool(2).run(late_backward):
        assert "what is in flight beside it needs a sibling" in text
