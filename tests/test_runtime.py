"""The communicator's life, the growth of its heap, and what stays behind."""

from __future__ import annotations

import secrets
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import fastkern
from fastkern import (
    AgreementError,
    ClosedError,
    Communicator,
    FastkernError,
    HeapMemoryError,
)
from fastkern.heap import ProcessIdentity, fresh_name, own_identity, remove_leftovers
from tests.processes import Pool

SHARED_MEMORY = Path("/dev/shm")
GROWTH_ROUND = 2 << 20  # the heap grows in whole multiples of this


def check(comm: Communicator, num_rows: int = 3, row_words: int = 2) -> None:
    """num_rows rows of row_words 64-bit words per pair; they carry source, destination and row."""
    rank, num_ranks = comm.rank, comm.num_ranks
    rows = torch.arange(num_rows)

    def part(src: int, dst: int) -> torch.Tensor:
        return ((src * num_ranks + dst) * num_rows + rows).unsqueeze(1).repeat(1, row_words)

    source = torch.cat([part(rank, dst) for dst in range(num_ranks)])
    out = torch.full((num_ranks * num_rows, row_words), -1)
    comm.all_to_all_single(out, source)
    assert torch.equal(out, torch.cat([part(src, rank) for src in range(num_ranks)]))


def heap_mappings() -> list[str]:
    """Lines of this process's memory map that are fastkern's heap."""
    return [k for k in Path("/proc/self/maps").read_text().splitlines() if "/fastkern-" in k]


def names_of(pids: list[int]) -> list[str]:
    """Segments in /dev/shm that these processes made."""
    return [p.name for p in SHARED_MEMORY.glob("fastkern-*") if int(p.name.split("-")[2]) in pids]


# -- life ------------------------------------------------------------------------------------------


def as_a_context(rank: int, num_ranks: int) -> None:
    before = heap_mappings()
    with Communicator(servers=2, buffer_bytes=0) as comm:
        assert comm.topology.servers == 2
        assert comm.topology.gpus_per_server == 2
        check(comm)
        assert "closed" not in repr(comm)
        assert len(heap_mappings()) == len(before) + 2  # control and data
        work = comm.all_to_all_single(torch.zeros(4), torch.ones(4), async_op=True)
    assert work is not None
    assert work.is_success()
    assert "closed" in repr(comm)
    assert heap_mappings() == before
    for call in (comm.barrier, lambda: comm.reserve(1), lambda: check(comm), comm.check):
        with pytest.raises(ClosedError, match="closed"):
            call()
    with pytest.raises(ClosedError):
        comm.all_to_all_single(torch.zeros(4), torch.ones(4), async_op=True)
    comm.close()
    with pytest.raises(ZeroDivisionError):
        fail_inside()
    assert heap_mappings() == before


def fail_inside() -> None:
    with Communicator(buffer_bytes=4096) as comm:
        check(comm)
        raise ZeroDivisionError


def test_a_communicator_is_a_context_and_leaves_nothing(four: Pool) -> None:
    four.run(as_a_context)
    assert names_of(four.pids) == []


def several(rank: int, num_ranks: int) -> None:
    """Three on one group, their calls interleaved, in the background too."""
    with (
        Communicator(servers=1) as one,
        Communicator(servers=2, policy="whole", chunk_bytes=100) as two,
        Communicator(servers=4, policy="direct", num_blocks=3) as four,
    ):
        for call in range(10):
            work = one.all_to_all_single(torch.zeros(8), torch.ones(8), async_op=True)
            check(two, 1 + call)
            check(four, 10 - call)
            check(one, 2)
            assert work is not None
            assert work.is_success()  # `one` runs its calls in order
        two.close()
        check(one)
        check(four)


def test_several_communicators_at_once(four: Pool) -> None:
    four.run(several)


def closed_by_another_thread(rank: int, num_ranks: int) -> None:
    """close() waits for a call that another thread has begun."""
    comm = Communicator(servers=2, entry_timeout_s=3, progress_timeout_s=3)
    results: list[Any] = []

    def call() -> None:
        try:
            check(comm)
            results.append("right rows")
        except Exception as error:
            results.append(error)

    if rank == 3:
        time.sleep(0.3)
        call()
    else:
        thread = threading.Thread(target=call)
        thread.start()
        time.sleep(0.1)
        comm.close()  # while `call` waits for rank 3
        thread.join(15)
    assert results == ["right rows"], results


def test_close_while_another_thread_is_in_a_call(four: Pool) -> None:
    four.run(closed_by_another_thread)


def one_rank_alone(rank: int, num_ranks: int) -> None:
    groups = [dist.new_group([r]) for r in range(num_ranks)]
    with Communicator(groups[rank]) as comm:
        assert (comm.rank, comm.num_ranks) == (0, 1)
        check(comm, 1000)


def test_a_group_of_one_rank(four: Pool) -> None:
    four.run(one_rank_alone)


# -- growth ----------------------------------------------------------------------------------------


def growing(rank: int, num_ranks: int, policy: str) -> None:
    with Communicator(servers=2, policy=policy, buffer_bytes=1) as comm:  # type: ignore[arg-type]
        sizes = []
        for num_rows in (1, 40_000, 3, 120_000, 1):
            check(comm, num_rows)
            sizes.append(comm._runtime.data_bytes)
        assert sizes[0] == GROWTH_ROUND
        assert sizes[0] < sizes[1] == sizes[2] < sizes[3] == sizes[4]
        assert len(heap_mappings()) == 2, "an outgrown segment is still mapped"


@pytest.mark.parametrize("policy", ["whole", "direct"])
def test_the_heap_grows_when_a_call_needs_more(four: Pool, policy: str) -> None:
    four.run(growing, policy)
    assert names_of(four.pids) == []


def exact_size(rank: int, num_ranks: int, policy: str) -> list[int]:
    """With the size that the formula gives a call is one launch; with a byte less it is not."""
    row_bytes, num_rows = 1000, 37
    traffic = np.full((num_ranks, num_ranks), num_rows)
    options: dict[str, Any] = {"servers": 2, "policy": policy, "buffer_bytes": 0}
    with Communicator(**options) as comm:
        need = comm.buffer_bytes_for(traffic, row_bytes)
        assert need == comm.buffer_bytes_for(traffic.tolist(), row_bytes)
        comm.reserve(need)
        reserved = comm._runtime.data_bytes
        assert need <= reserved < need + GROWTH_ROUND
        check(comm, num_rows, row_bytes // 8)
        assert comm._runtime.data_bytes == reserved
    launches = []
    for most in (need, need - 1, need // 5):
        with Communicator(**options, max_buffer_bytes=most) as comm:
            check(comm, num_rows, row_bytes // 8)
            launches.append(comm._runtime.epoch)
    assert launches[0] == 1
    assert launches[1] == 2
    assert launches[2] >= 5
    return [need, *launches]


@pytest.mark.parametrize("policy", ["whole", "split", "direct"])
def test_buffer_bytes_for_is_exact(four: Pool, policy: str) -> None:
    results = four.run(exact_size, policy)
    assert results == [results[0]] * 4


def too_large(rank: int, num_ranks: int, num_bytes: int) -> None:
    """Raises the error of a reservation that cannot be, having checked that calls go on."""
    with Communicator(servers=2, buffer_bytes=0, entry_timeout_s=2) as comm:
        check(comm)
        try:
            comm.reserve(num_bytes)
        except (MemoryError, ValueError):
            check(comm)
            check(comm, 50_000)  # a growth that can be
            raise


@pytest.mark.parametrize("num_bytes", [1 << 50, 1 << 62, (1 << 64) - 1], ids=hex)
def test_memory_that_is_not_there_is_an_error_on_all_ranks(four: Pool, num_bytes: int) -> None:
    errors = four.errors(too_large, num_bytes)
    assert {type(e) for e in errors} == {HeapMemoryError}, errors
    assert len({str(e) for e in errors}) == 1
    assert "for each of 4 ranks" in str(errors[0])
    assert names_of(four.pids) == []


@pytest.mark.parametrize("num_bytes", [-1, 1 << 64, 1 << 80], ids=hex)
def test_sizes_that_are_none_are_refused_on_all_ranks(four: Pool, num_bytes: int) -> None:
    errors = four.errors(too_large, num_bytes)
    assert {type(e) for e in errors} == {ValueError}, errors
    assert len({str(e) for e in errors}) == 1


def unequal_sizes(rank: int, num_ranks: int) -> None:
    with Communicator(entry_timeout_s=5) as comm:
        try:
            comm.reserve(5000 if rank == 1 else 6000)
        except ValueError:
            check(comm)
            raise


def test_reserve_with_unequal_sizes(four: Pool) -> None:
    errors = four.errors(unequal_sizes)
    assert {str(e) for e in errors} == {str(errors[0])}
    assert "rank 1: 5000 bytes" in str(errors[0])


def too_large_at_creation(rank: int, num_ranks: int) -> None:
    Communicator(buffer_bytes=1 << 50)


def test_memory_that_is_not_there_at_creation(four: Pool) -> None:
    errors = four.errors(too_large_at_creation)
    assert {type(e) for e in errors} == {HeapMemoryError}
    assert names_of(four.pids) == []


# -- leftovers -------------------------------------------------------------------------------------

TELL_IDENTITY = (
    "from fastkern.heap import own_identity as i; k = i(); print(k.pid, k.start, k.namespace)"
)


def dead_process() -> ProcessIdentity:
    """A process that has ended."""
    told = subprocess.run(
        [sys.executable, "-c", TELL_IDENTITY], capture_output=True, text=True, check=True
    )
    return ProcessIdentity(*map(int, told.stdout.split()))


@pytest.fixture
def segment() -> Iterator[Any]:
    """Makes a file in /dev/shm with a given maker; those still there are removed afterwards."""
    made = []

    def make(maker: ProcessIdentity, name: str = "") -> Path:
        name = (
            name or f"fastkern-{maker.namespace}-{maker.pid}-{maker.start}-{secrets.token_hex(16)}"
        )
        made.append(SHARED_MEMORY / name)
        made[-1].write_bytes(b"left")
        return made[-1]

    yield make
    for path in made:
        path.unlink(missing_ok=True)


def test_only_what_dead_processes_left_is_removed(segment: Any) -> None:
    me, dead = own_identity(), dead_process()
    assert me.alive()
    assert not dead.alive()
    left = segment(dead)
    reused_pid = segment(ProcessIdentity(me.pid, me.start - 1, me.namespace))
    kept = [
        segment(me),
        segment(ProcessIdentity(dead.pid, dead.start, dead.namespace + 1)),  # cannot be told
        segment(dead, f"fastkern-{dead.namespace}-{dead.pid}-{dead.start}-short"),  # not of ours
    ]
    removed = remove_leftovers()
    assert {left.name, reused_pid.name} <= set(removed)
    assert not left.exists()
    assert not reused_pid.exists()
    assert all(path.exists() for path in kept)


def test_a_segment_of_the_living_that_is_in_use_stays(segment: Any) -> None:
    path = segment(own_identity(), fresh_name()[1:])
    assert path.name not in remove_leftovers()
    assert path.exists()


def make_only(rank: int, num_ranks: int) -> None:
    Communicator().close()


def test_a_new_communicator_removes_leftovers(four: Pool, segment: Any) -> None:
    left, living = segment(dead_process()), segment(own_identity())
    four.run(make_only)
    assert not left.exists()
    assert living.exists()
    assert names_of(four.pids) == []


def test_errors_are_fastkerns_own() -> None:
    for kind in (AgreementError, ClosedError, fastkern.DeadlineError, fastkern.PeerLostError):
        assert issubclass(kind, FastkernError)
