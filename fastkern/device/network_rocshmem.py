"""rocshmem: rocSHMEM between servers, set up through rocshmem4py, rocSHMEM's own binding.

rocshmem4py is built against the rocSHMEM that is installed; there is no wheel of it on PyPI. It is
used rather than ctypes because rocSHMEM's host functions are C++, with C++ types in their names.
Written from its documentation and sources (rocSHMEM 3.6), and never run.

rocSHMEM's heap has a fixed size, ROCSHMEM_HEAP_SIZE (1 GiB if not set), which must be set before
the first communicator: room for control words and buffer_bytes or, for all calls to fit,
max_buffer_bytes. It does not tell whether it has been started: a program that starts it itself
cannot use this transport.
"""

from __future__ import annotations

import importlib
from typing import Any

from ..errors import DeviceUnavailableError
from .network import Setting
from .network_shmem import ShmemNetwork, ShmemSession


class Rocshmem:
    """See network_shmem.Shmem. binding: the module rocshmem4py, imported where none is given."""

    name = "rocSHMEM"
    heap_setting = "its heap has ROCSHMEM_HEAP_SIZE bytes, set before the process starts it"

    def __init__(self, binding: Any = None) -> None:
        self._binding = binding or _import_binding()
        self._started = False

    def initialized(self) -> bool:
        return self._started

    def unique_id(self) -> bytes:
        return bytes(self._binding.rocshmem_get_uniqueid())

    def init(self, device: int, rank: int, num_ranks: int, unique_id: bytes) -> None:
        del device  # the one that is current
        self._binding.rocshmem_init_attr(rank, num_ranks, unique_id)
        self._started = True

    def my_pe(self) -> int:
        return int(self._binding.rocshmem_my_pe())

    def n_pes(self) -> int:
        return int(self._binding.rocshmem_n_pes())

    def malloc(self, num_bytes: int) -> int:
        try:
            return int(self._binding.rocshmem_malloc(num_bytes))
        except RuntimeError:  # what the binding makes of a null pointer
            return 0

    def free(self, address: int) -> None:
        self._binding.rocshmem_free(address)

    def pointer(self, address: int, pe: int) -> int:
        return int(self._binding.rocshmem_ptr(address, pe))

    def module_init(self, module: Any) -> None:
        if status := self._binding.rocshmem_hipmodule_init(int(module)):
            raise RuntimeError(f"rocshmem_hipmodule_init returned {status}")
        self._binding.hip_device_synchronize()  # it copies in a stream of its own

    def module_finalize(self, module: Any) -> None:
        """rocSHMEM has no counterpart."""


_sessions: list[ShmemSession] = []


def make_rocshmem(setting: Setting) -> ShmemNetwork:
    """A communicator's share of this process's rocSHMEM."""
    if not _sessions:
        _sessions.append(ShmemSession(Rocshmem()))
    return ShmemNetwork(setting, _sessions[0])


def check_rocshmem() -> None:
    """Raise DeviceUnavailableError unless rocSHMEM's binding is there."""
    _import_binding()


def _import_binding() -> Any:
    try:
        return importlib.import_module("rocshmem4py")
    except (ImportError, OSError) as error:
        raise DeviceUnavailableError(
            f"the transport rocshmem cannot be set up: cannot import rocshmem4py ({error}). It "
            "comes with rocSHMEM's sources, and is built against the rocSHMEM that is installed"
        ) from error
