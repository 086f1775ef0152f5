"""The drivers against the real Python bindings: the names that they use exist, and with a stub in
place of the GPU's library every argument arrives and every result comes back."""

from __future__ import annotations

import ast
import importlib
import inspect
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from fastkern.device import cuda_driver, hip_driver
from tests.device.recording_cuda import RecordedCuda
from tests.device.recording_hip import RecordedHip

FOLDER = Path(__file__).parent
BINDINGS = {"cuda": "cuda.bindings.driver", "hip": "hip"}
LIBRARIES = {"cuda": "libcuda.so.1", "hip": "libamdhip64.so"}
FAKES: dict[str, Any] = {"cuda": RecordedCuda, "hip": RecordedHip}
DRIVERS: dict[str, ModuleType] = {"cuda": cuda_driver, "hip": hip_driver}


def bindings(target: str) -> Any:
    module = importlib.import_module(BINDINGS[target])
    return module.hip if target == "hip" else module


def functions_used(target: str) -> set[str]:
    """Functions that the driver's source names as text, which is how it calls them."""
    tree = ast.parse(inspect.getsource(DRIVERS[target]))
    prefix = {"cuda": "cu", "hip": "hip"}[target]
    return {
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and re.fullmatch(prefix + "[A-Z][A-Za-z0-9]+", node.value)
    }


def attributes_used(target: str) -> set[str]:
    """Dotted names below the bindings' module: "CUstream_flags.CU_STREAM_NON_BLOCKING"."""
    names = set()
    for node in ast.walk(ast.parse(inspect.getsource(DRIVERS[target]))):
        text = ast.unparse(node) if isinstance(node, ast.Attribute) else ""
        found = re.fullmatch(r"(?:self\._cu|self\._hip|cu)\.([\w.]+)", text)
        if found:
            names.add(found[1])
    return names


@pytest.mark.parametrize("target", ["cuda", "hip"])
def test_every_function_exists_with_these_parameters(target: str) -> None:
    """As many as the fakes take, which the drivers are tested with."""
    real = bindings(target)
    fake = FAKES[target]()
    if target == "hip":
        count = len(inspect.signature(real.hipGetDeviceProperties).parameters)
        fake = RecordedHip(old=count == 2)
    used = functions_used(target)
    assert len(used) > 35
    assert used | {"cuGetErrorString"} >= set(fake.functions)
    for name in sorted(set(fake.functions)):
        count = len(inspect.signature(getattr(real, name)).parameters)
        assert count == fake.num_parameters(name), name


@pytest.mark.parametrize("target", ["cuda", "hip"])
def test_every_constant_exists(target: str) -> None:
    """With the fake's value, where it is a number there."""
    real, fake = bindings(target), FAKES[target]()
    used = attributes_used(target)
    assert len(used) >= 7
    for dotted in sorted(used):
        there, here = real, fake
        for part in dotted.split("."):
            assert hasattr(there, part), dotted
            there, here = getattr(there, part), getattr(here, part, None)
        if isinstance(here, int) and not isinstance(here, bool):
            assert int(there) == int(here), dotted


def test_cuda_names_that_are_looked_up() -> None:
    real = bindings("cuda")
    for name in ("EVENT_DEFAULT", "EVENT_DISABLE_TIMING"):
        assert hasattr(real.CUevent_flags, f"CU_{name}")
    source = inspect.getsource(cuda_driver)
    attributes = set(re.findall(r'read\("(\w+)"\)', source))
    assert len(attributes) == 4
    for name in attributes:
        assert hasattr(real.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
    for code in re.findall(r'"(CUDA_ERROR_\w+)"', source):
        assert getattr(real.CUresult, code).name == code
    assert real.CU_IPC_HANDLE_SIZE == cuda_driver._HANDLE_BYTES


def test_hip_names_that_are_looked_up() -> None:
    real = bindings("hip")
    source = inspect.getsource(hip_driver)
    fields = set(re.findall(r"found\.(\w+)", source))
    assert len(fields) == 5
    for name in fields:
        assert hasattr(real.hipDeviceProp_t, name)
    codes = set(re.findall(r'"(hipError\w+)"', source))
    assert len(codes) == 2
    for code in codes:
        assert real.hipError_t[code].name == code
    assert real.hipIpcMemHandle_t().c_sizeof() == hip_driver._HANDLE_BYTES


SCRIPT = """
import ctypes, sys
from fastkern.device.driver import DriverError
from fastkern.device.open_driver import open_driver
from fastkern.device.records import ROUTE_ARGS, new_record
from tests.device.driver_path import KERNEL, NUM_BYTES, check_path, whole_path

target, library = sys.argv[1:]
driver = open_driver(target, 1)
stub = ctypes.CDLL(library)
stub.stub_complaint.restype = stub.stub_launches.restype = ctypes.c_char_p
properties = driver.properties()
assert (properties.name, properties.most_lanes) == ("a stub", 1024)
assert (properties.architecture, properties.num_processors) == {
    "cuda": ("sm_90", 132), "hip": ("gfx942", 304)}[target]
assert properties.memory_bytes == 1 << 37
peer = driver.allocate(NUM_BYTES, coherent=True)
handle = driver.export_memory(peer)
assert len(handle) == 64
try:
    image = f"{KERNEL}={ROUTE_ARGS.itemsize};".encode() + bytes(1)
    seen = whole_path(driver, image, handle)
finally:
    print(stub.stub_complaint().decode())
check_path(seen)
assert seen["asked"] is False
assert seen["elapsed_us"] == 1500
assert seen["resident"] == 2 * properties.num_processors
record = new_record(ROUTE_ARGS).tobytes().hex()
expected = [f"{KERNEL} 2 4 {record}"] + [f"{KERNEL} 1 2 {record}"] * 2
assert stub.stub_launches().decode().splitlines() == expected
driver.free(peer)
assert stub.stub_complaint() == b""
assert stub.stub_leftovers() == 0
for misuse in (lambda: driver.free(4096), lambda: driver.synchronize(77)):
    try:
        misuse()
    except DriverError as error:
        print(error)
    else:
        raise AssertionError("misuse was not an error")
driver.close()
"""


@pytest.mark.parametrize("target", ["cuda", "hip"])
def test_arguments_arrive(target: str, tmp_path: Path) -> None:
    """The whole path, records passed by value and all, through the real bindings."""
    library = tmp_path / LIBRARIES[target]
    source = FOLDER / f"{target}_stub.cc"
    flags = ["-std=c++17", "-O1", "-Wall", "-Wextra", "-Werror", "-fPIC", "-shared"]
    subprocess.run(
        [os.environ.get("CXX", "g++"), *flags, str(source), "-o", str(library)],
        check=True,
        timeout=120,
    )
    environment = {
        **os.environ,
        "LD_LIBRARY_PATH": str(tmp_path),
        "ROCM_PATH": str(tmp_path),
        "PYTHONPATH": f"{FOLDER.parents[1]}:{os.environ.get('PYTHONPATH', '')}",
    }
    ended = subprocess.run(
        [sys.executable, "-c", SCRIPT, target, str(library)],
        capture_output=True,
        text=True,
        env=environment,
        timeout=120,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    code = {"cuda": "CUDA_ERROR_INVALID_VALUE (a text)", "hip": "hipErrorInvalidValue"}[target]
    free, synchronize = {
        "cuda": ("cuMemFree", "cuStreamSynchronize"),
        "hip": ("hipFree", "hipStreamSynchronize"),
    }[target]
    assert f"{free}: {code}\n{synchronize}: {code}\n" in ended.stdout
