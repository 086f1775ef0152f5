"""What a static exchange has on one rank: its heap, memory, launches, and how its calls end."""

from __future__ import annotations

import logging
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ..errors import DeadlineError, FastkernError, WaitRecord
from ..moe.static_shape import StaticShape
from ..planner import Topology
from ..wait_records import abort_epoch, abort_origin, wait_record
from .memory import SymmetricHeap
from .records import CONTROL, offset_of
from .shared_heap import SharedHeap
from .static_launches import StaticLaunches
from .static_memory import StaticHeap, StaticMemory
from .static_outcome import OUTCOME_BYTES, Refusals
from .static_planning import HostPlanning, make_planning
from .static_tables import DirectPlan
from .together import together
from .transfer import download, upload
from .virtual_errors import RECORD_WRITTEN, control_record
from .virtual_launch import CommonArgs
from .virtual_memory import host_view

if TYPE_CHECKING:
    from .device_runtime import DeviceRuntime

log = logging.getLogger("fastkern")

_ABORT = offset_of(CONTROL, "abort") // 8
_STATUS_BYTES = CONTROL.itemsize + OUTCOME_BYTES


class StaticSite:
    """Made by all ranks together; raises HeapMemoryError or FastkernError on all of them alike.

    heap: of this exchange and its siblings alone, so that its epochs are its own: those of replays,
    which no host counts, do not disturb the communicator's. beside: a site of the same shape whose
    heap is used. name: for messages.
    """

    def __init__(
        self,
        runtime: DeviceRuntime,
        shape: StaticShape,
        topology: Topology,
        chunk_bytes: int,
        num_blocks: int,
        beside: StaticSite | None = None,
    ) -> None:
        self.shape = shape
        self.name = runtime.statics.next_name()
        self._runtime = runtime
        self._topology = topology
        self._num_blocks = num_blocks
        self._refusals, self._logged = Refusals(shape), Refusals(shape)
        driver, group = runtime.driver, runtime.group
        direct = DirectPlan(shape, topology, chunk_bytes) if shape.planner == "device" else None
        needs = StaticHeap.of(shape, topology, direct)
        with ExitStack() as made:
            if beside is None:
                heap = SymmetricHeap(driver, group, needs.num_slots, 8, needs.data_bytes)
                self._shared = SharedHeap(heap, runtime.freed)
            else:
                self._shared = beside._shared
            made.callback(self._shared.join())

            def allocate() -> None:
                self._shared.allocate_entries(driver)
                self._status = driver.allocate_host(_STATUS_BYTES)
                made.callback(driver.free_host, self._status)
                self._words = host_view(self._status, _STATUS_BYTES).view(np.uint64)
                self._words[:] = 0
                self._event = driver.create_event()
                made.callback(driver.destroy_event, self._event)
                self._planning: list[HostPlanning] = []
                if direct is None:
                    planning = make_planning(driver, shape, topology, runtime.rank, chunk_bytes)
                    made.callback(planning.close)
                    self._planning.append(planning)
                self.memory = self._make_memory(needs, direct)
                made.callback(self.memory.close)

            together(group, "memory of a static exchange", allocate)
            self.launches = StaticLaunches(
                driver,
                runtime.kernels,
                shape,
                topology,
                [runtime.rank],
                self.memory,
                num_blocks,
                runtime.num_lanes,
                self._planning,
            )
            made.callback(self._drain)
            self._owned = made.pop_all()

    def _make_memory(self, needs: StaticHeap, direct: DirectPlan | None) -> StaticMemory:
        runtime = self._runtime
        common = CommonArgs(
            controls=self.heap.controls_table,
            flags=self.heap.flags_table,
            data=self.heap.data_table,
            progress_ns=runtime.progress_ns,
            num_blocks=self._num_blocks,
            traces=[],
            trace_capacity=0,
        )
        layouts = [planning.planner.layout for planning in self._planning]
        memory = StaticMemory(
            runtime.driver,
            self.shape,
            self._topology,
            [runtime.rank],
            common,
            needs,
            runtime.entry_ns,
            direct,
            layouts,
            self._shared.entries,
        )
        for at, planning in zip(memory.rank, self._planning, strict=False):  # none, or all
            upload(runtime.driver, at["planned"], planning.first())
        return memory

    @property
    def heap(self) -> SymmetricHeap:
        """The one that siblings share."""
        return self._shared.heap

    def begin(self) -> int:
        """The stream of a call, which comes after the calls before it."""
        stream = self._runtime.streams.current()
        if self._shared.last_event and not self._runtime.streams.capturing():
            self._runtime.driver.wait_event(stream, self._shared.last_event)
        return stream

    def end(self, stream: int) -> None:
        """What follows the kernels of a call: how they ended, for whoever looks."""
        driver = self._runtime.driver
        control = self.heap.control_address(self._runtime.rank)
        driver.copy(self._status, control, CONTROL.itemsize, stream)
        outcome = self.memory.rank[0]["outcome"]
        driver.copy(self._status + CONTROL.itemsize, outcome, OUTCOME_BYTES, stream)
        if not self._runtime.streams.capturing():
            driver.record(self._event, stream)
            self._shared.last_event = self._event

    def fill(self, tensor: torch.Tensor, value: int, stream: int) -> None:
        """Every byte, in stream order."""
        size = tensor.numel() * tensor.element_size()
        self._runtime.driver.fill(tensor.data_ptr(), value, size, stream)

    # -- failures ----------------------------------------------------------------------------------

    def _outcome(self) -> Any:
        return self._words[CONTROL.itemsize // 8 :]

    def check(self) -> None:
        """Raise ValueError for a call that has ended and moved nothing, once."""
        error = self._refusals.news(self._outcome())
        if error is not None:
            raise error
        for planning in self._planning:
            planning.check()

    def look(self) -> FastkernError | None:
        """What made a kernel give up, as far as the host's memory says."""
        if refusal := self._logged.news(self._outcome()):
            log.error("%s", refusal)
        for text in filter(None, (planning.news() for planning in self._planning)):
            log.error("static dispatch: %s; the call moved nothing", text)
        word = int(self._words[_ABORT])
        if not word:
            return None
        record = self.record()
        if record is not None:
            return DeadlineError(str(record), record)
        return DeadlineError(
            f"{self.name}: rank {abort_origin(word)} gave up waiting for other ranks, or left the "
            "call"
        )

    def record(self) -> WaitRecord | None:
        """What the kernel that gave up has left, as the device's memory says."""
        word = int(self._control_of(self._runtime.rank)["abort"])
        if not word:
            return None
        origin = abort_origin(word)
        fields = self._control_of(origin)["record"]
        if int(fields["state"]) != RECORD_WRITTEN:
            return None
        return wait_record(self.name, abort_epoch(word), origin, fields)

    def _control_of(self, rank: int) -> Any:
        address = self.heap.control_address(rank)
        raw = download(self._runtime.driver, address, CONTROL.itemsize)
        return control_record(np.frombuffer(raw, dtype=np.uint8))

    # -- end ---------------------------------------------------------------------------------------

    def _drain(self) -> None:
        if self._shared.last_event:
            self._runtime.driver.wait_for(self._shared.last_event)
            self._shared.last_event = 0  # which may be this exchange's

    def close(self) -> None:
        """Free all, once the calls have ended. Not collective."""
        self._owned.close()
