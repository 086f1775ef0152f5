"""The driver for the CPU: order, failures, memory, captures; what a GPU's driver promises too."""

from __future__ import annotations

import ctypes
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fastkern.device.driver import DeviceMemoryError, DriverError
from fastkern.device.graphs import record_graph
from fastkern.device.host_driver import HostDriver
from fastkern.device.open_driver import open_driver
from fastkern.device.records import LAUNCH_ARGS, ROUTE_ARGS, new_record
from fastkern.device.transfer import download, fill, own_stream, pinned, upload
from tests.device.driver_path import check_path, whole_path

HOST_FUNCTION = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


@pytest.fixture
def driver() -> Iterator[HostDriver]:
    """A driver on which nothing may be left at the end, nor a thread after it."""
    threads = threading.active_count()
    made = HostDriver()
    yield made
    left = made.leftovers()
    made.close()
    assert not left
    assert threading.active_count() == threads


@pytest.fixture
def stream(driver: HostDriver) -> Iterator[int]:
    made = driver.create_stream()
    yield made
    driver.destroy_stream(made)


class Gate:
    """A host function that holds a stream up until it is opened."""

    def __init__(self) -> None:
        self._event = threading.Event()
        self.function = HOST_FUNCTION(lambda _: self._event.wait(30) and None)
        self.address = ctypes.cast(self.function, ctypes.c_void_p).value or 0

    def open(self) -> None:
        self._event.set()


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def seen(address: int, num_bytes: int) -> bytes:
    return ctypes.string_at(address, num_bytes)


def test_the_whole_path(driver: HostDriver) -> None:
    seen = whole_path(driver, b"")
    check_path(seen)


# -- memory --------------------------------------------------------------------------------------


def test_copies_and_fills_run_in_order(driver: HostDriver, stream: int) -> None:
    device = driver.allocate(64, coherent=True)
    with pinned(driver, 64) as host:
        gate = Gate()
        driver.call_host(stream, gate.address, 0)
        driver.fill(device, 7, 64, stream)
        driver.fill(device + 8, 9, 8, stream)
        driver.copy(host, device, 64, stream)
        before = seen(host, 64)
        gate.open()
        driver.synchronize(stream)
        assert before != seen(host, 64)  # nothing ran while the stream was held up
        assert seen(host, 64) == b"\7" * 8 + b"\t" * 8 + b"\7" * 48
    driver.free(device)


def test_memory_is_aligned_and_not_zero(driver: HostDriver) -> None:
    device, host = driver.allocate(3, coherent=False), driver.allocate_host(3)
    assert device % 256 == 0
    assert seen(device, 3) != b"\0\0\0"
    assert seen(host, 3) != b"\0\0\0"
    driver.free(device)
    driver.free_host(host)


def test_memory_is_limited() -> None:
    driver = HostDriver(memory_bytes=1 << 20)
    assert driver.properties().memory_bytes == 1 << 20
    first = driver.allocate(1 << 19, coherent=False)
    with pytest.raises(DeviceMemoryError, match="600000 bytes wanted, 524288 left") as caught:
        driver.allocate(600_000, coherent=False)
    assert isinstance(caught.value, MemoryError)
    driver.free(first)
    driver.free(driver.allocate(600_000, coherent=False))
    driver.close()


def test_what_is_not_there_cannot_be_freed(driver: HostDriver) -> None:
    device, host = driver.allocate(64, coherent=False), driver.allocate_host(64)
    for call, address in [
        (driver.free, host),
        (driver.free_host, device),
        (driver.close_memory, device),
        (driver.free, device + 1),
        (driver.free, 0),
    ]:
        with pytest.raises(DriverError, match="invalid value"):
            call(address)
    driver.free(device)
    driver.free_host(host)
    with pytest.raises(DriverError, match="free: invalid value"):
        driver.free(device)


def test_ranges_end_where_memory_ends(driver: HostDriver, stream: int) -> None:
    device, host = driver.allocate(64, coherent=False), driver.allocate_host(64)
    for to, source, num_bytes in [
        (device + 1, host, 64),
        (host, device, 65),
        (device, 0, 8),
        (0, device, 8),
        (host, device, -1),
    ]:
        with pytest.raises(DriverError, match="copy: invalid value"):
            driver.copy(to, source, num_bytes, stream)
    with pytest.raises(DriverError, match="fill: invalid value"):
        driver.fill(device + 60, 0, 5, stream)
    with pytest.raises(DriverError, match="256 is no byte"):
        driver.fill(device, 256, 5, stream)
    driver.copy(0, 0, 0, stream)  # nothing to copy
    driver.free(device)
    driver.free_host(host)


def test_freeing_waits_for_the_work(driver: HostDriver, stream: int) -> None:
    device = driver.allocate(64, coherent=False)
    gate = Gate()
    driver.call_host(stream, gate.address, 0)
    driver.fill(device, 1, 64, stream)
    timer = threading.Timer(0.1, gate.open)
    timer.start()
    begin = time.monotonic()
    driver.free(device)  # a fill after this would end the process
    assert time.monotonic() - begin > 0.05
    driver.synchronize(stream)
    timer.join()


CHILD = """
import sys
from fastkern.device.graphs import record_graph
from fastkern.device.host_driver import HostDriver
from fastkern.device.transfer import download, fill
driver = HostDriver()
address = driver.open_memory(bytes.fromhex(sys.argv[1]))
assert download(driver, address, 100) == bytes(range(100))
fill(driver, address + 10, 255, 5)
driver.close_memory(address)
driver.close()
"""


def run_child(handle: bytes) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", CHILD, handle.hex()]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def test_another_process_maps_it(driver: HostDriver) -> None:
    files = open_files()
    device = driver.allocate(100, coherent=True)
    upload(driver, device, bytes(range(100)))
    handle = driver.export_memory(device)
    ended = run_child(handle)
    assert ended.returncode == 0, ended.stderr
    assert download(driver, device, 20) == bytes(range(10)) + b"\xff" * 5 + bytes(range(15, 20))
    driver.free(device)
    assert open_files() == files
    other = driver.allocate(100, coherent=True)  # as the same file of this process
    ended = run_child(handle)
    assert "invalid handle (the memory has been freed)" in ended.stderr
    driver.free(other)


def test_handles_that_cannot_be_opened(driver: HostDriver) -> None:
    device = driver.allocate(100, coherent=True)
    handle = driver.export_memory(device)
    with pytest.raises(DriverError, match="this process made it"):
        driver.open_memory(handle)
    for wrong in (b"", b"{}", b"[]", handle[:-5]):
        with pytest.raises(DriverError, match="open_memory: invalid handle"):
            driver.open_memory(wrong)
    with pytest.raises(DriverError, match="export_memory: invalid value"):
        driver.export_memory(device + 8)
    driver.free(device)


# -- streams and events ----------------------------------------------------------------------------


def test_streams_run_side_by_side(driver: HostDriver, stream: int) -> None:
    gate, device = Gate(), driver.allocate(8, coherent=False)
    driver.call_host(stream, gate.address, 0)
    with own_stream(driver) as other:
        driver.fill(device, 4, 8, other)
        driver.synchronize(other)
        assert seen(device, 8) == b"\4" * 8
    gate.open()
    driver.synchronize(stream)
    driver.free(device)


def test_events_order_streams(driver: HostDriver, stream: int) -> None:
    gate, device = Gate(), driver.allocate(8, coherent=False)
    event = driver.create_event()
    assert driver.event_done(event)  # never recorded
    driver.wait_for(event)
    with own_stream(driver) as other:
        driver.wait_event(other, event)  # waits for nothing
        driver.synchronize(other)
        driver.call_host(stream, gate.address, 0)
        driver.fill(device, 1, 8, stream)
        driver.record(event, stream)
        driver.wait_event(other, event)
        driver.fill(device, 2, 8, other)
        assert not driver.event_done(event)
        threading.Timer(0.05, gate.open).start()
        driver.wait_for(event)
        assert driver.event_done(event)
        driver.synchronize(other)
    assert download(driver, device, 8) == b"\2" * 8
    driver.destroy_event(event)
    driver.free(device)


def test_an_event_stands_for_its_last_recording(driver: HostDriver, stream: int) -> None:
    event, gate = driver.create_event(), Gate()
    driver.record(event, stream)
    driver.wait_for(event)
    driver.call_host(stream, gate.address, 0)
    driver.record(event, stream)
    assert not driver.event_done(event)
    gate.open()
    driver.synchronize(stream)
    assert driver.event_done(event)
    driver.destroy_event(event)


def test_time_between_events(driver: HostDriver, stream: int) -> None:
    begin, end = driver.create_event(timing=True), driver.create_event(timing=True)
    plain, gate = driver.create_event(), Gate()
    sleep = HOST_FUNCTION(lambda _: time.sleep(0.02))
    driver.record(begin, stream)
    driver.call_host(stream, ctypes.cast(sleep, ctypes.c_void_p).value or 0, 0)
    driver.record(plain, stream)
    driver.call_host(stream, gate.address, 0)
    driver.record(end, stream)
    with pytest.raises(DriverError, match="elapsed_us: not ready"):
        driver.elapsed_us(begin, end)
    gate.open()
    driver.synchronize(stream)
    assert 20_000 <= driver.elapsed_us(begin, end) < 2e6
    with pytest.raises(DriverError, match="made without timing"):
        driver.elapsed_us(begin, plain)
    for event in (begin, end, plain):
        driver.destroy_event(event)


def test_handles_are_checked(driver: HostDriver, stream: int) -> None:
    event = driver.create_event()
    for call in (
        lambda: driver.synchronize(event),
        lambda: driver.record(stream, stream),
        lambda: driver.replay(stream, stream),
        lambda: driver.destroy_stream(0),
        lambda: driver.destroy_stream(12),
        lambda: driver.destroy_graph(event),
    ):
        with pytest.raises(DriverError, match="invalid handle"):
            call()
    driver.destroy_event(event)
    with pytest.raises(DriverError, match="record: invalid handle"):
        driver.record(event, stream)


def test_the_default_stream(driver: HostDriver) -> None:
    device = driver.allocate(8, coherent=False)
    driver.fill(device, 3, 8, 0)
    driver.synchronize(0)
    assert seen(device, 8) == b"\3" * 8
    driver.free(device)


# -- kernels ---------------------------------------------------------------------------------------


def route_kernel(driver: HostDriver) -> tuple[Any, Any]:
    module = driver.load_module(b"")
    return module, driver.function(module, "fastkern_route_count")


def test_a_kernel_runs(driver: HostDriver, stream: int) -> None:
    module, function = route_kernel(driver)
    arguments = new_record(ROUTE_ARGS).tobytes()  # no units: nothing to count
    driver.launch(function, 2, 4, stream, arguments)
    driver.synchronize(stream)
    driver.unload_module(module)


def test_a_failing_kernel_shows_when_synchronised(driver: HostDriver, stream: int) -> None:
    module, function = route_kernel(driver)
    device = driver.allocate(8, coherent=False)
    fill(driver, device, 5, 8)
    event = driver.create_event()
    driver.launch(function, 1, 1, stream, b"short")  # returns: the device finds out
    driver.fill(device, 6, 8, stream)
    driver.record(event, stream)
    with pytest.raises(DriverError, match=r"launch: ValueError .*bytes, not 5") as first:
        driver.synchronize(stream)
    with pytest.raises(DriverError) as second:
        driver.fill(device, 7, 8, stream)
    assert str(first.value) == str(second.value)
    assert first.value is not second.value
    assert seen(device, 8) == b"\5" * 8  # what follows a failure does not run
    with pytest.raises(DriverError, match="bytes, not 5"):
        driver.wait_for(event)
    with pytest.raises(DriverError, match="bytes, not 5"):
        driver.event_done(event)
    with pytest.raises(DriverError, match="bytes, not 5"), own_stream(driver) as other:
        driver.wait_event(other, event)
    driver.destroy_event(event)
    driver.free(device)
    driver.unload_module(module)


def test_every_kernel_of_the_module_is_there(driver: HostDriver) -> None:
    """The names are those that the host target knows: another is refused, and none is missing."""
    module = driver.load_module(b"")
    for name in module.kernels:
        function = driver.function(module, name)
        stream = driver.create_stream()
        driver.launch(function, 1, 1, stream, b"")
        with pytest.raises(DriverError, match="bytes, not 0"):  # not "no kernel is called"
            driver.synchronize(stream)
        driver.destroy_stream(stream)
    with pytest.raises(DriverError, match=r"function: not found \(fastkern_none\)"):
        driver.function(module, "fastkern_none")
    driver.unload_module(module)


def test_launches_are_checked(driver: HostDriver, stream: int) -> None:
    module, function = route_kernel(driver)
    arguments = new_record(LAUNCH_ARGS).tobytes()
    for grid, num_lanes in ((0, 1), (1, 0), (1, 5)):
        with pytest.raises(DriverError, match="launch: invalid value"):
            driver.launch(function, grid, num_lanes, stream, arguments)
    with pytest.raises(DriverError, match="resident_blocks: invalid value"):
        driver.resident_blocks(function, 5)
    with pytest.raises(DriverError, match=r"launch: invalid value .*shared memory"):
        driver.launch(function, 1, 1, stream, arguments, shared_bytes=16)
    with pytest.raises(DriverError, match=r"launch: invalid value .*parameters at"):
        driver.launch(function, 1, 1, stream, arguments, offsets=(0, 8))
    with pytest.raises(DriverError, match="resident_blocks: invalid value"):
        driver.resident_blocks(function, 1, 16)
    assert driver.resident_blocks(function, 4) >= 64
    driver.unload_module(module)
    for call in (
        lambda: driver.launch(function, 1, 1, stream, arguments),
        lambda: driver.function(module, "fastkern_exchange"),
        lambda: driver.unload_module(module),
        lambda: driver.resident_blocks(function, 1),
    ):
        with pytest.raises(DriverError, match="invalid handle"):
            call()


# -- graphs ----------------------------------------------------------------------------------------


def test_a_graph_is_recorded_and_replayed(driver: HostDriver, stream: int) -> None:
    device = driver.allocate(8, coherent=False)
    fill(driver, device, 0, 8)
    calls: list[int] = []
    note = HOST_FUNCTION(lambda data: calls.append(data or 0))
    address = ctypes.cast(note, ctypes.c_void_p).value or 0
    with pinned(driver, 8) as host:
        ctypes.memset(host, 1, 8)
        driver.begin_capture(stream)
        driver.copy(device, host, 8, stream)
        driver.fill(device, 2, 4, stream)
        driver.call_host(stream, address, 77)
        graph = driver.end_capture(stream)
        assert download(driver, device, 8) == b"\0" * 8  # recorded, not run
        driver.synchronize(stream)
        assert calls == []
        for value in (5, 6):
            ctypes.memset(host, value, 8)
            driver.replay(graph, stream)
            driver.synchronize(stream)
            assert seen(device, 8) == b"\2" * 4 + bytes([value]) * 4
    assert calls == [77, 77]
    driver.destroy_graph(graph)
    with pytest.raises(DriverError, match="replay: invalid handle"):
        driver.replay(graph, stream)
    driver.free(device)


def test_other_streams_join_a_capture(driver: HostDriver, stream: int) -> None:
    device = driver.allocate(8, coherent=False)
    fill(driver, device, 0, 8)
    fork, join = driver.create_event(), driver.create_event()
    with own_stream(driver) as other:
        driver.begin_capture(stream)
        driver.record(fork, stream)
        driver.wait_event(other, fork)
        driver.fill(device, 1, 8, other)
        driver.record(join, other)
        driver.wait_event(stream, join)
        driver.fill(device, 2, 4, stream)
        graph = driver.end_capture(stream)
        assert seen(device, 8) == b"\0" * 8
        driver.replay(graph, stream)
        driver.synchronize(stream)
        assert seen(device, 8) == b"\2" * 4 + b"\1" * 4
        driver.destroy_graph(graph)
        driver.begin_capture(stream)
        driver.record(fork, stream)
        driver.wait_event(other, fork)
        driver.record(join, other)
        driver.wait_event(stream, join)
        driver.fill(device, 1, 8, other)  # after what the first stream waits for
        with pytest.raises(DriverError, match="end_capture: capture unjoined"):
            driver.end_capture(stream)
        driver.fill(device, 3, 8, other)  # runs again
        driver.synchronize(other)
        assert seen(device, 8) == b"\3" * 8
        with pytest.raises(DriverError, match="wait_event: captured event"):
            driver.wait_event(other, fork)
    driver.destroy_event(fork)
    driver.destroy_event(join)
    driver.free(device)


def test_what_a_capture_forbids(driver: HostDriver, stream: int) -> None:
    device = driver.allocate(8, coherent=False)
    event, outside = driver.create_event(), driver.create_event()
    with own_stream(driver) as other:
        driver.record(outside, other)
        driver.begin_capture(stream)
        driver.record(event, stream)
        forbidden: list[Callable[[], object]] = [
            lambda: driver.allocate(8, coherent=False),
            lambda: driver.allocate_host(8),
            lambda: driver.free(device),
            lambda: driver.load_module(b""),
            lambda: driver.synchronize(stream),
            lambda: driver.destroy_stream(stream),
            lambda: driver.event_done(event),
            lambda: driver.wait_for(event),
            lambda: driver.wait_event(stream, outside),
            lambda: driver.begin_capture(stream),
            lambda: driver.end_capture(other),
            lambda: driver.begin_capture(0),
        ]
        for call in forbidden:
            with pytest.raises(DriverError, match=r"capture|captured|no capture"):
                call()
        elsewhere: list[int] = []
        thread = threading.Thread(target=lambda: elsewhere.append(driver.allocate(8, False)))
        thread.start()
        thread.join()
        graph = driver.end_capture(stream)
    driver.free(elsewhere[0])  # another thread's work goes on during a capture
    driver.free(device)
    driver.destroy_graph(graph)
    driver.destroy_event(event)
    driver.destroy_event(outside)


def test_recording_that_fails_ends_the_capture(driver: HostDriver, stream: int) -> None:
    with pytest.raises(DriverError, match="fill: invalid value"):
        record_graph(driver, stream, lambda: driver.fill(0, 1, 8, stream))
    driver.synchronize(stream)  # not captured any more
    driver.destroy_graph(record_graph(driver, stream, lambda: None))


# -- end -------------------------------------------------------------------------------------------


def test_closing_frees_and_names_what_was_left(caplog: pytest.LogCaptureFixture) -> None:
    threads, files = threading.active_count(), open_files()
    driver = open_driver("host", 3)
    assert driver.properties().architecture == "host"
    assert (driver.device, driver.target) == (3, "host")
    driver.allocate(100, coherent=False)
    driver.allocate_host(200)
    stream = driver.create_stream()
    driver.create_event()
    driver.load_module(b"")
    driver.close()
    driver.close()
    for left in ("100 bytes of device", "200 bytes of pinned", "stream", "event", "module"):
        assert left in caplog.text
    assert threading.active_count() == threads
    assert open_files() == files
    for call in (
        lambda: driver.synchronize(stream),
        lambda: driver.fill(1, 0, 1, 0),
        lambda: driver.create_stream(),
        lambda: driver.allocate(8, coherent=False),
        lambda: driver.create_event(),
    ):
        with pytest.raises(DriverError, match="the driver is closed"):
            call()


def test_threads_share_a_driver(driver: HostDriver) -> None:
    errors: list[BaseException] = []

    def work(value: int) -> None:
        try:
            for _ in range(20):
                device = driver.allocate(4096, coherent=False)
                fill(driver, device, value, 4096)
                content = np.frombuffer(download(driver, device, 4096), dtype=np.uint8)
                assert (content == value).all()
                driver.free(device)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(k,)) for k in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
