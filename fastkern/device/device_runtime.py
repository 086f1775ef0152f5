"""The runtime of one rank on a device: its heap, launches into the caller's stream, deadlines.

Ranks meet on the host (Entry), without the device; then each launches one kernel and goes on. What
became of a launch is read later: its stream ends with a copy of the rank's control words to the
host. Launches follow one another on the device, in whichever streams they are, since they share the
heap.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, TypeVar

import numpy as np

from ..entry import Entry
from ..errors import DeadlineError, FastkernError, WaitRecord
from ..heap import ProcessIdentity
from ..moe.static_shape import StaticShape
from ..planner import StageTable, Topology
from ..planner.table import VALUE_BITS
from ..records import Words
from ..runtime import RuntimeOptions
from ..stats import CallStats
from ..turns import Fork, Turns
from ..wait_records import abort_epoch, abort_origin, wait_record
from .backend import DeviceBackend
from .device_parts import make_parts
from .driver import DriverError
from .launch_ring import LaunchRing, Slot
from .moe_record import MoeRecord
from .records import CONTROL
from .static_exchange import StaticExchange
from .static_registry import StaticRegistry
from .stop_kernels import KernelStopper
from .together import logged
from .trace_buffer import TraceBuffer
from .transfer import download
from .virtual_errors import RECORD_WRITTEN, control_record
from .virtual_kernels import ENTRY_OF
from .virtual_launch import CommonArgs, PreparedLaunch
from .watchdog import Watchdog

log = logging.getLogger("fastkern")

T = TypeVar("T")


class DeviceRuntime:
    """One rank's heap and launches; see Runtime. group: used to begin with; later ranks meet in
    Entry. backend: belongs to the runtime, which closes it."""

    def __init__(
        self,
        group: Any,
        rank: int,
        topology: Topology,
        processes: Sequence[ProcessIdentity],
        hosts: Sequence[str],
        options: RuntimeOptions,
        backend: DeviceBackend,
    ) -> None:
        self.rank = rank
        self.num_ranks = topology.num_ranks
        self.streams = backend.streams
        self.device = backend.streams.device
        self.stats = CallStats(None)
        self.driver = backend.driver
        self.num_blocks = options.num_blocks
        self.num_lanes = options.num_lanes
        self._lock = threading.RLock()
        self._launched: deque[Slot] = deque()  # not yet looked at
        self._last: Slot | None = None
        self._calls: deque[tuple[int, str, int]] = deque(maxlen=64)  # epoch, op, call
        self._ended = False
        self.statics = StaticRegistry(self, self._lock)
        self.freed = backend.keep_open_unless
        self.progress_ns = int(min(options.progress_timeout_s * 1e9, 2.0**62))
        self.entry_ns = int(min(options.entry_timeout_s * 1e9, 2.0**62))
        with ExitStack() as made:
            made.callback(backend.close)
            parts = make_parts(
                made,
                backend,
                group,
                rank,
                topology,
                processes,
                hosts,
                options,
                self.num_blocks,
                self.num_lanes,
            )
            self.kernels, self._entry, self._heap = parts.kernels, parts.entry, parts.heap
            self._entry.find_record, self._entry.stop_kernels = self._find_record, self._stop
            common = CommonArgs(
                controls=self._heap.controls_table,
                flags=self._heap.flags_table,
                data=self._heap.data_table,
                progress_ns=self.progress_ns,
                num_blocks=self.num_blocks,
                traces=[],
                trace_capacity=0,
                network=parts.network_args,
            )
            self._stopper = KernelStopper(self.driver)
            made.callback(self._stopper.close)
            self._ring = LaunchRing(self.driver, common, rank)
            made.callback(self._ring.close)
            self._trace = TraceBuffer(self.driver, self._drain)
            made.callback(self._trace.close)
            self.tracing = self._trace.tracing()
            self._watchdog = Watchdog(self, options.progress_timeout_s, f"fastkern-watchdog-{rank}")
            self._owned = made.pop_all()

    @property
    def call(self) -> int:
        """Calls entered so far."""
        return self._entry.call

    @property
    def epoch(self) -> int:
        """Launches so far."""
        return self._entry.epoch

    @property
    def data_bytes(self) -> int:
        """Staging and window per rank."""
        return self._heap.data_bytes

    @property
    def group(self) -> Entry:
        """Through which ranks meet, in a call that all have entered."""
        return self._entry

    def load_static(self) -> None:
        """See Runtime."""
        for name, entry in ENTRY_OF.items():
            if entry == "static":
                self.kernels.get(name, self.num_lanes)

    def make_static(
        self,
        shape: StaticShape,
        topology: Topology,
        turns: Turns,
        chunk_bytes: int,
        num_blocks: int,
    ) -> StaticExchange:
        """See Runtime."""
        return self.statics.make(shape, topology, turns, chunk_bytes, num_blocks)

    # -- one call, step by step --------------------------------------------------------------------

    def exchange(self, record: Words, op: str) -> Words:
        """Enter the next call; the device is not waited for."""
        self.streams.check_eager()
        self.check()
        records = self._entry.exchange(record, op)
        self._entry.op = op
        return records

    def reserve(self, num_bytes: int) -> None:
        """Have at least this much staging and window per rank."""
        if num_bytes <= self._heap.data_bytes:
            return
        self._drain()
        self.check()
        self._heap.grow(num_bytes)

    def launch(
        self,
        table: StageTable,
        input_address: int,
        output_address: int,
        op: str,
        num_blocks: int | None = None,
    ) -> None:
        """Start the kernel of an all-to-all."""

        def bind(block: PreparedLaunch) -> None:
            block.args["input"], block.args["output"] = input_address, output_address

        self._launch("fastkern_exchange", table, bind, op, num_blocks)

    def launch_moe(
        self, table: StageTable, arguments: Any, op: str, num_blocks: int | None = None
    ) -> None:
        """Start the kernel of a dispatch or combine. arguments: MoeRecord."""
        given: MoeRecord = arguments

        def bind(block: PreparedLaunch) -> None:
            block.moe[0] = given.record

        self._launch(given.kernel, table, bind, op, num_blocks)

    def _launch(
        self,
        kernel: str,
        table: StageTable,
        bind: Callable[[PreparedLaunch], None],
        op: str,
        num_blocks: int | None,
    ) -> None:
        entry, stream = self._entry, self.streams.current()
        function = self.kernels.get(kernel, self.num_lanes)
        slot = self._ring.take()
        self.check()
        with self._lock:
            entry.epoch += 1
            slot.op, slot.call, slot.epoch = op, entry.call, entry.epoch
            block = slot.prepare(table)
            blocks = num_blocks or self.num_blocks
            block.set_num_blocks(blocks)
            block.set_trace(*self._trace.addresses)
            self.tracing.note(slot.epoch, op, slot.call, blocks)
            bind(block)
            if self._last is not None:
                self.driver.wait_event(stream, self._last.event)
            block.enqueue(function, self.num_lanes, stream, 1)
            slot.finish(self._heap.control_address(self.rank), stream)
            self._last = slot
            self._calls.append((slot.epoch, op, slot.call))
            self._launched.append(slot)
        if self.streams.settle():
            self.check()

    def guarded(self, body: Callable[[], T]) -> T:
        """See Entry."""
        return self._entry.guarded(body)

    def fork(self, own_lane: bool) -> Fork:
        """For a call that runs on a queue's thread."""
        return _LookingFork(self, self.streams.fork(own_lane))

    def check_if_open(self) -> None:
        """As `check`, but a closed communicator's results may still be fetched."""
        if not self._ended:
            self.check()

    # -- failures ----------------------------------------------------------------------------------

    def check(self) -> None:
        """Raise what broke the communicator, as far as launches have ended; never waits."""
        self.look()
        error = self._found(self._ask_driver)
        if error is not None:
            self._entry.found(error)
        self._entry.check()

    def fail(self, error: BaseException) -> None:
        """This rank left a call midway: no rank can go on, so all are told."""
        self._entry.fail(error)

    def look(self) -> Exception | None:
        """Look at the launches that have ended; what went wrong, if it is news.

        Goes by what they have written to the host: asking the driver for events while a thread
        captures a graph might break the capture.
        """
        with self._lock:
            while self._launched and not self._ended:
                slot = self._launched[0]
                if not slot.ended():
                    break
                error = self._found(partial(self._outcome, slot))
                self._launched.popleft()
                if error is not None and self._entry.found(error):
                    return error
            for look in self.statics.looks():
                error = self._found(look)
                if error is not None and self._entry.found(error):
                    return error
            return None

    def watch(self) -> Exception | None:
        """As `look`. No host waits for the kernels of static exchanges, so here it is seen when a
        rank that they wait for has died."""
        error = self.look()
        if error is not None or not self.statics:
            return error
        lost, error = self._entry.lost_peers()
        if error is None or not self._entry.found(error):
            return None
        self._stop(lost)
        return error

    @staticmethod
    def _found(look: Callable[[], FastkernError | None]) -> FastkernError | None:
        try:
            return look()
        except DriverError as failure:
            return failure

    def _ask_driver(self) -> None:
        """Raise what the device itself has failed with, say an access out of bounds."""
        with self._lock:
            if self._launched and not self._ended and not self.streams.capturing():
                self.driver.event_done(self._launched[0].event)

    def _outcome(self, slot: Slot) -> FastkernError | None:
        status = slot.status()
        if word := int(status["abort"]):
            record = self._record_of(word, slot.op, slot.call)
            if record is not None:
                return DeadlineError(str(record), record)
            origin = abort_origin(word)
            return DeadlineError(
                f"{slot.op}, call {slot.call}: rank {origin} gave up waiting for other ranks, or "
                "left the call"
            )
        if (completed := int(status["epoch"])) != slot.epoch:
            return FastkernError(
                f"{slot.op}, call {slot.call}: launch {completed} is the last that has completed "
                f"on rank {self.rank}, not {slot.epoch}: its blocks left without a word"
            )
        return None

    def _find_record(self, op: str, call: int) -> WaitRecord | None:
        """The record of the kernel that gave up, if one did. The device says which: the host's word
        may be of a rank that only found out."""
        try:
            word = int(self._control_of(self.rank)["abort"])
            if word:
                return self._record_of(word, op, call)
            return self.statics.record()
        except DriverError as error:
            log.warning("reading the control words: %s", error)
            return None

    def _record_of(self, word: int, op: str, call: int) -> WaitRecord | None:
        """What the rank that wrote an abort word has left, as mapped here."""
        origin = abort_origin(word)
        if not self._heap.control_address(origin):  # on another server: nothing is read from there
            return None
        fields = self._control_of(origin)["record"]
        if int(fields["state"]) != RECORD_WRITTEN:
            return None
        for epoch, known_op, known_call in self._calls:
            if epoch == abort_epoch(word):
                op, call = known_op, known_call
        return wait_record(op, call, origin, fields)

    def _control_of(self, rank: int) -> Any:
        raw = download(self.driver, self._heap.control_address(rank), CONTROL.itemsize)
        return control_record(np.frombuffer(raw, dtype=np.uint8))

    def _stop(self, lost: Sequence[int] = ()) -> None:
        """Tell the kernels of all ranks that this one has left, unless a kernel has given up. lost:
        ranks that are no more."""
        word = self.epoch << VALUE_BITS | self.rank + 1
        for heap in (self._heap, *self.statics.heaps()):
            all_of_them = (heap.control_address(r) for r in range(self.num_ranks) if r not in lost)
            reachable = filter(None, all_of_them)  # kernels tell other servers
            try:
                self._stopper.stop(heap.control_address(self.rank), reachable, word)
            except DriverError as error:
                log.warning("telling the other ranks' kernels: %s", error)

    # -- end ---------------------------------------------------------------------------------------

    def _drain(self) -> None:
        """Wait for the last launch, and so for all."""
        if self._last is not None:
            self.driver.wait_for(self._last.event)

    def close(self) -> None:
        """Wait for what was launched, then let go of the heap. Not collective."""
        self._watchdog.stop()
        self.statics.close()
        logged("closing", self._drain)
        logged("the end of a trace", self.tracing.close)
        self.look()
        with self._lock:
            self._ended = True
        self._owned.close()


class _LookingFork:
    """Whoever waits for a queued call learns what went wrong on the device so far."""

    def __init__(self, runtime: DeviceRuntime, fork: Fork) -> None:
        self._runtime = runtime
        self._fork = fork

    def run(self, body: Callable[[], T]) -> T:
        return self._fork.run(body)

    def join(self, result: object) -> None:
        self._runtime.check_if_open()
        self._fork.join(result)
