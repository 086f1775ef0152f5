"""NVIDIA GPUs, through cuda.bindings.driver.

Context. Everything happens in the device's primary context, which PyTorch uses too: a stream of
`torch.cuda.current_stream().cuda_stream` is one of ours. Where another context is current in the
calling thread it is put aside for the call and back afterwards, so that PyTorch's own notion of the
current device stays as it is.

Loading. A kernel that is loaded only at its first launch may make the device wait until it is idle,
which it never is while a kernel of ours waits for a peer whose launch comes after that loading.
CUDA_MODULE_LOADING=EAGER would have to be set before anybody in the process initialises CUDA, so
`function` loads each kernel itself (cuFuncLoad, from CUDA 12.4), whatever the mode.

Host functions. The bindings' own cuLaunchHostFunc wraps the function in a record that some releases
(12.9 and 13.0, say) free when it is first called, so that a graph with one can be replayed only
once. The C function is called instead, at the address that cuGetProcAddress gives.

Capture. Streams are captured in thread-local mode: other threads, a watchdog that asks for events
say, neither disturb a capture nor are disturbed.
"""

from __future__ import annotations

import ctypes
import importlib
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from ..errors import DeviceUnavailableError
from .driver import (
    ONE_RECORD,
    DeviceMemoryError,
    DeviceProperties,
    DriverError,
    check_launch,
)

log = logging.getLogger("fastkern")

_NAME_BYTES = 256
_HANDLE_BYTES = 64  # CU_IPC_HANDLE_SIZE
_HOST_FUNC_VERSION = 10000  # cuLaunchHostFunc came with CUDA 10.0
_LAUNCH_HOST_FUNC = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p
)


class CudaDriver:
    """Driver for one CUDA device. See driver.Driver.

    device: its ordinal as CUDA counts (after CUDA_VISIBLE_DEVICES). bindings: the module
    cuda.bindings.driver, imported where none is given. Raises DeviceUnavailableError where the
    module, NVIDIA's driver or the device is missing.
    """

    target = "cuda"
    kernels = "cxx"

    def __init__(self, device: int = 0, bindings: Any = None) -> None:
        self.device = device
        self._cu = cu = bindings if bindings is not None else _import_bindings()
        self._launch_host: Callable[[int, int, int], int] | None = None
        count = self._initialize()
        if not 0 <= device < count:
            raise DeviceUnavailableError(f"no CUDA device {device}: there are {count} here")
        self._handle = self._outside("cuDeviceGet", device)[0]
        self._properties = self._read_properties()
        (mode,) = self._outside("cuModuleGetLoadingMode")
        lazy = mode == cu.CUmoduleLoadingMode.CU_MODULE_LAZY_LOADING
        log.info(
            "CUDA device %d: %s, %s, modules load %s",
            device,
            self._properties.name,
            self._properties.architecture,
            "lazily (kernels of fastkern: when looked up)" if lazy else "eagerly",
        )
        self._context = self._outside("cuDevicePrimaryCtxRetain", self._handle)[0]
        self._closed = False

    def _initialize(self) -> int:
        """The number of devices."""
        try:
            self._outside("cuInit", 0)
            return int(self._outside("cuDeviceGetCount")[0])
        except DriverError as error:
            raise DeviceUnavailableError(
                f"no CUDA device can be used: {error}. It needs an NVIDIA GPU and its driver "
                "(libcuda.so.1), which no Python package brings"
            ) from error

    def _read_properties(self) -> DeviceProperties:
        attribute = self._cu.CUdevice_attribute

        def read(name: str) -> int:
            which = getattr(attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
            return int(self._outside("cuDeviceGetAttribute", which, self._handle)[0])

        name = self._outside("cuDeviceGetName", _NAME_BYTES, self._handle)[0]
        major, minor = read("COMPUTE_CAPABILITY_MAJOR"), read("COMPUTE_CAPABILITY_MINOR")
        return DeviceProperties(
            name=bytes(name).split(b"\0")[0].decode(),
            architecture=f"sm_{major}{minor}",
            num_processors=read("MULTIPROCESSOR_COUNT"),
            most_lanes=read("MAX_THREADS_PER_BLOCK"),
            memory_bytes=int(self._outside("cuDeviceTotalMem", self._handle)[0]),
        )

    def properties(self) -> DeviceProperties:
        return self._properties

    @contextmanager
    def current(self) -> Iterator[None]:
        if self._closed:
            raise DriverError("cuCtxPushCurrent", "the driver is closed")
        self._outside("cuCtxPushCurrent", self._context)
        try:
            yield
        finally:
            self._outside("cuCtxPopCurrent")

    # -- memory ------------------------------------------------------------------------------------

    def allocate(self, num_bytes: int, coherent: bool) -> int:
        """coherent: no difference. What peers write is read past L1 by the kernels' own loads."""
        return int(self._call("cuMemAlloc", num_bytes)[0])

    def free(self, address: int) -> None:
        self._call("cuMemFree", address)

    def allocate_host(self, num_bytes: int) -> int:
        flags = int(self._cu.CU_MEMHOSTALLOC_PORTABLE)
        return int(self._call("cuMemHostAlloc", num_bytes, flags)[0])

    def free_host(self, address: int) -> None:
        self._call("cuMemFreeHost", address)

    def copy(self, to: int, source: int, num_bytes: int, stream: int) -> None:
        if num_bytes:
            self._call("cuMemcpyAsync", to, source, num_bytes, stream)

    def fill(self, address: int, value: int, num_bytes: int, stream: int) -> None:
        if num_bytes:
            self._call("cuMemsetD8Async", address, value, num_bytes, stream)

    def export_memory(self, address: int) -> bytes:
        (handle,) = self._call("cuIpcGetMemHandle", address)
        return ctypes.string_at(int(handle.getPtr()), _HANDLE_BYTES)

    def open_memory(self, handle: bytes) -> int:
        if len(handle) != _HANDLE_BYTES:
            raise DriverError("cuIpcOpenMemHandle", f"a handle of {len(handle)} bytes")
        made = self._cu.CUipcMemHandle()
        ctypes.memmove(int(made.getPtr()), handle, _HANDLE_BYTES)
        flags = int(self._cu.CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS)
        return int(self._call("cuIpcOpenMemHandle", made, flags)[0])

    def close_memory(self, address: int) -> None:
        self._call("cuIpcCloseMemHandle", address)

    # -- streams and events ------------------------------------------------------------------------

    def create_stream(self) -> int:
        flags = int(self._cu.CUstream_flags.CU_STREAM_NON_BLOCKING)
        return int(self._call("cuStreamCreate", flags)[0])

    def destroy_stream(self, stream: int) -> None:
        self._call("cuStreamDestroy", stream)

    def synchronize(self, stream: int) -> None:
        self._call("cuStreamSynchronize", stream)

    def create_event(self, timing: bool = False) -> int:
        kinds = self._cu.CUevent_flags
        flags = kinds.CU_EVENT_DEFAULT if timing else kinds.CU_EVENT_DISABLE_TIMING
        return int(self._call("cuEventCreate", int(flags))[0])

    def destroy_event(self, event: int) -> None:
        self._call("cuEventDestroy", event)

    def record(self, event: int, stream: int) -> None:
        self._call("cuEventRecord", event, stream)

    def wait_event(self, stream: int, event: int) -> None:
        self._call("cuStreamWaitEvent", stream, event, 0)

    def event_done(self, event: int) -> bool:
        try:
            self._call("cuEventQuery", event)
        except DriverError as error:
            if error.code == "CUDA_ERROR_NOT_READY":
                return False
            raise
        return True

    def wait_for(self, event: int) -> None:
        self._call("cuEventSynchronize", event)

    def elapsed_us(self, begin: int, end: int) -> float:
        return float(self._call("cuEventElapsedTime", begin, end)[0]) * 1e3

    # -- kernels -----------------------------------------------------------------------------------

    def load_module(self, image: bytes) -> Any:
        return int(self._call("cuModuleLoadData", image)[0])

    def unload_module(self, module: Any) -> None:
        self._call("cuModuleUnload", module)

    def function(self, module: Any, name: str) -> Any:
        function = int(self._call("cuModuleGetFunction", module, name.encode())[0])
        self._call("cuFuncLoad", function)
        return function

    def launch(
        self,
        function: Any,
        grid: int,
        num_lanes: int,
        stream: int,
        arguments: bytes,
        shared_bytes: int = 0,
        offsets: Sequence[int] = ONE_RECORD,
    ) -> None:
        check_launch("cuLaunchKernel", arguments, shared_bytes, offsets)
        held = ctypes.create_string_buffer(arguments, len(arguments))
        first = ctypes.addressof(held)
        pointers = (ctypes.c_void_p * len(offsets))(*(first + offset for offset in offsets))
        address = ctypes.addressof(pointers)
        self._call(
            "cuLaunchKernel",
            *(function, grid, 1, 1, num_lanes, 1, 1, shared_bytes, stream, address, 0),
        )

    def resident_blocks(self, function: Any, num_lanes: int, shared_bytes: int = 0) -> int:
        name = "cuOccupancyMaxActiveBlocksPerMultiprocessor"
        (blocks,) = self._call(name, function, num_lanes, shared_bytes)
        return int(blocks) * self._properties.num_processors

    # -- graphs ------------------------------------------------------------------------------------

    def begin_capture(self, stream: int) -> None:
        mode = self._cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
        self._call("cuStreamBeginCapture", stream, mode)

    def end_capture(self, stream: int) -> int:
        graph = int(self._call("cuStreamEndCapture", stream)[0])
        try:
            return int(self._call("cuGraphInstantiate", graph, 0)[0])
        finally:
            self._call("cuGraphDestroy", graph)

    def call_host(self, stream: int, function: int, data: int) -> None:
        if self._launch_host is None:
            address, _ = self._outside(
                "cuGetProcAddress", b"cuLaunchHostFunc", _HOST_FUNC_VERSION, 0
            )
            self._launch_host = _LAUNCH_HOST_FUNC(int(address))
        self._call("cuLaunchHostFunc", stream, function, data)

    def replay(self, graph: int, stream: int) -> None:
        self._call("cuGraphLaunch", graph, stream)

    def destroy_graph(self, graph: int) -> None:
        self._call("cuGraphExecDestroy", graph)

    # -- end ---------------------------------------------------------------------------------------

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._outside("cuDevicePrimaryCtxRelease", self._handle)

    # -- calls -------------------------------------------------------------------------------------

    def _call(self, name: str, *arguments: Any) -> tuple[Any, ...]:
        """What the function returns after its status, called in this device's context."""
        if self._closed:
            raise DriverError(name, "the driver is closed")
        if int(self._outside("cuCtxGetCurrent")[0]) == int(self._context):
            return self._outside(name, *arguments)
        with self.current():
            return self._outside(name, *arguments)

    def _outside(self, name: str, *arguments: Any) -> tuple[Any, ...]:
        """As `_call`, in whatever context is current."""
        try:
            if name == "cuLaunchHostFunc" and self._launch_host is not None:
                status, values = self._cu.CUresult(self._launch_host(*arguments)), []
            else:
                status, *values = getattr(self._cu, name)(*arguments)
        except RuntimeError as error:  # of the bindings: the library or the function is not there
            raise DriverError(name, "not available", str(error)) from error
        if int(status):
            raise self._error(name, status)
        return tuple(values)

    def _error(self, name: str, status: Any) -> DriverError:
        code = getattr(status, "name", str(status))
        unknown, text = self._cu.cuGetErrorString(status)
        said = "" if int(unknown) else bytes(text).decode()
        kind = DeviceMemoryError if code == "CUDA_ERROR_OUT_OF_MEMORY" else DriverError
        return kind(name, code, said)


def _import_bindings() -> Any:
    try:
        return importlib.import_module("cuda.bindings.driver")
    except ImportError as error:
        raise DeviceUnavailableError(
            f"cannot import cuda.bindings.driver ({error}). Install NVIDIA's Python bindings with "
            "`pip install 'fastkern[cuda]'`"
        ) from error
