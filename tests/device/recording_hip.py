"""A fake of the module hip.hip: its names, argument orders, types and results."""

from __future__ import annotations

import enum
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from tests.device.recording import (
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


class HipError(enum.IntEnum):
    """hipError_t."""

    hipSuccess = 0  # noqa: N815 - the bindings' names
    hipErrorInvalidValue = 1  # noqa: N815
    hipErrorOutOfMemory = 2  # noqa: N815
    hipErrorInvalidImage = 200  # noqa: N815
    hipErrorInvalidHandle = 400  # noqa: N815
    hipErrorNotFound = 500  # noqa: N815
    hipErrorNotReady = 600  # noqa: N815
    hipErrorLaunchFailure = 719  # noqa: N815
    hipErrorStreamCaptureUnsupported = 900  # noqa: N815
    hipErrorNoDevice = 100  # noqa: N815


_CODES = {
    "invalid value": HipError.hipErrorInvalidValue,
    "invalid handle": HipError.hipErrorInvalidHandle,
    "invalid image": HipError.hipErrorInvalidImage,
    "not found": HipError.hipErrorNotFound,
    "not ready": HipError.hipErrorNotReady,
    "capture unsupported": HipError.hipErrorStreamCaptureUnsupported,
}
UNCACHED = 3
BLOCKS_PER_PROCESSOR = 2


def properties() -> SimpleNamespace:
    """hipDeviceProp_t, as far as it is read."""
    return SimpleNamespace(
        name="AMD Instinct MI300X",
        gcnArchName="gfx942:sramecc+:xnack-",
        multiProcessorCount=304,
        maxThreadsPerBlock=1024,
        totalGlobalMem=192 << 30,
    )


class RecordedHip(RecordedDevice):
    """The module. current: the thread's device. old: as hip-python before 10, where the caller
    makes the record of properties, with bytes for text."""

    hipError_t = HipError  # noqa: N815 - the bindings' names
    hipIpcMemHandle_t = IpcHandle  # noqa: N815
    hipHostMallocPortable = 1  # noqa: N815
    hipIpcMemLazyEnablePeerAccess = 1  # noqa: N815
    hipStreamNonBlocking = 1  # noqa: N815
    hipEventDefault = 0  # noqa: N815
    hipEventDisableTiming = 2  # noqa: N815
    hipMemcpyKind = enum.IntEnum("hipMemcpyKind", {"hipMemcpyDefault": 4})  # noqa: N815
    hipStreamCaptureMode = enum.IntEnum(  # noqa: N815
        "hipStreamCaptureMode", {"hipStreamCaptureModeThreadLocal": 1}
    )

    def __init__(self, num_devices: int = 2, old: bool = False) -> None:
        super().__init__(num_devices)
        self.current = 0
        functions: dict[str, tuple[str, Callable[..., Any]]] = {
            "hipInit": ("n", lambda flags: self._want(flags == 0)),
            "hipGetDeviceCount": ("", lambda: num_devices),
            "hipGetDevice": ("", lambda: self.current),
            "hipSetDevice": ("n", self._set_device),
            "hipMalloc": ("n", lambda n: Handle(self.allocate("device", n, self.current))),
            "hipExtMallocWithFlags": ("nn", self._allocate_with_flags),
            "hipFree": ("p", lambda address: self.free(("device", "uncached"), address)),
            "hipHostMalloc": ("nn", self._pinned),
            "hipHostFree": ("p", lambda address: self.free(("pinned",), address)),
            "hipMemcpyAsync": ("ppnep", lambda to, s, n, kind, stream: self.copy(to, s, n, stream)),
            "hipMemsetD8Async": ("pnnp", self._memset),
            "hipIpcGetMemHandle": ("p", self._export),
            "hipIpcOpenMemHandle": ("on", self._open),
            "hipIpcCloseMemHandle": ("p", self.close),
            "hipStreamCreateWithFlags": ("n", self._make_stream),
            "hipStreamDestroy": ("p", lambda stream: self.destroy(Stream, stream)),
            "hipStreamSynchronize": ("p", self.synchronize),
            "hipEventCreateWithFlags": ("n", lambda flags: Handle(self.make(Event(flags == 0)))),
            "hipEventDestroy": ("p", lambda event: self.destroy(Event, event)),
            "hipEventRecord": ("pp", self.record),
            "hipStreamWaitEvent": ("ppn", lambda stream, event, flags: self.wait(stream, event)),
            "hipEventQuery": ("p", self.query),
            "hipEventSynchronize": ("p", lambda event: self._want(self.get(Event, event))),
            "hipEventElapsedTime": ("pp", self.elapsed_ms),
            "hipModuleLoadData": ("b", lambda image: Handle(self.load(image))),
            "hipModuleUnload": ("p", self.unload),
            "hipModuleGetFunction": ("pb", self._function),
            "hipModuleLaunchKernel": ("pnnnnnnnppo", self._launch),
            "hipModuleOccupancyMaxActiveBlocksPerMultiprocessor": ("pnn", self._occupancy),
            "hipStreamBeginCapture": ("pe", lambda stream, mode: self.begin_capture(stream)),
            "hipStreamEndCapture": ("p", lambda stream: Handle(self.end_capture(stream))),
            "hipGraphInstantiateWithFlags": ("pn", lambda g, flags: Handle(self.instantiate(g))),
            "hipGraphDestroy": ("p", lambda graph: self.destroy(Graph, graph)),
            "hipGraphLaunch": ("pp", self.replay),
            "hipGraphExecDestroy": ("p", lambda graph: self.destroy(Graph, graph)),
            "hipLaunchHostFunc": ("ppp", self.call_host),
        }
        self.functions = (*functions, "hipGetDeviceProperties")
        for name, (kinds, body) in functions.items():
            setattr(self, name, self._wrap(name, kinds, body))
        if old:
            filled = self._wrap("hipGetDeviceProperties", "on", self._fill_properties)
            self.hipDeviceProp_t = SimpleNamespace
            self.hipGetDeviceProperties = lambda prop, deviceId: filled(prop, deviceId)  # noqa: N803
        else:
            made = self._wrap("hipGetDeviceProperties", "n", lambda device: properties())
            self.hipGetDeviceProperties = lambda deviceId: made(deviceId)  # type: ignore[misc,assignment] # noqa: N803

    def _wrap(self, name: str, kinds: str, body: Callable[..., Any]) -> Callable[..., Any]:
        self.parameters[name] = len(kinds)

        def call(*arguments: Any) -> tuple[Any, ...]:
            values = check_types(name, kinds, arguments)
            code = self.called(name)
            if code is not None:
                return (HipError[code], None)
            try:
                result = body(*values)
            except Fault as fault:
                return (_CODES[str(fault)], None)
            return (HipError.hipSuccess,) if result is None else (HipError.hipSuccess, result)

        return call

    def _want(self, good: object) -> None:
        if not good:
            raise Fault("invalid value")

    def _fill_properties(self, prop: SimpleNamespace, device: int) -> None:
        for key, value in vars(properties()).items():
            setattr(prop, key, value.encode() if isinstance(value, str) else value)

    def _set_device(self, device: int) -> None:
        self._want(device < self.num_devices)
        self.current = device

    def _allocate_with_flags(self, num_bytes: int, flags: int) -> Handle:
        self._want(flags == UNCACHED)
        return Handle(self.allocate("uncached", num_bytes, self.current))

    def _pinned(self, num_bytes: int, flags: int) -> Handle:
        self._want(flags == self.hipHostMallocPortable)
        return Handle(self.allocate("pinned", num_bytes, self.current))

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
            raise TypeError("unsupported input type")
        self._want(flags == self.hipIpcMemLazyEnablePeerAccess)
        return Handle(self.open(bytes(handle.bytes), self.current))

    def _make_stream(self, flags: int) -> Handle:
        self._want(flags == self.hipStreamNonBlocking)
        return Handle(self.make(Stream()))

    def _function(self, module: int, name: bytes) -> Handle:
        handle = self.function(module, name.decode())
        self.get(Function, handle).ready = True
        return Handle(handle)

    def _launch(self, function: int, *rest: Any) -> None:
        grid_x, grid_y, grid_z, x, y, z, shared_bytes, stream, parameters, extra = rest
        self._want((grid_y, grid_z, y, z) == (1, 1, 1, 1))
        self._want(parameters and extra is None)
        self.launch(function, grid_x, x, stream, parameters, shared_bytes)

    def _occupancy(self, function: int, num_lanes: int, shared_bytes: int) -> int:
        self._want(self.get(Function, function).ready and num_lanes and shared_bytes <= 48 << 10)
        return 1 if shared_bytes else BLOCKS_PER_PROCESSOR
