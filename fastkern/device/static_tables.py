"""Tables of a direct static exchange: lowered for the most rows, filled in on the device.

Every stream of a direct plan moves the rows of one pair: of a rank for a server, or for a rank. The
tables are lowered with C rows for each pair, so that each has a place in staging, windows and lists
whatever the others have. How many rows a pair has in a call, the device writes over C.

Which pair a stream belongs to is found by lowering once more, with a different number of rows for
each pair: the streams come in the same order, and tell by their rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ..moe.counts import RouteCounts
from ..moe.static_shape import StaticShape
from ..planner import MoePlan, StageTable, Topology, plan_moe
from ..planner.api import DEFAULT_CHUNK_BYTES

Ints = npt.NDArray[np.int64]
Patches = npt.NDArray[np.uint32]  # [n, 2]: RowPatch in kernels/body/static.h


@dataclass(frozen=True)
class StaticTables:
    """Of one rank. combine: None without one. patches: of both tables, as if the combine's followed
    `combine_at` bytes after the dispatch's began."""

    dispatch: StageTable
    combine: StageTable | None
    combine_at: int
    patches: Patches

    @property
    def num_bytes(self) -> int:
        """Of both."""
        return self.combine_at + (0 if self.combine is None else len(self.combine.bytes))


def most_counts(shape: StaticShape, topology: Topology) -> RouteCounts:
    """C tokens of every rank for every server and rank, and nothing for any expert."""
    r, n, most = topology.num_ranks, topology.servers, shape.num_max_tokens
    return RouteCounts(
        np.zeros((r, shape.options.num_experts), dtype=np.int64),
        np.full((r, n), most, dtype=np.int64),
        np.full((r, r), most, dtype=np.int64),
    )


class DirectPlan:
    """The plan for the most rows, and the one by which pairs are told."""

    def __init__(
        self, shape: StaticShape, topology: Topology, chunk_bytes: int = DEFAULT_CHUNK_BYTES
    ) -> None:
        self._shape = shape
        self._topology = topology
        self._chunk_bytes = chunk_bytes
        r, n = topology.num_ranks, topology.servers
        # Numbers of rows, one for each pair, such that no rank of a server gets more than the
        # server, and its ranks together no less.
        first = 2 * r * (r + n)
        to_rank = first + np.arange(r * r, dtype=np.int64).reshape(r, r)
        to_server = first + r * r + np.arange(r * n, dtype=np.int64).reshape(r, n)
        if topology.gpus_per_server == 1:
            to_server = to_rank
        self._probe = self._planned(to_server, to_rank)
        self._pair_of = self._pairs(to_server, to_rank)
        self._probe_tokens = 4 * first
        num_keys = shape.options.num_experts + n + r
        self._pair_of[self._probe_tokens] = r * num_keys
        most = most_counts(shape, topology)
        self.plan = self._planned(most.to_server, most.to_rank)

    def _planned(self, to_server: Ints, to_rank: Ints) -> MoePlan:
        row_bytes = self._shape.format.row_bytes
        return plan_moe(
            to_server,
            to_rank,
            self._topology,
            row_bytes,
            "direct",
            chunk_bytes=self._chunk_bytes,
        )

    def _pairs(self, to_server: Ints, to_rank: Ints) -> dict[int, int]:
        """The count, as RowPatch numbers it, by the probe's rows."""
        r, n = self._topology.num_ranks, self._topology.servers
        experts = self._shape.options.num_experts
        num_keys = experts + n + r
        found = {}
        for rank in range(r):
            for server in range(n):
                found[int(to_server[rank, server])] = rank * num_keys + experts + server
            for peer in range(r):
                found[int(to_rank[rank, peer])] = rank * num_keys + experts + n + peer
        return found

    def data_bytes(self) -> int:
        """Staging and window that any call needs, equal on all ranks."""
        shape, plan = self._shape, self.plan
        table = plan.table(0)
        table.header["row_bytes"] = shape.most_dispatch_bytes
        need = table.data_layout().bytes
        if shape.has_combine:
            sizes = *shape.most_combine_bytes, self.num_partials, shape.num_max_tokens
            need = max(need, plan.combine_table(0, *sizes).data_layout().bytes)
        return need

    @property
    def num_partials(self) -> int:
        """The most partial rows that a rank can give out as a proxy."""
        m = self._topology.gpus_per_server
        others = self._topology.servers - 1
        return others * self._shape.num_max_tokens * min(self._shape.topk, m - 1)

    def tables(self, rank: int) -> StaticTables:
        """Those of one rank."""
        dispatch = self.plan.table(rank)
        patches = self._patches(dispatch, self._probe.table(rank), 0)
        at = -(-len(dispatch.bytes) // 256) * 256
        if not self._shape.has_combine:
            return StaticTables(dispatch, None, at, np.array(patches, dtype=np.uint32))
        sizes = self._shape.combine_row_bytes, self._shape.partial_row_bytes, self.num_partials
        combine = self.plan.combine_table(rank, *sizes, self._shape.num_max_tokens)
        probe = self._probe.combine_table(rank, *sizes, self._probe_tokens)
        patches += self._patches(combine, probe, at)
        return StaticTables(dispatch, combine, at, np.array(patches, dtype=np.uint32))

    def _patches(self, table: StageTable, probe: StageTable, at: int) -> list[tuple[int, int]]:
        """(word, count) for the rows of every stream and of its one segment."""
        streams, known = table.streams, probe.streams
        same = ["peer", "slot", "gate_slot", "first_segment", "num_segments"]
        if len(streams) != len(known) or any((streams[f] != known[f]).any() for f in same):
            raise AssertionError("streams of a direct plan depend on the numbers of rows")
        if (streams["num_segments"] != 1).any():
            raise AssertionError("a stream of a direct plan has not one segment")
        patches = []
        for k, rows in enumerate(known["num_rows"]):
            count = self._pair_of[int(rows)]
            segment = int(streams["first_segment"][k])
            for array, index in ((streams, k), (table.segments, segment)):
                word = (at + _offset(table, array, index)) // 8
                patches.append((word, count))
        return patches


def _offset(table: StageTable, array: Any, index: int) -> int:
    """Bytes from the start of a table to `num_rows` of a record."""
    begin = array.__array_interface__["data"][0] - table.bytes.__array_interface__["data"][0]
    return int(begin + index * array.dtype.itemsize + array.dtype.fields["num_rows"][1])
