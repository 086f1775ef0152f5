"""NCCL's Python binding for devices that are the CPU: what network_gin.py calls of nccl.core.

Windows are tables of the addresses that a window's memory has here, which is what the kernels of
kernels/transport/shared.h take for one; so the real set-up runs whole calls. All that is called is
noted, and may fail.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum, IntFlag
from types import SimpleNamespace
from typing import Any

from fastkern.device.network import Setting
from fastkern.device.network_gin import GinNetwork
from tests.device.shared_network import Exchange, Mapped

DEV_COMM = bytes(range(248))
CONTEXTS = 3


class WindowFlag(IntFlag):
    DEFAULT = 0
    COLL_SYMMETRIC = 1
    STRICT_ORDERING = 2


class NcclGinType(IntEnum):
    NONE = 0
    PROXY = 2
    GDAKI = 3
    GPI = 4
    EFA_GDA = 5


class NcclGinConnectionType(IntEnum):
    NONE = 0
    FULL = 1
    RAIL = 2
    CUSTOM_STRIDE = 3


@dataclass(kw_only=True)
class NCCLDevCommRequirements:
    """Those that are asked for; others do not exist here."""

    gin_signal_count: int
    gin_counter_count: int
    gin_connection_type: NcclGinConnectionType
    gin_strong_signals_required: bool
    gin_va_signals_required: bool
    gin_type: NcclGinType


@dataclass
class Site:
    """What NCCL finds. lsa: ranks that map one another; None: those of a server."""

    lsa: int | None = None
    device_api: bool = True
    kinds: frozenset[NcclGinType] = frozenset({NcclGinType.PROXY, NcclGinType.GDAKI})
    connection: NcclGinConnectionType = NcclGinConnectionType.FULL
    windows: bool = True


class UniqueId:
    def __init__(self, content: bytes) -> None:
        self._content = content

    def __bytes__(self) -> bytes:
        return self._content

    @staticmethod
    def from_bytes(content: bytes) -> UniqueId:
        return UniqueId(content)


class DevComm:
    gin_context_count = CONTEXTS

    def __bytes__(self) -> bytes:
        return DEV_COMM


class FakeNccl:
    """The module nccl.core of one rank. failing: a call, and from which of its times on it fails
    on rank 1."""

    WindowFlag = WindowFlag
    NcclGinType = NcclGinType
    NcclGinConnectionType = NcclGinConnectionType
    NCCLDevCommRequirements = NCCLDevCommRequirements
    UniqueId = UniqueId

    def __init__(self, setting: Setting, site: Site, failing: tuple[str, int] | None) -> None:
        self.setting = setting
        self.site = site
        self.calls: list[str] = []
        self.exchange = Exchange(setting)
        self.requirements: NCCLDevCommRequirements | None = None
        self._failing = failing
        self.Communicator = SimpleNamespace(init=self._init)

    def note(self, call: str) -> None:
        self.calls.append(call)
        if self._failing is not None and self.setting.rank == 1:
            name, times = self._failing
            if call == name and self.calls.count(name) >= times:
                raise ValueError(f"{name} fails, as wished")

    def get_unique_id(self) -> UniqueId:
        self.note("get_unique_id")
        return UniqueId(b"unique")

    def _init(self, nranks: int, rank: int, unique_id: UniqueId) -> FakeComm:
        self.note("init")
        assert (nranks, rank) == (self.setting.topology.num_ranks, self.setting.rank)
        assert self.exchange(bytes(unique_id)) == [b"unique"] * nranks
        return FakeComm(self)

    def mem_alloc(self, size: int, device: int) -> FakeBuffer:
        self.note("mem_alloc")
        assert device == self.setting.driver.device
        return FakeBuffer(self, self.setting.driver.allocate(size, coherent=True))


@dataclass
class FakeBuffer:
    nccl: FakeNccl
    handle: int

    def close(self) -> None:
        self.nccl.note("mem_free")
        self.nccl.setting.driver.free(self.handle)


class FakeWindow:
    def __init__(self, nccl: FakeNccl, buffer: FakeBuffer) -> None:
        self._nccl = nccl
        self._mapped = Mapped(nccl.setting, nccl.exchange, buffer.handle)
        self.handle = self._mapped.table if nccl.site.windows else 0

    def get_peer_device_pointer(self, peer: int, offset: int = 0) -> int | None:
        self._nccl.note("get_peer_device_pointer")
        return (
            self._mapped.bases[peer] + offset if peer in self._nccl.setting.server_ranks else None
        )

    def close(self) -> None:
        self._nccl.note("window_deregister")
        self._mapped.close()


@dataclass
class FakeDevComm:
    nccl: FakeNccl
    dev_comm: DevComm = field(default_factory=DevComm)

    def close(self) -> None:
        self.nccl.note("dev_comm_destroy")


class FakeComm:
    def __init__(self, nccl: FakeNccl) -> None:
        self._nccl = nccl
        setting, site = nccl.setting, nccl.site
        self.team_lsa = SimpleNamespace(n_ranks=site.lsa or setting.topology.gpus_per_server)
        self.properties = SimpleNamespace(
            device_api_support=site.device_api,
            available_gin_types=site.kinds,
            gin_connection_type=site.connection,
        )

    def create_dev_comm(self, requirements: NCCLDevCommRequirements) -> FakeDevComm:
        self._nccl.note("create_dev_comm")
        self._nccl.requirements = requirements
        self._nccl.exchange(b"dev comm")
        return FakeDevComm(self._nccl)

    def register_window(self, buffer: FakeBuffer, flags: WindowFlag) -> FakeWindow:
        self._nccl.note("register_window")
        assert flags == WindowFlag.COLL_SYMMETRIC | WindowFlag.STRICT_ORDERING
        return FakeWindow(self._nccl, buffer)

    def abort(self) -> None:
        self._nccl.note("abort")


class Made:
    """Makes networks with a fake binding, and keeps them to look at."""

    def __init__(self, site: Site | None = None, failing: tuple[str, int] | None = None) -> None:
        self._site = site or Site()
        self._failing = failing
        self.nccl: Any = None

    def __call__(self, setting: Setting) -> GinNetwork:
        self.nccl = FakeNccl(setting, self._site, self._failing)
        return GinNetwork(setting, self.nccl)
