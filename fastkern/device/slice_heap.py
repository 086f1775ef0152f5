"""The heaps of all ranks of a virtual cluster, as slices of one process's memory on one device."""

from __future__ import annotations

from contextlib import ExitStack

import numpy as np

from ..kernels import _host
from .driver import Driver
from .transfer import download, fill, upload

_ALIGNMENT = 256
_GUARD = 0xE7  # no address, count or flag of ours repeats it


class SliceHeap:
    """Control and data of num_ranks ranks, and the pointer tables that all of them share.

    num_slots: flags per rank (`flag_slots`). record_bytes: payload of a rank's record. data_bytes:
    staging and window of each rank. guard_bytes: between slices and around them, filled with a
    pattern that `damaged_guards` looks for; 0: none. Control words are zero at first.

    Raises DriverError; then nothing is left allocated.
    """

    def __init__(
        self,
        driver: Driver,
        num_ranks: int,
        num_slots: int,
        record_bytes: int,
        data_bytes: int,
        guard_bytes: int = 0,
    ) -> None:
        self.num_ranks = num_ranks
        self.data_bytes = 0
        self.layout: dict[str, int] = _host.control_layout(num_ranks, num_slots, record_bytes)
        self._driver = driver
        self._guard_bytes = _round_up(guard_bytes)
        with ExitStack() as made:
            self._control = _Slices(driver, num_ranks, self.layout["bytes"], self._guard_bytes)
            made.callback(self._control.close)
            self._control.fill(0)
            self._tables = driver.allocate(3 * 8 * num_ranks, coherent=False)
            made.callback(driver.free, self._tables)
            self._data: _Slices | None = None
            made.callback(self._drop_data)
            self.grow(data_bytes)
            self._owned = made.pop_all()

    def grow(self, data_bytes: int) -> None:
        """Have data_bytes of data per rank, in place of what there was; control stays.

        No kernel that uses this heap may run. Raises DriverError; then there is no data, and a
        smaller size may be asked for.
        """
        self._drop_data()
        self._data = _Slices(self._driver, self.num_ranks, data_bytes, self._guard_bytes)
        rows = [self.control_address, self.flags_address, self.data_address]
        words = [[row(rank) for rank in range(self.num_ranks)] for row in rows]
        try:
            upload(self._driver, self._tables, np.array(words, dtype=np.uint64).tobytes())
        except BaseException:
            self._drop_data()
            raise
        self.data_bytes = data_bytes

    def close(self) -> None:
        """Free everything; no kernel that uses it may run. A second call does nothing."""
        self._owned.close()

    def control_address(self, rank: int) -> int:
        """Of a rank's Control and what follows it (`layout`)."""
        return self._control.address(rank)

    def flags_address(self, rank: int) -> int:
        """Of a rank's flags, num_slots words."""
        return self._control.address(rank) + self.layout["flags"]

    def data_address(self, rank: int) -> int:
        """Of a rank's data_bytes."""
        assert self._data is not None, "growth failed before"
        return self._data.address(rank)

    @property
    def controls_table(self) -> int:
        """Address, on the device, of the ranks' control addresses: [num_ranks] words."""
        return self._tables

    @property
    def flags_table(self) -> int:
        """Address, on the device, of the ranks' flags' addresses: [num_ranks] words."""
        return self._tables + 8 * self.num_ranks

    @property
    def data_table(self) -> int:
        """Address, on the device, of the ranks' data's addresses: [num_ranks] words."""
        return self._tables + 16 * self.num_ranks

    def damaged_guards(self) -> list[str]:
        """What was written outside of all slices: "data: byte 3 behind rank 1", and the like."""
        found = [f"control: {text}" for text in self._control.damaged_guards()]
        if self._data is not None:
            found += [f"data: {text}" for text in self._data.damaged_guards()]
        return found

    def _drop_data(self) -> None:
        if self._data is not None:
            self._data.close()
        self._data, self.data_bytes = None, 0


class _Slices:
    """num_slices of slice_bytes each in one allocation, guards before, between and behind them."""

    def __init__(self, driver: Driver, num_slices: int, slice_bytes: int, guard_bytes: int) -> None:
        self.driver = driver
        self.slice_bytes = slice_bytes
        self.num_slices = num_slices
        self.guard_bytes = guard_bytes
        # What rounding adds to a slice is part of the guard behind it.
        self.pitch_bytes = _round_up(max(slice_bytes, 1)) + guard_bytes
        self.num_bytes = guard_bytes + num_slices * self.pitch_bytes
        self.base = driver.allocate(self.num_bytes, coherent=True)
        if guard_bytes:
            try:
                fill(driver, self.base, _GUARD, self.num_bytes)
            except BaseException:
                driver.free(self.base)
                raise

    def address(self, index: int) -> int:
        return self.base + self.guard_bytes + index * self.pitch_bytes

    def fill(self, value: int) -> None:
        for k in range(self.num_slices):
            fill(self.driver, self.address(k), value, self.slice_bytes)

    def damaged_guards(self) -> list[str]:
        if not self.guard_bytes:
            return []
        guards = [("before rank 0", self.base, self.guard_bytes)]
        for k in range(self.num_slices):
            end = self.address(k) + self.slice_bytes
            guards.append((f"behind rank {k}", end, self.pitch_bytes - self.slice_bytes))
        found = []
        for text, address, num_bytes in guards:
            content = np.frombuffer(download(self.driver, address, num_bytes), dtype=np.uint8)
            found += [f"byte {k} {text}" for k in np.flatnonzero(content != _GUARD)[:1]]
        return found

    def close(self) -> None:
        self.driver.free(self.base)


def _round_up(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
