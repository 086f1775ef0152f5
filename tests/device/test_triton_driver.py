"""Launching the kernels in Triton: on drivers that record, and on the interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fastkern.device import backend as backends
from fastkern.device import compile_triton, virtual_kernels
from fastkern.device.cuda_driver import CudaDriver
from fastkern.device.driver import DriverError
from fastkern.device.hip_driver import HipDriver
from fastkern.device.host_driver import HostDriver
from fastkern.device.open_driver import open_driver
from fastkern.device.records import LAUNCH_ARGS, ROUTE_ARGS, new_record
from fastkern.device.route_records import launch_route, num_units
from fastkern.device.triton_driver import TritonDriver
from fastkern.device.triton_image import TritonImage, TritonKernel, pack_image, unpack_image
from fastkern.device.virtual_kernels import ENTRY_OF, PERSISTENT, Kernels, default_load
from fastkern.errors import DeviceUnavailableError
from fastkern.kernels.triton.entry import ENTRIES
from fastkern.transports import resolve
from fastkern.tuning.profile import Profile, format_profiles
from tests.device.driver_path import KERNEL, check_path, whole_path
from tests.device.recording import Launch, RecordedDevice, image_of
from tests.device.recording_cuda import RecordedCuda
from tests.device.recording_hip import RecordedHip

EXCHANGE = "fastkern_exchange"
RECORD = new_record(LAUNCH_ARGS, ranks=0x1234_5678_9ABC, num_ranks=3, blocks_per_rank=7).tobytes()
ARCHES = {"cuda": "sm_90", "hip": "gfx942"}
SHARED_BYTES = 640


def a_kernel(name: str, num_lanes: int) -> TritonKernel:
    """As compiled, in the terms of the fakes: LaunchArgs and two hidden pointers."""
    code = image_of(**{name: [8, 4, 4, 8, 8]})
    return TritonKernel(name, num_lanes, SHARED_BYTES, (0, 8, 12, 16, 24), 16, 32, code)


def an_image(target: str, num_lanes: int = 128, *names: str) -> bytes:
    kernels = tuple(a_kernel(name, num_lanes) for name in names or (EXCHANGE,))
    return pack_image(TritonImage(target, ARCHES[target], {}, kernels))


@pytest.fixture(params=["cuda", "hip"])
def fake(request: pytest.FixtureRequest) -> RecordedDevice:
    return RecordedCuda() if request.param == "cuda" else RecordedHip()


@pytest.fixture
def driver(fake: RecordedDevice) -> TritonDriver:
    return TritonDriver(CudaDriver(0, fake) if type(fake) is RecordedCuda else HipDriver(0, fake))


def test_what_is_not_triton_goes_to_the_driver(fake: RecordedDevice, driver: TritonDriver) -> None:
    check_path(whole_path(driver, image_of(**{KERNEL: ROUTE_ARGS.itemsize})))
    assert fake.leftovers() == []
    assert driver.properties().architecture == ARCHES[driver.target]
    with driver.current():
        pass
    driver.close()
    with pytest.raises(DriverError, match="the driver is closed"):
        driver.create_stream()


def test_a_launch(fake: RecordedDevice, driver: TritonDriver) -> None:
    """The record, then hidden pointers, which are null; the kernel's own shared memory."""
    module = driver.load_module(an_image(driver.target))
    function = driver.function(module, EXCHANGE)
    driver.launch(function, 21, 128, 0, RECORD)
    padded = RECORD + bytes(16)
    assert fake.launches == [Launch(EXCHANGE, 21, 128, 0, padded, SHARED_BYTES)]
    # The fakes hold fewer blocks where there is shared memory.
    assert driver.resident_blocks(function, 128) == driver.properties().num_processors
    driver.unload_module(module)
    assert fake.leftovers() == []
    driver.unload_module(module)


def test_launches_that_are_refused(fake: RecordedDevice, driver: TritonDriver) -> None:
    function = driver.function(driver.load_module(an_image(driver.target)), EXCHANGE)
    wrong: list[tuple[str, Callable[[], object]]] = [
        ("for 128 lanes, not 256", lambda: driver.launch(function, 1, 256, 0, RECORD)),
        ("for 128 lanes, not 64", lambda: driver.resident_blocks(function, 64)),
        ("16 bytes, not 15", lambda: driver.launch(function, 1, 128, 0, RECORD[:-1])),
        ("one record", lambda: driver.launch(function, 1, 128, 0, RECORD, 16)),
        ("one record", lambda: driver.launch(function, 1, 128, 0, RECORD, offsets=(0, 8))),
    ]
    for text, launch in wrong:
        with pytest.raises(DriverError, match=f"invalid value .*{text}"):
            launch()
    assert fake.launches == []


def test_images_for_another_device(fake: RecordedDevice, driver: TritonDriver) -> None:
    other = "hip" if driver.target == "cuda" else "cuda"
    with pytest.raises(DriverError, match=r"load_module: invalid image .*the device is"):
        driver.load_module(an_image(other))
    image = unpack_image(an_image(driver.target))
    with pytest.raises(DriverError, match=r"load_module: invalid image .*sm_80, the device is"):
        driver.load_module(pack_image(TritonImage(driver.target, "sm_80", {}, image.kernels)))
    assert fake.leftovers() == []


def test_a_kernel_that_does_not_load(fake: RecordedDevice, driver: TritonDriver) -> None:
    kernels = (a_kernel("first", 128), TritonKernel("second", 128, 0, (0,), 8, 8, b"no image"))
    image = TritonImage(driver.target, ARCHES[driver.target], {}, kernels)
    with pytest.raises(DriverError):
        driver.load_module(pack_image(image))
    assert fake.leftovers() == []
    module = driver.load_module(an_image(driver.target))
    with pytest.raises(DriverError, match="function: not found"):
        driver.function(module, "second")


def test_only_gpus_are_wrapped(driver: TritonDriver) -> None:
    for wrong in (driver, HostDriver()):
        with pytest.raises(ValueError, match="of target cuda or hip"):
            TritonDriver(wrong)


# -- the kernels of a process ----------------------------------------------------------------------


class Loads:
    """Images as the fakes have them; notes what is asked for."""

    def __init__(self, target: str) -> None:
        self.target = target
        self.asked: list[tuple[str, int]] = []

    def __call__(self, entry: str, num_lanes: int) -> bytes:
        self.asked.append((entry, num_lanes))
        names = [name for name, of in ENTRY_OF.items() if of == entry]
        if entry == "static":
            return image_of(**dict.fromkeys(names, 16))
        return an_image(self.target, num_lanes, *names)


def test_images_by_lanes(driver: TritonDriver) -> None:
    """A call's lanes for what moves rows, 128 for route, at most 512 for what is in C++."""
    load = Loads(driver.target)
    kernels = Kernels(driver, load, 1, 1)
    for name in ENTRY_OF:
        kernels.get(name, 1024)
    assert load.asked == [
        *(("exchange", 1024), ("dispatch", 1024), ("combine", 1024), ("route", 128), ("static", 0))
    ]
    assert kernels.lanes_of("fastkern_static_direct", 1024) == 512
    first = kernels.get(EXCHANGE, 1024)
    assert kernels.get(EXCHANGE, 1024) is first
    assert kernels.get(EXCHANGE, 256) is not first
    assert kernels.most_blocks(EXCHANGE, 256) == driver.properties().num_processors
    assert load.asked[5:] == [("exchange", 256)]
    kernels.close()


def test_lanes_that_a_kernel_cannot_have(driver: TritonDriver) -> None:
    kernels = Kernels(driver, Loads(driver.target), 1, 1)
    for lanes in (16, 96, 192, 2048, 0, -64):
        with pytest.raises(ValueError, match=r"num_lanes must be .* times a power of two, at most"):
            kernels.get(EXCHANGE, lanes)


def test_blocks_that_do_not_fit(driver: TritonDriver) -> None:
    kernels = Kernels(driver, Loads(driver.target), 3, 200)
    with pytest.raises(ValueError, match="3 ranks with 200 blocks each"):
        kernels.get(EXCHANGE, 256)


def test_what_is_loaded(monkeypatch: pytest.MonkeyPatch, driver: TritonDriver) -> None:
    asked: list[Any] = []

    def note(*given: Any, **named: Any) -> bytes:
        asked.append((*given, *named.values()))
        return b""

    monkeypatch.setattr(compile_triton, "compile_triton", note)
    monkeypatch.setattr(virtual_kernels, "compile_entry", note)
    load = default_load(driver, tile_bytes=2048)
    where = driver.target, ARCHES[driver.target]
    for entry in ("combine", "route", "static"):
        load(entry, 128)
    default_load(driver)("exchange", 64)
    assert asked == [
        ("combine", *where, 128, {"TILE_BYTES": 2048}),
        ("route", *where, 128, {}),
        ("static", *where, "peer"),
        ("exchange", *where, 64, {"TILE_BYTES": 16384}),
    ]
    for wrong in (0, 8, 3000, 1 << 18):
        with pytest.raises(ValueError, match=f"tile_bytes must be a power of two .*not {wrong}"):
            default_load(driver, tile_bytes=wrong)


# -- route -----------------------------------------------------------------------------------------


def test_units() -> None:
    """A unit costs a block: fewer than in C++, where it costs a lane."""
    assert [num_units(n, "triton") for n in (0, 1, 64, 65, 4096, 1 << 20)] == [1, 1, 4, 5, 256, 512]
    assert [num_units(n, "cxx") for n in (0, 1, 64, 65, 4096, 1 << 20)] == [1, 1, 8, 9, 512, 1024]


def test_route_launches(
    monkeypatch: pytest.MonkeyPatch, fake: RecordedDevice, driver: TritonDriver
) -> None:
    """A block for each unit, or for so many keys; the C++ kernels have a lane for each."""
    monkeypatch.setattr("fastkern.device.route_records._keys_per_program", lambda: 100)
    kernels = Kernels(driver, Loads(driver.target), 1, 1)
    args = new_record(LAUNCH_ARGS)  # of the fakes' kernels
    for step, items in (("count", 5), ("scan", 301), ("fill", 5), ("scan", 300)):
        launch_route(driver, kernels, f"fastkern_route_{step}", args, items, 0)
    assert [(x.name[15:], x.grid, x.num_lanes) for x in fake.launches] == [
        *(("count", 5, 128), ("scan", 4, 128), ("fill", 5, 128), ("scan", 3, 128))
    ]


# -- the interpreter -------------------------------------------------------------------------------

INTERPRETED = """
import numpy as np, pytest, torch
import torch.distributed as dist
from fastkern import Communicator
from fastkern.device.backend import backend_name, check_backend, open_backend
from fastkern.device.driver import DriverError
from fastkern.device.open_driver import open_driver
from fastkern.device.records import LAUNCH_ARGS, ROUTE_ARGS, new_record
from fastkern.device.transfer import download
from fastkern.device.virtual_cluster import VirtualCluster
from fastkern.device.virtual_kernels import PERSISTENT, Kernels, default_load
from fastkern.planner import Topology
from fastkern.transports import resolve
from tests.device import triton_kernels
from tests.device.test_triton_driver import an_image
from tests.device.driver_path import KERNEL, check_path, whole_path

triton_kernels.use(pytest.MonkeyPatch())
driver = open_driver("triton")
assert (driver.target, driver.kernels) == ("host", "triton")
kernels = Kernels(driver, default_load(driver, tile_bytes=64), 1, 3)
words, stream = driver.allocate(64, False), driver.create_stream()
driver.fill(words, 255, 64, stream)
function = kernels.get("fastkern_exchange", 3)
record = new_record(LAUNCH_ARGS, ranks=words, num_ranks=5, blocks_per_rank=7).tobytes()
driver.launch(function, 4, 3, stream, record)
driver.synchronize(stream)
found = np.frombuffer(download(driver, words, 64), dtype=np.int64).tolist()
assert found == triton_kernels.expected(4, 5, 7, 64) + [-1] * 4, found

# What is in C++ alone, and images of the host target: as on HostDriver.
kernels.get("fastkern_static_direct", 3)
check_path(whole_path(driver, b""))

# A kernel that fails ends its stream, as it does on a GPU.
other = driver.create_stream()
driver.launch(function, 1, 3, other, b"short")
with pytest.raises(DriverError, match="launch: ValueError"):
    driver.synchronize(other)
with pytest.raises(DriverError, match=r"load_module: invalid image .*of target cuda"):
    driver.load_module(an_image("cuda"))
for handle in (stream, other):
    driver.destroy_stream(handle)
driver.free(words)
kernels.close()
assert driver.leftovers() == []

with pytest.raises(ValueError, match="2 ranks on Triton's interpreter"):
    VirtualCluster(driver, Topology(1, 2))
VirtualCluster(driver, Topology(1, 1)).close()
assert driver.leftovers() == []

peer = resolve("peer")
assert backend_name("triton", peer) == "triton on host"
assert backend_name(driver, peer) == "driver of host, triton"
check_backend("triton", peer)
check_backend(driver, peer)
device = open_backend("triton", peer)
assert type(device.driver) is type(driver) and device.streams.device == torch.device("cpu")
device.close()
driver.close()

# A communicator's lanes and tiles reach the kernels.
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
with Communicator(backend="triton", servers=1, buffer_bytes=0) as comm:
    assert comm.transport.name == "peer"
    runtime = comm._runtime
    assert runtime.num_lanes == 2
    found = {name: runtime.kernels.get(name, 2).module.constants for name in PERSISTENT}
    assert found == dict.fromkeys(PERSISTENT, {"TILE_BYTES": 512}), found
dist.destroy_process_group()
print("as it should be")
"""


def test_the_interpreter(tmp_path: Path) -> None:
    """In a process of its own: Triton decides when it is imported."""
    profile = tmp_path / "tuning.json"
    profile.write_text(format_profiles([Profile(num_lanes=2, tile_bytes=512, kernels="triton")]))
    environment = {
        **os.environ,
        "TRITON_INTERPRET": "1",
        "FASTKERN_PROFILE": str(profile),
        "PYTHONPATH": str(Path.cwd()),
    }
    ended = subprocess.run(
        [sys.executable, "-c", INTERPRETED],
        env=environment,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert (ended.returncode, ended.stdout) == (0, "as it should be\n"), ended.stderr


# -- backend="triton" ------------------------------------------------------------------------------


def test_nowhere_to_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for ask in (
        lambda: open_driver("triton"),
        lambda: backends.backend_name("triton", resolve("peer")),
    ):
        with pytest.raises(DeviceUnavailableError, match=r"sees no GPU.*TRITON_INTERPRET=1"):
            ask()
    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.raises(DeviceUnavailableError, match=r"pip install 'fastkern\[triton\]'"):
        open_driver("triton")


@pytest.mark.parametrize("target", ["cuda", "hip"])
def test_the_gpu_that_torch_sees(monkeypatch: pytest.MonkeyPatch, target: str) -> None:
    """Wrapped; all ranks must have the same, and no rank with the kernels in C++ is like it."""
    fake: Any = RecordedCuda() if target == "cuda" else RecordedHip()
    kinds = {"cuda": CudaDriver, "hip": HipDriver}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.version, "hip", "7.0" if target == "hip" else None)
    module = f"fastkern.device.{target}_driver.{kinds[target].__name__}"
    monkeypatch.setattr(module, lambda device: kinds[target](device, fake))
    peer = resolve("peer")
    backends.check_backend("triton", peer)
    device = backends.open_backend("triton", peer)
    assert device is not None
    assert type(device.driver) is TritonDriver
    assert (device.driver.target, device.driver.device) == (target, 1)
    names = {backends.backend_name(given, peer) for given in ("triton", target, device.driver)}
    assert names == {f"triton on {target}", target, f"driver of {target}, triton"}
    assert device.streams.device == torch.device("cuda", 1)
    device.close()
    if target == "cuda":
        assert fake.retained == [0, 0]


@pytest.mark.parametrize("transport", ["rocshmem", "shm"])
def test_transports_that_the_kernels_do_not_know(driver: TritonDriver, transport: str) -> None:
    known = "its kernels go over peer, nvshmem, nccl_gin, not over"
    for backend in ("triton", driver):
        with pytest.raises(ValueError, match=f"{known} {transport}"):
            backends.check_backend(backend, resolve(transport))


@pytest.mark.parametrize("transport", ["nvshmem", "nccl_gin"])
def test_transports_between_servers_are_for_nvidia(driver: TritonDriver, transport: str) -> None:
    if driver.target == "cuda":
        backends.check_backend(driver, resolve(transport))
        return
    with pytest.raises(ValueError, match=f"transport {transport} is for cuda"):
        backends.check_backend(driver, resolve(transport))


def test_each_kernel_is_a_module_of_its_own(driver: TritonDriver) -> None:
    """What a library between servers is told of: modules of the wrapped driver, once each."""

    def load(entry: str, num_lanes: int) -> bytes:
        return an_image(driver.target, num_lanes, *ENTRIES[entry])

    kernels = Kernels(driver, load, 1, 1, "nccl_gin")
    modules = kernels.moving_modules(128)
    assert len(modules) == len(PERSISTENT)
    assert all(driver.parts_of(module) == [module] for module in modules)
    for name, module in zip(PERSISTENT, modules, strict=True):
        assert module in driver.parts_of(kernels.module_of(name, 128))
    kernels.close()
