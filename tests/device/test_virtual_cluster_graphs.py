"""All-to-alls of a virtual cluster that are captured and replayed, as a decoding step would be."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fastkern.device.host_driver import HostDriver
from fastkern.device.virtual_cluster import VirtualCluster
from fastkern.errors import FastkernError
from fastkern.planner import Topology, plan
from tests.device.virtual_cases import (
    expected_rows,
    options,
    random_rows,
)
from tests.device.virtual_sequences import check_replays


@pytest.mark.parametrize("policy", ["auto", "whole"])
def test_replays_of_a_captured_call_take_new_rows_and_new_tables(
    clean_driver: HostDriver, policy: str
) -> None:
    rng = np.random.default_rng(7)
    given = options(policy=policy, chunk_bytes=2000)
    with VirtualCluster(clean_driver, Topology(2, 2), 2, 2, options=given) as cluster:
        before = cluster.heap.data_bytes
        check_replays(cluster, rng, most_rows=9, row_bytes=900)
        assert cluster.heap.data_bytes > before
        assert cluster.epoch == 6 + 2 * 3


def test_a_replay_reads_the_tables_of_its_own_time(clean_driver: HostDriver) -> None:
    """Negative control: without new splits, new rows land by the old ones."""
    rng = np.random.default_rng(8)
    with VirtualCluster(clean_driver, Topology(1, 2), options=options()) as cluster:
        old, new = np.array([[1, 2], [2, 1]]), np.array([[2, 1], [1, 2]])
        call = cluster.prepare_all_to_all(old, 8)
        call.capture()
        assert cluster.epoch == 0  # nothing ran
        inputs = [random_rows(3, (8,), torch.uint8, rng) for _ in range(2)]
        call.write_inputs(inputs)
        call.replay()
        got = call.read_outputs((8,), torch.uint8)
        assert all(map(torch.equal, got, expected_rows(old, inputs)))
        assert not all(map(torch.equal, got, expected_rows(new, inputs)))
        call.close()


def test_what_has_no_room_is_refused_and_changes_nothing(clean_driver: HostDriver) -> None:
    rng = np.random.default_rng(9)
    with VirtualCluster(clean_driver, Topology(2, 2), options=options()) as cluster:
        call = cluster.prepare_all_to_all(np.full((4, 4), 2), 24)
        with pytest.raises(FastkernError, match="nothing was captured"):
            call.replay()
        call.capture()
        with pytest.raises(ValueError, match="rank 0 sends 64 rows, its room is 8"):
            call.set_splits(np.full((4, 4), 16))
        with pytest.raises(ValueError, match="input of rank 0 has 7 rows and 168 bytes"):
            call.write_inputs([torch.zeros(7, 24, dtype=torch.uint8)] * 4)
        large = plan(np.full((16, 16), 2), Topology(4, 4), 24, "whole")
        tables = [large.table(rank) for rank in range(4)]
        with pytest.raises(ValueError, match=r"the table of rank 0 has \d+ bytes, its room is \d+"):
            call.launch.set_tables(tables)
        inputs = [random_rows(8, (24,), torch.uint8, rng) for _ in range(4)]
        call.write_inputs(inputs)
        call.replay()
        got = call.read_outputs((24,), torch.uint8)
        assert all(map(torch.equal, got, expected_rows(call.splits, inputs)))
        call.close()
