"""The set-up of OpenSHMEMs (NVSHMEM, rocSHMEM), with one that is made up: it starts once for all
communicators of a process, what is allocated is freed together, failures, and whole communicators.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from fastkern import Communicator
from fastkern.device.host_driver import HostDriver
from fastkern.device.network_shmem import ShmemNetwork, ShmemSession
from tests.device.communicators import host_device, message
from tests.device.fake_shmem import FakeShmem, TabledNetwork
from tests.device.shared_network import hosts_of, on_network
from tests.device.test_communicator_failures import exchange
from tests.processes import Pool

OPEN = ["malloc", "pointer"]


@contextmanager
def shmem_device(rank: int, ranks: int, library: FakeShmem) -> Iterator[HostDriver]:
    """A device and a process's library, which goes with it; each server is a host."""
    make = functools.partial(TabledNetwork, session=ShmemSession(library))
    with host_device() as driver, hosts_of(rank, ranks // 2, make):
        yield driver
        dist.barrier()
        library.drop()
        assert library.modules == []


def whole_life(rank: int, ranks: int) -> None:
    library = FakeShmem()
    with shmem_device(rank, ranks, library) as driver:
        calls = library.calls
        with Communicator(**on_network(driver, 2, {})) as comm:
            first = ["initialized", *["unique_id"] * (rank == 0), "init", "module_init"]
            assert calls == [*first, *OPEN, *OPEN]
            exchange(comm)
            begin = len(calls)
            comm.reserve(32 << 20)
            assert calls[begin:] == ["free", *OPEN]
            exchange(comm)
            begin = len(calls)
        assert calls[begin:] == ["module_finalize"]  # closing waits for nobody
        dist.barrier()
        begin = len(calls)
        with Communicator(**on_network(driver, 2, {})) as comm:
            assert calls[begin:] == ["initialized", "module_init", "free", "free", *OPEN, *OPEN]
            exchange(comm)


def test_a_whole_life(four: Pool) -> None:
    """Of two communicators, one after the other: the library starts once, and what the first had is
    freed by all ranks when the second begins."""
    four.run(whole_life)


def test_only_what_all_have_let_go_of_is_freed() -> None:
    """In the order in which it was allocated, which is the same on all ranks."""
    freed: list[int] = []
    library: Any = SimpleNamespace(name="a library", free=freed.append)
    session = ShmemSession(library)
    session.retired.update({4: 40, 2: 20, 7: 70, 1: 10})
    network = ShmemNetwork(SimpleNamespace(), session)  # type: ignore[arg-type]
    others = [[2, 4, 5, 7], [1, 4, 7]]
    network.steps = SimpleNamespace(  # type: ignore[assignment]
        local=lambda what, step: [step(), *others], collective=lambda what, call: call()
    )
    network.prepare_memory()
    assert freed == [40, 70]
    assert session.retired == {2: 20, 1: 10}


def two_at_once(rank: int, ranks: int) -> None:
    library = FakeShmem()
    with (
        shmem_device(rank, ranks, library) as driver,
        Communicator(**on_network(driver, 2, {})) as outer,
    ):
        with Communicator(**on_network(driver, 2, {})) as inner:
            exchange(outer)
            exchange(inner)
            exchange(outer)
        outer.reserve(32 << 20)
        exchange(outer)
    assert library.calls.count("init") == 1


def test_two_communicators(four: Pool) -> None:
    four.run(two_at_once)


def too_large(rank: int, ranks: int) -> str:
    library = FakeShmem(heap_bytes=16 << 20)
    with (
        shmem_device(rank, ranks, library) as driver,
        Communicator(**on_network(driver, 2, {})) as comm,
    ):
        exchange(comm)
        text = message(lambda: comm.reserve(64 << 20))
        exchange(comm)
    return text


def test_a_heap_that_is_full(four: Pool) -> None:
    for text in four.run(too_large):
        assert text.startswith("HeapMemoryError: sharing of the heap, rank 0: "), text
        assert "HEAP_SIZE says how much it has" in text


def subgroup(rank: int, ranks: int) -> str:
    """Started by all ranks, it is not for a part of them."""
    library = FakeShmem()
    with shmem_device(rank, ranks, library) as driver:
        with Communicator(**on_network(driver, 2, {})) as comm:
            exchange(comm)
        halves = [dist.new_group([0, 2]), dist.new_group([1, 3])]
        half = halves[rank % 2]
        return message(lambda: Communicator(half, **on_network(driver, 2, {})))


def test_other_ranks_than_it_was_started_with(four: Pool) -> None:
    for text in four.run(subgroup):
        assert "the OpenSHMEM runs with 4 PEs in these processes" in text, text
        assert "start new processes" in text


def half_started(rank: int, ranks: int) -> str:
    library = FakeShmem()
    library.started, library.pes = rank >= 2, 2
    with shmem_device(rank, ranks, library) as driver:
        return message(lambda: Communicator(**on_network(driver, 2, {})))


def test_some_processes_run_it_already(four: Pool) -> None:
    for text in four.run(half_started):
        assert "runs in some of these processes, not on ranks [0, 1]" in text, text


def already_started(rank: int, ranks: int) -> None:
    library = FakeShmem()
    library.started, library.pes = True, ranks
    with (
        shmem_device(rank, ranks, library) as driver,
        Communicator(**on_network(driver, 2, {})) as comm,
    ):
        exchange(comm)
    assert "init" not in library.calls


def test_one_that_the_program_has_started_is_used(four: Pool) -> None:
    four.run(already_started)


def failing(rank: int, ranks: int, call: str, times: int) -> tuple[str, list[Any], list[str]]:
    library = FakeShmem(failing=(call, times))
    with shmem_device(rank, ranks, library) as driver:
        text = message(lambda: Communicator(**on_network(driver, 2, {})))
        dist.barrier()
        modules = list(library.modules)
    return text, modules, library.calls


@pytest.mark.parametrize(
    ("call", "times"),
    [("initialized", 1), ("init", 1), ("module_init", 1), ("malloc", 2), ("pointer", 1)],
)
def test_a_call_that_fails(four: Pool, call: str, times: int) -> None:
    """On one rank; all raise its error, and no module is left."""
    for text, modules, calls in four.run(failing, call, times):
        assert text.partition(": ")[0] in ("FastkernError", "HeapMemoryError"), text
        assert "rank 1: " in text, text
        assert f"{call} fails, as wished" in text, text
        assert modules == []
        if call in ("malloc", "pointer"):
            assert calls[-1] == "module_finalize"
