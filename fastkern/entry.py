"""Where the ranks of a host meet: they enter calls, and learn who has given up or died.

A segment of POSIX shared memory holds a record of each rank (records.py), an abort word and the
words of the heap's growth. Nothing here needs a device, or waits for one: kernels that move the
rows may run on the host or on GPUs. Where ranks are on several hosts, each host has a segment with
room for all ranks, and a HostLink brings the words of the others there.
"""

from __future__ import annotations

import logging
import pickle
import time
from collections.abc import Callable, Sequence
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
from .host_link import Carrier, HostLink
from .kernels import _host
from .records import Words, record_words
from .wait_records import abort_origin, wait_record

log = logging.getLogger("fastkern")

T = TypeVar("T")

_SLICE_NS = 200_000_000  # between looks at whether the peers still live
_PAGE_WORDS = 1000  # of a gathered value


class Entry:
    """One rank's side. Calls count from 1; all ranks count alike.

    processes: of each rank. timeout_s: the entry deadline. num_slots: flags of each rank, for
    kernels on the host. link: to the ranks of other hosts, where there are any; a rank that dies
    there is missed at the deadline, and one that is missing there stands for all of its host.

    call: entered so far. epoch: of the last launch, which the runtime counts: calls in rounds
    launch more than once. op: of the last launch. host: the segment's words, of kernels on the host
    too. For kernels on devices: find_record: the record of one that gave up, for an operation and a
    call. stop_kernels: tells all ranks' kernels that this rank has left.
    """

    def __init__(
        self,
        group: Any,
        rank: int,
        num_ranks: int,
        processes: Sequence[ProcessIdentity],
        timeout_s: float,
        num_slots: int = 1,
        link: HostLink | None = None,
    ) -> None:
        self.rank = rank
        self.num_ranks = num_ranks
        self.call = 0
        self._meetings = 0  # calls, and what else is exchanged in between
        self.epoch = 0
        self.op = "all_to_all_single"
        self.find_record: Callable[[str, int], WaitRecord | None] | None = None
        self.stop_kernels: Callable[[], None] | None = None
        self._processes = processes
        self._timeout_s = timeout_s
        self._found: Exception | None = None  # and raised to nobody yet
        self._broken: Exception | None = None
        self.link = link
        self._local = list(range(num_ranks)) if link is None else link.local_ranks
        self._control = self._make_control(group, num_slots)
        self._num_slots = num_slots
        self.host = self._host_rank(rank)
        self._carrier: Carrier | None = None
        if link is not None and link.leads:
            self._carrier = Carrier(link, self.host, self._host_rank)

    def _host_rank(self, rank: int) -> _host.HostRank:
        """The side of a rank in this host's segment, be it here or elsewhere."""
        record_bytes = record_words(self.num_ranks) * 8
        return _host.HostRank(rank, self.num_ranks, self._num_slots, record_bytes, self._control)

    def _make_control(self, group: Any, num_slots: int) -> _host.SharedMemory:
        """A host's first rank makes the control segment, all there map it, it removes the name."""
        first = self._local[0]
        num_bytes = self.num_ranks * _host.control_bytes(
            self.num_ranks, num_slots, record_words(self.num_ranks) * 8
        )
        segment: _host.SharedMemory | None = None
        name, error = "", ""
        if self.rank == first:
            remove_leftovers()
            name = fresh_name()
            try:
                segment = _host.SharedMemory(name, num_bytes, create=True)
            except RuntimeError as failure:
                error = str(failure)
        try:
            name, error = bootstrap.gather((name, error), group)[first]
            if not error and self.rank != first:
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

    # -- meeting -----------------------------------------------------------------------------------

    def exchange(self, record: Words, op: str) -> Words:
        """Enter the next call and return all ranks' records [R, words], as long as this one's."""
        self.check()
        self.call += 1
        return self._meet(record, op)

    def _meet(self, record: Words, op: str) -> Words:
        self._meetings += 1
        meeting = self._meetings
        self.host.post_record(meeting, record.view(np.uint8))
        try:
            self.wait(
                lambda: self._await_records(meeting, len(record)),
                lambda: self.host.missing_records(meeting),
                op,
                "not entered by",
            )
        except BaseException as error:  # an interrupt, say: the others have our record, not us
            self.fail(error)
            raise
        return self._read_records(meeting, len(record))

    def _await_records(self, meeting: int, num_words: int) -> str:
        if self._carrier is None:
            return self.host.await_records(meeting, _SLICE_NS)

        def read() -> Words:
            return self._read_records(meeting, num_words)

        self._carrier.advance(meeting, read, _SLICE_NS * 1e-9)
        return self.host.await_records(meeting, 0)

    def _read_records(self, meeting: int, num_words: int) -> Words:
        """As they are here: of ranks that are missing, something else."""
        records: Words = np.empty((self.num_ranks, num_words), dtype=np.uint64)
        self.host.read_records(meeting, records.reshape(-1).view(np.uint8))
        return records

    def gather_objects(self, value: T) -> list[T]:
        """Every rank's value, which must be small: a step of a call that all have entered."""
        self.check()
        content = np.frombuffer(pickle.dumps(value), dtype=np.uint8)
        page_bytes = 8 * _PAGE_WORDS
        pages: list[Words] = []
        sizes = np.zeros(1, dtype=np.uint64)
        while not pages or len(pages) * page_bytes < int(sizes.max()):
            page: Words = np.zeros(1 + _PAGE_WORDS, dtype=np.uint64)
            part = content[len(pages) * page_bytes :][:page_bytes]
            page[0] = len(content)
            page[1:].view(np.uint8)[: len(part)] = part
            records = self._meet(page, "exchange of addresses")
            sizes = records[:, 0]
            pages.append(records[:, 1:])
        whole = np.ascontiguousarray(np.concatenate(pages, axis=1)).view(np.uint8)
        return [
            pickle.loads(row[: int(size)].tobytes()) for row, size in zip(whole, sizes, strict=True)
        ]

    def wait(
        self, step: Callable[[], str], missing: Callable[[], Sequence[int]], op: str, what: str
    ) -> None:
        """Repeat a bounded wait until it is done, a peer is lost, or the entry deadline passes."""
        end = time.monotonic() + self._timeout_s
        text = f"{op}, call {self.call}: {what} rank"
        while (outcome := step()) != "done":
            # A peer's kernel that gave up was in the call before the one we wait to enter.
            call = self.call - ("entered" in what)
            if outcome == "aborted":
                record, ranks = self._record(op, call), tuple(missing())
                if record is None and ranks:
                    self._break_if_lost(ranks, text)
                    origin = abort_origin(self.host.abort_word())
                    why = f"{text} {_listed(ranks)}; rank {origin} gave up waiting, or left"
                    self._break(DeadlineError(why, missing=ranks))
                self.raise_aborted(op, call)
            ranks = tuple(missing())
            if self._lost(ranks) and step() != "done":
                self._break_if_lost(ranks, text)
            if time.monotonic() > end:
                self._abort()
                limit = f"within {self._timeout_s:g} s"
                self._break(DeadlineError(f"{text} {_listed(ranks)} {limit}", missing=ranks))

    def wait_for_acks(self, word: int) -> None:
        """Until every rank has acknowledged a step of the heap's growth."""
        self.wait(
            lambda: self.host.await_acks(word, _SLICE_NS),
            lambda: self.host.missing_acks(word),
            "growth of the heap",
            "not mapped by",
        )

    def wait_for_mailbox(self, generation: int) -> None:
        """Until rank 0 has said where the grown heap is."""
        self.wait(
            lambda: self.host.await_mailbox(generation, _SLICE_NS),
            lambda: [0],
            "growth of the heap",
            "no word from",
        )

    # -- failures ----------------------------------------------------------------------------------

    def check(self) -> None:
        """Raise what broke the communicator, if anything did, here or at a peer."""
        if self._broken is not None:
            raise FastkernError(f"the communicator is broken: {self._broken}") from self._broken
        if self._found is not None:
            self._break(self._found)
        if self.host.abort_word():
            self.raise_aborted(self.op, self.call)

    def check_hosts(self) -> None:
        """As `check`, and ask whether a rank of another host has given up, which takes a while."""
        if self.link is not None and (told := self.link.aborted()) is not None:
            epoch, origin = told
            self._host_rank(origin).abort_all(epoch)
        self.check()

    def guarded(self, body: Callable[[], T]) -> T:
        """Errors that all ranks meet alike pass; any other means that this rank leaves alone."""
        try:
            return body()
        except (HeapMemoryError, ValueError):
            raise
        except BaseException as error:
            self.fail(error)
            raise

    def fail(self, error: BaseException) -> None:
        """This rank left a call midway: no rank can go on, so all are told."""
        if self._broken is None:
            self._broken = FastkernError(f"rank {self.rank} left a call: {error!r}")
            self._abort()

    def found(self, error: Exception) -> bool:
        """A kernel has given up: to be raised by the next `check`. Whether it is news."""
        if self._broken is not None or self._found is not None:
            return False
        self._found = error
        self._tell_all()
        return True

    def raise_aborted(self, op: str, call: int) -> NoReturn:
        """Raise what a kernel that gave up in this call has left, or who left."""
        record = self._record(op, call)
        if record is not None:
            self._break(DeadlineError(str(record), record))
        origin = abort_origin(self.host.abort_word())
        self._break(
            DeadlineError(f"{op}: rank {origin} gave up waiting for other ranks, or left the call")
        )

    def close(self) -> None:
        """Let go of the segment; every later `check` raises."""
        self._broken = self._broken or FastkernError("closed")
        self.find_record = self.stop_kernels = None
        self._carrier = None
        del self.host
        del self._control

    def _tell_all(self) -> None:
        self.host.abort_all(self.epoch)
        if self.link is not None:
            try:
                self.link.abort(self.epoch, self.rank)
            except FastkernError as error:  # they find out at their deadline
                log.warning("telling other hosts that rank %d has left: %s", self.rank, error)

    def _abort(self) -> None:
        self._tell_all()
        if self.stop_kernels is not None:
            self.stop_kernels()

    def _break(self, error: Exception) -> NoReturn:
        self._broken = error
        raise error

    def lost_peers(self) -> tuple[list[int], PeerLostError | None]:
        """Ranks whose processes have ended, as far as that can be told here, and what to say."""
        lost = self._lost(range(self.num_ranks))
        if not lost:
            return [], None
        text = f"{self.op}, call {self.call}: no word will come from rank {_listed(lost)}"
        return lost, PeerLostError(f"{text}, whose process has ended")

    def _lost(self, ranks: Sequence[int]) -> list[int]:
        return [r for r in ranks if r in self._local and not self._processes[r].alive()]

    def _break_if_lost(self, ranks: Sequence[int], text: str) -> None:
        if lost := self._lost(ranks):
            self._abort()
            self._break(PeerLostError(f"{text} {_listed(lost)}, whose process has ended"))

    def _record(self, op: str, call: int) -> WaitRecord | None:
        """Of the rank whose kernel gave up, if it was a kernel that did."""
        if self.find_record is not None:
            return self.find_record(op, call)
        origin = abort_origin(self.host.abort_word())
        fields: dict[str, Any] = self.host.error(origin)
        return wait_record(op, call, origin, fields) if fields["written"] else None


def _listed(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))
