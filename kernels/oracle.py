"""The oracle of every kernel: the stage tables of all ranks, executed in plain Python.

Each rank has a heap (send staging, receive staging, window), flags, an input and an output. An item
runs only when its waits hold; it copies rows and then writes flags, at other ranks too:

    pack     input -> send staging of the proxy         writes pack at the proxy
    push     input -> window of a local rank            writes push there (not for own rows)
    put      send staging -> receive staging of peer    writes arrive at the peer
    receive  receive staging -> windows or own output   writes credit, and land at the window's rank
    land     window -> output                           after land
    take     window -> output                           after push

Worked example: 2 servers x 2 ranks, tile (0 -> 1) [[6, 2], [2, 2]]: the sources send 8 and 4 rows,
the destinations get 8 and 4, and each of the two rails carries 6.

    rank 0   keeps its 6 rows for rank 2 on rail 0; its 2 rows for rank 3 it packs into the send
             staging of rank 1, rows 4..6: on their destination's rail, no copy follows the put
    rank 1   packs its own 2 rows for rank 3 and 2 rows for rank 2 as rows 0..4 of rail 1
    put      6 rows from rank 0 to rank 2, 6 rows from rank 1 to rank 3
    rank 2   receives 6 rows straight into its output, rows 0..6
    rank 3   receives its own 4 rows into its output and the other 2 into rows 6..8 of the window of
             rank 2, which lands them
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from fastkern.planner.table import NO_SLOT, QUEUES, Item, StageTable, flag_slots

Rows = npt.NDArray[np.uint8]  # [rows, row_bytes]
_POISON = 0xAA


class OracleError(RuntimeError):
    """The tables break the protocol at `rank`; `item` and flag `slot` where they are known."""

    def __init__(self, text: str, slot: int | None = None):
        super().__init__(text)
        self.rank: int | None = None
        self.item: Item | None = None
        self.slot = slot

    def __str__(self) -> str:
        return f"rank {self.rank}, {self.item}: {self.args[0]}"


@contextmanager
def _blame(rank: int, item: Item | None = None) -> Iterator[None]:
    try:
        yield
    except (OracleError, IndexError) as caught:
        error = OracleError("an index in the table is too large")
        if isinstance(caught, OracleError):
            error = caught
        if error.rank is None:
            error.rank, error.item = rank, item
        raise error from None


class _Region:
    """Rows of a buffer: all inside it, each written once, none read before."""

    def __init__(self, name: str, rows: Rows, written: bool = False):
        self.name = name
        self.rows = rows
        self.written = np.full(len(rows), written)

    def write(self, row: int, data: Rows) -> None:
        where = self._inside(row, row + len(data))
        if self.written[where].any():
            raise OracleError(f"rows {row}..{where.stop} of {self.name} are written twice")
        self.rows[where], self.written[where] = data, True

    def read(self, row: int, num_rows: int) -> Rows:
        where = self._inside(row, row + num_rows)
        if not self.written[where].all():
            raise OracleError(f"rows {row}..{where.stop} of {self.name} are read but not written")
        return self.rows[where]

    def _inside(self, begin: int, end: int) -> slice:
        if end > len(self.rows):
            raise OracleError(f"rows {begin}..{end} of {self.name}, which has {len(self.rows)}")
        return slice(begin, end)


class _Flag(NamedTuple):
    value: int
    plan_time: int  # of the item that wrote it; -1 at kernel start


@dataclass
class _Rank:
    table: StageTable
    regions: dict[str, _Region]
    flags: dict[int, _Flag] = field(default_factory=dict)
    written: set[tuple[int, int]] = field(default_factory=set)  # (slot, value) of all flags so far
    awaited: set[tuple[int, int]] = field(default_factory=set)
    started: bool = False


def _regions(table: StageTable, rows: Rows) -> dict[str, _Region]:
    h = {name: int(table.header[name]) for name in table.header.dtype.names or ()}
    if rows.dtype != np.uint8 or rows.shape != (h["input_rows"], h["row_bytes"]):
        raise ValueError(
            f"the input of rank {h['rank']} must be uint8 [{h['input_rows']}, {h['row_bytes']}], "
            f"not {rows.dtype} {list(rows.shape)}"
        )
    heap = np.full(table.data_layout().bytes, _POISON, dtype=np.uint8)
    result = {"input": _Region("input", rows, written=True)}
    for name in ("send", "receive", "window"):
        begin: int = getattr(table.data_layout(), name)
        part = heap[begin : begin + h[name + "_rows"] * h["row_bytes"]]
        result[name] = _Region(name, part.reshape(h[name + "_rows"], h["row_bytes"]))
    output = np.full((h["output_rows"], h["row_bytes"]), _POISON, dtype=np.uint8)
    return result | {"output": _Region("output", output)}


# Region and row here, then rank, region and row of the target, and num_rows.
_Copy: TypeAlias = tuple[str, int, int, str, int, int]


class _Task(NamedTuple):
    """An item of a rank and what it means; empty items mean nothing."""

    rank: int
    item: Item
    waits: list[tuple[int, int]]  # (slot here, least value)
    copies: list[_Copy]
    signals: list[tuple[int, int, int]]  # (rank, slot there, value)


def _task(table: StageTable, item: Item) -> _Task:
    s = table.records("streams")[item.stream]
    chunk, peer, source, target = item.chunk, s["peer"], s["source_row"], s["target_row"]
    task = _Task(me := table.rank, item, [], [], [])
    if item.empty:
        return task
    parts = list(table.parts(item.stream, chunk))
    if item.queue in ("pack", "push", "put"):
        if s["gate_slot"] != NO_SLOT:
            task.waits.append((s["gate_slot"], s["gate_value"]))
        if s["slot"] != NO_SLOT:
            task.signals.append((peer, s["slot"] + chunk, 1))
    else:
        task.waits.append((s["slot"] + chunk, 1))
    if item.queue == "put":
        task.waits.extend((p.slot + chunk, 1) for p in parts)
        begin, end = table.chunk_bounds(item.stream, chunk)
        rows = end - begin
        task.copies.append(("send", source + begin, peer, "receive", target + begin, rows))
    elif item.queue == "receive":
        # A kernel gives the credit before it copies.
        if s["credit_slot"] != NO_SLOT and s["credit_chunk"] == chunk:
            task.signals.append((s["credit_rank"], s["credit_slot"], s["credit_value"]))
        for link in table.records("links")[s["first_link"] : s["first_link"] + s["num_links"]]:
            if link["gate_slot"] != NO_SLOT:
                task.waits.append((link["gate_slot"], 1))
            if any(p.peer == link["rank"] for p in parts):
                task.signals.append((link["rank"], link["slot"] + chunk, 1))
    for p in parts:
        if item.queue == "pack":
            copy = ("input", p.row, peer, "send", target + p.stream_row, p.num_rows)
        elif item.queue == "push":
            to = "output" if peer == me else "window"
            copy = ("input", p.row, peer, to, target + p.stream_row, p.num_rows)
        elif item.queue == "receive":
            to = "output" if p.peer == me else "window"
            copy = ("receive", source + p.stream_row, p.peer, to, p.row, p.num_rows)
        elif item.queue in ("land", "take"):
            copy = ("window", p.row, me, "output", p.row, p.num_rows)
        else:
            continue  # a put moves its chunk as one
        task.copies.append(copy)
    return task


class _Cluster:
    """All ranks, and what their tasks do to them."""

    def __init__(self, tables: Sequence[StageTable], inputs: Sequence[Rows]):
        for rank, table in enumerate(tables):
            if table.rank != rank or table.header["num_ranks"] != len(tables):
                raise ValueError(f"{table!r} was given for rank {rank} of {len(tables)}")
            for name in ("plan_hash", "row_bytes", "send_rows", "receive_rows", "window_rows"):
                if table.header[name] != tables[0].header[name]:
                    raise ValueError(f"the tables of ranks 0 and {rank} differ in {name}")
        pairs = zip(tables, inputs, strict=True)
        self.ranks = [_Rank(table, _regions(table, rows)) for table, rows in pairs]
        # Below are ready and credit, one of each per writer, which need no gate.
        self.first_gated_slot = 2 * len(tables)
        sizes = [int(tables[0].header[k]) for k in ("servers", "gpus_per_server", "chunk_slots")]
        self.num_flags = flag_slots(*sizes)

    def queue(self, rank: int, queue: str) -> Iterator[_Task]:
        """The tasks of a queue in order, checked against the counts that kernels claim items by."""
        table = self.ranks[rank].table
        entry, stages = table.records("queues")[QUEUES.index(queue)], table.records("stages")
        stage, num_items, last_time = -1, 0, 0
        with _blame(rank):
            for item in table.items(queue):
                first_item = stages[entry["first_stage"] + item.stage]["first_item"]
                if item.stage != stage and first_item != num_items:
                    raise OracleError(f"{item} is number {num_items}, its stage says {first_item}")
                if item.plan_time < last_time:
                    raise OracleError(f"{item} has a plan time before {last_time}")
                stage, num_items, last_time = item.stage, num_items + 1, item.plan_time
                yield _task(table, item)
            if entry["num_items"] != num_items:
                raise OracleError(f"{queue} has {num_items} items, not {entry['num_items']}")

    def start(self, rank: int) -> None:
        """Kernel start of a rank: its buffers are free, and it says so."""
        self.ranks[rank].started = True
        with _blame(rank):
            for post in self.ranks[rank].table.records("posts"):
                self._signal(post["rank"], post["slot"], post["value"], -1)

    def unmet(self, task: _Task) -> tuple[int, int] | None:
        """(slot, least value) of the first wait that does not hold yet."""
        flags = self.ranks[task.rank].flags
        for slot, value in task.waits:
            if slot not in flags or flags[slot].value < value:
                return slot, value
        return None

    def run(self, task: _Task) -> None:
        """Run a task; its waits must hold, thanks to items of earlier plan time."""
        me, time = self.ranks[task.rank], task.item.plan_time
        with _blame(task.rank, task.item):
            if unmet := self.unmet(task):
                raise OracleError(f"flag {unmet[0]} >= {unmet[1]} does not hold", unmet[0])
            me.awaited.update(task.waits)
            for slot, _ in task.waits:
                if me.flags[slot].plan_time >= time:
                    raise OracleError(f"flag {slot} is written at {me.flags[slot].plan_time}", slot)
            for source, source_row, rank, target, target_row, num_rows in task.copies:
                rows = me.regions[source].read(source_row, num_rows)
                self._peer(rank).regions[target].write(target_row, rows)
            for rank, slot, value in task.signals:
                self._signal(rank, slot, value, time)

    def _signal(self, rank: int, slot: int, value: int, plan_time: int) -> None:
        peer = self._peer(rank, gated=slot >= self.first_gated_slot)
        if slot >= self.num_flags or value < 1:
            raise OracleError(f"{value} for flag {slot} of {self.num_flags} flags", slot)
        # Only a credit is given more than once in a call, and it rises.
        credit = len(self.ranks) <= slot < self.first_gated_slot
        if slot in peer.flags and not (credit and value > peer.flags[slot].value):
            raise OracleError(f"flag {slot} of rank {rank} is written twice", slot)
        peer.flags[slot] = _Flag(value, plan_time)
        peer.written.add((slot, value))

    def _peer(self, rank: int, gated: bool = True) -> _Rank:
        if rank >= len(self.ranks):
            raise OracleError(f"writes to rank {rank} of {len(self.ranks)}")
        if gated and not self.ranks[rank].started:
            raise OracleError(f"writes to rank {rank} before it has started: a gate is missing")
        return self.ranks[rank]

    def finish(self) -> list[Rows]:
        """The outputs, after a check of what must hold when all items are done."""
        for rank, me in enumerate(self.ranks):
            with _blame(rank):
                for row in np.flatnonzero(~me.regions["output"].written):
                    raise OracleError(f"output row {row} is never written")
                for slot, value in sorted(me.written - me.awaited):
                    if slot >= len(self.ranks):  # ready may go unread, nothing else
                        raise OracleError(f"flag {slot} = {value} is never awaited", slot)
        return [me.regions["output"].rows for me in self.ranks]


def run_tables(
    tables: Sequence[StageTable], inputs: Sequence[Rows], rng: np.random.Generator | None = None
) -> list[Rows]:
    """Execute one call of all ranks.

    tables: one per rank, in rank order.
    inputs: one uint8 array [input_rows, row_bytes] per rank, rows ordered by destination.
    rng: without it, all ranks start and items run in plan-time order. With it, ranks start at
        random moments and items run in any order that queues and flags allow, as in a kernel.

    Returns one uint8 array [output_rows, row_bytes] per rank, rows ordered by source.

    Raises ValueError if tables and inputs do not belong together. Raises OracleError if a wait does
    not hold; if a row is written outside its region, twice, never, or before its owner has started,
    or read before it is written; if a flag is written twice, or never awaited; if nothing can run.
    """
    cluster = _Cluster(tables, inputs)
    queues = [cluster.queue(rank, name) for rank in range(len(tables)) for name in QUEUES]
    if rng is not None:
        _run_at_random(cluster, queues, rng)
        return cluster.finish()
    for rank in range(len(tables)):
        cluster.start(rank)
    for task in heapq.merge(*queues, key=lambda task: task.item.plan_time):
        cluster.run(task)
    return cluster.finish()


def _run_at_random(
    cluster: _Cluster, queues: list[Iterator[_Task]], rng: np.random.Generator
) -> None:
    heads = {k: task for k, queue in enumerate(queues) if (task := next(queue, None))}
    asleep = [int(rank) for rank in rng.permutation(len(cluster.ranks))]
    while heads or asleep:
        awake = [(k, task) for k, task in heads.items() if cluster.ranks[task.rank].started]
        ready = [k for k, task in awake if not cluster.unmet(task)]
        if asleep and (not ready or rng.random() < 0.1):
            cluster.start(asleep.pop())
        elif ready:
            k = ready[rng.integers(len(ready))]
            cluster.run(heads.pop(k))
            if task := next(queues[k], None):
                heads[k] = task
        else:
            task = min(heads.values(), key=lambda task: task.item.plan_time)
            cluster.run(task)  # nothing can run: raises, naming the wait
