"""A spread MoE layer on ranks beside the same layer in one process: cases, and how both run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

import fastkern
from fastkern.nn import (
    Exchange,
    ExpertParallelMoE,
    OneProcess,
    replicated_parameters,
    sum_gradients,
)

HIDDEN, FFN = 12, 20


@dataclass(frozen=True)
class Case:
    """num_tokens: of each rank."""

    num_experts: int
    top_k: int
    num_tokens: tuple[int, ...]
    servers: int
    expert_to_rank: tuple[int, ...] | None = None
    dtype: torch.dtype = torch.float64

    def layer(self, comm: Exchange | None) -> ExpertParallelMoE:
        """The layer, of the same weights wherever it is made."""
        torch.manual_seed(self.num_experts)
        spread_map = self.expert_to_rank if comm is not None and comm.num_ranks > 1 else None
        made = ExpertParallelMoE(
            HIDDEN, FFN, self.num_experts, self.top_k, comm=comm, expert_to_rank=spread_map
        )
        return made.to(self.dtype)

    def one_process(self) -> OneProcess:
        """Sums as the ranks do."""
        num_ranks = len(self.num_tokens)
        return OneProcess(self.servers, num_ranks // self.servers, self.expert_to_rank)

    def tokens(self, rank: int) -> Tensor:
        """What a rank puts in: [tokens, HIDDEN]."""
        generator = torch.Generator().manual_seed(100 + rank)
        x = torch.randn(self.num_tokens[rank], HIDDEN, generator=generator, dtype=torch.float64)
        return (x + 0.5).to(self.dtype)

    def wanted(self, rank: int) -> Tensor:
        """What the loss weighs a rank's output with."""
        generator = torch.Generator().manual_seed(200 + rank)
        shape = (self.num_tokens[rank], HIDDEN)
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(self.dtype)


CASES = [
    Case(8, 2, (20, 20, 20, 20), 2),
    Case(7, 3, (9, 0, 16, 1), 2),  # unequal ownership, a rank without tokens
    Case(3, 3, (5, 8, 0, 7), 4),  # a rank without experts; each token to all
    Case(1, 1, (4, 4, 4, 4), 1),  # one expert
    Case(6, 2, (0, 0, 0, 0), 2),  # no tokens at all
    Case(40, 2, (3, 2, 1, 0), 2),  # experts without rows
    Case(6, 4, (10, 11, 12, 13), 2, (3, 1, 3, 0, 1, 3)),  # a map of one's own; rank 2 has none
]


class Step(NamedTuple):
    """A forward and a backward. grads: of parameters by name."""

    output: Tensor
    grad_x: Tensor
    grads: dict[str, Tensor]


def spread_step(rank: int, num_ranks: int, case: Case) -> Step:
    """On one of the ranks, the replicated gradients summed."""
    layer = case.layer(fastkern.init(servers=case.servers))
    x = case.tokens(rank).requires_grad_()
    output = layer(x)
    (output * case.wanted(rank)).sum().backward()
    sum_gradients(replicated_parameters(layer))
    return _step(layer, output, x)


def whole_step(case: Case) -> Step:
    """In one process, on the tokens of all ranks in rank order."""
    ranks = range(len(case.num_tokens))
    layer = case.layer(case.one_process())
    x = torch.cat([case.tokens(rank) for rank in ranks]).requires_grad_()
    output = layer(x)
    (output * torch.cat([case.wanted(rank) for rank in ranks])).sum().backward()
    return _step(layer, output, x)


def _step(layer: nn.Module, output: Tensor, x: Tensor) -> Step:
    assert x.grad is not None
    grads = {
        name: torch.zeros_like(p) if p.grad is None else p.grad
        for name, p in layer.named_parameters()
    }
    return Step(output.detach(), x.grad, grads)


def spread_output(rank: int, num_ranks: int, case: Case, ways: Sequence[str]) -> list[Tensor]:
    """A forward each of the layer itself, and of one that is cut out of the whole one."""
    comm = fastkern.init(servers=case.servers)
    made = {
        "own weights": lambda: case.layer(comm),
        "from whole": lambda: ExpertParallelMoE.from_whole(
            case.layer(None), comm, case.expert_to_rank
        ),
    }
    with torch.no_grad():
        return [made[way]()(case.tokens(rank)) for way in ways]


def sgd_weights(rank: int, num_ranks: int, case: Case) -> list[Tensor]:
    """The replicated weights after three steps on tokens of this rank's own."""
    model = nn.Sequential(nn.Linear(HIDDEN, HIDDEN), case.layer(fastkern.init())).to(case.dtype)
    for p in model[0].parameters():
        dist.broadcast(p.data, 0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        model(case.tokens(rank)).square().sum().backward()
        sum_gradients(replicated_parameters(model))
        optimizer.step()
    return [p.detach() for p in replicated_parameters(model)]


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether they hold the same bytes: unlike torch.equal, 0.0 is not -0.0."""
    return a.shape == b.shape and torch.equal(a.view(torch.uint8), b.view(torch.uint8))
