"""The demo's summary as tables."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.table import Table

import fastkern
from fastkern.planner import Topology, plan

from .gate import Trained
from .layer import TOP_K, Placement
from .options import Options
from .results import PlanFacts, RankResult, slowest_s
from .shaped import POLICIES
from .worker import EXCHANGES

_BAR_WIDTH = 24
_MOST_BARS = 32
_PHASES = ("gate", "permute", "count exchange", "dispatch", "experts", "combine", "unpermute")


Matrix = npt.NDArray[np.int64]


def print_report(
    console: Console,
    options: Options,
    trained: Trained,
    text_bytes: int,
    results: Sequence[RankResult],
) -> None:
    """Everything that is told about a run that was found right."""
    traffic: Matrix = np.array([r.send for r in results], dtype=np.int64)
    row_bytes = options.hidden * 4
    source = "Python's standard library" if options.text is None else str(options.text)
    console.print(
        f"{options.servers} servers x {options.ranks_per_server} ranks as processes; "
        f"{options.num_experts} experts, top-{TOP_K}, rows of {row_bytes} bytes",
        f"text: {text_bytes / 1e6:.1f} MB of {source}; {options.steps} steps of training, "
        f"{trained.bits_before:.2f} -> {trained.bits_after:.2f} bits per byte",
        sep="\n",
        highlight=False,
        markup=False,
        soft_wrap=True,
    )
    _show(console, "Skew, in rows of the dispatch", _skew(options, results, traffic))
    if options.num_ranks <= _MOST_BARS:
        _show(console, "Where the rows go", _loads(options, traffic))
    server = np.arange(options.num_ranks) // options.ranks_per_server
    across = int(traffic[server[:, None] != server[None, :]].sum())
    title = f"Plans: scale-out rows in sequence ({across} of {traffic.sum()} leave their server)"
    _show(console, title, _plans(options, results, traffic))
    _show(console, "Time of each phase on this machine (slowest rank, median)", _phases(results))
    title = "The same rows by torch.distributed on gloo (found equal), in turns"
    _show(console, title, _beside_gloo(results))
    if options.shaped:
        title = f"On links of {_links()}, measured; rows found equal"
        if results[0].shaped[0].rows < traffic.sum():
            title += "; a share of the rows, to end in seconds"
        _show(console, title, _shaped(results))


def _show(console: Console, title: str, table: Table) -> None:
    console.print()
    console.print(title, style="bold", highlight=False, markup=False, soft_wrap=True)
    console.print(table)


def _links() -> str:
    transport = fastkern.shaped()
    up, out = transport.scale_up_GBps * 1e3, transport.scale_out_GBps * 1e3
    return f"{up:.0f} MB/s inside and {out:.0f} MB/s between servers"


def _table(*columns: str) -> Table:
    table = Table()
    for k, name in enumerate(columns):
        table.add_column(name, justify="left" if k == 0 else "right")
    return table


def _skew(options: Options, results: Sequence[RankResult], traffic: Matrix) -> Table:
    per_expert = sum(
        np.bincount(r.choice.experts.reshape(-1).numpy(), minlength=options.num_experts)
        for r in results
    )
    per_rank = traffic.sum(0)
    per_server = per_rank.reshape(options.servers, -1).sum(1)
    table = _table("per", "busiest", "max", "mean", "max / mean")
    for name, loads in (("expert", per_expert), ("rank", per_rank), ("server", per_server)):
        loads = np.asarray(loads)
        mean = loads.mean()
        ratio = f"{loads.max() / mean:.2f}" if mean else "-"
        table.add_row(name, f"{name} {loads.argmax()}", f"{loads.max()}", f"{mean:.0f}", ratio)
    return table


def _loads(options: Options, traffic: Matrix) -> Table:
    table = _table("rank", "experts", "rows in", "")
    table.columns[-1].justify = "left"
    placement = Placement(options.num_experts, options.num_ranks)
    into = traffic.sum(0)
    for rank, rows in enumerate(into):
        server, own = rank // options.ranks_per_server, placement.experts_of(rank)
        experts = f"{own[0]}-{own[-1]}" if len(own) > 1 else f"{own[0]}" if own else "none"
        bar = "#" * round(_BAR_WIDTH * rows / max(1, into.max()))
        table.add_row(f"{rank} (server {server})", experts, f"{rows}", bar)
    return table


def _plans(options: Options, results: Sequence[RankResult], traffic: Matrix) -> Table:
    """What ran here, and what would on the two-tier fabric that --shaped imitates."""
    table = _table("exchange", "links", "policy", "puts", "rows", "bound", "bound / rows")
    for name in EXCHANGES:
        table.add_row(name, "as run", *_facts(results[0].plans[name]))
    transport = fastkern.shaped()
    topology = Topology(
        options.servers,
        options.ranks_per_server,
        transport.scale_up_GBps,
        transport.scale_out_GBps,
        transport.alpha_us,
    )
    for policy in POLICIES:
        made = plan(traffic, topology, options.hidden * 4, policy) if traffic.any() else None
        ratio = transport.scale_up_GBps / transport.scale_out_GBps
        table.add_row("dispatch", f"{ratio:.0f} : 1", *_facts(PlanFacts.of(made)))
    return table


def _facts(facts: PlanFacts | None) -> tuple[str, ...]:
    if facts is None:
        return ("no rows", "-", "-", "-", "-")
    return (
        facts.policy,
        f"{facts.max_puts_per_rank}",
        f"{facts.completion_rows}",
        f"{facts.bound_rows}",
        f"{facts.bound_rows / facts.completion_rows:.1%}" if facts.completion_rows else "-",
    )


def _ms(results: Sequence[RankResult], phase: str) -> float:
    return slowest_s([r.spans[phase] for r in results]) * 1e3


def _phases(results: Sequence[RankResult]) -> Table:
    table = _table("phase", "ms")
    for phase in _PHASES:
        table.add_row(phase, f"{_ms(results, phase):.2f}")
    return table


def _beside_gloo(results: Sequence[RankResult]) -> Table:
    table = _table("", "fastkern ms", "gloo ms", "ratio")
    for name in EXCHANGES:
        ours, gloo = _ms(results, name), _ms(results, f"{name}, gloo")
        table.add_row(name, f"{ours:.2f}", f"{gloo:.2f}", f"{gloo / ours:.2f}")
    return table


def _shaped(results: Sequence[RankResult]) -> Table:
    table = _table(
        "policy",
        "exchange",
        "planned as",
        "rows",
        "ms",
        "bound ms",
        "ms / bound",
    )
    for k, run in enumerate(results[0].shaped):
        seconds = slowest_s([r.shaped[k].spans for r in results])
        table.add_row(
            run.policy,
            run.direction,
            run.planned or "-",
            f"{run.rows}",
            f"{seconds * 1e3:.1f}",
            f"{run.bound_us * 1e-3:.1f}",
            f"{seconds * 1e6 / run.bound_us:.3f}" if run.bound_us else "-",
        )
    return table
