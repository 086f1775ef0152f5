"""The MoE layer over ranks, phase by phase, and whole in one process, for the demo.

Both ways run the same functions on the same operands: a rank's tokens go through the gate at once,
an expert computes all its rows at once, in (source rank, token, choice) order, and a token's sum
has one order (fastkern.nn.OneProcess). The matrix products then have equal shapes and operands, and
on one thread equal bits: results may be compared exactly.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from fastkern.moe.placement import Placement
from fastkern.nn import ExpertParallelMoE, OneProcess

T = TypeVar("T")


class RunPhase(Protocol):
    """How a phase of a forward is run: timed, for instance."""

    def __call__(self, name: str, phase: Callable[[], T]) -> T:
        """Run the phase and return what it returns."""


def plainly(name: str, phase: Callable[[], T]) -> T:
    """Run a phase and no more."""
    return phase()


@dataclass(frozen=True)
class Spread:
    """One rank's part of the layer as computed over ranks.

    topk_idx, topk_weights: of its tokens, [tokens, top_k]. received: [rows, hidden] for its
    experts, by (expert, source rank, token, choice). received_weights: [rows]. computed: the
    experts' outputs for them. output: [tokens, hidden]. handle: of the dispatch.
    """

    topk_idx: Tensor
    topk_weights: Tensor
    received: Tensor
    received_weights: Tensor
    computed: Tensor
    output: Tensor
    handle: Any


def run_spread(layer: ExpertParallelMoE, x: Tensor, run: RunPhase = plainly) -> Spread:
    """What layer(x) does, [tokens, hidden]. Every rank calls it."""
    idx, weights = run("gate", lambda: layer.gate(x))
    received, received_weights, _, handle = run(
        "dispatch",
        lambda: layer.comm.dispatch(x, idx, weights, num_experts=layer.num_experts),
    )
    counts = handle.tokens_per_expert_list
    computed = run("experts", lambda: layer.run_experts(received, counts))
    output = run("combine", lambda: layer.comm.combine(computed, handle, weights=received_weights))
    return Spread(idx, weights, received, received_weights, computed, output, handle)


@dataclass(frozen=True)
class Whole:
    """One rank's part of the layer as computed in one process; see Spread.

    received: by the definition alone: for each own expert, each rank's tokens that chose it.
    """

    topk_idx: Tensor
    topk_weights: Tensor
    received: Tensor
    received_weights: Tensor
    output: Tensor


def run_whole(
    layer: ExpertParallelMoE, xs: Sequence[Tensor], servers: int, placement: Placement
) -> list[Whole]:
    """The whole layer on every rank's tokens [tokens, hidden]. placement: of the spread one."""
    choices = [layer.gate(x) for x in xs]
    exchange = OneProcess(servers, len(xs) // servers, placement.owner.tolist())
    x = torch.cat(list(xs))
    idx, weights = (torch.cat(parts) for parts in zip(*choices, strict=True))
    rows, row_weights, _, handle = exchange.dispatch(x, idx, weights, num_experts=layer.num_experts)
    computed = layer.run_experts(rows, handle.tokens_per_expert_list)
    output = exchange.combine(computed, handle, weights=row_weights)
    outputs = torch.split(output, [len(x) for x in xs])
    found = []
    for rank, (rank_idx, rank_weights) in enumerate(choices):
        picked = [_chosen(xs, choices, expert) for expert in placement.experts_of(rank)]
        received = torch.cat([x[:0], *(rows for rows, _ in picked)])
        received_weights = torch.cat([rank_weights[:0, 0], *(weights for _, weights in picked)])
        found.append(Whole(rank_idx, rank_weights, received, received_weights, outputs[rank]))
    return found


def _chosen(
    xs: Sequence[Tensor], choices: Sequence[tuple[Tensor, Tensor]], expert: int
) -> tuple[Tensor, Tensor]:
    """The tokens that chose an expert, and with which weight, rank after rank."""
    where = [(idx == expert).nonzero(as_tuple=True) for idx, _ in choices]
    rows = [x[token] for x, (token, _) in zip(xs, where, strict=True)]
    weights = [w[at] for (_, w), at in zip(choices, where, strict=True)]
    return torch.cat(rows), torch.cat(weights)
