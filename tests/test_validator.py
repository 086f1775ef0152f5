"""The validator on tables of an all-to-all with one thing wrong."""

from __future__ import annotations

import re

import numpy as np
import pytest

from fastkern.planner import Plan, Topology, plan
from fastkern.planner.table import DTYPES, NO_SLOT, QUEUES


def corrupt(made: Plan, array: str, index: int, fields: dict[str, int]) -> str:
    """The validator's word on the plan's tables with fields of one record of rank 0 changed."""
    tables = [made.table(r) for r in range(made.topology.num_ranks)]
    for field, value in fields.items():
        getattr(tables[0], array)[index][field] = value
    return "; ".join(made._core.validate_tables([bytes(t.bytes) for t in tables]))


def test_validator_finds_each_corruption() -> None:
    rng = np.random.default_rng(3)
    traffic = rng.integers(1, 50, (8, 8))
    made = plan(traffic, Topology(4, 2), 16, "whole", chunk_bytes=64)
    table = made.table(0)
    stages = {q: int(table.queues[QUEUES.index(q)]["first_stage"]) for q in QUEUES}
    put, receive, land = (
        int(table.stages[stages[q]]["first_stream"]) for q in ("put", "receive", "land")
    )
    puts, rows, packed = table.streams[put], table.streams["num_rows"], table.segments[0]
    assert corrupt(made, "streams", 0, {"num_rows": int(rows[0])}) == ""
    assert corrupt(made, "streams", receive, {"credit_chunk": 0}) == ""  # early is allowed
    no_credit = {"credit_slot": NO_SLOT, "credit_rank": 0, "credit_value": 0, "credit_chunk": 0}
    changes: list[tuple[str, int, dict[str, int], str]] = [
        ("segments", 0, {"row": int(packed["row"]) + 1}, "should be row|twice"),
        ("segments", 0, {"num_rows": int(packed["num_rows"]) + 1}, "overlap|range"),
        ("segments", 0, {"peer": 1}, "nothing reads"),
        ("streams", put, {"target_row": int(puts["target_row"]) + 1}, "twice|past|nothing"),
        ("streams", put, {"chunk_rows": int(puts["chunk_rows"]) - 1}, "flag|chunks"),
        ("streams", put, {"gate_value": 9}, "never written"),
        ("streams", put, {"slot": int(puts["slot"]) + 1}, "never|two writes"),
        ("streams", put, {"slot": int(puts["slot"]) + 64}, "not this item's"),
        ("streams", put, {"gate_slot": int(puts["peer"])}, "without a credit"),
        ("streams", receive, no_credit, "never written"),
        ("streams", receive, {"credit_slot": NO_SLOT}, "nothing reads"),
        ("streams", land, {"peer": 0}, "awaited from rank 0 but written by rank 1"),
        ("streams", 0, {"first_segment": 1}, "in order"),
        ("links", 0, {"slot": int(table.links[0]["slot"]) + 1}, "never|two writes"),
        ("links", 0, {"gate_slot": NO_SLOT}, "without a gate"),
        ("posts", 0, {"slot": int(table.posts[-1]["slot"])}, "two senders"),
        ("posts", 0, {"slot": 3}, "not its own"),
        ("posts", 0, {"rank": 7}, "sends nothing"),
        ("stages", stages["receive"], {"ticks_end": 0}, "no earlier|fall"),
        ("stages", stages["pack"], {"ticks_end": 1 << 40}, "no earlier|fall"),
        ("stages", stages["put"], {"num_chunks": 1000}, "out of range"),
        ("queues", 0, {"num_items": 1}, "number of items"),
        ("queues", QUEUES.index("sum"), {"num_stages": 1}, "only a combine"),
    ]
    for array, index, fields, text in changes:
        faults = corrupt(made, array, index, fields)
        assert re.search(text, faults), (array, fields, faults)


@pytest.mark.parametrize(
    ("field", "text"),
    [
        ("magic", "not a stage table"),
        ("version", "not a stage table"),
        ("table_bytes", "not that of its records"),
        ("num_links", "not that of its records"),
        ("rank", "another rank's"),
        ("op", "operation"),
        ("policy", "not of this plan"),
        ("plan_hash", "not of this plan"),
        ("bound_rows", "not of this plan"),
        ("row_bytes", "size of a row"),
        ("input_rows", "number of rows|past the end"),
        ("output_rows", "number of rows"),
        ("send_rows", "differs from rank 0's"),
        ("scratch_base", "nothing uses"),
    ],
)
def test_validator_finds_a_wrong_header(field: str, text: str) -> None:
    made = plan(np.full((4, 4), 5), Topology(2, 2), 16, "whole")
    tables = [made.table(r).bytes for r in range(4)]
    assert made._core.validate_tables([bytes(t) for t in tables]) == []
    header = tables[2][: DTYPES["Header"].itemsize].view(DTYPES["Header"])
    header[field] += 1
    faults = made._core.validate_tables([bytes(t) for t in tables])
    assert re.search(text, "; ".join(faults)), faults
    assert faults[0].startswith("rank 2 ")


def test_validator_refuses_tables_that_are_missing_or_cut() -> None:
    made = plan(np.full((4, 4), 5), Topology(2, 2), 16, "whole")
    tables = [bytes(made.table(r).bytes) for r in range(4)]
    assert made._core.validate_tables(tables[:3]) == ["3 tables for 4 ranks"]
    for size in (0, 100, 152, len(tables[1]) - 8):
        faults = made._core.validate_tables([tables[0], tables[1][:size], *tables[2:]])
        assert len(faults) == 1
        assert faults[0].startswith("rank 1 header: ")
