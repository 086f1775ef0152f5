"""What the runtime needs of a GPU's driver: a few operations, the same for CUDA, HIP and the CPU.

Addresses, streams, events and graphs are integers (handles of the driver). Every operation works on
the driver's own device. A failure raises DriverError with the operation's name and what the driver
said; too little memory DeviceMemoryError, which is one.

Releasing memory may wait until the whole device is idle: not while a kernel waits for one that is
launched later.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from ..errors import FastkernError


class DriverError(FastkernError):
    """A call of the GPU's driver failed.

    operation: the driver's function ("cuMemAlloc"). code: its error's name
    ("CUDA_ERROR_INVALID_VALUE"). text: what else there is to say.
    """

    def __init__(self, operation: str, code: str, text: str = "") -> None:
        super().__init__(operation, code, text)  # all of them, so that it can be pickled
        self.operation = operation
        self.code = code
        self.text = text

    def __str__(self) -> str:
        return f"{self.operation}: {self.code}" + (f" ({self.text})" if self.text else "")


class DeviceMemoryError(DriverError, MemoryError):
    """The device, or pinned memory, has too little left. Nothing else is wrong."""


@dataclass(frozen=True)
class DeviceProperties:
    """What a launch is planned with.

    architecture: what kernels are compiled for ("sm_90", "gfx942", "host"). num_processors: those
    that blocks are spread over (SMs, compute units). most_lanes: threads of a block.
    """

    name: str
    architecture: str
    num_processors: int
    most_lanes: int
    memory_bytes: int


ONE_RECORD = (0,)  # offsets of a launch whose arguments are one record
MOST_SHARED_BYTES = 48 << 10  # what every device gives a block that has not asked for more


def check_launch(
    operation: str, arguments: bytes, shared_bytes: int, offsets: Sequence[int]
) -> None:
    """Raise DriverError for parameters that lie outside, or too much shared memory."""
    if not 0 <= shared_bytes <= MOST_SHARED_BYTES:
        text = f"{shared_bytes} bytes of shared memory, at most {MOST_SHARED_BYTES}"
        raise DriverError(operation, "invalid value", text)
    last = max(1, len(arguments)) - 1
    if any(not 0 <= offset <= last for offset in offsets):
        text = f"parameters at {list(offsets)} of {len(arguments)} bytes"
        raise DriverError(operation, "invalid value", text)


class Driver(Protocol):
    """One device.

    target: "cuda", "hip" or "host", which kernels it runs. kernels: "cxx", or "triton" where those
    that move rows and those of route are the ones in Triton.
    """

    target: str
    kernels: str
    device: int

    def properties(self) -> DeviceProperties:
        """Of this device."""

    def current(self) -> AbstractContextManager[None]:
        """Within, the device is the calling thread's current one, for libraries that go by it."""

    # -- memory: zeroed by nobody; addresses are valid on the device and in copies ----------------

    def allocate(self, num_bytes: int, coherent: bool) -> int:
        """Device memory, at least 256-byte aligned.

        coherent: peers or a NIC write it while a kernel here reads it (flags, headers, staging):
        fine-grained or uncached on AMD; no difference on NVIDIA.
        """

    def free(self, address: int) -> None:
        """What `allocate` returned."""

    def allocate_host(self, num_bytes: int) -> int:
        """Pinned host memory, also readable through ctypes or NumPy at that address."""

    def free_host(self, address: int) -> None:
        """What `allocate_host` returned."""

    def copy(self, to: int, source: int, num_bytes: int, stream: int) -> None:
        """In stream order, in any direction between device and pinned host memory."""

    def fill(self, address: int, value: int, num_bytes: int, stream: int) -> None:
        """Bytes of one value, in stream order."""

    def export_memory(self, address: int) -> bytes:
        """A handle by which another process on this host maps what `allocate` returned."""

    def open_memory(self, handle: bytes) -> int:
        """The other process's memory, mapped here until `close_memory`."""

    def close_memory(self, address: int) -> None:
        """What `open_memory` returned."""

    # -- streams and events ------------------------------------------------------------------------

    def create_stream(self) -> int:
        """A stream that does not wait for the default one."""

    def destroy_stream(self, stream: int) -> None:
        """What `create_stream` returned."""

    def synchronize(self, stream: int) -> None:
        """Wait for all that is in the stream; raises what went wrong there."""

    def create_event(self, timing: bool = False) -> int:
        """An event that has not been recorded."""

    def destroy_event(self, event: int) -> None:
        """What `create_event` returned."""

    def record(self, event: int, stream: int) -> None:
        """At this place in the stream."""

    def wait_event(self, stream: int, event: int) -> None:
        """What follows in the stream comes after the event."""

    def event_done(self, event: int) -> bool:
        """Has all before it ended? Never waits."""

    def wait_for(self, event: int) -> None:
        """Wait, on the host, until all before the event has ended."""

    def elapsed_us(self, begin: int, end: int) -> float:
        """Time between two events that have ended."""

    # -- kernels -----------------------------------------------------------------------------------

    def load_module(self, image: bytes) -> Any:
        """A compiled image (cubin, code object); loaded before it is first called."""

    def unload_module(self, module: Any) -> None:
        """What `load_module` returned."""

    def function(self, module: Any, name: str) -> Any:
        """A kernel of the module."""

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
        """Start grid blocks of num_lanes lanes.

        arguments: the kernel's parameters as they lie in memory. offsets: where each begins; by
        default they are one record, passed by value. shared_bytes: dynamic shared memory of a
        block, at most MOST_SHARED_BYTES.
        """

    def resident_blocks(self, function: Any, num_lanes: int, shared_bytes: int = 0) -> int:
        """Blocks of this kernel that the whole device holds at once."""

    # -- graphs ------------------------------------------------------------------------------------

    def begin_capture(self, stream: int) -> None:
        """From here on the stream's work is recorded, not run."""

    def end_capture(self, stream: int) -> int:
        """The graph, ready to be replayed."""

    def call_host(self, stream: int, function: int, data: int) -> None:
        """A C function void(void*) at an address, called with `data` in stream order."""

    def replay(self, graph: int, stream: int) -> None:
        """Run a graph."""

    def destroy_graph(self, graph: int) -> None:
        """What `end_capture` returned."""

    # -- end ---------------------------------------------------------------------------------------

    def close(self) -> None:
        """Let go of the device. What was made here has been freed before; a second call does
        nothing."""
