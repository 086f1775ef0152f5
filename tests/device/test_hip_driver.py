"""The driver for AMD GPUs against a fake of its bindings: every call, its order, its failures."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from fastkern.device.driver import DeviceMemoryError, DriverError
from fastkern.device.hip_driver import HipDriver
from fastkern.device.memory import SliceHeap
from fastkern.device.records import LAUNCH_ARGS, ROUTE_ARGS, new_record
from fastkern.device.transfer import download
from fastkern.errors import DeviceUnavailableError
from tests.device.driver_path import KERNEL, NUM_BYTES, check_path, whole_path
from tests.device.recording import HANDLE_BYTES, Launch, image_of
from tests.device.recording_hip import RecordedHip

IMAGE = image_of(**{KERNEL: ROUTE_ARGS.itemsize})
# Those that give something back: their failure leaves it where it is.
RELEASES = (
    *("hipFree", "hipHostFree", "hipIpcCloseMemHandle", "hipStreamDestroy", "hipEventDestroy"),
    *("hipModuleUnload", "hipGraphDestroy", "hipGraphExecDestroy"),
)


def peer_handle() -> bytes:
    """Another process's memory, as its fake exports it."""
    driver = HipDriver(0, RecordedHip())
    return driver.export_memory(driver.allocate(NUM_BYTES, True))


@pytest.mark.parametrize("old", [False, True])
def test_the_whole_path(old: bool) -> None:
    fake = RecordedHip(old=old)
    driver = HipDriver(1, fake)
    seen = whole_path(driver, IMAGE, peer_handle())
    check_path(seen)
    assert seen["resident"] == 2 * 304
    assert seen["elapsed_us"] == 1000  # the fake's clock: a quarter of a millisecond for each
    assert len(seen["handle"]) == HANDLE_BYTES
    arguments = new_record(ROUTE_ARGS).tobytes()
    assert [(x.name, x.grid, x.num_lanes, x.record) for x in fake.launches] == [
        (KERNEL, 2, 4, arguments),
        (KERNEL, 1, 2, arguments),
        (KERNEL, 1, 2, arguments),
    ]
    assert fake.leftovers() == []
    assert fake.current == 0
    driver.close()
    driver.close()
    unused = set(fake.functions) - set(fake.log)
    assert unused == set()  # nothing in the fake that no driver calls


@pytest.mark.parametrize("old", [False, True])
def test_properties(old: bool) -> None:
    properties = HipDriver(0, RecordedHip(old=old)).properties()
    assert properties.name == "AMD Instinct MI300X"
    assert properties.architecture == "gfx942"
    assert (properties.num_processors, properties.most_lanes) == (304, 1024)
    assert properties.memory_bytes == 192 << 30


def test_coherent_memory_is_uncached() -> None:
    fake = RecordedHip()
    driver = HipDriver(0, fake)
    assert fake.buffers[driver.allocate(64, coherent=True)].kind == "uncached"
    assert fake.buffers[driver.allocate(64, coherent=False)].kind == "device"


def test_uncached_memory_that_is_refused_is_an_error() -> None:
    """Not replaced by memory that a running kernel may read stale."""
    fake = RecordedHip()
    fake.fail("hipExtMallocWithFlags", 1, "hipErrorInvalidValue")
    driver = HipDriver(0, fake)
    with pytest.raises(
        DriverError, match=r"hipExtMallocWithFlags: hipErrorInvalidValue.*ROCm 5\.7"
    ):
        driver.allocate(64, coherent=True)
    assert fake.buffers == {}


def test_the_heap_of_a_virtual_cluster_is_uncached() -> None:
    fake = RecordedHip()
    driver = HipDriver(1, fake)
    heap = SliceHeap(driver, 3, 64, 128, 1000, guard_bytes=64)
    for rank in range(3):
        for address in (heap.control_address(rank), heap.data_address(rank)):
            (kind,) = {
                b.kind
                for b in fake.buffers.values()
                if b.address <= address < b.address + b.num_bytes
            }
            assert kind == "uncached"
    assert download(driver, heap.control_address(2), 64) == bytes(64)
    heap.close()
    assert fake.leftovers() == []


def test_the_record_is_passed_by_value() -> None:
    fake = RecordedHip()
    driver = HipDriver(0, fake)
    module = driver.load_module(image_of(fastkern_exchange=LAUNCH_ARGS.itemsize))
    record = new_record(LAUNCH_ARGS, ranks=0x1234_5678_9ABC, num_ranks=3, blocks_per_rank=7)
    function = driver.function(module, "fastkern_exchange")
    driver.launch(function, 21, 512, 0, record.tobytes())
    assert fake.launches == [Launch("fastkern_exchange", 21, 512, 0, record.tobytes())]


def test_several_parameters_and_shared_memory() -> None:
    fake = RecordedHip()
    driver = HipDriver(0, fake)
    function = driver.function(driver.load_module(image_of(kernel=[8, 4, 2])), "kernel")
    arguments = bytes(range(16))
    driver.launch(function, 3, 64, 0, arguments, 1024, offsets=(0, 12, 8))
    read = bytes([*range(8), 12, 13, 14, 15, 8, 9])
    assert fake.launches == [Launch("kernel", 3, 64, 0, read, 1024)]
    assert driver.resident_blocks(function, 64, 1024) == 304
    with pytest.raises(DriverError, match=r"hipModuleLaunchKernel: invalid value .*parameters at"):
        driver.launch(function, 3, 64, 0, arguments, offsets=(0, 8, 16))
    with pytest.raises(DriverError, match=r"hipModuleLaunchKernel: invalid value .*shared memory"):
        driver.launch(function, 3, 64, 0, arguments, (48 << 10) + 1, offsets=(0, 8, 12))
    assert len(fake.launches) == 1


def test_another_current_device_is_put_aside() -> None:
    fake = RecordedHip()
    driver = HipDriver(1, fake)
    address = driver.allocate(64, coherent=True)
    assert fake.buffers[address].device == 1
    driver.free(address)
    with pytest.raises(DriverError):
        driver.free(address)
    assert fake.current == 0
    fake.current = 1
    fake.log.clear()
    driver.free(driver.allocate(64, coherent=False))
    assert "hipSetDevice" not in fake.log


def test_the_device_for_libraries() -> None:
    """Within, it is the thread's, whichever was; afterwards that is again."""
    fake = RecordedHip()
    driver = HipDriver(1, fake)
    with driver.current():
        assert fake.current == 1
    assert fake.current == 0
    with pytest.raises(ValueError, match="as wished"), driver.current():
        raise ValueError("as wished")
    assert fake.current == 0
    driver.close()
    with pytest.raises(DriverError, match="closed"), driver.current():
        pass


def test_every_failure_is_named_and_leaves_nothing() -> None:
    fake = RecordedHip()
    whole_path(HipDriver(1, fake), IMAGE, peer_handle())
    places = [(name, at + 1) for name, calls in fake.counts.items() for at in range(calls)]
    assert len(places) > 60
    for name, at in places:
        if name in ("hipGetDevice", "hipSetDevice"):
            continue  # around every call: below
        fake = RecordedHip()
        fake.fail(name, at, "hipErrorLaunchFailure")
        with pytest.raises((DriverError, DeviceUnavailableError)) as caught:
            whole_path(HipDriver(1, fake), IMAGE, peer_handle())
        assert f"{name}: hipErrorLaunchFailure" in str(caught.value)
        if name not in RELEASES:
            assert fake.leftovers() == []
            assert fake.current == 0


@pytest.mark.parametrize(("name", "at"), [("hipGetDevice", 1), ("hipSetDevice", 1)])
def test_failures_around_a_call_are_named(name: str, at: int) -> None:
    fake = RecordedHip()
    driver = HipDriver(1, fake)
    fake.fail(name, at, "hipErrorInvalidValue")
    with pytest.raises(DriverError, match=f"{name}: hipErrorInvalidValue"):
        driver.create_stream()


@pytest.mark.parametrize("name", ["hipMalloc", "hipExtMallocWithFlags", "hipHostMalloc"])
def test_too_little_memory_is_an_error_of_its_own(name: str) -> None:
    fake = RecordedHip()
    fake.fail(name, 1, "hipErrorOutOfMemory")
    driver = HipDriver(0, fake)
    calls: dict[str, Callable[[], object]] = {
        "hipMalloc": lambda: driver.allocate(64, coherent=False),
        "hipExtMallocWithFlags": lambda: driver.allocate(64, coherent=True),
        "hipHostMalloc": lambda: driver.allocate_host(64),
    }
    with pytest.raises(DeviceMemoryError) as caught:
        calls[name]()
    assert (caught.value.operation, caught.value.code) == (name, "hipErrorOutOfMemory")


def test_misuse_is_an_error() -> None:
    fake = RecordedHip()
    driver = HipDriver(0, fake)
    device, stream = driver.allocate(64, False), driver.create_stream()
    module = driver.load_module(IMAGE)
    function = driver.function(module, KERNEL)
    driver.free(device)
    misuses: list[Callable[[], object]] = [
        lambda: driver.free(device),
        lambda: driver.copy(device, device, 8, stream),
        lambda: driver.export_memory(device),
        lambda: driver.open_memory(bytes(HANDLE_BYTES)),
        lambda: driver.open_memory(bytes(HANDLE_BYTES - 1)),
        lambda: driver.load_module(b"no image"),
        lambda: driver.function(module, "fastkern_none"),
        lambda: driver.launch(function, 0, 32, stream, bytes(ROUTE_ARGS.itemsize)),
        lambda: driver.end_capture(stream),
    ]
    for misuse in misuses:
        with pytest.raises(DriverError):
            misuse()
    driver.unload_module(module)
    driver.destroy_stream(stream)
    for misuse in (
        lambda: driver.launch(function, 1, 32, 0, bytes(ROUTE_ARGS.itemsize)),
        lambda: driver.fill(device, 0, 1, stream),
        lambda: driver.synchronize(stream),
    ):
        with pytest.raises(DriverError):
            misuse()
    driver.close()
    with pytest.raises(DriverError, match="hipStreamCreateWithFlags: the driver is closed"):
        driver.create_stream()


def test_an_event_that_is_not_ready() -> None:
    fake = RecordedHip()
    driver = HipDriver(0, fake)
    event = driver.create_event()
    fake.not_ready = 1
    assert [driver.event_done(event), driver.event_done(event)] == [False, True]
    driver.destroy_event(event)
    with pytest.raises(DriverError, match="hipEventQuery: hipErrorInvalidHandle"):
        driver.event_done(event)


def test_a_graph_that_cannot_be_made_ready_is_destroyed() -> None:
    fake = RecordedHip()
    driver = HipDriver(0, fake)
    stream = driver.create_stream()
    fake.fail("hipGraphInstantiateWithFlags", 1, "hipErrorInvalidValue")
    driver.begin_capture(stream)
    with pytest.raises(DriverError, match="hipGraphInstantiateWithFlags"):
        driver.end_capture(stream)
    driver.destroy_stream(stream)
    assert fake.leftovers() == []


class NoLibrary:
    """Bindings without ROCm behind them."""

    def hipInit(self, flags: int) -> Any:  # noqa: N802 - the bindings' name
        raise RuntimeError("failed to dlopen libamdhip64.so")


def test_what_is_missing_is_named() -> None:
    text = r"hipInit: not available \(failed to dlopen libamdhip64.so\).*fastkern\[rocm\]"
    with pytest.raises(DeviceUnavailableError, match=text):
        HipDriver(0, NoLibrary())
    fake = RecordedHip()
    fake.fail("hipGetDeviceCount", 1, "hipErrorNoDevice")
    with pytest.raises(DeviceUnavailableError, match="hipGetDeviceCount: hipErrorNoDevice"):
        HipDriver(0, fake)
    for device in (2, -1):
        with pytest.raises(DeviceUnavailableError, match=f"no HIP device {device}: there are 2"):
            HipDriver(device, RecordedHip())
