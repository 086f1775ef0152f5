"""Dispatch and combine on a device, with the CPU for one: ranks as processes, bit by bit."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch

from fastkern import Communicator
from fastkern.moe import device_blocks
from fastkern.moe.handle import block_of
from tests.conftest import SharedPools
from tests.device.communicator_cases import check_step
from tests.device.communicators import (
    TOPOLOGIES,
    Topology,
    device_communicator,
    host_device,
    message,
    num_ranks,
    on_device,
)
from tests.moe_case_list import NAMED, random_cases
from tests.moe_cases import Case, Data
from tests.moe_checks import check_case
from tests.processes import Pool
from tests.test_moe_calls import counts_of, routing

POLICIES = ("auto", "whole", "split", "direct", "spreadout")


def run_cases(
    rank: int, ranks: int, servers: int, options: dict[str, Any], cases: list[Case]
) -> list[int]:
    """Every case on one communicator; the rows that this rank sent to other servers."""
    del rank
    with device_communicator(servers, **options) as comm:
        sent = [check_case(comm, Data(case, servers, ranks)) for case in cases]
        gc.collect()
        assert not len(device_blocks._blocks), "handles live on"
        return sent


@pytest.mark.parametrize("topology", TOPOLOGIES, ids=lambda t: f"{t[0]}x{t[1]}")
def test_cases(shared_pools: SharedPools, topology: Topology) -> None:
    """Named and random cases against the reference; a token crosses once to each server."""
    servers, ranks = topology[0], num_ranks(topology)
    which = TOPOLOGIES.index(topology)
    parts = (
        (NAMED[which::3], {"chunk_bytes": 200}),
        (random_cases(90 + which, 8), {"debug": True}),
    )
    for k, (cases, given) in enumerate(parts):
        options = {"policy": POLICIES[(which + 2 * k) % 5], "num_blocks": 1 + k, **given}
        sent = shared_pools.pool(ranks).run(run_cases, servers, options, list(cases), timeout_s=120)
        for case, rows in zip(cases, zip(*sent, strict=True), strict=True):
            assert sum(rows) == Data(case, servers, ranks).routing.num_scale_out_rows, case.name


# -- the same as on the host -----------------------------------------------------------------------


def on_both(rank: int, ranks: int, servers: int) -> None:
    with device_communicator(servers) as comm, Communicator(servers=servers) as host:
        for layout in ("expert", "rank"):
            check_step(comm, host, layout, exactly=True)
        gc.collect()


@pytest.mark.parametrize("topology", [(1, 3), (2, 2)], ids=lambda t: f"{t[0]}x{t[1]}")
def test_gradients_and_handles_are_those_of_the_host(
    shared_pools: SharedPools, topology: Topology
) -> None:
    shared_pools.pool(num_ranks(topology)).run(on_both, topology[0])


# -- handles ---------------------------------------------------------------------------------------


def life_of_a_handle(rank: int, ranks: int) -> list[str]:
    with device_communicator(2) as comm:
        x, idx, weights = routing(rank, 9, 3, 8)
        recv, got, _, handle = comm.dispatch(x, idx, weights, num_experts=8)
        kept = handle.meta.detach()[:]  # another tensor of the same storage
        copy, block = handle.meta.clone(), block_of(handle.meta)
        assert block is not None
        assert block.numel() == handle.nbytes
        first = comm.combine(recv, handle, weights=got)
        for other in range(12):  # whatever other calls do, more than there are slots for launches
            comm.dispatch(x + other, idx, num_experts=8)
        handle.meta = kept
        assert torch.equal(comm.combine(recv, handle, weights=got), first)
        handle.meta = copy
        assert torch.equal(comm.combine(recv, handle, weights=got), first)
        del kept, block
        gc.collect()
        texts = [message(lambda: comm.combine(recv, handle))]
        with_counts, _, _, other_handle = comm.dispatch(
            x,
            idx,
            num_experts=8,
            counts=counts_of([routing(r, 9, 3, 8)[1] for r in range(ranks)], 8, 2),
        )
        assert torch.equal(with_counts, recv)
        if rank == 1:
            other_handle.release()
        texts.append(message(lambda: comm.combine(recv, other_handle)))
        texts.append(message(lambda: comm.dispatch(x, idx + (rank == 3) * 8, num_experts=8)))
        texts.append(
            message(lambda: comm.dispatch(x, idx.to("meta") if rank == 2 else idx, num_experts=8))
        )
        comm.barrier()
    return texts


def test_handles_and_bad_input(four: Pool) -> None:
    outcomes = four.run(life_of_a_handle)
    assert all(texts == outcomes[0] for texts in outcomes)
    gone, released, index, place = outcomes[0]
    assert gone.startswith(
        "ValueError: combine: ranks 0, 1, 2, 3: handle: its memory on the device"
    )
    assert released.startswith("ValueError: combine: rank 1: handle: it has been released")
    assert index.startswith("ValueError: dispatch: rank 3: topk_idx[")
    assert place.startswith("TypeError: dispatch: rank 2: topk_idx is on meta, this communicator")


def with_two(rank: int, ranks: int) -> None:
    """A handle is of use with its own communicator alone, and outlives other communicators."""
    case = Data(Case("two"), 2, ranks)
    with host_device() as driver, Communicator(**on_device(driver, 2, {})) as one:
        with Communicator(**on_device(driver, 2, {})) as two:
            x, idx, _ = routing(rank, 4, 2, 4)
            *_, handle = one.dispatch(x, idx, num_experts=4)
            rows, *_, theirs = two.dispatch(x, idx, num_experts=4)
            assert "another communicator" in message(lambda: one.combine(rows, theirs))
        sums = one.combine(rows, handle)
        expected = x * torch.stack([(idx >= 0).sum(1)], 1)
        torch.testing.assert_close(sums, expected)
        check_case(one, case)


def test_handles_of_two_communicators(four: Pool) -> None:
    four.run(with_two)
