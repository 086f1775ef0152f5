"""A top-2 MoE layer: whole, in one process, and in the pieces that a rank runs.

Both ways use the same functions on the same operands: a rank's tokens go through the gate at once,
an expert computes all its rows at once, in (source rank, token, choice) order. The matrix products
then have equal shapes and operands, and on one thread equal bits: results may be compared exactly.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch
from torch import nn
from torch.nn import functional

TOP_K = 2

T = TypeVar("T")
# (rows, rows for each rank, rows from each rank) -> the rows received, in rank order
Exchange = Callable[[torch.Tensor, list[int], list[int]], torch.Tensor]


class Expert(nn.Module):
    """An MLP of one hidden layer, float32 [rows, hidden] -> [rows, hidden]."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.up = nn.Linear(hidden, hidden)
        self.down = nn.Linear(hidden, hidden)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """The expert's output for each row."""
        return self.down(functional.relu(self.up(rows)))  # type: ignore[no-any-return]


class MoeLayer(nn.Module):
    """Gate and experts. Nothing balances the experts' loads: skew is what the demo is about."""

    def __init__(self, hidden: int, num_experts: int) -> None:
        super().__init__()
        self.gate = nn.Linear(hidden, num_experts, bias=False)
        self.experts = nn.ModuleList(Expert(hidden) for _ in range(num_experts))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """float32 [tokens, hidden] -> [tokens, hidden]."""
        return run_whole(self, [x])[0].output


@dataclass(frozen=True)
class Choice:
    """Where the gate sends tokens. experts: int64 [tokens, TOP_K]; weights: float32, the same."""

    experts: torch.Tensor
    weights: torch.Tensor


def choose(gate: nn.Module, x: torch.Tensor) -> Choice:
    """The TOP_K experts of each token, and softmax weights over them."""
    best = gate(x).topk(TOP_K, dim=1)
    return Choice(best.indices, best.values.softmax(dim=1))


def mix(expert_rows: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """[tokens, TOP_K, hidden] weighted and summed, choice after choice: [tokens, hidden]."""
    output = expert_rows[:, 0] * weights[:, :1]
    for k in range(1, TOP_K):
        output = output + expert_rows[:, k] * weights[:, k : k + 1]
    return output


# -- in one process --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Whole:
    """One rank's part of the layer as computed in one process.

    choice: of its tokens. expert_rows: [tokens * TOP_K, hidden], the experts' outputs unweighted.
    output: [tokens, hidden].
    """

    choice: Choice
    expert_rows: torch.Tensor
    output: torch.Tensor


def run_whole(layer: MoeLayer, xs: Sequence[torch.Tensor]) -> list[Whole]:
    """The layer on every rank's tokens [tokens, hidden], without any exchange of rows."""
    choices = [choose(layer.gate, x) for x in xs]
    flat = torch.cat([c.experts.reshape(-1) for c in choices])  # (rank, token, choice) order
    rows = torch.cat(list(xs)).repeat_interleave(TOP_K, dim=0)
    order, parts = [], []
    for e, expert in enumerate(layer.experts):
        mine = (flat == e).nonzero().squeeze(1)
        order.append(mine)
        parts.append(expert(rows.index_select(0, mine)))
    expert_rows = torch.cat(parts).index_select(0, torch.cat(order).argsort())
    found, begin = [], 0
    for choice in choices:
        mine = expert_rows[begin : begin + choice.experts.numel()]
        begin += len(mine)
        output = mix(mine.view(-1, TOP_K, rows.shape[1]), choice.weights)
        found.append(Whole(choice, mine, output))
    return found


# -- over ranks ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Placement:
    """Expert e lives on rank e * ranks // experts: neighbours together, any numbers of both.

    Where there are fewer experts than ranks, some ranks own none.
    """

    num_experts: int
    num_ranks: int

    def rank_of(self, expert: int) -> int:
        """The rank that owns it."""
        return expert * self.num_ranks // self.num_experts

    def experts_of(self, rank: int) -> range:
        """What a rank owns."""
        first = -(-rank * self.num_experts // self.num_ranks)
        return range(first, -(-(rank + 1) * self.num_experts // self.num_ranks))

    def experts_per_rank(self) -> list[int]:
        """How many experts each rank owns."""
        return [len(self.experts_of(rank)) for rank in range(self.num_ranks)]


@dataclass(frozen=True)
class Outgoing:
    """A rank's copies of its tokens, ready to be sent.

    rows: [tokens * TOP_K, hidden], by destination expert, hence by rank; then by token and choice.
    order: int64, which (token, choice) each row is. rows_to_expert: int64 [experts].
    """

    rows: torch.Tensor
    order: torch.Tensor
    rows_to_expert: torch.Tensor


def permute(x: torch.Tensor, choice: Choice, num_experts: int) -> Outgoing:
    """Copy each token once per choice, ordered by destination."""
    flat = choice.experts.reshape(-1)
    order = flat.argsort(stable=True)
    rows = x.index_select(0, order.div(TOP_K, rounding_mode="floor"))
    return Outgoing(rows, order, flat.bincount(minlength=num_experts))


def rows_per_rank(placement: Placement, rows_to_expert: torch.Tensor) -> list[int]:
    """Rows for each rank, from rows for each expert."""
    parts = torch.split(rows_to_expert, placement.experts_per_rank())
    return [int(part.sum()) for part in parts]


def run_experts(
    experts: Sequence[nn.Module], received: torch.Tensor, counts: torch.Tensor
) -> torch.Tensor:
    """Outputs of a rank's experts, in the order of the rows that it received.

    received: [rows, hidden], by source rank, then expert. counts: int64 [ranks, own experts], the
    rows from each rank for each own expert.
    """
    own = torch.arange(counts.shape[1]).repeat(counts.shape[0])
    expert_of_row = own.repeat_interleave(counts.reshape(-1))
    order = expert_of_row.argsort(stable=True)  # by expert, then source rank, token, choice
    parts = torch.split(received.index_select(0, order), counts.sum(0).tolist()) if experts else []
    # Each on a tensor of its own: where operands start in memory can change a product's last bits.
    outputs = [expert(rows.clone()) for expert, rows in zip(experts, parts, strict=True)]
    return torch.cat(outputs).index_select(0, order.argsort()) if outputs else received


def unpermute(returned: torch.Tensor, outgoing: Outgoing, weights: torch.Tensor) -> torch.Tensor:
    """Put the experts' rows back in (token, choice) order and mix them: [tokens, hidden]."""
    rows = torch.empty_like(returned)
    rows[outgoing.order] = returned
    return mix(rows.view(-1, TOP_K, returned.shape[1]), weights)


@dataclass(frozen=True)
class Spread:
    """One rank's part of the layer as computed over ranks.

    choice: of its tokens. send, receive: rows to and from each rank in the dispatch. outgoing: rows
    sent. received: rows [.., hidden] that reached its experts. computed: their outputs, in the same
    order. returned: outputs for its own tokens, in `outgoing` order. output: [tokens, hidden].
    """

    choice: Choice
    send: list[int]
    receive: list[int]
    outgoing: Outgoing
    received: torch.Tensor
    computed: torch.Tensor
    returned: torch.Tensor
    output: torch.Tensor


class RunPhase(Protocol):
    """How a phase of a forward is run: timed, for instance."""

    def __call__(self, name: str, phase: Callable[[], T]) -> T:
        """Run the phase and return what it returns."""


def plainly(name: str, phase: Callable[[], T]) -> T:
    """Run a phase and no more."""
    return phase()


def run_spread(
    gate: nn.Module,
    experts: Sequence[nn.Module],
    placement: Placement,
    x: torch.Tensor,
    exchange: Exchange,
    run: RunPhase = plainly,
) -> Spread:
    """One rank's forward. experts: its own. x: its tokens [tokens, hidden]. Every rank calls it."""
    choice = run("gate", lambda: choose(gate, x))
    outgoing = run("permute", lambda: permute(x, choice, placement.num_experts))
    owned, own = placement.experts_per_rank(), len(experts)
    counts = run(
        "count exchange",
        lambda: exchange(outgoing.rows_to_expert, owned, [own] * placement.num_ranks),
    ).view(placement.num_ranks, own)
    send, receive = rows_per_rank(placement, outgoing.rows_to_expert), counts.sum(1).tolist()
    received = run("dispatch", lambda: exchange(outgoing.rows, send, receive))
    computed = run("experts", lambda: run_experts(experts, received, counts))
    returned = run("combine", lambda: exchange(computed, receive, send))
    output = run("unpermute", lambda: unpermute(returned, outgoing, choice.weights))
    return Spread(choice, send, receive, outgoing, received, computed, returned, output)
