"""What `moe_exchange` predicts of each case before it measures, and its table."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from fastkern.moe.dispatch_arguments import RowFormat
from fastkern.moe.placement import Placement
from perf.moe_cases import Case
from perf.routed_rows import RoutedRows, routed_rows
from perf.rows import Row, make_row

Way = tuple[str, str]  # who sends, which direction
COPIES: tuple[Way, ...] = (("copies", "dispatch"), ("copies", "combine"))
ONCE: tuple[Way, ...] = (("once", "dispatch"), ("once", "combine bf16"), ("once", "combine fp32"))
WAYS = COPIES + ONCE
RIVAL: dict[Way, Way] = dict(zip(ONCE, (COPIES[0], COPIES[1], COPIES[1]), strict=True))


def row_bytes(way: Way, hidden: int, top_k: int) -> int:
    """Bytes of a row over scale-out, weights, header and alignment included; payload: bf16.

    Copies carry no weights: their owner keeps them.
    """
    payload = 2 * hidden
    if way == ONCE[0]:
        return RowFormat.of([payload], weight_bytes=4, topk=top_k).row_bytes
    return payload * (2 if way == ONCE[2] else 1)


@dataclass(frozen=True)
class Figures:
    """One case's predictions.

    rows: of each repeat. bounds_us: microseconds of each repeat, way by way.
    """

    case: Case
    hidden: int
    rows: list[RoutedRows]
    bounds_us: dict[Way, list[float]]

    @property
    def num_tokens(self) -> float:
        """Tokens of all ranks, mean over repeats."""
        return float(np.mean([sum(map(len, call)) for call in self.case.routings]))

    def rows_out(self, way: Way) -> float:
        """Rows over scale-out, mean over repeats."""
        return float(np.mean([rows.scale_out_rows(way in ONCE) for rows in self.rows]))

    def bytes_out(self, way: Way) -> float:
        """Bytes over scale-out of all ranks, mean over repeats."""
        return self.rows_out(way) * row_bytes(way, self.hidden, self.case.top_k)

    def predicted(self, way: Way) -> float:
        """Time of copies over that of `way`."""
        return float(np.median(np.array(self.bounds_us[RIVAL[way]]) / self.bounds_us[way]))


def predict(case: Case, o: argparse.Namespace) -> Figures:
    """The model: rows of the busiest server over its NICs, times a row's bytes, over the rate."""
    owner = Placement(case.num_experts, o.servers * o.per_server).owner
    rows = [routed_rows(routing, owner, o.servers) for routing in case.routings]
    bounds = {}
    for way in WAYS:
        size = row_bytes(way, o.hidden, case.top_k)
        bounds[way] = [r.bound_us(way in ONCE, size, o.scale_out * 1e-3) for r in rows]
    return Figures(case, o.hidden, rows, bounds)


def show(figures: list[Figures], times: list[dict[Way, list[float]]], title: str) -> None:
    """Print the table. times: for each case, microseconds of each repeat."""
    table = Table(title=title, box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name in (
        "\n\nworkload",
        "\n\ntop",
        "rows out\nper token\ncopies>once",
        "MB out: copies (each way)\n> once: dispatch, combine\nbf16, fp32",
        "copies/once\npred. meas.\ndispatch",
        "\n\nbf16",
        "\n\nfp32",
        "over bound:\ncopies\ndisp comb",
        "\nonce\ndisp bf16 fp32",
    ):
        table.add_column(name, no_wrap=True)
    for f, took in zip(figures, times, strict=True):
        tokens = f.num_tokens
        megabytes = [f.bytes_out(way) * 1e-6 for way in (COPIES[0], *ONCE)]
        over = {w: float(np.median(np.array(took[w]) / f.bounds_us[w])) for w in WAYS}
        measured = {w: float(np.median(np.array(took[RIVAL[w]]) / took[w])) for w in ONCE}
        table.add_row(
            f.case.name,
            str(f.case.top_k),
            f"{f.rows_out(COPIES[0]) / tokens:.2f} > {f.rows_out(ONCE[0]) / tokens:.2f}",
            "{:.1f} > {:.1f}, {:.1f}, {:.1f}".format(*megabytes),
            *(f"{f.predicted(way):.2f}  {measured[way]:.2f}" for way in ONCE),
            " ".join(f"{over[way]:.2f}" for way in COPIES),
            " ".join(f"{over[way]:.2f}" for way in ONCE),
        )
    console = Console()
    Console(width=max(console.width, 140)).print(table)


def csv_rows(
    figures: list[Figures], times: list[dict[Way, list[float]]], servers: int, per_server: int
) -> list[Row]:
    """Rows of the file; bytes per rank are those over scale-out.

    Repeats have routings, so bounds, of their own: the share is the median of theirs.
    """
    made = []
    for f, took in zip(figures, times, strict=True):
        for way in WAYS:
            name = f"{f.case.name} top-{f.case.top_k} {' '.join(way)}"
            shape = (servers, per_server, round(f.bytes_out(way) / (servers * per_server)))
            share = float(np.median(np.array(f.bounds_us[way]) / took[way]))
            row = make_row("moe_exchange", name, shape, took[way])
            made.append(replace(row, share_of_bound=round(share, 4)))
    return made
