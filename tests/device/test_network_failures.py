"""Communicators over a network between servers when ranks fail, stall, are late or die: errors on
every rank, of both hosts, in time, and nothing left behind."""

from __future__ import annotations

import functools
import os
import signal
import time
from typing import Any

import pytest
import torch.distributed as dist

from fastkern import Communicator, DeadlineError, PeerLostError
from fastkern.device.driver import DeviceMemoryError
from fastkern.device.host_driver import HostDriver
from fastkern.device.network import Setting
from fastkern.device.peer_memory import PeerRegion
from tests.device.communicators import host_device, message
from tests.device.shared_network import (
    SharedNetwork,
    hosts_of,
    network_communicator,
    on_network,
)
from tests.device.test_communicator_failures import exchange, late
from tests.processes import Pool
from tests.test_runtime_failures import Failure, broken, failure_of

STEPS = (
    "fill_record",
    "after_load",
    "allocate",
    "share",
    "mapped",
    "place_in_record",
)


class Failing(SharedNetwork):
    """Fails in one of its functions, on one rank, from its n-th call on (1: the first)."""

    def __init__(self, setting: Setting, where: str, rank: int, at: int = 1) -> None:
        super().__init__(setting)
        if setting.rank != rank:
            return
        real = getattr(self, where)
        calls = 0

        def fail(*args: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls >= at:
                raise RuntimeError(f"{where} fails, as wished")
            return real(*args)

        setattr(self, where, fail)


# -- setting up ------------------------------------------------------------------------------------


def failing_start(rank: int, ranks: int, where: str) -> tuple[str, float]:
    make = functools.partial(Failing, where=where, rank=1)
    begin = time.monotonic()
    with host_device() as driver, hosts_of(rank, ranks // 2, make):
        text = message(lambda: Communicator(**on_network(driver, 2, {})))
        took_s = time.monotonic() - begin
        dist.barrier()
    return text, took_s


@pytest.mark.parametrize("where", STEPS)
def test_a_rank_that_cannot_set_up(four: Pool, where: str) -> None:
    """All say what rank 1 says, also where they wait for it inside the library; long before any
    deadline, and everything is given back."""
    outcomes = four.run(failing_start, where)
    for text, took_s in outcomes:
        assert text.startswith("FastkernError: "), text
        assert text.endswith(f"rank 1: {where} fails, as wished"), text
        assert took_s < 15


def test_a_rank_that_leaves_the_set_up(four: Pool) -> None:
    """An error that no step expects: the others, in the library or not, learn that it has left."""
    outcomes = four.run(failing_start, "start_library")
    for rank, (text, took_s) in enumerate(outcomes):
        if rank == 1:
            assert text == "RuntimeError: start_library fails, as wished"
        else:
            assert "rank 1" in text, text
        assert took_s < 15


def spread_server(rank: int, ranks: int) -> str:
    with host_device() as driver, hosts_of(rank, 1):
        text = message(lambda: Communicator(**on_network(driver, 2, {})))
        dist.barrier()
    return text


def test_a_server_on_two_hosts(four: Pool) -> None:
    for text in four.run(spread_server):
        assert text == (
            "FastkernError: the ranks of server 0, 2 of 4, are on 2 hosts: servers= must be a "
            "multiple of the number of hosts"
        )


def no_network(setting: Setting) -> SharedNetwork:
    raise AssertionError("nothing is between servers")


def one_server(rank: int, ranks: int) -> None:
    with host_device() as driver, hosts_of(rank, ranks, no_network):
        with Communicator(**on_network(driver, 1, {})) as comm:
            exchange(comm)
        dist.barrier()


def test_one_server_needs_no_network(four: Pool) -> None:
    four.run(one_server)


# -- memory ----------------------------------------------------------------------------------------


class Full(SharedNetwork):
    """Has no memory for what is large."""

    def allocate(self, region: PeerRegion, num_bytes: int) -> None:
        if num_bytes > 16 << 20 and self.setting.rank == 1:
            raise DeviceMemoryError("allocate", "as wished", f"{num_bytes} bytes")
        super().allocate(region, num_bytes)


def too_large(rank: int, ranks: int) -> str:
    with network_communicator(2, Full) as comm:
        exchange(comm)
        text = message(lambda: comm.reserve(64 << 20))
        exchange(comm)  # smaller calls still work
        comm.reserve(4 << 20)
        exchange(comm)
    return text


def test_too_little_memory_to_grow(four: Pool) -> None:
    for text in four.run(too_large):
        assert text.startswith("HeapMemoryError: allocation of the heap, rank 1: allocate"), text


def failing_growth(rank: int, ranks: int, where: str) -> str:
    make = functools.partial(Failing, where=where, rank=1, at=3)
    with network_communicator(2, make) as comm:
        exchange(comm)
        text = message(lambda: comm.reserve(64 << 20))
        assert message(comm.check) != "no error"
    return text


@pytest.mark.parametrize("where", ["allocate", "share"])
def test_a_rank_that_cannot_grow(four: Pool, where: str) -> None:
    for text in four.run(failing_growth, where):
        assert text.startswith("FastkernError: "), text
        assert text.endswith(f"rank 1: {where} fails, as wished"), text


# -- calls -----------------------------------------------------------------------------------------


def stalled(rank: int, ranks: int) -> Failure | None:
    """Rank 3 enters, but launches its kernel when the others' have given up."""
    with network_communicator(2, progress_timeout_s=0.5) as comm:
        exchange(comm)
        if rank == 3:
            runtime = comm._runtime
            runtime.launch = late(runtime.launch, 1.5)  # type: ignore[method-assign]
        failure = failure_of(lambda: exchange(comm))
        broken(comm)
    return failure


def test_a_rank_that_stalls(four: Pool) -> None:
    """The word goes to the other server, the record does not."""
    failures = four.run(stalled)
    for failure in failures:
        assert failure is not None
        assert failure.kind is DeadlineError, failure
    records = [f.record for f in failures if f is not None and f.record is not None]
    assert records
    assert all((record.op, record.call) == ("all_to_all_single", 2) for record in records)


def absent(rank: int, ranks: int) -> Failure | None:
    """Rank 3 does not enter."""
    with network_communicator(2, entry_timeout_s=1.0) as comm:
        exchange(comm)
        if rank == 3:
            time.sleep(3)
            return None
        failure = failure_of(lambda: exchange(comm))
        broken(comm)
    return failure


def test_a_rank_that_does_not_enter(four: Pool) -> None:
    """Its own host says who; the other one, that it is one of that host."""
    first, second, third, none = four.outcomes(absent)
    assert none.value is None
    for outcome, missing in ((first, (2, 3)), (second, (2, 3)), (third, (3,))):
        failure = outcome.value
        assert failure.kind is DeadlineError, outcome
        assert failure.text.startswith("all_to_all_single, call 2: not entered by rank")
        named = ", ".join(map(str, missing))
        assert f"rank {named}" in failure.text or "gave up" in failure.text, failure.text


def left(rank: int, ranks: int) -> tuple[Failure | None, float]:
    """Rank 3 leaves a call midway: long before the deadline the other host knows."""
    with network_communicator(2) as comm:
        exchange(comm)
        dist.barrier()  # all have done so
        begin = time.monotonic()
        if rank == 3:
            comm._runtime.fail(RuntimeError("as wished"))
            time.sleep(1.0)
            return None, 0.0
        failure = failure_of(lambda: exchange(comm))
        broken(comm)
    return failure, time.monotonic() - begin


def test_a_rank_that_leaves(four: Pool) -> None:
    for outcome in four.outcomes(left)[:3]:
        failure, took_s = outcome.value
        assert failure.kind is DeadlineError
        assert "rank 3 gave up waiting" in failure.text, failure.text
        assert took_s < 10


def dead(rank: int, ranks: int) -> Failure | None:
    driver = HostDriver(most_lanes=2)
    with hosts_of(rank, 2), Communicator(**on_network(driver, 2, {})) as comm:
        exchange(comm)
        if rank == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        return failure_of(lambda: exchange(comm))


def test_a_rank_that_dies(mortal_four: Pool) -> None:
    """Its host sees it die, and tells the other one."""
    outcomes = mortal_four.outcomes(dead)
    failures = [outcome.value for outcome in outcomes[:3]]
    assert [f.kind for f in failures] == [DeadlineError, DeadlineError, PeerLostError], failures
    assert all(f.took_s < 10 for f in failures)
    assert "rank 2 gave up waiting" in failures[0].text
    assert "rank 3, whose process has ended" in failures[2].text
