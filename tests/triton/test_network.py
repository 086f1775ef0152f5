"""The kernels in Triton between servers, interpreted: the protocol over a library's puts, with the
network that maps all memory and with fakes of NVSHMEM and NCCL that are late.
"""

from __future__ import annotations

import ctypes
import time
from typing import Any

import numpy as np
import pytest
import torch

from fastkern import Communicator, DeadlineError, WaitRecord
from fastkern.kernels import _host
from fastkern.planner.table import VALUE_BITS
from tests.conftest import SharedPools
from tests.device.communicator_cases import call_once, check_step
from tests.reference import random_traffic
from tests.test_runtime_failures import Failure, broken, failure_of
from tests.triton.fake_libraries import Library
from tests.triton.network_ranks import far_communicator, late_communicator

TRANSPORTS = ("nvshmem", "nccl_gin")

by_transport = pytest.mark.parametrize("transport", TRANSPORTS)


def all_to_alls(rank: int, ranks: int, servers: int, policy: str) -> None:
    """Odd and even widths, ranks that send or get nothing, several chunks; and calls after it."""
    del rank
    rng = np.random.default_rng(3)
    options: dict[str, Any] = {"cross_rail": policy == "direct", "chunk_bytes": 300}
    with far_communicator(servers, policy=policy, **options) as comm:
        traffic = random_traffic(servers, ranks // servers, rng, 8, "")
        call_once(comm, traffic, torch.uint8, 1, "queued")
        traffic[0] = 0
        traffic[:, ranks - 1] = 0
        call_once(comm, traffic, torch.int16, 2, "plain")
        call_once(comm, np.zeros_like(traffic), torch.int8, 3, "plain")


@pytest.mark.parametrize(
    ("topology", "policy"), [((2, 2), "whole"), ((2, 2), "direct"), ((3, 1), "split")], ids=str
)
def test_all_to_all(
    interpreting_pools: SharedPools, topology: tuple[int, int], policy: str
) -> None:
    servers, gpus_per_server = topology
    pool = interpreting_pools.pool(servers * gpus_per_server)
    pool.run(all_to_alls, servers, policy, timeout_s=250)


def steps(rank: int, ranks: int, servers: int) -> None:
    """A dispatch, a combine, their backward, the handle again, as on the host."""
    del rank, ranks
    with (
        Communicator(servers=servers, transport="shm", policy="whole", buffer_bytes=0) as host,
        far_communicator(servers, policy="whole", chunk_bytes=1024) as comm,
    ):
        check_step(comm, host, "expert", exactly=True)


def test_dispatch_and_combine(interpreting_pools: SharedPools) -> None:
    interpreting_pools.pool(2).run(steps, 2, timeout_s=250)


# -- the wires of the libraries --------------------------------------------------------------------


def late_calls(
    rank: int, ranks: int, servers: int, transport: str, policy: str, faults: tuple[str, ...] = ()
) -> str:
    """Two calls over a library whose puts come late and in any order; what went wrong."""
    del rank
    said = ""
    rng = np.random.default_rng(5)
    options: dict[str, Any] = {"cross_rail": policy == "direct", "chunk_bytes": 64}
    if faults:  # more puts to go wrong
        options |= {"progress_timeout_s": 2.0, "chunk_bytes": 32}
    with late_communicator(transport, servers, faults=faults, policy=policy, **options) as (
        comm,
        library,
    ):
        for k in range(2):
            traffic = random_traffic(servers, ranks // servers, rng, 6, "")
            traffic[ranks - 1, 0] += 6  # something crosses, in several chunks
            try:
                call_once(comm, traffic, torch.int64, k, "plain")
            except AssertionError as error:  # after the call: the others go on too
                said += f"wrong rows: {error}"
            except DeadlineError as error:
                return str(error)
        prefix = {"nvshmem": "fastkern_nvshmem_", "nccl_gin": "fastkern_gin_"}[transport]
        assert library.called, "the wire was not used"
        assert all(name.startswith(prefix) for name in library.called), library.called
    return said


@pytest.mark.parametrize(
    ("transport", "policy", "topology"),
    [
        ("nvshmem", "direct", (2, 1)),
        ("nccl_gin", "whole", (2, 1)),
    ],
    ids=lambda value: str(value),
)
def test_late_puts(
    interpreting_pools: SharedPools, transport: str, policy: str, topology: tuple[int, int]
) -> None:
    servers, gpus_per_server = topology
    pool = interpreting_pools.pool(servers * gpus_per_server)
    for said in pool.run(late_calls, servers, transport, policy, timeout_s=250):
        assert said == ""


def slow_reads(rank: int, ranks: int, transport: str, faults: tuple[str, ...] = ()) -> int:
    """Puts whose bytes have not been read when the kernel that began them is over."""
    traffic = np.array([[0, 12], [0, 0]], dtype=np.int64)
    options: dict[str, Any] = {"policy": "whole", "chunk_bytes": 32}
    with late_communicator(transport, 2, delay_s=0.3, faults=faults, **options) as (comm, library):
        source = torch.arange(12 * (rank == 0)).view(-1, 1)
        splits = traffic[rank].tolist(), traffic[:, rank].tolist()
        out = torch.empty((12 * (rank == 1), 1), dtype=torch.int64)
        comm.all_to_all_single(out, source, splits[1], splits[0])
        left = library.nic.puts_begun - sum(library.nic.read)
        assert library.nic.puts_begun == 3 * (rank == 0)
        assert rank == 0 or torch.equal(out, torch.arange(12).view(-1, 1))
    return left


@by_transport
def test_staging_is_kept_until_it_has_been_read(
    interpreting_pools: SharedPools, transport: str
) -> None:
    assert interpreting_pools.pool(2).run(slow_reads, transport, timeout_s=100) == [0, 0]


# -- deadlines and aborts across servers -----------------------------------------------------------


def slow_chain(
    rank: int, ranks: int, transport: str, faults: tuple[str, ...] = ()
) -> Failure | None:
    """Server 0 waits for server 1 until that has sent many chunks to server 2, slowly; the deadline
    is a part of the time."""
    traffic = np.array([[0, 0, 0], [1, 0, 14], [0, 0, 0]], dtype=np.int64)
    options: dict[str, Any] = {"policy": "whole", "chunk_bytes": 8, "progress_timeout_s": 2.0}
    with late_communicator(transport, 3, delay_s=0.25, faults=faults, **options) as (comm, _):
        rows = int(traffic[rank].sum())
        source = torch.arange(rows).view(-1, 1)
        out = torch.empty((int(traffic[:, rank].sum()), 1), dtype=torch.int64)
        splits = traffic[rank].tolist(), traffic[:, rank].tolist()
        failure = failure_of(lambda: comm.all_to_all_single(out, source, splits[1], splits[0]))
        if failure is not None:
            broken(comm)
    return failure


def test_a_deadline_counts_from_progress_elsewhere(interpreting_pools: SharedPools) -> None:
    begin = time.monotonic()
    assert interpreting_pools.pool(3).run(slow_chain, "nccl_gin", timeout_s=150) == [None] * 3
    assert time.monotonic() - begin > 3, "no longer than the deadline"


def control_word(library: Library, name: str) -> int:
    """A word of this rank's Control."""
    fields, _ = _host.record_schemas()["Control"]
    (offset,) = (at for field, _, at in fields if field == name)
    return ctypes.c_uint64.from_address(library.control[0] + offset).value


def stalled(
    rank: int, ranks: int, transport: str, faults: tuple[str, ...] = ()
) -> tuple[Failure | None, int, int]:
    """Rank 3, of the other server, enters, but launches its kernel when the others' have given up.
    Rank 0 has a deadline of 1 s, the others one of 4 s. How it failed, abort word, notice."""
    source, out = torch.arange(float(ranks)), torch.empty(ranks)
    deadline_s = 1.0 if rank == 0 else 4.0
    options: dict[str, Any] = {"policy": "whole", "progress_timeout_s": deadline_s}
    with late_communicator(transport, 2, faults=faults, **options) as (comm, library):
        comm.all_to_all_single(out, source)
        runtime: Any = comm._runtime
        if rank == 3:
            launch = runtime.launch

            def late(*args: Any) -> None:
                time.sleep(2.5)
                launch(*args)

            runtime.launch = late
        failure = failure_of(lambda: comm.all_to_all_single(out, source))
        broken(comm)
        words = control_word(library, "abort"), control_word(library, "notice")
    return failure, *words


def test_all_leave_when_one_gives_up(interpreting_pools: SharedPools) -> None:
    """The word goes to the other server, where rank 2 has time left, the record does not."""
    said = interpreting_pools.pool(4).run(stalled, "nvshmem", timeout_s=100)
    word = 2 << VALUE_BITS | (0 + 1)  # call 2, given up by rank 0
    for rank, (failure, abort, _) in enumerate(said):
        assert failure is not None
        assert failure.kind is DeadlineError, failure
        assert abort == word, said
        if rank < 2:
            record = failure.record
            assert isinstance(record, WaitRecord), failure
            assert (record.rank, record.call) == (0, 2)
            assert 1.0 <= record.waited_s < 2.5
    assert said[2][2] == word, "rank 0 has told its same-index peer"


# -- faults that must show -------------------------------------------------------------------------


def test_missing_quiet_is_found(interpreting_pools: SharedPools) -> None:
    for transport in TRANSPORTS:
        left = interpreting_pools.pool(2).run(slow_reads, transport, ("no quiet",), timeout_s=100)
        assert left[0] > 0, transport


def test_an_abort_that_is_not_passed_on_is_found(interpreting_pools: SharedPools) -> None:
    said = interpreting_pools.pool(4).run(stalled, "nccl_gin", ("no notices",), timeout_s=100)
    assert said[2][2] == 0


def test_missing_beats_are_found(interpreting_pools: SharedPools) -> None:
    said = interpreting_pools.pool(3).run(slow_chain, "nvshmem", ("no beats",), timeout_s=150)
    assert any(failure is not None for failure in said)


@pytest.mark.parametrize(
    ("transport", "fault"),
    [("nvshmem", "early flags"), ("nccl_gin", "sets")],
    ids=["flags-before-their-bytes", "signals-that-do-not-add"],
)
def test_wrong_flags_are_found(interpreting_pools: SharedPools, transport: str, fault: str) -> None:
    said = interpreting_pools.pool(2).run(
        late_calls, 2, transport, "whole", (fault,), timeout_s=150
    )
    assert any(said)
