"""A network between the CPU's devices, for whole communicators: its library is memory that all
processes map, and its kernels those of kernels/transport/shared.h. Hosts are made up.
"""

from __future__ import annotations

import functools
import socket
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


class SharedNetwork(LibraryNetwork):
    """Ranks in reverse order, so that ranks and the library's numbers differ."""

    name = "the shared network"

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self._num_shared = 0
        self.told: list[Any] = []  # modules that are loaded

    def start_library(self) -> Sequence[int]:
        self.steps.collective("start of the shared network", lambda: self._exchange(b"here"))
        return list(reversed(range(self.setting.topology.num_ranks)))

    def fill_record(self) -> None:
        size = 8 * self.setting.topology.num_ranks
        self.record["window"] = self.keep(bytes(size))
        self.record["data_window"] = self.keep(bytes(size))

    def after_load(self, module: Any) -> None:
        assert module.loaded
        self.told.append(module)

    def before_unload(self, module: Any) -> None:
        assert module.loaded
        self.told.remove(module)

    def _exchange(self, content: bytes) -> list[bytes]:
        """What all ranks give, through the store, which is what a library has its network for."""
        self._num_shared += 1
        store = self.setting.link._store
        ranks = range(self.setting.topology.num_ranks)
        store.set(f"shared-{self._num_shared}-{self.setting.rank}", content)
        return [bytes(store.get(f"shared-{self._num_shared}-{rank}")) for rank in ranks]

    def allocate(self, region: PeerRegion, num_bytes: int) -> None:
        region.own = self.setting.driver.allocate(num_bytes, coherent=True)

    def share(self, region: PeerRegion, num_bytes: int) -> None:
        driver, own = self.setting.driver, self.setting.rank
        handles = self._exchange(driver.export_memory(region.own))
        opened = {r: driver.open_memory(h) for r, h in enumerate(handles) if r != own}
        region.kept.append(opened)

    def mapped(self, region: PeerRegion, rank: int) -> int:
        return int(region.kept[0][rank])

    def unmap(self, region: PeerRegion) -> None:
        super().unmap(region)
        for opened in region.kept:
            while opened:
                self.setting.driver.close_memory(opened.popitem()[1])

    def release(self, region: PeerRegion) -> None:
        self.unmap(region)
        self.setting.driver.free(region.own)

    def place_in_record(self, control: PeerRegion, data: PeerRegion) -> None:
        self.record["heap"] = control.own
        for name, region in (("window", control), ("data_window", data)):
            bases = {**region.kept[0], self.setting.rank: region.own}
            words = [bases[rank] for rank in reversed(range(len(bases)))]
            content = np.array(words, dtype=np.uint64).tobytes()
            upload(self.setting.driver, int(self.record[name]), content)


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
    servers: int, make: Any = SharedNetwork, **options: Any
) -> Iterator[Communicator]:
    """A communicator of all ranks, each server a host of its own; nothing of it may be left."""
    ranks = dist.get_world_size()
    with host_device() as driver, hosts_of(dist.get_rank(), ranks // servers, make):
        with Communicator(**on_network(driver, servers, options)) as comm:
            yield comm
        dist.barrier()  # all have left, so what could not be freed before can be now


def on_network(driver: HostDriver, servers: int, options: dict[str, Any]) -> dict[str, Any]:
    """Options of a communicator over the shared network; cross_rail: of the transport."""
    options = dict(options)
    transport = transports.nccl_gin(cross_rail=options.pop("cross_rail", False))
    given = {"buffer_bytes": 0, "entry_timeout_s": 50.0, "progress_timeout_s": 40.0, **options}
    return {"servers": servers, "transport": transport, "backend": driver, **given}
