"""What a rank hands back to the process that started it. All of it pickles."""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch

from fastkern.planner import Plan

Spans = list[tuple[float, float]]  # (begin, end) of each timed run, seconds


@dataclass(frozen=True)
class PlanFacts:
    """What a Plan says; see fastkern.planner.Plan."""

    policy: str
    max_puts_per_rank: int
    bound_rows: int
    completion_rows: int

    @staticmethod
    def of(made: Plan | None) -> PlanFacts | None:
        """None where a call had nothing to move and was not planned."""
        if made is None:
            return None
        return PlanFacts(made.policy, made.max_puts_per_rank, made.bound_rows, made.completion_rows)


@dataclass(frozen=True)
class ShapedRun:
    """An exchange on the shaped transport.

    copies, policy: see shaped.WAYS. direction: "dispatch" or "combine". rows: over scale-out, of
    all ranks. bound_us: the least that any plan for these copies takes.
    """

    copies: str
    policy: str
    direction: str
    rows: int
    bound_us: float
    spans: Spans


@dataclass(frozen=True)
class RankResult:
    """A rank's part of the layer, and when it did what.

    topk_idx ... output: as in layer.Spread. stats: of the dispatch's handle. spans: of each phase,
    on a clock that all ranks share. plans: of dispatch and combine.
    """

    topk_idx: torch.Tensor
    topk_weights: torch.Tensor
    received: torch.Tensor
    received_weights: torch.Tensor
    output: torch.Tensor
    stats: Any
    spans: dict[str, Spans]
    plans: dict[str, PlanFacts | None]
    shaped: list[ShapedRun] = field(default_factory=list)


def slowest_s(spans: list[Spans]) -> float:
    """Median over runs of the time from the common start to the slowest rank's end, seconds.

    spans: of every rank.
    """
    times = [max(e for _, e in run) - min(b for b, _ in run) for run in zip(*spans, strict=True)]
    return float(median(times))
