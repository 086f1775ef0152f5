"""Telling kernels that wait to leave, from the host: without what would wait for them itself.

Releasing memory waits until the device is idle, so the word and the stream are there beforehand.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from contextlib import ExitStack

import numpy as np

from .driver import Driver
from .records import CONTROL, offset_of
from .virtual_memory import host_view

_ABORT = offset_of(CONTROL, "abort")


class KernelStopper:
    """One for each runtime. Raises DriverError; then nothing is left allocated."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._lock = threading.Lock()  # a caller and the watchdog may both want to
        with ExitStack() as made:
            self._word = driver.allocate_host(8)
            made.callback(driver.free_host, self._word)
            self._stream = driver.create_stream()
            made.callback(driver.destroy_stream, self._stream)
            self._owned = made.pop_all()

    def stop(self, own: int, controls: Iterable[int], word: int) -> None:
        """Write an abort word into these Controls, unless one has come to the own one already.

        own, controls: addresses, as mapped here. Raises DriverError.
        """
        with self._lock:
            driver, view = self._driver, host_view(self._word, 8).view(np.uint64)
            driver.copy(self._word, own + _ABORT, 8, self._stream)
            driver.synchronize(self._stream)
            if view[0]:
                return
            view[0] = word
            for control in controls:
                driver.copy(control + _ABORT, self._word, 8, self._stream)
            driver.synchronize(self._stream)

    def close(self) -> None:
        """Let go of both; no kernel waits any more."""
        self._owned.close()
