"""CUDA with NCCL's device API: nvcc, with nothing to link; where there is no nvcc, an image that
came with fastkern (gin_image.py).

NVRTC does not do: it leaves out the packing of NCCL's records. Needs neither a GPU nor a driver;
nvcc needs a host compiler.
"""

from __future__ import annotations

import functools
import re
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from ..config import read_compiler_environment
from ..errors import CompileError, DeviceUnavailableError
from .compile_cuda import CudaCompiler
from .gin_image import GinImage, read_gin_image
from .libraries import find_nccl, find_nvcc, identity, nccl_library_version, nccl_text, read_macro
from .sources import EntrySource, include_root

# The first release with all that kernels/transport/nccl_gin.h calls.
LEAST_NCCL = 23200
_TIMEOUT_S = 600.0


@dataclass(frozen=True)
class Tools:
    """What nccl_gin is compiled with. nccl: NCCL's folder; nccl_version: its headers', 23203."""

    nvcc: Path
    nvcc_version: str
    nccl: Path
    nccl_version: int


class GinCompiler:
    """Compiles a transport's entry to a cubin, with nvcc."""

    name = "nvcc"
    flags = ("-std=c++17", "-cubin")

    def check_arch(self, arch: str) -> None:
        """Raises ValueError unless `arch` is written like "sm_90" or "sm_90a"."""
        CudaCompiler().check_arch(arch)

    def version(self) -> str:
        """nvcc's, NCCL's, and what the files are of both. Raises DeviceUnavailableError."""
        tools = _tools()
        files = identity([tools.nvcc, tools.nccl / "include"])
        return f"{tools.nvcc_version}, NCCL {nccl_text(tools.nccl_version)}, files {files}"

    def compile(self, source: EntrySource, arch: str, defines: dict[str, str]) -> bytes:
        """Raises CompileError, DeviceUnavailableError."""
        tools = _tools()
        with tempfile.TemporaryDirectory(prefix="fastkern-") as name:
            folder = Path(name)
            for path, text in source.files.items():  # what is compiled is what was read
                (folder / path).parent.mkdir(parents=True, exist_ok=True)
                (folder / path).write_text(text, encoding="utf-8")
            output = folder / "image"
            command = [str(tools.nvcc), f"-arch={arch}", *self.flags]
            command += [f"-D{macro}={value}" for macro, value in defines.items()]
            command += [f"-I{folder}", f"-I{tools.nccl / 'include'}"]
            try:
                _run([*command, str(folder / source.path), "-o", str(output)])
                return output.read_bytes()
            except OSError as error:
                log = str(error).replace(f"{folder}/", "")
                raise CompileError(source.name, source.target, arch, log) from error


def find_tools() -> Tools | str:
    """nvcc with a host compiler, and NCCL's headers; or what is missing."""
    nvcc = find_nvcc()
    if nvcc is None:
        return "there is no nvcc on the PATH, in this environment's wheels or in CUDA_HOME"
    if shutil.which("g++") is None:
        return f"{nvcc} needs a host compiler, and there is no g++ on the PATH"
    nccl = find_nccl()
    if nccl is None:
        return "there is no nccl_device.h in this environment's wheels or in NCCL_HOME"
    version = read_macro(nccl / "include/nccl.h", "NCCL_VERSION_CODE") or 0
    if version < LEAST_NCCL:
        return (
            f"NCCL {nccl_text(LEAST_NCCL)} or newer is needed, and the headers in "
            f"{nccl / 'include'} are of {nccl_text(version)}"
        )
    try:
        nvcc_version = _nvcc_version(nvcc, nvcc.stat().st_mtime_ns)
    except OSError as error:
        return f"{nvcc} does not run: {error}"
    return Tools(nvcc, nvcc_version, nccl, version)


def ready_image(source: EntrySource, arch: str, defines: dict[str, str]) -> bytes | None:
    """None where there is nvcc; else the image that came with fastkern.

    Raises DeviceUnavailableError where that was made for something else, saying for what, or where
    there is none.
    """
    missing = find_tools()
    if isinstance(missing, Tools):
        return None
    image = read_gin_image(source.root)
    fault = image if isinstance(image, str) else image.fault(source, arch, defines)
    if isinstance(image, GinImage) and fault is None:
        fault = _library_fault(image.nccl_version)
        if fault is None:
            return image.path.read_bytes()
    raise _unavailable(f"{missing}; and {fault}")


def nccl_version_of_image() -> int:
    """The NCCL that images are made for here (23203), which the host must name to NCCL.

    Raises DeviceUnavailableError where there is nothing to compile with, and no image.
    """
    tools = find_tools()
    if isinstance(tools, Tools):
        return tools.nccl_version
    image = read_gin_image(include_root())
    if isinstance(image, str):
        raise _unavailable(f"{tools}; and {image}")
    return image.nccl_version


def _tools() -> Tools:
    found = find_tools()
    if isinstance(found, str):
        raise _unavailable(found)
    return found


def _library_fault(made_for: int) -> str | None:
    """Whether NCCL here has what an image expects: its own layout or an older one's."""
    text = f"the image that came with fastkern is for NCCL {nccl_text(made_for)} and newer 2.x"
    library = nccl_library_version()
    if library is None:
        return f"{text}, and there is no NCCL here"
    if library < made_for or library // 10000 != made_for // 10000:
        return f"{text}, and NCCL here is {nccl_text(library)}"
    return None


@functools.lru_cache(maxsize=8)
def _nvcc_version(nvcc: Path, _written_ns: int) -> str:
    """ "V13.0.88". Raises OSError."""
    said = _run([str(nvcc), "--version"])
    found = re.search(r"\bV\d+\.\d+\.\d+", said)
    if found is None:
        raise OSError(f"no version in what it says: {said.strip()[:200]!r}")
    return found[0]


def _run(command: list[str]) -> str:
    """What a program prints. Raises OSError, with what it printed, where it fails."""
    try:
        result = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=read_compiler_environment(),
            timeout=_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise OSError(f"{command[0]} did not end in {_TIMEOUT_S:.0f} s") from error
    said = result.stdout.decode(errors="replace")
    if result.returncode != 0:
        raise OSError(f"{command[0]} ended with {result.returncode}:\n{said}")
    return said


def _unavailable(what: str) -> DeviceUnavailableError:
    return DeviceUnavailableError(
        f"the transport nccl_gin cannot be compiled: {what}. `pip install 'fastkern[gin]'` "
        f"installs nvcc and NCCL; nvcc needs g++, which the system's packages bring"
    )
