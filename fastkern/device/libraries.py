"""Where the libraries lie that network entries are compiled against, and of which release they are.

NVIDIA's: wheels of this environment come first, since Python loads the libraries themselves from
there; then what the environment says (`fastkern.config.read_prefix`); then the usual folder.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import os
import re
import shutil
from collections.abc import Iterable
from pathlib import Path

from ..config import read_prefix

USUAL_CUDA = Path("/usr/local/cuda")
USUAL_ROCM = Path("/opt/rocm")


def wheel_folders() -> list[Path]:
    """The folders nvidia/ of this environment, which NVIDIA's wheels share."""
    found = importlib.util.find_spec("nvidia")
    places = None if found is None else found.submodule_search_locations
    return [Path(place) for place in places or ()]


def find_cuda_headers() -> list[Path] | None:
    """Include folders of the CUDA runtime and of CCCL; None where one is missing."""
    prefixes = [folder / "cu13" for folder in wheel_folders()]
    prefixes += [prefix for prefix in (read_prefix("cuda"), USUAL_CUDA) if prefix is not None]
    runtime = _first(prefix / "include" for prefix in prefixes if _has(prefix, "cuda_runtime.h"))
    # A folder of its own since CUDA 13.
    names = ("include/cccl", "include")
    standard = [prefix / name for prefix in prefixes for name in names]
    cccl = _first(folder for folder in standard if (folder / "cuda/std/cstdint").is_file())
    if runtime is None or cccl is None:
        return None
    return [runtime] if cccl == runtime else [runtime, cccl]


def find_nvshmem() -> Path | None:
    """The folder that holds NVSHMEM's include/ and lib/libnvshmem_device.a."""
    return _first(
        prefix
        for prefix in _prefixes("nvshmem")
        if _has(prefix, "nvshmem.h") and (prefix / "lib/libnvshmem_device.a").is_file()
    )


def find_nccl() -> Path | None:
    """The folder that holds NCCL's include/, with the headers for devices."""
    prefixes = [*_prefixes("nccl"), USUAL_CUDA, Path("/usr")]
    return _first(prefix for prefix in prefixes if _has(prefix, "nccl_device.h"))


def find_nvcc() -> Path | None:
    """nvcc: on the PATH, or a wheel's, or the toolkit's."""
    if found := shutil.which("nvcc"):
        return Path(found)
    prefixes = [folder / "cu13" for folder in wheel_folders()]
    prefixes += [prefix for prefix in (read_prefix("cuda"), USUAL_CUDA) if prefix is not None]
    tools = [prefix / "bin/nvcc" for prefix in prefixes]
    return _first(tool for tool in tools if tool.is_file() and os.access(tool, os.X_OK))


def rocshmem_folders() -> list[Path]:
    """Where rocSHMEM may have put its device bitcode, in this order."""
    prefixes = (read_prefix("rocshmem"), read_prefix("rocm"), USUAL_ROCM)
    return [prefix / "lib" for prefix in prefixes if prefix is not None]


def read_macro(header: Path, name: str) -> int | None:
    """The number that a header gives to a macro; None where it does not."""
    try:
        text = header.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    found = re.search(rf"^\s*#\s*define\s+{name}\s+(\d+)\b", text, re.MULTILINE)
    return None if found is None else int(found[1])


def nccl_text(version: int) -> str:
    """23203 as NCCL writes it for people: 2.32.3."""
    return f"{version // 10000}.{version // 100 % 100}.{version % 100}"


def nccl_library_version() -> int | None:
    """Of the NCCL that this process has loaded or would load (23203); None where there is none."""
    name = "libnccl.so.2"
    places = [str(folder / "nccl/lib" / name) for folder in wheel_folders()]
    # The one that PyTorch has loaded, if it has, is found by its name alone.
    attempts = [(name, os.RTLD_NOLOAD | os.RTLD_NOW), *((place, os.RTLD_NOW) for place in places)]
    for place, mode in (*attempts, (name, os.RTLD_NOW)):
        try:
            library = ctypes.CDLL(place, mode=mode)
            version = ctypes.c_int()
            if library.ncclGetVersion(ctypes.byref(version)) == 0:
                return version.value
        except (OSError, AttributeError):
            continue
    return None


def identity(paths: Iterable[Path]) -> str:
    """A digest of where files lie, how large they are and when they were written.

    Folders stand for all files in them. Enough to tell a library from one put into its place.
    """
    digest = hashlib.sha256()
    for path in paths:
        files = sorted(path.rglob("*")) if path.is_dir() else [path]
        for file in files:
            if not file.is_dir():
                status = file.stat()
                digest.update(f"{file}\0{status.st_size}\0{status.st_mtime_ns}\n".encode())
    return digest.hexdigest()[:16]


def _prefixes(library: str) -> list[Path]:
    given = read_prefix(library)
    found = [folder / library for folder in wheel_folders()]
    return found if given is None else [*found, given]


def _has(prefix: Path, header: str) -> bool:
    return (prefix / "include" / header).is_file()


def _first(paths: Iterable[Path]) -> Path | None:
    return next(iter(paths), None)
