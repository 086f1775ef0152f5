"""Compiles and links the network entries against their libraries, as wheels: NVSHMEM with NVRTC and
nvJitLink, NCCL's device API with nvcc, rocSHMEM with clang and our declarations of it.

Neither a GPU nor a driver is needed. nvcc needs a host compiler.
"""

from __future__ import annotations

import functools
import importlib.metadata
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.device_compile.toolchain import (
    ROOT,
    CompileError,
    Edit,
    compile_hip,
    copy_sources,
    load,
)

NVSHMEM = "kernels/entry/network/nvshmem.cu"
GIN = "kernels/entry/network/nccl_gin.cu"
ROCSHMEM = "kernels/entry/network/rocshmem.hip"
KERNELS = (
    "fastkern_exchange",
    "fastkern_dispatch",
    "fastkern_combine",
    "fastkern_combine_float64",
)
NETWORK_ARCHES = ("sm_90", "sm_100")


@dataclass(frozen=True)
class NetworkBuild:
    cubin: bytes  # of NVSHMEM: relocatable
    log: str  # of ptxas -v


@functools.cache
def wheel_file(package: str, path: str) -> Path:
    """A file of an installed wheel, by the end of its path. Fails the test where there is none."""
    try:
        files = importlib.metadata.files(package) or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    found = [file for file in files if str(file).endswith(path)]
    if len(found) != 1:
        pytest.fail(
            f"{package} is not installed, or has no {path}. Install it: `make check-kernels`, or "
            "`pip install 'fastkern[compile-checks]'`."
        )
    return Path(str(found[0].locate()))


def cuda_include_folders() -> list[Path]:
    """Of the CUDA runtime's headers and of CCCL's."""
    return [
        wheel_file("nvidia-cuda-runtime", "include/cuda_runtime.h").parent,
        wheel_file("nvidia-cuda-cccl", "include/cccl/cuda/std/cstdint").parents[2],
    ]


def compile_nvshmem(arch: str, root: Path = ROOT) -> NetworkBuild:
    """Compile NVSHMEM's entries with NVRTC to relocatable code. Raises CompileError."""
    nvrtc = load("cuda.bindings.nvrtc", "cuda-bindings and nvidia-cuda-nvrtc")

    def read(what: str) -> bytes:
        status, size = getattr(nvrtc, f"nvrtcGet{what}Size")(program)
        assert status == nvrtc.nvrtcResult.NVRTC_SUCCESS, (what, status)
        buffer = bytearray(size)
        (status,) = getattr(nvrtc, f"nvrtcGet{what}")(program, buffer)
        assert status == nvrtc.nvrtcResult.NVRTC_SUCCESS, (what, status)
        return bytes(buffer)

    library = wheel_file("nvidia-nvshmem-cu13", "nvshmem/include/nvshmem.h").parent
    flags = [f"--gpu-architecture={arch}", "-std=c++17", "--relocatable-device-code=true"]
    flags += [f"-I{folder}" for folder in (root, library, *cuda_include_folders())]
    encoded = [flag.encode() for flag in [*flags, "--ptxas-options=-v"]]
    source = (root / NVSHMEM).read_bytes()
    status, program = nvrtc.nvrtcCreateProgram(source, NVSHMEM.encode(), 0, [], [])
    assert status == nvrtc.nvrtcResult.NVRTC_SUCCESS, status
    try:
        (status,) = nvrtc.nvrtcCompileProgram(program, len(encoded), encoded)
        log = read("ProgramLog").replace(b"\0", b"").decode()
        if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            raise CompileError(log)
        return NetworkBuild(read("CUBIN"), log)
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def link_nvshmem(relocatable: bytes, arch: str) -> NetworkBuild:
    """Link with NVSHMEM's device library. Raises CompileError, for unresolved symbols too."""
    linker = load("cuda.bindings.nvjitlink", "cuda-bindings and nvidia-nvjitlink")
    library = wheel_file("nvidia-nvshmem-cu13", "lib/libnvshmem_device.a")

    def read(what: str) -> bytes:
        buffer = bytearray(getattr(linker, f"get_{what}_size")(handle))
        getattr(linker, f"get_{what}")(handle, buffer)
        return bytes(buffer)

    options = [f"-arch={arch}", "-verbose"]
    handle = linker.create(len(options), options)
    try:
        linker.add_data(handle, linker.InputType.CUBIN, relocatable, len(relocatable), "entries")
        linker.add_file(handle, linker.InputType.LIBRARY, str(library))
        linker.complete(handle)
        return NetworkBuild(read("linked_cubin"), read("info_log").replace(b"\0", b"").decode())
    except linker.nvJitLinkError as error:
        text = read("error_log").replace(b"\0", b"").decode()
        raise CompileError(f"{error}\n{text}") from error
    finally:
        linker.destroy(handle)


def linked_registers(log: str) -> dict[str, int]:
    """Registers of a lane by kernel, the library's functions included."""
    found = re.findall(r"Function properties for '(\w+)'.*\n.*used (\d+) registers", log)
    return {name: int(count) for name, count in found}


def compile_gin(arch: str, folder: Path, root: Path = ROOT) -> NetworkBuild:
    """Compile NCCL's entries with nvcc: the wheel's, which brings its own headers.

    NVRTC ignores the packing that NCCL's records ask for. Raises CompileError.
    """
    nvcc = wheel_file("nvidia-cuda-nvcc", "bin/nvcc")
    wheel_file("nvidia-nvvm", "nvvm/bin/cicc")  # what nvcc calls
    wheel_file("nvidia-cuda-crt", "include/crt/host_config.h")
    cuda_include_folders()
    if shutil.which("g++") is None:
        pytest.fail("no host compiler `g++`, which nvcc needs; fastkern itself needs one to build")
    library = wheel_file("nvidia-nccl-cu13", "nccl/include/nccl_device.h").parent
    output = folder / f"gin_{arch}.cubin"
    command = [str(nvcc), f"-arch={arch}", "-std=c++17", "-cubin", "-Xptxas", "-v"]
    command += [f"-I{root}", f"-I{library}", str(root / GIN), "-o", str(output)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    if result.returncode != 0:
        raise CompileError(result.stdout + result.stderr)
    return NetworkBuild(output.read_bytes(), result.stdout + result.stderr)


def compile_rocshmem(arch: str, root: Path = ROOT) -> str:
    """Compile rocSHMEM's entries with clang to assembly. Raises CompileError."""
    return compile_hip(ROCSHMEM.removesuffix(".hip"), arch, root)


def undefined_functions(assembly: str) -> set[str]:
    """Mangled names that an AMD listing calls or refers to, and does not define."""
    referred = set(re.findall(r"\b([\w$.]+)@(?:gotpc)?rel32(?:@lo|@hi)", assembly))
    defined = set(re.findall(r"^([\w$.]+):", assembly, re.MULTILINE))
    return referred - defined


def plain_name(mangled: str) -> str:
    """The last component of a name in a namespace: _ZN8rocshmem14rocshmem_quietEv, say."""
    name, rest = "", mangled.removeprefix("_ZN")
    while found := re.match(r"(\d+)", rest):
        end = found.end() + int(found[1])
        name, rest = rest[found.end() : end], rest[end:]
    return name


def kernels_for(arch: str) -> tuple[str, ...]:
    """The kernels that are compiled for an architecture: all for one of each vendor.

    Only the exchange for the others, to save time: what moves rows is compiled for all of them with
    the transport `peer`, and every operation of a transport is in each kernel.
    """
    return KERNELS if arch in ("sm_90", "gfx942") else KERNELS[:1]


def sources_for(entry: str, arch: str, folder: Path) -> Path:
    """Where the entry lies with the kernels that are compiled for `arch`: if need be, a copy."""
    if kernels_for(arch) == KERNELS:
        return ROOT
    return copy_sources(folder, [only_exchange(entry)])


def only_exchange(entry: str) -> Edit:
    """Takes the kernels of dispatch and combine out of an entry file."""
    kernel = r'\nextern "C" (?:(?!extern "C")[\s\S])*?fastkern_dispatch[\s\S]*'
    return Edit(entry, kernel, "")
