"""One rank of the training demo."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

import fastkern
from fastkern.nn import replicated_parameters, sum_gradients

from .group import rank_group
from .model import ByteModel
from .options import TrainOptions
from .training import positions, train


@dataclass(frozen=True)
class RankCourse:
    """A rank's training: losses and routing as in training.Course, and seconds of each step."""

    losses: Tensor
    routing: Tensor
    step_s: list[float]


def train_rank(
    rank: int, step: Callable[[], None], folder: Path, options: TrainOptions
) -> RankCourse:
    """Train this rank's part of the model on its tokens. `folder` holds the text.

    Calls `step` on rank 0 after each step.
    """
    with rank_group(rank, options.num_ranks, folder):
        text = torch.load(folder / "text", weights_only=True)
        comm = fastkern.init(servers=options.servers)
        ends = [time.perf_counter()]

        def on_step() -> None:
            ends.append(time.perf_counter())
            if rank == 0:
                step()

        course = train(
            options, text, positions(options, len(text))[:, rank], comm, sum_replicated, on_step
        )
        step_s = [end - begin for begin, end in itertools.pairwise(ends)]
        return RankCourse(course.losses, course.routing, step_s)


def sum_replicated(model: ByteModel) -> None:
    """Sum over ranks the gradients of what every rank has; those of experts are sums already."""
    sum_gradients(replicated_parameters(model))
