"""Making a handle: sizes from the counts of all ranks, the rest by route."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ..kernels import _host
from ..planner import MoePlan, Topology
from ..planner.api import DEFAULT_CHUNK_SLOTS
from ..records import Words
from .counts import FirstRows, RouteCounts, first_rows
from .dispatch_arguments import DispatchCall, DispatchOptions
from .handle import HEADER, LAYOUTS, MAGIC, array_of
from .placement import Placement
from .sizes import worst_case_rows


@dataclass(frozen=True)
class HandleOrigin:
    """Who makes a handle. tag: of the communicator. serial: of the call, equal on all ranks."""

    tag: int
    serial: int
    rank: int
    topology: Topology


@dataclass(frozen=True)
class HandleForm:
    """A handle before its memory is there. header: one HEADER record. first: where rows begin."""

    header: Any
    first: FirstRows
    counts: RouteCounts
    plan: MoePlan

    @property
    def num_bytes(self) -> int:
        """Of the whole handle."""
        return int(self.header["handle_bytes"][0])

    @property
    def num_start_bytes(self) -> int:
        """Of what `write_start` writes; route and dispatch fill the rest."""
        return int(_host.handle_layout(self.header.view(np.uint8))["pack_list"])

    @property
    def most_partials(self) -> int:
        """The most partial rows that any rank can give out as a proxy.

        Of every row that it brought, one to each other rank of its server that the token chose.
        """
        m, topk = int(self.header["gpus_per_server"][0]), int(self.header["topk"][0])
        ranks = range(int(self.header["num_ranks"][0]))
        return max(self.plan.staging_rows_of(rank)[1] for rank in ranks) * min(topk, m - 1)

    def write_start(self, meta: torch.Tensor) -> None:
        """Write header and counts to the start of `meta`, int64 [num_bytes / 8]."""
        counts, own = self.counts, self.first.tokens_per_expert
        meta.numpy().view(np.uint8)[: HEADER.itemsize] = self.header.view(np.uint8)
        array_of(meta, "to_server", np.int64, counts.to_server.size)[:] = counts.to_server.ravel()
        array_of(meta, "to_rank", np.int64, counts.to_rank.size)[:] = counts.to_rank.ravel()
        array_of(meta, "tokens_per_expert", np.int64, len(own))[:] = own


def handle_form(
    call: DispatchCall,
    counts: RouteCounts,
    out_rows: Words,
    plan: MoePlan,
    origin: HandleOrigin,
) -> HandleForm:
    """Sizes and first rows of a dispatch. out_rows: [R], 1 + rows of each rank's `out`, 0 without.

    Raises ValueError, the same on every rank, where a rank has not the room that was promised.
    """
    assert call.options is not None
    options, topology = call.options, origin.topology
    placement = Placement(options.num_experts, topology.num_ranks, options.expert_to_rank)
    first = first_rows(
        counts,
        placement,
        origin.rank,
        topology.servers,
        options.layout,
        options.expert_alignment,
    )
    _check_sizes(first.rows_on, counts)
    num_recv_rows = _recv_rows(options, call.topk, placement, first, out_rows, origin.rank)
    sent, received = plan.staging_rows_of(origin.rank)
    header = new_header(
        origin,
        options,
        len(first.tokens_per_expert),
        topk=call.topk,
        plan_row_bytes=call.format.row_bytes,
        num_tokens=call.num_tokens,
        pack_rows=first.pack_rows,
        window_rows=int(counts.to_rank[:, origin.rank].sum()),
        receive_rows=received,
        num_recv_rows=num_recv_rows,
        sent_rows=sent,
        packed_rows=plan.packed_rows_of(origin.rank),
    )
    return HandleForm(header, first, counts, plan)


def new_header(
    origin: HandleOrigin, options: DispatchOptions, num_own_experts: int, **sizes: int
) -> Any:
    """One HEADER record. sizes: the fields that counts decide, and topk."""
    topology = origin.topology
    header: Any = np.zeros(1, dtype=HEADER)
    header["magic"] = MAGIC
    header["communicator"] = origin.tag
    header["serial"] = origin.serial
    header["rank"] = origin.rank
    header["num_ranks"] = topology.num_ranks
    header["servers"] = topology.servers
    header["gpus_per_server"] = topology.gpus_per_server
    header["num_experts"] = options.num_experts
    header["num_own_experts"] = num_own_experts
    header["alignment"] = options.expert_alignment
    header["num_max_tokens"] = options.num_max_tokens_per_rank or 0
    header["layout"] = LAYOUTS.index(options.layout)
    header["zero_padding"] = options.zero_padding
    if topology.servers > 1 and topology.gpus_per_server > 1:
        header["num_arrivals"] = topology.num_ranks * DEFAULT_CHUNK_SLOTS
    for name, value in sizes.items():
        header[name] = value
    header["handle_bytes"] = int(_host.handle_layout(header.view(np.uint8))["bytes"])
    return header


def _recv_rows(
    options: DispatchOptions,
    topk: int,
    placement: Placement,
    first: FirstRows,
    out_rows: Words,
    own_rank: int,
) -> int:
    """Rows of this rank's output; all ranks raise ValueError where one has not enough."""
    limit = options.num_max_tokens_per_rank
    room = [int(rows) for rows in first.rows_on]
    if limit is not None:
        align, layout = options.expert_alignment, options.layout
        room = [
            worst_case_rows(placement.num_ranks, limit, topk, int(own), align, layout)
            for own in placement.num_owned
        ]
    for rank, rows in enumerate(first.rows_on):
        if rows > room[rank]:
            raise ValueError(
                f"dispatch: rank {rank} would receive {rows} rows, but num_max_tokens_per_rank "
                f"{limit} makes room for {room[rank]}"
            )
        if out_rows[rank] and int(out_rows[rank]) - 1 != room[rank]:
            raise ValueError(
                f"dispatch: out of rank {rank} has {int(out_rows[rank]) - 1} rows, but "
                f"{room[rank]} are received"
            )
    return room[own_rank]


def _check_sizes(rows_on: Any, counts: RouteCounts) -> None:
    most = max(int(rows_on.max()), int(counts.to_rank.sum(axis=0).max()))
    if most >= (1 << 32) - 1:
        raise ValueError(f"dispatch: {most} rows on one rank, more than 2^32 - 2")
