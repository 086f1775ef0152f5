"""Networks whose library is an OpenSHMEM: NVSHMEM and rocSHMEM, which differ in names.

Such a library is one per process: started once, over all ranks that will ever use it, and never
again, not even after `finalize` or the death of a rank. So all communicators share it
(ShmemSession), and must be of the same ranks as the first; those of other ranks need other
processes. It stays until the process ends. One that the program has started itself is used as it
is.

Memory is of its symmetric heap. Allocating and freeing wait for all ranks, and a communicator may
be closed by one rank alone: so what is free is noted, and freed when all ranks have noted it and
are about to allocate again. Control words and data are allocations of their own; puts name a
symmetric address, so growth replaces the data and nothing else. Ranks of a server are reached
through the library's own pointers (nvshmem_ptr, rocshmem_ptr).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from ..errors import FastkernError
from .driver import DeviceMemoryError
from .network import Setting, library_call
from .network_memory import LibraryNetwork
from .peer_memory import PeerRegion

_ALIGNMENT = 256


class Shmem(Protocol):
    """The host's side of a library. Every function may raise whatever its binding raises.

    name: for messages, "NVSHMEM". heap_setting: what to set where its heap is too small.
    """

    name: str
    heap_setting: str

    def initialized(self) -> bool:
        """Whether it has been started in this process."""

    def unique_id(self) -> bytes:
        """What one rank tells the others before they start it."""

    def init(self, device: int, rank: int, num_ranks: int, unique_id: bytes) -> None:
        """Start it; waits for all ranks."""

    def my_pe(self) -> int:
        """This rank's number there."""

    def n_pes(self) -> int:
        """Their number."""

    def malloc(self, num_bytes: int) -> int:
        """An address in the symmetric heap, 0 where there is not so much; waits for all ranks."""

    def free(self, address: int) -> None:
        """What `malloc` returned; waits for all ranks."""

    def pointer(self, address: int, pe: int) -> int:
        """The same object on another rank, as mapped here; 0: it is not."""

    def module_init(self, module: Any) -> None:
        """Tell a loaded module of the library's state."""

    def module_finalize(self, module: Any) -> None:
        """The module will be unloaded."""


class ShmemSession:
    """The library in this process, and what has been allocated of its heap, in the order that is
    the same on all ranks."""

    def __init__(self, library: Shmem) -> None:
        self.bindings = library
        self.num_allocations = 0
        self.retired: dict[int, int] = {}  # addresses by number, which wait to be freed

    def next_allocation(self) -> int:
        """The number of an allocation that all ranks try, whatever becomes of it on one of them."""
        self.num_allocations += 1
        return self.num_allocations


class ShmemNetwork(LibraryNetwork):
    """One communicator's use of a session."""

    def __init__(self, setting: Setting, session: ShmemSession) -> None:
        super().__init__(setting)
        self.name = session.bindings.name
        self._session = session
        self._library = session.bindings
        self._peers: list[int] = []

    def start_library(self) -> Sequence[int]:
        library, setting = self._library, self.setting
        num_ranks = setting.topology.num_ranks

        def state() -> tuple[bool, bytes]:
            with library_call(f"unique id of {self.name}"):
                if library.initialized():
                    return True, b""
                return False, library.unique_id() if setting.rank == 0 else b""

        def init() -> None:
            with library_call(f"start of {self.name}"):
                library.init(setting.driver.device, setting.rank, num_ranks, first)

        def numbers() -> tuple[int, int]:
            with library_call(f"PEs of {self.name}"):
                return library.my_pe(), library.n_pes()

        states = self.steps.local(f"state of {self.name}", state)
        started, first = [done for done, _ in states], states[0][1]
        if any(started) and not all(started):
            missing = [rank for rank, done in enumerate(started) if not done]
            raise FastkernError(
                f"{self.name} runs in some of these processes, not on ranks {missing}, and cannot "
                "be started again: start new processes"
            )
        if not any(started):
            self.steps.collective(f"start of {self.name}", init)
        found = self.steps.local(f"PEs of {self.name}", numbers)
        self._peers = [pe for pe, _ in found]
        if {count for _, count in found} != {num_ranks} or len(set(self._peers)) != num_ranks:
            raise FastkernError(
                f"{self.name} runs with {found[0][1]} PEs in these processes, those here being "
                f"{self._peers}: it starts once in a process, and all communicators with it must "
                "be of the same ranks; after the death of a rank, or for other ranks, start new "
                "processes"
            )
        return self._peers

    def stop_library(self) -> None:
        """It goes on, for other communicators, until the process ends."""

    def after_load(self, module: Any) -> None:
        with library_call(f"{self.name}'s state in the kernels"), self.setting.driver.current():
            self._library.module_init(module)

    def before_unload(self, module: Any) -> None:
        with self.setting.driver.current():
            self._library.module_finalize(module)

    # -- memory ------------------------------------------------------------------------------------

    def prepare_memory(self) -> None:
        """Free what all ranks have let go of."""
        retired = self._session.retired
        noted = self.steps.local(f"memory of {self.name}", lambda: sorted(retired))
        everywhere = sorted(set(noted[0]).intersection(*noted[1:]))
        if not everywhere:
            return

        def release() -> None:
            with library_call(f"{self.name}'s free"):
                for number in everywhere:
                    self._library.free(retired.pop(number))

        self.steps.collective(f"memory of {self.name}", release)

    def share(self, region: PeerRegion, num_bytes: int) -> None:
        number = self._session.next_allocation()
        with library_call(f"{self.name}'s malloc"):
            address = self._library.malloc(num_bytes)
        if not address:
            text = f"{num_bytes} bytes: {self._library.heap_setting}"
            raise DeviceMemoryError(f"{self.name}'s malloc", "no memory", text)
        region.kept.append(number)
        region.own = address
        if address % _ALIGNMENT:
            raise FastkernError(f"{self.name}'s malloc: {address:#x} is not a multiple of 256")

    def mapped(self, region: PeerRegion, rank: int) -> int:
        with library_call(f"{self.name}'s ptr"):
            return self._library.pointer(region.own, self._peers[rank])

    def release(self, region: PeerRegion) -> None:
        for number in region.kept:
            self._session.retired[number] = region.own
