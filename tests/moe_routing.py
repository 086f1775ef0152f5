"""Where the rows of a dispatch go, by definition: all ranks in one process, slow and plain."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from torch import Tensor


class Row(NamedTuple):
    """What a received row holds. choice, expert: -1 in the rank layout, whose rows are tokens."""

    source: int  # rank
    token: int
    choice: int  # k
    expert: int


def owners(num_experts: int, num_ranks: int, expert_to_rank: Sequence[int] | None) -> list[int]:
    """The rank of each expert; by default in order, the first E % R ranks own one more."""
    if expert_to_rank is not None:
        return list(expert_to_rank)
    least, more = divmod(num_experts, num_ranks)
    return [rank for rank in range(num_ranks) for _ in range(least + (rank < more))]


@dataclass(frozen=True)
class Routing:
    """One call's routing on all ranks. Raises ValueError where the call does not fit.

    topk_idx: one [T, K] per rank, -1 for none. num_max: num_max_tokens_per_rank.
    """

    servers: int
    topk_idx: Sequence[Tensor]
    num_experts: int
    expert_to_rank: Sequence[int] | None = None
    layout: str = "expert"
    alignment: int = 1
    zero_padding: bool = False
    num_max: int | None = None

    def __post_init__(self) -> None:
        if self.layout not in ("expert", "rank"):
            raise ValueError(f"no such layout: {self.layout!r}")
        for rank in range(self.num_ranks):
            most = self.num_max
            if most is not None and self.num_tokens(rank) > most:
                raise ValueError(f"rank {rank} has {self.num_tokens(rank)} tokens, above {most}")
            if len(self._used_rows[rank]) > self.num_rows(rank):
                raise ValueError(
                    f"rank {rank} gets {len(self._used_rows[rank])} rows, "
                    f"above the {self.num_rows(rank)} that num_max_tokens_per_rank={most} gives"
                )

    # -- ranks and experts -----------------------------------------------------------------------

    @property
    def num_ranks(self) -> int:
        return len(self.topk_idx)

    @property
    def ranks_per_server(self) -> int:
        return self.num_ranks // self.servers

    @property
    def topk(self) -> int:
        return self.topk_idx[0].shape[1]

    def num_tokens(self, rank: int) -> int:
        return self.topk_idx[rank].shape[0]

    @cached_property
    def owner(self) -> list[int]:
        return owners(self.num_experts, self.num_ranks, self.expert_to_rank)

    def experts_of(self, rank: int) -> list[int]:
        """The rank's experts by id; an expert's place here is its local index."""
        return [expert for expert in range(self.num_experts) if self.owner[expert] == rank]

    @cached_property
    def choices(self) -> list[list[list[int]]]:
        """topk_idx as lists: [rank][token][k]."""
        return [idx.tolist() for idx in self.topk_idx]

    def ranks_of(self, source: int, token: int) -> list[int]:
        """The distinct ranks that the token goes to, in order."""
        return sorted({self.owner[e] for e in self.choices[source][token] if e >= 0})

    # -- rows ------------------------------------------------------------------------------------

    @cached_property
    def _slots(self) -> list[list[Row]]:
        """Per expert its rows: by source rank, token, k."""
        slots: list[list[Row]] = [[] for _ in range(self.num_experts)]
        for source, tokens in enumerate(self.choices):
            for token, experts in enumerate(tokens):
                for choice, expert in enumerate(experts):
                    if expert >= 0:
                        slots[expert].append(Row(source, token, choice, expert))
        return slots

    @cached_property
    def _used_rows(self) -> list[list[Row | None]]:
        """Per rank its rows and the padding behind each expert."""
        used: list[list[Row | None]] = [[] for _ in range(self.num_ranks)]
        for rank in range(self.num_ranks):
            if self.layout == "expert":
                for expert in self.experts_of(rank):
                    used[rank] += self._slots[expert]
                    used[rank] += [None] * (-len(used[rank]) % self.alignment)
            else:
                for source, tokens in enumerate(self.choices):
                    for token in range(len(tokens)):
                        if rank in self.ranks_of(source, token):
                            used[rank].append(Row(source, token, -1, -1))
        return used

    def num_rows(self, rank: int) -> int:
        """Received rows: exact, or with num_max the same whatever the routing."""
        if self.num_max is None:
            return len(self._used_rows[rank])
        own, most = len(self.experts_of(rank)), self.num_ranks * self.num_max
        if self.layout == "rank":
            return most if own else 0
        rows = most * min(self.topk, own)
        if self.alignment == 1:
            return rows
        return rows + -rows % self.alignment + own * self.alignment

    def rows(self, rank: int) -> list[Row | None]:
        """What each received row holds; None for padding."""
        used = self._used_rows[rank]
        return used + [None] * (self.num_rows(rank) - len(used))

    def counts(self, rank: int) -> list[int]:
        """Slots of each own expert: tokens_per_expert."""
        return [len(self._slots[expert]) for expert in self.experts_of(rank)]

    def rows_of(self, source: int, token: int, rank: int) -> list[int]:
        """Where the token's rows are on a rank, in top-k order."""
        return self._places.get((source, token, rank), [])

    @cached_property
    def _places(self) -> dict[tuple[int, int, int], list[int]]:
        found: dict[tuple[int, int, int], list[tuple[int, int]]] = {}
        for rank in range(self.num_ranks):
            for place, row in enumerate(self._used_rows[rank]):
                if row is not None:
                    where = (row.source, row.token, rank)
                    found.setdefault(where, []).append((row.choice, place))
        return {where: [place for _, place in sorted(rows)] for where, rows in found.items()}

    @cached_property
    def num_scale_out_rows(self) -> int:
        """Distinct pairs of a token and a server other than its own."""
        per_server = self.ranks_per_server
        return sum(
            len({rank // per_server for rank in self.ranks_of(source, token)} - {own})
            for source in range(self.num_ranks)
            for own in [source // per_server]
            for token in range(self.num_tokens(source))
        )
