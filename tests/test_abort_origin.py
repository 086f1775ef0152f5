"""Ranks that give up at the same moment name one origin.

The moment itself is too short to be met by luck, so its middle is set up: another rank has reached
the home word, which is rank 0's, but has not told rank 1 yet. Rank 1, which then gives up, must
pass that word on and not its own.
"""

from __future__ import annotations

import ctypes

import numpy as np
import pytest

from fastkern.heap import fresh_name
from fastkern.kernels import _host
from fastkern.planner import Topology, plan
from fastkern.planner.api import DEFAULT_CHUNK_SLOTS
from fastkern.planner.table import VALUE_BITS, flag_slots

RECORD_BYTES = 8
OTHER_ORIGIN = 5 << VALUE_BITS | 3  # rank 2, epoch 5


class Two:
    """Rank 1 of two, alone on a heap of its own; rank 0 never comes."""

    def __init__(self) -> None:
        self.made = plan(np.full((2, 2), 5), Topology(2, 1), 8, "whole")
        self.table = self.made.table(1)
        slots = flag_slots(2, 1, DEFAULT_CHUNK_SLOTS)
        self.region_bytes = _host.control_bytes(2, slots, RECORD_BYTES)
        data_bytes = self.table.data_layout().bytes
        self.control = _host.SharedMemory(fresh_name(), 2 * self.region_bytes, create=True)
        self.data = _host.SharedMemory(fresh_name(), 2 * data_bytes, create=True)
        self.rank = _host.HostRank(1, 2, slots, RECORD_BYTES, self.control)
        self.rank.map_data(self.data, data_bytes)
        self.control.unlink()
        self.data.unlink()

    def abort_word(self, rank: int) -> ctypes.c_uint64:
        """The abort word of a rank: the first of its region."""
        return ctypes.c_uint64.from_address(self.control.address + rank * self.region_bytes)

    def give_up_in_the_kernel(self) -> None:
        source, out = np.zeros(80, np.uint8), np.zeros(80, np.uint8)
        ended = self.rank.launch(
            self.table.bytes,
            source.ctypes.data,
            out.ctypes.data,
            1,
            20_000_000,
            _host.LaunchOptions(),
        )
        assert not ended
        assert self.rank.error(1)["written"], "no record of the wait that ran out"

    def give_up_on_the_host(self) -> None:
        self.rank.abort_all(1)


@pytest.mark.parametrize("where", ["kernel", "host"])
@pytest.mark.parametrize("home", [0, OTHER_ORIGIN], ids=["first", "second"])
def test_the_first_to_reach_the_home_word_is_the_origin(where: str, home: int) -> None:
    two = Two()
    two.abort_word(0).value = home
    if where == "kernel":
        two.give_up_in_the_kernel()
    else:
        two.give_up_on_the_host()
    expected = home or (1 << VALUE_BITS | 2)  # rank 1, epoch 1
    assert two.abort_word(0).value == expected
    assert two.rank.abort_word() == expected
