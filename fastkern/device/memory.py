"""The symmetric heap on devices: what each rank allocates and its peers write.

Two parts per rank. Control (`_host.control_layout`: control words, flags, records) lives as long as
the heap, because epochs do. Data (staging and window) grows: it is replaced, between kernels.

How memory is shared (`PeerMemory`), and why:

- Plain allocations and the driver's IPC handles, `IpcPeerMemory`, are the default. It is one small
  path for NVIDIA, AMD and the CPU, which tests check to the last call, with no state but addresses;
  memory may be of the kind that AMD needs for what peers write; and ranks may share a GPU. It ends
  at the host.
- PyTorch's symmetric memory, `TorchPeerMemory`, maps the GPUs of a whole NVLink domain across hosts
  (fabric handles) and gives multicast addresses, which our kernels do not use yet. Only CUDA, an
  interface that PyTorch calls private, and all ranks must be in reach: the choice for such domains,
  where the caller asks for it.
- Libraries of networks between servers put only into memory that they have allocated or
  registered: their memory comes with the transport (network.py), control and data as two pieces,
  and their own pointers map what is in the server.
- cuda.core's virtual memory is good at growth in place, but leaves the passing of file descriptors
  between processes to us, and has no AMD counterpart.

Who may free what. A rank's kernels and copies write to its peers' memory, so memory is freed when
every rank that has mapped it has let go: in `grow` after a barrier, since all ranks call it; in
`close` without one, since a rank may have died in between: each rank sets a word when it has let go
of its peers' memory (presence.py), and frees its own when all words are set or their processes
gone. What cannot be freed yet is kept, and `release_leftovers` or a later heap's steps free it.
Then the provider itself is closed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from .. import bootstrap
from ..errors import FastkernError
from ..host_link import HostLink
from ..kernels import _host
from .driver import Driver
from .peer_memory import IpcPeerMemory, PeerMemory, PeerRegion
from .presence import Presence
from .slice_heap import SliceHeap
from .together import logged, together
from .transfer import upload

__all__ = ["SliceHeap", "SymmetricHeap", "release_leftovers"]

_ROUND_BYTES = 2 << 20  # of data
_POLL_S = 0.01


class SymmetricHeap:
    """One rank's heap, its peers' as mapped here, and the tables of their addresses.

    Made, grown and closed by all ranks of `group`, the first two together. group: of
    torch.distributed, or a bootstrap.Meeting. num_slots: flags per rank (`flag_slots`).
    record_bytes: payload of a rank's record. data_bytes: staging and window of each rank at first,
    rounded up to 2 MiB. provider: how memory is shared, `IpcPeerMemory` if not given; it belongs to
    the heap from here on. link: to ranks of other hosts, where the provider reaches them.

    Control words are zero before any peer has mapped them, and nobody zeroes them later. Ranks that
    cannot be mapped (on other servers) have null addresses: a network transport serves them.

    Raises HeapMemoryError or FastkernError, the same on every rank; then nothing is left allocated.
    """

    def __init__(
        self,
        driver: Driver,
        group: Any,
        num_slots: int,
        record_bytes: int,
        data_bytes: int,
        provider: PeerMemory | None = None,
        link: HostLink | None = None,
    ) -> None:
        release_leftovers()
        self.rank = bootstrap.rank_of(group)
        self.num_ranks = bootstrap.size_of(group)
        self.data_bytes = 0
        self.layout: dict[str, int] = _host.control_layout(self.num_ranks, num_slots, record_bytes)
        self._driver = driver
        self._group = group
        self._closed = False
        self._tables = 0
        self._control: PeerRegion | None = None
        self._data: PeerRegion | None = None
        try:
            infos = bootstrap.gather(bootstrap.own_info({}, None), group)
            hosts, processes = [i.host for i in infos], [i.process for i in infos]
            self._presence = Presence(group, hosts, processes, link)
        except BaseException:
            if provider is not None:
                logged("closing the heap", provider.close)
            raise
        self._provider = provider or IpcPeerMemory(driver, group, self._presence.local_ranks)
        try:
            together(group, "allocation of the heap", self._allocate_tables)
            self._control = self._provider.open(self.layout["bytes"], zero=True)
            self.grow(max(data_bytes, 1))
        except FastkernError:  # on all ranks alike
            self._undo(barrier=True)
            raise
        except BaseException:
            self._undo(barrier=False)
            raise

    def _allocate_tables(self) -> None:
        self._tables = self._driver.allocate(3 * 8 * self.num_ranks, coherent=False)

    def _undo(self, barrier: bool) -> None:
        regions = [region for region in (self._control, self._data) if region is not None]
        for region in regions:
            logged("closing the heap", partial(self._provider.unmap, region))
        if barrier:  # no rank frees what another has mapped
            bootstrap.gather(None, self._group)
        for region in regions:
            self._provider.free(region)
        if self._tables:
            logged("closing the heap", partial(self._driver.free, self._tables))
        logged("closing the heap", self._provider.close)
        self._closed = True

    # -- growth ------------------------------------------------------------------------------------

    def grow(self, data_bytes: int, streams: Sequence[int] = ()) -> None:
        """Have at least data_bytes of data per rank, in place of what there was; control stays.

        All ranks call it, with the same size, when their kernels have been launched into `streams`,
        which are synchronised: no rank lets go of the old data before all have ended. Never under
        capture.

        Raises HeapMemoryError, on every rank, where there is not so much; then there is no data,
        and a smaller size may be asked for. FastkernError, on every rank, where sizes differ, a
        stream has failed, or memory cannot be mapped.
        """

        def stop() -> int:
            for stream in streams:
                self._driver.synchronize(stream)
            return data_bytes

        sizes = together(self._group, "end of the kernels before growth", stop)
        if len(set(sizes)) > 1:
            raise FastkernError(f"ranks want the heap to grow to different sizes: {sizes}")
        if data_bytes <= self.data_bytes:
            return
        wanted = -(-data_bytes // _ROUND_BYTES) * _ROUND_BYTES
        release_leftovers()
        self._drop_data()
        self._data = self._provider.open(wanted, zero=False)
        try:
            together(self._group, "addresses of the heap", self._upload_tables)
        except FastkernError:
            self._drop_data()
            raise
        self.data_bytes = wanted

    def _drop_data(self) -> None:
        self.data_bytes = 0
        if (data := self._data) is not None:
            together(self._group, "unmapping of the heap", lambda: self._provider.unmap(data))
            self._provider.free(data)
            self._data = None

    def _upload_tables(self) -> None:
        assert self._control is not None
        assert self._data is not None
        self._provider.place(self._control, self._data)
        rows = [self.control_address, self.flags_address, self.data_address]
        words = [[row(rank) for rank in range(self.num_ranks)] for row in rows]
        upload(self._driver, self._tables, np.array(words, dtype=np.uint64).tobytes())

    # -- end ---------------------------------------------------------------------------------------

    def close(self, streams: Sequence[int] = (), timeout_s: float = 0.0) -> bool:
        """Let go of the peers' memory, and free this rank's when they have let go of it.

        The rank's kernels are in `streams`, which are synchronised. timeout_s: how long to wait for
        the peers. Returns whether all is freed; if not, `release_leftovers` does it later, or the
        process's end. Failures are logged, so that what caused them is not hidden. A second call
        goes on waiting.
        """
        if not self._closed:
            self._closed = True
            regions = [region for region in (self._data, self._control) if region is not None]
            steps: list[Callable[[], None]] = [
                *(partial(self._driver.synchronize, stream) for stream in streams),
                *(partial(self._provider.unmap, region) for region in regions),
                partial(self._driver.free, self._tables),
            ]
            for step in steps:
                logged("closing the heap", step)
            self._presence.leave()
            _leftovers.append(self)
        end = time.monotonic() + timeout_s
        while not self._release() and time.monotonic() < end:
            time.sleep(_POLL_S)
        return self not in _leftovers

    def _release(self) -> bool:
        """Free this rank's memory if no peer may use it."""
        if self not in _leftovers:
            return True
        if self._presence.remaining():
            return False
        _leftovers.remove(self)
        self._presence.close()
        for region in (self._data, self._control):
            if region is not None:
                self._provider.free(region)
        self._data = self._control = None
        logged("closing the heap", self._provider.close)
        return True

    # -- addresses ---------------------------------------------------------------------------------

    def control_address(self, rank: int) -> int:
        """Of a rank's Control and what follows it (`layout`), as mapped here; 0: not reachable."""
        assert self._control is not None
        return self._control.addresses[rank]

    def flags_address(self, rank: int) -> int:
        """Of a rank's flags, num_slots words, as mapped here; 0: not reachable."""
        base = self.control_address(rank)
        return base + self.layout["flags"] if base else 0

    def data_address(self, rank: int) -> int:
        """Of a rank's data_bytes, as mapped here; 0: not reachable."""
        assert self._data is not None, "growth failed before"
        return self._data.addresses[rank]

    @property
    def controls_table(self) -> int:
        """Address, on the device, of the ranks' control addresses: [num_ranks] words."""
        return self._tables

    @property
    def flags_table(self) -> int:
        """Address, on the device, of the ranks' flags' addresses: [num_ranks] words."""
        return self._tables + 8 * self.num_ranks

    @property
    def data_table(self) -> int:
        """Address, on the device, of the ranks' data's addresses: [num_ranks] words."""
        return self._tables + 16 * self.num_ranks


_leftovers: list[SymmetricHeap] = []


def release_leftovers() -> int:
    """Free the memory of closed heaps whose peers have let go by now; how many heaps are left."""
    for heap in list(_leftovers):
        heap._release()
    return len(_leftovers)
