"""A tiny language model around the layer: bytes before a position in, the next byte out."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

from .layer import MoeLayer
from .text import CONTEXT_BYTES

_EMBEDDING = 32  # floats per byte of context
_BATCH = 1024
_LEARNING_RATE = 3e-3


class ByteModel(nn.Module):
    """Embedded context -> rows of `hidden` floats -> MoE layer, with a skip -> next byte."""

    def __init__(self, hidden: int, num_experts: int) -> None:
        super().__init__()
        self.bytes = nn.Embedding(256, _EMBEDDING)
        self.join = nn.Linear(CONTEXT_BYTES * _EMBEDDING, hidden)
        self.norm = nn.LayerNorm(hidden)
        self.moe = MoeLayer(hidden, num_experts)
        self.head = nn.Linear(hidden, 256)

    def rows(self, contexts: torch.Tensor) -> torch.Tensor:
        """The MoE layer's input: uint8 [tokens, CONTEXT_BYTES] -> float32 [tokens, hidden]."""
        joined = self.join(self.bytes(contexts.int()).flatten(1))
        return self.norm(functional.relu(joined))  # type: ignore[no-any-return]

    def forward(self, contexts: torch.Tensor) -> torch.Tensor:
        """Logits of the next byte [tokens, 256]."""
        x = self.rows(contexts)
        return self.head(x + self.moe(x))  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Trained:
    """The model, and its loss on a batch before and after training, in bits per byte."""

    model: ByteModel
    bits_before: float
    bits_after: float


def train(
    text: torch.Tensor,
    hidden: int,
    num_experts: int,
    steps: int,
    seed: int,
    on_step: Callable[[], object],
) -> Trained:
    """Train on random positions of `text` (uint8), calling `on_step` after each step.

    The same arguments give the same model on the same machine; the global generator is left alone.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = ByteModel(hidden, num_experts)
        optimizer = torch.optim.AdamW(model.parameters(), lr=_LEARNING_RATE)
        bits_before = _bits(model, text)
        for step in range(steps):
            for group in optimizer.param_groups:
                group["lr"] = _LEARNING_RATE * (1 - step / steps)
            optimizer.zero_grad()
            _loss(model, text).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            on_step()
        return Trained(model.eval(), bits_before, _bits(model, text))


def _loss(model: ByteModel, text: torch.Tensor) -> torch.Tensor:
    """Mean loss in nats on a batch of random positions."""
    ends = torch.randint(CONTEXT_BYTES, len(text), (_BATCH,))
    contexts = text[ends[:, None] + torch.arange(-CONTEXT_BYTES, 0)]
    return functional.cross_entropy(model(contexts), text[ends].long())


def _bits(model: ByteModel, text: torch.Tensor) -> float:
    with torch.no_grad():
        return float(_loss(model, text)) / math.log(2)
