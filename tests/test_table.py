"""The reading side of the stage table: views, items, layout, dumps."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings

from fastkern.planner import StageTable, Topology, plan
from fastkern.planner.table import (
    ARRAYS,
    ARRIVAL_BYTES,
    AT_CHUNK_END,
    DTYPES,
    NO_SLOT,
    OPS,
    PHASES,
    QUEUES,
    VERSION,
)
from tests.reference import Case, traffic_matrices

SIZES = {
    "Header": 160,
    "Queue": 16,
    "Post": 16,
    "Stage": 40,
    "Stream": 80,
    "Segment": 32,
    "Link": 16,
}


def make_tables(chunk_bytes: int = 24, policy: Any = "whole") -> list[StageTable]:
    """3 servers x 2 ranks, every queue and record in use, several chunks per put."""
    traffic = np.random.default_rng(7).integers(1, 9, (6, 6))
    traffic[0] *= 3
    p = plan(traffic, Topology(3, 2), 8, policy, chunk_bytes=chunk_bytes, chunk_slots=32)
    return [p.table(rank) for rank in range(6)]


def edited_header(table: StageTable, **values: int) -> StageTable:
    block = table.bytes.copy()
    header = block[: SIZES["Header"]].view(DTYPES["Header"])
    for name, value in values.items():
        header[name] = value
    return StageTable(block)


def test_dtypes_are_dense_and_little_endian() -> None:
    assert {name: dtype.itemsize for name, dtype in DTYPES.items()} == SIZES
    for dtype in DTYPES.values():
        at = 0
        fields: Any = dtype.fields
        assert fields
        for name in dtype.names or ():
            field, offset = fields[name][:2]
            assert field.str in ("<u4", "<u8")
            assert offset == at
            at += field.itemsize
        assert at == dtype.itemsize


def test_queues_and_operations_are_those_of_the_header_file() -> None:
    assert QUEUES == ("pack", "push", "put", "receive", "land", "take", "sum", "reduce")
    assert OPS == ("all_to_all", "dispatch", "combine")
    assert VERSION == 3
    assert ARRIVAL_BYTES == 16
    ended = dict(zip(QUEUES, AT_CHUNK_END, strict=True))
    assert [queue for queue in QUEUES if ended[queue]] == ["receive", "land"]


def test_an_all_to_all_has_no_scratch_and_no_sums() -> None:
    for table in make_tables():
        assert table.op == "all_to_all"
        for field in ("scratch_rows", "scratch_row_bytes", "scratch_base"):
            assert table.header[field] == 0
        assert {queue for queue in QUEUES if not any(table.items(queue))} == {"sum", "reduce"}


def test_the_views_share_the_bytes_and_cover_them_in_order() -> None:
    for rank, table in enumerate(make_tables()):
        assert table.rank == rank
        assert table.header["table_bytes"] == table.bytes.size
        arrays = [getattr(table, name) for name in ARRAYS]
        assert all(len(array) for array in arrays), "the example uses every kind of record"
        assert all(np.shares_memory(array, table.bytes) for array in arrays)
        rest = b"".join(array.tobytes() for array in arrays)
        assert table.bytes.tobytes() == table.header.tobytes() + rest


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"magic": 0}, "not a stage table.*magic 0x0"),
        ({"version": 99}, "version 99"),
        ({"table_bytes": 64}, "its header says 64"),
        ({"num_links": 1000}, "should have .* bytes"),
        ({"num_posts": 0}, "should have .* bytes"),
    ],
)
def test_a_wrong_header_is_refused(values: dict[str, int], message: str) -> None:
    table = edited_header(make_tables()[0], **values)
    with pytest.raises(ValueError, match=message):
        _ = table.header


def test_a_table_cut_short_or_too_long_is_refused() -> None:
    block = make_tables()[0].bytes
    for size in (0, SIZES["Header"] - 1, SIZES["Header"], block.size - 1):
        with pytest.raises(ValueError, match="bytes"):
            _ = StageTable(block[:size]).header
    longer = np.concatenate([block, np.zeros(16, np.uint8)])
    with pytest.raises(ValueError, match="bytes"):
        _ = StageTable(longer).header


def expected_items(table: StageTable, queue: str) -> list[tuple[int, int, int, int]]:
    """(stage, stream, chunk, plan time) by the words of stage_table.h, item by item."""
    index = QUEUES.index(queue)
    entry = table.queues[index]
    found: list[tuple[int, int, int, int]] = []
    for k in range(int(entry["num_stages"])):
        stage = table.stages[int(entry["first_stage"]) + k]
        begin, end = int(stage["ticks_begin"]), int(stage["ticks_end"])
        num_streams, num_chunks = int(stage["num_streams"]), int(stage["num_chunks"])
        assert stage["first_item"] == len(found)
        for item in range(num_streams * num_chunks):
            chunk = item // num_streams
            passed = chunk + 1 if queue in ("receive", "land") else chunk
            time = (begin + (end - begin) * passed // num_chunks) * 4 + PHASES[index]
            found.append((k, int(stage["first_stream"]) + item % num_streams, chunk, time))
    assert entry["num_items"] == len(found)
    return found


@pytest.mark.parametrize("policy", ["whole", "split", "direct", "spreadout"])
def test_items_come_in_queue_order_with_their_plan_times(policy: str) -> None:
    for table in make_tables(policy=policy):
        for queue in QUEUES:
            items = list(table.items(queue))
            assert [tuple(i[1:5]) for i in items] == expected_items(table, queue)
            assert all(item.queue == queue for item in items)
            times = [item.plan_time for item in items]
            assert times == sorted(times)


def test_the_phases_order_items_of_one_tick() -> None:
    phase = dict(zip(QUEUES, PHASES, strict=True))
    assert phase["pack"] == phase["push"] == phase["reduce"] == 0
    assert phase["pack"] < phase["receive"] < phase["put"] < phase["land"] == phase["take"] < 4
    assert phase["pack"] < phase["sum"] < phase["put"]


@given(traffic_matrices(max_gpus_per_server=4))
@settings(max_examples=40, deadline=None)
def test_parts_of_all_chunks_are_the_segments(case: Case) -> None:
    topology = Topology(case.servers, case.gpus_per_server)
    p = plan(case.traffic, topology, case.row_bytes, "whole", chunk_bytes=3 * case.row_bytes)
    for rank in range(topology.num_ranks):
        table = p.table(rank)
        empty: dict[tuple[int, int], bool] = {}
        for queue in QUEUES:
            empty |= {(i.stream, i.chunk): i.empty for i in table.items(queue)}
        chunks = {stream: 0 for stream, _ in empty}
        for stream, _ in empty:
            chunks[stream] += 1
        assert set(chunks) == set(range(len(table.streams)))
        for stream, s in enumerate(table.streams):
            rows: list[tuple[int, int, int, int]] = []
            for chunk in range(chunks[stream]):
                begin, end = table.chunk_bounds(stream, chunk)
                parts = list(table.parts(stream, chunk))
                assert empty[stream, chunk] == (not parts)
                for part in parts:
                    assert begin <= part.stream_row
                    assert part.stream_row + part.num_rows <= end
                    rows += [(part.stream_row + k, part.row + k, *part[3:]) for k in range(part[2])]
            first = int(s["first_segment"])
            expected = [
                (int(g["stream_row"]) + k, int(g["row"]) + k, int(g["peer"]), int(g["slot"]))
                for g in table.segments[first : first + int(s["num_segments"])]
                for k in range(int(g["num_rows"]))
            ]
            assert rows == expected


def test_the_last_chunk_is_short_and_chunks_past_the_end_are_empty() -> None:
    table = make_tables()[0]
    items = [item for queue in QUEUES for item in table.items(queue)]
    seen = set()
    for item in items:
        s = table.streams[item.stream]
        begin, end = table.chunk_bounds(item.stream, item.chunk)
        if item.chunk * int(s["chunk_rows"]) >= int(s["num_rows"]):
            seen.add("past the end")
            assert begin == end == int(s["num_rows"])
            assert item.empty
        elif (item.chunk + 1) * int(s["chunk_rows"]) > int(s["num_rows"]):
            seen.add("short")
            assert end == int(s["num_rows"])
        else:
            seen.add("full")
            assert end - begin == int(s["chunk_rows"])
    assert seen == {"past the end", "short", "full"}


@pytest.mark.parametrize("row_bytes", [1, 16, 7168, 20000])
def test_data_layout_follows_the_header(row_bytes: int) -> None:
    traffic = np.random.default_rng(row_bytes).integers(0, 50, (4, 4))
    table = plan(traffic, Topology(2, 2), row_bytes, "whole").table(3)
    layout, at = table.data_layout(), 0
    for region in ("send", "receive", "window", "scratch"):
        assert getattr(layout, region) == at
        at += -(-int(table.header[region + "_rows"]) * row_bytes // 256) * 256
    assert layout.bytes == at
    assert layout.scratch == layout.bytes


def test_the_scratch_has_rows_of_its_own_size() -> None:
    table = edited_header(make_tables()[0], scratch_rows=3, scratch_row_bytes=100)
    layout = table.data_layout()
    assert layout.scratch == make_tables()[0].data_layout().bytes
    assert layout.bytes == layout.scratch + 512  # 300 bytes, up to a multiple of 256


def test_json_holds_every_field_and_gives_the_same_bytes_back() -> None:
    for table in make_tables(policy="split"):
        content = json.loads(table.to_json())
        assert content == table.to_dict()
        assert set(content["header"]) == set(DTYPES["Header"].names or ())
        for array, record in ARRAYS.items():
            assert len(content[array]) == len(getattr(table, array))
            assert all(set(row) == set(DTYPES[record].names or ()) for row in content[array])
        assert np.array_equal(StageTable.from_dict(content).bytes, table.bytes)


def test_json_keeps_64_bit_values_and_needs_every_field() -> None:
    table = edited_header(make_tables()[0], plan_hash=2**64 - 1)
    content = json.loads(table.to_json())
    assert content["header"]["plan_hash"] == 2**64 - 1
    assert np.array_equal(StageTable.from_dict(content).bytes, table.bytes)
    del content["streams"][0]["gate_value"]
    with pytest.raises(KeyError, match="gate_value"):
        StageTable.from_dict(content)


def test_an_empty_call_has_a_table_too() -> None:
    table = plan(np.zeros((4, 4), np.int64), Topology(2, 2), 16, "whole").table(0)
    assert [item for queue in QUEUES for item in table.items(queue)] == []
    assert np.array_equal(StageTable.from_dict(table.to_dict()).bytes, table.bytes)
    assert table.to_text().startswith("rank 0 of 4")


def test_the_text_names_queues_stages_and_streams() -> None:
    table = make_tables()[1]
    text = table.to_text()
    assert "rank 1 of 6 (3 x 2), all_to_all, whole, rows of 8 bytes" in text
    for queue, entry in zip(QUEUES, table.queues, strict=True):
        count = f"{queue}: {entry['num_items']} items"
        assert (count in text) == (queue not in ("sum", "reduce"))
    assert text.count("  stage ") == len(table.stages)
    assert text.count("rows by ") == len(table.streams)
    assert text.count("credit to rank") == int((table.streams["credit_slot"] != NO_SLOT).sum())
