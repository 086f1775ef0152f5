"""Ranks that are late, stall, or die: an error on the others in bounded time, never a hang."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist

from fastkern import (
    ClosedError,
    Communicator,
    DeadlineError,
    FastkernError,
    PeerLostError,
    WaitRecord,
    bootstrap,
    entry,
    host_runtime,
)
from fastkern.kernels import _host
from fastkern.planner.table import QUEUES
from tests.processes import Pool, ProcessEnded, errors, values

SHARED_MEMORY = Path("/dev/shm")


class Failure(NamedTuple):
    """An error as a rank saw it; at_s: when, on the clock that processes share."""

    kind: type[BaseException]
    text: str
    missing: tuple[int, ...]
    record: WaitRecord | None
    took_s: float
    at_s: float


def failure_of(call: Callable[[], object]) -> Failure | None:
    """What the call raised; None where it returned."""
    begin = time.monotonic()
    try:
        call()
    except Exception as error:
        missing, record = getattr(error, "missing", ()), getattr(error, "record", None)
        took_s = time.monotonic() - begin
        return Failure(type(error), str(error), missing, record, took_s, time.monotonic())
    return None


def exchange(comm: Communicator) -> None:
    """Two rows per pair, checked."""
    rank, num_ranks = comm.rank, comm.num_ranks
    out = torch.full((2 * num_ranks,), -1)
    comm.all_to_all_single(out, torch.arange(2 * num_ranks) + 100 * rank)
    rows = [100 * src + 2 * rank + k for src in range(num_ranks) for k in range(2)]
    assert out.tolist() == rows


OPERATIONS: dict[str, Callable[[Communicator], object]] = {
    "exchange": exchange,
    "barrier": lambda comm: comm.barrier(),
    "reserve": lambda comm: comm.reserve(30 << 20),
    "background": lambda comm: wait(comm),
}


def wait(comm: Communicator) -> None:
    work = comm.all_to_all_single(torch.zeros(4), torch.zeros(4), async_op=True)
    assert work is not None
    work.wait()


def broken(comm: Communicator) -> None:
    """Whatever is tried on a broken communicator raises at once."""
    for call in (*OPERATIONS.values(), Communicator.check):
        again = failure_of(lambda call=call: call(comm))  # type: ignore[misc]
        assert again is not None, "a call on a broken communicator returned"
        assert issubclass(again.kind, FastkernError), again
        assert not issubclass(again.kind, ClosedError), again
        assert again.took_s < 1, again


def names_of(pids: list[int]) -> list[str]:
    """Segments in /dev/shm that these processes made."""
    return [p.name for p in SHARED_MEMORY.glob("fastkern-*") if int(p.name.split("-")[2]) in pids]


def wait_for(path: Path, timeout_s: float = 30) -> None:
    end = time.monotonic() + timeout_s
    while not path.exists():
        assert time.monotonic() < end, f"no {path.name} within {timeout_s} s"
        time.sleep(0.01)


# -- entry -----------------------------------------------------------------------------------------


def late(rank: int, num_ranks: int, operation: str) -> Failure | None:
    """Rank 3 comes when the others have given up; then all make a fresh communicator."""
    with Communicator(servers=2, entry_timeout_s=0.8, progress_timeout_s=0.8) as comm:
        exchange(comm)
        dist.barrier()
        time.sleep(2 if rank == 3 else 0.05 * rank)
        failure = failure_of(lambda: OPERATIONS[operation](comm))
        if failure is not None:
            broken(comm)
        dist.barrier()
    with Communicator(servers=2) as fresh:
        exchange(fresh)
    return failure


@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_rank_that_does_not_call_is_named_and_is_told_too(four: Pool, operation: str) -> None:
    failures = four.run(late, operation)
    for rank, failure in enumerate(failures):
        assert failure is not None, f"rank {rank} returned from a call that others gave up"
        assert failure.kind is DeadlineError, failure
        assert failure.took_s < 2, failure
    for failure in failures[:3]:
        assert failure.took_s >= 0.5, failure
        assert "call 2" in failure.text
        assert failure.missing == (3,), failure
        assert re.search(r"not entered by rank 3\b", failure.text), failure


def closed_early(rank: int, num_ranks: int) -> Failure | None:
    comm = Communicator(entry_timeout_s=0.8)
    exchange(comm)
    if rank == 1:
        comm.close()
    failure = failure_of(comm.barrier)
    comm.close()
    return failure


def test_a_rank_that_closed_is_missed_by_the_others(four: Pool) -> None:
    failures = four.run(closed_early)
    assert [f and f.kind for f in failures] == [DeadlineError, ClosedError] + [DeadlineError] * 2
    assert [f.missing for f in failures] == [(1,), (), (1,), (1,)]


def dies(rank: int, num_ranks: int, folder: Path) -> tuple[Failure | None, float]:
    """Rank 2 never calls: it is killed. The others go on without it."""
    comm = Communicator(servers=2, entry_timeout_s=20)
    exchange(comm)
    if rank == 2:
        (folder / "waiting").touch()
        time.sleep(60)
    time.sleep(0.05 * rank)  # they look after each other at different moments
    failure = failure_of(lambda: exchange(comm))
    broken(comm)
    comm.close()
    rest = dist.new_group([0, 1, 3], use_local_synchronization=True)
    with Communicator(rest) as fresh:
        exchange(fresh)
    return failure, time.monotonic()


def test_a_dead_rank_is_named_at_once_and_the_rest_goes_on(
    mortal_four: Pool, tmp_path: Path
) -> None:
    mortal_four.start(dies, tmp_path)
    wait_for(tmp_path / "waiting")
    time.sleep(0.3)  # the others have entered, and looked after each other
    killed_s = time.monotonic()
    mortal_four.send_signal(2, signal.SIGKILL)
    outcomes = mortal_four.finish(30)
    assert isinstance(outcomes.pop(2).error, ProcessEnded)
    for failure, _ in values(outcomes):
        assert failure is not None
        assert failure.kind is PeerLostError, failure
        assert "rank 2" in failure.text
        assert failure.at_s - killed_s < 1.5, failure
    assert names_of(mortal_four.pids) == []


# -- progress --------------------------------------------------------------------------------------


def stalled(rank: int, num_ranks: int, policy: str, background: bool) -> Failure | None:
    """Rank 1 enters the second call, but launches it when the others have given up."""
    comm = Communicator(servers=2, policy=policy, progress_timeout_s=0.5)  # type: ignore[arg-type]
    exchange(comm)
    if rank == 1:
        launch = comm._runtime.launch

        def launch_late(*args: Any) -> None:
            time.sleep(1.5)
            launch(*args)

        comm._runtime.launch = launch_late  # type: ignore[assignment,method-assign]
    failure = failure_of(lambda: (wait if background else exchange)(comm))
    broken(comm)
    dist.barrier()
    comm.close()
    with Communicator(servers=2) as fresh:
        exchange(fresh)
    return failure


READABLE = re.compile(
    r"all_to_all_single, call 2: rank \d waited \d\.\d s for rank \d before its "
    r"(pack|push|put|receive|land|take) of stage \d, chunk \d "
    r"\(flag expected 2\.1, seen \d\.\d\)"
)


@pytest.mark.parametrize("background", [False, True], ids=["foreground", "background"])
@pytest.mark.parametrize("policy", ["whole", "direct", "split"])
def test_a_rank_that_stalls_is_one_record_on_all_ranks(
    four: Pool, policy: str, background: bool
) -> None:
    failures = four.run(stalled, policy, background)
    for failure in failures:
        assert failure is not None
        assert failure.kind is DeadlineError, failure
        assert failure.took_s < 3
        record = failure.record
        assert isinstance(record, WaitRecord)
        assert record == failures[0].record, "ranks tell different stories"
        assert failure.text == str(record)
        assert READABLE.fullmatch(failure.text), failure.text
        assert (record.op, record.call) == ("all_to_all_single", 2)
        assert record.rank != 1
        assert record.peer != record.rank
        assert record.item in QUEUES
        assert record.expected > record.seen
        assert 0.5 <= record.waited_s < 1.5
        if policy == "direct":  # nothing goes by way of others
            assert record.peer == 1


def killed_inside(rank: int, num_ranks: int, folder: Path) -> Failure | None:
    """Rank 3 has entered the call when it is killed."""
    comm = Communicator(servers=2, policy="whole", progress_timeout_s=1.5)
    exchange(comm)
    if rank == 3:

        def never(*_: Any) -> None:
            (folder / "inside").touch()
            time.sleep(60)

        comm._runtime.launch = never  # type: ignore[assignment,method-assign]
    failure = failure_of(lambda: exchange(comm))
    broken(comm)
    comm.close()
    return failure


def test_a_rank_killed_inside_a_call(mortal_four: Pool, tmp_path: Path) -> None:
    mortal_four.start(killed_inside, tmp_path)
    wait_for(tmp_path / "inside")
    mortal_four.send_signal(3, signal.SIGKILL)
    outcomes = mortal_four.finish(30)
    assert isinstance(outcomes.pop(3).error, ProcessEnded)
    for failure in values(outcomes):
        assert failure.kind in (DeadlineError, PeerLostError), failure
        assert failure.took_s < 4
    assert names_of(mortal_four.pids) == []


# -- heap ------------------------------------------------------------------------------------------


def killed_at_creation(rank: int, num_ranks: int, folder: Path) -> None:
    """Ranks stop where rank 0 has made a segment that the others have not yet mapped."""
    gather, count = bootstrap.gather, 0

    def stop_at_the_second(value: Any, group: Any) -> Any:
        nonlocal count
        count += 1
        if count == 2:
            (folder / f"made-{rank}").touch()
            time.sleep(60)
        return gather(value, group)

    bootstrap.gather = stop_at_the_second
    Communicator()


def make_and_use(rank: int, num_ranks: int) -> None:
    with Communicator() as comm:
        exchange(comm)


def test_ranks_killed_at_creation_leave_what_the_next_run_removes(
    mortal_four: Pool, four: Pool, tmp_path: Path
) -> None:
    mortal_four.start(killed_at_creation, tmp_path)
    for rank in range(4):
        wait_for(tmp_path / f"made-{rank}")
    living = names_of(mortal_four.pids)
    assert len(living) == 1
    four.run(make_and_use)
    assert names_of(mortal_four.pids) == living, "a living process's segment was removed"
    for rank in range(4):
        mortal_four.send_signal(rank, signal.SIGKILL)
    assert {type(e) for e in errors(mortal_four.finish(10))} == {ProcessEnded}
    assert names_of(mortal_four.pids) == living
    four.run(make_and_use)
    assert names_of(mortal_four.pids) == []


def cannot_map(rank: int, num_ranks: int, which: str) -> Failure | None:
    """Rank 2 cannot map the control part, or a grown data part."""

    def shared_memory(name: str, num_bytes: int, create: bool) -> Any:
        raise RuntimeError("no room for a mapping")

    parts = vars(_host) | {"SharedMemory": shared_memory}
    with pytest.MonkeyPatch.context() as patch:
        if which == "control":
            if rank == 2:
                patch.setattr(entry, "_host", SimpleNamespace(**parts))
            return failure_of(Communicator)
        with Communicator(buffer_bytes=0, entry_timeout_s=5, progress_timeout_s=5) as comm:
            if rank == 2:
                patch.setattr(host_runtime, "_host", SimpleNamespace(**parts))
            failure = failure_of(lambda: exchange(comm))
            broken(comm)
            return failure


@pytest.mark.parametrize("which", ["control", "data"])
def test_a_rank_that_cannot_map_the_heap(four: Pool, which: str) -> None:
    failures = four.run(cannot_map, which)
    for failure in failures:
        assert failure is not None
        assert issubclass(failure.kind, FastkernError), failure
        assert failure.took_s < 3, failure
    told = failures if which == "control" else [failures[2]]
    for failure in told:
        assert "rank 2 cannot map" in failure.text
        assert "no room for a mapping" in failure.text
    assert names_of(four.pids) == []
    four.run(make_and_use)


def test_the_helper_kills_a_rank_that_hangs(mortal_four: Pool) -> None:
    """The bound on every test here is real."""
    mortal_four.run(make_and_use)
    begin = time.monotonic()
    outcomes = mortal_four.outcomes(hang_on_rank_1, timeout_s=1)
    assert time.monotonic() - begin < 15
    assert [type(o.error) for o in outcomes] == [type(None), TimeoutError, type(None), type(None)]
    assert not mortal_four.usable
    for pid in mortal_four.pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def hang_on_rank_1(rank: int, num_ranks: int) -> None:
    if rank == 1:
        time.sleep(600)
