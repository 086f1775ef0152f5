"""A tiny language model around MoE layers: the bytes before a position in, the next byte out."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from fastkern.nn import Exchange, ExpertParallelMoE

from .text import CONTEXT_BYTES

_EMBEDDING = 32  # floats per byte of context


@dataclass(frozen=True)
class ModelSizes:
    """hidden, ffn: floats of a token, and inside an expert. top_k: experts of a token."""

    layers: int
    hidden: int
    ffn: int
    num_experts: int
    top_k: int


class Block(nn.Module):
    """A MoE layer with a skip around it. Nothing balances its experts: skew is the point."""

    def __init__(self, sizes: ModelSizes, comm: Exchange | None) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(sizes.hidden)
        self.moe = ExpertParallelMoE(
            sizes.hidden, sizes.ffn, sizes.num_experts, sizes.top_k, comm=comm
        )

    def forward(self, x: Tensor) -> Tensor:
        """[tokens, hidden] -> the same."""
        return x + self.moe(self.norm(x))  # type: ignore[no-any-return]


class ByteModel(nn.Module):
    """Embedded context -> rows of `hidden` floats -> blocks -> next byte.

    comm: as in ExpertParallelMoE; None for the whole model in this process.
    """

    def __init__(self, sizes: ModelSizes, comm: Exchange | None = None) -> None:
        super().__init__()
        self.bytes = nn.Embedding(256, _EMBEDDING)
        self.join = nn.Linear(CONTEXT_BYTES * _EMBEDDING, sizes.hidden)
        self.blocks = nn.ModuleList(Block(sizes, comm) for _ in range(sizes.layers))
        self.norm = nn.LayerNorm(sizes.hidden)
        self.head = nn.Linear(sizes.hidden, 256)

    def embed(self, contexts: Tensor) -> Tensor:
        """uint8 [tokens, CONTEXT_BYTES] -> float32 [tokens, hidden]."""
        return functional.relu(self.join(self.bytes(contexts.int()).flatten(1)))

    def forward(self, contexts: Tensor) -> Tensor:
        """Logits of the next byte [tokens, 256]. Where experts are spread, every rank calls it."""
        x = self.embed(contexts)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))  # type: ignore[no-any-return]

    def moe_layers(self) -> list[ExpertParallelMoE]:
        """The MoE layer of each block."""
        return [block.moe for block in self.blocks if isinstance(block, Block)]

    def first_rows(self, contexts: Tensor) -> Tensor:
        """What goes into the first MoE layer: float32 [tokens, hidden]."""
        first = self.blocks[0]
        assert isinstance(first, Block)
        return first.norm(self.embed(contexts))  # type: ignore[no-any-return]


def total_loss(model: ByteModel, contexts: Tensor, following: Tensor) -> Tensor:
    """The sum of the tokens' losses in nats, 0 for no tokens. following: uint8 [tokens]."""
    return functional.cross_entropy(model(contexts), following.long(), reduction="sum")


def batch_at(text: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """(contexts uint8 [tokens, CONTEXT_BYTES], the bytes that follow) at int64 [tokens]."""
    return text[positions[:, None] + torch.arange(-CONTEXT_BYTES, 0)], text[positions]
