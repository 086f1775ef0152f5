"""What the kernels in Triton are linked with between servers: a library's bitcode for devices.

    nvshmem     libnvshmem_device_sm_90.bc of NVSHMEM's wheel, or of NVSHMEM_HOME
    nccl_gin    libnccl_device.bc of NCCL's wheel, or of NCCL_HOME

Triton links a wrapper of ours first (kernels/triton/nvshmem.ll, nccl_gin.ll), which says what of
the library is needed. Its linker reads such bitcode from release 3.7 on: that of 3.6 does not know
what the LLVM that made it writes.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from ..errors import DeviceUnavailableError
from .libraries import find_nccl, find_nvshmem, identity, read_macro
from .triton_library import check_release

OLDEST = (3, 7)  # of Triton
_EXTRAS = {"nvshmem": "nvshmem", "nccl_gin": "gin"}
# Functions that the driver brings; anything else that is left undefined is a fault.
KNOWN_EXTERNS = frozenset({"vprintf", "__assertfail", "malloc", "free"})


def check_triton_network(transport: str) -> None:
    """Raise DeviceUnavailableError where a transport between servers lacks something that the
    kernels in Triton need: Triton's release, the library, its binding. Needs no GPU."""
    check_release(OLDEST, f"the transport {transport}")
    if transport == "nvshmem":
        from .network_nvshmem import check_nvshmem

        _nvshmem_files()
        check_nvshmem()
    else:
        from .network_gin import check_nccl

        check_nccl(kernels=_nccl_version(_nccl_file()))


def extern_libs(transport: str, arch: str) -> dict[str, str]:
    """Files by the name that Triton links them under, in this order. arch: "sm_90".

    Raises DeviceUnavailableError.
    """
    check_release(OLDEST, f"the transport {transport}")
    return {"fastkern": str(wrapper_of(transport)), transport: str(_library(transport, arch))}


def identity_of(transport: str, arch: str) -> list[str]:
    """What tells kernels with other libraries apart: the wrapper's text, the library's file."""
    wrapper = wrapper_of(transport).read_text(encoding="utf-8")
    return [wrapper, identity([_library(transport, arch)])]


def wrapper_of(transport: str) -> Path:
    """The file in kernels/triton."""
    from ..kernels import triton as kernels

    assert kernels.__file__ is not None
    return Path(kernels.__file__).parent / f"{transport}.ll"


def undefined(ptx: str) -> Sequence[str]:
    """Functions that PTX calls and nobody brings."""
    names = re.findall(r"^\.extern \.func\s+(?:\([^)]*\)\s*)?(\w+)", ptx, re.MULTILINE)
    return sorted(set(names) - KNOWN_EXTERNS)


def _library(transport: str, arch: str) -> Path:
    if transport == "nccl_gin":
        return _nccl_file()
    wanted = int(arch.removeprefix("sm_"))
    files = {number: path for number, path in _nvshmem_files().items() if number <= wanted}
    if not files:
        raise _unavailable("nvshmem", f"NVSHMEM has no bitcode for {arch}")
    return files[max(files)]


def _nvshmem_files() -> dict[int, Path]:
    """By architecture; code for one runs on later ones."""
    folder = find_nvshmem()
    if folder is None:
        raise _unavailable("nvshmem", "no NVSHMEM in this environment's wheels or in NVSHMEM_HOME")
    found = {}
    for path in (folder / "lib").glob("libnvshmem_device_sm_*.bc"):
        if number := re.fullmatch(r"libnvshmem_device_sm_(\d+)", path.stem):
            found[int(number[1])] = path
    if not found:
        raise _unavailable("nvshmem", f"no libnvshmem_device_sm_*.bc in {folder / 'lib'}")
    return found


def _nccl_file() -> Path:
    folder = find_nccl()
    if folder is None:
        raise _unavailable("nccl_gin", "no NCCL in this environment's wheels or in NCCL_HOME")
    path = folder / "lib/libnccl_device.bc"
    if not path.is_file():
        raise _unavailable("nccl_gin", f"{path} is missing")
    return path


def _nccl_version(library: Path) -> int:
    """Of the headers beside it (23203), which are of the same release."""
    header = library.parents[1] / "include/nccl.h"
    version = read_macro(header, "NCCL_VERSION_CODE")
    if version is None:
        raise _unavailable("nccl_gin", f"{header} does not say which NCCL it is of")
    return version


def _unavailable(transport: str, what: str) -> DeviceUnavailableError:
    return DeviceUnavailableError(
        f"the kernels in Triton cannot be linked for the transport {transport}: {what}. "
        f"`pip install 'fastkern[{_EXTRAS[transport]}]'` installs what they need"
    )
