"""How many rows a dispatch moves, by definition: one for each choice, or one to each server."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from fastkern.moe.placement import Placement

Matrix = npt.NDArray[np.int64]


@dataclass(frozen=True)
class RowCounts:
    """Rows of one dispatch of R ranks on N servers; a combine moves the same ones back.

    per_expert: int64 [E], choices. choices: int64 [R, R], a row for each choice, from rank to rank.
    to_server, to_rank: int64 [R, N], [R, R], tokens of each rank with a choice there, once each.
    """

    per_expert: Matrix
    choices: Matrix
    to_server: Matrix
    to_rank: Matrix

    @property
    def choices_across(self) -> int:
        """Choices that live on another server than their token."""
        ours = self._same_server()
        return int(self.choices[~ours].sum())

    @property
    def choices_inside(self) -> int:
        """Choices on another rank of the token's server."""
        ours = self._same_server()
        np.fill_diagonal(ours, False)
        return int(self.choices[ours].sum())

    @property
    def tokens_across(self) -> int:
        """Pairs of a token and another server that choices of it live on."""
        ranks = np.arange(len(self.to_server))
        own = self.to_server[ranks, ranks // self._ranks_per_server]
        return int(self.to_server.sum() - own.sum())

    @property
    def _ranks_per_server(self) -> int:
        num_ranks, num_servers = self.to_server.shape
        return int(num_ranks // num_servers)

    def _same_server(self) -> npt.NDArray[np.bool_]:
        server = np.arange(len(self.choices)) // self._ranks_per_server
        same: npt.NDArray[np.bool_] = server[:, None] == server[None, :]
        return same


def count_rows(topk_idx: Sequence[torch.Tensor], servers: int, placement: Placement) -> RowCounts:
    """topk_idx: of each rank, integers [tokens, top_k], each an expert."""
    num_ranks = len(topk_idx)
    per_server = num_ranks // servers
    per_expert = np.zeros(placement.num_experts, dtype=np.int64)
    choices, to_rank = np.zeros((2, num_ranks, num_ranks), dtype=np.int64)
    to_server = np.zeros((num_ranks, servers), dtype=np.int64)
    for rank, chosen in enumerate(topk_idx):
        experts = chosen.numpy().astype(np.int64)
        per_expert += np.bincount(experts.reshape(-1), minlength=placement.num_experts)
        owners = placement.owner[experts]
        choices[rank] = np.bincount(owners.reshape(-1), minlength=num_ranks)
        to_rank[rank] = [(owners == peer).any(axis=1).sum() for peer in range(num_ranks)]
        to_server[rank] = [(owners // per_server == n).any(axis=1).sum() for n in range(servers)]
    return RowCounts(per_expert, choices, to_server, to_rank)
