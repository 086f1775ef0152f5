"""Times on the device: events around what is enqueued, L2 flushed before, medians after."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from fastkern.device.virtual_cluster import VirtualCluster

_WARM_UPS = 2


@dataclass(frozen=True)
class Times:
    """Microseconds."""

    p20_us: float
    p50_us: float
    p80_us: float

    def figures(self) -> dict[str, float]:
        """As a measure's figures."""
        return {name: round(getattr(self, name), 3) for name in ("p20_us", "p50_us", "p80_us")}


def times_of(values_us: list[float]) -> Times:
    """Percentiles."""
    return Times(*(float(np.percentile(values_us, p)) for p in (20, 50, 80)))


class Timer:
    """Measures work in a cluster's stream. flush_bytes: written before each run, more than L2, as
    many times as flushes says.

    The flush also lets the host run ahead: it takes longer than enqueuing what is measured, so that
    the device never waits for the host between the two events.
    """

    def __init__(
        self, cluster: VirtualCluster, flush_bytes: int, repeats: int, flushes: int = 2
    ) -> None:
        self._cluster = cluster
        self._repeats = repeats
        self._flush_bytes = flush_bytes
        self._flushes = flushes
        self._memory = cluster.allocations()
        self._flushed = self._memory.empty(flush_bytes, "flush")
        self._turn = 0

    def close(self) -> None:
        """Free its memory."""
        self._memory.close()

    def flush(self) -> None:
        """Put into the stream: other bytes over all of L2."""
        driver, stream = self._cluster.driver, self._cluster.stream
        self._turn += 1
        for _ in range(self._flushes):
            driver.fill(self._flushed, self._turn % 251, self._flush_bytes, stream)

    def on_device(self, enqueue: Callable[[], Any]) -> Times:
        """Of what `enqueue` puts into the stream, launches and all between its events."""
        self.warm_up(enqueue)
        return times_of(self.samples_us(enqueue, self._repeats))

    def warm_up(self, enqueue: Callable[[], Any]) -> None:
        """Run it without a clock, and wait."""
        for _ in range(_WARM_UPS):
            enqueue()
        self._cluster.driver.synchronize(self._cluster.stream)

    def samples_us(self, enqueue: Callable[[], Any], repeats: int) -> list[float]:
        """Times one by one, as `on_device` takes them; the stream is done when it returns."""
        driver, stream = self._cluster.driver, self._cluster.stream
        events = [
            (driver.create_event(timing=True), driver.create_event(timing=True))
            for _ in range(repeats)
        ]
        driver.synchronize(stream)
        for begin, end in events:
            self.flush()
            driver.record(begin, stream)
            enqueue()
            driver.record(end, stream)
        driver.synchronize(stream)
        times_us = [driver.elapsed_us(begin, end) for begin, end in events]
        for pair in events:
            for event in pair:
                driver.destroy_event(event)
        return times_us

    def on_host(self, enqueue: Callable[[], Any]) -> Times:
        """From before the launch until the host knows that it is done, by the host's clock."""
        driver, stream = self._cluster.driver, self._cluster.stream
        for _ in range(_WARM_UPS):
            enqueue()
        times = []
        for _ in range(self._repeats):
            self.flush()
            driver.synchronize(stream)
            begin = time.perf_counter()
            enqueue()
            driver.synchronize(stream)
            times.append((time.perf_counter() - begin) * 1e6)
        return times_of(times)
