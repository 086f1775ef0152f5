"""A heap that several static exchanges use in turn."""

from __future__ import annotations

from collections.abc import Callable

from .driver import Driver
from .memory import SymmetricHeap
from .transfer import fill


class SharedHeap:
    """freed: told, at the end, whether the heap's memory could be freed.

    entries: address of a word on the device, the calls that have been entered through it.
    last_event: of the last eager call, whichever exchange made it; 0: none is under way.
    """

    def __init__(self, heap: SymmetricHeap, freed: Callable[[bool], None]) -> None:
        self.heap = heap
        self.entries = self.last_event = 0
        self._freed = freed
        self._driver: Driver | None = None
        self._users = 0

    def join(self) -> Callable[[], None]:
        """One more exchange uses it; returns what it calls when it does no longer."""
        self._users += 1
        return self._leave

    def allocate_entries(self, driver: Driver) -> None:
        """The word, zero, if it is not there yet."""
        if self.entries:
            return
        self.entries = driver.allocate(8, coherent=False)
        self._driver = driver
        fill(driver, self.entries, 0, 8)

    def _leave(self) -> None:
        self._users -= 1
        if self._users:
            return
        if self._driver is not None:
            self._driver.free(self.entries)
        self._freed(self.heap.close())
