"""An all-to-all: rows as they are."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fastkern.planner.table import StageTable

from .cluster import Cluster, Step, check_tables, run_all
from .region import OracleError, Region, Rows, heap_regions


def run_tables(
    tables: Sequence[StageTable], inputs: Sequence[Rows], rng: np.random.Generator | None = None
) -> list[Rows]:
    """Execute one all-to-all of all ranks.

    tables: one per rank, in rank order.
    inputs: one uint8 array [input_rows, row_bytes] per rank, rows ordered by destination.
    rng: without it, all ranks start and items run in plan-time order. With it, ranks start at
        random moments and items run in any order that queues and flags allow, as in a kernel.

    Returns one uint8 array [output_rows, row_bytes] per rank, rows ordered by source.

    Raises ValueError if tables and inputs do not belong together. Raises OracleError if a wait does
    not hold; if a row is written outside its region, twice, never, or before its owner has started,
    or read before it is written, or without a flag of its writer; if a flag is written twice, or
    never awaited; if nothing can run.
    """
    check_tables(tables, "all_to_all")
    cluster = AllToAll(tables, [_regions(*pair) for pair in zip(tables, inputs, strict=True)])
    run_all(cluster, rng)
    return [me.regions["output"].rows for me in cluster.ranks]


def _regions(table: StageTable, rows: Rows) -> dict[str, Region]:
    h = {name: int(table.header[name]) for name in ("rank", "input_rows", "output_rows")}
    row_bytes = int(table.header["row_bytes"])
    if rows.dtype != np.uint8 or rows.shape != (h["input_rows"], row_bytes):
        raise ValueError(
            f"the input of rank {h['rank']} must be uint8 [{h['input_rows']}, {row_bytes}], "
            f"not {rows.dtype} {list(rows.shape)}"
        )
    return heap_regions(table) | {
        "input": Region("input", rows, written=True),
        "output": Region.empty("output", h["output_rows"], row_bytes),
    }


def move_put(step: Step) -> None:
    """A put of any operation: a chunk from send staging to the peer's receive staging."""
    s, item = step.table.records("streams")[step.task.item.stream], step.task.item
    begin, end = step.table.chunk_bounds(item.stream, item.chunk)
    rows = step.read("send", s["source_row"] + begin, end - begin)
    step.write(s["peer"], "receive", s["target_row"] + begin, rows)


class AllToAll(Cluster):
    """Regions of a rank: input, send, receive, window, output."""

    def move(self, step: Step) -> None:
        me, item = step.task.rank, step.task.item
        s = step.table.records("streams")[item.stream]
        if item.queue == "put":
            return move_put(step)
        for p in step.table.parts(item.stream, item.chunk):
            to_self = (p.peer if item.queue == "receive" else s["peer"]) == me
            target = "output" if to_self else "window"
            if item.queue in ("pack", "push"):
                target = "send" if item.queue == "pack" else target
                rows = step.read("input", p.row, p.num_rows)
                step.write(s["peer"], target, s["target_row"] + p.stream_row, rows)
            elif item.queue == "receive":
                rows = step.read("receive", s["source_row"] + p.stream_row, p.num_rows)
                step.write(p.peer, target, p.row, rows)
            else:
                step.write(me, "output", p.row, step.read("window", p.row, p.num_rows))
        return None

    def check_written(self, rank: int) -> None:
        for row in np.flatnonzero(~self.ranks[rank].regions["output"].written):
            raise OracleError(f"output row {row} is never written")
