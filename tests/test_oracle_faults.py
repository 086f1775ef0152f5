"""Tables with one thing wrong: the oracle refuses them, or shows it in the outputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from fastkern.kernels.oracle import OracleError, run_tables
from fastkern.planner import StageTable, Topology, plan
from fastkern.planner.table import NO_SLOT, QUEUES, flag_slots
from tests.reference import Matrix, Rows, random_inputs, reference_all_to_all

Edit = Callable[[dict[str, Any]], None]


def example(policy: Any) -> tuple[Matrix, list[StageTable], list[Rows]]:
    """3 servers x 2 ranks, chunks of 3 rows, several per put, a hot source and an empty pair."""
    rng = np.random.default_rng(0)
    traffic = rng.integers(0, 9, (6, 6))
    traffic[0] *= 3
    traffic[1, 4] = 0
    p = plan(traffic, Topology(3, 2), 8, policy, chunk_bytes=24, chunk_slots=32)
    return traffic, [p.table(rank) for rank in range(6)], random_inputs(traffic, 8, rng)


def compare(outputs: list[Rows], expected: list[Rows]) -> list[bool]:
    return [np.array_equal(*pair) for pair in zip(outputs, expected, strict=True)]


def edited(table: StageTable, edit: Edit) -> StageTable:
    content = StageTable(table.bytes.copy()).to_dict()
    edit(content)
    return StageTable.from_dict(content)


def add_post(content: dict[str, Any], rank: int, slot: int) -> None:
    content["posts"].append({"rank": rank, "slot": slot, "value": 1, "reserved": 0})
    content["header"]["num_posts"] += 1
    content["header"]["table_bytes"] += 16


def streams_of(table: StageTable, queue: str) -> list[int]:
    return sorted({item.stream for item in table.items(queue)})


def segments_of(table: StageTable, queue: str) -> list[int]:
    found: list[int] = []
    for stream in streams_of(table, queue):
        s = table.records("streams")[stream]
        found += range(s["first_segment"], s["first_segment"] + s["num_segments"])
    return found


# What each queue reads of a stream or segment: a change of any of them by one must be found.
READ = [
    ("streams", "target_row", ("pack", "push", "put")),
    ("streams", "source_row", ("put", "receive")),
    ("streams", "peer", ("pack", "push", "put")),
    ("streams", "slot", ("pack", "push", "put", "receive", "land", "take")),
    ("streams", "credit_slot", ("receive",)),
    ("streams", "credit_rank", ("receive",)),
    ("streams", "credit_value", ("receive",)),
    ("streams", "gate_value", ("put",)),
    ("streams", "first_segment", QUEUES),
    ("segments", "row", ("pack", "push", "receive", "land", "take")),
    ("segments", "peer", ("receive",)),
    ("segments", "slot", ("put",)),
    ("links", "rank", ()),
    ("links", "slot", ()),
    ("stages", "first_item", ()),
    ("stages", "first_stream", ()),
    ("stages", "num_chunks", ()),
    ("stages", "num_streams", ()),
    ("queues", "num_items", ()),
    ("queues", "num_stages", ()),
]


def indices(table: StageTable, array: str, field: str, queues: tuple[str, ...]) -> list[int]:
    if not queues:
        return list(range(len(table.records(array))))
    of = streams_of if array == "streams" else segments_of
    found = [k for queue in queues for k in of(table, queue)]
    slot = {"credit_rank": "credit_slot", "credit_value": "credit_slot", "gate_value": "gate_slot"}
    used = slot.get(field, field)
    return [k for k in found if table.records(array)[k].get(used) != NO_SLOT]


@pytest.mark.parametrize("policy", ["whole", "spreadout"])
@pytest.mark.parametrize(("array", "field", "queues"), READ)
def test_every_field_changed_by_one_is_found(
    policy: str, array: str, field: str, queues: tuple[str, ...]
) -> None:
    traffic, tables, inputs = example(policy)
    expected = reference_all_to_all(traffic, inputs)
    if policy == "spreadout" and array == "links":
        assert not any(len(table.links) for table in tables), "no proxy, nothing to redistribute"
        return
    num_edits = 0
    for rank, table in enumerate(tables):
        for k in indices(table, array, field, queues):
            for change in (-1, 1):
                if table.records(array)[k][field] + change < 0:
                    continue

                def edit(content: dict[str, Any], k: int = k, change: int = change) -> None:
                    content[array][k][field] += change

                wrong = [*tables[:rank], edited(table, edit), *tables[rank + 1 :]]
                num_edits += 1
                try:
                    outputs = run_tables(wrong, inputs)
                except OracleError:
                    continue
                seen = not all(compare(outputs, expected))
                assert seen, f"rank {rank}: {array}[{k}].{field} {change:+d} goes unseen"
    assert num_edits >= len(tables)


def run_edited(rank: int, edit: Edit, rng: np.random.Generator | None = None) -> OracleError:
    """The error of the example of policy "whole", with the table of `rank` edited."""
    _, tables, inputs = example("whole")
    tables[rank] = edited(tables[rank], edit)
    with pytest.raises(OracleError) as caught:
        run_tables(tables, inputs, rng)
    return caught.value


def test_two_segments_that_change_places() -> None:
    """Two packed parts of one length: every row is written once, nothing but the data is wrong."""
    traffic = np.full((6, 6), 3)
    p = plan(traffic, Topology(2, 3), 8, "whole")
    tables = [p.table(rank) for rank in range(6)]
    inputs = random_inputs(traffic, 8, np.random.default_rng(0))
    first, second = segments_of(tables[0], "pack")[:2]

    def edit(content: dict[str, Any]) -> None:
        a, b = content["segments"][first], content["segments"][second]
        assert a["num_rows"] == b["num_rows"]
        a["row"], b["row"] = b["row"], a["row"]

    expected = reference_all_to_all(traffic, inputs)
    assert compare(run_tables(tables, inputs), expected) == [True] * 6
    tables[0] = edited(tables[0], edit)
    outputs = run_tables(tables, inputs)
    assert compare(outputs, expected) == [True, True, True, False, False, True]


def test_a_credit_never_given_names_the_put_that_misses_it() -> None:
    _, tables, _ = example("whole")
    receiver = 2
    credits = [s for s in tables[receiver].records("streams") if s["credit_slot"] != NO_SLOT]
    sender = credits[0]["credit_rank"]

    def edit(content: dict[str, Any]) -> None:
        for s in content["streams"]:
            s["credit_slot"] = NO_SLOT

    error = run_edited(receiver, edit)
    assert error.rank == sender
    assert error.item is not None
    assert error.item.queue == "put"
    assert error.slot == credits[0]["credit_slot"]
    assert f"rank {sender}, " in str(error)
    assert f"flag {error.slot} >= 1 does not hold" in str(error)
    stuck = run_edited(receiver, edit, np.random.default_rng(0))
    assert stuck.item is not None
    assert "does not hold" in str(stuck)


def test_a_ready_never_posted() -> None:
    def edit(content: dict[str, Any]) -> None:
        content["posts"] = [p for p in content["posts"] if p["slot"] != 1]
        content["header"]["num_posts"] = len(content["posts"])
        content["header"]["table_bytes"] -= 16

    error = run_edited(1, edit)
    assert error.rank == 0  # the only local peer
    assert error.slot == 1


def test_a_flag_written_later_than_the_plan_says() -> None:
    """Packs planned behind their puts: flags alone would set that right, the plan may not."""

    def edit(content: dict[str, Any]) -> None:
        entry = content["queues"][QUEUES.index("pack")]
        for k in range(entry["first_stage"], entry["first_stage"] + entry["num_stages"]):
            content["stages"][k]["ticks_begin"] += 10**9
            content["stages"][k]["ticks_end"] += 10**9

    assert "does not hold" in str(run_edited(0, edit))
    assert "is written at" in str(run_edited(0, edit, np.random.default_rng(0)))


def test_a_flag_that_nobody_awaits() -> None:
    unused = flag_slots(3, 2, 32) - 1

    def edit(content: dict[str, Any]) -> None:
        add_post(content, rank=4, slot=unused)

    error = run_edited(4, edit)
    assert (error.rank, error.item, error.slot) == (4, None, unused)
    assert "never awaited" in str(error)


def test_a_flag_outside_the_heap() -> None:
    error = run_edited(4, lambda content: add_post(content, rank=4, slot=flag_slots(3, 2, 32)))
    assert error.slot == flag_slots(3, 2, 32)
    error = run_edited(4, lambda content: add_post(content, rank=6, slot=0))
    assert "rank 6 of 6" in str(error)


def test_a_flag_written_twice() -> None:
    def edit(content: dict[str, Any]) -> None:
        post = content["posts"][0]
        add_post(content, post["rank"], post["slot"])

    error = run_edited(3, edit)
    assert error.rank == 3
    assert error.item is None
    assert "written twice" in str(error)


@pytest.mark.parametrize(("queue", "field"), [("pack", "target_row"), ("put", "target_row")])
def test_a_write_past_the_end_of_its_region(queue: str, field: str) -> None:
    _, tables, _ = example("whole")
    stream = streams_of(tables[0], queue)[0]

    def edit(content: dict[str, Any]) -> None:
        content["streams"][stream][field] += 10**6

    error = run_edited(0, edit)
    assert error.item is not None
    assert (error.rank, error.item.queue, error.item.stream) == (0, queue, stream)
    assert "1000000.." in str(error) or "which has" in str(error)


def test_an_index_past_the_end_of_an_array() -> None:
    def edit(content: dict[str, Any]) -> None:
        content["stages"][0]["first_stream"] = 10**6

    assert "index" in str(run_edited(0, edit))


def test_a_missing_gate_is_found_by_some_random_order() -> None:
    """In plan-time order every rank has started before any item: only the other mode can see it."""
    traffic, tables, inputs = example("whole")
    stream = next(k for k in streams_of(tables[0], "pack") if tables[0].streams["peer"][k] == 1)

    def edit(content: dict[str, Any]) -> None:
        content["streams"][stream]["gate_slot"] = NO_SLOT

    tables[0] = edited(tables[0], edit)
    expected = reference_all_to_all(traffic, inputs)
    assert compare(run_tables(tables, inputs), expected) == [True] * 6
    found = []
    for seed in range(20):
        try:
            run_tables(tables, inputs, np.random.default_rng(seed))
        except OracleError as error:
            found.append(error)
    assert found
    assert all("a gate is missing" in str(error) for error in found)


def test_a_missing_wait_is_found_in_every_order() -> None:
    """A put that does not await its pack: when the rows happen to be there, no flag says so."""
    _, tables, inputs = example("direct")
    segment = segments_of(tables[0], "put")[0]

    def edit(content: dict[str, Any]) -> None:
        content["segments"][segment]["num_rows"] = 0

    tables[0] = edited(tables[0], edit)
    with pytest.raises(OracleError, match="of send are read without their flag"):
        run_tables(tables, inputs)
    texts = []
    for seed in range(20):
        with pytest.raises(OracleError, match="of send are read") as caught:
            run_tables(tables, inputs, np.random.default_rng(seed))
        texts.append(str(caught.value))
    assert any("but not written" in text for text in texts)


def test_a_receive_in_larger_chunks_than_its_put_is_found_in_every_order() -> None:
    """As many chunks and flags, but the first reads a row that only the second flag stands for."""
    traffic = np.zeros((2, 2), np.int64)
    traffic[0, 1] = 7
    p = plan(traffic, Topology(2, 1), 8, "whole", chunk_bytes=32, chunk_slots=32)
    inputs = random_inputs(traffic, 8, np.random.default_rng(0))
    stream = streams_of(p.table(1), "receive")[0]

    def edit(content: dict[str, Any]) -> None:
        assert content["streams"][stream]["chunk_rows"] == 4
        content["streams"][stream]["chunk_rows"] = 5

    tables = [p.table(0), edited(p.table(1), edit)]
    for rng in (None, *(np.random.default_rng(seed) for seed in range(10))):
        with pytest.raises(OracleError, match="of receive are read"):
            run_tables(tables, inputs, rng)
