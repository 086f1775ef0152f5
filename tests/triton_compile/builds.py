"""Triton's compiler, for devices that are not there: what it made of a function, as text.

Compiles run in two processes beside the tests; what stands as it is gets compiled once per run.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import multiprocessing
import sys
import tempfile
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass

from fastkern.device.compile_triton import options_of
from fastkern.tuning.choose import LANES_BY_DEFAULT, TILE_BYTES_BY_DEFAULT
from tests.device_compile.toolchain import CUDA_ARCHES, HIP_ARCHES, cuda_usage, disassemble_cuda

ARCHES = (*CUDA_ARCHES, *HIP_ARCHES)
PRIMITIVES = "tests.triton_compile.primitives"
THREADS = LANES_BY_DEFAULT["triton"]  # of a block
# What functions' upper-case parameters are.
CONSTANTS = {"THREADS": THREADS, "FLAGS": 16, "TILE_BYTES": TILE_BYTES_BY_DEFAULT}


@dataclass(frozen=True)
class Source:
    """A Triton function: which module it is in, and what its parameters are."""

    module: str
    name: str
    folder: str = ""  # of edited modules; "": as installed
    # By parameter, "i64" where nothing is said.
    types: tuple[tuple[str, str], ...] = ()
    threads: int = THREADS
    entry: str = "exchange"  # whose options it is compiled with


@dataclass(frozen=True)
class Build:
    """What the compiler made of it."""

    arch: str
    ttir: str  # Triton's own form, functions inlined
    text: str  # PTX or AMD assembly
    triton: tuple[int, int]  # the release that made it
    llir: str = ""  # LLVM's form, optimised
    sass: str = ""  # CUDA
    usage: str = ""  # CUDA: of registers and memory


def compile_source(source: Source, arch: str) -> Build:
    """Compile it as programs do. Raises what Triton raises."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    if source.folder and source.folder not in sys.path:
        sys.path.insert(0, source.folder)
    function = getattr(importlib.import_module(source.module), source.name)
    names = list(inspect.signature(function.fn).parameters)
    types = dict(source.types)
    cuda = arch.startswith("sm_")
    target = GPUTarget("cuda", int(arch[3:]), 32) if cuda else GPUTarget("hip", arch, 64)
    with tempfile.TemporaryDirectory() as folder, triton.knobs.cache.scope():
        triton.knobs.cache.dir = folder
        made = triton.compile(
            ASTSource(
                fn=function,
                signature={n: "constexpr" if n.isupper() else types.get(n, "i64") for n in names},
                constexprs={n: CONSTANTS[n] for n in names if n.isupper()},
            ),
            target=target,
            options=options_of(target, source.threads // target.warp_size, source.entry),
        )
    major, minor = triton.__version__.split(".")[:2]
    version = (int(major), int(minor))
    ttir, llir = made.asm["ttir"], made.asm["llir"]
    if not cuda:
        return Build(arch, ttir, made.asm["amdgcn"], version, llir)
    cubin = made.asm["cubin"]
    return Build(
        arch, ttir, made.asm["ptx"], version, llir, disassemble_cuda(cubin), cuda_usage(cubin)
    )


@functools.cache
def _pool() -> ProcessPoolExecutor:
    return ProcessPoolExecutor(2, multiprocessing.get_context("spawn"))


@functools.cache
def start(source: Source, arch: str) -> Future[Build]:
    """Begin to compile; the same again is the same build."""
    return _pool().submit(compile_source, source, arch)


def build(source: Source, arch: str) -> Build:
    return start(source, arch).result()


def stop() -> None:
    """What has not begun will not."""
    if _pool.cache_info().currsize:
        _pool().shutdown(cancel_futures=True)
