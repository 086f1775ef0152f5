"""An OpenSHMEM for devices that are the CPU, behind the interface that network_shmem.py has of one.

Its kernels are those of kernels/transport/shared.h, which want tables of addresses; so networks
here say where these lie, as the real libraries need not. A process has one library, as it has of
the real ones.
"""

from __future__ import annotations

from typing import Any

from fastkern.device.network import Setting
from fastkern.device.network_shmem import ShmemNetwork, ShmemSession
from fastkern.device.peer_memory import PeerRegion
from tests.device.shared_network import Exchange, Mapped

FIRST_PE = 100  # so that PEs and ranks differ; kernels are told ranks


class FakeShmem:
    """One rank's library. heap_bytes: of its heap. failing: a call, and from which of its times on
    it fails on rank 1."""

    name = "the OpenSHMEM"
    heap_setting = "HEAP_SIZE says how much it has"

    def __init__(self, heap_bytes: int = 1 << 30, failing: tuple[str, int] | None = None) -> None:
        self.calls: list[str] = []
        self.setting: Any = None  # of the network that calls, set before each start
        self.exchange: Any = None
        self.started = False
        self.pes = 0  # how many it was started with
        self.allocated: dict[int, Mapped] = {}
        self.modules: list[Any] = []
        self._left = heap_bytes
        self._sizes: dict[int, int] = {}
        self._failing = failing

    def use(self, setting: Setting) -> None:
        self.setting, self.exchange = setting, Exchange(setting)

    def note(self, call: str) -> None:
        self.calls.append(call)
        if self._failing is not None and self.setting.rank == 1:
            name, times = self._failing
            if call == name and self.calls.count(name) >= times:
                raise ValueError(f"{name} fails, as wished")

    def initialized(self) -> bool:
        self.note("initialized")
        return self.started

    def unique_id(self) -> bytes:
        self.note("unique_id")
        return b"unique"

    def init(self, device: int, rank: int, num_ranks: int, unique_id: bytes) -> None:
        self.note("init")
        assert (device, rank) == (self.setting.driver.device, self.setting.rank)
        assert self.exchange(unique_id) == [b"unique"] * num_ranks
        self.started, self.pes = True, num_ranks

    def my_pe(self) -> int:
        return FIRST_PE + int(self.setting.rank)

    def n_pes(self) -> int:
        return self.pes

    def malloc(self, num_bytes: int) -> int:
        self.note("malloc")
        self.exchange(b"malloc %d" % num_bytes)
        if num_bytes > self._left:
            return 0
        driver = self.setting.driver
        address = int(driver.allocate(num_bytes, coherent=True))
        self.allocated[address] = Mapped(self.setting, self.exchange, address)
        self._sizes[address] = num_bytes
        self._left -= num_bytes
        return address

    def free(self, address: int) -> None:
        self.note("free")
        self.exchange(b"free")
        self.allocated.pop(address).close()
        self._left += self._sizes.pop(address)
        self.setting.driver.free(address)

    def pointer(self, address: int, pe: int) -> int:
        self.note("pointer")
        return self.allocated[address].bases[pe - FIRST_PE]

    def module_init(self, module: Any) -> None:
        self.note("module_init")
        self.modules.append(module)

    def module_finalize(self, module: Any) -> None:
        self.note("module_finalize")
        self.modules.remove(module)

    def drop(self) -> None:
        """The end of the process: what the library has goes with it."""
        for address, mapped in self.allocated.items():
            mapped.close()
            self.setting.driver.free(address)
        self.allocated.clear()


class TabledNetwork(ShmemNetwork):
    """Tells the kernels where the library's memory lies."""

    def __init__(self, setting: Setting, session: ShmemSession) -> None:
        super().__init__(setting, session)
        self.fake: Any = session.bindings
        self.fake.use(setting)

    def place_in_record(self, control: PeerRegion, data: PeerRegion) -> None:
        super().place_in_record(control, data)
        self.record["heap"] = control.own
        self.record["window"] = self.fake.allocated[control.own].table
        self.record["data_window"] = self.fake.allocated[data.own].table

    def _make_record(self, peers: Any) -> None:
        assert list(peers) == [FIRST_PE + r for r in range(len(peers))]
        super()._make_record(range(len(peers)))
