"""What a rank's runtime on a device consists of, made in the order in which it is undone again."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from ..entry import Entry
from ..errors import FastkernError
from ..heap import ProcessIdentity
from ..host_link import HostLink
from ..planner import Topology
from ..planner.api import DEFAULT_CHUNK_SLOTS
from ..planner.table import flag_slots
from ..runtime import RuntimeOptions
from .backend import DeviceBackend
from .memory import SymmetricHeap
from .network import Network, Setting, library_call
from .together import logged, together
from .virtual_kernels import ENTRY_OF, Kernels, default_load, is_triton

_RECORD_BYTES = 8  # of the heap's own records, which nobody writes: ranks meet in Entry


@dataclass(frozen=True)
class DeviceParts:
    """kernels, all loaded; entry, where ranks meet; heap. network_args: address of what kernels
    are told of the network between servers, or 0."""

    kernels: Kernels
    entry: Entry
    heap: SymmetricHeap
    network_args: int


def make_parts(
    made: ExitStack,
    backend: DeviceBackend,
    group: Any,
    rank: int,
    topology: Topology,
    processes: Sequence[ProcessIdentity],
    hosts: Sequence[str],
    options: RuntimeOptions,
    num_blocks: int,
    num_lanes: int,
) -> DeviceParts:
    """All parts, on all ranks together; what undoes them goes to `made`. See DeviceRuntime.

    One server has nothing to put between servers: whatever the transport, it is what `peer` is.
    Raises FastkernError, the same on every rank.
    """
    driver = backend.driver
    kind = backend.network if topology.servers > 1 else None
    transport = options.transport.name if kind is not None else "peer"
    load_image = default_load(driver, transport, options.tile_bytes)
    kernels = Kernels(driver, load_image, 1, num_blocks, transport)
    made.callback(kernels.close)

    def load() -> None:
        for name, entry in ENTRY_OF.items():
            if driver.kernels == "triton" and not is_triton(driver, entry):
                continue  # in C++, whose compiler is needed where a static exchange is made
            kernels.get(name, num_lanes)

    together(group, "loading of the kernels", load)
    link = HostLink(group, rank, hosts) if kind is not None else None
    entry = Entry(
        group,
        rank,
        topology.num_ranks,
        processes,
        options.entry_timeout_s,
        link=link if len(set(hosts)) > 1 else None,
    )
    made.callback(entry.close)
    try:
        network = None
        if kind is not None and link is not None:
            setting = Setting(
                driver,
                entry,
                entry.check_hosts,
                link,
                rank,
                topology,
                DEFAULT_CHUNK_SLOTS,
                options.entry_timeout_s,
            )
            network = kind.make(setting)
            network.start()
            _tell_of_kernels(network, entry, kernels.moving_modules(num_lanes), made)
        slots = flag_slots(topology.servers, topology.gpus_per_server, DEFAULT_CHUNK_SLOTS)
        size = options.buffer_bytes
        heap = SymmetricHeap(driver, entry, slots, _RECORD_BYTES, size, network, link)
    except FastkernError:  # on all ranks alike
        raise
    except BaseException as error:  # of this rank alone: the others wait for it
        entry.fail(error)
        raise
    made.callback(lambda: backend.keep_open_unless(heap.close()))
    return DeviceParts(kernels, entry, heap, 0 if network is None else network.args)


def _tell_of_kernels(
    network: Network, entry: Entry, modules: Sequence[Any], made: ExitStack
) -> None:
    leave = ExitStack()
    made.callback(leave.close)

    def tell() -> None:
        for module in modules:
            network.after_load(module)
            leave.callback(_leave, network, module)

    try:
        together(entry, "kernels of the network", tell)
    except BaseException:
        network.close()
        raise


def _leave(network: Network, module: Any) -> None:
    def unload() -> None:
        with library_call("unloading of the kernels"):
            network.before_unload(module)

    logged("closing", unload)
