"""An entry's code for a device: from the cache, or compiled now."""

from __future__ import annotations

import functools
import logging
import re
import time
from collections.abc import Mapping
from typing import Protocol

from ..config import read_cache_dir
from ..version import __version__
from .compile_cuda import CudaCompiler
from .compile_gin import GinCompiler, ready_image
from .compile_hip import HipCompiler
from .compile_nvshmem import NvshmemCompiler
from .compile_rocshmem import RocshmemCompiler
from .kernel_cache import KernelCache, key_of
from .sources import NETWORKS, EntrySource, entry_names, image_name, read_entry, read_network_entry

log = logging.getLogger("fastkern")


class Compiler(Protocol):
    """A compiler for one target. flags: all that it is told besides architecture and macros."""

    @property
    def name(self) -> str: ...

    @property
    def flags(self) -> tuple[str, ...]: ...

    def check_arch(self, arch: str) -> None:
        """Raises ValueError for what is no architecture."""

    def version(self) -> str:
        """Equal only where equal input gives equal code. Raises DeviceUnavailableError."""
        ...

    def compile(self, source: EntrySource, arch: str, defines: dict[str, str]) -> bytes:
        """Raises CompileError, DeviceUnavailableError."""
        ...


COMPILERS: dict[str, Compiler] = {
    "cuda": CudaCompiler(),
    "hip": HipCompiler(),
    # By transport, where a library is compiled in.
    "nvshmem": NvshmemCompiler(),
    "nccl_gin": GinCompiler(),
    "rocshmem": RocshmemCompiler(),
}


@functools.cache
def default_cache() -> KernelCache:
    """This process's, in the user's cache folder (`fastkern.config.read_cache_dir`)."""
    folder = read_cache_dir()
    return KernelCache(None if folder is None else folder / "kernels")


def compile_entry(
    entry: str,
    target: str,
    arch: str,
    defines: Mapping[str, str] | None = None,
    cache: KernelCache | None = None,
    transport: str = "peer",
) -> bytes:
    """The code of an entry, as the driver loads it: a cubin or fatbin (CUDA), a code object (HIP).

    entry: "exchange", "dispatch", "combine", "route", as in kernels/entry. target: "cuda" or "hip".
    arch: "sm_90", "gfx942". defines: macros with their values. cache: the process's own by default.
    transport: "peer", or between servers "nvshmem", "nccl_gin" (CUDA), "rocshmem" (HIP), for which
    all entries that move rows are one image (`sources.image_name`).
    No GPU is needed. Raises ValueError for unknown names, DeviceUnavailableError where no compiler
    or no library is installed, CompileError with the compiler's log, for symbols that the library
    does not have too.
    """
    known = entry_names(target)  # raises for an unknown target
    if entry not in known or image_name(entry, transport) == entry:
        return compile_with(
            COMPILERS[target], read_entry(entry, target), arch, defines, cache or default_cache()
        )
    if NETWORKS[transport] != target:
        raise ValueError(f"transport {transport} is for {NETWORKS[transport]}, not for {target}")
    source = read_network_entry(transport)
    compiler = COMPILERS[transport]
    if transport == "nccl_gin":
        compiler.check_arch(arch)
        image = ready_image(source, arch, dict(defines or {}))
        if image is not None:
            log.info(
                "nccl_gin for %s: the image that came with fastkern, as there is no nvcc", arch
            )
            return image
    return compile_with(compiler, source, arch, defines, cache or default_cache())


def compile_with(
    compiler: Compiler,
    source: EntrySource,
    arch: str,
    defines: Mapping[str, str] | None,
    cache: KernelCache,
) -> bytes:
    """`compile_entry` with the compiler and the source given."""
    compiler.check_arch(arch)
    macros = dict(sorted((defines or {}).items()))
    for name, value in macros.items():
        if not re.fullmatch(r"[A-Za-z_]\w*", name) or not re.fullmatch(r"[\w.:]*", value):
            raise ValueError(f"not a macro: {name}={value}")
    version = compiler.version()

    def compile_now() -> bytes:
        start = time.monotonic()
        code = compiler.compile(source, arch, macros)
        log.info(
            "compiled %s for %s %s with %s %s in %.1f s",
            *(source.name, source.target, arch, compiler.name, version, time.monotonic() - start),
        )
        return code

    key = key_of(
        fastkern=[__version__],
        compiler=[compiler.name, version],
        target=[source.target, arch],
        flags=compiler.flags,
        defines=[text for macro in macros.items() for text in macro],
        entry=[source.path],
        files=[text for file in sorted(source.files.items()) for text in file],
    )
    return cache.get(key, compile_now)
