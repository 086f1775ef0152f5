"""An item of a queue, what it waits for and what it signals: the same for every operation."""

from __future__ import annotations

from typing import NamedTuple

from fastkern.planner.table import NO_SLOT, Item, StageTable


class Task(NamedTuple):
    """An item of a rank, what it waits for and what it signals; empty items do neither."""

    rank: int
    item: Item
    waits: list[tuple[int, int]]  # (slot here, least value)
    signals: list[tuple[int, int, int]]  # (rank, slot there, value)
    after: tuple[str, ...]  # queues of the rank that must have ended


def make_task(table: StageTable, item: Item) -> Task:
    """What any operation's kernel awaits and signals for an item."""
    after = ("land", "take") if item.queue == "reduce" else ()
    task = Task(table.rank, item, [], [], after)
    if item.empty:
        return task._replace(after=())
    s, chunk = table.records("streams")[item.stream], item.chunk
    links = table.records("links")[s["first_link"] : s["first_link"] + s["num_links"]]
    parts = list(table.parts(item.stream, chunk))
    if s["gate_slot"] != NO_SLOT:
        task.waits.append((s["gate_slot"], s["gate_value"]))
    if item.queue in ("pack", "push", "put", "sum") and s["slot"] != NO_SLOT:
        task.signals.append((s["peer"], s["slot"] + chunk, 1))
    if item.queue == "put":
        task.waits.extend((p.slot + chunk, 1) for p in parts)
    elif item.queue == "sum":
        task.waits.extend((link["slot"] + chunk, 1) for link in links)
    elif item.queue in ("receive", "land", "take"):
        task.waits.append((s["slot"] + chunk, 1))
    if item.queue == "receive":
        # A kernel gives the credit before it copies.
        if s["credit_slot"] != NO_SLOT and s["credit_chunk"] == chunk:
            task.signals.append((s["credit_rank"], s["credit_slot"], s["credit_value"]))
        for link in links:
            if link["gate_slot"] != NO_SLOT:
                task.waits.append((link["gate_slot"], 1))
            # Which ranks a dispatch's rows are for is in the rows: all are told.
            if table.op == "dispatch" or any(p.peer == link["rank"] for p in parts):
                task.signals.append((link["rank"], link["slot"] + chunk, 1))
    return task
