"""What a rank hands back to the process that started it. All of it pickles."""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import median

import torch

from fastkern.planner import Plan

from .layer import Choice

Spans = list[tuple[float, float]]  # (begin, end) of each timed run, seconds


@dataclass(frozen=True)
class PlanFacts:
    """What a Plan says; see fastkern.planner.Plan."""

    policy: str
    max_puts_per_rank: int
    bound_rows: int
    completion_rows: int
    bound_us: float

    @staticmethod
    def of(made: Plan | None) -> PlanFacts | None:
        """None where a call had nothing to move and was not planned."""
        if made is None:
            return None
        return PlanFacts(
            made.policy,
            made.max_puts_per_rank,
            made.bound_rows,
            made.completion_rows,
            made.bound_us,
        )


@dataclass(frozen=True)
class ShapedRun:
    """An exchange on the shaped transport: asked-for policy, "dispatch" or "combine".

    planned: the policy that was planned. rows: of all ranks. bound_us: of the best plan.
    """

    policy: str
    direction: str
    planned: str
    rows: int
    bound_us: float
    spans: Spans


@dataclass(frozen=True)
class RankResult:
    """A rank's part of the layer, and when it did what.

    choice, received, returned, output: as in layer.Spread. send: rows to each rank in the dispatch.
    spans: of each phase, on a clock that all ranks share. plans: of dispatch and combine.
    """

    choice: Choice
    send: list[int]
    received: torch.Tensor
    returned: torch.Tensor
    output: torch.Tensor
    spans: dict[str, Spans]
    plans: dict[str, PlanFacts | None]
    shaped: list[ShapedRun] = field(default_factory=list)


def slowest_s(spans: list[Spans]) -> float:
    """Median over runs of the time from the common start to the slowest rank's end, seconds.

    spans: of every rank.
    """
    times = [max(e for _, e in run) - min(b for b, _ in run) for run in zip(*spans, strict=True)]
    return float(median(times))
