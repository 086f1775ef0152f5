"""Kernels on blocks of several lanes to a team: copies, wide accesses and team operations as on
devices. Each lane is a thread, so cases are few and small.
"""

from __future__ import annotations

import numpy as np
import pytest

from fastkern.device.host_driver import HostDriver
from fastkern.device.virtual_cluster import VirtualCluster
from fastkern.kernels import _host
from fastkern.planner import Topology
from tests.device.virtual_cases import check_moe, check_random_traffic, options
from tests.moe_case_list import NAMED, random_cases
from tests.moe_cases import Data
from tests.moe_tables import narrowed

TEAM = _host.lanes_of_team()
GRIDS = [((1, 2), 1, 1), ((2, 1), 2, 1), ((2, 2), 1, 2), ((1, 3), 1, 2), ((3, 1), 1, 1)]


def cluster_of(shape: tuple[int, int], num_blocks: int, num_teams: int) -> VirtualCluster:
    return VirtualCluster(
        HostDriver(most_lanes=4 * TEAM, teams=True),
        Topology(*shape),
        num_blocks,
        num_teams * TEAM,
        options=options(policy="whole", chunk_bytes=500),
    )


@pytest.mark.parametrize(("shape", "num_blocks", "num_teams"), GRIDS)
def test_dispatch_and_combine(shape: tuple[int, int], num_blocks: int, num_teams: int) -> None:
    with cluster_of(shape, num_blocks, num_teams) as cluster:
        for case in random_cases(70 + 10 * shape[0] + shape[1], 4):
            check_moe(cluster, Data(narrowed(case), shape[0], shape[0] * shape[1]))


@pytest.mark.parametrize("part", range(3))
def test_named_calls(part: int) -> None:
    """Every dtype, layout and width: wide and narrow accesses, rows that start anywhere."""
    shape = ((2, 2), (2, 1), (1, 2))[part]
    with cluster_of(shape, 1, 1 + part % 2) as cluster:
        for case in NAMED[part::3]:
            check_moe(cluster, Data(case, shape[0], shape[0] * shape[1]))


@pytest.mark.parametrize(("shape", "num_blocks", "num_teams"), GRIDS)
def test_all_to_all(shape: tuple[int, int], num_blocks: int, num_teams: int) -> None:
    with cluster_of(shape, num_blocks, num_teams) as cluster:
        rng = np.random.default_rng(shape[0] * 7 + shape[1])
        for _ in range(4):
            check_random_traffic(cluster, rng, max_rows=40, max_width=40)
