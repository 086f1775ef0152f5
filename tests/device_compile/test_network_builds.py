"""Network entries compiled as a program does it at run time: NVRTC with nvJitLink for nvshmem, nvcc
for nccl_gin; and by the wheel's build, which makes an image of the latter.

To save time, only nvshmem's is compiled whole here; the wheel's test has nccl_gin's.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from fastkern.device import compile as device_compile
from fastkern.device.compile import compile_entry, compile_with
from fastkern.device.compile_gin import GinCompiler
from fastkern.device.compile_nvshmem import NvshmemCompiler
from fastkern.device.kernel_cache import KernelCache
from fastkern.device.libraries import nccl_library_version, read_macro
from fastkern.device.sources import EntrySource, read_network_entry
from fastkern.errors import CompileError
from tests.device_compile.toolchain import ROOT, Edit, copy_sources, load
from tests.device_compile.transport_builds import (
    GIN,
    KERNELS,
    NVSHMEM,
    only_exchange,
    wheel_file,
)

Builds = dict[str, Future[bytes]]


@pytest.fixture(scope="module")
def cache_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache") / "kernels"


@pytest.fixture(scope="module")
def builds(tmp_path_factory: pytest.TempPathFactory, cache_folder: Path) -> Iterator[Builds]:
    """All that takes long, two at a time."""

    # One state of the sources for all tests, whatever is edited meanwhile.
    tree = copy_sources(tmp_path_factory.mktemp("tree"), [])

    def read(transport: str) -> EntrySource:
        return read_network_entry(transport, tree)

    def whole_nvshmem() -> bytes:
        cache = KernelCache(cache_folder)
        return compile_entry("exchange", "cuda", "sm_90", cache=cache, transport="nvshmem")

    def unresolved_nvshmem() -> bytes:
        bridge = Edit("kernels/transport/nvshmem.h", r"#ifdef __CUDACC_RTC__\n[\s\S]*?#endif\n", "")
        root = copy_sources(tmp_path_factory.mktemp("bridge"), [bridge, only_exchange(NVSHMEM)])
        source = read_network_entry("nvshmem", root)
        return compile_with(NvshmemCompiler(), source, "sm_90", None, KernelCache(None))

    def gin(*edits: Edit) -> bytes:
        root = copy_sources(tmp_path_factory.mktemp("gin"), [only_exchange(GIN), *edits])
        source = read_network_entry("nccl_gin", root)
        return compile_with(GinCompiler(), source, "sm_90", None, KernelCache(None))

    broken = Edit("kernels/transport/nccl_gin.h", r"#pragma once\n", "#pragma once\nint x = no;\n")
    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(2) as pool:
        patch.setattr(device_compile, "read_network_entry", read)
        yield {
            "nvshmem": pool.submit(whole_nvshmem),
            "nccl_gin": pool.submit(gin),
            "unresolved": pool.submit(unresolved_nvshmem),
            "broken": pool.submit(gin, broken),
        }


def test_nvshmem_is_linked(builds: Builds) -> None:
    code = builds["nvshmem"].result()
    assert code.startswith(b"\x7fELF")
    assert [name for name in KERNELS if name.encode() not in code] == []
    assert int.from_bytes(code[16:18], "little") == 2, "an executable, not to be linked any more"


def test_all_entries_that_move_rows_are_that_image(builds: Builds, cache_folder: Path) -> None:
    """From the cache, as in another process: nothing is compiled again."""
    code = builds["nvshmem"].result()
    for entry in ("dispatch", "combine"):
        cache = KernelCache(cache_folder)
        assert compile_entry(entry, "cuda", "sm_90", cache=cache, transport="nvshmem") == code
    assert len(list(cache_folder.glob("*.kernel"))) == 1


def test_an_unresolved_symbol_is_an_error(builds: Builds) -> None:
    with pytest.raises(CompileError, match="_Z37nvshmemi_transfer_put_sig") as caught:
        builds["unresolved"].result()
    assert "Undefined reference" in caught.value.log
    assert "network/nvshmem does not compile for cuda sm_90" in str(caught.value)


def test_nvcc_compiles_nccl_gin(builds: Builds) -> None:
    code = builds["nccl_gin"].result()
    assert code.startswith(b"\x7fELF")
    assert b"fastkern_exchange" in code


def test_nvccs_log_names_file_and_line(builds: Builds) -> None:
    with pytest.raises(CompileError, match=r"(?m)^kernels/transport/nccl_gin\.h\(\d+\): error:"):
        builds["broken"].result()


def test_the_librarys_version_is_its_headers() -> None:
    """Of one wheel, asked in two ways."""
    header = wheel_file("nvidia-nccl-cu13", "nccl/include/nccl.h")
    version = read_macro(header, "NCCL_VERSION_CODE")
    assert version is not None
    assert nccl_library_version() == version


# -- CMake: when an image is made ------------------------------------------------------------------


def configure(folder: Path, mode: str, *options: str) -> subprocess.CompletedProcess[str]:
    """Configure a build, which compiles nothing."""
    load("cmake", "cmake")
    nanobind = load("nanobind", "nanobind")
    command = [
        *(sys.executable, "-m", "cmake", "-S", str(ROOT), "-B", str(folder), "-G", "Ninja"),
        f"-DPython_EXECUTABLE={sys.executable}",
        f"-Dnanobind_DIR={nanobind.cmake_dir()}",
        f"-DCMAKE_MAKE_PROGRAM={shutil.which('ninja', path=str(Path(sys.executable).parent))}",
        f"-DFASTKERN_PREBUILD_GIN={mode}",
        *options,
    ]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def targets(folder: Path) -> str:
    return (folder / "build.ninja").read_text()


@pytest.mark.parametrize("mode", ["ON", "AUTO"])
def test_an_image_is_made_where_it_can_be(mode: str, tmp_path: Path) -> None:
    result = configure(tmp_path, mode)
    assert result.returncode == 0, result.stderr
    assert "prebuilt/nccl_gin.fatbin" in targets(tmp_path)
    assert "prebuilt/nccl_gin.fatbin" in (tmp_path / "cmake_install.cmake").read_text()
    assert "--arches 80 90 100 120" in targets(tmp_path)
    assert "not compiled ahead" not in result.stderr


def test_no_image_is_made_unless_asked_for(tmp_path: Path) -> None:
    result = configure(tmp_path, "OFF")
    assert result.returncode == 0, result.stderr
    assert "prebuilt" not in targets(tmp_path)


@pytest.mark.parametrize("mode", ["ON", "AUTO"])
def test_an_old_nccl_is_said(mode: str, tmp_path: Path) -> None:
    """With ON the build stops; with AUTO it goes on without an image."""
    old = tmp_path / "old"
    old.mkdir()
    (old / "nccl.h").write_text("#define NCCL_VERSION_CODE 22809\n")
    (old / "nccl_device.h").touch()
    result = configure(tmp_path / "build", mode, f"-DFASTKERN_NCCL_INCLUDE={old}")
    assert "is older than 2.32" in " ".join(result.stderr.split())
    assert (result.returncode == 0) == (mode == "AUTO")
    if mode == "AUTO":
        assert "prebuilt" not in targets(tmp_path / "build")
