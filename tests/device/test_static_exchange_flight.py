"""Static exchanges: several dispatches in flight, and ranks that differ around their calls."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fastkern import Communicator
from fastkern.device.graphs import record_graph
from fastkern.device.host_driver import HostDriver
from tests.conftest import SharedPools
from tests.device.communicators import (
    device_communicator,
    leave_work_to_itself,
    message,
    on_device,
)
from tests.device.static_cases import (
    StaticCase,
    experts,
    inputs,
    static_of,
    sums_of,
)
from tests.processes import Pool

PLANNERS = ("device", "host")
planners = pytest.mark.parametrize("planner", PLANNERS)


def rounds(rank: int, ranks: int, servers: int, planner: str) -> None:
    """Three dispatches, then their combines, last and first and middle, twice."""
    del ranks
    with device_communicator(servers) as comm:
        case = StaticCase(planner=planner)
        first = static_of(comm, case)
        all_of_them = [first, first.sibling(), first.sibling()]
        assert len({id(exchange.heap) for exchange in all_of_them}) == 1
        for step in range(2):
            given = [
                inputs(case, 3 + k, torch.Generator().manual_seed(100 * step + 10 * k + rank))
                for k in range(3)
            ]
            got = [
                exchange.dispatch(g.xs, g.idx, g.weights)
                for exchange, g in zip(all_of_them, given, strict=True)
            ]
            for k in (2, 0, 1):
                z = all_of_them[k].combine(
                    experts(case, got[k].recv_x[0]), got[k].recv_topk_weights
                )
                assert torch.equal(z, sums_of(comm, case, given[k])[1]), (step, k)
        first.close()  # the others go on with its heap
        g = inputs(case, 4, torch.Generator().manual_seed(rank))
        got_last = all_of_them[1].dispatch(g.xs, g.idx, g.weights)
        z = all_of_them[1].combine(experts(case, got_last.recv_x[0]), got_last.recv_topk_weights)
        assert torch.equal(z, sums_of(comm, case, g)[1])
        for exchange in all_of_them:
            exchange.close()


@planners
@pytest.mark.parametrize("servers", [1, 2])
def test_siblings(shared_pools: SharedPools, servers: int, planner: str) -> None:
    shared_pools.pool(2 * servers).run(rounds, servers, planner)


def detached(rank: int, ranks: int) -> list[bool]:
    """Rank 1 has no experts, and what its layer returns hangs on nothing; then all detach."""
    del ranks
    alike = []
    with device_communicator(1, progress_timeout_s=8.0) as comm:
        case = StaticCase(gradients=True, num_experts=4, topk=2, expert_to_rank=(0, 0, 0, 0))
        with static_of(comm, case) as exchange:
            for cut in (rank == 1, True):
                given = inputs(case, 5, torch.Generator().manual_seed(rank))
                grads = []
                for static in (False, True):
                    x = given.xs[0].clone().requires_grad_()
                    if static:
                        got = exchange.dispatch([x, given.xs[1]], given.idx, given.weights)
                        recv, weights = got.recv_x[0], got.recv_topk_weights
                    else:
                        (recv, _), weights, _, handle = comm.dispatch(
                            [x, given.xs[1]], given.idx, given.weights, **case.options()
                        )
                    y = experts(case, recv.detach() if cut else recv)
                    if static:
                        y = exchange.combine(y, weights)
                    else:
                        y = comm.combine(y, handle, weights=weights)
                    y.square().sum().backward()
                    assert x.grad is not None
                    grads.append(x.grad)
                alike.append(torch.equal(*grads))
    return alike


def test_gradients_where_nothing_hangs_on_what_was_received(shared_pools: SharedPools) -> None:
    """Every rank makes the same exchanges, as with the communicator's own calls."""
    assert shared_pools.pool(2).run(detached) == [[True, True]] * 2


def of_another(rank: int, ranks: int, planner: str) -> str:
    """A combine for 2 tokens, when a replay for 9 was the last dispatch."""
    del ranks
    with device_communicator(1) as comm:
        case = StaticCase(planner=planner)
        with static_of(comm, case) as exchange:
            runtime: Any = comm._runtime
            driver, stream = runtime.driver, runtime.streams.current()
            many = inputs(case, 9, torch.Generator().manual_seed(rank))
            kept: list[Any] = []
            graph = record_graph(
                driver,
                stream,
                lambda: kept.append(exchange.dispatch(many.xs, many.idx, many.weights)),
            )
            right = sums_of(comm, case, many)[1]
            few = inputs(case, 2, torch.Generator().manual_seed(rank))
            got = exchange.dispatch(few.xs, few.idx, few.weights)
            leave_work_to_itself(comm)
            driver.replay(graph, stream)
            room = torch.full((9, 5), 7.0)
            exchange.combine(experts(case, got.recv_x[0]), got.recv_topk_weights, out=room[:2])
            driver.synchronize(stream)
            assert (room[2:] == 7).all()
            text = message(exchange.check)
            # The wrong one has spoiled nothing: that of the replay is right at once.
            z = exchange.combine(
                experts(case, kept[0].recv_x[0]), kept[0].recv_topk_weights, of=kept[0]
            )
            driver.synchronize(stream)
            exchange.check()
            assert torch.equal(z, right)
            driver.replay(graph, stream)  # and its own combine is right
            driver.synchronize(stream)
            z = exchange.combine(
                experts(case, kept[0].recv_x[0]), kept[0].recv_topk_weights, of=kept[0]
            )
            driver.synchronize(stream)
            exchange.check()
            runtime.streams.waits = True
            assert torch.equal(z, right)
            driver.destroy_graph(graph)
    return text


@planners
def test_a_combine_of_another_dispatch(shared_pools: SharedPools, planner: str) -> None:
    """It is told of, and writes no more rows than there are."""
    for text in shared_pools.pool(2).run(of_another, planner):
        assert "belongs to another dispatch than the last one" in text


def nothing_moved(rank: int, ranks: int, planner: str) -> bool:
    """A bad index: a training step that goes on sums zeros."""
    del ranks
    with device_communicator(1) as comm:
        case = StaticCase(planner=planner, gradients=True)
        with static_of(comm, case) as exchange:
            streams = leave_work_to_itself(comm)
            given = inputs(case, 6, torch.Generator().manual_seed(rank))
            given.idx[0, 0] = 99 if rank == 1 else 0
            got = exchange.dispatch(given.xs, given.idx, given.weights)
            streams.wait()
            assert not got.tokens_per_expert.any()
            rows = torch.ones(exchange.num_recv_rows, 5)
            y = exchange.combine(rows, torch.ones(exchange.num_recv_rows))
            streams.wait()
            assert message(exchange.check).startswith("ValueError: static dispatch: topk_idx[0][0]")
            streams.waits = True
            return bool(y.any())


@planners
def test_sums_of_a_call_that_moves_nothing_are_zeros(
    shared_pools: SharedPools, planner: str
) -> None:
    assert shared_pools.pool(2).run(nothing_moved, planner) == [False, False]


def fails_alone(rank: int, ranks: int) -> tuple[str, float]:
    """Rank 1 has no memory for its outputs: the others do not wait for it to the deadline."""
    del ranks
    with device_communicator(1, entry_timeout_s=30.0) as comm:
        case = StaticCase()
        exchange = static_of(comm, case)
        given = inputs(case, 4, torch.Generator().manual_seed(rank))
        if rank == 1:
            site: Any = exchange._site
            site.fill = _no_memory
        dist.barrier()  # the others have made theirs
        begin = time.monotonic()
        text = message(lambda: exchange.dispatch(given.xs, given.idx, given.weights))
        took_s = time.monotonic() - begin
        assert "broken" in message(lambda: comm.barrier())
        return text, took_s


def _no_memory(*_: object) -> None:
    raise MemoryError("as wished")


def test_an_error_on_one_rank_is_told_to_the_others(shared_pools: SharedPools) -> None:
    (first, took_s), (second, _), _ = shared_pools.pool(3).run(fails_alone)
    assert "as wished" in second
    assert "rank 1 gave up waiting for other ranks, or left the call" in first
    assert took_s < 15


def comes_late(rank: int, ranks: int, planner: str) -> None:
    """Between dispatch and combine one rank is busy for longer than the progress deadline."""
    with device_communicator(1, progress_timeout_s=0.7, entry_timeout_s=40.0) as comm:
        case = StaticCase(planner=planner)
        with static_of(comm, case) as exchange:
            given = inputs(case, 4, torch.Generator().manual_seed(rank))
            got = exchange.dispatch(given.xs, given.idx, given.weights)
            if rank == ranks - 1:
                time.sleep(2.5)
            z = exchange.combine(experts(case, got.recv_x[0]), got.recv_topk_weights)
            assert torch.equal(z, sums_of(comm, case, given)[1])


@planners
def test_a_rank_may_come_late_to_a_combine(shared_pools: SharedPools, planner: str) -> None:
    shared_pools.pool(3).run(comes_late, planner)


def of_others(rank: int, ranks: int) -> list[str]:
    del ranks
    texts = []
    for wrong_type in (False, True):
        with device_communicator(1) as comm:
            case = StaticCase()
            a, b = static_of(comm, case), static_of(comm, case)
            given = inputs(case, 4, torch.Generator().manual_seed(rank))
            got = a.dispatch(given.xs, given.idx, given.weights)
            b.dispatch(given.xs, given.idx, given.weights)
            rows = experts(case, got.recv_x[0])
            of: Any = rows if wrong_type else got
            dist.barrier()  # the other has done all that precedes
            texts.append(message(lambda: b.combine(rows, of=of)))  # noqa: B023 - called at once
    return texts


def test_what_another_exchange_gave_is_refused(shared_pools: SharedPools) -> None:
    for texts in shared_pools.pool(2).run(of_others):
        assert texts[0] == ("ValueError: of: given by static exchange 1, this is static exchange 2")
        assert texts[1].startswith("TypeError: of must be what dispatch gave")


def closed(rank: int, ranks: int) -> list[str]:
    """Calls of exchanges that are closed, here or on one rank; bad arguments of one rank."""
    del ranks
    with device_communicator(1) as comm:
        case = StaticCase()
        a, b = static_of(comm, case), static_of(comm, case)
        given = inputs(case, 4, torch.Generator().manual_seed(rank))
        got = a.dispatch(given.xs, given.idx, given.weights)
        b.dispatch(given.xs, given.idx, given.weights)
        rows = experts(case, got.recv_x[0])
        texts = []
        if rank == 1:
            b.close()
        texts.append(message(b.sibling))
        b.close()
        texts += [message(b.sibling), message(b.check)]
        z = a.combine(rows, got.recv_topk_weights)
        assert torch.equal(z, sums_of(comm, case, given)[1])
        texts.append(
            message(
                lambda: comm.static_exchange(
                    None if rank else given.xs,  # type: ignore[arg-type]
                    topk=3,
                    num_experts=7,
                    num_max_tokens_per_rank=9,
                )
            )
        )
        a.close()
        return texts


def test_closed_exchanges(shared_pools: SharedPools) -> None:
    first, second = shared_pools.pool(2).run(closed)
    for texts in (first, second):
        assert "static exchange 2 is closed" in texts[0]
        assert "static exchange 2 is closed" in texts[1]
        assert texts[2] == "ClosedError: static exchange 2 is closed"
        assert "NoneType" in texts[3]


def dies(rank: int, ranks: int, planner: str) -> tuple[str, float]:
    """The last rank is killed, its dispatch not made; the host waits for nothing of it."""
    driver = HostDriver(most_lanes=2)
    options = {"progress_timeout_s": 1.0, "entry_timeout_s": 100.0}
    with Communicator(**on_device(driver, 2, options)) as comm:
        case = StaticCase(planner=planner)
        exchange = static_of(comm, case)
        given = inputs(case, 4, torch.Generator().manual_seed(rank))
        dist.barrier()
        if rank == ranks - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        begin = time.monotonic()
        text = message(lambda: exchange.dispatch(given.xs, given.idx, given.weights))
        return text, time.monotonic() - begin


@planners
def test_a_rank_that_dies(mortal_four: Pool, planner: str) -> None:
    """Whoever waits for it is let go long before the entry deadline."""
    *living, _ = mortal_four.outcomes(dies, planner)
    for outcome in living:
        assert outcome.error is None, outcome
        text, took_s = outcome.value
        assert "rank 3, whose process has ended" in text or "gave up waiting" in text, text
        assert took_s < 30
    assert any("rank 3, whose process has ended" in o.value[0] for o in living), living
