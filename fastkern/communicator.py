"""The communicator: one group of ranks, its symmetric heap, and the calls made on it."""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from . import bootstrap, transports
from .calls import CallRunner, CallStats
from .config import Settings, choose_settings
from .errors import ClosedError, FastkernError
from .host_runtime import HostRuntime, RuntimeOptions
from .planner import Policy, Topology
from .tensors import RowCall, prepare
from .transports import Transport
from .version import __version__
from .work import Work

log = logging.getLogger("fastkern")
_numbers = itertools.count()


class Communicator:
    """Ranks that exchange rows. Made by all ranks of `group` together; a context manager.

    group: any torch.distributed group, by default the default one; used once, to get started.
    servers: number of servers N; ranks of a server are neighbours in the group. Detected if not
    given.
    transport: "shm", "shaped", or a Transport with figures of its own.
    policy: planner policy. num_blocks: blocks per launch. chunk_bytes: size that puts are cut into.
    buffer_bytes: staging and window reserved per rank now, a hint: grows when a call needs more
    (see `buffer_bytes_for`). max_buffer_bytes: the most of it; a call that needs more is done in
    rounds, each moving a share of every pair's rows.
    entry_timeout_s: how long a call waits for ranks that have not entered it; by default the
    group's timeout. progress_timeout_s: how long a call that all have entered may stand still.
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
        given = {
            "transport": transport,
            "policy": policy,
            "num_blocks": num_blocks,
            "chunk_bytes": chunk_bytes,
            "buffer_bytes": buffer_bytes,
            "max_buffer_bytes": max_buffer_bytes,
            "entry_timeout_s": entry_timeout_s,
            "progress_timeout_s": progress_timeout_s,
            "debug": debug,
        }
        settings, error = Settings(), None
        self.rank = dist.get_rank(group)
        self.num_ranks = dist.get_world_size(group)
        try:
            settings = choose_settings(given)
            if servers is not None:
                bootstrap.given_servers(servers, self.num_ranks)
        except (TypeError, ValueError) as failure:
            error = failure  # the other ranks must learn of it
        self.transport = transports.resolve(settings.transport)
        agreement = {
            "version": __version__,
            "servers": servers,
            "transport": self.transport,
            "policy": settings.policy,
            "chunk_bytes": settings.chunk_bytes,
            "buffer_bytes": settings.buffer_bytes,
            "max_buffer_bytes": settings.max_buffer_bytes,
        }
        infos = bootstrap.gather(
            bootstrap.own_info(agreement, settings.local_world_size, error), group
        )
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
        self._calls = CallRunner(self._runtime, self.rank, self.topology, settings)
        self._lock = threading.Lock()
        self._running = threading.Lock()  # one call at a time, whoever makes it
        self._pool: ThreadPoolExecutor | None = None
        self._queued = 0
        self._closed = False  # no new calls
        self._released = False  # the heap is gone
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
        except Exception as error:  # the other ranks must learn of it
            call = error
        return self._submit(lambda: self._calls.run(call), async_op)

    def barrier(self) -> None:
        """Return when all ranks have called it: an exchange of nothing."""
        nothing = torch.empty(0, dtype=torch.uint8)
        self.all_to_all_single(nothing, nothing.clone())

    def check(self) -> None:
        """Raise the error that broke this communicator, if one did."""
        with self._lock:
            if self._closed:
                raise ClosedError("the communicator is closed")
        self._runtime.check()

    def buffer_bytes_for(self, traffic: Any, row_bytes: int) -> int:
        """Bytes of staging and window per rank that a call with traffic [R, R] needs, exactly."""
        _, table = self._calls.plan(np.asarray(traffic), row_bytes)
        return table.data_layout().bytes

    def reserve(self, num_bytes: int) -> None:
        """Have at least this much staging and window per rank. Collective, with equal sizes."""
        self._submit(lambda: self._calls.reserve(num_bytes), False)

    def forget_plan(self) -> None:
        """Plan the next call anew, even if it is equal to the last; for measurements."""
        self._calls.forget_plan()

    @property
    def stats(self) -> CallStats:
        """Figures of the last call that ended well on this rank."""
        return self._calls.stats

    # -- life ------------------------------------------------------------------------------------

    def close(self) -> None:
        """Wait for queued calls, then give the heap back. Not collective; may be repeated."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        if self._pool is not None:
            self._pool.shutdown(wait=True)
        with self._running:  # a call of another thread ends first
            self._released = True
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
        with self._lock:
            if self._closed:
                raise ClosedError("the communicator is closed")
            inline = not async_op and self._queued == 0
            if not inline:
                self._queued += 1
                if self._pool is None:
                    self._pool = ThreadPoolExecutor(1, thread_name_prefix=self._name)
                future = self._pool.submit(self._run_queued, run)
        if inline:
            self._run(run)
            return None
        work = Work(future)
        if async_op:
            return work
        work.wait()
        return None

    def _run(self, run: Callable[[], None]) -> None:
        with self._running:
            if self._released:
                raise ClosedError("the communicator is closed")
            run()

    def _run_queued(self, run: Callable[[], None]) -> None:
        try:
            self._run(run)
        finally:
            with self._lock:
                self._queued -= 1
