"""A virtual cluster whose ranks stall: a record instead of a hang, and an end to the cluster."""

from __future__ import annotations

import time

import numpy as np
import pytest
import torch

from fastkern.device.driver import DriverError
from fastkern.device.host_driver import HostDriver
from fastkern.device.virtual_cluster import VirtualCluster
from fastkern.errors import FastkernError
from fastkern.planner import Topology
from tests.device.virtual_cases import expected_rows, options, random_rows
from tests.device.virtual_sequences import OPS, check_missing_rank, check_withheld_flag

TIMEOUT_S = 0.4  # long enough for a good call on a busy machine
SPLITS = np.full((4, 4), 3)


@pytest.mark.parametrize("blocks", [1, 3])
@pytest.mark.parametrize("op", OPS)
def test_a_rank_that_does_not_run_ends_in_a_record(
    clean_driver: HostDriver, op: str, blocks: int
) -> None:
    start = time.monotonic()
    record = check_missing_rank(clean_driver, Topology(2, 2), op, blocks, TIMEOUT_S)
    assert time.monotonic() - start < 50 * TIMEOUT_S
    assert TIMEOUT_S / 2 < record.waited_s < 50 * TIMEOUT_S


@pytest.mark.parametrize("blocks", [1, 3])
def test_a_flag_that_never_comes_is_named(clean_driver: HostDriver, blocks: int) -> None:
    record = check_withheld_flag(clean_driver, blocks, TIMEOUT_S)
    assert record.expected == (2, 1)
    assert record.seen == (1, 1)  # of the call before


def test_rows_that_go_astray_show(clean_driver: HostDriver) -> None:
    """Negative control: a table with one row changed gives other bytes than the definition."""
    rng = np.random.default_rng(3)
    with VirtualCluster(clean_driver, Topology(2, 2), options=options()) as cluster:
        call = cluster.prepare_all_to_all(SPLITS, 16)
        inputs = [random_rows(12, (16,), torch.uint8, rng) for _ in range(4)]
        call.write_inputs(inputs)
        tables = [call.plan.table(rank) for rank in range(4)]
        tables[0].segments[0]["row"] ^= 1
        call.launch.set_tables(tables)
        call.run()
        got = call.read_outputs((16,), torch.uint8)
        assert not all(map(torch.equal, got, expected_rows(SPLITS, inputs)))
        call.close()


def test_writes_behind_an_output_are_found(clean_driver: HostDriver) -> None:
    with VirtualCluster(clean_driver, Topology(1, 1), options=options()) as cluster:
        call = cluster.prepare_all_to_all([[4]], 16)
        call.write_inputs([torch.zeros(4, 16, dtype=torch.uint8)])
        tables = [call.plan.table(0)]
        tables[0].streams["target_row"] += 1
        call.launch.set_tables(tables)
        call.run()
        with pytest.raises(FastkernError, match="byte 0 behind output 0"):
            call.read_outputs((16,), torch.uint8)
        call.close()


def test_a_failure_of_the_driver_ends_the_cluster(
    clean_driver: HostDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    with VirtualCluster(clean_driver, Topology(1, 2), options=options()) as cluster:
        call = cluster.prepare_all_to_all([[1, 1], [1, 1]], 16)

        def fail(stream: int) -> None:
            raise DriverError("synchronize", "ILLEGAL_ADDRESS", f"stream {stream}")

        with monkeypatch.context() as patched:
            patched.setattr(clean_driver, "synchronize", fail)
            with pytest.raises(DriverError, match="ILLEGAL_ADDRESS"):
                call.run()
        with pytest.raises(FastkernError, match="of no more use: synchronize: ILLEGAL_ADDRESS"):
            call.run()
        call.close()


def test_blocks_that_never_ran_are_noticed_without_a_deadline(clean_driver: HostDriver) -> None:
    """No rank waits for another where each sends to itself alone."""
    with VirtualCluster(clean_driver, Topology(2, 1), options=options()) as cluster:
        cluster.launched_ranks = 1
        with pytest.raises(FastkernError, match="rank 1 has completed call 0, not 1"):
            cluster.all_to_all([torch.zeros(2, 4)] * 2, np.eye(2, dtype=np.int64) * 2)


class Claimed(HostDriver):
    """Says that it is another target."""

    def __init__(self, target: str) -> None:
        super().__init__(most_lanes=512)
        self.target = target


@pytest.mark.parametrize(("target", "lanes"), [("cuda", 16), ("cuda", 100), ("hip", 32)])
def test_blocks_of_half_a_team_are_refused(target: str, lanes: int) -> None:
    """Half a warp or wave would have no team to move rows: it would wait for ever."""
    driver = Claimed(target)
    with (
        VirtualCluster(
            driver, Topology(1, 1), 1, lanes, load=lambda entry, lanes: b"", options=options()
        ) as cluster,
        pytest.raises(ValueError, match=f"multiple of {64 if target == 'hip' else 32}"),
    ):
        cluster.prepare_all_to_all(np.full((1, 1), 3), 16)
    driver.close()
