"""Dispatches and combines of one rank, from entry to delivered rows."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ..config import Settings
from ..planner import Topology
from ..records import OP_COMBINE, OP_DISPATCH, Words, agreed_bodies, encode_call
from ..runtime import Runtime
from ..tuning.blocks import BlockCounts
from .backend import MoeBackend, Route
from .combine_arguments import CombineCall
from .counts import RouteCounts
from .dispatch_arguments import DispatchCall, DispatchOptions
from .exchange_counts import HEAD, all_counts, count_page, counts_hash, given_counts
from .handle import NONE, MetaInfo, header_of, meta_info, padding_spans, tokens_per_expert
from .make_handle import HandleOrigin, handle_form
from .placement import Placement
from .plans import PlanKeeper
from .tensor_checks import with_target


@dataclass(frozen=True)
class DispatchResult:
    """What a dispatch delivered: see Communicator.dispatch."""

    recv: list[torch.Tensor]
    recv_topk_weights: torch.Tensor | None
    recv_topk_idx: torch.Tensor | None
    tokens_per_expert: torch.Tensor
    meta: torch.Tensor


class MoeRunner:
    """Runs the dispatches and combines of one rank; keeps the plans of recent handles."""

    def __init__(
        self,
        runtime: Runtime,
        backend: MoeBackend,
        rank: int,
        topology: Topology,
        settings: Settings,
        tag: int,
        blocks: BlockCounts,
    ) -> None:
        self.num_ranks = topology.num_ranks
        self.device = backend.device
        self._backend = backend
        self._runtime = runtime
        self._rank = rank
        self._topology = topology
        self._tag = tag  # of the communicator, in its handles
        self.blocks = blocks
        self._plans = PlanKeeper(runtime, topology, settings, blocks)

    def own_handle(self, meta: Any) -> MetaInfo:
        """What a handle says; raises ValueError unless it is one of this communicator's, in use."""
        if not isinstance(meta, torch.Tensor):
            raise TypeError(f"handle: its metadata must be a tensor, not {type(meta).__name__}")
        header = header_of(meta)
        if int(header["communicator"]) != self._tag:
            raise ValueError("handle: made by another communicator")
        if header["released"]:
            raise ValueError("handle: it has been released")
        self._backend.check_handle(meta)
        return meta_info(meta)

    # -- dispatch ----------------------------------------------------------------------------------

    def dispatch(
        self,
        call: DispatchCall | Exception,
        counts: RouteCounts | Sequence[torch.Tensor] | None = None,
    ) -> DispatchResult:
        """Enter with `call`, or with what was wrong with this rank's arguments."""
        begin = time.perf_counter()
        route: Route | None = None
        given: RouteCounts | None = None
        if isinstance(call, DispatchCall) and call.meta is None:
            try:
                route = self._route(call)
                given = given_counts(
                    counts, _options(call).num_experts, self._topology, self._rank, route
                )
            except Exception as error:  # the other ranks must learn of it
                call = error
        body = self._enter_dispatch(call, route, given)
        assert isinstance(call, DispatchCall)  # else the agreement has raised
        good, entered = call, time.perf_counter()

        def finish() -> DispatchResult:
            if good.meta is not None:
                return self._deliver(good, good.meta, False, begin, entered)
            assert route is not None
            known = given
            if known is None:
                rows = all_counts(self._runtime, route, body)
                known = RouteCounts.from_rows(
                    rows, _options(good).num_experts, self._topology.servers
                )
            plan = self._plans.make(known.to_server, known.to_rank, good.format.row_bytes)
            origin = HandleOrigin(self._tag, self._runtime.call, self._rank, self._topology)
            form = handle_form(good, known, body[:, 0], plan, origin)
            meta = self._backend.new_handle(good, form, route)
            self._plans.keep(origin.serial, plan)
            return self._deliver(good, meta, True, begin, entered)

        return self._runtime.guarded(finish)

    def _route(self, call: DispatchCall) -> Route:
        """Counts of this rank; raises ValueError naming the first index that is no expert's."""
        options = _options(call)
        placement = Placement(options.num_experts, self.num_ranks, options.expert_to_rank)
        idx = call.topk_idx
        assert idx is not None
        route = self._backend.route(call, placement)
        if route.bad < idx.numel():
            token, k = divmod(route.bad, call.topk)
            raise ValueError(
                f"topk_idx[{token}][{k}] is {int(idx[token, k])}, neither -1 nor one of "
                f"{options.num_experts} experts"
            )
        return route

    def _enter_dispatch(
        self,
        call: DispatchCall | Exception,
        route: Route | None,
        given: RouteCounts | None,
    ) -> Words:
        """All ranks' words, or the error that all raise."""
        words: Words = np.zeros(HEAD, dtype=np.uint64)
        agreement: str | Exception
        if isinstance(call, Exception):
            agreement, dtypes = call, ""
        else:
            if route is not None:
                words = count_page(route, 0)
            serial = None if call.meta is None else meta_info(call.meta).serial
            agreement, dtypes = call.agreement(serial), call.dtypes
            if given is not None:
                agreement += f", counts given with hash {counts_hash(given)}"
            words[0] = 0 if call.out is None else 1 + call.out[0].shape[0]
        record = encode_call(OP_DISPATCH, agreement, dtypes, words)
        return agreed_bodies(self._runtime.exchange(record, "dispatch"))

    def _deliver(
        self, call: DispatchCall, meta: torch.Tensor, record: bool, begin: float, entered: float
    ) -> DispatchResult:
        """Make the outputs, run the kernel."""
        info = meta_info(meta)
        rows, form = info.num_recv_rows, call.format
        plan = self._plans.of(meta)
        if form.row_bytes != plan.row_bytes:  # another payload with the same routing
            plan = self._plans.again(meta, form.row_bytes)
        table = plan.table(self._rank)
        planned = time.perf_counter()
        # All ranks have the same row format, but only this one knows its `out`.
        given: list[Any] = [None] * len(call.xs) if call.out is None else list(call.out)
        read = [*call.xs, call.weights, meta]
        targets = [with_target(o, rows, x, read) for o, x in zip(given, call.xs, strict=True)]
        weights, weights_address = None, 0
        if call.weights is not None:
            shape = (rows,) if info.layout == "expert" else (rows, info.topk)
            weights = call.weights.new_empty(shape)
            weights_address = weights.data_ptr()
        idx = None
        if info.layout == "rank":
            idx = call.xs[0].new_empty((rows, info.topk), dtype=torch.int64)
        _clear_padding(meta, targets, weights, idx)
        arguments = self._backend.arguments()
        for x, target, size, offset in zip(
            call.xs, targets, form.part_bytes, form.offsets, strict=True
        ):
            arguments.add_part(x.data_ptr(), target.data_ptr(), size, offset)
        arguments.set_dispatch(
            handle=self._backend.handle_address(meta),
            header_offset=form.header_offset,
            record=record,
            weights_input=0 if call.weights is None else call.weights.data_ptr(),
            weights_output=weights_address,
            weights_offset=form.weights_offset,
            weight_bytes=form.weight_bytes,
            index_output=0 if idx is None else idx.data_ptr(),
        )
        num_bytes = sum(max(x.nbytes, t.nbytes) for x, t in zip(call.xs, targets, strict=True))
        reserved = self._plans.launch(table, arguments, "dispatch", call.num_blocks, num_bytes)
        for o, target in zip(given, targets, strict=True):
            if o is not None and o is not target:
                o.copy_(target)
        recv = [t if o is None else o for o, t in zip(given, targets, strict=True)]
        self._plans.note(plan, begin, entered, planned, reserved)
        return DispatchResult(recv, weights, idx, tokens_per_expert(meta), meta)

    # -- combine -----------------------------------------------------------------------------------

    def combine(self, call: CombineCall | Exception) -> torch.Tensor:
        """Enter with `call`, or with what was wrong with this rank's arguments."""
        begin = time.perf_counter()
        words: Words = np.zeros(1, dtype=np.uint64)
        agreement: str | Exception
        if isinstance(call, Exception):
            agreement, dtype = call, ""
        else:
            agreement = call.agreement(meta_info(call.meta).serial)
            dtype = str(call.expert_out.dtype).removeprefix("torch.")
            words[0] = header_of(call.meta)["num_partials"]
        record = encode_call(OP_COMBINE, agreement, dtype, words)
        body = agreed_bodies(self._runtime.exchange(record, "combine"))
        assert isinstance(call, CombineCall)  # else the agreement has raised
        good, entered = call, time.perf_counter()
        num_partials = int(body[:, 0].max())
        return self._runtime.guarded(lambda: self._sum(good, num_partials, begin, entered))

    def _sum(
        self, call: CombineCall, num_partials: int, begin: float, entered: float
    ) -> torch.Tensor:
        num_tokens = meta_info(call.meta).num_tokens
        plan = self._plans.of(call.meta)
        table = plan.combine_table(
            self._rank, call.row_bytes, call.partial_row_bytes, num_partials, num_tokens
        )
        if (rows := int(table.header["scratch_rows"])) >= NONE:  # the same on all ranks
            raise ValueError(f"combine: {rows} partial rows on one rank, 2^32 - 1 or more")
        planned = time.perf_counter()
        read = [call.expert_out, call.weights, call.bias, call.meta]
        result = with_target(call.out, num_tokens, call.expert_out, read)
        arguments = self._backend.arguments()
        value, wire, bias = call.kinds
        arguments.set_combine(
            handle=self._backend.handle_address(call.meta),
            expert_out=call.expert_out.data_ptr(),
            row_weights=0 if call.weights is None else call.weights.data_ptr(),
            bias=0 if call.bias is None else call.bias.data_ptr(),
            result=result.data_ptr(),
            width=call.width,
            bias_stride=call.bias_stride,
            value_kind=value,
            wire_kind=wire,
            bias_kind=bias,
        )
        num_bytes = max(call.expert_out.nbytes, result.nbytes)
        reserved = self._plans.launch(table, arguments, "combine", call.num_blocks, num_bytes)
        self._plans.note(plan, begin, entered, planned, reserved)
        if call.out is not None and call.out is not result:
            call.out.copy_(result)
        return result if call.out is None else call.out


def _options(call: DispatchCall) -> DispatchOptions:
    assert call.options is not None
    return call.options


def _clear_padding(
    meta: torch.Tensor,
    targets: list[torch.Tensor],
    weights: torch.Tensor | None,
    idx: torch.Tensor | None,
) -> None:
    """Padding: weights 0 and indices -1 always, payloads zero on request."""
    zeros = bool(header_of(meta)["zero_padding"])
    for first, end in padding_spans(meta):
        if zeros:
            for target in targets:
                target[first:end].view(-1).view(torch.uint8).zero_()
        if weights is not None:
            weights[first:end] = 0
        if idx is not None:
            idx[first:end] = -1
