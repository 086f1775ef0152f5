"""nvshmem: NVSHMEM between servers, set up through nvshmem4py, NVIDIA's own binding.

Its heap grows by itself where it uses CUDA's virtual memory (the default), so nothing is reserved
at the start; where it does not (NVSHMEM_DISABLE_CUDA_VMM=1), NVSHMEM_SYMMETRIC_SIZE is all there
ever is: room for control words and buffer_bytes or, for all calls to fit, max_buffer_bytes.

Memory and modules go through nvshmem.bindings, the layer below nvshmem.core: plain addresses need
no objects that must be kept from the garbage collector, and nvshmem.core 0.4 prints a line for each
module, and cannot take its leave of one.
"""

from __future__ import annotations

import ctypes
import importlib
from typing import Any

from ..errors import DeviceUnavailableError
from .network import Setting, library_call
from .network_shmem import ShmemNetwork, ShmemSession


class Nvshmem:
    """See network_shmem.Shmem. modules: nvshmem.core, nvshmem.bindings and cuda.core, imported
    where none are given."""

    name = "NVSHMEM"
    heap_setting = (
        "its heap is limited by NVSHMEM_MAX_MEMORY_PER_GPU, or, without CUDA's virtual memory, by "
        "NVSHMEM_SYMMETRIC_SIZE"
    )

    def __init__(self, modules: tuple[Any, Any, Any] | None = None) -> None:
        self._core, self._bindings, self._cuda = modules or _import_modules()

    def initialized(self) -> bool:
        status = self._core.InitStatus
        found = int(self._bindings.init_status())
        return found in (status.STATUS_IS_INITIALIZED, status.STATUS_FULL_MPG)

    def unique_id(self) -> bytes:
        made = self._core.get_unique_id()
        return ctypes.string_at(made.ptr, self._bindings.uniqueid_dtype.itemsize)

    def init(self, device: int, rank: int, num_ranks: int, unique_id: bytes) -> None:
        made = self._core.get_unique_id(empty=True)
        ctypes.memmove(made.ptr, unique_id, len(unique_id))
        self._core.init(
            device=self._cuda.Device(device),
            uid=made,
            rank=rank,
            nranks=num_ranks,
            initializer_method="uid",
        )

    def my_pe(self) -> int:
        return int(self._bindings.my_pe())

    def n_pes(self) -> int:
        return int(self._bindings.n_pes())

    def malloc(self, num_bytes: int) -> int:
        return int(self._bindings.malloc(num_bytes))

    def free(self, address: int) -> None:
        self._bindings.free(address)

    def pointer(self, address: int, pe: int) -> int:
        return int(self._bindings.ptr(address, pe))

    def module_init(self, module: Any) -> None:
        if status := self._bindings.cumodule_init(int(module)):
            raise RuntimeError(f"nvshmemx_cumodule_init returned {status}")

    def module_finalize(self, module: Any) -> None:
        if status := self._bindings.cumodule_finalize(int(module)):
            raise RuntimeError(f"nvshmemx_cumodule_finalize returned {status}")


_sessions: list[ShmemSession] = []


def make_nvshmem(setting: Setting) -> ShmemNetwork:
    """A communicator's share of this process's NVSHMEM."""
    if not _sessions:
        _sessions.append(ShmemSession(Nvshmem()))
    return ShmemNetwork(setting, _sessions[0])


def check_nvshmem() -> None:
    """Raise DeviceUnavailableError unless NVSHMEM and its binding are there."""
    core, _, _ = _import_modules()
    try:
        with library_call("nvshmem.core.get_version"):
            core.get_version()
    except Exception as error:
        raise _unavailable(str(error)) from error


def _import_modules() -> tuple[Any, Any, Any]:
    try:
        names = ("nvshmem.core", "nvshmem.bindings", "cuda.core")
        core, bindings, cuda = (importlib.import_module(name) for name in names)
    except ImportError as error:
        raise _unavailable(f"cannot import nvshmem4py ({error})") from error
    return core, bindings, cuda


def _unavailable(what: str) -> DeviceUnavailableError:
    return DeviceUnavailableError(
        f"the transport nvshmem cannot be set up: {what}. `pip install 'fastkern[nvshmem]'` "
        "installs NVSHMEM and its binding"
    )
