"""All ranks of a call as the oracle sees them: regions, flags, items, and the order they run in."""

from __future__ import annotations

import heapq
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from fastkern.planner.table import QUEUES, StageTable, flag_slots

from .region import BEFORE_CALL, OracleError, Region, Rows, blame
from .tasks import Task, make_task

# What the headers of all ranks have in common.
_SHARED = ["op", "plan_hash", "row_bytes", "send_rows", "receive_rows", "window_rows"]
_SHARED += ["scratch_rows", "scratch_row_bytes", "scratch_base", "chunk_slots"]


class _Flag(NamedTuple):
    value: int
    plan_time: int  # of the item that wrote it; -1 at kernel start
    writer: int  # that item's number


@dataclass
class _Rank:
    table: StageTable
    regions: dict[str, Region]
    flags: dict[int, _Flag] = field(default_factory=dict)
    written: set[tuple[int, int]] = field(default_factory=set)  # (slot, value) of all flags so far
    awaited: set[tuple[int, int]] = field(default_factory=set)
    started: bool = False
    # By queue: items to come, last plan time of one with rows, items whose flags were seen.
    left: dict[str, int] = field(default_factory=dict)
    last_time: dict[str, int] = field(default_factory=dict)
    known: dict[str, set[int]] = field(default_factory=lambda: {queue: set() for queue in QUEUES})


class Step(NamedTuple):
    """A task that runs: its number, and those of the items whose flags it has seen."""

    cluster: Cluster
    task: Task
    number: int
    known: set[int]

    @property
    def table(self) -> StageTable:
        return self.cluster.ranks[self.task.rank].table

    def read(self, region: str, row: int, num_rows: int) -> Rows:
        """Rows of this rank."""
        return self.cluster.ranks[self.task.rank].regions[region].read(row, num_rows, self.known)

    def write(self, rank: int, region: str, row: int, data: Rows) -> None:
        """Rows of any rank that has started."""
        self.cluster.peer(rank).regions[region].write(row, data, self.number)


class Cluster(ABC):
    """All ranks, and what their tasks do to them. An operation says what an item moves."""

    def __init__(self, tables: Sequence[StageTable], regions: Sequence[dict[str, Region]]):
        self.ranks = [_Rank(*pair) for pair in zip(tables, regions, strict=True)]
        self._num_items = 0
        # Below are ready and credit, one of each per writer, which need no gate.
        self.first_gated_slot = 2 * len(tables)
        sizes = [int(tables[0].header[k]) for k in ("servers", "gpus_per_server", "chunk_slots")]
        self.num_flags = flag_slots(*sizes)
        for me in self.ranks:
            entries = zip(QUEUES, me.table.records("queues"), strict=True)
            me.left = {queue: entry["num_items"] for queue, entry in entries}

    @abstractmethod
    def move(self, step: Step) -> None:
        """What the item of a task does, between its waits and its signals."""

    @abstractmethod
    def check_written(self, rank: int) -> None:
        """Raise OracleError unless all that the call is to write at the end has been written."""

    def queue(self, rank: int, queue: str) -> Iterator[Task]:
        """The tasks of a queue in order, checked against the counts that kernels claim items by."""
        table = self.ranks[rank].table
        entry, stages = table.records("queues")[QUEUES.index(queue)], table.records("stages")
        with blame(rank):
            own = [stages[entry["first_stage"] + k] for k in range(entry["num_stages"])]
            total = sum(stage["num_chunks"] * stage["num_streams"] for stage in own)
            if entry["num_items"] != total:
                raise OracleError(f"{queue} has {total} items, not {entry['num_items']}")
            stage, num_items, last_time = -1, 0, 0
            for item in table.items(queue):
                first_item = own[item.stage]["first_item"]
                if item.stage != stage and first_item != num_items:
                    raise OracleError(f"{item} is number {num_items}, its stage says {first_item}")
                if item.plan_time < last_time:
                    raise OracleError(f"{item} has a plan time before {last_time}")
                stage, num_items, last_time = item.stage, num_items + 1, item.plan_time
                yield make_task(table, item)

    def start(self, rank: int) -> None:
        """Kernel start of a rank: its buffers are free, and it says so."""
        self.ranks[rank].started = True
        with blame(rank):
            for post in self.ranks[rank].table.records("posts"):
                self._signal(post["rank"], post["slot"], _Flag(post["value"], -1, BEFORE_CALL))

    def unmet(self, task: Task) -> OracleError | None:
        """The first wait that does not hold yet."""
        me = self.ranks[task.rank]
        for slot, value in task.waits:
            if slot not in me.flags or me.flags[slot].value < value:
                return OracleError(f"flag {slot} >= {value} does not hold", slot)
        for queue in task.after:
            if me.left[queue]:
                return OracleError(f"{queue} has {me.left[queue]} items left")
        return None

    def run(self, task: Task) -> None:
        """Run a task; its waits must hold, thanks to items of earlier plan time."""
        me, time = self.ranks[task.rank], task.item.plan_time
        with blame(task.rank, task.item):
            if error := self.unmet(task):
                raise error
            self._num_items += 1
            step = Step(self, task, self._num_items, {BEFORE_CALL, self._num_items})
            me.awaited.update(task.waits)
            for slot, value in task.waits:
                if value < 1:
                    raise OracleError(f"flag {slot} >= {value} says nothing", slot)
                if me.flags[slot].plan_time >= time:
                    raise OracleError(f"flag {slot} is written at {me.flags[slot].plan_time}", slot)
                step.known.add(me.flags[slot].writer)
            for queue in task.after:
                if me.last_time.get(queue, -1) >= time:
                    raise OracleError(f"{queue} ends at {me.last_time[queue]}")
                step.known.update(me.known[queue])
            me.left[task.item.queue] -= 1
            if task.item.empty:
                return
            me.last_time[task.item.queue] = time
            me.known[task.item.queue] |= step.known
            self.move(step)
            for rank, slot, value in task.signals:
                self._signal(rank, slot, _Flag(value, time, step.number))

    def _signal(self, rank: int, slot: int, flag: _Flag) -> None:
        peer = self.peer(rank, gated=slot >= self.first_gated_slot)
        if slot >= self.num_flags or flag.value < 1:
            raise OracleError(f"{flag.value} for flag {slot} of {self.num_flags} flags", slot)
        # Only a credit is given more than once in a call, and it rises.
        credit = len(self.ranks) <= slot < self.first_gated_slot
        if slot in peer.flags and not (credit and flag.value > peer.flags[slot].value):
            raise OracleError(f"flag {slot} of rank {rank} is written twice", slot)
        peer.flags[slot] = flag
        peer.written.add((slot, flag.value))

    def peer(self, rank: int, gated: bool = True) -> _Rank:
        """A rank to write to."""
        if rank >= len(self.ranks):
            raise OracleError(f"writes to rank {rank} of {len(self.ranks)}")
        if gated and not self.ranks[rank].started:
            raise OracleError(f"writes to rank {rank} before it has started: a gate is missing")
        return self.ranks[rank]

    def finish(self) -> None:
        """Check what must hold when all items are done."""
        for rank, me in enumerate(self.ranks):
            with blame(rank):
                self.check_written(rank)
                for slot, value in sorted(me.written - me.awaited):
                    if slot >= len(self.ranks):  # ready may go unread, nothing else
                        raise OracleError(f"flag {slot} = {value} is never awaited", slot)


def check_tables(tables: Sequence[StageTable], op: str) -> None:
    """Raise ValueError unless these are the tables of one call of all ranks, in order."""
    for rank, table in enumerate(tables):
        if table.rank != rank or table.header["num_ranks"] != len(tables):
            raise ValueError(f"{table!r} was given for rank {rank} of {len(tables)}")
        if table.op != op:
            raise ValueError(f"the table of rank {rank} is for {table.op}, not {op}")
        for name in _SHARED:
            if table.header[name] != tables[0].header[name]:
                raise ValueError(f"the tables of ranks 0 and {rank} differ in {name}")


def run_all(cluster: Cluster, rng: np.random.Generator | None) -> None:
    """Run every item of every rank, in plan-time order or (rng) any that the flags allow."""
    ranks = range(len(cluster.ranks))
    queues = [cluster.queue(rank, name) for rank in ranks for name in QUEUES]
    if rng is not None:
        _run_at_random(cluster, queues, rng)
    else:
        for rank in ranks:
            cluster.start(rank)
        for task in heapq.merge(*queues, key=lambda task: task.item.plan_time):
            cluster.run(task)
    cluster.finish()


def _run_at_random(
    cluster: Cluster, queues: list[Iterator[Task]], rng: np.random.Generator
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
