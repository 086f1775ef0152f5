"""Static exchanges of a virtual cluster that fail: see virtual_static_failures."""

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
from tests.device.virtual_cases import options
from tests.device.virtual_static_cases import PLANNERS, StaticCase, check_result, draw, write
from tests.device.virtual_static_failures import (
    check_missing_static_rank,
    check_refused,
    check_withheld_static_flag,
)

TIMEOUT_S = 0.4  # long enough for a good call on a busy machine
ENTRY_TIMEOUT_S = 1.0  # and for all ranks that are launched to begin
every_planner = pytest.mark.parametrize("planner", PLANNERS)


def virtual(driver: HostDriver, shape: tuple[int, int], *grid: int) -> VirtualCluster:
    return VirtualCluster(driver, Topology(*shape), *grid, options=options(chunk_bytes=300))


@every_planner
@pytest.mark.parametrize("layout", ["expert", "rank"])
@pytest.mark.parametrize(
    ("bad", "dtype"),
    [(7, torch.int64), (-2, torch.int64), (1 << 40, torch.int64), (-(1 << 31), torch.int32)],
)
@pytest.mark.parametrize("replayed", [False, True], ids=["run", "replayed"])
def test_a_bad_index_moves_nothing(
    clean_driver: HostDriver,
    planner: str,
    layout: str,
    bad: int,
    dtype: torch.dtype,
    replayed: bool,
) -> None:
    """On one rank, with later ones behind it: the message names the first."""
    case = StaticCase(planner=planner, layout=layout, zero_padding=bad < -2)
    with virtual(clean_driver, (2, 2), 2, 2) as cluster:
        step = draw(case, [9, 0, 9, 4], "distinct", np.random.default_rng(3), dtype)
        step.idx[2][5, 2] = step.idx[2][6, 0] = step.idx[2][8, 2] = bad
        text = (
            r"static dispatch: topk_idx\[5\]\[2\] of rank 2 is neither -1 nor one of 7 experts; "
            "the call moved nothing"
        )
        check_refused(cluster, case, step, text, replayed)


@every_planner
def test_bad_indices_on_several_ranks_name_one(clean_driver: HostDriver, planner: str) -> None:
    case = StaticCase(planner=planner)
    with virtual(clean_driver, (1, 3), 1, 2) as cluster:
        step = draw(case, [9, 9, 9], "distinct", np.random.default_rng(3), torch.int64)
        step.idx[0][0, 0] = step.idx[1][1, 1] = step.idx[2][2, 2] = 100
        text = r"static dispatch: topk_idx\[([012])\]\[\1\] of rank \1 is neither .* moved nothing"
        check_refused(cluster, case, step, text, False)


@every_planner
@pytest.mark.parametrize("alignment", [1, 16])
@pytest.mark.parametrize("replayed", [False, True], ids=["run", "replayed"])
def test_more_rows_than_there_is_room_for_are_refused(
    clean_driver: HostDriver, planner: str, alignment: int, replayed: bool
) -> None:
    """Each token four times for an expert of a rank that has two; its worst case is a token's two
    choices of them."""
    case = StaticCase(planner=planner, alignment=alignment, topk=4)
    with virtual(clean_driver, (2, 2), 2, 2) as cluster:
        step = draw(case, [9, 9, 8, 9], "none", np.random.default_rng(3), torch.int64)
        for idx in step.idx:
            idx[:] = 2
        text = "static dispatch: rank 1 would receive .* the call moved nothing"
        check_refused(cluster, case, step, text, replayed)


@every_planner
@pytest.mark.parametrize("blocks", [1, 3])
@pytest.mark.parametrize("shape", [(1, 3), (3, 1), (2, 2)], ids=["1x3", "3x1", "2x2"])
def test_a_rank_that_does_not_enter_is_named(
    clean_driver: HostDriver, shape: tuple[int, int], blocks: int, planner: str
) -> None:
    start = time.monotonic()
    topology = Topology(*shape)
    record = check_missing_static_rank(clean_driver, topology, planner, blocks, ENTRY_TIMEOUT_S)
    assert time.monotonic() - start < 50 * ENTRY_TIMEOUT_S
    assert ENTRY_TIMEOUT_S < record.waited_s < 50 * ENTRY_TIMEOUT_S


@pytest.mark.parametrize("blocks", [1, 3])
def test_a_flag_that_never_comes_is_named(clean_driver: HostDriver, blocks: int) -> None:
    record = check_withheld_static_flag(clean_driver, blocks, TIMEOUT_S)
    assert record.expected == (3, 1)
    assert record.seen == (2, 1)  # of the combine before


def test_a_failure_of_the_driver_ends_the_cluster(
    clean_driver: HostDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = StaticCase()
    with virtual(clean_driver, (1, 2)) as cluster:
        exchange = cluster.static_exchange(case.shape(2))
        write(exchange, draw(case, [2, 2], "distinct", np.random.default_rng(1), torch.int64))

        def fail(stream: int) -> None:
            raise DriverError("synchronize", "ILLEGAL_ADDRESS", f"stream {stream}")

        with monkeypatch.context() as patched:
            patched.setattr(clean_driver, "synchronize", fail)
            with pytest.raises(DriverError, match="ILLEGAL_ADDRESS"):
                exchange.run()
        with pytest.raises(FastkernError, match="of no more use: synchronize: ILLEGAL_ADDRESS"):
            exchange.run()
        exchange.close()


@every_planner
def test_what_cannot_be_called_is_refused(clean_driver: HostDriver, planner: str) -> None:
    """And changes nothing."""
    case, rng = StaticCase(planner=planner), np.random.default_rng(1)
    with virtual(clean_driver, (1, 2)) as cluster:
        exchange = cluster.static_exchange(case.shape(2))
        for call in (exchange.run, exchange.capture):
            with pytest.raises(FastkernError, match="no inputs were written"):
                call()
        with pytest.raises(FastkernError, match="nothing was captured"):
            exchange.replay()
        step = draw(case, [9, 3], "distinct", rng, torch.int64)
        write(exchange, step)
        exchange.capture()
        other = draw(case, [9, 10], "distinct", rng, torch.int64)
        with pytest.raises(ValueError, match=r"10.* num_max_tokens_per_rank"):
            write(exchange, other)
        wrong = draw(StaticCase(topk=2), [9, 3], "distinct", rng, torch.int64)
        with pytest.raises(ValueError, match="topk_idx has 2 choices, the exchange has 3"):
            write(exchange, wrong)
        exchange.replay()
        check_result(cluster, exchange, case, step)
        fewer = draw(case, [9, 2], "distinct", rng, torch.int64)
        write(exchange, fewer)
        if planner == "host":
            text = r"captured for .*\[\(9, 8\), \(3, 8\)\] per rank, not \[\(9, 8\), \(2, 8\)\]"
            with pytest.raises(ValueError, match=text):
                exchange.replay()
            exchange.run()
        else:
            exchange.replay()
        check_result(cluster, exchange, case, fewer)
        exchange.close()


def test_experts_that_change_rows_are_not_for_it(clean_driver: HostDriver) -> None:
    shape = StaticCase(dtypes=(torch.float32,)).shape(2)
    with virtual(clean_driver, (1, 2)) as cluster:
        other = type(shape)(**{**vars(shape), "expert_shape": (5,)})
        with pytest.raises(ValueError, match=r"expert_out must be like x\[0\]"):
            cluster.static_exchange(other)
