"""Faults of flags that other libraries shipped: missed, stale, erased, and read out of order.

Ranks as processes, stopped or asleep where it hurts; and as threads over a transport that delivers
puts in random order and stalls blocks at random. Every call's rows are checked.
"""

from __future__ import annotations

import signal
import time

import numpy as np
import pytest
import torch

from fastkern import Communicator
from fastkern.kernels import _host
from fastkern.planner import Topology, plan
from tests.processes import Pool
from tests.reference import Matrix, Rows, random_inputs, reference_all_to_all

CANARY = -77


# -- F12: equality spins ---------------------------------------------------------------------------


def thousand_calls(rank: int, num_ranks: int) -> int:
    with Communicator(servers=2, policy="whole", entry_timeout_s=30) as comm:
        for call in range(1000):
            source = torch.tensor([[call, rank, dst] for dst in range(num_ranks)])
            out = torch.full((num_ranks, 3), CANARY)
            comm.all_to_all_single(out, source)
            assert out.tolist() == [[call, src, rank] for src in range(num_ranks)]
        return comm._runtime.epoch


def test_f12_a_worker_stopped_between_polls_misses_no_flag(four: Pool) -> None:
    """Rank 1 is stopped for 50 ms now and then, wherever it is, in 1000 calls."""
    four.start(thousand_calls)
    num_stops, end = 0, time.monotonic() + 60
    while not four.answered() and time.monotonic() < end:
        four.send_signal(1, signal.SIGSTOP)
        time.sleep(0.05)
        four.send_signal(1, signal.SIGCONT)
        num_stops += 1
        time.sleep(0.01)
    assert [o.value or repr(o.error) for o in four.finish(60)] == [1000] * 4
    assert num_stops >= 3, "the calls were over before a worker was stopped"


def cluster(
    matrices: list[Matrix],
    launch: _host.LaunchOptions,
    delays_us: list[list[int]],
    policy: str = "whole",
    chunk_rows: int = 2,
    row_bytes: int = 24,
) -> None:
    """Calls back to back on ranks as threads, 2 servers of 2; every call's rows are checked."""
    rng = np.random.default_rng(len(matrices))
    plans = {}
    calls, expected, outputs = [], [], []
    for traffic, delay_us in zip(matrices, delays_us, strict=True):
        key = traffic.tobytes()
        if key not in plans:
            made = plan(
                traffic,
                Topology(2, 2),
                row_bytes,
                policy,  # type: ignore[arg-type]
                chunk_bytes=chunk_rows * row_bytes,
            )
            plans[key] = [made.table(rank).bytes for rank in range(4)]
        inputs = random_inputs(traffic, row_bytes, rng)
        expected.append(reference_all_to_all(traffic, inputs))
        outputs.append([np.full(e.size, 0xEE, dtype=np.uint8) for e in expected[-1]])
        calls.append((plans[key], [i.reshape(-1) for i in inputs], outputs[-1], delay_us))
    assert _host.run_cluster(calls, launch, 20_000_000_000) == ""
    for call, (got, rows) in enumerate(zip(outputs, expected, strict=True)):
        for rank in range(4):
            assert_rows(got[rank], rows[rank], f"call {call}, rank {rank}")


def assert_rows(got: Rows, expected: Rows, what: str) -> None:
    assert np.array_equal(got, expected.reshape(-1)), what


def test_f12_a_thousand_calls_with_stalls_and_a_slow_rank() -> None:
    rng = np.random.default_rng(12)
    few = [rng.integers(0, 6, (4, 4), dtype=np.int64) for _ in range(5)]
    matrices = [few[call % 5] for call in range(1000)]
    delays = [[0, 50_000 if call % 25 == 0 else 0, 0, 0] for call in range(1000)]
    cluster(matrices, _host.LaunchOptions(transport="shuffled", seed=12), delays)


# -- F13: stale flags ------------------------------------------------------------------------------


def slow_reader(rank: int, num_ranks: int, policy: str) -> None:
    """Three calls of other rows and counts; rank 1 sleeps before each."""
    with Communicator(
        servers=2,
        policy=policy,  # type: ignore[arg-type]
        chunk_bytes=64,  # 4 rows of 16 bytes
        entry_timeout_s=20,
    ) as comm:
        for call in range(3):
            traffic = [[12 + (src + dst + call) % 5 for dst in range(4)] for src in range(4)]
            sent, received = traffic[rank], [row[rank] for row in traffic]
            source = [[call, 100 * rank + dst] for dst in range(4) for _ in range(sent[dst])]
            expected = [[call, 100 * src + rank] for src in range(4) for _ in range(received[src])]
            out = torch.full((sum(received), 2), CANARY)
            if rank == 1:
                time.sleep(0.1)
            comm.all_to_all_single(out, torch.tensor(source), received, sent)
            made = comm.stats.plan
            assert made is not None
            num_chunks = made.table(rank).records("stages")
            assert max(stage["num_chunks"] for stage in num_chunks) >= 3
            assert out.tolist() == expected, f"call {call}"


@pytest.mark.parametrize("policy", ["whole", "split", "direct", "spreadout"])
def test_f13_three_calls_and_a_slow_reader(four: Pool, policy: str) -> None:
    four.run(slow_reader, policy)


@pytest.mark.parametrize("policy", ["whole", "split", "direct", "spreadout"])
@pytest.mark.parametrize("slow", range(4))
def test_f13_three_calls_and_a_slow_rank_on_a_network_without_order(policy: str, slow: int) -> None:
    rng = np.random.default_rng(slow)
    matrices = [rng.integers(6, 14, (4, 4), dtype=np.int64) for _ in range(3)]
    delays = [[100_000 if rank == slow else 0 for rank in range(4)]] * 3
    launch = _host.LaunchOptions(num_blocks=2, transport="shuffled", seed=slow)
    cluster(matrices, launch, delays, policy)


# -- F14: late zeroing -----------------------------------------------------------------------------


def late_first_use(rank: int, num_ranks: int, policy: str) -> None:
    """Rank 2 has the communicator but does not use it yet; its peers send at once."""
    with Communicator(
        servers=2,
        policy=policy,  # type: ignore[arg-type]
        buffer_bytes=1 << 20,
        entry_timeout_s=20,
        progress_timeout_s=5,
    ) as comm:
        if rank == 2:
            time.sleep(0.2)
        out = torch.full((num_ranks,), CANARY)
        comm.all_to_all_single(out, torch.arange(num_ranks) + 10 * rank)
        assert out.tolist() == [10 * src + rank for src in range(num_ranks)]


@pytest.mark.parametrize("policy", ["whole", "direct"])
def test_f14_signals_sent_before_the_first_use_are_not_erased(four: Pool, policy: str) -> None:
    for _ in range(5):
        four.run(late_first_use, policy)


# -- F15: out-of-order chunks ----------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["whole", "split", "direct", "spreadout"])
def test_f15_chunks_that_arrive_in_any_order(policy: str) -> None:
    """Puts land one by one in random order, flags with them: 4 to 6 chunks to each peer."""
    rng = np.random.default_rng(15)
    delays = [[0] * 4] * 4
    for seed in range(15):
        matrices = [rng.integers(8, 12, (4, 4), dtype=np.int64) for _ in range(4)]
        blocks = 1 + seed % 3
        launch = _host.LaunchOptions(num_blocks=blocks, transport="shuffled", seed=seed)
        cluster(matrices, launch, delays, policy)


def test_f15_has_at_least_four_chunks_to_a_peer() -> None:
    made = plan(np.full((4, 4), 8), Topology(2, 2), 24, "direct", chunk_bytes=48)
    put = made.table(0).records("queues")[2]  # pack, push, put, ...
    stages = made.table(0).records("stages")[put["first_stage"] :][: put["num_stages"]]
    assert [stage["num_chunks"] for stage in stages] == [4, 4]
