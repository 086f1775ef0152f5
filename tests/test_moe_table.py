"""Tables of dispatch and combine: what they hold, and that every plan is valid."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastkern.planner import MoePlan, StageTable, Topology, plan_moe
from fastkern.planner.table import ARRIVAL_BYTES, QUEUES, flag_slots
from tests.moe_table_edits import QUEUES_OF, tables_of
from tests.moe_tables import POLICIES, SHAPES


def random_counts(servers: int, per_server: int, rng: np.random.Generator) -> tuple[Any, Any]:
    """to_server [R, N] and to_rank [R, R] of random choices; some ranks have no tokens."""
    num_ranks = servers * per_server
    to_server = np.zeros((num_ranks, servers), np.int64)
    to_rank = np.zeros((num_ranks, num_ranks), np.int64)
    heat = rng.dirichlet(np.full(num_ranks, rng.choice([0.1, 1.0, 10.0])))
    for source in range(num_ranks):
        for _ in range(int(rng.integers(0, 25) * (rng.random() < 0.8))):
            ranks = np.unique(rng.choice(num_ranks, int(rng.integers(0, 9)), p=heat))
            to_rank[source, ranks] += 1
            to_server[source, np.unique(ranks // per_server)] += 1
    return to_server, to_rank


@settings(max_examples=300, deadline=None)
@given(
    seed=st.integers(0, 10**9),
    shape=st.sampled_from([*SHAPES, (5, 3), (2, 8)]),
    policy=st.sampled_from(POLICIES),
    times=st.sampled_from([1, 1, 40, 10**9]),
    chunk_bytes=st.sampled_from([1, 32, 96, 1 << 17]),
    chunk_slots=st.sampled_from([32, 64]),
    credit_lead=st.integers(0, 3),
    alpha_us=st.sampled_from([0.0, 5.0, 200.0]),
)
def test_every_dispatch_and_combine_is_valid(
    seed: int, shape: tuple[int, int], policy: Any, times: int, alpha_us: float, **options: int
) -> None:
    rng = np.random.default_rng(seed)
    to_server, to_rank = (times * counts for counts in random_counts(*shape, rng))
    topology = Topology(*shape, alpha_us=alpha_us)
    made = plan_moe(to_server, to_rank, topology, 32, policy, **options)
    made.validate()
    tokens = rng.integers(0, 40, topology.num_ranks)
    made.validate_combine(16, 32, int(rng.integers(0, 9)), tokens.tolist())
    check_headers(made, to_server, to_rank, tokens)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_rail_that_carries_all_stays_within_its_flags(policy: Any) -> None:
    """Unbalanced plans leave a rank's rows on its own rail, many times the share of a rail."""
    to_server, to_rank = np.zeros((8, 2), np.int64), np.zeros((8, 8), np.int64)
    to_server[0, 1] = to_rank[0, 5] = 4096
    made = plan_moe(to_server, to_rank, Topology(2, 4), 14432, policy)
    made.validate()
    made.validate_combine(14336, 28672, 100, [4096] + [0] * 7)
    for rank in range(8):
        table = made.table(rank)
        assert all(table.stages["num_chunks"] <= table.header["chunk_slots"])


def check_headers(made: MoePlan, to_server: Any, to_rank: Any, tokens: Any) -> None:
    """The sizes, from the counts."""
    servers, m = made.topology.servers, made.topology.gpus_per_server
    num_ranks = servers * m
    own = np.arange(num_ranks) // m
    local = own[:, None] == own[None, :]
    remote = to_server.copy()
    remote[np.arange(num_ranks), own] = 0
    others = np.where(local & ~np.eye(num_ranks, dtype=bool), to_rank, 0)
    for rank in range(num_ranks):
        h = made.table(rank).header
        assert h["input_rows"] == remote[rank].sum() + to_rank[rank][local[rank]].sum()
        assert h["output_rows"] == to_rank[:, rank].sum()
        assert h["window_rows"] == (to_rank.sum(axis=0).max() if m > 1 else 0)
        assert h["scratch_row_bytes"] == ARRIVAL_BYTES * m
        slots = num_ranks * int(h["chunk_slots"])
        assert h["scratch_rows"] == (slots if m > 1 and servers > 1 else 0)
        c = made.combine_table(rank, 16, 64, 7, int(tokens[rank])).header
        assert (c["input_rows"], c["output_rows"]) == (0, tokens[rank])
        assert (c["send_rows"], c["receive_rows"]) == (h["receive_rows"], h["send_rows"])
        assert c["window_rows"] == remote.sum(axis=1).max()
        assert c["scratch_base"] == others.sum(axis=1).max()
        assert c["scratch_rows"] == c["scratch_base"] + 7
        assert (c["row_bytes"], c["scratch_row_bytes"]) == (16, 64)


@pytest.mark.parametrize("op", QUEUES_OF)
def test_tables_hold_the_queues_of_their_operation(op: str) -> None:
    for table in tables_of(op):
        assert table.op == op
        used = {q for q, entry in zip(QUEUES, table.queues, strict=True) if entry["num_items"]}
        assert used == set(QUEUES_OF[op])
        assert f"{op}, whole" in table.to_text()
        assert np.array_equal(StageTable.from_dict(table.to_dict()).bytes, table.bytes)
        layout, h = table.data_layout(), table.header
        scratch = int(h["scratch_rows"]) * int(h["scratch_row_bytes"])
        assert layout.bytes == layout.scratch + -(-scratch // 256) * 256
        for queue in QUEUES:
            times = [item.plan_time for item in table.items(queue)]
            assert times == sorted(times)


def test_a_combine_reduces_when_all_has_landed() -> None:
    for table in tables_of("combine"):
        last = max(i.plan_time for q in ("land", "take") for i in table.items(q))
        assert min(i.plan_time for i in table.items("reduce")) > last
        rows = [table.chunk_bounds(i.stream, i.chunk) for i in table.items("reduce")]
        assert rows[-1][1] == table.header["output_rows"]


def test_every_pair_of_ranks_and_servers_has_its_flags() -> None:
    # ready and credit of 6 ranks; for each chunk: pack, arrive and land of 6, push of 2, sum of 3
    assert flag_slots(3, 2, 32) == 2 * 6 + 32 * (3 * 6 + 2 + 3)
