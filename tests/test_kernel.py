"""The host kernel against the oracle and the definition: all ranks as threads of one process.

Every policy, 1-4 blocks, 1-3 lanes, three transports, rows of 1-20000 bytes, calls back to back
with slow ranks. Guard bytes stand around every rank's heap and output.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastkern.kernels import _host
from fastkern.kernels.oracle import run_tables
from fastkern.planner import Plan, Topology, plan
from tests.reference import (
    Case,
    Rows,
    random_inputs,
    random_traffic,
    reference_all_to_all,
    traffic_matrices,
)

POLICIES = ("auto", "whole", "split", "direct", "spreadout")
GUARD_BYTES = 64
PROGRESS_NS = 20_000_000_000


class Launch(NamedTuple):
    """How the kernel runs."""

    num_blocks: int = 1
    num_lanes: int = 1
    transport: str = "shm"
    seed: int = 0

    def options(self) -> _host.LaunchOptions:
        rates = (50_000, 500_000) if self.transport == "shaped" else (0, 0)
        return _host.LaunchOptions(
            self.num_blocks, self.num_lanes, self.transport, *rates, self.seed
        )


def run_kernel(
    plans: Sequence[Plan],
    inputs: Sequence[Sequence[Rows]],
    launch: Launch = Launch(),  # noqa: B008
    delays_us: Sequence[Sequence[int]] = (),
) -> list[list[Rows]]:
    """The calls back to back on all ranks; checks the guards around outputs."""
    calls, views = [], []
    for k, (made, sources) in enumerate(zip(plans, inputs, strict=True)):
        tables = [made.table(r) for r in range(made.topology.num_ranks)]
        guarded, outputs = [], []
        for table in tables:
            num_bytes = int(table.header["output_rows"]) * made.row_bytes
            buffer = np.full(num_bytes + 2 * GUARD_BYTES, 0xC5, dtype=np.uint8)
            buffer[GUARD_BYTES : GUARD_BYTES + num_bytes] = 0xEE
            guarded.append(buffer)
            outputs.append(buffer[GUARD_BYTES : GUARD_BYTES + num_bytes])
        calls.append(
            (
                [t.bytes for t in tables],
                [np.ascontiguousarray(s).reshape(-1) for s in sources],
                outputs,
                list(delays_us[k]) if delays_us else [],
            )
        )
        views.append((guarded, [o.reshape(-1, made.row_bytes) for o in outputs]))
    assert _host.run_cluster(calls, launch.options(), PROGRESS_NS) == ""
    for guarded, _ in views:
        for buffer in guarded:
            assert (buffer[:GUARD_BYTES] == 0xC5).all(), "bytes before the output were overwritten"
            assert (buffer[-GUARD_BYTES:] == 0xC5).all(), "bytes after the output were overwritten"
    return [outputs for _, outputs in views]


def assert_same(got: Sequence[Rows], expected: Sequence[Rows], what: str) -> None:
    for rank, (a, b) in enumerate(zip(got, expected, strict=True)):
        assert np.array_equal(a, b), f"{what}: rank {rank}"


launches = st.builds(
    Launch,
    num_blocks=st.integers(1, 4),
    num_lanes=st.integers(1, 3),
    transport=st.sampled_from(["shm", "shuffled", "shaped"]),
    seed=st.integers(0, 1 << 30),
)


@settings(max_examples=400, deadline=None)
@given(
    traffic_matrices(max_bytes=1 << 18),
    st.sampled_from(POLICIES),
    launches,
    st.integers(1, 8),
    st.integers(0, 3),
)
def test_kernel_equals_oracle_equals_reference(
    case: Case, policy: str, launch: Launch, chunk: int, lead: int
) -> None:
    topology = Topology(case.servers, case.gpus_per_server)
    made = plan(
        case.traffic,
        topology,
        case.row_bytes,
        policy,
        chunk_bytes=chunk * case.row_bytes,
        credit_lead=lead,
    )
    inputs = random_inputs(case.traffic, case.row_bytes, np.random.default_rng(1))
    expected = reference_all_to_all(case.traffic, inputs)
    tables = [made.table(r) for r in range(topology.num_ranks)]
    assert_same(run_tables(tables, inputs), expected, "oracle")
    assert_same(run_kernel([made], [inputs], launch)[0], expected, "kernel")


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("transport", ["shm", "shuffled"])
@pytest.mark.parametrize(("servers", "per_server"), [(1, 4), (4, 1), (3, 2), (2, 4)])
def test_five_calls_back_to_back_with_a_slow_rank(
    policy: str, transport: str, servers: int, per_server: int
) -> None:
    rng = np.random.default_rng(servers * 10 + per_server)
    topology = Topology(servers, per_server)
    plans, inputs, expected, delays = [], [], [], []
    for call in range(5):
        traffic = random_traffic(servers, per_server, rng, max_rows=20)
        if call % 2:
            traffic = traffic.T.copy()
        plans.append(plan(traffic, topology, 24, policy, chunk_bytes=100))  # type: ignore[arg-type]
        inputs.append(random_inputs(traffic, 24, rng))
        expected.append(reference_all_to_all(traffic, inputs[-1]))
        delays.append([20_000 if r == 1 + call % 2 else 0 for r in range(topology.num_ranks)])
    got = run_kernel(plans, inputs, Launch(2, 2, transport, seed=7), delays)
    for call in range(5):
        assert_same(got[call], expected[call], f"call {call}")


@pytest.mark.parametrize("row_bytes", [1, 2, 3, 7, 8, 15, 16, 17, 258, 2736, 5760, 14336, 20000])
def test_odd_row_widths_leave_their_neighbours_alone(row_bytes: int) -> None:
    rng = np.random.default_rng(row_bytes)
    traffic = random_traffic(2, 3, rng, max_rows=9, kind="ragged")
    inputs = random_inputs(traffic, row_bytes, rng)
    expected = reference_all_to_all(traffic, inputs)
    for policy in POLICIES:
        made = plan(traffic, Topology(2, 3), row_bytes, policy, chunk_bytes=4 * row_bytes)  # type: ignore[arg-type]
        for lanes in (1, 3):
            got = run_kernel([made], [inputs], Launch(2, lanes))
            assert_same(got[0], expected, f"{policy}, {lanes} lanes")


def test_any_number_of_blocks_gives_the_same_bytes() -> None:
    rng = np.random.default_rng(11)
    traffic = random_traffic(3, 2, rng, max_rows=40, kind="hot_tile")
    inputs = random_inputs(traffic, 100, rng)
    expected = reference_all_to_all(traffic, inputs)
    made = plan(traffic, Topology(3, 2), 100, "split", chunk_bytes=500)
    for blocks in (1, 2, 3, 5, 8, 16):
        assert_same(run_kernel([made], [inputs], Launch(blocks))[0], expected, f"{blocks} blocks")


def test_a_missing_rank_ends_in_a_record_and_not_in_a_hang() -> None:
    traffic = np.full((4, 4), 5)
    made = plan(traffic, Topology(2, 2), 8, "whole")
    inputs = random_inputs(traffic, 8, np.random.default_rng(0))
    tables = [made.table(r) for r in range(4)]
    # Rank 3 sleeps longer than the others' deadline. What they wait for is rank 3, or a rank that
    # waits for it. That all name one origin is compared too; test_abort_origin.py forces the race.
    blamed = 0
    for _ in range(10):
        outputs = [np.zeros(20 * 8, dtype=np.uint8) for _ in range(4)]
        call = (
            [t.bytes for t in tables],
            [i.reshape(-1) for i in inputs],
            outputs,
            [0, 0, 0, 120_000],
        )
        error = _host.run_cluster([call], Launch(2, 1, "shuffled").options(), 50_000_000)
        assert "waits for flag" in error
        blamed += "of rank 3" in error
    assert blamed


def test_a_slow_link_is_no_stall() -> None:
    """Rows cross for longer than the deadline, others wait behind them: nobody gives up."""
    traffic = np.zeros((3, 3), dtype=np.int64)
    traffic[0, 2], traffic[1, 2] = 2, 1
    made = plan(traffic, Topology(3, 1), 16 * 1024, "whole", chunk_bytes=16 * 1024)
    inputs = random_inputs(traffic, 16 * 1024, np.random.default_rng(0))
    outputs = [np.zeros(rows * 16 * 1024, dtype=np.uint8) for rows in traffic.sum(axis=0)]
    tables = [made.table(r).bytes for r in range(3)]
    # A row takes 160 ms on the link; the deadline is 50 ms.
    slow = _host.LaunchOptions(transport="shaped", scale_out_ps_per_kib=10_000_000_000)
    call = (tables, [i.reshape(-1) for i in inputs], outputs, [])
    assert _host.run_cluster([call], slow, 50_000_000) == ""
    expected = reference_all_to_all(traffic, inputs)
    assert_same([o.reshape(-1, 16 * 1024) for o in outputs], expected, "slow link")


def test_a_corrupt_table_is_noticed() -> None:
    """The comparison can fail: one segment's row is changed, and the bytes differ."""
    traffic = np.full((4, 4), 5)
    made = plan(traffic, Topology(2, 2), 8, "whole")
    inputs = random_inputs(traffic, 8, np.random.default_rng(0))
    tables = [made.table(r) for r in range(4)]
    tables[0].segments[0]["row"] ^= 1
    outputs = [np.zeros(20 * 8, dtype=np.uint8) for _ in range(4)]
    call = ([t.bytes for t in tables], [i.reshape(-1) for i in inputs], outputs, [])
    assert _host.run_cluster([call], Launch().options(), PROGRESS_NS) == ""
    expected = reference_all_to_all(traffic, inputs)
    assert any(not np.array_equal(o, e.reshape(-1)) for o, e in zip(outputs, expected, strict=True))
