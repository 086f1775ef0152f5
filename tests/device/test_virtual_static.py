"""Static exchanges of a virtual cluster, on the CPU: the same bits as the cluster's eager calls."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from fastkern.device.host_driver import HostDriver
from fastkern.device.static_tables import DirectPlan
from fastkern.device.virtual_cluster import VirtualCluster
from fastkern.kernels import _host
from fastkern.planner import Topology
from tests.device.virtual_cases import FILL, check_random_traffic, options
from tests.device.virtual_static_cases import (
    CASES,
    PLANNERS,
    StaticCase,
    check_result,
    check_static_replays,
    check_steps,
    draw,
    steps,
    write,
)

TEAM = _host.lanes_of_team()
TOPOLOGIES = ((1, 1), (1, 4), (3, 1), (2, 2), (2, 3), (3, 2), (4, 2))  # servers x ranks
GRIDS = ((1, 1), (2, 3), (4, 2), (3, 1), (1, 16))  # blocks of a rank, lanes of a block
MOST_THREADS = 64  # of a launch, where lanes are threads
every_planner = pytest.mark.parametrize("planner", PLANNERS)


def ids(shape: tuple[int, int]) -> str:
    return f"{shape[0]}x{shape[1]}"


@pytest.fixture
def driver() -> Iterator[HostDriver]:
    """Blocks of up to 16 lanes; a test that leaves anything behind fails."""
    made = HostDriver(most_lanes=16)
    yield made
    left = made.leftovers()
    made.close()
    assert left == []


def virtual(driver: HostDriver, shape: tuple[int, int], *grid: int, **given: Any) -> VirtualCluster:
    return VirtualCluster(driver, Topology(*shape), *grid, options=options(**given))


@every_planner
@pytest.mark.parametrize("shape", TOPOLOGIES, ids=ids)
def test_the_bits_of_eager_calls(driver: HostDriver, shape: tuple[int, int], planner: str) -> None:
    """Every kind of choices and token counts, step after step on one exchange."""
    rng = np.random.default_rng(shape[0] * 10 + shape[1])
    turn = TOPOLOGIES.index(shape) + 5 * PLANNERS.index(planner)
    for k in range(5):
        case = replace(CASES[(turn * 5 + k) % len(CASES)], planner=planner)
        blocks, lanes = GRIDS[(turn + k) % len(GRIDS)]
        lanes = min(lanes, max(1, MOST_THREADS // (shape[0] * shape[1] * blocks)))
        chunk_bytes = (100, 300, 1 << 17)[(turn + k) % 3]
        with virtual(driver, shape, blocks, lanes, chunk_bytes=chunk_bytes) as cluster:
            check_steps(cluster, case, 5, rng)


@every_planner
@pytest.mark.parametrize("case", CASES, ids=range(len(CASES)))
def test_every_case_between_servers(driver: HostDriver, case: StaticCase, planner: str) -> None:
    shape, blocks = ((2, 2), (3, 2))[CASES.index(case) % 2], 1 + CASES.index(case) % 4
    with virtual(driver, shape, blocks, 2, chunk_bytes=200) as cluster:
        check_steps(cluster, replace(case, planner=planner), 5, np.random.default_rng(3))


@every_planner
@pytest.mark.parametrize("shape", TOPOLOGIES, ids=ids)
def test_replays_of_a_captured_call(
    driver: HostDriver, shape: tuple[int, int], planner: str
) -> None:
    rng = np.random.default_rng(shape[0] * 10 + shape[1])
    turn = TOPOLOGIES.index(shape)
    case = replace(CASES[(3 * turn) % len(CASES)], planner=planner)
    with virtual(driver, shape, 1 + turn % 4, 1 + turn % 3, chunk_bytes=300) as cluster:
        check_static_replays(cluster, case, 6, rng)


@every_planner
@pytest.mark.parametrize(
    ("shape", "blocks", "teams"), [((1, 2), 1, 4), ((2, 2), 2, 1), ((3, 1), 1, 2)]
)
def test_blocks_of_teams(shape: tuple[int, int], blocks: int, teams: int, planner: str) -> None:
    """Lanes that step together, wide accesses: as on devices."""
    driver = HostDriver(most_lanes=4 * TEAM, teams=True)
    for k in range(shape[0], len(CASES), 3):
        case = replace(CASES[k], planner=planner)
        with virtual(driver, shape, blocks, teams * TEAM, chunk_bytes=500) as cluster:
            check_steps(cluster, case, 3, np.random.default_rng(k))
    assert driver.leftovers() == []
    driver.close()


@every_planner
def test_two_exchanges_take_turns_with_eager_calls(driver: HostDriver, planner: str) -> None:
    rng = np.random.default_rng(5)
    cases = [StaticCase(planner=planner), StaticCase(planner=planner, layout="rank", most=4)]
    with virtual(driver, (2, 2), 2, 2) as cluster:
        exchanges = [cluster.static_exchange(case.shape(4)) for case in cases]
        drawn = [list(steps(case, 4, 4, rng)) for case in cases]
        for k in range(4):
            for exchange, own in zip(exchanges, drawn, strict=True):
                write(exchange, own[k])
            for exchange in exchanges:
                exchange.run()
            for case, exchange, own in zip(cases, exchanges, drawn, strict=True):
                check_result(cluster, exchange, case, own[k])
            check_random_traffic(cluster, rng, 9, 40)
        for exchange in exchanges:
            exchange.close()


@every_planner
@pytest.mark.parametrize("alignment", [1, 16])
def test_the_worst_case_of_rows_is_filled(driver: HostDriver, alignment: int, planner: str) -> None:
    """Every rank has as many tokens as may be, and all go to both experts of rank 1."""
    case = StaticCase(planner=planner, alignment=alignment, num_experts=8)
    rng = np.random.default_rng(6)
    with virtual(driver, (2, 2), 2, 2, chunk_bytes=300) as cluster:
        exchange = cluster.static_exchange(case.shape(4))
        step = draw(case, [case.most] * 4, "none", rng, torch.int64)
        for idx in step.idx:
            idx[:, 0], idx[:, 2] = 3, 2
        write(exchange, step)
        exchange.run()
        check_result(cluster, exchange, case, step)
        tokens = exchange.read().tokens_per_expert
        assert [t.tolist() for t in tokens] == [[0, 0], [36, 36], [0, 0], [0, 0]]
        assert exchange.shape.most_rows(4)[1] == (72 if alignment == 1 else 112)
        exchange.close()


@every_planner
def test_many_calls_in_a_row(driver: HostDriver, planner: str) -> None:
    """What a call counts is not left to the next one: there is room for one, mostly for sums."""
    case = StaticCase(planner=planner, dtypes=(torch.bfloat16,), width=128, weights=None)
    rng = np.random.default_rng(11)
    with virtual(driver, (2, 2), 2, 1) as cluster:
        exchange = cluster.static_exchange(case.shape(4))
        step = draw(case, [case.most] * 4, "distinct", rng, torch.int64)
        write(exchange, step)
        exchange.capture()
        for k in range(30):
            (exchange.run if k % 2 else exchange.replay)()
        check_result(cluster, exchange, case, step)
        exchange.close()


def test_a_call_writes_over_nothing_that_stays(driver: HostDriver) -> None:
    """Records, bases and placement on the device are those of the beginning, tables but for rows of
    streams and segments."""
    case, shape = StaticCase(alignment=16), (2, 3)
    experts = dict.fromkeys(("owner", "local_index", "expert_order"), 4 * case.num_experts)
    ranks = dict.fromkeys(("most_rows", "window_base", "list_base"), 8 * 6)
    fixed = experts | ranks | {"return_base": 8 * 2, "partial_base": 8 * 3}
    with virtual(driver, shape, 2, 2, chunk_bytes=300) as cluster:
        exchange = cluster.static_exchange(case.shape(6))
        tables = [DirectPlan(exchange.shape, cluster.topology, 300).tables(r) for r in range(6)]

        def kept(rank: int) -> list[bytes]:
            at, read, patches = (
                exchange.memory.rank[rank],
                cluster.copier.read,
                tables[rank].patches,
            )
            words = read(at["tables"], tables[rank].num_bytes).view(np.uint64)
            words[patches[:, 0]] = 0
            found = [read(at[name], size).tobytes() for name, size in fixed.items()]
            return [*found, words.tobytes(), read(at["patches"], patches.nbytes).tobytes()]

        before = [kept(rank) for rank in range(6)]
        assert all(len(content) for content in before[0])
        for step in steps(case, 6, 5, np.random.default_rng(7)):
            write(exchange, step)
            exchange.run()
        assert [kept(rank) for rank in range(6)] == before
        exchange.close()


def test_what_is_captured_reads_the_inputs_of_its_own_time(driver: HostDriver) -> None:
    """Negative control: a replay is of what was last written, and of nothing else."""
    case, rng = StaticCase(), np.random.default_rng(8)
    with virtual(driver, (2, 2), 1, 1) as cluster:
        exchange = cluster.static_exchange(case.shape(4))
        old, new = (draw(case, [3, 1, 4, 1], "distinct", rng, torch.int64) for _ in range(2))
        write(exchange, old)
        exchange.capture()
        assert all((recv[0].view(torch.uint8) == FILL).all() for recv in exchange.read().recv)
        write(exchange, new)
        exchange.replay()
        check_result(cluster, exchange, case, new)
        with pytest.raises(AssertionError):
            check_result(cluster, exchange, case, old)
        exchange.close()
