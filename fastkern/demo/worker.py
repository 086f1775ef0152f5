"""One rank of the demo: its tokens through the layer, over fastkern and over gloo."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

import fastkern

from .check import same_rows
from .gate import ByteModel
from .layer import Exchange, Placement, Spread, run_spread
from .options import Options
from .results import PlanFacts, RankResult, Spans
from .shaped import POLICIES, run_shaped
from .text import contexts

T = TypeVar("T")

_GROUP_TIMEOUT = timedelta(seconds=120)
EXCHANGES = ("dispatch", "combine")


def run_rank(rank: int, step: Callable[[], None], folder: Path, options: Options) -> RankResult:
    """A rank from start to end. `folder` holds the model and the passages; see save_inputs.

    Calls `step` on rank 0 after each part of the work, as often as num_steps says.
    """
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"  # all ranks are on this machine
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/rendezvous",
        rank=rank,
        world_size=options.num_ranks,
        timeout=_GROUP_TIMEOUT,
    )
    try:
        model, passage = _load_inputs(folder, rank, options)
        result = _run_layer(rank, step if rank == 0 else lambda: None, model, passage, options)
        dist.barrier()
        return result
    finally:
        fastkern.shutdown()
        dist.destroy_process_group()


def num_steps(options: Options) -> int:
    """Calls of `step` that rank 0 makes."""
    return 1 + options.repeats + (len(POLICIES) * len(EXCHANGES) if options.shaped else 0)


def save_inputs(folder: Path, model: ByteModel, passages: list[torch.Tensor]) -> None:
    """Write what the ranks start from: the model's weights, and uint8 text for each rank."""
    torch.save(model.state_dict(), folder / "model")
    for rank, passage in enumerate(passages):
        torch.save(passage.clone(), folder / f"passage-{rank}")


def _load_inputs(folder: Path, rank: int, options: Options) -> tuple[ByteModel, torch.Tensor]:
    model = ByteModel(options.hidden, options.num_experts)
    model.load_state_dict(torch.load(folder / "model", weights_only=True))
    return model, torch.load(folder / f"passage-{rank}", weights_only=True)


def _run_layer(
    rank: int,
    step: Callable[[], None],
    model: ByteModel,
    passage: torch.Tensor,
    options: Options,
) -> RankResult:
    placement = Placement(options.num_experts, options.num_ranks)
    experts = [model.moe.experts[e] for e in placement.experts_of(rank)]
    x = model.rows(contexts(passage))
    comm = fastkern.init(servers=options.servers)
    ours, gloo = exchange_by(fastkern.all_to_all_single), exchange_by(dist.all_to_all_single)
    clock = Clock(comm)
    first: torch.Tensor | None = None
    for repeat in range(options.repeats + 1):
        spread = run_spread(model.moe.gate, experts, placement, x, ours, clock)
        _exchange_again(rank, spread, gloo, clock)
        first = spread.output if first is None else first
        same_rows(f"rank {rank}, run {repeat} and the first one", spread.output, first)
        step()
    shaped = []
    if options.shaped:
        shaped = run_shaped(rank, options.servers, spread, options.repeats, step)
    return RankResult(
        spread.choice,
        spread.send,
        spread.received,
        spread.returned,
        spread.output,
        {name: spans[1:] for name, spans in clock.spans.items()},  # the first run maps memory
        {name: clock.plans[name] for name in EXCHANGES},
        shaped,
    )


def _exchange_again(rank: int, spread: Spread, gloo: Exchange, clock: Clock) -> None:
    """Both exchanges by gloo; raises DemoError where it delivers other rows than fastkern did."""
    received = clock(
        "dispatch, gloo", lambda: gloo(spread.outgoing.rows, spread.send, spread.receive)
    )
    returned = clock("combine, gloo", lambda: gloo(spread.computed, spread.receive, spread.send))
    same_rows(f"rank {rank}, dispatch by fastkern and by gloo", spread.received, received)
    same_rows(f"rank {rank}, combine by fastkern and by gloo", spread.returned, returned)


def exchange_by(all_to_all_single: Callable[..., Any]) -> Exchange:
    """An exchange into fresh memory by a function with PyTorch's signature."""

    def exchange(rows: torch.Tensor, send: list[int], receive: list[int]) -> torch.Tensor:
        output = rows.new_empty((sum(receive), *rows.shape[1:]))
        all_to_all_single(output, rows, receive, send)
        return output

    return exchange


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
