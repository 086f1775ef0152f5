"""Dispatches and combines with one thing wrong: the oracle refuses them, or the result shows it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from fastkern.kernels.oracle import NONE, OracleError, run_combine, run_dispatch
from fastkern.planner import StageTable
from fastkern.planner.table import NO_SLOT, QUEUES
from tests.moe_table_edits import (
    edited,
    example,
    handles,
    queue_of,
    right_by_oracle,
    tables_of,
)

# What each operation reads of a stream, segment or link, by queue: a change by one must show.
READ = [
    ("both", "streams", "target_row", ("put",)),
    ("dispatch", "streams", "target_row", ("pack", "push")),
    ("combine", "streams", "target_row", ("push", "sum")),
    ("both", "streams", "source_row", ("put", "receive")),
    ("combine", "streams", "source_row", ("sum",)),
    ("both", "streams", "peer", ("pack", "push", "put")),
    ("combine", "streams", "peer", ("sum",)),
    ("both", "streams", "slot", ("pack", "push", "put", "receive", "land", "take")),
    ("combine", "streams", "slot", ("sum",)),
    ("both", "streams", "credit_slot", ("receive",)),
    ("both", "streams", "credit_rank", ("receive",)),
    ("both", "streams", "credit_value", ("receive",)),
    ("both", "streams", "gate_value", ("put",)),
    ("dispatch", "segments", "row", ("pack", "push", "take")),
    ("combine", "segments", "row", ("pack", "push", "receive")),
    ("combine", "segments", "peer", ("receive",)),
    ("both", "segments", "slot", ("put",)),
    ("both", "links", "rank", ("receive",)),
    ("both", "links", "slot", ("receive",)),
    ("combine", "links", "slot", ("sum",)),
    ("both", "stages", "first_item", QUEUES),
    ("both", "stages", "first_stream", QUEUES),
    ("both", "stages", "num_chunks", QUEUES),
    ("both", "stages", "num_streams", QUEUES),
    ("both", "queues", "num_items", QUEUES),
    ("both", "queues", "num_stages", QUEUES),
]
SLOT_OF = {"credit_rank": "credit_slot", "credit_value": "credit_slot", "gate_value": "gate_slot"}


def places(
    tables: list[StageTable], array: str, field: str, queues: tuple[str, ...]
) -> list[tuple[int, int]]:
    """Rank and index of the records that use the field."""
    used = SLOT_OF.get(field, field)
    return [
        (rank, k)
        for rank, table in enumerate(tables)
        for k, queue in enumerate(queue_of(table, array))
        if queue in queues and table.records(array)[k].get(used) != NO_SLOT
    ]


@pytest.mark.parametrize("policy", ["whole", "direct"])
@pytest.mark.parametrize(
    ("op", "array", "field", "queues"),
    [(op, *row) for which, *row in READ for op in ("dispatch", "combine") if which in (op, "both")],
)
def test_every_field_changed_by_one_shows(
    op: str, policy: Any, array: str, field: str, queues: tuple[str, ...]
) -> None:
    tables = tables_of(op, policy)
    found = places(tables, array, field, queues)
    if policy == "direct" and field.startswith("credit"):
        assert not found, "all may send at once"
        return
    rng = np.random.default_rng(len(field))
    for place in rng.permutation(len(found))[:7]:
        rank, k = found[place]
        for change in (-1, 1):
            if tables[rank].records(array)[k][field] + change < 0:
                continue

            def edit(content: dict[str, Any], k: int = k, change: int = change) -> None:
                content[array][k][field] += change

            wrong = [*tables[:rank], edited(tables[rank], edit), *tables[rank + 1 :]]
            what = f"rank {rank}: {array}[{k}].{field} {change:+d}"
            assert not right_by_oracle(op, policy, wrong), f"{what} goes unseen"
    assert len(found) >= 6


@pytest.mark.parametrize("op", ["dispatch", "combine"])
def test_a_missing_gate_is_found_by_some_random_order(op: str) -> None:
    tables = list(tables_of(op))
    queue = "pack" if op == "combine" else "push"
    streams = queue_of(tables[0], "streams")
    k = next(
        k
        for k, of in enumerate(streams)
        if of == queue and tables[0].records("streams")[k]["peer"] == 1
    )
    tables[0] = edited(tables[0], lambda c: c["streams"][k].update(gate_slot=NO_SLOT))
    assert right_by_oracle(op, "whole", tables)
    texts = [caught(op, tables, seed) for seed in range(20)]
    assert any("a gate is missing" in text for text in texts)
    assert all(not text or "a gate is missing" in text for text in texts)


def caught(op: str, tables: list[StageTable], seed: int | None = None) -> str:
    """What the oracle says to the tables."""
    call, rng = example(), None if seed is None else np.random.default_rng(seed)
    try:
        if op == "dispatch":
            run_dispatch(tables, call.given, rng)
        else:
            run_combine(tables, call.combine_given(handles()), rng)
    except OracleError as error:
        return str(error)
    return ""


def without_links(table: StageTable, queue: str) -> StageTable:
    """The queue's streams have no links; the records stay."""

    def edit(content: dict[str, Any]) -> None:
        for k, of in enumerate(queue_of(table, "streams")):
            if of == queue:
                content["streams"][k]["num_links"] = 0

    return edited(table, edit)


@pytest.mark.parametrize("seed", [None, 0, 1, 2])
def test_a_sum_that_awaits_nobody_is_found_in_every_order(seed: int | None) -> None:
    tables = list(tables_of("combine"))
    tables[2] = without_links(tables[2], "sum")
    text = caught("combine", tables, seed)
    assert "rank 2, Item(queue='sum'" in text
    assert "of scratch are read" in text


@pytest.mark.parametrize("seed", [None, 0, 1, 2])
def test_a_proxy_that_tells_nobody_is_found_in_every_order(seed: int | None) -> None:
    tables = list(tables_of("dispatch"))
    tables[2] = without_links(tables[2], "receive")
    text = caught("dispatch", tables, seed)
    # Nor does it wait until rank 3 has started. What rank 3 would land is awaited in vain.
    assert "a gate is missing" in text or "does not hold" in text
    assert seed is not None or "rank 3, Item(queue='land'" in text


def test_a_reduce_planned_before_its_sums_land() -> None:
    tables = list(tables_of("combine"))

    def edit(content: dict[str, Any]) -> None:
        entry = content["queues"][QUEUES.index("reduce")]
        content["stages"][entry["first_stage"]].update(ticks_begin=0, ticks_end=100)

    tables[1] = edited(tables[1], edit)
    text = caught("combine", tables)
    assert "rank 1, Item(queue='reduce'" in text
    assert "items left" in text
    # The queues themselves would set it right; the plan may not.
    assert "ends at" in caught("combine", tables, 0)


# -- what ranks give -------------------------------------------------------------------------------


def dispatch_with(**changes: Any) -> str:
    """The error of a dispatch whose rank 0 has another route."""
    call = example()
    given = [replace(call.given[0], route=replace(call.routes[0], **changes)), *call.given[1:]]
    with pytest.raises(OracleError) as error:
        run_dispatch(call.tables, given)
    return str(error.value)


def test_headers_that_name_wrong_places_are_found() -> None:
    route = example().routes[0]
    entries = route.entries.copy()
    entries[..., 0] = np.where(entries[..., 0] == NONE, NONE, 0)
    assert "are written twice" in dispatch_with(entries=entries)
    entries = route.entries.copy()
    entries[..., 0] = np.where(entries[..., 0] == NONE, NONE, entries[..., 0] + 1000)
    assert "which has" in dispatch_with(entries=entries)
    entries = route.entries.copy()
    entries[..., 1] = np.where(entries[..., 1] == NONE, NONE, entries[..., 1] ^ 1)
    assert "no run in window" in dispatch_with(entries=entries)
    entries = np.full_like(route.entries, NONE)
    assert "is never written" in dispatch_with(entries=entries)
    filled = ~route.filled
    assert "written" in dispatch_with(filled=filled)


def test_handles_of_another_call_are_found() -> None:
    call, outs = example(), handles()
    tables = tables_of("combine")
    ranks = call.combine_given(outs)
    assert call.is_combined(run_combine(tables, ranks))

    def error_of(rank: int, **changes: Any) -> str:
        wrong = replace(ranks[rank], handle=replace(outs[rank], **changes))
        with pytest.raises(OracleError) as error:
            run_combine(tables, [*ranks[:rank], wrong, *ranks[rank + 1 :]])
        return str(error.value)

    nowhere = np.full_like(outs[2].touched, NONE)
    assert "came for no rank" in error_of(2, touched=nowhere)
    missing = np.where(outs[2].touched == NONE, NONE, outs[2].touched + 50)
    assert "index" in error_of(2, touched=missing) or "which has" in error_of(2, touched=missing)
    assert "has no choice here" in error_of(
        3, window_slots=np.full_like(outs[3].window_slots, NONE)
    )
    never = np.full_like(outs[3].arrivals, 0xAAAAAAAA)
    assert "index" in error_of(3, arrivals=never)
    untold = np.zeros_like(outs[3].arrivals)
    assert "read but not written" in error_of(3, arrivals=untold)
