"""Kernels compiled as a program does it at run time, by NVRTC, and taken from the cache after."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from fastkern.device.compile import COMPILERS, compile_entry, compile_with
from fastkern.device.compile_cuda import CudaCompiler
from fastkern.device.kernel_cache import KernelCache
from fastkern.device.sources import EntrySource, include_root, read_entry
from fastkern.errors import CompileError
from tests.device_compile.toolchain import EXCHANGE, KERNELS, ROOT, Edit, copy_sources


class CountingCompiler(CudaCompiler):
    def __init__(self) -> None:
        self.calls = 0

    def compile(self, source: EntrySource, arch: str, defines: dict[str, str]) -> bytes:
        self.calls += 1
        return super().compile(source, arch, defines)


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> CountingCompiler:
    """In place of the package's own."""
    counting = CountingCompiler()
    monkeypatch.setitem(COMPILERS, "cuda", counting)
    return counting


def test_the_second_process_compiles_nothing(tmp_path: Path, compiler: CountingCompiler) -> None:
    folder = tmp_path / "kernels"
    first = compile_entry("exchange", "cuda", "sm_90", cache=KernelCache(folder))
    assert compiler.calls == 1
    assert first.startswith(b"\x7fELF")
    assert KERNELS[EXCHANGE][0].encode() in first
    # A new cache has nothing in memory: as in another process.
    assert compile_entry("exchange", "cuda", "sm_90", cache=KernelCache(folder)) == first
    assert compiler.calls == 1

    (entry,) = folder.glob("*.kernel")
    entry.write_bytes(entry.read_bytes()[:-100])
    again = compile_entry("exchange", "cuda", "sm_90", cache=KernelCache(folder))
    assert compiler.calls == 2
    assert hashlib.sha256(again).digest() == hashlib.sha256(first).digest()
    other = compile_entry("exchange", "cuda", "sm_80", cache=KernelCache(folder))
    assert compiler.calls == 3
    assert other != first
    assert len(list(folder.glob("*.kernel"))) == 2


def test_a_changed_header_compiles_again(tmp_path: Path, compiler: CountingCompiler) -> None:
    cache = KernelCache(tmp_path / "kernels")
    edit = Edit("kernels/target/cuda.h", r"ld\.acquire\.sys", "ld.acquire.gpu")
    edited = copy_sources(tmp_path / "tree", [edit])
    found = [
        compile_with(compiler, read_entry("exchange", "cuda", root), "sm_90", None, cache)
        for root in (ROOT, edited, ROOT, edited)
    ]
    assert compiler.calls == 2
    assert found[0] == found[2] != found[1] == found[3]


def test_files_of_the_current_folder_are_not_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NVRTC looks beside the source first, which without a folder is the current one."""
    other = tmp_path / "kernels/target/cuda.h"
    other.parent.mkdir(parents=True)
    other.write_text("#error not the package's header\n")
    monkeypatch.chdir(tmp_path)
    compile_entry("exchange", "cuda", "sm_90", cache=KernelCache(tmp_path / "cache"))


def test_macros_reach_the_compiler(tmp_path: Path) -> None:
    entry = "kernels/entry/exchange.cu"
    text = '#include "kernels/target/cuda.h"'
    check = f'static_assert(LANES == 256 && EMPTY 1, "");\n{text}'
    root = copy_sources(tmp_path / "tree", [Edit(entry, text, check)])
    source = read_entry("exchange", "cuda", root)
    cache = KernelCache(tmp_path / "kernels")
    compile_with(CudaCompiler(), source, "sm_90", {"LANES": "256", "EMPTY": ""}, cache)
    with pytest.raises(CompileError, match="LANES == 256"):
        compile_with(CudaCompiler(), source, "sm_90", {"LANES": "255", "EMPTY": ""}, cache)


def test_the_log_names_file_and_line(tmp_path: Path) -> None:
    edit = Edit("kernels/body/move_rows.h", r"#pragma once\n", "#pragma once\nint x = no_such;\n")
    source = read_entry("exchange", "cuda", copy_sources(tmp_path / "tree", [edit]))
    line = source.files["kernels/body/move_rows.h"].split("no_such")[0].count("\n") + 1
    with pytest.raises(CompileError) as caught:
        compile_with(CudaCompiler(), source, "sm_90", None, KernelCache(tmp_path / "kernels"))
    assert f"kernels/body/move_rows.h({line}): error: identifier" in caught.value.log
    assert "exchange does not compile for cuda sm_90" in str(caught.value)
    assert not list((tmp_path / "kernels").glob("*.kernel"))


def test_an_architecture_that_nvrtc_does_not_know(tmp_path: Path) -> None:
    with pytest.raises(CompileError, match="--gpu-architecture"):
        compile_entry("exchange", "cuda", "sm_10", cache=KernelCache(tmp_path / "kernels"))


def test_sources_are_the_repositorys() -> None:
    """Installed in place: what is compiled is what is edited."""
    assert include_root() == ROOT
