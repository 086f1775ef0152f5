"""The network transports as they are, on the host and a simulated network: transfers late and in
random order, no memory mapped between servers, NCCL's signals that only add.

Random all-to-alls of three calls, all policies; deadlines and aborts across servers.
"""

from __future__ import annotations

import ctypes
import time
from pathlib import Path

import numpy as np
import pytest

from fastkern.planner import Plan, Topology, plan
from tests.device_compile.toolchain import Edit
from tests.network.harness import KINDS, Launch, Outcome, build, run
from tests.reference import Rows, random_inputs, random_traffic, reference_all_to_all

POLICIES = ("whole", "split", "direct", "spreadout", "auto")
VALUE_BITS = 16  # an abort word is epoch << VALUE_BITS | origin + 1

by_kind = pytest.mark.parametrize("kind", KINDS)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return build(tmp_path_factory.mktemp("network"))


def random_calls(
    library: ctypes.CDLL, kind: str, seed: int, policy: str
) -> tuple[Outcome, list[list[Rows]]]:
    """Three calls on 1-4 servers of 1-3 ranks, and what they should deliver."""
    rng = np.random.default_rng(seed)
    topology = Topology(int(rng.integers(1, 5)), int(rng.integers(1, 4)))
    row_bytes = int(rng.integers(1, 70))
    plans, inputs, expected = [], [], []
    for _ in range(3):
        traffic = random_traffic(topology.servers, topology.gpus_per_server, rng, max_rows=12)
        chunk_bytes, lead = row_bytes * int(rng.integers(1, 8)), int(rng.integers(3))
        made = plan(
            traffic,
            topology,
            row_bytes,
            policy,  # type: ignore[arg-type]
            chunk_bytes=chunk_bytes,
            credit_lead=lead,
        )
        plans.append(made)
        inputs.append(random_inputs(traffic, row_bytes, rng))
        expected.append(reference_all_to_all(traffic, inputs[-1]))
    launch = Launch(kind, int(rng.integers(1, 4)), int(rng.integers(1, 4)), seed=seed)
    return run(library, plans, inputs, launch), expected


@by_kind
@pytest.mark.parametrize("policy", POLICIES)
def test_all_to_alls(library: ctypes.CDLL, kind: str, policy: str) -> None:
    for seed in range(12):
        outcome, expected = random_calls(library, kind, seed, policy)
        assert (outcome.epochs == 3).all(), f"seed {seed}"
        assert not outcome.aborts.any()
        for got, right in zip(outcome.outputs, expected, strict=True):
            for a, b in zip(got, right, strict=True):
                assert np.array_equal(a, b), f"seed {seed}"


def one_row_each(servers: int, per_server: int) -> tuple[list[Plan], list[list[Rows]]]:
    topology = Topology(servers, per_server)
    traffic = np.ones((topology.num_ranks, topology.num_ranks), dtype=np.int64)
    inputs = random_inputs(traffic, 16, np.random.default_rng(1))
    return [plan(traffic, topology, 16, "whole")], [inputs]


def with_one_absent(library: ctypes.CDLL, kind: str, absent: int, others_s: float) -> Outcome:
    """3 servers of 2 ranks, one of which makes no call. Rank 2 has a deadline of 0.3 s."""
    plans, inputs = one_row_each(3, 2)
    deadlines = [0.3 if rank == 2 else others_s for rank in range(6)]
    return run(library, plans, inputs, Launch(kind, 2), deadlines, absent=[absent])


@by_kind
@pytest.mark.parametrize("absent", [1, 5])
def test_all_leave_when_one_gives_up(library: ctypes.CDLL, kind: str, absent: int) -> None:
    begin = time.monotonic()
    outcome = with_one_absent(library, kind, absent, others_s=60.0)
    assert time.monotonic() - begin < 20
    assert not outcome.epochs.any()
    assert set(outcome.aborts) == {1 << VALUE_BITS | (2 + 1)}


def slow_chain(library: ctypes.CDLL, kind: str) -> Outcome:
    """3 servers of 1 rank: server 0 waits for server 1 until that has sent 60 chunks to server 2,
    10 ms each; the deadline is a third of the time."""
    traffic = np.array([[0, 0, 0], [1, 0, 60], [0, 0, 0]], dtype=np.int64)
    made = plan(traffic, Topology(3, 1), 16, "whole", chunk_bytes=16)
    inputs = random_inputs(traffic, 16, np.random.default_rng(2))
    return run(library, [made], [inputs], Launch(kind, delay_us=10_000), 0.2)


@by_kind
def test_a_deadline_counts_from_progress_elsewhere(library: ctypes.CDLL, kind: str) -> None:
    outcome = slow_chain(library, kind)
    assert not outcome.aborts.any()
    assert (outcome.epochs == 1).all()


def slow_reads(library: ctypes.CDLL, kind: str) -> bool:
    """Two calls of a rank that only sends, whose staging is read slowly. Are both delivered?"""
    traffic = np.array([[0, 20], [0, 0]], dtype=np.int64)
    made = plan(traffic, Topology(2, 1), 16, "whole", chunk_bytes=16)
    rng = np.random.default_rng(3)
    inputs = [random_inputs(traffic, 16, rng) for _ in range(2)]
    outcome = run(library, [made] * 2, inputs, Launch(kind, delay_us=2_000))
    return all(
        np.array_equal(got[1], reference_all_to_all(traffic, sent)[1])
        for got, sent in zip(outcome.outputs, inputs, strict=True)
    )


@by_kind
def test_staging_is_kept_until_it_has_been_read(library: ctypes.CDLL, kind: str) -> None:
    assert slow_reads(library, kind)


# Faults that must show.
NETWORK = "kernels/transport/network.h"
GIN = "kernels/transport/nccl_gin.h"


def test_missing_beats_are_found(tmp_path: Path) -> None:
    edit = Edit(NETWORK, r"if \(r != args_\.rank\) wire_\.beat\(r\);", "(void)r;")
    assert slow_chain(build(tmp_path, [edit]), "nvshmem").aborts.any()


def test_an_abort_that_is_not_passed_on_is_found(tmp_path: Path) -> None:
    edit = Edit(NETWORK, r"if \(r != args_\.rank\) wire_\.notify\(r, word\);", "(void)word;")
    outcome = with_one_absent(build(tmp_path, [edit]), "nvshmem", absent=5, others_s=2.0)
    assert set(outcome.aborts) != {1 << VALUE_BITS | (2 + 1)}


def test_missing_quiet_is_found(tmp_path: Path) -> None:
    edit = Edit(GIN, r"(kCounterBits\)\)) return false;", r"\1 return true;")
    assert not slow_reads(build(tmp_path, [edit]), "nccl_gin")


@pytest.mark.parametrize(
    ("kind", "edit"),
    [
        (
            "nvshmem",
            Edit(
                NETWORK,
                r"wire_\.put\(to, from,",
                "if (target_.lane() == 0) wire_.raise(rank, slot, stamp(1));\n"
                "        wire_.put(to, from,",
            ),
        ),
        ("nccl_gin", Edit(GIN, "return stamp - before;", "return (void)before, stamp;")),
    ],
    ids=["flag-before-its-bytes", "signals-that-pile-up"],
)
def test_flags_that_come_too_early_are_found(kind: str, edit: Edit, tmp_path: Path) -> None:
    library = build(tmp_path, [edit])
    wrong = 0
    for seed in range(12):
        outcome, expected = random_calls(library, kind, seed, "whole")
        for got, right in zip(outcome.outputs, expected, strict=True):
            wrong += not all(map(np.array_equal, got, right))
    assert wrong
