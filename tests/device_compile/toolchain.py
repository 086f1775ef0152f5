"""The device compilers as Python packages: NVRTC for CUDA, clang (inside ziglang) for HIP.

Neither needs a GPU or a driver. A missing package fails the test that needs it: only
`make check-kernels` runs this folder, and it installs them.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest

from fastkern.device.compile_cuda import CUDA_OPTIONS
from fastkern.device.compile_hip import HIP_FLAGS
from tests.device_compile.listing import Kernel, hip_kernels, sass_kernels

ROOT = Path(__file__).resolve().parents[2]
# Entries by name, with their kernels. Each is a source for CUDA (.cu) and one for HIP (.hip).
KERNELS = {
    "kernels/entry/exchange": ("fastkern_exchange",),
    "kernels/entry/dispatch": ("fastkern_dispatch",),
    "kernels/entry/combine": ("fastkern_combine", "fastkern_combine_float64"),
    "kernels/entry/route": ("fastkern_route_count", "fastkern_route_scan", "fastkern_route_fill"),
    "kernels/entry/static": (
        "fastkern_static_direct",
        "fastkern_static_enter",
        "fastkern_static_values",
    ),
}
EXCHANGE, DISPATCH, COMBINE, ROUTE, STATIC = KERNELS
# Those that move rows between ranks; route only reads and writes what is its own.
PERSISTENT = (EXCHANGE, DISPATCH, COMBINE)
PRIMITIVES = "tests/device_compile/primitives"
WEIGHTED_SUM = "tests/device_compile/weighted_sum"
CUDA_ARCHES = ("sm_80", "sm_90", "sm_100")
HIP_ARCHES = ("gfx90a", "gfx942", "gfx950")

registers_used: list[str] = []  # a line for each kernel and architecture, for the report


class CompileError(Exception):
    """What the compiler said."""


@dataclass(frozen=True)
class Edit:
    """One replacement in one file of a copied source tree; `pattern` (a regex) matches once."""

    path: str
    pattern: str
    replacement: str


def copy_sources(target: Path, edits: Iterable[Edit]) -> Path:
    """Copy what the device compilers read to `target`, edited. Returns `target`."""
    suffixes = {".h", ".cu", ".hip"}
    for folder in ("planner", "kernels", "tests/device_compile"):
        for source in (ROOT / folder).rglob("*"):
            if source.suffix in suffixes:
                copy = target / source.relative_to(ROOT)
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(source, copy)
    for edit in edits:
        path = target / edit.path
        text, count = re.subn(edit.pattern, edit.replacement, path.read_text())
        assert count == 1, f"{edit.path}: {edit.pattern!r} matches {count} times, not once"
        path.write_text(text)
    return target


def load(module: str, package: str) -> ModuleType:
    """Import a compiler's module, or fail the test."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        pytest.fail(f"cannot import {module} ({error}). {_how_to_install(package)}")


def _how_to_install(package: str) -> str:
    return f"Install {package}: `make check-kernels`, or `pip install 'fastkern[compile-checks]'`."


@dataclass(frozen=True)
class CudaBuild:
    ptx: str
    cubin: bytes
    log: str  # of ptxas -v: registers, stack, spills


def compile_cuda(entry: str, arch: str, root: Path = ROOT) -> CudaBuild:
    """Compile the entry's .cu with NVRTC for `arch` ("sm_90"). Raises CompileError.

    As programs do it, but with the positions of instructions in the sources.
    """
    nvrtc = load("cuda.bindings.nvrtc", "cuda-bindings and nvidia-cuda-nvrtc")

    def read(what: str) -> bytes:
        status, size = getattr(nvrtc, f"nvrtcGet{what}Size")(program)
        assert status == nvrtc.nvrtcResult.NVRTC_SUCCESS, (what, status)
        buffer = bytearray(size)
        (status,) = getattr(nvrtc, f"nvrtcGet{what}")(program, buffer)
        assert status == nvrtc.nvrtcResult.NVRTC_SUCCESS, (what, status)
        return bytes(buffer)

    name = f"{entry}.cu"
    source = (root / name).read_bytes()
    status, program = nvrtc.nvrtcCreateProgram(source, name.encode(), 0, [], [])
    assert status == nvrtc.nvrtcResult.NVRTC_SUCCESS, status
    try:
        assert CUDA_OPTIONS.keys() == {"std", "no_source_include"}, "spelled out here"
        flags = [f"--gpu-architecture={arch}", f"-std={CUDA_OPTIONS['std']}", f"-I{root}"]
        flags += ["--no-source-include", "--ptxas-options=-v", "-lineinfo"]
        encoded = [flag.encode() for flag in flags]
        (status,) = nvrtc.nvrtcCompileProgram(program, len(encoded), encoded)
        log = read("ProgramLog").rstrip(b"\0").decode()
        if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            raise CompileError(log)
        return CudaBuild(read("PTX").rstrip(b"\0").decode(), read("CUBIN"), log)
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def disassemble_cuda(cubin: bytes) -> str:
    """The SASS of a cubin, with positions where it was compiled with them."""
    return _read_cubin("nvidia-cuda-nvdisasm", "nvdisasm", ["-c", "-gi"], cubin)


def cuda_usage(cubin: bytes) -> str:
    """What cuobjdump says of a cubin's registers and memory."""
    return _read_cubin("nvidia-cuda-cuobjdump", "cuobjdump", ["-res-usage"], cubin)


def _read_cubin(package: str, name: str, options: list[str], cubin: bytes) -> str:
    try:
        files = importlib.metadata.files(package) or []
    except importlib.metadata.PackageNotFoundError:
        pytest.fail(f"no {name}. {_how_to_install(package)}")
    (tool,) = (f.locate() for f in files if f.name in (name, f"{name}.exe"))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        result = subprocess.run(
            [str(tool), *options, str(path)],
            capture_output=True,
            text=True,
            timeout=120,
            check=True,
        )
    return result.stdout


def compile_hip(entry: str, arch: str, root: Path = ROOT, positions: bool = True) -> str:
    """Compile the entry's .hip for `arch` ("gfx942") to assembly. Raises CompileError.

    positions: of instructions in the sources, which programs compile without.
    """
    load("ziglang", "ziglang")
    lines = ("-gline-tables-only",) if positions else ()
    command = [
        *(sys.executable, "-m", "ziglang", "clang", "-x", "hip", "-S"),
        *(f"--offload-arch={arch}", "--offload-device-only", "--no-gpu-bundle-output"),
        *("-nogpulib", "-nogpuinc", *HIP_FLAGS, *lines),
        *("-Wall", "-Wextra", "-Werror", f"-I{root}", str(root / f"{entry}.hip"), "-o", "-"),
    ]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    if result.returncode != 0:
        raise CompileError(result.stderr)
    return result.stdout


def link_hip(assembly: str, arch: str, folder: Path) -> bytes:
    """Assemble and link a listing to a code object that could be loaded."""
    source, relocatable, linked = (folder / f"{arch}.{end}" for end in ("s", "o", "hsaco"))
    source.write_text(assembly)
    # By hand: clang would call a linker of its own name, which is not on the path.
    for command in (
        ["clang", "--target=amdgcn-amd-amdhsa", f"-mcpu={arch}", "-c", source.name],
        ["ld.lld", "-shared", "--no-undefined", relocatable.name, "-o", linked.name],
    ):
        subprocess.run(
            [sys.executable, "-m", "ziglang", *command], cwd=folder, timeout=60, check=True
        )
    return linked.read_bytes()


# What stands as it is gets compiled and read once per run, whoever asks for it. A build that is
# started ahead runs beside the tests.
_pool = ThreadPoolExecutor(2)


@functools.cache
def _cuda_build(entry: str, arch: str) -> Future[tuple[CudaBuild, str]]:
    def build() -> tuple[CudaBuild, str]:
        made = compile_cuda(entry, arch)
        return made, disassemble_cuda(made.cubin)

    return _pool.submit(build)


@functools.cache
def _hip_build(entry: str, arch: str) -> Future[str]:
    return _pool.submit(compile_hip, entry, arch)


def start_build(entry: str, arch: str) -> None:
    """Start to compile an entry as it stands."""
    (_cuda_build if arch.startswith("sm_") else _hip_build)(entry, arch)


def stop_builds() -> None:
    """Those that have not begun."""
    _pool.shutdown(cancel_futures=True)


def cuda_build(entry: str, arch: str) -> CudaBuild:
    return _cuda_build(entry, arch).result()[0]


def cuda_sass(entry: str, arch: str) -> str:
    return _cuda_build(entry, arch).result()[1]


def hip_assembly(entry: str, arch: str) -> str:
    return _hip_build(entry, arch).result()


@functools.cache
def kernels_of(entry: str, arch: str) -> dict[str, Kernel]:
    """The kernels of an entry by name, of SASS ("sm_90") or AMD assembly ("gfx942")."""
    if arch.startswith("sm_"):
        return sass_kernels(cuda_sass(entry, arch), ROOT)
    return hip_kernels(hip_assembly(entry, arch), ROOT)


def start_kernels_from(entry: str, arch: str, root: Path) -> Future[dict[str, Kernel]]:
    """Start to compile and read an entry from other sources, below `root`."""
    return _pool.submit(kernels_from, entry, arch, root)


def kernels_from(entry: str, arch: str, root: Path) -> dict[str, Kernel]:
    """The same from other sources, below `root`."""
    if arch.startswith("sm_"):
        return sass_kernels(disassemble_cuda(compile_cuda(entry, arch, root).cubin), root)
    return hip_kernels(compile_hip(entry, arch, root), root)
