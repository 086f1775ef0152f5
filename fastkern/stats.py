"""Figures of a call."""

from __future__ import annotations

from dataclasses import dataclass

from .planner import Plan


@dataclass(frozen=True)
class CallStats:
    """Figures of the last call that ended well on this rank; times in seconds.

    plan: of the call, or of its whole where it was done in rounds; None where nothing moved.
    entry_s: until all ranks had entered and their counts were here. plan_s: planning and lowering.
    grow_s: making a larger heap. kernel_s: the kernel, or all rounds; on a GPU, starting them.
    """

    plan: Plan | None
    entry_s: float = 0.0
    plan_s: float = 0.0
    grow_s: float = 0.0
    kernel_s: float = 0.0
