"""Which rank owns which expert: the one function that dispatch, combine and layers go by."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]


class Placement:
    """Experts on ranks. Those of a rank are ordered by expert id.

    num_experts: E, at least 1. num_ranks: R. expert_to_rank: [E] owner of each expert; by default
    neighbours together, the first E % R ranks with one expert more (30 experts on 8 ranks: 4, 4, 4,
    4, 4, 4, 3, 3).

    owner: int64 [E], the rank of each expert. local_index: int64 [E], its place among its owner's.
    Raises TypeError or ValueError naming the expert.
    """

    def __init__(
        self, num_experts: int, num_ranks: int, expert_to_rank: Sequence[int] | None = None
    ) -> None:
        if isinstance(num_experts, bool) or not hasattr(num_experts, "__index__"):
            raise TypeError(f"num_experts must be a whole number, not {num_experts!r}")
        if not 1 <= num_experts < 1 << 31:
            raise ValueError(f"num_experts must be at least 1, not {num_experts}")
        self.num_experts = int(num_experts)
        self.num_ranks = num_ranks
        if expert_to_rank is None:
            least, more = divmod(self.num_experts, num_ranks)
            counts = np.full(num_ranks, least, dtype=np.int64)
            counts[:more] += 1
            self.owner: Ints = np.repeat(np.arange(num_ranks, dtype=np.int64), counts)
        else:
            self.owner = _checked_map(expert_to_rank, self.num_experts, num_ranks)
        self.num_owned: Ints = np.bincount(self.owner, minlength=num_ranks).astype(np.int64)
        order = np.argsort(self.owner, kind="stable")
        first = np.cumsum(self.num_owned) - self.num_owned
        self.local_index: Ints = np.empty(self.num_experts, dtype=np.int64)
        self.local_index[order] = np.arange(self.num_experts) - first[self.owner[order]]
        self._by_rank = order  # experts, rank after rank
        self._first = first

    def experts_of(self, rank: int) -> list[int]:
        """The experts that a rank owns, in order."""
        first = int(self._first[rank])
        return [int(e) for e in self._by_rank[first : first + int(self.num_owned[rank])]]

    def rank_of(self, expert: int) -> int:
        """The rank that owns an expert."""
        return int(self.owner[expert])


def _checked_map(expert_to_rank: Sequence[int], num_experts: int, num_ranks: int) -> Ints:
    owners = np.asarray(expert_to_rank)
    if owners.shape != (num_experts,):
        raise ValueError(
            f"expert_to_rank must have {num_experts} entries, one per expert, "
            f"not shape {list(owners.shape)}"
        )
    if owners.dtype.kind not in "iu":
        raise TypeError(f"expert_to_rank must hold integers, not {owners.dtype}")
    bad = np.flatnonzero((owners < 0) | (owners >= num_ranks))
    if len(bad):
        e = int(bad[0])
        raise ValueError(f"expert_to_rank[{e}] is {int(owners[e])}, not one of {num_ranks} ranks")
    return owners.astype(np.int64)
