"""How much heap dispatch and combine need: the formula, exactly, and its worst case, attained."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fastkern.moe.buffers import WorstCase
from fastkern.planner import MoePlan, Topology, plan_moe
from fastkern.planner.api import DEFAULT_CHUNK_SLOTS
from tests.processes import Pool

ROW, WIRE, SUM = 208, 112, 240  # bytes, unlike and no multiples of 256
SHAPES = [(1, 1), (1, 4), (4, 1), (2, 2), (3, 2), (2, 4)]


def part(rows: int, num_bytes: int) -> int:
    return -(-rows * num_bytes // 256) * 256


def random_counts(
    rng: np.random.Generator, servers: int, m: int, topk: int, most: int
) -> tuple[np.ndarray, np.ndarray]:
    """to_server [R, N] and to_rank [R, R] of random tokens, up to `most` on a rank."""
    r = servers * m
    to_server, to_rank = np.zeros((r, servers), np.int64), np.zeros((r, r), np.int64)
    for s in range(r):
        for _ in range(int(rng.integers(0, most + 1))):
            ranks = set(rng.integers(0, r, topk).tolist())
            to_rank[s, list(ranks)] += 1
            to_server[s, list({d // m for d in ranks})] += 1
    return to_server, to_rank


def staging(plan: MoePlan, num_ranks: int) -> tuple[int, int]:
    rows = [plan.staging_rows_of(rank) for rank in range(num_ranks)]
    return max(out for out, _ in rows), max(got for _, got in rows)


@pytest.mark.parametrize("policy", ["whole", "split", "direct", "spreadout"])
@pytest.mark.parametrize(("servers", "m"), SHAPES)
def test_sizes_follow_the_formula(servers: int, m: int, policy: str) -> None:
    topology, r = Topology(servers, m), servers * m
    rng = np.random.default_rng(r)
    for _ in range(20):
        to_server, to_rank = random_counts(rng, servers, m, topk=3, most=9)
        plan = plan_moe(to_server, to_rank, topology, ROW, policy, chunk_bytes=3 * ROW)
        out, got = staging(plan, r)
        window = int(to_rank.sum(0).max()) if m > 1 else 0
        arrivals = r * DEFAULT_CHUNK_SLOTS if m > 1 and servers > 1 else 0
        need = part(out, ROW) + part(got, ROW) + part(window, ROW) + part(arrivals, 16 * m)
        for rank in range(r):
            assert plan.table(rank).data_layout().bytes == need
        own = np.repeat(np.arange(servers), m)
        returned = max(to_server[s, np.arange(servers) != own[s]].sum() for s in range(r))
        partials = max(
            to_rank[s, [d for d in range(r) if own[d] == own[s] and d != s]].sum() for s in range(r)
        )
        proxied = 11
        need = part(got, WIRE) + part(out, WIRE) + part(int(returned), WIRE)
        need += part(int(partials) + proxied, SUM)
        for rank in range(r):
            table = plan.combine_table(rank, WIRE, SUM, proxied, num_tokens=5)
            assert table.data_layout().bytes == need


@pytest.mark.parametrize(("servers", "m"), SHAPES)
def test_no_routing_exceeds_the_worst_case(servers: int, m: int) -> None:
    topology, r = Topology(servers, m), servers * m
    rng = np.random.default_rng(r)
    for topk in (1, 2, 5):
        for most in (1, 2, 7):
            worst = WorstCase(topology, most, topk)
            for _ in range(20):
                to_server, to_rank = random_counts(rng, servers, m, topk, most)
                for policy in ("whole", "direct"):
                    plan = plan_moe(to_server, to_rank, topology, ROW, policy)
                    assert plan.table(0).data_layout().bytes <= worst.dispatch_bytes(ROW)
                    partials = worst.proxy_partials
                    table = plan.combine_table(0, WIRE, SUM, partials, num_tokens=most)
                    assert table.data_layout().bytes <= worst.combine_bytes(WIRE, SUM)


def every_rank(rank: int, num_ranks: int, servers: int) -> tuple[int, int, int]:
    """Tokens that choose an expert on every rank: the worst case. Heap before, hinted, after."""
    import fastkern

    num_tokens, width = 6, 9
    comm = fastkern.init(servers=servers)
    idx = torch.arange(num_ranks).expand(num_tokens, num_ranks).contiguous()
    x = torch.randn(num_tokens, width)
    weights = torch.rand(num_tokens, num_ranks)
    hint = comm.moe_buffer_bytes_for(
        num_tokens, num_ranks, [4 * width], combine_width=width, combine_dtype=torch.float32
    )
    comm.reserve(hint)
    before = comm._runtime.data_bytes
    recv, recv_weights, _, handle = comm.dispatch(x, idx, weights, num_experts=num_ranks)
    dispatch_need = comm.stats.plan.table(rank).data_layout().bytes
    y = comm.combine(recv, handle, weights=recv_weights)
    torch.testing.assert_close(y, x * weights.sum(1, keepdim=True))
    partials = handle.stats.handed_on_rows
    table = comm.stats.plan.combine_table(rank, 48, 48, partials, num_tokens)
    need = max(dispatch_need, table.data_layout().bytes)
    assert comm._runtime.data_bytes == before  # it never grew
    return hint, need, partials


@pytest.mark.parametrize("servers", [1, 2, 4])
def test_the_hint_is_what_the_worst_routing_needs(four: Pool, servers: int) -> None:
    for hint, need, partials in four.run(every_rank, servers):
        assert hint == need
        assert partials == WorstCase(Topology(servers, 4 // servers), 6, 4).proxy_partials
