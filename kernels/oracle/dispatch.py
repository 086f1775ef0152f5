"""A dispatch: rows with headers, handed to the ranks that their headers name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from fastkern.planner.table import StageTable

from .all_to_all import move_put
from .cluster import Cluster, Step, check_tables, run_all
from .records import Dispatched, DispatchRank, RowForm, as_bytes
from .region import POISON, OracleError, Region, Rows, blame, heap_regions
from .route import NONE, Words


def run_dispatch(
    tables: Sequence[StageTable],
    ranks: Sequence[DispatchRank],
    rng: np.random.Generator | None = None,
) -> list[Dispatched]:
    """Execute one dispatch of all ranks, that fills fresh handles.

    tables: one per rank, in rank order. ranks: what each gives. rng: as for `run_tables`.

    Raises ValueError if tables and ranks do not belong together, and OracleError as `run_tables`
    does; also if rows of one source in a chunk are no run of a window, or if an output row that is
    not padding, or an entry of the handle, is never written.
    """
    check_tables(tables, "dispatch")
    for table, given in zip(tables, ranks, strict=True):
        h, form = table.header, given.form
        sizes = (len(given.route.pack_list), given.route.window_rows, form.row_bytes)
        if sizes != (h["input_rows"], h["output_rows"], h["row_bytes"]):
            raise ValueError(
                f"rank {table.rank} sends {sizes[0]} rows of {sizes[2]} bytes and gets {sizes[1]}; "
                f"its table is for {h['input_rows']} of {h['row_bytes']} and {h['output_rows']}"
            )
    cluster = Dispatch(tables, ranks)
    run_all(cluster, rng)
    return [cluster.result(rank) for rank in range(len(ranks))]


class Row(NamedTuple):
    """A row of a dispatch, taken apart."""

    parts: list[Rows]  # [bytes] each
    weights: Rows  # [K, weight_bytes]
    entries: Words  # [K, 3]: output row or expert, window row, local rank

    @classmethod
    def from_bytes(cls, wire: Rows, form: RowForm) -> Row:
        """Read a row that has moved."""
        parts = [wire[at : at + n] for at, n in zip(form.offsets, form.part_bytes, strict=True)]
        weights = wire[form.weights_offset :][: form.topk * form.weight_bytes]
        entries = wire[form.header_offset :][: form.topk * 12]
        shape = form.topk, form.weight_bytes
        return cls(parts, weights.reshape(shape), entries.copy().view(np.uint32).reshape(-1, 3))

    def to_bytes(self, form: RowForm) -> Rows:
        """The row as it moves: uint8 [1, row_bytes]."""
        wire = np.full((1, form.row_bytes), POISON, dtype=np.uint8)
        blocks = [*zip(form.offsets, self.parts, strict=True), (form.weights_offset, self.weights)]
        blocks.append((form.header_offset, self.entries.view(np.uint8)))
        for at, block in blocks:
            wire[0, at : at + block.size] = block.reshape(-1)
        return wire

    def on(self, local_rank: int) -> list[int]:
        """The choices that are on a local rank."""
        return [int(k) for k in np.flatnonzero(self.entries[:, 2] == local_rank)]

    def window_row(self, local_rank: int) -> int:
        """Where the row goes in the window of a local rank that it has a choice on."""
        return int(self.entries[self.on(local_rank)[0], 1])


class Dispatch(Cluster):
    """Regions of a rank: send, receive, window, scratch (Arrival records); of the caller: output 0,
    output 1, ..., weights, index; of the handle: window_slots, touched, arrivals.
    """

    def __init__(self, tables: Sequence[StageTable], ranks: Sequence[DispatchRank]):
        super().__init__(tables, [_regions(*pair) for pair in zip(tables, ranks, strict=True)])
        self.given = ranks
        self.num_local = int(tables[0].header["gpus_per_server"])
        self.num_partials = [0 for _ in ranks]

    def move(self, step: Step) -> None:
        item, me = step.task.item, step.task.rank
        s = step.table.records("streams")[item.stream]
        if item.queue == "put":
            return move_put(step)
        if item.queue == "receive":
            return self._receive(step)
        if item.queue == "land":
            return self._land(step)
        for p in step.table.parts(item.stream, item.chunk):
            for k in range(p.num_rows):
                target = s["target_row"] + p.stream_row + k
                if item.queue == "take":
                    self._scatter(step, self._staged(step, "window", p.row + k), p.row + k)
                elif item.queue == "push" and s["peer"] == me:
                    self._scatter(step, self._gather(me, p.row + k), target)
                else:
                    to = "send" if item.queue == "pack" else "window"
                    wire = self._gather(me, p.row + k).to_bytes(self.given[me].form)
                    step.write(s["peer"], to, target, wire)
        return None

    def _gather(self, rank: int, list_row: int) -> Row:
        """A row put together from the caller's tensors and the list that route made."""
        given = self.given[rank]
        token = int(given.route.pack_list[list_row])
        weights = np.zeros((given.route.topk, 0), dtype=np.uint8)
        if given.weights is not None:
            weights = as_bytes(given.weights[token, :, None])
        parts = [part[token] for part in given.parts]
        return Row(parts, weights, given.route.entries[list_row])

    def _staged(self, step: Step, region: str, row: int) -> Row:
        return Row.from_bytes(step.read(region, row, 1)[0], self.given[step.task.rank].form)

    def _scatter(self, step: Step, row: Row, window_row: int) -> None:
        """Lands a row: in the slot of every choice that is here, or (rank layout) in one row."""
        me = step.task.rank
        here = row.on(me % self.num_local)
        window_slots = np.full(len(row.entries), NONE, dtype=np.uint32)
        window_slots[here] = row.entries[here, 0]
        step.write(me, "window_slots", window_row, window_slots[None].view(np.uint8))
        if self.given[me].route.layout == "rank":
            for k, part in enumerate(row.parts):
                step.write(me, f"output {k}", window_row, part[None])
            index = np.full(len(row.entries), -1, dtype=np.int64)
            index[here] = row.entries[here, 0]
            step.write(me, "index", window_row, index[None].view(np.uint8))
            weights = np.zeros_like(row.weights)
            weights[here] = row.weights[here]
            step.write(me, "weights", window_row, weights.reshape(1, -1))
            return
        for choice in here:
            slot = int(row.entries[choice, 0])
            for k, part in enumerate(row.parts):
                step.write(me, f"output {k}", slot, part[None])
            step.write(me, "weights", slot, row.weights[choice][None])

    def _receive(self, step: Step) -> None:
        """Tells every rank of the server what the chunk has for it, and hands the rows on."""
        item, me = step.task.item, step.task.rank
        s = step.table.records("streams")[item.stream]
        first_link = s["first_link"]
        rows: dict[int, list[tuple[int, Row]]] = {}  # by source: staging row and row
        for p in step.table.parts(item.stream, item.chunk):
            at = range(s["source_row"] + p.stream_row, s["source_row"] + p.stream_row + p.num_rows)
            if p.peer in rows:
                raise OracleError(f"rank {p.peer} is a source of two parts of a chunk")
            rows[p.peer] = [(row, self._staged(step, "receive", row)) for row in at]
        for link in step.table.records("links")[first_link : first_link + s["num_links"]]:
            told = self._tell(step, rows, link["rank"])
            record = arrival(step.table, link["slot"] + item.chunk)
            step.write(link["rank"], "scratch", record, told.reshape(1, -1).view(np.uint8))
        self._tell(step, rows, me)
        for _, row in (pair for source in rows.values() for pair in source):
            for d in sorted(set(row.entries[:, 2].tolist()) - {NONE}):
                if d == me % self.num_local:
                    self._scatter(step, row, row.window_row(d))
                else:
                    wire = row.to_bytes(self.given[me].form)
                    step.write(me - me % self.num_local + d, "window", row.window_row(d), wire)

    def _tell(self, step: Step, rows: dict[int, list[tuple[int, Row]]], rank: int) -> Words:
        """The Arrival records [M, 4] for a rank of the server; notes where its sums are to come."""
        me, d = step.task.rank, rank % self.num_local
        told = np.zeros((self.num_local, 4), dtype=np.uint32)
        for source, staged in rows.items():
            record = told[source % self.num_local]
            record[2] = self.num_partials[me]
            for at, row in staged:
                place = NONE
                if row.on(d):
                    window_row = row.window_row(d)
                    if not record[1]:
                        record[0] = window_row
                    elif window_row != record[0] + record[1]:
                        raise OracleError(f"rows of rank {source} are no run in window {rank}")
                    record[1] += 1
                    place = window_row if rank == me else self.num_partials[me]
                    self.num_partials[me] += rank != me
                cell = np.array([[place]], dtype=np.uint32).view(np.uint8)
                step.write(me, "touched", at * self.num_local + d, cell)
        return told

    def _land(self, step: Step) -> None:
        """Lands what a proxy has put into the window, as its Arrival records tell."""
        item, me = step.task.item, step.task.rank
        record = arrival(
            step.table, step.table.records("streams")[item.stream]["slot"] + item.chunk
        )
        told = step.read("scratch", record, 1)
        step.write(me, "arrivals", record, told)
        for window_row, num_rows, _, _ in told.copy().view(np.uint32).reshape(-1, 4).tolist():
            for row in range(window_row, window_row + num_rows):
                self._scatter(step, self._staged(step, "window", row), row)

    def check_written(self, rank: int) -> None:
        regions, filled = self.ranks[rank].regions, self.given[rank].route.filled
        for name, region in regions.items():
            if name.startswith(("output", "weights", "index")):
                for row in np.flatnonzero(region.written != filled):
                    raise OracleError(f"row {row} of {name} is {_wrong(bool(filled[row]))}")
            elif name in ("window_slots", "touched"):
                for row in np.flatnonzero(~region.written):
                    raise OracleError(f"row {row} of {name} is {_wrong(True)}")

    def result(self, rank: int) -> Dispatched:
        """What the rank has now."""
        regions, given = self.ranks[rank].regions, self.given[rank]
        index = regions["index"].rows.view(np.int64) if given.route.layout == "rank" else None
        weights = None
        if given.weights is not None:
            weights = regions["weights"].rows.view(given.weights.dtype)
            weights = weights if given.route.layout == "rank" else weights[:, 0]
        return Dispatched(
            parts=[regions[f"output {k}"].rows for k in range(len(given.parts))],
            weights=weights,
            index=index,
            window_slots=regions["window_slots"].rows.view(np.uint32),
            touched=regions["touched"].rows.view(np.uint32).reshape(-1, self.num_local),
            arrivals=regions["arrivals"].rows.view(np.uint32).reshape(-1, self.num_local, 4),
            num_partials=self.num_partials[rank],
        )


def _wrong(due: bool) -> str:
    return "never written" if due else "padding, but written"


def arrival(table: StageTable, land_slot: int) -> int:
    """The Arrival record of a land flag, see FlagLayout."""
    num_ranks, chunk_slots = int(table.header["num_ranks"]), int(table.header["chunk_slots"])
    return land_slot - 2 * num_ranks - 2 * num_ranks * chunk_slots


def _regions(table: StageTable, given: DispatchRank) -> dict[str, Region]:
    form, route = given.form, given.route
    num_local, num_rows = int(table.header["gpus_per_server"]), len(route.filled)
    with blame(table.rank):
        streams = {item.stream for item in table.items("receive")}
        proxied = sum(table.records("streams")[stream]["num_rows"] for stream in streams)
    per_row = form.topk if route.layout == "rank" else 1
    arrivals = int(table.header["scratch_rows"])
    sizes = {
        "weights": (num_rows, per_row * form.weight_bytes),
        "window_slots": (route.window_rows, 4 * form.topk),
        "touched": (proxied * num_local, 4),
        "arrivals": (arrivals, 16 * num_local),
    }
    if route.layout == "rank":
        sizes["index"] = (num_rows, 8 * form.topk)
    sizes |= {f"output {k}": (num_rows, size) for k, size in enumerate(form.part_bytes)}
    return heap_regions(table) | {name: Region.empty(name, *size) for name, size in sizes.items()}
