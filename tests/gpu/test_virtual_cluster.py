"""The kernels on a GPU that holds all ranks, against the definition: a cut of perf/gpu_check.sh."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from fastkern.device.driver import Driver
from fastkern.device.virtual_cluster import VirtualCluster
from fastkern.planner import Topology
from tests.device.virtual_cases import (
    DTYPES,
    POLICIES,
    SHAPES,
    check_all_to_all,
    check_moe,
    check_random_traffic,
    options,
)
from tests.device.virtual_sequences import (
    OPS,
    check_missing_rank,
    check_replays,
    check_withheld_flag,
)
from tests.moe_case_list import NAMED
from tests.moe_cases import Data
from tests.reference import KINDS, random_traffic

LANES = {"cxx": (512, 64, 128), "triton": (256, 64, 256)}  # each in Triton is compiled
MORE_SHAPES = (*SHAPES, (2, 4), (1, 8))


def virtual(gpu: Driver, shape: tuple[int, int], *grid: int, **given: Any) -> VirtualCluster:
    with_time = options(progress_timeout_s=10.0, **given)
    return VirtualCluster(gpu, Topology(*shape), *grid, options=with_time)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("shape", MORE_SHAPES, ids=lambda shape: f"{shape[0]}x{shape[1]}")
def test_all_to_all(gpu: Driver, shape: tuple[int, int], policy: str) -> None:
    rng = np.random.default_rng(MORE_SHAPES.index(shape))
    with virtual(gpu, shape) as cluster:
        most = cluster.most_blocks
    for blocks, lanes in zip((1, max(1, most // 2), most), LANES[gpu.kernels], strict=True):
        with virtual(gpu, shape, blocks, lanes, policy=policy, chunk_bytes=3000) as cluster:
            for _ in range(2):
                check_random_traffic(cluster, rng, max_rows=60, max_width=2000)


def test_every_kind_of_traffic_and_dtype(gpu: Driver) -> None:
    rng = np.random.default_rng(5)
    with virtual(gpu, (2, 4), 2) as cluster:
        for kind in KINDS:
            check_random_traffic(cluster, rng, max_rows=30, max_width=300, kind=kind)
        for dtype in DTYPES:
            check_all_to_all(cluster, random_traffic(2, 4, rng, 9), (3, 5), dtype, rng)


@pytest.mark.parametrize("case", NAMED, ids=lambda case: case.name)
def test_dispatch_and_combine(gpu: Driver, case: Any) -> None:
    shape = MORE_SHAPES[1 + case.seed % (len(MORE_SHAPES) - 1)]
    lanes, policy = LANES[gpu.kernels][case.seed % 3], POLICIES[case.seed % 5]
    with virtual(gpu, shape, 1 + case.seed % 4, lanes, policy=policy, chunk_bytes=900) as cluster:
        check_moe(cluster, Data(case, shape[0], shape[0] * shape[1]))


@pytest.mark.parametrize("policy", ["auto", "whole", "split"])
def test_replays(gpu: Driver, policy: str) -> None:
    with virtual(gpu, (2, 2), 2, policy=policy, chunk_bytes=2000) as cluster:
        check_replays(cluster, np.random.default_rng(7), most_rows=60, row_bytes=900)


@pytest.mark.parametrize("op", OPS)
def test_a_rank_that_does_not_run_ends_in_a_record(gpu: Driver, op: str) -> None:
    record = check_missing_rank(gpu, Topology(2, 2), op, num_blocks=2, timeout_s=0.3)
    assert 0.1 < record.waited_s < 10


def test_a_flag_that_never_comes_is_named(gpu: Driver) -> None:
    assert check_withheld_flag(gpu, num_blocks=2, timeout_s=0.3).seen == (1, 1)


def test_more_blocks_than_fit_are_refused(gpu: Driver) -> None:
    with virtual(gpu, (2, 2)) as cluster:
        most = cluster.most_blocks
    with virtual(gpu, (2, 2), 4 * most + 4) as cluster, pytest.raises(ValueError, match="at once"):
        cluster.prepare_all_to_all(np.ones((4, 4)), 8)
