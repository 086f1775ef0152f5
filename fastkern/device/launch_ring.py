"""Launches that are under way: each with a block of arguments of its own, and its outcome.

A slot holds the pinned block that a launch's arguments are written into, the device's copy of it,
and pinned memory into which the rank's control words are copied, in stream order, when the kernel
has ended. A slot is used again when its event says so: nothing is overwritten that is on its way,
and the host waits only where it is a whole ring ahead of the device.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from ..planner import StageTable
from .driver import Driver
from .records import CONTROL
from .virtual_errors import control_record
from .virtual_launch import CommonArgs, PreparedLaunch
from .virtual_memory import host_view

_NUM_SLOTS = 8
_LEAST_TABLE_BYTES = 16 << 10
_NOT_WRITTEN = (1 << 64) - 1  # no word of Control is that


class Slot:
    """One launch. op, call, epoch: of it."""

    def __init__(self, driver: Driver, common: CommonArgs, rank: int) -> None:
        self.op = ""
        self.call = self.epoch = 0
        self._driver = driver
        self._common = common
        self._rank = rank
        self._room = 0
        self._block: PreparedLaunch | None = None
        self.event = driver.create_event()
        self._status = driver.allocate_host(CONTROL.itemsize)

    def prepare(self, table: StageTable) -> PreparedLaunch:
        """The block, with this table; what was launched with it before has ended."""
        size = len(table.bytes)
        if self._block is None or size > self._room:
            self._drop_block()
            self._room = max(_LEAST_TABLE_BYTES, 1 << (size - 1).bit_length())
            self._block = PreparedLaunch(
                self._driver, "", self._common, [table], self._room, first_rank=self._rank
            )
        self._block.set_tables([table])
        self._status_words()[:] = _NOT_WRITTEN
        return self._block

    def finish(self, control_address: int, stream: int) -> None:
        """What follows the kernel in the stream."""
        self._driver.copy(self._status, control_address, CONTROL.itemsize, stream)
        self._driver.record(self.event, stream)

    def ended(self) -> bool:
        """Whether the kernel has ended, as far as the host's memory says."""
        return bool((self._status_words() != _NOT_WRITTEN).all())

    def _status_words(self) -> npt.NDArray[np.uint64]:
        return host_view(self._status, CONTROL.itemsize).view(np.uint64)

    def status(self) -> Any:
        """The rank's Control after the kernel, once it has ended."""
        return control_record(host_view(self._status, CONTROL.itemsize))

    def close(self) -> None:
        """Free its memory; nothing of it is under way."""
        self._drop_block()
        self._driver.free_host(self._status)
        self._driver.destroy_event(self.event)

    def _drop_block(self) -> None:
        block, self._block = self._block, None
        if block is not None:
            block.close()


class LaunchRing:
    """The slots, in turns."""

    def __init__(self, driver: Driver, common: CommonArgs, rank: int) -> None:
        self._driver = driver
        self._slots: list[Slot] = []
        self._next = 0
        try:
            for _ in range(_NUM_SLOTS):
                self._slots.append(Slot(driver, common, rank))
        except BaseException:
            self.close()
            raise

    def take(self) -> Slot:
        """The next slot; waits until its last launch has ended."""
        slot = self._slots[self._next]
        self._next = (self._next + 1) % len(self._slots)
        self._driver.wait_for(slot.event)
        return slot

    def close(self) -> None:
        """Free all; nothing is under way."""
        while self._slots:
            self._slots.pop().close()
