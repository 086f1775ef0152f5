"""The kernels compile for CUDA and HIP, and their assembly keeps what the bodies rely on.

Each check is also run on a kernel that was broken on purpose, which it must find out.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.device_compile import checks
from tests.device_compile.toolchain import (
    COMBINE,
    CUDA_ARCHES,
    DISPATCH,
    EXCHANGE,
    HIP_ARCHES,
    KERNELS,
    ROOT,
    Edit,
    compile_cuda,
    compile_hip,
    compile_hip_object,
    copy_sources,
    cuda_build,
    disassemble_cuda,
    load,
    registers_used,
)

CUDA = "kernels/target/cuda.h"
HIP = "kernels/target/hip.h"
NARROW_COPY = Edit("kernels/target/block_copy.h", r"skew % 16 == 0", "skew % 16 == 16")
# Those that move rows between ranks; the others only read and write what is theirs.
PERSISTENT = (EXCHANGE, DISPATCH, COMBINE)

by_name = pytest.mark.parametrize("entry", KERNELS, ids=lambda entry: Path(entry).name)


@by_name
@pytest.mark.parametrize("arch", CUDA_ARCHES)
def test_cuda_kernel(arch: str, entry: str, tmp_path: Path) -> None:
    build = cuda_build(entry, arch)
    assert build.cubin.startswith(b"\x7fELF")
    registers = checks.ptxas_registers(build.log)
    assert sorted(registers) == sorted(KERNELS[entry])
    registers_used.extend(f"{arch:8} {name:22} {n:4}" for name, n in registers.items())
    for name in KERNELS[entry]:
        assert f".entry {name}(" in build.ptx
    sass = disassemble_cuda(build.cubin, tmp_path)
    assert checks.ptxas_faults(build.log) == []
    assert checks.sass_faults(sass) == []
    if entry in PERSISTENT:
        assert checks.ptx_faults(build.ptx) == []
        assert checks.wide_sass_faults(sass) == []
    else:
        assert checks.ptx_faults(build.ptx, names=()) == []


def test_cuda_kernel_through_cuda_core() -> None:
    """The compiler as a program calls it at run time: no driver is needed for an explicit arch."""
    core = load("cuda.core", "cuda-core")
    options = core.ProgramOptions(arch="sm_90", std="c++17", include_path=[str(ROOT)])
    program = core.Program((ROOT / f"{EXCHANGE}.cu").read_text(), "c++", options)
    cubin = bytes(program.compile("cubin").code)
    assert cubin.startswith(b"\x7fELF")
    assert KERNELS[EXCHANGE][0].encode() in cubin


@pytest.mark.parametrize(
    ("edit", "fault"),
    [
        (Edit(CUDA, r"st\.release\.sys", "st.relaxed.sys"), "no st.release.sys.global.u64"),
        (Edit(CUDA, r"ld\.acquire\.sys", "ld.acquire.gpu"), "unexpected ld.acquire.gpu.global.u64"),
        (Edit(CUDA, r"acq_rel\.sys\.global\.cas", "acq_rel.cta.global.cas"), "unexpected atom."),
    ],
    ids=["relaxed", "acquire-gpu", "cas-cta"],
)
def test_weak_ptx_is_found(edit: Edit, fault: str, tmp_path: Path) -> None:
    build = compile_cuda(EXCHANGE, "sm_90", copy_sources(tmp_path, [edit]))
    assert any(found.startswith(fault) for found in checks.ptx_faults(build.ptx))


@pytest.mark.parametrize(
    ("edit", "fault"),
    [
        (Edit(CUDA, r"ld\.global\.v4", "ld.global.nc.v4"), "non-coherent LDG.E.128.CONSTANT"),
        (Edit(CUDA, r"st\.global\.v4", "st.v4"), "generic ST.E.128"),
        (NARROW_COPY, "no STG.E.128"),
    ],
    ids=["non-coherent", "generic", "narrow"],
)
def test_bad_sass_is_found(edit: Edit, fault: str, tmp_path: Path) -> None:
    build = compile_cuda(EXCHANGE, "sm_90", copy_sources(tmp_path, [edit]))
    sass = disassemble_cuda(build.cubin, tmp_path)
    assert fault in [*checks.sass_faults(sass), *checks.wide_sass_faults(sass)]


@pytest.mark.parametrize("entry", PERSISTENT, ids=lambda entry: Path(entry).name)
def test_cuda_spills_are_found(entry: str, tmp_path: Path) -> None:
    """Bounds of 1024 lanes and two blocks leave 32 registers."""
    edit = Edit(f"{entry}.cu", r"__launch_bounds__\(512, 1\)", "__launch_bounds__(1024, 2)")
    build = compile_cuda(entry, "sm_90", copy_sources(tmp_path, [edit]))
    assert any("bytes spill stores" in fault for fault in checks.ptxas_faults(build.log))


@by_name
@pytest.mark.parametrize("arch", HIP_ARCHES)
def test_hip_kernel(arch: str, entry: str, tmp_path: Path) -> None:
    assembly = compile_hip(entry, arch, tmp_path)
    for name in KERNELS[entry]:
        assert f".amdhsa_kernel {name}" in assembly
    registers = checks.hip_registers(assembly)
    assert sorted(registers) == sorted(KERNELS[entry])
    registers_used.extend(
        f"{arch:8} {name:22} {v:4} and {s} scalar" for name, (v, s) in registers.items()
    )
    assert checks.hip_spill_faults(assembly) == []
    if entry not in PERSISTENT:
        return
    assert checks.hip_faults(assembly) == []
    if arch != "gfx90a":  # which has no scope bits
        assert checks.hip_scope_faults(assembly) == []


@by_name
def test_hip_code_object(entry: str, tmp_path: Path) -> None:
    code = compile_hip_object(entry, "gfx942", tmp_path)
    assert code.startswith(b"\x7fELF")
    for name in KERNELS[entry]:
        assert name.encode() in code


@pytest.mark.parametrize(
    ("edit", "fault"),
    [
        (Edit(HIP, r"void drain\(\) const \{.*\}", "void drain() const {}"), "4 barriers without"),
        (Edit(HIP, r"return \(FASTKERN_GLOBAL T\*\)p;", "return p;"), "no global_store_dwordx4"),
        (NARROW_COPY, "no global_store_dwordx4"),
    ],
    ids=["no-drain", "flat", "narrow"],
)
def test_bad_hip_is_found(edit: Edit, fault: str, tmp_path: Path) -> None:
    edits = [edit]
    if "return p;" in edit.replacement:
        edits.append(Edit(HIP, r"#define FASTKERN_GLOBAL .*", "#define FASTKERN_GLOBAL"))
    assembly = compile_hip(EXCHANGE, "gfx942", tmp_path, copy_sources(tmp_path, edits))
    assert any(found.startswith(fault) for found in checks.hip_faults(assembly))


@pytest.mark.parametrize(
    ("entry", "edit", "undrained"),
    [
        (DISPATCH, Edit("kernels/body/dispatch.h", r"    target\.drain\(\);\n", ""), 2),
        (  # sums of floats, sums of doubles
            COMBINE,
            Edit("kernels/body/items.h", r"(?<=u64 bytes\) \{\n)    target\.drain\(\);\n", ""),
            3,
        ),
    ],
    ids=["dispatch", "combine"],
)
def test_a_missing_drain_is_found(entry: str, edit: Edit, undrained: int, tmp_path: Path) -> None:
    assembly = compile_hip(entry, "gfx942", tmp_path, copy_sources(tmp_path, [edit]))
    assert f"{undrained} barriers without a write-back, not 1" in checks.hip_faults(assembly)


@pytest.mark.parametrize("entry", PERSISTENT, ids=lambda entry: Path(entry).name)
def test_hip_spills_are_found(entry: str, tmp_path: Path) -> None:
    edit = Edit(f"{entry}.hip", r"flat_work_group_size\(1, 512\)", "num_vgpr(32)")
    assembly = compile_hip(entry, "gfx942", tmp_path, copy_sources(tmp_path, [edit]))
    assert any("vgpr spills" in fault for fault in checks.hip_spill_faults(assembly))


def test_dropped_wait_is_found(tmp_path: Path) -> None:
    """In the listing, since later compilers keep the wait by themselves."""
    assembly = compile_hip(EXCHANGE, "gfx942", tmp_path)
    lines = assembly.splitlines()
    first = next(k for k, line in enumerate(lines) if line.strip().startswith("buffer_wbl2"))
    waits = [k for k in range(first, first + 6) if lines[k].strip().startswith("s_waitcnt")]
    kept = [line for k, line in enumerate(lines) if k not in waits]
    assert any(fault.startswith("no wait") for fault in checks.hip_faults("\n".join(kept)))


@pytest.mark.parametrize(
    "edit",
    [
        Edit(HIP, r"= __HIP_MEMORY_SCOPE_SYSTEM", "= __HIP_MEMORY_SCOPE_AGENT"),
        Edit(HIP, r'RELEASE, ""', 'RELEASE, "agent"'),
    ],
    ids=["atomics", "write-back"],
)
def test_narrow_hip_scope_is_found(edit: Edit, tmp_path: Path) -> None:
    assembly = compile_hip(EXCHANGE, "gfx942", tmp_path, copy_sources(tmp_path, [edit]))
    faults = checks.hip_scope_faults(assembly)
    assert any(fault.startswith("narrower than the system") for fault in faults)
