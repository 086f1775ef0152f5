"""The layer's exchanges without deduplication: a copy per choice, by any all_to_all_single."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fastkern.moe.placement import Placement

AllToAll = Callable[..., Any]  # with the signature of torch.distributed.all_to_all_single


@dataclass(frozen=True)
class Sent:
    """What the way back needs.

    slot_of_row: int64 [rows sent], token * top_k + choice. by_expert: int64 [rows received], where
    each row in expert order came in. send, receive: rows to and from each rank.
    """

    slot_of_row: Tensor
    by_expert: Tensor
    send: list[int]
    receive: list[int]


def dispatch_copies(
    all_to_all: AllToAll, x: Tensor, topk_idx: Tensor, placement: Placement, rank: int
) -> tuple[Tensor, Sent]:
    """x [tokens, hidden] once per choice to the ranks of topk_idx [tokens, top_k].

    Returns the rows received in (expert, source rank, token, choice) order. Experts of a rank are
    neighbours.
    """
    flat = topk_idx.reshape(-1)
    slot_of_row = flat.argsort(stable=True)
    rows = x.index_select(0, slot_of_row.div(topk_idx.shape[1], rounding_mode="floor"))
    to_expert = flat.bincount(minlength=placement.num_experts)
    owned = [len(placement.experts_of(peer)) for peer in range(placement.num_ranks)]
    own = owned[rank]
    from_rank = to_expert.new_empty(placement.num_ranks * own)
    all_to_all(from_rank, to_expert, [own] * placement.num_ranks, owned)
    counts = from_rank.view(placement.num_ranks, own)
    send = [int(part.sum()) for part in torch.split(to_expert, owned)]
    receive = [int(n) for n in counts.sum(1)]
    received = rows.new_empty(sum(receive), rows.shape[1])
    all_to_all(received, rows, receive, send)
    expert_of_row = torch.arange(own).repeat(placement.num_ranks).repeat_interleave(from_rank)
    by_expert = expert_of_row.argsort(stable=True)
    return received.index_select(0, by_expert), Sent(slot_of_row, by_expert, send, receive)


def combine_copies(
    all_to_all: AllToAll, computed: Tensor, sent: Sent, topk_weights: Tensor
) -> Tensor:
    """Experts' rows [rows, hidden] back, weighted and summed: [tokens, hidden], in top-k order."""
    rows = torch.empty_like(computed)
    rows[sent.by_expert] = computed
    back = computed.new_empty(sum(sent.send), computed.shape[1])
    all_to_all(back, rows, sent.send, sent.receive)
    slots = torch.empty_like(back)
    slots[sent.slot_of_row] = back
    slots = slots.view(*topk_weights.shape, computed.shape[1])
    output = slots[:, 0] * topk_weights[:, :1]
    for k in range(1, topk_weights.shape[1]):
        output = output + slots[:, k] * topk_weights[:, k : k + 1]
    return output
