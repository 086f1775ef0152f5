"""CUDA: NVRTC through cuda.core. Needs neither a GPU nor a driver, as the architecture is given."""

from __future__ import annotations

import importlib
import importlib.metadata
import re
from types import ModuleType
from typing import Any

from ..errors import CompileError, DeviceUnavailableError
from .sources import EntrySource

# What NVRTC is told besides architecture, macros and where to look, as cuda.core spells it. Without
# no_source_include a file ./kernels/... of the directory that Python was started in would be taken
# before the package's own.
CUDA_OPTIONS: dict[str, Any] = {"std": "c++17", "no_source_include": True}


class CudaCompiler:
    """Compiles an entry to a cubin."""

    name = "nvrtc"
    flags = tuple(f"{name}={value}" for name, value in CUDA_OPTIONS.items())

    def check_arch(self, arch: str) -> None:
        """Raises ValueError unless `arch` is written like "sm_90" or "sm_90a"."""
        if not re.fullmatch(r"sm_\d{2,3}[af]?", arch):
            raise ValueError(f'arch must be written like "sm_90", not {arch!r}')

    def version(self) -> str:
        """NVRTC's, its wheel's where it came as one, and cuda.core's, which sets flags too.

        Raises DeviceUnavailableError.
        """
        core = load_module("cuda.core")
        nvrtc = load_module("cuda.bindings.nvrtc")
        try:
            status, major, minor = nvrtc.nvrtcVersion()
        except RuntimeError as error:  # the library itself is missing
            raise _unavailable(str(error)) from error
        if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            raise _unavailable(f"nvrtcVersion: {status!r}")
        try:
            release = importlib.metadata.version("nvidia-cuda-nvrtc")
        except importlib.metadata.PackageNotFoundError:
            release = "no wheel"
        return f"{major}.{minor} ({release}), cuda-core {core.__version__}"

    def compile(self, source: EntrySource, arch: str, defines: dict[str, str]) -> bytes:
        """Raises CompileError, DeviceUnavailableError."""
        core = load_module("cuda.core")
        options = core.ProgramOptions(
            name=source.file_name,
            arch=arch,
            include_path=[str(source.root)],
            define_macro=list(defines.items()) or None,
            **CUDA_OPTIONS,
        )
        try:
            return bytes(core.Program(source.text, "c++", options).compile("cubin").code)
        except Exception as error:  # cuda.core's own classes are private, and no RuntimeError
            raise CompileError(source.name, source.target, arch, str(error)) from error


def load_module(module: str) -> ModuleType:
    """Import a binding. Raises DeviceUnavailableError."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise _unavailable(f"cannot import {module} ({error})") from error


def _unavailable(what: str) -> DeviceUnavailableError:
    return DeviceUnavailableError(
        f"no compiler for CUDA kernels: {what}. Install NVRTC and its bindings with "
        "`pip install 'fastkern[cuda]'`"
    )
