"""Many processes and threads on one cache folder; processes that die or stand still."""

from __future__ import annotations

import fcntl
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from fastkern.device.kernel_cache import KernelCache
from tests.device.compile_cases import KEY, Maker, entry_of, warnings_of

NUM_PROCESSES = 8
FORK = multiprocessing.get_context("fork")


def run_at_once(folder: Path, log: Path, lock_timeout_s: float, num_compiles: int) -> list[bytes]:
    """What 8 processes that start together get for one key.

    Each compile adds its pid to log, and takes until there are num_compiles.
    """
    start = FORK.Barrier(NUM_PROCESSES)

    def compile_slowly() -> bytes:
        with log.open("a") as file:
            file.write(f"{os.getpid()}\n")
        time.sleep(0.3)
        deadline = time.monotonic() + 60
        while len(log.read_text().split()) < num_compiles:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        return f"code of {os.getpid()}".encode() * 1000

    def work(result: Connection) -> None:
        cache = KernelCache(folder, lock_timeout_s)
        start.wait(60)
        result.send_bytes(cache.get(KEY, compile_slowly))

    pipes = [FORK.Pipe(duplex=False) for _ in range(NUM_PROCESSES)]
    workers = [FORK.Process(target=work, args=(sender,)) for _, sender in pipes]
    for worker in workers:
        worker.start()
    try:
        results = [receiver.recv_bytes() for receiver, _ in pipes if receiver.poll(60)]
    finally:
        for worker in workers:
            worker.join(60)
            worker.kill()
    assert [worker.exitcode for worker in workers] == [0] * NUM_PROCESSES
    assert len(results) == NUM_PROCESSES
    return results


def test_one_process_compiles_for_all(tmp_path: Path) -> None:
    folder, log = tmp_path / "cache" / "kernels", tmp_path / "log"
    results = run_at_once(folder, log, lock_timeout_s=60.0, num_compiles=1)
    pids = log.read_text().split()
    assert len(pids) == 1
    assert set(results) == {f"code of {pids[0]}".encode() * 1000}
    assert {path.name for path in folder.iterdir()} == {entry_of(folder).name, f"lock-{KEY[0]}"}


def test_without_the_lock_the_last_one_stays(tmp_path: Path) -> None:
    """Each gets a whole entry, its own or another's, and one of them is kept whole."""
    folder, log = tmp_path / "cache" / "kernels", tmp_path / "log"
    results = run_at_once(folder, log, lock_timeout_s=0.0, num_compiles=2)
    whole = {f"code of {pid}".encode() * 1000 for pid in log.read_text().split()}
    assert len(whole) >= 2
    assert set(results) <= whole
    unused = Maker()
    assert KernelCache(folder).get(KEY, unused) in whole
    assert unused.calls == 0
    assert {path.name for path in folder.iterdir()} == {entry_of(folder).name, f"lock-{KEY[0]}"}


def test_threads_compile_once(tmp_path: Path) -> None:
    cache, make = KernelCache(tmp_path / "kernels"), Maker()
    results: list[bytes] = []
    threads = [
        threading.Thread(target=lambda: results.append(cache.get(KEY, make))) for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert results == [b"code"] * 8
    assert make.calls == 1


def in_child(work: Callable[[Any], None]) -> Any:
    """A process that runs `work` with an event, once it has set that event."""
    ready = FORK.Event()
    child = FORK.Process(target=work, args=(ready,))
    child.start()
    assert ready.wait(60)
    return child


def hold_lock(folder: Path) -> Callable[[Any], None]:
    def work(ready: Any) -> None:
        def compile_forever() -> bytes:
            ready.set()
            time.sleep(600)
            return b"too late"

        KernelCache(folder).get(KEY, compile_forever)

    return work


def test_a_holder_that_stands_still(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tmp_path / "kernels"
    holder = in_child(hold_lock(folder))
    try:
        start = time.monotonic()
        cache = KernelCache(folder, lock_timeout_s=0.3)
        assert cache.get(KEY, Maker()) == b"code"
        assert 0.3 <= time.monotonic() - start < 30
        assert len(warnings_of(caplog)) == 1
        assert "another process holds a lock" in warnings_of(caplog)[0]
        assert entry_of(folder).exists()
    finally:
        holder.kill()
        holder.join(60)


def test_a_holder_that_dies(tmp_path: Path) -> None:
    """Its lock goes with it."""
    folder = tmp_path / "kernels"
    holder = in_child(hold_lock(folder))
    os.kill(holder.pid, signal.SIGKILL)
    holder.join(60)
    start = time.monotonic()
    assert KernelCache(folder, lock_timeout_s=60.0).get(KEY, Maker()) == b"code"
    assert time.monotonic() - start < 30


def test_a_child_forked_while_compiling_does_not_keep_the_lock(tmp_path: Path) -> None:
    folder = tmp_path / "kernels"
    children = []

    def compile_and_fork() -> bytes:
        children.append(FORK.Process(target=time.sleep, args=(600,)))
        children[0].start()
        return b"code"

    try:
        KernelCache(folder).get(KEY, compile_and_fork)
        file = os.open(folder / f"lock-{KEY[0]}", os.O_RDWR)
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # raises where it is held
        os.close(file)
    finally:
        children[0].kill()
        children[0].join(60)


def test_a_writer_that_dies_leaves_no_entry(tmp_path: Path) -> None:
    """Killed with the file written and not yet renamed: nothing is taken for an entry."""
    folder = tmp_path / "kernels"

    def die(*arguments: Any, **named: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def work() -> None:
        os.replace = die
        KernelCache(folder).get(KEY, Maker(b"lost"))

    child = FORK.Process(target=work)
    child.start()
    child.join(60)
    assert child.exitcode == -signal.SIGKILL
    left = [path for path in folder.iterdir() if path.name.startswith("tmp-")]
    assert len(left) == 1
    assert left[0].read_bytes().endswith(b"lost")

    assert KernelCache(folder, lock_timeout_s=5.0).get(KEY, Maker()) == b"code"
    assert left[0].exists()  # its writer might still live
    long_ago = time.time() - 7200
    os.utime(left[0], (long_ago, long_ago))
    entry_of(folder).unlink()
    assert KernelCache(folder).get(KEY, Maker()) == b"code"
    assert not left[0].exists()
