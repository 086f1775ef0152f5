"""The host target's runtime: heap in POSIX shared memory, growth, launches on the CPU."""

from __future__ import annotations

import errno
import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, TypeVar

import torch

from .entry import Entry
from .errors import FastkernError, HeapMemoryError
from .heap import ProcessIdentity, fresh_name
from .kernels import _host
from .planner import StageTable, Topology
from .planner.api import DEFAULT_CHUNK_SLOTS
from .planner.table import flag_slots
from .records import Words
from .runtime import RuntimeOptions
from .stats import CallStats
from .tracing import host_tracing
from .turns import Fork, InPlace

log = logging.getLogger("fastkern")

T = TypeVar("T")

_DATA_ROUND = 2 << 20


class HostRuntime:
    """One rank's heap and launches; see Runtime."""

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
        self.device = torch.device("cpu")
        self.stats = CallStats(None)
        self.data_bytes = 0  # per rank
        self._generation = 0
        self._data: _host.SharedMemory | None = None
        self._progress_ns = int(min(options.progress_timeout_s * 1e9, 2.0**62))
        per_kib = 1024e3  # picoseconds per KiB at 1 GB/s
        transport, shaped = options.transport, options.transport.shaped
        self._num_blocks = options.num_blocks
        self._launch_options = functools.cache(
            functools.partial(
                _host.LaunchOptions,
                num_lanes=options.num_lanes,
                transport=transport.name,
                scale_up_ps_per_kib=round(per_kib / transport.scale_up_GBps) if shaped else 0,
                scale_out_ps_per_kib=round(per_kib / transport.scale_out_GBps) if shaped else 0,
            )
        )
        self._entry = Entry(
            group,
            rank,
            topology.num_ranks,
            processes,
            options.entry_timeout_s,
            flag_slots(topology.servers, topology.gpus_per_server, DEFAULT_CHUNK_SLOTS),
        )
        self._host = self._entry.host
        self.tracing = host_tracing(self._host)
        if options.buffer_bytes:
            try:
                self.reserve(options.buffer_bytes)
            except HeapMemoryError:
                raise
            except BaseException as error:
                self.fail(error)
                raise

    @property
    def call(self) -> int:
        """Calls entered so far."""
        return self._entry.call

    @property
    def epoch(self) -> int:
        """Launches so far."""
        return self._entry.epoch

    # -- one call, step by step --------------------------------------------------------------------

    def exchange(self, record: Words, op: str) -> Words:
        """Enter the next call; see Entry."""
        return self._entry.exchange(record, op)

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
            self._entry.wait_for_acks(2 * generation - 1)
            new = self._announce(generation, wanted)
        self._entry.wait_for_mailbox(generation)
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
                self._entry.wait_for_acks(2 * generation)
            finally:
                new.unlink()
        self._data, self.data_bytes = new, wanted

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

    def launch(
        self,
        table: StageTable,
        input_address: int,
        output_address: int,
        op: str,
        num_blocks: int | None = None,
    ) -> None:
        """Run the kernel; raises DeadlineError when it was aborted."""
        blocks = num_blocks or self._num_blocks
        epoch = self._begin(op, blocks)
        ended = self._host.launch(
            table.bytes,
            input_address,
            output_address,
            epoch,
            self._progress_ns,
            self._launch_options(blocks),
        )
        if not ended:
            self._entry.raise_aborted(op, self.call)

    def launch_moe(
        self, table: StageTable, arguments: Any, op: str, num_blocks: int | None = None
    ) -> None:
        """Run the kernel of a dispatch or combine, as `launch`. arguments: _host.MoeArgs."""
        blocks = num_blocks or self._num_blocks
        epoch, options = self._begin(op, blocks), self._launch_options(blocks)
        ended = self._host.launch_moe(table.bytes, arguments, epoch, self._progress_ns, options)
        if not ended:
            self._entry.raise_aborted(op, self.call)

    def _begin(self, op: str, num_blocks: int) -> int:
        self._entry.epoch += 1
        self._entry.op = op
        self.tracing.note(self._entry.epoch, op, self.call, num_blocks)
        return self._entry.epoch

    def guarded(self, body: Callable[[], T]) -> T:
        """See Entry."""
        return self._entry.guarded(body)

    def load_static(self) -> None:
        """There is nothing; `make_static` refuses."""

    def make_static(self, *_: object) -> NoReturn:
        """Graphs and launches in streams are a device's."""
        raise ValueError(
            "static_exchange: tensors must be on a device, with backend cuda or hip; here they are "
            "on the host, where dispatch and combine serve"
        )

    def fork(self, own_lane: bool) -> Fork:
        """Queued calls need no preparation."""
        return InPlace()

    # -- failures, end -----------------------------------------------------------------------------

    def check(self) -> None:
        """Raise what broke this runtime, if anything did, here or at a peer."""
        self._entry.check()

    def fail(self, error: BaseException) -> None:
        """This rank left a call midway: no rank can go on, so all are told."""
        self._entry.fail(error)

    def close(self) -> None:
        """Let go of the heap. Peers keep their own mappings."""
        self.tracing.close()
        self._entry.close()
        del self._host
        self._data = None
