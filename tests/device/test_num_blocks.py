"""num_blocks of a call on a device: the grid of its launch, and nothing else of it."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch

from fastkern import Communicator
from fastkern.device.host_driver import HostDriver
from fastkern.device.records import LAUNCH_ARGS
from tests.device.communicators import device_communicator, message
from tests.processes import Pool
from tests.test_num_blocks import MOST, step

PERSISTENT = ("fastkern_exchange", "fastkern_dispatch", "fastkern_combine")


@contextmanager
def logged(**options: Any) -> Iterator[tuple[Communicator, list[int]]]:
    """A communicator on the CPU's driver, and the blocks of its launches."""
    with device_communicator(2, chunk_bytes=64, **options) as comm:
        runtime: Any = comm._runtime
        driver: HostDriver = runtime.driver
        seen: list[int] = []
        launch = driver.launch

        def logging(
            function: Any, grid: int, num_lanes: int, stream: int, arguments: bytes
        ) -> None:
            if function.name in PERSISTENT:
                record = np.frombuffer(arguments, LAUNCH_ARGS)[0]
                assert int(record["num_ranks"]) == 1
                assert int(record["blocks_per_rank"]) == grid
                seen.append(grid)
            launch(function, grid, num_lanes, stream, arguments)

        driver.launch = logging  # type: ignore[method-assign]
        yield comm, seen
        gc.collect()


def per_call(rank: int, num_ranks: int, layout: str) -> None:
    """As on the host; blocks differ by call and by rank. A ring of slots is gone round twice."""
    with logged(num_blocks=MOST) as (comm, seen):
        expected = step(comm, layout, [None] * 5)
        assert seen == [MOST] * 9
        for turn in range(2):
            seen.clear()
            blocks = [1 + (turn + rank + k) % MOST for k in range(5)]
            got = step(comm, layout, list(blocks))
            a, b, c, d, e = blocks
            assert seen[:5] == [a, b, c, d, d]
            assert sorted(seen[5:8]) == sorted([c, b, b])
            assert seen[8:] == [e]
            for mine, theirs in zip(got, expected, strict=True):
                assert torch.equal(mine, theirs)
        del got, expected, mine, theirs


@pytest.mark.parametrize("layout", ["expert", "rank"])
def test_a_call_has_the_blocks_it_asks_for(four: Pool, layout: str) -> None:
    four.run(per_call, layout)


def asks_for_too_many(rank: int, num_ranks: int) -> str:
    with logged(num_blocks=3) as (comm, seen):
        out = torch.zeros(num_ranks)
        text = message(
            lambda: comm.all_to_all_single(out, out + 1, num_blocks=4 if rank == 2 else None)
        )
        assert seen == []
        comm.all_to_all_single(out, out + 1)
        assert seen == [3]
        return text


def test_more_than_the_communicator_was_made_with(four: Pool) -> None:
    texts = four.run(asks_for_too_many)
    assert len(set(texts)) == 1
    assert texts[0].startswith("ValueError: all_to_all_single: rank 2: ")
    assert "num_blocks must be 1 to 3" in texts[0]
