"""What a runtime keeps while a trace is on: its kernels' events, and which launch each is of."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from .errors import ClosedError, FastkernError

_EPOCH_BITS = 32  # that an event has of its launch's epoch


class Launch(NamedTuple):
    """A launch that was traced. call: as errors count them; calls in rounds launch more often."""

    op: str
    call: int
    num_blocks: int


@dataclass(frozen=True)
class TraceLog:
    """Events of one rank's launches.

    events: TraceEvent of kernels/body/args.h by its fields, in order of begin_ns. num_dropped:
    events that there was no room for. launches: by epoch. clock: whose nanoseconds begin_ns and
    end_ns are; equal texts mean one clock. unix_offset_ns: to be added for the time of day, roughly
    where the clock is a device's.
    """

    events: npt.NDArray[Any]
    num_dropped: int = 0
    launches: dict[int, Launch] = field(default_factory=dict)
    clock: str = ""
    unix_offset_ns: int = 0


class Tracing:
    """One runtime's trace: off, or on.

    start: makes room for so many events. stop: gives back their bytes, and how many there were,
    kept or not. device_clock: None where kernels have the host's steady clock, else a name.
    """

    def __init__(
        self,
        start: Callable[[int], None],
        stop: Callable[[], tuple[bytes, int]],
        device_clock: str | None = None,
    ) -> None:
        self._start, self._stop = start, stop
        self._device_clock = device_clock
        self._launches: dict[int, Launch] | None = None
        self._first_unix_ns = 0
        self._ended: TraceLog | None = None  # by the end of the runtime

    def start(self, max_events: int) -> None:
        """From the next launch on. Raises FastkernError where a trace is on already."""
        if self._launches is not None:
            raise FastkernError("a trace of this communicator is on already")
        self._start(max_events)
        self._launches, self._ended, self._first_unix_ns = {}, None, 0

    def note(self, epoch: int, op: str, call: int, num_blocks: int) -> None:
        """A launch; costs nothing while no trace is on."""
        if self._launches is not None:
            self._first_unix_ns = self._first_unix_ns or time.time_ns()
            self._launches[epoch % (1 << _EPOCH_BITS)] = Launch(op, call, num_blocks)

    def stop(self) -> TraceLog:
        """What there is since `start`; waits for launches under way."""
        if self._launches is None:
            ended, self._ended = self._ended, None
            if ended is None:
                raise FastkernError("no trace of this communicator is on")
            return ended
        launches, self._launches = self._launches, None
        raw, count = self._stop()
        from .device.records import TRACE_EVENT  # only now: most processes trace nothing

        events = np.frombuffer(raw, dtype=TRACE_EVENT)
        events = events[np.argsort(events["begin_ns"], kind="stable")]
        clock, offset = self._clock(events)
        return TraceLog(events, count - len(events), launches, clock, offset)

    def close(self) -> None:
        """The runtime ends: a trace that is on can still be asked for."""
        try:
            if self._launches is not None:
                self._ended = self.stop()
        finally:
            self._start, self._stop = _refuse_start, _refuse_stop

    def _clock(self, events: npt.NDArray[Any]) -> tuple[str, int]:
        host = socket.gethostname()
        if self._device_clock is None:
            return f"host {host}", time.time_ns() - time.monotonic_ns()
        first = int(events["begin_ns"][0]) if len(events) else 0
        return f"{self._device_clock} of host {host}", self._first_unix_ns - first


def _refuse_start(max_events: int) -> None:
    raise ClosedError("the communicator is closed")


def _refuse_stop() -> tuple[bytes, int]:
    raise ClosedError("the communicator is closed")


def host_tracing(host: Any) -> Tracing:
    """Of kernels on the host, which a _host.HostRank launches."""

    def stop() -> tuple[bytes, int]:
        return host.stop_trace(), host.trace_count()

    return Tracing(host.start_trace, stop)
