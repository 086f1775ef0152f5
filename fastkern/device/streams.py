"""The order of what a communicator does on a device and what its caller does with tensors.

On a GPU both go into streams: a call's work goes into the caller's current stream, and what it
returns may be used in stream order. A queued call goes into a stream of the communicator's own,
beside what its caller does next; whoever waits for it has the own current stream wait.

CPU tensors have no streams: with the CPU as the device (HostDriver) a call waits for its work.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any, Protocol, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from ..errors import FastkernError
from ..turns import Fork, InPlace
from .driver import Driver

T = TypeVar("T")
Bytes = npt.NDArray[np.uint8]

_NOT_CAPTURED = (
    "a call of a communicator cannot be captured into a graph; those of a static_exchange can"
)


class StreamOrder(Protocol):
    """device: where tensors are."""

    device: torch.device

    def current(self) -> int:
        """The driver's stream into which a call made now goes."""

    def settle(self, *used: torch.Tensor) -> bool:
        """After work has been given to `current`: on the CPU, wait for it. Whether it has ended.

        used: memory of that work which its caller lets go of now. PyTorch's allocators on devices
        give it out again in stream order; on the CPU it is kept until the work has ended.
        """

    def upload(self, content: Bytes) -> torch.Tensor:
        """uint8 [bytes] on the device, in stream order; the content may change afterwards."""

    def download(self, tensor: torch.Tensor) -> Bytes:
        """The bytes of a contiguous tensor, once what is in the current stream has ended."""

    def wait(self) -> None:
        """For what is in the current stream."""

    def use(self, tensor: torch.Tensor) -> None:
        """The current stream uses memory that was allocated in another one, perhaps."""

    def fork(self, own_lane: bool) -> Fork:
        """For a call that runs on a queue's thread; see Turns."""

    def capturing(self) -> bool:
        """Whether the current stream's work is recorded into a graph."""

    def check_eager(self) -> None:
        """Raise FastkernError where the current stream is being captured into a graph."""

    def close(self) -> None:
        """Nothing of it is used any more."""


class HostStreams:
    """CPU tensors, and one stream of a HostDriver.

    waits: False leaves the work of a call to itself, as on a GPU; whoever looks at tensors has to
    synchronise the stream before. For tests.
    """

    def __init__(self, driver: Driver) -> None:
        self.device = torch.device("cpu")
        self.waits = True
        self._driver = driver
        self._stream = driver.create_stream()
        self._used: list[torch.Tensor] = []

    def current(self) -> int:
        return self._stream

    def settle(self, *used: torch.Tensor) -> bool:
        self._used += used
        waits = self.waits and not self.capturing()
        if waits:
            self.wait()
        return waits

    def upload(self, content: Bytes) -> torch.Tensor:
        return torch.from_numpy(content.copy())

    def download(self, tensor: torch.Tensor) -> Bytes:
        self.wait()
        content: Bytes = tensor.view(-1).view(torch.uint8).numpy().copy()
        return content

    def wait(self) -> None:
        self._driver.synchronize(self._stream)
        self._used = []

    def use(self, tensor: torch.Tensor) -> None:
        """CPU memory belongs to no stream."""

    def fork(self, own_lane: bool) -> Fork:
        return InPlace()

    def capturing(self) -> bool:
        asked: Any = self._driver
        return bool(asked.is_capturing(self._stream))

    def check_eager(self) -> None:
        if self.capturing():
            raise FastkernError(_NOT_CAPTURED)

    def close(self) -> None:
        self._driver.destroy_stream(self._stream)


class TorchStreams:
    """Tensors and streams of PyTorch on a CUDA or ROCm device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._lane: torch.cuda.Stream | None = None
        self._kept: list[tuple[torch.cuda.Event, Any]] = []
        self._keeping = threading.Lock()

    def current(self) -> int:
        return int(torch.cuda.current_stream(self.device).cuda_stream)

    def settle(self, *used: torch.Tensor) -> bool:
        return False

    def upload(self, content: Bytes) -> torch.Tensor:
        # PyTorch does not give pinned memory out again before the copy from it has ended.
        pinned = torch.empty(len(content), dtype=torch.uint8, pin_memory=True)
        pinned.numpy()[:] = content
        return pinned.to(self.device, non_blocking=True)

    def download(self, tensor: torch.Tensor) -> Bytes:
        raw = tensor.view(-1).view(torch.uint8)
        pinned = torch.empty(raw.shape, dtype=torch.uint8, pin_memory=True)
        pinned.copy_(raw, non_blocking=True)
        self.wait()
        content: Bytes = pinned.numpy()
        return content

    def wait(self) -> None:
        self._event().synchronize()

    def use(self, tensor: torch.Tensor) -> None:
        tensor.record_stream(torch.cuda.current_stream(self.device))

    def fork(self, own_lane: bool) -> Fork:
        return _TorchFork(self, own_lane)

    def capturing(self) -> bool:
        with torch.cuda.device(self.device):
            return torch.cuda.is_current_stream_capturing()

    def check_eager(self) -> None:
        if self.capturing():
            raise FastkernError(_NOT_CAPTURED)

    def close(self) -> None:
        self._kept = []
        self._lane = None

    # -- for forks ---------------------------------------------------------------------------------

    def lane(self) -> torch.cuda.Stream:
        """The stream of queued calls."""
        if self._lane is None:
            self._lane = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        return self._lane

    def keep(self, what: Any) -> torch.cuda.Event:
        """Keep what uses tensors of other streams until what is in the current one has ended; the
        event of that."""
        event = self._event()
        with self._keeping:
            self._kept = [(e, w) for e, w in self._kept if not e.query()]  # type: ignore[no-untyped-call]
            self._kept.append((event, what))
        return event

    def let_go(self, event: torch.cuda.Event) -> None:
        """The tensors' stream has come after the event."""
        with self._keeping:
            self._kept = [kept for kept in self._kept if kept[0] is not event]

    @contextlib.contextmanager
    def within(self, stream: torch.cuda.Stream) -> Iterator[None]:
        """Have it be the current stream of this thread."""
        with torch.cuda.device(self.device), torch.cuda.stream(stream):
            yield

    def _event(self) -> torch.cuda.Event:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self.device))
        return event


class _TorchFork:
    """A queued call: in the lane of its own, or in its caller's stream."""

    def __init__(self, streams: TorchStreams, own_lane: bool) -> None:
        self._streams = streams
        self._caller = torch.cuda.current_stream(streams.device)
        self._own_lane = own_lane
        self._begin = self._caller.record_event() if own_lane else None
        self._end: torch.cuda.Event | None = None

    def run(self, body: Callable[[], T]) -> T:
        stream = self._streams.lane() if self._own_lane else self._caller
        with self._streams.within(stream):
            if self._begin is None:
                return body()
            stream.wait_event(self._begin)
            try:
                return body()
            finally:  # the call's tensors are its caller's, whose stream knows nothing of the lane
                self._end = self._streams.keep(body)

    def join(self, result: object) -> None:
        if self._end is None:
            return
        current = torch.cuda.current_stream(self._streams.device)
        current.wait_event(self._end)
        if current == self._caller:
            self._streams.let_go(self._end)
        for tensor in _tensors(result):
            if tensor.device == self._streams.device:
                tensor.record_stream(current)


def _tensors(result: object) -> Iterator[torch.Tensor]:
    """Tensors in what a call returns: one, a sequence, or a record of such."""
    if isinstance(result, torch.Tensor):
        yield result
    elif isinstance(result, (list, tuple)):
        for part in result:
            yield from _tensors(part)
    elif hasattr(result, "__dataclass_fields__"):
        for name in result.__dataclass_fields__:
            yield from _tensors(getattr(result, name))
