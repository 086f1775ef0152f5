"""Small MoE layers on ranks, and the same layer densely in one process, to compare gradients.

A layer is x -> combine(experts(dispatch(x))), with experts tanh(x @ matrix). It runs on a
communicator or on a stand-in for one, whose exchanges are the reference's.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

import fastkern
from fastkern.moe import exchanges, ops
from tests.moe_reference import DispatchOptions, ReferenceExchange
from tests.moe_routing import Routing


class StandIn:
    """The reference's exchanges in a communicator's place."""

    dispatch = ops.dispatch
    combine = ops.combine

    def __init__(self, servers: int) -> None:
        exchange = ReferenceExchange(servers=servers)
        self.rank, self.num_ranks = exchange.rank, exchange.num_ranks
        self.exchange_number = exchanges.register(self, _Functions(exchange))


class _Functions:
    """What the operators call, as the functions of fastkern.moe.calls."""

    DispatchOptions = DispatchOptions

    def __init__(self, exchange: ReferenceExchange) -> None:
        self._exchange = exchange
        self.meta_info, self.slot_choice = exchange.meta_info, exchange.slot_choice

    def dispatch_tensors(self, comm: StandIn, xs: list[Tensor], *rest: Any) -> Any:
        return self._exchange.dispatch_tensors(xs, *rest)

    def combine_tensors(self, comm: StandIn, expert_out: Tensor, *rest: Any) -> Tensor:
        return self._exchange.combine_tensors(expert_out, *rest)


@contextlib.contextmanager
def communicator(servers: int = 2) -> Iterator[fastkern.Communicator]:
    """A communicator with small chunks."""
    with fastkern.Communicator(servers=servers, buffer_bytes=0, chunk_bytes=64) as comm:
        yield comm


@dataclass
class Problem:
    """A layer's data on all ranks.

    tokens: T of each rank. options: of dispatch, besides num_experts. Among the choices are -1,
    with NaN weights, and duplicates. matrices: [E, hidden, width]; bias: [width]. cotangents: per
    rank [T, width], what the loss weighs the result with.
    """

    tokens: tuple[int, ...] = (3, 0, 4, 2)
    num_experts: int = 6
    topk: int = 3
    hidden: int = 5
    width: int = 4
    dtype: torch.dtype = torch.float64
    seed: int = 1
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._rng = torch.Generator().manual_seed(self.seed)
        low, high = -1, self.num_experts
        self.topk_idx = [
            torch.randint(low, high, (t, self.topk), generator=self._rng) for t in self.tokens
        ]
        self.xs = [self.normal(t, self.hidden) for t in self.tokens]
        kind = torch.float64 if self.dtype == torch.float64 else torch.float32
        self.topk_weights = [
            torch.rand(idx.shape, generator=self._rng, dtype=kind).masked_fill(idx < 0, torch.nan)
            for idx in self.topk_idx
        ]
        self.matrices = self.normal(self.num_experts, self.hidden, self.width)
        self.bias = self.normal(self.width)
        self.cotangents = [self.normal(t, self.width) for t in self.tokens]
        del self._rng  # it cannot be pickled

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self._rng, dtype=torch.float64).to(self.dtype)


# Rank 1 has no tokens; with 3 experts on 4 ranks, rank 3 has no experts.
ZERO = {"zero_padding": True}
PROBLEMS: dict[str, dict[str, Any]] = {
    "expert": {"options": {}},
    "aligned": {"options": {"expert_alignment": 4}},
    "static": {"options": {"num_max_tokens_per_rank": 4, "expert_alignment": 2, **ZERO}},
    "rank": {"options": {"layout": "rank"}},
    "rank-static": {"options": {"layout": "rank", "num_max_tokens_per_rank": 5, **ZERO}},
    "no-experts": {"num_experts": 3},
    "no-experts-rank": {"num_experts": 3, "options": {"layout": "rank"}},
    "one-token": {"tokens": (0, 0, 1, 0)},
}


def problem_named(name: str, **more: Any) -> Problem:
    """A problem by name."""
    return Problem(**{**PROBLEMS[name], **more})


def own_experts(problem: Problem, rank: int) -> list[int]:
    """The experts of a rank, by default placement."""
    least, more = divmod(problem.num_experts, len(problem.tokens))
    first = rank * least + min(rank, more)
    return list(range(first, first + least + (rank < more)))


def expert_rank(problem: Problem, expert: int) -> int:
    """The rank of an expert, by default placement."""
    ranks = range(len(problem.tokens))
    return next(rank for rank in ranks if expert in own_experts(problem, rank))


def routing_of(problem: Problem, servers: int = 2) -> Routing:
    """What holds which row."""
    options = problem.options
    return Routing(
        servers,
        problem.topk_idx,
        problem.num_experts,
        layout=options.get("layout", "expert"),
        alignment=options.get("expert_alignment", 1),
        num_max=options.get("num_max_tokens_per_rank"),
    )


@dataclass
class Inputs:
    """A rank's tensors that require gradients. matrices: [own experts, hidden, width]."""

    x: Tensor
    topk_weights: Tensor
    matrices: Tensor
    bias: Tensor

    @classmethod
    def of(cls, problem: Problem, rank: int) -> Inputs:
        own = own_experts(problem, rank)
        parts = (
            problem.xs[rank],
            problem.topk_weights[rank],
            problem.matrices[own],
            problem.bias,
        )
        return cls(*(part.clone().requires_grad_() for part in parts))

    @property
    def leaves(self) -> list[Tensor]:
        return [self.x, self.topk_weights, self.matrices, self.bias]

    @property
    def gradients(self) -> list[Tensor | None]:
        return [leaf.grad for leaf in self.leaves]


def sharded_layer(comm: Any, problem: Problem, inputs: Inputs) -> Tensor:
    """The layer over ranks: [T, width]."""
    recv_x, recv_weights, counts, handle = comm.dispatch(
        inputs.x,
        problem.topk_idx[comm.rank],
        inputs.topk_weights,
        num_experts=problem.num_experts,
        **problem.options,
    )
    if problem.options.get("layout") == "rank":
        rows = weigh_and_add(recv_x, recv_weights, handle.recv_topk_idx, inputs.matrices)
        return comm.combine(rows, handle, bias=inputs.bias)
    rows = each_expert(recv_x, counts.tolist(), problem.options, inputs.matrices)
    return comm.combine(rows, handle, weights=recv_weights, bias=inputs.bias)


def each_expert(
    recv_x: Tensor, counts: list[int], options: dict[str, Any], matrices: Tensor
) -> Tensor:
    """Expert layout: each expert on its rows; without experts, rows that depend on nothing.

    Padding is computed with where it is zero, and left alone where it may be anything.
    """
    nothing = recv_x.new_full((len(recv_x), matrices.shape[2]), torch.nan)
    parts, begin = [nothing[:0]], 0
    for count, matrix in zip(counts, matrices, strict=True):
        end = begin + count + -count % options.get("expert_alignment", 1)
        middle = end if options.get("zero_padding") else begin + count
        parts += [torch.tanh(recv_x[begin:middle] @ matrix), nothing[middle:end]]
        begin = end
    return torch.cat([*parts, nothing[begin:]])


def weigh_and_add(
    recv_x: Tensor, recv_weights: Tensor, recv_topk_idx: Tensor, matrices: Tensor
) -> Tensor:
    """Rank layout: each row's experts here, weighted and added."""
    total = recv_x.new_zeros(len(recv_x), matrices.shape[2])
    for expert, matrix in enumerate(matrices):
        share = torch.where(recv_topk_idx == expert, recv_weights, 0).sum(1, keepdim=True)
        total = total + share.to(recv_x.dtype) * torch.tanh(recv_x @ matrix)
    return total


def dense_layer(problem: Problem, inputs: Inputs, rank: int) -> Tensor:
    """The same in one process, for the tokens of one rank; inputs.matrices: of all experts."""
    idx = problem.topk_idx[rank]
    rows = torch.tanh(torch.einsum("th,tkhw->tkw", inputs.x, inputs.matrices[idx.clamp(min=0)]))
    weights = torch.where(idx >= 0, inputs.topk_weights, 0).to(rows.dtype)
    return (weights.unsqueeze(-1) * rows).sum(1) + inputs.bias


def backward(comm: Any, problem: Problem) -> tuple[Tensor, list[Tensor | None]]:
    """The layer's result and its inputs' gradients on this rank."""
    inputs = Inputs.of(problem, comm.rank)
    y = sharded_layer(comm, problem, inputs)
    loss_of(problem, comm.rank, y).backward()
    return y.detach(), inputs.gradients


def same(one: Tensor | None, other: Tensor | None) -> bool:
    """Whether both are tensors of equal dtype, shape and values."""
    assert one is not None
    assert other is not None
    return one.dtype == other.dtype and torch.equal(one, other)


def loss_of(problem: Problem, rank: int, y: Tensor) -> Tensor:
    """What is differentiated."""
    return (y * problem.cotangents[rank]).sum()


def all_same(ones: list[Tensor | None], others: list[Tensor | None]) -> bool:
    """Whether all gradients are equal, bit by bit."""
    pairs = zip(ones, others, strict=True)
    return all((a is None and b is None) or same(a, b) for a, b in pairs)
