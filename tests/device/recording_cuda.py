"""A fake of the module cuda.bindings.driver: its names, argument orders, types and results."""

from __future__ import annotations

import ctypes
import enum
from collections.abc import Callable
from typing import Any

from tests.device.recording import (
    HANDLE_BYTES,
    Event,
    Fault,
    Function,
    Graph,
    Handle,
    IpcHandle,
    RecordedDevice,
    Stream,
    check_types,
)


class CUresult(enum.IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_VALUE = 1
    CUDA_ERROR_OUT_OF_MEMORY = 2
    CUDA_ERROR_NO_DEVICE = 100
    CUDA_ERROR_INVALID_IMAGE = 200
    CUDA_ERROR_INVALID_CONTEXT = 201
    CUDA_ERROR_INVALID_HANDLE = 400
    CUDA_ERROR_NOT_FOUND = 500
    CUDA_ERROR_NOT_READY = 600
    CUDA_ERROR_LAUNCH_FAILED = 719
    CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED = 900


_CODES = {
    "invalid value": CUresult.CUDA_ERROR_INVALID_VALUE,
    "invalid handle": CUresult.CUDA_ERROR_INVALID_HANDLE,
    "invalid image": CUresult.CUDA_ERROR_INVALID_IMAGE,
    "not found": CUresult.CUDA_ERROR_NOT_FOUND,
    "not ready": CUresult.CUDA_ERROR_NOT_READY,
    "capture unsupported": CUresult.CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED,
}

_ATTRIBUTES = {
    "CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK": 1024,
    "CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT": 132,
    "CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR": 9,
    "CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR": 0,
}
MEMORY_BYTES = 141 << 30
BLOCKS_PER_PROCESSOR = 3
FOREIGN_CONTEXT = 0x77
# Functions that work in any context, or in none.
_ANYWHERE = (
    *("cuInit", "cuDeviceGetCount", "cuDeviceGet", "cuDeviceGetName", "cuDeviceTotalMem"),
    *("cuDeviceGetAttribute", "cuDevicePrimaryCtxRetain", "cuDevicePrimaryCtxRelease"),
    *("cuCtxGetCurrent", "cuCtxPushCurrent", "cuModuleGetLoadingMode", "cuGetErrorString"),
    "cuGetProcAddress",
)


class RecordedCuda(RecordedDevice):
    """The module. contexts: the thread's stack of current contexts. retained: how often each
    device's primary context is."""

    CUresult = CUresult
    CUipcMemHandle = IpcHandle
    CU_MEMHOSTALLOC_PORTABLE = 1
    CUmoduleLoadingMode = enum.IntEnum(
        "CUmoduleLoadingMode", {"CU_MODULE_EAGER_LOADING": 1, "CU_MODULE_LAZY_LOADING": 2}
    )
    CUstream_flags = enum.IntEnum(
        "CUstream_flags", {"CU_STREAM_DEFAULT": 0, "CU_STREAM_NON_BLOCKING": 1}
    )
    CUevent_flags = enum.IntEnum(
        "CUevent_flags", {"CU_EVENT_DEFAULT": 0, "CU_EVENT_DISABLE_TIMING": 2}
    )
    CUipcMem_flags = enum.IntEnum("CUipcMem_flags", {"CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS": 1})
    CUstreamCaptureMode = enum.IntEnum(
        "CUstreamCaptureMode", {"CU_STREAM_CAPTURE_MODE_THREAD_LOCAL": 1}
    )
    CUdevice_attribute = enum.Enum("CUdevice_attribute", list(_ATTRIBUTES))

    def __init__(self, num_devices: int = 2) -> None:
        super().__init__(num_devices)
        self.contexts: list[int] = []
        self.retained = [0] * num_devices
        self.lazy = True
        self.cuLaunchHostFunc: Callable[..., Any]  # and the others that are named below
        functions: dict[str, tuple[str, Callable[..., Any]]] = {
            "cuInit": ("n", lambda flags: self._want(flags == 0)),
            "cuDeviceGetCount": ("", lambda: num_devices),
            "cuDeviceGet": ("n", self._device),
            "cuDeviceGetName": ("np", lambda n, device: b"NVIDIA H200".ljust(n, b"\0")),
            "cuDeviceTotalMem": ("p", lambda device: MEMORY_BYTES),
            "cuDeviceGetAttribute": ("ep", lambda which, device: _ATTRIBUTES[which.name]),
            "cuDevicePrimaryCtxRetain": ("p", self._retain),
            "cuDevicePrimaryCtxRelease": ("p", self._release),
            "cuCtxGetCurrent": ("", lambda: Handle(self.contexts[-1] if self.contexts else 0)),
            "cuCtxPushCurrent": ("p", lambda context: self.contexts.append(context)),
            "cuCtxPopCurrent": ("", lambda: Handle(self.contexts.pop())),
            "cuModuleGetLoadingMode": ("", lambda: self.CUmoduleLoadingMode(1 + self.lazy)),
            "cuGetErrorString": ("e", lambda code: b"text of " + code.name.encode()),
            "cuMemAlloc": ("n", lambda n: Handle(self.allocate("device", n, self._where()))),
            "cuMemFree": ("p", lambda address: self.free(("device",), address)),
            "cuMemHostAlloc": ("nn", self._pinned),
            "cuMemFreeHost": ("p", lambda address: self.free(("pinned",), address)),
            "cuMemcpyAsync": ("ppnp", self.copy),
            "cuMemsetD8Async": ("pnnp", self._memset),
            "cuIpcGetMemHandle": ("p", self._export),
            "cuIpcOpenMemHandle": ("on", self._open),
            "cuIpcCloseMemHandle": ("p", self.close),
            "cuStreamCreate": ("n", self._make_stream),
            "cuStreamDestroy": ("p", lambda stream: self.destroy(Stream, stream)),
            "cuStreamSynchronize": ("p", self.synchronize),
            "cuEventCreate": ("n", lambda flags: Handle(self.make(Event(flags == 0)))),
            "cuEventDestroy": ("p", lambda event: self.destroy(Event, event)),
            "cuEventRecord": ("pp", self.record),
            "cuStreamWaitEvent": ("ppn", lambda stream, event, flags: self.wait(stream, event)),
            "cuEventQuery": ("p", self.query),
            "cuEventSynchronize": ("p", lambda event: self._want(self.get(Event, event))),
            "cuEventElapsedTime": ("pp", self.elapsed_ms),
            "cuModuleLoadData": ("b", lambda image: Handle(self.load(image))),
            "cuModuleUnload": ("p", self.unload),
            "cuModuleGetFunction": ("pb", lambda m, name: Handle(self.function(m, name.decode()))),
            "cuFuncLoad": ("p", self._load_function),
            "cuLaunchKernel": ("pnnnnnnnppp", self._launch),
            "cuOccupancyMaxActiveBlocksPerMultiprocessor": ("pnn", self._occupancy),
            "cuStreamBeginCapture": ("pe", lambda stream, mode: self.begin_capture(stream)),
            "cuStreamEndCapture": ("p", lambda stream: Handle(self.end_capture(stream))),
            "cuGraphInstantiate": ("pn", lambda graph, flags: Handle(self.instantiate(graph))),
            "cuGraphDestroy": ("p", lambda graph: self.destroy(Graph, graph)),
            "cuGraphLaunch": ("pp", self.replay),
            "cuGraphExecDestroy": ("p", lambda graph: self.destroy(Graph, graph)),
            "cuLaunchHostFunc": ("ppp", self.call_host),
            "cuGetProcAddress": ("bnn", self._find),
        }
        self.functions = tuple(functions)
        for name, (kinds, body) in functions.items():
            setattr(self, name, self._wrap(name, kinds, body))

    def _wrap(self, name: str, kinds: str, body: Callable[..., Any]) -> Callable[..., Any]:
        self.parameters[name] = len(kinds)

        def call(*arguments: Any) -> tuple[Any, ...]:
            given = check_types(name, kinds, arguments)
            code = None if name == "cuGetErrorString" else self.called(name)
            if code is not None:
                return (CUresult[code], None)
            if name not in _ANYWHERE and self._where() < 0:
                return (CUresult.CUDA_ERROR_INVALID_CONTEXT, None)
            try:
                result = body(*given)
            except Fault as fault:
                return (_CODES[str(fault)], None)
            values = result if isinstance(result, tuple) else () if result is None else (result,)
            return (CUresult.CUDA_SUCCESS, *values)

        return call

    def _want(self, good: object) -> None:
        if not good:
            raise Fault("invalid value")

    def _where(self) -> int:
        """The device whose primary context is current, or -1."""
        context = self.contexts[-1] if self.contexts else 0
        device = context - 0x100
        return device if 0 <= device < self.num_devices and self.retained[device] else -1

    def _find(self, name: bytes, version: int, flags: int) -> tuple[int, int]:
        """The address of the C function; only one is called so."""
        self._want((name, version, flags) == (b"cuLaunchHostFunc", 10000, 0))
        kind = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)
        self._host_func = kind(
            lambda stream, function, data: int(
                self.cuLaunchHostFunc(stream or 0, function, data or 0)[0]
            )
        )
        return ctypes.cast(self._host_func, ctypes.c_void_p).value or 0, 0

    def _device(self, ordinal: int) -> Handle:
        self._want(ordinal < self.num_devices)
        return Handle(ordinal)

    def _retain(self, device: int) -> Handle:
        self.retained[device] += 1
        return Handle(0x100 + device)

    def _release(self, device: int) -> None:
        self._want(self.retained[device] > 0)
        self.retained[device] -= 1

    def _pinned(self, num_bytes: int, flags: int) -> Handle:
        self._want(flags == self.CU_MEMHOSTALLOC_PORTABLE)
        return Handle(self.allocate("pinned", num_bytes, self._where()))

    def _memset(self, address: int, value: int, num_bytes: int, stream: int) -> None:
        if value > 255:
            raise OverflowError("value too large to convert to unsigned char")
        self.fill(address, value, num_bytes, stream)

    def _export(self, address: int) -> IpcHandle:
        handle = IpcHandle()
        handle.bytes[:] = list(self.export(address))
        return handle

    def _open(self, handle: Any, flags: int) -> Handle:
        if not isinstance(handle, IpcHandle):
            raise TypeError("Argument 'handle' has incorrect type")
        self._want(flags == 1 and len(bytes(handle.bytes)) == HANDLE_BYTES)
        return Handle(self.open(bytes(handle.bytes), self._where()))

    def _make_stream(self, flags: int) -> Handle:
        self._want(flags == 1)  # one that waits for the default stream is not what we want
        return Handle(self.make(Stream()))

    def _load_function(self, function: int) -> None:
        self.get(Function, function).ready = True

    def _launch(self, function: int, *rest: int) -> None:
        grid_x, grid_y, grid_z, x, y, z, shared_bytes, stream, parameters, extra = rest
        self._want((grid_y, grid_z, y, z, extra) == (1, 1, 1, 1, 0))
        self._want(parameters)
        self.launch(function, grid_x, x, stream, parameters, shared_bytes)

    def _occupancy(self, function: int, num_lanes: int, shared_bytes: int) -> int:
        self._want(self.get(Function, function).ready and num_lanes and shared_bytes <= 48 << 10)
        return 1 if shared_bytes else BLOCKS_PER_PROCESSOR
