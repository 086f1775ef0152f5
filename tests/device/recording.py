"""A GPU's driver that is not one: what the fakes of cuda.bindings.driver and hip.hip share.

It keeps memory that can be read and written, runs everything at once, records every call, and
answers misuse as a driver does: with an error code. Types that the real bindings refuse raise
TypeError. It can be told to fail at the n-th call of a function.
"""

from __future__ import annotations

import ctypes
import itertools
import json
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

HANDLE_BYTES = 64
_handles = itertools.count(0x5000)
_exports: dict[bytes, tuple[RecordedDevice, int]] = {}  # of all fakes: other processes see them

Work = Callable[[], object]


class Fault(Exception):
    """Misuse, by the name that the fakes translate: "invalid value", "invalid handle", ..."""


@dataclass
class Buffer:
    """Memory. kind: "device", "uncached", "pinned", "opened"."""

    kind: str
    address: int
    num_bytes: int
    device: int
    memory: Any = None
    opened_by: int = 0


@dataclass
class Stream:
    """A stream; captured work is kept."""

    captured: list[Work] | None = None


@dataclass
class Event:
    """An event. timing: it may be asked for its time."""

    timing: bool
    recorded: bool = False
    time_ms: float = 0.0


@dataclass
class Graph:
    """A captured graph, or one that can be launched."""

    work: list[Work]


@dataclass
class Module:
    """kernels: bytes of each one's parameters, by name."""

    kernels: dict[str, list[int]]


@dataclass
class Function:
    """A kernel. ready: it has been loaded."""

    module: int
    name: str
    ready: bool = False


@dataclass
class Launch:
    """What a kernel was started with. record: its parameters, one behind the other."""

    name: str
    grid: int
    num_lanes: int
    stream: int
    record: bytes
    shared_bytes: int = 0


def image_of(**kernels: int | Sequence[int]) -> bytes:
    """An image that the fakes load: by kernel, bytes of its one record, or of each parameter."""
    return json.dumps({k: [n] if isinstance(n, int) else n for k, n in kernels.items()}).encode()


@dataclass(eq=False)
class RecordedDevice:
    """State and operations. num_devices: devices here. not_ready: how often an event is not done
    yet when asked."""

    num_devices: int = 2
    not_ready: int = 0
    log: list[str] = field(default_factory=list)
    launches: list[Launch] = field(default_factory=list)
    failures: dict[tuple[str, int], str] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)
    buffers: dict[int, Buffer] = field(default_factory=dict)
    objects: dict[int, Any] = field(default_factory=dict)
    clock_ms: float = 0.0
    capturing: set[int] = field(default_factory=set)
    parameters: dict[str, int] = field(default_factory=dict)

    def num_parameters(self, name: str) -> int:
        """Of a function that the bindings have."""
        return self.parameters[name]

    def leftovers(self) -> list[str]:
        """What has not been freed or destroyed."""
        return [b.kind for b in self.buffers.values()] + [
            type(o).__name__ for o in self.objects.values() if not isinstance(o, Function)
        ]

    def fail(self, name: str, at: int, code: str) -> None:
        """Let the at-th call of a function, from 1, answer with this code."""
        self.failures[name, at] = code

    def called(self, name: str) -> str | None:
        """Note a call; the code with which it is to fail, if it is."""
        self.log.append(name)
        self.counts[name] += 1
        code = self.failures.get((name, self.counts[name]))
        if code is not None and name.endswith("EndCapture"):  # which ends it all the same
            self.capturing.clear()
            for found in self.objects.values():
                if isinstance(found, Stream):
                    found.captured = None
        return code

    # -- memory ------------------------------------------------------------------------------------

    def allocate(self, kind: str, num_bytes: int, device: int) -> int:
        self.refuse_in_capture()
        if num_bytes < 1:
            raise Fault("invalid value")
        memory = (ctypes.c_uint8 * (num_bytes + 255))()
        address = -(-ctypes.addressof(memory) // 256) * 256
        ctypes.memset(address, 0xA5, num_bytes)
        self.buffers[address] = Buffer(kind, address, num_bytes, device, memory)
        return address

    def free(self, kinds: tuple[str, ...], address: int) -> None:
        self.refuse_in_capture()
        buffer = self.buffers.get(address)
        if buffer is None or buffer.kind not in kinds:
            raise Fault("invalid value")
        if buffer.opened_by:
            raise AssertionError("freed while another process maps it")
        del self.buffers[address]
        for handle, where in list(_exports.items()):
            if where == (self, address):
                del _exports[handle]

    def range(self, address: int, num_bytes: int) -> None:
        """Raises Fault unless it lies in one piece of memory."""
        for b in self.buffers.values():
            if b.address <= address and address + num_bytes <= b.address + b.num_bytes:
                return
        raise Fault("invalid value")

    def copy(self, to: int, source: int, num_bytes: int, stream: int) -> None:
        self.range(to, num_bytes)
        self.range(source, num_bytes)
        self.enqueue(stream, lambda: ctypes.memmove(to, source, num_bytes))

    def fill(self, address: int, value: int, num_bytes: int, stream: int) -> None:
        self.range(address, num_bytes)
        self.enqueue(stream, lambda: ctypes.memset(address, value, num_bytes))

    def export(self, address: int) -> bytes:
        buffer = self.buffers.get(address)
        if buffer is None or buffer.kind not in ("device", "uncached"):
            raise Fault("invalid value")
        handle = next(_handles).to_bytes(8, "big") + bytes(range(200, 200 + HANDLE_BYTES - 8))
        _exports[handle] = (self, address)
        return handle

    def open(self, handle: bytes, device: int) -> int:
        where = _exports.get(handle)
        if where is None or where[0] is self:
            raise Fault("invalid handle")
        owner, address = where
        buffer = owner.buffers[address]
        buffer.opened_by += 1
        self.buffers[address] = Buffer("opened", address, buffer.num_bytes, device, buffer)
        return address

    def close(self, address: int) -> None:
        buffer = self.buffers.get(address)
        if buffer is None or buffer.kind != "opened":
            raise Fault("invalid value")
        buffer.memory.opened_by -= 1
        del self.buffers[address]

    # -- objects -----------------------------------------------------------------------------------

    def make(self, made: Any) -> int:
        handle = next(_handles)
        self.objects[handle] = made
        return handle

    def get(self, kind: type[Any], handle: int) -> Any:
        found = self.objects.get(handle)
        if not isinstance(found, kind):
            raise Fault("invalid handle")
        return found

    def destroy(self, kind: type[Any], handle: int) -> None:
        self.get(kind, handle)
        del self.objects[handle]

    def stream(self, handle: int) -> Stream:
        return Stream() if handle == 0 else self.get(Stream, handle)

    def enqueue(self, stream: int, work: Work) -> None:
        captured = self.stream(stream).captured
        self.clock_ms += 0.25
        if captured is not None:
            captured.append(work)
        else:
            work()

    def synchronize(self, stream: int) -> None:
        if self.stream(stream).captured is not None:
            raise Fault("capture unsupported")

    def record(self, event: int, stream: int) -> None:
        found = self.get(Event, event)
        self.stream(stream)
        found.recorded, found.time_ms = True, self.clock_ms

    def wait(self, stream: int, event: int) -> None:
        self.get(Event, event)
        self.stream(stream)

    def query(self, event: int) -> None:
        self.get(Event, event)
        if self.not_ready:
            self.not_ready -= 1
            raise Fault("not ready")

    def elapsed_ms(self, begin: int, end: int) -> float:
        events = [self.get(Event, begin), self.get(Event, end)]
        if not all(e.timing and e.recorded for e in events):
            raise Fault("invalid handle")
        return float(events[1].time_ms - events[0].time_ms)

    # -- kernels and graphs ------------------------------------------------------------------------

    def load(self, image: bytes) -> int:
        try:
            return self.make(Module(json.loads(image)))
        except ValueError:
            raise Fault("invalid image") from None

    def unload(self, module: int) -> None:
        self.destroy(Module, module)
        for handle, found in list(self.objects.items()):
            if isinstance(found, Function) and found.module == module:
                del self.objects[handle]

    def function(self, module: int, name: str) -> int:
        if name not in self.get(Module, module).kernels:
            raise Fault("not found")
        return self.make(Function(module, name))

    def launch(
        self,
        function: int,
        grid: int,
        num_lanes: int,
        stream: int,
        parameters: int,
        shared_bytes: int,
    ) -> None:
        """parameters: an array with the address of each, which are read now, as drivers do."""
        found = self.get(Function, function)
        if not found.ready:
            raise AssertionError("launched before it was loaded")
        if not 1 <= num_lanes <= 1024 or grid < 1 or shared_bytes > 48 << 10:
            raise Fault("invalid value")
        read = b""
        for k, num_bytes in enumerate(self.get(Module, found.module).kernels[found.name]):
            read += ctypes.string_at(pointer_at(parameters + 8 * k), num_bytes)
        start = Launch(found.name, grid, num_lanes, stream, read, shared_bytes)
        self.enqueue(stream, lambda: self.launches.append(start))

    def begin_capture(self, stream: int) -> None:
        found = self.get(Stream, stream)
        if found.captured is not None:
            raise Fault("invalid value")
        found.captured = []
        self.capturing.add(threading.get_ident())

    def end_capture(self, stream: int) -> int:
        found = self.get(Stream, stream)
        if found.captured is None:
            raise Fault("invalid value")
        work, found.captured = found.captured, None
        self.capturing.discard(threading.get_ident())
        return self.make(Graph(work))

    def instantiate(self, graph: int) -> int:
        return self.make(Graph(list(self.get(Graph, graph).work)))

    def replay(self, graph: int, stream: int) -> None:
        for work in self.get(Graph, graph).work:
            self.enqueue(stream, work)

    def call_host(self, stream: int, function: int, data: int) -> None:
        call = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(function)
        self.enqueue(stream, lambda: call(data))

    def refuse_in_capture(self) -> None:
        if threading.get_ident() in self.capturing:
            raise Fault("capture unsupported")


# -- arguments -----------------------------------------------------------------------------------


class Handle:
    """What the bindings return for addresses and objects: convertible to int."""

    def __init__(self, value: int = 0) -> None:
        self.value = value

    def __int__(self) -> int:
        return self.value


class IpcHandle:
    """64 bytes at an address of their own."""

    def __init__(self) -> None:
        self.bytes = (ctypes.c_uint8 * HANDLE_BYTES)()

    def getPtr(self) -> int:  # noqa: N802 - the bindings' name
        return ctypes.addressof(self.bytes)

    def __int__(self) -> int:
        return ctypes.addressof(self.bytes)


def check_types(name: str, kinds: str, arguments: tuple[Any, ...]) -> list[Any]:
    """Arguments as plain values. kinds: one letter each.

    n: a number that is not negative; p: an address or handle; b: bytes; e: a member of an
    enumeration; o: any object. Raises TypeError, as the bindings do, or OverflowError.
    """
    if len(arguments) != len(kinds):
        raise TypeError(f"{name}() takes {len(kinds)} arguments ({len(arguments)} given)")
    values: list[Any] = []
    for kind, given in zip(kinds, arguments, strict=True):
        if kind == "p" and isinstance(given, Handle):
            values.append(int(given))
            continue
        plain = isinstance(given, int) and not isinstance(given, bool)
        if kind in "np" and not plain:
            raise TypeError(f"{name}: an integer is required, not {given!r}")
        if kind in "np" and given < 0:
            raise OverflowError(f"{name}: can't convert negative value")
        if kind == "b" and not isinstance(given, bytes):
            raise TypeError(f"{name}: expected bytes, {type(given).__name__} found")
        if kind == "e" and not hasattr(given, "name"):
            raise TypeError(f"{name}: a member of an enumeration is required, not {given!r}")
        values.append(given)
    return values


def pointer_at(address: int) -> int:
    """One of an array of pointers. Raises Fault where it is null."""
    found = ctypes.c_void_p.from_address(address).value
    if not found:
        raise Fault("invalid value")
    return found
