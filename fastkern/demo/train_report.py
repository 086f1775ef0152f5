"""Both loss curves, and what the routing was like."""

from __future__ import annotations

import torch
from rich.console import Console
from rich.table import Table

from fastkern.moe.placement import Placement

from .compare import Comparison
from .console import say, show, table_of
from .options import TrainOptions
from .rows import count_rows

_MOST_LINES = 13


def print_courses(
    console: Console, options: TrainOptions, comparison: Comparison, step_ms: float
) -> None:
    """Everything that is told about a training, right or wrong. step_ms: over ranks."""
    sizes = options.sizes
    say(
        console,
        f"{options.servers} servers x {options.ranks_per_server} ranks as processes; "
        f"{sizes.layers} MoE layers of {sizes.num_experts} experts, top-{sizes.top_k}, "
        f"{options.dtype}, rows of {options.row_bytes} bytes",
        f"text: {options.source}; {options.tokens_per_rank} tokens per rank and step; Adam; "
        f"{step_ms:.0f} ms per step (median)",
    )
    show(console, "Loss in nats per byte", _curves(comparison))
    show(console, f"Routing of step {options.steps - 1}", _routing(options, comparison))


def _curves(comparison: Comparison) -> Table:
    table = table_of("step", "over ranks", "one process", "difference")
    num_steps = len(comparison.losses)
    steps = torch.linspace(0, num_steps - 1, min(num_steps, _MOST_LINES), dtype=torch.float64)
    for k in steps.round().long().tolist():
        ranks, whole = float(comparison.losses[k]), float(comparison.whole_losses[k])
        table.add_row(f"{k}", f"{ranks:.6f}", f"{whole:.6f}", f"{ranks - whole:+.1e}")
    return table


def _routing(options: TrainOptions, comparison: Comparison) -> Table:
    table = table_of(
        "layer",
        "busiest expert / mean",
        "rows to other servers, per choice",
        "deduplicated",
        "saved",
        "unlike one process",
    )
    placement = Placement(options.num_experts, options.num_ranks)
    for layer in range(options.layers):
        chosen = comparison.routing[-1, layer]
        counts = count_rows(list(chosen), options.servers, placement)
        copies, sent = counts.choices_across, counts.tokens_across
        table.add_row(
            f"{layer}",
            f"{counts.per_expert.max() / counts.per_expert.mean():.2f}",
            f"{copies}",
            f"{sent}",
            f"{1 - sent / copies:.0%}" if copies else "-",
            f"{int(comparison.unlike[-1, layer])} of {chosen.numel()}",
        )
    return table
