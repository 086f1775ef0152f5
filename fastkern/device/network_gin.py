"""nccl_gin: NCCL between servers, set up through nccl4py, NVIDIA's own binding.

nccl4py is chosen over a ctypes layer of ours because it has all that is needed (windows, device
communicators, pointers into a peer's window) with NCCL's structures as generated from its headers,
and comes from NCCL's repository.

A communicator of NCCL is made for each of ours, with ranks in our order. Control words and flags
are one window, data another, which growth replaces; both are memory of ncclMemAlloc. Ranks of a
server are reached through the addresses that NCCL has mapped (its LSA team, which must be the
server): driver handles do not share such memory.

The kernels read ncclDevComm as it is in the headers that they were compiled with, and NCCL lays it
out as in the headers that nccl4py was made from: both must be of the same release, and the library
of that or a newer one.

At the end the communicator is aborted, not destroyed: nothing is under way, and `destroy` would
wait for the other ranks of the host, which close when they want to.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

from ..errors import DeviceUnavailableError, FastkernError
from .compile_gin import LEAST_NCCL, nccl_version_of_image
from .driver import DeviceMemoryError
from .libraries import nccl_text
from .network import Setting, library_call
from .network_memory import LibraryNetwork
from .peer_memory import PeerRegion

_FLAGS_BEFORE_CHUNKS = 2  # ready and credit, see exchange_written in kernels/transport/nccl_gin.h


def check_nccl(nccl: Any = None, kernels: int | None = None) -> None:
    """Raise DeviceUnavailableError unless NCCL, nccl4py and the kernels go together.

    nccl: the module nccl.core. kernels: the NCCL that kernels are compiled against (23203).
    """
    versions = (nccl or _import_nccl()).get_version()
    made_for = kernels if kernels is not None else nccl_version_of_image()
    if versions.libnccl is None:
        raise _unavailable("nccl4py finds no libnccl.so.2")
    library, binding = _number(versions.libnccl.version), _number(versions.nccl_bindings)
    if library < LEAST_NCCL:
        raise _unavailable(
            f"it needs NCCL {nccl_text(LEAST_NCCL)} or newer, and this process has "
            f"{nccl_text(library)} ({versions.libnccl.path})"
        )
    if binding // 100 != made_for // 100:
        raise _unavailable(
            f"nccl4py {versions.nccl4py} is for NCCL {nccl_text(binding)}, and the kernels are for "
            f"{nccl_text(made_for)}: NCCL's headers and nccl4py must be of the same release"
        )
    if library < binding:
        raise _unavailable(
            f"nccl4py {versions.nccl4py} is for NCCL {nccl_text(binding)}, and this process has "
            f"{nccl_text(library)} ({versions.libnccl.path})"
        )


class GinNetwork(LibraryNetwork):
    """NCCL's device API. nccl: the module nccl.core, imported where none is given."""

    name = "NCCL"

    def __init__(self, setting: Setting, nccl: Any = None) -> None:
        super().__init__(setting)
        self._nccl = nccl or _import_nccl()
        self._comm: Any = None
        self._dev_comm: Any = None
        self._needs: Any = None

    def start_library(self) -> Sequence[int]:
        nccl, setting = self._nccl, self.setting
        num_ranks = setting.topology.num_ranks

        def unique_id() -> bytes:
            with library_call("ncclGetUniqueId"):
                return bytes(nccl.get_unique_id()) if setting.rank == 0 else b""

        def init() -> None:
            with library_call("ncclCommInitRank"):
                name = nccl.UniqueId.from_bytes(first)
                self._comm = nccl.Communicator.init(num_ranks, setting.rank, name)

        def create() -> None:
            with library_call("ncclDevCommCreate"):
                self._dev_comm = self._comm.create_dev_comm(self._needs)

        first = self.steps.local("NCCL's unique id", unique_id)[0]
        self.steps.collective("start of NCCL", init)
        self.steps.local("check of NCCL", self._check)
        self.steps.collective("device communicator of NCCL", create)
        return range(num_ranks)

    def _check(self) -> None:
        with library_call("ncclCommQueryProperties"):
            self._needs = self._requirements()

    def _requirements(self) -> Any:
        """What the kernels need, if NCCL has it here; else FastkernError."""
        nccl, topology = self._nccl, self.setting.topology
        size = self._comm.team_lsa.n_ranks
        if size != topology.gpus_per_server:
            raise FastkernError(
                f"a server has {topology.gpus_per_server} ranks here, and NCCL maps the memory of "
                f"{size} ranks into one another: servers= must be {topology.num_ranks // size}, "
                "or the transport peer for one host"
            )
        properties, kinds = self._comm.properties, nccl.NcclGinType
        known = set(properties.available_gin_types or ()) - {kinds.NONE}
        usable = known - {kinds.EFA_GDA}  # which knows no signals at an address
        connection = nccl.NcclGinConnectionType
        wanted = connection.FULL if topology.cross_rail else connection.RAIL
        if not properties.device_api_support or not usable:
            raise FastkernError(
                "NCCL has no network here that GPUs can start transfers on (GIN), but for "
                f"{sorted(kind.name for kind in known)}: it needs NICs with GPUDirect RDMA; "
                "NCCL_DEBUG=INFO says what NCCL lacks"
            )
        if properties.gin_connection_type not in (connection.FULL, wanted):
            offered = connection(properties.gin_connection_type).name
            raise FastkernError(
                f"NCCL offers GIN connections of kind {offered} here, and {wanted.name} is needed"
                + (": nccl_gin(cross_rail=False) does with RAIL" if topology.cross_rail else "")
            )
        kind = kinds.NONE  # any
        if usable != known:
            kind = kinds.PROXY if kinds.PROXY in usable else min(usable)
        return nccl.NCCLDevCommRequirements(
            gin_signal_count=0,
            gin_counter_count=1,
            gin_connection_type=wanted,
            gin_strong_signals_required=False,
            gin_va_signals_required=True,
            gin_type=kind,
        )

    def fill_record(self) -> None:
        setting, made = self.setting, self._dev_comm.dev_comm
        flags = setting.topology.num_ranks * (_FLAGS_BEFORE_CHUNKS + setting.chunk_slots)
        self.record["comm"] = self.keep(bytes(made))
        self.record["written"] = self.keep(bytes(8 * flags))
        self.record["puts"] = self.keep(bytes(8 * made.gin_context_count))
        self.record["num_contexts"] = made.gin_context_count

    def stop_library(self) -> None:
        steps: list[tuple[str, Callable[[], object]]] = []
        if self._comm is not None:
            steps.append(("ncclCommAbort", self._comm.abort))
        if self._dev_comm is not None:
            steps.append(("ncclDevCommDestroy", self._dev_comm.close))
        self._comm = self._dev_comm = None
        self._all_of(steps)

    # -- memory ------------------------------------------------------------------------------------

    def allocate(self, region: PeerRegion, num_bytes: int) -> None:
        try:
            buffer = self._nccl.mem_alloc(num_bytes, self.setting.driver.device)
        except Exception as error:
            text = f"{num_bytes} bytes: {error}"
            raise DeviceMemoryError("ncclMemAlloc", type(error).__name__, text) from error
        region.kept.append(buffer)
        region.own = int(buffer.handle)

    def share(self, region: PeerRegion, num_bytes: int) -> None:
        kinds = self._nccl.WindowFlag
        flags = kinds.COLL_SYMMETRIC | kinds.STRICT_ORDERING
        with library_call("ncclCommWindowRegister"):
            window = self._comm.register_window(region.kept[0], flags)
        region.kept.append(window)
        if not window.handle:
            raise FastkernError(
                "ncclCommWindowRegister: no window: NCCL does not support them on this system"
            )

    def mapped(self, region: PeerRegion, rank: int) -> int:
        with library_call("ncclGetPeerDevicePointer"):
            return int(region.kept[1].get_peer_device_pointer(rank) or 0)

    def release(self, region: PeerRegion) -> None:
        names = ("ncclMemFree", "ncclCommWindowDeregister")
        self._all_of([(name, thing.close) for name, thing in zip(names, region.kept, strict=False)])

    def place_in_record(self, control: PeerRegion, data: PeerRegion) -> None:
        self.record["heap"] = control.own
        self.record["window"] = control.kept[1].handle
        self.record["data_window"] = data.kept[1].handle

    def _all_of(self, steps: Sequence[tuple[str, Callable[[], object]]]) -> None:
        """The last first, all of them whatever becomes of one."""

        def one(name: str, step: Callable[[], object]) -> None:
            with library_call(name), self.setting.driver.current():
                step()

        with ExitStack() as each:
            for name, step in steps:
                each.callback(partial(one, name, step))


def _number(version: Any) -> int:
    """Version("2.32.3") as NCCL_VERSION_CODE has it: 23203."""
    return int(version.major * 10000 + version.minor * 100 + version.micro)


def _import_nccl() -> Any:
    try:
        return importlib.import_module("nccl.core")
    except ImportError as error:
        raise _unavailable(f"cannot import nccl.core ({error})") from error


def _unavailable(what: str) -> DeviceUnavailableError:
    return DeviceUnavailableError(
        f"the transport nccl_gin cannot be set up: {what}. `pip install 'fastkern[gin]'` installs "
        "NCCL and nccl4py; PyTorch must use the same NCCL"
    )
