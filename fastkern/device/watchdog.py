"""A thread that looks at a communicator's launches now and then, for callers who do not."""

from __future__ import annotations

import logging
import threading
import weakref
from typing import Protocol

log = logging.getLogger("fastkern")


class Watched(Protocol):
    def watch(self) -> Exception | None:
        """What went wrong since the last look, if it is news."""


class Watchdog:
    """Looks every period_s until `stop`, and logs what it finds, once. Keeps nothing alive."""

    def __init__(self, watched: Watched, period_s: float, name: str) -> None:
        self._stop = threading.Event()
        self._thread = threading.Thread(
            target=_watch,
            args=(weakref.ref(watched), self._stop, min(period_s, threading.TIMEOUT_MAX)),
            name=name,
            daemon=True,
        )
        self._thread.start()

    def stop(self) -> None:
        """End the thread."""
        self._stop.set()
        if threading.current_thread() is not self._thread:
            self._thread.join()


def _watch(reference: weakref.ref[Watched], stop: threading.Event, period_s: float) -> None:
    while not stop.wait(period_s):
        watched = reference()
        if watched is None:
            return
        error = watched.watch()
        if error is not None:
            log.error("%s", error)
            return
        del watched
