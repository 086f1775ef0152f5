"""What the tests of memory share: sizes, a driver that fails, a check of the pointer tables."""

from __future__ import annotations

from typing import Any

import numpy as np

from fastkern.device.driver import DeviceMemoryError, DriverError
from fastkern.device.host_driver import HostDriver
from fastkern.device.memory import SliceHeap, SymmetricHeap
from fastkern.device.transfer import download

SLOTS, RECORD_BYTES, DATA_BYTES = 96, 256, 5000
ROUNDED = 2 << 20


def words(driver: HostDriver, address: int, count: int) -> list[int]:
    return [int(word) for word in np.frombuffer(download(driver, address, 8 * count), np.uint64)]


def check_tables(driver: HostDriver, heap: SliceHeap | SymmetricHeap) -> None:
    ranks = range(heap.num_ranks)
    for table, address in [
        (heap.controls_table, heap.control_address),
        (heap.flags_table, heap.flags_address),
        (heap.data_table, heap.data_address),
    ]:
        assert words(driver, table, heap.num_ranks) == [address(rank) for rank in ranks]


class FailingDriver(HostDriver):
    """Fails at the n-th call of one operation, from 1; 0: never."""

    def __init__(self, operation: str, at: int, memory: bool = False) -> None:
        super().__init__()
        self.calls = 0
        real = getattr(self, operation)

        def failing(*args: Any, **kwargs: Any) -> Any:
            self.calls += 1
            if self.calls == at:
                kind = DeviceMemoryError if memory else DriverError
                raise kind(operation, "as wished", f"call {at}")
            return real(*args, **kwargs)

        setattr(self, operation, failing)
