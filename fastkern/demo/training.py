"""The training that one process and a rank of several do alike: batches, model, steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from fastkern.nn import Exchange, TopKGate

from .model import ByteModel, batch_at, total_loss
from .options import TrainOptions
from .text import CONTEXT_BYTES

_LEARNING_RATE = 2e-3


def positions(options: TrainOptions, num_bytes: int) -> Tensor:
    """Where in a text of so many bytes: int64 [steps, ranks, tokens], the same in every process."""
    generator = torch.Generator().manual_seed(options.seed)
    shape = (options.steps, options.num_ranks, options.tokens_per_rank)
    return torch.randint(CONTEXT_BYTES, num_bytes, shape, generator=generator)


@dataclass(frozen=True)
class Course:
    """What came of a training.

    losses: float64 [steps], nats per token over the tokens of this process. routing: int32
    [steps, layers, tokens, top_k], the experts chosen. model: in its last state.
    """

    losses: Tensor
    routing: Tensor
    model: ByteModel


def train(
    options: TrainOptions,
    text: Tensor,
    places: Tensor,
    comm: Exchange | None,
    sync: Callable[[ByteModel], object],
    on_step: Callable[[], object],
) -> Course:
    """Train a fresh model on the tokens of text (uint8) at places [steps, tokens].

    The loss is the mean over the tokens of all ranks; `sync` brings together what backward left
    apart. Weights begin the same wherever the experts live. The global generator is left alone.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(options.seed)
        model = ByteModel(options.sizes, comm).to(getattr(torch, options.dtype))
    optimizer = torch.optim.Adam(model.parameters(), lr=_LEARNING_RATE)
    chosen: list[Tensor] = []
    _note_choices(model, chosen)
    losses = []
    for now in places:
        optimizer.zero_grad()
        loss = total_loss(model, *batch_at(text, now))
        (loss / (options.num_ranks * options.tokens_per_rank)).backward()  # type: ignore[no-untyped-call]
        sync(model)
        optimizer.step()
        losses.append(loss.item() / len(now))
        on_step()
    routing = torch.stack(chosen).view(len(places), options.layers, *chosen[0].shape)
    return Course(torch.tensor(losses, dtype=torch.float64), routing, model)


def _note_choices(model: ByteModel, chosen: list[Tensor]) -> None:
    """Have each gate append the experts that it chooses, layer after layer."""

    def note(gate: TopKGate, inputs: object, output: tuple[Tensor, Tensor]) -> None:
        chosen.append(output[0].int())

    for layer in model.moe_layers():
        layer.gate.register_forward_hook(note)
