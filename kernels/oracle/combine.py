"""A combine: sums on the way back, by rank, by server, then over servers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fastkern.planner.table import StageTable

from .all_to_all import move_put
from .cluster import Cluster, Step, check_tables, run_all
from .records import CombineRank, as_bytes
from .region import OracleError, Region, heap_regions
from .route import NONE
from .values import DTYPES, Sum, Values, narrow, sum_dtype, widen


def run_combine(
    tables: Sequence[StageTable],
    ranks: Sequence[CombineRank],
    rng: np.random.Generator | None = None,
) -> list[Values]:
    """Execute one combine of all ranks.

    tables: one per rank, in rank order, of the plan whose dispatch filled the handles. ranks: what
    each gives. rng: as for `run_tables`.

    Returns [T, width] per rank, of the kind of its expert_out.

    A rank's sum for a token: over its choices in top-k order, each product with a weight rounded
    before it is added. A server's: over its ranks in order; another server's is rounded to `wire`
    once. The token's: over servers in order, its own server's not rounded; then the bias; then one
    rounding. A sum starts with its first term; one of nothing is 0.

    Raises ValueError if tables and ranks do not belong together, and OracleError as `run_tables`
    does.
    """
    check_tables(tables, "combine")
    for table, given in zip(tables, ranks, strict=True):
        h, width = table.header, given.expert_out.shape[1]
        if given.route.num_tokens != h["output_rows"]:
            raise ValueError(
                f"rank {table.rank} has {given.route.num_tokens} tokens, its table is for "
                f"{h['output_rows']}"
            )
        if given.expert_out.dtype != DTYPES[given.kind]:
            raise ValueError(f"{given.kind} is held as {DTYPES[given.kind]}")
        wire = width * DTYPES[given.wire].itemsize
        partial = width * sum_dtype(given.kind).itemsize
        if wire > h["row_bytes"] or (h["scratch_rows"] and partial > h["scratch_row_bytes"]):
            raise ValueError(f"rows of {width} {given.kind} are larger than the table's")
    cluster = Combine(tables, ranks)
    run_all(cluster, rng)
    return [cluster.result(rank) for rank in range(len(ranks))]


class Combine(Cluster):
    """Regions of a rank: send, receive, window (servers' sums), scratch (partial rows: those of
    owners, then those of proxies), output.
    """

    def __init__(self, tables: Sequence[StageTable], ranks: Sequence[CombineRank]):
        super().__init__(tables, [_regions(*pair) for pair in zip(tables, ranks, strict=True)])
        self.given = ranks
        self.servers = int(tables[0].header["servers"])
        self.num_local = int(tables[0].header["gpus_per_server"])
        self.proxy_base = int(tables[0].header["scratch_base"])

    def move(self, step: Step) -> None:
        item, me = step.task.item, step.task.rank
        s = step.table.records("streams")[item.stream]
        begin, end = step.table.chunk_bounds(item.stream, item.chunk)
        if item.queue == "put":
            return move_put(step)
        if item.queue == "pack":
            # A segment names the Arrival record of chunk 0.
            segment = step.table.records("segments")[s["first_segment"]]
            told = self.given[me].handle.arrivals[segment["row"] + item.chunk]
            for window_row, num_rows, partial_row, _ in told.tolist():
                for k in range(num_rows):
                    self._send_partial(
                        step, s["peer"], window_row + k, self.proxy_base + partial_row + k
                    )
        elif item.queue == "push":
            for p in step.table.parts(item.stream, item.chunk):
                for k in range(p.num_rows):
                    target = s["target_row"] + p.stream_row + k
                    self._send_partial(step, s["peer"], p.row + k, target)
        elif item.queue == "sum":
            for row in range(begin, end):
                self._sum_server(step, s["source_row"] + row, s["target_row"] + row)
        elif item.queue == "receive":
            for p in step.table.parts(item.stream, item.chunk):
                rows = step.read("receive", s["source_row"] + p.stream_row, p.num_rows)
                step.write(p.peer, "window", p.row, rows)
        elif item.queue == "reduce":
            for token in range(begin, end):
                self._reduce(step, token)
        return None  # land, take: the wait was all

    # -- one row -----------------------------------------------------------------------------------

    def _rank_sum(self, rank: int, window_row: int) -> Values:
        """A rank's sum for a row of its dispatch window, [width]."""
        given, total = self.given[rank], Sum()
        slots = [window_row]
        if given.route.layout == "expert":
            slots = given.handle.window_slots[window_row].tolist()
        for slot in slots:
            if slot == NONE:
                continue
            term = widen(given.expert_out[slot], given.kind, sum_dtype(given.kind))
            if given.weights is not None:
                with np.errstate(over="ignore", invalid="ignore"):
                    term = term * given.weights[slot]
            total.add(term)
        if total.value is None:
            raise OracleError(f"window row {window_row} has no choice here to sum")
        return total.value

    def _send_partial(self, step: Step, rank: int, window_row: int, target_row: int) -> None:
        row = as_bytes(self._rank_sum(step.task.rank, window_row)[None])
        padded = np.zeros((1, step.table.header["scratch_row_bytes"]), dtype=np.uint8)
        padded[:, : row.shape[1]] = row
        step.write(rank, "scratch", target_row, padded)

    def _partial(self, step: Step, row: int) -> Values:
        given = self.given[step.task.rank]
        dtype, width = sum_dtype(given.kind), given.expert_out.shape[1]
        values: Values = (
            step.read("scratch", row, 1)[0, : width * dtype.itemsize].copy().view(dtype)
        )
        return values

    def _sum_server(self, step: Step, source_row: int, target_row: int) -> None:
        """A row that this rank proxied: its server's partial rows, into send staging."""
        me, total = step.task.rank, Sum()
        for d, row in enumerate(self.given[me].handle.touched[source_row].tolist()):
            if row == NONE:
                continue
            own = d == me % self.num_local
            total.add(
                self._rank_sum(me, row) if own else self._partial(step, self.proxy_base + row)
            )
        if total.value is None:
            raise OracleError(f"row {source_row} came for no rank")
        sent = as_bytes(narrow(total.value, self.given[me].wire)[None])
        padded = np.zeros((1, step.table.header["row_bytes"]), dtype=np.uint8)
        padded[:, : sent.shape[1]] = sent
        step.write(me, "send", target_row, padded)

    def _reduce(self, step: Step, token: int) -> None:
        """A token of this rank: the sums of all servers, and the bias."""
        me = step.task.rank
        given, width = self.given[me], self.given[me].expert_out.shape[1]
        places = given.route.token_map[token].tolist()
        wire_bytes = width * DTYPES[given.wire].itemsize
        total = Sum()
        for server in range(self.servers):
            if server == me // self.num_local:
                total.add(self._own_server(step, places[self.servers :]))
            elif places[server] != NONE:
                row = step.read("window", places[server], 1)[0, :wire_bytes].copy()
                values = row.view(DTYPES[given.wire])
                total.add(widen(values, given.wire, sum_dtype(given.kind)))
        if given.bias is not None:
            bias = given.bias[token] if given.bias.ndim == 2 else given.bias
            total.add(widen(bias, given.bias_kind, sum_dtype(given.kind)))
        if total.value is None:
            total.add(np.zeros(width, dtype=sum_dtype(given.kind)))
        assert total.value is not None
        step.write(me, "output", token, as_bytes(narrow(total.value, given.kind)[None]))

    def _own_server(self, step: Step, places: list[int]) -> Values | None:
        me, total = step.task.rank, Sum()
        for d, row in enumerate(places):
            if row != NONE:
                own = d == me % self.num_local
                total.add(self._rank_sum(me, row) if own else self._partial(step, row))
        return total.value

    # -- the end -----------------------------------------------------------------------------------

    def check_written(self, rank: int) -> None:
        for name in ("output", "window"):
            region = self.ranks[rank].regions[name]
            due = np.zeros_like(region.written)
            due[: len(due) if name == "output" else self._num_returned(rank)] = True
            for row in np.flatnonzero(region.written != due):
                raise OracleError(f"row {row} of {name} is written: {bool(region.written[row])}")

    def _num_returned(self, rank: int) -> int:
        """Rows that come back over scale-out."""
        to_server = self.given[rank].route.to_server
        return int(to_server.sum() - to_server[rank // self.num_local])

    def result(self, rank: int) -> Values:
        """What the rank has now."""
        given = self.given[rank]
        rows = self.ranks[rank].regions["output"].rows
        shape = (given.route.num_tokens, given.expert_out.shape[1])
        return rows.reshape(-1).view(DTYPES[given.kind]).reshape(shape)


def _regions(table: StageTable, given: CombineRank) -> dict[str, Region]:
    row_bytes = given.expert_out.shape[1] * given.expert_out.dtype.itemsize
    output = Region.empty("output", int(table.header["output_rows"]), row_bytes)
    return heap_regions(table) | {"output": output}
