"""A mixture-of-experts layer whose experts live on the ranks of a communicator."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from fastkern.moe.placement import Placement

from .one_process import OneProcess


class Exchange(Protocol):
    """What the layer needs of a communicator: fastkern.Communicator and OneProcess have it."""

    rank: int
    num_ranks: int

    def dispatch(
        self,
        x: Any,
        topk_idx: Any,
        topk_weights: Any = None,
        *,
        num_experts: int | None = None,
        expert_to_rank: Sequence[int] | None = None,
    ) -> tuple[Any, Any, Any, Any]:
        """(rows by expert, their weights, rows per own expert, handle)."""

    def combine(self, expert_out: Any, handle: Any, weights: Any = None) -> Any:
        """The weighted sums of the experts' rows, on the tokens' own ranks."""


class TopKGate(nn.Module):
    """Chooses `top_k` of `num_experts` experts for each token: a linear map, and the best of it.

    The weights of a token's choices are the softmax over the chosen scores only. Nothing balances
    the experts' loads.
    """

    def __init__(self, hidden: int, num_experts: int, top_k: int) -> None:
        super().__init__()
        if not 1 <= top_k <= num_experts:
            raise ValueError(f"top_k must be 1 to {num_experts}, the experts, and is {top_k}")
        self.top_k = top_k
        self.scores = nn.Linear(hidden, num_experts, bias=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """[tokens, hidden] -> topk_idx int64 [tokens, top_k], topk_weights of the same shape.

        Weights are float32, or float64 where x is; each row's weights fall from left to right.
        """
        best = self.scores(x).topk(self.top_k, dim=1)
        scores = best.values if best.values.dtype == torch.float64 else best.values.float()
        return best.indices, scores.softmax(dim=1)


class Mlp(nn.Module):
    """An expert: [rows, hidden] -> [rows, ffn] -> [rows, hidden]."""

    def __init__(self, hidden: int, ffn: int) -> None:
        super().__init__()
        self.up = nn.Linear(hidden, ffn)
        self.down = nn.Linear(ffn, hidden)

    def forward(self, rows: Tensor) -> Tensor:
        """The expert's output for each row."""
        return self.down(functional.relu(self.up(rows)))  # type: ignore[no-any-return]


class ExpertParallelMoE(nn.Module):
    """Gate and experts; every rank has the gate and the experts that `placement` gives it.

    hidden, ffn: widths of a token and of an expert's middle. top_k: experts per token. comm: a
    fastkern.Communicator; None: the whole layer in this process, the reference for the spread one.
    expert_to_rank: [num_experts] owner of each expert, by default neighbours together in equal
    shares (fastkern.moe.placement).

    Every rank calls forward, and backward, as often as the others, with any number of tokens, none
    included. Gradients: an expert's weights get the sum over all ranks' tokens, here on its owner.
    The gate's, like those of any replicated weights, are of this rank's tokens only: the caller
    sums them over ranks, `sum_gradients(replicated_parameters(model))` does. The loss should
    therefore be a sum over tokens, divided by the number of tokens of all ranks for a mean.

    First weights are made on the CPU, and depend on PyTorch's generator and an expert's id, not on
    where it lives: ranks, or one process, that seed alike begin with the same layer. Names in the
    state dict hold the expert's id among all ("experts.5.up.weight"): a rank's state is a part of
    the whole one.

    The communicator is not part of the state; a layer that has one cannot be copied or pickled.
    """

    def __init__(
        self,
        hidden: int,
        ffn: int,
        num_experts: int,
        top_k: int,
        *,
        comm: Exchange | None = None,
        expert_to_rank: Sequence[int] | None = None,
    ) -> None:
        super().__init__()
        self.hidden, self.ffn, self.num_experts, self.top_k = hidden, ffn, num_experts, top_k
        self.comm: Exchange = OneProcess() if comm is None else comm
        self.expert_to_rank = None if expert_to_rank is None else tuple(expert_to_rank)
        self.placement = Placement(num_experts, self.comm.num_ranks, self.expert_to_rank)
        generator = torch.default_generator  # PyTorch's own, of the CPU
        seed = int(torch.randint(1 << 62, (), device="cpu"))  # one draw, however many live here
        with torch.random.fork_rng(devices=[]), torch.device("cpu"):
            generator.manual_seed(seed)
            self.gate = TopKGate(hidden, num_experts, top_k)
            self.experts = nn.ModuleDict()
            for expert in self.placement.experts_of(self.comm.rank):
                generator.manual_seed(seed + 1 + expert)
                self.experts[str(expert)] = Mlp(hidden, ffn)

    @classmethod
    def from_whole(
        cls,
        whole: ExpertParallelMoE,
        comm: Exchange,
        expert_to_rank: Sequence[int] | None = None,
    ) -> ExpertParallelMoE:
        """This rank's part of a layer that is whole in this process, with copies of its weights."""
        weight = whole.gate.scores.weight
        made = cls(
            whole.hidden,
            whole.ffn,
            whole.num_experts,
            whole.top_k,
            comm=comm,
            expert_to_rank=expert_to_rank,
        ).to(weight.device, weight.dtype)
        state = whole.state_dict()
        made.load_state_dict({name: state[name] for name in made.state_dict()})
        return made.train(whole.training)

    def forward(self, x: Tensor) -> Tensor:
        """Floats [..., hidden], this rank's tokens -> the same shape. Every rank calls it.

        Raises ValueError where the last dimension is not `hidden`.
        """
        if x.shape[-1:] != (self.hidden,):
            raise ValueError(f"x must have rows of {self.hidden}, and has shape {list(x.shape)}")
        tokens = x.reshape(-1, self.hidden)
        topk_idx, topk_weights = self.gate(tokens)
        rows, row_weights, _, handle = self.comm.dispatch(
            tokens,
            topk_idx,
            topk_weights,
            num_experts=self.num_experts,
            expert_to_rank=self.expert_to_rank,
        )
        expert_out = self.run_experts(rows, handle.tokens_per_expert_list)
        return self.comm.combine(expert_out, handle, weights=row_weights).view_as(x)  # type: ignore[no-any-return]

    def run_experts(self, rows: Tensor, rows_per_expert: Sequence[int]) -> Tensor:
        """Each expert on its slice of `rows` [rows, hidden]; they stand by expert, none between."""
        if not self.experts:
            # Backward has to come past here as on the other ranks, whose weights want gradients.
            return rows if rows.requires_grad else rows.requires_grad_(torch.is_grad_enabled())
        parts = torch.split(rows, list(rows_per_expert))
        # Each on a tensor of its own: where operands begin in memory can change a product's last
        # bits, and these are to be the same wherever the expert lives.
        outputs = [
            expert(part.clone()) for expert, part in zip(self.experts.values(), parts, strict=True)
        ]
        return torch.cat(outputs)

    def extra_repr(self) -> str:
        """Sizes, and where this is."""
        return (
            f"hidden={self.hidden}, ffn={self.ffn}, num_experts={self.num_experts}, "
            f"top_k={self.top_k}, rank={self.comm.rank} of {self.comm.num_ranks}"
        )
