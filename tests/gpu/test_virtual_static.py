"""Static exchanges of a cluster on one GPU: the bits of eager calls, run and replayed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from fastkern.device.driver import Driver
from fastkern.device.virtual_cluster import VirtualCluster
from fastkern.planner import Topology
from tests.device.virtual_cases import options
from tests.device.virtual_static_cases import (
    CASES,
    PLANNERS,
    StaticCase,
    check_static_replays,
    check_steps,
)
from tests.device.virtual_static_failures import (
    check_missing_static_rank,
    check_withheld_static_flag,
)

SHAPES = ((1, 1), (1, 4), (3, 1), (2, 2), (2, 3), (3, 2), (4, 2))  # servers x ranks
LANES = {"cxx": (512, 64, 128), "triton": (256, 64, 256)}  # each in Triton is compiled


def virtual(gpu: Driver, shape: tuple[int, int], *grid: int, **given: Any) -> VirtualCluster:
    with_time = options(progress_timeout_s=10.0, **given)
    return VirtualCluster(gpu, Topology(*shape), *grid, options=with_time)


@pytest.mark.parametrize("planner", PLANNERS)
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: f"{shape[0]}x{shape[1]}")
def test_runs_and_replays(gpu: Driver, shape: tuple[int, int], planner: str) -> None:
    rng, turn = np.random.default_rng(SHAPES.index(shape)), SHAPES.index(shape)
    with virtual(gpu, shape) as cluster:
        most = cluster.most_blocks
    for k, blocks in enumerate((1, max(1, most // 2), most)):
        case = replace(CASES[(3 * turn + k) % len(CASES)], planner=planner)
        with virtual(gpu, shape, blocks, LANES[gpu.kernels][k], chunk_bytes=300) as cluster:
            check_steps(cluster, case, 5, rng)
            check_static_replays(cluster, case, 5, rng)


@pytest.mark.parametrize("planner", PLANNERS)
def test_rows_of_real_width(gpu: Driver, planner: str) -> None:
    case = StaticCase(planner, topk=8, num_experts=64, most=16, dtypes=CASES[2].dtypes, width=7168)
    with virtual(gpu, (2, 4), 4) as cluster:
        check_static_replays(cluster, case, 4, np.random.default_rng(2))


@pytest.mark.parametrize("planner", PLANNERS)
@pytest.mark.parametrize("shape", [(2, 2), (1, 3)], ids=lambda shape: f"{shape[0]}x{shape[1]}")
def test_a_rank_that_does_not_enter_is_named(
    gpu: Driver, shape: tuple[int, int], planner: str
) -> None:
    record = check_missing_static_rank(gpu, Topology(*shape), planner, num_blocks=2, timeout_s=0.3)
    assert 0.3 < record.waited_s < 10


def test_a_flag_that_never_comes_is_named(gpu: Driver) -> None:
    record = check_withheld_static_flag(gpu, num_blocks=2, timeout_s=0.3)
    assert record.seen == (2, 1)  # of the combine before
