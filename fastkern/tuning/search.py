"""Measures every candidate of a search on a virtual cluster: interleaved rounds, medians.

All candidates of a call take their turns in every round, in an order drawn anew, so that drift of
clocks and of other load hits all alike. Between the events of a measure lie the upload of tables
and arguments and the kernel.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np

from ..device.driver import Driver
from ..device.virtual_cluster import VirtualCluster, VirtualOptions
from .calls import PreparedCall, prepared_call
from .choose import TILE_BYTES_BY_DEFAULT
from .search_space import SearchOptions, SearchSpace, Shape

_FLUSH_BYTES = 256 << 20  # more than the L2 of any GPU
_TIMEOUT_S = 20.0


@dataclass(frozen=True)
class Measured:
    """One candidate at one call. median_us: of the rounds. num_bytes: that a rank gives or gets."""

    op: str
    size: int
    shape: Shape
    num_blocks: int
    median_us: float
    num_bytes: int


def measure(
    driver: Driver,
    space: SearchSpace,
    options: SearchOptions,
    note: Callable[[str], None] = lambda text: None,
) -> list[Measured]:
    """Every candidate at every operation and size. note: is told what is being measured.

    Raises DeadlineError or FastkernError where a launch does not end as it should.
    """
    found: list[Measured] = []
    with ExitStack() as made:
        clusters = {}
        for shape in space.shapes:
            cluster = VirtualCluster(
                driver,
                options.topology,
                max(space.blocks[shape.compiled]),
                shape.num_lanes,
                options=VirtualOptions(
                    chunk_bytes=shape.chunk_bytes,
                    progress_timeout_s=_TIMEOUT_S,
                    tile_bytes=shape.tile_bytes or TILE_BYTES_BY_DEFAULT,
                ),
            )
            clusters[shape] = made.enter_context(cluster)
        flush = _flusher(made, driver, next(iter(clusters.values())))
        for op in options.operations:
            for size in space.sizes:
                note(f"{op}, {size} bytes")
                with ExitStack() as calls:
                    prepared = {
                        shape: calls.enter_context(prepared_call(cluster, op, size, options.seed))
                        for shape, cluster in clusters.items()
                    }
                    found += _rounds(clusters, prepared, space, options, (op, size), flush)
    return found


_Candidate = tuple[Shape, int]


def _rounds(
    clusters: dict[Shape, VirtualCluster],
    prepared: dict[Shape, PreparedCall],
    space: SearchSpace,
    options: SearchOptions,
    call: tuple[str, int],
    flush: Callable[[VirtualCluster], None],
) -> list[Measured]:
    op, size = call
    candidates = [(shape, n) for shape in prepared for n in space.blocks[shape.compiled]]
    times: dict[_Candidate, list[float]] = {candidate: [] for candidate in candidates}
    order = random.Random(options.seed)
    for turn in range(options.warm_ups + options.rounds):
        order.shuffle(candidates)
        for shape, num_blocks in candidates:
            us = _once(clusters[shape], prepared[shape], op, num_blocks, flush)
            if turn >= options.warm_ups:
                times[shape, num_blocks].append(us)
    return [
        Measured(op, size, shape, n, float(np.median(us)), prepared[shape].num_bytes)
        for (shape, n), us in times.items()
    ]


def _once(
    cluster: VirtualCluster,
    call: PreparedCall,
    op: str,
    num_blocks: int,
    flush: Callable[[VirtualCluster], None],
) -> float:
    """One launch with so many blocks per rank, microseconds."""
    driver, stream = cluster.driver, cluster.stream
    call.launch.set_num_blocks(num_blocks)
    with ExitStack() as made:
        events = [driver.create_event(timing=True) for _ in range(2)]
        for event in events:
            made.callback(driver.destroy_event, event)
        flush(cluster)
        driver.record(events[0], stream)
        cluster.enqueue(call.launch)
        driver.record(events[1], stream)
        cluster.finish(op, cluster.epoch + 1)
        return driver.elapsed_us(*events)


def _flusher(
    made: ExitStack, driver: Driver, cluster: VirtualCluster
) -> Callable[[VirtualCluster], None]:
    """Puts other bytes over all of L2 into a stream. That also takes longer than enqueuing what is
    measured, so that the device does not wait for the host between the events."""
    if driver.target == "host":
        return lambda cluster: None
    memory = cluster.allocations()
    made.callback(memory.close)
    address = memory.empty(_FLUSH_BYTES, "flush")
    return lambda cluster: driver.fill(address, 0, _FLUSH_BYTES, cluster.stream)
