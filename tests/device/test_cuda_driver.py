"""The driver for NVIDIA GPUs against a fake of its bindings: calls, their order, failures."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from fastkern.device.cuda_driver import CudaDriver
from fastkern.device.driver import DeviceMemoryError, DriverError
from fastkern.device.memory import SliceHeap
from fastkern.device.open_driver import open_driver
from fastkern.device.records import LAUNCH_ARGS, ROUTE_ARGS, new_record
from fastkern.device.transfer import download
from fastkern.errors import DeviceUnavailableError
from tests.device.driver_path import KERNEL, NUM_BYTES, check_path, whole_path
from tests.device.recording import HANDLE_BYTES, Launch, image_of
from tests.device.recording_cuda import FOREIGN_CONTEXT, MEMORY_BYTES, RecordedCuda

IMAGE = image_of(**{KERNEL: ROUTE_ARGS.itemsize})
# Those that give something back: their failure leaves it where it is.
RELEASES = (
    *("cuMemFree", "cuMemFreeHost", "cuIpcCloseMemHandle", "cuStreamDestroy", "cuEventDestroy"),
    *("cuModuleUnload", "cuGraphDestroy", "cuGraphExecDestroy", "cuCtxPopCurrent"),
    "cuDevicePrimaryCtxRelease",
)
STARTING = (
    *("cuInit", "cuDeviceGetCount", "cuDeviceGet", "cuDeviceGetName", "cuDeviceTotalMem"),
    *("cuDeviceGetAttribute", "cuModuleGetLoadingMode", "cuDevicePrimaryCtxRetain"),
)


def peer_handle() -> bytes:
    """Another process's memory, as its fake exports it."""
    peer = RecordedCuda()
    return CudaDriver(0, peer).export_memory(CudaDriver(0, peer).allocate(NUM_BYTES, True))


def test_the_whole_path() -> None:
    fake = RecordedCuda()
    driver = CudaDriver(1, fake)
    seen = whole_path(driver, IMAGE, peer_handle())
    check_path(seen)
    assert seen["resident"] == 3 * 132
    assert seen["elapsed_us"] == 1000  # the fake's clock: a quarter of a millisecond for each
    assert len(seen["handle"]) == HANDLE_BYTES
    arguments = new_record(ROUTE_ARGS).tobytes()
    assert [(x.name, x.grid, x.num_lanes, x.record) for x in fake.launches] == [
        (KERNEL, 2, 4, arguments),
        (KERNEL, 1, 2, arguments),
        (KERNEL, 1, 2, arguments),
    ]
    assert fake.leftovers() == []
    assert fake.contexts == []
    driver.close()
    driver.close()
    assert fake.retained == [0, 0]
    unused = set(fake.functions) - set(fake.log) - {"cuGetErrorString"}
    assert unused == set()  # nothing in the fake that no driver calls


def test_properties() -> None:
    properties = CudaDriver(0, RecordedCuda()).properties()
    assert properties.name == "NVIDIA H200"
    assert properties.architecture == "sm_90"
    assert (properties.num_processors, properties.most_lanes) == (132, 1024)
    assert properties.memory_bytes == MEMORY_BYTES


def test_kernels_are_loaded_before_they_are_launched() -> None:
    """The fake refuses a launch of a function that was looked up but not loaded."""
    fake = RecordedCuda()
    driver = CudaDriver(0, fake)
    driver.function(driver.load_module(IMAGE), KERNEL)
    assert fake.log.index("cuModuleLoadData") < fake.log.index("cuModuleGetFunction")
    assert fake.log.index("cuModuleGetFunction") < fake.log.index("cuFuncLoad")


def test_the_record_is_passed_by_value() -> None:
    fake = RecordedCuda()
    driver = CudaDriver(0, fake)
    module = driver.load_module(image_of(fastkern_exchange=LAUNCH_ARGS.itemsize))
    record = new_record(LAUNCH_ARGS, ranks=0x1234_5678_9ABC, num_ranks=3, blocks_per_rank=7)
    function = driver.function(module, "fastkern_exchange")
    driver.launch(function, 21, 512, 0, record.tobytes())
    assert fake.launches == [Launch("fastkern_exchange", 21, 512, 0, record.tobytes())]


def test_several_parameters_and_shared_memory() -> None:
    fake = RecordedCuda()
    driver = CudaDriver(0, fake)
    function = driver.function(driver.load_module(image_of(kernel=[8, 4, 2])), "kernel")
    arguments = bytes(range(16))
    driver.launch(function, 3, 64, 0, arguments, 1024, offsets=(0, 12, 8))
    read = bytes([*range(8), 12, 13, 14, 15, 8, 9])
    assert fake.launches == [Launch("kernel", 3, 64, 0, read, 1024)]
    assert driver.resident_blocks(function, 64, 1024) == 132
    with pytest.raises(DriverError, match=r"cuLaunchKernel: invalid value .*parameters at"):
        driver.launch(function, 3, 64, 0, arguments, offsets=(0, 8, 16))
    with pytest.raises(DriverError, match=r"cuLaunchKernel: invalid value .*shared memory"):
        driver.launch(function, 3, 64, 0, arguments, (48 << 10) + 1, offsets=(0, 8, 12))
    assert len(fake.launches) == 1


@pytest.mark.parametrize("current", [0, FOREIGN_CONTEXT, 0x101])
def test_another_current_context_is_put_aside(current: int) -> None:
    """0x101 is the primary context of another device, as PyTorch may have made current."""
    fake = RecordedCuda()
    fake.retained[1] = 1
    fake.contexts = [current] if current else []
    driver = CudaDriver(0, fake)
    address = driver.allocate(64, coherent=True)
    assert fake.buffers[address].device == 0
    driver.free(address)
    with pytest.raises(DriverError):
        driver.free(address)
    assert fake.contexts == ([current] if current else [])


def test_the_own_context_is_used_as_it_is() -> None:
    fake = RecordedCuda()
    driver = CudaDriver(0, fake)
    fake.contexts = [0x100]
    driver.free(driver.allocate(64, coherent=False))
    assert "cuCtxPushCurrent" not in fake.log


def test_the_device_for_libraries() -> None:
    """Within, the device's context is the thread's, whatever was; afterwards that is again."""
    fake = RecordedCuda()
    fake.retained[1] = 1
    driver = CudaDriver(0, fake)
    fake.contexts = [0x101]
    with driver.current():
        assert fake.contexts == [0x101, 0x100]
        driver.free(driver.allocate(64, coherent=False))
    assert fake.contexts == [0x101]
    with pytest.raises(ValueError, match="as wished"), driver.current():
        raise ValueError("as wished")
    assert fake.contexts == [0x101]
    driver.close()
    with pytest.raises(DriverError, match="closed"), driver.current():
        pass


def start_use_and_close(fake: RecordedCuda, drivers: list[CudaDriver]) -> None:
    drivers.append(CudaDriver(1, fake))
    whole_path(drivers[0], IMAGE, peer_handle())
    drivers[0].close()


def failing_places() -> list[tuple[str, int]]:
    """Every call that the whole path makes: its function and which call of it."""
    fake = RecordedCuda()
    start_use_and_close(fake, [])
    return [(name, at + 1) for name, calls in fake.counts.items() for at in range(calls)]


def test_every_failure_is_named_and_leaves_nothing() -> None:
    places = failing_places()
    assert len(places) > 60
    for name, at in places:
        if name.startswith("cuCtx"):
            continue  # around every call: below
        fake = RecordedCuda()
        fake.fail(name, at, "CUDA_ERROR_LAUNCH_FAILED")
        drivers: list[CudaDriver] = []
        with pytest.raises((DriverError, DeviceUnavailableError)) as caught:
            start_use_and_close(fake, drivers)
        text = f"{name}: CUDA_ERROR_LAUNCH_FAILED (text of CUDA_ERROR_LAUNCH_FAILED)"
        assert text in str(caught.value)
        if name in STARTING:
            assert drivers == []
            assert fake.retained == [0, 0]
        if name not in RELEASES:
            assert fake.leftovers() == []
            assert fake.contexts == []
            for driver in drivers:
                driver.close()
            assert fake.retained == [0, 0]


@pytest.mark.parametrize("name", ["cuCtxGetCurrent", "cuCtxPushCurrent", "cuCtxPopCurrent"])
def test_failures_around_a_call_are_named(name: str) -> None:
    fake = RecordedCuda()
    driver = CudaDriver(1, fake)
    fake.fail(name, 1, "CUDA_ERROR_INVALID_CONTEXT")
    with pytest.raises(DriverError, match=f"{name}: CUDA_ERROR_INVALID_CONTEXT"):
        driver.create_stream()


@pytest.mark.parametrize("name", ["cuMemAlloc", "cuMemHostAlloc"])
def test_too_little_memory_is_an_error_of_its_own(name: str) -> None:
    fake = RecordedCuda()
    fake.fail(name, 1, "CUDA_ERROR_OUT_OF_MEMORY")
    driver = CudaDriver(0, fake)
    call = driver.allocate_host if name == "cuMemHostAlloc" else driver.allocate
    with pytest.raises(DeviceMemoryError, match="CUDA_ERROR_OUT_OF_MEMORY") as caught:
        call(64, *([] if name == "cuMemHostAlloc" else [True]))
    assert isinstance(caught.value, MemoryError)
    assert (caught.value.operation, caught.value.code) == (name, "CUDA_ERROR_OUT_OF_MEMORY")


def test_misuse_is_an_error() -> None:
    fake = RecordedCuda()
    driver = CudaDriver(0, fake)
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
        lambda: driver.allocate(0, False),
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
    with pytest.raises(DriverError, match="cuStreamCreate: the driver is closed"):
        driver.create_stream()


def test_an_event_that_is_not_ready() -> None:
    fake = RecordedCuda()
    driver = CudaDriver(0, fake)
    event = driver.create_event()
    fake.not_ready = 1
    assert [driver.event_done(event), driver.event_done(event)] == [False, True]
    driver.destroy_event(event)
    with pytest.raises(DriverError, match="cuEventQuery: CUDA_ERROR_INVALID_HANDLE"):
        driver.event_done(event)


def test_a_graph_that_cannot_be_made_ready_is_destroyed() -> None:
    fake = RecordedCuda()
    driver = CudaDriver(0, fake)
    stream = driver.create_stream()
    fake.fail("cuGraphInstantiate", 1, "CUDA_ERROR_INVALID_VALUE")
    driver.begin_capture(stream)
    with pytest.raises(DriverError, match="cuGraphInstantiate"):
        driver.end_capture(stream)
    driver.destroy_stream(stream)
    assert fake.leftovers() == []


def test_a_heap_of_slices_works_on_it() -> None:
    fake = RecordedCuda()
    driver = CudaDriver(1, fake)
    heap = SliceHeap(driver, 3, 64, 128, 1000, guard_bytes=64)
    assert download(driver, heap.control_address(2), 64) == bytes(64)
    assert heap.damaged_guards() == []
    heap.close()
    assert fake.leftovers() == []


class NoLibrary:
    """Bindings without NVIDIA's driver behind them."""

    def cuInit(self, flags: int) -> Any:  # noqa: N802 - the bindings' name
        raise RuntimeError("no libcuda")


def test_what_is_missing_is_named() -> None:
    with pytest.raises(DeviceUnavailableError, match=r"cuInit: not available \(no libcuda\)"):
        CudaDriver(0, NoLibrary())
    fake = RecordedCuda()
    fake.fail("cuInit", 1, "CUDA_ERROR_NO_DEVICE")
    with pytest.raises(DeviceUnavailableError, match=r"CUDA_ERROR_NO_DEVICE.*libcuda"):
        CudaDriver(0, fake)
    for device in (2, -1):
        with pytest.raises(DeviceUnavailableError, match=f"no CUDA device {device}: there are 2"):
            CudaDriver(device, RecordedCuda())
    with pytest.raises(ValueError, match='must be "cuda", "hip", "host" or "triton", not \'rocm\''):
        open_driver("rocm")


def test_a_function_that_an_old_driver_lacks() -> None:
    fake = RecordedCuda()

    def missing(*_: object) -> Any:
        raise RuntimeError('Function "cuFuncLoad" not found')

    fake.cuFuncLoad = missing  # type: ignore[attr-defined]
    driver = CudaDriver(0, fake)
    module = driver.load_module(IMAGE)
    with pytest.raises(DriverError, match=r'cuFuncLoad: not available .*"cuFuncLoad" not found'):
        driver.function(module, KERNEL)


@pytest.mark.parametrize(("target", "package"), [("cuda", "cuda"), ("hip", "hip")])
def test_without_bindings_the_package_imports_and_says_how_to_get_them(
    target: str, package: str
) -> None:
    script = f"""
import sys
sys.modules[{package!r}] = None
from fastkern.device import cuda_driver, hip_driver, host_driver, memory, torch_memory
from fastkern.device.open_driver import open_driver
from fastkern.errors import DeviceUnavailableError
try:
    open_driver({target!r})
except DeviceUnavailableError as error:
    print(error)
"""
    ended = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120
    )
    assert "pip install 'fastkern[" in ended.stdout, ended.stderr
