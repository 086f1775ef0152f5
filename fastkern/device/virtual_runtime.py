"""What the calls of a virtual cluster share: memory of all ranks, kernels, launches, their end."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from ..errors import FastkernError
from ..planner import Policy, StageTable, Topology
from ..planner.api import DEFAULT_CHUNK_BYTES, DEFAULT_CHUNK_SLOTS
from ..planner.table import flag_slots
from ..tuning.choose import MOST_LANES, TILE_BYTES_BY_DEFAULT, default_lanes
from .driver import Driver, DriverError
from .memory import SliceHeap
from .records import CONTROL, TRACE_EVENT
from .virtual_errors import control_record, launch_error
from .virtual_kernels import PERSISTENT, Kernels, Load, default_load
from .virtual_launch import CommonArgs, PreparedLaunch, epoch_after
from .virtual_memory import Allocations, Copier

T = TypeVar("T")


@dataclass(frozen=True)
class VirtualOptions:
    """How a virtual cluster plans and runs.

    policy, chunk_bytes: of plans. progress_timeout_s: how long a launch may stand still.
    trace_events: kept of each rank's launch, 0 for none. fill_byte: what staging and outputs hold
    before every call, to find what was not written; None: whatever there is. guard_bytes: between
    ranks' slices and behind each tensor, checked after every call. tile_bytes: that a block of a
    kernel in Triton moves at a time.
    """

    policy: Policy = "auto"
    chunk_bytes: int = DEFAULT_CHUNK_BYTES
    progress_timeout_s: float = 30.0
    trace_events: int = 0
    fill_byte: int | None = None
    guard_bytes: int = 0
    tile_bytes: int = TILE_BYTES_BY_DEFAULT


class VirtualRuntime:
    """The ranks' memory, the kernels and the stream; see VirtualCluster for the arguments."""

    def __init__(
        self,
        driver: Driver,
        topology: Topology,
        num_blocks: int = 1,
        num_lanes: int | None = None,
        load: Load | None = None,
        options: VirtualOptions = VirtualOptions(),
    ) -> None:
        if num_blocks < 1:
            raise ValueError(f"num_blocks must be at least 1, not {num_blocks}")
        if driver.kernels == "triton" and driver.target == "host" and topology.num_ranks > 1:
            raise ValueError(
                f"{topology.num_ranks} ranks on Triton's interpreter: it runs one block after the "
                "other, and those of different ranks wait for one another; a virtual cluster of "
                "one rank works there, and a communicator with backend triton, whose ranks are "
                "processes"
            )
        properties = driver.properties()
        most_lanes = min(MOST_LANES[driver.kernels], properties.most_lanes)
        self.num_lanes = default_lanes(driver.kernels, properties)
        if num_lanes is not None:
            self.num_lanes = num_lanes
        if not 1 <= self.num_lanes <= most_lanes:
            raise ValueError(f"num_lanes must be 1 to {most_lanes}, not {num_lanes}")
        self.driver = driver
        self.topology = topology
        self.num_ranks = self.launched_ranks = topology.num_ranks
        self.options = options
        self.epoch = 0  # calls completed
        self._broken: Exception | None = None
        with ExitStack() as made:
            self.stream = driver.create_stream()
            made.callback(driver.destroy_stream, self.stream)
            self.copier = Copier(driver, self.stream)
            made.callback(self.copier.close)
            images = load or default_load(driver, tile_bytes=options.tile_bytes)
            self.kernels = Kernels(driver, images, self.num_ranks, num_blocks)
            made.callback(self.kernels.close)
            slots = flag_slots(topology.servers, topology.gpus_per_server, DEFAULT_CHUNK_SLOTS)
            guard = options.guard_bytes
            self.heap = SliceHeap(driver, self.num_ranks, slots, 8, 1 << 20, guard)
            made.callback(self.heap.close)
            self._traces = Allocations(self.copier)
            made.callback(self._traces.close)
            self._num_blocks = num_blocks
            self._trace_places = self._make_traces()
            self._common = self.common_args(self.heap)
            self._owned = made.pop_all()

    def common_args(self, heap: SliceHeap) -> CommonArgs:
        """What launches on a heap of all ranks say alike."""
        return CommonArgs(
            controls=heap.controls_table,
            flags=heap.flags_table,
            data=heap.data_table,
            progress_ns=int(min(self.options.progress_timeout_s * 1e9, 2.0**62)),
            num_blocks=self._num_blocks,
            traces=self._trace_places,
            trace_capacity=self.options.trace_events,
        )

    def break_off(self, error: Exception) -> None:
        """No call is possible any more, because of this error."""
        self._broken = error

    def _make_traces(self) -> list[tuple[int, int]]:
        num_events = self.options.trace_events
        if not num_events:
            return []
        size = num_events * TRACE_EVENT.itemsize
        made = self._traces
        return [(made.empty(size, "trace"), made.empty(8, "count")) for _ in range(self.num_ranks)]

    def __enter__(self: T) -> T:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Free everything of the cluster's own; handles and prepared calls before it."""
        self._broken = self._broken or FastkernError("it was closed")
        self._owned.close()

    # -- launches ----------------------------------------------------------------------------------

    def prepare(
        self, kernel: str, tables: Sequence[StageTable], room_bytes: int = 0
    ) -> PreparedLaunch:
        """Tables and arguments for a launch of `kernel`; close it when done."""
        self.check()
        self.kernels.get(kernel, self.num_lanes)
        self.reserve(tables)
        return PreparedLaunch(self.driver, kernel, self._common, tables, room_bytes)

    def reserve(self, tables: Sequence[StageTable]) -> None:
        """Have the staging that the tables need; captured launches find it too."""
        need = max(1, tables[0].data_layout().bytes)
        if need > self.heap.data_bytes:
            self.driver.synchronize(self.stream)
            self.heap.grow(need)

    def poison(self) -> None:
        """Put into the stream what a launch is preceded by: fills of staging, traces forgotten."""
        if self.options.fill_byte is not None:
            for rank in range(self.num_ranks):
                address, size = self.heap.data_address(rank), self.heap.data_bytes
                self.driver.fill(address, self.options.fill_byte, size, self.stream)
        for _, count in self._common.traces:
            self.driver.fill(count, 0, 8, self.stream)

    def enqueue(self, launch: PreparedLaunch) -> None:
        """Put a launch into the stream."""
        function = self.kernels.get(launch.kernel, self.num_lanes)
        launch.enqueue(function, self.num_lanes, self.stream, self.launched_ranks)

    def run(self, launch: PreparedLaunch, op: str) -> None:
        """Launch, and wait for the end."""
        self.check()
        self.poison()
        self.enqueue(launch)
        self.finish(op, epoch_after(launch.args[0], self.epoch))

    def finish(self, op: str, epoch: int) -> None:
        """Wait for what is in the stream; every rank must have completed call `epoch`.

        Raises DeadlineError with what a rank waited for, or FastkernError.
        """
        try:
            controls = self.controls()
        except DriverError as error:
            self._broken = error
            raise
        found = launch_error(controls, op, epoch)
        if found is None and self.options.guard_bytes and (where := self.heap.damaged_guards()):
            found = FastkernError(f"{op}: the kernel wrote outside of its memory: {where}")
        if found is not None:
            self._broken = found
            raise found
        self.epoch = epoch

    # -- state -------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raise FastkernError when the cluster is closed, or broken by an earlier call."""
        if self._broken is not None:
            text = f"the virtual cluster is of no more use: {self._broken}"
            raise FastkernError(text) from self._broken

    def controls(self) -> list[Any]:
        """Every rank's Control record, once the stream has ended."""
        size = CONTROL.itemsize
        addresses = map(self.heap.control_address, range(self.num_ranks))
        return [control_record(self.copier.read(address, size)) for address in addresses]

    def abort_words(self) -> list[int]:
        """Every rank's abort word: 0, or the call and the rank that gave up."""
        return [int(control["abort"]) for control in self.controls()]

    def traces(self) -> list[npt.NDArray[Any]]:
        """Per rank the events of the last launch (TraceEvent), at most trace_events of them."""
        found = []
        for events, count in self._common.traces:
            num = int(self.copier.read(count, 8).view(np.uint64)[0])
            kept = min(num, self.options.trace_events) * TRACE_EVENT.itemsize
            found.append(self.copier.read(events, kept).view(TRACE_EVENT))
        return found

    def allocations(self, poisoned: bool = False) -> Allocations:
        """Device memory for a call. poisoned: filled with the options' fill_byte at first."""
        fill = self.options.fill_byte if poisoned else None
        return Allocations(self.copier, fill, self.options.guard_bytes)

    @property
    def most_blocks(self) -> int:
        """Blocks per rank that the device holds at once, of the kernel that needs most room."""
        kernels = PERSISTENT
        return min(self.kernels.most_blocks(kernel, self.num_lanes) for kernel in kernels)
