"""How much heap a dispatch and a combine need per rank: the formula, and its worst case.

Parts are rounded up to 256 bytes each. Rows are counted by the rank that has the most, so that all
ranks have the same layout. N servers of M ranks, R = N * M, T tokens at most on a rank, K choices;
row: bytes of a dispatched row with weights and header (RowFormat); wire and sum: bytes of a
combined row between servers and of a float32 (float64) row, multiples of 16.

    part                 dispatch                           worst case
    send staging         rows put, balanced                 S row
    receive staging      rows received, balanced            (N - 1) T row
    window (M > 1)       distinct tokens received           R T row
    arrivals (N, M > 1)  16 bytes per chunk flag and source  64 R * 16 M

    part                 combine                            worst case
    send staging         as the dispatch's receive staging  (N - 1) T wire
    receive staging      as the dispatch's send staging     S wire
    window               an owner's rows sent by servers    T min(K, N - 1) wire
    partial rows         of owners: sums for them by ranks  T min(K, M - 1) sum
                         of their server;
                         of proxies: sums that they get     (N - 1) T min(K, M - 1) sum

S is T min(K, N - 1), and what rounding adds where a server's rows for many servers are divided over
M rails: at most (N - 1)(M - 1) / M rows, and never more than (N - 1) T in all.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..planner import Topology
from ..planner.api import DEFAULT_CHUNK_SLOTS
from ..planner.table import ARRIVAL_BYTES

_PART = 256


def _rounded(*parts: int) -> int:
    return sum(-(-part // _PART) * _PART for part in parts)


@dataclass(frozen=True)
class WorstCase:
    """Bounds on rows for up to `num_max_tokens` tokens of `topk` choices on each rank."""

    topology: Topology
    num_max_tokens: int
    topk: int

    @property
    def sent(self) -> int:
        """Rows that a rank puts, and that come back to it."""
        others, m = self.topology.servers - 1, self.topology.gpus_per_server
        return min(others * self.num_max_tokens, self.returned + others * (m - 1) // m)

    @property
    def returned(self) -> int:
        """Rows of a rank's own tokens that go to other servers."""
        return min(self.topk, self.topology.servers - 1) * self.num_max_tokens

    @property
    def received(self) -> int:
        """Rows that a rank gets over scale-out."""
        return (self.topology.servers - 1) * self.num_max_tokens

    @property
    def window(self) -> int:
        """Distinct tokens that a rank gets."""
        return self.topology.num_ranks * self.num_max_tokens

    @property
    def _others(self) -> int:
        return min(self.topk, self.topology.gpus_per_server - 1)

    @property
    def owner_partials(self) -> int:
        """Sums of other ranks of the server for a rank's own tokens."""
        return self.num_max_tokens * self._others

    @property
    def proxy_partials(self) -> int:
        """Sums of other ranks of the server for the rows that a rank brought."""
        return self.received * self._others

    def dispatch_bytes(self, row_bytes: int) -> int:
        """Heap per rank for any dispatch of rows of this size."""
        n, m = self.topology.servers, self.topology.gpus_per_server
        arrivals = self.topology.num_ranks * DEFAULT_CHUNK_SLOTS * m * ARRIVAL_BYTES
        return _rounded(
            self.sent * row_bytes,
            self.received * row_bytes,
            self.window * row_bytes if m > 1 else 0,
            arrivals if n > 1 and m > 1 else 0,
        )

    def combine_bytes(self, wire_row_bytes: int, sum_row_bytes: int) -> int:
        """Heap per rank for any combine of rows of these sizes."""
        partials = self.owner_partials + self.proxy_partials
        return _rounded(
            self.received * wire_row_bytes,
            self.sent * wire_row_bytes,
            self.returned * wire_row_bytes,
            partials * sum_row_bytes,
        )
