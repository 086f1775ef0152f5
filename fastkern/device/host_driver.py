"""The CPU as a device: the same operations, and kernels on the host target.

What lies above drivers runs on it for real in tests: launches, copies and fills return at once and
run in stream order on a thread per stream, failures surface when a stream is synchronised, memory
is not zeroed and can be mapped by other processes, and what a GPU would refuse is refused.

What differs: blocks and lanes are threads of this process, so a grid may be as large as threads can
be made, and an address that belongs to nobody ends the process.
"""

from __future__ import annotations

import ctypes
import logging
import os
import platform
import threading
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from ..kernels import _host
from .driver import ONE_RECORD, DeviceProperties, DriverError
from .host_memory import HostMemory
from .host_stream import Capture, HostEvent, HostStream, Work, begin_capture, end_capture

log = logging.getLogger("fastkern")

T = TypeVar("T")

_MOST_BLOCKS = 1024
_FIRST_HANDLE = 0x1000  # 0 is the default stream
_HOST_FUNCTION = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


@dataclass(eq=False)  # each is itself alone
class HostModule:
    """A loaded image: every kernel of the host target. constants: of kernels in Triton, whose image
    it is; see InterpreterDriver."""

    kernels: tuple[str, ...] = tuple(_host.device_kernel_names())
    constants: Mapping[str, int] | None = None
    loaded: bool = True


@dataclass(frozen=True)
class HostFunction:
    """A kernel of a module."""

    module: HostModule
    name: str


class HostDriver:
    """Driver for the CPU. See driver.Driver.

    device: any number from 0; they share nothing. most_lanes: lanes of a block at most; each is a
    thread. memory_bytes: what `allocate` gives out in all; by default what this machine has. teams:
    blocks consist of teams of lanes (`_host.lanes_of_team()`), so that kernels go the way they go
    on devices; else each lane is a team.
    """

    target = "host"
    kernels = "cxx"

    def __init__(
        self,
        device: int = 0,
        most_lanes: int = 4,
        memory_bytes: int | None = None,
        teams: bool = False,
    ) -> None:
        if device < 0:
            raise ValueError(f"device must be 0 or more, not {device}")
        self.device = device
        if memory_bytes is None:
            memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        self._properties = DeviceProperties(
            name=platform.processor() or platform.machine(),
            architecture="host",
            num_processors=os.cpu_count() or 1,
            most_lanes=most_lanes,
            memory_bytes=memory_bytes,
        )
        self._teams = teams
        self._memory = HostMemory(memory_bytes)
        self._lock = threading.Lock()
        self._next_handle = _FIRST_HANDLE
        self._objects: dict[int, HostStream | HostEvent | list[Work]] = {}
        self._ended: list[HostStream] = []
        self._num_modules = 0
        self._closed = False

    def properties(self) -> DeviceProperties:
        return self._properties

    def current(self) -> AbstractContextManager[None]:
        return nullcontext()

    # -- memory ------------------------------------------------------------------------------------

    def allocate(self, num_bytes: int, coherent: bool) -> int:
        self._refuse_in_capture("allocate")
        return self._memory.allocate(num_bytes)

    def free(self, address: int) -> None:
        self._release("free", "device", address)

    def allocate_host(self, num_bytes: int) -> int:
        self._refuse_in_capture("allocate_host")
        return self._memory.allocate_pinned(num_bytes)

    def free_host(self, address: int) -> None:
        self._release("free_host", "pinned", address)

    def copy(self, to: int, source: int, num_bytes: int, stream: int) -> None:
        found = self._stream("copy", stream)
        if num_bytes:
            self._memory.check("copy", to, num_bytes)
            self._memory.check("copy", source, num_bytes)
            found.submit("copy", lambda: _discard(ctypes.memmove(to, source, num_bytes)))

    def fill(self, address: int, value: int, num_bytes: int, stream: int) -> None:
        found = self._stream("fill", stream)
        if not 0 <= value <= 255:
            raise DriverError("fill", "invalid value", f"{value} is no byte")
        if num_bytes:
            self._memory.check("fill", address, num_bytes)
            found.submit("fill", lambda: _discard(ctypes.memset(address, value, num_bytes)))

    def export_memory(self, address: int) -> bytes:
        return self._memory.export(address)

    def open_memory(self, handle: bytes) -> int:
        self._refuse_in_capture("open_memory")
        return self._memory.open(handle)

    def close_memory(self, address: int) -> None:
        self._release("close_memory", "opened", address)

    def _release(self, operation: str, kind: str, address: int) -> None:
        """As GPUs do, wait for what may still use it."""
        self._refuse_in_capture(operation)
        for stream in self._all(HostStream):
            stream.drain()
        for stream in self._ended:
            stream.join()
        self._memory.release(operation, kind, address)

    # -- streams and events ------------------------------------------------------------------------

    def create_stream(self) -> int:
        self._check_open("create_stream")
        return self._keep(HostStream(f"fastkern-host-{self.device}"))

    def destroy_stream(self, stream: int) -> None:
        if stream == 0:
            raise DriverError("destroy_stream", "invalid handle", "the default stream")
        if self._get("destroy_stream", HostStream, stream).capture is not None:
            raise DriverError("destroy_stream", "capture unsafe", "the stream is captured")
        found = self._take("destroy_stream", HostStream, stream)
        found.end()
        with self._lock:
            self._ended = [s for s in self._ended if s.running()] + [found]

    def synchronize(self, stream: int) -> None:
        self._stream("synchronize", stream).synchronize()

    def create_event(self, timing: bool = False) -> int:
        self._check_open("create_event")
        return self._keep(HostEvent(timing))

    def destroy_event(self, event: int) -> None:
        self._take("destroy_event", HostEvent, event)

    def record(self, event: int, stream: int) -> None:
        self._stream("record", stream).record(self._get("record", HostEvent, event))

    def wait_event(self, stream: int, event: int) -> None:
        self._stream("wait_event", stream).wait(self._get("wait_event", HostEvent, event))

    def event_done(self, event: int) -> bool:
        moment = self._get("event_done", HostEvent, event).moment
        if moment is None:
            return True
        moment.refuse_captured("event_done")
        if not moment.reached.is_set():
            return False
        moment.check()
        return True

    def wait_for(self, event: int) -> None:
        moment = self._get("wait_for", HostEvent, event).moment
        if moment is not None:
            moment.refuse_captured("wait_for")
            moment.reached.wait()
            moment.check()

    def elapsed_us(self, begin: int, end: int) -> float:
        times = []
        for handle in (begin, end):
            event = self._get("elapsed_us", HostEvent, handle)
            if not event.timing or event.moment is None:
                text = "made without timing" if not event.timing else "never recorded"
                raise DriverError("elapsed_us", "invalid handle", text)
            event.moment.refuse_captured("elapsed_us")
            if not event.moment.reached.is_set():
                raise DriverError("elapsed_us", "not ready")
            event.moment.check()
            times.append(event.moment.time_ns)
        return (times[1] - times[0]) / 1e3

    # -- kernels -----------------------------------------------------------------------------------

    def load_module(self, image: bytes) -> Any:
        """Any image: the kernels are those of the host target."""
        self._refuse_in_capture("load_module")
        self._num_modules += 1
        return HostModule()

    def unload_module(self, module: Any) -> None:
        self._check_module("unload_module", module)
        module.loaded = False
        self._num_modules -= 1

    def function(self, module: Any, name: str) -> Any:
        self._check_module("function", module)
        if name not in module.kernels:
            raise DriverError("function", "not found", name)
        return HostFunction(module, name)

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
        """Kernels here take one record, and no shared memory."""
        found = self._stream("launch", stream)
        self._check_module("launch", function.module)
        if grid < 1 or not 1 <= num_lanes <= self._properties.most_lanes:
            text = f"{grid} blocks of {num_lanes} lanes"
            raise DriverError("launch", "invalid value", text)
        if shared_bytes or tuple(offsets) != ONE_RECORD:
            text = f"{shared_bytes} bytes of shared memory, parameters at {list(offsets)}"
            raise DriverError("launch", "invalid value", text)
        found.submit("launch", self._work_of(function, grid, num_lanes, bytes(arguments)))

    def _work_of(self, function: HostFunction, grid: int, num_lanes: int, arguments: bytes) -> Work:
        """What runs the kernel."""
        record = np.frombuffer(arguments, dtype=np.uint8)
        teams = self._teams
        return lambda: _host.launch_device_kernel(function.name, grid, num_lanes, record, teams)

    def resident_blocks(self, function: Any, num_lanes: int, shared_bytes: int = 0) -> int:
        self._check_module("resident_blocks", function.module)
        if shared_bytes:
            text = f"{shared_bytes} bytes of shared memory"
            raise DriverError("resident_blocks", "invalid value", text)
        if not 1 <= num_lanes <= self._properties.most_lanes:
            raise DriverError("resident_blocks", "invalid value", f"{num_lanes} lanes")
        return _MOST_BLOCKS

    # -- graphs ------------------------------------------------------------------------------------

    def begin_capture(self, stream: int) -> None:
        if stream == 0:
            raise DriverError("begin_capture", "capture unsupported", "the default stream")
        begin_capture(self._stream("begin_capture", stream))

    def end_capture(self, stream: int) -> int:
        return self._keep(end_capture(self._stream("end_capture", stream)))

    def is_capturing(self, stream: int) -> bool:
        """Whether the stream's work is recorded."""
        return self._stream("is_capturing", stream).capture is not None

    def call_host(self, stream: int, function: int, data: int) -> None:
        if not function:
            raise DriverError("call_host", "invalid value", "null function")
        found, call = self._stream("call_host", stream), _HOST_FUNCTION(function)
        found.submit("call_host", lambda: call(data))

    def replay(self, graph: int, stream: int) -> None:
        work = self._get("replay", list, graph)
        found = self._stream("replay", stream)
        if found.capture is not None:
            raise DriverError("replay", "capture unsupported", "the stream is captured")
        for piece in work:
            found.submit("replay", piece)

    def destroy_graph(self, graph: int) -> None:
        self._take("destroy_graph", list, graph)

    # -- end ---------------------------------------------------------------------------------------

    def leftovers(self) -> list[str]:
        """What was made and has neither been freed nor destroyed."""
        names = {HostStream: "stream", HostEvent: "event", list: "graph"}
        with self._lock:
            found = [names[type(o)] for handle, o in self._objects.items() if handle]
        return self._memory.leftovers() + found + ["module"] * self._num_modules

    def close(self) -> None:
        if self._closed:
            return
        if found := self.leftovers():
            log.warning("host driver %d closed with %s", self.device, ", ".join(found))
        self._closed = True
        with self._lock:
            streams = [o for o in self._objects.values() if isinstance(o, HostStream)]
            ended, self._ended = self._ended, []
            self._objects.clear()
        for stream in streams:
            stream.end()
        for stream in streams + ended:
            stream.join()
        self._memory.close()

    # -- handles -----------------------------------------------------------------------------------

    def _check_open(self, operation: str) -> None:
        if self._closed:
            raise DriverError(operation, "the driver is closed")

    def _stream(self, operation: str, handle: int) -> HostStream:
        self._check_open(operation)
        if handle == 0:
            with self._lock:
                found = self._objects.get(0)
                if found is None:
                    found = self._objects[0] = HostStream(f"fastkern-host-{self.device}-default")
        return self._get(operation, HostStream, handle)

    def _keep(self, made: HostStream | HostEvent | list[Work]) -> int:
        with self._lock:
            handle = self._next_handle
            self._next_handle += 1
            self._objects[handle] = made
        return handle

    def _get(self, operation: str, kind: type[T], handle: int) -> T:
        self._check_open(operation)
        found = self._objects.get(handle)
        if not isinstance(found, kind):
            text = f"{handle:#x} is none, or was destroyed"
            raise DriverError(operation, "invalid handle", text)
        return found

    def _take(self, operation: str, kind: type[T], handle: int) -> T:
        found = self._get(operation, kind, handle)
        with self._lock:
            del self._objects[handle]
        return found

    def _all(self, kind: type[T]) -> list[T]:
        with self._lock:
            return [o for o in self._objects.values() if isinstance(o, kind)]

    def _check_module(self, operation: str, module: Any) -> None:
        self._check_open(operation)
        if not isinstance(module, HostModule) or not module.loaded:
            raise DriverError(operation, "invalid handle", "the module is not loaded")

    def _refuse_in_capture(self, operation: str) -> None:
        """What may wait for the device would break the capture that this thread has begun."""
        self._check_open(operation)
        me = threading.get_ident()
        captures: list[Capture | None] = [stream.capture for stream in self._all(HostStream)]
        if any(capture is not None and capture.thread == me for capture in captures):
            raise DriverError(operation, "capture unsafe", "this thread is capturing")


def _discard(_: object) -> None:
    """For functions whose result nobody wants."""
