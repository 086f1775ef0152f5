"""Communicators whose device is the CPU, for functions that run on ranks."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

from fastkern import Communicator
from fastkern.device.host_driver import HostDriver
from fastkern.device.memory import release_leftovers
from fastkern.device.streams import HostStreams

Topology = tuple[int, int]
TOPOLOGIES: tuple[Topology, ...] = ((2, 1), (1, 3), (2, 2))


def num_ranks(topology: Topology) -> int:
    return topology[0] * topology[1]


@contextmanager
def device_communicator(servers: int, **options: Any) -> Iterator[Communicator]:
    """A communicator of all ranks; afterwards nothing of it may be left."""
    with host_device() as driver, Communicator(**on_device(driver, servers, options)) as comm:
        yield comm


def on_device(driver: HostDriver, servers: int, options: dict[str, Any]) -> dict[str, Any]:
    """Options of a communicator that works on the driver."""
    given = {"buffer_bytes": 0, "entry_timeout_s": 50.0, "progress_timeout_s": 40.0, **options}
    return {"servers": servers, "transport": "peer", "backend": driver, **given}


@contextmanager
def host_device(memory_bytes: int | None = None) -> Iterator[HostDriver]:
    """A device of this rank; whoever used it must have freed all that it made."""
    driver = HostDriver(most_lanes=2, memory_bytes=memory_bytes)
    yield driver  # after an error the other ranks may be elsewhere
    dist.barrier()  # the others have let go of this rank's memory
    gc.collect()
    assert release_leftovers() == 0
    left, threads = driver.leftovers(), [t.name for t in threading.enumerate()]
    driver.close()
    assert left == []
    assert not [name for name in threads if name.startswith("fastkern-watchdog")]


def leave_work_to_itself(comm: Communicator) -> HostStreams:
    """From here on, calls return before their kernels have ended, as on a GPU."""
    runtime: Any = comm._runtime
    streams: HostStreams = runtime.streams
    streams.waits = False
    return streams


def message(call: Any) -> str:
    """The error that a call raises."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"
