"""Holding a training over ranks against the same training in one process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .errors import DemoError
from .training import Course

# Losses are of order 1, in nats. Gradients are sums over tokens, taken in other orders, so weights
# differ in their last places from the first step on. That alone keeps losses this close:
TOLERANCE = {"float64": 1e-9, "float32": 1e-4}
# In float32 it soon turns a near tie between experts the other way: another expert, another loss,
# and from then on another course of training. Later steps show no more than that both learn alike.
TOLERANCE_AFTER_A_TIE = 0.1


@dataclass(frozen=True)
class Comparison:
    """Two trainings on the same tokens.

    losses, whole_losses: float64 [steps], nats per token, over ranks and in one process. routing:
    int32 [steps, layers, ranks, tokens, top_k], over ranks. unlike: int64 [steps, layers], choices
    that were others in one process.
    """

    losses: Tensor
    whole_losses: Tensor
    routing: Tensor
    unlike: Tensor

    @staticmethod
    def of(losses: Sequence[Tensor], routing: Sequence[Tensor], whole: Course) -> Comparison:
        """losses, routing: of each rank, as in training.Course."""
        over_ranks = torch.stack(list(routing), dim=2)
        unlike = over_ranks != whole.routing.view_as(over_ranks)
        return Comparison(
            torch.stack(list(losses)).mean(0),
            whole.losses,
            over_ranks,
            unlike.sum(dim=(2, 3, 4)),
        )

    @property
    def num_alike(self) -> int:
        """How many steps, from the first, have no choice unlike one process."""
        found = self.unlike.sum(1).nonzero()
        return int(found[0]) if len(found) else len(self.losses)


def verdict(comparison: Comparison, dtype: str) -> str:
    """How close the losses are, in a sentence; raises DemoError where they are not close enough."""
    apart = (comparison.losses - comparison.whole_losses).abs()
    limits = torch.full_like(apart, TOLERANCE[dtype])
    alike = comparison.num_alike
    if dtype == "float32":
        limits[alike:] = TOLERANCE_AFTER_A_TIE
    wrong = (~(apart <= limits)).nonzero()  # a NaN is wrong too
    if len(wrong):
        step = int(wrong[0])
        raise DemoError(
            f"losses over ranks and in one process differ by {float(apart[step]):.1e} nats at step "
            f"{step}, more than {float(limits[step]):.0e}"
        )
    spans = [(slice(0, alike), "while the choices are alike"), (slice(alike, None), "later")]
    if dtype == "float64" or alike == len(apart):
        spans = [(slice(None), "nats")]
    return "losses differ by at most " + ", ".join(
        f"{float(apart[span].max()):.1e} {when} (tolerance {float(limits[span][0]):.0e})"
        for span, when in spans
        if len(apart[span])
    )
