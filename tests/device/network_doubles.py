"""Doubles of what network entries are compiled with: folders of NVIDIA's wheels, cuda.core with
nvJitLink, a program nvcc, and HIPRTC's linker."""

from __future__ import annotations

import ctypes
import enum
import os
import stat
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from fastkern.device import libraries
from tests.device.hiprtc_double import HipRtc, Status

VARIABLES = (
    *("CUDA_HOME", "CUDA_PATH", "NCCL_HOME", "NVSHMEM_HOME", "ROCM_PATH", "ROCSHMEM_HOME"),
    *("NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS"),
)
WHEELS = {
    "cu13/include/cuda.h": "",
    "cu13/include/cuda_runtime.h": "",
    "cu13/include/cuda_runtime_api.h": "#define CUDART_VERSION  13050\n",
    "cu13/include/cccl/cuda/std/cstdint": "",
    "nvshmem/include/nvshmem.h": "",
    "nvshmem/include/non_abi/nvshmem_version.h": (
        "#define NVSHMEM_VENDOR_MAJOR_VERSION 3\n#define NVSHMEM_VENDOR_MINOR_VERSION 8\n"
        "#define NVSHMEM_VENDOR_PATCH_VERSION 1\n"
    ),
    "nvshmem/lib/libnvshmem_device.a": "library",
    "nccl/include/nccl.h": "#define NCCL_VERSION_CODE 23203\n",
    "nccl/include/nccl_device.h": "",
}


def write_files(root: Path, files: dict[str, str]) -> Path:
    for path, text in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
    return root


def hide_machine(monkeypatch: pytest.MonkeyPatch, folder: Path) -> Path:
    """Only what lies in `folder` is found: wheels in nvidia/, programs in bin/. Returns nvidia/."""
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    (folder / "bin").mkdir(parents=True, exist_ok=True)
    monkeypatch.setenv("PATH", str(folder / "bin"))
    monkeypatch.setattr(libraries, "wheel_folders", lambda: [folder / "nvidia"])
    monkeypatch.setattr(libraries, "USUAL_CUDA", folder / "cuda")
    monkeypatch.setattr(libraries, "USUAL_ROCM", folder / "rocm")
    return folder / "nvidia"


# -- CUDA ------------------------------------------------------------------------------------------


class NvJitLinkError(Exception):
    pass


@dataclass
class NvJitLink:
    """cuda.bindings.nvjitlink, and what it was asked for.

    failing: the call that raises. library: whether there is one.
    """

    failing: str = ""
    library: bool = True
    asked: list[tuple[Any, ...]] = field(default_factory=list)
    destroyed: int = 0
    nvJitLinkError: type[Exception] = NvJitLinkError  # noqa: N815
    InputType = SimpleNamespace(CUBIN="cubin", LIBRARY="library")

    def version(self) -> tuple[int, int]:
        if not self.library:
            raise RuntimeError("libnvJitLink.so.13 not found")
        return 13, 5

    def _note(self, *what: Any) -> None:
        self.asked.append(what)
        if what[0] == self.failing:
            raise NvJitLinkError(f"ERROR_{what[0]}")

    def create(self, num_options: int, options: list[str]) -> int:
        assert num_options == len(options)
        self._note("create", *options)
        return 7

    def add_data(self, handle: int, kind: str, data: bytes, size: int, name: str) -> None:
        assert (handle, size) == (7, len(data))
        self._note("add_data", kind, data, name)

    def add_file(self, handle: int, kind: str, name: str) -> None:
        assert handle == 7
        self._note("add_file", kind, name)

    def complete(self, handle: int) -> None:
        assert handle == 7
        self._note("complete")

    def get_linked_cubin_size(self, _handle: int) -> int:
        return 6

    def get_linked_cubin(self, _handle: int, buffer: bytearray) -> None:
        buffer[:] = b"linked"

    def get_error_log_size(self, _handle: int) -> int:
        return 16

    def get_error_log(self, _handle: int, buffer: bytearray) -> None:
        buffer[:] = b"no 'nvshmem_x'!\0"

    def destroy(self, _handle: int) -> None:
        self.destroyed += 1


@dataclass
class Core:
    """cuda.core, and what it was asked for. error: what compile() raises."""

    error: Exception | None = None
    asked: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    __version__: str = "1.2.3"

    def ProgramOptions(self, **options: Any) -> dict[str, Any]:  # noqa: N802
        return options

    def Program(self, code: str, _code_type: str, options: dict[str, Any]) -> Core:  # noqa: N802
        self.asked.append((code, options))
        return self

    def compile(self, target_type: str) -> SimpleNamespace:
        assert target_type == "cubin"
        if self.error is not None:
            raise self.error
        return SimpleNamespace(code=bytearray(b"relocatable"))


def install_cuda(monkeypatch: pytest.MonkeyPatch, core: Core, linker: NvJitLink | None) -> None:
    """Put the doubles where the bindings would be; None: there is no nvJitLink."""
    nvrtc = SimpleNamespace(
        nvrtcVersion=lambda: (0, 13, 5), nvrtcResult=SimpleNamespace(NVRTC_SUCCESS=0)
    )
    modules: dict[str, Any] = {
        "cuda": ModuleType("cuda"),
        "cuda.core": core,
        "cuda.bindings": ModuleType("cuda.bindings"),
        "cuda.bindings.nvrtc": nvrtc,
        "cuda.bindings.nvjitlink": linker,
    }
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)


NVCC = """#!{python}
import os, pathlib, sys
arguments = sys.argv[1:]
if arguments == ["--version"]:
    sys.exit(print("Cuda compilation tools, release 13.0, {version}"))
with open({log!r}, "a") as log:
    print(arguments, [n for n in os.environ if n.startswith("NVCC")], file=log)
if {fails}:
    sys.exit("thing.cu(1): error: no such thing")
source = next(a for a in arguments if a.endswith(".cu"))
if "-MF" in arguments:
    listed = pathlib.Path(arguments[arguments.index("-MF") + 1])
    root = pathlib.Path(next(a for a in arguments if a.startswith("-I"))[2:])
    own = [source, root / "kernels/body/outer.h", root / "kernels/../planner/table.h"]
    names = [str(n).replace(" ", "\\\\ ") for n in (*own, "/usr/include/stdint.h")]
    listed.write_text("image.o : " + " \\\\\\n    ".join(names) + "\\n")
text = pathlib.Path(source).read_text()
pathlib.Path(arguments[arguments.index("-o") + 1]).write_text("image of " + text)
"""


def write_nvcc(path: Path, log: Path, fails: bool = False, version: str = "V13.0.88") -> Path:
    """A program that takes nvcc's arguments, and notes them in `log`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(NVCC.format(python=sys.executable, log=str(log), fails=fails, version=version))
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def write_host_compiler(folder: Path) -> None:
    """A g++ that is found, and not called."""
    path = folder / "bin/g++"
    path.write_text("#!/bin/false\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


def newer(path: Path) -> None:
    """As if written again, with the same content."""
    status = path.stat()
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + 1))


# -- HIP -------------------------------------------------------------------------------------------


class Kind(enum.IntEnum):
    hipJitInputLLVMBitcode = 100  # noqa: N815


class Binary:
    """A pointer as hip-python has it: int() gives its address."""

    def __init__(self, content: bytes) -> None:
        self._buffer = ctypes.create_string_buffer(content, len(content))

    def __int__(self) -> int:
        return ctypes.addressof(self._buffer)


@dataclass
class LinkingHipRtc(HipRtc):
    """HIPRTC with its linker. As hip-python of HIP 6 names kinds of input where `old`."""

    old: bool = False
    linked: bytes = b"\x7fELF linked \0 code"
    added: list[tuple[Any, ...]] = field(default_factory=list)
    states: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.old:
            names = SimpleNamespace(HIPRTC_JIT_INPUT_LLVM_BITCODE=Kind.hipJitInputLLVMBitcode)
            self.hiprtcJITInputType = names
        else:
            self.hipJitInputType = Kind

    def hiprtcGetBitcodeSize(self, prog: Any) -> tuple[Status, int]:  # noqa: N802
        return self._call("hiprtcGetBitcodeSize", prog.compiled and not prog.destroyed), 4

    def hiprtcGetBitcode(self, prog: Any, code: bytearray) -> tuple[Status]:  # noqa: N802
        status = self._call("hiprtcGetBitcode", type(code) is bytearray and len(code) == 4)
        code[:] = b"BC\xc0\xde"
        return (status,)

    def hiprtcLinkCreate(  # noqa: N802
        self, num_options: int, options: None, values: None
    ) -> tuple[Status, str | None]:
        status = self._call("hiprtcLinkCreate", (num_options, options, values) == (0, None, None))
        self.states.append("open")
        return status, "state"

    def hiprtcLinkAddData(self, state: str, kind: Kind, *rest: Any) -> tuple[Status]:  # noqa: N802
        image, size, name, *options = rest
        self.added.append((kind, image, name))
        valid = state == "state" and type(image) is type(name) is bytes and size == len(image)
        return (self._call("hiprtcLinkAddData", valid and options == [0, None, None]),)

    def hiprtcLinkAddFile(self, state: str, kind: Kind, *rest: Any) -> tuple[Status]:  # noqa: N802
        path, *options = rest
        self.added.append((kind, path))
        valid = state == "state" and type(path) is bytes and options == [0, None, None]
        return (self._call("hiprtcLinkAddFile", valid),)

    def hiprtcLinkComplete(self, state: str) -> tuple[Status, Binary, int]:  # noqa: N802
        status = self._call("hiprtcLinkComplete", state == "state")
        return status, Binary(self.linked), len(self.linked)

    def hiprtcLinkDestroy(self, state: str) -> tuple[Status]:  # noqa: N802
        self.states.append("destroyed")
        return (self._call("hiprtcLinkDestroy", state == "state"),)


Change = Callable[[Path], object]
