"""Memory that ranks share: processes map each other's heap on the driver for the CPU; failures are
the same on every rank and leave nothing behind."""

from __future__ import annotations

import ctypes
import logging
import signal
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fastkern import bootstrap
from fastkern.device import together
from fastkern.device.driver import DriverError
from fastkern.device.host_driver import HostDriver
from fastkern.device.memory import SymmetricHeap, release_leftovers
from fastkern.device.transfer import download, fill, upload
from fastkern.errors import FastkernError, HeapMemoryError
from tests.conftest import SharedPools
from tests.device.memory_cases import (
    DATA_BYTES,
    RECORD_BYTES,
    ROUNDED,
    SLOTS,
    FailingDriver,
    check_tables,
    words,
)
from tests.processes import Pool


@pytest.fixture
def three(shared_pools: SharedPools) -> Pool:
    """Three ranks, shared with other tests."""
    return shared_pools.pool(3)


def write_and_read(rank: int, num_ranks: int) -> dict[str, Any]:
    """Every rank writes its number into a flag and into data of every rank, before and after
    growth."""
    driver = HostDriver()
    heap = SymmetricHeap(driver, None, SLOTS, RECORD_BYTES, DATA_BYTES)
    found: dict[str, Any] = {"data_bytes": [heap.data_bytes]}
    check_tables(driver, heap)
    control = download(driver, heap.control_address(rank), heap.layout["bytes"])
    found["zero"] = control == bytes(len(control))
    bootstrap.gather(None, None)
    for turn in range(2):
        for peer in range(num_ranks):
            upload(driver, heap.flags_address(peer) + 8 * (4 * turn + rank), bytes([rank + 1] * 8))
            upload(driver, heap.data_address(peer) + 16 * rank, bytes([rank + 17] * 16))
        bootstrap.gather(None, None)
        found[f"flags{turn}"] = download(driver, heap.flags_address(rank), 64)
        found[f"data{turn}"] = download(driver, heap.data_address(rank), 16 * num_ranks)
        if turn == 0:
            stream = driver.create_stream()
            heap.grow(ROUNDED + 1, [stream])
            driver.destroy_stream(stream)
            found["data_bytes"].append(heap.data_bytes)
            check_tables(driver, heap)
    heap.grow(5)  # smaller: nothing happens
    found["data_bytes"].append(heap.data_bytes)
    found["freed"] = heap.close(timeout_s=30)
    found["left"] = driver.leftovers()
    driver.close()
    return found


def test_ranks_write_into_each_others_heap(three: Pool) -> None:
    for found in three.run(write_and_read):
        flags = b"".join(bytes([rank + 1] * 8) for rank in range(3)) + bytes(8)
        assert found["zero"]
        assert found["flags0"] == flags + bytes(32)
        assert found["flags1"] == flags + flags  # control stays when data grows
        expected = b"".join(bytes([rank + 17] * 16) for rank in range(3))
        assert found["data0"] == found["data1"] == expected
        assert found["data_bytes"] == [ROUNDED, 2 * ROUNDED, 2 * ROUNDED]
        assert found["freed"]
        assert found["left"] == []


def make_a_heap_that_fails(rank: int, num_ranks: int, operation: str, at: int) -> list[str]:
    """One rank's driver fails; returns the error of every rank's, if there was one."""
    driver = FailingDriver(operation, at if rank == 1 else 0, memory=operation == "allocate")
    text = ""
    try:
        heap = SymmetricHeap(driver, None, SLOTS, RECORD_BYTES, DATA_BYTES)
    except FastkernError as error:
        text = f"{type(error).__name__}: {error}"
    else:
        assert heap.close(timeout_s=30)
    left = driver.leftovers()
    driver.close()
    return [text, *left]


@pytest.mark.parametrize(
    ("operation", "least"),
    [("allocate", 3), ("export_memory", 2), ("open_memory", 4), ("fill", 1), ("copy", 1)],
)
def test_a_heap_that_fails_on_one_rank_fails_on_all(
    three: Pool, operation: str, least: int
) -> None:
    for at in range(1, least + 2):
        answers = three.run(make_a_heap_that_fails, operation, at)
        assert answers[0] == answers[1] == answers[2]
        (text,) = answers[0]  # nothing is left
        if at > least:
            assert text == ""  # all places have been tried
        else:
            kind = "HeapMemoryError" if operation == "allocate" else "FastkernError"
            assert text.startswith(f"{kind}: ")
            assert f"rank 1: {operation}: as wished (call {at})" in text


def grow_too_far(rank: int, num_ranks: int) -> list[Any]:
    driver = HostDriver(memory_bytes=(20 if rank == 2 else 200) << 20)
    heap = SymmetricHeap(driver, None, SLOTS, RECORD_BYTES, DATA_BYTES)
    with pytest.raises(HeapMemoryError, match=r"rank 2: allocate: out of memory"):
        heap.grow(100 << 20)
    assert heap.data_bytes == 0
    heap.grow(10 << 20)
    check_tables(driver, heap)
    with pytest.raises(FastkernError, match="different sizes"):
        heap.grow((10 + rank) << 20)
    assert heap.data_bytes == 10 << 20
    upload(driver, heap.data_address((rank + 1) % num_ranks), bytes([rank]))
    bootstrap.gather(None, None)
    seen = download(driver, heap.data_address(rank), 1)[0]
    heap.close(timeout_s=30)
    left = driver.leftovers()
    driver.close()
    return [seen, left]


def test_growth_that_is_too_much_is_refused_on_all(three: Pool) -> None:
    assert three.run(grow_too_far) == [[2, []], [0, []], [1, []]]


def grow_after_a_failed_kernel(rank: int, num_ranks: int) -> list[str]:
    driver = HostDriver()
    heap = SymmetricHeap(driver, None, SLOTS, RECORD_BYTES, DATA_BYTES)
    stream, module = driver.create_stream(), driver.load_module(b"")
    if rank == 0:
        driver.launch(driver.function(module, "fastkern_exchange"), 1, 1, stream, b"short")
    with pytest.raises(FastkernError, match="end of the kernels before growth, rank 0: launch"):
        heap.grow(2 * ROUNDED, [stream])
    assert heap.data_bytes == ROUNDED
    heap.close([stream], timeout_s=30)
    driver.destroy_stream(stream)
    driver.unload_module(module)
    left = driver.leftovers()
    driver.close()
    return left


def test_growth_after_a_failed_kernel_is_refused_on_all(three: Pool) -> None:
    assert three.run(grow_after_a_failed_kernel) == [[], [], []]


def wait_for_work_before_growth(rank: int, num_ranks: int) -> bool:
    """Rank 0's stream still writes into the old data of rank 1 when the others ask for growth."""
    driver = HostDriver()
    heap = SymmetricHeap(driver, None, SLOTS, RECORD_BYTES, DATA_BYTES)
    stream = driver.create_stream()
    slow = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda _: time.sleep(0.3))
    begin = time.monotonic()
    if rank == 0:
        driver.call_host(stream, ctypes.cast(slow, ctypes.c_void_p).value or 0, 0)
        driver.fill(heap.data_address(1), 5, DATA_BYTES, stream)
    heap.grow(2 * ROUNDED, [stream])
    waited = time.monotonic() - begin
    driver.synchronize(stream)
    driver.destroy_stream(stream)
    heap.close(timeout_s=30)
    driver.close()
    return waited > 0.25


def test_growth_waits_for_all_ranks_work(three: Pool) -> None:
    assert three.run(wait_for_work_before_growth) == [True, True, True]


def close_one_by_one(rank: int, num_ranks: int) -> list[Any]:
    """Rank 0 closes first, while its peers still write into its memory."""
    driver = HostDriver()
    heap = SymmetricHeap(driver, None, SLOTS, RECORD_BYTES, DATA_BYTES)
    own, data = driver.leftovers(), heap.data_address(0)
    found: list[Any] = []
    if rank == 0:
        found.append(heap.close())
        found.append(release_leftovers())
    bootstrap.gather(None, None)
    if rank != 0:
        fill(driver, data, rank, 8)  # would end this process, had it been unmapped
    bootstrap.gather(None, None)
    if rank == 0:
        found.append(ctypes.string_at(data, 1)[0] in (1, 2))  # what the peers wrote is still there
    bootstrap.gather(None, None)
    if rank != 0:
        heap.close(timeout_s=30)
    bootstrap.gather(None, None)
    if rank == 0:
        found += [release_leftovers(), heap.close()]
    assert len(own) > 2
    left = driver.leftovers()
    driver.close()
    return [*found, left]


def test_memory_is_freed_when_the_peers_have_let_go(three: Pool) -> None:
    assert three.run(close_one_by_one) == [[False, 1, True, 0, True, []], [[]], [[]]]


def close_after_a_death(rank: int, num_ranks: int, mark: Path) -> list[Any]:
    driver = HostDriver()
    heap = SymmetricHeap(driver, None, SLOTS, RECORD_BYTES, DATA_BYTES)
    bootstrap.gather(None, None)
    if rank == 1:
        mark.touch()
        time.sleep(60)
    found = [heap.close()]
    end = time.monotonic() + 30
    while release_leftovers() and time.monotonic() < end:
        time.sleep(0.05)
    found.append(driver.leftovers())
    driver.close()
    return found


def test_memory_is_freed_when_a_peer_has_died(tmp_path: Path) -> None:
    with Pool(3, tmp_path) as pool:
        mark = tmp_path / "ready"
        pool.start(close_after_a_death, mark)
        end = time.monotonic() + 60
        while not mark.exists() and time.monotonic() < end:
            time.sleep(0.05)
        time.sleep(0.5)  # the others close, and cannot free yet
        pool.send_signal(1, signal.SIGKILL)
        outcomes = pool.finish(60)
        assert [outcomes[rank].value for rank in (0, 2)] == [[False, []], [False, []]]


class TimedDriver(HostDriver):
    """Notes when memory is unmapped and freed; rank 1 takes its time to unmap."""

    def __init__(self, rank: int, opens: int) -> None:
        super().__init__()
        self.rank = rank
        self.opens = opens  # so many mappings succeed
        self.unmapped: list[float] = []
        self.freed: list[float] = []

    def open_memory(self, handle: bytes) -> int:
        self.opens -= 1
        if self.opens < 0:
            raise DriverError("open_memory", "as wished")
        return super().open_memory(handle)

    def close_memory(self, address: int) -> None:
        time.sleep(0.1 * (self.rank == 1))
        super().close_memory(address)
        self.unmapped.append(time.monotonic())

    def free(self, address: int) -> None:
        self.freed.append(time.monotonic())
        super().free(address)


def unmap_before_freeing(rank: int, num_ranks: int, when: str) -> tuple[float, float]:
    """When this rank unmapped last and when it freed first, in growth, after a mapping that failed
    on rank 0, or when closing."""
    driver = TimedDriver(rank, 1 if when == "failure" and rank == 0 else 9)
    if when == "failure":
        with pytest.raises(FastkernError, match="mapping of the heap, rank 0: open_memory"):
            SymmetricHeap(driver, None, SLOTS, RECORD_BYTES, DATA_BYTES)
        times = list(driver.unmapped), list(driver.freed[:1])
    else:
        heap = SymmetricHeap(driver, None, SLOTS, RECORD_BYTES, DATA_BYTES)
        driver.freed.clear()
        if when == "growth":
            heap.grow(2 * ROUNDED)
            times = list(driver.unmapped), list(driver.freed)
        tables = heap.controls_table
        assert heap.close(timeout_s=30)
        if when == "closing":
            assert len(driver.freed) == 3
            assert tables
            times = list(driver.unmapped), driver.freed[1:]  # the first is this rank's tables
    left = driver.leftovers()
    assert left == []
    driver.close()
    return max(times[0]), min(times[1])


@pytest.mark.parametrize("when", ["growth", "failure", "closing"])
def test_no_rank_frees_what_another_has_mapped(three: Pool, when: str) -> None:
    times = three.run(unmap_before_freeing, when)
    assert max(unmapped for unmapped, _ in times) < min(freed for _, freed in times)


def far_ranks_are_null(rank: int, num_ranks: int) -> list[Any]:
    """As if each rank were alone on its host."""
    driver = HostDriver()
    real = bootstrap.own_info
    bootstrap.own_info = lambda *args: SimpleNamespace(  # type: ignore[assignment]
        host=f"host {rank // 2}", process=real(*args).process
    )
    try:
        heap = SymmetricHeap(driver, None, SLOTS, RECORD_BYTES, DATA_BYTES)
    finally:
        bootstrap.own_info = real
    rows = [words(driver, table, 3) for table in (heap.controls_table, heap.flags_table)]
    rows.append(words(driver, heap.data_table, 3))
    closed = heap.close(timeout_s=30)
    left = driver.leftovers()
    driver.close()
    return [[[bool(word) for word in row] for row in rows], closed, left]


def test_ranks_of_other_hosts_are_null(three: Pool) -> None:
    answers = three.run(far_ranks_are_null)
    for rank, reachable in enumerate(
        [[True, True, False], [True, True, False], [False, False, True]]
    ):
        assert answers[rank] == [[reachable] * 3, True, []]


def failing_close(rank: int, num_ranks: int) -> list[Any]:
    """Closing goes on after a failure, and says what failed."""
    driver = FailingDriver("close_memory", 1 if rank == 0 else 0)
    heap = SymmetricHeap(driver, None, SLOTS, RECORD_BYTES, DATA_BYTES)
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    together.log.addHandler(handler)
    closed = heap.close(timeout_s=30)
    together.log.removeHandler(handler)
    left = driver.leftovers()
    driver.close()
    return [closed, lines, len(left)]


def test_closing_goes_on_after_a_failure(three: Pool) -> None:
    line = "closing the heap: close_memory: as wished (call 1)"
    answers = three.run(failing_close)
    assert answers[1] == answers[2] == [True, [], 0]
    assert answers[0] == [True, [line], 1]  # one mapping could not be closed, all else was
