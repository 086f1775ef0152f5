"""One rank of the demo: its tokens through the layer, over fastkern and over gloo."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist

import fastkern
from fastkern.nn import ExpertParallelMoE

from .check import close_rows, same_rows
from .copies import combine_copies, dispatch_copies
from .group import rank_group
from .layer import Spread, run_spread
from .model import ByteModel
from .options import Options
from .results import PlanFacts, RankResult, Spans
from .shaped import WAYS, run_shaped
from .text import contexts

T = TypeVar("T")

EXCHANGES = ("dispatch", "combine")


def run_rank(rank: int, step: Callable[[], None], folder: Path, options: Options) -> RankResult:
    """A rank from start to end. `folder` holds the model and the passages; see save_inputs.

    Calls `step` on rank 0 after each part of the work, as often as num_steps says.
    """
    torch.set_grad_enabled(False)
    with rank_group(rank, options.num_ranks, folder):
        model, passage = _load_inputs(folder, rank, options)
        return _run_layer(rank, step if rank == 0 else lambda: None, model, passage, options)


def num_steps(options: Options) -> int:
    """Calls of `step` that rank 0 makes."""
    return 1 + options.repeats + (len(WAYS) if options.shaped else 0)


def save_inputs(folder: Path, model: ByteModel, passages: list[torch.Tensor]) -> None:
    """Write what the ranks start from: the model's weights, and uint8 text for each rank."""
    torch.save(model.state_dict(), folder / "model")
    for rank, passage in enumerate(passages):
        torch.save(passage.clone(), folder / f"passage-{rank}")


def _load_inputs(folder: Path, rank: int, options: Options) -> tuple[ByteModel, torch.Tensor]:
    model = ByteModel(options.sizes)
    model.load_state_dict(torch.load(folder / "model", weights_only=True))
    return model, torch.load(folder / f"passage-{rank}", weights_only=True)


def _run_layer(
    rank: int,
    step: Callable[[], None],
    model: ByteModel,
    passage: torch.Tensor,
    options: Options,
) -> RankResult:
    comm = fastkern.init(servers=options.servers)
    layer = ExpertParallelMoE.from_whole(model.moe_layers()[0], comm)
    x = model.first_rows(contexts(passage))
    clock = Clock(comm)
    first: torch.Tensor | None = None
    for repeat in range(options.repeats + 1):
        spread = run_spread(layer, x, clock)
        _exchange_copies(layer, x, spread, clock)
        first = spread.output if first is None else first
        same_rows(f"rank {rank}, run {repeat} and the first one", spread.output, first)
        step()
    shaped = run_shaped(layer, x, spread, options, step) if options.shaped else []
    return RankResult(
        spread.topk_idx,
        spread.topk_weights,
        spread.received,
        spread.received_weights,
        spread.output,
        spread.handle.stats,
        {name: spans[1:] for name, spans in clock.spans.items()},  # the first run maps memory
        {name: clock.plans[name] for name in EXCHANGES},
        shaped,
    )


def _exchange_copies(
    layer: ExpertParallelMoE, x: torch.Tensor, spread: Spread, clock: Clock
) -> None:
    """The same by gloo, a copy per choice; DemoError where its rows or sums are others."""
    rank, gloo = layer.comm.rank, dist.all_to_all_single
    received, sent = clock(
        "dispatch, gloo",
        lambda: dispatch_copies(gloo, x, spread.topk_idx, layer.placement, rank),
    )
    output = clock(
        "combine, gloo", lambda: combine_copies(gloo, spread.computed, sent, spread.topk_weights)
    )
    same_rows(f"rank {rank}, dispatch by fastkern and by gloo", spread.received, received)
    close_rows(f"rank {rank}, combine by fastkern and by gloo", spread.output, output)


class Clock:
    """Runs phases from a common start, each when all ranks have come to it, and notes times.

    spans, plans: by phase; a plan is the communicator's last one at the phase's end.
    """

    def __init__(self, comm: fastkern.Communicator) -> None:
        self._comm = comm
        self.spans: dict[str, Spans] = {}
        self.plans: dict[str, PlanFacts | None] = {}

    def __call__(self, name: str, phase: Callable[[], T]) -> T:
        """Run a phase when all ranks are ready for it."""
        self._comm.barrier()
        begin = time.monotonic()
        value = phase()
        self.spans.setdefault(name, []).append((begin, time.monotonic()))
        self.plans[name] = PlanFacts.of(self._comm.stats.plan)
        return value
