"""CUDA with NVSHMEM: NVRTC to relocatable code, linked with NVSHMEM's device library by nvJitLink.

Needs neither a GPU nor a driver. nvJitLink is called through cuda.bindings: the linker of cuda.core
would use the driver's instead where nvJitLink is missing, and the driver's does not report all.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..errors import CompileError, DeviceUnavailableError
from .compile_cuda import CUDA_OPTIONS, CudaCompiler, load_module
from .libraries import find_cuda_headers, find_nvshmem, identity, read_macro
from .sources import EntrySource

# NVSHMEM's headers include their neighbours; the package's own files cannot be taken for those of
# the current folder all the same, since the source is named with its folder.
NVSHMEM_OPTIONS: dict[str, Any] = {
    **{name: value for name, value in CUDA_OPTIONS.items() if name != "no_source_include"},
    "relocatable_device_code": True,
}


class NvshmemCompiler(CudaCompiler):
    """Compiles a transport's entry to a cubin that calls NVSHMEM.

    Once it is loaded, NVSHMEM must be told (nvshmemx_cumodule_init), or its state there is empty.
    """

    name = "nvrtc and nvjitlink"
    flags = tuple(f"{name}={value}" for name, value in NVSHMEM_OPTIONS.items())

    def version(self) -> str:
        """NVRTC's, nvJitLink's, NVSHMEM's, and what the files are that are used of the latter.

        Raises DeviceUnavailableError.
        """
        compiler = super().version()
        linker = load_module("cuda.bindings.nvjitlink")
        try:
            major, minor = linker.version()
        except RuntimeError as error:  # the library itself is missing
            raise _unavailable(f"nvJitLink: {error}") from error
        nvshmem, headers = _libraries()
        of_header = nvshmem / "include/non_abi/nvshmem_version.h"
        parts = [
            read_macro(of_header, f"NVSHMEM_VENDOR_{part}_VERSION")
            for part in ("MAJOR", "MINOR", "PATCH")
        ]
        release = ".".join("?" if part is None else str(part) for part in parts)
        runtime = read_macro(headers[0] / "cuda_runtime_api.h", "CUDART_VERSION")
        files = identity([nvshmem / "include", _device_library(nvshmem), headers[0] / "cuda.h"])
        return (
            f"{compiler}, nvJitLink {major}.{minor}, NVSHMEM {release}, CUDA headers {runtime}, "
            f"files {files} with {', '.join(map(str, headers))}"
        )

    def compile(self, source: EntrySource, arch: str, defines: dict[str, str]) -> bytes:
        """Raises CompileError, for unresolved symbols too; DeviceUnavailableError."""
        core = load_module("cuda.core")
        nvshmem, headers = _libraries()
        options = core.ProgramOptions(
            name=str(source.root / source.path),
            arch=arch,
            include_path=[str(path) for path in (source.root, nvshmem / "include", *headers)],
            define_macro=list(defines.items()) or None,
            **NVSHMEM_OPTIONS,
        )
        try:
            code = bytes(core.Program(source.text, "c++", options).compile("cubin").code)
        except Exception as error:  # cuda.core's own classes are private, and no RuntimeError
            raise CompileError(source.name, source.target, arch, str(error)) from error
        return _link(source, arch, code, _device_library(nvshmem))


def _link(source: EntrySource, arch: str, code: bytes, library: Path) -> bytes:
    linker = load_module("cuda.bindings.nvjitlink")

    def read(what: str) -> bytes:
        buffer = bytearray(getattr(linker, f"get_{what}_size")(handle))
        if buffer:
            getattr(linker, f"get_{what}")(handle, buffer)
        return bytes(buffer)

    options = [f"-arch={arch}"]
    try:
        handle = linker.create(len(options), options)
    except linker.nvJitLinkError as error:
        raise CompileError(source.name, source.target, arch, str(error)) from error
    try:
        linker.add_data(handle, linker.InputType.CUBIN, code, len(code), source.file_name)
        linker.add_file(handle, linker.InputType.LIBRARY, str(library))
        linker.complete(handle)
        return read("linked_cubin")
    except linker.nvJitLinkError as error:
        said = read("error_log").rstrip(b"\0").decode(errors="replace")
        raise CompileError(source.name, source.target, arch, f"{error}\n{said}") from error
    finally:
        linker.destroy(handle)


def _libraries() -> tuple[Path, list[Path]]:
    """NVSHMEM's folder; the include folders of CUDA. Raises DeviceUnavailableError."""
    nvshmem = find_nvshmem()
    if nvshmem is None:
        raise _unavailable(
            "no nvshmem.h with libnvshmem_device.a in this environment's wheels or in NVSHMEM_HOME"
        )
    headers = find_cuda_headers()
    if headers is None:
        raise _unavailable(
            "no cuda_runtime.h, or none of CCCL's headers (cuda/std/cstdint), in this "
            "environment's wheels, in CUDA_HOME or in /usr/local/cuda"
        )
    return nvshmem, headers


def _device_library(nvshmem: Path) -> Path:
    return nvshmem / "lib/libnvshmem_device.a"


def _unavailable(what: str) -> DeviceUnavailableError:
    return DeviceUnavailableError(
        f"the transport nvshmem cannot be compiled: {what}. "
        "`pip install 'fastkern[nvshmem]'` installs all that it needs"
    )
