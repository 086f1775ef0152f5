"""Blocks that lose a claim: each goes on to what others have not taken.

In the interpreter blocks run one after the other, so rivals are played: they take an item or more
from what a block has just seen, and run them, before the block takes its own.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch

from fastkern import Communicator
from fastkern.planner.table import VALUE_BITS
from tests.conftest import SharedPools
from tests.device.communicator_cases import call_once
from tests.triton.communicators import triton_communicator
from tests.triton.fake_libraries import Library
from tests.triton.network_ranks import late_communicator

TILE_BYTES = 4096


@contextmanager
def communicator(transport: str, **options: Any) -> Iterator[tuple[Communicator, Library | None]]:
    """Of two servers; and the fake of a library between them."""
    if transport == "peer":
        with triton_communicator(2, **options) as comm:
            yield comm, None
    else:
        with late_communicator(transport, 2, **options) as both:
            yield both


def check_vouched(call: Any, item: Any, library: Library) -> None:
    """An item has been taken: the library has vouched for its flags of the other server."""
    from fastkern.kernels.triton import layout as at
    from fastkern.kernels.triton.access import get

    flags = []
    if item.queue == at.QUEUE_RECEIVE:
        flags.append((int(get(item.stream, at.STREAM_SLOT)) + int(item.chunk), 1))
    elif item.queue == at.QUEUE_PUT and get(item.stream, at.STREAM_GATE_SLOT) != at.NO_SLOT:
        gate = get(item.stream, at.STREAM_GATE_SLOT), get(item.stream, at.STREAM_GATE_VALUE)
        flags.append((int(gate[0]), int(gate[1])))
    for slot, value in flags:
        address, stamp = int(call.flags) + 8 * slot, (int(call.epoch) << VALUE_BITS) + value
        assert any(a == address and held >= stamp for a, held in library.granted), flags


def with_rivals(rank: int, ranks: int, transport: str) -> dict[str, int]:
    """How often a block got an item after a rival, by queue."""
    from fastkern.kernels.triton import items, layout, move_rows, persistent

    rng, got_late = random.Random(rank), Counter[int]()
    real = persistent.take

    def take_one(call: Any, heads: Any, queue: Any) -> Any:
        got, item = real(call, heads, queue)
        if int(got) and library is not None:
            check_vouched(call, item, library)
        return got, item

    def take(call: Any, heads: Any, queue: Any) -> Any:
        for _ in range(rng.choice((1, 1, 2))):
            got, item = take_one(call, heads, queue)
            if int(got) == 0:
                return got, item
            move_rows.move_rows(call, item, TILE_BYTES)
        head = items.item_of(call, heads, queue)
        got, item = take_one(call, heads, queue)
        if int(got) and int(item.ticket) > int(head.ticket):
            got_late[int(queue)] += 1
        return got, item

    options: dict[str, Any] = {"num_blocks": 2, "chunk_bytes": 64, "policy": "whole"}
    try:
        with communicator(transport, **options) as (comm, library):
            persistent.take = take
            call_once(comm, np.full((ranks, ranks), 24 // ranks), torch.int32, 1, "plain")
    finally:
        persistent.take = real
    names = {getattr(layout, name).value: name for name in vars(layout) if name[:6] == "QUEUE_"}
    return {names[queue][6:]: count for queue, count in got_late.items()}


@pytest.mark.parametrize(
    ("ranks", "transport", "queues"),
    [
        (4, "peer", ("PACK", "PUSH", "PUT", "RECEIVE")),
        (2, "nvshmem", ("PACK", "PUT", "RECEIVE")),
        (2, "nccl_gin", ("PACK", "PUT", "RECEIVE")),
    ],
    ids=lambda value: str(value) if isinstance(value, str) else "",
)
def test_a_block_that_loses_goes_on(
    interpreting_pools: SharedPools, ranks: int, transport: str, queues: tuple[str, ...]
) -> None:
    counts = interpreting_pools.pool(ranks).run(with_rivals, transport, timeout_s=150)
    for queue in queues:
        assert any(queue in count for count in counts), f"{queue}: {counts}"
