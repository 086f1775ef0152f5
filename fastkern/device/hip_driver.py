"""AMD GPUs, through hip-python (`from hip import hip`).

Device. HIP calls work on the calling thread's current device, which PyTorch sets too: where it is
another one, it is changed for the call and back afterwards.

Coherent memory. What a peer or a NIC writes while a kernel here reads it is allocated uncached
(hipExtMallocWithFlags with hipDeviceMallocUncached, from ROCm 5.7), on every architecture. Plain
hipMalloc gives coarse-grained memory, whose lines a running kernel may keep in L2 although a peer
has overwritten them: on gfx942 and gfx950 each chiplet has an L2 of its own, and no acquire of the
kernel's drops what another device has written. Fine-grained device memory (the flag that older code
asks for) leaves caching to the kernel driver's settings, so it is not tried: where uncached memory
is refused, the allocation fails and says so.

Loading. Modules and their kernels are loaded by hipModuleLoadData, before they are looked up.

Names and results are the same in hip-python 6.2 to 10, but for hipGetDeviceProperties.
"""

from __future__ import annotations

import ctypes
import importlib
import inspect
import logging
from collections.abc import Iterator, Sequence
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

_UNCACHED = 0x3  # hipDeviceMallocUncached, which hip-python does not name
_HANDLE_BYTES = 64  # HIP_IPC_HANDLE_SIZE


class HipDriver:
    """Driver for one HIP device. See driver.Driver.

    device: its ordinal as HIP counts (after HIP_VISIBLE_DEVICES). bindings: the module hip.hip,
    imported where none is given. Raises DeviceUnavailableError where the module, ROCm or the device
    is missing.
    """

    target = "hip"
    kernels = "cxx"

    def __init__(self, device: int = 0, bindings: Any = None) -> None:
        self.device = device
        self._hip = bindings if bindings is not None else _import_bindings()
        count = self._initialize()
        if not 0 <= device < count:
            raise DeviceUnavailableError(f"no HIP device {device}: there are {count} here")
        self._properties = self._read_properties()
        self._closed = False
        log.info(
            "HIP device %d: %s, %s; memory that peers write is uncached",
            device,
            self._properties.name,
            self._properties.architecture,
        )

    def _initialize(self) -> int:
        """The number of devices."""
        try:
            self._outside("hipInit", 0)
            return int(self._outside("hipGetDeviceCount")[0])
        except DriverError as error:
            raise DeviceUnavailableError(
                f"no HIP device can be used: {error}. It needs an AMD GPU, ROCm (libamdhip64.so), "
                "and bindings of the same release: `pip install 'fastkern[rocm]'`"
            ) from error

    def _read_properties(self) -> DeviceProperties:
        read = self._hip.hipGetDeviceProperties
        if len(inspect.signature(read).parameters) == 1:
            (found,) = self._outside("hipGetDeviceProperties", self.device)
        else:  # before hip-python 10 the caller makes the record
            found = self._hip.hipDeviceProp_t()
            self._outside("hipGetDeviceProperties", found, self.device)
        return DeviceProperties(
            name=_text(found.name),
            architecture=_text(found.gcnArchName).partition(":")[0],
            num_processors=int(found.multiProcessorCount),
            most_lanes=int(found.maxThreadsPerBlock),
            memory_bytes=int(found.totalGlobalMem),
        )

    def properties(self) -> DeviceProperties:
        return self._properties

    @contextmanager
    def current(self) -> Iterator[None]:
        if self._closed:
            raise DriverError("hipSetDevice", "the driver is closed")
        (current,) = self._outside("hipGetDevice")
        if current != self.device:
            self._outside("hipSetDevice", self.device)
        try:
            yield
        finally:
            if current != self.device:
                self._outside("hipSetDevice", current)

    # -- memory ------------------------------------------------------------------------------------

    def allocate(self, num_bytes: int, coherent: bool) -> int:
        if not coherent:
            return int(self._call("hipMalloc", num_bytes)[0])
        try:
            return int(self._call("hipExtMallocWithFlags", num_bytes, _UNCACHED)[0])
        except DeviceMemoryError:
            raise
        except DriverError as error:
            text = f"{num_bytes} bytes of uncached memory, which need ROCm 5.7 or later"
            raise DriverError(error.operation, error.code, text) from error

    def free(self, address: int) -> None:
        self._call("hipFree", address)

    def allocate_host(self, num_bytes: int) -> int:
        flags = int(self._hip.hipHostMallocPortable)
        return int(self._call("hipHostMalloc", num_bytes, flags)[0])

    def free_host(self, address: int) -> None:
        self._call("hipHostFree", address)

    def copy(self, to: int, source: int, num_bytes: int, stream: int) -> None:
        if num_bytes:
            kind = self._hip.hipMemcpyKind.hipMemcpyDefault
            self._call("hipMemcpyAsync", to, source, num_bytes, kind, stream)

    def fill(self, address: int, value: int, num_bytes: int, stream: int) -> None:
        if num_bytes:
            self._call("hipMemsetD8Async", address, value, num_bytes, stream)

    def export_memory(self, address: int) -> bytes:
        (handle,) = self._call("hipIpcGetMemHandle", address)
        return ctypes.string_at(int(handle), _HANDLE_BYTES)

    def open_memory(self, handle: bytes) -> int:
        if len(handle) != _HANDLE_BYTES:
            raise DriverError("hipIpcOpenMemHandle", f"a handle of {len(handle)} bytes")
        made = self._hip.hipIpcMemHandle_t()
        ctypes.memmove(int(made), handle, _HANDLE_BYTES)
        flags = int(self._hip.hipIpcMemLazyEnablePeerAccess)
        return int(self._call("hipIpcOpenMemHandle", made, flags)[0])

    def close_memory(self, address: int) -> None:
        self._call("hipIpcCloseMemHandle", address)

    # -- streams and events ------------------------------------------------------------------------

    def create_stream(self) -> int:
        flags = int(self._hip.hipStreamNonBlocking)
        return int(self._call("hipStreamCreateWithFlags", flags)[0])

    def destroy_stream(self, stream: int) -> None:
        self._call("hipStreamDestroy", stream)

    def synchronize(self, stream: int) -> None:
        self._call("hipStreamSynchronize", stream)

    def create_event(self, timing: bool = False) -> int:
        flags = self._hip.hipEventDefault if timing else self._hip.hipEventDisableTiming
        return int(self._call("hipEventCreateWithFlags", int(flags))[0])

    def destroy_event(self, event: int) -> None:
        self._call("hipEventDestroy", event)

    def record(self, event: int, stream: int) -> None:
        self._call("hipEventRecord", event, stream)

    def wait_event(self, stream: int, event: int) -> None:
        self._call("hipStreamWaitEvent", stream, event, 0)

    def event_done(self, event: int) -> bool:
        try:
            self._call("hipEventQuery", event)
        except DriverError as error:
            if error.code == "hipErrorNotReady":
                return False
            raise
        return True

    def wait_for(self, event: int) -> None:
        self._call("hipEventSynchronize", event)

    def elapsed_us(self, begin: int, end: int) -> float:
        return float(self._call("hipEventElapsedTime", begin, end)[0]) * 1e3

    # -- kernels -----------------------------------------------------------------------------------

    def load_module(self, image: bytes) -> Any:
        return int(self._call("hipModuleLoadData", image)[0])

    def unload_module(self, module: Any) -> None:
        self._call("hipModuleUnload", module)

    def function(self, module: Any, name: str) -> Any:
        return int(self._call("hipModuleGetFunction", module, name.encode())[0])

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
        check_launch("hipModuleLaunchKernel", arguments, shared_bytes, offsets)
        held = ctypes.create_string_buffer(arguments, len(arguments))
        first = ctypes.addressof(held)
        pointers = (ctypes.c_void_p * len(offsets))(*(first + offset for offset in offsets))
        address = ctypes.addressof(pointers)  # not a list, which only hip-python 10 takes
        self._call(
            "hipModuleLaunchKernel",
            *(function, grid, 1, 1, num_lanes, 1, 1, shared_bytes, stream, address, None),
        )

    def resident_blocks(self, function: Any, num_lanes: int, shared_bytes: int = 0) -> int:
        name = "hipModuleOccupancyMaxActiveBlocksPerMultiprocessor"
        (blocks,) = self._call(name, function, num_lanes, shared_bytes)
        return int(blocks) * self._properties.num_processors

    # -- graphs ------------------------------------------------------------------------------------

    def begin_capture(self, stream: int) -> None:
        """In thread-local mode: other threads may go on asking for events."""
        mode = self._hip.hipStreamCaptureMode.hipStreamCaptureModeThreadLocal
        self._call("hipStreamBeginCapture", stream, mode)

    def end_capture(self, stream: int) -> int:
        graph = int(self._call("hipStreamEndCapture", stream)[0])
        try:
            return int(self._call("hipGraphInstantiateWithFlags", graph, 0)[0])
        finally:
            self._call("hipGraphDestroy", graph)

    def call_host(self, stream: int, function: int, data: int) -> None:
        self._call("hipLaunchHostFunc", stream, function, data)

    def replay(self, graph: int, stream: int) -> None:
        self._call("hipGraphLaunch", graph, stream)

    def destroy_graph(self, graph: int) -> None:
        self._call("hipGraphExecDestroy", graph)

    # -- end ---------------------------------------------------------------------------------------

    def close(self) -> None:
        """HIP keeps the device's context itself, so there is nothing to give back."""
        self._closed = True

    # -- calls -------------------------------------------------------------------------------------

    def _call(self, name: str, *arguments: Any) -> tuple[Any, ...]:
        """What the function returns after its status, called with this device as the current."""
        if self._closed:
            raise DriverError(name, "the driver is closed")
        with self.current():
            return self._outside(name, *arguments)

    def _outside(self, name: str, *arguments: Any) -> tuple[Any, ...]:
        """As `_call`, with whatever device is current."""
        try:
            status, *values = getattr(self._hip, name)(*arguments)
        except RuntimeError as error:  # of the bindings: the library or the function is not there
            raise DriverError(name, "not available", str(error)) from error
        if int(status):
            code = getattr(status, "name", str(status))
            kind = DeviceMemoryError if code == "hipErrorOutOfMemory" else DriverError
            raise kind(name, code)
        return tuple(values)


def _text(value: Any) -> str:
    """A C string, which hip-python gives as bytes or as str."""
    text = value.decode() if isinstance(value, bytes) else str(value)
    return text.split("\0")[0]


def _import_bindings() -> Any:
    try:
        return importlib.import_module("hip").hip
    except ImportError as error:
        raise DeviceUnavailableError(
            f"cannot import hip ({error}). Install AMD's Python bindings, of ROCm's release, with "
            "`pip install 'fastkern[rocm]'`"
        ) from error
