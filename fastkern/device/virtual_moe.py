"""Dispatch of a virtual cluster: CPU tensors of all ranks in, what every rank receives out."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from ..moe.dispatch_arguments import DispatchCall, DispatchOptions, prepare_dispatch
from ..moe.handle import header_of, padding_spans
from .virtual_handle import VirtualHandle, planned, routed_handle

if TYPE_CHECKING:
    from .virtual_runtime import VirtualRuntime


@dataclass(frozen=True)
class VirtualDispatch:
    """What the ranks received: see Communicator.dispatch for each.

    recv: per rank its tensors. weights: per rank, or None. idx: rank layout: per rank int64
    [rows, K], else None. tokens_per_expert: per rank int64 [own experts]. handle: to be closed when
    it is of no more use.
    """

    recv: list[list[torch.Tensor]]
    weights: list[torch.Tensor] | None
    idx: list[torch.Tensor] | None
    tokens_per_expert: list[torch.Tensor]
    handle: VirtualHandle


class Dispatch:
    """One prepared dispatch: routed and planned, its tensors on the device.

    xs: per rank its tensors [T, ...]. topk_idx: per rank [T, K]. topk_weights: per rank [T, K], or
    None. options: None with a handle, whose routing is used again. handle: of this call; it is not
    closed with it. Raises TypeError or ValueError for bad arguments.
    """

    def __init__(
        self,
        cluster: VirtualRuntime,
        xs: Sequence[Sequence[torch.Tensor]],
        topk_idx: Sequence[torch.Tensor] | None,
        topk_weights: Sequence[torch.Tensor] | None,
        options: DispatchOptions | None,
        handle: VirtualHandle | None = None,
    ) -> None:
        self._cluster = cluster
        num_ranks = cluster.num_ranks
        none: list[None] = [None] * num_ranks
        self._calls = [
            prepare_dispatch(
                xs[rank],
                (topk_idx or none)[rank],
                (topk_weights or none)[rank],
                options,
                None if handle is None else handle.info(rank),
                None if handle is None else handle.starts[rank],
                None,
                num_ranks,
            )
            for rank in range(num_ranks)
        ]
        self._check_alike()
        self._record = handle is None
        with ExitStack() as made:
            if handle is None:
                handle = routed_handle(cluster, self._calls)
                made.callback(handle.close)
            self.handle = handle
            self.infos = [handle.info(rank) for rank in range(num_ranks)]
            plan, row_bytes = handle.plan, self._calls[0].format.row_bytes
            if plan.row_bytes != row_bytes:  # another payload with the same routing
                plan = planned(cluster, handle.counts, row_bytes)
            self.plan = plan
            self.launch = cluster.prepare(
                "fastkern_dispatch", [plan.table(rank) for rank in range(num_ranks)]
            )
            made.callback(self.launch.close)
            self._inputs, self._outputs = cluster.allocations(), cluster.allocations(True)
            made.callback(self._inputs.close)
            made.callback(self._outputs.close)
            self._recv: list[list[int]] = [[] for _ in range(num_ranks)]
            for rank in range(num_ranks):
                self._bind(rank)
            made.pop_all()

    def close(self) -> None:
        """Free its memory, but not the handle's. A second call does nothing."""
        self.launch.close()
        self._inputs.close()
        self._outputs.close()

    def _check_alike(self) -> None:
        first = self._calls[0]
        for rank, call in enumerate(self._calls):
            if (
                call.format != first.format
                or call.topk != first.topk
                or call.dtypes != first.dtypes
            ):
                raise ValueError(f"ranks 0 and {rank} disagree: {first.format} and {call.format}")

    def _bind(self, rank: int) -> None:
        """A rank's tensors, and its MoeArgs."""
        call, info, form = self._calls[rank], self.infos[rank], self._calls[rank].format
        moe = self.launch.moe[rank]
        rows, empty = info.num_recv_rows, self._outputs.empty
        for p, (x, size, offset) in enumerate(
            zip(call.xs, form.part_bytes, form.offsets, strict=True)
        ):
            self._recv[rank].append(empty(rows * size, f"output {p} of rank {rank}"))
            part = moe["parts"][p]
            part["input"] = self._inputs.filled(x, f"x[{p}] of rank {rank}")
            part["output"] = self._recv[rank][p]
            part["row_bytes"], part["offset"] = size, offset
        moe["num_parts"] = len(call.xs)
        moe["handle"] = self.handle.addresses[rank]
        moe["header_offset"], moe["weights_offset"] = form.header_offset, form.weights_offset
        moe["weight_bytes"] = form.weight_bytes
        moe["record"] = self._record
        if call.weights is not None:
            moe["weights_input"] = self._inputs.filled(call.weights, f"weights of rank {rank}")
            per_row = 1 if info.layout == "expert" else info.topk
            size = rows * per_row * form.weight_bytes
            moe["weights_output"] = empty(size, f"weights received by rank {rank}")
        if info.layout == "rank":
            moe["index_output"] = empty(rows * info.topk * 8, f"index output of rank {rank}")

    # -- running -----------------------------------------------------------------------------------

    def run(self) -> None:
        """Launch, and wait for the end. Repeated runs leave the handle as the first one made it."""
        for rank in range(self._cluster.num_ranks):
            self._clear_padding(rank)
        self._cluster.run(self.launch, "dispatch")
        self.launch.moe["record"] = 0

    def _clear_padding(self, rank: int) -> None:
        """As every dispatch: weights 0 and indices -1 in padding, payloads zero on request."""
        call, info, moe = self._calls[rank], self.infos[rank], self.launch.moe[rank]
        zeros = bool(header_of(self.handle.starts[rank])["zero_padding"])
        for first, end in padding_spans(self.handle.starts[rank]):
            clears = []
            if zeros:
                sizes = call.format.part_bytes
                clears += [(a, n, 0) for a, n in zip(self._recv[rank], sizes, strict=True)]
            if call.weights is not None:
                per_row = 1 if info.layout == "expert" else info.topk
                clears.append((int(moe["weights_output"]), per_row * call.format.weight_bytes, 0))
            if info.layout == "rank":
                clears.append((int(moe["index_output"]), 8 * info.topk, 0xFF))
            for address, row_bytes, value in clears:
                self._cluster.driver.fill(
                    address + first * row_bytes,
                    value,
                    (end - first) * row_bytes,
                    self._cluster.stream,
                )

    def read(self) -> VirtualDispatch:
        """What was received, as CPU tensors; checks the guards."""
        for memory in (self._inputs, self._outputs):
            memory.check_guards()
        ranks = range(self._cluster.num_ranks)
        calls: list[DispatchCall] = self._calls
        return VirtualDispatch(
            [self._recv_of(rank) for rank in ranks],
            None if calls[0].weights is None else [self._weights_of(rank) for rank in ranks],
            None if self.infos[0].layout == "expert" else [self._idx_of(rank) for rank in ranks],
            [self.handle.tokens_per_expert(rank) for rank in ranks],
            self.handle,
        )

    def _recv_of(self, rank: int) -> list[torch.Tensor]:
        rows = self.infos[rank].num_recv_rows
        return [
            self._outputs.tensor(address, (rows, *x.shape[1:]), x.dtype)
            for address, x in zip(self._recv[rank], self._calls[rank].xs, strict=True)
        ]

    def _weights_of(self, rank: int) -> torch.Tensor:
        info, given = self.infos[rank], self._calls[rank].weights
        assert given is not None
        rows = info.num_recv_rows
        shape = (rows,) if info.layout == "expert" else (rows, info.topk)
        address = int(self.launch.moe[rank]["weights_output"])
        return self._outputs.tensor(address, shape, given.dtype)

    def _idx_of(self, rank: int) -> torch.Tensor:
        info = self.infos[rank]
        address = int(self.launch.moe[rank]["index_output"])
        return self._outputs.tensor(address, (info.num_recv_rows, info.topk), torch.int64)
