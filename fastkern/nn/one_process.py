"""Dispatch and combine without ranks: the exchange of a layer that is whole in one process."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fastkern.moe.placement import Placement


@dataclass(frozen=True)
class OneProcessHandle:
    """What `OneProcess.combine` needs of a dispatch.

    topk_idx: int64 [tokens, top_k]. slot_of_row: int64 [rows], token * top_k + choice of each row.
    """

    topk_idx: Tensor
    slot_of_row: Tensor
    num_experts: int
    tokens_per_expert_list: list[int]


class OneProcess:
    """All tokens and all experts in this process; differentiable by PyTorch's own operations.

    Sums as `servers` x `ranks_per_server` ranks with `expert_to_rank` would: a token's choices on a
    rank in top-k order, a server's ranks, then the servers. float32 and float64 results thus have
    the bits of the spread layer's. Other dtypes are summed in float32 and rounded once, which
    leaves out what ranks round on the way between servers.
    """

    rank = 0
    num_ranks = 1

    def __init__(
        self,
        servers: int = 1,
        ranks_per_server: int = 1,
        expert_to_rank: Sequence[int] | None = None,
    ) -> None:
        self._servers = servers
        self._ranks_per_server = ranks_per_server
        self._expert_to_rank = expert_to_rank

    def dispatch(
        self,
        x: Tensor,
        topk_idx: Tensor,
        topk_weights: Tensor | None = None,
        *,
        num_experts: int | None = None,
        expert_to_rank: Sequence[int] | None = None,
    ) -> tuple[Tensor, Tensor | None, Tensor, OneProcessHandle]:
        """As Communicator.dispatch in the expert layout: rows by (expert, token, choice).

        x: [tokens, ...]. topk_idx: [tokens, top_k], -1 for none. Raises ValueError for an expert
        that there is not.
        """
        if num_experts is None:
            raise ValueError("num_experts must be given")
        Placement(num_experts, 1, expert_to_rank)  # says what is wrong with it
        flat = topk_idx.reshape(-1).long()
        if bool(((flat < -1) | (flat >= num_experts)).any()):
            raise ValueError(f"topk_idx holds a number that is not -1 to {num_experts - 1}")
        slot_of_row = flat.argsort(stable=True)[int((flat < 0).sum()) :]
        rows = x.index_select(0, slot_of_row.div(topk_idx.shape[1], rounding_mode="floor"))
        weights = None
        if topk_weights is not None:
            weights = topk_weights.reshape(-1).index_select(0, slot_of_row)
        counts = flat[slot_of_row].bincount(minlength=num_experts)
        handle = OneProcessHandle(topk_idx, slot_of_row, num_experts, counts.tolist())
        return rows, weights, counts, handle

    def combine(
        self, expert_out: Tensor, handle: OneProcessHandle, weights: Tensor | None = None
    ) -> Tensor:
        """Each token's sum of expert_out [rows, ...], times weights [rows]: [tokens, ...].

        A token without a choice gets 0.
        """
        precision = torch.float64 if expert_out.dtype == torch.float64 else torch.float32
        width = math.prod(expert_out.shape[1:])
        terms = expert_out.to(precision).reshape(len(expert_out), width)
        if weights is not None:
            terms = terms * weights.to(precision)[:, None]
        num_tokens, top_k = handle.topk_idx.shape
        by_slot = terms.new_zeros(num_tokens * top_k, width)
        by_slot = by_slot.index_copy(0, handle.slot_of_row, terms).view(num_tokens, top_k, width)
        sums = self._sums(by_slot, handle)
        return sums.to(expert_out.dtype).view(num_tokens, *expert_out.shape[1:])

    def _sums(self, terms: Tensor, handle: OneProcessHandle) -> Tensor:
        """[tokens, top_k, width] -> [tokens, width], in the order that the class tells."""
        num_ranks = self._servers * self._ranks_per_server
        placement = Placement(handle.num_experts, num_ranks, self._expert_to_rank)
        owners = torch.from_numpy(placement.owner).to(terms.device)
        rank_of = owners[handle.topk_idx.clamp(min=0)].where(handle.topk_idx >= 0, -1)
        num_tokens, top_k, width = terms.shape
        total = _Sum(terms, num_tokens, width)
        for server in range(self._servers):
            of_server = _Sum(terms, num_tokens, width)
            for local_rank in range(self._ranks_per_server):
                of_rank = _Sum(terms, num_tokens, width)
                for k in range(top_k):
                    here = rank_of[:, k] == server * self._ranks_per_server + local_rank
                    of_rank.add(terms[:, k], here)
                of_server.add(of_rank.rows, of_rank.begun)
            total.add(of_server.rows, of_server.begun)
        return total.rows


class _Sum:
    """Sums [tokens, width] that begin with their first term, not with zero (which -0.0 shows)."""

    def __init__(self, like: Tensor, num_tokens: int, width: int) -> None:
        self.rows = like.new_zeros(num_tokens, width)
        self.begun = torch.zeros(num_tokens, dtype=torch.bool, device=like.device)

    def add(self, terms: Tensor, which: Tensor) -> None:
        """Add terms [tokens, width] to the tokens of which [tokens]."""
        begun = self.begun[:, None]
        added = torch.where(begun, self.rows + terms, terms)
        self.rows = torch.where(which[:, None], added, self.rows)
        self.begun = self.begun | which
