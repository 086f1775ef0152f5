"""all_to_all_single on a device, with the CPU for one: ranks as processes.

Results are compared with the definition, bit by bit.
"""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from fastkern import Communicator
from fastkern.device.host_driver import HostDriver
from fastkern.device.memory import release_leftovers
from tests.conftest import SharedPools
from tests.device.communicator_cases import call_once
from tests.device.communicators import (
    TOPOLOGIES,
    Topology,
    device_communicator,
    host_device,
    leave_work_to_itself,
    message,
    num_ranks,
    on_device,
)
from tests.device.virtual_cases import DTYPES, POLICIES
from tests.processes import Pool
from tests.reference import random_traffic
from tests.test_moe_calls import routing, weighted


@pytest.fixture(params=TOPOLOGIES, ids=lambda t: f"{t[0]}x{t[1]}")
def topology(request: pytest.FixtureRequest) -> Topology:
    return request.param  # type: ignore[no-any-return]


def many_calls(rank: int, ranks: int, servers: int) -> None:
    del rank
    rng = np.random.default_rng(7)
    ways = ("plain", "strided", "queued")
    for k, policy in enumerate(POLICIES[::2]):
        with device_communicator(servers, policy=policy, num_blocks=1 + k % 3) as comm:
            assert comm.device == torch.device("cpu")
            assert comm._runtime.data_bytes < 3 << 20
            for n, dtype in enumerate(DTYPES[k % 2 :: 2]):
                rows = 4000 if n == 3 else 20  # the heap grows once
                traffic = random_traffic(servers, ranks // servers, rng, rows, "")
                if n == 1:
                    traffic[0] = 0
                    traffic[:, ranks - 1] = 0
                call_once(comm, traffic, dtype, 100 * k + n, ways[n % 3])
            call_once(comm, np.zeros((ranks, ranks), dtype=np.int64), torch.int8, 1, "plain")
            comm.barrier()


def test_random_calls(shared_pools: SharedPools, topology: Topology) -> None:
    """Dtypes, policies, blocks, strides, the queue, empty ranks and growth."""
    shared_pools.pool(num_ranks(topology)).run(many_calls, topology[0], timeout_s=120)


def in_rounds(rank: int, ranks: int) -> None:
    with device_communicator(2, max_buffer_bytes=3000, chunk_bytes=100) as comm:
        source = torch.arange(400.0).view(400, 1) + 1000 * rank
        out = torch.empty_like(source)
        comm.all_to_all_single(out, source)
        parts = [(torch.arange(400.0) + 1000 * s)[100 * rank :][:100] for s in range(ranks)]
        assert torch.equal(out.view(-1), torch.cat(parts))
        assert comm._runtime.epoch > 1


def test_a_call_in_rounds(four: Pool) -> None:
    four.run(in_rounds)


def two_at_once(rank: int, ranks: int) -> None:
    """Two communicators, on one device and interleaved; one is used after the other was closed."""
    rng = np.random.default_rng(3)
    with host_device() as driver, Communicator(**on_device(driver, 2, {})) as outer:
        with Communicator(**on_device(driver, 1, {"policy": "direct"})) as inner:
            works = []
            for comm in (outer, inner, outer):
                source = torch.arange(4 * ranks) + 100 * rank
                works.append(
                    (comm.all_to_all_single(o := source.clone(), source, None, None, True), o)
                )
            for work, out in works:
                assert work is not None
                work.wait()
                assert out.tolist() == [
                    100 * s + 4 * rank + k for s in range(ranks) for k in range(4)
                ]
        call_once(outer, random_traffic(2, ranks // 2, rng, 9, ""), torch.int16, 5, "plain")
        assert message(inner.barrier) == "ClosedError: the communicator is closed"


def test_two_communicators(four: Pool) -> None:
    four.run(two_at_once)


def far_ahead(rank: int, ranks: int) -> None:
    """The host runs ahead of the device, as on a GPU: by more launches than have a block each,
    through growth, and from a dispatch into its combine."""
    with device_communicator(2) as comm:
        order = leave_work_to_itself(comm)
        kept = []
        for call in range(20):
            source = torch.arange(ranks * (10 if call < 12 else 200_000)) + 7 * call + rank
            out = torch.full_like(source, -1)
            comm.all_to_all_single(out, source)
            kept.append((source, out))
        assert comm._runtime.data_bytes > 2 << 20
        x, idx, weights = routing(rank, 30, 3, 8)
        recv, got, _, handle = comm.dispatch(x, idx, weights, num_experts=8)
        y = comm.combine(recv, handle, weights=got)
        order.wait()
        torch.testing.assert_close(y, weighted(x, idx, weights))
        for call, (source, out) in enumerate(kept):
            part = len(source) // ranks
            own = torch.arange(part) + rank * part + 7 * call
            assert torch.equal(out, torch.cat([own + s for s in range(ranks)])), f"call {call}"
        comm.check()


def test_a_host_far_ahead_of_the_device(four: Pool) -> None:
    four.run(far_ahead)


def with_little_memory(rank: int, ranks: int) -> list[str]:
    """Rank 1's device has room for a heap of 4 MiB, not for one of 64 MiB."""
    rng = np.random.default_rng(1)
    small = random_traffic(2, ranks // 2, rng, 9, "")
    with host_device(12 << 20 if rank == 1 else None) as driver:
        texts = [message(lambda: Communicator(**on_device(driver, 2, {"buffer_bytes": 64 << 20})))]
        with Communicator(**on_device(driver, 2, {})) as comm:
            call_once(comm, small, torch.int32, 1, "plain")
            texts.append(message(lambda: comm.reserve(64 << 20)))
            call_once(comm, small, torch.int32, 2, "queued")
            source = torch.arange(ranks << 19) + rank  # 16 MiB in all: in rounds
            out = torch.empty_like(source)
            comm.all_to_all_single(out, source)
            begin = rank << 19
            assert out.view(ranks, -1)[:, 0].tolist() == [begin + s for s in range(ranks)]
            x, idx = torch.zeros(40000, 64), torch.arange(40000).view(-1, 1) % ranks
            texts.append(message(lambda: comm.dispatch(x, idx, num_experts=ranks)))
            call_once(comm, small, torch.int32, 3, "strided")
    return texts


def test_too_little_memory(four: Pool) -> None:
    for texts in four.run(with_little_memory):
        for text in texts:
            assert text.startswith("HeapMemoryError: allocation of the heap, rank 1: "), text


# -- what is refused -------------------------------------------------------------------------------


def with_bad_input(rank: int, ranks: int) -> list[str]:
    with device_communicator(1) as comm:
        x = torch.zeros(ranks, 2)
        elsewhere = torch.zeros(ranks, 2, device="meta")
        texts = [
            message(lambda: comm.all_to_all_single(torch.zeros(ranks, 2 + (rank == 1)), x)),
            message(lambda: comm.all_to_all_single(x.clone(), elsewhere if rank == 2 else x)),
            message(lambda: comm.all_to_all_single(x.clone().int() if rank == 0 else x.clone(), x)),
        ]
        comm.barrier()
        return texts


def test_bad_input_is_the_same_error_on_all_ranks(shared_pools: SharedPools) -> None:
    outcomes = shared_pools.pool(3).run(with_bad_input)
    width, place, dtype = outcomes[0]
    assert all(texts == outcomes[0] for texts in outcomes)
    assert width.startswith("ValueError: all_to_all_single: rank 1: a row of input")
    assert place.startswith("TypeError: all_to_all_single: rank 2: input is on meta, this comm")
    assert dtype.startswith("TypeError: all_to_all_single: rank 0: output is int32")


class FullDriver(HostDriver):
    """A device that holds two blocks at once."""

    def resident_blocks(self, function: Any, num_lanes: int) -> int:
        return 2


def with_many_blocks(rank: int, ranks: int) -> list[str]:
    driver = FullDriver() if rank == 1 else HostDriver()
    given = [on_device(driver, 1, {"num_blocks": blocks}) for blocks in (3, 2)]
    texts = [message(lambda: Communicator(**given[0]))]
    with Communicator(**given[1]) as comm:
        comm.barrier()
    dist.barrier()
    assert release_leftovers() == 0
    assert driver.leftovers() == []
    driver.close()
    return texts


def test_blocks_that_do_not_fit(shared_pools: SharedPools) -> None:
    for (text,) in shared_pools.pool(3).run(with_many_blocks):
        assert text.startswith("FastkernError: loading of the kernels, rank 1: fastkern_exchange: ")
        assert "at most 2 per rank" in text


def with_backends(rank: int, ranks: int) -> list[str]:
    """Nothing here has a GPU."""
    given: list[dict[str, Any]] = [
        {"transport": "peer"},
        {"backend": "cuda"},
        {"transport": "peer", "backend": "cuda" if rank else "hip"},
        {"transport": "peer", "backend": "host"},
        {"transport": "shm", "backend": "cuda"},
        {"transport": "nvshmem"},
        {"transport": "nccl_gin", "backend": "hip"},
        {"backend": "metal" if rank == 1 else None},
        {"backend": 7, "transport": "peer"},
        {"backend": "triton"},
        {"backend": "triton", "transport": "rocshmem"},
    ]
    texts = [message(lambda options=options: Communicator(**options)) for options in given]
    with host_device() as driver:
        texts.append(
            message(
                lambda: (
                    Communicator(transport="peer", backend=driver)
                    if rank
                    else Communicator(transport="peer", backend=driver, chunk_bytes=7)
                )
            )
        )
    dist.barrier()
    return texts


def test_a_backend_that_cannot_be_had(shared_pools: SharedPools) -> None:
    outcomes = shared_pools.pool(3).run(with_backends)
    assert all(texts == outcomes[0] for texts in outcomes)
    cuda, alone, hip, host, shm, nvshmem, gin, unknown, number, *triton, disagree = outcomes[0]
    assert cuda.startswith("DeviceUnavailableError: rank 0: ")
    assert "pip install 'fastkern[cuda]'" in cuda or "libcuda" in cuda or "PyTorch" in cuda
    assert alone == cuda  # on devices the transport is peer
    assert hip.startswith("DeviceUnavailableError: rank 0: ")
    assert host == "ValueError: rank 0: transport peer is between devices, backend is host"
    assert shm.startswith("ValueError: rank 0: backend cuda needs a transport between devices")
    assert nvshmem.startswith("DeviceUnavailableError: rank 0: ")  # the library or the GPU
    assert gin == "ValueError: rank 0: transport nccl_gin is for cuda, and backend is hip"
    known = "host, cuda, hip, triton"
    assert unknown == f"ValueError: rank 1: backend must be one of {known}, not 'metal'"
    assert number == "TypeError: rank 0: backend must be a name or a Driver, not 7"
    assert triton[0].startswith("DeviceUnavailableError: rank 0: backend triton: PyTorch ")
    assert "TRITON_INTERPRET=1" in triton[0]
    assert triton[1].startswith("ValueError: rank 0: backend triton: its kernels go over peer")
    assert disagree.startswith("AgreementError: ranks disagree on chunk_bytes")


def mapped() -> list[str]:
    lines = Path("/proc/self/maps").read_text().splitlines()
    return [line for line in lines if "/fastkern-" in line]


def close_at_once(rank: int, ranks: int) -> list[str]:
    del rank, ranks
    gc.collect()
    before = mapped()
    gc.disable()
    try:
        with device_communicator(1) as comm:
            comm.barrier()
        return [line for line in mapped() if line not in before]
    finally:
        gc.enable()


def test_closing_leaves_no_memory_mapped(shared_pools: SharedPools) -> None:
    """At once, not when the garbage collector comes by."""
    assert shared_pools.pool(2).run(close_at_once) == [[], []]
