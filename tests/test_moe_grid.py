"""Dispatch and combine on processes against the reference, bit for bit: topologies and policies.

Every named case on every topology; random cases on every topology under every policy, with blocks,
chunks and transport varied. Starting ranks takes seconds, so one run does many cases.
"""

from __future__ import annotations

from typing import Any

import pytest

import fastkern
from fastkern import Communicator
from tests.conftest import SharedPools
from tests.moe_case_list import NAMED, random_cases
from tests.moe_cases import Case, Data
from tests.moe_checks import check_case
from tests.processes import Pool

TOPOLOGIES = ((1, 1), (1, 4), (4, 1), (2, 2), (2, 3), (3, 2), (2, 4))
POLICIES = ("auto", "whole", "split", "direct", "spreadout")
# What must change nothing: how many blocks, how small the chunks, which transport.
WAYS: tuple[dict[str, Any], ...] = (
    {},
    {"chunk_bytes": 64, "debug": True},
    {"num_blocks": 4, "chunk_bytes": 1000},
    {"transport": fastkern.shaped(50.0, 5.0), "chunk_bytes": 256, "num_blocks": 2},
)


def run_cases(
    rank: int, num_ranks: int, servers: int, options: dict[str, Any], cases: list[Case]
) -> list[int]:
    """Every case on one communicator; the rows that this rank sent to other servers."""
    del rank
    with Communicator(servers=servers, buffer_bytes=0, entry_timeout_s=50, **options) as comm:
        return [check_case(comm, Data(case, servers, num_ranks)) for case in cases]


def check_rows(servers: int, num_ranks: int, cases: list[Case], sent: list[list[int]]) -> None:
    """A token crosses once to each server that it goes to, whatever the case."""
    for case, rows in zip(cases, zip(*sent, strict=True), strict=True):
        right = Data(case, servers, num_ranks).routing.num_scale_out_rows
        assert sum(rows) == right, f"{case.name}: {rows} rows between servers, not {right}"


@pytest.mark.parametrize("part", range(4))
@pytest.mark.parametrize("topology", TOPOLOGIES, ids=lambda t: f"{t[0]}x{t[1]}")
def test_named_cases(shared_pools: SharedPools, topology: tuple[int, int], part: int) -> None:
    servers, num_ranks = topology[0], topology[0] * topology[1]
    cases = list(NAMED[part::4])
    pool = shared_pools.pool(num_ranks)
    sent = pool.run(run_cases, servers, WAYS[part], cases, timeout_s=240)
    check_rows(servers, num_ranks, cases, sent)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("topology", TOPOLOGIES, ids=lambda t: f"{t[0]}x{t[1]}")
def test_random_cases(shared_pools: SharedPools, topology: tuple[int, int], policy: str) -> None:
    servers, num_ranks = topology[0], topology[0] * topology[1]
    which = TOPOLOGIES.index(topology) * len(POLICIES) + POLICIES.index(policy)
    cases = random_cases(which, 12)
    options = {"policy": policy, **WAYS[(which + which // len(WAYS)) % len(WAYS)]}
    pool = shared_pools.pool(num_ranks)
    sent = pool.run(run_cases, servers, options, cases, timeout_s=240)
    check_rows(servers, num_ranks, cases, sent)


LARGER = [
    Case("larger", 501, num_tokens=700, choose="skewed", topk=8, num_experts=64, width=900),
    Case(
        "larger, by rank",
        502,
        num_tokens=700,
        choose="distinct",
        topk=6,
        num_experts=40,
        layout="rank",
        payload="fp8_scales",
        width=1024,
        summed="bfloat16",
        sum_width=1024,
    ),
]


@pytest.mark.parametrize("policy", ["auto", "direct"])
@pytest.mark.parametrize("servers", [1, 2])
def test_calls_of_some_megabytes(four: Pool, servers: int, policy: str) -> None:
    """Chunks of the usual size, several to a put; the heap grows."""
    sent = four.run(run_cases, servers, {"policy": policy}, LARGER, timeout_s=240)
    check_rows(servers, 4, LARGER, sent)
