"""The kernels compile for CUDA and HIP: registers, spills, wide accesses, and orders on every way.

Each check is also run on a kernel that was broken on purpose, which it must find out.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from fastkern.device.compile_cuda import CudaCompiler
from fastkern.device.sources import read_entry
from tests.device_compile import checks, transport_checks
from tests.device_compile.devices import DEVICES
from tests.device_compile.listing import Kernel, hip_kernels, sass_kernels
from tests.device_compile.order_checks import (
    EARLY_FLAG,
    EARLY_READ,
    UNDRAINED,
    order_faults,
    synchronising_faults,
)
from tests.device_compile.toolchain import (
    CUDA_ARCHES,
    DISPATCH,
    EXCHANGE,
    HIP_ARCHES,
    KERNELS,
    PERSISTENT,
    ROOT,
    STATIC,
    Edit,
    compile_cuda,
    compile_hip,
    copy_sources,
    cuda_build,
    cuda_sass,
    disassemble_cuda,
    hip_assembly,
    kernels_from,
    kernels_of,
    link_hip,
    registers_used,
)

CUDA = "kernels/target/cuda.h"
HIP = "kernels/target/hip.h"
ITEMS = "kernels/body/items.h"
EXCHANGE_BODY = "kernels/body/exchange.h"
# What a block that shares memory with other ranks synchronises with: PTX, AMD. (route's do not.)
CUDA_NAMES = dict.fromkeys(PERSISTENT, checks.CUDA_SYNCHRONISING)
HIP_NAMES = dict.fromkeys(PERSISTENT, checks.HIP_SYNCHRONISING)
# One block of a rank enters a call: there is none to count.
CUDA_NAMES[STATIC] = tuple(name for name in checks.CUDA_SYNCHRONISING if ".add." not in name)
HIP_NAMES[STATIC] = tuple(name for name in checks.HIP_SYNCHRONISING if "_add_" not in name)
# Of a lane's own memory: route's arrays for the choices of one token. Others of these have none.
STACK_BYTES = {"fastkern_static_direct": 800}

by_name = pytest.mark.parametrize("entry", KERNELS, ids=lambda entry: Path(entry).name)
moves_rows = pytest.mark.parametrize("entry", PERSISTENT, ids=lambda entry: Path(entry).name)


def too_much_stack(found: dict[str, int]) -> list[str]:
    return [f"{name}: {size}" for name, size in found.items() if size > STACK_BYTES.get(name, 0)]


@by_name
@pytest.mark.parametrize("arch", CUDA_ARCHES)
def test_cuda_kernel(arch: str, entry: str) -> None:
    build = cuda_build(entry, arch)
    assert build.cubin.startswith(b"\x7fELF")
    registers = checks.ptxas_registers(build.log)
    assert sorted(registers) == sorted(KERNELS[entry])
    assert sorted(kernels_of(entry, arch)) == sorted(KERNELS[entry])
    registers_used.extend(f"{arch:8} {name:24} {n:4}" for name, n in registers.items())
    assert checks.register_faults(registers) == []
    assert checks.ptxas_faults(build.log) == []
    assert checks.ptx_faults(build.ptx, CUDA_NAMES.get(entry, ())) == []
    if entry not in PERSISTENT:
        assert ".CONSTANT" not in cuda_sass(entry, arch)
    if entry in CUDA_NAMES:
        assert too_much_stack(checks.ptxas_stack(build.log)) == []
        assert transport_checks.copy_loop_faults(cuda_sass(entry, arch)) == []


@by_name
@pytest.mark.parametrize("arch", HIP_ARCHES)
def test_hip_kernel(arch: str, entry: str) -> None:
    assembly = hip_assembly(entry, arch)
    registers = checks.hip_registers(assembly)
    assert sorted(registers) == sorted(KERNELS[entry])
    assert sorted(kernels_of(entry, arch)) == sorted(KERNELS[entry])
    registers_used.extend(
        f"{arch:8} {name:24} {v:4} and {s} scalar" for name, (v, s) in registers.items()
    )
    assert checks.register_faults({name: v for name, (v, _) in registers.items()}) == []
    assert checks.hip_spill_faults(assembly) == []
    if entry not in HIP_NAMES:
        return
    assert too_much_stack(checks.hip_stack(assembly)) == []
    assert transport_checks.amd_copy_loop_faults(assembly) == []
    if arch != "gfx90a":  # which has no scope bits
        assert checks.hip_scope_faults(assembly, HIP_NAMES[entry]) == []


@moves_rows
@pytest.mark.parametrize("arch", [*CUDA_ARCHES, *HIP_ARCHES])
def test_orders(arch: str, entry: str) -> None:
    for name, kernel in kernels_of(entry, arch).items():
        assert order_faults(kernel, DEVICES[arch]) == [], name
        assert synchronising_faults(kernel, DEVICES[arch]) == [], name
        assert kernel.texts(DEVICES[arch].bad) == [], name


@by_name
def test_hip_code_object(entry: str, tmp_path: Path) -> None:
    code = link_hip(hip_assembly(entry, "gfx942"), "gfx942", tmp_path)
    assert code.startswith(b"\x7fELF")
    for name in KERNELS[entry]:
        assert name.encode() in code


def texts(kernels: dict[str, Kernel]) -> dict[str, list[str]]:
    return {name: [found.text for found in kernel.instructions] for name, kernel in kernels.items()}


def test_programs_compile_what_is_judged_here() -> None:
    """By cuda.core, and without positions: which change no instruction."""
    cubin = CudaCompiler().compile(read_entry("exchange", "cuda"), "sm_90", {})
    found = sass_kernels(disassemble_cuda(cubin), ROOT)
    assert texts(found) == texts(kernels_of(EXCHANGE, "sm_90"))
    found = hip_kernels(compile_hip(EXCHANGE, "gfx942", positions=False), ROOT)
    assert texts(found) == texts(kernels_of(EXCHANGE, "gfx942"))


def test_other_ptx_is_found(tmp_path: Path) -> None:
    edits = [
        Edit(CUDA, r"st\.release\.sys", "st.relaxed.sys"),
        Edit(CUDA, r"ld\.acquire\.sys", "ld.acquire.gpu"),
        Edit(CUDA, r"acq_rel\.sys\.global\.cas", "acq_rel.cta.global.cas"),
        Edit(CUDA, r"(void drain\(\) const \{)", r"\1 __threadfence();"),
    ]
    build = compile_cuda(EXCHANGE, "sm_90", copy_sources(tmp_path, edits))
    faults = {
        "no st.release.sys.global.u64",
        "unexpected ld.acquire.gpu.global.u64",
        "unexpected atom.acq_rel.cta.global.cas.b64",
        "unexpected membar.gl",
    }
    assert faults <= set(checks.ptx_faults(build.ptx))


@pytest.mark.parametrize(
    ("edit", "fault"),
    [
        (Edit(CUDA, r"ld\.global\.v4", "ld.global.nc.v4"), "non-coherent: LDG.E.128.CONSTANT"),
        (Edit(CUDA, r"st\.global\.v4", "st.v4"), "no loop of 16-byte global loads and stores"),
    ],
    ids=["non-coherent", "generic"],
)
def test_bad_cuda_copies_are_found(edit: Edit, fault: str, tmp_path: Path) -> None:
    build = compile_cuda(EXCHANGE, "sm_90", copy_sources(tmp_path, [edit]))
    assert fault in transport_checks.copy_loop_faults(disassemble_cuda(build.cubin))


def test_bad_hip_copies_are_found(tmp_path: Path) -> None:
    narrow = Edit("kernels/target/block_copy.h", r"skew % 16 == 0", "skew % 16 == 16")
    assembly = compile_hip(EXCHANGE, "gfx942", copy_sources(tmp_path, [narrow]))
    faults = transport_checks.amd_copy_loop_faults(assembly)
    assert faults == ["no loop of 16-byte global loads and stores"]


def test_cuda_spills_are_found(tmp_path: Path) -> None:
    """32 registers are too few."""
    edit = Edit(f"{EXCHANGE}.cu", r"\(512, 2\)", "(1024, 2)")
    log = compile_cuda(EXCHANGE, "sm_90", copy_sources(tmp_path, [edit])).log
    assert any("bytes spill stores" in fault for fault in checks.ptxas_faults(log))


def test_hip_spills_are_found(tmp_path: Path) -> None:
    edit = Edit(f"{EXCHANGE}.hip", r"amdgpu_num_vgpr\(32\)", "amdgpu_num_vgpr(12)")
    assembly = compile_hip(EXCHANGE, "gfx942", copy_sources(tmp_path, [edit]))
    faults = checks.hip_spill_faults(assembly)
    assert any(fault.startswith("vgpr_spill_count") for fault in faults)


def test_too_many_registers_are_found() -> None:
    """In the compilers' reports."""
    log = cuda_build(EXCHANGE, "sm_90").log.replace("Used 64 registers", "Used 65 registers")
    faults = checks.register_faults(checks.ptxas_registers(log))
    assert faults == ["fastkern_exchange: 65 registers"]
    text = re.sub(r"(\.vgpr_count: +)\d+", r"\g<1>65", hip_assembly(EXCHANGE, "gfx942"))
    registers = {name: v for name, (v, _) in checks.hip_registers(text).items()}
    assert checks.register_faults(registers) == faults


def test_narrow_hip_scope_is_found(tmp_path: Path) -> None:
    edits = [
        Edit(HIP, r"= __HIP_MEMORY_SCOPE_SYSTEM", "= __HIP_MEMORY_SCOPE_AGENT"),
        Edit(HIP, r'RELEASE, ""', 'RELEASE, "agent"'),
    ]
    root = copy_sources(tmp_path, edits)
    assembly = compile_hip(EXCHANGE, "gfx942", root)
    narrow = [fault.split()[-2:] for fault in checks.hip_scope_faults(assembly)]
    assert ["buffer_wbl2", "sc1"] in narrow
    assert ["buffer_inv", "sc1"] in narrow
    (kernel,) = hip_kernels(assembly, root).values()
    assert synchronising_faults(kernel, DEVICES["gfx942"]) != []


NO_SIGNAL_BARRIER = Edit(
    ITEMS, r"(u64 bytes\) \{\n    call\.target\.drain\(\);\n) +call\.target\.barrier\(\);\n", r"\1"
)
NO_SIGNAL_DRAIN = Edit(ITEMS, r"(?<=u64 bytes\) \{\n)    call\.target\.drain\(\);\n", "")
NO_DISPATCH_DRAIN = Edit("kernels/body/dispatch.h", r"    target\.drain\(\);\n", "")
NO_LOOK_BARRIER = Edit(EXCHANGE_BODY, r"\.look\(\);\n        target\.barrier\(\);", ".look();")
PLAIN_FLAGS = [
    Edit(CUDA, rf"(u64 load_{order}\(.*\{{)[\s\S]*?\n    \}}", r"\1 return *p; }")
    for order in ("relaxed", "acquire")
]


@pytest.mark.parametrize(
    ("arch", "entry", "edits", "faults"),
    [
        ("sm_90", EXCHANGE, [NO_SIGNAL_BARRIER], [EARLY_FLAG]),
        ("sm_90", DISPATCH, [NO_LOOK_BARRIER], [EARLY_READ]),
        ("sm_90", EXCHANGE, PLAIN_FLAGS, ["no poll", "no acquire"]),
        ("gfx942", EXCHANGE, [NO_SIGNAL_BARRIER], [EARLY_FLAG]),
        ("gfx942", DISPATCH, [NO_LOOK_BARRIER, NO_DISPATCH_DRAIN], [EARLY_READ, UNDRAINED]),
        ("gfx90a", EXCHANGE, [NO_SIGNAL_DRAIN], [UNDRAINED]),
    ],
    ids=["cuda-flag", "cuda-look", "cuda-vanished-wait", "hip-flag", "hip-look", "gfx90a-drain"],
)
def test_broken_orders_are_found(
    arch: str, entry: str, edits: list[Edit], faults: list[str], tmp_path: Path
) -> None:
    (kernel,) = kernels_from(entry, arch, copy_sources(tmp_path, edits)).values()
    assert set(faults) <= set(order_faults(kernel, DEVICES[arch]))


def test_synchronisation_by_hand_is_found(tmp_path: Path) -> None:
    edits = [
        Edit(CUDA, r"ld\.relaxed\.sys", "ld.relaxed.gpu"),
        Edit(EXCHANGE_BODY, r"(control\.epoch, )call", r"\1atomicAdd(&control.epoch, 0) + call"),
    ]
    (kernel,) = kernels_from(EXCHANGE, "sm_90", copy_sources(tmp_path, edits)).values()
    faults = synchronising_faults(kernel, DEVICES["sm_90"])
    assert any(fault.startswith("LDG.E.64.STRONG.GPU") for fault in faults)
    assert any(fault.startswith(("ATOM", "LD.E.64.STRONG")) for fault in faults), faults
