"""One prepared launch: tables and arguments of all ranks that are here in one block.

The block lies in pinned memory and, at the same offsets, in device memory:
KernelArgs[R] | MoeArgs[R] | table of rank 0 | table of rank 1 | ..., tables from multiples of 256
bytes on. One copy brings it over, in stream order before the kernel.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..planner import StageTable
from .driver import Driver
from .records import KERNEL_ARGS, LAUNCH_ARGS, MOE_ARGS, new_record
from .virtual_memory import host_view

_ALIGNMENT = 256


def _round_up(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


@dataclass(frozen=True)
class CommonArgs:
    """What KernelArgs say alike in every launch of a cluster; addresses are the device's.

    num_blocks: of each rank, unless a launch says otherwise. network: NetworkArgs of a transport
    between servers, or 0. traces: per rank (events, count) addresses, empty without traces.
    """

    controls: int
    flags: int
    data: int
    progress_ns: int
    num_blocks: int
    traces: Sequence[tuple[int, int]]
    trace_capacity: int
    network: int = 0


class PreparedLaunch:
    """Tables, arguments and the kernel that reads them; may be launched any number of times.

    kernel: its name. args, moe: [R] records in the pinned block, to be changed between launches.
    room_bytes: for each rank's table; by default as much as it has. first_rank: the ranks are those
    from here on, and so many as there are tables: one in a process with a device of its own.
    """

    def __init__(
        self,
        driver: Driver,
        kernel: str,
        common: CommonArgs,
        tables: Sequence[StageTable],
        room_bytes: int = 0,
        first_rank: int = 0,
    ) -> None:
        self.kernel = kernel
        self.num_ranks = len(tables)
        self._driver = driver
        self._common = common
        self._num_blocks = common.num_blocks
        self._room = [max(room_bytes, len(table.bytes)) for table in tables]
        args_bytes = self.num_ranks * KERNEL_ARGS.itemsize
        moe_bytes = self.num_ranks * MOE_ARGS.itemsize
        at = _round_up(args_bytes + moe_bytes)
        self._places = []
        for room in self._room:
            self._places.append(at)
            at += _round_up(room)
        self.num_bytes = at
        with ExitStack() as made:
            self._pinned = driver.allocate_host(at)
            made.callback(driver.free_host, self._pinned)
            self.address = driver.allocate(at, coherent=False)
            made.callback(driver.free, self.address)
            self._owned = made.pop_all()
        self._view = host_view(self._pinned, at)
        self._view[:] = 0
        self.args: Any = self._view[:args_bytes].view(KERNEL_ARGS)
        self.moe: Any = self._view[args_bytes : args_bytes + moe_bytes].view(MOE_ARGS)
        for rank in range(self.num_ranks):
            self.args[rank] = self._args_of(rank, args_bytes, first_rank)
        self.set_tables(tables)

    def _args_of(self, rank: int, moe_at: int, first_rank: int) -> Any:
        common = self._common
        record = new_record(
            KERNEL_ARGS,
            table=self.address + self._places[rank],
            controls=common.controls,
            flags=common.flags,
            data=common.data,
            network=common.network,
            moe=self.address + moe_at + rank * MOE_ARGS.itemsize,
            progress_ns=common.progress_ns,
            num_blocks=common.num_blocks,
            rank=first_rank + rank,
        )
        if common.traces:
            record["trace"], record["trace_count"] = common.traces[rank]
            record["trace_capacity"] = common.trace_capacity
        return record

    def set_tables(self, tables: Sequence[StageTable]) -> None:
        """Write other tables over those of before; none may be on its way.

        Raises ValueError where one is larger than its room.
        """
        for rank, (table, room) in enumerate(zip(tables, self._room, strict=True)):
            if len(table.bytes) > room:
                raise ValueError(
                    f"the table of rank {rank} has {len(table.bytes)} bytes, its room is {room}"
                )
        for place, table in zip(self._places, tables, strict=True):
            self._view[place : place + len(table.bytes)] = table.bytes

    def set_num_blocks(self, num_blocks: int) -> None:
        """Blocks of each rank from the next launch on: as many as fit, see Kernels, or fewer."""
        self._num_blocks = num_blocks
        self.args["num_blocks"] = num_blocks

    def set_trace(self, events: int, count: int, capacity: int) -> None:
        """Where each rank's events go from the next launch on: addresses, zeros for nowhere."""
        self.args["trace"], self.args["trace_count"] = events, count
        self.args["trace_capacity"] = capacity

    def enqueue(self, function: Any, num_lanes: int, stream: int, num_ranks: int) -> None:
        """Bring the block over and start the blocks of the first num_ranks ranks."""
        self.enqueue_upload(stream)
        self.enqueue_kernel(function, num_lanes, stream, num_ranks)

    def enqueue_upload(self, stream: int) -> None:
        """The copy alone."""
        self._driver.copy(self.address, self._pinned, self.num_bytes, stream)

    def enqueue_kernel(self, function: Any, num_lanes: int, stream: int, num_ranks: int) -> None:
        """The kernel alone, on what was brought over before."""
        blocks = self._num_blocks
        launch = new_record(
            LAUNCH_ARGS, ranks=self.address, num_ranks=num_ranks, blocks_per_rank=blocks
        )
        self._driver.launch(function, num_ranks * blocks, num_lanes, stream, launch.tobytes())

    def close(self) -> None:
        """Free the block; no launch of it may be under way. A second call does nothing."""
        self._owned.close()


def epoch_after(args: Any, epoch: int) -> int:
    """The epoch that a rank has completed after a launch with these arguments, `epoch` before."""
    return int(args["epoch"]) or epoch + 1


def copied_args(target: PreparedLaunch, source: PreparedLaunch) -> None:
    """Have a launch with other tables read and write what `source` does."""
    for name in ("input", "output"):
        target.args[name] = source.args[name]
    target.moe[:] = source.moe


def table_bytes(tables: Sequence[StageTable]) -> int:
    """Bytes of the largest table."""
    return max(len(np.asarray(table.bytes)) for table in tables)
