"""What networks have in common: the heap's memory, step by step, and the record for kernels."""

# ruff: noqa: B027 - what a library has no use for stays empty

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import numpy as np

from ..errors import FastkernError
from .network import Setting, Steps
from .peer_memory import PeerRegion
from .records import NETWORK_ARGS, new_record
from .together import logged
from .transfer import fill, upload

_ROUND_BYTES = 2 << 20  # of each piece of memory


class LibraryNetwork(ABC):
    """Base of networks. A library's own file says what it does in each step.

    name: of the library, for messages. See network.Network.
    """

    name = ""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.steps = Steps(setting)
        self.record: Any = new_record(NETWORK_ARGS)
        self._args = 0
        self._pieces: list[int] = []
        self._closed = False

    @property
    def args(self) -> int:
        """See Network."""
        assert self._args, "not started"
        return self._args

    # -- start and end -----------------------------------------------------------------------------

    def start(self) -> None:
        """See Network."""
        try:
            peers = self.start_library()
            self.steps.local(f"memory for {self.name}", lambda: self._make_record(peers))
        except BaseException:
            self.close()
            raise

    @abstractmethod
    def start_library(self) -> Sequence[int]:
        """Start it, on all ranks; what it calls each rank. On errors `stop_library` follows."""

    def fill_record(self) -> None:
        """What stands in `record` from the start besides `peers`. Memory by `keep`."""

    def stop_library(self) -> None:
        """Let go of what `start_library` has made, as far as it has. Raises FastkernError."""

    def after_load(self, module: Any) -> None:
        """See Network."""

    def before_unload(self, module: Any) -> None:
        """See Network."""

    def _make_record(self, peers: Sequence[int]) -> None:
        self.record["peers"] = self.keep(np.asarray(peers, dtype=np.uint32).tobytes())
        self.fill_record()
        self._args = self.keep(self.record.tobytes())

    def keep(self, content: bytes) -> int:
        """Address of device memory with this content, which lives as long as the network."""
        driver = self.setting.driver
        address = driver.allocate(len(content), coherent=False)
        self._pieces.append(address)
        upload(driver, address, content)
        return address

    def close(self) -> None:
        """See PeerMemory. A second call does nothing."""
        if self._closed:
            return
        self._closed = True
        self.steps.undo(f"closing {self.name}", self.stop_library)
        while self._pieces:
            logged(f"closing {self.name}", partial(self.setting.driver.free, self._pieces.pop()))

    # -- memory ------------------------------------------------------------------------------------

    def open(self, num_bytes: int, zero: bool) -> PeerRegion:
        """See PeerMemory."""
        region = PeerRegion(0, ())
        size = -(-num_bytes // _ROUND_BYTES) * _ROUND_BYTES

        def map_server() -> None:
            if zero:
                fill(self.setting.driver, region.own, 0, num_bytes)
            region.addresses = self._mapped(region)

        with ExitStack() as undo:
            undo.callback(self.free, region)
            self.prepare_memory()
            self.steps.local("allocation of the heap", lambda: self.allocate(region, size))
            self.steps.collective("sharing of the heap", lambda: self.share(region, size))
            self.steps.local("mapping of the heap", map_server)
            undo.pop_all()
        return region

    def prepare_memory(self) -> None:
        """What comes before any allocation, on all ranks."""

    def allocate(self, region: PeerRegion, num_bytes: int) -> None:
        """Memory that no other rank is needed for: region.own, and `kept` what frees it."""

    def share(self, region: PeerRegion, num_bytes: int) -> None:
        """What the library does with all ranks at once: allocates too, or registers."""

    @abstractmethod
    def mapped(self, region: PeerRegion, rank: int) -> int:
        """The region of another rank of this server, as mapped here; 0: it is not."""

    @abstractmethod
    def release(self, region: PeerRegion) -> None:
        """Undo `share` and `allocate`, as far as they have come. Raises FastkernError."""

    def _mapped(self, region: PeerRegion) -> tuple[int, ...]:
        addresses = [0] * self.setting.topology.num_ranks
        for rank in self.setting.server_ranks:
            own = rank == self.setting.rank
            addresses[rank] = region.own if own else self.mapped(region, rank)
            if not addresses[rank]:
                raise FastkernError(
                    f"{self.name} does not map the memory of rank {rank}, which is of the same "
                    "server: GPUs of a server must reach each other's memory (NVLink, xGMI, PCIe "
                    "with peer access); servers= says what a server is"
                )
        return tuple(addresses)

    def unmap(self, region: PeerRegion) -> None:
        """See PeerMemory: mappings are the library's, and go with the memory."""
        region.addresses = ()

    def free(self, region: PeerRegion) -> None:
        """See PeerMemory. Where the library may be using it, that is stopped first."""
        if self.steps.stuck:
            self.close()
        if region.own or region.kept:
            self.steps.undo("release of the heap", partial(self.release, region))
        region.own, region.addresses = 0, ()
        region.kept.clear()

    def place(self, control: PeerRegion, data: PeerRegion) -> None:
        """See PeerMemory."""
        self.place_in_record(control, data)
        upload(self.setting.driver, self.args, self.record.tobytes())

    def place_in_record(self, control: PeerRegion, data: PeerRegion) -> None:
        """What `record` says of the heap."""
