"""Products are rounded before they are added: no device fuses the two in a weighted sum."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.device_compile import checks
from tests.device_compile.listing import Kernel
from tests.device_compile.toolchain import (
    CUDA_ARCHES,
    HIP_ARCHES,
    WEIGHTED_SUM,
    Edit,
    copy_sources,
    kernels_from,
    kernels_of,
)

ENTRY = WEIGHTED_SUM
KERNELS = {
    "sum_floats": "float",
    "sum_float_products": "float",
    "sum_doubles": "double",
    "sum_double_products": "double",
}
# In a combine's own loop compilers find nothing to fuse today; the plain one shows that they try.


def faults(kernels: dict[str, Kernel]) -> dict[str, list[str]]:
    assert kernels.keys() == KERNELS.keys()
    found = {name: checks.fused_faults(kernels[name], [kind]) for name, kind in KERNELS.items()}
    return {name: text for name, text in found.items() if text}


@pytest.mark.parametrize("arch", [*CUDA_ARCHES, *HIP_ARCHES])
def test_products_are_rounded(arch: str) -> None:
    assert faults(kernels_of(ENTRY, arch)) == {}


def test_fused_cuda_products_are_found(tmp_path: Path) -> None:
    edits = [
        Edit("kernels/target/cuda.h", rf"{intrinsic}\(a, b\)", "a * b")
        for intrinsic in ("__fmul_rn", "__dmul_rn")
    ]
    found = faults(kernels_from(ENTRY, "sm_90", copy_sources(tmp_path, edits)))
    assert "fused FFMA" in found["sum_float_products"]
    assert "fused DFMA" in found["sum_double_products"]


def test_fused_hip_products_are_found(tmp_path: Path) -> None:
    edits = [
        Edit(
            "kernels/target/hip.h",
            rf"({kind} product\(.*\n)#pragma clang fp contract\(off\)\n",
            r"\1",
        )
        for kind in ("float", "double")
    ]
    found = faults(kernels_from(ENTRY, "gfx942", copy_sources(tmp_path, edits)))
    for kind, fused in (("float", r"fused v_\w+f32"), ("double", r"fused v_\w+f64")):
        text = found[f"sum_{kind}_products"]
        assert any(re.match(fused, fault) for fault in text), text
