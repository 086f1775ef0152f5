"""The layer's exchanges once more, on links slowed down to the rates of a two-tier fabric."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import torch.distributed as dist
from torch import Tensor

import fastkern
from fastkern.nn import ExpertParallelMoE
from fastkern.planner import Plan, Policy, Topology, plan, plan_moe

from .check import close_rows, same_rows
from .copies import Sent, combine_copies, dispatch_copies
from .layer import Spread
from .options import Options
from .results import ShapedRun, Spans
from .rows import RowCounts, count_rows

T = TypeVar("T")

POLICIES: tuple[Policy, ...] = ("auto", "spreadout", "direct")
PER_SERVER, PER_CHOICE = "per server", "per choice"  # a token's copies
WAYS = tuple((copies, policy) for copies in (PER_SERVER, PER_CHOICE) for policy in POLICIES)
_LONGEST_S = 1.0  # the most that a rank's links may be busy in one call; more tokens are left out


def run_shaped(
    layer: ExpertParallelMoE,
    x: Tensor,
    spread: Spread,
    options: Options,
    step: Callable[[], object],
) -> list[ShapedRun]:
    """Dispatch and combine by each way; every call's rows are checked. Collective.

    x: [tokens, hidden], of which the first ones are used where all would take too long.
    """
    return _Runs(layer, x, spread, options).all(step)


class _Runs:
    def __init__(
        self, layer: ExpertParallelMoE, x: Tensor, spread: Spread, options: Options
    ) -> None:
        self._layer, self._options = layer, options
        self._dispatch_row_bytes = spread.handle.stats.row_bytes
        self._row_bytes = x.shape[1] * x.element_size()
        self._transport = fastkern.shaped()
        self._topology = topology_of(self._transport, options)
        busy_s = self._busy_s(self._count(spread.topk_idx))
        kept = int(len(x) * min(1.0, _LONGEST_S / busy_s)) if busy_s else len(x)
        self._x, self._weights = x[:kept], spread.topk_weights[:kept]
        self._idx = spread.topk_idx[:kept]
        self._counts = self._count(self._idx)
        # What the calls must deliver, by links that are not slowed down.
        self._received, (handle, weights) = self._dispatch(layer.comm)
        self._computed = layer.run_experts(self._received, handle.tokens_per_expert_list)
        self._output = self._combine(layer.comm, handle, weights)

    def all(self, step: Callable[[], object]) -> list[ShapedRun]:
        """Every way, in turn; `step` is called after each."""
        found = []
        for copies, policy in WAYS:
            with fastkern.Communicator(
                servers=self._options.servers, transport=self._transport, policy=policy
            ) as comm:
                found += self._one(comm, copies, policy)
                dist.barrier()
            step()
        return found

    def _one(self, comm: fastkern.Communicator, copies: str, policy: Policy) -> list[ShapedRun]:
        dispatch: Callable[..., Any] = self._dispatch
        combine: Callable[..., Tensor] = self._combine
        same, num_rows = same_rows, self._counts.tokens_across
        if copies == PER_CHOICE:
            dispatch, combine = self._dispatch_copies, self._combine_copies
            same, num_rows = close_rows, self._counts.choices_across
        what = f"rank {comm.rank}, {{}} on shaped links, copies {copies}, policy {policy}"
        there: Spans = []
        back: Spans = []
        for _ in range(self._options.repeats + 1):
            rows, kept = _timed(comm, there, partial(dispatch, comm))
            same_rows(what.format("dispatch"), rows, self._received)
            output = _timed(comm, back, partial(combine, comm, *kept))
            same(what.format("combine"), output, self._output)
        return [
            ShapedRun(
                copies,
                policy,
                direction,
                num_rows,
                self._bound_us(copies, direction),
                spans[1:],  # the first call maps memory
            )
            for direction, spans in (("dispatch", there), ("combine", back))
        ]

    def _dispatch(self, comm: Any) -> tuple[Tensor, tuple[Any, ...]]:
        rows, weights, _, handle = comm.dispatch(
            self._x, self._idx, self._weights, num_experts=self._layer.num_experts
        )
        return rows, (handle, weights)

    def _combine(self, comm: Any, handle: Any, weights: Tensor) -> Tensor:
        return comm.combine(self._computed, handle, weights=weights)  # type: ignore[no-any-return]

    def _dispatch_copies(self, comm: Any) -> tuple[Tensor, tuple[Any, ...]]:
        rows, sent = dispatch_copies(
            comm.all_to_all_single, self._x, self._idx, self._layer.placement, comm.rank
        )
        return rows, (sent,)

    def _combine_copies(self, comm: Any, sent: Sent) -> Tensor:
        return combine_copies(comm.all_to_all_single, self._computed, sent, self._weights)

    def _count(self, topk_idx: Tensor) -> RowCounts:
        """Rows of all ranks, from this one's choices."""
        parts: list[Tensor] = [topk_idx] * self._topology.num_ranks
        dist.all_gather_object(parts, topk_idx)
        return count_rows(parts, self._options.servers, self._layer.placement)

    def _busy_s(self, counts: RowCounts) -> float:
        """How long a rank's links would be busy with all tokens, in the slowest way."""
        made = [
            plan_for(counts, copies, policy, self._topology, self._dispatch_row_bytes)
            for copies, policy in WAYS
        ]
        rate = self._topology.scale_out_GBps * 1e9
        return max(max(p.completion_rows * p.row_bytes / rate, p.bound_us * 1e-6) for p in made)

    def _bound_us(self, copies: str, direction: str) -> float:
        """Of the best plan for these copies; a combine moves the same rows back."""
        has_header = copies == PER_SERVER and direction == "dispatch"
        row_bytes = self._dispatch_row_bytes if has_header else self._row_bytes
        return plan_for(self._counts, copies, "auto", self._topology, row_bytes).bound_us


def plan_for(
    counts: RowCounts, copies: str, policy: Policy, topology: Topology, row_bytes: int
) -> Plan:
    """The plan of a dispatch with a copy per server, or per choice."""
    if copies == PER_CHOICE:
        return plan(counts.choices, topology, row_bytes, policy)
    return plan_moe(counts.to_server, counts.to_rank, topology, row_bytes, policy)


def topology_of(transport: fastkern.Transport, options: Options) -> Topology:
    """The demo's servers and ranks on a transport's links."""
    return Topology(
        options.servers,
        options.ranks_per_server,
        transport.scale_up_GBps,
        transport.scale_out_GBps,
        transport.alpha_us,
    )


def _timed(comm: fastkern.Communicator, spans: Spans, call: Callable[[], T]) -> T:
    """Run a call when all ranks are ready for it, and note its span."""
    comm.barrier()
    begin = time.monotonic()
    value = call()
    spans.append((begin, time.monotonic()))
    return value
