"""The rival of deduplication: one copy of a token per expert, through all_to_all_single.

What frameworks do by default: rows are permuted by expert, counts are exchanged, then rows; on the
way back the experts' rows return as they are and the token's owner weighs and sums them.
"""

from __future__ import annotations

import torch
from torch import Tensor

import fastkern
from fastkern.moe.placement import Placement


class Copies:
    """One rank's side of one call. The exchanges are apart from the local work around them.

    comm: the communicator. placement: the default one (a rank's experts are neighbours). topk_idx:
    int64 [T, K], -1 for none.
    """

    def __init__(self, comm: fastkern.Communicator, placement: Placement, topk_idx: Tensor) -> None:
        self.comm = comm
        self._owned = placement.num_owned.tolist()
        flat = topk_idx.reshape(-1)
        live = (flat >= 0).nonzero().squeeze(1)
        self._slots = live[flat[live].argsort(stable=True)]  # by expert, token, choice
        self._top_k = topk_idx.shape[1]
        self._num_slots = len(flat)
        self._to_expert = flat[live].bincount(minlength=placement.num_experts)
        self._send = [int(p.sum()) for p in torch.split(self._to_expert, self._owned)]
        self._receive: list[int] = []
        self._order = torch.empty(0, dtype=torch.int64)  # of received rows, by expert

    def permute(self, x: Tensor) -> Tensor:
        """[T, H] -> [copies, H], by destination. Local."""
        return x.index_select(0, self._slots.div(self._top_k, rounding_mode="floor"))

    def send(self, rows: Tensor) -> Tensor:
        """Exchange counts, then rows. Returns what arrived, by source rank and expert."""
        own = self._owned[self.comm.rank]
        counts = torch.empty(self.comm.num_ranks * own, dtype=torch.int64)
        self.comm.all_to_all_single(
            counts, self._to_expert, [own] * self.comm.num_ranks, self._owned
        )
        counts = counts.view(self.comm.num_ranks, own)
        self._receive = counts.sum(1).tolist()
        received = rows.new_empty((sum(self._receive), *rows.shape[1:]))
        self.comm.all_to_all_single(received, rows, self._receive, self._send)
        expert = torch.arange(own).repeat(self.comm.num_ranks).repeat_interleave(counts.reshape(-1))
        self._order = expert.argsort(stable=True)
        return received

    def by_expert(self, received: Tensor) -> Tensor:
        """Received rows by expert, source rank, token, choice. Local."""
        return received.index_select(0, self._order)

    def by_source(self, expert_out: Tensor) -> Tensor:
        """The inverse of `by_expert`. Local."""
        rows = torch.empty_like(expert_out)
        rows[self._order] = expert_out
        return rows

    def send_back(self, rows: Tensor) -> Tensor:
        """Exchange the experts' rows: [copies, H] in the order of `permute`."""
        returned = rows.new_empty((sum(self._send), *rows.shape[1:]))
        self.comm.all_to_all_single(returned, rows, self._send, self._receive)
        return returned

    def weigh(self, returned: Tensor, topk_weights: Tensor) -> Tensor:
        """[copies, H] weighted and summed per token, in float32: [T, H]. Local."""
        rows = returned.new_zeros((self._num_slots, *returned.shape[1:]))
        rows[self._slots] = returned
        rows = rows.view(-1, self._top_k, *returned.shape[1:])
        total = torch.zeros(rows[:, 0].shape, dtype=torch.float32)
        for k in range(self._top_k):
            total += rows[:, k].float() * topk_weights[:, k, None]
        return total.to(returned.dtype)
