"""The communicator: one group of ranks, its symmetric heap, and the calls made on it."""

from __future__ import annotations

import itertools
import logging
import secrets
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist

from . import bootstrap, transports
from .calls import CallRunner
from .config import Settings, choose_settings
from .device.backend import (
    DeviceBackend,
    backend_name,
    check_backend,
    kernels_of,
    open_backend,
)
from .errors import FastkernError
from .make_runtime import runtime_on, shareable
from .moe import exchanges
from .moe import ops as moe_ops
from .moe.buffers import WorstCase
from .moe.counts import RouteCounts
from .moe.dispatch_arguments import DispatchOptions, RowFormat
from .moe.handle import Handle
from .moe.runner import MoeRunner
from .moe.started import Pending, start
from .moe.static_shape import StaticShape, make_static_shape
from .moe.tensor_checks import aligned_row
from .planner import Policy, Topology
from .records import OP_STATIC, agreed_bodies, encode_call
from .runtime import RuntimeOptions
from .stats import CallStats
from .tensors import RowCall, prepare
from .trace import Trace
from .transports import Transport
from .tuning.choose import LaunchParameters, choose_parameters
from .turns import Turns
from .version import __version__
from .work import Work

if TYPE_CHECKING:
    from .device.static_exchange import StaticExchange

log = logging.getLogger("fastkern")

Dispatched = tuple[torch.Tensor | list[torch.Tensor], torch.Tensor | None, torch.Tensor, Handle]
_numbers = itertools.count()


class Communicator:
    """Ranks that exchange rows. Made by all ranks of `group` together; a context manager.

    group: any torch.distributed group, by default the default one; used once, to get started.
    servers: number of servers N; ranks of a server are neighbours in the group. Detected if not
    given.
    transport: "shm" or "shaped" for CPU tensors, "peer" for GPUs of one host, one for each rank; or
    a Transport with figures of its own. By default "peer" where the backend is a device, else
    "shm".
    backend: "host", "cuda", "hip", "triton", or a Driver (fastkern.device.driver) that stays its
    owner's; by default what the transport needs: the accelerator that torch was built for. On GPUs
    the rank's device is torch's current one. "triton" is the same device with the kernels in
    Triton; where the environment has TRITON_INTERPRET=1, they are interpreted, and tensors are on
    the CPU. All tensors of a call are on `device`; counts and handles'
    metadata are on the CPU.
    policy: planner policy. chunk_bytes: size that puts are cut into. num_blocks: blocks per launch;
    calls take a num_blocks of their own, up to this one. Ranks may differ in it, and results are
    the same bit by bit for any. Both by default as the tuning profile has it for operation and size
    (fastkern.tuning); without one num_blocks is 1 on the host and a sixth of a GPU's processors.
    buffer_bytes: staging and window reserved per rank now, a hint: grows when a call needs more
    (see `buffer_bytes_for`). max_buffer_bytes: the most of it; a call that needs more is done in
    rounds, each moving a share of every pair's rows.
    entry_timeout_s: how long a call waits for ranks that have not entered it; by default the
    group's timeout. progress_timeout_s: how long a call that all have entered may stand still.
    debug: validate every plan before it runs.

    Options not given come from the environment (fastkern.config). Raises AgreementError, ValueError
    or FastkernError on every rank alike, DeviceUnavailableError where the backend lacks something.
    One call runs at a time; later ones queue.

    On GPUs. A call is ordered in the caller's current stream: it sees what came before there, its
    outputs may be used in stream order after it returns, and its inputs overwritten. Calls in
    different streams follow one another on the device. The host waits for the other ranks to enter,
    and in a dispatch for this rank's counts, which means for all that is in the stream before it;
    not for the rows. A call with async_op, and what *_start starts, runs beside what its caller
    does next; wait() and finish() have the current stream wait, not the host. No call may be
    captured into a graph.

    Where errors appear: bad input and missing ranks in the call itself. A kernel that stands still
    for progress_timeout_s gives up; that is a DeadlineError, with the WaitRecord of the rank that
    gave up first, at the next call, or check(), of every rank, and a line in the log before that;
    outputs then hold anything. A rank's time begins when its kernel does: where streams of ranks
    lag behind one another, progress_timeout_s must be more than that.

    Between servers. Ranks of a server are on one host and map each other's memory; rows between
    servers go through the transport's library, which the communicator sets up (with one server
    there is nothing to set up, and any transport between devices does). Ranks meet on the host
    through the store of torch.distributed. NVSHMEM and rocSHMEM start once in a process, so that
    all communicators over them must be of the same ranks, and none can be made after a rank has
    died. What the last kernel of a closed communicator has used is freed when all ranks have closed
    it. Compiled and set up in tests, with made-up libraries; never run on GPUs.
    """

    def __init__(
        self,
        group: Any = None,
        *,
        servers: int | None = None,
        transport: str | Transport | None = None,
        backend: Any = None,
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
            "backend": backend,
            "policy": policy,
            "num_blocks": num_blocks,
            "chunk_bytes": chunk_bytes,
            "buffer_bytes": buffer_bytes,
            "max_buffer_bytes": max_buffer_bytes,
            "entry_timeout_s": entry_timeout_s,
            "progress_timeout_s": progress_timeout_s,
            "debug": debug,
        }
        settings, launched, error, device = Settings(), None, None, None
        self.rank = dist.get_rank(group)
        self.num_ranks = dist.get_world_size(group)
        try:
            settings = choose_settings(given)
            if servers is not None:
                bootstrap.given_servers(servers, self.num_ranks)
            self.transport = transports.resolve(settings.transport)
            check_backend(settings.backend, self.transport)
            device = open_backend(settings.backend, self.transport)
            properties = None if device is None else device.driver.properties()
            launched = choose_parameters(
                self.transport.name,
                properties,
                settings.num_blocks,
                "cxx" if device is None else kernels_of(device.driver),
            )
            settings = choose_settings(given, launched.defaults)
        except (TypeError, ValueError, FastkernError) as failure:
            error = shareable(failure)  # the other ranks must learn of it
            settings = Settings()
            self.transport = transports.resolve(settings.transport)
        agreement = {
            "version": __version__,
            "servers": servers,
            "transport": self.transport,
            "backend": backend_name(settings.backend, self.transport),
            "policy": settings.policy,
            "chunk_bytes": settings.chunk_bytes,
            "buffer_bytes": settings.buffer_bytes,
            "max_buffer_bytes": settings.max_buffer_bytes,
        }
        try:
            self._assemble(group, servers, settings, launched, agreement, error, device)
        except BaseException:
            if device is not None:
                device.close()
            raise

    def _assemble(
        self,
        group: Any,
        servers: int | None,
        settings: Settings,
        launched: LaunchParameters | None,
        agreement: dict[str, Any],
        error: Exception | None,
        device: DeviceBackend | None,
    ) -> None:
        """Agree with the other ranks, then make what calls run on."""
        infos = bootstrap.gather(
            bootstrap.own_info(agreement, settings.local_world_size, error), group
        )
        self.agreement_hash = bootstrap.agreement_hash(infos)
        assert launched is not None  # else there was an error, and all ranks have raised it
        if servers is None:
            num_servers, per_server = bootstrap.detect_servers(infos)
        else:
            num_servers, per_server = bootstrap.given_servers(servers, self.num_ranks)
        hosts = [info.host for info in infos]
        if len(set(hosts)) > 1 and not self.transport.capabilities.across_hosts:
            raise FastkernError(
                f"transport {self.transport.name} works on one host, but ranks are on "
                f"{len(set(hosts))}"
            )
        bootstrap.check_servers(hosts, num_servers)
        self.topology = Topology(
            servers=num_servers,
            gpus_per_server=per_server,
            scale_up_GBps=self.transport.scale_up_GBps,
            scale_out_GBps=self.transport.scale_out_GBps,
            alpha_us=self.transport.alpha_us,
            cross_rail=self.transport.capabilities.cross_rail,
        )
        options = RuntimeOptions(
            transport=self.transport,
            num_blocks=launched.blocks.most,
            num_lanes=launched.num_lanes,
            tile_bytes=launched.tile_bytes,
            buffer_bytes=settings.buffer_bytes,
            entry_timeout_s=settings.entry_timeout_s or bootstrap.group_timeout_s(group),
            progress_timeout_s=settings.progress_timeout_s,
        )
        processes = [info.process for info in infos]
        self._runtime, moe = runtime_on(
            device, group, self.rank, self.topology, processes, hosts, options
        )
        self._calls = CallRunner(self._runtime, self.rank, self.topology, settings, launched.blocks)
        self._chunk_bytes = settings.chunk_bytes
        self.moe = MoeRunner(
            self._runtime,
            moe,
            self.rank,
            self.topology,
            settings,
            secrets.randbits(63),
            launched.blocks,
        )
        self.exchange_number = exchanges.register(self)
        self.turns = Turns(f"fastkern-{next(_numbers)}", self._runtime.fork)

    # -- operations ------------------------------------------------------------------------------

    def all_to_all_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_split_sizes: list[int] | None = None,
        input_split_sizes: list[int] | None = None,
        async_op: bool = False,
        *,
        num_blocks: int | None = None,
    ) -> Work | None:
        """Send the k-th part of `input` to rank k; receive its part for this rank into `output`.

        output: [sum(output_split_sizes), ...], input: [sum(input_split_sizes), ...], tensors of one
        dtype, any strides; splits are rows along dimension 0, equal parts if not given.
        Received parts stand in rank order. With async_op, returns a Work; `output` is filled after
        its wait(). num_blocks: blocks of its launches, see Communicator.

        Raises ValueError or TypeError, the same on every rank and before any byte moves, for bad or
        disagreeing splits, dtypes and row widths; DeadlineError or PeerLostError when others fail.
        """
        call: RowCall | Exception
        try:
            call = prepare(
                output,
                input,
                output_split_sizes,
                input_split_sizes,
                self.num_ranks,
                self.device,
            )
            call.num_blocks = self.moe.blocks.check(num_blocks)
        except Exception as error:  # the other ranks must learn of it
            call = error
        if async_op:
            return Work(self.turns.queue(lambda: self._calls.run(call)))
        self.turns.call(lambda: self._calls.run(call))
        return None

    def dispatch(
        self,
        x: torch.Tensor | Sequence[torch.Tensor],
        topk_idx: torch.Tensor | None = None,
        topk_weights: torch.Tensor | None = None,
        *,
        num_experts: int | None = None,
        expert_to_rank: Sequence[int] | None = None,
        layout: str = "expert",
        expert_alignment: int = 1,
        zero_padding: bool = False,
        num_max_tokens_per_rank: int | None = None,
        host_counts: bool = True,
        counts: RouteCounts | None = None,
        handle: Handle | None = None,
        out: torch.Tensor | Sequence[torch.Tensor] | None = None,
        num_blocks: int | None = None,
    ) -> Dispatched:
        """Send each token to the ranks of its experts, once to each server.

        x: [T, ...], or several tensors of T tokens (values, scales, ids), any dtypes.
        topk_idx: [T, K] int32 or int64, K up to 32; -1 for no choice, an expert as often as one
        likes. topk_weights: [T, K] float32 or float64; where topk_idx is -1 they do not count.
        num_experts: E. expert_to_rank: [E] their ranks; by default neighbours together, see
        fastkern.moe.placement. layout: "expert": a row for each choice, ordered by expert, source
        rank, token and choice; "rank": a row for each token, ordered by source rank and token.
        expert_alignment: each expert's rows are padded to a multiple of it, with zeros where
        zero_padding says so (else unwritten: a layer that computes with them and takes gradients
        wants zeros). num_max_tokens_per_rank: makes the number of rows the worst case for up to so
        many tokens, which is known beforehand. host_counts: False: no counts on the host.
        counts: those of all ranks, if the caller has them; spares their exchange. handle: routing
        and plan of an earlier call; x may have other rows. out: where to receive into. num_blocks:
        blocks of its launch, see Communicator; backward's exchanges for this call have as many.

        Returns recv_x [rows, ...] (a list if x is one), recv_topk_weights ([rows]; rank layout
        [rows, K], 0 for choices elsewhere; None without topk_weights), tokens_per_expert (int64
        [own experts] on the CPU, without padding) and the handle, which in the rank layout has
        recv_topk_idx.

        Can be differentiated in x and topk_weights; every rank must then take part in backward.
        Raises ValueError or TypeError, the same on every rank and before any byte moves.
        """
        return moe_ops.dispatch(
            self,
            x,
            topk_idx,
            topk_weights,
            num_experts=num_experts,
            expert_to_rank=expert_to_rank,
            layout=layout,
            expert_alignment=expert_alignment,
            zero_padding=zero_padding,
            num_max_tokens_per_rank=num_max_tokens_per_rank,
            host_counts=host_counts,
            counts=counts,
            handle=handle,
            out=out,
            num_blocks=num_blocks,
        )

    def combine(
        self,
        expert_out: torch.Tensor,
        handle: Handle,
        weights: torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
        wire_dtype: torch.dtype | None = None,
        out: torch.Tensor | None = None,
        *,
        num_blocks: int | None = None,
    ) -> torch.Tensor:
        """Bring expert outputs back to their tokens, summed on the way: [T, ...].

        expert_out: [rows, ...] of float64, float32, bfloat16 or float16, with the rows of the
        handle's recv_x; rows may be of any width. weights: [rows], multiplied in where given, and
        only there. bias: [T, ...] or [...], added last. wire_dtype: of sums between servers,
        expert_out's dtype (then each remote server's sum is rounded once) or float32. num_blocks:
        as in `dispatch`.

        Sums are float32 (float64 for float64): per rank over choices in top-k order, per server
        over its ranks, then over servers, all in order; one rounding at the end. The result is the
        same bit by bit for any chunk size, number of blocks and transport. A token without choices
        gives exactly 0 (and the bias).

        Can be differentiated in expert_out, weights and bias. Raises as `dispatch` does.
        """
        return moe_ops.combine(
            self, expert_out, handle, weights, bias, wire_dtype, out, num_blocks=num_blocks
        )

    def dispatch_start(self, *args: Any, **options: Any) -> Pending[Dispatched]:
        """`dispatch`, but return at once; `finish()` of the result waits and returns the same.

        In between, this communicator refuses other calls, and the tensors must not be written.
        """
        return start("dispatch", self.dispatch, args, options)

    def combine_start(self, *args: Any, **options: Any) -> Pending[torch.Tensor]:
        """`combine`, but return at once, as `dispatch_start`."""
        return start("combine", self.combine, args, options)

    def trace(self, max_events: int = 1 << 18) -> Trace:
        """A trace of what the blocks of this rank's launches do, for Perfetto; see Trace.

        A context manager, with start() and stop() besides, and save(path). max_events: kept of the
        span, 48 bytes each; more are counted and dropped. Not collective. Costs nothing while no
        trace is on; while one is, two clock reads and a record for each item of a block. Static
        exchanges are not in it.
        """
        return Trace(self.turns, self._runtime.tracing, self.rank, max_events)

    def static_exchange(
        self,
        x: torch.Tensor | Sequence[torch.Tensor],
        *,
        topk: int,
        num_experts: int,
        num_max_tokens_per_rank: int,
        weights_dtype: torch.dtype | None = torch.float32,
        expert_out: torch.Tensor | None = None,
        wire_dtype: torch.dtype | None = None,
        expert_to_rank: Sequence[int] | None = None,
        layout: str = "expert",
        expert_alignment: int = 1,
        zero_padding: bool = False,
        planner: str = "device",
        gradients: bool = False,
        num_blocks: int | None = None,
    ) -> StaticExchange:
        """Dispatches and combines of one shape that the host only enqueues. Collective.

        They can be captured into graphs, and no call waits for counts. On devices, over `peer`.
        planner: "device": rows go straight to their server, unbalanced, by a table that each call
        fills in by itself: the low-latency choice, for 1 to some hundred tokens per rank. "host":
        the planner balances each call, as a function that the stream calls between two copies: for
        the token counts of training.

        x, expert_out: tensors like those of the calls, for the shape and dtype of their rows;
        expert_out None: no combine. topk: K. weights_dtype: of topk_weights, None: none travel.
        num_max_tokens_per_rank: the most tokens of any rank; memory is reserved for them, by the
        formula of fastkern.moe.buffers where the host plans, whatever max_buffer_bytes is.
        The communicator's policy and debug do not apply. gradients: calls can be differentiated,
        backward before the next dispatch or by a sibling, see StaticExchange. num_blocks: of
        their launches, see Communicator. Others as in `dispatch` and `combine`.

        Raises ValueError or TypeError, the same on every rank; HeapMemoryError where there is too
        little memory.
        """
        shape: StaticShape | Exception
        blocks = 0
        try:
            if self.transport.capabilities.across_hosts and self.topology.servers > 1:
                raise ValueError(
                    f"static_exchange: works over peer, where ranks map each other's memory, not "
                    f"{self.transport.name}"
                )
            shape = make_static_shape(
                [x] if isinstance(x, torch.Tensor) else list(x),
                topk,
                weights_dtype,
                expert_out,
                wire_dtype,
                DispatchOptions(
                    num_experts,
                    None if expert_to_rank is None else tuple(int(r) for r in expert_to_rank),
                    layout,
                    expert_alignment,
                    zero_padding,
                    num_max_tokens_per_rank,
                ),
                planner,
                self.num_ranks,
                gradients,
            )
            most_bytes = shape.num_max_tokens * shape.format.row_bytes
            given = self.moe.blocks.check(num_blocks)
            blocks = self.moe.blocks.of(given, "dispatch", most_bytes)
            self._runtime.load_static()
        except Exception as error:  # the other ranks must learn of it
            shape = error
        return self.turns.call(lambda: self._make_static(shape, blocks))

    def _make_static(self, shape: StaticShape | Exception, num_blocks: int) -> StaticExchange:
        text = shape if isinstance(shape, Exception) else shape.agreement()
        record = encode_call(OP_STATIC, text, "", np.zeros(0, dtype=np.uint64))
        agreed_bodies(self._runtime.exchange(record, "static_exchange"))
        assert isinstance(shape, StaticShape)  # else the agreement has raised
        return self._runtime.guarded(
            lambda: self._runtime.make_static(
                shape, self.topology, self.turns, self._chunk_bytes, num_blocks
            )
        )

    def barrier(self) -> None:
        """Return when all ranks have called it: an exchange of nothing."""
        nothing = torch.empty(0, dtype=torch.uint8, device=self.device)
        self.all_to_all_single(nothing, nothing.clone())

    def check(self) -> None:
        """Raise the error that broke this communicator, if one did."""
        self.turns.check_open()
        self._runtime.check()

    def buffer_bytes_for(self, traffic: Any, row_bytes: int) -> int:
        """Bytes of staging and window per rank that a call with traffic [R, R] needs, exactly."""
        _, table = self._calls.plan(np.asarray(traffic), row_bytes)
        return table.data_layout().bytes

    def moe_buffer_bytes_for(
        self,
        num_max_tokens_per_rank: int,
        topk: int,
        payload_row_bytes: Sequence[int],
        *,
        weight_bytes: int = 4,
        combine_width: int = 0,
        combine_dtype: torch.dtype = torch.bfloat16,
        wire_dtype: torch.dtype | None = None,
    ) -> int:
        """Bytes per rank that no dispatch and combine within these limits exceed; for `reserve`.

        payload_row_bytes: of each tensor of x. weight_bytes: of one of topk_weights, 0 without.
        combine_width: values of a row of expert_out, 0 without a combine. The formula is in
        fastkern.moe.buffers; there is a routing that needs all of it.
        """
        worst = WorstCase(self.topology, num_max_tokens_per_rank, topk)
        form = RowFormat.of(payload_row_bytes, weight_bytes, topk)
        wire = combine_dtype if wire_dtype is None else wire_dtype
        sum_bytes = 8 if combine_dtype == torch.float64 else 4
        dispatch_bytes = worst.dispatch_bytes(form.row_bytes)
        if not combine_width:
            return dispatch_bytes
        combine_bytes = worst.combine_bytes(
            aligned_row(combine_width * wire.itemsize), aligned_row(combine_width * sum_bytes)
        )
        return max(dispatch_bytes, combine_bytes)

    def reserve(self, num_bytes: int) -> None:
        """Have at least this much staging and window per rank. Collective, with equal sizes."""
        self.turns.call(lambda: self._calls.reserve(num_bytes))

    def forget_plan(self) -> None:
        """Plan the next call anew, even if it is equal to the last; for measurements."""
        self._calls.forget_plan()

    @property
    def device(self) -> torch.device:
        """Where the tensors of calls are."""
        return self._runtime.device

    @property
    def stats(self) -> CallStats:
        """Figures of the last call that ended well on this rank."""
        return self._runtime.stats

    # -- life ------------------------------------------------------------------------------------

    def close(self) -> None:
        """Wait for queued calls, then give the heap back. Not collective; may be repeated."""
        self.turns.close(self._runtime.close)

    def __enter__(self) -> Communicator:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        t = self.topology
        return (
            f"Communicator(rank {self.rank} of {self.num_ranks}, {t.servers} servers x "
            f"{t.gpus_per_server}, {self.transport.name}{', closed' if self.turns.closed else ''})"
        )
