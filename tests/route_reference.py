"""What route finds, by definition: counts, row headers, pack list and token map of one rank."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from fastkern.moe.handle import NONE

Words = npt.NDArray[np.uint32]
UNWRITTEN = 0xDDDDDDDD


class Case(NamedTuple):
    """One rank's view. owner: [E]; idx: [T, K]."""

    servers: int
    gpus_per_server: int
    rank: int
    owner: list[int]
    idx: npt.NDArray[np.int64]

    @property
    def num_ranks(self) -> int:
        return self.servers * self.gpus_per_server

    @property
    def local_index(self) -> list[int]:
        return [self.owner[:e].count(rank) for e, rank in enumerate(self.owner)]

    def ranks_of(self, token: int) -> list[int | None]:
        """The rank of each choice."""
        return [None if e < 0 else self.owner[e] for e in self.idx[token]]

    def server_of(self, rank: int | None) -> int | None:
        return None if rank is None else rank // self.gpus_per_server

    def totals(self) -> list[int]:
        """Copies for each expert, distinct tokens for each server and each rank."""
        tokens = range(len(self.idx))
        copies = [int((self.idx == e).sum()) for e in range(len(self.owner))]
        ranks = [set(self.ranks_of(t)) for t in tokens]
        servers = [{self.server_of(r) for r in of_token} for of_token in ranks]
        to_server = [sum(s in found for found in servers) for s in range(self.servers)]
        to_rank = [sum(r in found for found in ranks) for r in range(self.num_ranks)]
        return copies + to_server + to_rank


class Bases(NamedTuple):
    """First rows, see RouteArgs in kernels/body/route.h."""

    slot: list[int]
    window: list[int]
    list: list[int]
    returned: list[int]
    partial: list[int]


class Filled(NamedTuple):
    """Arrays of a handle. entries: [rows, K, (slot, window row, local rank)]; map: [T, N + M]."""

    pack_list: Words
    entries: Words
    token_map: Words


def random_bases(case: Case, seed: int) -> tuple[Bases, int]:
    """Any first rows but those of the pack list, which has no gaps; and the rows of that."""
    generator = np.random.default_rng(seed)

    def draw(count: int) -> list[int]:
        return [int(n) for n in generator.integers(0, 1000, count)]

    m, n = case.gpus_per_server, case.servers
    own_server, own_local = divmod(case.rank, m)
    totals = case.totals()
    to_server, to_rank = totals[-case.num_ranks - n :][:n], totals[-case.num_ranks :]
    first, rows = [], 0
    for rank in range(case.num_ranks):
        first.append(rows)
        if rank // m == own_server:
            rows += to_rank[rank]
        elif rank % m == own_local:
            rows += to_server[rank // m]
    bases = Bases(draw(len(case.owner)), draw(case.num_ranks), first, draw(n), draw(m))
    return bases, rows


def expected(case: Case, bases: Bases, num_rows: int, layout: str) -> Filled:
    """By definition, token after token."""
    m, n, topk = case.gpus_per_server, case.servers, case.idx.shape[1]
    own_server, own_local = divmod(case.rank, m)
    filled = Filled(
        np.full(num_rows, UNWRITTEN, np.uint32),
        np.full((num_rows, topk, 3), NONE, np.uint32),
        np.full((len(case.idx), n + m), NONE, np.uint32),
    )
    copies = [0] * len(case.owner)
    for token, experts in enumerate(case.idx):
        ranks = case.ranks_of(token)

        def before(target: int, token: int = token) -> int:
            """Earlier tokens with a choice on the rank."""
            return sum(target in case.ranks_of(t) for t in range(token))

        def before_server(server: int, token: int = token) -> int:
            """Earlier tokens with a choice on the server."""
            return sum(
                server in [case.server_of(r) for r in case.ranks_of(t)] for t in range(token)
            )

        headers: list[list[int]] = []
        for expert, rank in zip(experts, ranks, strict=True):
            if rank is None:
                headers.append([NONE] * 3)
                continue
            slot = bases.slot[expert] + copies[expert]
            copies[expert] += 1
            if layout == "rank":
                slot = case.local_index[expert]
            headers.append([slot, bases.window[rank] + before(rank), rank % m])

        def put(row: int, of_row: list[bool], token: int = token, headers: Any = headers) -> None:
            assert filled.pack_list[row] == UNWRITTEN
            filled.pack_list[row] = token
            for k in range(topk):
                if of_row[k]:
                    filled.entries[row, k] = headers[k]

        for rank in sorted({r for r in ranks if r is not None and r // m == own_server}):
            place = before(rank)
            put(bases.list[rank] + place, [r == rank for r in ranks])
            back = bases.window[rank] if rank == case.rank else bases.partial[rank % m]
            filled.token_map[token, n + rank % m] = back + place
        for server in sorted({r // m for r in ranks if r is not None} - {own_server}):
            place = before_server(server)
            put(
                bases.list[server * m + own_local] + place,
                [case.server_of(r) == server for r in ranks],
            )
            filled.token_map[token, server] = bases.returned[server] + place
    return filled
