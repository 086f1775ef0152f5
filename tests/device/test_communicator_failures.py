"""A communicator on a device when ranks are late, stall or die: errors everywhere, nothing left."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fastkern import Communicator, DeadlineError, PeerLostError, WaitRecord
from fastkern.device.driver import DeviceProperties
from fastkern.device.host_driver import HostDriver
from fastkern.tuning.choose import default_num_blocks
from tests.device.communicators import (
    device_communicator,
    host_device,
    leave_work_to_itself,
    message,
    on_device,
)
from tests.processes import Pool
from tests.test_moe_calls import routing
from tests.test_runtime_failures import Failure, broken, failure_of, names_of, wait_for


def exchange(comm: Communicator) -> None:
    """An all-to-all of a row for each pair, compared."""
    source = torch.arange(float(comm.num_ranks)) + 100 * comm.rank
    out = torch.empty_like(source)
    comm.all_to_all_single(out, source)
    assert out.tolist() == [100.0 * s + comm.rank for s in range(comm.num_ranks)]


def late(call: Callable[..., None], delay_s: float) -> Any:
    def later(*args: Any) -> None:
        time.sleep(delay_s)
        call(*args)

    return later


# -- kernels that stand still ----------------------------------------------------------------------


def stalled(rank: int, ranks: int, op: str) -> Failure | None:
    """Rank 1 enters, but launches its kernel when the others' have given up."""
    with device_communicator(2, progress_timeout_s=0.5) as comm:
        exchange(comm)
        x, idx, _ = routing(rank, 5, 2, 4)
        recv, *_, handle = comm.dispatch(x, idx, num_experts=4)
        if rank == 1:
            runtime = comm._runtime
            runtime.launch = late(runtime.launch, 1.5)  # type: ignore[method-assign]
            runtime.launch_moe = late(runtime.launch_moe, 1.5)  # type: ignore[method-assign]
        calls: dict[str, Callable[[], Any]] = {
            "all_to_all_single": lambda: exchange(comm),
            "dispatch": lambda: comm.dispatch(x, handle=handle),
            "combine": lambda: comm.combine_start(recv, handle).finish(),
        }
        failure = failure_of(calls[op])
        broken(comm)
    return failure


@pytest.mark.parametrize("op", ["all_to_all_single", "dispatch", "combine"])
def test_a_rank_that_stalls_is_one_record_on_all_ranks(four: Pool, op: str) -> None:
    failures = four.run(stalled, op)
    for failure in failures:
        assert failure is not None
        assert failure.kind is DeadlineError, failure
        record = failure.record
        assert isinstance(record, WaitRecord)
        assert record == failures[0].record, "ranks tell different stories"
        assert failure.text == str(record)
        assert (record.op, record.call) == (op, 3)
        assert record.rank != 1
        assert 0.5 <= record.waited_s < 1.5


class Lines(logging.Handler):
    """What was logged."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def found_later(rank: int, ranks: int, how: str) -> list[str]:
    """Calls do not wait for their kernels; rank 2 launches too late. What the others find, how."""
    log, heard = logging.getLogger("fastkern"), Lines()
    log.addHandler(heard)
    try:
        with device_communicator(1, progress_timeout_s=0.4) as comm:
            exchange(comm)
            leave_work_to_itself(comm)
            if rank == 2:
                comm._runtime.launch = late(comm._runtime.launch, 1.2)  # type: ignore[method-assign]
            source, out = torch.zeros(ranks), torch.zeros(ranks)
            begin = time.monotonic()
            work = comm.all_to_all_single(out, source, async_op=True) if how == "wait" else None
            if work is None and rank == 2:
                return [message(lambda: comm.all_to_all_single(out, source)), message(comm.check)]
            if work is None:
                comm.all_to_all_single(out, source)
            assert time.monotonic() - begin < 0.4, "the call waited for its kernel"
            time.sleep(1.8)
            steps = {"check": comm.check, "call": lambda: exchange(comm)}
            texts = [message(steps[how] if work is None else work.wait)]
            texts.append(message(comm.check))
        return texts + heard.lines
    finally:
        log.removeHandler(heard)


@pytest.mark.parametrize("how", ["check", "call", "wait"])
def test_a_stall_is_found_later_and_logged_once(shared_pools: Any, how: str) -> None:
    outcomes = shared_pools.pool(3).run(found_later, how)
    for rank, (first, second, *logged) in enumerate(outcomes):
        assert first.startswith("DeadlineError: all_to_all_single, call 2: rank "), first
        assert "waited" in first
        assert second.startswith("FastkernError: the communicator is broken: all_to_all_single")
        if rank != 2:  # which was told when it launched
            assert logged == [first.removeprefix("DeadlineError: ")]


def leaves_midway(rank: int, ranks: int) -> str:
    """Rank 0 fails between entry and launch: the others' kernels are told, before any deadline."""
    with device_communicator(1, progress_timeout_s=30) as comm:
        exchange(comm)
        if rank == 0:

            def fails(*_: Any) -> None:
                time.sleep(0.3)  # the others' kernels wait by now
                raise RuntimeError("no kernel today")

            comm._runtime.launch = fails  # type: ignore[method-assign]
        begin = time.monotonic()
        text = message(lambda: exchange(comm))
        assert time.monotonic() - begin < 10
        broken(comm)
        return text


def test_a_rank_that_leaves_a_call(shared_pools: Any) -> None:
    own, *others = shared_pools.pool(3).run(leaves_midway)
    assert own == "RuntimeError: no kernel today"
    for text in others:
        assert text.startswith("DeadlineError: all_to_all_single")
        assert "rank 0 gave up waiting for other ranks, or left the call" in text


# -- ranks that do not come, or die ----------------------------------------------------------------


def never_enters(rank: int, ranks: int) -> Failure | None:
    with device_communicator(1, entry_timeout_s=0.5) as comm:
        exchange(comm)
        failure = None
        if rank != 1:
            failure = failure_of(lambda: exchange(comm))
            broken(comm)
        dist.barrier()
        if rank == 1:
            assert "gave up waiting" in message(lambda: exchange(comm))
    return failure


def test_a_rank_that_never_enters(shared_pools: Any) -> None:
    for rank, failure in enumerate(shared_pools.pool(3).run(never_enters)):
        if rank == 1:
            continue
        assert failure is not None
        assert failure.kind is DeadlineError, failure
        assert "not entered by rank 1" in failure.text


def stopped_or_killed(rank: int, ranks: int, folder: Path, end: bool) -> Failure | None:
    """Rank 3 is stopped in the middle of a call, and killed if `end`, else goes on too late."""
    driver = HostDriver(most_lanes=2)
    comm = Communicator(**on_device(driver, 2, {"progress_timeout_s": 0.6, "entry_timeout_s": 5.0}))
    exchange(comm)
    if rank == 3:
        launch = comm._runtime.launch

        def stop(*args: Any) -> None:
            (folder / "inside").touch()
            os.kill(os.getpid(), signal.SIGSTOP)
            launch(*args)

        comm._runtime.launch = stop  # type: ignore[method-assign]
    failure = failure_of(lambda: exchange(comm))
    broken(comm)
    begin = time.monotonic()
    if end:
        failure_of(comm.barrier)
        comm.close()
        assert time.monotonic() - begin < 5
    else:
        dist.barrier()
        comm.close()
    return failure


@pytest.mark.parametrize("end", [False, True], ids=["stopped", "killed"])
def test_a_rank_stopped_in_the_middle(mortal_four: Pool, tmp_path: Path, end: bool) -> None:
    mortal_four.start(stopped_or_killed, tmp_path, end)
    wait_for(tmp_path / "inside")
    time.sleep(1.5)
    mortal_four.send_signal(3, signal.SIGKILL if end else signal.SIGCONT)
    outcomes = mortal_four.finish(20)
    for outcome in outcomes[: 3 if end else 4]:
        assert outcome.error is None, outcome
        failure = outcome.value
        assert failure is not None
        assert failure.kind in (DeadlineError, PeerLostError), failure
        assert failure.record is not None
        assert failure.record.call == 2
    assert names_of(mortal_four.pids) == []


# -- what stays ------------------------------------------------------------------------------------


def fresh_after_stall(rank: int, ranks: int) -> None:
    """One device, a broken communicator and a fresh one; closed in the wrong order, and twice."""
    with host_device() as driver:
        first = Communicator(**on_device(driver, 1, {"progress_timeout_s": 0.3}))
        if rank == 1:
            first._runtime.launch = late(first._runtime.launch, 1.0)  # type: ignore[method-assign]
        assert "waited" in message(lambda: exchange(first))
        with Communicator(**on_device(driver, 1, {})) as second:
            exchange(second)
            first.close()
            exchange(second)
            first.close()
        names = [t.name for t in threading.enumerate()]
        assert not [name for name in names if name.startswith("fastkern-watchdog")]


def test_a_fresh_communicator_after_a_stall(shared_pools: Any) -> None:
    pool = shared_pools.pool(3)
    pool.run(fresh_after_stall)
    assert names_of(pool.pids) == []


def test_default_num_blocks() -> None:
    def properties(num_processors: int) -> DeviceProperties:
        return DeviceProperties("", "", num_processors, 1024, 1 << 30)

    assert [default_num_blocks(properties(n)) for n in (1, 2, 132, 304)] == [1, 1, 22, 50]
