"""Counts of all ranks, and the first rows that follow from them: pure arithmetic."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from .placement import Placement

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class RouteCounts:
    """What dispatch is planned from, of all ranks.

    copies: int64 [R, E], choices of each rank for each expert, duplicates counted. to_server: int64
    [R, N], to_rank: int64 [R, R], distinct tokens of each rank with a choice there.
    """

    copies: Ints
    to_server: Ints
    to_rank: Ints

    @classmethod
    def from_rows(cls, rows: npt.NDArray[Any], num_experts: int, servers: int) -> RouteCounts:
        """From each rank's own counts, [R, E + N + R]."""
        counts = rows.astype(np.int64)
        e, n = num_experts, servers
        return cls(
            np.ascontiguousarray(counts[:, :e]),
            np.ascontiguousarray(counts[:, e : e + n]),
            np.ascontiguousarray(counts[:, e + n :]),
        )

    def row(self, rank: int) -> Ints:
        """One rank's own counts, [E + N + R]."""
        return np.concatenate([self.copies[rank], self.to_server[rank], self.to_rank[rank]])

    def check(self, num_experts: int, servers: int, num_ranks: int) -> None:
        """Raise ValueError when a shape is wrong or a count negative."""
        shapes = {
            "copies": (num_ranks, num_experts),
            "to_server": (num_ranks, servers),
            "to_rank": (num_ranks, num_ranks),
        }
        for name, shape in shapes.items():
            counts = np.asarray(getattr(self, name))
            if counts.shape != shape or counts.dtype.kind not in "iu":
                raise ValueError(
                    f"counts.{name} must be integers {list(shape)}, "
                    f"not {counts.dtype} {list(counts.shape)}"
                )
            if (counts < 0).any():
                raise ValueError(f"counts.{name} has negative entries")


@dataclass(frozen=True)
class FirstRows:
    """First rows of one rank's tokens wherever they go; see RouteArgs in kernels/body/route.h.

    slot: [E]. window: [R]. pack_list: [R], pack_rows in all. returned: [N]. partial: [M].
    tokens_per_expert: [own experts]. rows_on: [R] output rows of each rank, padding included.
    """

    slot: npt.NDArray[np.uint64]
    window: npt.NDArray[np.uint64]
    pack_list: npt.NDArray[np.uint64]
    pack_rows: int
    returned: npt.NDArray[np.uint64]
    partial: npt.NDArray[np.uint64]
    tokens_per_expert: Ints
    rows_on: Ints


def first_rows(
    counts: RouteCounts,
    placement: Placement,
    rank: int,
    servers: int,
    layout: str,
    alignment: int,
) -> FirstRows:
    """Where the rows of `rank` begin, from the counts of all ranks.

    Output, expert layout: by expert, then source rank, each expert padded to `alignment`. Window:
    by source rank. Pack list: by destination rank; tokens for another server stand at the rank of
    this one's index there.
    """
    num_ranks = len(counts.copies)
    m = num_ranks // servers
    server, local = divmod(rank, m)
    per_expert = counts.copies.sum(axis=0)
    padded = -(-per_expert // alignment) * alignment
    order = np.lexsort((placement.local_index, placement.owner))
    begins = np.zeros(len(padded), dtype=np.int64)
    totals = np.cumsum(padded[order])
    rows_on = np.zeros(num_ranks, dtype=np.int64)
    np.add.at(rows_on, placement.owner, padded)
    before_rank = np.cumsum(rows_on) - rows_on
    begins[order] = totals - padded[order] - before_rank[placement.owner[order]]
    slot = begins + counts.copies[:rank].sum(axis=0)
    if layout == "rank":
        rows_on = counts.to_rank.sum(axis=0)

    listed = np.zeros(num_ranks, dtype=np.int64)
    listed[server * m : (server + 1) * m] = counts.to_rank[rank, server * m : (server + 1) * m]
    remote = np.arange(servers) != server
    listed[np.arange(servers)[remote] * m + local] = counts.to_server[rank, remote]
    back = np.where(remote, counts.to_server[rank], 0)
    partial = counts.to_rank[rank, server * m : (server + 1) * m].copy()
    partial[local] = 0
    return FirstRows(
        slot.astype(np.uint64),
        counts.to_rank[:rank].sum(axis=0).astype(np.uint64),
        _before(listed),
        int(listed.sum()),
        _before(back),
        _before(partial),
        per_expert[placement.experts_of(rank)].astype(np.int64),
        rows_on,
    )


def _before(counts: Ints) -> npt.NDArray[np.uint64]:
    return (np.cumsum(counts) - counts).astype(np.uint64)
