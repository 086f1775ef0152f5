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
from .compile_hip import HipCompiler
from .kernel_cache import KernelCache, key_of
from .sources import EntrySource, entry_names, read_entry

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


COMPILERS: dict[str, Compiler] = {"cuda": CudaCompiler(), "hip": HipCompiler()}


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
) -> bytes:
    """The code of an entry, as the driver loads it: a cubin (CUDA) or a code object (HIP).

    entry: "exchange", "dispatch", "combine", "route", as in kernels/entry. target: "cuda" or "hip".
    arch: "sm_90", "gfx942". defines: macros with their values. cache: the process's own by default.
    No GPU is needed. Raises ValueError for unknown names, DeviceUnavailableError where no compiler
    is installed, CompileError with the compiler's log.
    """
    entry_names(target)  # raises for an unknown target
    return compile_with(
        COMPILERS[target], read_entry(entry, target), arch, defines, cache or default_cache()
    )


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
