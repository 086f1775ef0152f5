"""Tables of one dispatch and its combine, and changes to them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

from fastkern.kernels.oracle import Dispatched, OracleError, run_combine, run_dispatch
from fastkern.planner import StageTable
from fastkern.planner.table import ARRAYS, QUEUES
from tests.moe_cases import Case
from tests.moe_tables import Call

Edit = Callable[[dict[str, Any]], None]
QUEUES_OF = {
    "dispatch": ("pack", "push", "put", "receive", "land", "take"),
    "combine": QUEUES,
}


@cache
def example(policy: Any = "whole") -> Call:
    """3 servers x 2 ranks, several chunks per put."""
    case = Case("table", topk=3, num_experts=12, num_tokens=9, tokens="equal", width=2, sum_width=2)
    return Call(case, 3, 2, policy, chunk_rows=2, chunk_slots=32)


@cache
def handles(policy: Any = "whole") -> list[Dispatched]:
    return example(policy).dispatch()


def tables_of(op: str, policy: Any = "whole") -> list[StageTable]:
    if op == "dispatch":
        return example(policy).tables
    return example(policy).combine_tables(max(h.num_partials for h in handles(policy)))


def found(call: Call, tables: Sequence[StageTable]) -> str:
    """The faults that the validator finds."""
    return "; ".join(call.plan._core.validate_tables([bytes(t.bytes) for t in tables]))


def edited(table: StageTable, edit: Edit) -> StageTable:
    content = StageTable(table.bytes.copy()).to_dict()
    edit(content)
    return StageTable.from_dict(content)


def right_by_oracle(op: str, policy: Any, tables: list[StageTable], rng: Any = None) -> bool:
    """Whether the oracle runs the tables, with the right result."""
    call = example(policy)
    try:
        if op == "dispatch":
            return call.is_dispatched(run_dispatch(tables, call.given, rng))
        return call.is_combined(run_combine(tables, call.combine_given(handles(policy)), rng))
    except (OracleError, ValueError):
        return False


def queue_of(table: StageTable, array: str) -> list[str]:
    """The queue of each record."""
    owner: dict[str, list[str]] = {name: [] for name in ARRAYS}
    owner["queues"], owner["posts"] = list(QUEUES), ["-"] * len(table.posts)
    for queue, entry in zip(QUEUES, table.records("queues"), strict=True):
        for k in range(entry["num_stages"]):
            stage = table.records("stages")[entry["first_stage"] + k]
            owner["stages"].append(queue)
            for x in range(stage["num_streams"]):
                s = table.records("streams")[stage["first_stream"] + x]
                owner["streams"].append(queue)
                owner["segments"] += [queue] * s["num_segments"]
                owner["links"] += [queue] * s["num_links"]
    return owner[array]
