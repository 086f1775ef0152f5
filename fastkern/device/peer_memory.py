"""Memory that each rank allocates and its peers map, and how it is shared: by the drivers' own
handles. See memory.py for the choice; networks bring memory of their own (network.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

from .. import bootstrap
from ..errors import FastkernError
from .driver import Driver
from .together import logged, together
from .transfer import fill

_ROUND_BYTES = 2 << 20  # what a GPU maps at a time: another allocation must not share it


@dataclass
class PeerRegion:
    """Memory of the same size on every rank.

    own: this rank's address. addresses: of each rank, as mapped here; 0: not reachable. kept: what
    the provider needs to hold.
    """

    own: int
    addresses: tuple[int, ...]
    kept: list[Any] = field(default_factory=list)


class PeerMemory(Protocol):
    """A way to share memory between ranks."""

    def open(self, num_bytes: int, zero: bool) -> PeerRegion:
        """Allocate and map, on all ranks together; the sizes are equal.

        zero: the memory is zero before any peer has mapped it. Raises HeapMemoryError or
        FastkernError, the same on every rank, and leaves nothing behind.
        """

    def unmap(self, region: PeerRegion) -> None:
        """Let go of the peers' memory. Kernels of this rank that use it have ended."""

    def free(self, region: PeerRegion) -> None:
        """Free this rank's memory, failures being logged. Its peers have let go of it, or died."""

    def place(self, control: PeerRegion, data: PeerRegion) -> None:
        """Where a heap's parts lie from here on; between kernels. Raises FastkernError."""

    def close(self) -> None:
        """Nothing is left to free, and no kernel runs: let go of what regions need."""


class IpcPeerMemory:
    """Plain device memory and the driver's handles for other processes: CUDA IPC, HIP IPC.

    local_ranks: those that can be mapped, this rank among them: ranks of one host.
    """

    def __init__(self, driver: Driver, group: Any, local_ranks: Sequence[int]) -> None:
        self._driver = driver
        self._group = group
        self._rank = bootstrap.rank_of(group)
        self._num_ranks = bootstrap.size_of(group)
        self._peers = [r for r in local_ranks if r != self._rank]

    def open(self, num_bytes: int, zero: bool) -> PeerRegion:
        driver, region = self._driver, PeerRegion(0, ())

        def make() -> bytes:
            region.own = driver.allocate(
                -(-num_bytes // _ROUND_BYTES) * _ROUND_BYTES, coherent=True
            )
            if zero:
                fill(driver, region.own, 0, num_bytes)
            return driver.export_memory(region.own)

        opened: dict[int, int] = {}

        def map_peers() -> None:
            for rank in self._peers:
                opened[rank] = driver.open_memory(handles[rank])

        def undo_mapping() -> None:
            for rank in list(opened):
                logged("unmapping of the heap", partial(driver.close_memory, opened.pop(rank)))

        with ExitStack() as undo:
            undo.callback(self.free, region)
            handles = together(self._group, "allocation of the heap", make)
            undo.callback(undo_mapping)
            try:
                together(self._group, "mapping of the heap", map_peers)
            except FastkernError:  # on all ranks: none frees what another has mapped
                undo_mapping()
                bootstrap.gather(None, self._group)
                raise
            undo.pop_all()
        opened[self._rank] = region.own
        region.addresses = tuple(opened.get(rank, 0) for rank in range(self._num_ranks))
        return region

    def unmap(self, region: PeerRegion) -> None:
        mapped, region.addresses = region.addresses, ()
        with ExitStack() as each:
            for rank in self._peers if mapped else ():
                each.callback(self._driver.close_memory, mapped[rank])

    def free(self, region: PeerRegion) -> None:
        own, region.own = region.own, 0
        if own:
            logged("release of the heap", partial(self._driver.free, own))

    def place(self, control: PeerRegion, data: PeerRegion) -> None:
        """Addresses are all that kernels need."""

    def close(self) -> None:
        """Nothing is held but regions."""
