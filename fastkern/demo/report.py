"""The demo's summary as tables."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

import fastkern
from fastkern.moe.placement import Placement

from .console import say, show, table_of
from .options import Options
from .pretrain import Trained
from .results import PlanFacts, RankResult, slowest_s
from .rows import RowCounts
from .shaped import PER_CHOICE, PER_SERVER, WAYS, plan_for, topology_of
from .worker import EXCHANGES

_BAR_WIDTH = 24
_MOST_BARS = 32
_PHASES = ("gate", "dispatch", "experts", "combine")


def print_report(
    console: Console,
    options: Options,
    trained: Trained,
    text_bytes: int,
    counts: RowCounts,
    results: Sequence[RankResult],
) -> None:
    """Everything that is told about a run that was found right."""
    say(
        console,
        f"{options.servers} servers x {options.ranks_per_server} ranks as processes; "
        f"{options.num_experts} experts, top-{options.top_k}, rows of {options.hidden * 4} bytes",
        f"text: {text_bytes / 1e6:.1f} MB of {options.source}; {options.steps} steps of training, "
        f"{trained.bits_before:.2f} -> {trained.bits_after:.2f} bits per byte",
    )
    show(console, "Skew, in choices", _skew(options, counts))
    if options.num_ranks <= _MOST_BARS:
        show(console, "Where the tokens go", _loads(options, counts))
    title = "Rows of a dispatch; its combine moves as many back, as sums"
    show(console, title, _saved(counts, results))
    show(
        console,
        "Plans: rows in sequence between servers, and the least",
        _plans(options, counts, results),
    )
    title = "Time of each phase on this machine (slowest rank, median)"
    show(console, title, _phases(results))
    title = "Beside all_to_all_single of torch.distributed on gloo, a copy per choice, in turns"
    show(console, title, _beside_gloo(results))
    if options.shaped:
        title = f"On links of {_links()}, measured; rows found equal"
        if results[0].shaped[0].rows < counts.tokens_across:
            title += "; a share of the tokens, to end in seconds"
        show(console, title, _shaped(results))


def _links() -> str:
    transport = fastkern.shaped()
    up, out = transport.scale_up_GBps * 1e3, transport.scale_out_GBps * 1e3
    return f"{up:.0f} MB/s inside and {out:.0f} MB/s between servers"


def _skew(options: Options, counts: RowCounts) -> Table:
    per_rank = counts.choices.sum(0)
    per_server = per_rank.reshape(options.servers, -1).sum(1)
    table = table_of("per", "busiest", "max", "mean", "max / mean")
    for name, loads in (
        ("expert", counts.per_expert),
        ("rank", per_rank),
        ("server", per_server),
    ):
        mean = loads.mean()
        ratio = f"{loads.max() / mean:.2f}" if mean else "-"
        table.add_row(name, f"{name} {loads.argmax()}", f"{loads.max()}", f"{mean:.0f}", ratio)
    return table


def _loads(options: Options, counts: RowCounts) -> Table:
    table = table_of("rank", "experts", "tokens in", "choices in", "")
    table.columns[-1].justify = "left"
    placement = Placement(options.num_experts, options.num_ranks)
    tokens, choices = counts.to_rank.sum(0), counts.choices.sum(0)
    for rank in range(options.num_ranks):
        server, own = rank // options.ranks_per_server, placement.experts_of(rank)
        experts = f"{own[0]}-{own[-1]}" if len(own) > 1 else f"{own[0]}" if own else "none"
        bar = "#" * round(_BAR_WIDTH * choices[rank] / max(1, choices.max()))
        table.add_row(
            f"{rank} (server {server})", experts, f"{tokens[rank]}", f"{choices[rank]}", bar
        )
    return table


def _saved(counts: RowCounts, results: Sequence[RankResult]) -> Table:
    """What deduplication takes off the links between servers, as the handles tell it."""
    table = table_of("copies of a token", "rows between servers", "rows inside servers")
    across = sum(r.stats.scale_out_rows for r in results)
    inside = sum(r.stats.scale_up_rows for r in results)
    table.add_row(PER_CHOICE, f"{counts.choices_across}", f"{counts.choices_inside}")
    table.add_row(f"{PER_SERVER} (fastkern)", f"{across}", f"{inside}")
    changes = (_change(counts.choices_across, across), _change(counts.choices_inside, inside))
    table.add_row("change", *changes)
    return table


def _change(before: int, after: int) -> str:
    return f"{after / before - 1:+.0%}" if before else "-"


def _plans(options: Options, counts: RowCounts, results: Sequence[RankResult]) -> Table:
    """What ran here, and what would on the two-tier fabric that --shaped imitates."""
    table = table_of("exchange", "links", "copies", "policy", "puts", "rows", "bound")
    for name in EXCHANGES:
        table.add_row(name, "as run", PER_SERVER, *_facts(results[0].plans[name]))
    transport = fastkern.shaped()
    topology = topology_of(transport, options)
    ratio = f"{transport.scale_up_GBps / transport.scale_out_GBps:.0f} : 1"
    for copies, policy in WAYS:
        made = plan_for(counts, copies, policy, topology, results[0].stats.row_bytes)
        table.add_row("dispatch", ratio, copies, *_facts(PlanFacts.of(made)))
    return table


def _facts(facts: PlanFacts | None) -> tuple[str, ...]:
    if facts is None:
        return ("no rows", "-", "-", "-")
    return (
        facts.policy,
        f"{facts.max_puts_per_rank}",
        f"{facts.completion_rows}",
        f"{facts.bound_rows}",
    )


def _ms(results: Sequence[RankResult], phase: str) -> float:
    return slowest_s([r.spans[phase] for r in results]) * 1e3


def _phases(results: Sequence[RankResult]) -> Table:
    table = table_of("phase", "ms")
    for phase in _PHASES:
        table.add_row(phase, f"{_ms(results, phase):.2f}")
    return table


def _beside_gloo(results: Sequence[RankResult]) -> Table:
    table = table_of("", "fastkern ms", "gloo ms", "ratio")
    for name in EXCHANGES:
        ours, gloo = _ms(results, name), _ms(results, f"{name}, gloo")
        table.add_row(name, f"{ours:.2f}", f"{gloo:.2f}", f"{gloo / ours:.2f}")
    return table


def _shaped(results: Sequence[RankResult]) -> Table:
    table = table_of("copies", "policy", "exchange", "rows out", "ms", "bound ms", "ms / bound")
    for k, run in enumerate(results[0].shaped):
        seconds = slowest_s([r.shaped[k].spans for r in results])
        table.add_row(
            run.copies,
            run.policy,
            run.direction,
            f"{run.rows}",
            f"{seconds * 1e3:.1f}",
            f"{run.bound_us * 1e-3:.1f}",
            f"{seconds * 1e6 / run.bound_us:.3f}" if run.bound_us else "-",
        )
    return table
