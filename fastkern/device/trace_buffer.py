"""Device memory that a rank's kernels write trace events into, while a trace is on."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ..tracing import Tracing
from .driver import Driver
from .records import TRACE_EVENT
from .transfer import download, fill

_HEAD_BYTES = 256  # before the events: their number


class TraceBuffer:
    """drain: waits for all launches."""

    def __init__(self, driver: Driver, drain: Callable[[], None]) -> None:
        self._driver = driver
        self._drain = drain
        self._address = 0
        self._capacity = 0

    @property
    def addresses(self) -> tuple[int, int, int]:
        """Of the events and of their number, and how many fit; zeros while no trace is on."""
        if not self._address:
            return 0, 0, 0
        return self._address + _HEAD_BYTES, self._address, self._capacity

    def tracing(self) -> Tracing:
        """What starts and stops traces into this buffer."""
        clock = f"{self._driver.target} device {self._driver.device}"
        own_clock = None if self._driver.target == "host" else clock
        return Tracing(self._start, self._stop, own_clock)

    def close(self) -> None:
        """Free it; nothing is under way."""
        address, self._address = self._address, 0
        if address:
            self._driver.free(address)

    def _start(self, max_events: int) -> None:
        self._drain()  # what is done here may wait until the device is idle
        size = _HEAD_BYTES + max_events * TRACE_EVENT.itemsize
        address = self._driver.allocate(size, coherent=False)
        try:
            fill(self._driver, address, 0, _HEAD_BYTES)
        except BaseException:
            self._driver.free(address)
            raise
        self._address, self._capacity = address, max_events

    def _stop(self) -> tuple[bytes, int]:
        try:
            self._drain()
            head = np.frombuffer(download(self._driver, self._address, 8), dtype=np.uint64)
            count = int(head[0])
            size = min(count, self._capacity) * TRACE_EVENT.itemsize
            if not size:
                return b"", count
            return download(self._driver, self._address + _HEAD_BYTES, size), count
        finally:
            self.close()
