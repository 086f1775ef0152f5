"""Items, flags and plan times as the stage table defines them, and the check of a plan's order."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

from .memory import Row

PACK, PUSH, PUT, RECEIVE, LAND, TAKE = range(6)
QUEUE_NAMES = ("pack", "push", "put", "receive", "land", "take")
VALUE_BITS = 16


class FlagLayout(NamedTuple):
    """Flag words of one rank: `FlagLayout` of stage_table.h, then the free flags of rings.

    A free flag lies with the writer of a ring's slot; its own writer is the owner of the ring.
    """

    num_ranks: int
    servers: int
    gpus_per_server: int
    chunk_slots: int
    ring_slots: int  # of each sub-ring; 0: no rings

    def ready(self, writer: int) -> int:
        return writer

    def credit(self, writer: int) -> int:
        return self.num_ranks + writer

    def pack(self, writer_local: int, server: int) -> int:
        return 2 * self.num_ranks + (writer_local * self.servers + server) * self.chunk_slots

    def pack_direct(self, destination: int) -> int:
        return 2 * self.num_ranks + destination * self.chunk_slots

    def arrive(self, writer: int) -> int:
        return 2 * self.num_ranks + (self.num_ranks + writer) * self.chunk_slots

    def land(self, writer_local: int, server: int) -> int:
        offset = 2 * self.num_ranks + writer_local * self.servers + server
        return 2 * self.num_ranks + offset * self.chunk_slots

    def push(self, writer_local: int) -> int:
        return 2 * self.num_ranks + (3 * self.num_ranks + writer_local) * self.chunk_slots

    def sum(self, server: int) -> int:
        return self.push(self.gpus_per_server) + server * self.chunk_slots

    def arrival(self, land_slot: int) -> int:
        return land_slot - self.land(0, 0)

    def num_arrivals(self) -> int:
        return self.num_ranks * self.chunk_slots

    def free(self, ring: str, owner: int) -> int:
        kind = ("send", "receive", "land", "push").index(ring)
        return self.sum(self.servers) + (kind * self.num_ranks + owner) * self.ring_slots

    def num_slots(self) -> int:
        return self.sum(self.servers) + 4 * self.num_ranks * self.ring_slots


def plan_time(queue: int, ticks_begin: int, ticks_end: int, num_chunks: int, chunk: int) -> int:
    """The formula of `plan_time` in stage_table.h."""
    ended = 1 if queue in (RECEIVE, LAND) else 0
    ticks = (ticks_end - ticks_begin) * (chunk + ended) // num_chunks
    phase = {PUT: 2, RECEIVE: 1, LAND: 3, TAKE: 3}.get(queue, 0)
    return (ticks_begin + ticks) * 4 + phase


class Wait(NamedTuple):
    slot: int  # flag of the item's own rank
    value: int
    rule: str = ""  # the rule that can be dropped; "": none


class Signal(NamedTuple):
    rank: int  # whose flag
    slot: int
    value: int
    turn: int = 0  # of a credit: the receiver's how-manieth sender this is; not part of the flag
    counted: bool = False  # adds one instead of storing a value: only with `flag_per_chunk` dropped


class Copy(NamedTuple):
    source_region: int  # of the item's own rank
    source_row: int
    target_rank: int
    target_region: int
    target_row: int
    row: Row


@dataclass(eq=False)
class Item:
    """One chunk's work of one rank: wait for flags, post the credit, copy rows, raise flags."""

    rank: int
    queue: int
    time: int
    label: str
    waits: list[Wait] = field(default_factory=list)
    credits: list[Signal] = field(default_factory=list)
    copies: list[Copy] = field(default_factory=list)
    signals: list[Signal] = field(default_factory=list)
    frees: list[Signal] = field(default_factory=list)
    claims: int = 0
    turn: int = 0  # of a put that a credit gates: its place in the receiver's order, from 1


@dataclass
class Plan:
    """All ranks' tables of one call."""

    layout: FlagLayout
    queues: list[list[list[Item]]]  # [R][6] items in order
    posts: list[list[Signal]]  # [R] flags written at kernel start
    outputs: list[list[Row]]  # [R] the true rows of each output
    inputs: list[list[Row]]  # [R]
    heap_rows: tuple[
        int, int, int
    ]  # rows of send staging, receive staging, window: equal on all ranks

    def items(self) -> list[Item]:
        return [item for queues in self.queues for queue in queues for item in queue]


def check_plan(plan: Plan) -> list[str]:
    """Times never fall in a queue and strictly rise along every flag; every wait has a producer."""
    faults: list[str] = []
    written: dict[tuple[int, int, int], int] = {
        (post.rank, post.slot, post.value): -1 for posts in plan.posts for post in posts
    }
    for item in plan.items():
        for signal in item.credits + item.signals + item.frees:
            key = (signal.rank, signal.slot, signal.value)
            if key in written:
                faults.append(f"{item.label} writes {key}, which has a writer")
            written[key] = item.time
    for queues in plan.queues:
        for queue in queues:
            for before, item in pairwise(queue):
                if before.time > item.time:
                    faults.append(f"{item.label} comes after {before.label}, its time before")
    awaited = {key for key in written if key[1] < plan.layout.num_ranks}  # ready may go unread
    for item in plan.items():
        for wait in item.waits:
            key = (item.rank, wait.slot, wait.value)
            awaited.add(key)
            if key not in written:
                faults.append(f"{item.label} waits for {key}, which nothing writes")
            elif written[key] >= item.time:
                faults.append(f"{item.label} waits for {key}, which is written no earlier")
    faults += [f"{key} is written and never awaited" for key in written if key not in awaited]
    return faults
