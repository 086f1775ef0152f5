"""The communicator: one group of ranks, its symmetric heap, and the calls made on it."""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from . import bootstrap, rounds, transports
from .config import read_settings
from .errors import ClosedError, FastkernError
from .host_runtime import HostRuntime, RuntimeOptions
from .planner import Plan, Policy, StageTable, Topology, plan
from .records import OP_ALL_TO_ALL, OP_RESERVE, encode, row_bytes, verdict
from .tensors import RowCall, prepare
from .transports import Transport
from .version import __version__
from .work import Work

log = logging.getLogger("fastkern")
_numbers = itertools.count()


@dataclass(frozen=True)
class CallStats:
    """Figures of the last call that ended well on this rank; times in seconds.

    entry_s: until all ranks had entered and their counts were here. plan_s: planning and lowering.
    grow_s: making a larger heap. kernel_s: the kernel.
    """

    plan: Plan | None
    entry_s: float = 0.0
    plan_s: float = 0.0
    grow_s: float = 0.0
    kernel_s: float = 0.0


class Communicator:
    """Ranks that exchange rows. Made by all ranks of `group` together; a context manager.

    group: any torch.distributed group, by default the default one; used once, to get started.
    servers: number of servers N; ranks of a server are neighbours in the group. Detected if not
    given.
    transport: "shm", "shaped", or a Transport with figures of its own.
    policy: planner policy. num_blocks: blocks per launch. chunk_bytes: size that puts are cut into.
    buffer_bytes: staging and window reserved per rank now (a hint: grows when a call needs more;
    see
        `buffer_bytes_for`). max_buffer_bytes: the most of it; a call that needs more is done in
        rounds, each moving a share of every pair's rows.
    entry_timeout_s: how long a call waits for ranks that have not entered it; by default the
    group's
        timeout. progress_timeout_s: how long a call that all have entered may stand still.
    debug: validate every plan before it runs.

    Options not given come from the environment (fastkern.config). Raises AgreementError, ValueError
    or FastkernError on every rank alike. One call runs at a time; later ones queue.
    """

    def __init__(
        self,
        group: Any = None,
        *,
        servers: int | None = None,
        transport: str | Transport | None = None,
        policy: Policy | None = None,
        num_blocks: int | None = None,
        chunk_bytes: int | None = None,
        buffer_bytes: int | None = None,
        max_buffer_bytes: int | None = None,
        entry_timeout_s: float | None = None,
        progress_timeout_s: float | None = None,
        debug: bool | None = None,
    ) -> None:
        group = dist.group.WORLD if group is None else group
        settings = read_settings()
        given = {
            "policy": policy,
            "num_blocks": num_blocks,
            "chunk_bytes": chunk_bytes,
            "buffer_bytes": buffer_bytes,
            "max_buffer_bytes": max_buffer_bytes,
            "entry_timeout_s": entry_timeout_s,
            "progress_timeout_s": progress_timeout_s,
            "debug": debug,
        }
        settings = replace(settings, **{k: v for k, v in given.items() if v is not None})  # type: ignore[arg-type]
        chosen = settings.transport if transport is None else transport
        self.transport = transports.by_name(chosen) if isinstance(chosen, str) else chosen
        self.rank = dist.get_rank(group)
        self.num_ranks = dist.get_world_size(group)
        self._settings = settings
        agreement = {
            "version": __version__,
            "servers": servers,
            "transport": self.transport,
            "policy": settings.policy,
            "chunk_bytes": settings.chunk_bytes,
            "buffer_bytes": settings.buffer_bytes,
            "max_buffer_bytes": settings.max_buffer_bytes,
        }
        infos = bootstrap.gather(bootstrap.own_info(agreement, settings.local_world_size), group)
        self.agreement_hash = bootstrap.agreement_hash(infos)
        if servers is None:
            num_servers, per_server = bootstrap.detect_servers(infos)
        else:
            num_servers, per_server = bootstrap.given_servers(servers, self.num_ranks)
        hosts = {info.host for info in infos}
        if len(hosts) > 1 and not self.transport.capabilities.across_hosts:
            raise FastkernError(
                f"transport {self.transport.name} works on one host, but ranks are on {len(hosts)}"
            )
        self.topology = Topology(
            servers=num_servers,
            gpus_per_server=per_server,
            scale_up_GBps=self.transport.scale_up_GBps,
            scale_out_GBps=self.transport.scale_out_GBps,
            alpha_us=self.transport.alpha_us,
        )
        self._runtime = HostRuntime(
            group,
            self.rank,
            self.topology,
            [info.process for info in infos],
            RuntimeOptions(
                transport=self.transport,
                num_blocks=settings.num_blocks,
                buffer_bytes=settings.buffer_bytes,
                entry_timeout_s=settings.entry_timeout_s or bootstrap.group_timeout_s(group),
                progress_timeout_s=settings.progress_timeout_s,
            ),
        )
        self.stats = CallStats(None)
        self._lock = threading.Lock()
        self._running = threading.Lock()  # one call at a time, whoever makes it
        self._pool: ThreadPoolExecutor | None = None
        self._queued = 0
        self._closed = False
        self._name = f"fastkern-{next(_numbers)}"

    # -- operations ------------------------------------------------------------------------------

    def all_to_all_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_split_sizes: list[int] | None = None,
        input_split_sizes: list[int] | None = None,
        async_op: bool = False,
    ) -> Work | None:
        """Send the k-th part of `input` to rank k; receive its part for this rank into `output`.

        output: [sum(output_split_sizes), ...], input: [sum(input_split_sizes), ...], CPU tensors of
        one dtype, any strides; splits are rows along dimension 0, equal parts if not given.
        Received parts stand in rank order. With async_op, returns a Work; `output` is filled after
        its wait().

        Raises ValueError or TypeError, the same on every rank and before any byte moves, for bad or
        disagreeing splits, dtypes and row widths; DeadlineError or PeerLostError when others fail.
        """
        call: RowCall | Exception
        try:
            call = prepare(output, input, output_split_sizes, input_split_sizes, self.num_ranks)
        except (TypeError, ValueError) as error:
            call = error  # the other ranks must learn of it
        return self._submit(lambda: self._run(call), async_op)

    def barrier(self) -> None:
        """Return when all ranks have called it: an exchange of nothing."""
        nothing = torch.empty(0, dtype=torch.uint8)
        self.all_to_all_single(nothing, nothing.clone())

    def check(self) -> None:
        """Raise the error that broke this communicator, if one did."""
        self._runtime.check()

    def buffer_bytes_for(self, traffic: Any, row_bytes: int) -> int:
        """Bytes of staging and window per rank that a call with traffic [R, R] needs, exactly."""
        made = self._plan(np.asarray(traffic), row_bytes)
        return made.table(self.rank).data_layout().bytes

    def reserve(self, num_bytes: int) -> None:
        """Have at least this much staging and window per rank. Collective, with equal sizes."""

        def run() -> None:
            record = encode(OP_RESERVE, num_bytes, self.num_ranks)
            verdict(self._runtime.exchange(record, "reserve"))
            self._runtime.reserve(num_bytes)

        self._submit(run, False)

    # -- life ------------------------------------------------------------------------------------

    def close(self) -> None:
        """Wait for queued calls, then give the heap back. Not collective; may be repeated."""
        if self._closed:
            return
        self._closed = True
        if self._pool is not None:
            self._pool.shutdown(wait=True)
        self._runtime.close()

    def __enter__(self) -> Communicator:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        t = self.topology
        return (
            f"Communicator(rank {self.rank} of {self.num_ranks}, {t.servers} servers x "
            f"{t.gpus_per_server}, {self.transport.name}{', closed' if self._closed else ''})"
        )

    # -- inside ----------------------------------------------------------------------------------

    def _submit(self, run: Callable[[], None], async_op: bool) -> Work | None:
        """Run now, on this thread, or behind the calls that are queued."""
        if self._closed:
            raise ClosedError("the communicator is closed")
        with self._lock:
            inline = not async_op and self._queued == 0
            if not inline:
                self._queued += 1
                if self._pool is None:
                    self._pool = ThreadPoolExecutor(1, thread_name_prefix=self._name)
                future = self._pool.submit(self._run_queued, run)
        if inline:
            with self._running:
                run()
            return None
        work = Work(future)
        if async_op:
            return work
        work.wait()
        return None

    def _run_queued(self, run: Callable[[], None]) -> None:
        try:
            with self._running:
                run()
        finally:
            with self._lock:
                self._queued -= 1

    def _plan(self, traffic: Any, num_bytes: int) -> Plan:
        settings = self._settings
        made = plan(
            traffic,
            self.topology,
            num_bytes,
            settings.policy,  # type: ignore[arg-type]
            chunk_bytes=settings.chunk_bytes,
        )
        if settings.debug:
            made.validate()
        return made

    def _run(self, call: RowCall | Exception) -> None:
        """One call from entry to delivered rows, on the caller's thread or the queue's."""
        runtime = self._runtime
        begin = time.perf_counter()
        records = runtime.exchange(encode(OP_ALL_TO_ALL, call, self.num_ranks), "all_to_all_single")
        traffic = verdict(records)
        assert isinstance(call, RowCall)  # else `verdict` has raised
        entered = time.perf_counter()
        num_bytes = row_bytes(records)
        if num_bytes == 0 or not traffic.any():
            call.finish()
            self.stats = CallStats(None, entry_s=entered - begin)
            return
        made = self._plan(traffic, num_bytes)
        table = made.table(self.rank)
        need = table.data_layout().bytes
        planned = time.perf_counter()
        if need <= self._settings.max_buffer_bytes:
            runtime.reserve(need)
            reserved = time.perf_counter()
            self._launch(table, call.input, call.target)
        else:
            reserved = planned
            self._run_in_rounds(
                call, traffic, num_bytes, -(-need // self._settings.max_buffer_bytes)
            )
        ended = time.perf_counter()
        call.finish()
        self.stats = CallStats(
            made, entered - begin, planned - entered, reserved - planned, ended - reserved
        )

    def _launch(self, table: StageTable, source: torch.Tensor, target: torch.Tensor) -> None:
        self._runtime.launch(table, source.data_ptr(), target.data_ptr(), "all_to_all_single")

    def _run_in_rounds(
        self, call: RowCall, traffic: rounds.Matrix, num_bytes: int, num_rounds: int
    ) -> None:
        """Staging for the whole call would be too large: move a share of it at a time."""
        source = call.input.reshape(-1).view(torch.uint8).view(-1, num_bytes)
        target = call.target.reshape(-1).view(torch.uint8).view(-1, num_bytes)
        for part in rounds.cut(traffic, num_rounds):
            table = self._plan(part.rows, num_bytes).table(self.rank)
            self._runtime.reserve(table.data_layout().bytes)
            received = torch.empty(
                (int(part.rows[:, self.rank].sum()), num_bytes), dtype=torch.uint8
            )
            self._launch(table, rounds.gather(source, self.rank, traffic, part), received)
            rounds.scatter(target, received, self.rank, traffic, part)
