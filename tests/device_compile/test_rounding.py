"""Products are rounded before they are added: no device fuses the two in a weighted sum."""

from __future__ import annotations

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
    assert faults(kernels_of(WEIGHTED_SUM, arch)) == {}


@pytest.mark.parametrize(
    ("intrinsic", "kind", "fault"),
    [("__fmul_rn", "float", "fused FFMA"), ("__dmul_rn", "double", "fused DFMA")],
)
def test_fused_cuda_products_are_found(
    intrinsic: str, kind: str, fault: str, tmp_path: Path
) -> None:
    edit = Edit("kernels/target/cuda.h", rf"{intrinsic}\(a, b\)", "a * b")
    found = faults(kernels_from(WEIGHTED_SUM, "sm_90", copy_sources(tmp_path, [edit])))
    assert fault in found[f"sum_{kind}_products"]


@pytest.mark.parametrize(("kind", "bits"), [("float", "f32"), ("double", "f64")])
def test_fused_hip_products_are_found(kind: str, bits: str, tmp_path: Path) -> None:
    edit = Edit(
        "kernels/target/hip.h",
        rf"({kind} product\(.*\n)#pragma clang fp contract\(off\)\n",
        r"\1",
    )
    found = faults(kernels_from(WEIGHTED_SUM, "gfx942", copy_sources(tmp_path, [edit])))
    text = found[f"sum_{kind}_products"]
    assert any(fault.startswith("fused v_") and bits in fault for fault in text), text
