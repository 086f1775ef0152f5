"""Static exchanges captured into graphs, with the CPU for a device, and what goes wrong in them."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fastkern import Communicator
from fastkern.device.graphs import record_graph
from tests.conftest import SharedPools
from tests.device.communicators import (
    Topology,
    device_communicator,
    leave_work_to_itself,
    message,
    num_ranks,
)
from tests.device.static_cases import (
    StaticCase,
    compare,
    experts,
    inputs,
    received,
    static_of,
    sums_of,
)

PLANNERS = ("device", "host")
TOPOLOGIES: tuple[Topology, ...] = ((1, 3), (2, 1), (2, 2))


class Captured:
    """A dispatch and its combine in a graph, on tensors that stay in place."""

    def __init__(self, comm: Communicator, case: StaticCase) -> None:
        runtime: Any = comm._runtime
        self.comm, self.case = comm, case
        self.driver, self.stream = runtime.driver, runtime.streams.current()
        self.exchange = static_of(comm, case)
        self.given = inputs(case, case.most, torch.Generator().manual_seed(comm.rank))
        self.graph = record_graph(self.driver, self.stream, self.enqueue)

    def enqueue(self) -> None:
        self.got = self.exchange.dispatch(self.given.xs, self.given.idx, self.given.weights)
        weights = self.got.recv_topk_weights if self.case.layout == "expert" else None
        self.sums = self.exchange.combine(self.got.recv_x[0], weights)

    def refill(self, seed: int, empty: bool) -> None:
        """Other tokens; empty: none of them chooses an expert."""
        fresh = inputs(self.case, self.case.most, torch.Generator().manual_seed(seed))
        for old, new in zip(self.given.xs, fresh.xs, strict=True):
            old.copy_(new)
        self.given.idx.copy_(torch.full_like(fresh.idx, -1) if empty else fresh.idx)
        if self.given.weights is not None and fresh.weights is not None:
            self.given.weights.copy_(fresh.weights)

    def replay(self) -> None:
        self.driver.replay(self.graph, self.stream)
        self.driver.synchronize(self.stream)
        self.exchange.check()

    def check(self, what: str) -> None:
        right, y = sums_of(self.comm, self.case, self.given)
        compare(self.case, received(self.case, self.got), right, what)
        assert torch.equal(self.sums, y), what

    def close(self) -> None:
        self.driver.destroy_graph(self.graph)
        self.exchange.close()


def replays(rank: int, ranks: int, servers: int, cases: list[StaticCase]) -> None:
    with device_communicator(servers, num_blocks=2) as comm:
        for case in cases:
            captured = Captured(comm, case)
            for step in range(5):
                captured.refill(100 * step + rank, (step + rank) % 3 == 2)
                captured.replay()
                captured.check(f"{case} replay {step}")
                if step % 2:  # an eager call of the same exchange in between
                    captured.refill(7000 + 100 * step + rank, False)
                    kept = captured.got, captured.sums
                    captured.enqueue()
                    captured.check(f"{case} eager {step}")
                    captured.got, captured.sums = kept
            captured.close()
        del ranks


@pytest.mark.parametrize("planner", PLANNERS)
@pytest.mark.parametrize("topology", TOPOLOGIES, ids=lambda t: f"{t[0]}x{t[1]}")
def test_replays(shared_pools: SharedPools, topology: Topology, planner: str) -> None:
    """Other tokens each time, none on some ranks, the communicator's own calls in between."""
    cases = [
        StaticCase(planner=planner, narrow=False, layout=layout, alignment=alignment)
        for layout, alignment in (("expert", 1), ("expert", 8), ("rank", 1))
    ]
    shared_pools.pool(num_ranks(topology)).run(replays, topology[0], cases, timeout_s=120)


def two_at_once(rank: int, ranks: int, servers: int) -> None:
    """Two exchanges in one graph, their calls interleaved."""
    del ranks
    with device_communicator(servers) as comm:
        a, b = (
            Captured(comm, StaticCase(narrow=False)),
            Captured(comm, StaticCase(narrow=False, planner="host", topk=2)),
        )

        def both() -> None:
            for one in (a, b):
                one.got = one.exchange.dispatch(one.given.xs, one.given.idx, one.given.weights)
            for one in (a, b):
                one.sums = one.exchange.combine(one.got.recv_x[0], one.got.recv_topk_weights)

        graph = record_graph(a.driver, a.stream, both)
        for step in range(4):
            for k, one in enumerate((a, b)):
                one.refill(step + 10 * k + 100 * rank, False)
            a.driver.replay(graph, a.stream)
            a.driver.synchronize(a.stream)
            a.check(f"first, {step}")
            b.check(f"second, {step}")
        a.driver.destroy_graph(graph)
        a.close()
        b.close()


def test_two_exchanges_in_one_graph(shared_pools: SharedPools) -> None:
    shared_pools.pool(4).run(two_at_once, 2)


# -- what goes wrong -------------------------------------------------------------------------------


def bad_calls(rank: int, ranks: int, servers: int, planner: str) -> list[str]:
    """A bad index on one rank, too many rows for one, and good calls after each."""
    del ranks
    case = StaticCase(planner=planner, num_experts=2, topk=2)
    texts = []
    with device_communicator(servers) as comm, static_of(comm, case) as exchange:
        streams = leave_work_to_itself(comm)
        for kind in ("index", "rows"):
            given = inputs(case, case.most, torch.Generator().manual_seed(rank))
            if kind == "rows":
                given.idx[:] = 1  # each token twice
            elif rank == 1:
                given.idx[4, 1] = 2
            exchange.dispatch(given.xs, given.idx, given.weights)
            streams.wait()
            texts.append(message(exchange.check))
            exchange.check()  # it is told once
            good = inputs(case, 5, torch.Generator().manual_seed(rank))
            got = exchange.dispatch(good.xs, good.idx, good.weights)
            z = exchange.combine(experts(case, got.recv_x[0]), got.recv_topk_weights)
            streams.wait()
            streams.waits = True
            exchange.check()
            right, _ = sums_of(comm, case, good)
            compare(case, received(case, got), right, kind)
            z = exchange.combine(experts(case, got.recv_x[0]), got.recv_topk_weights)
            assert torch.equal(z, sums_of(comm, case, good)[1])
            streams.waits = False
        streams.waits = True
    return texts


@pytest.mark.parametrize("planner", PLANNERS)
def test_calls_that_move_nothing(shared_pools: SharedPools, planner: str) -> None:
    """Every rank is told alike; the next calls are good."""
    for texts in shared_pools.pool(2).run(bad_calls, 1, planner):
        index, rows = texts
        assert index == (
            "ValueError: static dispatch: topk_idx[4][1] of rank 1 is neither -1 nor one of 2 "
            "experts; the call moved nothing"
        )
        assert "rank 1 would receive" in rows
        assert rows.endswith("the call moved nothing")


def wrong_arguments(rank: int, ranks: int) -> list[str]:
    with device_communicator(1) as comm:
        case = StaticCase(num_experts=4, topk=2)
        x, expert_out = case.like()
        options = {"topk": 2, "num_experts": 4, "num_max_tokens_per_rank": 9}
        made = [
            lambda: comm.static_exchange(x, **{**options, "topk": 2 + rank}),
            lambda: comm.static_exchange(x, **{**options, "topk": 33}),
            lambda: comm.static_exchange(x, **options, planner="none"),
            lambda: comm.static_exchange(x, **{**options, "num_max_tokens_per_rank": 0}),
            lambda: comm.static_exchange(x, **options, wire_dtype=torch.float32),
            lambda: comm.static_exchange(x, **options, expert_out=x[1]),
            lambda: comm.static_exchange(x, **options, weights_dtype=torch.bfloat16),
            lambda: comm.static_exchange(x, **options, num_blocks=99),
        ]
        texts = [message(call) for call in made]
        with static_of(comm, case) as exchange:
            given = inputs(case, 9, torch.Generator().manual_seed(rank))
            got = exchange.dispatch(given.xs, given.idx, given.weights)
            z = exchange.combine(experts(case, got.recv_x[0]), got.recv_topk_weights)
            assert torch.equal(z, sums_of(comm, case, given)[1])  # none of it did any harm
        texts.append(message(lambda: exchange.dispatch(given.xs, given.idx, given.weights)))
        exchange.close()
        del ranks, expert_out
    return texts


def wrong_call(rank: int, ranks: int, which: int) -> tuple[str, str, float]:
    """Rank 1's arguments are wrong in one call; rank 0 makes a good one."""
    del ranks
    case = StaticCase(num_experts=4, topk=2)
    with device_communicator(1, entry_timeout_s=40.0) as comm:
        exchange = static_of(comm, case)
        options = {"topk": 2, "num_experts": 4, "num_max_tokens_per_rank": 9}
        plain = comm.static_exchange(case.like()[0], **options)
        given = inputs(case, 9, torch.Generator().manual_seed(rank))
        rows = torch.zeros(exchange.num_recv_rows, 5)
        if which > 0:
            exchange.dispatch(given.xs, given.idx, given.weights)
            plain.dispatch(given.xs, given.idx, given.weights)
        calls = [
            lambda: exchange.combine(rows),
            lambda: exchange.dispatch(given.xs[:1], given.idx, given.weights),
            lambda: exchange.dispatch(given.xs, given.idx),
            lambda: exchange.dispatch(given.xs, given.idx[:, :1], given.weights),
            lambda: exchange.combine(rows[1:]),
            lambda: exchange.combine(rows[:, 1:]),
            lambda: exchange.combine(rows.double()),
            lambda: plain.combine(rows),
            lambda: exchange.combine(rows.requires_grad_()),
        ]
        dist.barrier()  # the other has done all that precedes
        begin = time.monotonic()
        if rank == 1:
            text = message(calls[which])
        else:
            text = message(lambda: exchange.dispatch(given.xs, given.idx, given.weights))
        took_s = time.monotonic() - begin
        return text, message(comm.check), took_s


@pytest.mark.parametrize(
    ("which", "part"),
    list(
        enumerate(
            [
                "combine: there was no dispatch before",
                "x has rows [[12]], the exchange was made for [[12], [3]]",
                "topk_weights is None",
                "topk_weights [9, 2]",
                "expert_out [35, 5] must have the 36 rows",
                "expert_out has rows [4], the exchange combines [5]",
                "expert_out is float64, the exchange combines float32",
                "the exchange was made without a combine",
                "this static exchange was made without gradients=True",
            ]
        )
    ),
)
def test_arguments_of_calls(shared_pools: SharedPools, which: int, part: str) -> None:
    """The rank itself names the place; the other is told long before the deadline."""
    (other, other_after, took_s), (text, after, _) = shared_pools.pool(2).run(wrong_call, which)
    assert part in text, text
    assert "rank 1 gave up waiting for other ranks, or left the call" in other, other
    assert "the communicator is broken" in other_after, other_after
    assert "the communicator is broken" in after, after
    assert took_s < 20


def test_arguments(shared_pools: SharedPools) -> None:
    both = shared_pools.pool(2).run(wrong_arguments)
    assert both[0][1:] == both[1][1:]
    expected = [
        "static exchange planned on the device",
        "topk must be 1 to 32, not 33",
        'planner must be "device" or "host"',
        "num_max_tokens_per_rank must be given, and at least 1",
        "wire_dtype is of a combine",
        "expert_out must be float64",
        "weights_dtype must be float32",
        "num_blocks must be 1 to",
        "ClosedError: the static exchange is closed",
    ]
    assert len(both[0]) == len(expected)
    for text, part in zip(both[0], expected, strict=True):
        assert part in text, text


def late(rank: int, ranks: int, planner: str) -> str:
    """The last rank does not come."""
    with device_communicator(1, entry_timeout_s=1.5) as comm:
        case = StaticCase(planner=planner)
        exchange = static_of(comm, case)
        leave_work_to_itself(comm)
        given = inputs(case, 4, torch.Generator().manual_seed(rank))
        if rank < ranks - 1:
            exchange.dispatch(given.xs, given.idx, given.weights)
        end = time.monotonic() + 20
        text = "no error"
        while text == "no error" and time.monotonic() < end:
            time.sleep(0.02)
            text = message(comm.check)
        again = message(lambda: exchange.dispatch(given.xs, given.idx, given.weights))
        assert "the communicator is broken" in again, again
        return text


@pytest.mark.parametrize("planner", PLANNERS)
def test_a_rank_that_does_not_come(shared_pools: SharedPools, planner: str) -> None:
    """Those that wait give up together, and say for whom."""
    texts = shared_pools.pool(3).run(late, planner)
    for text in texts:
        assert text.startswith("DeadlineError: static exchange"), texts
        assert "to enter (flag" in text, texts
        assert "rank 2" in text, texts


def told_at_other_times(rank: int, ranks: int, planner: str) -> str:
    """Rank 0 knows of the refusal before its next call, rank 1 does not."""
    del ranks
    with device_communicator(1) as comm:
        case = StaticCase(planner=planner, num_experts=4, topk=2)
        with static_of(comm, case) as exchange:
            streams = leave_work_to_itself(comm)
            bad = inputs(case, 6, torch.Generator().manual_seed(rank))
            bad.idx[2, 0] = 4 if rank == 1 else -1
            exchange.dispatch(bad.xs, bad.idx, bad.weights)
            if rank == 0:
                streams.wait()
            good = inputs(case, 5, torch.Generator().manual_seed(10 + rank))
            got = exchange.dispatch(good.xs, good.idx, good.weights)
            streams.wait()
            text = message(exchange.check)
            exchange.check()
            streams.waits = True
            z = exchange.combine(experts(case, got.recv_x[0]), got.recv_topk_weights)
            right, y = sums_of(comm, case, good)
            compare(case, received(case, got), right, planner)
            assert torch.equal(z, y)
            return text


@pytest.mark.parametrize("planner", PLANNERS)
def test_a_refusal_that_ranks_learn_of_at_other_times(
    shared_pools: SharedPools, planner: str
) -> None:
    """Nobody leaves out a call because of it."""
    for text in shared_pools.pool(2).run(told_at_other_times, planner):
        assert text.startswith("ValueError: static dispatch: topk_idx[2][0] of rank 1"), text


def captured_behind_a_queue(rank: int, ranks: int) -> str:
    with device_communicator(1) as comm:
        case = StaticCase()
        with static_of(comm, case) as exchange:
            runtime: Any = comm._runtime
            driver, stream = runtime.driver, runtime.streams.current()
            given = inputs(case, 4, torch.Generator().manual_seed(rank))
            x = torch.ones(ranks, 2)
            comm.turns._queued += 1  # as if a call were under way
            text = message(
                lambda: record_graph(
                    driver, stream, lambda: exchange.dispatch(given.xs, given.idx, given.weights)
                )
            )
            comm.turns._queued -= 1
            comm.all_to_all_single(torch.empty_like(x), x)
            return text


def test_a_capture_while_calls_are_queued_is_refused(shared_pools: SharedPools) -> None:
    for text in shared_pools.pool(2).run(captured_behind_a_queue):
        assert "calls of the communicator are queued" in text
