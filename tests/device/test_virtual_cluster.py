"""All-to-all on a virtual cluster of the CPU's driver, by the kernels that a GPU runs."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fastkern.device.host_driver import HostDriver
from fastkern.device.virtual_cluster import VirtualCluster
from fastkern.planner import Policy, Topology
from tests.device.virtual_cases import (
    DTYPES,
    POLICIES,
    SHAPES,
    check_all_to_all,
    check_random_traffic,
    options,
)
from tests.reference import KINDS, random_traffic


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: f"{shape[0]}x{shape[1]}")
def test_every_shape_policy_and_grid(
    clean_driver: HostDriver, shape: tuple[int, int], policy: Policy
) -> None:
    seed = 10 * SHAPES.index(shape) + POLICIES.index(policy)
    rng = np.random.default_rng(seed)
    for blocks in (1, 2, 3):
        lanes = 1 + (blocks + seed) % 3
        with VirtualCluster(
            clean_driver, Topology(*shape), blocks, lanes, options=options(policy=policy)
        ) as cluster:
            for _ in range(3):
                check_random_traffic(cluster, rng, max_rows=14, max_width=9)
            assert cluster.epoch == 3


def test_every_kind_of_traffic_and_dtype_on_one_cluster(clean_driver: HostDriver) -> None:
    rng = np.random.default_rng(5)
    with VirtualCluster(clean_driver, Topology(2, 2), 2, 2, options=options()) as cluster:
        for kind in KINDS:
            check_random_traffic(cluster, rng, max_rows=9, max_width=40, kind=kind)
        for dtype in DTYPES:
            traffic = random_traffic(2, 2, rng, 9)
            check_all_to_all(cluster, traffic, (3, 5), dtype, rng)
        # No elements in a row, and no rows: nothing to launch, or a launch of nothing.
        empty = [torch.empty(2, 0) for _ in range(4)]
        got = cluster.all_to_all(empty, np.eye(4, dtype=np.int64) * 2)
        assert [tuple(x.shape) for x in got] == [(2, 0)] * 4
        check_all_to_all(cluster, np.zeros((4, 4), np.int64), (3,), torch.float32, rng)


def test_one_cluster_grows_with_its_calls(clean_driver: HostDriver) -> None:
    rng = np.random.default_rng(6)
    with VirtualCluster(
        clean_driver, Topology(2, 2), options=options(chunk_bytes=1 << 16)
    ) as cluster:
        sizes = []
        for rows in (2, 900, 3):
            traffic = np.full((4, 4), rows)
            check_all_to_all(cluster, traffic, (700,), torch.float32, rng)
            sizes.append(cluster.heap.data_bytes)
    assert sizes[0] == 1 << 20
    assert sizes[0] < sizes[1] == sizes[2]


def test_traces_tell_what_every_block_did(clean_driver: HostDriver) -> None:
    rng = np.random.default_rng(9)
    traffic = np.full((4, 4), 6)
    with VirtualCluster(
        clean_driver, Topology(2, 2), 2, options=options(policy="whole", trace_events=500)
    ) as cluster:
        for _ in range(2):
            check_all_to_all(cluster, traffic, (20,), torch.uint8, rng)
            found = cluster.traces()
            for events in found:
                assert 0 < len(events) < 500
                assert (events["end_ns"] >= events["begin_ns"]).all()
                assert set(events["block"].tolist()) <= {0, 1}
                assert int(events["bytes"][events["queue"] == 0].sum()) == 2 * 6 * 20  # packed
    with VirtualCluster(clean_driver, Topology(2, 2), options=options(trace_events=3)) as cluster:
        check_all_to_all(cluster, traffic, (20,), torch.uint8, rng)
        assert [len(events) for events in cluster.traces()] == [3] * 4


def test_more_blocks_than_fit_are_refused(clean_driver: HostDriver) -> None:
    with VirtualCluster(clean_driver, Topology(2, 2), 1, 1) as cluster:
        most = 4 * cluster.most_blocks
    blocks = most // 4 + 1
    with VirtualCluster(clean_driver, Topology(2, 2), blocks, 1) as cluster:
        assert cluster.most_blocks == most // 4
        text = (
            rf"fastkern_exchange: 4 ranks with {blocks} blocks each are {4 * blocks} blocks, but "
            rf"the device holds {most} of 1 lanes at once: at most {most // 4} per rank"
        )
        with pytest.raises(ValueError, match=text):
            cluster.all_to_all([torch.zeros(4, 2)] * 4, np.ones((4, 4), np.int64))


def test_bad_arguments_are_refused_and_leave_the_cluster_usable(clean_driver: HostDriver) -> None:
    rng = np.random.default_rng(10)
    for blocks, lanes, text in ((0, 1, "num_blocks must be at least 1"), (1, 5, "1 to 4, not 5")):
        with pytest.raises(ValueError, match=text):
            VirtualCluster(clean_driver, Topology(1, 2), blocks, lanes)
    with VirtualCluster(clean_driver, Topology(1, 2), options=options()) as cluster:
        rows = [torch.zeros(3, 2)] * 2
        with pytest.raises(ValueError, match="input of rank 0 has 3 rows"):
            cluster.all_to_all(rows, np.full((2, 2), 2))
        with pytest.raises(ValueError, match="2 tensors of one dtype and row shape"):
            cluster.all_to_all([rows[0], torch.zeros(3, 3)], np.full((2, 2), 2))
        with pytest.raises(ValueError, match="traffic"):
            cluster.all_to_all(rows, np.full((3, 3), 1))
        check_random_traffic(cluster, rng, max_rows=9, max_width=9)
    with pytest.raises(Exception, match="of no more use: it was closed"):
        cluster.all_to_all(rows, np.full((2, 2), 2))
