"""Training the demo's model in one process, so that its gate does what a real one does."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from .model import ByteModel, ModelSizes, batch_at, total_loss
from .text import CONTEXT_BYTES

_BATCH = 1024
_LEARNING_RATE = 3e-3


@dataclass(frozen=True)
class Trained:
    """The model, and its loss on a batch before and after training, in bits per byte."""

    model: ByteModel
    bits_before: float
    bits_after: float


def train(
    text: torch.Tensor,
    sizes: ModelSizes,
    steps: int,
    seed: int,
    on_step: Callable[[], object],
) -> Trained:
    """Train on random positions of `text` (uint8), calling `on_step` after each step.

    The same arguments give the same model on the same machine; the global generator is left alone.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = ByteModel(sizes)
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
    positions = torch.randint(CONTEXT_BYTES, len(text), (_BATCH,))
    return total_loss(model, *batch_at(text, positions)) / _BATCH


def _bits(model: ByteModel, text: torch.Tensor) -> float:
    with torch.no_grad():
        return float(_loss(model, text)) / math.log(2)
