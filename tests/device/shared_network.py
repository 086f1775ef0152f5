"""A network between the CPU's devices, for whole communicators: its library is memory that all
processes map, and its kernels those of kernels/transport/shared.h. Hosts are made up.
"""

from __future__ import annotations

import functools
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import numpy as np
import torch.distributed as dist

from fastkern import Communicator, bootstrap, transports
from fastkern.device import networks
from fastkern.device.host_driver import HostDriver
from fastkern.device.network import Setting
from fastkern.device.network_memory import LibraryNetwork
from fastkern.device.networks import NetworkKind
from fastkern.device.peer_memory import PeerRegion
from fastkern.device.transfer import upload
from tests.device.communicators import host_device

TRANSPORT = "nccl_gin"  # in whose place it stands
_PATIENCE_S = 20.0  # of the library, as a thread of it stays behind


class Exchange:
    """What a made-up library has its network for: all ranks' values, through the store."""

    def __init__(self, setting: Setting) -> None:
        self._setting = setting
        self._count = 0

    def __call__(self, content: bytes) -> list[bytes]:
        self._count += 1
        store = self._setting.link._store
        keys = [f"lib-{self._count}-{r}" for r in range(self._setting.topology.num_ranks)]
        store.set(keys[self._setting.rank], content)
        end = time.monotonic() + _PATIENCE_S
        while not store.check(keys):
            assert time.monotonic() < end, "the library waited in vain"
            time.sleep(1e-3)
        return [bytes(store.get(key)) for key in keys]


class Mapped:
    """Memory of a rank's device that all ranks have mapped: bases by rank; table: their addresses,
    on the device."""

    def __init__(self, setting: Setting, exchange: Exchange, own: int) -> None:
        driver = self._driver = setting.driver
        self._rank = setting.rank
        handles = exchange(driver.export_memory(own))
        self.bases = [
            own if r == setting.rank else driver.open_memory(handle)
            for r, handle in enumerate(handles)
        ]
        self.table = driver.allocate(8 * len(handles), coherent=False)
        upload(driver, self.table, np.array(self.bases, dtype=np.uint64).tobytes())

    def close(self) -> None:
        for rank, base in enumerate(self.bases):
            if rank != self._rank:
                self._driver.close_memory(base)
        self._driver.free(self.table)
        self.bases, self.table = [], 0


class SharedNetwork(LibraryNetwork):
    """See above."""

    name = "the shared network"

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self._exchange = Exchange(setting)
        self.told: list[Any] = []  # modules that are loaded

    def start_library(self) -> Sequence[int]:
        self.steps.collective("start of the shared network", lambda: self._exchange(b"here"))
        return range(self.setting.topology.num_ranks)

    def fill_record(self) -> None:
        """Nothing besides the heap."""

    def after_load(self, module: Any) -> None:
        assert module.loaded
        self.told.append(module)

    def before_unload(self, module: Any) -> None:
        assert module.loaded
        self.told.remove(module)

    def allocate(self, region: PeerRegion, num_bytes: int) -> None:
        region.own = self.setting.driver.allocate(num_bytes, coherent=True)

    def share(self, region: PeerRegion, num_bytes: int) -> None:
        region.kept.append(Mapped(self.setting, self._exchange, region.own))

    def mapped(self, region: PeerRegion, rank: int) -> int:
        return int(region.kept[0].bases[rank])

    def release(self, region: PeerRegion) -> None:
        for mapped in region.kept:
            mapped.close()
        self.setting.driver.free(region.own)

    def place_in_record(self, control: PeerRegion, data: PeerRegion) -> None:
        self.record["heap"] = control.own
        self.record["window"] = control.kept[0].table
        self.record["data_window"] = data.kept[0].table


@functools.cache
def tcp_store() -> Any:
    """The store that process groups have on clusters; the tests' own, a file, takes its time."""
    rank, ports = dist.get_rank(), [0]
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        ports = [store.port]
    dist.broadcast_object_list(ports)
    return store if rank == 0 else dist.TCPStore("127.0.0.1", ports[0], wait_for_workers=False)


@contextmanager
def hosts_of(rank: int, ranks_per_host: int, make: Any = SharedNetwork) -> Iterator[None]:
    """Within, neighbours share a host, and the transport's library is the shared network."""
    kind = NetworkKind("host", lambda: None, make)
    name = f"host{rank // ranks_per_host}"
    with (
        mock.patch.object(socket, "gethostname", return_value=name),
        mock.patch.object(bootstrap, "default_store", tcp_store),
        mock.patch.dict(networks.KINDS, {TRANSPORT: kind}),
    ):
        yield


@contextmanager
def network_communicator(
    servers: int, make: Any = SharedNetwork, memory_bytes: int | None = None, **options: Any
) -> Iterator[Communicator]:
    """A communicator of all ranks, each server a host of its own; nothing of it may be left.

    memory_bytes: what this rank's device has.
    """
    ranks = dist.get_world_size()
    with host_device(memory_bytes) as driver, hosts_of(dist.get_rank(), ranks // servers, make):
        with Communicator(**on_network(driver, servers, options)) as comm:
            yield comm
        dist.barrier()  # all have left, so what could not be freed before can be now


def on_network(driver: HostDriver, servers: int, options: dict[str, Any]) -> dict[str, Any]:
    """Options of a communicator over the shared network; cross_rail: of the transport."""
    options = dict(options)
    transport = transports.nccl_gin(cross_rail=options.pop("cross_rail", False))
    given = {"buffer_bytes": 0, "entry_timeout_s": 50.0, "progress_timeout_s": 40.0, **options}
    return {"servers": servers, "transport": transport, "backend": driver, **given}
