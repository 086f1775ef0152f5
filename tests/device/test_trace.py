"""Traces on a device, that of the CPU here: the same as on the host, and nothing left behind."""

from __future__ import annotations

import gc
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fastkern import DeadlineError
from fastkern.device.records import TRACE_EVENT
from fastkern.tracing import Launch, Tracing
from tests.device.communicators import device_communicator, leave_work_to_itself, message
from tests.processes import Pool
from tests.trace_cases import (
    MISUSE,
    SPLITS,
    WIDTH,
    bounded,
    check_files,
    closed_within,
    exchange,
    items_of_table,
    misused,
    traced_calls,
)


def on_device(rank: int, num_ranks: int, body: Any, *args: Any) -> Any:
    with device_communicator(2, policy="whole", num_blocks=3, chunk_bytes=64) as comm:
        result = body(comm, *args)
        gc.collect()
        return result


def test_every_item_of_a_span_is_there(four: Pool, tmp_path: Path) -> None:
    ranks = four.run(on_device, traced_calls, str(tmp_path))
    crossing = sum(SPLITS[a][b] for a in range(4) for b in range(4) if a // 2 != b // 2)
    assert sum(found["put_bytes"] for found in ranks) == crossing * WIDTH * 4
    check_files(tmp_path, ranks, one_clock=True)


def test_events_are_bounded(four: Pool) -> None:
    four.run(on_device, bounded)


def test_misuse(four: Pool) -> None:
    assert four.run(on_device, misused) == [list(MISUSE)] * 4


def test_a_communicator_that_is_closed_in_the_span(four: Pool) -> None:
    four.run(on_device, closed_within)


def off(rank: int, num_ranks: int) -> None:
    """No launch is told of a trace that is over: its memory has been freed."""
    with device_communicator(2) as comm:
        runtime: Any = comm._runtime

        def told() -> list[int]:
            blocks = [slot._block for slot in runtime._ring._slots]
            fields = ("trace", "trace_count", "trace_capacity")
            return [sum(bool(block.args[0][name]) for name in fields) for block in blocks]

        with comm.trace():
            for _ in range(8):  # as many launches as there are slots
                exchange(comm)
            assert told() == [3] * 8
        for _ in range(8):
            exchange(comm)
        assert told() == [0] * 8


def test_off_is_off(four: Pool) -> None:
    four.run(off)


def unfinished(rank: int, num_ranks: int) -> None:
    """Calls return before their kernels have ended; the end of the trace waits for those."""
    with device_communicator(2, policy="whole", chunk_bytes=64) as comm:
        streams = leave_work_to_itself(comm)
        driver = streams._driver
        out, ones = torch.zeros(4), torch.ones(4)
        with comm.trace() as trace:
            for _ in range(20):  # more than there are slots for launches
                comm.all_to_all_single(out, ones)
            exchange_count = len(comm._runtime.tracing._launches or ())
        assert exchange_count == 20
        assert len(set(trace.events["epoch"].tolist())) == 20
        driver.synchronize(streams.current())
        assert torch.equal(out, ones)


def test_kernels_that_are_under_way(four: Pool) -> None:
    four.run(unfinished)


def stalled(rank: int, num_ranks: int) -> str:
    """Rank 1 launches too late: what the others did until they gave up is in their traces."""
    with device_communicator(2, policy="whole", progress_timeout_s=0.5, chunk_bytes=64) as comm:
        runtime: Any = comm._runtime
        launch = runtime.launch

        def late(*args: Any) -> None:
            time.sleep(1.5)
            launch(*args)

        if rank == 1:
            runtime.launch = late
        trace = comm.trace()
        trace.start()
        text = message(lambda: exchange(comm))
        trace.stop()
        events = trace.events
        assert len(events) < sum(items_of_table(comm).values())
        if rank != 1:
            assert len(events)
        return text


def test_a_call_that_has_failed(four: Pool) -> None:
    for text in four.run(stalled):
        assert text.startswith(DeadlineError.__name__)


def test_the_clock_of_a_device() -> None:
    """A device's first event is laid at the host's time of the first launch."""
    events = np.zeros(3, dtype=TRACE_EVENT)
    events["begin_ns"] = [5_000, 3_000, 4_000]
    tracing = Tracing(lambda most: None, lambda: (events.tobytes(), 7), "cuda device 1")
    tracing.note(1, "dispatch", 1, 2)  # off
    tracing.start(3)
    before = time.time_ns()
    tracing.note((1 << 32) + 5, "dispatch", 9, 2)
    after = time.time_ns()
    time.sleep(0.01)
    tracing.note((1 << 32) + 6, "combine", 10, 3)
    log = tracing.stop()
    assert log.launches == {5: Launch("dispatch", 9, 2), 6: Launch("combine", 10, 3)}
    assert log.events["begin_ns"].tolist() == [3_000, 4_000, 5_000]
    assert log.num_dropped == 4
    assert before <= 3_000 + log.unix_offset_ns <= after
    assert log.clock.startswith("cuda device 1 of host ")
