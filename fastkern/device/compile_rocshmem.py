"""HIP with rocSHMEM: HIPRTC to bitcode, linked with rocSHMEM's own by HIPRTC's linker."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

from ..errors import CompileError, DeviceUnavailableError
from .compile_hip import HIP_FLAGS, HipCompiler, bindings, values
from .libraries import identity, rocshmem_folders
from .sources import EntrySource


class RocshmemCompiler(HipCompiler):
    """Compiles a transport's entry to a code object that calls rocSHMEM.

    Once it is loaded, rocSHMEM must be told (rocshmem_hipmodule_init), or its state there is empty.
    """

    name = "hiprtc and its linker"
    flags = (*HIP_FLAGS, "-fgpu-rdc")
    what = "Bitcode"

    def version(self) -> str:
        """HIPRTC's, HIP's, and what the files of rocSHMEM are. Raises DeviceUnavailableError."""
        compiler = super().version()
        libraries = _libraries("gfx*")
        if not libraries:
            raise _unavailable("gfx...")
        return f"{compiler}, rocSHMEM's files {identity(libraries)}"

    def compile(self, source: EntrySource, arch: str, defines: dict[str, str]) -> bytes:
        """Raises CompileError, DeviceUnavailableError."""
        name, _, _ = arch.partition(":")  # the library knows no sramecc and no xnack
        libraries = _libraries(name)
        if not libraries:
            raise _unavailable(name)
        code = super().compile(source, arch, defines)
        return _link(source, arch, code, libraries[0])


def _link(source: EntrySource, arch: str, code: bytes, library: Path) -> bytes:
    def failed(log: str) -> CompileError:
        return CompileError(source.name, source.target, arch, f"{log}, linking with {library}")

    hip, rtc = bindings()
    kind = _bitcode(hip, rtc)
    (state,) = values(failed, rtc.hiprtcLinkCreate, 0, None, None)
    try:
        added = (code, len(code), source.file_name.encode())
        values(failed, rtc.hiprtcLinkAddData, state, kind, *added, 0, None, None)
        values(failed, rtc.hiprtcLinkAddFile, state, kind, str(library).encode(), 0, None, None)
        address, size = values(failed, rtc.hiprtcLinkComplete, state)
        return ctypes.string_at(int(address), size)  # the linker's own, until it is destroyed
    finally:
        rtc.hiprtcLinkDestroy(state)


def _bitcode(hip: Any, rtc: Any) -> Any:
    """The kind of input. HIPRTC had a name of its own for it before HIP did."""
    name = "HIPRTC_JIT_INPUT_LLVM_BITCODE"
    if hasattr(getattr(rtc, "hiprtcJITInputType", None), name):
        return getattr(rtc.hiprtcJITInputType, name)
    return hip.hipJitInputType.hipJitInputLLVMBitcode


def _libraries(arch: str) -> list[Path]:
    """rocSHMEM's device bitcode for an architecture ("gfx942") or a pattern of several."""
    for folder in rocshmem_folders():
        if found := sorted(folder.glob(f"librocshmem_device_{arch}.bc")):
            return found
    return []


def _unavailable(arch: str) -> DeviceUnavailableError:
    folders = ", ".join(map(str, rocshmem_folders()))
    return DeviceUnavailableError(
        f"the transport rocshmem cannot be compiled: there is no librocshmem_device_{arch}.bc in "
        f"{folders}. It needs rocSHMEM with its device bitcode, from ROCm or built for this GPU; "
        "ROCSHMEM_HOME or ROCM_PATH names its folder"
    )
