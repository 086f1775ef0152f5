"""Where every choice of every token goes: all ranks at once, by definition."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

NONE = 0xFFFFFFFF
Words = npt.NDArray[np.uint32]
Ints = npt.NDArray[np.int64]


class Choice(NamedTuple):
    """A token's choice of an expert."""

    source: int  # rank
    token: int
    k: int
    expert: int


@dataclass(frozen=True)
class Route:
    """What one rank's handle holds after route, and what it is to get; see kernels/body/handle.h.

    T tokens of K choices; N servers of M ranks. layout: "expert" or "rank".

    to_server: int64 [N], to_rank: int64 [R], distinct tokens with a choice there.
    pack_list: uint32 [rows sent], the token of each: by destination rank, then token. A row for
        another server stands at the rank of this one's index there.
    entries: uint32 [rows sent, K, 3], its header: output row (rank layout: the expert's index on
        its rank), window row and local rank of each choice that the row is for, else NONE.
    token_map: uint32 [T, N + M], where a token's sums come back: window row of each other server,
        partial row of each other local rank; own rank: the dispatch's window row; else NONE.
    window_rows: distinct tokens that this rank gets.
    filled: bool [rows of its output], which of them are not padding.
    """

    layout: str
    num_tokens: int
    topk: int
    to_server: Ints
    to_rank: Ints
    pack_list: Words
    entries: Words
    token_map: Words
    window_rows: int
    filled: npt.NDArray[np.bool_]


def route_all(
    servers: int,
    topk_idx: Sequence[npt.NDArray[np.integer]],
    owner: Sequence[int],
    layout: str = "expert",
    alignment: int = 1,
    num_recv_rows: Sequence[int] | None = None,
) -> list[Route]:
    """Route the tokens of all ranks.

    topk_idx: one [T, K] per rank, -1 for none. owner: [E], the rank of each expert. alignment: each
    expert's rows are padded to a multiple of it (layout "expert"). num_recv_rows: [R] rows of each
    output, where it is larger than need be.

    Example: 2 servers x 2 ranks, one expert each; rank 0 has tokens [0, 2], [3, 2], [-1, 1]. It
    sends four rows: token 0 for rank 0, token 2 for rank 1, tokens 0 and 1 for server 1, once each
    (they stand at rank 2). The header of token 1's row: choice 0 is for local rank 1, choice 1 for
    local rank 0.
    """
    all_ranks = _AllRanks(servers, topk_idx, owner, layout, alignment)
    routes = [all_ranks.route(rank) for rank in range(len(topk_idx))]
    if num_recv_rows is None:
        return routes
    return [_with_rows(route, rows) for route, rows in zip(routes, num_recv_rows, strict=True)]


def _with_rows(route: Route, num_rows: int) -> Route:
    filled = np.zeros(num_rows, dtype=np.bool_)
    filled[: len(route.filled)] = route.filled
    return Route(**(vars(route) | {"filled": filled}))


class _AllRanks:
    def __init__(
        self,
        servers: int,
        topk_idx: Sequence[npt.NDArray[np.integer]],
        owner: Sequence[int],
        layout: str,
        alignment: int,
    ):
        if layout not in ("expert", "rank"):
            raise ValueError(f"no such layout: {layout!r}")
        self.num_ranks = len(topk_idx)
        self.servers, self.per_server = servers, self.num_ranks // servers
        self.layout = layout
        self.topk = topk_idx[0].shape[1]
        self.owner = [int(rank) for rank in owner]
        self.tokens = [idx.tolist() for idx in topk_idx]  # [rank][token][k]
        self.filled: list[list[bool]] = [[] for _ in topk_idx]
        self.slot: dict[tuple[int, int, int], int] = {}  # (source, token, k) -> output row
        by_expert = sorted(self._choices(), key=lambda c: (c.expert, c.source, c.token, c.k))
        for expert, rank in enumerate(self.owner):
            rows = self.filled[rank]
            for c in (c for c in by_expert if c.expert == expert):
                self.slot[c.source, c.token, c.k] = len(rows)
                rows.append(True)
            rows += [False] * (-len(rows) % alignment)
        # Per rank its distinct tokens, by source, then token: (source, token) -> window row.
        self.window: list[dict[tuple[int, int], int]] = [{} for _ in topk_idx]
        for rank, window in enumerate(self.window):
            for c in self._choices():
                if self.owner[c.expert] == rank:
                    window.setdefault((c.source, c.token), len(window))
        if layout == "rank":
            self.filled = [[True] * len(window) for window in self.window]

    def _choices(self) -> Iterator[Choice]:
        for source, tokens in enumerate(self.tokens):
            for token, experts in enumerate(tokens):
                for k, expert in enumerate(experts):
                    if expert >= 0:
                        yield Choice(source, token, k, expert)

    def _ranks_of(self, source: int, token: int) -> set[int]:
        return {self.owner[expert] for expert in self.tokens[source][token] if expert >= 0}

    def _tokens_for(self, source: int, ranks: Sequence[int]) -> list[int]:
        """Tokens with a choice on any of the ranks."""
        tokens = range(len(self.tokens[source]))
        return [token for token in tokens if self._ranks_of(source, token) & set(ranks)]

    def _on_server(self, server: int) -> range:
        return range(server * self.per_server, (server + 1) * self.per_server)

    def _header(self, source: int, token: int, ranks: Sequence[int]) -> list[tuple[int, int, int]]:
        header = []
        for k, expert in enumerate(self.tokens[source][token]):
            rank = self.owner[expert] if expert >= 0 else -1
            if rank not in ranks:
                header.append((NONE, NONE, NONE))
                continue
            index = sum(1 for e in range(expert) if self.owner[e] == rank)
            place = self.slot[source, token, k] if self.layout == "expert" else index
            header.append((place, self.window[rank][source, token], rank % self.per_server))
        return header

    def route(self, source: int) -> Route:
        server, local = divmod(source, self.per_server)
        tokens, num_tokens = self.tokens[source], len(self.tokens[source])
        pack_list: list[int] = []
        entries: list[list[tuple[int, int, int]]] = []
        for rank in range(self.num_ranks):
            there = rank // self.per_server
            if there == server:
                ranks: Sequence[int] = [rank]
            elif rank % self.per_server == local:
                ranks = self._on_server(there)
            else:
                continue
            for token in self._tokens_for(source, ranks):
                pack_list.append(token)
                entries.append(self._header(source, token, ranks))

        token_map = np.full((num_tokens, self.servers + self.per_server), NONE, dtype=np.uint32)
        returned = 0  # the window holds each server's sums in turn
        for there in range(self.servers):
            for token in self._tokens_for(source, self._on_server(there)):
                if there != server:
                    token_map[token, there] = returned
                    returned += 1
        partial = 0  # the scratch each local rank's
        for rank in self._on_server(server):
            for token in self._tokens_for(source, [rank]):
                column = self.servers + rank % self.per_server
                token_map[token, column] = self.window[rank].get((source, token), NONE)
                if rank != source:
                    token_map[token, column] = partial
                    partial += 1

        counted = [len(self._tokens_for(source, [rank])) for rank in range(self.num_ranks)]
        per_server = [
            len(self._tokens_for(source, self._on_server(there))) for there in range(self.servers)
        ]
        shape = (len(tokens), self.topk)
        return Route(
            layout=self.layout,
            num_tokens=shape[0],
            topk=self.topk,
            to_server=np.array(per_server, dtype=np.int64),
            to_rank=np.array(counted, dtype=np.int64),
            pack_list=np.array(pack_list, dtype=np.uint32),
            entries=np.array(entries, dtype=np.uint32).reshape(len(entries), self.topk, 3),
            token_map=token_map,
            window_rows=len(self.window[source]),
            filled=np.array(self.filled[source], dtype=np.bool_),
        )
