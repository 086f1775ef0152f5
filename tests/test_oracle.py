"""The oracle against the definition of an all-to-all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastkern.kernels.oracle import run_tables
from fastkern.planner import StageTable, Topology, plan
from tests.reference import (
    KINDS,
    Case,
    Matrix,
    Rows,
    random_inputs,
    random_traffic,
    reference_all_to_all,
    small_matrices,
    traffic_matrices,
)

POLICIES = ("whole", "split", "direct", "spreadout", "auto")


def make_tables(
    traffic: Matrix, topology: Topology, *args: Any, **options: Any
) -> list[StageTable]:
    p = plan(traffic, topology, *args, **options)
    return [p.table(rank) for rank in range(topology.num_ranks)]


def assert_same(got: Sequence[Rows], expected: Sequence[Rows]) -> None:
    assert len(got) == len(expected)
    for rank, (rows, want) in enumerate(zip(got, expected, strict=True)):
        assert rows.shape == want.shape
        assert np.array_equal(rows, want), f"rank {rank}"


def test_the_reference_on_rows_written_out_by_hand() -> None:
    traffic = np.array([[1, 2, 0], [0, 0, 1], [1, 1, 1]])
    inputs = [np.array([[10 * s + k] for k in range(3)], np.uint8) for s in range(3)]
    inputs[1] = inputs[1][:1]
    outputs = reference_all_to_all(traffic, inputs)
    assert [rows[:, 0].tolist() for rows in outputs] == [[0, 20], [1, 2, 21], [10, 22]]


@pytest.mark.parametrize("policy", POLICIES)
@given(case=traffic_matrices(), data=st.data())
@settings(max_examples=100, deadline=None)
def test_any_traffic(policy: str, case: Case, data: st.DataObject) -> None:
    options = {
        "chunk_bytes": case.row_bytes * data.draw(st.sampled_from([1, 3, 1000]), "chunk rows"),
        "chunk_slots": data.draw(st.sampled_from([32, 64]), "chunk slots"),
        "credit_lead": data.draw(st.integers(0, 3), "credit lead"),
    }
    topology = Topology(
        case.servers, case.gpus_per_server, alpha_us=data.draw(st.sampled_from([0, 5]))
    )
    tables = make_tables(case.traffic, topology, case.row_bytes, policy, **options)
    inputs = random_inputs(case.traffic, case.row_bytes, np.random.default_rng(0))
    assert_same(run_tables(tables, inputs), reference_all_to_all(case.traffic, inputs))


@pytest.mark.parametrize("policy", POLICIES)
@given(
    traffic=small_matrices(4, max_rows=5), servers=st.sampled_from([1, 2, 4]), seed=st.integers(0)
)
@settings(max_examples=60, deadline=None)
def test_any_order_that_flags_allow(policy: str, traffic: Matrix, servers: int, seed: int) -> None:
    topology = Topology(servers, 4 // servers)
    tables = make_tables(traffic, topology, 2, policy, chunk_bytes=4)
    rng = np.random.default_rng(seed)
    inputs = random_inputs(traffic, 2, rng)
    assert_same(run_tables(tables, inputs, rng), reference_all_to_all(traffic, inputs))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("policy", POLICIES)
def test_every_kind_of_traffic_in_random_order(policy: str, kind: str) -> None:
    rng = np.random.default_rng(KINDS.index(kind))
    traffic = random_traffic(3, 3, rng, max_rows=12, kind=kind)
    tables = make_tables(traffic, Topology(3, 3), 5, policy, chunk_bytes=20, chunk_slots=32)
    inputs = random_inputs(traffic, 5, rng)
    assert_same(run_tables(tables, inputs, rng), reference_all_to_all(traffic, inputs))


def test_the_example_of_the_docstring() -> None:
    traffic = np.zeros((4, 4), np.int64)
    traffic[:2, 2:] = [[6, 2], [2, 2]]
    p = plan(traffic, Topology(2, 2), 4, "whole")
    assert [p.puts(rank) for rank in range(4)] == [[(2, 6)], [(3, 6)], [], []]
    tables = [p.table(rank) for rank in range(4)]

    def parts(rank: int, queue: str) -> list[tuple[int, int, int, int, int]]:
        """(peer of the stream, first stream row, row, rows, peer of the segment)"""
        found = []
        for item in tables[rank].items(queue):
            peer = int(tables[rank].streams[item.stream]["peer"])
            found += [(peer, *part[:4]) for part in tables[rank].parts(item.stream, item.chunk)]
        return found

    assert parts(0, "pack") == [(0, 0, 0, 6, 0), (1, 4, 6, 2, 0)]
    assert parts(1, "pack") == [(1, 0, 2, 2, 0), (1, 2, 0, 2, 0)]
    assert parts(2, "receive") == [(0, 0, 0, 6, 2)]
    assert parts(3, "receive") == [(1, 0, 2, 2, 3), (1, 2, 6, 2, 2), (1, 4, 0, 2, 3)]
    assert parts(2, "land") == [(3, 2, 6, 2, 0)]
    assert not parts(3, "land")
    inputs = random_inputs(traffic, 4, np.random.default_rng(1))
    outputs = run_tables(tables, inputs)
    assert [len(rows) for rows in outputs] == [0, 0, 8, 4]
    assert_same(outputs, reference_all_to_all(traffic, inputs))


def test_the_inputs_stay_as_they_are() -> None:
    traffic = random_traffic(2, 2, np.random.default_rng(0), kind="ragged")
    tables = make_tables(traffic, Topology(2, 2), 8, "whole")
    inputs = random_inputs(traffic, 8, np.random.default_rng(1))
    before = [rows.copy() for rows in inputs]
    for rows in inputs:
        rows.flags.writeable = False
    assert_same(run_tables(tables, inputs), reference_all_to_all(traffic, inputs))
    assert_same(inputs, before)


def test_tables_and_inputs_must_belong_together() -> None:
    traffic = random_traffic(3, 2, np.random.default_rng(0), kind="ragged")
    tables = make_tables(traffic, Topology(3, 2), 8, "whole")
    inputs = random_inputs(traffic, 8, np.random.default_rng(1))
    with pytest.raises(ValueError, match="for rank 0 of 6"):
        run_tables(tables[::-1], inputs)
    with pytest.raises(ValueError, match="of 5"):
        run_tables(tables[:5], inputs[:5])
    other = make_tables(traffic, Topology(3, 2), 8, "split")
    with pytest.raises(ValueError, match="differ in plan_hash"):
        run_tables([*tables[:5], other[5]], inputs)
    with pytest.raises(ValueError, match="the input of rank 2 must be uint8"):
        run_tables(tables, [*inputs[:2], inputs[2][1:], *inputs[3:]])
    with pytest.raises(ValueError, match="shorter"):
        run_tables(tables, inputs[:5])
