"""What is asked of HIPRTC and its linker for rocshmem, where its bitcode is looked for, and what is
said where it is missing. HIPRTC is a double."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from fastkern.device.compile import compile_entry
from fastkern.device.compile_hip import HIP_FLAGS
from fastkern.device.compile_rocshmem import RocshmemCompiler
from fastkern.device.kernel_cache import KernelCache
from fastkern.errors import CompileError, DeviceUnavailableError
from tests.device.hiprtc_double import hip_module
from tests.device.network_doubles import Kind, LinkingHipRtc, hide_machine, newer, write_files


def compile_rocshmem(arch: str = "gfx942:xnack-") -> bytes:
    return compile_entry(
        "exchange", "hip", arch, {"A": "1"}, KernelCache(None), transport="rocshmem"
    )


def rocshmem_at(prefix: Path, *arches: str) -> list[Path]:
    files = {f"lib/librocshmem_device_{arch}.bc": "bitcode" for arch in arches}
    return [write_files(prefix, files) / path for path in files]


@pytest.mark.parametrize("old", [False, True], ids=["HIP 7", "HIP 6"])
def test_what_is_asked_for_rocshmem(
    old: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hide_machine(monkeypatch, tmp_path)
    rtc = LinkingHipRtc(old=old)
    monkeypatch.setitem(sys.modules, "hip", hip_module(rtc))
    _, library = rocshmem_at(tmp_path / "rocm", "gfx90a", "gfx942")
    assert compile_rocshmem() == rtc.linked
    (program,) = rtc.programs
    assert program.options == [
        b"--offload-arch=gfx942:xnack-",
        *(flag.encode() for flag in (*HIP_FLAGS, "-fgpu-rdc", "-DA=1")),
    ]
    assert b"kernels/transport/rocshmem_declarations.h" in program.headers
    assert rtc.added == [
        (Kind.hipJitInputLLVMBitcode, b"BC\xc0\xde", b"rocshmem.hip"),
        (Kind.hipJitInputLLVMBitcode, str(library).encode()),
    ]
    assert rtc.states == ["open", "destroyed"]
    assert program.destroyed


@pytest.mark.parametrize(
    "call",
    [
        *("hiprtcGetBitcodeSize", "hiprtcGetBitcode", "hiprtcLinkCreate", "hiprtcLinkAddData"),
        *("hiprtcLinkAddFile", "hiprtcLinkComplete"),
    ],
)
def test_a_call_of_the_linker_fails(
    call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hide_machine(monkeypatch, tmp_path)
    rtc = LinkingHipRtc(failing=(call,))
    monkeypatch.setitem(sys.modules, "hip", hip_module(rtc))
    rocshmem_at(tmp_path / "rocm", "gfx942")
    with pytest.raises(CompileError, match=f"{call}: <Status.HIPRTC_ERROR_INVALID_INPUT: 3>"):
        compile_rocshmem()
    if "Link" in call and call != "hiprtcLinkCreate":
        assert rtc.states == ["open", "destroyed"]
    assert [program.destroyed for program in rtc.programs] == [True]


def test_where_rocshmem_lies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hide_machine(monkeypatch, tmp_path)
    rtc = LinkingHipRtc()
    monkeypatch.setitem(sys.modules, "hip", hip_module(rtc))
    with pytest.raises(DeviceUnavailableError, match=r"librocshmem_device_gfx\.\.\.\.bc in .*rocm"):
        compile_rocshmem()
    versions = []
    for variable in (None, "ROCM_PATH", "ROCSHMEM_HOME"):
        prefix = tmp_path / (variable or "rocm")
        (library,) = rocshmem_at(prefix, "gfx942")
        if variable is not None:
            monkeypatch.setenv(variable, str(prefix))
        compile_rocshmem()
        assert rtc.added[-1][1] == str(library).encode()
        versions.append(RocshmemCompiler().version())
    assert len(set(versions)) == 3
    newer(library)
    assert RocshmemCompiler().version() not in versions
    with pytest.raises(DeviceUnavailableError, match=r"librocshmem_device_gfx950\.bc"):
        compile_rocshmem("gfx950")
