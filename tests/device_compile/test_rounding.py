"""Products are rounded before they are added: no device fuses the two in a weighted sum."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.device_compile import checks
from tests.device_compile.toolchain import (
    CUDA_ARCHES,
    HIP_ARCHES,
    ROOT,
    WEIGHTED_SUM,
    Edit,
    compile_cuda,
    compile_hip,
    copy_sources,
    disassemble_cuda,
)


def cuda_assembly(arch: str, folder: Path, root: Path = ROOT) -> str:
    return disassemble_cuda(compile_cuda(WEIGHTED_SUM, arch, root).cubin, folder)


@pytest.mark.parametrize("arch", CUDA_ARCHES)
def test_cuda_product(arch: str, tmp_path: Path) -> None:
    assert checks.fused_faults(cuda_assembly(arch, tmp_path)) == []


@pytest.mark.parametrize("arch", HIP_ARCHES)
def test_hip_product(arch: str, tmp_path: Path) -> None:
    assert checks.fused_faults(compile_hip(WEIGHTED_SUM, arch, tmp_path)) == []


@pytest.mark.parametrize(
    ("intrinsic", "fault"), [("__fmul_rn", "fused FFMA"), ("__dmul_rn", "fused DFMA")]
)
def test_fused_cuda_product_is_found(intrinsic: str, fault: str, tmp_path: Path) -> None:
    edit = Edit("kernels/target/cuda.h", rf"{intrinsic}\(a, b\)", "a * b")
    faults = checks.fused_faults(cuda_assembly("sm_90", tmp_path, copy_sources(tmp_path, [edit])))
    assert fault in faults


@pytest.mark.parametrize("kind", ["float", "double"])
def test_fused_hip_product_is_found(kind: str, tmp_path: Path) -> None:
    edit = Edit(
        "kernels/target/hip.h",
        rf"({kind} product\(.*\n)#pragma clang fp contract\(off\)\n",
        r"\1",
    )
    assembly = compile_hip(WEIGHTED_SUM, "gfx942", tmp_path, copy_sources(tmp_path, [edit]))
    faults = checks.fused_faults(assembly)
    assert f"fused v_fmac_{'f32' if kind == 'float' else 'f64'}_e32" in faults
