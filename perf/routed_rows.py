"""Rows and bytes that a routing moves, with and without deduplication, and the least time for them.

Nothing here runs an exchange: it is what the measurements are compared with.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from perf.workloads import Ints, Routing


@dataclass(frozen=True)
class RoutedRows:
    """Rows of one call, from each source rank.

    copies: [R, R], one row per choice of an expert (duplicates included), to the expert's rank.
    to_rank: [R, R], distinct tokens per rank. to_server: [R, N], distinct tokens per server.
    """

    copies: Ints
    to_rank: Ints
    to_server: Ints

    @property
    def servers(self) -> int:
        """N."""
        return int(self.to_server.shape[1])

    @property
    def ranks_per_server(self) -> int:
        """M."""
        return len(self.copies) // self.servers

    def between_servers(self, deduplicated: bool) -> Ints:
        """[N, N] rows over scale-out, zero on the diagonal."""
        n, m = self.servers, self.ranks_per_server
        matrix: Ints
        if deduplicated:
            matrix = self.to_server.reshape(n, m, n).sum(axis=1)
        else:
            matrix = self.copies.reshape(n, m, n, m).sum(axis=(1, 3))
        matrix[np.diag_indices(n)] = 0
        return matrix

    def scale_out_rows(self, deduplicated: bool) -> int:
        """Rows of all ranks over scale-out."""
        return int(self.between_servers(deduplicated).sum())

    def bound_us(self, deduplicated: bool, row_bytes: float, scale_out_GBps: float) -> float:  # noqa: N803
        """The least time over scale-out: the busiest server's rows, shared by its ranks' NICs.

        The same both ways: the way back has the transposed matrix.
        """
        matrix = self.between_servers(deduplicated)
        busiest = max(matrix.sum(axis=0).max(), matrix.sum(axis=1).max())
        return float(busiest) / self.ranks_per_server * row_bytes / (scale_out_GBps * 1e3)


def routed_rows(topk_idx: Routing, owner: Ints, servers: int) -> RoutedRows:
    """Count a call. topk_idx: per rank [tokens, K], -1 for none. owner: [E], each expert's rank."""
    num_ranks = len(topk_idx)
    copies, to_rank, to_server = [], [], []
    for ids in topk_idx:
        copies.append(np.bincount(owner[ids[ids >= 0]], minlength=num_ranks))
        hit = ranks_hit(ids, owner, num_ranks)
        to_rank.append(hit.sum(axis=0))
        to_server.append(servers_hit(hit, servers).sum(axis=0))
    return RoutedRows(*(np.array(a, dtype=np.int64) for a in (copies, to_rank, to_server)))


def ranks_hit(ids: Ints, owner: Ints, num_ranks: int) -> npt.NDArray[np.bool_]:
    """[tokens, R]: whether a token has an expert on a rank."""
    hit = np.zeros((len(ids), num_ranks), dtype=np.bool_)
    token, choice = np.nonzero(ids >= 0)
    hit[token, owner[ids[token, choice]]] = True
    return hit


def servers_hit(hit: npt.NDArray[np.bool_], servers: int) -> npt.NDArray[np.bool_]:
    """[tokens, N] from [tokens, R]."""
    tiles = hit.reshape(len(hit), servers, hit.shape[1] // servers)
    hit_servers: npt.NDArray[np.bool_] = np.logical_or.reduce(tiles, axis=2)
    return hit_servers


def distinct_servers(topk_idx: Routing, owner: Ints, servers: int, remote: bool = False) -> Ints:
    """Distinct servers of every token, all ranks' tokens in order.

    remote: without the token's own server.
    """
    num_ranks, found = len(topk_idx), []
    for rank, ids in enumerate(topk_idx):
        hit = servers_hit(ranks_hit(ids, owner, num_ranks), servers)
        if remote:
            hit[:, rank // (num_ranks // servers)] = False
        found.append(hit.sum(axis=1))
    return np.concatenate(found).astype(np.int64)


def expected_distinct_servers(owner: Ints, num_ranks: int, servers: int, top_k: int) -> float:
    """Expected distinct servers of a token with top_k uniform experts, none twice.

    A server with e of E experts is missed with probability C(E - e, k) / C(E, k). With E / N
    experts each: N * (1 - C(E - E/N, k) / C(E, k)); 4 servers, 64 experts, top-8: 3.66.
    """
    num_experts = len(owner)
    own = np.bincount(owner // (num_ranks // servers), minlength=servers)
    all_ways = math.comb(num_experts, top_k)
    return sum(1 - math.comb(num_experts - int(e), top_k) / all_ways for e in own)


def expert_loads(topk_idx: Routing, num_experts: int) -> Ints:
    """[E] choices of each expert."""
    flat = np.concatenate([ids.reshape(-1) for ids in topk_idx])
    return np.bincount(flat[flat >= 0], minlength=num_experts).astype(np.int64)


def gini(loads: Ints) -> float:
    """Gini coefficient: 0 where all are equal, towards 1 where one has everything."""
    total, n = int(loads.sum()), len(loads)
    if total == 0:
        return 0.0
    ranked = np.sort(loads)
    return float(2 * (np.arange(1, n + 1) * ranked).sum() / (n * total) - (n + 1) / n)
