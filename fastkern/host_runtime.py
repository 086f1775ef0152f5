"""The host target's runtime: heap in POSIX shared memory, entry, growth, launches, deadlines."""

from __future__ import annotations

import errno
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar

import numpy as np

from . import bootstrap
from .errors import (
    DeadlineError,
    FastkernError,
    HeapMemoryError,
    PeerLostError,
    WaitRecord,
)
from .heap import ProcessIdentity, fresh_name, remove_leftovers
from .kernels import _host
from .planner import StageTable, Topology
from .planner.api import DEFAULT_CHUNK_SLOTS
from .planner.table import QUEUES, VALUE_BITS, flag_slots
from .records import Words, record_words
from .stats import CallStats
from .transports import Transport

log = logging.getLogger("fastkern")

T = TypeVar("T")

_SLICE_NS = 200_000_000  # between looks at whether the peers still live
_DATA_ROUND = 2 << 20


@dataclass(frozen=True)
class RuntimeOptions:
    """What a runtime is made with; see Communicator."""

    transport: Transport
    num_blocks: int
    buffer_bytes: int
    entry_timeout_s: float
    progress_timeout_s: float


class HostRuntime:
    """One rank's heap and calls. Calls and launches count from 1; all ranks count alike."""

    def __init__(
        self,
        group: Any,
        rank: int,
        topology: Topology,
        processes: Sequence[ProcessIdentity],
        options: RuntimeOptions,
    ) -> None:
        self.rank = rank
        self.num_ranks = topology.num_ranks
        self.epoch = 0  # of the last launch; calls in rounds launch more than once
        self.call = 0  # entered so far
        self.stats = CallStats(None)
        self.data_bytes = 0  # per rank
        self._processes = processes
        self._options = options
        self._generation = 0
        self._op = "all_to_all_single"  # of the last launch
        self._broken: Exception | None = None
        self._data: _host.SharedMemory | None = None
        self._record_words = record_words(self.num_ranks)
        self._progress_ns = int(min(options.progress_timeout_s * 1e9, 2.0**62))
        per_kib = 1024e3  # picoseconds per KiB at 1 GB/s
        shaped = options.transport.shaped
        self._launch_options = _host.LaunchOptions(
            num_blocks=options.num_blocks,
            transport=options.transport.name,
            scale_up_ps_per_kib=round(per_kib / options.transport.scale_up_GBps) if shaped else 0,
            scale_out_ps_per_kib=round(per_kib / options.transport.scale_out_GBps) if shaped else 0,
        )
        self._control = self._make_control(group, topology)
        self._host = _host.HostRank(
            rank, self.num_ranks, self._slots, self._record_words * 8, self._control
        )
        if options.buffer_bytes:
            try:
                self.reserve(options.buffer_bytes)
            except HeapMemoryError:
                raise
            except BaseException as error:
                self.fail(error)
                raise

    def _make_control(self, group: Any, topology: Topology) -> _host.SharedMemory:
        """Rank 0 makes the control segment, all map it, rank 0 removes its name."""
        self._slots = flag_slots(topology.servers, topology.gpus_per_server, DEFAULT_CHUNK_SLOTS)
        num_bytes = self.num_ranks * _host.control_bytes(
            self.num_ranks, self._slots, self._record_words * 8
        )
        segment: _host.SharedMemory | None = None
        name, error = "", ""
        if self.rank == 0:
            remove_leftovers()
            name = fresh_name()
            try:
                segment = _host.SharedMemory(name, num_bytes, create=True)
            except RuntimeError as failure:
                error = str(failure)
        try:
            name, error = bootstrap.gather((name, error), group)[0]
            if not error and self.rank != 0:
                try:
                    segment = _host.SharedMemory(name, num_bytes, create=False)
                except RuntimeError as failure:
                    error = str(failure)
            errors = bootstrap.gather(error, group)
        finally:
            if segment is not None:
                segment.unlink()
        for rank, text in enumerate(errors):
            if text:
                raise FastkernError(f"rank {rank} cannot map the heap's control part: {text}")
        assert segment is not None
        return segment

    # -- one call, step by step --------------------------------------------------------------------

    def exchange(self, record: Words, op: str) -> Words:
        """Enter the next call and return all ranks' records [R, words], as long as this one's."""
        self.check()
        self.call += 1
        self._host.post_record(self.call, record.view(np.uint8))
        try:
            self._await(
                lambda: self._host.await_records(self.call, _SLICE_NS),
                lambda: self._host.missing_records(self.call),
                op,
                "not entered by",
            )
        except BaseException as error:  # an interrupt, say: the others have our record, not us
            self.fail(error)
            raise
        records: Words = np.empty((self.num_ranks, len(record)), dtype=np.uint64)
        self._host.read_records(self.call, records.reshape(-1).view(np.uint8))
        return records

    def reserve(self, num_bytes: int) -> None:
        """Have at least this much staging and window per rank; all ranks ask for the same.

        Raises HeapMemoryError on every rank where there is not so much; smaller calls still work.
        """
        if num_bytes <= self.data_bytes:
            return
        wanted = -(-num_bytes // _DATA_ROUND) * _DATA_ROUND
        self._generation += 1
        generation = self._generation
        # All ranks have entered this call, so no kernel of an earlier one still uses the old heap:
        # all let go of it, then rank 0 makes the new one.
        self._data, self.data_bytes = None, 0
        self._host.acknowledge(2 * generation - 1)
        new: _host.SharedMemory | None = None
        if self.rank == 0:
            self._await_acks(2 * generation - 1)
            new = self._announce(generation, wanted)
        self._await(
            lambda: self._host.await_mailbox(generation, _SLICE_NS),
            lambda: [0],
            "growth of the heap",
            "no word from",
        )
        name, _, status = self._host.mailbox()
        if status:
            raise HeapMemoryError(
                f"cannot reserve {wanted} bytes of shared memory for each of {self.num_ranks} ranks"
            )
        if new is None:
            try:
                new = _host.SharedMemory(name, wanted * self.num_ranks, create=False)
            except RuntimeError as failure:
                text = f"rank {self.rank} cannot map the heap: {failure}"
                raise FastkernError(text) from failure
        self._host.map_data(new, wanted)
        self._host.acknowledge(2 * generation)
        if self.rank == 0:
            try:
                self._await_acks(2 * generation)
            finally:
                new.unlink()
        self._data, self.data_bytes = new, wanted

    def _await_acks(self, word: int) -> None:
        self._await(
            lambda: self._host.await_acks(word, _SLICE_NS),
            lambda: self._host.missing_acks(word),
            "growth of the heap",
            "not mapped by",
        )

    def _announce(self, generation: int, wanted: int) -> _host.SharedMemory | None:
        name = fresh_name()
        made: _host.SharedMemory | None = None
        if wanted * self.num_ranks < 1 << 62:
            try:
                made = _host.SharedMemory(name, wanted * self.num_ranks, create=True)
            except RuntimeError as failure:
                log.warning("growth of the heap: %s", failure)
        status = 0 if made is not None else errno.ENOMEM
        self._host.announce(generation, name, wanted if made is not None else 0, status)
        return made

    def launch(self, table: StageTable, input_address: int, output_address: int, op: str) -> None:
        """Run the kernel; raises DeadlineError when it was aborted."""
        self.epoch += 1
        self._op = op
        ended = self._host.launch(
            table.bytes,
            input_address,
            output_address,
            self.epoch,
            self._progress_ns,
            self._launch_options,
        )
        if not ended:
            self._raise_aborted(op, self.call)

    def launch_moe(self, table: StageTable, arguments: _host.MoeArgs, op: str) -> None:
        """Run the kernel of a dispatch or combine, as `launch`."""
        self.epoch += 1
        self._op = op
        ended = self._host.launch_moe(
            table.bytes, arguments, self.epoch, self._progress_ns, self._launch_options
        )
        if not ended:
            self._raise_aborted(op, self.call)

    def guarded(self, body: Callable[[], T]) -> T:
        """Errors that all ranks meet alike pass; any other means that this rank leaves alone."""
        try:
            return body()
        except (HeapMemoryError, ValueError):
            raise
        except BaseException as error:
            self.fail(error)
            raise

    # -- failures ----------------------------------------------------------------------------------

    def check(self) -> None:
        """Raise what broke this runtime, if anything did, here or at a peer."""
        if self._broken is not None:
            raise FastkernError(f"the communicator is broken: {self._broken}") from self._broken
        if self._host.abort_word():
            self._raise_aborted(self._op, self.call)

    def fail(self, error: BaseException) -> None:
        """This rank left a call midway: no rank can go on, so all are told."""
        if self._broken is None:
            self._broken = FastkernError(f"rank {self.rank} left a call: {error!r}")
            self._host.abort_all(self.epoch)

    def close(self) -> None:
        """Let go of the heap. Peers keep their own mappings."""
        self._broken = self._broken or FastkernError("closed")
        del self._host
        self._data = None
        del self._control

    def _break(self, error: Exception) -> NoReturn:
        self._broken = error
        raise error

    def _await(
        self, step: Callable[[], str], missing: Callable[[], Sequence[int]], op: str, what: str
    ) -> None:
        """Repeat a bounded wait until it is done, a peer is lost, or the entry deadline passes."""
        end = time.monotonic() + self._options.entry_timeout_s
        text = f"{op}, call {self.call}: {what} rank"
        while (outcome := step()) != "done":
            if outcome == "aborted":
                origin, record = self._abort_origin()
                if record is None and (ranks := tuple(missing())):
                    self._break_if_lost(ranks, text)
                    why = f"{text} {_listed(ranks)}; rank {origin} gave up waiting, or left"
                    self._break(DeadlineError(why, missing=ranks))
                # A peer's kernel that gave up was in the call before the one we wait to enter.
                self._raise_aborted(op, self.call - ("entered" in what))
            ranks = tuple(missing())
            if self._lost(ranks) and step() != "done":
                self._break_if_lost(ranks, text)
            if time.monotonic() > end:
                self._host.abort_all(self.epoch)
                limit = f"within {self._options.entry_timeout_s:g} s"
                self._break(DeadlineError(f"{text} {_listed(ranks)} {limit}", missing=ranks))

    def _lost(self, ranks: Sequence[int]) -> list[int]:
        return [r for r in ranks if not self._processes[r].alive()]

    def _break_if_lost(self, ranks: Sequence[int], text: str) -> None:
        if lost := self._lost(ranks):
            self._host.abort_all(self.epoch)
            self._break(PeerLostError(f"{text} {_listed(lost)}, whose process has ended"))

    def _abort_origin(self) -> tuple[int, dict[str, Any] | None]:
        """Who aborted, and the record of its kernel if it was that which gave up."""
        origin = (self._host.abort_word() & ((1 << VALUE_BITS) - 1)) - 1
        fields: dict[str, Any] = self._host.error(origin)
        return origin, fields if fields["written"] else None

    def _raise_aborted(self, op: str, call: int) -> NoReturn:
        origin, fields = self._abort_origin()
        if fields is not None:
            record = WaitRecord(
                op=op,
                call=call,
                rank=origin,
                peer=fields["peer"],
                item=(*QUEUES, "end of its puts")[fields["queue"]],
                stage=fields["stage"],
                chunk=fields["chunk"],
                expected=_call_and_value(fields["expected"]),
                seen=_call_and_value(fields["seen"]),
                waited_s=fields["waited_ns"] * 1e-9,
            )
            self._break(DeadlineError(str(record), record))
        self._break(
            DeadlineError(f"{op}: rank {origin} gave up waiting for other ranks, or left the call")
        )


def _call_and_value(flag: int) -> tuple[int, int]:
    return flag >> VALUE_BITS, flag & ((1 << VALUE_BITS) - 1)


def _listed(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))
